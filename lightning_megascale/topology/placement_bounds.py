"""What no order of the nodes can go below: a bound on the slowest link of each traffic under one order of axes.

Bounds on each traffic, valid for all orders of the nodes, so the largest counts; what they need together is added by a fourth and by
placement_joint.py.

1. members: a group of n ranks falls into at least ``ceil(n / C)`` parts when the largest NVLink domain holds C of its ranks, into 2 when
   whole groups do not all fit into domains. Its smallest part has at most ``n / parts`` members; the time of a part of m members follows
   from the model of placement_links.py, and the least over the m allowed is the bound. All groups together need the bytes of their parts
   from the NICs of all nodes together.
2. nics: where each node is a domain of its own, flows between positions are fixed; each position is put on some node, and where all nodes
   are used each kind of node gets some position.
3. uplinks: a switch with s of the used nodes below it, and positions that fall into sets of k which exchange data: whole sets fill it up
   to a rest of ``s mod k`` positions, and the cut of a set is concave in its size (a ring: one edge out; all pairs: r (k - r) of them), so
   the least cut of s positions is that of one set with the rest. **Source**: a concave function on a polytope is least at a corner.
4. grid: where the sets of two axes are the rows and columns of all positions, the nodes below a switch are cells that cannot be whole rows
   and whole columns at once; the least over all counts of rows and columns that are hit and whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_megascale.topology.placement_groups import EXPERT
from lightning_megascale.topology.placement_joint import joint_bound, part_seconds, parts_of_fabric
from lightning_megascale.topology.placement_links import Flows, Links

MOST_COUNTS = 500_000  # of rows and columns that a bound looks through


class Bounds:
    """The bounds of a cluster's links under the traffic of a mesh."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.nic_kinds = {tuple(nic.gb_per_s for nic in node.nics) for node in links.cluster.nodes}
        self.switches = _switches(links)
        self.parts = parts_of_fabric(links)

    def seconds(self, axis_order: tuple[str, ...]) -> float:
        """What a step needs at least under any order of the nodes."""
        links = self.links
        bounds = np.zeros(len(links.traffic))
        splits: dict[bytes, list[_Split]] = {}  # traffics by the sets into which they split the positions
        for number, sent in enumerate(links.traffic):
            groups = links.mesh.groups(axis_order, sent.groups)
            if groups.shape[1] == 1 or not sent.bytes_:
                continue
            sets, width = _sets(groups // links.per_node, links.positions)
            bounds[number] = _members(links, sent.kind, sent.bytes_, groups, width)
            if links.single:
                flows = links.flows(axis_order, number, np.arange(links.positions))
                nvlink = flows.nvlink_bytes / (links.cluster.gpu.scale_up_gb_per_s * 1e9)
                cuts = {alike: _cuts(sent.kind, flows, alike, sets, width, links) for _, alike, _ in self.switches if width > 1}
                uplinks = [float(cuts[alike][nodes % width]) / speed for nodes, alike, speed in self.switches if width > 1]
                bounds[number] = max(bounds[number], nvlink, self._nics(flows), *uplinks)
                if width > 1:
                    splits.setdefault(sets.tobytes(), []).append(_Split(number, sets, width, cuts))

        def spread(name: str) -> tuple[int, int] | None:
            if name in EXPERT and links.mesh.ep is None:
                return None
            _, width = _sets(links.mesh.groups(axis_order, name) // links.per_node, links.positions)
            return (width, links.mesh.size(name) // width) if width else None

        return max(joint_bound(links, self.parts, bounds, spread), self._pairs(bounds, list(splits.values())))

    def _pairs(self, bounds: np.ndarray, splits: Sequence[Sequence[_Split]]) -> float:
        """The sum of ``bounds``, raised by what two axes need together where they are the rows and columns of all positions."""
        best = total = float(bounds.sum())
        for rows, columns in itertools.combinations(splits, 2):
            across, down = rows[0].width, columns[0].width
            cells = rows[0].sets * across * down + columns[0].sets
            if across * down != self.links.positions or len(np.unique(cells)) < len(cells):
                continue
            alone = total - sum(float(bounds[split.number]) for split in [*rows, *columns])
            for nodes, alike, speed in self.switches:
                costs = []
                for split, lines in ((rows, down), (columns, across)):
                    cut = np.arange(lines + 1) / speed
                    costs.append(np.sum([np.maximum(bounds[one.number], one.cuts[alike][1] * cut) for one in split], axis=0))
                if nodes < self.links.positions and alone + costs[0][-1] + costs[1][-1] > best:
                    best = max(best, alone + _grid_cut(nodes, across, down, *costs))
        return best

    def _nics(self, flows: Flows) -> float:
        """Bound 2. Sent and received bytes of each position, by the NICs it would have on each kind of node."""
        if not len(flows.bytes_):
            return 0.0
        costs = []
        positions, per_node = self.links.positions, self.links.per_node
        for speeds in self.nic_kinds:
            slot = np.arange(per_node) * len(speeds) // self.links.cluster.gpus_per_node
            worst = np.zeros(positions)
            for ranks in (flows.source, flows.target):
                owner = ranks // per_node * len(speeds) + slot[ranks % per_node]
                load = np.bincount(owner, flows.bytes_, positions * len(speeds)).reshape(positions, len(speeds))
                worst = np.maximum(worst, (load / (np.array(speeds) * 1e9)).max(1))
            costs.append(worst)
        every = np.array(costs)
        return float(max(every.min(0).max(), every.min(1).max() if positions == len(self.links.cluster.nodes) else 0.0))


@dataclass(frozen=True)
class _Split:
    """Traffic ``number`` splits the positions into ``sets`` of ``width``; ``cuts`` by GPUs below a switch, as ``_cuts`` finds them."""

    number: int
    sets: np.ndarray
    width: int
    cuts: dict[bytes, np.ndarray]


def _grid_cut(cells: int, across: int, down: int, row_cost: np.ndarray, column_cost: np.ndarray) -> float:
    """Least cost of the rows and columns that ``cells`` of a grid cut, over all that its counts allow.

    Of ``down`` rows of ``across`` cells r are hit and f of these whole, of the columns c and g. A whole row hits every column; a row that
    is hit and not whole holds at least max(1, g) and at most min(c, across - 1) cells. These rules are necessary, so the least is a bound.

    Args:
        row_cost: of 0 .. down rows cut, float64 (down + 1,).
        column_cost: of 0 .. across columns cut, float64 (across + 1,).
    """
    if (across + 1) ** 2 * (down + 1) ** 2 > MOST_COUNTS:
        return 0.0
    r, f, c, g = np.ogrid[: down + 1, : down + 1, : across + 1, : across + 1]
    allowed = (f <= r) & (g <= c) & ((f == 0) | (c == across)) & ((g == 0) | (r == down))
    allowed = allowed & (f * across + (r - f) * np.maximum(1, g) <= cells) & (f * across + (r - f) * np.minimum(c, across - 1) >= cells)
    allowed = allowed & (g * down + (c - g) * np.maximum(1, f) <= cells) & (g * down + (c - g) * np.minimum(r, down - 1) >= cells)
    cost = row_cost[np.maximum(r - f, 0)] + column_cost[np.maximum(c - g, 0)]
    return float(np.where(allowed, cost, np.inf).min())


def _switches(links: Links) -> list[tuple[int, bytes, float]]:
    """(nodes below, which GPUs of a node are below on all of these as bool bytes, bytes per second upwards) where all nodes are used."""
    cluster, tree = links.cluster, links.tree
    if links.positions < len(cluster.nodes) or links.per_node < cluster.gpus_per_node:
        return []
    found: set[tuple[int, bytes, float]] = set()
    for tier in range(len(tree.unit) - 1):
        below = tree.unit[tier][tree.nic].reshape(len(cluster.nodes), links.per_node)
        for unit in np.unique(below):
            hangs = below == unit
            some = hangs.any(1)
            bytes_per_s = float(tree.uplink_gb_per_s[tier, unit]) * 1e9
            if np.isfinite(bytes_per_s):
                found.add((int(some.sum()), hangs[some].all(0).tobytes(), bytes_per_s))
    return sorted(found)


def _sets(places: np.ndarray, positions: int) -> tuple[np.ndarray, int]:
    """(set of each position (N,), positions of each): a set is what groups join; 0 where they differ or are unevenly covered."""
    label = np.arange(positions)
    low = places.min(1)
    np.minimum.at(label, places.ravel(), np.repeat(low, places.shape[1]))
    _, sets, counts = np.unique(label, return_inverse=True, return_counts=True)
    width = int(counts[0])
    if (counts != width).any() or places.shape[1] % width:
        return sets, 0
    evenly = np.sort(places, axis=1).reshape(len(places), width, -1)  # each group has equally many ranks at each position of its set
    each = evenly[:, :, :1]
    same = (evenly == each).all() and (np.diff(each[:, :, 0]) > 0).all() and (sets[places] == sets[low][:, None]).all()
    return sets, width if same else 0


def _members(links: Links, kind: str, bytes_: float, groups: np.ndarray, width: int) -> float:
    count, size = groups.shape
    domains = np.bincount(links.domain)
    most = min(size, int(domains.max()) * links.per_node)
    parts = math.ceil(size / most)
    if parts == 1 and width and (domains // width).sum() < links.positions // width:
        parts = 2
    speeds = links.tree.nic_gb_per_s * 1e9
    nic, nvlink = (float(speeds.max()) if speeds.size else 1e-9), links.cluster.gpu.scale_up_gb_per_s * 1e9
    alone = float(part_seconds(kind, bytes_, size, np.arange(1, min(most, size // parts) + 1), nic, nvlink).min())
    if size <= most or kind == "chain":
        return alone
    # Bytes of all parts of a group, least where all but one are as large as can be: their number, or pairs that are parted.
    crossing = float(parts) if kind == "ring" else (size**2 - size // most * most**2 - (size % most) ** 2) / (size - 1)
    together = np.sort([sum(nic.gb_per_s for nic in node.nics) for node in links.cluster.nodes])[::-1][: links.positions].sum() * 1e9
    return max(alone, bytes_ * count * crossing / together)


def _cuts(kind: str, flows: Flows, below: bytes, sets: np.ndarray, width: int, links: Links) -> np.ndarray:
    """Bytes that r positions of a set send at least to its others from these GPUs' NICs: float64 (width,) for r = 0 .. width - 1."""
    per_node, positions = links.per_node, links.positions
    alike = np.frombuffer(below, dtype=bool)
    kept = alike[flows.source % per_node]
    edges = flows.source[kept] // per_node * positions + flows.target[kept] // per_node
    lanes, place = np.unique(edges, return_inverse=True)
    none = np.zeros(width)
    if not len(lanes):
        return none
    least = float(np.bincount(place, flows.bytes_[kept]).min())
    per_set = np.bincount(sets[lanes // positions], minlength=int(sets.max()) + 1)
    expected = {"ring": width, "alltoall": width * (width - 1), "chain": 2 * (width - 1)}[kind]
    if (per_set != expected).any():
        return none
    rest = np.arange(width)
    return np.where(rest > 0, least * (rest * (width - rest) if kind == "alltoall" else 1), 0.0)
