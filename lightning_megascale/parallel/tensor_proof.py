"""Numeric proof of tensor parallelism: at the first training call of each kind of block, a split copy must give a whole copy's numbers.

Rules on structure (tensor_check.py) cannot see what a forward does with its part of the heads and features. So before anything is split
a copy without storage is kept of one block of each kind; with the real inputs it is run whole and run split, with drawn weights and
random cotangents, and every output and gradient is compared. The real block is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_megascale.layout import ModelLayout
from lightning_megascale.ops.tensor_parallel import TensorAxis, tensor_axis
from lightning_megascale.parallel import tensor_proof_run as runs
from lightning_megascale.parallel.init import local_part
from lightning_megascale.parallel.mixin import become
from lightning_megascale.parallel.tensor import split_modules
from lightning_megascale.parallel.tensor_check import Roles

_enabled = True  # for tests of the proof itself

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_ROLES = tuple(role for role in Roles.__dataclass_fields__ if role != "model")
_ROOT = "block"  # the copy's name in its holder

# dtype -> largest relative error, and the share of a typical gradient below which a gradient counts as zero
_TOLERANCE = {torch.float64: (1e-6, 1e-2), torch.float32: (1e-3, 1e-2), torch.bfloat16: (0.1, 0.3), torch.float16: (0.05, 0.3)}


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
    split = (*roles.colwise, *roles.rowwise)
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


def _inside(names: tuple[str, ...], block: str) -> tuple[str, ...]:
    """The names at or below ``block``, as they are in the copy's holder."""
    return tuple(f"{_ROOT}.{name.removeprefix(block).lstrip('.')}".rstrip(".") for name in names if _within(name, block))


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
            f"the linears {', '.join(kind.part.colwise)} lie directly in the {kind.type}, whose forward no step calls, so their split cannot be "
            "proven at the first call: put them into a child module with a forward of its own"
        )
    try:
        return runs.structure_of(model.get_submodule(kind.name), model)
    except Exception as error:
        raise ValueError(
            f"{kind.name} ({kind.type}) cannot be copied with copy.deepcopy, which the numeric proof of tensor parallelism needs: "
            f"{type(error).__name__}: {error}. Keep objects that cannot be copied outside of the block, or give them __deepcopy__"
        ) from error


@dataclass
class Kind:
    """Blocks that compute alike.

    Args:
        name, type: the first one's name and class, for messages.
        part: its roles, named as in the copy's holder.
        names: of all of them.
        structure: the copy without storage.
        armed: the real blocks that wait for their first call, with the classes they had.
    """

    name: str
    type: str
    part: Roles
    names: list[str] = field(default_factory=list)
    structure: nn.Module | None = None
    armed: list[tuple[nn.Module, type]] = field(default_factory=list)

    def disarm(self) -> None:
        for module, kind in self.armed:
            module.__class__ = kind
            del module.__dict__["_tensor_proof"]
        self.armed, self.structure = [], None


