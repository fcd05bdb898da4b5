"""Stages as pass-through copies, without ranks: run one after the other they are the model; names, tensors and ties stay what they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lightning_megascale.layout import ModelLayout
from lightning_megascale.models.decoder import Decoder
from lightning_megascale.parallel.layouts import describe
from lightning_megascale.parallel.pipeline import Chunk, PassThrough, Pipeline, split_into_stages, unowned_parameters
from lightning_megascale.parallel.pipeline_split import Stages, cut_stages
from tests.models.test_huggingface import GPT2, LLAMA, QWEN3, gpt2, llama_like

torch.set_num_threads(1)  # tiny tensors: a second thread only waits

HF_LAYOUT = ModelLayout(blocks="model.layers.*", first="model.embed_tokens", last=["model.norm", "lm_head"])
GPT2_LAYOUT = ModelLayout(
    blocks="transformer.h.*", first=["transformer.wte", "transformer.wpe", "transformer.drop"], last=["transformer.ln_f", "lm_head"]
)
DEPTH = 6
MODELS: dict[str, tuple[Callable[[], nn.Module], ModelLayout | None]] = {
    "llama-like": (lambda: Decoder(replace(LLAMA, num_layers=DEPTH)), None),
    "gpt-like": (lambda: Decoder(replace(GPT2, num_layers=DEPTH, tie_embeddings=False)), None),
    "tied": (lambda: Decoder(replace(QWEN3, num_layers=DEPTH)), None),
    "hf llama": (
        lambda: llama_like(transformers.LlamaConfig, transformers.LlamaForCausalLM, replace(LLAMA, num_layers=DEPTH)),
        HF_LAYOUT,
    ),
    "hf qwen3": (
        lambda: llama_like(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, replace(QWEN3, num_layers=DEPTH)),
        HF_LAYOUT,
    ),
    "hf gpt2": (lambda: gpt2(replace(GPT2, num_layers=DEPTH)), GPT2_LAYOUT),
}
# (ranks, stages on each, schedule): every number of stages from 2 to 6, one on each rank, round robin and V
CUTS = [(n, 1, "1F1B") for n in range(2, 7)] + [(n, 2, s) for n in (2, 3) for s in ("Interleaved1F1B", "ZBVZeroBubble")]
FEW = [CUTS[0], CUTS[3], CUTS[-1]]
RUNS = [(name, *cut) for name in MODELS for cut in (CUTS if name in ("llama-like", "hf qwen3") else FEW)]


def cut(model: nn.Module, layout: ModelLayout, ranks: int, per_rank: int = 1, schedule: str = "1F1B", split: Any = "auto") -> Stages:
    roles = layout.resolve([name for name, _ in model.named_modules()])
    options: Any = dict(ranks=ranks, stages_per_rank=per_rank, schedule=schedule, split=split)
    return cut_stages(roles["first"], roles["blocks"], roles["last"], describe(model), **options)


def on_each_rank(model: nn.Module, layout: ModelLayout, stages: Stages) -> list[tuple[nn.Module, Pipeline]]:
    """(what is left of a copy of the model, its pipeline) of every rank."""
    found = []
    for rank in range(max(stages.owners) + 1):
        own = copy.deepcopy(model)
        found.append((own, split_into_stages(own, layout, stages, rank)))
    return found


def run_by_hand(ranks: list[tuple[nn.Module, Pipeline]], stages: Stages, *args: Any, **kwargs: Any) -> Any:
    """The model's output, from one stage after the other."""
    received: tuple[Any, ...] = ()
    for stage, owner in enumerate(stages.owners):
        pipeline = ranks[owner][1]
        chunk = pipeline.chunks[pipeline.own_stages.index(stage)]
        output = chunk(*received, call=(args, kwargs))
        received = (output,)
    return chunk.rebuild(output)


# ---- numbers ---------------------------------------------------------------------------------------------------------------


