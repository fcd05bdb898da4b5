"""A cluster as data: nodes, their NICs, the switches above them, and what a planner asks of them: levels, bandwidth, contention.

A switch stands for all that act as one: the spines that the same leaves hang on are one Switch whose uplinks are summed. GPU g is
the ``g % gpus_per_node``-th of node ``g // gpus_per_node``. GB/s are 1e9 bytes per second in one direction; links carry both at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_megascale.topology.gpus import Gpu, gpu_sheet
from lightning_megascale.topology.rules import check_cluster


@dataclass(frozen=True)
class Nic:
    """A network card's port: ``leaf`` is the name of the Switch it hangs on, ``gb_per_s`` its line rate."""

    leaf: str
    gb_per_s: float


@dataclass(frozen=True)
class Node:
    """A server. GPUs of nodes with the same ``nvlink_domain`` reach each other without the network.

    ``nics`` are in rail order; GPU i of G uses NIC ``i * len(nics) // G``.
    """

    name: str
    nvlink_domain: str
    nics: tuple[Nic, ...]


@dataclass(frozen=True)
class Switch:
    """A switch, or several that act as one.

    Args:
        name: unique in the cluster.
        tier: 0 for a leaf; a switch above has a larger one.
        up: name of the switch above; None at the top.
        uplink_gb_per_s: of all links to ``up`` together; 0 at the top.
    """

    name: str
    tier: int
    up: str | None = None
    uplink_gb_per_s: float = 0.0


@dataclass(frozen=True)
class Level:
    """Where two GPUs meet: level 0 is the NVLink domain, level t + 1 a switch of tier t.

    Args:
        name: such as "nvlink", "leaf", "spine", "row", "data_center".
        latency_us: of one message between GPUs that meet here, microseconds.
    """

    name: str
    latency_us: float


