"""Packing: which samples share a training sequence, planned window by window as a pure function of the samples' token counts.

A *window* is a stretch of consecutive positions of the stream. Its samples are put into sequences of ``capacity`` tokens, and nothing is
carried over to the next, so any sequence can be found again without looking at what came before its window. One integer says where a run
stands: ``window << 20 | sequence``.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from lightning_megascale.data.shuffle import permutation

_T = TypeVar("_T")
Lengths = Callable[[int, int], np.ndarray]

_SHIFT = 20
_IN_WINDOW = (1 << _SHIFT) - 1
LARGEST_WINDOW = 1 << _SHIFT
_SEQUENCES_PER_WINDOW, _SMALLEST_WINDOW = 256, 8192
_SEQUENCES_PER_GROUP, _SMALLEST_GROUP, _MOST_GROUPS, _LARGEST_GROUPED = 256, 1024, 64, 1 << 18
_SAMPLES, _SEQUENCES, _DEALT, _TIES, _BATCHES = 11, 12, 13, 21, 22  # keys of the shuffles
_KEPT = 4  # windows whose plan a Packer remembers: a batch may span two


def best_fit_decreasing(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Puts samples into few sequences: the longest first, each where the least space is left that holds it.

    O(n log n) comparisons; equal lengths in the order given, equal spaces in the order the sequences were opened.

    Args:
        lengths: (n,) tokens of each sample, 1 to ``capacity``.
        capacity: tokens of a sequence.

    Returns:
        for each sequence the indices of its samples, longest first.

    Raises:
        ValueError: for a length outside of 1 to ``capacity``.

    Source: Johnson (1973), "Near-optimal bin packing algorithms": at most 11/9 of the fewest sequences possible, and 4 more.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and not 1 <= sizes.min() <= sizes.max() <= capacity:
        wrong = int(np.flatnonzero((sizes < 1) | (sizes > capacity))[0])
        raise ValueError(
            f"lengths[{wrong}]={sizes[wrong]} and capacity={capacity}: a sample needs 1 to {capacity} tokens; cut longer ones, drop empty"
        )
    order = np.argsort(-sizes, kind="stable")
    unit = len(sizes) + 1
    spaces: list[int] = []  # sorted; space * unit + sequence
    sequences: list[list[int]] = []
    for sample, size in zip(order.tolist(), sizes[order].tolist()):
        place = bisect_left(spaces, size * unit)
        if place == len(spaces):
            number, space = len(sequences), capacity - size
            sequences.append([sample])
        else:
            space, number = divmod(spaces.pop(place), unit)
            space -= size
            sequences[number].append(sample)
        if space:
            insort(spaces, space * unit + number)
    return sequences


def plan_window(lengths: Sequence[int] | np.ndarray, capacity: int, *key: int) -> list[list[int]]:
    """The sequences of a window: best-fit decreasing, then shuffled, for its order is by length (the first ones hold one long sample).

    Args:
        lengths: (n,) tokens of each sample. One that is longer than a sequence counts as one, for it will be cut; one without tokens
            counts as 1, for another sample will take its place.
        capacity: tokens of a sequence.
        key: of the shuffle of sequences, and of samples in each.

    Returns:
        for each sequence the indices of its samples.
    """
    sequences = best_fit_decreasing(np.clip(np.asarray(lengths, dtype=np.int64), 1, capacity), capacity)
    rank = permutation(len(lengths), *key, _SAMPLES).tolist()
    return [sorted(sequences[number], key=rank.__getitem__) for number in permutation(len(sequences), *key, _SEQUENCES).tolist()]


def bucketed(lengths: Sequence[int] | np.ndarray, batch_size: int, *key: int, parts: Sequence[np.ndarray] | None = None) -> list[list[int]]:
    """Batches of samples of like length, for little padding without packing.

    Args:
        lengths: (n,) of a window's samples.
        batch_size: samples of a batch; where n is no multiple, the batch of the longest is smaller.
        key: of the shuffles: of the batches, and of samples of equal length.
        parts: the indices of each group, where a batch is to hold equally many of all, in turn, from the same place of their lengths.

    Returns:
        for each batch the indices of its samples; each sample is in one.

    Raises:
        ValueError: for a batch without samples.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be 1 or more")
    mixed = permutation(len(lengths), *key, _TIES)
    order = mixed[np.argsort(np.asarray(lengths)[mixed], kind="stable")]
    orders = [order] if parts is None else [order[np.isin(order, part, assume_unique=True)] for part in parts]
    each = max(batch_size // len(orders), 1)
    most = max(len(one) for one in orders)
    batches = [_in_turn([one[start : start + each].tolist() for one in orders]) for start in range(0, most, each)]
    return [batches[number] for number in permutation(len(batches), *key, _BATCHES).tolist()]


def choose_window(capacity: int, mean_length: float) -> int:
    """Samples of a window: a power of two that fills at least 256 sequences, for about half a sequence of a window is padding, and at least
    8,192 samples, for few of them leave gaps that none of them fills. Planning takes 1 to 2 microseconds a sample.

    Args:
        capacity: tokens of a sequence.
        mean_length: tokens of a sample in the mean.

    Returns:
        at most 2^20.

    Raises:
        ValueError: for numbers that are not positive.
    """
    if capacity < 1 or not mean_length > 0:
        raise ValueError(f"capacity={capacity}, mean_length={mean_length}: both must be above 0")
    samples = int(np.ceil(_SEQUENCES_PER_WINDOW * capacity / min(float(mean_length), capacity)))
    return min(max(1 << (samples - 1).bit_length(), _SMALLEST_WINDOW), LARGEST_WINDOW)


def choose_groups(capacity: int, mean_length: float, lanes: int, window: int | None = None) -> tuple[int, int]:
    """Samples of a window, and into how many groups it is parted by position, each of which is packed by itself.

    Positions equal modulo the groups read neighbouring samples of a source (``SourceOrder``'s lanes), so sequences that hold positions of
    one group only, dealt to ranks in turn, let a rank open few shards. A group fills 256 to 1,024 sequences and has at least 1,024 samples;
    a window that is chosen for groups has at most 262,144, which are planned in half a second.

    Args:
        capacity: tokens of a sequence.
        mean_length: tokens of a sample in the mean.
        lanes: the most groups; of it the largest power of two that divides it, at most 64, is taken.
        window: samples of a window where they are given; None chooses, ``choose_window`` at least.

    Returns:
        (window, groups).
    """
    least = choose_window(capacity, mean_length)
    filling = int(np.ceil(_SEQUENCES_PER_GROUP * capacity / min(float(mean_length), capacity)))
    group = max(1 << (filling - 1).bit_length(), _SMALLEST_GROUP)
    groups = 1
    while groups < _MOST_GROUPS and lanes % (2 * groups) == 0 and 2 * groups * group <= (window or _LARGEST_GROUPED):
        groups *= 2
    return window or max(least, min(groups * 2 * group, max(_LARGEST_GROUPED, least)) if groups > 1 else 0), groups


class Packer:
    """The packed sequences of a stream: from one integer of state to positions, and to the next state.

    A state is ``window << 20 | sequence``, and always that of a sequence, or the end: ``windows << 20``. Two windows can have different
    numbers of sequences, so "sequence s" counted from the start of the run would need all plans before it.

    Args:
        lengths: (start, count) -> (count,) tokens of the samples at these positions; pure, or ranks pack differently.
        window: samples that are packed together, at most 2^20; see ``choose_window``.
        capacity: tokens of a sequence.
        total: positions of the stream; None: endless.
        borders: ascending positions that no window spans (the starts of stages): what is left before one is packed by itself.
        seed: of the shuffles.
        groups: positions equal modulo this share sequences, and sequences of all groups take turns; see ``choose_groups``. Fewer in
            windows that are cut short.

    Raises:
        ValueError: for arguments out of their range.
    """

    def __init__(
        self,
        lengths: Lengths,
        window: int,
        capacity: int,
        total: int | None,
        borders: Sequence[int] = (),
        seed: int = 0,
        groups: int = 1,
    ) -> None:
        if not 1 <= window <= LARGEST_WINDOW:
            raise ValueError(f"window={window}: must be 1 to {LARGEST_WINDOW}, so that a sequence's number fits into the state")
        if not 1 <= groups <= window or groups & (groups - 1):
            raise ValueError(f"groups={groups}: must be a power of two, at most the window's {window} samples")
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: a sequence holds at least 1 token")
        if total is not None and total < 1:
            raise ValueError(f"total={total}: a stream has at least 1 position; None makes it endless")
        inner = [int(border) for border in borders if border]
        ends = [0, *inner] + ([] if total is None else [total])
        if any(a >= b for a, b in zip(ends, ends[1:])):
            raise ValueError(f"borders={list(borders)} of total={total}: must ascend, and lie inside the stream")
        self._lengths, self.window, self.capacity, self.total, self.seed = lengths, window, capacity, total, seed
        self.groups = groups
        self._starts = [0, *inner]  # of parts, in positions
        self._first = [0]  # window of each part
        for begin, end in zip(self._starts, inner):
            self._first.append(self._first[-1] - (begin - end) // window)
        self.windows = None if total is None else self._first[-1] - (self._starts[-1] - total) // window
        self._plans: dict[int, list[list[int]]] = {}
        self._counts: dict[int, int] = {}
        self._lengths_of: dict[int, np.ndarray] = {}

    @property
    def end(self) -> int | None:
        """The state behind the last sequence; None for an endless stream."""
        return None if self.windows is None else self.windows << _SHIFT

    def span(self, window: int) -> tuple[int, int]:
        """(first position, samples) of a window; O(log borders).

        Raises:
            ValueError: for a window that the stream does not have.
        """
        if window < 0 or (self.windows is not None and window >= self.windows):
            raise ValueError(f"window {window} of a stream of {'endless' if self.windows is None else self.windows} windows")
        part = bisect_right(self._first, window) - 1
        start = self._starts[part] + (window - self._first[part]) * self.window
        end = self._starts[part + 1] if part + 1 < len(self._starts) else self.total
        return start, self.window if end is None else min(self.window, end - start)

    def window_at(self, position: int) -> int:
        """The window that holds a position."""
        part = bisect_right(self._starts, position) - 1
        return self._first[part] + (position - self._starts[part]) // self.window

    def sequence(self, state: int) -> list[int]:
        """The positions of the samples of a sequence, in the order they stand in it.

        Raises:
            ValueError: for a state that is none of this stream's sequences (of another configuration, say).
        """
        window, number = self._split(state)
        return list(self._plan(window)[number])

    def rooms(self, state: int) -> list[int]:
        """Tokens that each sample of a sequence was planned with."""
        start = self.span(state >> _SHIFT)[0]
        measured = self._measured_once(state >> _SHIFT)
        return [int(min(measured[position - start], self.capacity)) for position in self.sequence(state)]

    def sequences(self, window: int) -> int:
        """How many sequences a window makes."""
        if window not in self._counts:
            self._counts[window] = len(self._plan(window))
        return self._counts[window]

    def count(self, limit_windows: int | None = None) -> int:
        """Sequences of the first windows, or of all. Plans each of them once: milliseconds a window.

        Raises:
            ValueError: for an endless stream without a limit.
        """
        if limit_windows is None and self.windows is None:
            raise ValueError("limit_windows=None: an endless stream has no number of sequences; say how many windows to count")
        known = [number for number in (limit_windows, self.windows) if number is not None]
        return sum(self.sequences(window) for window in range(min(known)))

    def advance(self, state: int, count: int) -> int:
        """The state ``count`` sequences later, at most the end."""
        if count < 0:
            raise ValueError(f"count={count}: a stream goes forward")
        if state == self.end:
            return state
        window, number = self._split(state)
        number += count
        while number >= self.sequences(window):
            number -= self.sequences(window)
            window += 1
            if window == self.windows:
                return window << _SHIFT
        return window << _SHIFT | number

    def take(self, state: int, count: int) -> tuple[list[int], int]:
        """The states of the next sequences, which may lie in several windows, and the state after them.

        Returns:
            ``count`` states, or what the stream still has.
        """
        states: list[int] = []
        while len(states) < count and state != self.end:
            window, number = self._split(state)
            taken = min(count - len(states), self.sequences(window) - number)
            states += range(state, state + taken)
            state = self.advance(state, taken)
        return states, state

    def padding(self, first_window: int = 0, n: int = 1) -> float:
        """Share of padding in the sequences of ``n`` windows, by the token counts they were planned with."""
        tokens = space = 0
        for window in range(first_window, first_window + n):
            tokens += int(np.minimum(self._measured_once(window), self.capacity).sum())
            space += self.sequences(window) * self.capacity
        return 1 - tokens / space if space else 0.0

    def _split(self, state: int) -> tuple[int, int]:
        window, number = state >> _SHIFT, state & _IN_WINDOW
        known = window >= 0 and (self.windows is None or window < self.windows)
        if not known or number >= self.sequences(window):
            raise ValueError(
                f"state={state} is sequence {number} of window {window}, which this stream does not have: it was saved under other data, "
                "seed, sequence length or window; resume with those, or start anew"
            )
        return window, number

    def _measured(self, start: int, count: int) -> np.ndarray:
        found = np.asarray(self._lengths(start, count))
        if found.shape != (count,) or not np.issubdtype(found.dtype, np.integer):
            raise ValueError(
                f"lengths({start}, {count}) gave {found.dtype} {found.shape}: must be whole numbers ({count},), one for each position"
            )
        return found

    def _measured_once(self, window: int) -> np.ndarray:
        if window not in self._lengths_of:
            while len(self._lengths_of) >= _KEPT:
                self._lengths_of.pop(next(iter(self._lengths_of)))
            self._lengths_of[window] = self._measured(*self.span(window))
        return self._lengths_of[window]

    def _plan(self, window: int) -> list[list[int]]:
        if window not in self._plans:
            start = self.span(window)[0]
            offsets = self._together(self._measured_once(window), window, self._parts(window))
            while len(self._plans) >= _KEPT:
                self._plans.pop(next(iter(self._plans)))
            self._plans[window] = [[start + offset for offset in sequence] for sequence in offsets]
        return self._plans[window]

    def _parts(self, window: int) -> list[np.ndarray]:
        """The samples of each group of a window."""
        start, count = self.span(window)
        groups = self.groups
        while groups > 1 and count * self.groups < groups * self.window:
            groups //= 2
        return [np.arange((group - start) % groups, count, groups) for group in range(groups)]

    def _together(self, lengths: np.ndarray, window: int, parts: list[np.ndarray]) -> list[list[int]]:
        """Which samples of a window share a sequence."""
        if len(parts) == 1:
            return plan_window(lengths, self.capacity, self.seed, window)
        sequences = []
        for number, part in enumerate(parts):
            planned = plan_window(lengths[part], self.capacity, self.seed, window, number)
            sequences += [part[sequence].tolist() for sequence in planned]
        return _dealt(sequences, len(parts), self.seed, window)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}, "_lengths_of": {}}


