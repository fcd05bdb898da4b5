"""What to ask for instead, where a search found no plan: other fixed values, more or fewer GPUs, another global batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from lightning_megascale.planning.candidates import CHECKPOINTING, METHODS, SHARDING, Candidates
from lightning_megascale.planning.estimates import Setting
from lightning_megascale.planning.grid import base_candidates, variants
from lightning_megascale.planning.search import SearchResult, domain_size, search
from lightning_megascale.support import SCHEDULES
from lightning_megascale.topology.cluster import Cluster

_TRIES = 5  # searches for each way out
_CODES = {"schedule": SCHEDULES, "checkpointing": CHECKPOINTING, "sharding": SHARDING, "method": METHODS}


def explain_nothing(result: SearchResult, fixed: Mapping[str, int] | None = None, whole: Cluster | None = None) -> str:
    """Why no plan fits, and a near request that has one.

    Args:
        result: of a search that found none.
        fixed: what it had to hold to.
        whole: the cluster that the search's own was cut from; None: it was not cut.
    """
    setting, gpus, held = result.setting, result.gpus, dict(fixed or {})
    lines = [f"no plan of {gpus} GPUs can train {setting.workload.model.name} on {setting.cluster.name}:"]
    lines += [f"  {count:>9,} combinations: {reason}" for reason, count in list(result.rejected.items())[:6]]
    lines += _impossible(setting, gpus, held)
    if result.smallest_bytes < float("inf"):
        usable = f"{setting.usable_bytes / 1e9:.1f} that are planned with"
        lines.append(f"the one that needs least memory needs at least {result.smallest_bytes / 1e9:.1f} GB of the {usable}")
    return "\n".join([*lines, _nearest(setting, gpus, held, whole or setting.cluster)])


def in_words(name: str, value: int) -> str:
    """A column and its value as a user knows them, such as "schedule=GPipe"."""
    return f"{name}={_CODES[name][value] if name in _CODES else value}"


def _values(setting: Setting, gpus: int, name: str, held: Mapping[str, int]) -> list[int]:
    """What a column can be, given the others."""
    others = {key: value for key, value in held.items() if key != name}
    bases, _ = base_candidates(setting.workload, gpus, most_tensor=domain_size(setting), fixed=others)
    plans: Candidates = (
        bases
        if name in ("dp", *bases.columns()) and name not in ("checkpointing", "sharding", "reduce_every")
        else (variants(bases, setting.workload.global_batch_size, others)[0])
    )
    column = plans.dp if name == "dp" else plans.columns()[name]
    return [int(value) for value in np.unique(column).tolist()]


def _impossible(setting: Setting, gpus: int, held: Mapping[str, int]) -> list[str]:
    """Fixed values that no plan has, with those that one can have."""
    lines = []
    for name, value in held.items():
        free = _values(setting, gpus, name, {name: value})
        if value not in free:
            shown = ", ".join(in_words(name, other).partition("=")[2] for other in free[:24]) or "none"
            lines.append(f"{in_words(name, value)}: no plan of {gpus} GPUs has it; there are {shown}")
    return lines


def _nearest(setting: Setting, gpus: int, held: dict[str, int], whole: Cluster) -> str:
    for name, value in held.items():
        others = sorted(_values(setting, gpus, name, held), key=lambda other: (abs(other - value), other))
        for other in [choice for choice in others if choice != value][:_TRIES]:
            if search(setting, gpus, top=1, fixed={**held, name: other}).best:
                return f"nearest: {in_words(name, other)} instead of {in_words(name, value)}"
    found = _nearest_gpus(setting, gpus, held, whole)
    if found is not None:
        return f"nearest found: gpus={found}"
    batch = setting.workload.global_batch_size
    for data in sorted({2**power for power in range(20)}, key=lambda size: abs(size - batch))[:_TRIES]:
        other_batch = dataclasses.replace(setting, workload=dataclasses.replace(setting.workload, global_batch_size=data))
        if search(other_batch, gpus, top=1, fixed=held).best:
            return f"nearest found: batch.global_size={data} instead of {batch}"
    return f"nothing near has one on {whole.name!r}: take GPUs with more memory (gpu=NAME), a larger cluster, or shorter rows"


def _nearest_gpus(setting: Setting, gpus: int, held: dict[str, int], whole: Cluster) -> int | None:
    """A number of GPUs that has a plan: whole nodes nearby, then doubled until it does, and halved back while it still does."""

    def works(count: int) -> bool:
        cut = dataclasses.replace(setting, cluster=whole.cut(gpus=count))
        return bool(search(cut, top=1, fixed=held).best)

    node = whole.gpus_per_node
    rounded = max(1, round(gpus / node)) * node
    near = sorted({rounded + node * step for step in (-2, -1, 0, 1, 2)} - {gpus}, key=lambda count: (abs(count - gpus), count))
    for count in [count for count in near if node <= count <= whole.num_gpus][:_TRIES]:
        if works(count):
            return count
    low, high = rounded, rounded * 2
    for _ in range(_TRIES):
        if high > whole.num_gpus or works(high):
            break
        low, high = high, high * 2
    if high > whole.num_gpus or not works(high):
        return None
    for _ in range(_TRIES):
        middle = (low + high) // 2 // node * node
        if middle in (low, high):
            break
        low, high = (low, middle) if works(middle) else (middle, high)
    return high
