"""Habits that break sharded training without an error elsewhere: here they are exact, or refused by name."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_megascale import MegascaleStrategy
from tests.harness import RankFailure, run_ranks, worst
from tests.strategies.test_existing_code import CLASSES, PLANS, WIDTH, CallsModel, Layer, Tokens, train
from tests.strategies.test_guards import QUIET

# ---- exact -----------------------------------------------------------------------------------------------------------------


class ForwardBeforeStep(CallsModel):
    """An extra forward between backward and step leaves gathered parameters behind, which the step makes stale."""

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self.model(torch.zeros(2, 3, dtype=torch.long))


class Frozen(CallsModel):
    def build(self) -> None:
        super().build()
        self.model.embed.requires_grad_(False)
        self.model.layers[0].up.requires_grad_(False)
        self.model.layers[1].down.bias.requires_grad_(False)


class CalledTwice(CallsModel):
    """One forward of the model for each half of the rows, and a block that is used at two depths."""

    def build(self) -> None:
        super().build()
        self.model.layers = nn.ModuleList([self.model.layers[0], self.model.layers[1], self.model.layers[0]])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        ids = batch["input_ids"]
        logits = torch.cat([self.model(ids[:1]), self.model(ids[1:])]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten())


class ClippedByValue(CallsModel):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.clip_gradients(optimizer, 1e-3, "value")


class TiedHead(CallsModel):
    def build(self) -> None:
        super().build()
        self.model.head.weight = self.model.embed.weight


class TwoGroups(CallsModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        slow = list(self.model.embed.parameters())
        rest = [p for name, p in self.model.named_parameters() if not name.startswith("embed")]
        return torch.optim.AdamW([{"params": rest}, {"params": slow, "lr": 1e-4}], lr=1e-2, foreach=True)


class LooksAfterBackward(CallsModel):
    """Gradients read and changed in on_after_backward are those of one device."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            local.clamp_(-1e-3, 1e-3)


class ChangesWeightsAfterForward(CallsModel):
    """A monitoring forward, then a change of the weights by hand."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.model(torch.zeros(2, 3, dtype=torch.long))
            for parameter in self.parameters():
                (parameter.to_local() if hasattr(parameter, "to_local") else parameter).clamp_(-0.3, 0.3)


class SkipsAStep(CallsModel):
    """Lightning's own example of an optimizer_step that runs the closure alone on some batches."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 1:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class GathersRows(CallsModel):
    """A loss over everybody's rows."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        pooled = self.model(batch["input_ids"]).mean((1, 2))
        everybody = self.all_gather(pooled, sync_grads=True)
        return everybody.flatten().square().sum()


EXACT = [
    *(ForwardBeforeStep, Frozen, CalledTwice, ClippedByValue, TiedHead, TwoGroups),
    *(LooksAfterBackward, ChangesWeightsAfterForward, SkipsAStep, GathersRows),
]


UNDER_A_PIPELINE = {  # what the others are told
    ForwardBeforeStep: "was called outside of a training, validation, test or predict step",
    CalledTwice: "a module that is used twice cannot lie on two pipeline stages",  # a block used at two depths
    ChangesWeightsAfterForward: "was called outside of a training, validation, test or predict step",
    GathersRows: "training_step's loss cannot be cut into microbatches",
}


@pytest.mark.parametrize("plan", [pytest.param(plan, marks=pytest.mark.slow if plan == "dp2" else ()) for plan in PLANS])
@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.__name__)
def test_habit_equals_one_device(kind: type[L.LightningModule], plan: str) -> None:
    arguments = {**PLANS[plan], "label_alignment": "aligned", "loss_weight": "samples" if kind is GathersRows else "auto"}
    if plan == "pp2" and kind in UNDER_A_PIPELINE:
        with pytest.raises(RankFailure, match=UNDER_A_PIPELINE[kind]):
            run_ranks(train, 2, kind, arguments)
        return
    reference, results = train(kind, None), run_ranks(train, 2, kind, arguments)
    state = {name: value for result in results for name, value in result["state"].items()}  # pipeline stages hold different ones
    reference["state"] |= {name: state[name] for name in state.keys() - reference["state"].keys() if kind is TiedHead}  # a stage's copy
    off, name = worst(reference["state"], state)
    assert off < 1e-10, f"{name} is off by {off:.2e}"


# ---- refused ---------------------------------------------------------------------------------------------------------------


class TiedAcrossChildren(CallsModel):
    def build(self) -> None:
        self.embed, self.body, self.head = nn.Embedding(CLASSES, WIDTH), Layer(), nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embed.weight


class TiedIntoBlock(CallsModel):
    def build(self) -> None:
        super().build()
        self.model.spare = nn.Linear(WIDTH, 4 * WIDTH)
        self.model.spare.weight = self.model.layers[0].up.weight


class WithBatchNorm(CallsModel):
    def build(self) -> None:
        super().build()
        self.model.norm = nn.BatchNorm1d(WIDTH)


class ByRank(IterableDataset):
    """A stream that divides itself by RANK, as many do."""

    def __iter__(self) -> Any:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        yield from (Tokens()[i] for i in range(rank, len(Tokens()), world))


class UnevenStream(IterableDataset):
    """Rank 1's stream is one batch longer."""

    def __iter__(self) -> Any:
        yield from (Tokens()[i] for i in range(8 + 4 * int(os.environ["RANK"])))


