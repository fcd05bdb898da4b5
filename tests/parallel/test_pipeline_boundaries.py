"""Which models are chains over pipeline stages: they give one device's numbers, others are refused on all ranks in the same words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_megascale.layout import ModelLayout
from lightning_megascale.parallel.layouts import describe
from lightning_megascale.parallel.pipeline import split_into_stages
from lightning_megascale.parallel.pipeline_boundaries import infer_boundaries
from lightning_megascale.parallel.pipeline_schedule import build_schedule, run_schedule
from lightning_megascale.parallel.pipeline_split import cut_stages
from tests.harness import run_ranks, worst

WIDTH, VOCABULARY, LENGTH, MICROBATCHES = 8, 11, 5, 2
EMBED, HEAD = ("embed",), ("norm", "head")


# ---- chains, in every disguise ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Chain(nn.Module):
    """Embedding, blocks, norm, head; the others below change one thing of it."""

    block: Callable[[], nn.Module] = Block
    depth = 4

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.layers = nn.ModuleList(type(self).block() for _ in range(self.depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.end(self.middle(self.start(ids)))

    def start(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def end(self, hidden: torch.Tensor) -> Any:
        return self.head(self.norm(hidden))


class Positions(Chain):
    def start(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids) + self.positions(torch.arange(ids.shape[1]))


class PositionsFirst(Chain):
    """The second embedding is looked up before the first: the one that is received stands for both."""

    def start(self, ids: torch.Tensor) -> torch.Tensor:
        positions = self.positions(torch.arange(ids.shape[1]).expand(ids.shape))
        return positions + self.embed(ids)


class ScaledLogits(Chain):
    def end(self, hidden: torch.Tensor) -> Any:
        return 30.0 * torch.tanh(super().end(hidden) / 30.0)


class LastTokenOnly(Chain):
    """What stands between the modules of the last stage is the model's own matter."""

    def end(self, hidden: torch.Tensor) -> Any:
        return self.head(self.norm(hidden)[:, -1])


class AnswersInADict(Chain):
    def end(self, hidden: torch.Tensor) -> Any:
        return {"logits": super().end(hidden), "hidden": hidden, "name": "chain"}


class TupleBlock(Block):
    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> Any:
        return (super().forward(hidden) * scale, None)


class Tuples(Chain):
    """Blocks that answer (hidden, attention), as older Hugging Face models have."""

    block = TupleBlock

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, scale=0.5)[0]
        return hidden


class MaskedBlock(Block):
    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden) * mask[..., None]


class Masked(Chain):
    """A second tensor that follows the arguments, not the hidden state."""

    block = MaskedBlock

    def forward(self, ids: torch.Tensor) -> Any:
        hidden, mask = self.start(ids), ids.ne(0).to(torch.float64)
        for layer in self.layers:
            hidden = layer(hidden, mask=mask)
        return self.end(hidden)


class ByKeyword(Chain):
    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden=hidden)
        return hidden


class DropoutInFirst(Chain):
    """A dropout module that the layout's first names runs once, on the first stage."""

    def start(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.embed(ids))


class FrozenStart(Chain):
    """No gradient reaches the first boundary."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.embed, *self.layers[:2]):
            module.requires_grad_(False)


class InSequential(Chain):
    """Layers in a container that calls them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers)

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layers(hidden)


# ---- no chains ------------------------------------------------------------------------------------------------------------------


class EmbeddingFactor(Chain):
    """Gemma's normalizer."""

    def start(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids) * WIDTH**0.5


class FunctionalDropout(Chain):
    def start(self, ids: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.embed(ids), 0.5, self.training)


class ChangedAtTheBoundary(Chain):
    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden * 2 if number == 2 else hidden)
        return hidden


class ChangedEarly(Chain):
    """Inside of the first stage, which the second would repeat."""

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden + 1 if number == 1 else hidden)
        return hidden


class SkipBlock(Block):
    def forward(self, hidden: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden) + 0.1 * skip


class SkipToEveryBlock(Chain):
    block = SkipBlock

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        first = hidden
        for layer in self.layers:
            hidden = layer(hidden, first)
        return hidden


class SkipToTheOnlyBlock(SkipToEveryBlock):
    """One block on each stage: there the skip and the hidden state are one tensor."""

    depth = 2


class SkipToTheHead(Chain):
    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().middle(hidden) + hidden


class UNet(Chain):
    """The first block's output comes back at the last."""

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        kept = self.layers[0](hidden)
        return self.layers[3](self.layers[2](self.layers[1](kept)) + kept)


class PositionsAtEveryBlock(Chain):
    """As detection transformers add them: on a later stage nobody has the table."""

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.embed(ids)
        positions = self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden + positions)
        return self.end(hidden)


class BiasForEveryBlock(Chain):
    """A second embedding handed to the blocks as an argument of their own."""

    block = SkipBlock

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.embed(ids)
        bias = self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden, bias)
        return self.end(hidden)


class BiasForBothBlocks(BiasForEveryBlock):
    depth = 2


