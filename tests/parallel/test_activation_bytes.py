"""Bytes a layer keeps for its backward equal the formulas, to the byte; and what it pays for that: the collectives of its backward."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.activation_bytes import KINDS, MODES, TARGETS, formula, kept_per_layer
from tests.harness import run_ranks

AXES = ("all_gather_into_tensor", "reduce_scatter_tensor")


def _every_mode(kind: str, dtype: torch.dtype) -> dict:
    return {mode: kept_per_layer(kind, "ours", mode, dtype) for mode in MODES}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_equal_the_formulas(kind: str, tp: int, dtype: torch.dtype) -> None:
    for measured in run_ranks(_every_mode, tp, kind, dtype):
        assert {mode: kept for mode, (kept, _) in measured.items()} == {mode: formula(kind, mode, tp, dtype) for mode in MODES}


@pytest.mark.parametrize("kind", KINDS)
def test_backward_of_a_layer_gathers_four_times_and_repeats_no_row(kind: str) -> None:
    measured = run_ranks(_every_mode, 2, kind, torch.float64)[0]
    calls = {mode: {name: calls.get(f"_c10d_functional::{name}", 0) for name in AXES} for mode, (_, calls) in measured.items()}
    # two gradients of row outputs and two module inputs again; two sums of input gradients
    assert calls[None] == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 2}
    # the gathers of the recomputation take the place of the styles' own; sums of rows are saved
    assert calls["selective"] == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 2}
    assert "lightning_megascale::row_linear" not in measured["selective"][1]
    # attention's row is repeated, for the MLP needs it; the MLP's is not
    assert calls["full"] == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 3}
    matmuls = {mode: sum(calls.get(f"aten::{name}", 0) for name in ("mm", "addmm")) for mode, (_, calls) in measured.items()}
    columns = 5 if kind == "swiglu" else 4
    assert matmuls["full"] - matmuls[None] == columns + 1  # each column, and attention's row
    assert matmuls["selective"] == matmuls[None] or kind == "gelu"  # a saved matmul is not run again


@pytest.mark.parametrize(("kind", "tp", "mode"), TARGETS)
def test_torchs_own_styles_keep_more(kind: str, tp: int, mode: str | None) -> None:
    torchs = run_ranks(kept_per_layer, tp, kind, "torch", mode)[0][0]
    assert formula(kind, mode, tp, torch.float64) / torchs <= TARGETS[kind, tp, mode]
