"""How far predictions are from measured runs: errors with their spread, and how well plans of one model are ranked."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Errors:
    """Errors in percent of what was measured.

    Args:
        count: of rows.
        mean: of absolute values.
        median, worst: likewise.
        spread: standard deviation of the signed errors.
        bias: mean of the signed errors; above 0 where predictions are too high.
    """

    count: int
    mean: float
    median: float
    worst: float
    spread: float
    bias: float

    @classmethod
    def of(cls, predicted: Sequence[float], measured: Sequence[float]) -> Errors:
        """Of pairs.

        Raises:
            ValueError: no pair, or a measured value that is not above 0.
        """
        if not measured or min(measured) <= 0:
            raise ValueError(f"measured: {len(measured)} values, the least {min(measured, default=None)}; give at least one, all above 0")
        signed = [100 * (guess / real - 1) for guess, real in zip(predicted, measured, strict=True)]
        absolute = [abs(value) for value in signed]
        spread = statistics.stdev(signed) if len(signed) > 1 else 0.0
        return cls(len(signed), statistics.fmean(absolute), statistics.median(absolute), max(absolute), spread, statistics.fmean(signed))


@dataclass(frozen=True)
class Ranking:
    """How well plans are ranked among those of the same model, GPUs and batch.

    Args:
        groups: with two plans or more.
        tau: mean of Kendall's tau-b of the groups; 1 is the measured order, 0 none.
        regret: mean, in percent: how much longer the plan predicted to be best takes than the plan measured to be.
        worst_regret: of a group.
    """

    groups: int
    tau: float
    regret: float
    worst_regret: float

    @classmethod
    def of(cls, groups: Mapping[Hashable, Sequence[tuple[float, float]]]) -> Ranking | None:
        """From (predicted, measured) seconds of each group's plans; None where no group has two.

        Source: Kendall 1945, "The treatment of ties in ranking problems", Biometrika 33(3), tau-b.
        """
        several = [list(pairs) for pairs in groups.values() if len(pairs) > 1]
        if not several:
            return None
        regrets = [100 * (min(pairs)[1] / min(real for _, real in pairs) - 1) for pairs in several]
        return cls(len(several), statistics.fmean(map(kendall_tau, several)), statistics.fmean(regrets), max(regrets))


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of (predicted, measured); 0 where all of one side are equal."""
    agree = first_ties = second_ties = total = 0
    for (a, x), (b, y) in combinations(pairs, 2):
        one, two = (a > b) - (a < b), (x > y) - (x < y)
        agree += one * two
        first_ties += one == 0
        second_ties += two == 0
        total += 1
    scale = ((total - first_ties) * (total - second_ties)) ** 0.5
    return agree / scale if scale else 0.0
