"""Recomputation changes what is kept, never the numbers, the names or the random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lightning_megascale.models.decoder import Decoder
from lightning_megascale.models.layers import Attention, FeedForward
from lightning_megascale.parallel.recompute import apply_recompute
from tests.benchmarks.activation_bytes import LiveBytes
from tests.harness import run_ranks
from tests.parallel.tensor_runs import GELU, SWIGLU, batch, build, case

MODES = {"selective": "selective", "full": "full", "classes": {Attention, FeedForward}}


class Calls(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.removeprefix("aten::")
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    def matmuls(self) -> int:
        return sum(self.counts.get(name, 0) for name in ("mm", "addmm", "bmm"))

    def attention(self) -> int:
        return self.counts.get("_scaled_dot_product_flash_attention_for_cpu", 0)


def step(model: Decoder) -> tuple[dict[str, Tensor], Calls]:
    """Loss and gradients of one backward with dropout, and the operators of the backward."""
    torch.manual_seed(7)
    ids, labels = batch(0)
    loss, _ = model(ids, labels=labels)
    after = torch.rand(2)  # the forward's use of the generator
    with Calls() as calls:
        loss.backward()
    return {"loss": loss.detach(), "random": after, **{name: p.grad for name, p in model.named_parameters()}}, calls


@pytest.mark.parametrize("mode", MODES)
def test_numbers_names_and_dropout_stay(mode: str) -> None:
    shape = case({**GELU, "dropout": 0.3})
    plain, model = build(shape), build(shape)
    names, kinds = list(model.state_dict()), [type(module).__name__ for module in model.modules()]
    apply_recompute(list(model.layers), MODES[mode])
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [type(module).__name__ for module in model.modules()] == kinds
    assert all(isinstance(module, type(other)) for module, other in zip(model.modules(), plain.modules()))
    wanted, numbers = step(plain)[0], step(model)[0]
    assert all(torch.equal(numbers[name], value) for name, value in wanted.items())


def test_what_is_run_again() -> None:
    """Two layers of 7 matmuls: selective repeats none and no attention, full all but the last of a layer, classes the like."""
    runs = {}
    for mode in (None, "selective", "full", "classes"):
        model = build(case(SWIGLU))
        apply_recompute(list(model.layers), MODES.get(mode))  # type: ignore[arg-type]
        runs[mode] = step(model)[1]
    again = {mode: (calls.matmuls() - runs[None].matmuls(), calls.attention() - runs[None].attention()) for mode, calls in runs.items()}
    assert again == {None: (0, 0), "selective": (0, 0), "full": (2 * 6, 2), "classes": (2 * (3 + 2), 2)}
    assert runs["selective"].counts.get("silu", 0) == 2  # what is cheap is


def kept(mode: Any, layers: int) -> int:
    model = build(case({**GELU, "num_layers": layers}))
    apply_recompute(list(model.layers), mode)
    counter = LiveBytes()
    for parameter in model.parameters():
        counter.adopt(parameter)
    before = counter.live
    with counter:
        out = model(batch(0)[0])
    del out
    with counter:
        out = model(batch(0)[0])
    assert out.requires_grad
    return counter.live - before


def test_bytes_of_a_layer_on_one_device() -> None:
    """Full keeps the input of a block. Selective: input, q, k, v, attention's output and log-sum-exp, and the three other matmuls."""
    tokens, d, n, f, e = 4 * 16, 32, 8, 48, 8
    full = kept("full", 2) - kept("full", 1)
    selective = kept("selective", 2) - kept("selective", 1)
    nothing = kept(None, 2) - kept(None, 1)
    assert full == tokens * d * e
    assert selective == tokens * (d + 3 * d + d + n + d + f + d) * e
    assert nothing > selective


def test_without_gradients_nothing_is_wrapped() -> None:
    model = build(case(SWIGLU))
    ids, labels = batch(0)
    with torch.no_grad():
        wanted = model(ids, labels=labels)[0]
        apply_recompute(list(model.layers), "selective")
        assert torch.equal(model(ids, labels=labels)[0], wanted)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, function: Tensor, debug: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Argument names that torch's checkpoint has as well."""
        return self.linear(x).sin() * function * debug, {"x": x}


def test_any_arguments_and_results_and_a_block_given_twice() -> None:
    block, x, scale = Keywords(), torch.randn(2, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    wanted = torch.autograd.grad(block(x, function=scale, debug=2.0)[0].sum(), [x, scale])
    apply_recompute([block, block], "full")
    out, more = block(x, function=scale, debug=2.0)
    assert more["x"] is x
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.sum(), [x, scale]), wanted))
    assert sum(base.__name__ == "FullRecompute" for base in type(block).__mro__) == 1


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("some", "activation_checkpointing='some': must be None, 'selective', 'full' or a set of module classes"),
        ({nn.Conv1d}, "activation_checkpointing holds Conv1d, but no block has such a module; they have Attention"),
        ({"Attention"}, "activation_checkpointing holds 'Attention': must be None"),
    ],
)
def test_errors(mode: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        apply_recompute(list(build(case(SWIGLU)).layers), mode)


def _transformers_numbers(family: str, mode: str | None, cache: bool, padded: bool) -> list[Tensor]:
    sizes: dict[str, Any] = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(0)
    if family == "Mixtral":  # its router divides what topk gave it in place
        config: Any = MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, use_cache=cache)
        model: Any = MixtralForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, use_cache=cache))
    apply_recompute(list(model.model.layers), mode)
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    loss = model(input_ids=ids, labels=ids, attention_mask=mask if padded else None).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_transformers_blocks_with_their_cache(family: str, mode: str, cache: bool, padded: bool) -> None:
    """Appending to a cache twice attends to twice the keys; without a mask nothing would even fail."""
    for got, wanted in zip(_transformers_numbers(family, mode, cache, padded), _transformers_numbers(family, None, False, padded)):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_a_cache_that_holds_tokens_is_refused() -> None:
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    ids = torch.arange(8)[None]
    prefix = model(input_ids=ids, use_cache=True)
    given = getattr(prefix, "past_key_values", None) or prefix.cache
    apply_recompute(list(model.model.layers), "full")
    with pytest.raises(ValueError, match="gets a DynamicCache of 8 tokens and is recomputed in the backward"):
        model(input_ids=ids, **{"past_key_values" if hasattr(prefix, "past_key_values") else "cache": given})


def _compiled_inside() -> tuple[bool, int]:
    from torch._dynamo.utils import counters

    shape = case({**GELU, "dropout": 0.3})
    plain, model = build(shape), build(shape)
    for block in model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    apply_recompute(list(model.layers), "full")
    torch.manual_seed(7)
    ids, labels = batch(0)
    (model(ids, labels=labels)[0]).backward()
    numbers = {name: p.grad for name, p in model.named_parameters()}
    wanted = step(plain)[0]
    worst = max(float((numbers[name] - wanted[name]).abs().max()) for name in numbers)
    return worst < 1e-10, counters["stats"]["unique_graphs"]


def test_checkpoint_outside_of_a_compiled_block() -> None:
    """In a forked rank, so that torch's compiler does not start in the parent of other tests."""
    assert run_ranks(_compiled_inside, 1, timeout=120) == [(True, 1)]
