"""Reads node labels of Kubernetes as topograph writes them: the output of ``kubectl get nodes -o json``.

Source: NVIDIA/topograph, docs/reference/node-labels.md, in its older and newer keys.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_megascale.topology.fabric import Fabric, FabricNode, FabricPort, FabricSwitch
from lightning_megascale.topology.lines import malformed, read_text

_OLD, _NEW = "network.topology.nvidia.com/", "fabric.topograph.run/tier-"
_TIERS = {**{_OLD + name: tier for tier, name in enumerate(("leaf", "spine", "core"))}, **{f"{_NEW}{tier}": tier for tier in range(8)}}
_BLOCKS = (_OLD + "accelerator", "accelerator.topograph.run/domain")
_EXPECTED = f"the output of kubectl get nodes -o json, nodes with the labels {_OLD}leaf, spine, core or {_NEW}0, 1, ..."


def read_node_labels(path: str | Path) -> Fabric:
    """The fabric that labels of Kubernetes nodes tell; nodes without a leaf's label are left out and noted.

    Where the highest labelled switches are several, one is put above them: the nodes of a cluster reach each other.

    Raises:
        ValueError: with file, number of the line, the line and what was expected.
    """
    text = read_text(path)
    nodes: list[FabricNode] = []
    parent: dict[tuple[int, str], tuple[int, str] | None] = {}
    bare: list[str] = []
    for name, labels in _items(path, text):
        chain = sorted((tier, str(labels[key])) for key, tier in _TIERS.items() if key in labels)
        if not chain or chain[0][0] != 0:
            bare.append(name)
            continue
        if [tier for tier, _ in chain] != list(range(len(chain))):
            raise _wrong(path, text, name, f"one label for every tier from the leaf up, not tiers {[tier for tier, _ in chain]}")
        for below, above in zip(chain, [*chain[1:], None]):
            if parent.setdefault(below, above) != above:
                raise _wrong(path, text, name, f"one switch above {below[1]!r}; an earlier node says another")
        block = next((str(labels[key]) for key in _BLOCKS if key in labels), None)
        nodes.append(FabricNode(name, (FabricPort(_name(chain[0])),), block))
    if not nodes:
        raise ValueError(f"{path}:1: no node has a leaf's label\n  expected: {_EXPECTED}")
    notes = (f"{len(bare)} nodes without a leaf's label left out: {', '.join(bare[:5])}",) if bare else ()
    return Fabric(str(path), tuple(nodes), _switches(parent), notes, tuple(bare))


def _items(path: str | Path, text: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, labels) of each node."""
    try:
        items = json.loads(text)["items"]
        return [(str(item["metadata"]["name"]), dict(item["metadata"].get("labels") or {})) for item in items]
    except json.JSONDecodeError as error:
        raise malformed(path, error.lineno, text.split("\n")[error.lineno - 1], f"JSON ({error.msg}): {_EXPECTED}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise malformed(path, 1, text.partition("\n")[0], f"items with metadata.name and metadata.labels: {_EXPECTED}") from error


def _wrong(path: str | Path, text: str, name: str, expected: str) -> ValueError:
    """An error at the line where the node has its name."""
    lines = text.split("\n")
    quoted = json.dumps(name)
    number = next((number for number, line in enumerate(lines, start=1) if '"name"' in line and quoted in line), 1)
    return malformed(path, number, lines[number - 1], f"node {name!r}: {expected}")


def _name(switch: tuple[int, str]) -> str:
    """A leaf and a spine may have the same label."""
    return f"tier{switch[0]}.{switch[1]}"


def _switches(parent: dict[tuple[int, str], tuple[int, str] | None]) -> tuple[FabricSwitch, ...]:
    tops = [switch for switch, above in parent.items() if above is None]
    root = "all" if len(tops) > 1 else None
    switches = [FabricSwitch(_name(switch), switch[0], _name(above) if above is not None else root) for switch, above in parent.items()]
    return tuple(switches) + ((FabricSwitch("all", 1 + max(tier for tier, _ in tops)),) if root else ())
