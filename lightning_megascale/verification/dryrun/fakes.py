"""A world of any size seen by one of its ranks, without the others: torch's fake process group, and what would read an answer of theirs.

Everything here changes this process for good, so it runs in one that was forked for it; torch caches names of groups, so a process can be
one rank of one world only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_megascale.models import moe
from lightning_megascale.ops import dispatch
from lightning_megascale.ops.tensor_parallel import TensorAxis, finish_gather, start_gather
from lightning_megascale.parallel import expert, parallelize, tensor_proof
from lightning_megascale.parallel.pipeline_schedule import CallStage

VOTES = ("_warmup_forward_vote", "_warmup_backward_result")
"""Private to torch: pipeline stages vote whether all of them were given the shapes of their messages; ours always are."""
_HOST = "<host of a fake rank>"


class _Yes:
    def item(self) -> int:
        return 1


def _vote(*_: Any, **__: Any) -> _Yes:
    return _Yes()


def become_rank(rank: int, world_size: int, ranks_per_node: int = 8) -> None:
    """Makes this process the rank ``rank`` of ``world_size``; collectives return at once and change nothing.

    Args:
        rank, world_size: of the run.
        ranks_per_node: neighbouring ranks that say they share a host.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    for name in VOTES:
        setattr(CallStage, name, _vote)
    tensor_proof._enabled = False  # compares numbers, and there are none

    def all_alike(found: list[Any], own: Any, group: Any = None) -> None:
        """Objects of other ranks are as this rank's, but for the names of hosts."""
        members = dist.get_process_group_ranks(group) if group is not None else range(world_size)
        found[:] = [f"host {member // ranks_per_node}" for member in members] if own == _HOST else [own] * len(found)

    dist.all_gather_object = all_alike  # type: ignore[assignment]
    expert.host_name = lambda: _HOST
    for module, name in ((parallelize, "expert_views"), (expert, "_nodes")):
        setattr(module, name, _once(getattr(module, name)))
    _balance_experts()
    torch.nn.functional.rms_norm = _FusedNorm.normalize  # type: ignore[assignment]


class _FusedNorm(torch.autograd.Function):
    """What a GPU's kernel keeps of an RMS norm: its input and a number for each token. The CPU's is made of parts, which keep copies of the
    input in float32. Nothing is computed."""

    @staticmethod
    def normalize(x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None) -> torch.Tensor:
        return _FusedNorm.apply(x, weight)  # type: ignore[no-any-return]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _once(make: Callable[..., Any]) -> Callable[..., Any]:
    """The groups of experts are made for the first model of this process; further ones share them."""
    made: dict[tuple[int, ...], tuple[Any, tuple[Any, ...]]] = {}

    def call(*args: Any) -> Any:
        key = tuple(map(id, args))
        if key not in made:
            made[key] = (make(*args), args)  # the arguments stay alive, so that no other gets the same id
        return made[key][0]

    return call


def _balance_experts() -> None:
    """Every expert gets as many tokens: the dispatcher's one read of counts on the host, which are known beforehand then."""
    moe.check_choice = expert.check_choice = lambda *_: None  # looks at indices, and there are none
    sort, seen = dispatch._by_expert, [(0, 0, 1)]

    def noted(indices: torch.Tensor, num_experts: int) -> Any:
        seen[0] = (*indices.shape, num_experts)  # type: ignore[assignment]
        return sort(indices, num_experts)

    def shares(counts: torch.Tensor, axis: TensorAxis) -> list[list[int]]:
        tokens, top_k, experts = seen[0]
        if axis.size > 1:
            finish_gather(start_gather(counts[None], axis), axis, 0)  # the message is sent all the same
        row = [tokens * top_k // experts + (place < tokens * top_k % experts) for place in range(experts)]
        nodes = counts.shape[0] - experts
        if nodes:  # tokens that cross to a node once
            away = dispatch.bytes_across(top_k, nodes, experts, once_a_node=True) / max(nodes - 1, 1)
            row += [round(tokens * away) if nodes > 1 else tokens] * nodes
        return [row] * axis.size

    def ids(counts: Sequence[Sequence[int]], like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(sum(map(sum, counts)), dtype=torch.int64)  # repeats by a tensor, whose numbers a fake one lacks

    dispatch._by_expert, dispatch._share_counts, dispatch._expert_ids = noted, shares, ids  # type: ignore[assignment]


def number_of_groups() -> int:
    """Process groups that this rank is a member of, the default one too."""
    return len(dist.distributed_c10d._world.pg_map)


def axes_of(meshes: Sequence[Any], module: torch.nn.Module) -> dict[str, str]:
    """Name of a process group -> axis.

    Args:
        meshes: all of them; the first that has a group names it, as the dim is called.
        module: whose experts may have groups for the hops inside of a node and between nodes.
    """
    world = dist.distributed_c10d._get_default_group().group_name
    found: dict[str, str] = {}
    for mesh in meshes:
        for dim, name in enumerate(mesh.mesh_dim_names or ()):
            found.setdefault(mesh.get_group(dim).group_name, name)
    found.setdefault(world, "world")
    for child in module.modules():
        ranks = getattr(getattr(child, "ep", None), "ranks", None)
        for axis, name in ((getattr(ranks, "inside", None), "ep in node"), (getattr(ranks, "across", None), "ep across nodes")):
            if axis is not None:
                found.setdefault(axis.name, name)
    return found
