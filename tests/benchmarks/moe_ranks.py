"""Expert parallelism on ranks: this package's experts against a loop written by hand of all_to_all_single and grouped_mm.

Run: ``python -m tests.benchmarks.moe_ranks [ranks=4] [rounds=9] [turns=6] [shape=1024x256x512x16x2]``; a shape is tokens of a rank x
width x feed-forward x experts x experts of a token.

Both hold the same experts and take turns inside one run, the order changing each round; a turn is some forwards and backwards with
gradients of hidden states, of the weights of the choice and of parameters. Ratios are medians of the ratios inside a round, by hand /
ours (above 1: ours is faster), wall time of the slowest rank and processor time of all ranks, with their 95% bootstrap interval.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_megascale.models.moe import GroupedExperts
from lightning_megascale.ops.dispatch import ExpertRanks
from lightning_megascale.ops.tensor_parallel import tensor_axis
from lightning_megascale.parallel.expert import SharedExperts, SharedState
from lightning_megascale.parallel.mixin import become
from tests.benchmarks.overhead import interval
from tests.harness import run_ranks


class ByHand(nn.Module):
    """What people write: sort by expert, exchange counts, exchange rows, sort again, multiply, and all of it back."""

    def __init__(self, experts: GroupedExperts, each: int) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.each = experts.gate_up_proj, experts.down_proj, each

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        world, group, top_k = dist.get_world_size(), dist.group.WORLD, indices.shape[1]
        flat = indices.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=world * self.each)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sends, receives = counts.view(world, -1).sum(1).tolist(), theirs.view(world, -1).sum(1).tolist()
        rows = collectives.all_to_all_single_autograd(hidden[order // top_k], receives, sends, group)
        ids = torch.arange(self.each).repeat(world).repeat_interleave(theirs)
        again = ids.argsort(stable=True)
        offsets = torch.bincount(ids, minlength=self.each).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows[again], self.gate_up_proj.transpose(1, 2), offs=offsets).chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=offsets)
        back = collectives.all_to_all_single_autograd(made[again.argsort()], sends, receives, group)
        return torch.zeros_like(hidden).index_add(0, order // top_k, back * weights.flatten()[order, None])


def contenders(shape: tuple[int, ...]) -> dict[str, nn.Module]:
    _, width, inner, experts, _ = shape
    each = experts // dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    ours = GroupedExperts(each, width, inner)
    by_hand = ByHand(ours, each)
    assert dist.group.WORLD is not None
    ranks = ExpertRanks(experts, tensor_axis(dist.group.WORLD))
    ours.num_experts = experts
    become(ours, SharedExperts).ep = SharedState(ranks, "alltoall", None)
    return {"ours": ours, "by hand": by_hand}


def measure(shape: tuple[int, ...], rounds: int, turns: int) -> dict[str, Any]:
    """On every rank: (seconds, processor seconds) of each round, by contender; and how far their results differ."""
    tokens, width, _, experts, top_k = shape
    modules = contenders(shape)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weights = torch.rand(tokens, top_k, generator=generator).requires_grad_()
    indices = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    gradient = torch.randn(tokens, width, generator=generator)
    off = (modules["ours"](hidden, indices, weights) - modules["by hand"](hidden, indices, weights)).abs().max()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in modules}
    for number in range(rounds + 1):
        for name in list(modules)[:: 1 if number % 2 else -1]:
            dist.barrier()
            begin = time.perf_counter(), time.process_time()
            for _ in range(turns):
                modules[name](hidden, indices, weights).backward(gradient)
            dist.barrier()
            if number:
                times[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    return {**times, "off": float(off)}


def main(arguments: list[str]) -> None:
    given = {"ranks": "4", "rounds": "9", "turns": "6", "shape": "1024x256x512x16x2"}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in given:
            sys.exit(f"no argument {key!r}; arguments are {', '.join(given)}")
        given[key] = value
    shape = tuple(int(size) for size in given["shape"].split("x"))
    results = run_ranks(measure, int(given["ranks"]), shape, int(given["rounds"]), int(given["turns"]), timeout=580)
    table = Table("ranks", "shape", "time", "ours, s", "by hand, s", "by hand / ours")
    for what, index, join in (("wall", 0, max), ("processor", 1, sum)):
        ours, theirs = ([join(turn[index] for turn in turns) for turns in zip(*(r[name] for r in results))] for name in ("ours", "by hand"))
        ratios = [b / a for a, b in zip(ours, theirs)]
        middle, low, high = interval(ratios)
        row = (given["ranks"], given["shape"], what, f"{statistics.median(ours):.3f}", f"{statistics.median(theirs):.3f}")
        table.add_row(*row, f"{middle:.3f} [{low:.3f}, {high:.3f}]")
    Console().print(table)
    print(f"largest difference of results: {max(result['off'] for result in results):.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])
