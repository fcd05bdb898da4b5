"""From a short description (conf/cluster/*.yaml) to a cluster: a symmetric tree of switches, rail-optimised or not."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_megascale.topology.cluster import Cluster, Level, Nic, Node, Switch
from lightning_megascale.topology.gpus import check_positive, gpu_sheet
from lightning_megascale.topology.rules import check_failures

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel conf/ lies inside the package; in a checkout or an editable install, beside it.
FOLDER = (_PACKAGE if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent) / "conf" / "cluster"

_KEYS = ("name", "gpu", "nodes", "node", "nvlink", "levels", "storage", "failures_per_1000_node_days")
_NODE_KEYS = ("gpus", "nics", "nic_gb_per_s", "rails")
_NVLINK_KEYS = ("nodes", "latency_us")
_LEVEL_KEYS = ("name", "nodes", "latency_us", "oversubscription")
_STORAGE_KEYS = ("read_gb_per_s", "write_gb_per_s", "node_gb_per_s")


def load_cluster(name: str | Path) -> Cluster:
    """A cluster by its name in conf/cluster/, or by the path of a YAML file in that form.

    Raises:
        ValueError: there is no such name or file, it is no YAML, gives a key twice, or it describes no cluster.
    """
    path = Path(name)
    if not str(name).strip() or (path.is_dir() and str(name) not in _known()):
        what = "is a folder" if str(name).strip() else "is empty"
        raise ValueError(f"cluster={str(name)!r}: {what}; give one of {', '.join(_known())}, or the path of a .yaml file")
    if path.suffix not in (".yaml", ".yml"):
        path = FOLDER / f"{name}.yaml"
        known = _known()
        if str(name) not in known:
            near = difflib.get_close_matches(str(name), known, 1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else "or give the path of a .yaml file"
            raise ValueError(f"cluster={str(name)!r}: must be one of {', '.join(known)}; {hint}")
    elif not path.is_file():
        raise ValueError(f"cluster={str(name)!r}: there is no such file; give a path that exists or a name of conf/cluster/")
    description, twice = _read_yaml(path)
    if twice:
        raise ValueError(f"{path}:{twice}")
    try:
        return cluster_from(description)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _known() -> list[str]:
    """The names of conf/cluster/."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def _read_yaml(path: Path) -> tuple[Any, str]:
    """(what the file holds, what is wrong with a key that a mapping of it gives twice: yaml would silently keep the last)."""
    import yaml  # only here: a description that is given as a mapping needs no YAML

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        twice = _key_twice(root)  # first: the construction merges mappings, so keys may then rightly come twice
        return (None if root is None else loader.construct_document(root)), twice
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, a date that is none, a number of 5000 digits
        raise ValueError(f"{path}: is no YAML: {' '.join(str(error).split())}; mend it there") from error


def _key_twice(root: Any) -> str:
    """Line and remedy of the first key that a mapping below the YAML node ``root`` gives twice, or ""."""
    waiting: list[Any] = [] if root is None else [root]
    seen: set[int] = set()  # an alias repeats a node, and may lie inside itself
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node.value, str):
            continue
        seen.add(id(node))
        pairs = [item for item in node.value if isinstance(item, tuple)]  # of a mapping; a list has nodes
        waiting += reversed([value for _, value in pairs] or node.value)
        lines: dict[str, int] = {}
        for key in (key for key, _ in pairs if isinstance(key.value, str)):
            line = key.start_mark.line + 1
            if key.value in lines:
                return f"{line}: key {key.value!r} is given in line {lines[key.value]} already; keep one"
            lines[key.value] = line
    return ""


