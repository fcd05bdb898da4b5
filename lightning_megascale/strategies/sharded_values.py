"""Numbers that code reads off sharded parameters and gradients: whole where all ranks read them, refused where one might read alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import grads
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import register_sharding

from lightning_megascale.parallel.clip import total_norm

PART = (
    "a number was read (.item(), float(), int()) off a norm, mean or extreme of a sharded parameter or gradient, and this rank holds its "
    "part of it only: call .full_tensor() on it first, on all ranks, or give it to self.log as it is; of all gradients: strategy.grad_norm"
)
LOGGED_ALONE = (
    "self.log({name!r}, rank_zero_only=True) was given a value of a sharded tensor, of which each rank has a part: log it on all ranks"
)


@functools.cache
def prepare_tensors() -> None:
    """Lets torch's sharded tensors refuse what gives a part without an error, and do what anomaly detection asks. Once in a process."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _read_number
    register_sharding(torch.ops.aten._is_any_true.default)(lambda tensor: [([Replicate()], [Replicate()])])


def _read_number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if _is_part(tensor):
        raise ValueError(PART)
    return op(tensor.to_local())


def _is_part(tensor: Any) -> bool:
    sizes = zip(tensor.placements, tensor.device_mesh.shape)
    return any(size > 1 and not placement.is_replicate() for placement, size in sizes)


def log_whole_values(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """``self.log`` of a sharded tensor's norm or mean logs the whole one. Collective: all ranks log it."""
    log = type(module).log.__get__(module)

    @functools.wraps(log)
    def log_whole(name: str, value: Any, *args: Any, **options: Any) -> None:
        if isinstance(value, DTensor):
            if options.get("rank_zero_only"):
                raise ValueError(LOGGED_ALONE.format(name=name))
            value = value.full_tensor()
        log(name, value, *args, **options)

    module.__dict__["log"] = log_whole
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        callback.log = log_whole


# ---- lightning.pytorch.utilities.grad_norm ---------------------------------------------------------------------------------


_current: list[Any] = []
_stock: CodeType = grads.grad_norm.__code__


def _grad_norm(module, norm_type, group_separator="/"):  # type: ignore[no-untyped-def]
    """Runs under the name of Lightning's ``grad_norm``, which people import in many ways; so it may use nothing of this file."""
    from lightning_megascale.strategies.sharded_values import gradient_norms

    return gradient_norms(module, norm_type, group_separator)


@contextmanager
def stock_grad_norm() -> Iterator[None]:
    grads.grad_norm.__code__ = _stock
    try:
        yield
    finally:
        grads.grad_norm.__code__ = _grad_norm.__code__


def answer_grad_norm(strategy: Any) -> None:
    """Lightning's ``grad_norm`` gives the norms of one device, for the modules of this strategy's run, until ``forget_grad_norm``."""
    _current[:] = [strategy]
    grads.grad_norm.__code__ = _grad_norm.__code__


def forget_grad_norm() -> None:
    _current.clear()
    grads.grad_norm.__code__ = _stock


def gradient_norms(module: nn.Module, norm_type: float | str, group_separator: str) -> dict[str, Any]:
    """As ``lightning.pytorch.utilities.grad_norm``, each parameter's norm and the total over all ranks. Collective.

    Args:
        module: the LightningModule or a module below it; any other has its own norms.
        norm_type: p, at least 1, or "inf".
        group_separator: between the norm's name and the parameter's.
    """
    owner: Any = _current[0].lightning_module if _current else None
    prefix = None if owner is None else next((name for name, child in owner.named_modules() if child is module), None)
    if prefix is None:
        with stock_grad_norm():
            return grads.grad_norm(module, norm_type, group_separator)
    order, held, over = _named_gradients(_current[0], owner)
    start, kind = f"{prefix}." if prefix else "", float(norm_type)
    names = [name for name in order if name.startswith(start)]
    norms: dict[str, Any] = {name: total_norm([held[name]] if name in held else [], kind, **over) for name in names}
    shown = {f"grad_{kind}_norm{group_separator}{name.removeprefix(start)}": norm for name, norm in norms.items()}
    if shown:
        shown[f"grad_{kind}_norm_total"] = torch.stack([norm.double() for norm in norms.values()]).norm(kind)
    return shown


def _named_gradients(strategy: Any, owner: nn.Module) -> tuple[Sequence[str], dict[str, nn.Parameter], dict[str, Any]]:
    """(names in the whole module's order, this rank's parameters with a gradient, what ``total_norm`` has to know)."""
    held = {name: parameter for name, parameter in owner.named_parameters() if parameter.grad is not None}
    pipeline, copies = strategy._spread_of_parameters()
    if pipeline is None:
        return list(held), held, {}
    return strategy.parameter_names, held, {"pipeline": pipeline, "copies": copies}
