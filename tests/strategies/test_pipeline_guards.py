"""What a pipelined LightningModule is refused for, before its ranks talk and while they train; every rank ends, with the same words."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_megascale import MegascaleStrategy, ParallelPlan
from lightning_megascale.layout import ModelLayout
from lightning_megascale.parallel.layouts import find_layout, target_of
from lightning_megascale.parallel.model_check import check_model
from lightning_megascale.strategies.pipeline_guards import check_module, check_optimizers, refuse_ragged
from tests.harness import RankFailure, run_ranks
from tests.strategies.test_guards import QUIET

WIDTH, CLASSES, LENGTH, ROWS = 8, 5, 6, 4
LAYOUT = ModelLayout(first="embed", blocks="layers.*", last="head")
PIPELINE: dict[str, Any] = dict(pipeline_parallel_size=2, layout=LAYOUT, label_alignment="aligned")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(F.gelu(self.up(hidden)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Plain(L.LightningModule):
    """What works; each of the others below breaks one rule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.build()

    def build(self) -> None:
        self.model = Net()

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.model(batch["ids"]), batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(self.model(batch["ids"]), batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# ---- what a module is refused for, without any rank ------------------------------------------------------------------------


class Direct(Plain):
    """The layers are the LightningModule's own children."""

    def build(self) -> None:
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(Layer() for _ in range(2))


class BareParameter(Plain):
    def build(self) -> None:
        super().build()
        self.temperature = nn.Parameter(torch.ones(1))


class Outside(Plain):
    """A second trainable child, named apart so that it is seen."""

    def build(self) -> None:
        super().build()
        self.probes = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(4))


class Manual(Plain):
    def build(self) -> None:
        super().build()
        self.automatic_optimization = False


def module_says(kind: type[Plain], child: str = "auto") -> list[str]:
    module = kind()
    return check_module(module, target_of(module, child)[1])


def test_a_model_that_is_no_single_child_is_refused() -> None:
    (message,) = module_says(Direct)
    assert message.startswith("the model must be one child of Direct, called once in each step as self.model(...)")
    assert "(embed, head, layers) or in Direct itself: put them into one nn.Module, or name the one with" in message


def test_a_bare_parameter_of_the_module_is_refused_by_name() -> None:
    (message,) = module_says(BareParameter, "model")
    assert message.startswith("temperature: trainable, and outside of the pipelined module, so only the last pipeline stage would train")
    (message,) = module_says(BareParameter)  # which child is meant nobody can tell
    assert "or in BareParameter itself" in message


def test_trainable_modules_outside_are_refused_by_name_and_frozen_ones_are_not() -> None:
    (message,) = module_says(Outside, "model")
    assert message.startswith("probes.0.weight, probes.0.bias, probes.1.weight, probes.1.bias, probes.2.weight, probes.2.bias and more: ")
    assert "move them into it, or freeze them" in message
    module = Outside()
    module.probes.requires_grad_(False)
    assert check_module(module, module.model) == []


def test_manual_optimization_is_refused() -> None:
    (message,) = module_says(Manual)
    assert message.startswith("manual optimization:") and "use automatic optimization or pipeline_parallel_size=1" in message


def test_several_optimizers_are_refused_and_one_is_not() -> None:
    check_optimizers([object()])
    with pytest.raises(ValueError, match="returned 2 optimizers: .* Use one optimizer with parameter groups"):
        check_optimizers([object(), object()])


def test_what_is_right_passes() -> None:
    assert module_says(Plain) == [] == model_says(Plain())


def model_says(module: Plain, layout: ModelLayout | None = LAYOUT, **fields: Any) -> list[str]:
    plan = ParallelPlan(**{"pipeline_parallel_size": 2, "data_parallel_size": 1, **fields})
    _, target = target_of(module, "auto")
    return check_model(module, target, plan, find_layout(target, layout or "auto"))


