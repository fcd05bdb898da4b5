"""Position -> (stage, source, draw) where weights count tokens: every source has a clock that shows the tokens of its draws.

Its order of sources is `token_order.py`'s. A stage starts its clocks anew, so bounds of parts add. A ramp counts tokens. A sample of no
tokens counts as one of one token. Far jumps cost some windows' plans: ask for windows of positions, not for single ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lightning_megascale.data.schedule import Draw, Schedule, tree_of
from lightning_megascale.data.stages import Stage, runs, segments_of, whole
from lightning_megascale.data.token_order import TokenOrder

_BLOCK = 1 << 12  # positions kept for single look-ups
_CACHED = 8  # windows and epochs of a clock kept, each

Lengths = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Rows(Protocol):
    """What a clock needs of a source's order; a ``SourceOrder`` also has ``sizes`` and ``stream``, which make epochs cheap."""

    size: int

    def many(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Epochs, shards and rows of draws."""


class TokenClock:
    """Tokens of the draws of a source: C(k) is what its first k draws hold together.

    Args:
        order: of its draws, without lanes (lanes need positions, and positions this clock).
        lengths: (shards (n,), rows (n,)) -> tokens (n,) of these rows, from the index.

    Attributes:
        epoch_tokens: tokens of every row once.
        longest: tokens of the longest row.

    Raises:
        ValueError: an order with lanes.
    """

    def __init__(self, order: Rows, lengths: Lengths) -> None:
        lanes = getattr(order, "lanes", 1)
        if lanes != 1:
            raise ValueError(f"lanes={lanes}: weights in tokens need orders without lanes; pass lanes=1")
        self.order, self.lengths, self.size = order, lengths, order.size
        self.window = min(getattr(order, "window", 1 << 16), order.size)
        self.starts = np.arange(0, order.size, self.window)
        self._epochs: OrderedDict[int, np.ndarray] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()
        self._totals: np.ndarray | None = None  # tokens of every shard
        if hasattr(order, "stream") and hasattr(order, "sizes"):
            shards = [self._shard(shard, size) for shard, size in enumerate(order.sizes.tolist())]
            self._totals = np.array([tokens.sum() for tokens in shards], np.int64)
            self.longest: int = max(int(tokens.max(initial=0)) for tokens in shards)
        else:
            self.longest = max(int(self._draws(start).max()) for start in self.starts.tolist())
        self.epoch_tokens = int(self._table(0)[-1])

    def _shard(self, shard: int, rows: int) -> np.ndarray:
        """Tokens of a shard's first rows, (rows,) int64."""
        return _counts(self.lengths(np.full(rows, shard, np.int64), np.arange(rows, dtype=np.int64)))

    def _draws(self, first: int) -> np.ndarray:
        """Tokens of the draws of the window that starts with draw ``first``, (draws,) int64."""
        _, shards, rows = self.order.many(first, min(self.window, self.size - first % self.size))
        return _counts(self.lengths(shards, rows))

    def _table(self, epoch: int) -> np.ndarray:
        """Tokens of an epoch before every window and in all, (windows + 1,) int64."""
        if epoch not in self._epochs:
            if self._totals is None:
                sums = [self._draws(epoch * self.size + start).sum() for start in self.starts.tolist()]
                table = np.concatenate([[0], np.cumsum(sums, dtype=np.int64)])
            else:  # a window without lanes is a stretch of the stream: whole shards, and a part of one at its start
                order, before = self.order.stream(epoch)  # type: ignore[attr-defined]
                tokens = np.concatenate([[0], np.cumsum(self._totals[order])])
                place = np.searchsorted(before, self.starts, side="right") - 1
                parts = [int(self._shard(int(order[i]), int(start - before[i])).sum()) for i, start in zip(place, self.starts)]
                table = np.concatenate([tokens[place] + np.array(parts, np.int64), tokens[-1:]])
            _keep(self._epochs, epoch, table)
        return self._epochs[epoch]

    def _inside(self, epoch: int, window: int) -> np.ndarray:
        """Tokens of a window before each of its draws and in all, (draws + 1,) int64."""
        if (epoch, window) not in self._windows:
            tokens = self._draws(epoch * self.size + window * self.window)
            _keep(self._windows, (epoch, window), np.concatenate([[0], np.cumsum(tokens)]))
        return self._windows[epoch, window]

    def tokens(self, k: int) -> int:
        """C(k)."""
        epoch, inside = divmod(k, self.size)
        window, offset = divmod(inside, self.window)
        before = epoch * self.epoch_tokens + int(self._table(epoch)[window])
        return before + (int(self._inside(epoch, window)[offset]) if offset else 0)

    def marks(self, first: int, count: int) -> np.ndarray:
        """C(first) .. C(first + count), (count + 1,) int64."""
        out, done = np.full(count + 1, self.tokens(first), np.int64), 0
        while done < count:
            epoch, inside = divmod(first + done, self.size)
            window, offset = divmod(inside, self.window)
            found = self._inside(epoch, window)[offset:][: count + 1 - done] + (epoch * self.epoch_tokens + int(self._table(epoch)[window]))
            out[done : done + len(found)] = found
            done += len(found) - 1
        return out

    def find(self, tokens: int) -> int:
        """The draw that holds a token: the largest k with C(k) <= tokens."""
        epoch, inside = divmod(tokens, self.epoch_tokens)
        table = self._table(epoch)
        window = int(np.searchsorted(table, inside, side="right")) - 1
        offset = int(np.searchsorted(self._inside(epoch, window), inside - int(table[window]), side="right")) - 1
        return epoch * self.size + window * self.window + offset

    def roughly(self, tokens: int) -> float:
        """About ``find``, from the table of windows alone."""
        epoch, inside = divmod(tokens, self.epoch_tokens)
        return epoch * self.size + float(np.interp(inside, self._table(epoch), [*self.starts, self.size]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epochs": OrderedDict(), "_windows": OrderedDict()}


def _counts(lengths: np.ndarray) -> np.ndarray:
    return np.maximum(np.asarray(lengths, np.int64), 1)


def _keep(cache: OrderedDict, key: Any, value: Any) -> None:
    """Puts a value in a cache that forgets its oldest."""
    while len(cache) >= _CACHED:
        cache.popitem(last=False)
    cache[key] = value


@dataclass(frozen=True)
class TokenStage(Stage):
    """A stage whose weights count tokens.

    Args:
        samples: positions it lasts; None with ``tokens``, or in an endless last stage.
        ramp: tokens, not samples, over which the mix moves from the stage before.
        tokens: its length where ``samples`` is None: it ends with the first sample that reaches them.
    """

    tokens: int | None = None


class TokenSchedule(Schedule):
    """A ``Schedule`` whose weights count tokens; ``targets`` and bounds do too.

    Args:
        stages: ``TokenStage``, whose length is in samples or in tokens, or ``Stage``; ramps count tokens.
        orders: of every source, in the order of the sorted names or by name; without lanes.
        lengths: tokens of rows, of every source likewise: (shards (n,), rows (n,)) -> (n,).
        sources: names a mix may use; None allows all.

    Raises:
        ValueError: as ``Schedule``; a stage with both lengths, or with none where another follows; a ramp longer than its stage.
    """

    unit = "tokens"

    def __init__(
        self,
        stages: Sequence[Stage],
        orders: Sequence[Rows] | Mapping[str, Rows],
        lengths: Sequence[Lengths] | Mapping[str, Lengths],
        sources: Sequence[str] | None = None,
    ) -> None:
        self._read(stages, sources)
        self.clocks = [TokenClock(order, length) for order, length in zip(self._each("orders", orders), self._each("lengths", lengths))]
        self._block: tuple[int, np.ndarray, np.ndarray, np.ndarray] | None = None
        for number, stage in enumerate(self.stages):
            self._add_stage(number, stage)
        self._finish()

    def _each(self, what: str, given: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        missing = [name for name in self.sources if name not in given] if isinstance(given, Mapping) else []
        if missing or (not isinstance(given, Mapping) and len(given) != len(self.sources)):
            raise ValueError(
                f"{what}: {len(given)} for {len(self.sources)} sources {', '.join(self.sources)}; give one each, in this order or by name"
            )
        return [given[name] for name in self.sources] if isinstance(given, Mapping) else list(given)

    def _budget(self, number: int, stage: Stage) -> tuple[int | None, int | None]:
        """A stage's length as (tokens, samples)."""
        tokens, name = getattr(stage, "tokens", None), f"stage {stage.name!r}"
        if tokens is not None and stage.samples is not None:
            raise ValueError(f"{name}: samples={stage.samples} and tokens={tokens}, but a stage has one length; take one out")
        if tokens is None and stage.samples is None and number + 1 < len(self.stages):
            raise ValueError(f"{name}: without samples and tokens it never ends, so no stage may follow; give one, or make it the last")
        if tokens is not None and whole(f"{name}: tokens", tokens, 1) < stage.ramp:
            raise ValueError(f"{name}: ramp={stage.ramp} is longer than its tokens={tokens}; shorten the ramp")
        return tokens, None if stage.samples is None else whole(f"{name}: samples", stage.samples, 1)

    def _add_stage(self, number: int, stage: Stage) -> None:
        tokens, samples = self._budget(number, stage)
        start, base = self._next()
        stretches = runs(segments_of(number, tokens, stage.ramp, self.mixes[number - 1], self.mixes[number]))
        before = self._tokens(base)
        for index, run in enumerate(stretches):
            position, base = self._next()
            tree, names = tree_of(run)
            members = [self.sources.index(name) for name in names]
            order = TokenOrder(tree, [self.clocks[i] for i in members], [base[i] for i in members])
            total: int | None = None
            if index + 1 < len(stretches):
                total = order.reached(sum(segment.length or 0 for segment in run))
            elif samples is not None:
                total = samples - (position - start)
                if total <= 0 or (stage.ramp and len(stretches) == 1 and order.reached(stage.ramp) > total):
                    raise ValueError(
                        f"stage {stage.name!r}: ramp={stage.ramp} tokens is longer than its samples={samples}; shorten the ramp"
                    )
            elif tokens is not None:
                left = tokens - (self._tokens(base) - before)
                if left <= 0:  # the last sample of the ramp reached them
                    break
                total = order.reached(left)
            self._append(number, total, order, names, order.bound)
        if tokens is not None or samples is not None:
            self._starts.append(self._next()[0])

    def _tokens(self, counts: Sequence[int]) -> int:
        return sum(clock.tokens(k) for clock, k in zip(self.clocks, counts))

    def at(self, p: int) -> Draw:
        """What position p holds; cheap near the position asked for before."""
        self._check(p, 1)
        begin = p // _BLOCK * _BLOCK
        if self._block is None or self._block[0] != begin:
            count = _BLOCK if self.total is None else min(_BLOCK, self.total - begin)
            self._block = (begin, *self.window(begin, count))
        stages, sources, draws = (int(column[p - begin]) for column in self._block[1:])
        return Draw(stages, sources, draws)

    def tokens(self, n: int) -> list[int]:
        """Tokens of every source among the first n positions."""
        return [clock.tokens(k) for clock, k in zip(self.clocks, self.counts(n))]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_block": None}
