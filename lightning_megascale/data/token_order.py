"""The order of sources whose weights count tokens: a tree of merges, each a function of the tokens around it.

Draw k of a source takes the tokens C(k) .. C(k + 1) of its own sequence of draws. At a node of the mix tree (`mix_tree.py`) two sequences
are merged by the middles of these spans, each seen on the node's own scale, T_node(T_child^-1(middle)); the merged one is again a sequence
of samples with spans, which the node above merges. With L tokens in the longest sample: at any moment v of a merge each child has
T_child(v) tokens but for L / 2, e_left and e_right; seen from the tokens v + e_left + e_right the node really has, the left one is off by
(1 - r) e_left - r e_right for some slope 0 <= r <= 1, so again by at most L / 2. By the argument of `mix_tree.py` a source is then at most
L/2 * sum over itself and its ancestors a (not the root) of max_segment w_i / w_a from its target at every prefix: L for up to four sources.
(One merge of all sources by these middles is not enough: many equal light sources come due together, and a heavy one is off by several L.)

Random access: the samples around any token of a node are merged from those around its children's targets, a few L wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np

from lightning_megascale.data.mix_tree import MixTree, Node


class Clock(Protocol):
    """Tokens of a source's draws; see ``TokenClock``."""

    longest: int

    def tokens(self, k: int) -> int:
        """Tokens of the first k draws."""

    def marks(self, first: int, count: int) -> np.ndarray:
        """Tokens before draws first .. first + count, (count + 1,) int64."""

    def find(self, tokens: int) -> int:
        """The draw that holds a token."""

    def roughly(self, tokens: int) -> float:
        """About ``find``, cheap everywhere."""


class Items(NamedTuple):
    """Consecutive samples of a node: sources, draws and tokens of each, (n,); draws of every source before the first; its first token."""

    sources: np.ndarray
    draws: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    begin: int

    @property
    def first(self) -> int:
        """The first sample's number in the node's sequence."""
        return int(self.counts.sum())

    def before(self, index: int) -> np.ndarray:
        """Draws of every source before the sample at an index, (sources,) int64."""
        return self.counts + np.bincount(self.sources[:index], minlength=len(self.counts))

    def ends(self) -> np.ndarray:
        """The node's tokens up to every sample's end, (n,) int64."""
        return self.begin + np.cumsum(self.lengths)


