"""Exact attention over a sequence that lies on several ranks: keys travel a ring, or are gathered, or heads are exchanged for tokens.

Each function takes this rank's tokens and the runs of every rank (``ops/sequence_layout.py``), so any layout, packing and window is the
same code; what a rank computes are blocks (``ops/attention.py``) whose results are merged by their log-sum-exp, in float32 (float64 for
float64). Shapes: B batch, N query heads, G key/value heads, L local tokens, H head dim; W ranks.

Source: Liu et al. 2023, "Ring attention", section 3 (keys travel); Llama 3 (2024), section 3.3.2 (keys are gathered); Jacobs et al. 2023,
"DeepSpeed Ulysses", section 3 (heads for tokens); Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3
(merge).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megascale.ops.attention import BlockOptions, Kernel, wide_dtype
from lightning_megascale.ops.sequence_layout import PADDING, Block, Run, blocks_between, fused

Tables = Sequence[Sequence[Run]]
"""The runs of each rank, for one row."""


Rows = slice
Segment = tuple[int, int, int]
"""Tokens of a group that stand together: place of their rank in the group, start on it, length."""


@dataclass(frozen=True)
class Pattern:
    """What attention computes. Blocks are worked out once.

    Args:
        tables: for each row of the batch the runs of every rank; a single entry holds for all rows.
        is_causal: each token sees those of its document up to itself; False: all of its document.
        window: how many it sees, itself included (causal only); None: all.
        scale: of the scores; None: 1 / sqrt(H).
    """

    tables: tuple[Tables, ...]
    is_causal: bool = True
    window: int | None = None
    scale: float | None = None
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def rows(self, batch: int) -> list[Rows]:
        """The rows of every table: all at once where one holds for all."""
        if len(self.tables) == 1:
            return [slice(0, batch)]
        if len(self.tables) != batch:
            raise ValueError(f"{len(self.tables)} tables of runs for {batch} rows: one for each row, or one for all")
        return [slice(row, row + 1) for row in range(batch)]

    def blocks(self, batch: int, rank: int, source: int) -> list[tuple[Rows, Block]]:
        """(rows, block) of everything that ``rank``'s queries see of ``source``'s keys, the causal ones of a row first."""
        found = self.known.get((batch, rank, source))
        if found is None:
            found = []
            for rows, tables in zip(self.rows(batch), self.tables):
                blocks = blocks_between(tables[rank], tables[source], is_causal=self.is_causal, window=self.window)
                blocks = fused(blocks) if self.window is None else sorted(blocks, key=lambda block: not block.is_causal)
                found += [(rows, block) for block in blocks]
            self.known[batch, rank, source] = found
        return found

    def joined(self, size: int, length: int) -> tuple[Pattern, list[list[list[Segment]]]]:
        """The pattern of groups of ``size`` ranks whose tokens are put together and in order, and, for each table and group, that order."""
        if (size, length) not in self.known:
            tables, orders = [], []
            for row in self.tables:
                groups = [in_order(row[first : first + size], length) for first in range(0, len(row), size)]
                tables.append([runs for runs, _ in groups])
                orders.append([order for _, order in groups])
            self.known[size, length] = Pattern(tuple(tables), self.is_causal, self.window, self.scale), orders
        return self.known[size, length]


def in_order(tables: Tables, length: int) -> tuple[list[Run], list[Segment]]:
    """The runs of several ranks whose tokens are put in the order of their documents, padding last; and where each stretch comes from.

    Args:
        tables: of the ranks.
        length: tokens of each.
    """
    pieces = sorted((run.document, run.position, rank, run.start, run.length) for rank, runs in enumerate(tables) for run in runs)
    joined: list[Run] = []
    order: list[Segment] = []
    start = 0
    for document, position, rank, own, count in pieces:
        last = joined[-1] if joined else None
        if last is not None and (last.document, last.end) == (document, position):
            joined[-1] = Run(document, last.position, last.start, last.length + count)
        else:
            joined.append(Run(document, position, start, count))
        order.append((rank, own, count))
        start += count
    for rank, runs in enumerate(tables):
        end = 0
        for run in [*sorted(runs, key=lambda run: run.start), Run(PADDING, 0, length, 0)]:
            if run.start > end:
                order.append((rank, end, run.start - end))
            end = run.start + run.length
    return joined, order


class _Sum:
    """A sum of pieces in the wide dtype; a single one that is all of it stays as it is, and belongs to the sum.

    Args:
        like: whose shape it has, and whose pieces may have the dtype of.
    """

    def __init__(self, like: Tensor) -> None:
        self.like, self.value = like, None if like.numel() else torch.zeros_like(like)

    def add(self, at: tuple[slice, ...], piece: Tensor) -> None:
        if self.value is None and piece.shape == self.like.shape:
            self.value = piece
        else:
            self.wide()[at] += piece

    def wide(self) -> Tensor:
        dtype = wide_dtype(self.like.dtype)
        self.value = torch.zeros(self.like.shape, dtype=dtype, device=self.like.device) if self.value is None else self.value.to(dtype)
        return self.value


Gradients = list[tuple[tuple[slice, ...], Tensor, Tensor]]
"""Of some of a rank's keys and values: where, and both."""