class EvenStream(IterableDataset):
    def __iter__(self) -> Any:
        rank = int(os.environ["RANK"])
        yield from (Tokens()[i] for i in range(12 * rank, 12 * rank + 12))


def count_stream() -> int:
    module, strategy = CallsModel(), MegascaleStrategy(label_alignment="aligned")
    trainer = L.Trainer(**QUIET, devices=2, max_epochs=2, strategy=strategy)
    trainer.fit(module, DataLoader(EvenStream(), batch_size=4))
    return trainer.global_step


def test_streams_of_equal_length_end_together() -> None:
    assert run_ranks(count_stream, 2) == [6, 6]


class Uneven(CallsModel):
    def train_dataloader(self) -> DataLoader:
        count = 4 + int(os.environ["RANK"])
        return DataLoader([Tokens()[i] for i in range(count)], batch_size=2)  # type: ignore[arg-type]


class ManyHeads(CallsModel):
    """Which head is used depends on the rank, as with tasks that only some rows have."""

    def build(self) -> None:
        super().build()
        self.heads = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(2))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["input_ids"]).flatten(0, 1)
        used = self.heads if batch_idx == 0 else self.heads[self.global_rank : self.global_rank + 1]
        return sum(F.cross_entropy(head(logits), batch["labels"].flatten()) for head in used)  # type: ignore[return-value]


class ParameterHook(CallsModel):
    def build(self) -> None:
        super().build()
        self.model.head.weight.register_hook(lambda gradient: gradient * 0)


class BackwardByHand(CallsModel):
    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx).backward()
        self.optimizers().step()


class NeverZeroes(CallsModel):
    def optimizer_zero_grad(self, *_: Any) -> None:
        pass


class TargetKey(CallsModel):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return super().training_step({"input_ids": batch["ids"], "labels": batch["target"]}, batch_idx)

    def on_before_batch_transfer(self, batch: dict[str, torch.Tensor], dataloader_idx: int) -> dict[str, torch.Tensor]:
        return {"ids": batch["input_ids"], "target": batch["labels"]}


