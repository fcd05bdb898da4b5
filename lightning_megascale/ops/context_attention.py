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
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megascale.ops.attention import BlockOptions, Kernel, wide_dtype
from lightning_megascale.ops.sequence_layout import Block, Run, blocks_between

Tables = Sequence[Sequence[Run]]
"""The runs of each rank, for one row."""


@dataclass(frozen=True)
class Pattern:
    """What attention computes.

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

    def rows(self, batch: int) -> Iterator[tuple[slice, Tables]]:
        """(rows, their tables): all rows at once where one table holds for all."""
        if len(self.tables) == 1:
            yield slice(0, batch), self.tables[0]
            return
        if len(self.tables) != batch:
            raise ValueError(f"{len(self.tables)} tables of runs for {batch} rows: one for each row, or one for all")
        yield from ((slice(row, row + 1), tables) for row, tables in enumerate(self.tables))

    def blocks(self, batch: int, rank: int, source: int) -> Iterator[tuple[slice, Block]]:
        """(rows, block) of everything that ``rank``'s queries see of ``source``'s keys."""
        for rows, tables in self.rows(batch):
            for block in blocks_between(tables[rank], tables[source], is_causal=self.is_causal, window=self.window):
                yield rows, block


class _Blocks:
    """One rank's queries: accumulates block by block.

    Args:
        kernel, pattern, rank: what is computed.
        q: (B, N, L, H).
    """

    def __init__(self, kernel: Kernel, pattern: Pattern, rank: int, q: Tensor) -> None:
        self.kernel, self.pattern, self.rank, self.q = kernel, pattern, rank, q
        self.scale = q.shape[-1] ** -0.5 if pattern.scale is None else pattern.scale
        self.wide = wide_dtype(q.dtype)

    def _each(self, source: int) -> Iterator[tuple[slice, slice, slice, BlockOptions]]:
        for rows, block in self.pattern.blocks(self.q.shape[0], self.rank, source):
            queries = slice(block.query_start, block.query_start + block.query_length)
            keys = slice(block.key_start, block.key_start + block.key_length)
            yield rows, queries, keys, BlockOptions(self.scale, block.is_causal, self.pattern.window, block.ahead)

    def start(self) -> tuple[Tensor, Tensor]:
        """(out, lse) before any key: rows without a key, such as padding, keep 0 and -inf."""
        return torch.zeros(self.q.shape, dtype=self.wide, device=self.q.device), torch.full(
            self.q.shape[:-1], -torch.inf, dtype=self.wide, device=self.q.device
        )

    def forward(self, source: int, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merges what this rank's queries see of ``source``'s keys into ``out`` and ``lse``, in place."""
        for rows, queries, keys, options in self._each(source):
            part, part_lse = self.kernel.forward(self.q[rows, :, queries], k[rows, :, keys], v[rows, :, keys], options)
            before, at = lse[rows, :, queries], (rows, slice(None), queries)
            both = torch.logaddexp(before, part_lse.to(self.wide))
            old, new = (before - both).exp().unsqueeze(-1), (part_lse.to(self.wide) - both).exp().unsqueeze(-1)
            out[at] = out[at] * old + part.to(self.wide) * new
            lse[at] = both

    def backward(self, source: int, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, lse: Tensor, grad_q: Tensor, grad_kv: Tensor) -> None:
        """Adds this rank's part of the gradients about ``source``'s keys to ``grad_q`` and ``grad_kv`` (2, B, G, L, H), in place."""
        for rows, queries, keys, options in self._each(source):
            at = (rows, slice(None), queries)
            parts = self.kernel.backward(grad[at], self.q[at], k[rows, :, keys], v[rows, :, keys], out[at], lse[at].contiguous(), options)
            grad_q[at] += parts[0]
            grad_kv[0][rows, :, keys] += parts[1]
            grad_kv[1][rows, :, keys] += parts[2]


