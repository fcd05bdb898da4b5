"""Seconds of collectives over the levels of a cluster, for many groups at once, while all groups of the same axis run theirs.

A group has ``size`` ranks, each ``stride`` ranks after the one before; ranks are dealt to GPUs in order. Arguments are numbers or arrays
that broadcast. Bytes are those of the whole tensor: what a rank has after an all-gather, before a reduce-scatter, or before and after an
all-reduce; of an all-to-all, what one rank sends, its own part included.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_megascale.planning.stack import Stack
from lightning_megascale.topology.cluster import Cluster

Number = np.ndarray | float | int


@dataclass(frozen=True)
class Links:
    """A cluster as collectives see it. L levels, the NVLink domain first.

    Args:
        sizes: ranks in a row that meet below or at each level, int (L,).
        bytes_per_s: that each rank can send across a level while all do, float (L,).
        seconds: of one message across a level, float (L,).
    """

    sizes: np.ndarray
    bytes_per_s: np.ndarray
    seconds: np.ndarray

    @classmethod
    def of(cls, cluster: Cluster, stack: Stack) -> Links:
        """With ranks dealt to GPUs in order, and PXN: a GPU reaches the NIC on its receiver's rail over NVLink."""
        count = cluster.num_gpus
        met = np.maximum.accumulate(cluster.levels_between(0, np.arange(count), through_peers=True))
        levels = np.unique(met)
        sizes = np.searchsorted(met, levels, side="right")
        share = np.where(levels == 0, stack.nvlink_efficiency, stack.network_efficiency)
        rates = [float(cluster.bandwidths_gb_per_s(int(level)).min()) * 1e9 for level in levels]
        latency = [cluster.levels[int(level)].latency_us * 1e-6 for level in levels]
        return cls(sizes, np.array(rates) * share, np.array(latency))

    def ring_seconds(self, bytes_: Number, size: Number, stride: Number = 1) -> np.ndarray:
        """An all-gather or a reduce-scatter: a ring of ``size - 1`` steps, each of a part of the bytes.

        A ring goes through all ranks of one switch before it leaves it; the groups that cross a node's border together have the NICs
        of their own ranks, so a group of n ranks in a node has n NICs and all groups together every one. What crosses a level at a time
        is as many messages as the ring has switches there.

        Source: Thakur et al. 2005, "Optimization of collective communication operations in MPICH", section 4.1 (ring:
            (p - 1) alpha + (p - 1) / p n beta); Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
            workstations", section 3.1 (a ring through a tree crosses each edge once).
        """
        bytes_, size, stride = _floats(bytes_, size, stride)
        return np.where(size > 1, (size - 1) / size * bytes_ / self._ring_rate(size, stride) + self._ring_latency(size, stride), 0.0)

    def _ring_rate(self, size: np.ndarray, stride: np.ndarray) -> np.ndarray:
        """Bytes a second of one ring: the least over the levels that it crosses, each dealt to the rings that cross it there."""
        inner = self._members(0, size, stride)
        nodes = np.ceil(size / inner)
        rate = np.where(inner > 1, self.bytes_per_s[0], np.inf)
        for level in range(1, len(self.sizes)):
            passes = self._passes(level, size, stride)
            share = self.bytes_per_s[level] * inner * nodes / np.maximum(passes, 1)
            rate = np.where(passes > 0, np.minimum(rate, share), rate)
        return rate

    def _ring_latency(self, size: np.ndarray, stride: np.ndarray) -> np.ndarray:
        """Seconds of the ring's messages, one after another: those that cross a level and none above, times its latency."""
        passes = [self._passes(level, size, stride) for level in range(len(self.sizes))] + [np.zeros_like(size)]
        each = sum((low - high) * seconds for low, high, seconds in zip(passes, passes[1:], self.seconds, strict=False))
        return (size - 1) / size * each

    def _passes(self, level: int, size: np.ndarray, stride: np.ndarray) -> np.ndarray:
        """Hops of a closed ring that cross ``level`` or a higher one: one for each switch below that it visits, none if only one."""
        if level == 0:
            return size.copy()
        visited = np.ceil(size / self._members(level - 1, size, stride))
        return np.where(visited > 1, visited, 0.0)

    def all_reduce_seconds(self, bytes_: Number, size: Number, stride: Number = 1) -> np.ndarray:
        """A ring (reduce-scatter and all-gather), or a double binary tree between nodes where its fewer steps win.

        Source: Patarasuk and Yuan 2009, section 3; Sanders et al. 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and
            scan", section 3 (two trees send all bytes twice at full bandwidth in 2 log2 p steps), which NCCL uses between nodes.
        """
        bytes_, size, stride = _floats(bytes_, size, stride)
        ring = 2 * self.ring_seconds(bytes_, size, stride)
        inner = self._members(0, size, stride)
        nodes = np.ceil(size / inner)
        steps = 2 * np.log2(np.maximum(nodes, 1)) * self._farthest(size, stride) + 2 * (inner - 1) * self.seconds[0]
        tree = ring - 2 * self._ring_latency(size, stride) + steps
        return np.where(nodes > 1, np.minimum(ring, tree), ring)

    def all_to_all_seconds(self, bytes_: Number, size: Number, stride: Number = 1) -> np.ndarray:
        """Each rank sends an equal part to every other. Levels are used at once; the slowest one counts, and the NICs take each message.

        Source: Thakur et al. 2005, section 4.2 (pairwise exchange: (p - 1) alpha + (p - 1) / p n beta), level by level.
        """
        bytes_, size, stride = _floats(bytes_, size, stride)
        inner = self._members(0, size, stride)
        moved = (inner - 1) / size * bytes_ / self.bytes_per_s[0]
        for level in range(1, len(self.sizes)):
            below = self._members(level - 1, size, stride)
            moved = np.maximum(moved, (size - below) / size * bytes_ / self.bytes_per_s[level])
        # Messages are posted together: the latency is that of the farthest, and a small cost for each, a tenth, is assumed.
        return np.where(size > 1, moved + self._farthest(size, stride) + 0.1 * (size - 1) * self.seconds[0], 0.0)

    def two_hop_seconds(self, bytes_: Number, choices: int, size: Number, stride: Number = 1, most: int | None = None) -> np.ndarray:
        """Tokens to their experts' ranks: each token once to every node that it has experts on, and from there on over NVLink.

        Args:
            bytes_: of all copies that a rank sends, one for each expert of a token.
            choices: experts of a token; they fall on nodes evenly.
            size, stride: of the group.
            most: nodes of a token; None: any number.

        Source: DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.2. Nodes of a token: N (1 - (1 - 1/N)^K), by linearity of expectation.
        """
        bytes_, size, stride = _floats(bytes_, size, stride)
        inner = self._members(0, size, stride)
        nodes = np.ceil(size / inner)
        copies = np.minimum(nodes * (1 - (1 - 1 / nodes) ** choices), np.inf if most is None else most) / choices  # a node, for each expert
        first = self.all_to_all_seconds(bytes_ * copies, nodes, stride * inner)
        second = self.all_to_all_seconds(bytes_, inner, stride)
        return np.where(nodes > 1, first + second, self.all_to_all_seconds(bytes_, size, stride))

    def send_seconds(self, bytes_: Number, distance: Number) -> np.ndarray:
        """From a rank to the one so many ranks on, while all ranks send."""
        bytes_, distance = np.broadcast_arrays(np.asarray(bytes_, dtype=np.float64), np.asarray(distance))
        level = np.searchsorted(self.sizes, np.minimum(distance + 1, self.sizes[-1]))
        return bytes_ / self.bytes_per_s[level] + self.seconds[level]

    def _farthest(self, size: np.ndarray, stride: np.ndarray) -> np.ndarray:
        """Seconds of a message between a group's first rank and its last."""
        return self.seconds[np.searchsorted(self.sizes, np.minimum((size - 1) * stride + 1, self.sizes[-1]))]

    def _members(self, level: int, size: np.ndarray, stride: np.ndarray) -> np.ndarray:
        """Ranks of a group that meet at ``level`` or below, at least 1."""
        return np.clip(self.sizes[level] // stride, 1, size)


def _floats(*values: Number) -> tuple[np.ndarray, ...]:
    return tuple(np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in values)))
