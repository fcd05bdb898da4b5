"""Which rank holds which tokens of a sequence, and what attention between two ranks then has to compute: index maths, no tensors.

A *run* is a longest stretch of a rank's tokens that is consecutive in one document. Runs are disjoint intervals of documents, so for any
two of them one of four things holds: other documents, later keys (nothing to do), earlier keys (all of them seen), or one and the same
run (a causal square). Nothing else exists, so no kernel ever sees a rectangle with a diagonal, whose alignment conventions differ.
Padding is in no run. Every rank computes the runs of all ranks from the whole batch: no communication.

Source of the head-tail order: Brandon et al. 2023, "Striped attention" (balance of causal work), and Llama 3 (2024), section 3.3.2 (2 x CP
chunks, i and 2 x CP - 1 - i). Positions count from 0 inside each document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

PADDING = -1  # the document of a token that is none
LAYOUTS = ("contiguous", "headtail", "packed")
BALANCED = 1.02  # largest share of work of a rank over the mean at which "packed" stops looking for better


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one document on one rank.

    Args:
        document: its number.
        position: of the first token in the document.
        start: local index of the first token on the rank.
        length: tokens.
    """

    document: int
    position: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.position + self.length


@dataclass(frozen=True)
class Block:
    """One dense piece of attention between a rank's queries and another's keys, as local slices.

    Args:
        query_start, query_length: of the queries.
        key_start, key_length: of the keys.
        is_causal: the queries are the keys, and each sees those up to itself; False: all keys are seen.
        ahead: by how many positions the first query stands after the first key.
    """

    query_start: int
    query_length: int
    key_start: int
    key_length: int
    is_causal: bool
    ahead: int

    @property
    def pairs(self) -> int:
        """(query, key) pairs without a window."""
        return self.query_length * (self.query_length + 1) // 2 if self.is_causal else self.query_length * self.key_length


def positions_of(documents: np.ndarray) -> np.ndarray:
    """Position of each token in its document.

    Args:
        documents: (L,) whole numbers; the tokens of a document stand together, in order; ``PADDING`` where there is none.

    Returns:
        (L,) positions, 0 for padding.
    """
    starts = np.flatnonzero(np.r_[True, documents[1:] != documents[:-1]])
    positions = np.arange(len(documents)) - np.repeat(starts, np.diff(np.r_[starts, len(documents)]))
    return np.where(documents == PADDING, 0, positions)


def assign(documents: np.ndarray, ranks: int, layout: str) -> np.ndarray:
    """The tokens of each rank.

    Args:
        documents: (L,) as for ``positions_of``.
        ranks: context_parallel_size.
        layout: "contiguous", "headtail" (chunks i and 2 x ranks - 1 - i of the row), or "packed" (equal tokens and nearly equal causal
            work for any documents).

    Returns:
        (ranks, L / ranks) indices into the row, ascending on each rank.

    Raises:
        ValueError: for a length that does not divide.
    """
    length = len(documents)
    parts = 2 * ranks if layout == "headtail" and ranks > 1 else ranks
    if layout not in LAYOUTS:
        raise ValueError(f"context_parallel_layout={layout!r}: must be one of {', '.join(LAYOUTS)}")
    if length % parts:
        below, above = length - length % parts, length - length % parts + parts
        raise ValueError(
            f"sequence length L={length} is not divisible by {parts}, as context_parallel_size={ranks} with the layout {layout!r} needs: "
            f"pad or cut rows to {below} or {above}"
        )
    if layout == "packed":
        return _packed(documents, ranks)
    chunks = np.arange(length).reshape(parts, -1)
    return chunks if parts == ranks else np.concatenate([chunks[:ranks], chunks[ranks:][::-1]], axis=1)


def runs_of(documents: np.ndarray, positions: np.ndarray) -> list[Run]:
    """The runs of one rank.

    Args:
        documents, positions: (L / ranks,) of the rank's tokens, in the rank's order.
    """
    if not len(documents):
        return []
    continues = (documents[1:] == documents[:-1]) & (positions[1:] == positions[:-1] + 1)
    starts = np.flatnonzero(np.r_[True, ~continues])
    ends = np.r_[starts[1:], len(documents)]
    return [Run(int(documents[a]), int(positions[a]), int(a), int(b - a)) for a, b in zip(starts, ends) if documents[a] != PADDING]


