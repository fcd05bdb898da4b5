"""The search for a placement: orders of axes x orders of nodes, exact where few orders of nodes differ, else packings and swaps.

1. Orders of axes come by their lower bound (placement_bounds.py); one whose bound is not below the best time found is skipped.
2. Packings: nodes depth first through the tree; whole sets of k positions below one domain or leaf, what remains joined further up, for
   every k at which an axis ends, dealt to the positions axis by axis in each order; and boxes of their grid below equal leaves or domains.
3. Where a bound remains below: every order of nodes, if nodes that hang alike count as one and the work is small; the result is exact.
4. Otherwise swaps of nodes, drawn from a fixed seed; the result has a stated gap to the least bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_megascale.topology.placement_bounds import Bounds
from lightning_megascale.topology.placement_links import Links
from lightning_megascale.topology.placement_packing import distinct_orders, flow_count, packings

MOST_FLOWS = 20_000_000  # flows x orders of nodes x orders of axes of an exhaustive search: about two seconds
MOST_PATTERNS = 12_000  # orders of domains x orders of axes x traffics, where NVLink domains of several nodes change the flows
SWAPS, PATIENCE, STARTS = 48, 6, 4  # drawn at once; draws without gain until a descent ends; descents under each order of axes
SWAP_FLOWS = 5_000_000  # flows x orders of nodes of all swaps: about a second
EQUAL = 1 + 1e-9


@dataclass(frozen=True)
class Found:
    """The best order of axes and nodes, its seconds by traffic, and what no order goes below."""

    axis_order: tuple[str, ...]
    node_order: tuple[int, ...]
    seconds: tuple[float, ...]
    lower_bound: float


class Search:
    """The best so far, and what is tried."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.best: tuple[float, float] = (math.inf, math.inf)
        self.axis_order: tuple[str, ...] = ()
        self.node_order = np.arange(0)
        self.seconds = np.zeros(0)
        self.packed: dict[tuple[str, ...], tuple[tuple[float, float], np.ndarray]] = {}  # best packing of each order of axes

    def run(self) -> Found:
        least = Bounds(self.links)
        bounds = {order: least.seconds(order) for order in distinct_orders(self.links)}
        by_bound = sorted(bounds, key=lambda order: bounds[order])
        for order in by_bound:
            self._pack(order, bounds[order])
        open_orders = [order for order in by_bound if bounds[order] * EQUAL < self.best[0]]
        exhaustive = not open_orders
        if open_orders and self._few(open_orders):
            for order in open_orders:
                if bounds[order] * EQUAL < self.best[0]:
                    self._all(order)
            exhaustive = True
        elif open_orders:
            self._swap(sorted(open_orders, key=lambda order: order != self.axis_order))
        bound = self.best[0] if exhaustive else min(self.best[0], bounds[by_bound[0]])
        node_order = tuple(int(node) for node in self.node_order)
        return Found(self.axis_order, node_order, tuple(float(second) for second in self.seconds), bound)

    def _pack(self, axis_order: tuple[str, ...], bound: float) -> None:
        """Tries the packings, the cluster's own order first, unless the bound is met."""
        if bound * EQUAL >= self.best[0]:
            return
        tries = packings(self.links, axis_order)
        self.packed[axis_order] = self.attempt(axis_order, tries[:1])
        if len(tries) > 1 and bound * EQUAL < self.best[0]:
            self.packed[axis_order] = min(self.packed[axis_order], self.attempt(axis_order, tries[1:]), key=lambda pair: pair[0])

    def attempt(self, axis_order: tuple[str, ...], node_orders: np.ndarray) -> tuple[tuple[float, float], np.ndarray]:
        """Notes the best of ``node_orders`` (P, N), the first of equals, if it beats the best so far; returns its score and itself."""
        seconds, total = self.links.seconds(axis_order, node_orders)
        times = seconds.sum(1)
        row = int(np.lexsort((total, np.round(times / max(times.min(), 1e-300), 9)))[0])
        score = float(times[row]), float(total[row])
        if _better(score, self.best):
            self.best, self.axis_order, self.node_order, self.seconds = score, axis_order, node_orders[row], seconds[row]
        return score, node_orders[row]

    def _few(self, orders: Sequence[tuple[str, ...]]) -> bool:
        """Whether all orders of nodes under these orders of axes are little work."""
        links = self.links
        count = arrangements(_classes(links), links.positions) * len(orders)
        if not links.single:
            domains = [np.flatnonzero(links.domain == name).tolist() for name in np.unique(links.domain)]
            if arrangements(domains, links.positions) * len(orders) * len(links.traffic) > MOST_PATTERNS:
                return False
        return count * max(50, flow_count(links, orders[0]) if links.single else 0) <= MOST_FLOWS

    def _all(self, axis_order: tuple[str, ...]) -> None:
        some = arranged(_classes(self.links), self.links.positions)
        while batch := list(itertools.islice(some, 4096)):
            self.attempt(axis_order, np.array(batch))

    def _swap(self, orders: Sequence[tuple[str, ...]]) -> None:
        """From the best packing and from random orders, under each order of axes in turn, as long as the work allows."""
        links, generator = self.links, np.random.default_rng(0)
        nodes = len(links.cluster.nodes)
        left = float(SWAP_FLOWS)
        for start in range(STARTS):
            for order in orders:
                if start:
                    score, chosen = (math.inf, math.inf), generator.permutation(nodes)
                else:
                    score, best = self.packed[order]
                    chosen = np.append(best, np.setdiff1d(np.arange(nodes), best))
                left = self._descend(order, score, chosen, generator, left)

    def _descend(
        self, axis_order: tuple[str, ...], score: tuple[float, float], chosen: np.ndarray, generator: np.random.Generator, left: float
    ) -> float:
        """Exchanges two nodes, or a node and an unused one, while that gains; returns what work is left."""
        links, nodes, positions = self.links, len(chosen), self.links.positions
        each = SWAPS if links.single else SWAPS // 4
        work = each * flow_count(links, axis_order)
        rows, idle = np.arange(each), 0
        while idle < PATIENCE and left >= work and nodes > 1:
            tries = np.repeat(chosen[None], each, 0)
            first, second = generator.integers(positions, size=each), generator.integers(nodes, size=each)
            tries[rows, first], tries[rows, second] = chosen[second], chosen[first]
            found, best = self.attempt(axis_order, tries[:, :positions])
            left, idle = left - work, idle + 1
            if _better(found, score):
                score, chosen, idle = found, np.append(best, np.setdiff1d(np.arange(nodes), best)), 0
        return left