def cluster_from(description: Any) -> Cluster:
    """The cluster that ``description`` describes: what a file of conf/cluster/ holds, read.

    Its keys, all needed unless said otherwise: ``name``; ``gpu`` (a sheet's name); ``nodes``;
    ``node``: gpus, nics, nic_gb_per_s, rails (leaves that the NICs of a node are dealt to: as many as NICs when rail-optimised, 1 when
    all hang on one); ``nvlink``: nodes (of a domain, 1 by default), latency_us; ``levels`` (leaf first): name, nodes (below one of its
    switches), latency_us, oversubscription (NICs below over uplinks into it, 1 by default; none at the leaf); ``storage``:
    read_gb_per_s, write_gb_per_s, node_gb_per_s; ``failures_per_1000_node_days``.

    Raises:
        ValueError: a key is missing, unknown or no such value.
    """
    top = _section(description, "cluster", _KEYS, optional=("levels",))
    node = _section(top["node"], "node", _NODE_KEYS, optional=("nics", "nic_gb_per_s", "rails"))
    nvlink = _section(top["nvlink"], "nvlink", _NVLINK_KEYS, optional=("nodes",))
    storage = _section(top["storage"], "storage", _STORAGE_KEYS)
    nodes, gpus = _whole("nodes", top["nodes"]), _whole("node.gpus", node["gpus"])
    nics = _whole("node.nics", node.get("nics", 0), least=0)
    rails = _whole("node.rails", node.get("rails", 1))
    domain = _whole("nvlink.nodes", nvlink.get("nodes", 1))
    if nics and nics % rails:
        raise ValueError(f"node.rails={rails}: the {nics} NICs of a node must be dealt evenly to rails; take a divisor of {nics}")
    levels = _levels(top.get("levels") or [], nodes, nics)
    if nics and "nic_gb_per_s" not in node:
        raise ValueError(f"node: nic_gb_per_s missing, the speed of its {nics} NICs; add it")
    speed = _number("node.nic_gb_per_s", node["nic_gb_per_s"]) if "nic_gb_per_s" in node else 0.0
    switches = _switches(levels, nodes, rails, nics * speed)
    return Cluster(
        name=str(top["name"]),
        gpu=gpu_sheet(top["gpu"]),
        gpus_per_node=gpus,
        nodes=tuple(
            Node(
                f"node{number}",
                f"nvlink{number // domain}",
                tuple(Nic(_leaf(number // levels[0]["nodes"], nic * rails // nics), speed) for nic in range(nics)),
            )
            for number in range(nodes)
        ),
        switches=switches,
        levels=(
            Level("nvlink", _number("nvlink.latency_us", nvlink["latency_us"])),
            *(Level(str(level["name"]), _number(f"levels.{level['name']}.latency_us", level["latency_us"])) for level in levels),
        ),
        storage_read_gb_per_s=_number("storage.read_gb_per_s", storage["read_gb_per_s"]),
        storage_write_gb_per_s=_number("storage.write_gb_per_s", storage["write_gb_per_s"]),
        node_storage_gb_per_s=_number("storage.node_gb_per_s", storage["node_gb_per_s"]),
        failures_per_1000_node_days=_number("failures_per_1000_node_days", top["failures_per_1000_node_days"], check_failures),
    )


def _levels(given: Any, nodes: int, nics: int) -> list[dict[str, Any]]:
    """The levels of switches, each above whole units of the one before, the last above all nodes."""
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"levels={given!r}: must be a list, the leaf first")
    levels = [_section(level, f"levels[{place}]", _LEVEL_KEYS, optional=("oversubscription",)) for place, level in enumerate(given)]
    if bool(levels) != bool(nics):
        raise ValueError(f"levels={[level['name'] for level in levels]}: {nics} NICs a node; give both NICs and levels, or neither")
    for place, level in enumerate(levels):
        level["nodes"] = _whole(f"levels[{place}].nodes", level["nodes"])
        if place and level["nodes"] % levels[place - 1]["nodes"]:
            below = levels[place - 1]
            raise ValueError(
                f"levels.{level['name']}.nodes={level['nodes']}: must be a multiple of the {below['nodes']} nodes of a {below['name']}"
            )
    if levels and "oversubscription" in levels[0]:
        raise ValueError(f"levels.{levels[0]['name']}.oversubscription: the first level is a leaf, NICs hang on it; take the key away")
    if levels and levels[-1]["nodes"] < nodes:
        last = levels[-1]
        raise ValueError(
            f"levels.{last['name']}.nodes={last['nodes']}: the last level must lie above all {nodes} nodes; raise it to {nodes}"
        )
    return levels


def _leaf(group: int, rail: int) -> str:
    return f"leaf{group}.rail{rail}"


def _switches(levels: list[dict[str, Any]], nodes: int, rails: int, node_gb_per_s: float) -> tuple[Switch, ...]:
    """One switch for every unit of a level, one leaf for every rail of a leaf group; uplinks for full units.

    Args:
        node_gb_per_s: of all NICs of a node.
    """
    switches = []
    for tier, level in enumerate(levels):
        above = levels[tier + 1] if tier + 1 < len(levels) else None
        uplink = 0.0
        if above is not None:
            share = 1.0 / rails if tier == 0 else 1.0
            oversubscription = _number(f"levels.{above['name']}.oversubscription", above.get("oversubscription", 1))
            uplink = level["nodes"] * node_gb_per_s * share / oversubscription
        for unit in range(-(-nodes // level["nodes"])):
            up = None if above is None else f"{above['name']}{unit * level['nodes'] // above['nodes']}"
            names = [_leaf(unit, rail) for rail in range(rails)] if tier == 0 else [f"{level['name']}{unit}"]
            if tier == 0 and above is None and len(names) > 1:
                raise ValueError(f"levels: {rails} rails meet at no leaf; add a level above, or set node.rails to 1")
            switches += [Switch(name, tier, up, uplink) for name in names]
    return tuple(switches)


def _section(given: Any, where: str, keys: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """``given`` as a dict that holds all of ``keys`` but the optional ones, and no others."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}={given!r}: must be a mapping with {', '.join(keys)}")
    for key in given:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, 1)
            raise ValueError(
                f"{where}.{key}: no such key; {where} has {', '.join(keys)}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    missing = [key for key in keys if key not in given and key not in optional]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} missing; add it")
    return dict(given)


def _whole(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")
    return value


def _number(name: str, value: Any, check: Callable[[str, object], None] = check_positive) -> float:
    """``value`` if ``check`` lets it pass; text, which is what YAML makes of 1e12 and nan, is never a number."""
    if isinstance(value, str):
        try:
            meant = float(value)
        except ValueError:
            meant = 0.0
        if not math.isfinite(meant):
            check(name, meant)
        raise ValueError(f"{name}={value!r}: must be a number; YAML reads 1e12 as text, write 1.0e+12")
    check(name, value)
    return float(value)
