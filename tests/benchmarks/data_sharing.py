"""Samples per second and processor time of ranks that share a model replica (tp4): each reads for itself, or one reads for all.

Run: ``python -m tests.benchmarks.data_sharing [rounds=5] [samples=256] [edge=384] [size=336] [batch=8] [ranks=4] [workers=0]``.

Pictures are drawn (smooth, with noise) as JPEG of ``edge`` pixels. In a turn every rank gets the same ``samples`` captioned pictures, of
``size`` pixels, in batches, with share="none" and with share="model", in random order inside a round. Seconds are those of the slowest
rank; processor seconds (user and system, loader workers included) are summed over all ranks, which also says what a machine with
idle cores would save. Figures are medians [least, most]; ratios are medians of the ratios inside a round. Afterwards: seconds of one batch
from rank to rank, nothing read. The first round warms the page cache and is left out.
"""

from __future__ import annotations

import io
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import webdataset as wds
from PIL import Image
from rich.console import Console
from rich.table import Table

from lightning_megascale.data import images
from lightning_megascale.data.image_text import ImageTextDataModule
from lightning_megascale.data.sharing import Replica, SharedLoader
from tests.data.chat import IMAGE, make_tokenizer
from tests.harness import run_ranks

SHARES = ("none", "model")


class Peer:
    """What a loader asks of its trainer: a strategy under which all ranks hold one model."""

    def __init__(self) -> None:
        self.strategy, self.model_replica = self, Replica(dist.group.WORLD, 0)


class Same:
    """The same batch again and again."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter([self.batch] * self.count)


def draw(folder: Path, edge: int, count: int) -> str:
    """A source of captioned pictures in 4 shards."""
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[0:edge, 0:edge] / edge
    for shard in range(4):
        with wds.TarWriter(str(folder / f"caption-{shard:03d}.tar"), mtime=0) as tar:
            for number in range(-(-count // 4)):
                phase = generator.random(3) * 6
                smooth = np.stack([np.sin(6 * rows + p) * np.cos(6 * columns - p) for p in phase], -1) * 90 + 128
                pixels = np.clip(smooth + generator.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
                file = io.BytesIO()
                Image.fromarray(pixels).save(file, "JPEG", quality=90)
                tar.write({"__key__": f"{shard:03d}{number:05d}", "jpg": file.getvalue(), "txt": f"{IMAGE}a red square"})
    return str(folder / "caption-*.tar")


def module(urls: str, cache: Path, given: dict[str, int]) -> ImageTextDataModule:
    stages = [{"name": "all", "until": {"samples": given["samples"]}, "mix": {"caption": 1}}]
    options: dict[str, Any] = dict(rows="padded", image_size=given["size"], num_workers=given["workers"], cache_dir=cache)
    length = (given["size"] // 14) ** 2 + 32
    return ImageTextDataModule({"caption": urls}, stages, make_tokenizer(), length, given["batch"], **options)


def processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def timed(loader: Any) -> tuple[float, float, Any]:
    """Seconds of the slowest rank, processor seconds of all, the last batch."""
    dist.barrier()
    begin, before, batch = time.perf_counter(), processor_seconds(), None
    for one in loader:
        batch = one
    own = torch.tensor([time.perf_counter() - begin, processor_seconds() - before], dtype=torch.float64)
    slowest, total = own.clone(), own.clone()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(slowest[0]), float(total[1]), batch


def one_rank(urls: str, cache: str, given: dict[str, int]) -> Any:
    data, peer, order = module(urls, Path(cache), given), Peer(), random.Random(0)
    data.setup()
    plain: Any = data.train_dataloader()
    loaders = {"none": plain, "model": SharedLoader(plain, peer, "training")}
    turns: list[dict[str, tuple[float, float]]] = []
    batch: Any = None
    for _ in range(given["rounds"] + 1):
        names, turn = list(SHARES), {}
        order.shuffle(names)
        for name in names:
            seconds, processor, batch = timed(loaders[name])
            turn[name] = seconds, processor
        turns.append(turn)
    sent = [timed(SharedLoader(Same(batch, 20), peer, "training")) for _ in range(given["rounds"])]  # type: ignore[arg-type]
    size = batch["pixel_values"].values.nbytes
    return turns[1:], size, [seconds / 20 for seconds, *_ in sent], [processor / 20 for _, processor, _ in sent]


def spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def main(arguments: list[str]) -> None:
    given = {"rounds": 5, "samples": 256, "edge": 384, "size": 336, "batch": 8, "ranks": 4, "workers": 0}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in given:
            sys.exit(f"no argument {key!r}; arguments are {', '.join(given)}")
        given[key] = int(value)
    make_tokenizer()
    with tempfile.TemporaryDirectory() as name:
        urls = draw(Path(name), given["edge"], given["samples"])
        module(urls, Path(name) / "cache", given).prepare_data()
        turns, size, seconds, processor = run_ranks(one_rank, given["ranks"], urls, f"{name}/cache", given, timeout=3600)[0]
    title = f"{given['ranks']} ranks of one replica, decoder: {images.decoder_version()}"
    table = Table("share", "samples / s", "processor s / 1,000 samples", "samples / s, model / it", "processor, it / model", title=title)
    for share in SHARES:
        rates, used = [given["samples"] / turn[share][0] for turn in turns], [turn[share][1] for turn in turns]
        faster = [turn[share][0] / turn["model"][0] for turn in turns]
        lighter = [turn[share][1] / turn["model"][1] for turn in turns]
        table.add_row(share, spread(rates, 0), spread([1000 * one / given["samples"] for one in used], 1), spread(faster), spread(lighter))
    console = Console()
    console.print(table)
    each = f"{spread([1e3 * one for one in seconds], 1)} ms, {spread([1e3 * one for one in processor], 1)} processor ms of all ranks"
    console.print(f"a batch of {given['batch']} pictures ({size / 1e6:.1f} MB) from rank to rank: {each}")


if __name__ == "__main__":
    main(sys.argv[1:])
