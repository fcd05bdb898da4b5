"""Which modules of a LightningModule are meant: the one that is parallelized, its layout, its blocks, its pipeline stages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_megascale.layout import ModelLayout, ModuleInfo, repeated_blocks
from lightning_megascale.layout_huggingface import Published, layout_of
from lightning_megascale.parallel.pipeline_split import Stages, cut_stages
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.support import schedule_name

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def describe(model: nn.Module) -> list[ModuleInfo]:
    """The model's modules as data, in module order."""
    return [
        ModuleInfo(name, type(module).__name__, tuple((key, tuple(p.shape)) for key, p in module._parameters.items() if p is not None))
        for name, module in model.named_modules()
    ]


def find_layout(
    model: nn.Module, given: ModelLayout | Mapping[str, Any] | str, *, tensor_parallel: bool = False, expert_parallel: bool = False
) -> ModelLayout | None:
    """The layout to use: the given one, the model's own ``megascale_layout``, what a transformers model publishes, or None.

    Args:
        model: the module that layout names refer to.
        given: a layout, a dict of patterns, or "auto".
        tensor_parallel: the roles of tensor parallelism are needed; without it a published plan of styles is not read,
        expert_parallel: but for which modules are experts, where these are needed.

    Raises:
        ValueError: for a published plan that is not understood.
    """
    if isinstance(given, ModelLayout):
        return given
    if isinstance(given, Mapping):
        return ModelLayout.from_dict(given)
    if given != "auto":
        raise ValueError(f"layout={given!r}: must be a ModelLayout, a dict of patterns, or 'auto'")
    own = getattr(model, "megascale_layout", None)
    if own is not None or not is_published(model):
        return own
    return layout_of(published_by(model), tensor_parallel=tensor_parallel, expert_parallel=expert_parallel)


def is_published(model: nn.Module) -> bool:
    """True for a model of transformers, which publishes its blocks and, for many classes, its plans as data."""
    return hasattr(type(model), "_no_split_modules") and hasattr(model, "config")


def published_by(model: Any) -> Published:
    """What a transformers model publishes, as data."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(name)
    shared = tuple((first, other) for first, *others in users.values() for other in others)
    return Published(
        modules=describe(model),
        tp_plan=dict(getattr(model, "tp_plan", None) or {}),
        pp_plan=dict(getattr(model, "pp_plan", None) or {}),
        no_split=tuple(sorted(model._no_split_modules or ())),
        inputs=tuple(inspect.signature(model.forward).parameters),
        shared=shared,
    )


def block_names(model: nn.Module, layout: ModelLayout | None) -> tuple[str, ...]:
    """Names of the repeated layers: by the layout, else found."""
    if layout is not None and layout.blocks:
        return layout.resolve([name for name, _ in model.named_modules()])["blocks"]
    return repeated_blocks(describe(model))


def unit_names(model: nn.Module, layout: ModelLayout | None) -> tuple[str, ...]:
    """Names of the modules that are FSDP2 units of their own, in module order: the blocks, and what the layout names beside them."""
    blocks = block_names(model, layout)
    named = [name for name, _ in model.named_modules()]
    units = layout.resolve(named)["units"] if layout is not None and layout.units else ()
    return tuple(name for name in named if name in {*blocks, *units})


def stage_count(plan: ParallelPlan) -> int:
    """How many stages a plan cuts a model into."""
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