class Proof:
    """The kinds of blocks to be proven; see ``prepare_proof``."""

    def __init__(self, mesh_tp: DeviceMesh, sequence_parallel: bool) -> None:
        self.mesh, self.sequence = mesh_tp, sequence_parallel
        self.axis: TensorAxis = tensor_axis(mesh_tp.get_group())
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

    def prove(self, kind: Kind, real: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Runs the copy whole and split on a call's arguments.

        Raises:
            ValueError: on all ranks of the axis alike, when the numbers differ or a copy cannot run.
        """
        tensors = [*real.parameters(), *real.buffers()]
        device = next((tensor.device for tensor in _tensors(args, kwargs)), tensors[0].device)
        runs.isolated(lambda: _Attempt(self, kind, real, device).prove(args, kwargs), device)


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
        waiting.proof.prove(waiting.kind, module, args, kwargs)
        waiting.kind.disarm()
    if "_tensor_proof" in module.__dict__:  # a user's copy of a block, made while it waited
        module.__class__ = next(kind for kind in type(module).__mro__ if not issubclass(kind, ProvenOnFirstCall))
        del module.__dict__["_tensor_proof"]


# ---- one proof ---------------------------------------------------------------------------------------------------------------------


class _Failed(Exception):
    """A copy that could not run, on this rank or another."""


class _Attempt:
    def __init__(self, proof: Proof, kind: Kind, real: nn.Module, device: torch.device) -> None:
        self.mesh, self.axis, self.sequence = proof.mesh, proof.axis, proof.sequence
        self.kind, self.real, self.device = kind, real, device

    def prove(self, args: tuple, kwargs: dict[str, Any]) -> None:
        assert self.kind.structure is not None
        order = runs.parameter_names(self.kind.structure)
        given = runs.Given.of(order, args, kwargs, self.axis, self.sequence and not self.kind.part.embedding)
        exact = torch.float64 if self.device.type == "cpu" else torch.float32
        used = next((leaf.dtype for leaf in given.leaves if isinstance(leaf, Tensor) and leaf.dtype in _TOLERANCE), exact)
        for dtype in dict.fromkeys((exact, used)):  # kernels of half precision only take what the run gives them
            with runs.precise(self.device, dtype):
                try:
                    whole, cotangents = self._whole(given, dtype)
                except _Failed as failed:
                    error: BaseException | None = failed.__cause__
                    continue
                self._compare(given, dtype, whole, cotangents)
                return
        raise ValueError(
            f"{self._called()}: the numeric proof of tensor parallelism cannot run its copy whole, with drawn weights and the inputs of the first "
            f"call: {type(error).__name__}: {error}. A block must compute what its arguments and its own parameters and buffers say"
        ) from error

    def _called(self) -> str:
        return f"{self.kind.name or 'the model'} ({self.kind.type})"

    def _agreed(self, function: Callable[[], Any]) -> Any:
        """The result, if no rank failed."""
        error, result = None, None
        try:
            result = function()
        except Exception as caught:
            error = caught
        if self._max([float(error is not None)])[0]:
            raise _Failed from error or RuntimeError("another rank failed")
        return result

    def _max(self, values: list[float]) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.mesh.get_group())
        return numbers.tolist()

    def _whole(self, given: runs.Given, dtype: torch.dtype) -> tuple[runs.Ran, list[Tensor]]:
        assert self.kind.structure is not None
        block = runs.drawn(self.kind.structure, self.real, self.device, dtype)

        def run() -> tuple[runs.Ran, list[Tensor]]:
            outputs, inputs = runs.forward(block, given, self.device, dtype, whole=True)
            cotangents = runs.random_like(outputs)
            return runs.backward(block, outputs, cotangents, inputs), cotangents

        return self._agreed(run)

    def _compare(self, given: runs.Given, dtype: torch.dtype, whole: runs.Ran, cotangents: list[Tensor]) -> None:
        assert self.kind.structure is not None
        holder = nn.Module()
        block = runs.drawn(self.kind.structure, self.real, self.device, dtype)
        holder.add_module(_ROOT, block)
        roles = replace(self.kind.part, model=holder)
        partial = split_modules(holder, self.mesh, roles, sequence_parallel=self.sequence)
        try:
            outputs, inputs = self._agreed(lambda: runs.forward(block, given, self.device, dtype, whole=False))
            parts = [self._part(tensor, like) for tensor, like in zip(cotangents, outputs)]
            shapes = [tuple(part.shape) == tuple(output.shape) for part, output in zip(parts, outputs)]
            if self._max([float(len(outputs) != len(cotangents) or not all(shapes))])[0]:
                raise self._other_shapes(cotangents, outputs)
            split = self._agreed(lambda: runs.backward(block, outputs, parts, inputs))
        except _Failed as failed:
            raise self._cannot_run(failed.__cause__) from failed.__cause__
        errors = self._errors(given, whole, split, dict(block.named_parameters()), partial, _TOLERANCE[dtype][1])
        worst = dict(zip(errors, self._max(list(errors.values()))))
        wrong = next((item for item, error in worst.items() if not error <= _TOLERANCE[dtype][0]), None)
        if wrong is not None:
            raise ValueError(self._message(wrong, worst[wrong]))

    def _part(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's part of the sequence, where ``like`` is one."""
        if self.sequence and whole.ndim >= 2 and whole.shape != like.shape and whole.shape[1] == like.shape[1:2].numel() * self.axis.size:
            return whole.chunk(self.axis.size, 1)[self.axis.rank]
        return whole

    def _errors(
        self,
        given: runs.Given,
        whole: runs.Ran,
        split: runs.Ran,
        parameters: dict[str, nn.Parameter],
        partial: list[str],
        floor: float,
    ) -> dict[tuple[str, Any], float]:
        """Relative errors by (kind, name), in the order outputs, inputs, parameters."""
        errors: dict[tuple[str, Any], float] = {}
        for i, (wanted, got) in enumerate(zip(whole.outputs, split.outputs)):
            errors["output", i] = _error(self._part(wanted, got), got, _scale([wanted]) * floor)
        typical = _scale(whole.inputs.values()) * floor
        for i, gradient in split.inputs.items():
            wanted = whole.inputs[i]
            got = torch.zeros(given.leaves[i].shape, device=self.device) if gradient is None else gradient
            part = torch.zeros_like(got) if wanted is None else self._part(wanted, got)
            errors["input", (i, given.names[i], i not in given.shards and i != given.hidden)] = _error(part, got, typical)
        typical = _scale(whole.parameters.values()) * floor
        for name, gradient in split.parameters.items():
            errors["parameter", name] = self._parameter_error(name, parameters[name], whole.parameters[name], gradient, partial, typical)
        return errors

    def _parameter_error(
        self, name: str, parameter: Tensor, wanted: Tensor | None, gradient: Tensor | None, partial: list[str], typical: Tensor
    ) -> float:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        got = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        got = torch.zeros_like(local) if got is None else got.detach().clone()
        if f"{_ROOT}.{name}" in partial:
            dist.all_reduce(got, group=self.mesh.get_group())
        if wanted is None:
            wanted = torch.zeros_like(got)
        elif isinstance(parameter, DTensor):
            wanted = local_part(wanted, parameter)
        return _error(wanted, got, typical)

    # ---- messages ------------------------------------------------------------------------------------------------------------------

    def _plan(self) -> str:
        return f"tensor_parallel_size={self.axis.size}" + (" with sequence_parallel" if self.sequence else "")

    def _cannot_run(self, error: BaseException | None) -> ValueError:
        text = str(error)
        if isinstance(error, ValueError) and text.startswith(_ROOT) and self.kind.name:
            return ValueError(self.kind.name + text.removeprefix(_ROOT))  # a check of ours, with the module's name in front
        return ValueError(
            f"{self._called()}: runs on one device, but not under {self._plan()}: {type(error).__name__}: {text}. Read every size from a projected "
            f"tensor, never from a setting of the whole layer.\n{_CAUSES['output']}"
        )

    def _other_shapes(self, wanted: list[Tensor], got: list[Tensor]) -> ValueError:
        shapes = [", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none" for tensors in (wanted, got)]
        return ValueError(
            f"{self._called()}: under {self._plan()} its floating outputs have the shapes {shapes[1]}; on one device {shapes[0]}.\n{_CAUSES['output']}"
        )

    def _message(self, wrong: tuple[str, Any], error: float) -> str:
        kind, name = wrong
        second = kind == "input" and name[2]
        what = {
            "output": f"output {name}" if kind == "output" else "",
            "input": f"the gradient of its argument {name[1]!r}" if kind == "input" else "",
            "parameter": f"the gradient of its parameter {name}",
        }[kind]
        others = f" and {len(self.kind.names) - 1} blocks like it" if len(self.kind.names) > 1 else ""
        causes = _CAUSES["second"] if second else _CAUSES[kind]
        if self.sequence:
            causes += _SEQUENCE
        return (
            f"{self._called()}{others}: under {self._plan()} it does not compute what it computes on one device: {what} is off by "
            f"{error:.1e} of its size (numeric proof at the first training call, weights drawn at random). Nothing was trained.\n{causes}"
        )


_CAUSES = {
    "output": (
        "Likely causes:\n"
        "- inside attention or mlp an operation goes over the heads or features, of which a rank has a part: a norm, softmax, top-k or mean "
        "over them; chunk or split of a fused projection (use one linear per projection); a table per head that is sliced (slopes[:n]); "
        "key/value heads repeated by tiling (use repeat_interleave, or enable_gqa)\n"
        "- dropout is drawn inside attention or mlp (F.dropout, dropout_p=): set it to 0 there, or use nn.Dropout behind the row-parallel linear\n"
        "- a linear has the wrong role in the layout: colwise and rowwise must alternate, one rowwise linear after the colwise ones"
    ),
    "input": (
        "Likely causes:\n"
        "- the module that works on a part of the heads or features is not listed in layout.attention or layout.mlp\n"
        "- inside attention or mlp the input reaches the output around the row-parallel linear (a residual, a gate): its gradient is then counted "
        "once per rank; do it outside of the module\n"
        "- an output besides the row-parallel linear's own depends on this rank's heads only (attention weights, a statistic)"
    ),
    "second": (
        "Likely cause: attention or mlp uses it together with a part of the heads or features, and only the gradient of the module's FIRST argument is "
        "summed over the ranks; this one stays a partial sum. Combine it with the hidden state before the module, detach it, or pass it as the "
        "module's first argument"
    ),
    "parameter": (
        "Likely causes:\n"
        "- it works on a part of the heads or features and is not listed in layout.replicated (whole on every rank, gradients summed), which also "
        "needs its attention or mlp module listed in layout.attention or layout.mlp\n"
        "- it is listed in layout.replicated but works behind the row-parallel linear, where its gradient is whole and would be counted once per "
        "rank: move it out of the attention or mlp module\n"
        "- its attention or mlp module also returns something that depends on this rank's heads only"
    ),
}  # fmt: skip

_SEQUENCE = (
    "\n- under sequence_parallel the block outside of attention and mlp sees a part of the positions: what mixes positions there (a shift, cumsum, mean or "
    "convolution over the sequence) or draws by itself (F.dropout: use nn.Dropout) is wrong; do it inside of the attention or mlp module, or set "
    "sequence_parallel=False"
)


def _scale(tensors: Any) -> Tensor:
    """The root mean square of the largest of some tensors."""
    sizes = [tensor.norm() / max(tensor.numel(), 1) ** 0.5 for tensor in tensors if tensor is not None]
    return torch.stack(sizes).nan_to_num(0, 0, 0).max() if sizes else torch.zeros(())


def _error(wanted: Tensor, got: Tensor, floor: Tensor) -> float:
    """|got - wanted| / max(|wanted|, floor * sqrt(elements)); what is not finite must not be finite in both."""
    if wanted.shape != got.shape or not torch.equal(wanted.isfinite(), got.isfinite()):
        return float("inf")
    wanted, got = wanted.nan_to_num(0, 0, 0), got.nan_to_num(0, 0, 0)
    size = torch.maximum(wanted.norm(), floor.to(wanted) * wanted.numel() ** 0.5)
    off = (got - wanted).norm()
    return 0.0 if off == 0 else (off / size).item()


def _tensors(args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
