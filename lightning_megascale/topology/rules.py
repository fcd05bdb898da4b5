"""The rules of a cluster: every violated one as a message with the name, the value, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lightning_megascale.topology.gpus import check_positive

if TYPE_CHECKING:
    from lightning_megascale.topology.cluster import Cluster

# A thousand node-days over a million: a node fails every 1.44 minutes, before a step of any large model ends. Source: assumed.
MOST_FAILURES = 1_000_000


def check_cluster(cluster: Cluster) -> list[str]:
    """A message for every rule that ``cluster`` breaks: name, value, rule, remedy."""
    wrong: list[str] = []
    for name in ("gpus_per_node", "storage_read_gb_per_s", "storage_write_gb_per_s", "node_storage_gb_per_s"):
        wrong += _not_positive(name, getattr(cluster, name))
    try:
        check_failures("failures_per_1000_node_days", cluster.failures_per_1000_node_days)
    except ValueError as error:
        wrong.append(str(error))
    if not cluster.nodes:
        wrong.append("nodes=(): a cluster needs at least one; give the number of nodes")
    wrong += _check_levels(cluster)
    wrong += _check_switches(cluster)
    return wrong + _check_nodes(cluster)


def check_failures(name: str, value: object) -> None:
    """Refuse what is no rate of failures of a cluster that trains: a number from 0 to MOST_FAILURES."""
    measured = "3.8 to 6.5 are measured on large clusters"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r}: must be a number of at least 0; {measured}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value!r}: must be at least 0 and finite; {measured}")
    if value > MOST_FAILURES:
        raise ValueError(f"{name}={value!r}: must be at most {MOST_FAILURES:,}, a failure of each node every 1.4 minutes; {measured}")


def _not_positive(name: str, value: object) -> list[str]:
    try:
        check_positive(name, value)
    except ValueError as error:
        return [str(error)]
    return []


def _check_levels(cluster: Cluster) -> list[str]:
    wrong: list[str] = []
    tiers = 1 + max((switch.tier for switch in cluster.switches), default=-1)
    if len(cluster.levels) < 1 + tiers or not cluster.levels:
        wrong.append(
            f"levels={[level.name for level in cluster.levels]}: NVLink and {tiers} tiers of switches need {1 + tiers} levels; name all"
        )
    for level in cluster.levels:
        wrong += _not_positive(f"levels.{level.name}.latency_us", level.latency_us)
    return wrong + [f"level {name!r}: named twice; give each its own name" for name in _twice(level.name for level in cluster.levels)]


def _check_switches(cluster: Cluster) -> list[str]:
    wrong = [f"switch {name!r}: named twice; give each its own name" for name in _twice(switch.name for switch in cluster.switches)]
    by_name = {switch.name: switch for switch in cluster.switches}
    for switch in cluster.switches:
        if switch.up is None:
            continue
        above = by_name.get(switch.up)
        if above is None:
            wrong.append(f"switch {switch.name!r}: up={switch.up!r} is no switch of this cluster; add it or mend the name")
        elif above.tier <= switch.tier:
            wrong.append(f"switch {switch.name!r}: tier {switch.tier} must lie below tier {above.tier} of {above.name!r}; raise the latter")
        wrong += _not_positive(f"switch {switch.name!r}: uplink_gb_per_s", switch.uplink_gb_per_s)
    tops = [switch.name for switch in cluster.switches if switch.up is None]
    if len(tops) > 1:
        few = ", ".join(tops[:3]) + (" ..." if len(tops) > 3 else "")
        wrong.append(f"switches: {len(tops)} have none above ({few}), so their nodes never meet; join them by a switch or keep one part")
    return wrong


def _check_nodes(cluster: Cluster) -> list[str]:
    wrong = [f"node {name!r}: named twice; give each its own name" for name in _twice(node.name for node in cluster.nodes)]
    leaves = {switch.name for switch in cluster.switches}
    domains = {node.nvlink_domain for node in cluster.nodes}
    for node in cluster.nodes:
        if not node.nics and (len(domains) > 1 or any(other.nics for other in cluster.nodes)):
            wrong.append(f"node {node.name!r}: has no NIC, so it reaches no other node; give it one or leave the node out")
        for nic in node.nics:
            wrong += _not_positive(f"node {node.name!r}: nic.gb_per_s", nic.gb_per_s)
            if nic.leaf not in leaves:
                wrong.append(f"node {node.name!r}: leaf={nic.leaf!r} is no switch of this cluster; add it or mend the name")
    return wrong


def _twice(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    again: list[str] = []
    for name in names:
        if name in seen and name not in again:
            again.append(name)
        seen.add(name)
    return again
