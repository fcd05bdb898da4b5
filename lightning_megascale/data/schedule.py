"""Position -> (stage, source, draw): staged mixes of sources counted in samples, exact at every position, without state.

A draw k of a source is how many earlier positions had that source. The run is cut in parts at every stage, and where a ramp has brought
in or taken out a source: carried over such a border, the rounding would draw a source of weight zero; and what comes at a position never
depends on later stages, nor on the length of its own. Each part is one tree of integer lines (`mix_tree.py`), within its bound of its own
targets; bounds of parts add. Ramps are staircases (`stages.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from math import inf, lcm, nextafter
from typing import NamedTuple, Protocol

import numpy as np

from lightning_megascale.data.mix_tree import MixTree
from lightning_megascale.data.stages import RAMP_LEVELS, Segment, Stage, check_names, nested, normalised, runs, segments_of, whole

__all__ = ["RAMP_LEVELS", "Bound", "Draw", "Schedule", "Stage", "nested"]


class Draw(NamedTuple):
    """What a position holds: stage number, source number, and how many earlier positions had that source."""

    stage: int
    source: int
    draw: int


class Bound(NamedTuple):
    """The proven error of a part: from position ``first`` on no source strays from its target by more, in the unit of the weights."""

    stage: str
    first: int
    error: float


def tree_of(segments: Sequence[Segment]) -> tuple[MixTree, list[str]]:
    """The tree of segments that have the same sources, and the sources' names in its order."""
    names = sorted(segments[0].mix)
    scale = lcm(*(weight.denominator for segment in segments for weight in segment.mix.values()))
    rows = [[int(segment.mix[name] * scale) for name in names] for segment in segments]
    return MixTree(rows, [segment.length or 0 for segment in segments[:-1]]), names


def rounded_up(value: Fraction) -> float:
    """A float that is not below the fraction."""
    return float(value) if Fraction(float(value)) >= value else nextafter(float(value), inf)