def blocks_between(queries: Sequence[Run], keys: Sequence[Run], *, is_causal: bool = True, window: int | None = None) -> list[Block]:
    """What attention of one rank's queries to another's (or its own) keys computes.

    Args:
        queries, keys: the runs of the two ranks.
        is_causal: a query sees the keys of its document up to itself; False: all of its document.
        window: a query sees the last ``window`` keys up to itself (causal only); None: all. Blocks are trimmed to what is in reach.
    """
    by_document: dict[int, list[Run]] = {}
    for run in keys:
        by_document.setdefault(run.document, []).append(run)
    found: list[Block] = []
    for query in queries:
        full: list[Run] = []
        for key in by_document.get(query.document, []):
            if not is_causal or key.end <= query.position:
                full.append(key)
            elif key.position == query.position:
                found.append(Block(query.start, query.length, key.start, key.length, True, 0))
            elif key.position < query.end:
                raise ValueError(f"runs of two ranks overlap: {query} and {key}")
        found += [block for key in _joined(full) if (block := _in_reach(query, key, window if is_causal else None)) is not None]
    return found


def _joined(runs: list[Run]) -> list[Run]:
    """Runs that lie side by side, as one slice each: all of their keys are seen, so their order does not matter."""
    joined: list[Run] = []
    for run in sorted(runs, key=lambda run: run.start):
        last = joined[-1] if joined else None
        if last is not None and last.start + last.length == run.start and last.end == run.position:
            joined[-1] = Run(last.document, last.position, last.start, last.length + run.length)
        else:
            joined.append(run)
    return joined


def _in_reach(query: Run, key: Run, window: int | None) -> Block | None:
    """The full block of a query and an earlier key run, without the rows and keys that no window reaches."""
    if window is None:
        return Block(query.start, query.length, key.start, key.length, False, query.position - key.position)
    last_query = min(query.end, key.end + window - 1)  # a later query does not reach the last key
    first_key = max(key.position, query.position - window + 1)  # an earlier key is reached by no query
    if last_query <= query.position or first_key >= key.end:
        return None
    return Block(
        query.start,
        last_query - query.position,
        key.start + first_key - key.position,
        key.end - first_key,
        False,
        query.position - first_key,
    )


def fused(blocks: Sequence[Block]) -> list[Block]:
    """The same (query, key) pairs in fewer, larger blocks, causal ones first; not for windows, since positions inside a block are lost.

    Args:
        blocks: between two ranks, without a window.
    """
    full = [block for block in blocks if not block.is_causal]
    full = _side_by_side(full, lambda b: (b.query_start, b.query_length), lambda b: (b.key_start, b.key_length), by_query=False)
    squares: list[Block] = []
    for block in sorted((block for block in blocks if block.is_causal), key=lambda block: block.query_start):
        last = squares[-1] if squares else None
        if last is not None and last.query_start + last.query_length == block.query_start:
            below = Block(block.query_start, block.query_length, last.query_start, last.query_length, False, 0)
            if below in full:  # the later square's queries see the earlier one: together a larger square
                full.remove(below)
                length = last.query_length + block.query_length
                squares[-1] = Block(last.query_start, length, last.query_start, length, True, 0)
                continue
        squares.append(block)
    return squares + _side_by_side(full, lambda b: (b.key_start, b.key_length), lambda b: (b.query_start, b.query_length), by_query=True)


def _side_by_side(
    blocks: Sequence[Block], same: Callable[[Block], tuple[int, int]], slices: Callable[[Block], tuple[int, int]], by_query: bool
) -> list[Block]:
    """Full blocks that have one side in common and on the other lie next to each other, as one."""
    joined: list[Block] = []
    for block in sorted(blocks, key=lambda block: (same(block), slices(block))):
        last = joined[-1] if joined else None
        if last is not None and same(last) == same(block) and sum(slices(last)) == slices(block)[0]:
            (start, length), more = slices(last), slices(block)[1]
            joined.pop()
            block = (
                Block(start, length + more, block.key_start, block.key_length, False, 0)
                if by_query
                else Block(block.query_start, block.query_length, start, length + more, False, 0)
            )
        joined.append(Block(block.query_start, block.query_length, block.key_start, block.key_length, False, 0))
    return joined


# ---- balance ------------------------------------------------------------------------------------------------------------------------