def _better(score: tuple[float, float], than: tuple[float, float]) -> bool:
    """Less time, or as much and less load on all links; roundings do not count."""
    return score[0] * EQUAL < than[0] or (score[0] <= than[0] * EQUAL and score[1] * EQUAL < than[1])


def _classes(links: Links) -> list[list[int]]:
    """Nodes that can change places without any link seeing it."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, node in enumerate(links.cluster.nodes):
        alike.setdefault((None if links.single else node.nvlink_domain, node.nics), []).append(number)
    return list(alike.values())


def arrangements(classes: Sequence[Sequence[int]], positions: int) -> float:
    """How many orders of ``positions`` nodes differ when those of a class are alike; infinite where that is not worth counting."""
    if len(classes) > 1 and positions > 64:
        return math.inf
    ways = [1] + [0] * positions  # sequences of so many nodes from the classes so far
    for members in classes:
        ways = [
            sum(math.comb(length, taken) * ways[length - taken] for taken in range(min(length, len(members)) + 1))
            for length in range(positions + 1)
        ]
    return ways[positions]


def arranged(classes: Sequence[Sequence[int]], positions: int) -> Iterator[list[int]]:
    """Those orders, one by one."""
    used = [0] * len(classes)
    chosen: list[int] = []

    def longer() -> Iterator[list[int]]:
        if len(chosen) == positions:
            yield list(chosen)
            return
        for number, members in enumerate(classes):
            if used[number] < len(members):
                chosen.append(members[used[number]])
                used[number] += 1
                yield from longer()
                used[number] -= 1
                chosen.pop()

    return longer()
