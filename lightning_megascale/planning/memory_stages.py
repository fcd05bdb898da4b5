"""What stands on each pipeline rank: blocks, parameters, and how many microbatches of each stage are between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_megascale.planning.candidates import Candidates
from lightning_megascale.planning.shape import LayerKind, Matmul, ModelShape
from lightning_megascale.planning.stack import Stack
from lightning_megascale.planning.stages import stage_owners
from lightning_megascale.planning.step_time import stage_blocks
from lightning_megascale.planning.workload import Workload
from lightning_megascale.support import SCHEDULES, V_SCHEDULES


@dataclass(frozen=True)
class StagePlan:
    """How a pipeline is cut.

    Args:
        ranks: of the pipeline.
        stages: of all of them.
        schedule: index into ``SCHEDULES``.
        counts: blocks of each kind on each stage, int64 (S, K).
        owners: rank of each stage, int64 (S,).
    """

    ranks: int
    stages: int
    schedule: int
    counts: np.ndarray
    owners: np.ndarray

    def stages_of(self, rank: int) -> list[int]:
        """Of one rank, in order."""
        return np.flatnonzero(self.owners == rank).tolist()

    def boundaries(self, rank: int) -> int:
        """Sides of a rank's stages that receive from another: a hidden state before, its gradient after."""
        return sum((stage > 0) + (stage < self.stages - 1) for stage in self.stages_of(rank))

    def telling_ranks(self) -> list[int]:
        """Ranks of which one needs most: without those that an earlier one outdoes, which has as many microbatches in flight or more.

        That one has no fewer blocks of any kind, the same ends, and no fewer boundaries. In a V a later rank has more of the way up in
        flight, so blocks must be equal there.
        """
        stages = [self.stages_of(rank) for rank in range(self.ranks)]
        blocks = [self.counts[own] for own in stages]
        others = [np.array((0 in own, self.stages - 1 in own, self.boundaries(rank))) for rank, own in enumerate(stages)]
        same = np.array_equal if SCHEDULES[self.schedule] in V_SCHEDULES else lambda more, less: (more >= less).all()
        kept: list[int] = []
        for rank in range(self.ranks):
            if not any((others[other] >= others[rank]).all() and same(blocks[other], blocks[rank]) for other in kept):
                kept.append(rank)
        return kept


@dataclass(frozen=True)
class Holding:
    """Parameters on one rank after tensor and expert parallelism, before data-parallel ranks share them. Float64 (P,).

    Args:
        dense: all but experts.
        experts: this rank's.
        root: of ``dense``, those in no block: embedding, last norm, head.
        head: of ``root``, the head's.
        largest: of the largest block, its experts among them.
        blocks: how many of each kind, int64 (K,).
        last: whether the loss is computed here.
    """

    dense: np.ndarray
    experts: np.ndarray
    root: np.ndarray
    head: np.ndarray
    largest: np.ndarray
    blocks: np.ndarray
    last: bool


def stage_plans(workload: Workload, stack: Stack, plans: Candidates) -> tuple[np.ndarray, list[tuple[StagePlan, slice]]]:
    """The ways to cut the pipeline that occur.

    Returns:
        (an order of the plans, int (P,), in which those of one way are neighbours; each way with its place in that order).
    """
    stages = np.where(plans.pp > 1, plans.pp * plans.stages_per_rank, 1)
    schedule = np.where(plans.pp > 1, plans.schedule, 0)
    key = (plans.pp * (int(stages.max(initial=1)) + 1) + stages) * len(SCHEDULES) + schedule
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1)).tolist()
    found = []
    for start, stop in zip(starts, [*starts, len(order)][1:], strict=True):
        first = order[start]
        ranks, total, name = int(plans.pp[first]), int(stages[first]), int(schedule[first])
        counts = stage_blocks(workload.model, total, stack)
        found.append((StagePlan(ranks, total, name, counts, stage_owners(total, ranks, SCHEDULES[name])), slice(start, stop)))
    return order, found


