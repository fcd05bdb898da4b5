"""Block inputs in host memory: the numbers stay, nothing else moves, and it does happen: copies are counted, and what stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megascale import MegascaleStrategy
from lightning_megascale.models.decoder import Decoder
from lightning_megascale.models.layers import Attention, FeedForward
from lightning_megascale.parallel import recompute
from lightning_megascale.parallel.recompute import apply_recompute
from tests import parity
from tests.benchmarks.activation_bytes import LiveBytes
from tests.harness import run_ranks
from tests.parallel.tensor_runs import GELU, SWIGLU, batch, build, case
from tests.parallel.test_recompute import Keywords, step

OFFLOADED = {"checkpointing": "full", "offload": "block inputs offloaded"}


class Moved:
    """What went to host memory and came back, as shapes."""

    def __init__(self, patch: pytest.MonkeyPatch, counter: LiveBytes | None = None) -> None:
        self.out: list[tuple[int, ...]] = []
        self.back: list[tuple[int, ...]] = []
        to_host, from_host = recompute.to_host, recompute.from_host

        def counted(tensor: Tensor) -> Tensor:
            self.out.append(tuple(tensor.shape))
            if counter is not None:
                counter.paused = True  # the copy is not on the device
            copy = to_host(tensor)
            if counter is not None:
                counter.paused = False
            return copy

        def returned(device: torch.device, tensor: Tensor) -> Tensor:
            self.back.append(tuple(tensor.shape))
            return from_host(device, tensor)

        patch.setattr(recompute, "to_host", counted)
        patch.setattr(recompute, "from_host", returned)


@pytest.mark.parametrize("mode, modules", [("full", 2), ({Attention, FeedForward}, 4)], ids=["full", "classes"])
@pytest.mark.parametrize("shape", [SWIGLU, GELU], ids=["swiglu", "gelu"])
def test_one_copy_of_each_input_and_no_other_number(
    shape: dict[str, Any], mode: Any, modules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotary angles, an argument of every block as well, stay: they need no gradient and are one tensor for all."""
    dropping = case({**shape, "dropout": 0.3})
    kept, model = build(dropping), build(dropping)
    apply_recompute(list(kept.layers), mode)
    wanted = step(kept)[0]
    moved = Moved(monkeypatch)
    apply_recompute(list(model.layers), mode, offload=True)
    numbers = step(model)[0]
    assert all(torch.equal(numbers[name], value) for name, value in wanted.items())
    assert moved.out == moved.back == [(4, 16, 32)] * modules
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in kept.named_parameters()]


def left_on_device(layers: int, offload: bool, patch: pytest.MonkeyPatch) -> int:
    """Bytes that are alive after a forward, without the copies."""
    model, counter = build(case({**GELU, "num_layers": layers})), LiveBytes()
    for parameter in model.parameters():
        counter.adopt(parameter)
    with patch.context() as inner:
        Moved(inner, counter)
        apply_recompute(list(model.layers), "full", offload=offload)
        before = counter.live
        with counter:
            out = model(batch(0)[0])
    assert out.requires_grad
    return counter.live - before


def test_nothing_of_a_layer_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full recomputation keeps 4 x 16 tokens of width 32 in float64 a layer; offloaded that is gone, so nothing else holds it."""
    each = {offload: left_on_device(3, offload, monkeypatch) - left_on_device(2, offload, monkeypatch) for offload in (False, True)}
    assert each == {False: 4 * 16 * 32 * 8, True: 0}


class Several(Keywords):
    """A block that also looks at a tuple of states, a mask and a parameter of its owner."""

    def forward(self, x: Tensor, states: tuple[Tensor, Tensor], *, function: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.linear(x).sin() * function * mask + states[0] * states[1]


def test_what_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that need a gradient, by place, by name and in a tuple; no mask, no frozen state, no parameter."""
    block, moved = Several(), Moved(monkeypatch)
    x, scale = torch.randn(2, 4, requires_grad=True), nn.Parameter(torch.randn(4))
    states, mask = (torch.randn(3, 1, 4, requires_grad=True), torch.randn(5, 1, 1, 4)), torch.ones(1, 4)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(block(x, states, function=scale, mask=mask).sum(), [x, states[0], scale, block.linear.weight])

    wanted = gradients()
    apply_recompute([block], "full", offload=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients(), wanted))
    assert moved.out == moved.back == [(2, 4), (3, 1, 4)]
    with torch.no_grad():
        block(x, states, function=scale, mask=mask)
    assert len(moved.out) == 2


def test_an_input_that_is_changed_later_is_recomputed_from_what_it_was() -> None:
    block = Keywords()
    x = torch.randn(2, 4, requires_grad=True)
    (wanted,) = torch.autograd.grad(block(x * 1, function=torch.ones(4))[0].sum(), x)
    apply_recompute([block], "full", offload=True)
    hidden = x * 1
    out = block(hidden, function=torch.ones(4))[0].sum()
    hidden.detach().zero_()
    assert torch.equal(torch.autograd.grad(out, x)[0], wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_on_cuda() -> None:
    away = torch.randn(4, 8, device="cuda")
    host = recompute.to_host(away)
    assert host.is_pinned() and host.device.type == "cpu"
    back = recompute.from_host(away.device, host)
    assert back.device == away.device and torch.equal(back, away)


# ---- on ranks ------------------------------------------------------------------------------------------------------------------------


def _counted(case: parity.Case) -> tuple[dict[str, Any], list[tuple[int, ...]], list[tuple[int, ...]]]:
    moved = Moved(pytest.MonkeyPatch())
    return parity.train_parallel(case, {}), moved.out, moved.back


@pytest.mark.parametrize(
    "choices, blocks, shape",
    [
        ({"axes": "fsdp2"}, 2, (2, 16, 16)),
        ({"axes": "tp+sp", "accumulation": "accumulate 2, reduce last"}, 4, (4, 8, 16)),
        ({"axes": "pp2", "schedule": "1F1B"}, None, (1, 16, 16)),
        ({"axes": "cp2", "dropout": "dropout"}, 2, (4, 8, 16)),
    ],
    ids=lambda value: value["axes"] if isinstance(value, dict) else "",
)
def test_parity_and_copies(choices: dict[str, str], blocks: int | None, shape: tuple[int, ...]) -> None:
    """Every block of every microbatch of every step, of this rank's part of the tokens, and equal to one device."""
    case = parity.default_case(**choices, **OFFLOADED)
    results = run_ranks(_counted, 2, case, timeout=120)
    parity.compare(case, parity.merged([result for result, _, _ in results]))
    counts = [blocks * parity.STEPS] * 2 if blocks else [(4 * parity.STEPS) * own for own in (2, 1)]
    for (_, out, back), count in zip(results, counts if blocks else sorted(counts, key=lambda n: n != len(results[0][1]))):
        assert out == back == [shape] * count


# ---- refusals ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, "selective"])
def test_offload_without_full_recomputation_is_refused(mode: str | None) -> None:
    with pytest.raises(ValueError, match="activation_offload=True moves the inputs of .*use activation_checkpointing='full'"):
        MegascaleStrategy(activation_offload=True, activation_checkpointing=mode)
    model: Decoder = build(case(SWIGLU))
    with pytest.raises(ValueError, match=f"activation_offload=True with activation_checkpointing={mode!r}: use 'full'"):
        apply_recompute(list(model.layers), mode, offload=True)
