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


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "kind", [ForwardBeforeStep, Frozen, CalledTwice, ClippedByValue, TiedHead, TwoGroups], ids=lambda kind: kind.__name__
)
def test_habit_equals_one_device(kind: type[L.LightningModule], plan: str) -> None:
    reference = train(kind, None)
    results = run_ranks(train, 2, kind, {**PLANS[plan], "label_alignment": "aligned"})
    off, name = worst(reference["state"], results[0]["state"])
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


class Uneven(CallsModel):
    def train_dataloader(self) -> DataLoader:
        count = 4 + int(os.environ["RANK"])
        return DataLoader([Tokens()[i] for i in range(count)], batch_size=2)  # type: ignore[arg-type]


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
    except ValueError as error:
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
