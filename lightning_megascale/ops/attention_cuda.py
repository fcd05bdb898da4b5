"""FlashAttention on GPUs as kernels of blocks (``attention.py``): torch's own, versions 3 and 4 in its place, and the flash-attn package.

**Not proven on a GPU.** Where this was written there was none: tests run these classes with the operators replaced by plain math that
keeps their published conventions (arguments, layouts, how a window is aligned and cut), so indices and calls are tested, the operators
themselves are not. ``attention_backend='math'`` is the proven way to check a run against.

Conventions of the operators: tensors are (B, L, N, H) and (B, S, G, H), with G key heads as they are (the backward sums over the group);
row i sees the key j if i + S - L - left <= j <= i + S - L + right, where a negative left or right, or one of S and more, is *no limit* on
the left but becomes S on the right, which does hide keys where L > S + 1. Causal squares have L = S; other windows go through ``pieces``.

Source: Dao 2023, "FlashAttention-2", section 3.1; flash-attn 2.8, set_params_fprop (windows); torch.nn.attention (FlashAttention 3, 4).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from lightning_megascale.ops.attention import BlockOptions

NO_WINDOW = -1
DTYPES = (torch.float16, torch.bfloat16)


class Piece(NamedTuple):
    """Rows of a block that one call computes.

    Args:
        rows: of the block.
        is_causal: a causal square.
        left: keys to the left of the diagonal that a row sees, ``NO_WINDOW``: all.
    """

    rows: slice
    is_causal: bool
    left: int


def pieces(length: int, keys: int, options: BlockOptions) -> list[Piece]:
    """The calls of a block: one, or, where a window hides something, the first rows, which see all keys, and the others.

    Each of the others sees fewer keys than the one before, so they are fewer than the keys, and no limit on the right can bind; as the
    first of them does not see the first key, and the last one does see the last, left is between 0 and S - 2.

    Args:
        length, keys: L and S.
        options: of the block.
    """
    window, every = options.binding_window(length), slice(0, length)
    if options.is_causal:
        assert length == keys, f"a causal block of {length} queries and {keys} keys is not square"
        return [Piece(every, True, NO_WINDOW if window is None else window - 1)]
    if window is None:
        return [Piece(every, False, NO_WINDOW)]
    whole = window - options.ahead  # rows that see the first key, and so all
    left = keys - (length - whole) - 1
    assert whole > 0 and left >= 0, f"{options}: {length} queries and {keys} keys reach out of the window"
    return [Piece(slice(0, whole), False, NO_WINDOW), Piece(slice(whole, length), False, left)]


class Flash:
    """What the kernels share; a subclass makes the two calls.

    Args:
        name: of the backend.
        package: that has to be installed; None: torch has it.
        install: how.
        capabilities: major compute capabilities it runs on; None: 8 and above.
        head_dim: the largest.
        replaces: what torch is told to put in the place of its own; None: nothing.
    """

    def __init__(
        self,
        name: str,
        package: str | None = None,
        install: str = "",
        capabilities: tuple[int, ...] | None = None,
        head_dim: int = 256,
        replaces: str | None = None,
    ) -> None:
        self.name, self.package, self.install = name, package, install
        self.capabilities, self.head_dim, self.replaces = capabilities, head_dim, replaces

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: BlockOptions) -> tuple[Tensor, Tensor]:
        """(out, lse), as ``Kernel.forward``."""
        q_, k_, v_ = (_laid_out(x) for x in (q, k, v))
        parts = [self._forward(q_[:, p.rows], k_, v_, options.scale, p) for p in pieces(q.shape[2], k.shape[2], options)]
        out = torch.cat([part[0] for part in parts], 1) if len(parts) > 1 else parts[0][0]
        lse = torch.cat([part[1] for part in parts], 2) if len(parts) > 1 else parts[0][1]
        return out.transpose(1, 2)[..., : q.shape[-1]], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: BlockOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), as ``Kernel.backward``; the sum of several calls is in float32."""
        grad_, q_, k_, v_, out_ = (_laid_out(x) for x in (grad, q, k, v, out))
        parts = [
            self._backward(grad_[:, p.rows], q_[:, p.rows], k_, v_, out_[:, p.rows], lse[:, :, p.rows].contiguous(), options.scale, p)
            for p in pieces(q.shape[2], k.shape[2], options)
        ]
        grad_q = torch.cat([part[0] for part in parts], 1)
        grad_k, grad_v = parts[0][1:]
        for part in parts[1:]:
            wide = torch.promote_types(q.dtype, torch.float32)
            grad_k, grad_v = grad_k.to(wide) + part[1], grad_v.to(wide) + part[2]
        grads = [x.transpose(1, 2)[..., : q.shape[-1]] for x in (grad_q, grad_k, grad_v)]
        return grads[0], grads[1], grads[2]

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, piece: Piece) -> tuple[Tensor, Tensor]:
        """(out (B, L, N, H), lse (B, N, L)) of q (B, L, N, H), k and v (B, S, G, H)."""
        raise NotImplementedError

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, piece: Piece
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


def _laid_out(x: Tensor) -> Tensor:
    """(B, N, L, H) as (B, L, N, H); heads of odd sizes are filled up with zeros, which change no product, to a multiple of 8."""
    x = F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2)


