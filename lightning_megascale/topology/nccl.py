"""Reads NCCL's topology file (``NCCL_TOPO_FILE``): the GPUs and NICs of one node, who is near whom, and whether a cluster says the same.

Source: NCCL documentation, "NCCL_TOPO_FILE"; its form as src/graph/xml.cc writes it: cpu > pci > pci, with classes and link speeds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from lightning_megascale.topology.cluster import Cluster
from lightning_megascale.topology.lines import read_text

# First digits of a PCI class. Source: PCI Code and ID Assignment Specification, class codes 02h and 03h.
_GPUS, _NICS = ("0x0302", "0x0300"), ("0x0207", "0x0200")
_SPEED = re.compile(r"([0-9.]+)\s*GT/s")


@dataclass(frozen=True)
class NcclNode:
    """One node. GPUs and NICs are counted in the order of the file.

    Args:
        gpus: bus ids.
        nics: bus ids.
        near: for each GPU the numbers of the NICs that are nearest to it: below the same PCI switch, else the same CPU, else all.
        nic_gb_per_s: what the slot of each NIC carries, 1e9 bytes per second in one direction; infinite where the file does not say.
    """

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    near: tuple[tuple[int, ...], ...]
    nic_gb_per_s: tuple[float, ...]

    def differences(self, cluster: Cluster) -> list[str]:
        """A message for everything in which a node of the cluster is another: GPUs, NICs, the NIC a GPU uses, rates beyond a slot."""
        node = cluster.nodes[0]
        if len(self.gpus) != cluster.gpus_per_node:
            return [f"node.gpus={cluster.gpus_per_node}: the file has {len(self.gpus)} GPUs"]
        if len(self.nics) != len(node.nics):
            return [f"node.nics={len(node.nics)}: the file has {len(self.nics)} NICs"]
        wrong = []
        for gpu, near in enumerate(self.near):
            used = gpu * len(node.nics) // cluster.gpus_per_node
            if used not in near:
                wrong.append(f"GPU {gpu} uses NIC {used} in the cluster, and NIC {', '.join(map(str, near))} is nearest in the file")
        for number, (nic, slot) in enumerate(zip(node.nics, self.nic_gb_per_s, strict=True)):
            if nic.gb_per_s > slot * 1.001:
                wrong.append(f"node.nic_gb_per_s={nic.gb_per_s:g} of NIC {number}: its slot carries {slot:.1f} GB/s")
        return wrong


def read_nccl_node(path: str | Path) -> NcclNode:
    """The node of a file.

    Raises:
        ValueError: the file is no XML of this kind, with the line, or has no GPU.
    """
    try:
        root = ElementTree.fromstring(read_text(path))
    except ElementTree.ParseError as error:
        line, column = error.position
        raise ValueError(f"{path}:{line}: is no XML at column {column + 1}: {error}; give NCCL's topology file") from None
    if root.tag != "system":
        raise ValueError(f"{path}:1: <{root.tag}>: expected <system>, the outermost element of NCCL's topology file")
    found: dict[str, list[tuple[tuple[int, ...], ElementTree.Element]]] = {"gpu": [], "nic": []}
    _walk(root, (), found)
    if not found["gpu"]:
        raise ValueError(f"{path}: has no GPU, that is no <pci> with a class of {' or '.join(_GPUS)}")
    nics = [place for place, _ in found["nic"]]
    return NcclNode(
        gpus=tuple(element.get("busid", "") for _, element in found["gpu"]),
        nics=tuple(element.get("busid", "") for _, element in found["nic"]),
        near=tuple(_nearest(place, nics) for place, _ in found["gpu"]),
        nic_gb_per_s=tuple(_slot_gb_per_s(element, path) for _, element in found["nic"]),
    )


def _walk(
    element: ElementTree.Element, place: tuple[int, ...], found: dict[str, list[tuple[tuple[int, ...], ElementTree.Element]]]
) -> None:
    for number, child in enumerate(element):
        kind = str(child.get("class", ""))[:6]
        if child.tag == "pci" and kind in _GPUS + _NICS:
            found["gpu" if kind in _GPUS else "nic"].append(((*place, number), child))
        _walk(child, (*place, number), found)


def _nearest(place: tuple[int, ...], others: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Those of ``others`` that share the longest way from the root."""
    if not others:
        return ()
    shared = [next((depth for depth, (one, two) in enumerate(zip(place, other)) if one != two), len(place)) for other in others]
    return tuple(number for number, depth in enumerate(shared) if depth == max(shared))


def _slot_gb_per_s(element: ElementTree.Element, path: str | Path) -> float:
    """GT/s x lanes x 128 / 130 (from PCIe 3.0 on) in bytes.

    Source: PCI Express Base Specification 3.0, section 4.2.2 (128b/130b encoding).
    """
    speed, width = element.get("link_speed", ""), element.get("link_width", "")
    found = _SPEED.match(speed)
    if not found or not width.isdecimal() or int(width) == 0:
        if speed or width:
            bus = element.get("busid")
            raise ValueError(f"{path}: pci {bus}: link_speed={speed!r} link_width={width!r}; expected such as '16 GT/s' and '16'")
        return float("inf")
    return float(found[1]) * int(width) * 128 / 130 / 8
