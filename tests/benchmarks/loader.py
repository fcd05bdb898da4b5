"""Samples per second of MixtureDataModule's stream against webdataset's RandomMix, with the same decoder and transport.

Run: ``python -m tests.benchmarks.loader [rounds=5] [samples=1024] [workers=0,2] [edge=384]``.

Pictures are drawn (smooth, with noise) as JPEG in 4 sources of 8 shards. A turn reads ``samples`` pictures in batches of 16, decodes
them with the decoder of ``data/images.py``, and stacks them in the worker to one uint8 tensor; those who take part take turns in random
order, each with a fresh loader (start-up counts). Figures are medians [least, most]; ratios are medians of the ratios inside a round.
Afterwards: the first batch of a resume deep in an epoch against a fresh start, and the memory of 50 epochs of a small source.
"""

from __future__ import annotations

import io
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import webdataset as wds
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from lightning_megascale.data import images
from lightning_megascale.data.mixture import MixtureDataModule
from tests.data.chat import make_tokenizer

WEIGHTS = {"a": 0.405, "b": 0.225, "c": 0.27, "d": 0.1}
SHARDS, BATCH = 8, 16


def draw(folder: Path, edge: int, count: int) -> None:
    """``count`` pictures of each source."""
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[0:edge, 0:edge] / edge
    for name in WEIGHTS:
        for shard in range(SHARDS):
            with wds.TarWriter(str(folder / f"{name}-{shard:03d}.tar"), mtime=0) as tar:
                for number in range(count // SHARDS):
                    phase = generator.random(3) * 6
                    smooth = np.stack([np.sin(6 * rows + p) * np.cos(6 * columns - p) for p in phase], -1) * 90 + 128
                    pixels = np.clip(smooth + generator.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
                    file = io.BytesIO()
                    Image.fromarray(pixels).save(file, "JPEG", quality=90)
                    tar.write({"__key__": f"{name}{shard:03d}{number:05d}", "jpg": file.getvalue(), "txt": "a"})


def encode(sample: dict[str, Any], context: Any) -> dict[str, Any]:
    """A picture and no text to speak of."""
    one = torch.ones(2, dtype=torch.int64)
    return {"input_ids": one, "labels": one, "pixels": torch.from_numpy(images.decode(sample["jpg"]))}


encode.count = lambda sample, context: 2  # type: ignore[attr-defined]


def stack_ours(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.stack([sample["pixels"] for sample in samples])


def stack_arrays(samples: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack([images.decode(sample["jpg"]) for sample in samples]))


def module(folder: Path, cache: Path) -> MixtureDataModule:
    sources = {name: {"urls": str(folder / f"{name}-*.tar"), "fields": {"jpg": "jpg"}, "encode": encode} for name in WEIGHTS}
    options: dict[str, Any] = dict(rows="padded", sequence_length=2, cache_dir=cache)
    data = MixtureDataModule(sources, [{"name": "mix", "mix": WEIGHTS}], make_tokenizer(), **options)
    data.prepare_data()
    data.setup()
    return data


def ours(data: MixtureDataModule, workers: int, samples: int) -> Iterator[torch.Tensor]:
    batches = [list(range(first, first + BATCH)) for first in range(0, samples, BATCH)]
    yield from DataLoader(data.train_stream, batch_sampler=batches, num_workers=workers, collate_fn=stack_ours)  # type: ignore[arg-type]


def random_mix(folder: Path, workers: int, samples: int) -> Iterator[torch.Tensor]:
    parts = [
        wds.WebDataset(
            sorted(map(str, folder.glob(f"{name}-*.tar"))), shardshuffle=SHARDS, workersplitter=wds.split_by_worker, nodesplitter=None
        )
        .shuffle(100)
        .repeat()
        for name in WEIGHTS
    ]
    mixed = wds.RandomMix(parts, list(WEIGHTS.values()))
    loader = DataLoader(_Limited(mixed, samples, workers), batch_size=BATCH, num_workers=workers, collate_fn=stack_arrays)
    yield from loader


class _Limited(torch.utils.data.IterableDataset):
    """Each worker's part of so many samples."""

    def __init__(self, mixed: Any, samples: int, workers: int) -> None:
        self.mixed, self.each = mixed, samples // max(workers, 1)

    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(self.mixed):
            if number == self.each:
                return
            yield sample


def timed(batches: Iterator[torch.Tensor]) -> tuple[int, float]:
    begin, count = time.perf_counter(), 0
    for batch in batches:
        count += len(batch)
    return count, time.perf_counter() - begin


def first_batch(data: MixtureDataModule, position: int) -> float:
    """Seconds to the first batch from a position, of a module that has planned nothing."""
    fresh = module_like(data)
    begin = time.perf_counter()
    stream: Any = fresh.train_stream
    stack_ours([stream[place] for place in fresh.take(position, BATCH)])
    return time.perf_counter() - begin


def module_like(data: MixtureDataModule) -> MixtureDataModule:
    options: dict[str, Any] = dict(rows="padded", sequence_length=2, cache_dir=data.cache_dir)
    fresh = MixtureDataModule(data.sources, [{"name": "mix", "mix": WEIGHTS}], data.tokenizer, **options)
    fresh.setup()
    return fresh


def memory(data: MixtureDataModule, epochs: int) -> tuple[float, float]:
    """MB of this process after 5 epochs of the smallest source's draws, and after all."""
    stream: Any = data.train_stream
    process, size = psutil.Process(), data.orders[0].size
    found = []
    for epoch in range(epochs):
        for draw_number in range(size):
            row = data.orders[0].at(epoch * size + draw_number)
            stream.sources[0].load(row.shard, row.row)
        if epoch in (4, epochs - 1):
            found.append(process.memory_info().rss / 1e6)
    return found[0], found[-1]


def main(arguments: list[str]) -> None:
    given = {"rounds": "5", "samples": "1024", "workers": "0,2", "edge": "384"}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in given:
            sys.exit(f"no argument {key!r}; arguments are {', '.join(given)}")
        given[key] = value
    samples, order = int(given["samples"]), random.Random(0)
    table = Table("workers", "loader", "samples / s", "ours / it", title=f"decoder: {images.decoder_version()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw(folder, int(given["edge"]), samples // 4)
        data = module(folder, folder / "cache")
        for workers in map(int, given["workers"].split(",")):
            loaders: dict[str, Callable[[], Iterator[torch.Tensor]]] = {
                "ours": lambda workers=workers: ours(data, workers, samples),  # type: ignore[misc]
                "RandomMix": lambda workers=workers: random_mix(folder, workers, samples),  # type: ignore[misc]
            }
            rates: dict[str, list[float]] = {name: [] for name in loaders}
            for _ in range(int(given["rounds"]) + 1):
                turn = list(loaders)
                order.shuffle(turn)
                for one in turn:
                    count, seconds = timed(loaders[one]())
                    rates[one].append(count / seconds)
            for one, values in rates.items():
                values = values[1:]  # the first round warms the page cache
                ratios = [mine / theirs for mine, theirs in zip(rates["ours"][1:], values)]
                spread = f"{statistics.median(values):.0f} [{min(values):.0f}, {max(values):.0f}]"
                table.add_row(str(workers), one, spread, f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
        console = Console()
        console.print(table)
        fresh, deep = ([first_batch(data, position) for _ in range(5)] for position in (0, 997_531))
        console.print(
            f"first batch: {statistics.median(fresh):.3f} s from the start, {statistics.median(deep):.3f} s from position 997,531"
        )
        early, late = memory(data, 50)
        console.print(f"memory: {early:.0f} MB after 5 epochs of a source, {late:.0f} MB after 50")


if __name__ == "__main__":
    main(sys.argv[1:])