class _Blocks:
    """One rank's queries, block by block.

    Args:
        kernel, pattern, rank: what is computed.
        q: (B, N, L, H).
    """

    def __init__(self, kernel: Kernel, pattern: Pattern, rank: int, q: Tensor) -> None:
        self.kernel, self.pattern, self.rank, self.q = kernel, pattern, rank, q
        self.scale = q.shape[-1] ** -0.5 if pattern.scale is None else pattern.scale
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def _each(self, source: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], BlockOptions]]:
        for rows, block in self.pattern.blocks(self.q.shape[0], self.rank, source):
            queries = slice(block.query_start, block.query_start + block.query_length)
            keys = slice(block.key_start, block.key_start + block.key_length)
            options = BlockOptions(self.scale, block.is_causal, self.pattern.window, block.ahead)
            yield (rows, slice(None), queries), (rows, slice(None), keys), options

    def result(self) -> tuple[Tensor, Tensor]:
        """(out, lse) in the wide dtype; rows without a key, such as padding, have 0 and -inf."""
        wide = wide_dtype(self.q.dtype)
        if self._out is None or self._lse is None:
            self._out = torch.zeros(self.q.shape, dtype=wide, device=self.q.device)
            self._lse = torch.full(self.q.shape[:-1], -torch.inf, dtype=wide, device=self.q.device)
        self._out, self._lse = self._out.to(wide), self._lse.to(wide)
        return self._out, self._lse

    def output(self) -> tuple[Tensor, Tensor]:
        """(out, lse), the output in the dtype of the queries."""
        if self._out is None or self._lse is None:
            self.result()
        assert self._out is not None and self._lse is not None
        return self._out.to(self.q.dtype), self._lse

    def forward(self, source: int, k: Tensor, v: Tensor) -> None:
        """Takes in what this rank's queries see of ``source``'s keys; its own come first."""
        for at, keys, options in self._each(source):
            part, part_lse = self.kernel.forward(self.q[at], k[keys], v[keys], options)
            if self._out is None and part.shape == self.q.shape:
                self._out, self._lse = part, part_lse
                continue
            out, lse = self.result()
            if options.is_causal:  # of a rank's own keys, which nothing came before
                out[at], lse[at] = part, part_lse
                continue
            before, part_lse = lse[at], part_lse.to(lse.dtype)
            share = (part_lse - before).sigmoid_().unsqueeze_(-1)  # 1 where nothing came before: exp(-inf) of it
            out[at].lerp_(part.to(out.dtype), share)
            lse[at] = torch.logaddexp(before, part_lse)

    def backward(self, source: int, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, lse: Tensor, grad_q: _Sum) -> Gradients:
        """This rank's part of the gradients about ``source``'s keys; adds that of its queries to ``grad_q``."""
        found: Gradients = []
        for at, keys, options in self._each(source):
            parts = self.kernel.backward(grad[at], self.q[at], k[keys], v[keys], out[at], lse[at].contiguous(), options)
            grad_q.add(at, parts[0])
            found.append((keys, parts[1], parts[2]))
        return found


def _summed(like: Tensor, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """Gradients of all of a rank's keys and values, (B, G, L, H) each, in the wide dtype."""
    sums = _Sum(like), _Sum(like)
    for keys, *pair in gradients:
        for total, piece in zip(sums, pair):
            total.add(keys, piece)
    return sums[0].wide(), sums[1].wide()


def _add(total: Tensor, gradients: Gradients) -> None:
    """Adds to gradients of all of a rank's keys and values, (2, B, G, L, H)."""
    for keys, *pair in gradients:
        for part, piece in zip(total, pair):
            part[keys] += piece


class _OverRanks(torch.autograd.Function):
    """Attention whose keys come as a ``_Way`` says, there and back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, kernel: Kernel, group: Any, way: _Way) -> Tensor:
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        blocks = _Blocks(kernel, pattern, rank, q)
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
        blocks, grad_q = _Blocks(ctx.kernel, ctx.pattern, rank, q), _Sum(q)

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

    forward: Callable[[_Blocks, Tensor, Tensor, Any, int], None]
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


def _ring_forward(blocks: _Blocks, k: Tensor, v: Tensor, group: Any, size: int) -> None:
    for source, keys, values in _around(k, v, group, blocks.rank, size):
        blocks.forward(source, keys, values)


def _ring_backward(about: About, k: Tensor, v: Tensor, group: Any, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Gradients follow their keys, start one rank on, and come home after W - 1 hops."""
    travelling, spare = None, None  # gradients of the keys that come next; the last ones sent
    for source, keys, values in _around(k, v, group, rank, size):
        gradients = about(source, keys, values)
        if source == rank:
            grad_k, grad_v = _summed(k, gradients)
            continue
        if travelling is None:
            message = torch.stack(_summed(k, gradients))
        else:
            spare, message = message, _arrived(travelling)
            _add(message, gradients)
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


def _gathered_forward(blocks: _Blocks, k: Tensor, v: Tensor, group: Any, size: int) -> None:
    everywhere = _gather(k, v, group, size)
    for source in (blocks.rank, *(other for other in range(size) if other != blocks.rank)):
        blocks.forward(source, *everywhere[source])


def _gathered_backward(about: About, k: Tensor, v: Tensor, group: Any, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Gathered again; the sums are scattered in float32."""
    everywhere = _gather(k, v, group, size)
    grads = torch.zeros(everywhere.shape, dtype=wide_dtype(k.dtype), device=k.device)
    for source in range(size):
        _add(grads[source], about(source, *everywhere[source]))
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
