"""Reads the dump of ibnetdiscover: https://man7.org/linux/man-pages/man8/ibnetdiscover.8.html, "Topology file format".

Leaves are the switches that named hosts hang on; a switch's rank is its distance from the nearest leaf. Switches of one rank that the
same lower switches reach act as one, so a fat tree of leaves and spines becomes leaves below one switch.
"""

from __future__ import annotations

import fnmatch
import re
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from lightning_megascale.topology.fabric import Fabric, FabricNode, FabricPort, FabricSwitch
from lightning_megascale.topology.lines import malformed, read_text

# Gb/s of data on one lane. Source: InfiniBand Trade Association, roadmap; SDR, DDR, QDR lose a fifth to their 8b/10b code.
LANE_GBIT_PER_S = {"SDR": 2, "DDR": 4, "QDR": 8, "FDR10": 10, "FDR": 13.64, "EDR": 25, "HDR": 50, "NDR": 100, "XDR": 200}
_SECTION = re.compile(r'(Switch|Ca|Rt)\s+(\d+)\s+"([^"]+)"\s*#\s*"([^"]*)"')
_PORT = re.compile(r'\[(\d+)\](?:\([^)]*\))?\s+"([^"]+)"\[(\d+)\]\S*\s*#\s*(.*)')
_SPEED = re.compile(rf"\b(\d+)x({'|'.join(sorted(LANE_GBIT_PER_S, key=len, reverse=True))})\b")
_HOST = re.compile(r"(\S+)\s(\S+)")  # "a06-c01 HCA-6"; a card without a host's name describes itself in more words
# Names that systems give themselves when installed: such a host was never named as a node, and two of them look like one.
_DEFAULT_NAME = re.compile(r"(localhost|ubuntu|debian|centos|rocky|rhel)(\..*)?", re.IGNORECASE)
_Ports = dict[str, list[tuple[str, str, float]]]  # host -> its ports as (device, GUID of the switch, GB/s)
_ID = re.compile(r"\w+=0x[0-9a-fA-F]+(\([0-9a-fA-F]+\))?")
_HEADINGS = ("Non-Chassis Nodes", "Chassis ", "DR path")
_PORT_LINE = '[PORT] "PEER"[PORT] # "NAME" ... WIDTHxSPEED, such as [1] "H-e09d"[1](e09d) # "node1 mlx5_0" lid 6 4xNDR'
_SECTION_LINE = 'Switch PORTS "S-GUID" # "NAME", or Ca PORTS "H-GUID" # "NAME"'


@dataclass
class _Switch:
    """A switch section. Links are (line number, line, peer's id, peer's name, GB/s)."""

    guid: str
    description: str
    links: list[tuple[int, str, str, str, float]] = field(default_factory=list)


def read_ibnetdiscover(path: str | Path, nodes: str | None = None) -> Fabric:
    """The fabric of an ibnetdiscover dump.

    Args:
        path: the dump.
        nodes: which hosts are nodes, * for any text; others (managers, log-in nodes) are no part of the fabric, and a switch that
            only they hang on is no leaf. By default a host is no node, and named in ``left_out``, when it has at most half as many
            ports as the median host, or a system's default name such as localhost (a rule that is assumed).

    Raises:
        ValueError: with file, number of the line, the line and what was expected; or when no host of a switch matches ``nodes``.
    """
    switches = _sections(path)
    hosts, notes = _hosts(path, switches, nodes or "*")
    left_out: dict[str, str] = {}
    if nodes is None:
        hosts, left_out = _usual(path, hosts)
    if left_out:
        notes.append(f"{len(left_out)} hosts that look like no nodes left out: {'; '.join(left_out.values())}")
    names = _names(switches)
    rank = _ranks(switches, {guid for ports in hosts.values() for _, guid, _ in ports})
    lost = [names[guid] for guid in switches if guid not in rank]
    if lost:
        notes.append(f"{len(lost)} switches that no node reaches left out: {', '.join(lost[:5])}")
    tree, unit_of = _units(switches, names, rank)
    fabric_nodes = tuple(
        FabricNode(host, tuple(FabricPort(unit_of[guid], speed, device) for device, guid, speed in sorted(ports, key=_by_device)))
        for host, ports in sorted(hosts.items())
    )
    return Fabric(str(path), fabric_nodes, tree, tuple(notes), tuple(left_out))


def _sections(path: str | Path) -> dict[str, _Switch]:
    """The switch sections by GUID. Sections of cards repeat the same links from the other end: they are checked, not kept."""
    switches: dict[str, _Switch] = {}
    section: tuple[str, _Switch | None] | None = None
    number, line = 0, ""
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if text.startswith("["):
            if section is None:
                raise malformed(path, number, line, f"a section first: {_SECTION_LINE}")
            link = _link(path, number, line)
            if section[1] is not None:
                section[1].links.append(link)
        elif (match := _SECTION.match(text)) is not None:
            kind, guid = match[1], match[3]
            if kind == "Switch" and guid in switches:
                raise malformed(path, number, line, f"each switch once; {guid} has a section already")
            section = kind, _Switch(guid, match[4]) if kind == "Switch" else None
            if section[1] is not None:
                switches[guid] = section[1]
        elif not _ID.match(text) and not text.startswith(_HEADINGS):
            raise malformed(path, number, line, f"{_SECTION_LINE}; or a port: {_PORT_LINE}")
    if not switches:
        raise malformed(path, number, line, f"at least one switch before the file ends: {_SECTION_LINE}")
    for switch in switches.values():
        for number, line, peer, _, _ in switch.links:
            if peer.startswith("S-") and peer not in switches:
                raise malformed(
                    path, number, line, f"a peer with a section: {peer} has none, so the dump is cut off; run ibnetdiscover again"
                )
    return switches