class UnequalPlateau(CallsModel):
    """A plateau schedule on a value that ranks do not share."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("mine", float(batch_idx * (1 - 2 * self.global_rank)), on_step=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "monitor": "mine"}}


class MaxNorm(CallsModel):
    def build(self) -> None:
        super().build()
        self.model.embed = nn.Embedding(CLASSES, WIDTH, max_norm=1.0)


class ForeignOptimizer(CallsModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


class PartsApart(CallsModel):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        hidden = self.model.embed(batch["input_ids"])
        return F.cross_entropy(self.model.head(hidden).flatten(0, 1), batch["labels"].flatten())


class IntegerSum(CallsModel):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        return {"loss_sum": 3, "num_tokens": 2}


REFUSALS: dict[str, tuple[type[L.LightningModule], dict[str, Any], dict[str, Any], list[str]]] = {
    "tied over children": (TiedAcrossChildren, {}, {}, ["embed.weight and head.weight are one parameter", "untie"]),
    "tied into a block": (TiedIntoBlock, {}, {}, ["model.layers.0.up.weight and model.spare.weight are one parameter"]),
    "batch norm": (WithBatchNorm, {}, {}, ["'model.norm' is a BatchNorm1d", "this rank's rows only"]),
    "sync_batchnorm": (CallsModel, {}, dict(sync_batchnorm=True), ["sync_batchnorm=True"]),
    "data divided by RANK under tp": (
        CallsModel,
        PLANS["tp2"],
        dict(data=ByRank),
        ["tensor-parallel peers got different batches", "data_parallel_rank"],
    ),
    "head by rank": (ManyHeads, PLANS["dp2"], {}, ["ranks gave gradients to different parameters", "multiply an unused output by 0"]),
    "hook on a parameter": (ParameterHook, {}, {}, ["model.head.weight: a hook on a parameter never runs"]),
    "loss.backward() by hand": (BackwardByHand, {}, {}, ["self.manual_backward(loss) was not called"]),
    "gradients never zeroed": (NeverZeroes, {}, {}, ["gradients of an earlier step are left"]),
    "masked labels under another key": (TargetKey, {}, {}, ["-100 in it", "Call it 'labels'"]),
    "plateau on an unshared value": (UnequalPlateau, PLANS["dp2"], {}, ["different learning rates", "sync_dist=True"]),
    "embedding with max_norm": (MaxNorm, {}, {}, ["'model.embed' is an Embedding with max_norm"]),
    "optimizer of other tensors": (ForeignOptimizer, {}, {}, ["holds 1 tensors that are no parameters"]),
    "parts called apart": (PartsApart, {}, {}, ["outside of its module's forward", "self.model.head(x)"]),
    "loss_sum is no tensor": (IntegerSum, {}, {}, ["loss_sum is a int: it must be a tensor"]),
    "averaging of weights": (
        CallsModel,
        {},
        dict(callbacks=[StochasticWeightAveraging(0.1)]),
        ["StochasticWeightAveraging averages whole copies"],
    ),
    "streams of unequal length": (CallsModel, {}, dict(data=UnevenStream), ["after 2 batches some ranks have another batch"]),
    "unequal numbers of batches": (Uneven, {}, dict(use_distributed_sampler=False), ["rank 0 has 2 and rank 1 has 3", "drop_last=True"]),
}


def refused(name: str) -> str:
    kind, arguments, options, _ = REFUSALS[name]
    options = dict(options)
    data = options.pop("data", Tokens)()
    try:
        strategy = MegascaleStrategy(label_alignment="aligned", **arguments)
        trainer = L.Trainer(**{**QUIET, **options}, devices=2, max_epochs=1, strategy=strategy)
        module = kind()
        trainer.fit(module, None if kind is Uneven else DataLoader(data, batch_size=4))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", REFUSALS)
def test_every_rank_refuses_with_the_same_words(name: str) -> None:
    messages = run_ranks(refused, 2, name, timeout=30)
    assert len(set(messages)) == 1, messages
    for part in REFUSALS[name][3]:
        assert part in messages[0], messages[0]


def missing_rank(path: str) -> None:
    """Rank 1 comes too late."""
    if torch.distributed.get_rank() == 1:
        time.sleep(3)
        return
    try:
        MegascaleStrategy(timeout=timedelta(seconds=1)).barrier()
    except RuntimeError as error:
        Path(path).write_text(str(error))
        raise


def test_a_barrier_that_times_out_names_the_missing_rank(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(missing_rank, 2, str(tmp_path / "message"), timeout=20)
    assert "Ranks 1 failed to pass monitoredBarrier" in (tmp_path / "message").read_text()
