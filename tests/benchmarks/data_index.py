"""Build rate, size, open and lookup time of the shard index, also extrapolated to 1,000,000 samples.

Run: ``python -m tests.benchmarks.data_index samples=100000``. Shards of 10,000 samples with a 3 kB jpg and a json of about 100 bytes each,
with a pax header for every member as WebDataset's writer makes them; local disk, page cache warm.
"""

from __future__ import annotations

import io
import os
import random
import resource
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_megascale.data.index import build_index, column, open_index
from lightning_megascale.data.storage import ShardStore

PER_SHARD = 10_000
MILLION = 1_000_000


def jpeg() -> bytes:
    from PIL import Image

    picture = Image.effect_noise((64, 64), 50.0).convert("RGB")
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=75)
    return buffer.getvalue()


def write_shards(folder: Path, samples: int) -> list[Path]:
    """Tars with pax headers; the two pax headers and the picture are made once, since writing is not what is measured."""
    picture, paths = jpeg(), []
    for first in range(0, samples, PER_SHARD):
        paths.append(folder / f"{first // PER_SHARD:04d}.tar")
        with paths[-1].open("wb") as file:
            for number in range(first, min(samples, first + PER_SHARD)):
                text = b'{"caption": "sample %d, %s"}' % (number, b"words " * 12)
                for extension, data in (("jpg", picture), ("json", text)):
                    member = tarfile.TarInfo(f"{number:09d}.{extension}")
                    member.size, member.mtime = len(data), 1_700_000_000.25
                    file.write(member.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512))
            file.write(bytes(1024))
            file.write(bytes(-file.tell() % 10240))
    return paths


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the processor and of the clock."""
    usage, wall = time.process_time(), time.perf_counter()
    action()
    return time.process_time() - usage, time.perf_counter() - wall


def report(paths: list[Path], samples: int) -> Iterator[tuple[str, str, str]]:
    """Rows: what, measured, for 1,000,000 samples (by proportion)."""
    scale = MILLION / samples
    for label, crc in (("build, headers only", False), ("build, with CRC-32 and image sizes", True)):
        cpu, wall = timed(lambda crc=crc: [build_index(path, crc=crc) for path in paths])
        yield label, f"{samples / cpu:,.0f} samples per CPU-s ({samples / wall:,.0f} per s)", f"{cpu * scale:.0f} CPU-s"
    indexes = [open_index(path) for path in paths]
    size = sum(os.path.getsize(str(index.path)) for index in indexes)
    yield "index files", f"{size / samples:.1f} B a sample, key of 9 included", f"{size / samples:.1f} MB"
    _, wall = timed(lambda: [open_index(path) for path in paths])
    yield "open, header and state checked", f"{wall / len(paths) * 1e6:.0f} us a shard", f"{wall * scale * 1e3:.1f} ms"
    _, wall = timed(lambda: [index.key(0) for index in indexes])
    yield "first look-up (maps the file)", f"{wall / len(paths) * 1e6:.0f} us a shard", f"{wall * scale * 1e3:.1f} ms"
    generator = random.Random(0)
    wanted = [(generator.randrange(len(indexes)), generator.randrange(indexes[-1].samples)) for _ in range(50_000)]
    _, wall = timed(lambda: [indexes[shard].span(row, "jpg;png") for shard, row in wanted])
    yield "random look-up of offset and size", f"{wall / len(wanted) * 1e6:.2f} us", ""
    store, names = ShardStore(), [str(path) for path in paths]
    _, wall = timed(lambda: [store.read(names[shard], *indexes[shard].span(row, "jpg")) for shard, row in wanted])
    yield "random look-up and read of a picture", f"{wall / len(wanted) * 1e6:.2f} us", ""
    for index in indexes:
        column(index, "tokens", "benchmark", lambda row: row)
    _, wall = timed(lambda: np.concatenate([column(index, "tokens", "benchmark", lambda row: row) for index in indexes]))
    yield "read all token counts", f"{wall / len(paths) * 1e6:.0f} us a shard", f"{wall * scale * 1e3:.1f} ms"


def main(arguments: list[str]) -> None:
    options = dict(argument.split("=", 1) for argument in arguments)
    samples = int(options.pop("samples", 100_000))
    if options or samples < 1:
        raise SystemExit(f"usage: python -m tests.benchmarks.data_index samples=100000 (not {' '.join(arguments)})")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEGASCALE_CACHE"] = os.path.join(folder, "cache")
        paths = write_shards(Path(folder), samples)
        megabytes = sum(path.stat().st_size for path in paths) / 1e6
        table = Table("what", "measured", f"{MILLION:,} samples", title=f"{samples:,} samples in {len(paths)} shards, {megabytes:,.0f} MB")
        for row in report(paths, samples):
            table.add_row(*row)
    console = Console(width=120)
    console.print(table)
    console.print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
