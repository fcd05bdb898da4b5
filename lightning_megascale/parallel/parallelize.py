"""The fixed order in which the axes are applied to a model: PP split -> TP/SP -> recompute -> compile -> FSDP2; then the first values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_megascale.layout import ModelLayout, ModuleInfo, guess_layout, repeated_blocks
from lightning_megascale.mesh import MeshViews
from lightning_megascale.parallel.data import apply_data_parallel, sum_gradients, units_of
from lightning_megascale.parallel.pipeline import PassThrough, Pipeline, split_into_stages, unowned_parameters
from lightning_megascale.parallel.pipeline_split import Stages, check_places, check_split, cut_stages
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.support import schedule_name

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


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


def describe(model: nn.Module) -> list[ModuleInfo]:
    """The model's modules as data, in module order."""
    return [
        ModuleInfo(name, type(module).__name__, tuple((key, tuple(p.shape)) for key, p in module._parameters.items() if p is not None))
        for name, module in model.named_modules()
    ]


def find_layout(model: nn.Module, given: ModelLayout | Mapping[str, Any] | str) -> ModelLayout | None:
    """The layout to use: the given one, the model's own ``megascale_layout``, or None."""
    if isinstance(given, ModelLayout):
        return given
    if isinstance(given, Mapping):
        return ModelLayout.from_dict(given)
    if given != "auto":
        raise ValueError(f"layout={given!r}: must be a ModelLayout, a dict of patterns, or 'auto'")
    return getattr(model, "megascale_layout", None)


def block_names(model: nn.Module, layout: ModelLayout | None) -> tuple[str, ...]:
    """Names of the repeated layers: by the layout, else found."""
    if layout is not None and layout.blocks:
        return layout.resolve([name for name, _ in model.named_modules()])["blocks"]
    return repeated_blocks(describe(model))


def check_model(module: nn.Module, model: nn.Module, plan: ParallelPlan, layout: ModelLayout | None) -> list[str]:
    """A message for every rule that a model violates under this plan. Same on all ranks, no communication.

    Args:
        module: the LightningModule.
        model: its part that the layout's names refer to.
        plan, layout: what is to be done.
    """
    if plan.tensor_parallel_size > 1 and layout is None:
        guess = guess_layout(describe(model)).paste()
        message = (
            f"tensor_parallel_size={plan.tensor_parallel_size} needs to know the roles of the modules of {type(model).__name__}, which "
            "has no megascale_layout. A guess from its names and shapes, to be read, corrected and given as "
            f"MegascaleStrategy(layout=...):\n{guess}"
        )
        return [message]
    wrong = []
    if layout is not None and (plan.tensor_parallel_size > 1 or layout.blocks):
        wrong += layout.unmatched([name for name, _ in model.named_modules()]) if plan.tensor_parallel_size == 1 else []
    if plan.tensor_parallel_size > 1:
        from lightning_megascale.parallel.tensor import check_tensor_parallel

        assert layout is not None
        wrong += check_tensor_parallel(model, layout, plan.tensor_parallel_size, plan.sequence_parallel)
    if (plan.activation_checkpointing or plan.compile) and not wrong and not block_names(model, layout):
        option = "activation_checkpointing" if plan.activation_checkpointing else "compile"
        wrong.append(
            f"{option}={getattr(plan, option)!r} works on repeated blocks, and {type(model).__name__} has none that can be found: "
            "name them with layout=ModelLayout(blocks='...')"
        )
    wrong += _rank_dependent_modules(module) if int(plan.data_parallel_size) > 1 or plan.pipeline_parallel_size > 1 else []
    wrong += _unshardable_parameters(module, model)
    if plan.activation_checkpointing == "selective" and getattr(getattr(model, "config", None), "use_cache", False):
        wrong.append(
            "activation_checkpointing='selective' and the model's config.use_cache=True: the cache keeps what is recomputed; set "
            "model.config.use_cache = False for training"
        )
    if plan.pipeline_parallel_size > 1 and not wrong:
        wrong = _check_pipeline(model, plan, layout)
    return wrong or _shared_between_units(module, model, layout, pipelined=plan.pipeline_parallel_size > 1)