def _link(path: str | Path, number: int, line: str) -> tuple[int, str, str, str, float]:
    match = _PORT.match(line.strip())
    speed = _SPEED.search(match[4]) if match is not None else None
    if match is None or speed is None:
        raise malformed(path, number, line, _PORT_LINE)
    named = re.search(r'"([^"]*)"', match[4])
    return number, line, match[2], named[1] if named else "", int(speed[1]) * LANE_GBIT_PER_S[speed[2]] / 8


def _hosts(path: str | Path, switches: dict[str, _Switch], pattern: str) -> tuple[_Ports, list[str]]:
    """(the ports of each host, notes on what is no node)."""
    hosts: _Ports = defaultdict(list)
    others: set[str] = set()
    nameless: Counter[str] = Counter()
    for switch in switches.values():
        for _, _, peer, description, speed in switch.links:
            if peer.startswith("S-"):
                continue
            match = _HOST.fullmatch(description)
            if match is None:
                nameless[" ".join(description.split())] += 1
            elif fnmatch.fnmatchcase(match[1], pattern):
                hosts[match[1]].append((match[2], switch.guid, speed))
            else:
                others.add(match[1])
    if not hosts:
        some = ", ".join(sorted(others)[:3]) or "none with a name"
        raise ValueError(f"{path}: nodes={pattern!r} matches no host of a switch ({some}); use * for any text")
    notes = [f"{count} ports without a host's name left out: {name!r}" for name, count in sorted(nameless.items())]
    if others:
        notes.append(f"{len(others)} hosts that do not match {pattern!r} left out: {', '.join(sorted(others)[:5])}")
    return dict(hosts), notes


def _usual(path: str | Path, hosts: _Ports) -> tuple[_Ports, dict[str, str]]:
    """(the hosts that look like nodes, name of each other -> name and reason).

    Half is less than what a node with a broken card or two still has, and what managers with two ports beside nodes with four have.
    """
    named = [len(ports) for host, ports in hosts.items() if not _DEFAULT_NAME.fullmatch(host)]
    if not named:
        raise ValueError(
            f"{path}: hosts={', '.join(sorted(hosts))}: every host has a system's default name, so nodes cannot be told apart; "
            "give them names and run ibnetdiscover again"
        )
    usual = statistics.median(named)
    left_out: dict[str, str] = {}
    for host, ports in sorted(hosts.items()):
        if _DEFAULT_NAME.fullmatch(host):
            left_out[host] = f"{host} (a system's default name)"
        elif 2 * len(ports) <= usual:
            left_out[host] = f"{host} (ports: {len(ports)}, of the median host: {usual:g})"
    return {host: ports for host, ports in hosts.items() if host not in left_out}, left_out


def _by_device(port: tuple[str, str, float]) -> tuple[list[str | int], str]:
    """mlx5_10 behind mlx5_9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", port[0])], port[1]


def _names(switches: dict[str, _Switch]) -> dict[str, str]:
    """A switch's name from its description ("MF0;leaf-1:MQM9701/U1" is leaf-1), or its GUID where two would be equal."""
    short = {guid: re.sub(r"^\w+;|:[^:]*$", "", switch.description).strip() or guid for guid, switch in switches.items()}
    count = Counter(short.values())
    return {guid: name if count[name] == 1 else guid for guid, name in short.items()}


def _ranks(switches: dict[str, _Switch], leaves: set[str]) -> dict[str, int]:
    """Hops to the nearest leaf, of every switch that has one."""
    rank = {guid: 0 for guid in switches if guid in leaves}
    ready = list(rank)
    for guid in ready:
        for _, _, peer, _, _ in switches[guid].links:
            if peer in switches and peer not in rank:
                rank[peer] = rank[guid] + 1
                ready.append(peer)
    return rank


def _units(switches: dict[str, _Switch], names: dict[str, str], rank: dict[str, int]) -> tuple[tuple[FabricSwitch, ...], dict[str, str]]:
    """(switches that act as one, tier by tier; the name of a leaf's unit by its GUID)."""
    group = {guid: guid for guid in rank}  # union-find over the links among ranks up to the tier
    tree: list[FabricSwitch] = []
    waiting: list[tuple[str, str, float]] = []  # of the tier below: (name, a member, GB/s upwards)
    for tier in range(max(rank.values()) + 1):
        for guid in rank if tier else ():
            for _, _, peer, _, _ in switches[guid].links:
                if peer in rank and max(rank[guid], rank[peer]) <= tier:
                    group[_root(group, guid)] = _root(group, peer)
        members: dict[str, list[str]] = defaultdict(list)
        for guid in rank:
            if rank[guid] == tier:
                members[_root(group, guid)].append(guid)
        unit = {root: _unit_name(names, same) for root, same in members.items()}
        for name, member, uplink in waiting:
            up = unit.get(_root(group, member))
            tree.append(FabricSwitch(name, tier - 1, up, uplink if up is not None else None))
        waiting = [
            (unit[root], same[0], sum(link[4] for guid in same for link in switches[guid].links if rank.get(link[2]) == tier + 1))
            for root, same in members.items()
        ]
    tree += [FabricSwitch(name, max(rank.values())) for name, _, _ in waiting]
    return tuple(tree), {guid: names[guid] for guid in rank if rank[guid] == 0}


def _root(group: dict[str, str], guid: str) -> str:
    while group[guid] != guid:
        group[guid] = guid = group[group[guid]]
    return guid


def _unit_name(names: dict[str, str], guids: list[str]) -> str:
    """The first name of switches that act as one, and how many they are."""
    first, *others = sorted(names[guid] for guid in guids)
    return f"{first} and {len(others)} more" if others else first
