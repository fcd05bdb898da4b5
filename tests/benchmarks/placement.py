"""Placement on a real InfiniBand fabric: the slowest link of a step against Slurm's order of nodes and a random one.

Run: ``python -m tests.benchmarks.placement [subsets=100] [seed=0] [processes=1] [file=DUMP]``; DUMP, as ibnetdiscover prints it, is by
default topograph_example.out of NVIDIA/topograph's tests.

Each subset is 16 to 64 of the fabric's nodes, drawn at random, as a scheduler of a busy cluster might give them. Slurm's order is that of
the sorted host names with the mesh's own order of axes; random is one random order of the nodes. A ratio is the slowest link's time of that
order over the planner's, so 1 says that the order does not matter. Bytes are those of a step of the plan in the table's row.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_megascale.topology.cluster import Cluster
from lightning_megascale.topology.describe import load_cluster
from lightning_megascale.topology.fabric import Fabric
from lightning_megascale.topology.infiniband import read_ibnetdiscover
from lightning_megascale.topology.placement import evaluate, place
from lightning_megascale.topology.placement_groups import Traffic
from tests.topology.real_files import FOLDER

GB = 1e9
COUNTS = (16, 24, 32, 48, 64)  # nodes of four GPUs
# 70e9 parameters of 80 layers, width 8192, 8 microbatches of 8192 tokens; all-gathers twice and a reduce-scatter of 2 bytes a parameter.
LAYER_GB = 8192 * 8192 * 2 / GB  # one microbatch's activations at a layer's edge


def dense(gpus: int) -> tuple[dict[str, int], int | None, list[Traffic]]:
    """pp 2, tp 4: parameters over dp_shard once a step, activations over tp (4 gathers or scatters a layer, twice), edges over pp."""
    sent = [
        Traffic("tp", "ring", 8 * 40 * 8 * LAYER_GB * 3 / 4 * GB),
        Traffic("fsdp", "ring", 3 * 2 * 70 / 8 * GB),
        Traffic("pp", "chain", 8 * LAYER_GB / 4 * GB),
    ]
    return {"pp": 2, "dp_shard": gpus // 8, "tp": 4}, None, sent


def replicated(gpus: int) -> tuple[dict[str, int], int | None, list[Traffic]]:
    """pp 2, dp_shard 4, tp 4, the rest dp_replicate: an all-reduce of gradients over replicas on top."""
    sizes, _, sent = dense(gpus)
    return {**sizes, "dp_shard": 4, "dp_replicate": gpus // 32}, None, [*sent, Traffic("dp_replicate", "ring", 2 * 4 * 70 / 32 * GB)]


def experts(gpus: int) -> tuple[dict[str, int], int | None, list[Traffic]]:
    """pp 2, ep 16: 40 layers a stage, 8 microbatches of 8192 tokens over 16 ranks, top 4, there and back, forward and backward."""
    sent = [
        Traffic("ep", "alltoall", 4 * 40 * 8 * 4 * LAYER_GB / 16 * GB),
        Traffic("expert_shard", "ring", 3 * 2 * 200 / 32 * GB),
        Traffic("fsdp", "ring", 3 * 2 * 10 / 2 * GB),
        Traffic("pp", "chain", 8 * LAYER_GB / 16 * GB),
    ]
    return {"pp": 2, "dp_shard": gpus // 2}, 16, sent


def long_context(gpus: int) -> tuple[dict[str, int], int | None, list[Traffic]]:
    """cp 8, tp 4: keys and values of 8 heads of 128 for 131,072 tokens travel around cp in every layer, forward and backward."""
    sent = [
        Traffic("cp", "ring", 80 * 3 * 7 * 131072 / 8 * 2 * 8 * 128 * 2 / 4),
        Traffic("tp", "ring", 8 * 80 * 131072 / 8 * 8192 * 2 * 3 / 4),
        Traffic("fsdp", "ring", 3 * 2 * 70 / 4 * GB),
    ]
    return {"dp_shard": gpus // 32, "cp": 8, "tp": 4}, None, sent


PLANS: tuple[Callable[[int], tuple[dict[str, int], int | None, list[Traffic]]], ...] = (dense, replicated, experts, long_context)


def clusters(fabric: Fabric) -> dict[str, Cluster]:
    """Three readings: trays of racks that share NVLink; trays alone; and those with a quarter of the uplinks (assumed)."""
    like = load_cluster("gb200_nvl72")
    racks = {node.name: node.name.rsplit("-", 1)[0] for node in fabric.nodes}
    alone = fabric.cluster(like, domains={node.name: node.name for node in fabric.nodes})
    thin = tuple(dataclasses.replace(switch, uplink_gb_per_s=switch.uplink_gb_per_s / 4) for switch in alone.switches)
    return {
        "NVLink racks": fabric.cluster(like, domains=racks),
        "trays": alone,
        "trays, uplinks / 4": dataclasses.replace(alone, switches=thin),
    }


def compare(cluster: Cluster, plan: Callable[[int], tuple[dict[str, int], int | None, list[Traffic]]], shuffled: np.ndarray) -> list[float]:
    """Slurm's time and the random order's over the planner's, the planner's gap to its bound (0: none), its seconds, and the search's."""
    sizes, ep, sent = plan(cluster.num_gpus)
    begin = time.perf_counter()
    best = place(cluster, sizes, sent, ep=ep)
    took = time.perf_counter() - begin
    slurm = evaluate(cluster, sizes, sent, ep=ep)
    random = evaluate(cluster, sizes, sent, ep=ep, node_order=shuffled.tolist())
    return [slurm.seconds / best.seconds, random.seconds / best.seconds, best.gap or 0.0, best.seconds, took]