@cache
def whole(name: str) -> tuple[nn.Module, ModelLayout]:
    """A model, never run or changed, and its layout."""
    torch.manual_seed(0)
    build, layout = MODELS[name]
    model = build().double()
    return model, layout or model.megascale_layout  # type: ignore[return-value]


@pytest.mark.parametrize(("name", "ranks", "per_rank", "schedule"), RUNS)
def test_stages_by_hand_give_the_models_logits_and_gradients(name: str, ranks: int, per_rank: int, schedule: str) -> None:
    model, layout = whole(name)
    ids = torch.randint(96, (2, 7), generator=torch.Generator().manual_seed(1))
    stages = cut(model, layout, ranks, per_rank, schedule)
    parts = on_each_rank(model, layout, stages)
    model = copy.deepcopy(model)
    expected, found = model(ids), run_by_hand(parts, stages, ids)
    assert type(found) is type(expected)
    expected, found = (getattr(output, "logits", output) for output in (expected, found))
    assert torch.equal(found, expected), "logits differ"
    target = torch.randn_like(expected)
    (expected * target).sum().backward()
    (found * target).sum().backward()
    summed = {key: p.grad for own, _ in parts for key, p in own.named_parameters()}
    for first, *copies in parts[0][1].tied:
        for key in copies:
            summed[first] = summed[first] + summed.pop(key)
    reference = dict(model.named_parameters())
    assert summed.keys() == reference.keys()
    for key, gradient in summed.items():
        off = (gradient - reference[key].grad).abs().max().item()
        assert off < 1e-12 * reference[key].grad.abs().max().item(), f"{key}: {off:.1e}"


def test_labels_and_other_arguments_reach_the_stage_that_uses_them() -> None:
    model, _ = whole("tied")
    ids, labels = torch.randint(96, (2, 7)), torch.randint(96, (2, 7))
    positions = torch.arange(3, 10).expand(2, 7)
    stages = cut(model, model.megascale_layout, 3)
    parts = on_each_rank(model, model.megascale_layout, stages)
    expected = model(ids, position_ids=positions, labels=labels)
    found = run_by_hand(parts, stages, ids, position_ids=positions, labels=labels)
    assert isinstance(found, tuple) and torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


# ---- names and tensors -----------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """A container with a buffer and blocks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


