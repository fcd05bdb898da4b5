"""What a dry run says, as plain data: bytes, operations, traffic and memory of one rank of each distinct pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Messages of one kind that one rank takes part in during one optimizer step.

    Args:
        axis: of the mesh, such as "dp_shard", "tp" or "pp"; "world" for all ranks.
        operation: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv", "broadcast".
        dtype: of what travels.
        calls: how many.
        bytes_: payload of all of them: of an all-gather what comes out, of a reduce-scatter what goes in, of the rest the buffer.
    """

    axis: str
    operation: str
    dtype: str
    calls: int
    bytes_: int


@dataclass(frozen=True)
class StageTrace:
    """One optimizer step of one rank, which stands for all ranks that compute alike.

    Args:
        stage: place on the pipeline axis; 0 without a pipeline.
        alike: the places that hold as many layers of each kind, this one first.
        rank: the global rank that was traced: the first of its place on all other axes, whose shards are the largest.
        layers: kind of layer -> how many this rank holds, over all of its pipeline stages.
        parameters: elements of the whole tensors of which this rank holds parts (its stages' share of the model; second copies of tied
            ones are not counted).
        parameters_bytes, gradient_bytes, optimizer_bytes: what stays on this rank between steps, before the optimizer's step and after it.
        flops: matrix products of a forward and a backward, two for a multiplication and an addition; attention over
            the pairs that causality leaves, five products in its backward.
        recomputed_flops: run again in the backward; not in ``flops``.
        traffic: collectives and messages.
        groups: process groups of the mesh and of experts that this rank is a member of, and the default one.
        in_flight: most microbatches whose forward is kept, over all chunks of this rank.
        peak_bytes: most bytes of tensors at a time during a step that is not the first: an estimate, see ``PEAK``.
        schedule: "F0.1" is the forward of microbatch 1 on pipeline stage 0, B its backward, I and W the two halves of a zero-bubble one.
    """

    stage: int
    alike: tuple[int, ...]
    rank: int
    layers: Mapping[str, int]
    parameters: int
    parameters_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    flops: int
    recomputed_flops: int
    traffic: tuple[Traffic, ...]
    groups: int
    in_flight: int
    peak_bytes: int
    schedule: tuple[str, ...] = ()

    @property
    def comm_bytes(self) -> dict[str, int]:
        """Axis -> payload bytes of all its traffic; what is received over a pipeline's axis is left out, its sender counts it."""
        found: dict[str, int] = {}
        for entry in self.traffic:
            if entry.operation != "recv":
                found[entry.axis] = found.get(entry.axis, 0) + entry.bytes_
        return found


PEAK = (
    "peak: tensors of PyTorch in the second step or a later one, on the kernels of a CPU; without the CUDA context, NCCL's buffers, "
    "workspaces of kernels and fragmentation"
)


@dataclass(frozen=True)
class Difference:
    """One figure of the planner beside the dry run's.

    Args:
        stage: place on the pipeline axis.
        name: of the figure, with its unit.
        traced, planned: the dry run's and the planner's.
    """

    stage: int
    name: str
    traced: float
    planned: float

    @property
    def relative(self) -> float:
        """How far the planner is off, relative to the dry run; 0 where both are 0."""
        return abs(self.planned - self.traced) / max(abs(self.traced), 1e-300) if self.planned != self.traced else 0.0


@dataclass(frozen=True)
class DryRun:
    """All distinct stages of a plan.

    Args:
        world_size: ranks.
        microbatches: of one optimizer step on one rank.
        stages: one trace for each kind of place on the pipeline axis, in order.
        differences: planner against dry run, for every figure that is compared.
        full: every layer and microbatch was traced, nothing extended.
    """

    world_size: int
    microbatches: int
    stages: tuple[StageTrace, ...]
    differences: tuple[Difference, ...] = ()
    full: bool = False

    @property
    def parameters(self) -> int:
        """Of the whole model: the sum over all places of the pipeline axis."""
        return sum(trace.parameters * len(trace.alike) for trace in self.stages)
