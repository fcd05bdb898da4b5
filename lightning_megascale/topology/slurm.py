"""Reads Slurm's topology.conf, tree and block: https://slurm.schedmd.com/topology.conf.html."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_megascale.topology.fabric import Fabric, FabricNode, FabricPort, FabricSwitch
from lightning_megascale.topology.hostlist import expand
from lightning_megascale.topology.lines import joined_lines, malformed, read_text

_TREE = "SwitchName=NAME with Nodes=HOSTLIST or Switches=HOSTLIST, and LinkSpeed=N if you like"
_BLOCK = "BlockName=NAME Nodes=HOSTLIST, or BlockSizes=N[,N...]"
_KEYS = {"switchname": {"nodes", "switches", "linkspeed"}, "blockname": {"nodes"}, "blocksizes": set()}


@dataclass
class _Entry:
    """A line that declares a switch or block."""

    number: int
    line: str
    name: str
    nodes: list[str]
    children: list[str]


def read_slurm(path: str | Path) -> Fabric:
    """The fabric of a topology.conf, tree or block.

    A tree's leaves are switches of tier 0; others lie one above their highest child. A block is a leaf and the ``block`` of its nodes;
    aggregated blocks (the larger BlockSizes) are switches above consecutive blocks, as Slurm forms them, and one switch is above all.

    Raises:
        ValueError: with file, number of the line, the line and what was expected.
    """
    switches: dict[str, _Entry] = {}
    blocks: dict[str, _Entry] = {}
    sizes: tuple[int, str, list[int]] | None = None
    for number, line in joined_lines(read_text(path)):
        kind, values = _parse(path, number, line)
        if kind == "blocksizes":
            if sizes is not None:
                raise malformed(path, number, line, f"one BlockSizes, the first is in line {sizes[0]}")
            sizes = number, line, _sizes(path, number, line, values["blocksizes"])
            continue
        entries = switches if kind == "switchname" else blocks
        if (blocks if kind == "switchname" else switches) or (kind == "switchname" and sizes is not None):
            raise malformed(path, number, line, "a file of switches (tree) or of blocks, not both")
        entry = _entry(path, number, line, kind, values)
        if entry.name in entries:
            raise malformed(path, number, line, f"a new name: {entry.name!r} is declared in line {entries[entry.name].number}")
        entries[entry.name] = entry
    if switches:
        return _tree(path, switches)
    if blocks:
        return _blocks(path, blocks, sizes)
    raise ValueError(f"{path}: declares no switch and no block; expected: {_TREE}; or {_BLOCK}")


def _parse(path: str | Path, number: int, line: str) -> tuple[str, dict[str, str]]:
    """(the kind of the line: its first key, its values by key in lower case)."""
    values: dict[str, str] = {}
    for word in line.split():
        key, equals, value = word.partition("=")
        key = key.lower()
        if not equals or not value:
            raise malformed(path, number, line, f"KEY=VALUE, not {word!r}: {_TREE}; or {_BLOCK}")
        if key in values:
            raise malformed(path, number, line, f"{word.partition('=')[0]} once")
        values[key] = value
    kind = next(iter(values))
    allowed = _KEYS.get(kind)
    if allowed is None or not set(values) <= allowed | {kind}:
        raise malformed(path, number, line, f"{_TREE}; or {_BLOCK}")
    return kind, values


def _entry(path: str | Path, number: int, line: str, kind: str, values: dict[str, str]) -> _Entry:
    if kind == "blockname" and "nodes" not in values:
        raise malformed(path, number, line, _BLOCK)
    if "nodes" in values and "switches" in values:
        raise malformed(path, number, line, "Nodes (a leaf) or Switches, not both")
    names = {}
    for key in ("nodes", "switches"):
        try:
            names[key] = expand(values[key]) if key in values else []
        except ValueError as error:
            raise malformed(path, number, line, f"a hostlist such as node[001-016,018]: {error}") from error
    return _Entry(number, line, values[kind], names["nodes"], names["switches"])


def _sizes(path: str | Path, number: int, line: str, text: str) -> list[int]:
    expected = "BlockSizes=N[,N...], each N a power of two times the one before"
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError as error:
        raise malformed(path, number, line, expected) from error
    for smaller, larger in zip([0, *sizes], sizes):
        times = larger // smaller if smaller else 2
        if larger < 1 or (smaller and (larger % smaller or times < 2 or times & (times - 1))):
            raise malformed(path, number, line, expected)
    return sizes


def _owners(path: str | Path, entries: dict[str, _Entry], kind: str) -> dict[str, _Entry]:
    """Which entry each child (``kind``: nodes or children) is named by."""
    owner: dict[str, _Entry] = {}
    for entry in entries.values():
        for child in getattr(entry, kind):
            if child in owner:
                raise malformed(path, entry.number, entry.line, f"{child!r} below one parent; line {owner[child].number} names it too")
            owner[child] = entry
    return owner


def _tree(path: str | Path, entries: dict[str, _Entry]) -> Fabric:
    leaf_of, parent = _owners(path, entries, "nodes"), _owners(path, entries, "children")
    for child, entry in parent.items():
        if child not in entries:
            raise malformed(path, entry.number, entry.line, f"a switch that the file declares: no line says SwitchName={child}")
    tiers = _tiers(path, entries, parent)
    empty = [entry.name for entry in entries.values() if not entry.nodes and not entry.children]
    notes = (f"{len(empty)} switches without nodes or switches left out: {', '.join(empty[:5])}",) if empty else ()
    return Fabric(
        source=str(path),
        nodes=tuple(FabricNode(name, (FabricPort(entry.name),)) for name, entry in leaf_of.items()),
        switches=tuple(
            FabricSwitch(name, tiers[name], parent[name].name if name in parent else None) for name in entries if name not in empty
        ),
        notes=notes,
    )


def _tiers(path: str | Path, entries: dict[str, _Entry], parent: dict[str, _Entry]) -> dict[str, int]:
    """0 for a switch without children, else one above the highest child; a loop is found because its switches are never reached."""
    tiers = dict.fromkeys(entries, 0)
    waiting = {name: len(entry.children) for name, entry in entries.items()}
    ready = [name for name, count in waiting.items() if not count]
    for name in ready:
        if name in parent:
            above = parent[name].name
            tiers[above] = max(tiers[above], tiers[name] + 1)
            waiting[above] -= 1
            if not waiting[above]:
                ready.append(above)
    if len(ready) < len(entries):
        looped = next(entries[name] for name in entries if waiting[name])
        raise malformed(path, looped.number, looped.line, f"a tree: {looped.name!r} lies above itself")
    return tiers


def _blocks(path: str | Path, entries: dict[str, _Entry], sizes: tuple[int, str, list[int]] | None) -> Fabric:
    _owners(path, entries, "nodes")
    names = list(entries)
    widths = [1] + ([size // sizes[2][0] for size in sizes[2][1:]] if sizes else [])  # in blocks
    widths = [width for width in widths if width == 1 or width < len(names)]
    labels = [str(sizes[2][0] * width) if sizes else "" for width in widths]
    switches: list[FabricSwitch] = []
    for tier, (width, label) in enumerate(zip(widths, labels)):
        for unit in range(-(-len(names) // width)):
            name = names[unit] if tier == 0 else f"aggregated{label}.{unit}"
            up = None if len(names) == 1 else "all"
            if tier + 1 < len(widths):
                up = f"aggregated{labels[tier + 1]}.{unit * width // widths[tier + 1]}"
            switches.append(FabricSwitch(name, tier, up))
    if len(names) > 1:
        switches.append(FabricSwitch("all", len(widths)))
    nodes = tuple(FabricNode(node, (FabricPort(entry.name),), entry.name) for entry in entries.values() for node in entry.nodes)
    return Fabric(str(path), nodes, tuple(switches))
