"""Errors and rankings against values by hand."""

import pytest

from lightning_megascale.planning.accuracy import Errors, Ranking, kendall_tau


def test_errors_by_hand():
    errors = Errors.of([11, 8, 10], [10, 10, 10])
    assert (errors.count, errors.mean, errors.median, errors.worst) == (3, pytest.approx(10), pytest.approx(10), pytest.approx(20))
    assert errors.bias == pytest.approx(-10 / 3) and errors.spread == pytest.approx(15.275, abs=1e-3)
    with pytest.raises(ValueError, match="measured: 1 values, the least 0"):
        Errors.of([1], [0])


def test_tau_counts_pairs_and_ties():
    assert kendall_tau([(1, 1), (2, 2), (3, 3)]) == 1 and kendall_tau([(1, 3), (2, 2), (3, 1)]) == -1
    assert kendall_tau([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)
    assert kendall_tau([(1, 1), (1, 2), (2, 3)]) == pytest.approx(2 / (2 * 3) ** 0.5) and kendall_tau([(1, 1), (1, 2)]) == 0


def test_regret_is_what_the_first_pick_costs():
    ranking = Ranking.of({"a": [(1.0, 12.0), (2.0, 10.0)], "b": [(1.0, 5.0), (2.0, 6.0)], "c": [(1.0, 1.0)]})
    assert ranking is not None and ranking.groups == 2
    assert ranking.regret == pytest.approx(10) and ranking.worst_regret == pytest.approx(20) and ranking.tau == 0
    assert Ranking.of({"c": [(1.0, 1.0)]}) is None
