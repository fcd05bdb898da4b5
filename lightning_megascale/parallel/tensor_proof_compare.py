"""One numeric proof of tensor parallelism: a block's copy run whole and run split on the arguments of a call, and the comparison."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, current_token_mask, weighed_as
from lightning_megascale.ops.tensor_parallel import tensor_axis
from lightning_megascale.parallel.init import local_part
from lightning_megascale.parallel.tensor import split_modules
from lightning_megascale.parallel.tensor_proof_messages import Called
from lightning_megascale.parallel.tensor_proof_run import (
    DtypesSeen,
    Given,
    Ran,
    backward,
    drawn,
    forward,
    isolated,
    parameter_names,
    precise,
    random_like,
)
from lightning_megascale.parallel.tensor_roles import Roles

log = logging.getLogger(__name__)

COPY = "block"  # the copy's name in its holder, which roles are relative to

# dtype -> largest relative error, and the share of a typical gradient below which a gradient counts as zero
_TOLERANCE = {torch.float64: (1e-6, 1e-2), torch.float32: (1e-3, 1e-2), torch.bfloat16: (0.1, 0.3), torch.float16: (0.05, 0.3)}

_Result = TypeVar("_Result")


@dataclass
class Subject:
    """What is proven: blocks that compute alike.

    Args:
        name, type: the first one's name and class, for messages.
        part: its roles, named as in the copy's holder.
        names: of all of them.
        structure: the copy without storage; None once it is proven.
    """

    name: str
    type: str
    part: Roles
    names: list[str] = field(default_factory=list)
    structure: nn.Module | None = None


class _Failed(Exception):
    """A copy could not run, on this rank or on another."""


@dataclass
class _Item:
    """One compared tensor: how messages call it, the causes that fit it, and its relative error."""

    what: str
    causes: str
    error: float


class Attempt:
    """Runs the copy of ``subject`` with what ``real``, one of its blocks, has: buffers, modes, frozen parameters."""

    def __init__(self, mesh_tp: DeviceMesh, sequence_parallel: bool, subject: Subject, real: nn.Module) -> None:
        assert subject.structure is not None
        self.mesh, self.axis, self.sequence = mesh_tp, tensor_axis(mesh_tp.get_group()), sequence_parallel
        self.subject, self.real, self.structure = subject, real, subject.structure
        self.called = Called(subject.name, subject.type, len(subject.names), self.axis.size, sequence_parallel)

    def prove(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Proves it on a call's arguments.

        Raises:
            ValueError: on all ranks of the axis alike, when the numbers differ or a copy cannot run.
        """
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.device = next(iter((*tensors, *self.real.parameters()))).device
        with weighed_as(MicrobatchWeight(1.0, 1.0, current_token_mask())):  # its backward comes before the step's weight is known
            isolated(lambda: self._prove(args, kwargs), self.device)

    def _prove(self, args: tuple, kwargs: dict[str, Any]) -> None:
        has_shards = self.sequence and not self.subject.part.embedding
        given = Given.of(parameter_names(self.structure), args, kwargs, self.axis, has_shards)
        exact = torch.float64 if self.device.type == "cpu" else torch.float32
        used = next((leaf.dtype for leaf in given.leaves if isinstance(leaf, Tensor) and leaf.dtype in _TOLERANCE), exact)
        error: BaseException | None = None
        for self.dtype in dict.fromkeys((exact, used)):  # some kernels take nothing but the dtype of the real call
            with precise(self.device, self.dtype):
                try:
                    whole, cotangents = self._agreed(lambda: self._run_whole(given))
                except _Failed as failed:
                    error = failed.__cause__
                    continue
                return self._run_split_and_compare(given, whole, cotangents)
        raise self.called.no_copy(error) from error

    # ---- the two runs --------------------------------------------------------------------------------------------------------------

    def _run_whole(self, given: Given) -> tuple[Ran, list[Tensor]]:
        block = drawn(self.structure, self.real, self.device, self.dtype)
        outputs, inputs = forward(block, given, self.device, self.dtype, whole=True)
        cotangents = random_like(outputs)
        return backward(block, outputs, cotangents, inputs), cotangents

    def _run_split_and_compare(self, given: Given, whole: Ran, cotangents: list[Tensor]) -> None:
        holder = nn.Module()
        block = drawn(self.structure, self.real, self.device, self.dtype)
        holder.add_module(COPY, block)
        partial = split_modules(holder, self.mesh, replace(self.subject.part, model=holder), sequence_parallel=self.sequence)
        try:
            outputs, inputs = self._agreed(lambda: forward(block, given, self.device, self.dtype, whole=False))
            parts = [self._part(tensor, like) for tensor, like in zip(cotangents, outputs)]
            wanted, got = [[tuple(tensor.shape) for tensor in tensors] for tensors in (parts, outputs)]
            if self._max([float(wanted != got or len(outputs) != len(cotangents))])[0]:
                raise self.called.other_shapes([tuple(tensor.shape) for tensor in cotangents], got)
            split = self._agreed(lambda: backward(block, outputs, parts, inputs))
        except _Failed as failed:
            raise self._cannot_run(failed.__cause__) from failed.__cause__
        items = list(self._items(given, whole, split, dict(block.named_parameters()), partial))
        self._refuse_difference(given, items)

    def _cannot_run(self, error: BaseException | None) -> ValueError:
        if isinstance(error, ValueError) and str(error).startswith(COPY) and self.subject.name:
            return ValueError(self.subject.name + str(error).removeprefix(COPY))  # a check of ours, with the module's name in front
        return self.called.no_split(error)

    def _agreed(self, function: Callable[[], _Result]) -> _Result:
        """The result, if no rank failed."""
        error: Exception | None = None
        try:
            result = function()
        except Exception as caught:  # noqa: BLE001 - whatever a user's forward raises; raised again below, on all ranks
            error = caught
        if self._max([float(error is not None)])[0]:
            raise _Failed from error or RuntimeError("another rank failed")
        return result

    def _max(self, values: list[float]) -> list[float]:
        """The largest of each value over the ranks of the axis."""
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.mesh.get_group())
        return numbers.tolist()

    # ---- the comparison ------------------------------------------------------------------------------------------------------------

    def _refuse_difference(self, given: Given, items: list[_Item]) -> None:
        errors = self._max([item.error for item in items])
        tolerance = _TOLERANCE[self.dtype][0]
        if tolerance < max(errors, default=0.0) <= max(_TOLERANCE.values())[0]:  # large for this dtype, but perhaps not for one used inside
            tolerance = self._max([max(_TOLERANCE[dtype][0] for dtype in (self.dtype, *self._dtypes_inside(given)))])[0]
        for item, error in zip(items, errors):
            if not error <= tolerance:
                raise self.called.differs(item.what, item.causes, error)

    def _dtypes_inside(self, given: Given) -> set[torch.dtype]:
        """The dtypes that the block computes in whatever it is given, as an autocast of its own makes it."""
        block = drawn(self.structure, self.real, self.device, self.dtype)
        try:
            with DtypesSeen() as seen, torch.no_grad():
                forward(block, given, self.device, self.dtype, whole=True)
        except Exception as error:  # noqa: BLE001 - an operator that refuses dispatch modes: the block is judged by its own dtype
            log.debug("dtypes inside %s are not known: %s", self.called, error)
            return set()
        return seen.found & _TOLERANCE.keys()

    def _part(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's part of the sequence, where ``like`` is one."""
        if self.sequence and whole.shape != like.shape and whole.shape[1:2].numel() == like.shape[1:2].numel() * self.axis.size:
            return whole.chunk(self.axis.size, 1)[self.axis.rank]
        return whole

    def _items(self, given: Given, whole: Ran, split: Ran, parameters: dict[str, nn.Parameter], partial: list[str]) -> Iterable[_Item]:
        """All comparisons, in an order that is equal on all ranks: outputs, inputs, parameters."""
        floor = _TOLERANCE[self.dtype][1]
        for i, (wanted, got) in enumerate(zip(whole.outputs, split.outputs)):
            yield _Item(f"output {i}", "output", _error(self._part(wanted, got), got, _typical([wanted]) * floor))
        typical = _typical(whole.inputs.values()) * floor
        for i, gradient in split.inputs.items():
            reference = whole.inputs[i]
            got = torch.zeros(given.leaves[i].shape, dtype=self.dtype, device=self.device) if gradient is None else gradient
            wanted = torch.zeros_like(got) if reference is None else self._part(reference, got)
            causes = "hidden" if i == given.hidden else "second"
            yield _Item(f"the gradient of its argument {given.names[i]!r}", causes, _error(wanted, got, typical))
        typical = _typical(whole.parameters.values()) * floor
        for name, gradient in split.parameters.items():
            pair = self._parameter_pair(parameters[name], whole.parameters[name], gradient, f"{COPY}.{name}" in partial)
            yield _Item(f"the gradient of its parameter {name!r}", "parameter", _error(*pair, typical))

    def _parameter_pair(self, parameter: Tensor, wanted: Tensor | None, got: Tensor | None, partial: bool) -> tuple[Tensor, Tensor]:
        """The wanted gradient and the one after the strategy's sum, on this rank's part of the parameter."""
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        mine = got.to_local() if isinstance(got, DTensor) else got
        mine = torch.zeros_like(local) if mine is None else mine.detach().clone()
        if partial:
            dist.all_reduce(mine, group=self.mesh.get_group())
        if wanted is None:
            return torch.zeros_like(mine), mine
        return (local_part(wanted, parameter) if isinstance(parameter, DTensor) else wanted), mine


def _typical(tensors: Iterable[Tensor | None]) -> Tensor:
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
