"""Kernels of one block against a mask and autograd; those for GPUs with operators that keep the conventions of the real ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.attention
from torch import Tensor

from lightning_megascale.ops import attention_cuda
from lightning_megascale.ops.attention import KERNELS, BlockOptions, check_backend, choose_kernel
from lightning_megascale.ops.attention_cuda import NO_WINDOW, pieces
from tests.ops.test_context_attention import all_cases, check

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = {  # queries, keys, options without the scale; what a block can be
    "all keys": (6, 9, dict(ahead=9)),
    "square": (7, 7, dict(is_causal=True)),
    "one token": (1, 1, dict(is_causal=True)),
    "square, window 3": (7, 7, dict(is_causal=True, window=3)),
    "square, window 1": (7, 7, dict(is_causal=True, window=1)),
    "square, window out of reach": (7, 7, dict(is_causal=True, window=7)),
    "window": (6, 6, dict(window=7, ahead=4)),
    "window over many keys": (3, 9, dict(window=10, ahead=8)),
    "window, more queries than keys": (7, 2, dict(window=8, ahead=2)),
    "window, last row sees one key": (9, 5, dict(window=9, ahead=4)),
    "window out of reach": (3, 4, dict(window=7, ahead=4)),
}


# ---- operators of GPUs, as plain math with their conventions ---------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, scale: float, is_causal: bool, left: int, right: int) -> Tensor:
    """Scores (B, G, N/G, L, S) of q (B, L, N, H) and k (B, S, G, H): windows end at the last row and key, clipped as in flash-attn."""
    length, keys = q.shape[1], k.shape[1]
    left, right = (NO_WINDOW if limit >= keys else limit for limit in (left, right))
    right = 0 if is_causal else right
    if left >= 0 > right:
        right = keys
    scores = torch.einsum("blgrh,bsgh->bgrls", q.unflatten(2, (k.shape[2], -1)), k) * scale
    place = torch.arange(length)[:, None] + keys - length - torch.arange(keys)
    hidden = torch.zeros(length, keys, dtype=torch.bool)
    hidden |= place > left if left >= 0 else hidden
    hidden |= place < -right if right >= 0 else hidden
    return scores.masked_fill(hidden, -torch.inf)


def plain_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, left: int, right: int) -> tuple[Tensor, Tensor]:
    for x in (q, k, v):
        assert x.stride(-1) == 1 and x.shape[-1] % 8 == 0 and x.shape[-2] in (q.shape[2], k.shape[2])
    scores = plain(q, k, scale, is_causal, left, right)
    lse = scores.logsumexp(-1)
    return torch.einsum("bgrls,bsgh->blgrh", (scores - lse[..., None]).exp(), v).flatten(2, 3), lse.flatten(1, 2)


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, is_causal: bool, left: int, right: int
) -> tuple[Tensor, Tensor, Tensor]:
    assert lse.is_contiguous() and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    groups = k.shape[2]
    weights = (plain(q, k, scale, is_causal, left, right) - lse.unflatten(1, (groups, -1))[..., None]).exp()
    grad, out, q = (x.unflatten(2, (groups, -1)) for x in (grad, out, q))
    grad_weights = torch.einsum("blgrh,bsgh->bgrls", grad, v)
    grad_scores = weights * (grad_weights - (grad * out).sum(-1).permute(0, 2, 3, 1)[..., None]) * scale
    grad_q = torch.einsum("bgrls,bsgh->blgrh", grad_scores, k).flatten(2, 3)
    return grad_q, torch.einsum("bgrls,blgrh->bsgh", grad_scores, q), torch.einsum("bgrls,blgrh->bsgh", weights, grad)


def _torch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int = NO_WINDOW,
    window_size_right: int = NO_WINDOW,
    **rest: Any,
) -> tuple[Tensor, ...]:
    assert cum_seq_q is None and cum_seq_k is None and (max_q, max_k) == (q.shape[1], k.shape[1])
    assert dropout_p == 0 and not return_debug_mask and not any(rest.values())
    out, lse = plain_forward(q, k, v, scale, is_causal, window_size_left, window_size_right)
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(()), torch.empty(0)


def _torch_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int = NO_WINDOW,
    window_size_right: int = NO_WINDOW,
) -> tuple[Tensor, Tensor, Tensor]:
    assert cum_seq_q is None and (max_q, max_k, dropout_p) == (q.shape[1], k.shape[1], 0)
    return plain_backward(grad, q, k, v, out, lse, scale, is_causal, window_size_left, window_size_right)


class FakeFlashAttn(ModuleType):
    """``flash_attn.flash_attn_interface`` with the signatures of flash-attn 2.8."""

    def __init__(self) -> None:
        super().__init__("flash_attn.flash_attn_interface")

    @staticmethod
    def _flash_attn_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        return_softmax: bool,
    ) -> tuple[Tensor, Tensor, None, None]:
        assert dropout_p == softcap == 0 and alibi_slopes is None and not return_softmax
        return *plain_forward(q, k, v, softmax_scale, causal, window_size_left, window_size_right), None, None

    @staticmethod
    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> None:
        assert dropout_p == softcap == 0 and alibi_slopes is None and all(x.is_contiguous() for x in (dq, dk, dv))
        grads = plain_backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal, window_size_left, window_size_right)
        for given, grad in zip((dq, dk, dv), grads):
            given.copy_(grad)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's CUDA operators on CPU tensors, dispatched through their real schemas, and a package flash_attn."""
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", FakeFlashAttn())
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", _torch_forward, "CPU")
        library.impl("_flash_attention_backward", _torch_backward, "CPU")
        yield


