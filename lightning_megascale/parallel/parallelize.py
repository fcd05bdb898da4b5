"""The fixed order in which the axes are applied to a model: PP split -> TP/SP -> CP -> EP -> recompute -> compile -> FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_megascale.layout import ModelLayout
from lightning_megascale.mesh import MeshViews, expert_views
from lightning_megascale.parallel.context import Context
from lightning_megascale.parallel.context_seams import apply_context
from lightning_megascale.parallel.data import apply_data_parallel, prefetch_in_order, sum_gradients, units_of
from lightning_megascale.parallel.expert import apply_experts, regroups_ranks
from lightning_megascale.parallel.expert_balance import Routers
from lightning_megascale.parallel.layouts import block_names, is_published, roots_of, stages_of, unit_names
from lightning_megascale.parallel.pipeline import PassThrough, Pipeline, split_into_stages
from lightning_megascale.parallel.published_calls import guard_calls, guard_saving
from lightning_megascale.plan import ParallelPlan


@dataclass
class Parallelized:
    """What was done to a module, kept on it so that fit, validate and test do it once.

    Args:
        plan, views: the resolved plan and the mesh it was done on.
        blocks: names of the repeated layers, below the LightningModule.
        units: all FSDP2 units.
        partial: ids of the parameters whose gradients are parts of a sum over the tensor-parallel axis.
        by_user: the module's own ``configure_model`` had applied FSDP2 or tensor parallelism already.
        pipeline: this rank's stages, or None without a pipeline.
        copies: ids of the parameters that are a second copy of a tied one, which norms and checkpoints count once.
        num_parameters: of the whole module, tied ones once.
        trainable: names of the whole module's trainable parameters.
        shapes: name and shape of each of the whole module's parameters, in module order; filled under a pipeline.
        context: what attention reads, or None without context parallelism.
        routers: those of this rank that learn from a whole step, or None.
    """

    plan: ParallelPlan
    views: MeshViews
    blocks: tuple[str, ...] = ()
    units: list[FSDPModule] = field(default_factory=list)
    partial: set[int] = field(default_factory=set)
    by_user: bool = False
    pipeline: Pipeline | None = None
    copies: set[int] = field(default_factory=set)
    num_parameters: int = 0
    trainable: tuple[str, ...] = ()
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    context: Context | None = None
    routers: Routers | None = None


def parallelize(
    module: nn.Module,
    target: nn.Module,
    plan: ParallelPlan,
    views: MeshViews,
    layout: ModelLayout | None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    context: Context | None = None,
) -> Parallelized:
    """Applies every axis of a resolved plan in place.

    Args:
        module: the LightningModule.
        target: the child (or the module itself) that layout names refer to.
        plan, views, layout: what to do, where, and to which modules; already checked with ``check_model``.
        param_dtype, reduce_dtype: mixed precision, see ``apply_data_parallel``.
        context: what attention reads, under context parallelism.

    Returns:
        What was done. The model may still be on the meta device.
    """
    done = Parallelized(plan, views, num_parameters=sum(parameter.numel() for parameter in module.parameters()))
    done.trainable = tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    partial: list[str] = []
    proof = None
    roots = roots_of(module, target)
    regrouped = expert_views(views, plan.expert_parallel_size) if regroups_ranks(plan, layout) else None  # by all ranks of all stages
    experts: list[nn.Module] = []
    if views.pipeline is not None:
        assert layout is not None
        done.shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        done.pipeline = split_into_stages(target, layout, stages_of(target, plan, layout), views.pipeline.get_local_rank())
        layout = done.pipeline.layout
        roots = [*done.pipeline.chunks, *roots[1:]]
    names = _own(target, block_names(target, layout))
    blocks = [target.get_submodule(name) for name in names]
    sharded = [target.get_submodule(name) for name in _own(target, unit_names(target, layout))]
    if views.tensor is not None and plan.tensor_parallel_size > 1:
        from lightning_megascale.parallel.tensor import split_modules
        from lightning_megascale.parallel.tensor_proof import prepare_proof
        from lightning_megascale.parallel.tensor_roles import Roles

        assert layout is not None
        proven = layout if regrouped is None else _without_experts(layout, summed=plan.sequence_parallel)
        proof = prepare_proof(target, proven, views.tensor, sequence_parallel=plan.sequence_parallel)
        partial = split_modules(
            target,
            views.tensor,
            Roles.of(target, layout if regrouped is None else _without_experts(layout)),
            sequence_parallel=plan.sequence_parallel,
            recompute=plan.activation_checkpointing,
            loss_parallel=plan.loss_parallel,
            compiled=bool(plan.compile),
        )
    done.routers = Routers.of(target, views, sequence_parallel=plan.sequence_parallel)
    if context is not None:
        apply_context(target, layout, context)
        done.context = context
        if views.context is not None and done.routers is not None:
            done.routers.count_over(views.context.get_group())
    if regrouped is not None:
        assert layout is not None
        experts = apply_experts(target, layout, views, regrouped, plan)
    if plan.compile:
        for block in blocks:
            block.compile(**(plan.compile if isinstance(plan.compile, Mapping) else {}))
    if plan.activation_checkpointing:
        from lightning_megascale.parallel.recompute import apply_recompute

        apply_recompute(blocks, plan.activation_checkpointing, offload=plan.activation_offload)
    apply_data_parallel(
        roots,
        sharded,
        views,
        reshard_after_forward=plan.reshard_after_forward,
        pipelined=done.pipeline is not None,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        cpu_offload=plan.cpu_offload,
        experts=experts,
        expert_mesh=None if regrouped is None else regrouped.shard,
    )
    if experts:
        prefetch_in_order(roots, blocks)
    if proof is not None:
        proof.arm(target)
    guard_saving(target)
    if is_published(target) and done.pipeline is None:
        guard_calls(target, plan)
    prefix = next(name for name, child in module.named_modules() if child is target)
    done.blocks = tuple(".".join(filter(None, (prefix, name))) for name in names)
    parameters = dict(target.named_parameters(remove_duplicate=False))
    done.partial = {id(parameters[name]) for name in partial}
    if done.pipeline is not None:
        done.copies = {id(parameters[name]) for group in done.pipeline.tied for name in group[1:] if name in parameters}
    record_units(module, done)
    return done


def _without_experts(layout: ModelLayout, *, summed: bool = False) -> ModelLayout:
    """The layout for tensor parallelism of experts that it does not deal out; ``summed``: each of its ranks has other tokens."""
    return replace(layout, experts=(), replicated=(*layout.replicated, *(layout.experts if summed else ())))


def _own(target: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those that lie on this rank's pipeline stages."""
    return tuple(name for name in names if not isinstance(target.get_submodule(name), PassThrough))


def record_units(module: nn.Module, done: Parallelized) -> None:
    """Notes the FSDP2 units of a module, and makes all of them sum."""
    chunks = [] if done.pipeline is None else done.pipeline.chunks
    found = [unit for root in (*chunks, module) for unit in units_of(root)]
    done.units = list({id(unit): unit for unit in found}.values())
    sum_gradients(done.units)


def is_parallel(module: nn.Module) -> bool:
    """True when something (the user's ``configure_model``) has sharded parameters already."""
    return any(isinstance(child, FSDPModule) for child in module.modules()) or any(isinstance(p, DTensor) for p in module.parameters())
