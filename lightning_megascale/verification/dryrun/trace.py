"""The job of one process: be a rank, trace a few small models, and say what the whole one gives."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from lightning_megascale.mesh import MeshViews, build_mesh
from lightning_megascale.support import schedule_name
from lightning_megascale.verification.dryrun.extend import added, line, traced_microbatches
from lightning_megascale.verification.dryrun.subject import Counts, Subject, owned, resized, shrunk

_BASE = 2
"""Layers of a kind that a small stage has, and one more: with a single one a stage's peak lies at another moment, by up to 3%."""

_ROUNDS = {"Interleaved1F1B": 2, "InterleavedZeroBubble": 3, "ZBVZeroBubble": 2}
"""Rounds of microbatches from which on the peak of each schedule of several stages grows by the messages that wait alone: measured with 2
and 4 pipeline ranks and 1 to 8 rounds."""


@dataclass(frozen=True)
class Job:
    """One place on the pipeline axis.

    Args:
        subject: the whole run.
        counts: layers of its pipeline stages.
        place: on the pipeline axis.
        own: pipeline stages of that place.
        full: trace all layers and microbatches.
    """

    subject: Subject
    counts: Counts
    place: int
    own: tuple[int, ...]
    full: bool = False

    @property
    def rank(self) -> int:
        """The first global rank of this place."""
        return self.place * self.subject.world_size // self.subject.plan.pipeline_parallel_size


@dataclass(frozen=True)
class Found:
    """What a job gives: ``figures`` by name, and what is not extended."""

    figures: dict[Hashable, int]
    groups: int
    schedule: tuple[str, ...]


def run_job(job: Job) -> Found:
    """Traces one rank. Changes this process for good."""
    from lightning_megascale.verification.dryrun import fakes, recorder

    fakes.become_rank(job.rank, job.subject.world_size, job.subject.ranks_per_node)
    recorder.install()
    tracer = _Tracer(job, build_mesh(job.subject.plan, "cpu"))
    figures = tracer.whole() if job.full else tracer.extended()
    return Found(figures, fakes.number_of_groups(), tuple(tracer.schedule))


class _Tracer:
    def __init__(self, job: Job, views: MeshViews) -> None:
        self.job, self.views = job, views
        self.schedule: list[str] = []

    def whole(self) -> dict[Hashable, int]:
        """Nothing left out."""
        return self._measure(self.job.counts, (self.job.subject.microbatches,))[0]

    def extended(self) -> dict[Hashable, int]:
        """Over layers at each number of microbatches, then over these."""
        job = self.job
        wanted, plan = job.subject.microbatches, job.subject.plan
        few = traced_microbatches(wanted, plan.pipeline_parallel_size, _ROUNDS.get(schedule_name(plan.pipeline_schedule)))
        found = [added(base, *changes) for base, changes in zip(*self._over_layers(few))]
        return found[0] if len(few) == 1 else line(found[0], found[1], few[1] - few[0], wanted - few[0])

    def _over_layers(self, few: tuple[int, ...]) -> tuple[list[dict[Hashable, int]], list[list[tuple[dict[Hashable, int], int, int]]]]:
        """For each number of microbatches the figures of the least layers, and what ``added`` takes of each kind of layer."""
        job = self.job
        whole, least = owned(job.counts, job.own), shrunk(job.counts, _BASE, _BASE)
        base, held = self._measure(least, few), owned(least, job.own)
        changes: list[list[tuple[dict[Hashable, int], int, int]]] = [[] for _ in few]
        for kind, more in (("dense", (_BASE + 1, _BASE)), ("moe", (_BASE, _BASE + 1))):
            counts = shrunk(job.counts, *more)
            steps = owned(counts, job.own).get(kind, 0) - held.get(kind, 0)
            if steps:
                for place, figures in enumerate(self._measure(counts, few)):
                    changes[place].append((figures, steps, whole[kind] - held[kind]))
        return base, changes

    def _measure(self, counts: Counts, few: tuple[int, ...]) -> list[dict[Hashable, int]]:
        """A step with these layers for each number of microbatches."""
        from lightning_megascale.verification.dryrun.measure import Model

        model, found = Model(resized(self.job.subject, counts), self.views), []
        for microbatches in few:
            figures, watch = model.measure(microbatches)
            self.schedule = watch.trace
            found.append(figures)
        return found
