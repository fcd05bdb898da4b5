"""Numeric proof of tensor parallelism: at the first training call of each kind of block, a split copy must give a whole copy's numbers.

Rules on structure (tensor_check.py) cannot see what a forward does with its part of the heads and features. So before anything is split
a copy without storage is kept of one block of each kind; with the real inputs it is run whole and run split, with drawn weights and
random cotangents, and every output and gradient is compared. The real block is not touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_megascale.layout import ModelLayout
from lightning_megascale.parallel.mixin import become
from lightning_megascale.parallel.tensor_proof_compare import COPY, Attempt, Subject
from lightning_megascale.parallel.tensor_proof_run import structure_of
from lightning_megascale.parallel.tensor_roles import Roles

_enabled = True  # for tests of the proof itself

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_ROLES = tuple(role for role in Roles.__dataclass_fields__ if role != "model")


def prepare_proof(model: nn.Module, layout: ModelLayout, mesh_tp: DeviceMesh, *, sequence_parallel: bool) -> Proof:
    """Keeps a copy on the meta device of one block of each kind of a model that was checked and not yet split.

    Args:
        model, layout, mesh_tp, sequence_parallel: as for ``apply_tensor_parallel``.

    Raises:
        ValueError: for a block that cannot be copied or is not called by itself.
    """
    roles = Roles.of(model, layout)
    proof = Proof(mesh_tp, sequence_parallel)
    kinds: dict[Any, Kind] = {}
    for name in proved_modules(model, roles, sequence_parallel) if _enabled else ():
        module = model.get_submodule(name)
        part = replace(roles, model=model, **{role: _inside(getattr(roles, role), name) for role in _ROLES})
        kind = kinds.setdefault(_fingerprint(module, part), Kind(name, type(module).__name__, part))
        kind.names.append(name)
    for kind in kinds.values():
        kind.structure = _structure(kind, model)
    proof.kinds = list(kinds.values())
    return proof


def proved_modules(model: nn.Module, roles: Roles, sequence_parallel: bool) -> list[str]:
    """Names of the modules that are run twice: the blocks that hold split linears (under ``sequence_parallel`` all blocks), and for the
    linears outside of them the smallest module that holds a column- and a row-parallel one; never a part of attention or MLP."""
    split = (*roles.colwise, *roles.rowwise, *roles.gathered, *roles.experts)
    found = [name for name in roles.blocks if sequence_parallel or any(_within(linear, name) for linear in split)]
    outside = [name for name in split if not any(_within(name, block) for block in roles.blocks)]
    columns, rows = [[n for n in outside if n in group] for group in (roles.colwise, roles.rowwise)]
    for linear in outside:
        parts = linear.split(".")
        above = [".".join(parts[:depth]) for depth in reversed(range(len(parts)))]
        holders = [name for name in above if any(_within(n, name) for n in columns) and any(_within(n, name) for n in rows)]
        holders = [name for name in holders if not any(_within(block, name) for block in roles.blocks)]
        found.append(next((name for name in holders if not isinstance(model.get_submodule(name), _CONTAINERS)), linear))
    owners = [min((owner for owner in roles.parallel_modules if _within(name, owner)), key=len, default=name) for name in found]
    return [name for name in dict.fromkeys(owners) if not any(name != other and _within(name, other) for other in owners)]


def _within(name: str, owner: str) -> bool:
    return owner in ("", name) or name.startswith(owner + ".")


def _inside(entries: tuple[Any, ...], block: str) -> tuple[Any, ...]:
    """The names at or below ``block``, as they are in the copy's holder; of pairs the first is the name."""
    found = []
    for entry in entries:
        name, *rest = (entry,) if isinstance(entry, str) else entry
        if _within(name, block):
            moved = f"{COPY}.{name.removeprefix(block).lstrip('.')}".rstrip(".")
            found.append((moved, *rest) if rest else moved)
    return tuple(found)


def _fingerprint(block: nn.Module, part: Roles) -> Any:
    """Equal for blocks that compute alike: classes, shapes, roles and switches; numbers such as a layer's index are no switches."""
    rows = []
    for name, module in block.named_modules():
        shapes = tuple(
            (key, tuple(tensor.shape)) for key, tensor in (*module._parameters.items(), *module._buffers.items()) if tensor is not None
        )
        switches = tuple(
            (k, v if isinstance(v, (bool, str)) else v > 0) for k, v in vars(module).items() if isinstance(v, (bool, str, float))
        )
        rows.append((name, type(module), shapes, switches))
    return tuple(rows), tuple(getattr(part, role) for role in _ROLES)


def _structure(kind: Kind, model: nn.Module) -> nn.Module:
    if hasattr(model.get_submodule(kind.name), "training_step"):
        raise ValueError(
            f"the linears {', '.join(name.partition('.')[2] for name in kind.part.colwise)} lie directly in the {kind.type}, whose forward "
            "no step calls, so their split cannot be proven at the first call: put them into a child module with a forward of its own"
        )
    try:
        return structure_of(model.get_submodule(kind.name), model)
    except Exception as error:
        raise ValueError(
            f"{kind.name or 'the model'} ({kind.type}) cannot be copied with copy.deepcopy, as the numeric proof of tensor parallelism "
            f"needs: {type(error).__name__}: {error}. Keep objects that cannot be copied outside of the block, or give them __deepcopy__"
        ) from error


@dataclass
class Kind(Subject):
    """Blocks that compute alike: what a proof needs of them, and those that wait for their first call, with the classes they had."""

    armed: list[tuple[nn.Module, type]] = field(default_factory=list)

    def disarm(self) -> None:
        """Gives all of them their classes back, before any of them runs: a compiler then sees them as alike as they are."""
        for module, kind in self.armed:
            module.__class__ = kind
            del module.__dict__["_tensor_proof"]
        self.armed, self.structure = [], None


class Proof:
    """The kinds of blocks to be proven; see ``prepare_proof``."""

    def __init__(self, mesh_tp: DeviceMesh, sequence_parallel: bool) -> None:
        self.mesh, self.sequence = mesh_tp, sequence_parallel
        self.kinds: list[Kind] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Proof:
        return self  # a user's copy of the model waits for the same proof

    def arm(self, model: nn.Module) -> None:
        """Makes the first call with gradients of each kind of block run the proof. After everything else has been applied.

        Args:
            model: the one given to ``prepare_proof``, split since.
        """
        for kind in self.kinds:
            for name in kind.names:
                module = model.get_submodule(name)
                kind.armed.append((module, type(module)))
                module.__dict__["_tensor_proof"] = _Waiting(self, kind)
                become(module, ProvenOnFirstCall)


@dataclass
class _Waiting:
    proof: Proof
    kind: Kind

    def __deepcopy__(self, memo: dict[int, Any]) -> _Waiting:
        return self


class ProvenOnFirstCall:
    """A block whose first call with gradients runs the proof. Outside of a compiled call, a checkpoint and FSDP2's hooks."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        waiting: _Waiting = self.__dict__["_tensor_proof"]
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        _prove_once(waiting, self, args, kwargs)
        return self(*args, **kwargs)


@torch.compiler.disable
def _prove_once(waiting: _Waiting, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if waiting.kind.structure is not None:
        Attempt(waiting.proof.mesh, waiting.proof.sequence, waiting.kind, module).prove(args, kwargs)
        waiting.kind.disarm()
    if "_tensor_proof" in module.__dict__:  # a user's copy of a block, made while it waited
        bases: Any = type(module).__mro__
        module.__class__ = next(kind for kind in bases if not issubclass(kind, ProvenOnFirstCall))
        del module.__dict__["_tensor_proof"]
