"""Seconds of one optimizer step of many plans at once, by cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_megascale.planning.blocks import block_cost, end_costs
from lightning_megascale.planning.candidates import Candidates
from lightning_megascale.planning.collectives import Links
from lightning_megascale.planning.cuts import Cost, Cut, Machine, distinct
from lightning_megascale.planning.kernels import Rates
from lightning_megascale.planning.schedules import Stages, makespan
from lightning_megascale.planning.shape import LayerKind, ModelShape
from lightning_megascale.planning.sharing import Held, Traffic, Work, copy_seconds, exposed_seconds, optimizer_seconds
from lightning_megascale.planning.stack import Stack
from lightning_megascale.planning.stages import split_model, stage_owners
from lightning_megascale.planning.workload import Workload
from lightning_megascale.support import SCHEDULES
from lightning_megascale.topology.cluster import Cluster

# Outermost to innermost; the mesh's own order.
ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
LAUNCHES_LOST = 20  # assumed


@dataclass(frozen=True)
class StepTime:
    """Seconds of the pipeline rank that works longest; all float64 (P,). ``total`` is the sum of all below but ``recompute``.

    Args:
        compute: kernels of forward and backward.
        recompute: those of them that run a forward again.
        tensor, context, expert: exposed communication of these axes.
        data: gathering of parameters and reduction of gradients that shows, and copies for them.
        sends: between pipeline stages.
        bubble: waiting for other stages.
        optimizer: the update.
        flops_per_gpu: of the model in a step, nothing recomputed, only visible pairs of attention; no seconds.
    """

    compute: np.ndarray
    recompute: np.ndarray
    tensor: np.ndarray
    context: np.ndarray
    expert: np.ndarray
    data: np.ndarray
    sends: np.ndarray
    bubble: np.ndarray
    optimizer: np.ndarray
    flops_per_gpu: np.ndarray

    @property
    def communication(self) -> np.ndarray:
        """All that is exposed."""
        return self.tensor + self.context + self.expert + self.data + self.sends

    @property
    def total(self) -> np.ndarray:
        """Of the step; what storage costs is goodput's matter."""
        return self.compute + self.communication + self.bubble + self.optimizer


def step_time(workload: Workload, cluster: Cluster, stack: Stack, plans: Candidates, *, order: Sequence[str] = ORDER) -> StepTime:
    """Of every plan.

    Args:
        workload: model, rows, batch.
        cluster: its first GPUs are used, one for each rank, in order.
        stack: the software and its constants.
        plans: P plans.
        order: axes from the outermost to the innermost, by which ranks are numbered; dp_shard, cp, tp are neighbours so.

    Raises:
        ValueError: ``order`` is none of the axes.
    """
    strides = axis_strides(plans, order)
    machine = Machine(workload, Rates.of(cluster.gpu, stack), Links.of(cluster, stack), stack)
    pipeline = _Pipeline.of(machine, plans, strides)
    traffic = Traffic.of(pipeline.held, plans, strides, machine.links, stack)
    microbatches = plans.microbatches(workload.global_batch_size)
    parts = pipeline.parts
    work = Work(parts.forward, parts.backward_inputs + parts.backward_weights + parts.recompute)
    return StepTime(
        compute=microbatches * (work.forward + work.backward),
        recompute=microbatches * parts.recompute,
        tensor=microbatches * (parts.tensor_forward + parts.tensor_backward),
        context=microbatches * (parts.context_forward + parts.context_backward),
        expert=microbatches * (parts.expert_forward + parts.expert_backward),
        data=exposed_seconds(traffic, work, plans, stack, microbatches)
        + copy_seconds(pipeline.held, plans, machine.rates, stack, microbatches),
        sends=_sends(machine, plans, strides, microbatches),
        bubble=pipeline.bubble,
        optimizer=optimizer_seconds(pipeline.held, plans, machine.rates, stack),
        flops_per_gpu=workload.flops_per_step("visible").total / plans.world_size,
    )


def axis_strides(plans: Candidates, order: Sequence[str] = ORDER) -> dict[str, np.ndarray]:
    """Axis -> ranks from one coordinate to the next, int (P,).

    Raises:
        ValueError: ``order`` does not name each axis once, or parts or reorders dp_shard, cp and tp, whose ranks share parameters and
            experts.
    """
    if sorted(order) != sorted(ORDER):
        raise ValueError(f"order={tuple(order)}: must name each of {', '.join(ORDER)} once")
    first = order.index("dp_shard")
    if tuple(order[first : first + 3]) != ("dp_shard", "cp", "tp"):
        raise ValueError(
            f"order={tuple(order)}: dp_shard, cp and tp must be neighbours in this order, their ranks share parameters and experts; "
            "move pp and dp_replicate only"
        )
    strides, stride = {}, np.ones(len(plans), dtype=np.int64)
    for name in reversed(order):
        strides[name] = stride
        stride = stride * getattr(plans, name)
    return strides


def stage_blocks(model: ModelShape, stages: int, stack: Stack) -> np.ndarray:
    """Blocks of each kind on each stage, int (S, K): by cost, or equal numbers of blocks where the stack cuts so."""
    if not stack.even_split or stages > len(model.layers):
        return split_model(model, stages)
    kinds = list(model.kinds)
    stage_of = np.arange(len(model.layers)) * stages // len(model.layers)
    counts = np.zeros((stages, len(kinds)), dtype=np.int64)
    np.add.at(counts, (stage_of, np.array([kinds.index(kind) for kind in model.layers])), 1)
    return counts


