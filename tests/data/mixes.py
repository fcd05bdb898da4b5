"""Small sources in WebDataset shards, and runs over them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import webdataset as wds
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn, optim, zeros

from lightning_megascale.data.mixture import MixtureDataModule
from tests.data.chat import make_tokenizer

QUIET: dict[str, Any] = dict(
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
)
STAGES: list[dict[str, Any]] = [
    {"name": "one", "until": {"samples": 64}, "mix": {"b": 1}},
    {"name": "two", "until": {"samples": 96}, "mix": {"a": 0.5, "b": 0.3, "c": 0.2}, "ramp": 32},
    {"name": "three", "until": {"samples": 96}, "mix": {"c": {"share": 0.25, "c": 1}, "a": 0.75}},
]
SIZES = {"a": (7, 1, 12), "b": (30, 25), "c": (5,)}  # samples of the shards


def write(folder: Path, name: str, sizes: tuple[int, ...], words: tuple[int, int] = (1, 8), seed: int = 0) -> str:
    """Shards of short texts; the keys are those of the source. Returns their glob."""
    letters = random.Random(f"{seed} {name}")
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for shard, size in enumerate(sizes):
        with wds.TarWriter(str(folder / f"{name}-{shard:03d}.tar"), mtime=0) as tar:
            for _ in range(size):
                text = " ".join(letters.choice(("cat", "red", "blue", "circle", "square")) for _ in range(letters.randint(*words)))
                tar.write({"__key__": f"{name}{number:04d}", "txt": text})
                number += 1
    return str(folder / f"{name}-*.tar")


def sources(folder: Path) -> dict[str, str]:
    return {name: write(folder / "shards", name, sizes) for name, sizes in SIZES.items()}


def module(urls: dict[str, Any], folder: Path, stages: Any = STAGES, **options: Any) -> MixtureDataModule:
    given: dict[str, Any] = dict(sequence_length=32, batch_size=2, rows="padded", shuffle_window=16, lanes=4, cache_dir=folder / "cache")
    return MixtureDataModule(urls, stages, make_tokenizer(), **{**given, **options})


class OnRank(SingleDeviceStrategy):
    """One process that believes it is a rank of a data-parallel axis."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("cpu")
        self.data_parallel_rank, self.data_parallel_size = rank, size


class Recorder(LightningModule):
    """Keeps the keys of every row it is trained on; asks for the number of steps early, as schedules do; dies at a batch."""

    def __init__(self, die_at: int = -1, early: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(zeros(()))
        self.die_at, self.early = die_at, early
        self.rows: list[list[list[str]]] = []
        self.validated: list[dict[str, Any]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        if len(self.rows) == self.die_at:
            raise RuntimeError("killed")
        self.rows.append(batch["__key__"])
        return self.weight.square() + 0 * batch["input_ids"].sum()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated.append(batch)

    def configure_optimizers(self) -> Any:
        if self.early:
            self.total_steps = self.trainer.estimated_stepping_batches
        return optim.SGD(self.parameters(), 0.1)


def run(data: MixtureDataModule, rank: int = 0, size: int = 1, **options: Any) -> Recorder:
    """A whole run of one rank."""
    recorder = Recorder()
    Trainer(strategy=OnRank(rank, size), **{**QUIET, "max_epochs": 1, **options}).fit(recorder, datamodule=data)
    return recorder


def joined(ranks: list[Recorder]) -> list[list[str]]:
    """The rows of all ranks in the order of the run: row j of a global batch is rank j mod size's."""
    return [row for batches in zip(*(rank.rows for rank in ranks)) for rows in zip(*batches) for row in rows]
