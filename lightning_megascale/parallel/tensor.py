"""Tensor and sequence parallelism by layout: own styles on local tensors, on modules whose code is not changed.

A parallel module keeps its class as a base and its names; its forward is one of tensor_styles.py. Split parameters are DTensors on the
1-D tensor-parallel mesh, so checkpoints and optimizers see logical shapes and FSDP2 can shard them further.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_megascale.layout import ModelLayout
from lightning_megascale.ops.tensor_parallel import TensorAxis, tensor_axis
from lightning_megascale.parallel.expert_balance import count_over, take_slice
from lightning_megascale.parallel.mixin import become
from lightning_megascale.parallel.tensor_check import check_tensor_parallel
from lightning_megascale.parallel.tensor_experts import DealtExperts, ExpertState
from lightning_megascale.parallel.tensor_roles import Roles, split_dim
from lightning_megascale.parallel.tensor_styles import (
    ColumnLinear,
    ColumnModule,
    ColumnState,
    EmbeddingState,
    Head,
    HeadState,
    LoneColumnLinear,
    LossHead,
    RowLinear,
    RowState,
    SequenceDropout,
    VocabularyEmbedding,
)

__all__ = ["apply_tensor_parallel", "check_tensor_parallel", "split_modules"]

Recompute = str | Collection[type] | None


def apply_tensor_parallel(
    model: nn.Module,
    mesh_tp: DeviceMesh,
    layout: ModelLayout,
    *,
    sequence_parallel: bool,
    recompute: Recompute,
    loss_parallel: bool = False,
    compiled: bool = False,
) -> list[str]:
    """Splits ``model`` over ``mesh_tp`` in place. No communication: every rank keeps its part of the values it has.

    Args:
        model: an ordinary model, on any device, meta included.
        mesh_tp: 1-D mesh of the tensor-parallel ranks.
        layout: which module plays which role.
        sequence_parallel: norms, dropout and the residual stream are split over the sequence (Megatron-LM).
        recompute: what ``apply_recompute`` will be told: modules that are recomputed keep no shard to gather again.
        loss_parallel: the head returns (B, L, V/tp) logits instead of (B, L, V).
        compiled: the blocks will be compiled: leaves out the checks of the first forward that a compiler cannot trace.

    Returns:
        names of the parameters whose local gradients are partial sums over tp. The caller adds them over the axis once per step.

    Raises:
        ValueError: listing every violated rule.
    """
    wrong = check_tensor_parallel(model, layout, mesh_tp.size(), sequence_parallel)
    if wrong:
        raise ValueError("tensor parallelism cannot be applied:\n" + "\n".join(f"- {line}" for line in wrong))
    return split_modules(
        model,
        mesh_tp,
        Roles.of(model, layout),
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        loss_parallel=loss_parallel,
        compiled=compiled,
    )


def split_modules(
    model: nn.Module,
    mesh_tp: DeviceMesh,
    roles: Roles,
    *,
    sequence_parallel: bool,
    recompute: Recompute = None,
    loss_parallel: bool = False,
    compiled: bool = False,
) -> list[str]:
    """``apply_tensor_parallel`` of a model whose rules were checked, or of a part of one."""
    axis = tensor_axis(mesh_tp.get_group())
    _split_parameters(model, mesh_tp, roles)
    _divide_attributes(model, roles, axis.size)
    for owner, names in roles.columns_by_owner().items():
        _make_columns(model, owner, names, roles, axis, sequence_parallel, recompute, not compiled)
    for name in roles.rowwise:
        module = become(model.get_submodule(name), RowLinear)
        module.tp = RowState(axis, sequence_parallel, fused=recompute == "selective")
    for name in roles.embedding:
        module = become(model.get_submodule(name), VocabularyEmbedding)
        module.tp = EmbeddingState(axis, sequence_parallel, name)
    for name in roles.experts:
        module = become(model.get_submodule(name), DealtExperts)
        module.tp = ExpertState(axis, name)
    for name in roles.gathered:
        module = become(model.get_submodule(name), Head)
        module.tp = HeadState(axis, mesh_tp, sequence_parallel, whole_logits=True)
    for name in roles.head:
        module = model.get_submodule(name)
        takes_labels = "labels" in inspect.signature(module.forward).parameters
        module = become(module, LossHead if takes_labels else Head)
        module.tp = HeadState(axis, mesh_tp, sequence_parallel, whole_logits=not loss_parallel)
    if sequence_parallel:
        for name in roles.sharded_dropouts():
            module = become(model.get_submodule(name), SequenceDropout)
            module.tp = axis
        for name in roles.router:
            count_over(model.get_submodule(name), mesh_tp.get_group())
            take_slice(model.get_submodule(name), axis)
    return _partial_names(model, roles, sequence_parallel)


def _partial_names(model: nn.Module, roles: Roles, sequence_parallel: bool) -> list[str]:
    """Norms, routers and row biases see a part of the sequence under sequence parallelism, ``replicated`` modules a part of the heads
    always, and of a packed linear a rank uses its own features."""
    names, part_used = [], {*roles.replicated, *(name for name, _ in roles.packed)}
    for name, module in model.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            shard_of_sequence = name in (*roles.norms, *roles.router) or (name in roles.rowwise and key == "bias")
            if name in part_used or (sequence_parallel and shard_of_sequence):
                names.append(f"{name}.{key}")
    return names


def _split_parameters(model: nn.Module, mesh: DeviceMesh, roles: Roles) -> None:
    """Replaces parameters by DTensors; a parameter that several modules share stays one object."""
    packed = dict(roles.packed)
    split = {name: role for name, role in roles.split().items() if name not in packed} | dict.fromkeys(roles.experts, "experts")
    made: dict[int, nn.Parameter] = {}
    for name, role in split.items():
        module = model.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            if role == "rowwise" and key == "bias":
                continue  # added once, after the sum
            dim = split_dim(module, role) if key == "weight" else 0
            if id(parameter) not in made:
                local = parameter.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous().clone()
                part = nn.Parameter(DTensor.from_local(local, mesh, [Shard(dim)], run_check=False), parameter.requires_grad)
                made[id(parameter)] = part
            module.register_parameter(key, made[id(parameter)])
    rank, tp = mesh.get_local_rank(), mesh.size()
    for name in packed:
        parts = roles.parts(name) or []
        starts = [sum(parts[:place]) for place in range(len(parts))]
        model.get_submodule(name).__dict__["tp_parts"] = [(at + rank * size // tp, size // tp) for at, size in zip(starts, parts)]


def _divide_attributes(model: nn.Module, roles: Roles, tp: int) -> None:
    for name, attribute in roles.divided:
        module = model.get_submodule(name)
        setattr(module, attribute, getattr(module, attribute) // tp)


def _make_columns(
    model: nn.Module,
    owner: str,
    names: list[str],
    roles: Roles,
    axis: TensorAxis,
    sequence: bool,
    recompute: Recompute,
    first_check: bool,
) -> None:
    """Makes ``owner`` gather for the linears ``names``; ``owner`` is the linear itself when no attention or MLP module holds it."""
    module = model.get_submodule(owner)
    # keys relative to the owner: alike in every block, so that compiled blocks share one graph
    linears = {name.removeprefix(owner).lstrip("."): model.get_submodule(name) for name in names}
    input_name = next(iter(inspect.signature(module.forward).parameters), "hidden_states")
    regather = not _is_recomputed(model, owner, roles, recompute)
    state = ColumnState(axis, sequence, regather, owner, input_name, linears, first_check)
    if owner in names:
        become(module, LoneColumnLinear).tp = state
        return
    for key, linear in linears.items():
        linear = become(linear, ColumnLinear)
        linear.tp, linear.tp_key = state, key
    become(module, ColumnModule).tp = state


def _is_recomputed(model: nn.Module, name: str, roles: Roles, recompute: Recompute) -> bool:
    """Whether ``apply_recompute`` will run ``name`` again in the backward, by itself or as a part of something larger."""
    if recompute is None:
        return False
    parts = name.split(".")
    above = [".".join(parts[: i + 1]) for i in range(len(parts))]
    block = next((path for path in above if path in roles.blocks), None)
    if block is None:
        return False
    if isinstance(recompute, str):
        return True
    return any(isinstance(model.get_submodule(path), tuple(recompute)) for path in above[above.index(block) :])
