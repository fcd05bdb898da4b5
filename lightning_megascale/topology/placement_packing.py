"""Orders of nodes worth a try: whole sets of positions below one domain or leaf, and boxes of the positions' grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from lightning_megascale.topology.placement_links import Links

PACKED_FLOWS = 4_000_000  # flows x orders of nodes of all packings: about a second
PATTERN_FLOWS = 5_000  # what finding the flows of one traffic anew is worth
MOST_WALKS = 24  # orders in which a packing walks through the positions' grid
MOST_BOXES = 200
LEAST_TRIED = 4


def flow_count(links: Links, axis_order: tuple[str, ...]) -> int:
    """About how many flows one order of nodes has, in the work of finding them where they are not known."""
    pattern = np.arange(links.positions)
    flows = sum(len(links.flows(axis_order, number, pattern).bytes_) for number in range(len(links.traffic)))
    return max(50, flows) if links.single else max(PATTERN_FLOWS * len(links.traffic), flows)


def _labels(links: Links) -> np.ndarray:
    """For each node the unit it belongs to, lowest first: its domain, then the switch above its first NIC in each tier; int (L, nodes)."""
    first = links.tree.node_nics[:, 0] if links.tree.unit.size else np.zeros(len(links.domain), dtype=np.int64)
    tiers = [links.tree.unit[tier][first] for tier in range(len(links.tree.unit))] if links.tree.unit.size else []
    return np.array([links.domain, *tiers])


def distinct_orders(links: Links) -> list[tuple[str, ...]]:
    """Orders of axes that put different places of the mesh together on a node.

    Two that differ in the order of whole nodes alone are the same choice: every order of the nodes is tried under either, and rings follow
    the mesh's coordinates under both.
    """
    found: dict[bytes, tuple[str, ...]] = {}
    for order in links.mesh.axis_orders:
        ranks = links.mesh.grid(order).ravel()
        _, first, node = np.unique(ranks // links.per_node, return_index=True, return_inverse=True)
        found.setdefault(np.stack([np.argsort(np.argsort(first))[node], ranks % links.per_node]).tobytes(), order)
    return list(found.values())


def packings(links: Links, axis_order: tuple[str, ...]) -> np.ndarray:
    """Orders of nodes worth a try, the order of the cluster's nodes first: int (P, N)."""
    positions, nodes = links.positions, len(links.cluster.nodes)
    labels = _labels(links)
    speed = np.array([sum(nic.gb_per_s for nic in node.nics) for node in links.cluster.nodes])
    preferred, depth_first = np.lexsort((np.arange(nodes), -speed)), np.lexsort(labels)
    starts = range(0, nodes - positions + 1, max(1, (nodes - positions) // 16))
    tried = [order[start : start + positions] for order in (np.arange(nodes), depth_first) for start in starts]
    packed = {1: _packed(preferred, labels, 1)[:positions]}
    for grid in _grids(links, axis_order):
        walks = itertools.islice(itertools.permutations(range(len(grid))), MOST_WALKS)
        for walk in walks:
            places = np.arange(positions).reshape(grid).transpose(walk).ravel()
            for end in range(len(grid) + 1):
                block = math.prod(grid[axis] for axis in walk[end:])
                if block not in packed:
                    packed[block] = _packed(preferred, labels, block)[:positions]
                order = np.empty(positions, dtype=np.int64)
                order[places] = packed[block]
                tried.append(order)
        for label in labels[:2]:
            tried += _tiles(depth_first, label, grid)
    most = max(LEAST_TRIED, PACKED_FLOWS // flow_count(links, axis_order))
    return np.array(list({order.tobytes(): order for order in tried}.values())[:most])


def _grids(links: Links, axis_order: tuple[str, ...]) -> list[list[int]]:
    """Positions as a grid: what of each axis lies between nodes, outermost first; with experts, that of their groups too."""
    mesh = links.mesh
    many = [[mesh.sizes[axis] for axis in axis_order]]
    inner = [axis for axis in axis_order if axis in ("dp_shard", "cp", "tp") and mesh.sizes[axis] > 1]
    wide = [axis for axis in axis_order if mesh.sizes[axis] > 1]
    if mesh.ep and inner and wide[wide.index(inner[0]) :][: len(inner)] == inner:
        begin = wide.index(inner[0])
        sizes = [mesh.sizes[axis] for axis in wide]
        many.append(sizes[:begin] + [mesh.size("expert_shard"), mesh.size("ep")] + sizes[begin + len(inner) :])
    found = []
    for sizes in many:
        grid, inside = [], links.per_node
        for size in reversed(sizes):
            held = min(size, inside)
            if size % held or inside % held:
                break
            inside //= held
            grid.append(size // held)
        else:
            found.append([size for size in reversed(grid) if size > 1] or [1])
    return found or [[links.positions]]


def _packed(nodes: np.ndarray, labels: np.ndarray, block: int) -> np.ndarray:
    """All ``nodes``: sets of ``block`` that share a low unit, larger units first; what remains of units is joined in those above."""

    def pack(some: np.ndarray, level: int) -> tuple[list[int], list[int]]:
        if level < 0:
            fits = len(some) // block * block
            return list(some[:fits]), list(some[fits:])
        parts = [some[labels[level][some] == unit] for unit in dict.fromkeys(labels[level][some].tolist())]
        packed = [pack(part, level - 1) for part in sorted(parts, key=len, reverse=True)]
        whole = [node for full, _ in packed for node in full]
        rest = [node for _, left in sorted(packed, key=lambda pair: len(pair[1]), reverse=True) for node in left]
        fits = len(rest) // block * block
        return whole + rest[:fits], rest[fits:]

    whole, rest = pack(nodes, len(labels) - 1)
    return np.array(whole + rest, dtype=np.int64)


def _tiles(depth_first: np.ndarray, label: np.ndarray, grid: Sequence[int]) -> list[np.ndarray]:
    """Orders in which each unit of ``label`` holds a box of the positions' grid; none where units have other numbers of nodes."""
    positions = math.prod(grid)
    counts = np.unique(label, return_counts=True)[1]
    each = int(counts[0])
    if (counts != each).any() or positions % each or not 1 < each < positions or len(depth_first) != positions or len(grid) < 2:
        return []
    units = depth_first[np.argsort(label[depth_first], kind="stable")].reshape(-1, each)
    units = units[np.argsort([int(np.flatnonzero(depth_first == unit[0])[0]) for unit in units])]
    shapes = [box for box in itertools.product(*[_divisors(size) for size in grid]) if math.prod(box) == each]
    places = np.array(np.unravel_index(np.arange(positions), grid))
    orders = []
    for box in shapes[:MOST_BOXES]:
        edge = np.array(box)[:, None]
        coarse = np.ravel_multi_index(tuple(places // edge), tuple(np.array(grid) // np.array(box)))
        fine = np.ravel_multi_index(tuple(places % edge), box)
        orders.append(units[coarse, fine])
    return orders


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
