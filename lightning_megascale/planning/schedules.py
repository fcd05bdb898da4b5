"""Seconds of a pipeline schedule: how long the busiest rank works, and how long it waits (the bubble).

Closed forms for stages of unlike cost, held against an event simulation in tests. N is the number of plans, S of stages, all plans of a
call having as many; ranks own stages as ``stage_owners`` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_megascale.planning.stages import stage_owners
from lightning_megascale.support import V_SCHEDULES, ZERO_BUBBLE_SCHEDULES


@dataclass(frozen=True)
class Stages:
    """Seconds of each stage for one microbatch. All (N, S).

    Args:
        forward: with what it waits for links.
        backward_inputs: the part of the backward that the stage before waits for; all of it but for zero-bubble schedules.
        backward_weights: the part that may be put off.
    """

    forward: np.ndarray
    backward_inputs: np.ndarray
    backward_weights: np.ndarray

    @property
    def backward(self) -> np.ndarray:
        return self.backward_inputs + self.backward_weights

    @property
    def each(self) -> np.ndarray:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Makespan:
    """Of a pipeline.

    Args:
        bubble: seconds that the busiest rank waits; (N,).
        rank: which one it is, int (N,).
    """

    bubble: np.ndarray
    rank: np.ndarray


def rank_seconds(values: np.ndarray, ranks: int, schedule: str) -> np.ndarray:
    """Sums over the stages of each rank: (N, S) -> (N, ranks)."""
    owners = stage_owners(values.shape[1], ranks, schedule)
    return np.stack([values[:, owners == rank].sum(1) for rank in range(ranks)], axis=1)


def makespan(schedule: str, stages: Stages, ranks: int, microbatches: np.ndarray) -> Makespan:
    """The time of one step's microbatches.

    Args:
        schedule: a name of ``SCHEDULES``.
        stages: seconds.
        ranks: of the pipeline, a divisor of S.
        microbatches: int (N,).

    Source: Huang et al. 2019, "GPipe", section 2.3, and Narayanan et al. 2021, sections 2.2.1 and 2.2.2: for p equal stages and m
        microbatches (m + p - 1) (F + B), and (p - 1) (F + B) / v waited with v stages on a rank. With unlike stages the busiest one works
        through all microbatches, and the first waits for every other stage once. Qi et al. 2023, "Zero bubble pipeline parallelism",
        table 1: ZB-H1 waits (p - 1) (F + B - W), with B the inputs' part. ZB-V is not the paper's (section 6: F + B - 2 W): its figure is
        fitted to the order that torch makes, in tests/planning/test_schedules.py.
    """
    load = rank_seconds(stages.each, ranks, schedule)
    rank = load.argmax(1)
    busiest = load.max(1)
    virtual = stages.each.shape[1] // ranks
    if schedule == "GPipe":
        # Each half is a line of equal jobs: the sum of all stages for the first, and the slowest stage for each that follows.
        total = sum(part.sum(1) + (microbatches - 1) * part.max(1) for part in (stages.forward, stages.backward))
        return Makespan(total - microbatches * busiest, rank)
    if schedule in ZERO_BUBBLE_SCHEDULES:
        bubble = _zero_bubble(schedule, stages, ranks, virtual, microbatches)
    else:
        bubble = (stages.each.sum(1) - busiest) / virtual
    if schedule == "Interleaved1F1B":
        bubble = bubble * _round(microbatches, ranks) / ranks
    return Makespan(np.maximum(bubble, 0.0), rank)


def _round(microbatches: np.ndarray, ranks: int) -> np.ndarray:
    """Microbatches that a rank puts through one of its stages before it turns to the next; torch: m // max(1, m // p)."""
    return microbatches // np.maximum(1, microbatches // ranks)


def _zero_bubble(schedule: str, stages: Stages, ranks: int, virtual: int, microbatches: np.ndarray) -> np.ndarray:
    """Seconds waited when the weights' gradients fill gaps: what one rank waits for the others, less what it can put off."""
    others = (ranks - 1) / ranks
    forward, inputs, weights = (
        part.sum(1) / virtual * others for part in (stages.forward, stages.backward_inputs, stages.backward_weights)
    )
    if schedule not in V_SCHEDULES:
        return np.maximum(forward + inputs - weights, 0.0)
    # Fitted to the order that torch makes, which starts the last rank (p - 1) F late and ends the others so early; with fewer than
    # 2 p - 1 microbatches some slots stay empty too. Values of F, I and W from 0.5 to 2 in tests.
    missing = np.maximum(2 * ranks - 1 - microbatches, 0) / max(ranks - 1, 1)
    return np.maximum(inputs, 2 * (inputs - weights)) + missing * inputs
