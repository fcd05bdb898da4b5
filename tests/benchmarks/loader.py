"""Samples per second of MixtureDataModule's stream against RandomMix, litdata and Energon, with the same decoder and transport.

Run: ``python -m tests.benchmarks.loader [rounds=5] [samples=1024] [workers=0,2] [edge=384]``. litdata and Energon take part where they
import (``pip install --no-deps litdata megatron-energon`` and what their import asks for: all they require would bring torchvision).

Pictures are drawn (smooth, with noise) as JPEG in 4 sources of 8 shards. A turn reads ``samples`` pictures in batches of 16, decodes
them with the decoder of ``data/images.py``, and stacks them in the worker to one uint8 tensor as torch's ``default_collate`` does; those
who take part take turns in random order, each with a fresh loader (start-up counts). Processor time is that of all processes, workers
included: it leaves out what other programs do to the clock. Figures are medians [least, most]; ratios are medians of the ratios inside a
round, above 1: ours is faster. Afterwards: the first batch of a resume deep in an epoch against a fresh start, and the memory of 50
epochs of a small source.
"""

from __future__ import annotations

import gc
import importlib.util
import io
import itertools
import json
import os
import random
import statistics
import subprocess
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
from torch.utils.data import DataLoader, default_collate

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
    return default_collate([sample["pixels"] for sample in samples])


def stack_theirs(samples: list[Any]) -> torch.Tensor:
    return default_collate([torch.from_numpy(images.decode(sample["jpg"])) for sample in samples])


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
    loader = DataLoader(_Limited(mixed, samples, workers), batch_size=BATCH, num_workers=workers, collate_fn=stack_theirs)
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


def write_litdata(folder: Path, target: Path) -> None:
    """The same pictures in litdata's chunks, in a process of its own, as litdata wants it."""
    script = (
        f"from pathlib import Path; from tests.benchmarks.loader import optimize; optimize(Path({str(folder)!r}), Path({str(target)!r}))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def optimize(folder: Path, target: Path) -> None:
    import litdata

    for name in WEIGHTS:
        shards = [str(shard) for shard in sorted(folder.glob(f"{name}-*.tar"))]
        litdata.optimize(pictures_of, shards, str(target / name), chunk_bytes="4MB", num_workers=1, start_method="fork")


def pictures_of(shard: str) -> Iterator[dict[str, bytes]]:
    for sample in wds.WebDataset(shard, shardshuffle=False):
        yield {"jpg": sample["jpg"]}


def litdata_mix(target: Path, workers: int, samples: int) -> Iterator[torch.Tensor]:
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

    class Pictures(StreamingDataset):
        def __getitem__(self, index: Any) -> torch.Tensor:
            return torch.from_numpy(images.decode(bytes(super().__getitem__(index)["jpg"])))

    parts = [Pictures(str(target / name), shuffle=True) for name in WEIGHTS]
    mixed = CombinedStreamingDataset(parts, weights=list(WEIGHTS.values()), iterate_over_all=False)
    yield from itertools.islice(StreamingDataLoader(mixed, batch_size=BATCH, num_workers=workers), samples // BATCH)


def prepare_energon(folder: Path, target: Path) -> None:
    """Links to the shards with Energon's own index beside them."""
    for name in WEIGHTS:
        (target / name).mkdir(parents=True)
        for shard in folder.glob(f"{name}-*.tar"):
            (target / name / shard.name).hardlink_to(shard)
        options = ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "1"]
        command = [sys.executable, "-m", "megatron.energon.cli.main", "prepare", str(target / name), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    blend = [{"weight": weight, "path": f"./{name}"} for name, weight in WEIGHTS.items()]
    content = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": blend}}}
    (target / "mix.yaml").write_text(json.dumps(content))  # JSON is YAML


def energon_mix(target: Path, workers: int, samples: int) -> Iterator[torch.Tensor]:
    from megatron.energon import Cooker, WorkerConfig, get_loader, get_train_dataset, stateless
    from megatron.energon.task_encoder.base import DefaultTaskEncoder

    @stateless
    def as_it_is(sample: Any) -> Any:
        return sample

    class Pictures(DefaultTaskEncoder):
        cookers = [Cooker(as_it_is)]
        decoder = None

        def encode_sample(self, sample: Any) -> torch.Tensor:
            return torch.from_numpy(images.decode(sample["jpg"]))

        def batch(self, samples: list[torch.Tensor]) -> torch.Tensor:
            return default_collate(samples)

    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    options: dict[str, Any] = dict(shuffle_buffer_size=100, max_samples_per_sequence=100, task_encoder=Pictures())
    mixed = get_train_dataset(target / "mix.yaml", worker_config=config, batch_size=BATCH, **options)
    yield from itertools.islice(get_loader(mixed), samples // BATCH)


def timed(batches: Iterator[torch.Tensor]) -> tuple[int, float, float]:
    """Samples, seconds, and processor seconds with those of the workers."""
    begin, used, count = time.perf_counter(), sum(os.times()[:4]), 0
    for batch in batches:
        count += len(batch)
    gc.collect()  # a loader's end waits for its workers, whose time counts from then
    return count, time.perf_counter() - begin, sum(os.times()[:4]) - used


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
    table = Table("workers", "loader", "samples / s", "time / ours", "processor time / ours", title=f"decoder: {images.decoder_version()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw(folder, int(given["edge"]), 2 * samples)  # more than a turn reads: litdata's smallest source must not end it
        data = module(folder, folder / "cache")
        peers = [name for name in ("litdata", "megatron") if importlib.util.find_spec(name) is not None]
        if "litdata" in peers:
            write_litdata(folder, folder / "litdata")
        if "megatron" in peers:
            prepare_energon(folder, folder / "energon")
        for workers in map(int, given["workers"].split(",")):
            loaders: dict[str, Callable[[], Iterator[torch.Tensor]]] = {
                "ours": lambda workers=workers: ours(data, workers, samples),  # type: ignore[misc]
                "RandomMix": lambda workers=workers: random_mix(folder, workers, samples),  # type: ignore[misc]
            }
            if "litdata" in peers:
                loaders["litdata"] = lambda workers=workers: litdata_mix(folder / "litdata", workers, samples)  # type: ignore[misc]
            if "megatron" in peers:
                loaders["Energon"] = lambda workers=workers: energon_mix(folder / "energon", workers, samples)  # type: ignore[misc]
            turns: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}  # seconds and processor seconds a sample
            for _ in range(int(given["rounds"]) + 1):
                turn = list(loaders)
                order.shuffle(turn)
                for one in turn:
                    count, seconds, processor = timed(loaders[one]())
                    if count != samples:
                        sys.exit(f"{one} gave {count} of {samples} samples")
                    turns[one].append((seconds / count, processor / count))
            for one, values in turns.items():
                pairs = list(zip(turns["ours"][1:], values[1:]))  # the first round warms the page cache
                rates = [1 / theirs[0] for _, theirs in pairs]
                cells = [f"{statistics.median(rates):.0f} [{min(rates):.0f}, {max(rates):.0f}]"]
                for kind in (0, 1) if one != "ours" else ():
                    ratios = [theirs[kind] / mine[kind] for mine, theirs in pairs]
                    cells.append(f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
                table.add_row(str(workers), one, *cells)
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
