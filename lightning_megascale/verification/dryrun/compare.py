"""The planner's figures beside those of a dry run, stage by stage; where they differ too much one of the two is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from lightning_megascale.planning.candidates import Candidates
from lightning_megascale.planning.memory import memory_by_rank
from lightning_megascale.planning.memory_stages import stage_plans
from lightning_megascale.planning.model_config import from_decoder_config
from lightning_megascale.planning.plan_effects import auto_method
from lightning_megascale.planning.precisions import precision_named
from lightning_megascale.planning.stacks import stack_for
from lightning_megascale.planning.workload import Workload
from lightning_megascale.topology.describe import load_cluster
from lightning_megascale.verification.dryrun.result import Difference, StageTrace
from lightning_megascale.verification.dryrun.subject import Subject

TOLERANCE = 0.05
"""Relative difference above which a dry run fails."""
PEAK_BYTES = "peak, bytes"
_GPU, _CLUSTER = "h100", "h100_1024"  # no byte of a tensor depends on them


class PlannerDisagrees(ValueError):
    """The planner and the dry run give figures that are too far apart."""


def planned(subject: Subject, place: int, layers: Mapping[str, int], *, first: bool, last: bool) -> dict[str, float]:
    """The planner's figures of a rank; names as in ``traced``.

    Args:
        subject: the run.
        place: of the rank on the pipeline axis.
        layers: kind -> how many it holds.
        first, last: it holds the embeddings; the last norm and the head.
    """
    plan, workload = subject.plan, _workload(subject)
    shape = workload.model
    kinds = {kind.name: kind for kind in shape.kinds}
    parameters = sum(kinds[name].parameters * count for name, count in layers.items())
    row = sum(workload.layer_flops(kinds[name], flash=True).total * count for name, count in layers.items())
    if first:
        parameters += shape.embedding_parameters
    if last:
        parameters += shape.head_parameters + shape.vectors
        row += workload.head_flops().total
    rows = workload.global_batch_size // int(plan.data_parallel_size)
    found: dict[str, float] = {"parameters": parameters}
    cp = plan.context_parallel_size
    # A contiguous layout's first rank attends to the fewest pairs, and rows that do not divide are filled up.
    if cp == 1 or (plan.context_parallel_layout != "contiguous" and workload.sequence_length % (2 * cp) == 0):
        found["FLOP per step"] = row * rows / (plan.tensor_parallel_size * plan.context_parallel_size)
    return found | _memory(subject, workload, place, layers)


def _workload(subject: Subject) -> Workload:
    shape = from_decoder_config(asdict(subject.config))
    return Workload(shape, subject.sequence_length, subject.plan.global_batch_size or int(subject.plan.data_parallel_size))


def _memory(subject: Subject, workload: Workload, place: int, layers: Mapping[str, int]) -> dict[str, float]:
    """Bytes on one pipeline rank, of whose reserve for what is no tensor the dry run knows nothing; none where the planner has other layers
    there: it cuts a mixture of experts by what a token goes through, a plan's "auto" by what there is."""
    stack = stack_for(_GPU, precision=precision_named(subject.precision))
    candidates = Candidates.from_plan(subject.plan, auto_method(subject.plan, workload))
    ((cut, _),) = stage_plans(workload, stack, candidates)[1]
    held = sum(cut.counts[stage] for stage in cut.stages_of(place))
    if {kind.name: int(count) for kind, count in zip(workload.model.kinds, held) if count} != dict(layers):
        return {}
    kinds = memory_by_rank(workload, load_cluster(_CLUSTER), stack, candidates)[place].row()
    peak = sum(bytes_ for kind, bytes_ in kinds.items() if kind != "reserve")
    return {"parameters, bytes": kinds["parameters"], "optimizer, bytes": kinds["optimizer"], PEAK_BYTES: peak}


def traced(trace: StageTrace) -> dict[str, float]:
    """The dry run's figures, by the names of ``planned``."""
    return {
        "parameters": trace.parameters,
        "FLOP per step": trace.flops,
        "parameters, bytes": trace.parameters_bytes,
        "optimizer, bytes": trace.optimizer_bytes,
        PEAK_BYTES: trace.peak_bytes,
    }


def compare(subject: Subject, stages: Sequence[StageTrace], ends: Mapping[int, tuple[bool, bool]]) -> tuple[Difference, ...]:
    """Every figure that both have.

    Args:
        subject, stages: of the dry run.
        ends: place on the pipeline axis -> (holds the first stage, holds the last).
    """
    found = []
    for trace in stages:
        first, last = ends[trace.stage]
        ours, theirs = traced(trace), planned(subject, trace.stage, trace.layers, first=first, last=last)
        found += [Difference(trace.stage, name, ours[name], theirs[name]) for name in theirs]
    return tuple(found)


def judged(differences: Sequence[Difference]) -> list[Difference]:
    """Those that must be small: all but the peak, which is an estimate on both sides."""
    return [entry for entry in differences if entry.name != PEAK_BYTES]


def check(differences: Sequence[Difference]) -> None:
    """Raises PlannerDisagrees with every figure that is further off than ``TOLERANCE``, but for the peak."""
    far = [entry for entry in judged(differences) if entry.relative > TOLERANCE]
    if far:
        lines = [
            f"stage {entry.stage}: {entry.name} is {entry.traced:.6g} in the dry run and {entry.planned:.6g} in the planner, "
            f"{entry.relative:.1%} off"
            for entry in far
        ]
        raise PlannerDisagrees("the planner and the dry run disagree by more than 5%, so one of them is wrong:\n  " + "\n  ".join(lines))
