"""Bytes a layer keeps for its backward equal the formulas, to the byte; and what it pays for that: the collectives of its backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.benchmarks.activation_bytes import KINDS, MODES, TARGETS, formula, kept_per_layer
from tests.harness import run_ranks

DTYPES = (torch.float64, torch.float32)
Measured = dict[tuple[str, str | None, torch.dtype], tuple[int, dict[str, int]]]


def _everything() -> Measured:
    return {(kind, mode, dtype): kept_per_layer(kind, "ours", mode, dtype) for kind in KINDS for mode in MODES for dtype in DTYPES}


@pytest.fixture(scope="module")
def two_ranks() -> list[Measured]:
    return run_ranks(_everything, 2, timeout=200)


def _check(ranks: list[Measured], tp: int) -> None:
    for measured in ranks:
        assert {case: kept for case, (kept, _) in measured.items()} == {
            (kind, mode, dtype): formula(kind, mode, tp, dtype) for kind, mode, dtype in measured
        }


def test_bytes_equal_the_formulas_on_two_ranks(two_ranks: list[Measured]) -> None:
    _check(two_ranks, 2)


@pytest.mark.slow
def test_bytes_equal_the_formulas_on_four_ranks() -> None:
    _check(run_ranks(_everything, 4, timeout=250), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_of_a_layer_gathers_four_times_and_repeats_no_row(kind: str, two_ranks: list[Measured]) -> None:
    calls: dict[Any, dict[str, int]] = {mode: two_ranks[0][kind, mode, torch.float64][1] for mode in MODES}

    def count(mode: str | None, *names: str) -> int:
        return sum(calls[mode].get(name, 0) for name in names)

    gathers, scatters = "_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor"
    # gradients of two rows' outputs and two module inputs again; the recomputation's gathers take the place of the styles' own
    assert [count(mode, gathers) for mode in MODES] == [4, 4, 4]
    # sums of two modules' input gradients; under full recompute attention's row too, for the MLP needs it, and not the MLP's
    assert [count(mode, scatters) for mode in MODES] == [2, 2, 3]
    assert count("selective", "lightning_megascale::row_linear") == 0
    matmuls = {mode: count(mode, "aten::mm", "aten::addmm", "aten::addmm_") for mode in MODES}
    columns = 5 if kind == "swiglu" else 4
    assert matmuls["selective"] == matmuls[None]
    assert matmuls["full"] == matmuls[None] + columns + 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tp", "mode"), TARGETS)
def test_torchs_own_styles_keep_more(kind: str, tp: int, mode: str | None) -> None:
    torchs = run_ranks(kept_per_layer, tp, kind, "torch", mode, timeout=120)[0][0]
    assert formula(kind, mode, tp, torch.float64) / torchs <= TARGETS[kind, tp, mode]
