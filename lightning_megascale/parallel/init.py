"""Same start for every plan: a parameter is drawn at its full logical shape from (seed, module name) and only the shard is kept.

One module at a time is whole in memory, so a model of any size can be built on the meta device and started on its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_megascale.parallel.rng import derive_seed, fork_seeded


def on_meta(model: nn.Module) -> bool:
    """True when any parameter or buffer still lies on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def check_materializable(model: nn.Module) -> list[str]:
    """A message for every module on the meta device that nothing can initialize."""
    return [
        f"module {name or 'the model itself'!r} ({type(module).__name__}) lies on the meta device and has no reset_parameters(): "
        "give it one, give the model an init_module(module, name), or build it on a real device"
        for name, module in model.named_modules()
        if _own_meta(module)
        and not (hasattr(model, "init_module") or hasattr(module, "reset_parameters") or _transformers_owner(model, name) is not None)
    ]


def materialize(model: nn.Module, device: torch.device | str, seed: int) -> nn.Module:
    """Gives every parameter and buffer on the meta device its storage and its first value, in place.

    Args:
        model: sharded or not; parameters may be DTensors of any placement. ``model.init_module(module, name)`` initializes
            the parameters that ``module`` owns itself; without it what transformers' models have for that, else each module's
            ``reset_parameters()``.
        device: where the values go.
        seed: the run's seed. Values depend on it and on module names, never on ranks or plan.

    Raises:
        ValueError: naming the modules that nothing can initialize.
    """
    device = torch.device(device)
    wrong = check_materializable(model)
    if wrong:
        raise ValueError("\n".join(wrong))
    drawn: set[int] = set()
    for name, module in model.named_modules():
        if _own_meta(module):
            _materialize_module(module, partial(_initialize, model, name), device, derive_seed(seed, "init", name), drawn)
    return model


def _initialize(model: nn.Module, name: str, module: nn.Module) -> None:
    """Draws a module's own parameters and buffers: as the model says, the transformers model around it, or the module itself."""
    owner = _transformers_owner(model, name)
    if hasattr(model, "init_module"):
        cast(Any, model).init_module(module, name)
    elif owner is not None:
        owner._init_weights(module)
    else:
        cast(Any, module).reset_parameters()


def _transformers_owner(model: nn.Module, name: str) -> Any:
    """The innermost transformers model (it has a config and ``_init_weights``) that the module ``name`` is or lies in."""
    parts = name.split(".") if name else []
    for end in range(len(parts), -1, -1):
        outer = model.get_submodule(".".join(parts[:end]))
        if callable(getattr(outer, "_init_weights", None)) and hasattr(outer, "config"):
            return outer
    return None


def _own_meta(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in own)


def _materialize_module(
    module: nn.Module, initialize: Callable[[nn.Module], None], device: torch.device, seed: int, drawn: set[int]
) -> None:
    """Initializes whole stand-ins of one module's own parameters, then keeps this rank's part of each.

    The first module, in module order, that holds a tied parameter draws it (``drawn`` holds the ids of those done).
    """
    if _is_drawn_by_expert(module):
        _materialize_experts(module, initialize, device, seed, drawn)
        return
    own = dict(module._parameters)
    buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    whole = {
        name: nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=False)
        for name, parameter in own.items()
        if parameter is not None
    }
    module._parameters.update(whole)
    module._buffers.update({name: torch.empty_like(buffer, device=device) for name, buffer in buffers.items()})
    try:
        with torch.no_grad(), fork_seeded(seed, device):
            initialize(module)
    finally:
        module._parameters.update(own)
    with torch.no_grad():
        for name, parameter in own.items():
            if parameter is not None and parameter.is_meta and id(parameter) not in drawn:
                _fill(parameter, whole[name])
                drawn.add(id(parameter))


def _is_drawn_by_expert(module: nn.Module) -> bool:
    """True for a module whose parameters are those of ``num_experts`` experts, by their first dim."""
    count, own = getattr(module, "num_experts", None), [p for p in module._parameters.values() if p is not None]
    has_experts = isinstance(count, int) and bool(own) and all(p.is_meta and p.ndim > 1 and p.shape[0] == count for p in own)
    return has_experts and not any(buffer is not None for buffer in module._buffers.values())


