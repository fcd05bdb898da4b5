"""Seconds of what data-parallel ranks share: gathered parameters, reduced gradients and the optimizer, and how much of it shows.

P is the number of plans; figures are float64 (P,), of the pipeline rank that works longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_megascale.planning.candidates import SHARDING, Candidates
from lightning_megascale.planning.collectives import Links
from lightning_megascale.planning.cuts import distinct
from lightning_megascale.planning.kernels import Rates, traffic_seconds
from lightning_megascale.planning.stack import Stack


@dataclass(frozen=True)
class Held:
    """What a rank holds before it is shared out. All (P,).

    Args:
        dense: parameters that are no experts, a tensor-parallel part of them.
        experts: parameters of its experts.
        units: collectives that move all of it once.
    """

    dense: np.ndarray
    experts: np.ndarray
    units: np.ndarray


@dataclass(frozen=True)
class Work:
    """Seconds of one microbatch behind which communication hides: forward and backward, (P,)."""

    forward: np.ndarray
    backward: np.ndarray


@dataclass(frozen=True)
class Traffic:
    """Seconds of moving everything a rank holds once: parameters gathered, gradients reduced. All (P,)."""

    gather: np.ndarray
    reduce: np.ndarray
    replicas: np.ndarray

    @classmethod
    def of(cls, held: Held, plans: Candidates, strides: Mapping[str, np.ndarray], links: Links, stack: Stack) -> Traffic:
        """Gather and reduce-scatter over the ranks that share one copy, all-reduce over those that hold equal parts.

        Source: Rajbhandari et al. 2020, "ZeRO", section 7 (volumes); Zhao et al. 2023, "PyTorch FSDP", section 3.2.2 (hybrid sharding:
            reduce-scatter in the group, all-reduce of the part between groups).
        """
        none = plans.sharding == SHARDING.index("none")
        stride = np.minimum(strides["cp"], strides["dp_shard"])
        size = np.where(none, 1, plans.fsdp)
        replicas = np.where(none, plans.dp * plans.cp, plans.dp_replicate)
        outer = np.where(none, stride, strides["dp_replicate"])
        inner = _line(links, size, stride, held.dense, held.units)
        step = strides["tp"] * plans.expert_owners  # between ranks with the same experts
        apart = _line(links, np.where(none, 1, plans.expert_shard), step, held.experts, held.units * (held.experts > 0))
        many = np.where(none, plans.expert_shard * plans.dp_replicate, plans.dp_replicate)
        wide = np.where(none, step, strides["dp_replicate"])
        shard, others = held.dense / size, held.experts / np.where(none, 1, plans.expert_shard)
        across = _all_reduce(links, replicas, outer, shard * stack.precision.reduce_bytes)
        across += np.where(others > 0, _all_reduce(links, many, wide, others * stack.precision.reduce_bytes), 0.0)
        gather, reduce = stack.precision.gather_bytes, stack.precision.reduce_bytes
        return cls(
            inner[0] * gather + inner[1] + apart[0] * gather + apart[1],
            inner[0] * reduce + inner[1] + apart[0] * reduce + apart[1],
            across,
        )


def exposed_seconds(traffic: Traffic, work: Work, plans: Candidates, stack: Stack, microbatches: np.ndarray) -> np.ndarray:
    """Communication of parameters and gradients in a step that nothing hides, (P,).

    Fully sharded parameters are gathered for each forward and each backward. Parameters that are kept are gathered once; with sharded
    optimizer state alone, after the step. Gradients are reduced in the last microbatch, or in each. Under a pipeline torch reduces after
    the last microbatch.

    Source: torch.distributed.fsdp.fully_shard and torch.distributed.pipelining (the schedules' UNSHARD and REDUCE_GRAD actions).
    """
    fully = plans.sharding == SHARDING.index("parameters")
    piped = plans.pp > 1
    every = plans.reduce_every & (plans.sharding >= SHARDING.index("gradients"))
    hides = np.where(piped, stack.overlap_piped, True) & stack.overlap_data
    last = _shown(fully * traffic.gather + hides * (traffic.reduce + traffic.replicas), work.backward, stack)
    last = last + ~hides * (traffic.reduce + traffic.replicas)
    early = _shown(fully * traffic.gather + every * traffic.reduce, work.backward, stack)
    forwards = np.where(fully, microbatches, 1) * _shown(traffic.gather, work.forward, stack)
    return forwards + (microbatches - 1) * early + last


def copy_seconds(held: Held, plans: Candidates, rates: Rates, stack: Stack, microbatches: np.ndarray) -> np.ndarray:
    """Of bringing parameters and gradients in and out of the buffers that collectives use, for all gathers and reductions. (P,)

    A gather's result is copied into parameters where the stack does so (read and written); a gradient is read, and written in the
    type of the reduction. Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (copy-out, copy-in).
    """
    precision, fully = stack.precision, plans.sharding == SHARDING.index("parameters")
    shared = plans.sharding >= SHARDING.index("gradients")
    gathers = np.where(fully, 2 * microbatches, 1) * (2 * precision.gather_bytes if stack.copies_gathered else 0)
    reductions = np.where(plans.reduce_every, microbatches, 1) * (precision.compute_bytes + precision.reduce_bytes)
    return traffic_seconds(rates, np.where(shared, (held.dense + held.experts) * (gathers + reductions), 0.0))


def optimizer_seconds(held: Held, plans: Candidates, rates: Rates, stack: Stack) -> np.ndarray:
    """Of the update, by memory: parameters and state are read and written; gradients read twice (norm, update) and cleared. (P,)"""
    shared = plans.sharding > SHARDING.index("none")
    kept = held.dense / np.where(shared, plans.fsdp, 1) + held.experts / np.where(shared, plans.expert_shard, 1)
    precision = stack.precision
    return traffic_seconds(rates, kept * (2 * precision.shard_bytes + 3 * precision.gradient_bytes + 2 * precision.optimizer_bytes))


def _shown(sent: np.ndarray, work: np.ndarray, stack: Stack) -> np.ndarray:
    """What is left of ``sent`` when as much as the stack hides, and no more than there is work, runs beside it."""
    return sent - np.minimum(sent * stack.hidden_share, work) if stack.overlap_data else sent


def _line(links: Links, size: np.ndarray, stride: np.ndarray, numbers: np.ndarray, calls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(Seconds for each byte of a number, of all numbers; seconds of latency) of so many rings that move all numbers between them."""
    (sizes, strides), places = distinct(size, stride)
    latency = links.ring_seconds(0.0, sizes, strides)
    slope = (links.ring_seconds(1e9, sizes, strides) - latency) / 1e9
    return numbers * slope[places], calls * latency[places]


def _all_reduce(links: Links, size: np.ndarray, stride: np.ndarray, bytes_: np.ndarray) -> np.ndarray:
    """Of so many bytes in few large calls."""
    (sizes, strides), places = distinct(size, stride)
    latency = links.all_reduce_seconds(0.0, sizes, strides)
    slope = (links.all_reduce_seconds(1e9, sizes, strides) - latency) / 1e9
    return bytes_ * slope[places] + latency[places]
