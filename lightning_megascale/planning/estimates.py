"""What a plan is expected to do on a cluster: memory, step time, where the time goes, and goodput. One plan, or many as columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_megascale.plan import ParallelPlan
from lightning_megascale.planning.candidates import Candidates
from lightning_megascale.planning.goodput import Footprint, Goodput, Reliability, Storage, estimate_goodput
from lightning_megascale.planning.legal import broken_rules
from lightning_megascale.planning.memory import Memory, memory
from lightning_megascale.planning.plan_effects import auto_method, check_split, not_modelled, stack_under
from lightning_megascale.planning.stack import Stack
from lightning_megascale.planning.stacks import stack_for
from lightning_megascale.planning.step_time import StepTime, step_time
from lightning_megascale.planning.workload import Workload
from lightning_megascale.support import SCHEDULES, ZERO_BUBBLE_SCHEDULES
from lightning_megascale.topology.cluster import Cluster


@dataclass(frozen=True)
class Setting:
    """What all candidates of a search share.

    Args:
        workload, cluster, stack: what is trained, where, and by which software.
        reliability: failures and recovery; None: the cluster's rate and the defaults.
        memory_margin: share of a GPU's memory that a searched plan leaves free, since estimates of memory are off by about that much.
    """

    workload: Workload
    cluster: Cluster
    stack: Stack
    reliability: Reliability | None = None
    memory_margin: float = 0.05

    @cached_property
    def failures(self) -> Reliability:
        """``reliability``, or what the cluster says."""
        return self.reliability or Reliability(failures_per_node_year=self.cluster.failures_per_1000_node_days * 0.36525)

    @cached_property
    def storage(self) -> Storage:
        """The cluster's file system."""
        cluster = self.cluster
        return Storage(cluster.storage_write_gb_per_s, cluster.storage_read_gb_per_s, cluster.node_storage_gb_per_s)

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Of parameters and optimizer state, once for the whole model."""
        precision = self.stack.precision
        return self.workload.model.parameters * (precision.shard_bytes + precision.optimizer_bytes)

    @cached_property
    def memory_bytes(self) -> float:
        """Of one GPU."""
        return self.cluster.gpu.memory_gib * 2**30

    @cached_property
    def usable_bytes(self) -> float:
        """Of one GPU, for a plan that is searched."""
        return self.memory_bytes * (1 - self.memory_margin)

    @cached_property
    def node_network_gb_per_s(self) -> float:
        """Of one node to others; a cluster without NICs hands a state over by storage."""
        return sum(nic.gb_per_s for nic in self.cluster.nodes[0].nics) or self.cluster.node_storage_gb_per_s

    def footprint(self, step_seconds: float, gpus: int, replicas: int) -> Footprint:
        """What a plan means for failures; replicas smaller than nodes are none, since a node's failure costs several."""
        nodes = -(-gpus // self.cluster.gpus_per_node)
        return Footprint(
            step_seconds=step_seconds,
            gpus=gpus,
            nodes=nodes,
            checkpoint_bytes=self.checkpoint_bytes,
            replicas=replicas if nodes % replicas == 0 else 1,
            network_gb_per_s=self.node_network_gb_per_s,
        )

    def goodput(self, step_seconds: float, gpus: int, replicas: int) -> Goodput:
        """Of a plan with this step time on so many GPUs."""
        return estimate_goodput(self.failures, self.storage, self.footprint(step_seconds, gpus, replicas))


@dataclass(frozen=True)
class Estimate:
    """What one plan is expected to do.

    Args:
        setting: workload, cluster and stack.
        candidates: the plan as columns of length 1.
        time: seconds by cause.
        memory: bytes by kind, of the pipeline rank that needs most.
        goodput: of the whole run.
        not_modelled: fields of the plan that no figure here depends on, as "name=value".
    """

    setting: Setting
    candidates: Candidates
    time: StepTime
    memory: Memory
    goodput: Goodput
    not_modelled: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        """Of an optimizer step without failures."""
        return float(self.time.total[0])

    @property
    def memory_bytes(self) -> float:
        """That one GPU needs."""
        return float(self.memory.total[0])

    @property
    def fits(self) -> bool:
        """Whether a GPU has that much."""
        return self.memory_bytes <= self.setting.memory_bytes

    @property
    def gpus(self) -> int:
        """That the plan uses."""
        return int(self.candidates.world_size[0])

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs, while nothing fails."""
        return self.setting.workload.tokens_per_step / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak of the matrix units: nothing recomputed, the half of attention's square that causality leaves.

        Source: Chowdhery et al. 2022, "PaLM", appendix B, but for the causal half.
        """
        peak = self.setting.cluster.gpu.peak_flops_per_s(self.setting.stack.precision.matmul_dtype)
        return self.setting.workload.flops_per_step("visible").total / self.step_seconds / peak / self.gpus

    @property
    def bubble_share(self) -> float:
        """Of the step, that a rank waits in the pipeline."""
        return float(self.time.bubble[0]) / self.step_seconds

    @property
    def shares(self) -> dict[str, float]:
        """Of wall time: "compute", "communication" that nothing hides, "bubble", "storage" (checkpoints that stall), "recovery", "lost"."""
        useful = self.goodput.share / self.step_seconds
        seconds = {"compute": self.time.compute[0] + self.time.optimizer[0], "bubble": self.time.bubble[0]}
        seconds["communication"] = self.step_seconds - seconds["compute"] - seconds["bubble"]
        shares = {name: float(seconds[name]) * useful for name in ("compute", "communication", "bubble")}
        good = self.goodput
        return shares | {"storage": good.checkpoint_share, "recovery": good.recovery_share, "lost": good.lost_share}


def estimate(
    workload: Workload,
    cluster: Cluster,
    plan: ParallelPlan | Candidates,
    *,
    stack: Stack | None = None,
    reliability: Reliability | None = None,
) -> Estimate:
    """What a plan is expected to do.

    Args:
        workload: what is trained.
        cluster: where; the plan may use fewer GPUs than it has.
        plan: resolved; or columns of length 1.
        stack: software and precision; None: this package's on the cluster's GPU.
        reliability: failures and recovery; None: the cluster's rate and the defaults.

    Raises:
        ValueError: the plan has an open size, needs more GPUs than there are, or is several; or, for a ``ParallelPlan``, it breaks a rule
            of its own or of the model, the batch or the schedule.
    """
    stack = stack or stack_for(cluster.gpu.name)
    candidates = plan if isinstance(plan, Candidates) else Candidates.from_plan(plan, auto_method(plan, workload))
    if len(candidates) != 1:
        raise ValueError(f"plan: {len(candidates)} candidates, and one is estimated; take(np.array([i])) chooses one")
    if isinstance(plan, ParallelPlan):
        _check(plan, workload, candidates)
        stack = stack_under(stack, vars(plan))
    gpus = int(candidates.world_size[0])
    if gpus > cluster.num_gpus:
        raise ValueError(f"plan: it needs {gpus} GPUs, and cluster {cluster.name!r} has {cluster.num_gpus}; use a larger cluster")
    setting = Setting(workload, cluster, stack, reliability)
    time = step_time(workload, cluster, stack, candidates)
    goodput = setting.goodput(float(time.total[0]), gpus, int(candidates.dp_replicate[0]))
    ignored = not_modelled(vars(plan), workload.model) if isinstance(plan, ParallelPlan) else ()
    return Estimate(setting, candidates, time, memory(workload, cluster, stack, candidates), goodput, ignored)


def _check(plan: ParallelPlan, workload: Workload, candidates: Candidates) -> None:
    wrong = [*plan.check(int(candidates.world_size[0])), *broken_rules(workload, candidates), *check_split(plan, workload.model)]
    if wrong:
        lines = "\n".join(f"  - {message}" for message in dict.fromkeys(wrong))
        raise ValueError(f"this plan cannot run {workload.model.name}:\n{lines}")


def floor_seconds(setting: Setting, plans: Candidates) -> np.ndarray:
    """A step time that no plan with these sizes, microbatches and schedule falls below, seconds (P,): its products at full rate, and a
    pipeline of even stages that fills and drains.

    Stages may be uneven and kernels small, products are recomputed and data is sent, which all takes longer.

    Source of the bubble: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM",
        sections 2.2.1 and 2.2.2; a zero-bubble schedule is given none.
    """
    stack, gpu, work = setting.stack, setting.cluster.gpu, setting.workload
    rate = gpu.peak_flops_per_s(stack.precision.matmul_dtype) * max(1.0, stack.small_dtype_efficiency)
    rate *= max(stack.matmul_efficiency, stack.attention_efficiency)
    full = np.isin(plans.schedule, [SCHEDULES.index(name) for name in ZERO_BUBBLE_SCHEDULES], invert=True)
    bubble = np.where(full, (plans.pp - 1) / plans.stages_per_rank / plans.microbatches(work.global_batch_size), 0.0)
    return np.asarray(work.flops_per_step("visible").total / rate / plans.world_size * (1 + bubble))
