"""Tokens to experts over slow links: the dispatchers, their bytes between nodes against the formula, and what "auto" picks.

Run as root: ``python -m tests.benchmarks.moe_links [nodes=2,4] [rate=200mbit] [top_k=2,8] [rounds=7] [tokens=512] [width=512] [each=2]``.

Every node is a network namespace whose link is shaped to ``rate``, with ``each`` ranks in it. A turn is one layer's forward: tokens to 16
experts that return them as they came, and back. Dispatchers take turns in one run; figures are medians, ratios are medians of the ratios
inside a round. Bytes are what the node's device sent in a turn (headers too), against ``bytes_across`` for experts chosen evenly.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_megascale.ops.dispatch import ExpertRanks, Tokens, bytes_across, choose_dispatcher, find_dispatcher
from lightning_megascale.ops.tensor_parallel import TensorAxis, tensor_axis
from tests import links

NAMES = ("alltoall", "two_hop", "two_hop_dedup")
EXPERTS, EACH = 16, 2


def ranks_here() -> ExpertRanks:
    """All ranks share the experts; which of them share a node is what the node says."""
    world, me = dist.get_world_size(), dist.get_rank()
    said: list[Any] = [None] * world
    dist.all_gather_object(said, int(os.environ["NODE"]))
    members = [[rank for rank, node in enumerate(said) if node == number] for number in range(max(said) + 1)]
    peers = [[part[place] for part in members] for place in range(len(members[0]))]
    axes: list[TensorAxis] = []
    for parts in (members, peers):
        groups = {tuple(part): dist.new_group(part) for part in parts}
        axes.append(tensor_axis(next(group for part, group in groups.items() if me in part)))
    assert dist.group.WORLD is not None
    return ExpertRanks(EXPERTS, tensor_axis(dist.group.WORLD), tuple(said), *axes)


def measure(top_ks: list[int], rounds: int, tokens: int, width: int) -> dict[str, Any]:
    """On every rank: seconds and bytes of each turn, by top-k and dispatcher."""
    ranks, found = ranks_here(), {}
    for top_k in top_ks:
        generator = torch.Generator().manual_seed(dist.get_rank())
        chosen = torch.rand(tokens, EXPERTS, generator=generator).topk(top_k).indices
        given = Tokens(torch.randn(tokens, width, generator=generator), chosen, torch.full((tokens, top_k), 1 / top_k))
        turns: dict[str, list[tuple[float, int]]] = {name: [] for name in NAMES}
        for number in range(rounds + 1):
            for name in NAMES[number % 3 :] + NAMES[: number % 3]:
                dist.barrier()
                sent, begin = links.sent_bytes(), time.perf_counter()
                out, _ = find_dispatcher(name)(given, ranks, lambda rows, ids, weights: rows * weights, None)
                took = time.perf_counter() - begin
                dist.barrier()
                torch.testing.assert_close(out, given.hidden)
                if number:  # the first opens connections
                    turns[name].append((took, links.sent_bytes() - sent))
        found[str(top_k)] = {"turns": turns, "auto": choose_dispatcher(top_k, ranks)}
    return found


def expected_bytes(top_k: int, count: int, tokens: int, width: int, name: str, each: int = EACH) -> float:
    """What a node sends in a turn: the tokens of its ranks, and the results of others' tokens, float32."""
    return 2 * each * tokens * width * 4 * bytes_across(top_k, count, EXPERTS, once_a_node=name == "two_hop_dedup")


def summary(results: list[dict[str, Any]], top_k: int) -> dict[str, tuple[float, float]]:
    """(median seconds of the slowest rank, median bytes of a node) by dispatcher."""
    found = {}
    for name in NAMES:
        by_rank = [result[str(top_k)]["turns"][name] for result in results]
        seconds = [max(turn[0] for turn in turns) for turns in zip(*by_rank)]
        found[name] = statistics.median(seconds), statistics.median(turn[1] for turns in by_rank for turn in turns)
    return found


def main(arguments: list[str]) -> None:
    given = {"nodes": "2,4", "rate": "200mbit", "top_k": "2,8", "rounds": "7", "tokens": "512", "width": "512", "each": f"{EACH}"}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in given:
            sys.exit(f"no argument {key!r}; arguments are {', '.join(given)}")
        given[key] = value
    reason = links.missing()
    if reason:
        sys.exit(f"cannot run: {reason}")
    top_ks = [int(k) for k in given["top_k"].split(",")]
    tokens, width, each = (int(given[name]) for name in ("tokens", "width", "each"))
    table = Table("nodes x ranks", "top-k", "dispatcher", "seconds", "alltoall / it", "MB sent by a node", "formula", "auto")
    for count in map(int, given["nodes"].split(",")):
        with links.nodes(count, given["rate"]) as nodes:
            results = nodes.run("tests.benchmarks.moe_links:measure", each, top_ks, int(given["rounds"]), tokens, width, timeout=600)
        for top_k in top_ks:
            found = summary(results, top_k)
            for name, (seconds, sent) in found.items():
                formula = expected_bytes(top_k, count, tokens, width, name, each)
                picked = "picked" if results[0][str(top_k)]["auto"] == name else ""
                ratio = found["alltoall"][0] / seconds
                row = (f"{count} x {each}", str(top_k), name, f"{seconds:.3f}", f"{ratio:.2f}", f"{sent / 1e6:.2f}", f"{formula / 1e6:.2f}")
                table.add_row(*row, picked)
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