@dataclass(frozen=True)
class _Pipeline:
    """Of the busiest rank: one microbatch's parts, the wait, and what it holds; all (P,)."""

    parts: Cost
    bubble: np.ndarray
    held: Held

    @classmethod
    def of(cls, machine: Machine, plans: Candidates, strides: Mapping[str, np.ndarray]) -> _Pipeline:
        model = machine.workload.model
        cut, places = Cut.of(plans, strides)
        kinds = tuple(model.kinds)
        parts = (*(block_cost(machine, kind, cut) for kind in kinds), *end_costs(machine, cut))
        costs = np.array([part.table() for part in parts])  # (K + 2, 10, U)
        microbatches = plans.microbatches(machine.workload.global_batch_size)
        piped = plans.pp > 1
        rows, back = distinct(plans.pp, plans.stages_per_rank, np.where(piped, plans.schedule, 1), places, microbatches)
        groups, group_of = distinct(*rows[:3])
        counts = np.zeros((len(kinds) + 2, len(rows[0])))  # of parts on the busiest rank
        bubble = np.zeros(len(rows[0]))
        for number, (pp, virtual, schedule) in enumerate(zip(*groups, strict=True)):
            mine = np.flatnonzero(group_of == number)
            blocks = _parts(model, int(pp * virtual), machine.stack)
            counts[:, mine], bubble[mine] = _busiest(costs[:, :, rows[3][mine]], blocks, SCHEDULES[schedule], int(pp), rows[4][mine])
        chosen = costs[:, :, rows[3]]
        busiest = np.einsum("kn,kfn->fn", counts, chosen)
        held = _held(model, kinds, counts[:, back], plans)
        return cls(Cost(*busiest[:, back]), bubble[back], held)


def _parts(model: ModelShape, stages: int, stack: Stack) -> np.ndarray:
    """Blocks of each kind, embedding and head on each stage, (S, K + 2)."""
    blocks = stage_blocks(model, stages, stack)
    ends = np.zeros((stages, 2), dtype=np.int64)
    ends[0, 0] = ends[-1, 1] = 1
    return np.concatenate([blocks, ends], axis=1)


def _busiest(costs: np.ndarray, blocks: np.ndarray, schedule: str, ranks: int, microbatches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(Parts on the busiest rank (K + 2, N), seconds it waits (N,)).

    Args:
        costs: seconds of each part, (K + 2, 10, N).
        blocks: parts on each stage, (S, K + 2).
        schedule, ranks, microbatches: of the pipeline.
    """
    names = [field.name for field in dataclasses.fields(Cost)]
    column = {name: costs[:, number] for number, name in enumerate(names)}
    waits = {way: sum(column[f"{axis}_{way}"] for axis in ("tensor", "context", "expert")) for way in ("forward", "backward")}
    stages = Stages(
        (blocks @ (column["forward"] + waits["forward"])).T,
        (blocks @ (column["backward_inputs"] + column["recompute"] + waits["backward"])).T,
        (blocks @ column["backward_weights"]).T,
    )
    found = makespan(schedule, stages, ranks, microbatches)
    owners = stage_owners(len(blocks), ranks, schedule)
    on_rank = np.stack([blocks[owners == rank].sum(0) for rank in range(ranks)])
    return on_rank[found.rank].T, found.bubble


def _held(model: ModelShape, kinds: tuple[LayerKind, ...], counts: np.ndarray, plans: Candidates) -> Held:
    """What the busiest rank holds."""
    experts = np.array(
        [sum(matmul.parameters for matmul in kind.matmuls if matmul.copies > 1) for kind in kinds] + [0, 0], dtype=np.float64
    )
    head = model.head_parameters + model.tied_parameters + model.vectors
    both = plans.pp == 1  # a tied weight stands on both ends of a pipeline, and once without one
    whole = np.array([float(kind.parameters) for kind in kinds] + [float(model.embedding_parameters), float(head)])
    dense = (whole - experts) @ counts - both * model.tied_parameters
    return Held(dense / plans.tp, experts @ counts / plans.expert_owners, counts.sum(0))


def _sends(machine: Machine, plans: Candidates, strides: Mapping[str, np.ndarray], microbatches: np.ndarray) -> np.ndarray:
    """Between stages: each microbatch's where nothing hides them, else those of the first way there and the last way back.

    Source: Narayanan et al. 2021, section 4.1 (each tensor-parallel rank sends its part, and an all-gather over NVLink follows).
    """
    stack, links = machine.stack, machine.links
    tokens = plans.microbatch_size * machine.workload.sequence_length / plans.cp
    whole = tokens * machine.workload.model.hidden_size * stack.precision.compute_bytes
    parted = plans.sequence_parallel | stack.scatter_sends
    one = links.send_seconds(np.where(parted, whole / plans.tp, whole), strides["pp"])
    one = one + np.where(parted & ~plans.sequence_parallel, links.ring_seconds(whole, plans.tp, strides["tp"]), 0.0)
    # A send that is waited for stops the host, which had run ahead: the launches it had done in advance are worth about so many kernels.
    often = plans.pp - 1
    if not stack.overlap_pipeline:
        one, often = one + LAUNCHES_LOST * stack.kernel_seconds, often + microbatches * plans.stages_per_rank
    return np.where(plans.pp > 1, 2 * one * often, 0.0)
