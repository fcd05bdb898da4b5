"""A bound on several traffics at once: a domain or a part of the fabric cannot hold whole groups of every axis.

Let a set of s ranks hit ``P_i`` groups of axis i, so that it has ``t_i = s / P_i`` members of such a group on average. For axes whose
groups are the lines of one grid, ``prod t_i <= s``. **Source**: Loomis and Whitney, An inequality related to the isoperimetric
inequality (1949). A time that does not rise in ``t_i`` may therefore be bounded by its least sum over all ``t`` with that product.

- A domain of NVLink with s ranks: the smallest part of axis i has at most ``t_i`` members, whose time the model gives.
- A part of the fabric with its uplinks, where all nodes are used: of ``s / t_i`` groups of n at most ``(s - s / t_i) / (n - 1)`` are whole,
  so ``s (n / t_i - 1) / (n - 1)`` are cut, and each cut group sends ``bytes_`` outwards at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lightning_megascale.topology.placement_links import Links

# Groups that are the lines of one grid over all ranks.
GRIDS = (
    ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    ("pp", "dp_replicate", "fsdp", "tp"),
    ("pp", "batch", "cp", "tp"),
    ("pp", "loss", "tp"),
    ("pp", "dp_replicate", "expert_shard", "ep"),
)
STEPS = 256  # of the logarithm of t; each is counted as its end, so that the bound holds


def part_seconds(kind: str, bytes_: float, size: int, members: np.ndarray, nic: float, nvlink: float) -> np.ndarray:
    """Least time of a part of ``members`` (m,) of a group of ``size`` ranks in one domain.

    Args:
        nic: fastest NIC, bytes per second.
        nvlink: of a GPU, bytes per second.
    """
    if size == 1:
        return np.zeros(members.shape)
    whole = members == size
    if kind == "alltoall":
        return np.maximum((members - 1) / nvlink, (size - members) / nic) * bytes_ / (size - 1)
    inside, outside = (0.0, 1.0) if kind == "chain" else (1 - 1 / members, 1 / members)
    return np.maximum(np.where(whole, 1.0, inside) / nvlink, np.where(whole, 0.0, outside) / nic) * bytes_


def joint_bound(
    links: Links, parts: Sequence[tuple[int, float]], bounds: np.ndarray, spread: Callable[[str], tuple[int, int] | None]
) -> float:
    """Seconds that all traffics need together at least.

    Args:
        parts: what ``parts_of_fabric`` found.
        bounds: what each traffic needs alone, seconds, float64 (T,).
        spread: (positions that a group of this name is on, its ranks at each of them), None where groups are not spread so evenly.
    """
    best = float(bounds.sum())
    if not links.tree.nic_gb_per_s.size:
        return best
    for grid in GRIDS:
        inside = [number for number, sent in enumerate(links.traffic) if sent.groups in grid and bounds[number] > 0]
        alone = float(bounds.sum() - bounds[inside].sum())
        axes: dict[str, list[int]] = {}
        for number in inside:
            axes.setdefault(links.traffic[number].groups, []).append(number)
        if not axes:
            continue
        if not links.single:
            on = [spread(name) for name in grid]
            even = all(on) and math.prod(one[0] for one in on if one) == links.positions
            each = {name: one[1] for name, one in zip(grid, on) if one} if even else None
            best = max(best, alone + _domain(links, bounds, axes, each))
        for ranks, bytes_per_s in parts if len(axes) > 1 else ():
            best = max(best, alone + _uplinks(links, bounds, axes, ranks, bytes_per_s))
    return best


def _domain(links: Links, bounds: np.ndarray, axes: Mapping[str, list[int]], each: Mapping[str, int] | None) -> float:
    """The least sum over whole numbers of members whose product is at most what a domain holds: positions, where ``each`` says how many
    ranks of a group are at one; else ranks."""
    counts = np.bincount(links.domain)
    used_whole = links.positions == len(links.cluster.nodes)
    held = int(counts.min() if used_whole else counts.max())  # any domain gives a bound; the smallest the best
    held = min(held * (1 if each else links.per_node), links.mesh.world)
    nic, nvlink = links.tree.nic_gb_per_s.max() * 1e9, links.cluster.gpu.scale_up_gb_per_s * 1e9
    total = np.zeros(held + 1)
    for name, numbers in axes.items():
        size, ranks = links.mesh.size(name), each[name] if each else 1
        members = np.arange(1, min(size // ranks, held) + 1)
        cost = np.zeros(len(members))
        for number in numbers:
            sent = links.traffic[number]
            seconds = part_seconds(sent.kind, sent.bytes_, size, members * ranks, nic, nvlink)
            cost += np.maximum(bounds[number], np.minimum.accumulate(seconds))
        total = np.array([0.0] + [(cost[:left] + total[left // members[:left]]).min() for left in range(1, held + 1)])
    return float(total[held])


def parts_of_fabric(links: Links) -> list[tuple[int, float]]:
    """(ranks, bytes per second of all uplinks) of each part: nodes below the same switches of a tier, where all nodes are used."""
    cluster, tree = links.cluster, links.tree
    if links.positions < len(cluster.nodes) or links.per_node < cluster.gpus_per_node:
        return []
    found: set[tuple[int, float]] = set()
    for tier in range(len(tree.unit) - 1):
        above = tree.unit[tier][tree.node_nics]
        part = np.arange(len(above))
        for _ in range(len(above)):  # nodes that share a switch or a domain are one part
            before = part.copy()
            for owner in [*above.T, links.domain]:
                low = np.full(owner.max() + 1, len(part))
                np.minimum.at(low, owner, part)
                part = np.minimum(part, low[owner])
            # a node's switches carry its part to each other
            low = np.full(int(above.max()) + 1, len(part))
            np.minimum.at(low, above.ravel(), np.repeat(part, above.shape[1]))
            part = np.minimum(part, low[above].min(1))
            if (part == before).all():
                break
        for name in np.unique(part):
            nodes = part == name
            speed = float(tree.uplink_gb_per_s[tier, np.unique(above[nodes])].sum())
            if not nodes.all() and math.isfinite(speed):
                found.add((int(nodes.sum()) * links.per_node, speed * 1e9))
    return sorted(found)


def _uplinks(links: Links, bounds: np.ndarray, axes: Mapping[str, list[int]], ranks: int, bytes_per_s: float) -> float:
    width = math.log(ranks) / STEPS
    ends = np.exp(width * np.arange(1, STEPS + 2))
    costs = []
    for name, numbers in axes.items():
        size = links.mesh.size(name)
        cut = ranks * np.maximum(size / np.minimum(ends, size) - 1, 0) / max(1, size - 1) / bytes_per_s
        costs.append(np.sum([np.maximum(bounds[number], links.traffic[number].bytes_ * cut) for number in numbers], axis=0))
    return _least(costs)


def _least(costs: list[np.ndarray]) -> float:
    """The least sum of one value of each list whose places add up to at most STEPS."""
    total = costs[0]
    for cost in costs[1:]:
        total = np.array([(total[: left + 1] + cost[left::-1]).min() for left in range(STEPS + 1)])
    return float(total[STEPS])
