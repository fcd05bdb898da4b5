"""Linear extension: what few layers and microbatches give, as what many give. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

Figures = Mapping[Hashable, int]
"""Name of a figure -> its value; what is missing is 0."""


def round_of(microbatches: int, pipeline_ranks: int) -> int:
    """Microbatches of one round of a schedule of several stages on each rank: steps of whole rounds are alike.

    Source: torch.distributed.pipelining.schedules, ScheduleInterleaved1F1B (rounds = max(1, microbatches // ranks)), whose rule holds for
        the zero-bubble schedules too.
    """
    return microbatches // max(1, microbatches // pipeline_ranks)


def traced_microbatches(microbatches: int, pipeline_ranks: int, rounds: int | None) -> tuple[int, ...]:
    """How many microbatches to trace: two numbers from which on every further microbatch, or round of them, adds the same; all of them
    where that is no less, or where rounds would be cut otherwise.

    Args:
        microbatches, pipeline_ranks: of a step.
        rounds: after which as much is kept as ever; None: single microbatches are alike, once there is one more than ranks.
    """
    if rounds is None:
        few = (pipeline_ranks + 1, pipeline_ranks + 2)
        return few if microbatches > few[1] else (microbatches,)
    unit = round_of(microbatches, pipeline_ranks)
    few = (rounds * unit, (rounds + 1) * unit)
    alike = microbatches % unit == 0 and all(round_of(count, pipeline_ranks) == unit for count in few)
    return few if alike and microbatches > few[1] else (microbatches,)


def line(low: Figures, high: Figures, steps: int, taken: int) -> dict[Hashable, int]:
    """The figures ``taken`` steps after ``low``, when ``high`` is ``steps`` after it. Exact where a step adds a whole number."""
    names = [*low, *(name for name in high if name not in low)]
    return {name: low.get(name, 0) + (high.get(name, 0) - low.get(name, 0)) * taken // steps for name in names}


def added(base: Figures, *changes: tuple[Figures, int, int]) -> dict[Hashable, int]:
    """``base`` plus what each of several kinds of layer adds.

    Args:
        base: of the fewest layers.
        changes: (figures with ``steps`` more layers of one kind, steps, layers of the kind to add).
    """
    result = dict(base)
    for high, steps, taken in changes:
        for name, value in line(base, high, steps, taken).items():
            result[name] = result.get(name, 0) + value - base.get(name, 0)
    return result