def _check_pipeline(model: nn.Module, plan: ParallelPlan, layout: ModelLayout | None) -> list[str]:
    """A message for every rule of pipeline stages that a model violates."""
    if layout is None or not (layout.blocks and layout.first and layout.last):
        missing = [role for role in ("blocks", "first", "last") if layout is None or not getattr(layout, role)]
        message = (
            f"pipeline_parallel_size={plan.pipeline_parallel_size} needs a layout that names the model's {', '.join(missing)}: the "
            "repeated layers, the modules called before and those called after them. A guess for "
            f"{type(model).__name__}, to be read, corrected and given as MegascaleStrategy(layout=...):\n"
            f"{guess_layout(describe(model)).paste()}"
        )
        return [message]
    wrong = layout.unmatched([name for name, _ in model.named_modules()])
    if not wrong:
        roles = layout.resolve([name for name, _ in model.named_modules()])
        wrong = check_places([*roles["first"], *roles["blocks"], *roles["last"]])
    wrong = wrong or check_split(plan.pipeline_split, block_names(model, layout), _stage_count(plan))
    if wrong:
        return wrong
    try:
        stages = stages_of(model, plan, layout)
    except ValueError as error:
        return [str(error)]
    return unowned_parameters(model, stages)


def _stage_count(plan: ParallelPlan) -> int:
    return plan.pipeline_parallel_size * plan.pipeline_stages_per_rank


def stages_of(model: nn.Module, plan: ParallelPlan, layout: ModelLayout) -> Stages:
    """The pipeline stages of a whole model under a plan."""
    roles = layout.resolve([name for name, _ in model.named_modules()])
    return cut_stages(
        roles["first"],
        roles["blocks"],
        roles["last"],
        describe(model),
        ranks=plan.pipeline_parallel_size,
        stages_per_rank=plan.pipeline_stages_per_rank,
        schedule=schedule_name(plan.pipeline_schedule),
        split=plan.pipeline_split,
    )


def _rank_dependent_modules(module: nn.Module) -> list[str]:
    """A message for every module whose result depends on which rows a rank holds, or whose state ranks would not share."""
    wrong = []
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._NormBase) and child.training and (child.track_running_stats or _is_batch_norm(child)):
            wrong.append(
                f"module {name!r} is a {type(child).__name__}: it takes its statistics from this rank's rows only (in a pipeline from one "
                "microbatch), so the numbers would depend on the number of ranks. Use group, layer or RMS norm, or freeze it "
                "(requires_grad_(False) and eval())"
            )
        if isinstance(child, nn.Embedding) and (child.max_norm is not None or child.scale_grad_by_freq):
            option = "max_norm" if child.max_norm is not None else "scale_grad_by_freq"
            wrong.append(f"module {name!r} is an Embedding with {option}, which looks at this rank's rows only: leave it out")
    return wrong


def _is_batch_norm(child: nn.Module) -> bool:
    return isinstance(child, nn.modules.batchnorm._BatchNorm)