@dataclass(frozen=True)
class Cluster:
    """GPUs, nodes, fabric, storage and failures.

    Args:
        name: for tables and messages.
        gpu: the sheet of every GPU.
        gpus_per_node: the same for all nodes.
        nodes: in the order in which GPUs are counted.
        switches: a tree; every leaf's name is found in it.
        levels: the NVLink domain, then one for each tier.
        storage_read_gb_per_s: of the shared file system, all nodes together.
        storage_write_gb_per_s: the same for writing.
        node_storage_gb_per_s: what one node can read or write at most.
        failures_per_1000_node_days: interruptions of a run by hardware or system, per thousand nodes and day.

    Raises:
        ValueError: lists every violated rule.
    """

    name: str
    gpu: Gpu
    gpus_per_node: int
    nodes: tuple[Node, ...]
    switches: tuple[Switch, ...]
    levels: tuple[Level, ...]
    storage_read_gb_per_s: float
    storage_write_gb_per_s: float
    node_storage_gb_per_s: float
    failures_per_1000_node_days: float

    def __post_init__(self) -> None:
        wrong = check_cluster(self)
        if wrong:
            more = f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else ""
            raise ValueError(f"cluster {self.name!r}:\n  " + "\n  ".join(wrong[:20]) + more)

    @property
    def num_gpus(self) -> int:
        return len(self.nodes) * self.gpus_per_node

    def level(self, name: str) -> int:
        """The index of the level called ``name``.

        Raises:
            ValueError: there is none.
        """
        names = [level.name for level in self.levels]
        if name not in names:
            raise ValueError(f"level={name!r}: cluster {self.name!r} has {', '.join(names)}; choose one of these")
        return names.index(name)

    def cut(self, *, gpus: int | None = None, gpu: str | Gpu | None = None) -> Cluster:
        """The first ``gpus`` GPUs of this cluster, or the same cluster with other GPUs, or both.

        Leaves keep their uplinks, so a cut that half fills a leaf has more of them for each GPU; storage stays whole. Another GPU
        brings its NVLink; NICs, nodes and switches stay.

        Args:
            gpus: a part of one node, or whole nodes.
            gpu: a sheet, or the name of one.

        Raises:
            ValueError: there are fewer, the last node would be broken, or no sheet has this name.
        """
        sheet = self.gpu if gpu is None else gpu if isinstance(gpu, Gpu) else gpu_sheet(gpu)
        if gpus is None:
            return dataclasses.replace(self, gpu=sheet)
        per_node = self.gpus_per_node
        if isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= self.num_gpus:
            raise ValueError(f"gpus={gpus!r}: cluster {self.name!r} has {self.num_gpus}; take a number from 1 to that, or a larger cluster")
        if gpus > per_node and gpus % per_node:
            near = gpus // per_node * per_node
            more = f" or {near + per_node}" if near + per_node <= self.num_gpus else ""
            raise ValueError(f"gpus={gpus}: above one node it must be a multiple of the {per_node} GPUs of a node; take {near}{more}")
        nodes = self.nodes[: max(1, gpus // per_node)]
        if gpus < per_node:
            used = (gpus - 1) * len(nodes[0].nics) // per_node + 1
            nodes = (dataclasses.replace(nodes[0], nics=nodes[0].nics[:used]),)
        return dataclasses.replace(self, gpu=sheet, gpus_per_node=min(gpus, per_node), nodes=nodes, switches=self._above(nodes))

    def _above(self, nodes: tuple[Node, ...]) -> tuple[Switch, ...]:
        """The switches on the way up from ``nodes``, in their order."""
        by_name = {switch.name: switch for switch in self.switches}
        kept: set[str] = set()
        for start in {nic.leaf for node in nodes for nic in node.nics}:
            name: str | None = start
            while name is not None and name not in kept:
                kept.add(name)
                name = by_name[name].up
        return tuple(switch for switch in self.switches if switch.name in kept)

    def levels_between(self, first: np.ndarray | int, second: np.ndarray | int, *, through_peers: bool = False) -> np.ndarray:
        """The level at which GPUs meet, pair by pair.

        Args:
            first, second: numbers of GPUs, int, any shapes that broadcast.
            through_peers: a GPU may hand its data over NVLink to the GPU of its node whose NIC meets the receiver's lowest, as NCCL
                does (PXN); otherwise each uses its own NIC, and two rails meet at the spine.

        Returns:
            Levels, int, of the broadcast shape. Source of PXN: NCCL 2.12 release notes.
        """
        first, second = np.broadcast_arrays(self._chosen(0, first), self._chosen(0, second))
        fabric = self._fabric
        met = np.full(first.shape, len(self.levels) - 1)
        far = fabric.domain[first] != fabric.domain[second]
        if fabric.unit.size:
            senders = fabric.node_nics[first // self.gpus_per_node] if through_peers else fabric.nic[first][..., None]
            receivers = fabric.nic[second][..., None]
            for tier in reversed(range(len(fabric.unit))):
                same = (fabric.unit[tier][senders] == fabric.unit[tier][receivers]).any(-1)
                met[same] = tier + 1
        return np.where(far, met, 0)

    def bandwidths_gb_per_s(self, level: int, gpus: np.ndarray | None = None) -> np.ndarray:
        """What each of ``gpus`` can send across ``level`` when all of them do so at once.

        Each NIC and each uplink on the way is dealt evenly to the GPUs that share it; a GPU has the least of its shares.

        Args:
            level: index into ``levels``; 0 is NVLink.
            gpus: numbers of the GPUs that send, int (G,); all by default.

        Returns:
            GB/s, float64 (G,).
        """
        gpus = self._chosen(level, gpus)
        if level == 0:
            return np.full(gpus.shape, float(self.gpu.scale_up_gb_per_s))
        shares = self._fabric.nic_gb_per_s[self._fabric.nic[gpus]] / self.nic_sharers(gpus)
        for tier in range(level - 1):
            capacity = self._fabric.uplink_gb_per_s[tier][self._fabric.unit[tier][self._fabric.nic[gpus]]]
            shares = np.minimum(shares, capacity / self.uplink_sharers(tier + 1, gpus))
        return shares

    def bandwidth_gb_per_s(self, level: int, gpu: int = 0) -> float:
        """What one GPU can send across ``level`` while no other does, GB/s."""
        return float(self.bandwidths_gb_per_s(level, np.array([gpu]))[0])

    def nic_sharers(self, gpus: np.ndarray) -> np.ndarray:
        """For each of ``gpus`` (G,): how many of them send through its NIC, int (G,)."""
        return _sharers(self._fabric.nic[self._chosen(1, gpus)])

    def uplink_sharers(self, level: int, gpus: np.ndarray) -> np.ndarray:
        """For each of ``gpus`` (G,): how many of them leave by the same uplink out of ``level`` (1: the leaf), int (G,)."""
        gpus = self._chosen(level, gpus)
        if level == 0:
            raise ValueError("level=0: an NVLink domain has no uplink, its GPUs leave by NICs; ask nic_sharers")
        return _sharers(self._fabric.unit[level - 1][self._fabric.nic[gpus]])

    def oversubscription(self, level: int) -> float:
        """Bandwidth of the NICs below over that of the uplinks into ``level``, where it is worst; 1 at levels without uplinks below."""
        self._chosen(level, np.arange(0))
        if level < 2:
            return 1.0
        fabric = self._fabric
        below = np.bincount(fabric.unit[level - 2], fabric.nic_gb_per_s)
        return float((below / fabric.uplink_gb_per_s[level - 2][: len(below)]).max())

    def storage_gb_per_s(self, nodes: int, *, write: bool) -> float:
        """What ``nodes`` nodes read or write together, GB/s: their own limit or the file system's."""
        return min(nodes * self.node_storage_gb_per_s, self.storage_write_gb_per_s if write else self.storage_read_gb_per_s)

    def failures_per_hour(self, nodes: int | None = None) -> float:
        """Interruptions per hour of a run on ``nodes`` nodes, all by default."""
        return self.failures_per_1000_node_days * (len(self.nodes) if nodes is None else nodes) / 1000 / 24

    def _chosen(self, level: int, gpus: np.ndarray | int | None) -> np.ndarray:
        """``gpus`` as an array, after a look at both arguments."""
        if not 0 <= level < len(self.levels):
            raise ValueError(f"level={level!r}: cluster {self.name!r} has levels 0 to {len(self.levels) - 1}; level(name) finds one")
        gpus = np.arange(self.num_gpus) if gpus is None else np.asarray(gpus)
        if gpus.size and (gpus.min() < 0 or gpus.max() >= self.num_gpus):
            bad = gpus[(gpus < 0) | (gpus >= self.num_gpus)][0]
            raise ValueError(f"gpu={bad}: cluster {self.name!r} counts its GPUs from 0 to {self.num_gpus - 1}; name one of these")
        if level and not self._fabric.nic_gb_per_s.size:
            raise ValueError(f"level={level!r}: cluster {self.name!r} has no NICs, so only level 0; give its node a NIC")
        return gpus

    @cached_property
    def _fabric(self) -> _Fabric:
        return _Fabric.of(self)


@dataclass(frozen=True)
class _Fabric:
    """The tree as arrays. C NICs, G GPUs, N nodes, K tiers, U switches of a tier."""

    domain: np.ndarray  # (G,) NVLink domain of each GPU
    nic: np.ndarray  # (G,) the NIC a GPU uses
    node_nics: np.ndarray  # (N, most NICs of a node); a node with fewer repeats its last
    nic_gb_per_s: np.ndarray  # (C,)
    unit: np.ndarray  # (K, C) the switch that stands above a NIC in each tier: the highest one up to that tier
    uplink_gb_per_s: np.ndarray  # (K, U) out of that switch towards the next tier; infinite where it is that tier's too

    @classmethod
    def of(cls, cluster: Cluster) -> _Fabric:
        domains = {name: number for number, name in enumerate(dict.fromkeys(node.nvlink_domain for node in cluster.nodes))}
        numbers = {switch.name: number for number, switch in enumerate(cluster.switches)}
        by_name = {switch.name: switch for switch in cluster.switches}
        per_node, tiers = cluster.gpus_per_node, len(cluster.levels) - 1
        nics = [nic for node in cluster.nodes for nic in node.nics]
        nic: list[int] = []
        node_nics: list[list[int]] = []
        start = 0
        most = max(len(node.nics) for node in cluster.nodes)
        for node in cluster.nodes:
            count = len(node.nics)
            nic.extend(start + gpu * count // per_node for gpu in range(per_node))
            node_nics.append([start + min(slot, count - 1) for slot in range(most)])
            start += count
        uplink = np.full((tiers, len(numbers)), np.inf)
        chains = {leaf: cls._chain(by_name, leaf, tiers, uplink, numbers) for leaf in {nic.leaf for nic in nics}}
        unit = np.array([chains[nic.leaf] for nic in nics], dtype=np.int64).reshape(len(nics), tiers).T
        domain = np.repeat([domains[node.nvlink_domain] for node in cluster.nodes], per_node)
        return cls(domain, np.array(nic), np.array(node_nics), np.array([nic.gb_per_s for nic in nics]), unit, uplink)

    @staticmethod
    def _chain(by_name: dict[str, Switch], leaf: str, tiers: int, uplink: np.ndarray, numbers: dict[str, int]) -> list[int]:
        """The switch above ``leaf`` in each tier; notes the uplinks it passes."""
        switch, chain = by_name[leaf], []
        for tier in range(tiers):
            above = by_name[switch.up] if switch.up is not None else None
            if above is not None and above.tier <= tier:
                switch = above
                above = by_name[switch.up] if switch.up is not None else None
            chain.append(numbers[switch.name])
            if above is not None and above.tier == tier + 1:
                uplink[tier, numbers[switch.name]] = switch.uplink_gb_per_s
        return chain


def _sharers(owners: np.ndarray) -> np.ndarray:
    """How often each value occurs, at each place."""
    _, places, counts = np.unique(owners, return_inverse=True, return_counts=True)
    return counts[places]