class TokenOrder:
    """The order of the sources of a part by tokens; positions and draws count from the part's start.

    Args:
        tree: of the sources' weights, with segments measured in tokens.
        clocks: of the tree's sources.
        base: draws of every one of them before the part.

    Attributes:
        bound: proven largest error of any source, in tokens.
    """

    def __init__(self, tree: MixTree, clocks: Sequence[Clock], base: Sequence[int]) -> None:
        self.tree, self.clocks, self.base = tree, clocks, list(base)
        self.origins = [clock.tokens(k) for clock, k in zip(clocks, base)]
        self.longest = max(clock.longest for clock in clocks)
        self.bound: Fraction = max(tree.bounds) * self.longest
        self.leaves = [path[0][0] if path else tree.root for path in tree.paths]
        self.shares = [tree.keys(tree.root, leaf) for leaf in self.leaves]
        edges = _edges(tree.root)
        self.up = {child.sources: tree.keys(child, parent) for parent, child in edges}
        self.down = {child.sources: tree.keys(parent, child) for parent, child in edges}

    def items(self, node: Node, low: int, high: int) -> Items:
        """The samples of a node that hold any of the tokens low .. high - 1 of its sequence (from 0)."""
        low, high = max(low, 0), max(high, 1)
        if node.source is not None:
            return self._leaf(node.source, low, high)
        slack = 2 * self.longest + 1  # a child is within L / 2 of its target, seen from a sample's end as from its start
        parts = []
        for child in node.children:
            down = self.down[child.sources]
            parts.append(self.items(child, down.at(2 * low) // 2 - slack, down.at(2 * high) // 2 + 1 + slack))
        merged, start, stop = self._merge(node, *parts)
        ends = merged.ends()
        a = max(start, int(np.searchsorted(ends, low, side="right")))
        b = min(stop, int(np.searchsorted(ends - merged.lengths, high, side="left")))
        begin = int(ends[a] - merged.lengths[a])
        return Items(merged.sources[a:b], merged.draws[a:b], merged.lengths[a:b], merged.before(a), begin)

    def _leaf(self, source: int, low: int, high: int) -> Items:
        clock, origin, base = self.clocks[source], self.origins[source], self.base[source]
        first, end = clock.find(low + origin), clock.find(high - 1 + origin) + 1
        marks = clock.marks(first, end - first)
        counts = np.zeros(self.tree.size, np.int64)
        counts[source] = first - base
        draws = np.arange(first - base, end - base, dtype=np.int64)
        return Items(np.full(end - first, source, np.int32), draws, np.diff(marks), counts, int(marks[0]) - origin)

    def _merge(self, node: Node, left: Items, right: Items) -> tuple[Items, int, int]:
        """Both children's samples in order, and the stretch [start, stop) in which none of either child is missing."""
        parts = zip(node.children, (left, right))
        keys = [self.up[child.sources].many(2 * part.ends() - part.lengths) for child, part in parts]  # middles, in half tokens
        order = np.argsort(np.concatenate(keys), kind="stable")  # the left one first where both come at once
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        start = max(int(place[0]) if left.first else 0, int(place[len(left.draws)]) if right.first else 0)
        stop = min(int(place[len(left.draws) - 1]), int(place[-1])) + 1
        sources, draws, lengths = (np.concatenate([a, b])[order] for a, b in zip(left[:3], right[:3]))
        return Items(sources, draws, lengths, left.counts + right.counts, left.begin + right.begin), start, stop

    def _around(self, x: int) -> Items:
        """Some consecutive samples of the part with its x-th among them."""
        low, high = 0, 1
        while self._roughly(high) <= x:
            high *= 2
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._roughly(middle) > x else (middle + 1, high)
        token, reach = low, 4 * self.longest
        while True:
            found = self.items(self.tree.root, token - reach, token + reach)
            missing = x - found.first
            if 0 <= missing < len(found.draws):
                return found
            token = max(0, token + int((missing - len(found.draws) // 2) * float(found.lengths.mean())))
            reach *= 2

    def _roughly(self, token: int) -> float:
        parts = zip(self.clocks, self.shares, self.origins, self.base)
        return sum(clock.roughly(share.at(2 * token) // 2 + origin) - base for clock, share, origin, base in parts)

    def reached(self, tokens: int) -> int:
        """How many samples it takes to reach so many tokens."""
        return self.items(self.tree.root, tokens - 1, tokens).first + 1

    def at(self, x: int) -> tuple[int, int]:
        """Position x -> (source, draw)."""
        sources, draws = self.window(x, 1)
        return int(sources[0]), int(draws[0])

    def window(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources (count,) int32 and draws (count,) int64 of positions start .. start + count - 1."""
        found = self._around(start)
        low = found.begin + int(found.lengths[: start - found.first].sum())
        while found.first + len(found.draws) < start + count:
            missing = start + count - found.first - len(found.draws)
            high = found.begin + int(found.lengths.sum()) + int(1.02 * missing * float(found.lengths.mean())) + 4 * self.longest
            found = self.items(self.tree.root, low, high)
        part = slice(start - found.first, start - found.first + count)
        return found.sources[part], found.draws[part]

    def positions(self, source: int, first: int, count: int) -> np.ndarray:
        """Ascending positions (count,) int64 of draws first .. first + count - 1 of a source."""
        back, k = self.tree.keys(self.leaves[source], self.tree.root), self.base[source] + first
        begin, end = (self.clocks[source].tokens(at) - self.origins[source] for at in (k, k + count))
        slack = int(self.bound) + self.longest + 1
        found = self.items(self.tree.root, back.at(2 * max(begin - slack, 0)) // 2, back.at(2 * (end + slack)) // 2 + 1)
        return found.first + np.flatnonzero((found.sources == source) & (found.draws >= first) & (found.draws < first + count))

    def counts(self, n: int) -> list[int]:
        """Draws of every source among the first n positions."""
        found = self._around(n)
        return found.before(n - found.first).tolist()

    def target(self, source: int, n: int) -> Fraction:
        """A source's share of the tokens of the first n positions."""
        parts = zip(self.clocks, self.counts(n), self.base, self.origins)
        return self.tree.target(source, sum(clock.tokens(base + k) - origin for clock, k, base, origin in parts))


def _edges(node: Node) -> list[tuple[Node, Node]]:
    """All (parent, child) at and below a node."""
    if node.source is not None:
        return []
    return [edge for child in node.children for edge in ((node, child), *_edges(child))]
