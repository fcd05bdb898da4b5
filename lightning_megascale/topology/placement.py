"""Which node and GPU each place of the mesh sits on, so that a step's slowest link is fast; for Slurm, torchrun and the strategy.

Two things are chosen. The order of the axes says how ranks count the mesh: the strategy's ``placement``, under the rule of mesh.py that
the ranks of every group ascend. The order of the nodes says which host the launcher gives ranks 0 to n - 1, which the next n, and so on;
a rank's GPU is its local rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_megascale.topology.cluster import Cluster
from lightning_megascale.topology.placement_groups import AXES, Mesh, Traffic
from lightning_megascale.topology.placement_links import Links
from lightning_megascale.topology.placement_search import Search

MOST_PAIRS = 20_000_000  # of an all-to-all: some seconds and two GB


@dataclass(frozen=True)
class Placement:
    """Where every rank sits, and the time of the slowest link.

    Args:
        mesh: sizes of the axes.
        axis_order: in which ranks count them, outermost first.
        node_order: number in the cluster of the node that hosts each run of ``ranks_per_node`` ranks.
        hosts: the names of those nodes.
        ranks_per_node: ranks of a node, on its GPUs 0, 1, ...
        gpus_per_node: GPUs of a node of the cluster.
        traffic: what was counted.
        seconds_by_traffic: per step, of the slowest link under each traffic; no latency, no overlap with computing.
        lower_bound_seconds: what no order of axes and nodes goes below; None where it was not asked for.
    """

    mesh: Mesh
    axis_order: tuple[str, ...]
    node_order: tuple[int, ...]
    hosts: tuple[str, ...]
    ranks_per_node: int
    gpus_per_node: int
    traffic: tuple[Traffic, ...]
    seconds_by_traffic: tuple[float, ...]
    lower_bound_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """The slowest link's time in a step: the sum over traffics, which take turns."""
        return sum(self.seconds_by_traffic)

    @property
    def gap(self) -> float | None:
        """``seconds`` over the lower bound: 1 is proven best; None where no bound was asked for or it is 0."""
        if self.lower_bound_seconds is None:
            return None
        if self.seconds <= self.lower_bound_seconds * (1 + 1e-9):
            return 1.0
        return self.seconds / self.lower_bound_seconds if self.lower_bound_seconds else None

    @property
    def quality(self) -> str:
        """In words: "exact", or how far from the lower bound."""
        if self.gap == 1.0:
            return "exact"
        return "no bound" if self.gap is None else f"at most {self.gap:.3f} times the least possible"

    @property
    def gpus(self) -> np.ndarray:
        """The cluster's number of each rank's GPU, int (W,)."""
        ranks = np.arange(self.mesh.world)
        return np.array(self.node_order)[ranks // self.ranks_per_node] * self.gpus_per_node + ranks % self.ranks_per_node

    @property
    def mesh_gpus(self) -> np.ndarray:
        """The cluster's number of the GPU at each place of the mesh, int (pp, dp_replicate, dp_shard, cp, tp)."""
        return self.gpus[self.mesh.grid(self.axis_order)]

    @property
    def strategy_placement(self) -> list[int]:
        """The ``placement`` of MegascaleStrategy: the rank at each place of the flattened mesh."""
        ranks: list[int] = self.mesh.grid(self.axis_order).ravel().tolist()
        return ranks

    def slurm_hostfile(self) -> str:
        """The text of a file for ``SLURM_HOSTFILE=FILE srun --distribution=arbitrary``: the host of every rank, one a line.

        **Source**: srun(1), --distribution=arbitrary and SLURM_HOSTFILE: tasks are put on hosts in the order of the lines.
        """
        return "".join(f"{host}\n" * self.ranks_per_node for host in self.hosts)

    def torchrun_nodes(self) -> list[tuple[int, str]]:
        """(node_rank, host) for ``torchrun --node-rank``; a fixed rendezvous (--master-addr, the first host) keeps this order.

        **Source**: torchrun's documentation: the static rendezvous takes node ranks from the command line, c10d deals its own.
        """
        return list(enumerate(self.hosts))


def place(cluster: Cluster, sizes: Mapping[str, int], traffic: Sequence[Traffic], *, ep: int | None = None) -> Placement:
    """The placement with the fastest slowest link that the search finds; ``lower_bound_seconds`` says how good it is.

    Args:
        cluster: its GPUs may be more than the mesh has places; then the search picks nodes too.
        sizes: of the axes pp, dp_replicate, dp_shard, cp, tp; those left out are 1.
        traffic: of one step; groups that send nothing may be left out.
        ep: ranks that hold different experts; None for a model without.

    Raises:
        ValueError: sizes that are none, more ranks than GPUs, ranks that leave a node half filled, an ep that does not divide, or an
            all-to-all of more than MOST_PAIRS pairs.
    """
    links = _links(cluster, sizes, traffic, ep)
    found = Search(links).run()
    return _placement(links, found.axis_order, found.node_order, found.seconds, found.lower_bound)


def evaluate(
    cluster: Cluster,
    sizes: Mapping[str, int],
    traffic: Sequence[Traffic],
    *,
    ep: int | None = None,
    axis_order: Sequence[str] = AXES,
    node_order: Sequence[int] | None = None,
) -> Placement:
    """A given placement and its times; arguments as for ``place``.

    Args:
        axis_order: all five axes, outermost first.
        node_order: numbers of nodes in the order of the ranks they host; None: as in the cluster.

    Raises:
        ValueError: as ``place``; or an order that is none, or under which the strategy's mesh refuses the ranks of a group.
    """
    links = _links(cluster, sizes, traffic, ep)
    axes = tuple(axis_order)
    if sorted(axes) != sorted(AXES):
        raise ValueError(f"axis_order={axes}: must name each of {', '.join(AXES)} once; reorder these")
    refused = links.mesh.descending(axes)
    if refused is not None:
        raise ValueError(
            f"axis_order={axes}: ranks of the {refused} groups would not ascend, and torch's groups count them so; keep "
            "dp_replicate, dp_shard, cp in this order, and tp behind cp where there are experts"
        )
    nodes = list(range(links.positions)) if node_order is None else [int(node) for node in node_order]
    if len(set(nodes)) != len(nodes) or len(nodes) != links.positions or not set(nodes) <= set(range(len(cluster.nodes))):
        raise ValueError(
            f"node_order={nodes[:16]}: must name {links.positions} of the nodes 0 to {len(cluster.nodes) - 1} once each; mend the list"
        )
    seconds, _ = links.seconds(axes, np.array([nodes]))
    return _placement(links, axes, tuple(nodes), tuple(float(second) for second in seconds[0]), None)


def _links(cluster: Cluster, sizes: Mapping[str, int], traffic: Sequence[Traffic], ep: int | None) -> Links:
    mesh = Mesh(sizes, ep)
    per_node = cluster.gpus_per_node
    said = " x ".join(f"{axis} {size}" for axis, size in mesh.sizes.items() if size > 1) or "1"
    if mesh.world > cluster.num_gpus:
        raise ValueError(
            f"sizes: {said} = {mesh.world} ranks: cluster {cluster.name!r} has {cluster.num_gpus} GPUs; shrink an axis or take more nodes"
        )
    if mesh.world > per_node and mesh.world % per_node:
        raise ValueError(
            f"sizes: {said} = {mesh.world} ranks: above one node they must fill nodes of {per_node} GPUs; "
            f"take {mesh.world // per_node * per_node} ranks"
        )
    if ep is None and any(sent.groups in ("ep", "expert_shard") for sent in traffic):
        raise ValueError("ep=None: traffic of expert groups needs the size of these groups; give ep")
    for sent in traffic:
        pairs = mesh.world * (mesh.size(sent.groups) - 1)
        if sent.kind == "alltoall" and pairs > MOST_PAIRS:
            raise ValueError(
                f"traffic {sent.groups}: all pairs of groups of {mesh.size(sent.groups)} are {pairs}, more than the {MOST_PAIRS} that are "
                "counted one by one; take smaller groups"
            )
    return Links(cluster, mesh, traffic)


def _placement(
    links: Links, axis_order: tuple[str, ...], node_order: tuple[int, ...], seconds: tuple[float, ...], lower_bound: float | None
) -> Placement:
    cluster = links.cluster
    return Placement(
        mesh=links.mesh,
        axis_order=axis_order,
        node_order=node_order,
        hosts=tuple(cluster.nodes[node].name for node in node_order),
        ranks_per_node=links.per_node,
        gpus_per_node=cluster.gpus_per_node,
        traffic=links.traffic,
        seconds_by_traffic=seconds,
        lower_bound_seconds=lower_bound,
    )