def _materialize_experts(
    module: nn.Module, initialize: Callable[[nn.Module], None], device: torch.device, seed: int, drawn: set[int]
) -> None:
    """Draws one expert after the other, each from the seed and its number, and only those of which this rank has a part: all experts of a
    layer at once may be larger than a rank's memory."""
    own = {name: p for name, p in module._parameters.items() if p is not None and p.is_meta and id(p) not in drawn}
    bounds = {name: local_bounds(p) for name, p in own.items()}
    parts = {name: torch.empty([stop - start for start, stop in bounds[name]], dtype=p.dtype, device=device) for name, p in own.items()}
    filled = [bound[0] for name, bound in bounds.items() if parts[name].numel()]
    try:
        for expert in range(min((start for start, _ in filled), default=0), max((stop for _, stop in filled), default=0)):
            single = {name: nn.Parameter(torch.empty((1, *p.shape[1:]), dtype=p.dtype, device=device), False) for name, p in own.items()}
            module._parameters.update(single)
            with torch.no_grad(), fork_seeded(derive_seed(seed, expert), device):
                initialize(module)
            for name, ((start, stop), *others) in bounds.items():
                if start <= expert < stop and parts[name].numel():
                    parts[name][expert - start] = single[name].detach()[0][tuple(slice(*bound) for bound in others)]
    finally:
        module._parameters.update(own)
    with torch.no_grad():
        for name, parameter in own.items():
            _replace(parameter, parts[name])
            drawn.add(id(parameter))


def _fill(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    """Puts this rank's part of ``whole`` in place of the parameter's meta storage; the Parameter object stays."""
    _replace(parameter, local_part(whole, parameter).clone() if isinstance(parameter, DTensor) else whole.detach())


def _replace(parameter: nn.Parameter, local: torch.Tensor) -> None:
    """Gives a parameter the storage of ``local``, this rank's part of it."""
    data = local
    if isinstance(parameter, DTensor):
        data = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    torch.utils.swap_tensors(parameter, nn.Parameter(data, requires_grad=parameter.requires_grad))


def reserve(model: nn.Module, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Gives parameters and buffers on the meta device their storage, this rank's part each, and no value: the caller fills them.

    Args:
        tensors: those of the model's that will be filled; one that has storage already is left alone.
        device: where the storage is.
    """
    wanted = {id(tensor) for tensor in tensors}
    buffers: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta and id(parameter) in wanted:
                _replace(parameter, _storage(parameter, device))
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and id(buffer) in wanted:
                if id(buffer) not in buffers:
                    buffers[id(buffer)] = _storage(buffer, device)
                module._buffers[key] = buffers[id(buffer)]


def _storage(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    local = like.to_local() if isinstance(like, DTensor) else like
    return torch.empty(local.shape, dtype=local.dtype, device=device)


def local_bounds(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """(start, stop) in each dim of this rank's part of a tensor, within the whole. No communication."""
    if not isinstance(tensor, DTensor):
        return tuple((0, length) for length in tensor.shape)
    whole = torch.empty(tensor.shape, device="meta")
    part = local_part(whole, tensor)
    if part.numel() == 0:
        return tuple((0, length) for length in part.shape)
    offset, bounds = int(part.storage_offset()), []
    for length, stride in zip(part.shape, whole.stride()):
        start, offset = divmod(offset, stride)
        bounds.append((start, start + length))
    return tuple(bounds)


def local_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a whole tensor under the mesh and placements of ``like``. No communication.

    Later mesh dims split first: tensor parallelism cut the logical tensor, FSDP2 cut what was left of it.
    """
    part = whole
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    for dim in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[dim]
        if not placement.is_replicate():  # Shard, or the strided one that FSDP2 over tensor parallelism makes
            axis = cast(Any, placement).dim
            pieces = part.chunk(like.device_mesh.size(dim), axis)
            index = coordinate[dim]
            part = pieces[index] if index < len(pieces) else part.narrow(axis, 0, 0)
    return part


def same_on_all_ranks(model: nn.Module, device: torch.device, but: Container[int] = ()) -> bool:
    """True when every plain parameter and buffer has the same value on all ranks (compared by two sums and the ends).

    Args:
        but: ids of those that do not matter.
    """
    sums = []
    for tensor in _plain_tensors(model, but):
        value = tensor.detach().flatten().double().nan_to_num()
        sums += [value.sum(), value.abs().sum(), value[0], value[-1]] if value.numel() else []
    mine = torch.stack([value.to(device) for value in sums]) if sums else torch.zeros(1, dtype=torch.float64, device=device)
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return bool(torch.equal(low, high))


def broadcast_from_first(model: nn.Module, device: torch.device, but: Container[int] = ()) -> None:
    """Gives every rank the plain parameters and buffers of rank 0, one tensor at a time, without those of the ids in ``but``."""
    with torch.no_grad():
        for tensor in _plain_tensors(model, but):
            moved = tensor.detach().to(device).contiguous()
            dist.broadcast(moved, 0)
            tensor.copy_(moved)


def _plain_tensors(model: nn.Module, but: Container[int]) -> list[torch.Tensor]:
    tensors = (*model.parameters(), *model.buffers())
    return [tensor for tensor in tensors if not isinstance(tensor, DTensor) and not tensor.is_meta and id(tensor) not in but]