class MaskBeforeHidden(Masked):
    """What crosses is the first argument; here that is another one."""

    def forward(self, ids: torch.Tensor) -> Any:
        hidden, mask = self.start(ids), ids.ne(0).to(torch.float64)
        for layer in self.layers:
            hidden = layer(mask=mask, hidden=hidden)
        return self.end(hidden)


class CarriesBlock(Block):
    def forward(self, hidden: torch.Tensor, memory: torch.Tensor | None = None) -> Any:
        hidden = super().forward(hidden if memory is None else hidden + memory)
        return hidden, hidden.tanh()


class CarriesFromBlockToBlock(Chain):
    """Blocks hand each other a second tensor, where there is one."""

    block = CarriesBlock

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        memory = None
        for layer in self.layers:
            outputs = layer(hidden, memory)
            hidden, memory = outputs[0], outputs[1] if len(outputs) > 1 else None
        return hidden


class LeavesEarly(Chain):
    """Returns after its blocks: the last stage is never called."""

    def end(self, hidden: torch.Tensor) -> Any:
        return hidden.mean()


class LeavesBeforeTheBoundary(Chain):
    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](hidden))

    def end(self, hidden: torch.Tensor) -> Any:
        return hidden.mean()


class Backwards(Chain):
    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            hidden = layer(hidden)
        return hidden


class TwoStreams(Chain):
    """The hidden state is a pair."""

    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, pair: Any) -> Any:
            return (pair[1], self.inner(pair[0]))

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        pair = (hidden, hidden)
        for layer in self.layers:
            pair = layer(pair)
        return pair[0] + pair[1]


class ByItsWeight(Chain):
    """A tied head without a module of its own."""

    def end(self, hidden: torch.Tensor) -> Any:
        return self.norm(hidden) @ self.embed.weight.T


class Raises(Chain):
    def end(self, hidden: torch.Tensor) -> Any:
        raise KeyError("no such thing")


@dataclass
class Case:
    """A model, its layout where it is unusual, and parts of what must be said (none: it works)."""

    kind: type[Chain]
    said: list[str] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    split: Any = "auto"


INWARDS, OUTWARDS = "the hidden state that pipeline stage 1 receives is not what", "outside of any module"
ONE = "tensor crosses a pipeline boundary"
ENDED = "ended without calling the modules of the next pipeline stage"
ORDER = "the layout's first, blocks and last must stand in the order of the calls"
TWO_EMBEDDINGS = dict(first=["embed", "positions"])
CASES: dict[str, Case] = {
    "chain": Case(Chain),
    "embedding alone on its stage": Case(Positions, layout=TWO_EMBEDDINGS, split=["layers.0"]),
    "head alone on its stage": Case(Chain, split=["last"]),
    "positions": Case(Positions, layout=TWO_EMBEDDINGS),
    "positions first": Case(PositionsFirst, layout=TWO_EMBEDDINGS),
    "scaled logits": Case(ScaledLogits),
    "last token only": Case(LastTokenOnly),
    "answers in a dict": Case(AnswersInADict),
    "tuples": Case(Tuples),
    "tuples, embedding alone": Case(Tuples, split=["layers.0"]),
    "tuples, head alone": Case(Tuples, split=["last"]),
    "masked": Case(Masked),
    "by keyword": Case(ByKeyword),
    "dropout in first": Case(DropoutInFirst, layout=dict(first=["embed", "dropout"])),
    "frozen start": Case(FrozenStart),
    "in a Sequential": Case(InSequential),
    "embedding factor": Case(EmbeddingFactor, [INWARDS, "'layers.", "a factor or a dropout after the embedding", "layout's first"]),
    "functional dropout": Case(FunctionalDropout, [INWARDS, "a factor or a dropout after the embedding"]),
    "dropout that first leaves out": Case(DropoutInFirst, [INWARDS, "name it in the layout's first"]),
    "changed at the boundary": Case(ChangedAtTheBoundary, [OUTWARDS, "'layers.1', the last block of pipeline stage 0", "pipeline_split"]),
    "changed early": Case(ChangedEarly, [INWARDS]),
    "skip to every block": Case(SkipToEveryBlock, [ONE, "second tensor that follows the hidden state", "pipeline_parallel_size=1"]),
    "skip to the only block": Case(
        SkipToTheOnlyBlock, [ONE, "'layers.1' of pipeline stage 1 is given a second tensor"], split=["layers.1"]
    ),
    "skip to the head": Case(SkipToTheHead, [ONE, "pipeline stage 1 computes follows an earlier layer past 'layers.2'"]),
    "skip to the head alone": Case(SkipToTheHead, [OUTWARDS, "'layers.3', the last block"], split=["last"]),
    "U-net": Case(UNet, [ONE, "pipeline stage 1 computes follows an earlier layer past 'layers.2'"]),
    "positions at every block": Case(PositionsAtEveryBlock, [OUTWARDS], layout=TWO_EMBEDDINGS),
    "positions at every block, embeddings alone": Case(
        PositionsAtEveryBlock, [ONE, "past 'layers.0'", "a second embedding"], layout=TWO_EMBEDDINGS, split=["layers.0"]
    ),
    "bias for every block": Case(BiasForEveryBlock, [ONE, "past 'layers.2'", "a second embedding"], layout=TWO_EMBEDDINGS),
    "bias for both blocks": Case(
        BiasForBothBlocks, [ONE, "past 'layers.1'", "a second embedding"], layout=TWO_EMBEDDINGS, split=["layers.1"]
    ),
    "mask before hidden": Case(MaskBeforeHidden, [OUTWARDS]),
    "carries from block to block": Case(CarriesFromBlockToBlock, [ONE, "'layers.3' of pipeline stage 1 is given a second tensor"]),
    "leaves early": Case(LeavesEarly, [ENDED, "LeavesEarly"], split=["last"]),
    "leaves before the boundary": Case(LeavesBeforeTheBoundary, [ENDED, "stage 0 cannot run"]),
    "backwards": Case(Backwards, ["did not call 'layers.0', 'layers.1' of pipeline stage 0", ORDER]),
    "two streams": Case(TwoStreams, [ONE, "pipeline stage 0 ends in a tuple"]),
    "by its weight": Case(ByItsWeight, ["'embed' lies on another pipeline stage", "no 'weight' of it"]),
    "raises": Case(Raises, ["pipeline stage 1 cannot run: KeyError: 'no such thing'"]),
    "norm in first": Case(Chain, ["did not call 'norm' of pipeline stage 0", ORDER], layout=dict(first=["embed", "norm"], last=["head"])),
    "dropout in last": Case(DropoutInFirst, ["did not call 'layers.0', 'layers.1'", ORDER], layout=dict(last=["dropout", "norm", "head"])),
    "embedding in last": Case(Chain, ["did not call 'positions', 'l", ORDER], layout=dict(first=["positions"], last=["embed", *HEAD])),
}