# ---- values ---------------------------------------------------------------------------------------------------------------------------


def block(shape: str, heads: tuple[int, int], head_dim: int) -> tuple[list[Tensor], BlockOptions]:
    """q, k, v, grad in float64 and the options; every row of ``shape`` sees a key."""
    length, keys, options = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, n, tokens, head_dim) for n, tokens in zip((*heads, heads[1], heads[0]), (length, keys, keys, length))]
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes], BlockOptions(0.3, **options)


def masked(tensors: list[Tensor], options: BlockOptions) -> list[Tensor]:
    """(out, lse, dq, dk, dv) by autograd, from the words of ``BlockOptions``."""
    q, k, v, grad = tensors
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeats, 1).mT * options.scale
    for i in range(q.shape[2]):
        for j in range(k.shape[2]):
            hidden = options.is_causal and j > i or options.window is not None and i + options.ahead - j >= options.window
            if hidden:
                scores[:, :, i, j] = -torch.inf
    out = scores.softmax(-1) @ v.repeat_interleave(repeats, 1)
    return [out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), grad)]


@pytest.mark.parametrize("kernel", ["cpu", "math", "sdpa", "flash2", "flash3"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("heads", "head_dim"), [((2, 2), 16), ((4, 2), 16), ((4, 1), 10)])
def test_a_block_equals_a_mask_and_autograd(faked: None, kernel: str, shape: str, heads: tuple[int, int], head_dim: int) -> None:
    tensors, options = block(shape, heads, head_dim)
    wanted = masked(tensors, options)
    q, k, v, grad = (x.detach() for x in tensors)
    out, lse = KERNELS[kernel].forward(q, k, v, options)
    found = [out, lse, *KERNELS[kernel].backward(grad, q, k, v, out, lse.contiguous(), options)]
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, wanted):
        assert a.shape == b.shape and (a - b).abs().max() < 1e-12, f"{name} off by {(a - b).abs().max():.1e}"


@pytest.mark.parametrize("kernel", ["sdpa", "flash2"])
def test_kernels_of_gpus_compute_any_packing_and_window(faked: None, kernel: str) -> None:
    check("ring", 2, all_cases("ring", 2, every=5), torch.float64, kernel, 1e-12)


