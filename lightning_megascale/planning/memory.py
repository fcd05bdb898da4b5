"""Bytes a GPU needs under each of many plans, by kind, on the pipeline rank that needs most."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from lightning_megascale.planning.activations import Activations, Block
from lightning_megascale.planning.candidates import SHARDING, Candidates
from lightning_megascale.planning.memory_stages import Holding, StagePlan, holdings, in_flight, stage_plans, widest_product
from lightning_megascale.planning.stack import Stack
from lightning_megascale.planning.workload import Workload
from lightning_megascale.support import SCHEDULES
from lightning_megascale.topology.cluster import Cluster


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of the fullest pipeline rank. All float64 (P,) but ``rank``; ``total`` is the sum of all below.

    Args:
        parameters: as a rank keeps them: its shard, or all of its stages.
        gradients: as the optimizer reads them.
        optimizer: moments, and a master copy where there is one.
        unsharded: gathered parameters; and gradients of whole parameters, while they add up over microbatches or wait for their reduction.
        activations: kept between forward and backward, of all microbatches in flight.
        working: what the backward of one block needs beside them, recomputed activations among it; 0 where the loss needs more.
        logits: what the loss needs beside them; 0 where a block needs more.
        buffers: receive buffers of the pipeline, rows for experts, keys and values of other ranks.
        reserve: of no tensor: context, communicators, libraries, fragments.
        rank: the pipeline rank, int64.
    """

    parameters: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    unsharded: np.ndarray
    activations: np.ndarray
    working: np.ndarray
    logits: np.ndarray
    buffers: np.ndarray
    reserve: np.ndarray
    rank: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The sum."""
        return np.sum([getattr(self, name) for name in KINDS], axis=0)

    def row(self, index: int = 0) -> dict[str, float]:
        """Kind -> bytes of one plan."""
        return {name: float(getattr(self, name)[index]) for name in KINDS}


KINDS = tuple(field.name for field in dataclasses.fields(Memory) if field.name != "rank")


def memory(workload: Workload, cluster: Cluster, stack: Stack, candidates: Candidates) -> Memory:
    """Of every plan, on the pipeline rank that needs most.

    Args:
        workload: what is trained.
        cluster: where; its GPUs' memory is no limit here.
        stack: what the software keeps.
        candidates: P plans.

    Source: Rajbhandari et al. 2020, "ZeRO", section 3 and figure 1 (what each stage shares out); for FSDP2 under a pipeline and the order
        in which it gathers and reduces: torch 2.13, torch/distributed/fsdp/_fully_shard, as ``parallel/pipeline_bytes.py`` derives it.
    """
    order, groups = stage_plans(workload, stack, candidates)
    plans = _Plans.of(workload, stack, candidates.take(order))
    best = {name: np.zeros(len(order)) for name in KINDS} | {"rank": np.zeros(len(order), dtype=np.int64)}
    for stage_plan, place in groups:
        worst = np.full(place.stop - place.start, -1.0)
        here = plans.at(place)
        for rank in stage_plan.telling_ranks():
            found = here.on_rank(stage_plan, rank)
            total = np.sum(list(found.values()), axis=0)
            more = total > worst
            np.copyto(worst, total, where=more)
            best["rank"][place][more] = rank
            for name, value in found.items():
                np.copyto(best[name][place], value, where=more)
    back = np.argsort(order, kind="stable")
    return Memory(**{name: value[back] for name, value in best.items()})


def memory_by_rank(workload: Workload, cluster: Cluster, stack: Stack, candidates: Candidates) -> list[Memory]:
    """Of one plan, one ``Memory`` of length 1 for each pipeline rank, in order.

    Raises:
        ValueError: several plans.
    """
    if len(candidates) != 1:
        raise ValueError(f"candidates: {len(candidates)} plans, and the ranks of one are told apart; take(np.array([i])) chooses one")
    _, ((stage_plan, _),) = stage_plans(workload, stack, candidates)
    plans = _Plans.of(workload, stack, candidates)
    return [Memory(**plans.on_rank(stage_plan, rank), rank=np.array([rank])) for rank in range(stage_plan.ranks)]


@dataclass(frozen=True)
class _Plans:
    """What all ranks of a plan share.

    Args:
        workload, stack, plans: as ``memory`` takes them.
        blocks: bytes of a block of each kind.
        hidden: bytes of the hidden state between blocks, (P,).
        microbatches: of a step, (P,).
        sharded: parameters are kept as shards, bool (P,).
        gathers: they are gathered into tensors of their own, bool (P,).
        adding: whole gradients add up over microbatches in tensors of their own, bool (P,).
    """

    workload: Workload
    stack: Stack
    plans: Candidates
    blocks: tuple[Block, ...]
    hidden: np.ndarray
    microbatches: np.ndarray
    sharded: np.ndarray
    gathers: np.ndarray
    adding: np.ndarray

    @classmethod
    def of(cls, workload: Workload, stack: Stack, plans: Candidates) -> _Plans:
        activations = Activations(workload, stack, plans)
        blocks = tuple(activations.block(kind) for kind in workload.model.kinds)
        microbatches = plans.microbatches(workload.global_batch_size)
        sharded = plans.sharding >= SHARDING.index("gradients")
        gathers = sharded | stack.copies_weights
        adding = (microbatches > 1) & ~plans.reduce_every & gathers
        return cls(workload, stack, plans, blocks, activations.hidden_bytes(), microbatches, sharded, gathers, adding)

    def at(self, place: slice) -> _Plans:
        """Of some plans, without copying."""
        blocks = tuple(Block(block.kept[place], block.working[place], block.buffers[place]) for block in self.blocks)
        columns = (column[place] for column in (self.hidden, self.microbatches, self.sharded, self.gathers, self.adding))
        plans = Candidates(**{name: column[place] for name, column in self.plans.columns().items()})
        return _Plans(self.workload, self.stack, plans, blocks, *columns)

    def on_rank(self, stage_plan: StagePlan, rank: int) -> dict[str, np.ndarray]:
        """Kind -> bytes (P,) on one pipeline rank."""
        held = holdings(self.workload.model, stage_plan, rank, self.plans)
        found = self._states(held)
        flight = in_flight(SCHEDULES[stage_plan.schedule], stage_plan.ranks, stage_plan.stages // stage_plan.ranks, rank, self.microbatches)
        kept = np.zeros(len(self.plans))
        for place, stage in enumerate(stage_plan.stages_of(rank)):
            layer = sum((int(n) * block.kept for n, block in zip(stage_plan.counts[stage], self.blocks, strict=True) if n), np.zeros(1))
            sent = self.hidden if self.stack.receive_all and stage < stage_plan.stages - 1 else 0.0  # torch keeps it for the backward
            kept = kept + flight[place] * (layer + sent)
        zero = np.zeros(len(self.plans))
        here = [block for block, n in zip(self.blocks, held.blocks, strict=True) if n]
        working = np.max([block.working for block in here] or [zero], axis=0)
        moving = np.max([block.buffers for block in here] or [zero], axis=0)
        passing = self._passing_gradients(held)
        logits = self._logits(flight[-1]) if held.last else zero
        late = ~self.adding & (self.microbatches == 1) & self.gathers & self.stack.zeroes_late & (stage_plan.ranks == 1)
        old = np.where(late, self._own(held) * self.stack.precision.gradient_bytes, 0.0)
        at_loss = logits + old > working + moving + passing
        found["gradients"] = found["gradients"] + np.where(at_loss, old, 0.0)
        found["unsharded"] = found["unsharded"] + np.where(at_loss, 0.0, passing) - self._before_any_backward(held, flight, kept)
        each = self.microbatches if self.stack.receive_all else 2
        found |= {
            "activations": kept,
            "working": np.where(at_loss, 0.0, working),
            "logits": np.where(at_loss, logits, 0.0),
            "buffers": np.where(at_loss, 0.0, moving) + stage_plan.boundaries(rank) * self.hidden * each,
            "reserve": np.full(len(self.plans), float(self.stack.reserve_bytes)),
        }
        return self._at_the_end(found, held)

    def _logits(self, flight: np.ndarray) -> np.ndarray:
        """The last norm's output and its gradient, and logits. A loss in chunks makes the head's gradient in the forward, in float32 or
        wider, and keeps it until the backward: as many as microbatches are in flight."""
        model, stack, plans = self.workload.model, self.stack, self.plans
        tokens = plans.microbatch_size * self.workload.sequence_length / plans.cp
        row = tokens * model.hidden_size * stack.precision.compute_bytes
        weight = model.head[-1].inputs * model.head[-1].outputs / plans.tp
        if stack.loss_chunk is None:
            each = np.where(plans.tp > 1, self._of_a_logit(stack.split_logit_bytes), self._of_a_logit(stack.logit_bytes))
            gradient = np.where(self.gathers, 0.0, stack.weight_gradient_bytes) * weight  # before it is added to a buffer that is there
            return self.hidden + row + tokens * model.vocab_size / plans.tp * each + gradient
        kept = self.hidden + row + max(4, stack.precision.compute_bytes) * weight
        logits = np.minimum(tokens, stack.loss_chunk) * model.vocab_size / plans.tp
        return flight * kept + row + logits * self._of_a_logit(stack.logit_bytes)

    def _of_a_logit(self, bytes_: float) -> float:
        """In the stack's numbers, from what 2-byte ones need: wider ones are worked on as they are, without a copy of two bytes beside.

        Source: ops/cross_entropy.py (no cast of float32 or float64 logits); of other software assumed.
        """
        element = self.stack.precision.compute_bytes
        if element == 2 or self.stack.fused_loss:
            return bytes_ * element / 2
        return max(bytes_ - 2, 0) * element / 4

    def _states(self, held: Holding) -> dict[str, np.ndarray]:
        """Parameters, gradients, optimizer state and what of them is whole, while activations are alive."""
        numbers, plans = self.stack.precision, self.plans
        whole, spread, own = held.dense + held.experts, _spread(held, plans), self._own(held)
        gathers, adding = self.gathers, self.adding
        few = held.root + np.minimum(whole - held.root, 3 * held.largest)  # the root, the block at work, the next one, its gather's output
        gathered = np.where(plans.sharding == SHARDING.index("parameters"), few, whole) * numbers.compute_bytes
        # gradients of a single microbatch come after the activations are gone
        there = ~gathers | (~adding & (self.microbatches > 1))
        return {
            "parameters": own * numbers.shard_bytes,
            "gradients": np.where(there, own * numbers.gradient_bytes, 0.0),
            "optimizer": np.where(plans.sharding == SHARDING.index("none"), whole, spread) * numbers.optimizer_bytes,
            "unsharded": np.where(gathers, gathered, 0.0) + np.where(adding, whole * numbers.accumulate_bytes, 0.0),
        }

    def _own(self, held: Holding) -> np.ndarray:
        """Parameters that a rank keeps."""
        return np.where(self.sharded, _spread(held, self.plans), held.dense + held.experts)

    def _before_any_backward(self, held: Holding, flight: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Where all forwards come first there are no whole gradients yet when most is kept, and then a microbatch less is kept."""
        running = flight.sum(0)
        first = self.adding & (running >= self.microbatches * len(flight))
        gradients = (held.dense + held.experts) * self.stack.precision.accumulate_bytes
        return np.where(first, np.minimum(gradients, kept / np.maximum(running, 1)), 0.0)

    def _passing_gradients(self, held: Holding) -> np.ndarray:
        """Whole gradients while a block's backward runs: the head's, which wait for the root's turn, and the block's; or one product's."""
        numbers = self.stack.precision
        wider = numbers.accumulate_bytes > numbers.compute_bytes
        added = (held.head + held.largest) * numbers.compute_bytes * wider  # as one microbatch makes them
        reduced = held.head * numbers.compute_bytes + held.largest * (numbers.compute_bytes + numbers.reduce_bytes)
        passing = np.where(self.adding, added, reduced)
        if self.gathers.all():
            return passing
        product = widest_product(self.workload.model, held, self.plans) * self.stack.weight_gradient_bytes
        return np.where(self.gathers, passing, product)

    def _at_the_end(self, found: dict[str, np.ndarray], held: Holding) -> dict[str, np.ndarray]:
        """The reduction after the last backward needs more where activations are few: the root's gradients twice, beside all others."""
        numbers, plans = self.stack.precision, self.plans
        whole = held.dense + held.experts
        all_of_it = (whole - held.root) * numbers.compute_bytes + whole * numbers.accumulate_bytes
        all_of_it = all_of_it + held.root * numbers.reduce_bytes * (1 + 1 / plans.fsdp)
        one_by_one = (
            found["activations"] / np.maximum(held.blocks.sum(), 1)
            + found["working"]
            + self._own(held) * numbers.gradient_bytes
            + held.root * (2 * numbers.compute_bytes + numbers.reduce_bytes)
        )
        then = np.where(self.adding, all_of_it, one_by_one)
        now = found["unsharded"] + found["activations"] + found["working"] + found["logits"] + found["gradients"]
        found["unsharded"] = found["unsharded"] + np.where(self.gathers, np.maximum(then - now, 0.0), 0.0)
        return found


def _spread(held: Holding, plans: Candidates) -> np.ndarray:
    """Parameters of a rank where all ranks share."""
    return held.dense / plans.fsdp + held.experts / plans.expert_shard