class Order(Protocol):
    """How the sources of a part follow each other; positions and draws count from the part's start, sources are the part's own numbers."""

    def at(self, x: int) -> tuple[int, int]:
        """Position x -> (source, draw)."""

    def window(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources (count,) and draws (count,) of positions start .. start + count - 1."""

    def positions(self, source: int, first: int, count: int) -> np.ndarray:
        """Positions (count,) int64 of draws first .. first + count - 1 of a source."""

    def counts(self, n: int) -> list[int]:
        """Draws of every source among the first n positions."""

    def target(self, source: int, n: int) -> Fraction:
        """What a source should have among the first n positions, in the unit of the weights."""


class Part:
    """A stretch of positions under one order.

    Args:
        start: its first position.
        total: how many positions it has; None: no end.
        stage: number of the stage it begins in.
        order: of its sources.
        numbers: the run's numbers of its sources, (sources,) int32.
        base: draws of every source of the run before it.
        bound: proven largest error, in the unit of the weights.
    """

    def __init__(
        self, start: int, total: int | None, stage: int, order: Order, numbers: np.ndarray, base: list[int], bound: Fraction
    ) -> None:
        self.start, self.total, self.stage, self.order, self.numbers, self.base, self.bound = (
            start,
            total,
            stage,
            order,
            numbers,
            base,
            bound,
        )

    def counts(self, n: int) -> list[int]:
        """Draws of every source of the run among everything before the part's n-th position."""
        counts = list(self.base)
        for number, count in zip(self.numbers.tolist(), self.order.counts(n)):
            counts[number] += count
        return counts


class Schedule:
    """Which source every position of a run draws from, and which of its draws.

    Args:
        stages: in their order; see ``Stage``.
        sources: names a mix may use; None allows all.

    Attributes:
        sources: names of all sources of all stages, sorted; a source's number is its place here.
        total: positions in all; None when the last stage is endless.

    Raises:
        ValueError: no stages, a name twice, samples <= 0 or None before the last stage, a ramp longer than its stage or in the first one;
            a mix that is empty, all zero, negative, no number, or names an unknown source.
    """

    unit = "samples"

    def __init__(self, stages: Sequence[Stage], sources: Sequence[str] | None = None) -> None:
        self._read(stages, sources)
        segments: list[Segment] = []
        for number, stage in enumerate(self.stages):
            length = self._length(number, stage)
            segments += segments_of(number, length, stage.ramp, self.mixes[number - 1], self.mixes[number])
            if length is not None:
                self._starts.append(self._starts[-1] + length)
        for run in runs(segments):
            tree, names = tree_of(run)
            total = None if run[-1].length is None else sum(segment.length or 0 for segment in run)
            if total == 0:
                continue
            self._append(run[0].stage, total, tree, names, max(tree.bounds))
        self._finish()

    def _read(self, stages: Sequence[Stage], sources: Sequence[str] | None) -> None:
        """Checks stages and mixes and starts an empty run."""
        self.stages = tuple(stages)
        check_names(self.stages)
        self.mixes = [normalised(stage.name, stage.mix, sources) for stage in self.stages]
        self.sources = tuple(sorted({name for mix in self.mixes for name in mix}))
        self._starts: list[int] = [0]  # of every stage, and the end
        self._parts: list[Part] = []

    def _next(self) -> tuple[int, list[int]]:
        """First position after the parts so far, and the draws of every source before it."""
        if not self._parts:
            return 0, [0] * len(self.sources)
        last = self._parts[-1]
        assert last.total is not None
        return last.start + last.total, last.counts(last.total)

    def _append(self, stage: int, total: int | None, order: Order, names: Sequence[str], bound: Fraction) -> None:
        start, base = self._next()
        numbers = np.array([self.sources.index(name) for name in names], np.int32)
        self._parts.append(Part(start, total, stage, order, numbers, base, bound))

    def _finish(self) -> None:
        self.total: int | None = None
        self._end: list[int] | None = None  # draws of every source in the whole run
        if self._parts[-1].total is not None:
            self.total, self._end = self._next()
        self._part_starts = [part.start for part in self._parts]

    def _length(self, number: int, stage: Stage) -> int | None:
        tokens = getattr(stage, "tokens", None)
        if tokens is not None:
            raise ValueError(f"stage {stage.name!r}: tokens={tokens} in a schedule of samples; give samples, or count weights in tokens")
        if stage.samples is None:
            if number + 1 < len(self.stages):
                raise ValueError(
                    f"stage {stage.name!r}: samples=None never ends, so no stage may follow; give samples, or make it the last"
                )
            return None
        length = whole(f"stage {stage.name!r}: samples", stage.samples, 1)
        if stage.ramp > length:
            raise ValueError(f"stage {stage.name!r}: ramp={stage.ramp} is longer than its samples={length}; shorten the ramp")
        return length

    def _check(self, start: int, count: int) -> None:
        if start < 0 or count < 0 or (self.total is not None and start + count > self.total):
            end = "without end" if self.total is None else f"of {self.total} positions"
            raise ValueError(f"positions {start} to {start + count} are outside this run {end}; a longer run needs another stage")

    def _part(self, position: int) -> Part:
        return self._parts[bisect_right(self._part_starts, position) - 1]

    def stage_start(self, number: int) -> int:
        """The first position of a stage."""
        return self._starts[range(len(self.stages))[number]]

    def at(self, p: int) -> Draw:
        """What position p holds, exact at any size."""
        self._check(p, 1)
        part = self._part(p)
        leaf, draw = part.order.at(p - part.start)
        source = int(part.numbers[leaf])
        return Draw(min(bisect_right(self._starts, p), len(self.stages)) - 1, source, draw + part.base[source])

    def window(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Stages (count,) int32, sources (count,) int32 and draws (count,) int64 of positions start .. start + count - 1."""
        self._check(start, count)
        sources, draws, done = np.empty(count, np.int32), np.empty(count, np.int64), 0
        while done < count:
            part = self._part(start + done)
            offset = start + done - part.start
            size = count - done if part.total is None else min(count - done, part.total - offset)
            leaves, inner = part.order.window(offset, size)
            sources[done : done + size] = part.numbers[leaves]
            draws[done : done + size] = inner + np.array(part.base, np.int64)[sources[done : done + size]]
            done += size
        borders = [start_of - start for start_of in self._starts[1 : len(self.stages)]]
        stages = np.zeros(count, np.int32)
        for border in borders:
            stages[min(max(border, 0), count) :] += 1
        return stages, sources, draws

    def positions(self, source: int, first: int, count: int) -> np.ndarray:
        """Ascending positions (count,) int64 of draws first .. first + count - 1 of a source; draws the run never makes get any number."""
        out, done = np.arange(first, first + count, dtype=np.int64), 0
        for number, part in enumerate(self._parts):
            end = self._parts[number + 1].base[source] if number + 1 < len(self._parts) else (self._end[source] if self._end else None)
            leaf = np.flatnonzero(part.numbers == source)
            size = (count if end is None else min(count, max(0, end - first))) - done
            if size > 0 and len(leaf):
                out[done : done + size] = part.order.positions(int(leaf[0]), first + done - part.base[source], size) + part.start
                done += size
        return out

    def lane_positions(self, source: int, first: int, count: int) -> np.ndarray:
        """As ``positions``, but as if the part with draw ``first`` never ended: a function of the past, whatever stages follow."""
        for part in reversed(self._parts):
            leaf = np.flatnonzero(part.numbers == source)
            if len(leaf) and part.base[source] <= first:
                return part.order.positions(int(leaf[0]), first - part.base[source], count) + part.start
        return np.arange(first, first + count, dtype=np.int64)

    def counts(self, n: int) -> list[int]:
        """Draws of every source among the first n positions."""
        self._check(n, 0)
        part = self._part(n)
        return part.counts(n - part.start)

    def bounds(self) -> list[Bound]:
        """The proven largest error of any source in every part; at most one sample (or longest sample) for up to four sources."""
        return [Bound(self.stages[part.stage].name, part.start, rounded_up(part.bound)) for part in self._parts]

    def bound(self, n: int) -> float:
        """The proven largest error of any source at prefix n: the bounds of the parts begun before it, added."""
        return rounded_up(sum((part.bound for part in self._parts if part.start < n), Fraction(0)))

    def targets(self, n: int) -> list[Fraction]:
        """What every source should have among the first n positions, exact."""
        self._check(n, 0)
        found = [Fraction(0)] * len(self.sources)
        for part in self._parts:
            inside = n - part.start if part.total is None else min(n - part.start, part.total)
            for leaf, number in enumerate(part.numbers.tolist() if inside > 0 else []):
                found[number] += part.order.target(leaf, inside)
        return found

    def describe(self) -> str:
        """The stages in words: positions, share and expected amount of every source, and the proven bounds."""
        lines = []
        for number, stage in enumerate(self.stages):
            start, end = self._starts[number], self._starts[number + 1] if number + 1 < len(self._starts) else None
            span = f"{start:,} on, without end" if end is None else f"{start:,} to {end - 1:,} ({end - start:,} samples)"
            lines.append(f"{stage.name}: positions {span}" + (f", ramp over {stage.ramp:,} {self.unit}" if stage.ramp else ""))
            wanted = None if end is None else [b - a for a, b in zip(self.targets(start), self.targets(end))]
            for name, share in sorted(self.mixes[number].items()):
                amount = "" if wanted is None else f", {float(wanted[self.sources.index(name)]):,.1f} {self.unit} expected"
                lines.append(f"  {name}: {float(share):.4%}{amount}")
        for bound in self.bounds():
            lines.append(f"from position {bound.first:,} ({bound.stage}): no source is ever more than {bound.error:,.3f} {self.unit} off")
        return "\n".join(lines)
