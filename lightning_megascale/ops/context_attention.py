"""Exact attention over a sequence that lies on several ranks: keys travel a ring, or are gathered, or heads are exchanged for tokens.

Each function takes this rank's tokens and the runs of every rank (``ops/sequence_layout.py``), so any layout, packing and window is the
same code; what a rank computes of it is in ``context_blocks.py``. Shapes: B batch, N query heads, G key/value heads, L local tokens, H head
dim; W ranks.

Source: Liu et al. 2023, "Ring attention", section 3 (keys travel); Llama 3 (2024), section 3.3.2 (keys are gathered); Jacobs et al. 2023,
"DeepSpeed Ulysses", section 3 (heads for tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megascale.ops.attention import Kernel, wide_dtype
from lightning_megascale.ops.context_blocks import Blocks, Gradients, Pattern, Rows, Segment, Sum, add_to, summed


class _OverRanks(torch.autograd.Function):
    """Attention whose keys come as a ``_Way`` says, there and back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, kernel: Kernel, group: Any, way: _Way) -> Tensor:
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        blocks = Blocks(kernel, pattern, rank, q)
        way.forward(blocks, k, v, group, size)
        out, lse = blocks.output()
        ctx.kernel, ctx.pattern, ctx.way, ctx.group, ctx.place = kernel, pattern, way, group, (rank, size)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, size = ctx.place
        blocks, grad_q = Blocks(ctx.kernel, ctx.pattern, rank, q), Sum(q)

        def about(source: int, k: Tensor, v: Tensor) -> Gradients:
            return blocks.backward(source, k, v, grad, out, lse, grad_q)

        grad_k, grad_v = ctx.way.backward(about, k, v, ctx.group, rank, size)
        return grad_q.wide().to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None


About = Callable[[int, Tensor, Tensor], Gradients]
"""(rank, its keys, its values) -> their gradients from this rank's queries."""


@dataclass(frozen=True)
class _Way:
    """How the keys and values of all ranks, (B, G, L, H), come to the queries.

    Args:
        forward: (blocks, this rank's keys, values, group, size): hands those of all ranks to the blocks, this rank's first.
        backward: (about, this rank's keys, values, group, rank, size) -> their gradients from the queries of all ranks.
    """

    forward: Callable[[Blocks, Tensor, Tensor, Any, int], None]
    backward: Callable[[About, Tensor, Tensor, Any, int, int], tuple[Tensor, Tensor]]


# ---- ring ---------------------------------------------------------------------------------------------------------------------------


def _pass_on(tensor: Tensor, group: dist.ProcessGroup, rank: int, size: int, into: Tensor | None = None) -> tuple[Tensor, list[dist.Work]]:
    """Starts sending to the next rank and receiving from the one before."""
    received = torch.empty_like(tensor) if into is None else into
    following, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    sends = dist.P2POp(dist.isend, tensor, following, group)
    return received, dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, received, before, group)])


def _arrived(passed: tuple[Tensor, list[dist.Work]]) -> Tensor:
    for work in passed[1]:
        work.wait()
    return passed[0]


def _around(k: Tensor, v: Tensor, group: Any, rank: int, size: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(rank, its keys, its values) for every rank, this one first; the next ones travel while these are worked on."""
    if size == 1:
        yield rank, k, v
        return
    kv, spare = torch.stack((k, v)), None  # (2, B, G, L, H), one message
    for step in range(size):
        following = _pass_on(kv, group, rank, size, spare) if step < size - 1 else None
        yield (rank - step) % size, kv[0], kv[1]
        if following is not None:
            kv, spare = _arrived(following), kv


def _ring_forward(blocks: Blocks, k: Tensor, v: Tensor, group: Any, size: int) -> None:
    for source, keys, values in _around(k, v, group, blocks.rank, size):
        blocks.forward(source, keys, values)


def _ring_backward(about: About, k: Tensor, v: Tensor, group: Any, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Gradients follow their keys, start one rank on, and come home after W - 1 hops."""
    travelling, spare = None, None  # gradients of the keys that come next; the last ones sent
    for source, keys, values in _around(k, v, group, rank, size):
        gradients = about(source, keys, values)
        if source == rank:
            grad_k, grad_v = summed(k, gradients)
            continue
        if travelling is None:
            message = torch.stack(summed(k, gradients))
        else:
            spare, message = message, _arrived(travelling)
            add_to(message, gradients)
        travelling = _pass_on(message, group, rank, size, spare)
    if travelling is not None:
        home = _arrived(travelling)
        grad_k += home[0]
        grad_v += home[1]
    return grad_k, grad_v


_RING = _Way(_ring_forward, _ring_backward)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, kernel: Kernel, group: dist.ProcessGroup | None) -> Tensor:
    """Attention with keys that travel from rank to rank; W - 1 messages of keys forward, and in backward as many of keys and of gradients.

    Args:
        q: (B, N, L, H) this rank's queries.
        k, v: (B, G, L, H) its keys and values; G divides N.
        pattern: who sees whom.
        kernel: of blocks.
        group: the context-parallel ranks, in the order of the tables; None: one rank, nothing is sent.

    Returns:
        (B, N, L, H); 0 for padding.
    """
    return _OverRanks.apply(q, k, v, pattern, kernel, group, _RING)


