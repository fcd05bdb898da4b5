"""``dry_run``: every distinct place of a plan's pipeline, traced on a fake rank, extended, and compared with the planner."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping

from lightning_megascale.parallel.pipeline_split import owners_of
from lightning_megascale.support import schedule_name
from lightning_megascale.verification.dryrun.compare import compare
from lightning_megascale.verification.dryrun.processes import in_processes
from lightning_megascale.verification.dryrun.rank import check_precision, problems
from lightning_megascale.verification.dryrun.result import DryRun, StageTrace, Traffic
from lightning_megascale.verification.dryrun.subject import Counts, Subject, counts_of, owned
from lightning_megascale.verification.dryrun.trace import Found, Job, run_job


def dry_run(subject: Subject, *, full: bool = False, processes: int | None = None) -> DryRun:
    """Runs the code of a plan on ranks that do not exist, for its bytes, operations, traffic and memory. Nothing is computed.

    Each traced rank is a process of its own, forked from this one, which must not have used CUDA.

    Args:
        subject: the run; its plan is resolved and has its batch.
        full: trace every layer and microbatch; else two and three layers of each kind and two and three rounds of microbatches, and extend.
        processes: at a time; None: as many as there are cores.

    Returns:
        The figures of all distinct stages, and the planner's beside them (``compare.check`` judges those).

    Raises:
        ValueError: listing every rule that the run violates.
    """
    check_precision(subject.precision)
    _refuse_what_is_not_traced(subject)
    wrong = problems(subject)
    if wrong:
        raise ValueError("this model cannot run under this plan:\n" + "\n".join(f"  - {message}" for message in wrong))
    counts = counts_of(subject.config, subject.plan)
    kinds = distinct(subject, counts)
    jobs = [Job(subject, counts, places[0], own_stages(subject, places[0]), full) for places in kinds]
    found = in_processes(run_job, jobs, processes or os.cpu_count() or 1)
    traces = tuple(_trace(job, places, result) for job, places, result in zip(jobs, kinds, found))
    ends = {job.place: (0 in job.own, len(counts) - 1 in job.own) for job in jobs}
    return DryRun(subject.world_size, subject.microbatches, traces, compare(subject, traces, ends), full)


def own_stages(subject: Subject, place: int) -> tuple[int, ...]:
    """The pipeline stages of a place on the pipeline axis."""
    plan = subject.plan
    stages = plan.pipeline_parallel_size * plan.pipeline_stages_per_rank
    owners = owners_of(stages, plan.pipeline_parallel_size, schedule_name(plan.pipeline_schedule))
    return tuple(stage for stage, owner in enumerate(owners) if owner == place)


def distinct(subject: Subject, counts: Counts) -> list[tuple[int, ...]]:
    """Places on the pipeline axis that hold alike, in order; the first of each, which keeps most microbatches, is traced."""
    found: dict[Hashable, list[int]] = {}
    for place in range(subject.plan.pipeline_parallel_size):
        own = own_stages(subject, place)
        key = (tuple(owned(counts, own).items()), 0 in own, len(counts) - 1 in own)
        found.setdefault(key, []).append(place)
    return [tuple(places) for places in found.values()]


def _refuse_what_is_not_traced(subject: Subject) -> None:
    plan = subject.plan
    wrong = []
    if plan.compile:
        wrong.append("plan.compile: a compiler decides what is kept and fused, which no dry run sees; use plan.compile=false")
    if plan.cpu_offload or plan.activation_offload:
        wrong.append("plan.cpu_offload and plan.activation_offload need a GPU beside the host's memory; use false")
    if wrong:
        raise ValueError("the dry run cannot trace this plan:\n" + "\n".join(f"  - {message}" for message in wrong))


def _trace(job: Job, alike: tuple[int, ...], found: Found) -> StageTrace:
    figures: Mapping[Hashable, int] = found.figures
    keys = sorted(name[:3] for name in figures if isinstance(name, tuple) and name[3] == "bytes")
    traffic = tuple(
        Traffic(axis, operation, dtype, figures[axis, operation, dtype, "calls"], figures[axis, operation, dtype, "bytes"])
        for axis, operation, dtype in keys
    )
    plain = {name: value for name, value in figures.items() if isinstance(name, str)}
    return StageTrace(
        stage=job.place,
        alike=alike,
        rank=job.rank,
        layers=owned(job.counts, job.own),
        traffic=traffic,
        groups=found.groups,
        schedule=found.schedule,
        **plain,
    )
