"""What the files of a real fabric say: nodes, the leaves they hang on, the switches above; with a known cluster's speeds, a Cluster."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_megascale.topology.cluster import Cluster, Level, Nic, Node, Switch


@dataclass(frozen=True)
class FabricPort:
    """A node's way into the fabric.

    Args:
        leaf: name of the switch.
        gb_per_s: line rate, 1e9 bytes per second; None: the file names the leaf of a node, not its NICs.
        device: the NIC's name; "" where the file gives none.
    """

    leaf: str
    gb_per_s: float | None = None
    device: str = ""


@dataclass(frozen=True)
class FabricNode:
    """A node, its ports by the order of their devices, and the block (NVLink domain) the file puts it in, if any."""

    name: str
    ports: tuple[FabricPort, ...]
    block: str | None = None


@dataclass(frozen=True)
class FabricSwitch:
    """A switch, or several that act as one; ``uplink_gb_per_s`` of all links to ``up``, None where the file does not say."""

    name: str
    tier: int
    up: str | None = None
    uplink_gb_per_s: float | None = None


@dataclass(frozen=True)
class Fabric:
    """Nodes and switches in the file's order; ``notes`` say what was left out and why.

    ``left_out`` are the names of hosts that the reader took for no nodes by its own rule; not those that your pattern excludes.
    """

    source: str
    nodes: tuple[FabricNode, ...]
    switches: tuple[FabricSwitch, ...]
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def only(self, pattern: str) -> Fabric:
        """The nodes whose name matches ``pattern`` (* for any text), and all switches.

        Raises:
            ValueError: no node matches.
        """
        nodes = tuple(node for node in self.nodes if fnmatch.fnmatchcase(node.name, pattern))
        if not nodes:
            some = ", ".join(node.name for node in self.nodes[:3])
            raise ValueError(
                f"nodes={pattern!r}: matches none of the {len(self.nodes)} nodes of {self.source}, such as {some}; use * for any text"
            )
        return dataclasses.replace(self, nodes=nodes)

    def cluster(self, like: Cluster, *, domains: Mapping[str, str] | None = None) -> Cluster:
        """This fabric with the GPUs, speeds, latencies, storage and failures of ``like``.

        A leaf without a count of NICs carries as many as a node of ``like`` has. Uplinks that the file does not tell have
        ``like``'s oversubscription at their level, tiers beyond ``like``'s its last latency. Switches without nodes are dropped.

        Args:
            like: a cluster of such nodes.
            domains: the NVLink domain of each node; by default the file's blocks where ``like``'s domains span nodes, else every node
                is one of its own.

        Raises:
            ValueError: ``like`` has no NICs, a node no domain, or the result breaks a rule of clusters.
        """
        if not like.nodes[0].nics:
            raise ValueError(f"like={like.name!r}: its nodes have no NICs, so it knows no speed of a fabric; name a cluster that has some")
        nodes = tuple(Node(node.name, self._domain(node, like, domains), _nics(node, like)) for node in self.nodes)
        tiers = 1 + max((switch.tier for switch in self.switches), default=-1)
        last = like.levels[-1].latency_us
        levels = like.levels[: 1 + tiers] + tuple(Level(f"tier{tier}", last) for tier in range(len(like.levels) - 1, tiers))
        return dataclasses.replace(like, name=self.source, nodes=nodes, switches=_switches(self.switches, nodes, like), levels=levels)

    @staticmethod
    def _domain(node: FabricNode, like: Cluster, domains: Mapping[str, str] | None) -> str:
        if domains is not None:
            if node.name not in domains:
                raise ValueError(f"domains: node {node.name!r} has none; give every node its NVLink domain")
            return domains[node.name]
        spans = len({other.nvlink_domain for other in like.nodes}) < len(like.nodes)
        return node.block if spans and node.block is not None else node.name


def _nics(node: FabricNode, like: Cluster) -> tuple[Nic, ...]:
    known = like.nodes[0].nics
    if len(node.ports) == 1 and node.ports[0].gb_per_s is None:
        return tuple(Nic(node.ports[0].leaf, nic.gb_per_s) for nic in known)
    return tuple(Nic(port.leaf, known[0].gb_per_s if port.gb_per_s is None else port.gb_per_s) for port in node.ports)


def _switches(switches: tuple[FabricSwitch, ...], nodes: tuple[Node, ...], like: Cluster) -> tuple[Switch, ...]:
    """The switches above ``nodes``; an unknown uplink is the NICs below over the oversubscription of its level."""
    by_name = {switch.name: switch for switch in switches}
    below = {switch.name: 0.0 for switch in switches}  # GB/s of the NICs under each
    for nic in (nic for node in nodes for nic in node.nics):
        name: str | None = nic.leaf
        while name is not None and name in by_name:
            below[name] += nic.gb_per_s
            name = by_name[name].up
    built = []
    for switch in switches:
        if not below[switch.name]:
            continue
        uplink = switch.uplink_gb_per_s
        if switch.up is None:
            uplink = 0.0
        elif uplink is None:
            level = by_name[switch.up].tier + 1
            uplink = below[switch.name] / (like.oversubscription(level) if level < len(like.levels) else 1.0)
        built.append(Switch(switch.name, switch.tier, switch.up, uplink))
    return tuple(built)
