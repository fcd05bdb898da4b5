"""What one step's traffic puts on NVLink, NICs and uplinks: flows between ranks, and the slowest link of each kind of group.

Rank r sits on GPU ``r % n`` of the node at position ``r // n``, n being the ranks of a node. M groups, n ranks of a group, W ranks,
F flows, P orders of nodes, N positions, T kinds of traffic.

The model. **Source**: NCCL's graph search and transports (src/graph, NCCL_CROSS_NIC, NCCL_PXN_DISABLE in its documentation), simplified:

- ring: the members that share an NVLink domain are neighbours in the ring, domains follow each other by their lowest rank. Each of the n
  ranks sends ``bytes_`` onwards, so ``bytes_`` cross from a domain to the next, in as many channels as they have GPUs of equal number
  (rails), each over its own GPU's NIC; where no number is common, all pairs share the bytes. Of m members a GPU passes (m - 1) / m of its
  bytes over NVLink, all where the ring stays in one domain.
- alltoall: ``bytes_ / (n - 1)`` to each other member. A member hands what is for GPU i of another domain to GPU i of its own node where
  that is a member too (PXN), so that it stays on its rail; otherwise its own NIC sends it.
- chain: ``bytes_`` to the next of the group and as much back; the same hops.

Axes send at different times (a layer's tensor, expert and data collectives follow each other), so a step takes the sum over them of the
slowest link: bytes over bandwidth, with all groups of that axis at once. Latencies and overlap with computing are the planner's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_megascale.topology.cluster import Cluster
from lightning_megascale.topology.placement_groups import Mesh, Traffic

MOST_CACHED = 512
BATCH_FLOWS = 2_000_000  # flows x orders of nodes in one numpy call: some hundred MB


@dataclass(frozen=True)
class Flows:
    """What one traffic sends between NVLink domains, and the most that one GPU sends inside its own.

    Args:
        source: ranks whose NIC sends, int (F,).
        target: ranks whose NIC receives, int (F,).
        bytes_: of each flow, float64 (F,).
        nvlink_bytes: sent over NVLink by the busiest GPU.
    """

    source: np.ndarray
    target: np.ndarray
    bytes_: np.ndarray
    nvlink_bytes: float


def flows_of(kind: str, bytes_: float, groups: np.ndarray, domain: np.ndarray, per_node: int) -> Flows:
    """The flows of one traffic.

    Args:
        kind: "ring", "alltoall" or "chain".
        bytes_: that each rank sends.
        groups: ranks of each group, ascending, int (M, n); they partition the world.
        domain: NVLink domain of each rank, int (W,).
        per_node: ranks of a node.
    """
    if groups.shape[1] == 1 or not bytes_:
        return Flows(np.arange(0), np.arange(0), np.zeros(0), 0.0)
    if kind == "ring":
        return _ring(groups, domain, per_node, bytes_)
    if kind == "chain":
        source, target = groups[:, :-1].ravel(), groups[:, 1:].ravel()
        return _pairs(np.append(source, target), np.append(target, source), groups, domain, per_node, bytes_)
    size = groups.shape[1]
    first, second = np.nonzero(~np.eye(size, dtype=bool))
    return _pairs(groups[:, first].ravel(), groups[:, second].ravel(), groups, domain, per_node, bytes_ / (size - 1))


def _pairs(source: np.ndarray, target: np.ndarray, groups: np.ndarray, domain: np.ndarray, per_node: int, bytes_: float) -> Flows:
    """``bytes_`` from each source to its target, handed to the peer on the target's rail where the group has one in the node."""
    world = groups.size
    group = np.empty(world, dtype=np.int64)
    group[groups] = np.arange(len(groups))[:, None]
    far = domain[source] != domain[target]
    peer = source // per_node * per_node + target % per_node
    sender = np.where(far & (group[peer] == group[source]), peer, source)
    inside = np.bincount(source, ~far | (sender != source), world)
    source, target = sender[far], target[far]
    lanes, counts = np.unique(source * world + target, return_counts=True)
    return Flows(lanes // world, lanes % world, counts * bytes_, float(inside.max()) * bytes_)


def _ring(groups: np.ndarray, domain: np.ndarray, per_node: int, bytes_: float) -> Flows:
    count, size = groups.shape
    rank = groups.ravel()
    # A part is the members of a group in one domain; parts are numbered by group, then by first member.
    label = np.repeat(np.arange(count), size) * (int(domain.max()) + 1) + domain[rank]
    _, first, part, members = np.unique(label, return_index=True, return_inverse=True, return_counts=True)
    by_first = np.argsort(first)
    place = np.empty(len(first), dtype=np.int64)
    place[by_first] = np.arange(len(first))
    members, owner = members[by_first], first[by_first] // size
    rank = rank[np.argsort(place[part], kind="stable")]
    start = np.cumsum(members) - members
    parts = np.bincount(owner, minlength=count)
    whole = parts[owner] == 1
    here = np.flatnonzero(~whole)
    following = here + 1
    last = np.append(owner, -1)[following] != owner[here]
    following[last] -= parts[owner[here[last]]]
    nvlink = np.where(whole, 1.0, (members - 1) / members).max() * bytes_
    pairs = members[here] * members[following]
    edge = np.repeat(np.arange(len(here)), pairs)
    step = np.arange(len(edge)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    width = members[following][edge]
    source, target = rank[start[here][edge] + step // width], rank[start[following][edge] + step % width]
    same = source % per_node == target % per_node
    kept = same | (np.bincount(edge, same, len(here)) == 0)[edge]
    share = bytes_ / np.bincount(edge[kept], minlength=len(here))
    return Flows(source[kept], target[kept], share[edge[kept]], float(nvlink))


class Links:
    """The links of a cluster under the traffic of a mesh, for many orders of its nodes at once."""

    def __init__(self, cluster: Cluster, mesh: Mesh, traffic: Sequence[Traffic]) -> None:
        self.cluster, self.mesh, self.traffic = cluster, mesh, tuple(traffic)
        self.per_node = min(cluster.gpus_per_node, mesh.world)
        self.positions = mesh.world // self.per_node
        self.tree = cluster._fabric  # the arrays that the cluster itself answers from
        names = {name: number for number, name in enumerate(dict.fromkeys(node.nvlink_domain for node in cluster.nodes))}
        self.domain = np.array([names[node.nvlink_domain] for node in cluster.nodes])
        self.single = len(names) == len(cluster.nodes)
        self._cache: dict[tuple[tuple[str, ...], int, bytes], Flows] = {}

    def flows(self, axis_order: tuple[str, ...], number: int, pattern: np.ndarray) -> Flows:
        """Of traffic ``number``; ``pattern`` (N,) is the domain at each position, counted by first appearance."""
        key = axis_order, number, pattern.tobytes()
        if key not in self._cache:
            if len(self._cache) >= MOST_CACHED:
                self._cache.clear()
            sent = self.traffic[number]
            groups = self.mesh.groups(axis_order, sent.groups)
            self._cache[key] = flows_of(sent.kind, sent.bytes_, groups, np.repeat(pattern, self.per_node), self.per_node)
        return self._cache[key]

    def seconds(self, axis_order: tuple[str, ...], node_orders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Time of the slowest link.

        Args:
            axis_order: outermost first.
            node_orders: number of the node at each position, int (P, N).

        Returns:
            Seconds by traffic, float64 (P, T); and the sum over all links of their squares (P,), which breaks ties.
        """
        found, total = np.zeros((len(node_orders), len(self.traffic))), np.zeros(len(node_orders))
        for pattern, rows in self._by_pattern(node_orders):
            for number in range(len(self.traffic)):
                flows = self.flows(axis_order, number, pattern)
                found[rows, number] = flows.nvlink_bytes / (self.cluster.gpu.scale_up_gb_per_s * 1e9)
                batch = max(1, BATCH_FLOWS // max(1, len(flows.bytes_)))
                for begin in range(0, len(rows) if len(flows.bytes_) else 0, batch):
                    some = rows[begin : begin + batch]
                    slowest, added = self._network(flows, node_orders[some])
                    found[some, number] = np.maximum(found[some, number], slowest)
                    total[some] += added
        return found, total

    def _by_pattern(self, node_orders: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """(pattern of domains (N,), the rows that have it)."""
        if self.single:
            return [(np.arange(self.positions), np.arange(len(node_orders)))]
        rows: dict[bytes, list[int]] = {}
        for row, domains in enumerate(self.domain[node_orders]):
            _, first, part = np.unique(domains, return_index=True, return_inverse=True)
            rows.setdefault(np.argsort(np.argsort(first))[part].astype(np.int64).tobytes(), []).append(row)
        return [(np.frombuffer(pattern, dtype=np.int64), np.array(some)) for pattern, some in rows.items()]

    def _network(self, flows: Flows, node_orders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(seconds of the slowest NIC or uplink, sum of the squares of all), each (P,)."""
        tree, orders = self.tree, len(node_orders)
        slowest, total = np.zeros(orders), np.zeros(orders)
        ends = []
        for ranks in (flows.source, flows.target):
            nic = tree.nic[node_orders[:, ranks // self.per_node] * self.cluster.gpus_per_node + ranks % self.per_node]
            ends.append(nic)
        for nic in ends:
            load = _loads(nic, np.broadcast_to(flows.bytes_, nic.shape), len(tree.nic_gb_per_s)) / (tree.nic_gb_per_s * 1e9)
            slowest = np.maximum(slowest, load.max(1))
            total += (load**2).sum(1)
        for tier in range(len(tree.unit) - 1):
            units = [tree.unit[tier][nic] for nic in ends]
            leaves = np.where(units[0] != units[1], flows.bytes_, 0.0)
            for unit in units:
                load = _loads(unit, leaves, tree.uplink_gb_per_s.shape[1]) / (tree.uplink_gb_per_s[tier] * 1e9)
                slowest = np.maximum(slowest, load.max(1))
                total += (load**2).sum(1)
        return slowest, total


def _loads(owner: np.ndarray, bytes_: np.ndarray, owners: int) -> np.ndarray:
    """Bytes of each owner, row by row: (P, F), (P, F) -> (P, owners)."""
    rows = np.arange(len(owner))[:, None] * owners
    return np.bincount((rows + owner).ravel(), bytes_.ravel(), len(owner) * owners).reshape(len(owner), owners)