def _unshardable_parameters(module: nn.Module, model: nn.Module) -> list[str]:
    """A message for every parameter that FSDP2 cannot shard, and for every one whose hooks sharding would drop."""
    inside = {id(parameter) for root in roots_of(module, model) for parameter in root.parameters()}
    scalars = [name for name, p in module.named_parameters() if p.ndim == 0 and id(p) in inside]
    hooked = [name for name, p in module.named_parameters() if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
    wrong = [f"{', '.join(scalars)}: a parameter without a dimension cannot be sharded; give it the shape (1,)"] if scalars else []
    if hooked:
        wrong.append(
            f"{', '.join(hooked)}: a hook on a parameter never runs once the parameter is sharded; change gradients in "
            "on_before_optimizer_step, where they are final"
        )
    return wrong


def _shared_between_units(module: nn.Module, model: nn.Module, layout: ModelLayout | None, pipelined: bool) -> list[str]:
    """A message for every parameter that two FSDP2 units would hold: each would shard a copy, untied without an error.

    Outside of the blocks a pipeline may separate them: it gives each stage a copy and adds their gradients up.
    """
    blocks = [model.get_submodule(name) for name in block_names(model, layout)]
    inside = {id(child): number for number, block in enumerate(blocks) for child in block.modules()}
    for number, root in enumerate(roots_of(module, model)):
        for child in root.modules():
            inside.setdefault(id(child), -1 - number)
    holders: dict[int, list[tuple[int | None, str]]] = {}
    for name, child in module.named_modules():
        for key, parameter in child.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append((inside.get(id(child)), f"{name}.{key}".lstrip(".")))
    return [
        f"{' and '.join(name for _, name in held)} are one parameter in units that are sharded apart, which would untie them: "
        "put the modules "
        "that share it into one child of the LightningModule, outside the repeated blocks"
        for held in holders.values()
        if len({unit for unit, _ in held}) > 1
    ]


def parallelize(
    module: nn.Module,
    target: nn.Module,
    plan: ParallelPlan,
    views: MeshViews,
    layout: ModelLayout | None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Parallelized:
    """Applies every axis of a resolved plan in place.

    Args:
        module: the LightningModule.
        target: the child (or the module itself) that layout names refer to.
        plan, views, layout: what to do, where, and to which modules; already checked with ``check_model``.
        param_dtype, reduce_dtype: mixed precision, see ``apply_data_parallel``.

    Returns:
        What was done. The model may still be on the meta device.
    """
    done = Parallelized(plan, views, num_parameters=sum(parameter.numel() for parameter in module.parameters()))
    done.trainable = tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    partial: list[str] = []
    proof = None
    roots = roots_of(module, target)
    if views.pipeline is not None:
        assert layout is not None
        done.shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        done.pipeline = split_into_stages(target, layout, stages_of(target, plan, layout), views.pipeline.get_local_rank())
        layout = done.pipeline.layout
        roots = [*done.pipeline.chunks, *roots[1:]]
    names = tuple(name for name in block_names(target, layout) if not isinstance(target.get_submodule(name), PassThrough))
    blocks = [target.get_submodule(name) for name in names]
    if views.tensor is not None and plan.tensor_parallel_size > 1:
        from lightning_megascale.parallel.tensor import Roles, split_modules
        from lightning_megascale.parallel.tensor_proof import prepare_proof

        assert layout is not None
        proof = prepare_proof(target, layout, views.tensor, sequence_parallel=plan.sequence_parallel)
        partial = split_modules(
            target,
            views.tensor,
            Roles.of(target, layout),
            sequence_parallel=plan.sequence_parallel,
            recompute=plan.activation_checkpointing,
            loss_parallel=plan.loss_parallel,
            compiled=bool(plan.compile),
        )
    if plan.compile:
        for block in blocks:
            block.compile(**(plan.compile if isinstance(plan.compile, Mapping) else {}))
    if plan.activation_checkpointing:
        from lightning_megascale.parallel.recompute import apply_recompute

        apply_recompute(blocks, plan.activation_checkpointing)
    apply_data_parallel(
        roots,
        blocks,
        views,
        reshard_after_forward=plan.reshard_after_forward,
        pipelined=done.pipeline is not None,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        cpu_offload=plan.cpu_offload,
    )
    if proof is not None:
        proof.arm(target)
    prefix = next(name for name, child in module.named_modules() if child is target)
    done.blocks = tuple(".".join(filter(None, (prefix, name))) for name in names)
    parameters = dict(target.named_parameters(remove_duplicate=False))
    done.partial = {id(parameters[name]) for name in partial}
    if done.pipeline is not None:
        done.copies = {id(parameters[name]) for group in done.pipeline.tied for name in group[1:] if name in parameters}
    record_units(module, done)
    return done


def record_units(module: nn.Module, done: Parallelized) -> None:
    """Notes the FSDP2 units of a module, and makes all of them sum."""
    chunks = [] if done.pipeline is None else done.pipeline.chunks
    found = [unit for root in (*chunks, module) for unit in units_of(root)]
    done.units = list({id(unit): unit for unit in found}.values())
    sum_gradients(done.units)


def is_parallel(module: nn.Module) -> bool:
    """True when something (the user's ``configure_model``) has sharded parameters already."""
    return any(isinstance(child, FSDPModule) for child in module.modules()) or any(isinstance(p, DTensor) for p in module.parameters())


def target_of(module: nn.Module, wanted: str) -> tuple[str, nn.Module]:
    """The child that is parallelized, with its name ("" for the module itself).

    Args:
        module: the LightningModule.
        wanted: a child's name, or "auto": the only child with parameters, else the module itself.

    Raises:
        ValueError: for a name that is no child.
    """
    children = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
    if wanted != "auto":
        try:
            return wanted, module.get_submodule(wanted)
        except AttributeError:
            raise ValueError(f"module={wanted!r}: {type(module).__name__} has no such child; it has {', '.join(children)}") from None
    own = any(True for _ in module.parameters(recurse=False))
    if len(children) == 1 and not own:
        name, child = next(iter(children.items()))
        if not isinstance(child, _CONTAINERS):
            return name, child
    return "", module


def roots_of(module: nn.Module, target: nn.Module) -> list[nn.Module]:
    """The modules whose forward a step calls: the target, or the LightningModule's children, containers opened.

    Parameters that belong to no root (a bare ``nn.Parameter`` of the LightningModule) stay whole on every rank; their
    gradients are summed once per step (data.py).
    """
    if target is not module:
        outside = [child for _, child in module.named_children() if child is not target and any(True for _ in child.parameters())]
        return [target, *_opened(outside)]
    return _opened(list(module.children()))


def _opened(children: list[nn.Module]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in children:
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _opened(list(child.children()))
        elif any(True for _ in child.parameters()) and not isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            found.append(child)
    return found