def test_kernels_in_bfloat16_keep_their_dtypes(faked: None) -> None:
    tensors, options = block("window", (4, 2), 16)
    q, k, v, grad = (x.bfloat16() for x in tensors)
    out, lse = KERNELS["math"].forward(q, k, v, options)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    fake_out, _ = KERNELS["sdpa"].forward(q, k, v, options)
    assert fake_out.dtype == torch.bfloat16
    kinds = [x.dtype for x in KERNELS["flash2"].backward(grad, q, k, v, out, lse.bfloat16(), options)]
    assert kinds == [torch.bfloat16, torch.float32, torch.float32]  # the sum of two calls is not rounded


# ---- windows --------------------------------------------------------------------------------------------------------------------------


def test_no_window_is_ever_negative_or_cut_on_the_right() -> None:
    """Every trimmed block of up to 7 x 7 tokens: rows of the calls see what the block's do, and a limit the operators would drop or move
    never appears."""
    seen = 0
    for length in range(1, 8):
        for keys in range(1, 8):
            for ahead in range(keys, 12):
                for window in range(1, 20):
                    if ahead >= window or ahead + length - keys >= window:
                        continue  # trimmed away by ``blocks_between``
                    calls, total = pieces(length, keys, BlockOptions(1.0, False, window, ahead)), 0
                    for call in calls:
                        rows = call.rows.stop - call.rows.start
                        total += rows
                        assert call.left == NO_WINDOW or 0 <= call.left < keys - 1 and rows < keys
                        for i in range(rows):
                            first = 0 if call.left == NO_WINDOW else max(0, i + keys - rows - call.left)
                            assert first == max(0, call.rows.start + i + ahead - window + 1) < keys
                            seen += 1
                    assert total == length
    assert seen > 1000


@pytest.mark.parametrize(
    ("length", "keys", "options"),
    [
        (3, 3, BlockOptions(1.0, False, 4, 5)),  # the first row does not see the first key
        (9, 3, BlockOptions(1.0, False, 4, 3)),  # the last row sees none
        (3, 4, BlockOptions(1.0, True)),  # a causal block that is no square
    ],
)
def test_blocks_that_were_not_trimmed_are_not_computed(length: int, keys: int, options: BlockOptions) -> None:
    with pytest.raises(AssertionError):
        pieces(length, keys, options)


