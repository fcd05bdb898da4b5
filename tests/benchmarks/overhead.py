"""Step time of MegascaleStrategy against a hand-written torch loop with the same calls and against Lightning's ModelParallelStrategy.

Run: ``python -m tests.benchmarks.overhead [ranks=2,4] [sizes=tiny,100m] [rounds=9] [steps=12]``. The three contenders take turns inside one
run on the same ranks, so a drifting machine slows all of them; figures are medians of per-round ratios with their 95% interval. The
second row of each size is processor time, summed over the ranks: it leaves out waiting, and what other programs do to the clock.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_megascale.mesh import build_mesh
from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.parallel.clip import clip_grad_norm_
from lightning_megascale.parallel.loss_scale import LossScale, Weights, weighted
from lightning_megascale.parallel.parallelize import parallelize
from lightning_megascale.parallel.rng import seed_microbatch
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.strategies.trainer import MegascaleStrategy
from tests.harness import run_ranks

SIZES = {  # config, rows and tokens of a rank's batch, steps of a turn, steps of it that are not counted
    "tiny": (
        DecoderConfig(vocab_size=256, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, max_position_embeddings=32),
        2,
        32,
        40,
        10,
    ),
    "100m": (
        DecoderConfig(vocab_size=16000, hidden_size=768, num_layers=11, num_heads=12, intermediate_size=2048, max_position_embeddings=64),
        1,
        32,
        12,
        2,
    ),
}


class Module(L.LightningModule):
    def __init__(self, size: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(SIZES[size][0])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class StockModule(Module):
    """The same, sharded by hand as ModelParallelStrategy asks."""

    def configure_model(self) -> None:
        if not getattr(self, "sharded", False):
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.layers:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            self.sharded = True


class Clock(L.Callback):
    """Seconds and processor seconds of each step of the current turn, first ones left out."""

    def __init__(self, skipped: int) -> None:
        self.skipped, self.ends = skipped, []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def take(self) -> tuple[float, float]:
        """(seconds, processor seconds) of a step, medians."""
        ends, self.ends = self.ends[self.skipped - 1 :], []
        kinds = [[b[kind] - a[kind] for a, b in zip(ends, ends[1:])] for kind in (0, 1)]
        return statistics.median(kinds[0]), statistics.median(kinds[1])


def loader(size: str) -> DataLoader:
    config, rows, tokens, steps, _ = SIZES[size]
    ids = torch.randint(config.vocab_size, (rows * steps, tokens), generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
    return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=rows)  # type: ignore[arg-type]


def lightning_turns(size: str, module: Module, make_strategy: Callable[[], Any]) -> Iterator[tuple[float, float]]:
    clock = Clock(SIZES[size][4])
    data = loader(size)
    while True:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=make_strategy(),
            max_epochs=1,
            gradient_clip_val=1.0,
            callbacks=[clock],
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data)
        yield clock.take()


def hand_written_turns(size: str) -> Iterator[tuple[float, float]]:
    """What a careful user of the same building blocks would write without Lightning."""
    module, plan = Module(size), ParallelPlan().resolve(int(os.environ["WORLD_SIZE"]))
    views = build_mesh(plan, "cpu")
    parallelize(module, module.model, plan, views, None)
    optimizer, scale, clock = module.configure_optimizers(), LossScale(), Clock(SIZES[size][4])
    parameters, group, data = list(module.parameters()), views.loss.get_group(), loader(size)
    while True:
        for index, batch in enumerate(data):
            seed_microbatch(0, index, views.data_parallel_rank)
            optimizer.zero_grad()
            loss = module.training_step(batch, index)
            weights = Weights((batch["labels"] != -100).sum().double())
            weighted(loss, scale.share(loss.detach(), weights, group)).backward()
            clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            clock.on_train_batch_end()
        yield clock.take()


def contest(size: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds and processor seconds a step of every round of every contender on this rank; the order of turns rotates."""
    warnings.simplefilter("ignore")
    turns = {
        "megascale": lightning_turns(size, Module(size), lambda: MegascaleStrategy(label_alignment="aligned")),
        "hand-written": hand_written_turns(size),
        "ModelParallelStrategy": lightning_turns(
            size, StockModule(size), lambda: ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)
        ),
    }
    names = list(turns)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names[turn % 3 :] + names[: turn % 3]:
            took = next(turns[name])
            torch.distributed.barrier()
            if turn:  # the first round warms up
                seconds[name].append(took)
    return seconds


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """(median, low, high) with a 95% bootstrap interval of the median."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor(ratios)
    picks = torch.randint(len(ratios), (2000, len(ratios)), generator=generator)
    medians = values[picks].quantile(0.5, dim=1)
    return float(values.quantile(0.5)), float(medians.quantile(0.025)), float(medians.quantile(0.975))


def main(arguments: list[str]) -> None:
    options = dict(argument.split("=") for argument in arguments)
    table = Table(
        "ranks", "parameters", "ms a step", "vs hand-written", "vs ModelParallelStrategy", title="step time, median ratio [95% interval]"
    )
    if "steps" in options:
        SIZES.update({name: (*values[:3], int(options["steps"]), values[4]) for name, values in SIZES.items()})
    for ranks in map(int, options.get("ranks", "2,4").split(",")):
        for size in options.get("sizes", "tiny,100m").split(","):
            results = run_ranks(contest, ranks, size, int(options.get("rounds", 9)), timeout=3000)
            with torch.device("meta"):
                count = sum(p.numel() for p in Decoder(SIZES[size][0]).parameters())
            for kind, (title, together) in enumerate((("", max), ("processor ", sum))):
                seconds = {
                    name: [together(result[name][i][kind] for result in results) for i in range(len(results[0][name]))]
                    for name in results[0]
                }
                cells = []
                for other in ("hand-written", "ModelParallelStrategy"):
                    middle, low, high = interval([a / b for a, b in zip(seconds["megascale"], seconds[other])])
                    cells.append(f"{middle:.3f} [{low:.3f}, {high:.3f}]")
                table.add_row(str(ranks), f"{count:,}", f"{title}{statistics.median(seconds['megascale']) * 1e3:.1f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
