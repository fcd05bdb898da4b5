"""Data parallelism: FSDP2, HSDP and plain replication are one ``fully_shard`` over the right mesh. Gradients are sums, never means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves

from lightning_megascale.mesh import MeshViews


def apply_data_parallel(
    roots: Iterable[nn.Module],
    blocks: Iterable[nn.Module],
    views: MeshViews,
    *,
    reshard_after_forward: bool | int | str = "auto",
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
    pipelined: bool = False,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shards every block as one unit and what is left of each root as another; experts that regroup the ranks are units inside of blocks.

    Args:
        roots: modules whose forward the step calls.
        blocks: the repeated layers below the roots, in module order.
        views: the run's mesh; its ``data`` view may have shard size 1 (plain replication) or replicate size 1 (FSDP2).
        reshard_after_forward: "auto" frees a block's parameters after its forward and keeps the root's; True frees both, False
            none, a number reshards blocks to groups of that size.
        param_dtype: dtype of forward and backward; None: that of the parameters. Outputs of a root are float32 then.
        reduce_dtype: dtype in which gradients are summed over ranks.
        cpu_offload: parameters, gradients and optimizer state stay in host memory.
        pipelined: the roots are pipeline stages: "auto" keeps all parameters until the schedule ends, since every microbatch needs them;
            what leaves a stage keeps its dtype, and the last stage's output is cast where the loss is computed.
        experts: modules of experts that lie on a mesh of their own, ``expert_mesh``.
    """
    policy: dict[str, Any] = {"offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy()}
    block_policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    output_dtype = torch.float32 if param_dtype is not None and not pipelined else None
    root_policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=output_dtype)
    block_reshard: bool | int = not pipelined if reshard_after_forward == "auto" else reshard_after_forward  # type: ignore[assignment]
    root_reshard = reshard_after_forward is True
    for module in experts:
        assert expert_mesh is not None
        # what they are called with is in the right dtypes already, and weights of tokens stay as exact as the router made them
        exact = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        placement = _second_dim if _better_by_features(module, expert_mesh) else None
        fully_shard(module, mesh=expert_mesh, reshard_after_forward=block_reshard, mp_policy=exact, shard_placement_fn=placement, **policy)
    blocks, apart = list(blocks), {id(module) for module in experts}
    units = {f"block {number}": block.named_modules() for number, block in enumerate(blocks)}
    names = shared_between({name: [(key, child) for key, child in found if id(child) not in apart] for name, found in units.items()})
    if names:  # of a pipeline stage; without one it was seen before any rank was asked
        raise ValueError(
            f"{' and '.join(names[0])} of this rank are one module in blocks that are sharded apart: give each block its own, or cut the "
            "pipeline so that each stage has one of them"
        )
    for block in blocks:
        policy["ignored_params"] = _without_dims(block)
        fully_shard(block, mesh=views.data, reshard_after_forward=block_reshard, mp_policy=block_policy, **policy)
        _look_once(block)
    for root in roots:
        if not isinstance(root, FSDPModule):
            policy["ignored_params"] = _without_dims(root)
            fully_shard(root, mesh=views.data, reshard_after_forward=root_reshard, mp_policy=root_policy, **policy)
            _look_once(root)
            if not pipelined:
                root.register_forward_hook(_drop_whole_copy)


def shared_between(units: Mapping[str, Iterable[tuple[str, nn.Module]]]) -> list[tuple[str, str]]:
    """Both names of every module with parameters of its own that two units hold.

    Args:
        units: name of each unit -> its modules, by their names inside of it.
    """
    holders: dict[int, tuple[str, str]] = {}
    found = []
    for unit, modules in units.items():
        for key, child in modules:
            if not any(True for _ in child.parameters(recurse=False)):
                continue
            name = f"{unit}.{key}".rstrip(".")
            first = holders.setdefault(id(child), (unit, name))
            if first[0] != unit:
                found.append((first[1], name))
    return found


def _better_by_features(module: nn.Module, mesh: DeviceMesh) -> bool:
    """Whether the ranks that share a rank's experts cannot have equally many of them, and can have equal parts of each."""
    size = mesh.size(mesh.ndim - 1)
    shapes = [(p.to_local() if isinstance(p, DTensor) else p).shape for p in module.parameters()]
    return any(shape[0] % size for shape in shapes) and all(len(shape) > 1 and shape[1] % size == 0 for shape in shapes)


def _second_dim(parameter: nn.Parameter) -> Shard:
    return Shard(1)


def prefetch_in_order(roots: Iterable[nn.Module], blocks: Iterable[nn.Module]) -> None:
    """Tells the units of blocks with experts what comes next: FSDP2's own order sees the experts of a block only once it is there. Units of
    one root only: another root (a rank's other pipeline stage) runs at its own time."""
    inside = {id(unit) for block in blocks for unit in units_of(block)}
    for root in roots:
        order = [unit for unit in units_of(root) if id(unit) in inside]
        for unit, following in zip(order, order[1:]):
            unit.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([unit])


