"""An optimizer's state as flat tensors named by parameter, and back into an optimizer with other groups or sharding. No files, no ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_megascale.strategies.checkpoint.state import canonical, parameter_names, some

# How a step is computed, not what it computes: the current optimizer's choice stays.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
NOT_AN_OPTION = frozenset({"params", "param_names", "names"})
# State keys of torch's optimizers that have the shape of their parameter.
LIKE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "exp_inf", "sum", "prev"}
)


def optimizer_key(index: int, name: str, key: str) -> str:
    return f"optimizer.{index}.state.{name}.{key}"


def unwrap(optimizer: Any) -> Optimizer:
    """The torch optimizer inside Lightning's wrapper."""
    inner = getattr(optimizer, "_optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def optimizer_record(
    index: int, optimizer: Optimizer, names: Mapping[int, Sequence[str]], copies: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as flat tensors, and the rest of it by parameter name.

    ``copies`` are left out: second copies of tied parameters. Parameters without state (frozen, never stepped, SGD without momentum)
    have no tensors; non-tensor entries go to the record.

    Returns:
        ``{"optimizer.{i}.state.{name}.{key}": tensor}``, and a record
        ``{"class", "groups": [{"names", "options"}], "values": {name: {key: value}}}``.

    Raises:
        ValueError: when a parameter of the optimizer is not one of the module's, or a state holds DTensors inside a container.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        group_names = []
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"optimizer {index}, group {number}: a parameter of shape {tuple(parameter.shape)} is not a parameter of the module; "
                    "checkpoints name optimizer state by parameter name: make it a parameter of the LightningModule"
                )
            name = names[id(parameter)][0]
            if name in copies:
                continue  # kept under the tied parameter's first name, on another pipeline stage
            group_names.append(name)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[optimizer_key(index, name, key)] = value.detach()
                elif any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value)):
                    raise ValueError(
                        f"optimizer {index} ({type(optimizer).__name__}): state {key!r} of {name} is a {type(value).__name__} of DTensors, "
                        "which cannot be saved; use an optimizer whose state is tensors"
                    )
                else:
                    values.setdefault(name, {})[key] = value
        options = {key: _portable(value) for key, value in group.items() if key not in NOT_AN_OPTION}
        groups.append({"names": group_names, "options": options})
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "values": values}