# ---- gathered keys ------------------------------------------------------------------------------------------------------------------


def _gather(k: Tensor, v: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """(W, 2, B, G, L, H)."""
    kv = torch.stack((k, v))
    everywhere = kv.new_empty((size, *kv.shape))
    dist.all_gather_into_tensor(everywhere.flatten(0, 1), kv, group=group)
    return everywhere


def _gathered_forward(blocks: Blocks, k: Tensor, v: Tensor, group: Any, size: int) -> None:
    everywhere = _gather(k, v, group, size)
    for source in (blocks.rank, *(other for other in range(size) if other != blocks.rank)):
        blocks.forward(source, *everywhere[source])


def _gathered_backward(about: About, k: Tensor, v: Tensor, group: Any, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Gathered again; the sums are scattered in float32."""
    everywhere = _gather(k, v, group, size)
    grads = torch.zeros(everywhere.shape, dtype=wide_dtype(k.dtype), device=k.device)
    for source in range(size):
        add_to(grads[source], about(source, *everywhere[source]))
    own = torch.empty_like(grads[0])
    dist.reduce_scatter_tensor(own, grads.flatten(0, 1), group=group)
    return own[0], own[1]


_GATHERED = _Way(_gathered_forward, _gathered_backward)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, kernel: Kernel, group: dist.ProcessGroup | None) -> Tensor:
    """Attention with the keys of all ranks gathered, forward and again in backward. Arguments and result: those of ``ring_attention``."""
    if group is None or dist.get_world_size(group) == 1:
        return ring_attention(q, k, v, pattern, kernel, None)
    return _OverRanks.apply(q, k, v, pattern, kernel, group, _GATHERED)


# ---- heads for tokens ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Order:
    """How the tokens of a group are put together: rows, and the stretches of its ranks one after the other."""

    rows: list[Rows]
    segments: list[list[Segment]]

    def copy(self, whole: Tensor, parts: Tensor, *, apart: bool) -> None:
        """Tokens of ``parts`` (W, B, n, L, H) to their places in ``whole`` (B, n, W L, H); ``apart``: the other way."""
        for rows, segments in zip(self.rows, self.segments):
            place = 0
            for rank, start, length in segments:
                together, own = whole[rows, :, place : place + length], parts[rank, rows, :, start : start + length]
                own.copy_(together) if apart else together.copy_(own)
                place += length


class _Exchange(torch.autograd.Function):
    """All heads of a rank's tokens (B, N, L, H) for a part of the heads of all tokens (B, N / W, W L, H), or back; the backward is the way
    back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: _Order, group: Any, back: bool) -> Tensor:
        ctx.arguments = order, group, back
        return (_to_tokens if back else _to_heads)(x, order, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, group, back = ctx.arguments
        return (_to_heads if back else _to_tokens)(grad, order, group), None, None, None


def _swap(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def _to_heads(x: Tensor, order: _Order, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    parts = _swap(x.unflatten(1, (size, -1)).movedim(1, 0).contiguous(), group)  # (W, B, N / W, L, H)
    whole = parts.new_empty((*parts.shape[1:3], size * x.shape[2], x.shape[3]))
    order.copy(whole, parts, apart=False)
    return whole


def _to_tokens(x: Tensor, order: _Order, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    parts = x.new_empty((size, *x.shape[:2], x.shape[2] // size, x.shape[3]))
    order.copy(x, parts, apart=True)
    return _swap(parts, group).movedim(0, 1).flatten(1, 2)


def check_heads(heads: int, kv_heads: int, size: int) -> list[str]:
    """A message for every number of heads that cannot be divided over ``size`` ranks."""
    return [
        f"{name}={count} is not divisible by the {size} context-parallel ranks that exchange heads for tokens (Ulysses): use "
        "context_parallel_method='ring' or 'allgather', or fewer ranks"
        for name, count in (("num_heads", heads), ("num_kv_heads", kv_heads))
        if count % size
    ]


def exchanged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    kernel: Kernel,
    group: dist.ProcessGroup,
    ring: dist.ProcessGroup | None = None,
) -> Tensor:
    """Ulysses: each rank gets all tokens of its group for a part of the heads; with ``ring`` the groups pass their keys on to each other.

    Args:
        q, k, v, kernel: as for ``ring_attention``.
        pattern: tables of all ranks; those of one ``group`` stand together, and the groups in the order of ``ring``.
        group: the ranks that exchange heads for tokens; their number divides N and G.
        ring: ranks of the same place in each group.

    Raises:
        ValueError: for heads that do not divide, before anything is sent.
    """
    size, length = dist.get_world_size(group), q.shape[2]
    wrong = check_heads(q.shape[1], k.shape[1], size)
    if wrong:
        raise ValueError("; ".join(wrong))
    if size == 1:
        return ring_attention(q, k, v, pattern, kernel, ring)
    pattern_of_groups, orders = pattern.joined(size, length)
    own = 0 if ring is None else dist.get_rank(ring)
    order = _Order(pattern.rows(q.shape[0]), [row[own] for row in orders])
    q, k, v = (_Exchange.apply(x, order, group, False) for x in (q, k, v))
    return _Exchange.apply(ring_attention(q, k, v, pattern_of_groups, kernel, ring), order, group, True)
