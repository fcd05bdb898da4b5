"""Process groups of a rank, and seconds and memory to make the mesh and to wrap a 175B model, for 1,024 and 16,384 fake ranks.

Run: ``python -m tests.benchmarks.groups``. One process stands for one rank of the whole world (torch's fake backend); the model is
on the meta device. Nothing here sends a byte, so real group creation over a network is not in the figures.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_megascale.mesh import build_mesh
from lightning_megascale.models.decoder import Decoder
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.parallel.parallelize import parallelize
from lightning_megascale.plan import ParallelPlan

WORLDS = {
    "1,024 = hsdp 2 x 64 x tp 8": (1024, dict(data_parallel_replicate_size=2, tensor_parallel_size=8, sequence_parallel=True)),
    "1,024 = fsdp2 128 x tp 8": (1024, dict(tensor_parallel_size=8, sequence_parallel=True)),
    "16,384 = hsdp 16 x 128 x tp 8": (16384, dict(data_parallel_replicate_size=16, tensor_parallel_size=8, sequence_parallel=True)),
    "16,384 = fsdp2 2,048 x tp 8": (16384, dict(tensor_parallel_size=8, sequence_parallel=True)),
}


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one_rank(name: str, queue: Any) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    world, sizes = WORLDS[name]
    dist.init_process_group("fake", store=FakeStore(), rank=world // 3, world_size=world)
    before, start = memory_mb(), time.perf_counter()
    plan = ParallelPlan(**sizes).resolve(world)
    views = build_mesh(plan, "cpu")
    made = time.perf_counter() - start
    groups = {tuple(dist.get_process_group_ranks(group)) for group in dist.distributed_c10d._world.pg_map}
    count = len(dist.distributed_c10d._world.pg_map)
    start = time.perf_counter()
    with torch.device("meta"):
        model = Decoder(PRESETS["dense_175b"])
    parallelize(model, model, plan, views, model.megascale_layout)
    queue.put((count, len(groups), made, time.perf_counter() - start, memory_mb() - before))


def main() -> None:
    table = Table("world", "groups a rank", "distinct rank sets", "mesh, s", "wrapping 175B, s", "peak memory, MB", title="fake ranks")
    context = multiprocessing.get_context("fork")
    for name in WORLDS:
        queue = context.Queue()
        process = context.Process(target=one_rank, args=(name, queue))
        process.start()
        count, distinct, made, wrapped, memory = queue.get(timeout=600)
        process.join()
        table.add_row(name, str(count), str(distinct), f"{made:.2f}", f"{wrapped:.2f}", f"{memory:.0f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
