"""Sources mixed by a binary tree of integer lines: the mechanism under `schedule.py` (samples) and `token_clock.py` (tokens).

Every source i has a target T_i(n), what it should have had after n samples of the part: rising, straight on every segment. A node's
target is the sum of its two children's. A node's x-th item goes left or right by ONE line, the left target seen from the node:
left_count(x) = floor(T_left(T_node^-1(x)) + 1/2). No state, no table by position, no end.

Why the error is bounded: let tau_a = T_a^-1(count of a) for a node a. At the root tau is n itself; each step down moves a child's count
by at most 1/2 from T_child(tau_parent), so moves T_i by at most 1/2 * max over segments of w_i / w_child. Summed over the way from
the root to the leaf: |count_i - T_i(n)| <= 1/2 * sum over i and its ancestors a (not the root) of max_segment w_i / w_a.
The lines are extended past their end, so this also holds where tau runs past the last position. At depth 2 the sum is at most 1.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from math import gcd

import numpy as np

_INT64 = (1 << 63) - 1


class Line:
    """x -> floor((a + b x) / m) with (a, b, m) by piece; non-decreasing, exact for ints of any size and for int64 arrays.

    Args:
        first: the first x of every piece, ascending; the first piece also serves what lies before it.
        pieces: (a, b, m) of every piece, integers, b >= 0, m > 0.
    """

    def __init__(self, first: list[int], pieces: list[tuple[int, int, int]]) -> None:
        self.first, self.pieces = first, pieces

    def at(self, x: int) -> int:
        """The value at one x."""
        a, b, m = self.pieces[bisect_right(self.first, x, 1) - 1]
        return (a + b * x) // m

    def many(self, x: np.ndarray) -> np.ndarray:
        """The values (n,) int64 at ascending x (n,) int64."""
        values = np.empty(len(x), np.int64)
        borders = np.searchsorted(x, [min(f, _INT64) for f in self.first[1:]], side="left").tolist()
        for (a, b, m), begin, end in zip(self.pieces, [0, *borders], [*borders, len(x)]):
            if begin == end:
                continue
            anchor = int(x[begin])
            whole, left = divmod(a + b * anchor, m)
            distance = x[begin:end] - anchor
            if max(left + b * int(distance[-1]), b, m) > _INT64:  # weights of very many digits: slower, as exact
                distance = distance.astype(object)
            values[begin:end] = whole + (left + b * distance) // m
        return values


class Node:
    """A source (a leaf) or the union of two nodes.

    Attributes:
        source: number of the leaf, None for a union.
        sources: numbers of all leaves below, or of the leaf itself.
        weights: weight in every segment, integers out of the tree's ``scale``.
        knots: target at the start of every segment, times ``scale``.
    """

    __slots__ = ("knots", "left", "lower", "right", "source", "sources", "upper", "weights")

    def __init__(self, weights: list[int], lengths: Sequence[int], sources: tuple[int, ...], children: tuple[Node, Node] | None) -> None:
        self.weights, self.sources = weights, sources
        self.source = sources[0] if children is None else None
        self.left: Node | None
        self.right: Node | None
        self.left, self.right = children or (None, None)
        self.knots = [0]
        for weight, length in zip(weights, lengths):
            self.knots.append(self.knots[-1] + weight * length)
        self.lower: Line | None = None  # my item -> how many of the items before it went left
        self.upper: Line | None = None  # my item -> the parent's item

    @property
    def children(self) -> tuple[Node, Node]:
        """Left and right of a union."""
        assert self.left is not None and self.right is not None
        return self.left, self.right


class MixTree:
    """The tree of a part in which every source has a positive weight all the time.

    Args:
        weights: weight of every source in every segment, integers; every segment's sum is ``scale``.
        lengths: samples (or tokens) of every segment but the last, whose length changes nothing here.
    """

    def __init__(self, weights: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        self.scale, self.size = sum(weights[0]), len(weights[0])
        self.lengths, self.starts = lengths, [0, *accumulate(lengths)]
        leaves = [Node([row[i] for row in weights], lengths, (i,), None) for i in range(self.size)]
        shapes = [shape(leaves, self._join) for shape in (_huffman, _balanced, _heavy_with_light)]
        self.root, self.bounds = min(((root, _bounds(root)) for root in shapes), key=lambda found: max(found[1]))
        self.paths: list[list[tuple[Node, bool]]] = [[] for _ in leaves]  # from the leaf up: (node, is it its parent's left child)
        self._prepare(self.root)

    def _join(self, a: Node, b: Node) -> Node:
        return Node([x + y for x, y in zip(a.weights, b.weights)], self.lengths, a.sources + b.sources, (a, b))

    def _prepare(self, node: Node) -> None:
        if node.source is not None:
            return
        node.lower = self._line(node, node.children[0], half=0, extra=self.scale)
        for child, is_left in zip(node.children, (True, False)):
            self._prepare(child)
            child.upper = self._line(child, node, half=1, extra=None if is_left else 0)
            for source in child.sources:
                self.paths[source].append((child, is_left))

    def _line(self, a: Node, b: Node, half: int, extra: int | None) -> Line:
        """floor(T_b(T_a^-1(x + half / 2)) + extra / (2 scale)); ``extra`` None: the largest integer strictly below T_b(T_a^-1(..)).

        With knots F of a and G of b and weights f and g: T_b(T_a^-1(y)) = (G f + (y scale - F) g) / (scale f).
        """
        pieces, first = [], []
        for start_a, start_b, f, g in zip(a.knots, b.knots, a.weights, b.weights):
            common = gcd(f, g)
            numerator = 2 * start_b * f + (half * self.scale - 2 * start_a) * g + (-1 if extra is None else extra * f)
            pieces.append((numerator // (2 * self.scale * common), g // common, f // common))
            first.append(-((half * self.scale - 2 * start_a) // (2 * self.scale)))
        return Line(first, pieces)

    def keys(self, child: Node, parent: Node) -> Line:
        """Child's target -> parent's target at the same time, both in half units, rounded down.

        The order of both children's whole halves survives the rounding: for a left one m and a right one n in the same half unit k of
        the parent, T_left(k) <= m and T_right(k) <= n, and T_left(k + 1) > m and T_right(k + 1) > n; the sums say k <= m + n < k + 1,
        so m and n both come exactly at k.
        """
        pieces, first = [], []
        for start_child, start_parent, f, g in zip(child.knots, parent.knots, child.weights, parent.weights):
            a, b, m = 2 * start_parent * f - 2 * start_child * g, self.scale * g, self.scale * f
            common = gcd(a, b, m)
            pieces.append((a // common, b // common, m // common))
            first.append(-(-2 * start_child // self.scale))
        return Line(first, pieces)

    def target(self, source: int, n: int) -> Fraction:
        """What a source should have had among the part's first n."""
        segment = max(bisect_right(self.starts, n) - 1, 0)
        leaf = self.paths[source][0][0] if self.paths[source] else self.root
        return Fraction(leaf.knots[segment] + leaf.weights[segment] * (n - self.starts[segment]), self.scale)

    def at(self, x: int) -> tuple[int, int]:
        """Position x of the part -> (source, how many earlier ones had that source)."""
        node = self.root
        while node.source is None:
            assert node.lower is not None
            before, after = node.lower.at(x), node.lower.at(x + 1)
            node, x = (node.children[0], before) if after > before else (node.children[1], x - before)
        return node.source, x

    def counts(self, n: int) -> list[int]:
        """Draws of every source among the first n positions of the part."""
        counts, todo = [0] * self.size, [(self.root, n)]
        while todo:
            node, x = todo.pop()
            if node.source is not None:
                counts[node.source] = x
            else:
                assert node.lower is not None
                left = node.lower.at(x)
                todo += [(node.children[0], left), (node.children[1], x - left)]
        return counts

    def window(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources (count,) int32 and draws (count,) int64 of positions start .. start + count - 1 of the part."""
        sources, draws = np.empty(count, np.int32), np.empty(count, np.int64)
        todo = [(self.root, np.arange(count), np.arange(start, start + count, dtype=np.int64))]
        while todo:
            node, place, x = todo.pop()
            if not len(x):
                continue
            if node.source is not None:
                sources[place], draws[place] = node.source, x
                continue
            assert node.lower is not None
            before = node.lower.many(x)
            left = node.lower.many(x + 1) > before
            todo += [(node.children[0], place[left], before[left]), (node.children[1], place[~left], (x - before)[~left])]
        return sources, draws

    def positions(self, source: int, first: int, count: int) -> np.ndarray:
        """Ascending positions (count,) int64 of draws first .. first + count - 1 of a source.

        A left child's item j is the parent's ceil(T_parent(T_left^-1(j + 1/2))) - 1, a right child's floor(T_parent(T_right^-1(j + 1/2))).
        """
        x = np.arange(first, first + count, dtype=np.int64)
        for node, _ in self.paths[source]:
            assert node.upper is not None
            x = node.upper.many(x)
        return x


def _bounds(root: Node) -> list[Fraction]:
    """The proven largest error of every source: 1/2 * sum over itself and its ancestors but the root of max_segment w_i / w_a."""
    found = {}

    def walk(node: Node, above: tuple[Node, ...]) -> None:
        if node.source is not None:
            ratios = [max(Fraction(w, v) for w, v in zip(node.weights, ancestor.weights)) for ancestor in above]
            found[node.source] = sum(ratios, Fraction(0)) / 2
        else:
            for child in node.children:
                walk(child, (*above, child))

    walk(root, ())
    return [found[i] for i in range(len(found))]


_Join = Callable[[Node, Node], Node]


def _by_weight(node: Node) -> tuple[int, tuple[int, ...]]:
    return -sum(node.weights), node.sources


def _huffman(leaves: list[Node], join: _Join) -> Node:
    """The two lightest joined, again and again."""
    heap = [(sum(node.weights), node.sources, node) for node in leaves]
    heapq.heapify(heap)
    while len(heap) > 1:
        node = join(heapq.heappop(heap)[2], heapq.heappop(heap)[2])
        heapq.heappush(heap, (sum(node.weights), node.sources, node))
    return heap[0][2]


def _balanced(leaves: list[Node], join: _Join) -> Node:
    """Neighbours by weight joined, level by level: depth 2 for up to four sources, so an error of at most one."""
    level = sorted(leaves, key=_by_weight)
    while len(level) > 1:
        level = [join(level[i], level[i + 1]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


def _heavy_with_light(leaves: list[Node], join: _Join) -> Node:
    """The heaviest joined with the lightest, level by level."""
    level = sorted(leaves, key=_by_weight)
    while len(level) > 1:
        half = len(level) // 2
        joined = [join(level[i], level[-1 - i]) for i in range(half)]
        level = sorted(joined + level[half : len(level) - half], key=_by_weight)
    return level[0]