def _look_once(unit: nn.Module) -> None:
    """At the first call with gradients: FSDP2 finds the tensors of an output by looking into containers that torch knows. What hides in
    another object would keep its unit from reducing any gradient."""

    def look(module: nn.Module, _: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        for leaf in tree_leaves(output):
            hidden = vars(leaf) if hasattr(leaf, "__dict__") and not isinstance(leaf, (torch.Tensor, nn.Module, type)) else {}
            if not is_dataclass(leaf) and any(isinstance(value, torch.Tensor) and value.requires_grad for value in hidden.values()):
                raise ValueError(
                    f"{type(module).__name__} returns its tensors in a {type(leaf).__name__}, in which sharding does not find them, so its "
                    "gradients would not be summed: return a tensor, tuple, dict, dataclass or ModelOutput"
                )

    handle = unit.register_forward_hook(look)


def _without_dims(module: nn.Module) -> set[nn.Parameter]:
    """Single numbers (a temperature) have nothing to shard: they stay whole, and their gradients are summed once per step."""
    return {parameter for parameter in module.parameters() if parameter.ndim == 0}


def _drop_whole_copy(root: nn.Module, *_: Any) -> None:
    """No backward follows a forward without gradients, so nothing else would free the gathered parameters, which then grow stale."""
    if not torch.is_grad_enabled():
        root.reshard()  # type: ignore[operator]


def sum_gradients(units: Iterable[FSDPModule]) -> None:
    """Makes every unit add gradients up over its ranks instead of averaging them; the one scale comes later (loss_scale.py)."""
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # the factor alone asks gloo for PREMUL_SUM, which it lacks


def units_of(module: nn.Module) -> list[FSDPModule]:
    """All FSDP2 units at or below a module, in module order."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


@contextmanager
def postponed_reduction(units: list[FSDPModule], last_only: bool) -> Iterator[None]:
    """Gradients of the backwards inside are kept back and join the next reduction outside.

    Args:
        units: all FSDP2 units.
        last_only: True keeps them unsharded on each rank (no communication); False adds them up over the shards and postpones
            only the sum over replicas (no memory).
    """
    for unit in units:
        if last_only:
            unit.set_requires_gradient_sync(False, recurse=False)
        else:
            unit.set_requires_all_reduce(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.set_requires_all_reduce(True, recurse=False)


class GatherRows(torch.autograd.Function):
    """(rank 0's tensor, rank 1's, ...) stacked; backward adds up what every rank's loss says of this rank's tensor.

    Losses are weighted so that their sum over ranks is the loss, hence the sum of gradients is the gradient.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor.contiguous(), group=group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


@dataclass(frozen=True)
class Remaining:
    """Parameters whose gradients no unit's reduction completes, by the axes that are missing.

    Args:
        tensor: parts of a sum over the tensor-parallel axis.
        loss: not reduced over any data axis (outside every FSDP2 unit).
        replicate: reduced over the shards, not over the replicas (sharded by the user on ``mesh["data_parallel"]``).
    """

    tensor: list[nn.Parameter]
    loss: list[nn.Parameter]
    replicate: list[nn.Parameter]


def remaining(parameters: Iterable[nn.Parameter], partial: set[int], views: MeshViews) -> Remaining:
    """Sorts parameters by the reductions their gradients still need.

    Args:
        parameters: those about to be stepped, in an order that is equal on all ranks.
        partial: ids of those whose gradient is this rank's part of a sum over the tensor-parallel axis.
        views: the run's mesh.
    """
    over = Remaining([], [], [])
    for parameter in parameters:
        covered = set(parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else set()
        if id(parameter) in partial:
            over.tensor.append(parameter)
        if not covered & {"dp_shard", "fsdp", "data_parallel", "expert_shard", "inner"}:
            over.loss.append(parameter)
        elif views.sizes["dp_replicate"] > 1 and "dp_replicate" not in covered:
            over.replicate.append(parameter)
    return over


def reduce_remaining(over: Remaining, parameters: Iterable[nn.Parameter], views: MeshViews) -> None:
    """Adds up the gradients that no unit's reduction covers: one flat all-reduce for each kind and dtype, in place."""
    for parameter in parameters:
        _settle_partial(parameter)
    if views.tensor is not None and views.tensor.size() > 1:
        _all_reduce_flat(over.tensor, views.tensor.get_group())
    if views.loss.size() > 1:
        _all_reduce_flat(over.loss, views.loss.get_group())
    if over.replicate:
        _all_reduce_flat(over.replicate, views.root["dp_replicate"].get_group())


def _settle_partial(parameter: nn.Parameter) -> None:
    """Torch's own tensor-parallel styles may leave a gradient as a pending sum: carry it out."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
        wanted = [Replicate() if now.is_partial() else now for now in grad.placements]
        parameter.grad = grad.redistribute(grad.device_mesh, wanted)


def _all_reduce_flat(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sums the gradients over the group in place, one message for each dtype; ranks hold equal shapes in equal order."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    for dtype in dict.fromkeys(tensor.dtype for tensor in local):
        same = [tensor for tensor in local if tensor.dtype == dtype and tensor.numel()]
        if not same:
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same])):
            tensor.copy_(part.view_as(tensor))