class _OverRanks(torch.autograd.Function):
    """Attention whose keys come as a ``_Way`` says, there and back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, kernel: Kernel, group: Any, way: _Way) -> Tensor:
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        blocks = _Blocks(kernel, pattern, rank, q)
        out, lse = blocks.start()
        way.forward(blocks, torch.stack((k, v)), out, lse, group, size)
        ctx.kernel, ctx.pattern, ctx.way, ctx.group, ctx.place = kernel, pattern, way, group, (rank, size)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, size = ctx.place
        blocks = _Blocks(ctx.kernel, ctx.pattern, rank, q)
        grad_q = torch.zeros(q.shape, dtype=blocks.wide, device=q.device)

        def about(source: int, kv: Tensor, grad_kv: Tensor) -> None:
            blocks.backward(source, kv[0], kv[1], grad, out, lse, grad_q, grad_kv)

        own = ctx.way.backward(blocks, torch.stack((k, v)), about, ctx.group, size)
        return grad_q.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), None, None, None, None


@dataclass(frozen=True)
class _Way:
    """How keys and values, (2, B, G, L, H) of each rank, come to the queries.

    Args:
        forward: (blocks, this rank's keys and values, out, lse, group, size) -> None: merges those of all ranks into out and lse.
        backward: (blocks, this rank's keys and values, about, group, size) -> the gradients of this rank's keys and values from the queries
            of all ranks; ``about(source, keys and values, gradients)`` adds those from this rank's queries.
    """

    forward: Callable[[_Blocks, Tensor, Tensor, Tensor, Any, int], None]
    backward: Callable[[_Blocks, Tensor, Callable[[int, Tensor, Tensor], None], Any, int], Tensor]


# ---- ring ---------------------------------------------------------------------------------------------------------------------------


def _pass_on(tensor: Tensor, group: dist.ProcessGroup, rank: int, size: int) -> tuple[Tensor, list[dist.Work]]:
    """Starts sending to the next rank and receiving from the one before."""
    received = torch.empty_like(tensor)
    following, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    sends = dist.P2POp(dist.isend, tensor, following, group)
    return received, dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, received, before, group)])


def _arrived(passed: tuple[Tensor, list[dist.Work]]) -> Tensor:
    for work in passed[1]:
        work.wait()
    return passed[0]


def _around(kv: Tensor, group: Any, rank: int, size: int) -> Iterator[tuple[int, Tensor]]:
    """(rank, its keys and values) for every rank, this one first; the next ones travel while these are worked on."""
    for step in range(size):
        following = _pass_on(kv, group, rank, size) if step < size - 1 else None
        yield (rank - step) % size, kv
        if following is not None:
            kv = _arrived(following)


def _ring_forward(blocks: _Blocks, kv: Tensor, out: Tensor, lse: Tensor, group: Any, size: int) -> None:
    for source, theirs in _around(kv, group, blocks.rank, size):
        blocks.forward(source, theirs[0], theirs[1], out, lse)


def _ring_backward(blocks: _Blocks, kv: Tensor, about: Callable[[int, Tensor, Tensor], None], group: Any, size: int) -> Tensor:
    """Gradients follow their keys, start one rank on, and come home after W - 1 hops."""
    own = torch.zeros(kv.shape, dtype=blocks.wide, device=kv.device)
    travelling = None  # gradients of the keys that come next
    for source, theirs in _around(kv, group, blocks.rank, size):
        grads = own if source == blocks.rank else torch.zeros_like(own)
        about(source, theirs, grads)
        if source != blocks.rank:
            if travelling is not None:
                grads += _arrived(travelling)
            travelling = _pass_on(grads, group, blocks.rank, size)
    if travelling is not None:
        own += _arrived(travelling)
    return own


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


def _gather(kv: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    everywhere = kv.new_empty((size, *kv.shape))
    dist.all_gather_into_tensor(everywhere.flatten(0, 1), kv, group=group)
    return everywhere


def _gathered_forward(blocks: _Blocks, kv: Tensor, out: Tensor, lse: Tensor, group: Any, size: int) -> None:
    for source, theirs in enumerate(_gather(kv, group, size)):
        blocks.forward(source, theirs[0], theirs[1], out, lse)


def _gathered_backward(blocks: _Blocks, kv: Tensor, about: Callable[[int, Tensor, Tensor], None], group: Any, size: int) -> Tensor:
    """Gathered again; the sums are scattered in float32."""
    everywhere = _gather(kv, group, size)
    grads = torch.zeros(everywhere.shape, dtype=blocks.wide, device=kv.device)
    for source in range(size):
        about(source, everywhere[source], grads[source])
    own = torch.empty_like(grads[0])
    dist.reduce_scatter_tensor(own, grads.flatten(0, 1), group=group)
    return own


_GATHERED = _Way(_gathered_forward, _gathered_backward)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, kernel: Kernel, group: dist.ProcessGroup | None) -> Tensor:
    """Attention with the keys of all ranks gathered, forward and again in backward. Arguments and result: those of ``ring_attention``."""
    if group is None or dist.get_world_size(group) == 1:
        return ring_attention(q, k, v, pattern, kernel, None)
    return _OverRanks.apply(q, k, v, pattern, kernel, group, _GATHERED)


# ---- heads for tokens ---------------------------------------------------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """Splits dim ``split`` over the ranks and joins dim ``join`` of them, rank by rank; the backward is the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: Any) -> Tensor:
        ctx.dims, ctx.group = (split, join), group
        return _exchange(x, split, join, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        split, join = ctx.dims
        return _exchange(grad, join, split, ctx.group), None, None, None


def _exchange(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    parts = torch.stack(x.chunk(size, split))  # (W, ...)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), join)


def joined_table(tables: Tables, length: int) -> list[Run]:
    """The runs of several ranks whose tokens were joined end to end, each rank's in its own order; runs that continue are fused.

    Args:
        tables: of the ranks, in order.
        length: tokens of each.
    """
    joined: list[Run] = []
    for rank, runs in enumerate(tables):
        for run in runs:
            run, last = Run(run.document, run.position, run.start + rank * length, run.length), joined[-1] if joined else None
            if last is not None and last.document == run.document and last.end == run.position and last.start + last.length == run.start:
                joined[-1] = Run(last.document, last.position, last.start, last.length + run.length)
            else:
                joined.append(run)
    return joined


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
    if size > 1:
        tables = tuple([joined_table(row[first : first + size], length) for first in range(0, len(row), size)] for row in pattern.tables)
        pattern = Pattern(tables, pattern.is_causal, pattern.window, pattern.scale)
        q, k, v = (_Exchange.apply(x, 1, 2, group) for x in (q, k, v))
    out = ring_attention(q, k, v, pattern, kernel, ring)
    return _Exchange.apply(out, 2, 1, group) if size > 1 else out