def _portable(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


@dataclass
class SavedOptimizer:
    """One optimizer of a checkpoint.

    Args:
        kind: class name, or None when the file does not say.
        groups: ``{"names": [...], "options": {...}}``; entries of ``names`` are parameter names, or numbers in files of plain optimizers.
        tensors: name or number -> state key -> key in the checkpoint's storage.
        values: name or number -> state key -> value that is not a tensor.
    """

    kind: str | None
    groups: list[dict[str, Any]]
    tensors: dict[Any, dict[str, str]] = field(default_factory=dict)
    values: dict[Any, dict[str, Any]] = field(default_factory=dict)

    @property
    def names(self) -> list[Any]:
        return [name for group in self.groups for name in group["names"]]


def named(
    index: int,
    saved: SavedOptimizer,
    optimizer: Optimizer,
    module: nn.Module,
    sizes: Mapping[str, tuple],
    whole_shapes: Mapping[str, torch.Size] | None = None,
    whole_groups: list[list[str]] | None = None,
) -> SavedOptimizer:
    """The saved optimizer with numbers replaced by parameter names.

    Two numberings exist: torch's own counts through the groups of the optimizer that saved; FSDPStrategy and ModelParallelStrategy
    count ``module.parameters()``. Numbers that do not run 0, 1, 2, ... through the groups are the second kind. Under a pipeline both
    count over the whole module: ``whole_shapes`` are its parameters in order, ``whole_groups`` the optimizer's groups over all stages.

    Raises:
        ValueError: when the numbers cannot be told apart safely: other group sizes than now, or state of another shape.
    """
    ids = saved.names
    if not any(isinstance(i, int) for i in ids):
        return saved
    names = parameter_names(module)
    current = whole_groups or [[names[id(p)][0] for p in group["params"]] for group in optimizer.param_groups]
    shapes = whole_shapes or {names[id(p)][0]: p.shape for p in module.parameters()}
    in_module_order = list(shapes)
    recorded = [name for group in saved.groups for name in group["options"].get("param_names") or ()]
    if len(recorded) == len(ids):
        table = dict(zip(ids, map(canonical, recorded)))
    elif ids != list(range(len(ids))):
        if max(ids) >= len(in_module_order):
            raise ValueError(f"optimizer {index}: the file numbers parameters up to {max(ids)}, the module has {len(in_module_order)}")
        table = {i: in_module_order[i] for i in ids}
    elif [len(group["names"]) for group in saved.groups] == [len(group) for group in current]:
        table = dict(zip(ids, chain(*current)))
    elif len(saved.groups) == 1 and sorted(chain(*current)) == sorted(in_module_order) and len(ids) == len(in_module_order):
        table = dict(zip(ids, in_module_order))
    else:
        raise ValueError(
            f"optimizer {index}: the file numbers its parameters instead of naming them, and was saved with groups of "
            f"{[len(group['names']) for group in saved.groups]} parameters; now they are {[len(group) for group in current]}. "
            "Build the optimizer with the groups it was saved with (or with named_parameters(), then the names are in the file)"
        )
    for i, keys in saved.tensors.items():
        wrong = [sizes[storage_key][0] for key, storage_key in keys.items() if key in LIKE_PARAMETER]
        if any(shape != shapes[table[i]] for shape in wrong):
            raise ValueError(
                f"optimizer {index}: state number {i} has shape {tuple(wrong[0])}, but counts to {table[i]} of shape "
                f"{tuple(shapes[table[i]])}: the optimizer was saved with its parameters in another order"
            )
    groups = [{"names": [table[i] for i in group["names"]], "options": group["options"]} for group in saved.groups]
    tensors = {table[i]: keys for i, keys in saved.tensors.items()}
    return SavedOptimizer(saved.kind, groups, tensors, {table[i]: values for i, values in saved.values.items()})


@dataclass
class OptimizerPlan:
    """What a load does to one optimizer, decided before anything is changed.

    Args:
        targets: key in the storage -> empty tensor to fill.
        repeats: (tensor, the one of ``targets`` that it equals), for a second copy of a tied parameter.
        state: parameter -> state key -> the tensors of ``targets`` and ``repeats`` and the other values.
        options: per current group, what to set.
        origin: per current group, the number of the saved group its options come from; None for a new group.
    """

    targets: dict[str, Tensor] = field(default_factory=dict)
    repeats: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    state: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)
    origin: list[int | None] = field(default_factory=list)


def plan_optimizer(
    index: int,
    optimizer: Optimizer,
    saved: Sequence[SavedOptimizer],
    names: Mapping[int, Sequence[str]],
    tied: Iterable[Sequence[str]],
    sizes: Mapping[str, tuple[torch.Size, torch.dtype]],
    model_dtypes: Mapping[str, torch.dtype],
) -> OptimizerPlan:
    """Maps a saved optimizer onto the current one by parameter name.

    Args:
        saved: all optimizers of the checkpoint, named.
        names: of ``parameter_names``.
        tied: groups of names that were one parameter when saved: each finds the state of the others.
        sizes: storage key -> shape and dtype.
        model_dtypes: name -> dtype of the parameter when saved; state of that dtype takes the parameter's current one.

    Raises:
        ValueError: another optimizer class, parameters of another optimizer, or a group whose parameters had different options.
    """
    mine = saved[index]
    if mine.kind is not None and mine.kind != type(optimizer).__name__:
        raise ValueError(
            f"optimizer {index} is {type(optimizer).__name__}, the checkpoint's is {mine.kind}: their states do not fit; "
            "configure the saved class, or take the weights only"
        )
    alias = {name: group for group in tied for name in group}
    where = {name: number for number, group in enumerate(mine.groups) for name in group["names"]}
    elsewhere = {name: number for number, other in enumerate(saved) if number != index for name in other.names}
    plan = OptimizerPlan()
    for number, group in enumerate(optimizer.param_groups):
        found: dict[int, list[str]] = {}
        for parameter in group["params"]:
            known = names.get(id(parameter), ())
            candidates = [*known, *chain(*(alias.get(name, ()) for name in known))]
            name = next((candidate for candidate in candidates if candidate in where), None)
            if name is None:
                stranger = next((candidate for candidate in candidates if candidate in elsewhere), None)
                if stranger:
                    raise ValueError(
                        f"optimizer {index} holds {stranger}, which the checkpoint has in optimizer {elsewhere[stranger]}: "
                        "return the optimizers from configure_optimizers in the saved order"
                    )
                continue
            found.setdefault(where[name], []).append(name)
            plan.state[parameter] = _empty_state(mine, name, parameter, group, sizes, model_dtypes.get(name), plan)
        origin, options = _agreed_options(index, number, found, mine)
        plan.origin.append(origin)
        plan.options.append(options)
    if mine.names and not any(origin is not None for origin in plan.origin):
        raise ValueError(
            f"optimizer {index}: none of its parameters is in the checkpoint's optimizer {index} "
            f"({some(mine.names)}); return the optimizers from configure_optimizers in the saved order"
        )
    return plan


