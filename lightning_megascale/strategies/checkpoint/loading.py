"""Loading: a checkpoint of any plan into a module and optimizers as they are sharded now."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from lightning_megascale.strategies.checkpoint import files
from lightning_megascale.strategies.checkpoint.archive import Archive, fetch, open_archive
from lightning_megascale.strategies.checkpoint.optimizer import (
    OptimizerPlan,
    named,
    plan_optimizer,
    regroup_scheduler,
    restore_optimizer,
    unwrap,
)
from lightning_megascale.strategies.checkpoint.state import ModelState, describe_mismatch, model_state, parameter_names, reshard
from lightning_megascale.strategies.checkpoint.together import broadcast, dcp_together, gather, rank_of, together


def load(
    path: str | os.PathLike,
    module: nn.Module,
    optimizers: Sequence[Any] = (),
    *,
    data_parallel_rank: int = 0,
    strict: bool = True,
    weights_only: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
    scheduler_optimizers: Sequence[int] | None = None,
    shapes: Mapping[str, torch.Size] | None = None,
    metadata: bool = True,
) -> dict[str, Any]:
    """Loads a checkpoint of any plan into the module and the optimizers as they are sharded now. Collective.

    Reads our folders, ``.ckpt`` files of the plain Trainer (one device, DDP), of FSDPStrategy (full) and of ModelParallelStrategy, and
    ModelParallelStrategy's folders. Files are memory-mapped: a rank reads the pages of its own shards.

    Args:
        path: rank 0's value counts.
        optimizers: in the order of ``configure_optimizers``; none for weights only (validate, test, a new run from old weights).
        data_parallel_rank: whose loader states come back; they are dropped, with a warning, when their number changed and they differ.
        strict: False loads the names that both have. Shapes must agree either way.
        weights_only: as in ``torch.load``: None refuses pickled classes, False trusts the file.
        scheduler_optimizers: for each learning-rate scheduler the index of its optimizer; needed only with several optimizers whose
            parameter groups changed.

        shapes: names and shapes of the parameters of the whole module, in order, where this rank's module holds some of them (a pipeline);
            needed for files that number parameters.
        metadata: False, for weights only: leaves Lightning's dict of a folder, which may hold foreign classes, and loader states alone.

    Returns:
        Lightning's dict without ``state_dict`` and ``optimizer_states``.

    Raises:
        ValueError: nothing there, torn, cut files, pickled classes, names or shapes that do not fit (all in one message), optimizer
            groups that do not fit: before anything is loaded. Tied parameters that differ in the file: afterwards.
        RuntimeError: when a rank could not read, with its cause.
    """
    group = process_group
    target = str(broadcast(str(path), group))
    what = f"checkpoint {target} was not loaded"
    with torch.no_grad():
        together(what, lambda: files.check_sizes(files.locate(target)) if rank_of(group) == 0 else None, group)
        archive = together(what, lambda: open_archive(target, weights_only, metadata=metadata), group)
        reshard(module)
        state = model_state(module)
        _check_names(archive, state, strict, group)
        inner = [unwrap(optimizer) for optimizer in optimizers]
        whole = _whole_groups(archive, module, inner, shapes, group)
        plans = together(what, lambda: _plan_optimizers(archive, module, inner, shapes, whole), group)
        targets, repeats, fresh = _model_targets(archive, state)
        for plan in plans:
            targets.update(plan.targets)
        dcp_together(what, lambda: fetch(targets, archive.reader(), group))
        together(what, lambda: _check_tied(repeats), group)
        rest = {state.raw[name]: value for name, value in {**fresh, **archive.objects}.items() if name in state.raw}
        if rest:
            module.load_state_dict(rest, strict=False)
        for optimizer, plan in zip(inner, plans):
            restore_optimizer(optimizer, plan)
    found = archive.metadata
    if not metadata:
        return {}
    if archive.kind == "file":  # let go of the memory map: the file may be replaced while training goes on
        found = pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, found)
    _restore_loaders(what, found, archive, data_parallel_rank, weights_only, group)
    _restore_schedulers(found, archive, inner, plans, scheduler_optimizers)
    return found


def _check_names(archive: Archive, state: ModelState, strict: bool, group: dist.ProcessGroup | None) -> None:
    """One ValueError, equal on all ranks, for every name or shape that does not fit. A pipeline stage holds only some of the names."""
    mine = state.all_tensors()
    own = (
        [name for name in mine if name not in archive.model],
        [name for name in archive.model if name not in mine],
        {
            name: (tuple(archive.sizes[archive.model[name]][0]), tuple(tensor.shape))
            for name, tensor in mine.items()
            if name in archive.model and archive.sizes[archive.model[name]][0] != tensor.shape
        },
    )
    everyone = gather(own, group)
    missing = list(dict.fromkeys(name for one, _, _ in everyone for name in one))
    surplus = [set(two) for _, two, _ in everyone]
    unexpected = [name for name in everyone[0][1] if all(name in two for two in surplus)]
    shapes = {name: pair for _, _, three in everyone for name, pair in three.items()}
    message = describe_mismatch(archive.path, missing, unexpected, shapes)
    if message and (strict or shapes):
        raise ValueError(message)
    if message and rank_of(group) == 0:
        warnings.warn(message, stacklevel=3)


def _whole_groups(
    archive: Archive, module: nn.Module, optimizers: Sequence[Any], shapes: Mapping[str, torch.Size] | None, group: dist.ProcessGroup | None
) -> list[list[list[str]]]:
    """For each optimizer and group the names over all ranks, in the whole module's order; empty where nothing is numbered."""
    numbered = any(isinstance(name, int) for one in archive.optimizers for name in one.names)
    if shapes is None or not numbered:
        return []
    names = parameter_names(module)
    mine = [[[names[id(p)][0] for p in entry["params"]] for entry in optimizer.param_groups] for optimizer in optimizers]
    everyone = gather(mine, group)
    order = {name: place for place, name in enumerate(shapes)}
    found = []
    for optimizer in range(len(optimizers)):
        groups = zip(*(one[optimizer] for one in everyone))
        found.append([sorted({name for part in parts for name in part if name in order}, key=order.__getitem__) for parts in groups])
    return found