def work_of(runs: Sequence[Run]) -> int:
    """Causal (query, key) pairs of a rank's queries, over the keys of all ranks: a query at position p sees p + 1."""
    return sum(run.length * run.position + run.length * (run.length + 1) // 2 for run in runs)


def imbalance(tables: Sequence[Sequence[Run]]) -> float:
    """Work of the busiest rank over the mean; 1 where there is none."""
    work = [work_of(runs) for runs in tables]
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


def ring_step_ratio(tables: Sequence[Sequence[Run]]) -> float:
    """Time of a ring, whose every step waits for its slowest rank, over that of perfectly equal steps; 1 where there is no work."""
    ranks = len(tables)
    pairs = [[sum(block.pairs for block in blocks_between(q, k)) for k in tables] for q in tables]
    steps = [max(pairs[rank][(rank - step) % ranks] for rank in range(ranks)) for step in range(ranks)]
    total = sum(map(sum, pairs))
    return sum(steps) * ranks / total if total else 1.0


@dataclass
class _Load:
    """What a rank has been given: intervals of the row, tokens and work."""

    room: int
    work: float = 0.0

    def __post_init__(self) -> None:
        self.intervals: list[tuple[int, int, int | None]] = []

    def give(self, start: int, end: int, position: int | None) -> None:
        """Tokens start:end of the row, of which the first stands at ``position`` of its document; None: padding, which costs nothing."""
        self.intervals.append((start, end, position))
        self.room -= end - start
        if position is not None:
            self.work += (end - start) * position + (end - start) * (end - start + 1) / 2


def _packed(documents: np.ndarray, ranks: int) -> np.ndarray:
    """Equal tokens on every rank and nearly equal causal work: the longest documents are folded head-tail over all ranks, the others lie
    whole on one, heaviest first on the lightest rank with room, and the last ones fill what is left. As many are folded as are needed."""
    bounds = np.r_[np.flatnonzero(np.r_[True, documents[1:] != documents[:-1]]), len(documents)]
    spans = [(int(a), int(b)) for a, b in pairwise(bounds)]
    padding = [span for span in spans if documents[span[0]] == PADDING]
    texts = sorted((span for span in spans if documents[span[0]] != PADDING), key=lambda span: (span[0] - span[1], span[0]))
    best: tuple[float, list[_Load]] | None = None
    for folded in range(len(texts) + 1):
        loads = _fold(texts, folded, padding, ranks, len(documents) // ranks)
        work = [load.work for load in loads]
        ratio = max(work) * ranks / sum(work) if sum(work) else 1.0
        if best is None or ratio < best[0]:
            best = ratio, loads
        if ratio <= BALANCED:
            break
    assert best is not None
    if best[0] > BALANCED:
        _trade(best[1])
    return np.stack([np.sort(np.concatenate([np.arange(a, b) for a, b, _ in load.intervals])) for load in best[1]])


def _trade(loads: list[_Load]) -> None:
    """The busiest rank swaps pieces of one length with others, each time what lowers the larger of the two works most."""
    target = BALANCED * sum(load.work for load in loads) / len(loads)
    for _ in loads:
        busiest = max(loads, key=lambda load: load.work)
        best, swap = busiest.work, None
        for other in loads if busiest.work > target else []:
            for i, (start, end, mine) in enumerate(busiest.intervals):
                for j, (begin, stop, theirs) in enumerate(other.intervals):
                    if mine is None or theirs is None or end - start != stop - begin or other is busiest:
                        continue
                    moved = (mine - theirs) * (end - start)
                    if max(busiest.work - moved, other.work + moved) < best:
                        best, swap = max(busiest.work - moved, other.work + moved), (other, i, j, moved)
        if swap is None:
            return
        other, i, j, moved = swap
        busiest.intervals[i], other.intervals[j] = other.intervals[j], busiest.intervals[i]
        busiest.work, other.work = busiest.work - moved, other.work + moved


def _fold(texts: Sequence[tuple[int, int]], folded: int, padding: Sequence[tuple[int, int]], ranks: int, room: int) -> list[_Load]:
    loads = [_Load(room) for _ in range(ranks)]
    for number, (start, end) in enumerate(texts[:folded]):
        cuts = [start + (end - start) * part // (2 * ranks) for part in range(2 * ranks + 1)]
        for part, (a, b) in enumerate(pairwise(cuts)):
            rank = part if part < ranks else 2 * ranks - 1 - part
            rank = rank if number % 2 == 0 else ranks - 1 - rank  # rounding favours other ranks each time
            _fill(loads, rank, a, b, start)
    for start, end in texts[folded:]:
        fitting = [load for load in loads if load.room >= end - start]
        if fitting:
            min(fitting, key=lambda load: load.work).give(start, end, 0)
        else:
            _spread(loads, start, end, start)
    for start, end in padding:
        _spread(loads, start, end, None)
    return loads


def _fill(loads: list[_Load], rank: int, start: int, end: int, origin: int) -> None:
    """Gives a piece to a rank as far as it has room, the rest to others."""
    fits = min(loads[rank].room, end - start)
    if fits:
        loads[rank].give(start, start + fits, start - origin)
    if start + fits < end:
        _spread(loads, start + fits, end, origin)


def _spread(loads: list[_Load], start: int, end: int, origin: int | None) -> None:
    """Cuts what fits on no rank: pieces go to the lightest ranks that have room."""
    while start < end:
        load = min((load for load in loads if load.room), key=lambda load: load.work)
        size = min(load.room, end - start)
        load.give(start, start + size, None if origin is None else start - origin)
        start += size