def _agreed_options(index: int, number: int, found: Mapping[int, Sequence[str]], saved: SavedOptimizer) -> tuple[int | None, dict]:
    origins = sorted(found)
    if not origins:
        return None, {}
    first = saved.groups[origins[0]]["options"]
    skip = IMPLEMENTATION | NOT_AN_OPTION
    for origin in origins[1:]:
        other = saved.groups[origin]["options"]
        differing = [key for key in first if key not in skip and str(first[key]) != str(other.get(key))]
        if differing:
            rows = "; ".join(f"{key}={first[key]} and {other.get(key)}" for key in differing)
            raise ValueError(
                f"optimizer {index}, group {number}: its parameters were saved in groups with different options ({rows}), "
                f"the first for {some(found[origins[0]])}, the second for {some(found[origin])}; split the group as it was saved"
            )
    return origins[0], {key: value for key, value in first.items() if key not in skip}


def _empty_state(
    saved: SavedOptimizer,
    name: str,
    parameter: nn.Parameter,
    group: Mapping[str, Any],
    sizes: Mapping[str, tuple[torch.Size, torch.dtype]],
    saved_dtype: torch.dtype | None,
    plan: OptimizerPlan,
) -> dict[str, Any]:
    """Empty state tensors for one parameter: sharded like it when of its shape, otherwise whole on every rank."""
    state: dict[str, Any] = dict(saved.values.get(name, {}))
    for key, storage_key in saved.tensors.get(name, {}).items():
        size, dtype = sizes[storage_key]
        if key != "step" and dtype.is_floating_point and dtype == saved_dtype:
            dtype = parameter.dtype  # torch's own rule on load: state follows its parameter
        if key != "step" and size == parameter.shape:
            tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        elif key == "step" or not len(size):
            # torch.optim.Optimizer keeps a step on the host unless the kernel reads it on the device.
            on_device = key != "step" or group.get("fused") or group.get("capturable")
            tensor = torch.empty(size, dtype=dtype, device=parameter.device if on_device else "cpu")
        else:
            tensor = torch.empty(size, dtype=dtype, device=parameter.device)
            if isinstance(parameter, DTensor):  # a plain tensor would not mix with it
                mesh = parameter.device_mesh
                tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        state[key] = tensor
        if storage_key in plan.targets:
            plan.repeats.append((tensor, plan.targets[storage_key]))
        else:
            plan.targets[storage_key] = tensor
    return state


def restore_optimizer(optimizer: Optimizer, plan: OptimizerPlan) -> None:
    """Gives the loaded state and options to the optimizer."""
    for tensor, loaded in plan.repeats:
        tensor.copy_(loaded)
    optimizer.state.clear()
    for parameter, state in plan.state.items():
        if state:
            optimizer.state[parameter] = state
    for group, options in zip(optimizer.param_groups, plan.options):
        for key, value in options.items():
            current = group.get(key)
            if isinstance(current, Tensor):
                current.copy_(torch.as_tensor(value))
            else:
                group[key] = value.item() if isinstance(value, Tensor) and value.ndim == 0 and current is not None else value


def regroup_scheduler(state: dict[str, Any], origin: Sequence[int | None], groups: int, optimizer: Optimizer) -> dict[str, Any]:
    """A learning-rate scheduler's state for another number or order of groups: its lists have one entry per saved group.

    Args:
        state: ``scheduler.state_dict()`` as saved.
        origin: per current group, the saved group it comes from; a new group takes its own ``initial_lr`` and ``lr``.
        groups: number of saved groups.
    """
    if list(origin) == list(range(groups)):
        return state
    own = {"base_lrs": "initial_lr", "_last_lr": "lr"}
    result = dict(state)
    for key, value in state.items():
        if not isinstance(value, (list, tuple)) or len(value) != groups:
            continue
        entries = []
        for saved, group in zip(origin, optimizer.param_groups):
            fresh = group.get(own[key], group["lr"]) if key in own else value[0]
            entries.append(fresh if saved is None else value[saved])
        result[key] = type(value)(entries)
    return result
