"""Reads a fabric's own file, whichever of the known formats it has."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_megascale.topology.fabric import Fabric
from lightning_megascale.topology.infiniband import read_ibnetdiscover
from lightning_megascale.topology.kubernetes import read_node_labels
from lightning_megascale.topology.lines import read_text
from lightning_megascale.topology.slurm import read_slurm

_SLURM = re.compile(r"^\s*(SwitchName|BlockName|BlockSizes)\s*=", re.IGNORECASE | re.MULTILINE)
_IBNETDISCOVER = re.compile(r'^\s*(vendid=|(Switch|Ca|Rt)\s+\d+\s+")', re.MULTILINE)


def read_fabric(path: str | Path) -> Fabric:
    """The fabric of a Slurm topology.conf, an ibnetdiscover dump, or Kubernetes nodes that topograph labelled.

    Hosts that are no nodes by the rule of the format's reader are named in ``left_out``.

    Raises:
        ValueError: the file has none of these forms, or is malformed: then with number of the line, the line and what was expected.
    """
    text = read_text(path)
    if text.lstrip().startswith("{"):
        return read_node_labels(path)
    if _IBNETDISCOVER.search(text):
        return read_ibnetdiscover(path)
    if _SLURM.search(text):
        return read_slurm(path)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    raise ValueError(
        f"{path}:1: {first[:200]!r}\n  expected: a Slurm topology.conf (SwitchName=... or BlockName=...), "
        "the output of ibnetdiscover, or that of kubectl get nodes -o json"
    )
