"""Stages and mixes as a user writes them, checked, and as stretches of constant exact weights.

A ramp is a staircase of at most RAMP_LEVELS mixes, each the true line's at the middle of its step (at most R dw / (8 levels^2) samples
from the line itself, for R samples and a change dw of weight).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

RAMP_LEVELS = 64
_DIGITS = 40  # a weight's decimal exponent


@dataclass(frozen=True)
class Stage:
    """A stretch of the run with one mix.

    Args:
        name: unique among the stages.
        samples: positions it lasts; None only in the last stage, which then never ends.
        mix: weight of every source, in any scale; a group may be a dict with its ``share`` and its own sources (``nested``).
        ramp: samples over which the mix moves in a straight line from the stage before; counted in ``samples``.
    """

    name: str
    samples: int | None
    mix: Mapping[str, Any]
    ramp: int = 0


class Segment(NamedTuple):
    """A stretch of constant mix (weights sum to one, none is zero); ``length`` None: endless."""

    stage: int
    length: int | None
    mix: dict[str, Fraction]


def nested(weights: Mapping[str, Any]) -> dict[str, Fraction]:
    """Groups of sources as flat weights: ``{"text": 0.1, "chat": {"share": 0.9, "a": 0.25, "b": 0.75}}`` -> text 0.1, a 0.225, b 0.675.

    A group's share is divided among its members by their weights, whatever these sum to; groups nest. Exact.

    Raises:
        ValueError: a weight that is no number >= 0, a group without share or without members of any weight, a source named twice.
    """
    flat: dict[str, Fraction] = {}
    for name, value in weights.items():
        if not isinstance(name, str) or not name or name == "share":
            raise ValueError(
                f"mix: {name!r} is no name of a source or group; 'share' stands only inside a group: {{name: {{share: 0.9, ...}}}}"
            )
        if not isinstance(value, Mapping):
            found = {name: _fraction(name, value)}
        else:
            if "share" not in value:
                raise ValueError(
                    f"mix: the group {name!r} has no share; add share: its weight beside {', '.join(map(repr, value)) or 'its sources'}"
                )
            share, inner = _fraction(f"{name}.share", value["share"]), nested({k: v for k, v in value.items() if k != "share"})
            total = sum(inner.values(), Fraction(0))
            if not total:
                raise ValueError(f"mix: the group {name!r} has no source with a weight above zero; give one, or take the group out")
            found = {k: share * v / total for k, v in inner.items()}
        for source, weight in found.items():
            if source in flat:
                raise ValueError(f"mix: the source {source!r} is named twice; give it one weight, the sum of both")
            flat[source] = weight
    return flat


def _fraction(name: str, value: Any) -> Fraction:
    """A weight by its decimal text, so that 0.405 is 405/1000."""
    rule = f"mix: the weight of {name!r} is {value!r}, but must be a number >= 0; write it as a decimal number such as 0.45"
    if isinstance(value, bool):
        raise ValueError(rule)
    if isinstance(value, Fraction):
        number = value
    else:
        try:
            text = Decimal(str(value))
        except InvalidOperation:
            raise ValueError(rule) from None
        if not text.is_finite() or (text and abs(text.adjusted()) > _DIGITS):
            raise ValueError(rule)
        number = Fraction(text)
    if number < 0:
        raise ValueError(rule)
    return number


def normalised(stage: str, mix: Any, known: Sequence[str] | None = None) -> dict[str, Fraction]:
    """The flat weights of a stage's mix, summing to one (zeros kept).

    Raises:
        ValueError: a mix that is empty, all zero, or names a source that is not ``known``; what ``nested`` refuses.
    """
    if not isinstance(mix, Mapping) or not mix:
        raise ValueError(f"stage {stage!r}: mix={mix!r} names no source; write mix: {{source: weight}}")
    try:
        flat = nested(mix)
    except ValueError as error:
        raise ValueError(f"stage {stage!r}: {error}") from None
    for name in flat:
        if known is not None and name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the sources are {', '.join(map(repr, known))}"
            raise ValueError(f"stage {stage!r}: mix names {name!r}, which is no source; {hint}")
    total = sum(flat.values(), Fraction(0))
    if not total:
        raise ValueError(f"stage {stage!r}: all weights of mix are zero; give at least one source a weight above zero")
    return {name: weight / total for name, weight in flat.items()}


def whole(what: str, value: Any, least: int) -> int:
    """A whole number >= ``least``; refuses everything else, True and 1.0 included."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{what}={value!r} must be a whole number >= {least}; write the digits, as 1000000 for a million")
    return int(value)


def check_names(stages: Sequence[Stage]) -> None:
    """Refuses an empty list of stages, nameless ones, a name given twice, and a ramp into the first stage."""
    if not stages:
        raise ValueError("stages=[] is empty; give at least one stage: {name, samples, mix}")
    names = [stage.name for stage in stages]
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise ValueError(f"stages[{number}].name={name!r} must be a text that is not empty; name the stage")
        if name in names[:number]:
            raise ValueError(
                f"stages[{number}].name={name!r} is also the name of stages[{names.index(name)}]; give every stage its own name"
            )
        whole(f"stage {name!r}: ramp", stages[number].ramp, 0)
    if stages[0].ramp:
        raise ValueError(f"stage {names[0]!r}: ramp={stages[0].ramp}, but the first stage has none before it; take the ramp out")


def segments_of(stage: int, length: int | None, ramp: int, before: dict[str, Fraction], mix: dict[str, Fraction]) -> list[Segment]:
    """A stage as stretches of constant mix: the steps of its ramp, then what remains."""

    def part(amount: int | None, weights: dict[str, Fraction]) -> Segment:
        return Segment(stage, amount, {name: weight for name, weight in weights.items() if weight})

    found, levels = [], min(RAMP_LEVELS, ramp)
    for level in range(levels):
        way = Fraction(2 * level + 1, 2 * levels)
        both = {name: before.get(name, Fraction(0)) * (1 - way) + mix.get(name, Fraction(0)) * way for name in {*before, *mix}}
        found.append(part((level + 1) * ramp // levels - level * ramp // levels, both))
    # also where nothing is left of it: a stage that ends with its ramp must not be ordered otherwise than one that goes on
    found.append(part(None if length is None else length - ramp, mix))
    return found


def runs(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Neighbouring segments of the same stage with the same set of sources, together."""
    found: list[list[Segment]] = []
    for segment in segments:
        if found and found[-1][-1].stage == segment.stage and found[-1][-1].mix.keys() == segment.mix.keys():
            found[-1].append(segment)
        else:
            found.append([segment])
    return found
