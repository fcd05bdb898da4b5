"""Names of combinations of axes, such as ``fsdp2xtp2+sp`` or ``pp2:interleaved1f1b``, as ranks and fields of a plan. No torch."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

from lightning_megascale.support import LOOPED_SCHEDULES, SCHEDULES, V_SCHEDULES, schedule_name

_FIELDS = {
    "dp": "data_parallel_replicate_size",
    "fsdp": "data_parallel_shard_size",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
}
_EXAMPLES = ("dp2", "fsdp2", "hsdp2x2", "tp2", "tp2+sp", "pp2", "fsdp2xtp2", "pp2xfsdp2", "pp2xtp2", "pp2:interleaved1f1b")
_PART = re.compile(r"(?P<name>[a-z]+)(?P<size>\d*)(?P<sequence>\+sp)?")


@dataclass(frozen=True)
class Axes:
    """One combination.

    Args:
        name: as it was asked for.
        ranks: number of processes.
        shares: data-parallel size: into how many shares the rows are divided.
        plan: fields of ``ParallelPlan``.
    """

    name: str
    ranks: int
    shares: int
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def is_pipeline(self) -> bool:
        return self.plan["pipeline_parallel_size"] > 1


def parse_axes(text: str) -> Axes:
    """Reads a combination: names with sizes, joined by ``x``; ``+sp`` after a tp; ``:schedule`` after all with a pp.

    Args:
        text: such as ``tp2``, ``dp2xfsdp2`` (also ``hsdp2x2``), ``fsdp2xtp2+sp``, ``pp2xfsdp2:interleaved1f1b``.

    Raises:
        ValueError: with the nearest name.
    """
    body, colon, schedule = text.strip().partition(":")
    plan: dict[str, Any] = {**dict.fromkeys(_FIELDS.values(), 1), "sequence_parallel": False}
    seen: list[str] = []
    for part in re.sub(r"hsdp(\d+)x(\d+)", r"dp\1xfsdp\2", body.lower()).split("x"):
        name, size, sequence = _read(part, text)
        if name in seen:
            raise ValueError(f"axes={text}: {name} stands twice")
        seen.append(name)
        plan[_FIELDS[name]] = size
        plan["sequence_parallel"] |= sequence
    if colon:
        plan |= _read_schedule(schedule, text, "pp" in seen)
    counted = [size for name, size in plan.items() if name in _FIELDS.values() and name != "expert_parallel_size"]
    ranks = max(prod(counted), plan["expert_parallel_size"])
    return Axes(text.strip(), ranks, plan[_FIELDS["dp"]] * plan[_FIELDS["fsdp"]], plan)


def _read(part: str, text: str) -> tuple[str, int, bool]:
    found = _PART.fullmatch(part)
    name = found["name"] if found else ""
    where = f"axes={text}: " if part != text else "axes="
    if found is None or name not in _FIELDS:
        if name == "hsdp":
            raise ValueError(f"axes={text}: hsdp has two sizes, copies and shards: hsdp2x2 (or dp2xfsdp2)")
        near = difflib.get_close_matches(part, [*_EXAMPLES, *_FIELDS], 1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where}{part!r} is no axis{hint} Axes: {', '.join(_FIELDS)} with their sizes, joined by x, such as fsdp2xtp2")
    if not found["size"] or int(found["size"]) < 2:
        raise ValueError(f"{where}{part!r} needs its number of ranks, at least 2, such as {name}2")
    if found["sequence"] and name != "tp":
        raise ValueError(f"axes={text}: +sp (sequence parallelism) belongs to tp, as in tp2+sp")
    return name, int(found["size"]), bool(found["sequence"])


def _read_schedule(schedule: str, text: str, has_pipeline: bool) -> dict[str, Any]:
    if not has_pipeline:
        raise ValueError(f"axes={text}: a schedule needs a pipeline, as in pp2:{schedule or '1f1b'}")
    name = schedule_name(schedule)
    if name not in SCHEDULES:
        near = difflib.get_close_matches(schedule.lower(), [known.lower() for known in SCHEDULES], 1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"axes={text}: {schedule!r} is no schedule{hint} Schedules: {', '.join(SCHEDULES)}, in any case")
    return {"pipeline_schedule": name}


def stages_of_schedule(schedule: str) -> int:
    """The smallest number of stages that a rank has under a schedule."""
    return 2 if schedule_name(schedule) in LOOPED_SCHEDULES + V_SCHEDULES else 1