class Bucketer(Packer):
    """One sample in each sequence, next to others of its length: groups of ``GROUP`` like ones follow each other, in a shuffled order.

    A batch of any size takes neighbours, so its padding is small wherever it is cut.
    """

    GROUP = 64

    def _together(self, lengths: np.ndarray, window: int, parts: list[np.ndarray]) -> list[list[int]]:
        return [[sample] for batch in bucketed(lengths, self.GROUP, self.seed, window, parts=parts) for sample in batch]


def _dealt(sequences: list[list[int]], groups: int, *key: int) -> list[list[int]]:
    """Sequences in the order of their groups, dealt in turn: number n mod ``groups`` has those of its group, and a few of the next to it.

    Groups have unlike numbers of sequences, so their borders are moved until all have the same, which keeps neighbours in storage
    together; and some sequences are halved until the number divides, so that the next window begins with the first group again.
    """
    halved = [number for number, sequence in enumerate(sequences) if len(sequence) > 1]
    missing = min(-len(sequences) % groups, len(halved))
    for number in reversed(halved[:: max(len(halved) // max(missing, 1), 1)][:missing]):
        middle = len(sequences[number]) // 2
        sequences[number : number + 1] = [sequences[number][:middle], sequences[number][middle:]]
    borders = [len(sequences) * number // groups for number in range(groups + 1)]
    dealt = []
    for number, (begin, end) in enumerate(zip(borders, borders[1:])):
        dealt.append([sequences[begin + place] for place in permutation(end - begin, *key, _DEALT, number).tolist()])
    return _in_turn(dealt)


def _in_turn(groups: Sequence[Sequence[_T]]) -> list[_T]:
    """One of each group, again and again, as long as they have any."""
    return [entry for entries in itertools.zip_longest(*groups) for entry in entries if entry is not None]