@pytest.mark.parametrize(
    ("layout", "missing"),
    [
        (None, "blocks, first, last"),
        (ModelLayout(blocks="layers.*"), "first, last"),
        (ModelLayout(blocks="layers.*", first="embed"), "last"),
        (ModelLayout(first="embed", last="head"), "blocks"),
    ],
)
def test_a_layout_without_first_or_last_is_refused_with_one_to_paste(layout: ModelLayout | None, missing: str) -> None:
    (message,) = model_says(Plain(), layout)
    assert f"pipeline_parallel_size=2 needs a layout that names the model's {missing}: " in message
    pasted = eval(message[message.index("ModelLayout(") :], {"ModelLayout": ModelLayout})
    assert (pasted.first, pasted.blocks, pasted.last) == (("embed",), ("layers.*",), ("head",))
    assert model_says(Plain(), pasted) == []


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    (message,) = model_says(Plain(), ModelLayout(first="embedd", blocks="layers.*", last="head"))
    assert message == "layout.first: pattern 'embedd' matches no module; the nearest name is 'embed'"


def test_a_wrong_split_by_hand_is_refused() -> None:
    (message,) = model_says(Plain(), pipeline_split=["layers.0", "layers.1"])
    assert "2 names make 3 pipeline stages, and pipeline_parallel_size x pipeline_stages_per_rank = 2 are needed" in message
    (message,) = model_says(Plain(), pipeline_split=["layer.1"])
    assert message == "pipeline_split: 'layer.1' is no block; blocks are layers.0 ... layers.1, then 'last'"


def test_too_many_stages_are_refused() -> None:
    (message,) = model_says(Plain(), pipeline_schedule="Interleaved1F1B", pipeline_stages_per_rank=3)
    assert "= 6 pipeline stages, and the model has 4 parts (embedding, 2 blocks, head)" in message


def test_a_parameter_that_no_stage_holds_is_refused() -> None:
    module = Plain()
    module.model.norm = nn.LayerNorm(WIDTH)
    (message,) = model_says(module)
    assert message.startswith("norm.weight, norm.bias: no pipeline stage holds them: name their modules in the layout's first")


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (ModelLayout(first="embed", blocks="layers.*", last=["embed", "head"]), "'embed'"),
        (ModelLayout(first="embed", blocks="layers.*", last=["layers.1", "head"]), "'layers.1'"),
        (ModelLayout(first=["embed", "layers"], blocks="layers.*", last="head"), "'layers' and 'layers.0'"),
        (ModelLayout(first="embed", blocks="layers.*", last=["layers.*.down", "head"]), "'layers.0' and 'layers.0.down'"),
    ],
)
def test_a_module_with_two_places_is_refused(layout: ModelLayout, names: str) -> None:
    (message,) = model_says(Plain(), layout)
    assert names in message and "one place" in message


@pytest.mark.parametrize("sizes", [dict(), dict(data_parallel_size=2)])
def test_batch_norm_is_refused_also_without_data_parallelism(sizes: dict[str, int]) -> None:
    module = Plain()
    module.model.layers[0].up = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH))
    (message,) = model_says(module, **sizes)
    assert "module 'model.layers.0.up.1' is a BatchNorm1d: it takes its statistics from" in message


# ---- rows of a batch, without any rank -------------------------------------------------------------------------------------


def ragged(rows: int = 8, size: int = 2, anybody: bool = False, most: int = 8, least: int = 8, accumulate: int = 1, **plan: Any) -> None:
    refuse_ragged(rows, size, anybody, most, least, accumulate, ParallelPlan(pipeline_parallel_size=2, data_parallel_size=2, **plan))


