"""When each pipeline rank works on which microbatch: a schedule's order of forwards and backwards, played with given durations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_megascale.planning.stages import stage_owners
from lightning_megascale.support import LOOPED_SCHEDULES, V_SCHEDULES, ZERO_BUBBLE_SCHEDULES

Kind = Literal["forward", "backward", "inputs", "weights"]


@dataclass(frozen=True)
class Piece:
    """One piece of work.

    Args:
        rank, stage, microbatch: whose, where, which.
        kind: "forward", "backward", or its two halves "inputs" and "weights" under a zero-bubble schedule.
        start, end: seconds.
    """

    rank: int
    stage: int
    microbatch: int
    kind: Kind
    start: float
    end: float


def timeline(
    schedule: str,
    *,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
    forward: Sequence[float],
    backward_inputs: Sequence[float],
    backward_weights: Sequence[float],
) -> list[Piece]:
    """Every piece of one step, in order of its start.

    A rank takes, of what is ready, what its schedule puts first, and waits only when nothing is: for GPipe, 1F1B and Interleaved1F1B that
    is the order of their papers; zero-bubble schedules put gradients of inputs first, then forwards while few enough are in flight, and
    fill the rest with gradients of weights, which is their idea and not their exact order.

    Args:
        schedule: torch's name.
        ranks, stages_per_rank, microbatches: of the plan.
        forward, backward_inputs, backward_weights: seconds of each stage for a microbatch, one for each of ranks x stages_per_rank.

    Raises:
        ValueError: durations of another number of stages.

    Source: Huang et al. 2019, "GPipe", figure 2; Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters
        using Megatron-LM", figures 3 and 4; Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.
    """
    stages = ranks * stages_per_rank
    if not len(forward) == len(backward_inputs) == len(backward_weights) == stages:
        raise ValueError(f"durations of {len(forward)} stages; the plan has {ranks} x {stages_per_rank} = {stages}")
    split = schedule in ZERO_BUBBLE_SCHEDULES
    seconds = {"forward": forward, "inputs": backward_inputs, "weights": backward_weights}
    seconds["backward"] = [first + second for first, second in zip(backward_inputs, backward_weights, strict=True)]
    owners = stage_owners(stages, ranks, schedule).tolist()
    orders = [_order(schedule, rank, ranks, stages_per_rank, microbatches) for rank in range(ranks)]
    back: Kind = "inputs" if split else "backward"
    ready: dict[tuple[str, int, int], float] = {("forward", 0, number): 0.0 for number in range(microbatches)}
    free = [0.0] * ranks
    waiting: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]  # gradients of weights that are put off
    pieces: list[Piece] = []

    def work(rank: int, kind: Kind, stage: int, number: int, start: float) -> None:
        end = start + seconds[kind][stage]
        pieces.append(Piece(rank, stage, number, kind, start, end))
        free[rank] = end
        if kind == "forward":
            ready[("forward", stage + 1, number) if stage + 1 < stages else (back, stage, number)] = end
        elif kind == back:
            if stage:
                ready[back, stage - 1, number] = end
            if split:
                waiting[rank].append((stage, number))

    assert max(owners) == ranks - 1
    while any(orders) or any(waiting):
        options = []
        for rank in range(ranks):
            step = _next(orders[rank], ready, back, split, free[rank])
            if step is not None:
                options.append((max(free[rank], ready[step]), rank, step))
        soon = min(options) if options else None
        fill = [(free[rank], rank) for rank in range(ranks) if waiting[rank]]
        if fill and (soon is None or _fills(min(fill), options, seconds, waiting)):
            start, rank = min(fill)
            stage, number = waiting[rank].pop(0)
            work(rank, "weights", stage, number, start)
            continue
        assert soon is not None, "a schedule whose next piece is never ready"
        start, rank, step = soon
        orders[rank].remove((step[0], step[1], step[2]))
        work(rank, step[0], step[1], step[2], start)  # type: ignore[arg-type]
    return sorted(pieces, key=lambda piece: (piece.start, piece.rank))


def _fills(
    place: tuple[float, int],
    options: list[tuple[float, int, tuple[str, int, int]]],
    seconds: dict[str, Sequence[float]],
    waiting: list[list[tuple[int, int]]],
) -> bool:
    """Whether the rank that is free first has time for a gradient of weights before its next piece is ready."""
    free, rank = place
    own = [start for start, owner, _ in options if owner == rank]
    soonest = min((start for start, _, _ in options), default=float("inf"))
    stage = waiting[rank][0][0]
    return free <= soonest and (not own or own[0] - free >= seconds["weights"][stage] * 0.999)


Step = tuple[str, int, int]


def _next(order: list[Step], ready: dict[Step, float], back: str, split: bool, free: float) -> Step | None:
    """The next piece of a rank: the first of its order, or under a zero-bubble schedule the first that is ready before it."""
    if not order:
        return None
    if order[0] in ready and (not split or ready[order[0]] <= free):
        return order[0]
    if not split:
        return None
    early = [step for step in order[: 1 + 2 * len(ready)] if step in ready]
    backs = [step for step in early if step[0] == back]
    if not early:
        return None
    return min(backs or early[:1], key=lambda step: ready[step])


def _order(schedule: str, rank: int, ranks: int, each: int, microbatches: int) -> list[Step]:
    """A rank's pieces in the order of its schedule."""
    split = schedule in ZERO_BUBBLE_SCHEDULES
    back = "inputs" if split else "backward"
    if schedule in V_SCHEDULES:
        own = [rank, 2 * ranks - 1 - rank]
        forwards = [("forward", stage, number) for number in range(microbatches) for stage in own]
        backwards = [(back, stage, number) for number in range(microbatches) for stage in reversed(own)]
        return _alternate(forwards, backwards, 2 * (ranks - rank) - 1)
    own = list(range(rank, ranks * each, ranks))
    rounds = max(1, microbatches // ranks) if schedule in LOOPED_SCHEDULES else 1
    size = microbatches // rounds if schedule in LOOPED_SCHEDULES else microbatches
    groups = [range(start, min(start + size, microbatches)) for start in range(0, microbatches, size)]
    forwards = [("forward", stage, number) for group in groups for stage in own for number in group]
    backwards = [(back, stage, number) for group in groups for stage in reversed(own) for number in group]
    if schedule == "GPipe":
        return forwards + backwards
    warm = ranks - rank if each == 1 else (each - 1) * size + 2 * (ranks - 1 - rank) + 1
    return _alternate(forwards, backwards, warm)


def _alternate(forwards: list[Step], backwards: list[Step], warm: int) -> list[Step]:
    """``warm`` forwards, then a backward and a forward in turn, then the rest."""
    warm = min(warm, len(forwards))
    order = forwards[:warm]
    rest = forwards[warm:]
    for index, step in enumerate(backwards):
        order.append(step)
        order += rest[index : index + 1]
    return order
