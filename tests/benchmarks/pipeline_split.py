"""Stages cut by cost (``pipeline_split="auto"``) against the blocks divided evenly, on a model whose head weighs as much as its blocks.

Run: ``python -m tests.benchmarks.pipeline_split [rounds=5] [steps=1] [microbatches=6]``. Two ranks, one thread each. The two cuts take
turns inside one run on the same ranks, so a drifting machine slows both; the figure is the median of per-round ratios, its 95% interval
in brackets. It means something only while both ranks have a core to themselves: where others compute too, a waiting rank's core is not
idle and the cuts come out alike. The second figure does not depend on that: the processor time of the dearer rank, which waits for nobody.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.strategies.trainer import MegascaleStrategy
from tests.benchmarks.overhead import interval
from tests.harness import run_ranks

RANKS, LENGTH, TARGET = 2, 128, 1.15
# matrices so large that a stage's time follows from their sizes, as the split assumes: the head weighs as much as the blocks together
CONFIG = DecoderConfig(vocab_size=36000, hidden_size=512, num_layers=6, num_heads=8, intermediate_size=1376, max_position_embeddings=LENGTH)
SPLITS: dict[str, Any] = {"by cost": "auto", "even": [f"layers.{CONFIG.num_layers // RANKS}"]}


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(CONFIG)
        self.ends: list[tuple[float, float]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        loss_sum, num_tokens = self.model(batch["input_ids"], labels=batch["labels"])
        return {"loss_sum": loss_sum, "num_tokens": num_tokens}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))


def turns(split: Any, steps: int, microbatches: int, costs: list[float]) -> Iterator[tuple[float, float]]:
    """Seconds and processor seconds of a step, the quickest of each turn, its first one left out: other programs can only add."""
    module = Module()
    ids = torch.randint(CONFIG.vocab_size, (microbatches * (steps + 1), LENGTH), generator=torch.Generator().manual_seed(0))
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]
    while True:
        strategy = MegascaleStrategy(
            pipeline_parallel_size=RANKS, microbatch_size=1, pipeline_schedule="1F1B", pipeline_split=split, label_alignment="aligned"
        )
        trainer = L.Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=strategy,
            max_epochs=1,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(rows, batch_size=microbatches))
        costs[:] = strategy._done.pipeline.stages.costs  # type: ignore[union-attr]
        ends, module.ends = module.ends, []
        steps_taken = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(ends, ends[1:])]
        yield min(wall for wall, _ in steps_taken), min(processor for _, processor in steps_taken)


def contest(rounds: int, steps: int, microbatches: int) -> tuple[dict[str, list[tuple[float, float]]], dict[str, list[float]]]:
    """On each rank: both seconds of a step in every round, and the share of the work of every stage, for both cuts."""
    warnings.simplefilter("ignore")
    costs: dict[str, list[float]] = {name: [] for name in SPLITS}
    contenders = {name: turns(split, steps, microbatches, costs[name]) for name, split in SPLITS.items()}
    names = list(contenders)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names[turn % 2 :] + names[: turn % 2]:
            took = next(contenders[name])
            torch.distributed.barrier()
            if turn:  # the first round warms up
                seconds[name].append(took)
    return seconds, costs


def main(arguments: list[str]) -> None:
    options = {name: int(value) for name, value in (argument.split("=") for argument in arguments)}
    rounds, microbatches = options.get("rounds", 5), options.get("microbatches", 6)
    results = run_ranks(contest, RANKS, rounds, options.get("steps", 1), microbatches, timeout=3000)
    wall, processor = (
        {name: [max(result[0][name][number][kind] for result in results) for number in range(rounds)] for name in SPLITS} for kind in (0, 1)
    )
    costs = results[0][1]
    table = Table("cut", "share of the work of each stage", "ms a step", "processor ms of the dearer rank")
    table.title = f"pp2, 1F1B, {microbatches} microbatches of {LENGTH} tokens"
    for name in SPLITS:
        times = [f"{statistics.median(kind[name]) * 1e3:.0f}" for kind in (wall, processor)]
        table.add_row(name, " ".join(f"{cost:.3f}" for cost in costs[name]), *times)
    console = Console()
    console.print(table)
    for title, kind in (("time of a step", wall), ("processor time of the dearer rank", processor)):
        middle, low, high = interval([even / cost for even, cost in zip(kind["even"], kind["by cost"])])
        verdict = "met" if middle >= TARGET else "MISSED"
        console.print(f"{title}, even / by cost: {middle:.3f} [{low:.3f}, {high:.3f}], target {TARGET}: {verdict}")
    # of (m + 1) turns of a two-stage pipeline with unequal stages all but one are the dearer stage's
    planned = [max(costs[name]) * (microbatches - 1) + sum(costs[name]) for name in ("even", "by cost")]
    console.print(f"by the costs alone: {planned[0] / planned[1]:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