class TorchFlash(Flash):
    """Torch's operators behind ``_scaled_dot_product_flash_attention``, which alone take a window. FlashAttention 3 and 4 take their place
    once they are activated. Not proven on a GPU: see the top of this file."""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, piece: Piece) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, piece.is_causal, False, scale=scale, **_window(piece)
        )[:2]

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, piece: Piece
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # states of the dropout that there is not
        lengths = (None, None, q.shape[1], k.shape[1])
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *lengths, 0.0, piece.is_causal, unused, unused, scale=scale, **_window(piece)
        )


class FlashAttn2(Flash):
    """The package flash-attn, 2.8 and above; imported at the first call. Not proven on a GPU: see the top of this file."""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, piece: Piece) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_forward

        return _flash_attn_forward(q, k, v, return_softmax=False, **_flash2_arguments(scale, piece))[:2]

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, piece: Piece
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_backward

        grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        deterministic = torch.are_deterministic_algorithms_enabled()
        _flash_attn_backward(grad, q, k, v, out, lse, *grads, deterministic=deterministic, **_flash2_arguments(scale, piece))
        return grads[0], grads[1], grads[2]


def _window(piece: Piece) -> dict[str, int]:
    return {"window_size_left": piece.left, "window_size_right": 0 if piece.is_causal else NO_WINDOW}


def _flash2_arguments(scale: float, piece: Piece) -> dict[str, object]:
    return dict(dropout_p=0.0, softmax_scale=scale, causal=piece.is_causal, softcap=0.0, alibi_slopes=None, **_window(piece))


FLASH_KERNELS: dict[str, Flash] = {
    "sdpa": TorchFlash("sdpa"),
    "flash2": FlashAttn2("flash2", "flash_attn", "pip install 'lightning-megascale[flash]'"),
    "flash3": TorchFlash("flash3", "flash_attn_interface", "build the folder hopper/ of flash-attention", (9,), replaces="FA3"),
    "flash4": TorchFlash("flash4", "flash_attn.cute", "pip install flash-attn-4", (9, 10), 128, replaces="FA4"),
}


def missing(kernel: Flash, device_type: str, dtype: torch.dtype | None, head_dim: int | None) -> list[str]:
    """What keeps a kernel from running, and what to use instead; arguments as for ``check_backend``."""
    choice = f"attention_backend={kernel.name!r}"
    if device_type != "cuda":
        return [f"{choice} runs on CUDA devices, and the tensors lie on {device_type!r}: use 'auto'"]
    wrong = []
    if kernel.package is not None and not installed(kernel.package):
        wrong.append(f"{choice} needs the package {kernel.package}, which is not installed: {kernel.install}, or use 'sdpa'")
    wrong += _missing_on_device(kernel, choice)
    if dtype is not None and dtype not in DTYPES:
        wrong.append(
            f"{choice} takes float16 and bfloat16, and queries are {str(dtype).removeprefix('torch.')}: use 'math', or a 16-bit precision"
        )
    if head_dim is not None and head_dim > kernel.head_dim:
        instead = "'sdpa'" if kernel.head_dim < head_dim <= FLASH_KERNELS["sdpa"].head_dim else "'math'"
        wrong.append(f"{choice} takes head dims up to {kernel.head_dim}, and queries have {head_dim}: use {instead}")
    return wrong


def _missing_on_device(kernel: Flash, choice: str) -> list[str]:
    """What this process's GPU, or torch's build for it, lacks; nothing where there is no GPU to ask."""
    if not torch.cuda.is_available():
        return []
    wrong, major = [], torch.cuda.get_device_capability()[0]
    if kernel.package is None and not torch.backends.cuda.is_flash_attention_available():
        wrong.append(f"{choice} needs a torch that is built with flash attention, and torch {torch.__version__} is not: use 'math'")
    runs = major in kernel.capabilities if kernel.capabilities else major >= 8
    if not runs:
        needs = " or ".join(f"{m}.0" for m in kernel.capabilities) if kernel.capabilities else "8.0 or above"
        instead = "'math'" if major < 8 else "'sdpa'"
        wrong.append(
            f"{choice} needs a GPU of compute capability {needs}, and {torch.cuda.get_device_name()} is older or newer: use {instead}"
        )
    return wrong


@cache
def installed(package: str) -> bool:
    """Whether a package can be found; nothing is imported."""
    parent, _, child = package.partition(".")
    spec = importlib.util.find_spec(parent)
    return spec is not None and (not child or PathFinder.find_spec(package, spec.submodule_search_locations) is not None)


def activate(kernel: Flash) -> None:
    """Puts FlashAttention 3 or 4 in the place of torch's own, for the whole process; torch's own stays whatever is active.

    Raises:
        ValueError: where the package is there but cannot be loaded.
    """
    if kernel.replaces is None:
        return
    from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

    if current_flash_attention_impl() == kernel.replaces:
        return
    try:
        activate_flash_attention_impl(kernel.replaces)
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"attention_backend={kernel.name!r}: the package {kernel.package} is installed and cannot be used ({error}): "
            f"{kernel.install}, or use 'sdpa'"
        ) from error
