"""Rows of a tensor to and from other ranks in unequal numbers, with gradients; the group is plain values.

A start returns at once and a finish waits, forward and backward alike, so what stands between the two is computed while rows travel.
Rows of no rank are never sent: a group of one rank copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megascale.ops.tensor_parallel import TensorAxis

_c10d = torch.ops._c10d_functional


class Hop(NamedTuple):
    """One exchange inside a group.

    Attributes:
        axis: the group.
        sends: rows for each of its ranks; the rows of a tensor lie in that order.
        receives: rows from each of them.
    """

    axis: TensorAxis
    sends: tuple[int, ...]
    receives: tuple[int, ...]

    @classmethod
    def of(cls, axis: TensorAxis, sends: Sequence[int], receives: Sequence[int]) -> Hop:
        """From any sequences of numbers."""
        return cls(axis, tuple(sends), tuple(receives))

    def back(self) -> Hop:
        """The way back of the same rows."""
        return Hop(self.axis, self.receives, self.sends)


@dataclass(eq=False)
class Travelling:
    """Rows on their way. ``returning``: their gradient on its way back, which only the start of the exchange reads."""

    rows: Tensor
    hop: Hop
    returning: list[Tensor]


def start_exchange(rows: Tensor, hop: Hop) -> Travelling:
    """Starts sending ``rows``; ``finish_exchange`` gives what arrives.

    Args:
        rows: (sum of sends, ...), in the order of the group's ranks.
        hop: who gets how many.
    """
    returning: list[Tensor] = []
    return Travelling(_Start.apply(rows, hop, returning), hop, returning)


def finish_exchange(travelling: Travelling) -> Tensor:
    """Waits; (sum of receives, ...), in the order of the group's ranks."""
    arrived: Tensor = _Finish.apply(travelling.rows, travelling.hop, travelling.returning)
    return arrived


def exchange(rows: Tensor, hop: Hop) -> Tensor:
    """``start_exchange`` and ``finish_exchange``."""
    return finish_exchange(start_exchange(rows, hop))


def _send(rows: Tensor, hop: Hop) -> Tensor:
    if hop.axis.size == 1:
        return rows.contiguous()
    return _c10d.all_to_all_single(rows.contiguous(), list(hop.receives), list(hop.sends), hop.axis.name)


def _wait(pending: Tensor, hop: Hop) -> Tensor:
    return pending if hop.axis.size == 1 else _c10d.wait_tensor(pending)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, hop: Hop, returning: list[Tensor]) -> Tensor:
        ctx.hop, ctx.returning = hop, returning
        sent = _send(rows, hop)
        return sent.view_as(sent) if sent is rows else sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        return _wait(ctx.returning.pop(), ctx.hop), None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Tensor, hop: Hop, returning: list[Tensor]) -> Tensor:
        ctx.hop, ctx.returning = hop, returning
        arrived = _wait(pending, hop)
        return arrived.view_as(arrived) if arrived is pending else arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.returning.append(_send(gradient, ctx.hop.back()))
        return gradient.new_zeros(()).expand_as(gradient), None, None  # autograd wants this shape; the start reads ``returning``


@torch.library.custom_op("lightning_megascale::sum_rows_back", mutates_args=())
def _sum_rows_back(rows: Tensor, places: Tensor, count: int, sends: list[int], receives: list[int], name: str, size: int) -> Tensor:
    """An operator of its own: what recomputation keeps of it is the sum, not the rows that came."""
    hop = Hop.of(TensorAxis(name, size, 0), sends, receives)
    returned = _wait(_send(rows, hop), hop)
    return returned.new_zeros((count, *rows.shape[1:])).index_add_(0, places, returned)


class _SumBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, count: int, hop: Hop) -> Tensor:
        ctx.hop = hop
        ctx.save_for_backward(places)
        return _sum_rows_back(rows, places, count, list(hop.sends), list(hop.receives), hop.axis.name, hop.axis.size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        hop = ctx.hop.back()
        return _wait(_send(gradient.index_select(0, places), hop), hop), None, None, None


def sum_rows_back(rows: Tensor, places: Tensor, count: int, hop: Hop) -> Tensor:
    """Sends rows back to where they came from and adds them up there.

    Args:
        rows: (sum of sends, D), results on this rank.
        places: (sum of receives,) which of the results a row that comes back belongs to.
        count: number of results.
        hop: the way back.

    Returns:
        (count, D); a place that gets no row is 0.
    """
    summed: Tensor = _SumBack.apply(rows, places, count, hop)
    return summed


SUM_ROWS_BACK = torch.ops.lightning_megascale.sum_rows_back.default
ALL_TO_ALL = _c10d.all_to_all_single.default
