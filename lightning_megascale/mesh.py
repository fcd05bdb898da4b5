"""build_mesh: a resolved plan becomes a DeviceMesh and its named views. Every mesh call that torch does not document lives here.

Axes, outermost to innermost: pp, dp_replicate, dp_shard, cp, tp. An axis of size 1 owns no communicator, except dp_shard, on which
FSDP2 always stands. A view over several axes is flattened once; a view that covers a single axis is that axis, so equal rank sets
share one group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_megascale.plan import ParallelPlan
from lightning_megascale.plan_rules import ulysses_size

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class MeshViews:
    """The root mesh of a run and its views.

    Args:
        root: the N-D mesh of the axes above size 1 (and dp_shard).
        sizes: size of every axis.
        batch: view dp_replicate x dp_shard: who gets other rows. Samplers and metrics follow it.
        loss: view batch x cp: who counts other tokens.
        data: 1-D (dp_shard x cp) or 2-D (dp_replicate, dp_shard x cp) mesh for ``fully_shard``.
        tensor: the tp axis, or None.
        pipeline: the pp axis, or None.
        context: the cp axis, or None.
        context_ring, context_heads: its two factors, where heads are exchanged inside groups whose keys travel between them.
    """

    root: DeviceMesh
    sizes: dict[str, int]
    batch: DeviceMesh
    loss: DeviceMesh
    data: DeviceMesh
    tensor: DeviceMesh | None
    pipeline: DeviceMesh | None = None
    context: DeviceMesh | None = None
    context_ring: DeviceMesh | None = None
    context_heads: DeviceMesh | None = None

    @property
    def data_parallel_size(self) -> int:
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's share of the batch: the same for all its tensor-, pipeline- and context-parallel peers."""
        return self.batch.get_local_rank()

    @property
    def context_rank(self) -> int:
        """Which part of each row this rank holds."""
        return 0 if self.context is None else self.context.get_local_rank()

    @property
    def token_rank(self) -> int:
        """Index of this rank's share of the tokens: the same for all its tensor- and pipeline-parallel peers."""
        return self.data_parallel_rank * self.sizes["cp"] + self.context_rank

    def replica_ranks(self, pipeline_rank: int | None = None) -> list[int]:
        """The global ranks that work on this rank's rows, in mesh order.

        Args:
            pipeline_rank: only those at this place of the pipeline axis; None: all.
        """
        places = zip(self.root.mesh_dim_names or (), self.root.get_coordinate() or ())
        found = self.root.mesh[tuple(place if name in ("dp_replicate", "dp_shard") else slice(None) for name, place in places)]
        if pipeline_rank is not None:
            found = found.sort(0).values[pipeline_rank]  # pp is outermost, and torch's groups count ranks in ascending order
        ranks: list[int] = found.flatten().tolist()
        return ranks

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        return None if self.tensor is None else self.tensor.get_group()


