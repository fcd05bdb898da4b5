"""What one rank computes of attention over ranks: which blocks, and the sums their results go into.

Results over disjoint keys are merged by their log-sum-exp, in float32 (float64 for float64). Shapes: B batch, N query heads, G key/value
heads, L local tokens, H head dim; W ranks.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3 (merge).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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


class Sum:
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


class Blocks:
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
        self._is_kernels = False  # out and lse are what a kernel gave, which a selective checkpoint may keep: not to be changed

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
        self._out, self._lse = self._out.to(wide, copy=self._is_kernels), self._lse.to(wide, copy=self._is_kernels)
        self._is_kernels = False
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
                self._out, self._lse, self._is_kernels = part, part_lse, True
                continue
            out, lse = self.result()
            if options.is_causal:  # of a rank's own keys, which nothing came before
                out[at], lse[at] = part, part_lse
                continue
            before, part_lse = lse[at], part_lse.to(lse.dtype)
            share = (part_lse - before).sigmoid_().unsqueeze_(-1)  # 1 where nothing came before: exp(-inf) of it
            out[at].lerp_(part.to(out.dtype), share)
            lse[at] = torch.logaddexp(before, part_lse)

    def backward(self, source: int, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, lse: Tensor, grad_q: Sum) -> Gradients:
        """This rank's part of the gradients about ``source``'s keys; adds that of its queries to ``grad_q``."""
        found: Gradients = []
        for at, keys, options in self._each(source):
            parts = self.kernel.backward(grad[at], self.q[at], k[keys], v[keys], out[at], lse[at].contiguous(), options)
            grad_q.add(at, parts[0])
            found.append((keys, parts[1], parts[2]))
        return found


def summed(like: Tensor, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """Gradients of all of a rank's keys and values, (B, G, L, H) each, in the wide dtype."""
    sums = Sum(like), Sum(like)
    for keys, *pair in gradients:
        for total, piece in zip(sums, pair):
            total.add(keys, piece)
    return sums[0].wide(), sums[1].wide()


def add_to(total: Tensor, gradients: Gradients) -> None:
    """Adds to gradients of all of a rank's keys and values, (2, B, G, L, H)."""
    for keys, *pair in gradients:
        for part, piece in zip(total, pair):
            part[keys] += piece
