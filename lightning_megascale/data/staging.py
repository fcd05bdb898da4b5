"""A run's stages as a recipe writes them -> the schedule of its positions; and whether two lists of stages agree up to a position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from lightning_megascale.data.schedule import Schedule
from lightning_megascale.data.shuffle import SourceOrder
from lightning_megascale.data.stages import Stage, normalised, whole
from lightning_megascale.data.token_clock import Lengths, TokenClock, TokenSchedule, TokenStage

UNITS = ("samples", "tokens", "steps")
_KEYS = ("name", "until", "mix", "ramp")
_TRAINING = ("freeze", "lr", "init_from")  # of the same list, for whoever trains


@dataclass(frozen=True)
class StageSpec:
    """A stage as written.

    Args:
        name: unique.
        mix: weights, as in ``stages.Stage``.
        unit: "samples", "tokens" or "steps"; None for a last stage without end.
        amount: its length in ``unit``.
        ramp: how long the mix moves from the stage before, in ``unit`` (samples in an endless stage).
    """

    name: str
    mix: Mapping[str, Any]
    unit: str | None = None
    amount: int | None = None
    ramp: int = 0


def read_stages(stages: Sequence[Mapping[str, Any]]) -> list[StageSpec]:
    """``{name, until: {samples or tokens or steps: n}, mix: {source: weight}, ramp}`` in order; ``freeze``, ``lr`` and ``init_from`` pass.

    Raises:
        ValueError: for a key that is none of these (with the nearest), a stage without a name or mix, or another ``until``.
    """
    found = []
    for number, stage in enumerate(stages):
        where = f"stages[{number}]"
        if not isinstance(stage, Mapping):
            raise ValueError(f"{where}={stage!r}: must be a mapping {{name, until, mix, ramp}}")
        for key in stage:
            if key not in _KEYS + _TRAINING:
                near = get_close_matches(str(key), _KEYS + _TRAINING, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(f"{where} has the key {key!r}: {hint}keys of a stage are {', '.join(_KEYS + _TRAINING)}")
        if "name" not in stage or not isinstance(stage.get("mix"), Mapping):
            raise ValueError(f"{where} has {', '.join(map(str, stage)) or 'no keys'}: give it a name and a mix {{source: weight}}")
        unit, amount = _until(f"stage {stage['name']!r}", stage.get("until"))
        ramp = whole(f"stage {stage['name']!r}: ramp", stage.get("ramp") or 0, 0)
        found.append(StageSpec(stage["name"], dict(stage["mix"]), unit, amount, ramp))
    return found


def _until(where: str, until: Any) -> tuple[str | None, int | None]:
    if until is None:
        return None, None
    if not isinstance(until, Mapping) or len(until) != 1 or next(iter(until)) not in UNITS:
        raise ValueError(
            f"{where}: until={until!r} must be {{samples: n}}, {{tokens: n}} or {{steps: n}}; left out in an endless last stage"
        )
    unit, amount = next(iter(until.items()))
    return str(unit), whole(f"{where}: until.{unit}", amount, 1)


def make_schedule(
    specs: Sequence[StageSpec],
    weights: str,
    orders: Mapping[str, SourceOrder],
    lengths: Callable[[str], Lengths],
    step_samples: int | None,
) -> Schedule:
    """The schedule of a run.

    Args:
        specs: its stages.
        weights: what the weights of a mix count, "samples" or "tokens".
        orders: of each source, without lanes.
        lengths: source -> its tokens by shard and row; asked only where tokens are counted.
        step_samples: samples of an optimizer step; None where it is not known (packed rows, no trainer).

    A stage of so many tokens ends with the first sample that reaches them; where weights count samples, by the order without lanes
    (with lanes, rows inside a shuffle window trade places, so the sum may differ by what a window's end moves).

    Raises:
        ValueError: as ``Schedule``; for steps where a step has no fixed number of samples.
    """
    sources = sorted(orders)
    for spec in specs:
        if spec.unit == "steps" and step_samples is None:
            raise ValueError(
                f"stage {spec.name!r}: until.steps={spec.amount}, and a step has no known number of samples: with packing give tokens "
                "(steps x global batch size x sequence_length), without a trainer steps_per"
            )
    if weights == "tokens":
        used = sorted({name for spec in specs for name in normalised(spec.name, spec.mix, sources)})
        stages = [_token_stage(spec, step_samples) for spec in specs]
        return TokenSchedule(stages, {name: orders[name] for name in used}, {name: lengths(name) for name in used}, sources)
    plain: list[Stage] = []
    clocks: dict[str, TokenClock] = {}
    for spec in specs:
        length, ramp = _in_samples(spec, step_samples)
        if spec.unit == "tokens":
            length, ramp = _reached(spec, plain, clocks, orders, lengths, sources)
        plain.append(Stage(spec.name, length, spec.mix, ramp))
    return Schedule(plain, sources)


def _in_samples(spec: StageSpec, step_samples: int | None) -> tuple[int | None, int]:
    times = (step_samples or 1) if spec.unit == "steps" else 1
    return (None if spec.amount is None else spec.amount * times), spec.ramp * times


def _token_stage(spec: StageSpec, step_samples: int | None) -> Stage:
    if spec.unit == "tokens":
        return TokenStage(spec.name, None, spec.mix, spec.ramp, tokens=spec.amount)
    if spec.ramp:
        raise ValueError(
            f"stage {spec.name!r}: ramp={spec.ramp} {spec.unit or 'samples'}, and weights='tokens' counts ramps in tokens: use until.tokens"
        )
    return TokenStage(spec.name, _in_samples(spec, step_samples)[0], spec.mix)


def _reached(
    spec: StageSpec,
    before: Sequence[Stage],
    clocks: dict[str, TokenClock],
    orders: Mapping[str, SourceOrder],
    lengths: Callable[[str], Lengths],
    sources: Sequence[str],
) -> tuple[int, int]:
    """Samples of a stage of so many tokens whose weights count samples, and of its ramp."""
    assert spec.amount is not None

    def ended(ramp: int, tokens: int) -> int:
        schedule = Schedule([*before, Stage(spec.name, None, spec.mix, ramp)], sources)
        for name in schedule.sources:
            if name not in clocks:
                clocks[name] = TokenClock(orders[name], lengths(name))
        start = schedule.stage_start(len(before))

        def total(n: int) -> int:
            return sum(clocks[name].tokens(count) for name, count in zip(schedule.sources, schedule.counts(n)))

        first, low, high = total(start), 0, 1
        while total(start + high) - first < tokens:
            low, high = high, 2 * high
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if total(start + middle) - first >= tokens else (middle + 1, high)
        return low

    if spec.ramp > spec.amount:
        raise ValueError(f"stage {spec.name!r}: ramp={spec.ramp} is longer than its tokens={spec.amount}; shorten the ramp")
    ramp = ended(0, spec.ramp) if spec.ramp else 0  # by the mix it leads to: close, and a rule that is easy to say
    return max(ended(ramp, spec.amount), ramp), ramp


def agree_until(old: Sequence[Sequence[Any]], new: Sequence[Sequence[Any]], position: int) -> bool:
    """Whether two runs, each as (samples or None, mix, ramp) by stage, hold the same rows up to ``position``.

    A schedule starts anew at every stage and looks at no later one, so they do while their stages are equal, and inside of one that
    differs in its length only, up to the shorter end.
    """
    start = 0
    for before, after in zip(old, new):
        if list(before[1:]) != list(after[1:]):
            return start >= position
        ends = [start + stage[0] for stage in (before, after) if stage[0] is not None]
        if before[0] != after[0] or not ends:
            return not ends or position <= min(ends)
        start = ends[0]
    return start >= position