def build_mesh(
    plan: ParallelPlan, device_type: str, ranks: Sequence[int] | torch.Tensor | None = None, keep: Sequence[str] = ()
) -> MeshViews:
    """Builds the mesh of a resolved plan; every rank must call it with equal arguments.

    Args:
        plan: a resolved plan.
        device_type: "cpu" or "cuda".
        ranks: which global rank stands at each place of the flattened mesh; None: rank i at place i.
        keep: axes of size 1 that get a dimension (and a group of one rank) all the same.

    Raises:
        ValueError: when ``ranks`` is no permutation of the world, or ranks of a group are not in ascending order.
    """
    sizes = {
        "pp": plan.pipeline_parallel_size,
        "dp_replicate": plan.data_parallel_replicate_size,
        "dp_shard": int(plan.data_parallel_shard_size),
        "cp": plan.context_parallel_size,
        "tp": plan.tensor_parallel_size,
    }
    names = tuple(name for name in AXES if sizes[name] > 1 or name == "dp_shard" or name in keep)
    world = torch.tensor([sizes[name] for name in names]).prod().item()
    order = torch.arange(int(world)) if ranks is None else torch.as_tensor(ranks).flatten().to(torch.int64)
    if sorted(order.tolist()) != list(range(int(world))):
        raise ValueError(f"placement must name each of the {world} ranks once, in mesh order; got {order.tolist()[:16]}")
    grid = order.reshape([sizes[name] for name in names])
    _check_ascending(grid, names)
    root = DeviceMesh(device_type, grid, mesh_dim_names=names)
    batch = _view(root, ("dp_replicate", "dp_shard"), "batch")
    loss = _view(root, ("dp_replicate", "dp_shard", "cp"), "loss") if "cp" in names else batch
    shard = _view(root, ("dp_shard", "cp"), "fsdp")
    data = shard if "dp_replicate" not in names else root["dp_replicate", _name(shard)]
    tensor, pipeline, context = (root[name] if name in names else None for name in ("tp", "pp", "cp"))
    ring = heads = None
    if context is not None and plan.context_parallel_method == "ring+ulysses":
        inner = ulysses_size(context.size())
        split = context._unflatten(0, (context.size() // inner, inner), ("cp_ring", "cp_heads"))
        ring, heads = split["cp_ring"], split["cp_heads"]
    return MeshViews(root, sizes, batch, loss, data, tensor, pipeline, context, ring, heads)


def _check_ascending(grid: torch.Tensor, names: tuple[str, ...]) -> None:
    """torch's groups count ranks in ascending order: where the mesh has another, a rank would take another's place without an error."""
    joined = [("dp_replicate", "dp_shard"), ("dp_replicate", "dp_shard", "cp"), ("dp_shard", "cp")]
    for wanted in [(name,) for name in names] + joined:
        axes = [names.index(name) for name in wanted if name in names]
        kept = [axis for axis in range(len(names)) if axis not in axes]
        for group in grid.permute(kept + axes).reshape(-1, math.prod(grid.shape[axis] for axis in axes)).tolist():
            if group != sorted(group):
                along = " x ".join(names[axis] for axis in axes)
                raise ValueError(
                    f"placement puts the ranks {group[:16]} along {along} in this order: they must ascend, since torch's groups count"
                    " them so; exchange them, or have the launcher number the processes in the order that is wanted"
                )


@dataclass(frozen=True)
class ExpertViews:
    """The ranks of dp_shard x cp x tp, regrouped for experts.

    Args:
        shard: 1-D (expert_shard) or 2-D (dp_replicate, expert_shard) mesh for ``fully_shard`` of experts.
        expert: the ep axis: ranks that hold other experts; None where each holds all.
    """

    shard: DeviceMesh
    expert: DeviceMesh | None


def expert_views(views: MeshViews, expert_parallel_size: int) -> ExpertViews:
    """Makes the views of experts; every rank must call it.

    Args:
        views: the run's mesh.
        expert_parallel_size: ep, a divisor of dp_shard x cp x tp. Neighbours in the mesh are one group: ep = tp is the tp axis itself.

    Raises:
        ValueError: on all ranks, for a placement under which the ranks of a group are not in ascending order, which is the order in which
            torch's groups count them.
    """
    root = views.root
    for group in root.mesh.reshape(-1, expert_parallel_size).tolist():
        if group != sorted(group):
            raise ValueError(
                f"placement gives expert_parallel_size={expert_parallel_size} neighbours of the mesh the ranks {group[:8]}: they must be "
                "in ascending order, since torch's groups count them so and experts lie on them in that order"
            )
    if expert_parallel_size == views.sizes["tp"] > 1:
        return ExpertViews(views.data, root["tp"])
    inner, expert = _view(root, ("dp_shard", "cp", "tp"), "inner"), None
    shard = inner
    if expert_parallel_size > 1:
        split = inner._unflatten(0, (inner.size() // expert_parallel_size, expert_parallel_size), ("expert_shard", "ep"))
        shard, expert = split["expert_shard"], split["ep"]
    if views.sizes["dp_replicate"] > 1:
        shard = DeviceMesh._concatenate([root["dp_replicate"], shard])
    return ExpertViews(shard, expert)


def compatible_mesh(views: MeshViews) -> DeviceMesh:
    """A 2-D view ("data_parallel", "tensor_parallel") for a ``configure_model`` written for Lightning's ModelParallelStrategy.

    It makes no new group: the two dims are this rank's fsdp view and tp axis. Needs a tp axis (``keep=("tp",)``).
    """
    assert views.tensor is not None
    shard = views.data if views.data.ndim == 1 else views.data[_name(views.data)]
    rows, columns = shard.mesh.tolist(), views.tensor.mesh.tolist()
    names = ("data_parallel", "tensor_parallel")
    whole = views.root.mesh
    axes = list(views.root.mesh_dim_names or ())
    fixed = tuple(slice(None) if name in ("dp_shard", "cp", "tp") else int(views.root.get_local_rank(name)) for name in axes)
    grid = whole[fixed].reshape(len(rows), len(columns))
    return DeviceMesh.from_group([shard.get_group(), views.tensor.get_group()], views.root.device_type, mesh=grid, mesh_dim_names=names)


def _view(root: DeviceMesh, wanted: tuple[str, ...], name: str) -> DeviceMesh:
    """The flattened view over those wanted axes that exist; a single one is the axis itself."""
    present = tuple(axis for axis in wanted if axis in (root.mesh_dim_names or ()))
    return root[present[0]] if len(present) == 1 else root[present]._flatten(name)


def _name(mesh: DeviceMesh) -> str:
    """Name of the last dim."""
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names[-1]