def test_equal_whole_batches_pass() -> None:
    ragged()
    ragged(global_batch_size=16)
    ragged(global_batch_size=32, accumulate=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(most=8, least=6), ["batches of 6 to 8 rows in one step (here 8)", "drop_last=True", "different numbers of microbatches"]),
        (dict(rows=7, anybody=True), ["a batch of 7 rows cannot be cut into microbatches of microbatch_size=2", "drop_last=True"]),
        (
            dict(global_batch_size=32),
            ["global_batch_size=32, and the loader's 8 rows x data-parallel size 2 x accumulate_grad_batches=1 = 16", "all microbatches"],
        ),
    ],
)
def test_batches_that_cannot_be_pipelined_alike_are_refused(arguments: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        ragged(**arguments)
    for part in said:
        assert part in str(caught.value)


# ---- while training, on two ranks -------------------------------------------------------------------------------------------


class TwoOptimizers(Plain):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model.embed.parameters(), lr=0.1), torch.optim.SGD(self.model.head.parameters(), lr=0.1)], []


class SecondCall(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.model(batch["ids"]).square().mean()


class SecondCallInValidation(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch["ids"]) + self.model(batch["ids"])


class NeverCalled(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model.head.weight.sum() if batch is None else torch.zeros((), requires_grad=True)


class CalledLater(Plain):
    """Generates text after a batch, say."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.model(torch.zeros(1, 3, dtype=torch.long))


class ReturnsNone(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class DetachedLoss(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).detach()


class VectorLoss(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch["ids"]).square().mean((1, 2)).expand(2)


class RaisesInTheLoss(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        raise RuntimeError("the user's own mistake")


class RaisesInOneMicrobatch(Plain):
    """Of the second batch, when both ranks are in the middle of a schedule."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and batch["number"].item() == 6:
            raise KeyError("number 6")
        return loss


class RaisesInValidation(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.model(batch["ids"])
        raise RuntimeError("the user's own mistake")


class RaisesBeforeTheCall(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch["idss"]).sum()


class RaisesBeforeTheCallOnOneRank(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if int(os.environ["RANK"]) == 0:
            raise OSError("no such file here")
        return super().training_step(batch, batch_idx)


class ReturnsEarlyOnOneRank(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if int(os.environ["RANK"]) == 1 else super().training_step(batch, batch_idx)


class CallsAPartApart(Plain):
    """The embedding lies on the first rank only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.model(batch["ids"]), batch) + self.model.embed(batch["ids"]).square().mean()


class CallsAPartFirst(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        penalty = self.model.embed(batch["ids"]).square().mean()
        return self.loss(self.model(batch["ids"]), batch) + penalty


class TrimsPadding(Plain):
    """Each microbatch to its own longest row."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        length = 3 + int(batch["number"].item()) % 2
        return self.loss(self.model(batch["ids"][:, :length]), {"labels": batch["labels"][:, :length]})


class ListMetric(Plain):
    def build(self) -> None:
        super().build()
        self.auroc = torchmetrics.AUROC("multiclass", num_classes=CLASSES)


class Opaque(Plain):
    """A scalar mean over a batch that says nothing of its rows."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch["ids"].sum()]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


class OddRows(Plain):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "prior": torch.zeros(CLASSES)}


class GemmaNet(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[1](self.layers[0](self.embed(ids) * 3)))


class GemmaLike(Plain):
    def build(self) -> None:
        self.model = GemmaNet()


class LogsAVector(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("both", torch.zeros(2))
        return loss


class Rows(Dataset):
    """``count`` rows; ``shift`` makes other ones on the second rank."""

    def __init__(self, count: int = 2 * ROWS, shift: bool = False) -> None:
        generator = torch.Generator().manual_seed(5 + shift * int(os.environ["RANK"]))
        self.ids = torch.randint(CLASSES, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": self.ids[index], "labels": self.ids[index].roll(-1), "number": torch.tensor(index)}


Case = tuple[type[Plain], dict[str, Any], dict[str, Any], list[str]]
LAST, CHILD = "the step failed on the last pipeline stage: ", "the model must be one child of "
# module, strategy arguments, loader arguments, what each rank must say (nothing: it trains)
CASES: dict[str, Case] = {
    "what is right": (Plain, {}, {}, []),
    "model directly in the module": (Direct, {}, {}, [CHILD + "Direct"]),
    "bare parameter": (BareParameter, {}, {}, [CHILD + "BareParameter"]),
    "trainable outside": (Outside, dict(module="model"), {}, ["probes.0.weight", "only the last pipeline stage would train them"]),
    "manual optimization": (Manual, {}, {}, ["manual optimization: "]),
    "several optimizers": (TwoOptimizers, {}, {}, ["multiple optimizers is only supported with manual optimization"]),
    "no layout": (Plain, dict(layout="auto"), {}, ["names the model's blocks, first, last", "A guess for Net", "first=['embed']"]),
    "split by hand": (Plain, dict(pipeline_split=["layers.7"]), {}, ["pipeline_split: 'layers.7' is no block"]),
    "list metric": (ListMetric, {}, {}, ["auroc: a metric that keeps a list of all values", "pipeline_parallel_size=1"]),
    "ragged last batch": (
        Plain,
        dict(microbatch_size=2),
        dict(rows=7),
        ["a batch of 3 rows cannot be cut", "microbatch_size=2", "drop_last"],
    ),
    "indivisible batch": (Plain, dict(microbatch_size=3), {}, ["a batch of 4 rows cannot be cut", "microbatch_size=3", "drop_last=True"]),
    "too few microbatches": (
        Plain,
        dict(microbatch_size=4),
        {},
        ["makes 1 microbatch of microbatch_size=4", "1F1B", "at least", "'GPipe'"],
    ),
    "last batch too small": (Plain, {}, dict(rows=5), ["makes 1 microbatch of microbatch_size=1", "1F1B"]),
    "global batch": (Plain, dict(global_batch_size=8), {}, ["global_batch_size=8, and the loader's 4 rows x data-parallel size 1 x"]),
    "second call": (SecondCall, {}, {}, ["the step calls Net a second time", "Concatenate the inputs into one call"]),
    "second call in validation": (SecondCallInValidation, {}, dict(validate=True), ["the step calls Net a second time"]),
    "never called": (NeverCalled, {}, {}, ["training_step never called Net, the pipelined module", "MegascaleStrategy(module=...)"]),
    "called after the step": (CalledLater, {}, {}, ["Net is cut into pipeline stages and was called outside of a training, validation"]),
    "returns None": (ReturnsNone, {}, {}, ["training_step returned no loss that depends on the model's output", "by returning None"]),
    "detached loss": (DetachedLoss, {}, {}, ["training_step returned no loss that depends on the model's output"]),
    "vector loss": (VectorLoss, {}, {}, ["training_step's loss has shape (2,): it must be a single number"]),
    "error in the loss": (RaisesInTheLoss, {}, {}, ["the user's own mistake"]),
    "error in one microbatch": (RaisesInOneMicrobatch, {}, {}, ["number 6"]),
    "error in validation": (RaisesInValidation, {}, dict(validate=True), ["the user's own mistake"]),
    "error before the call": (RaisesBeforeTheCall, {}, {}, ["idss"]),
    "error before the call on one rank": (RaisesBeforeTheCallOnOneRank, {}, {}, ["no such file here"]),
    "returns early on one rank": (ReturnsEarlyOnOneRank, {}, {}, ["training_step never called Net"]),
    "a part called after the model": (CallsAPartApart, {}, {}, ["module 'embed' lies on another pipeline stage and was called outside"]),
    "a part called before the model": (CallsAPartFirst, {}, {}, ["called"]),
    "microbatches of two lengths": (
        TrimsPadding,
        {},
        {},
        ["reach the model with different shapes", "(1, 3)", "(1, 4)", "collate function"],
    ),
    "batch without rows": (Opaque, {}, {}, ["the batch of training_step holds no tensor with rows"]),
    "tensor of other rows": (OddRows, {}, {}, ["batch['prior'] has 5 rows and the batch 4", "0-dim tensor"]),
    "other batches on each rank": (Plain, {}, dict(shift=True), ["tensor-parallel peers got different batches"]),
    "no chain": (GemmaLike, {}, {}, ["the hidden state that pipeline stage 1 receives is not what 'layers.1' is given"]),
    "logs a vector": (LogsAVector, {}, {}, ["self.log('both') was given a tensor of shape (2,)"]),
}
ON_ONE_RANK = {"error before the call on one rank": 0, "returns early on one rank": 1}
WHILE_RUNNING = {  # found by the last stage when the others cannot see it any more
    "second call", "second call in validation", "returns None", "detached loss", "vector loss", "error in the loss",
    "error in one microbatch", "error in validation", "a part called after the model", "logs a vector",
}  # fmt: skip


def fitted(kind: type[Plain], arguments: dict[str, Any], rows: int = 2 * ROWS, shift: bool = False, validate: bool = False) -> str:
    """The error's kind and words on this rank."""
    options: dict[str, Any] = dict(num_sanity_val_steps=0, limit_val_batches=int(validate), use_distributed_sampler=False)
    trainer = L.Trainer(**QUIET, **options, devices=2, max_epochs=1, strategy=MegascaleStrategy(**{**PIPELINE, **arguments}))
    loader = DataLoader(Rows(rows, shift), batch_size=ROWS)
    try:
        trainer.validate(kind(), loader, verbose=False) if validate else trainer.fit(kind(), loader, loader)
    except Exception as error:  # noqa: BLE001 - looked at by the parent
        return f"{type(error).__name__}: {error}"
    return ""


def all_cases() -> dict[str, str]:
    return {name: fitted(kind, arguments, **loader) for name, (kind, arguments, loader, _) in CASES.items()}


@cache
def outcomes() -> list[dict[str, str]]:
    return run_ranks(all_cases, 2, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_ends_with_the_same_words(name: str) -> None:
    messages = [outcome[name] for outcome in outcomes()]
    expected = CASES[name][3]
    assert all(bool(message) == bool(expected) for message in messages), messages
    for message in messages:
        for part in expected:
            assert part in message, message
    first, last = messages
    if name == "a part called before the model":  # each rank's own reason
        assert "part of the model was called apart" in first
        assert "module 'embed' lies on another pipeline stage and was called outside" in last
    elif name in WHILE_RUNNING:
        assert first == f"ValueError: {LAST}{last}"
    elif name in ON_ONE_RANK:
        own = ON_ONE_RANK[name]
        assert messages[1 - own].startswith(f"ValueError: the step failed on another rank before it called the model: {messages[own]}")
    else:
        assert first == last


# ---- errors that end a process ----------------------------------------------------------------------------------------------


class Breaks(Layer):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and hidden[0, 0, 0] == hidden[0, 0, 0]:
            raise FloatingPointError("inside of a block")
        return super().forward(hidden)


class BreaksInAStage(Plain):
    """In the middle of a schedule, on one rank only: its process ends, and the other must not wait for it."""

    def build(self) -> None:
        super().build()
        self.model.layers[int(os.environ["BROKEN"])] = Breaks()


def broken(stage: int) -> None:
    os.environ["BROKEN"] = str(stage)
    trainer = L.Trainer(**QUIET, devices=2, max_epochs=1, strategy=MegascaleStrategy(**PIPELINE))
    trainer.fit(BreaksInAStage(), DataLoader(Rows(), batch_size=ROWS))


@pytest.mark.parametrize("stage", [0, 1])
def test_an_error_inside_of_a_stage_ends_all_ranks(stage: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=f"rank {stage}:(.|\n)*inside of a block"):
        run_ranks(broken, 2, stage, timeout=60)
    assert time.monotonic() - start < 50