class Nested(nn.Module):
    """Embedding at the root, blocks two containers deep, buffers in both, and a model that catches every Exception."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.part = Part()
        self.register_buffer("factor", torch.tensor(3.0))

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.embed(ids)
        for layer in self.part.layers:
            try:
                hidden = layer(hidden)
            except Exception:  # noqa: BLE001 - the end of a stage must pass
                return None
        return {"logits": self.head(hidden), "name": "nested", "parts": [hidden, self.factor]}


NESTED = ModelLayout(first="embed", blocks="part.layers.*", last="head", colwise="part.layers.*")


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def test_the_union_keeps_the_names_and_the_tensors_of_its_stages() -> None:
    for rank in range(2):
        model = Nested()
        before, modules = parameters_of(model), dict(model.named_modules())
        stages = cut(model, NESTED, 2, split=["part.layers.1"])
        pipeline = split_into_stages(model, NESTED, stages, rank)
        after = parameters_of(model)
        own = ["embed.weight", "part.layers.0.weight", "part.layers.0.bias"]
        assert list(after) == (own if rank == 0 else [name for name in before if name not in own])
        assert all(after[name] is before[name] for name in after), "a parameter was copied"
        assert all(parameter is before[name] for name, parameter in parameters_of(pipeline.chunks[0].model).items())
        assert parameters_of(pipeline.chunks[0].model).keys() == after.keys()
        assert model.get_submodule("part") is modules["part"], "the model itself must stay the object it is"
        assert pipeline.chunks[0].model is not model and type(pipeline.chunks[0].model) is Nested


def test_every_parameter_is_on_exactly_one_rank() -> None:
    for name in ("tied", "hf gpt2"):
        model, layout = whole(name)
        for ranks, per_rank, schedule in FEW:
            stages = cut(model, layout, ranks, per_rank, schedule)
            parts = on_each_rank(model, layout, stages)
            held = [key for own, _ in parts for key in parameters_of(own)]
            assert sorted(held) == sorted(parameters_of(model)), (name, ranks, per_rank, schedule)
            for rank, (own, _) in enumerate(parts):
                places = {stages.owners[stages.stage_of(key)] for key in parameters_of(own)}  # type: ignore[index]
                assert places == {rank}


def test_buffers_of_containers_are_shared_and_move_together() -> None:
    model = Nested()
    pipeline = split_into_stages(model, NESTED, cut(model, NESTED, 2, 2, "ZBVZeroBubble"), 0)
    first, last = (chunk.model for chunk in pipeline.chunks)
    assert first.factor is model.factor and last.part.table is model.part.table
    model.to(torch.float64)
    assert first.factor is model.factor is last.factor and first.factor.dtype == torch.float64
    assert first.part.table is model.part.table is last.part.table and last.part.table.dtype == torch.float64
    assert first.embed.weight is model.embed.weight and first.embed.weight.dtype == torch.float64


def test_on_the_meta_device_nothing_is_drawn() -> None:
    with torch.device("meta"):
        model = Nested()
    pipeline = split_into_stages(model, NESTED, cut(model, NESTED, 2), 1)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    nn.init.ones_(model.head.weight)
    assert pipeline.chunks[0].model.head.weight.eq(1).all()


def test_the_layout_that_is_left_names_own_modules_only() -> None:
    model = Nested()
    layout = split_into_stages(model, NESTED, cut(model, NESTED, 2, split=["part.layers.3"]), 0).layout
    assert layout.first == ("embed",) and layout.last == ()
    assert layout.blocks == layout.colwise == ("part.layers.0", "part.layers.1", "part.layers.2")


def test_the_last_stage_gives_the_models_own_kind_of_output() -> None:
    model = Nested()
    stages = cut(model, NESTED, 2)
    parts, ids = on_each_rank(model, NESTED, stages), torch.tensor([[1, 2]])
    expected, found = model(ids), run_by_hand(parts, stages, ids)
    assert list(found) == list(expected) and found["name"] == "nested" and isinstance(found["parts"], list)
    assert torch.equal(found["logits"], expected["logits"]) and torch.equal(found["parts"][1], expected["parts"][1])


def test_a_stage_knows_whether_a_gradient_reaches_its_output() -> None:
    model = Nested()
    model.embed.requires_grad_(False)
    model.part.layers[0].requires_grad_(False)
    model.head.requires_grad_(False)
    split = ["part.layers.0", "part.layers.1", "head"]
    stages = cut(model, NESTED, 4, split=[*split[:2], "last"])
    assert split_into_stages(model, NESTED, stages, 0).trains == (False, False, True, True)


# ---- what no stage holds, and what several hold -----------------------------------------------------------------------------


def test_a_parameter_that_no_stage_holds_is_named() -> None:
    model = Nested()
    model.part.extra = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    (message,) = unowned_parameters(model, cut(model, NESTED, 2))
    assert message.startswith("part.extra.0.weight, part.extra.0.bias, ")
    assert "and more: no pipeline stage holds them" in message and "first (called before the blocks) or last" in message
    assert unowned_parameters(Nested(), cut(Nested(), NESTED, 2)) == []
    model.scale = nn.Parameter(torch.ones(1))
    (message,) = unowned_parameters(model, cut(model, NESTED, 2))
    assert message.startswith("scale: a parameter of the model itself lies on no pipeline stage: put it into a module")


def test_a_block_that_stands_at_two_depths_is_held_by_no_stage_at_the_second() -> None:
    model = Nested()
    model.part.layers.append(model.part.layers[0])
    (message,) = unowned_parameters(model, cut(model, NESTED, 2))
    assert message.startswith("part.layers.4.weight is the parameter part.layers.0.weight at another depth: a module that is used twice")


def tie(model: Nested, frozen: bool = False) -> None:
    model.head.weight = model.embed.weight
    model.part.layers[3].weight = model.part.layers[2].weight
    model.part.layers[1].bias = model.part.layers[2].bias = model.part.layers[3].bias = model.part.layers[0].bias
    model.embed.weight.requires_grad_(not frozen)


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_tied_across_stages_become_equal_copies_in_reported_groups(frozen: bool) -> None:
    for rank in range(3):
        model = Nested()
        tie(model, frozen)
        shared = model.embed.weight
        stages = cut(model, NESTED, 3, split=["part.layers.1", "part.layers.2"])
        pipeline = split_into_stages(model, NESTED, stages, rank)
        layer = "part.layers.{}.bias".format
        assert pipeline.tied == [["embed.weight", "head.weight"], [layer(0), layer(1), layer(2)]]
        if rank == 0:
            assert model.embed.weight is shared
        if rank == 2:
            head, layers = model.head.weight, model.part.layers
            assert head is not shared and torch.equal(head, shared) and head.data_ptr() != shared.data_ptr()
            assert isinstance(head, nn.Parameter) and head.requires_grad is not frozen
            assert layers[3].bias is layers[2].bias, "what one stage shares with itself stays one parameter"
            assert layers[3].weight is layers[2].weight
            assert pipeline.chunks[0].model.head.weight is head


def test_a_tie_within_a_stage_is_left_alone() -> None:
    model = Nested()
    model.part.layers[3].weight = model.part.layers[2].weight
    pipeline = split_into_stages(model, NESTED, cut(model, NESTED, 2, split=["part.layers.1"]), 1)
    assert pipeline.tied == [] and model.part.layers[3].weight is model.part.layers[2].weight


# ---- messages --------------------------------------------------------------------------------------------------------------


def pipelined() -> tuple[Nested, Chunk]:
    model = Nested()
    return model, split_into_stages(model, NESTED, cut(model, NESTED, 2), 1).chunks[0]


def test_a_pass_through_called_outside_of_the_pipeline_says_so() -> None:
    model, chunk = pipelined()
    for called in (model, chunk.model):
        with pytest.raises(ValueError) as caught:
            called(torch.tensor([[1]]))
        assert str(caught.value).startswith("module 'embed' lies on another pipeline stage and was called outside of the pipeline")
        assert "once, as self.model(...)" in str(caught.value)


def test_after_a_run_the_pass_throughs_are_closed_again_even_after_an_error() -> None:
    _, chunk = pipelined()
    chunk(torch.randn(1, 1, 4), call=((torch.tensor([[1]]),), {}))
    with pytest.raises(ValueError, match="outside of the pipeline"):
        chunk.model(torch.tensor([[1]]))
    chunk.model.head = nn.Linear(7, 7)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        chunk(torch.randn(1, 1, 4), call=((torch.tensor([[1]]),), {}))
    with pytest.raises(ValueError, match="outside of the pipeline"):
        chunk.model(torch.tensor([[1]]))


def test_an_attribute_of_another_stages_module_says_so() -> None:
    model, chunk = pipelined()
    for holder in (model, chunk.model):
        with pytest.raises(AttributeError, match="module 'embed' lies on another pipeline stage, so this rank has no 'weight' of it"):
            _ = holder.embed.weight
    assert isinstance(model.embed, PassThrough) and model.embed.training


class Short(Nested):
    """Never comes to the next stage."""

    def forward(self, ids: torch.Tensor) -> Any:
        return self.part.layers[0](self.embed(ids))


def test_a_forward_that_ends_before_the_next_stage_is_refused() -> None:
    model = Short()
    chunk = split_into_stages(model, NESTED, cut(model, NESTED, 2, split=["part.layers.2"]), 0).chunks[0]
    with pytest.raises(ValueError, match="the forward of Short ended without calling the modules of the next pipeline stage"):
        chunk(call=((torch.tensor([[1]]),), {}))