def token_ids() -> torch.Tensor:
    return torch.randint(VOCABULARY, (MICROBATCHES, 2, LENGTH), generator=torch.Generator().manual_seed(2))


def loss_of(output: Any) -> torch.Tensor:
    logits = output["logits"] if isinstance(output, dict) else output
    return (logits.sigmoid() * torch.arange(1, logits.numel() + 1, dtype=logits.dtype).view_as(logits)).sum()


def built(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return case.kind().double()


def alone(name: str) -> dict[str, torch.Tensor]:
    """Losses and gradients on one device."""
    model = built(CASES[name])
    losses = []
    for number, ids in enumerate(token_ids()):
        torch.manual_seed(number)
        losses.append(loss_of(model(ids)))
        losses[-1].backward()
    return {"loss": torch.stack(losses).detach(), **{key: p.grad for key, p in model.named_parameters() if p.grad is not None}}


def piped(name: str) -> Any:
    """The refusal, or losses and gradients of this rank's stage."""
    case = CASES[name]
    model = built(case)
    layout = ModelLayout(**{**dict(first=EMBED, blocks="layers.*", last=HEAD), **case.layout})
    roles = layout.resolve([key for key, _ in model.named_modules()])
    parts = (roles["first"], roles["blocks"], roles["last"])
    split = ["layers.2"] if case.split == "auto" and case.kind.depth == 4 else case.split
    stages = cut_stages(*parts, describe(model), ranks=2, stages_per_rank=1, schedule="GPipe", split=split)
    pipeline = split_into_stages(model, layout, stages, dist.get_rank())
    calls: list[Any] = [((ids,), {}) for ids in token_ids()]
    group, device = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    try:
        boundaries = infer_boundaries(pipeline, calls[0], device, group)
    except ValueError as error:
        return str(error)
    losses = []

    def loss_fn(output: Any, number: torch.Tensor) -> torch.Tensor:
        losses.append(loss_of(pipeline.chunks[-1].rebuild(output)))
        return losses[-1]

    def seed(stage: int, number: int) -> None:
        torch.manual_seed(number)

    options: Any = dict(device=device, group=group, loss_fn=loss_fn, before_forward=seed, before_backward=lambda number: None, train=True)
    run_schedule(*build_schedule(pipeline, "GPipe", MICROBATCHES, boundaries, **options), calls, pipeline.has_last)
    found = {"loss": torch.stack(losses).detach()} if pipeline.has_last else {}
    return {**found, **{key: p.grad for key, p in model.named_parameters() if p.grad is not None}}


def all_cases() -> dict[str, Any]:
    return {name: piped(name) for name in CASES}


@cache
def outcomes() -> list[dict[str, Any]]:
    return run_ranks(all_cases, 2, timeout=60)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.said])
def test_a_chain_gives_one_devices_losses_and_gradients(name: str) -> None:
    one, other = (outcome[name] for outcome in outcomes())
    assert not isinstance(one, str), one
    off, where = worst({**one, **other}, alone(name))
    assert off < 1e-12, f"{where} is off by {off:.1e}"
    assert one.keys().isdisjoint(other)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.said])
def test_what_is_no_chain_is_refused_on_all_ranks_alike(name: str) -> None:
    one, other = (outcome[name] for outcome in outcomes())
    assert isinstance(one, str) and one == other, f"ranks differ, or nothing was said: {one!r} {other!r}"[:400]
    for part in CASES[name].said:
        assert part in one
