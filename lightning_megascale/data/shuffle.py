"""Draw -> (epoch, shard, row): each epoch of a source visits every row once, in an order that is a pure function of keys.

Two levels: an epoch orders the shards, giving a stream of rows; the stream is cut in windows of a fixed number of rows, and the draws of a
window are permuted inside it. With lanes, the draws of a window whose positions are equal modulo ``lanes`` share one slice of the
stream, so that a rank that reads every ``lanes``-th position opens few shards. Own hashes: NumPy's shuffles may change with its version.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHARDS, _WINDOW, _LANES = 1, 2, 3
_LANE_BITS = 16
LARGEST_LANES = 1 << _LANE_BITS
_LANE_ROWS = 64  # fewer in a lane are shuffled among too few
_CACHED = 4  # windows and epochs kept, each


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def hash64(*key: int) -> int:
    """A 64-bit hash of integers, order included.

    Source: SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 17).
    """
    x = 0
    for part in key:
        x = ((x ^ part) + _GOLDEN) & _MASK
        x = ((x ^ (x >> 30)) * _FIRST) & _MASK
        x = ((x ^ (x >> 27)) * _SECOND) & _MASK
        x ^= x >> 31
    return x


def hashes(count: int, *key: int, start: int = 0) -> np.ndarray:
    """Numbers start .. start + count - 1 of the key's sequence of hashes, (count,) uint64."""
    return _mix(np.arange(start, start + count, dtype=np.uint64) + np.uint64(hash64(*key)))


def permutation(size: int, *key: int) -> np.ndarray:
    """A permutation (size,) int64 of 0 .. size - 1 from integer keys, the same for every NumPy version and machine."""
    return np.argsort(hashes(size, *key), kind="stable")


class Row(NamedTuple):
    """Where a draw's row lies: its epoch, the shard's number and the row in the shard."""

    epoch: int
    shard: int
    row: int


class SourceOrder:
    """The order in which a source's rows are drawn.

    Args:
        number: of the source, part of every key.
        sizes: rows of every shard.
        seed: of the run.
        window: rows permuted together; a larger one shuffles better and opens more shards.
        lanes: positions equal modulo this read neighbouring rows; 1 for none. Best a multiple of any number of data-parallel ranks. Halved
            for windows with fewer than 64 rows in each.
        positions: (source, first draw, count) -> positions (count,) int64; needed with lanes, where ``Schedule.lane_positions`` keeps the
            order from depending on stages to come. Positions that turn out other than these cost locality, nothing else.

    Attributes:
        size: rows in all, so draws per epoch.

    Raises:
        ValueError: no rows, a negative size, a window or lanes out of range, lanes without ``positions``.
    """

    def __init__(
        self,
        number: int,
        sizes: Sequence[int] | np.ndarray,
        seed: int,
        window: int = 1 << 18,
        lanes: int = 1,
        positions: Callable[[int, int, int], np.ndarray] | None = None,
    ) -> None:
        self.number, self.seed, self.window, self.lanes, self.positions = number, seed, window, lanes, positions
        self.sizes = np.asarray(sizes, dtype=np.int64).reshape(-1)
        if (self.sizes < 0).any():
            raise ValueError(
                f"sizes[{int(self.sizes.argmin())}]={int(self.sizes.min())}: a shard has at least 0 rows; build its index again"
            )
        self.size = int(self.sizes.sum())
        if not self.size:
            raise ValueError(f"sizes: the {len(self.sizes)} shards of source {number} hold no row; give shards with samples")
        if window < 1:
            raise ValueError(f"window={window} must be at least 1 row; 262144 shuffles well")
        if not 1 <= lanes <= 1 << _LANE_BITS:
            raise ValueError(f"lanes={lanes} must be from 1 to {1 << _LANE_BITS}; 1024 fits most runs, 1 turns lanes off")
        if lanes > 1 and positions is None:
            raise ValueError(f"lanes={lanes} needs positions, the schedule's inverse; pass schedule.positions, or lanes=1")
        self._epochs: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def stream(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """An epoch's order of shards (shards,) int64, and the rows before each of them and in all, (shards + 1,) int64."""
        if epoch not in self._epochs:
            order = permutation(len(self.sizes), self.seed, self.number, epoch, _SHARDS)
            _keep(self._epochs, epoch, (order, np.concatenate([[0], np.cumsum(self.sizes[order])])))
        return self._epochs[epoch]

    def _span(self, k: int) -> tuple[int, int]:
        """First draw of the window that holds draw k, and the first one after it."""
        epoch, inside = divmod(k, self.size)
        begin = epoch * self.size + inside // self.window * self.window
        return begin, min(begin + self.window, (epoch + 1) * self.size)

    def _plan(self, begin: int, end: int) -> np.ndarray:
        """Place in the epoch's stream of draws begin .. end - 1, a whole window, (end - begin,) int64."""
        if (begin, end) not in self._windows:
            epoch, inside = divmod(begin, self.size)
            lanes = self.lanes
            while lanes > 1 and lanes * _LANE_ROWS > end - begin:
                lanes //= 2  # few rows in each would hardly be shuffled, a single one not at all
            if lanes == 1:
                plan = permutation(end - begin, self.seed, self.number, epoch, _WINDOW, inside)
            else:
                random = hashes(end - begin, self.seed, self.number, epoch, _LANES, inside)
                plan = self._lanes_plan(begin, end - begin, lanes, random)
            _keep(self._windows, (begin, end), plan + inside)
        return self._windows[begin, end]

    def _lanes_plan(self, begin: int, size: int, lanes: int, random: np.ndarray) -> np.ndarray:
        """Lane after lane takes as many rows of the window as it has draws, permuted among themselves."""
        assert self.positions is not None
        lane = self.positions(self.number, begin, size) % lanes
        draws = np.argsort(lane.astype(np.uint16), kind="stable")
        slices = np.repeat(np.arange(lanes, dtype=np.uint64), np.bincount(lane, minlength=lanes))
        plan = np.empty(size, np.int64)
        plan[draws] = np.argsort(slices << np.uint64(64 - _LANE_BITS) | random >> np.uint64(_LANE_BITS), kind="stable")
        return plan

    def at(self, k: int) -> Row:
        """Where draw k lies."""
        if k < 0:
            raise ValueError(f"k={k}: draws count from 0")
        begin, end = self._span(k)
        epoch, place = begin // self.size, int(self._plan(begin, end)[k - begin])
        order, before = self.stream(epoch)
        found = int(before.searchsorted(place, side="right")) - 1
        return Row(epoch, int(order[found]), place - int(before[found]))

    def many(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Epochs, shards and rows of draws first .. first + count - 1, each (count,) int64."""
        if first < 0:
            raise ValueError(f"first={first}: draws count from 0")
        epochs, shards, rows = (np.empty(count, np.int64) for _ in range(3))
        done = 0
        while done < count:
            begin, end = self._span(first + done)
            offset, epoch = first + done - begin, begin // self.size
            places = self._plan(begin, end)[offset : offset + count - done]
            order, before = self.stream(epoch)
            found = np.searchsorted(before, places, side="right") - 1
            part = slice(done, done + len(places))
            epochs[part], shards[part], rows[part] = epoch, order[found], places - before[found]
            done += len(places)
        return epochs, shards, rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epochs": OrderedDict(), "_windows": OrderedDict()}


def _keep(cache: OrderedDict, key: Any, value: Any) -> None:
    """Puts a value in a cache that forgets its oldest."""
    while len(cache) >= _CACHED:
        cache.popitem(last=False)
    cache[key] = value
