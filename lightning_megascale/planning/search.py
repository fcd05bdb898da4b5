"""The search: every plan of a number of GPUs, ranked by seconds per useful step, exact under the model, with what rules out the rest.

Exact without looking at all: a plan's time is least with no memory saved, so that time is a bound for all ways to save memory, of which
only those matter that no faster one that fits stands before. And a bound on the share of productive time turns step times into bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_megascale.plan import ParallelPlan
from lightning_megascale.planning.candidates import Candidates
from lightning_megascale.planning.estimates import Estimate, Setting, estimate, floor_seconds
from lightning_megascale.planning.goodput import checkpoint_seconds, productive_share, recovery_seconds
from lightning_megascale.planning.grid import SAVINGS, base_candidates, variants
from lightning_megascale.planning.legal import expert_counts, first_broken, support_rules
from lightning_megascale.planning.memory import memory
from lightning_megascale.planning.stages import split_names
from lightning_megascale.planning.step_time import step_time

_CHUNK, _STEP = 16384, 1024  # bases whose time, and whose memory, is asked for at once
# Of plans that are equally good the one with fewer of these, in this order.
_SIMPLEST = ("cp", "pp", "tp", "ep", "stages_per_rank", "dp_replicate", "dp_shard", "microbatch_size", "schedule", *SAVINGS, "method")
_TOO_SLOW = "no faster than the plans shown, whatever memory is saved"


@dataclass(frozen=True)
class SearchResult:
    """The best plans and what became of the others.

    Args:
        setting: workload, cluster and stack.
        gpus: of every plan.
        best: the best first; empty where nothing fits.
        considered: combinations that were looked at or ruled out together.
        rejected: reason -> how many combinations.
        given: further fields of every plan, which no figure depends on.
        smallest_bytes: what no plan needs less than, of those looked at; infinite where none is legal.
    """

    setting: Setting
    gpus: int
    best: tuple[Estimate, ...]
    considered: int
    rejected: dict[str, int]
    smallest_bytes: float
    given: Mapping[str, Any]

    def plan(self, rank: int = 0, block: str = "layers.{}") -> ParallelPlan:
        """The plan at a place in the ranking.

        Args:
            rank: 0 is the best.
            block: how the model calls its blocks. A pipeline of a mixture of experts names its cut, since the strategy's own counts
                all experts where a token goes through few.
        """
        candidates, work = self.best[rank].candidates, self.setting.workload
        plan = dataclasses.replace(candidates.plan(0, work.global_batch_size), **self.given)
        stages = plan.pipeline_parallel_size * plan.pipeline_stages_per_rank
        if stages == 1 or not expert_counts(work.model):
            return plan
        return dataclasses.replace(plan, pipeline_split=split_names(work.model, stages, block))


def search(
    setting: Setting,
    gpus: int | None = None,
    *,
    top: int = 10,
    fixed: Mapping[str, int] | None = None,
    given: Mapping[str, Any] | None = None,
) -> SearchResult:
    """The best plans of so many GPUs.

    Args:
        setting: workload, cluster, stack.
        gpus: that every plan uses; None: all of the cluster.
        top: how many plans to return.
        fixed: column of ``Candidates`` -> the only value it may have; "dp" for dp_replicate x dp_shard.
        given: further fields of every plan, such as "compile"; plans that the support table refuses with them are left out.

    Raises:
        ValueError: more GPUs than there are, or a name that is no column.
    """
    gpus = setting.cluster.num_gpus if gpus is None else gpus
    if not 1 <= gpus <= setting.cluster.num_gpus:
        raise ValueError(f"gpus={gpus}: cluster {setting.cluster.name!r} has {setting.cluster.num_gpus}; take a number from 1 to that")
    columns = [*Candidates.__dataclass_fields__, "dp"]
    unknown = set(fixed or {}) - set(columns)
    if unknown:
        raise ValueError(f"fixed: {', '.join(sorted(unknown))} is no column; there are {', '.join(columns)}")
    return _Search(setting, gpus, top, dict(fixed or {}), dict(given or {})).run()


class _Search:
    """One search: its best plans so far, and the counts of the rest."""

    def __init__(self, setting: Setting, gpus: int, top: int, fixed: dict[str, int], given: dict[str, Any]) -> None:
        self.setting, self.gpus, self.top, self.fixed, self.given = setting, gpus, top, fixed, given
        self.best: list[tuple[float, tuple[int, ...], Candidates]] = []
        self.rejected: Counter[str] = Counter()
        self.considered = 0
        self.smallest = math.inf
        self.shares: dict[int, float] = {}
        self.step = _STEP
        usable, whole = setting.usable_bytes / 1e9, setting.memory_bytes / 1e9
        self.too_large = f"needs more than {usable:.1f} GB of a {setting.cluster.gpu.name}'s {whole:.1f}"

    def run(self) -> SearchResult:
        workload = self.setting.workload
        bases, refused = base_candidates(workload, self.gpus, most_tensor=domain_size(self.setting), fixed=self.fixed)
        self.rejected += refused
        self.considered += len(bases) + sum(refused.values())
        bases = self._without(bases, *first_broken(support_rules(bases, workload.global_batch_size, self.given), len(bases)))
        bound = floor_seconds(self.setting, bases) / self._share_bound(bases)
        order = np.argsort(bound, kind="stable")
        for start in range(0, len(order), _CHUNK):
            chosen = order[start : start + _CHUNK]
            if bound[chosen[0]] > self._limit():
                self.rejected[_TOO_SLOW] += len(order) - start
                break
            self._look_at(bases.take(chosen))
        self.rejected["slower per useful step than the plans shown"] += self.considered - len(self.best) - sum(self.rejected.values())
        rejected = {reason: count for reason, count in self.rejected.most_common() if count}
        best = tuple(self._estimate(plan) for _, _, plan in self.best)
        return SearchResult(self.setting, self.gpus, best, self.considered, rejected, self.smallest, self.given)

    def _estimate(self, plan: Candidates) -> Estimate:
        setting = self.setting
        return estimate(setting.workload, setting.cluster, plan, stack=setting.stack, reliability=setting.reliability)

    def _limit(self) -> float:
        """Seconds per useful step of the last plan that would be shown."""
        return self.best[-1][0] if len(self.best) == self.top else math.inf

    def _look_at(self, bases: Candidates) -> None:
        """Those of the bases that may be among the best, the fastest first."""
        setting = self.setting
        bound = step_time(setting.workload, setting.cluster, setting.stack, bases).total / self._share_bound(bases)
        order = np.argsort(bound, kind="stable")
        start = 0
        while start < len(order):
            chosen = order[start : start + self.step]
            if bound[chosen[0]] > self._limit():
                self.rejected[_TOO_SLOW] += len(order) - start
                return
            self._save_memory(bases.take(chosen))
            start += self.step
            self.step *= 1 if self.best else 2  # where nothing fits, all have to be looked at

    def _save_memory(self, bases: Candidates) -> None:
        """Each base with what it must save to fit, and no more."""
        workload, cluster, stack = self.setting.workload, self.setting.cluster, self.setting.stack
        held = memory(workload, cluster, stack, bases)
        states = held.parameters + held.optimizer + held.reserve  # which nothing saves
        hopeless = states > self.setting.usable_bytes
        self.smallest = min(self.smallest, float(states[hopeless].min(initial=math.inf)))
        self.rejected[self.too_large] += int(hopeless.sum())
        bases = bases.take(~hopeless)
        plans, owner = variants(bases, workload.global_batch_size, self.fixed)
        self.considered += len(plans) - len(bases)
        broken, messages = first_broken(support_rules(plans, workload.global_batch_size, self.given), len(plans))
        plans, owner = self._without(plans, broken, messages), owner[broken < 0]
        needed = memory(workload, cluster, stack, plans).total
        self.smallest = min(self.smallest, float(needed.min(initial=math.inf)))
        fits = needed <= self.setting.usable_bytes
        self.rejected[self.too_large] += int((~fits).sum())
        plans, owner = plans.take(fits), owner[fits]
        first = _undominated(plans, owner)
        self.rejected["saves memory that a faster plan with the same sizes does not need to save"] += int((~first).sum())
        self._rank(plans.take(first))

    def _rank(self, plans: Candidates) -> None:
        setting = self.setting
        seconds = step_time(setting.workload, setting.cluster, setting.stack, plans).total
        bound = seconds / self._share_bound(plans)
        for index in np.argsort(bound, kind="stable"):
            if bound[index] > self._limit():
                break
            good = setting.goodput(float(seconds[index]), self.gpus, int(plans.dp_replicate[index]))
            if not math.isfinite(good.seconds_per_useful_step):
                self.rejected["fails before a step is kept"] += 1
                continue
            one = plans.take(np.array([index]))
            key = tuple(int(getattr(one, name)[0]) for name in _SIMPLEST)
            self.best.append((good.seconds_per_useful_step, key, one))
            self.best.sort(key=lambda entry: entry[:2])
            del self.best[self.top :]

    def _share_bound(self, plans: Candidates) -> np.ndarray:
        """The largest share of productive time that plans with these replicas can have, (P,); step times do not matter to it."""
        replicas, owner = np.unique(plans.dp_replicate, return_inverse=True)
        for count in replicas.tolist():
            if count not in self.shares:
                self.shares[count] = self._best_share(count)
        return np.array([self.shares[count] for count in replicas.tolist()] or [1.0])[owner.reshape(-1)]

    def _best_share(self, replicas: int) -> float:
        setting = self.setting
        footprint = setting.footprint(1.0, self.gpus, replicas)
        if setting.failures.replica_recovery and footprint.replicas > 1:
            return 1.0
        mtbf = setting.goodput(1.0, self.gpus, replicas).mtbf_seconds
        stall, persist = checkpoint_seconds(setting.storage, footprint)
        recovery = recovery_seconds(setting.failures, setting.storage, footprint)
        if math.isinf(mtbf):
            return 1.0
        low, high = math.log(stall / 100 + 1e-6), math.log(100 * mtbf)
        for _ in range(60):  # the share has one top; each round keeps the two thirds that hold it
            left, right = low + (high - low) / 3, high - (high - low) / 3
            first, second = (productive_share(math.exp(place), stall, mtbf, recovery, persist) for place in (left, right))
            low, high = (left, high) if first < second else (low, right)
        return min(1.0, max(first, second) * (1 + 1e-9))

    def _without(self, plans: Candidates, broken: np.ndarray, messages: list[str]) -> Candidates:
        for number, message in enumerate(messages):
            self.rejected[message] += int((broken == number).sum())
        return plans.take(broken < 0)


def _undominated(plans: Candidates, owner: np.ndarray) -> np.ndarray:
    """Plans before which no faster way to save memory fits: of the same ``owner``, and no slower in any of ``SAVINGS``. bool (P,)."""
    columns = plans.columns()
    levels = [np.searchsorted(values, columns[name].astype(np.int64)) for name, values in SAVINGS.items()]  # "none" to share counts as 0
    shape = tuple(len(values) for values in SAVINGS.values())
    fits = np.zeros((int(owner.max(initial=-1)) + 1, *shape), dtype=bool)
    fits[(owner, *levels)] = True
    reached = fits.copy()  # something at or before this place fits
    for axis in (1, 2, 3):
        reached = np.logical_or.accumulate(reached, axis=axis)
    before = np.zeros_like(fits)
    before[:, 1:] |= reached[:, :-1]
    before[:, :, 1:] |= reached[:, :, :-1]
    before[:, :, :, 1:] |= reached[:, :, :, :-1]
    return np.asarray(~before[(owner, *levels)])


def domain_size(setting: Setting) -> int:
    """GPUs that reach each other by NVLink."""
    cluster = setting.cluster
    return int((cluster.levels_between(0, np.arange(cluster.num_gpus)) == 0).sum())