def in_flight(schedule: str, ranks: int, virtual: int, rank: int, microbatches: np.ndarray) -> np.ndarray:
    """Microbatches of each of a rank's stages whose activations are kept when most are, float64 (v, P).

    Args:
        schedule: a name of ``SCHEDULES``.
        ranks: of the pipeline, p.
        virtual: stages of a rank, v.
        rank: which one.
        microbatches: of a step, m, int (P,).

    Source: Huang et al. 2019, "GPipe" (all m); Narayanan et al. 2021, section 2.2 (1F1B: min(m, p - rank); interleaved: (v - 1) p + 2 (p -
        rank - 1) + 1 of the v m, p of a stage at a time); Qi et al. 2023, "Zero bubble pipeline parallelism", sections 2 and 6: a weight's
        gradient that is put off keeps what it needs, so every rank has as many as the first of 1F1B. As torch 2.13 orders them: its
        ``_get_1f1b_rank_ops`` and the tests of this file, which read torch's own schedules.
    """
    m = np.asarray(microbatches, dtype=float)
    if ranks == 1:
        return np.ones((virtual, len(m)))
    if schedule == "GPipe":
        return np.tile(m, (virtual, 1))
    if schedule == "1F1B":
        return np.minimum(m, ranks - rank)[None]
    if schedule == "ZBVZeroBubble":
        return _zero_bubble_v(ranks, rank, m)
    a_round = m // np.maximum(1, m // ranks)  # microbatches of a stage before the next one's turn
    ahead = 2 * (ranks - 1 - rank) if schedule == "Interleaved1F1B" else ranks - 1
    running = np.minimum((virtual - 1) * a_round + ahead + 1, virtual * m)
    rounds, rest = np.divmod(running, virtual * a_round)
    stage = np.arange(virtual)[:, None]
    return np.minimum(rounds * a_round + np.clip(rest - stage * a_round, 0, a_round), m)


def _zero_bubble_v(ranks: int, rank: int, m: np.ndarray) -> np.ndarray:
    """The V holds 2 p halves on every rank: the way down 2 p - 1 - rank at most, the way up the rest. (2, P)."""
    down = np.minimum(m, 2 * ranks - 1 - rank)
    return np.stack([down, np.minimum(m, np.maximum(2 * ranks - down, 1))])


def holdings(model: ModelShape, stage_plan: StagePlan, rank: int, plans: Candidates) -> Holding:
    """Parameters of one rank."""
    stages = stage_plan.stages_of(rank)
    blocks = stage_plan.counts[stages].sum(0)
    owners = plans.expert_owners
    dense, experts, largest = (np.zeros(len(plans)) for _ in range(3))
    for count, kind in zip(blocks.tolist(), model.kinds, strict=True):
        if count:
            split, same, dealt = block_parameters(kind)
            one, own = split / plans.tp + same, dealt / owners
            dense, experts, largest = dense + count * one, experts + count * own, np.maximum(largest, one + own)
    first, last = 0 in stages, stage_plan.stages - 1 in stages
    head_weights = sum(matmul.parameters for matmul in model.head)
    shared = model.tied_parameters if stage_plan.stages == 1 else 0  # two stages have a copy each, on one rank too
    embedding = model.embedding_parameters / plans.tp if first else np.zeros(len(plans))
    head = (head_weights - shared) / plans.tp if last else np.zeros(len(plans))
    root = embedding + head + (model.vectors if last else 0)
    return Holding(dense + root, experts, root, head, largest, blocks, last)


def block_parameters(kind: LayerKind) -> tuple[int, int, int]:
    """(divided by tensor parallelism, the same on all of its ranks, of experts) of one block."""
    split = same = experts = 0
    for matmul in kind.matmuls:
        if matmul.copies > 1:
            experts += matmul.parameters
        elif matmul.part == "router" or matmul.name.endswith(("_a_proj", "shared.gate")):
            same += matmul.parameters
        else:
            bias = _whole_bias(matmul)
            split, same = split + matmul.parameters - bias, same + bias
    return split, same + kind.vectors, experts


def widest_product(model: ModelShape, held: Holding, plans: Candidates) -> np.ndarray:
    """Weights of the largest product in a rank's blocks, gate and up as one; float64 (P,)."""
    largest = np.zeros(len(plans))
    for count, kind in zip(held.blocks.tolist(), model.kinds, strict=True):
        gated = {matmul.part for matmul in kind.matmuls if matmul.name.endswith("gate_proj")}
        for matmul in kind.matmuls if count else ():
            pair = 2 if matmul.part in gated and matmul.name.endswith("up_proj") and matmul.copies == 1 else 1
            ranks = plans.expert_owners if matmul.copies > 1 else plans.tp
            largest = np.maximum(largest, pair * matmul.parameters / ranks)
    return largest


def _whole_bias(matmul: Matmul) -> int:
    """The bias of a row-wise product, which every rank adds."""
    return matmul.outputs if matmul.bias and matmul.name.endswith(("o_proj", "down_proj")) else 0