# ---- which one ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU that can be asked: what it says may be changed."""
    said: dict[str, Any] = dict(capability=(9, 0), flash=True, packages={"flash_attn", "flash_attn_interface", "flash_attn.cute"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: said["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: said["flash"])
    monkeypatch.setattr(attention_cuda, "installed", lambda package: package in said["packages"])
    return said


def test_auto_takes_the_fast_kernel_where_it_runs(gpu: dict[str, Any]) -> None:
    assert choose_kernel("auto", CPU, torch.float64).name == "cpu"
    assert choose_kernel("auto", CUDA, torch.bfloat16, 128).name == choose_kernel("auto", CUDA, torch.float16).name == "sdpa"
    assert choose_kernel("auto", CUDA, torch.float32).name == choose_kernel("auto", CUDA, torch.float64).name == "math"
    assert choose_kernel("auto", CUDA, torch.bfloat16, 512).name == "math"
    assert choose_kernel("auto", torch.device("mps"), torch.bfloat16).name == "math"
    gpu["capability"] = (7, 0)
    assert choose_kernel("auto", CUDA, torch.float16).name == "math"


def test_every_choice_of_a_plan_is_answered(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: None)
    for name in ("sdpa", "flash2", "flash3", "flash4", "math"):
        assert check_backend(name, "cuda", torch.bfloat16, 64) == [] and choose_kernel(name, CUDA, torch.bfloat16, 64).name == name
    for name in ("auto", "cpu", "math"):
        assert check_backend(name, "cpu") == []


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "said", "words"),
    [
        ("flash9", "cpu", None, None, {}, ["'flash9'", "'auto'", "'flash2'", "'math'"]),
        ("cpu", "cuda", None, None, {}, ["'cpu' runs on CPUs", "'cuda'", "'auto'"]),
        ("sdpa", "cpu", None, None, {}, ["'sdpa' runs on CUDA", "'cpu'", "'auto'"]),
        ("flash4", "cpu", None, None, {}, ["'flash4' runs on CUDA", "'cpu'", "'auto'"]),
        ("sdpa", "cuda", torch.float32, None, {}, ["'sdpa'", "float32", "'math'"]),
        ("flash2", "cuda", torch.float64, None, {}, ["'flash2'", "float64", "'math'"]),
        ("sdpa", "cuda", torch.bfloat16, 320, {}, ["up to 256", "320", "'math'"]),
        ("flash4", "cuda", torch.bfloat16, 192, {}, ["up to 128", "192", "'sdpa'"]),
        ("flash2", "cuda", None, None, {"packages": set()}, ["flash_attn", "not installed", "lightning-megascale[flash]", "'sdpa'"]),
        ("flash3", "cuda", None, None, {"packages": {"flash_attn"}}, ["flash_attn_interface", "hopper/", "'sdpa'"]),
        ("flash4", "cuda", None, None, {"packages": {"flash_attn"}}, ["flash_attn.cute", "flash-attn-4", "'sdpa'"]),
        ("flash3", "cuda", None, None, {"capability": (10, 0)}, ["compute capability 9.0", "Some GPU", "'sdpa'"]),
        ("sdpa", "cuda", None, None, {"capability": (7, 5)}, ["8.0 or above", "'math'"]),
        ("sdpa", "cuda", None, None, {"flash": False}, ["built with flash attention", "'math'"]),
    ],
)
def test_what_cannot_run_says_what_is_missing(
    gpu: dict[str, Any], name: str, device: str, dtype: torch.dtype | None, head_dim: int | None, said: dict[str, Any], words: list[str]
) -> None:
    gpu.update(said)
    (message,) = check_backend(name, device, dtype, head_dim)
    with pytest.raises(ValueError) as caught:
        choose_kernel(name, torch.device(device), dtype or torch.bfloat16, head_dim)
    assert str(caught.value) == message
    assert message.startswith(f"attention_backend={name!r}") and all(word in message for word in words), message


def test_all_that_is_missing_is_said_at_once(gpu: dict[str, Any]) -> None:
    gpu.update(packages=set(), capability=(8, 0))
    with pytest.raises(ValueError, match="not installed.*compute capability.*float32.*head dims up to 128"):
        choose_kernel("flash4", CUDA, torch.float32, 256)


def test_a_plan_for_another_machine_is_not_judged_by_this_one() -> None:
    """No GPU here: its capability and torch's build for it are not asked."""
    if not torch.cuda.is_available():
        assert check_backend("sdpa", "cuda", torch.bfloat16) == []


# ---- activation and imports -----------------------------------------------------------------------------------------------------------


def test_a_version_is_activated_once_and_only_where_it_is_chosen(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    active: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[-1] if active else None)
    for name in ("sdpa", "flash2", "auto", "flash3", "flash3", "flash4", "flash4", "sdpa"):
        choose_kernel(name, CUDA, torch.bfloat16, 64)
    assert active == ["FA3", "FA4"]


def test_a_package_that_does_not_load_is_an_error_that_says_so(gpu: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"attention_backend='flash3': the package flash_attn_interface.*cannot be used.*or use 'sdpa'"):
        choose_kernel("flash3", CUDA, torch.bfloat16)  # said to be installed, and is not


def test_nothing_imports_flash_attn() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('flash_attn', 'flash_attn_interface')));"
        "import lightning_megascale.ops.attention as a, lightning_megascale.parallel.context; a.check_backend('flash4', 'cpu')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # None in sys.modules makes an import raise


def test_a_part_of_a_package_is_found_without_importing_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("some_flash", "some_flash/cute", "old_flash"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert attention_cuda.installed("some_flash.cute") and attention_cuda.installed("old_flash")
    assert not attention_cuda.installed("old_flash.cute") and not attention_cuda.installed("no_flash.cute")