def _plan_optimizers(
    archive: Archive,
    module: nn.Module,
    optimizers: Sequence[Any],
    shapes: Mapping[str, torch.Size] | None = None,
    whole: Sequence[list[list[str]]] = (),
) -> list[OptimizerPlan]:
    if not optimizers:
        return []
    if not archive.optimizers:
        raise ValueError(
            f"checkpoint {archive.path} holds weights only, so training cannot resume from it; "
            "load the weights into the module instead (load_from_checkpoint, init_from), or save with save_weights_only=False"
        )
    if len(archive.optimizers) != len(optimizers):
        raise ValueError(
            f"checkpoint {archive.path} holds {len(archive.optimizers)} optimizers, configure_optimizers gave {len(optimizers)}"
        )
    names = parameter_names(module)
    saved = [
        named(i, one, optimizers[i], module, archive.sizes, shapes if whole else None, whole[i] if whole else None)
        for i, one in enumerate(archive.optimizers)
    ]
    dtypes = {name: archive.sizes[key][1] for name, key in archive.model.items()}
    return [plan_optimizer(i, one, saved, names, archive.tied, archive.sizes, dtypes) for i, one in enumerate(optimizers)]


def _model_targets(
    archive: Archive, state: ModelState
) -> tuple[dict[str, Tensor], list[tuple[str, str, Tensor, Tensor]], dict[str, Tensor]]:
    """What DCP fills: the module's tensors in place; a scratch tensor for the second name of a tied one; new tensors for copies."""
    targets: dict[str, Tensor] = {}
    repeats: list[tuple[str, str, Tensor, Tensor]] = []
    fresh: dict[str, Tensor] = {}
    seen: dict[int, str] = {}
    for name, tensor in state.all_tensors().items():
        if name not in archive.model:
            continue
        value = tensor.detach()
        if name in state.copies:
            value = fresh[name] = torch.empty_like(value)
        elif id(tensor) in seen:
            value = torch.empty_like(value)
            repeats.append((seen[id(tensor)], name, tensor.detach(), value))
        else:
            seen[id(tensor)] = name
        targets[archive.model[name]] = value
    return targets, repeats, fresh


def _check_tied(repeats: Sequence[tuple[str, str, Tensor, Tensor]]) -> None:
    for first, second, tensor, other in repeats:
        a, b = (value.to_local() if isinstance(value, DTensor) else value for value in (tensor, other))
        if not torch.equal(a, b):
            raise ValueError(
                f"{first} and {second} are one tensor in the module, but differ in the checkpoint: load into a model that does not tie them"
            )


def _restore_loaders(
    what: str,
    metadata: dict[str, Any],
    archive: Archive,
    data_parallel_rank: int,
    weights_only: bool | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Gives each data-parallel rank its loader states; when their number changed, only states that are all equal mean something."""
    if not archive.loaders:
        return
    size = 1 + max(gather(data_parallel_rank, group))
    same_size = size == len(archive.loaders)

    def read() -> list[Any]:
        if same_size:
            return [files.load_pickled(archive.loaders[data_parallel_rank], archive.path, weights_only)]
        return [files.load_pickled(file, file, weights_only) for file in archive.loaders.values()] if rank_of(group) == 0 else []

    states = together(what, read, group)
    if not same_size:
        states = broadcast(states[:1] if states and all(_equal(state, states[0]) for state in states) else [], group)
        if not states and rank_of(group) == 0:
            warnings.warn(
                f"checkpoint {archive.path} has loader states of {len(archive.loaders)} data-parallel ranks, now there are {size}, and the "
                "states differ from rank to rank: they are dropped, the loaders start the epoch anew. A loader whose state is a global "
                "position resumes under any plan",
                stacklevel=3,
            )
    if states:
        metadata["loops"]["fit_loop"].setdefault("state_dict", {})["combined_loader"] = states[0]


def _equal(one: Any, other: Any) -> bool:
    (a, a_spec), (b, b_spec) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return a_spec == b_spec and all(torch.equal(x, y) if isinstance(x, Tensor) else bool(x == y) for x, y in zip(a, b))


def _restore_schedulers(
    metadata: dict[str, Any], archive: Archive, optimizers: Sequence[Any], plans: Sequence[OptimizerPlan], owners: Sequence[int] | None
) -> None:
    """Reorders the per-group lists of learning-rate schedulers when the parameter groups are other ones than when saved."""
    states = metadata.get("lr_schedulers") or []
    changed = [plan.origin != list(range(len(saved.groups))) for plan, saved in zip(plans, archive.optimizers)]
    if not states or not any(changed):
        return
    if owners is None:
        if len(optimizers) == 1:
            owners = [0] * len(states)
        elif len(optimizers) == len(states):
            owners = range(len(states))
        else:
            raise ValueError(
                f"the parameter groups changed, and it is unclear which of {len(optimizers)} optimizers each of {len(states)} "
                "learning-rate schedulers belongs to; give scheduler_optimizers"
            )
    metadata["lr_schedulers"] = [
        regroup_scheduler(state, plans[owner].origin, len(archive.optimizers[owner].groups), optimizers[owner])
        for state, owner in zip(states, owners)
    ]