def compare_all(subset: tuple[Fabric, np.ndarray]) -> dict[tuple[str, str], list[float]]:
    """Every reading of the fabric with every plan."""
    some, shuffled = subset
    return {(name, plan.__name__): compare(cluster, plan, shuffled) for name, cluster in clusters(some).items() for plan in PLANS}


def subsets(fabric: Fabric, count: int, seed: int) -> list[tuple[Fabric, np.ndarray]]:
    """(fabric of some nodes by name, a random order of them)."""
    generator = np.random.default_rng(seed)
    by_name = sorted(fabric.nodes, key=lambda node: node.name)
    found = []
    for _ in range(count):
        size = int(generator.choice(COUNTS))
        chosen = sorted(generator.choice(len(by_name), size, replace=False).tolist())
        some = dataclasses.replace(fabric, nodes=tuple(by_name[number] for number in chosen))
        found.append((some, generator.permutation(size)))
    return found


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    count, seed = int(given.get("subsets", 100)), int(given.get("seed", 0))
    fabric = read_ibnetdiscover(given.get("file", FOLDER / "topograph_example.out"), nodes="*-dgx-*")
    found: dict[tuple[str, str], list[list[float]]] = {}
    with ProcessPoolExecutor(int(given.get("processes", 1))) as pool:
        for rows in pool.map(compare_all, subsets(fabric, count, seed)):
            for key, row in rows.items():
                found.setdefault(key, []).append(row)
    heads = ("fabric", "plan", "Slurm / planner: mean ± sd", "median", "worst", "random / planner: mean ± sd", "median", "worst")
    table = Table(*heads, "proven best", "worst gap", "search s", title=f"slowest link of a step, n = {count} random subsets, seed {seed}")
    for (name, plan_name), rows in found.items():
        values = np.array(rows)
        ratios = [
            text
            for column in (0, 1)
            for text in (
                f"{values[:, column].mean():.3f} ± {values[:, column].std():.3f}",
                f"{np.median(values[:, column]):.3f}",
                f"{values[:, column].max():.3f}",
            )
        ]
        table.add_row(name, plan_name, *ratios, f"{(values[:, 2] == 1).sum()}", f"{values[:, 2].max():.3f}", f"{values[:, 4].mean():.2f}")
    Console(width=190).print(table)


if __name__ == "__main__":
    main()
