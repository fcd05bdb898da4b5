"""Seconds of kernels, by hand."""

import dataclasses

import numpy as np
import pytest

from lightning_megascale.planning.kernels import (
    HALF_LENGTH,
    PRODUCT_MEMORY,
    Rates,
    flash_seconds,
    matmul_seconds,
    scores_seconds,
    traffic_seconds,
)
from lightning_megascale.planning.stack import Precision, Stack
from lightning_megascale.topology.gpus import gpu_sheet

RATES = Rates(matmul=100e12, plain=50e12, attention=40e12, memory=1e12, product_memory=2e12, multiprocessors=100, element_bytes=2)


def test_rates_are_peaks_times_efficiencies():
    stack = Stack("s", Precision("p", "float8"), matmul_efficiency=0.5, small_dtype_efficiency=0.8, attention_efficiency=0.3)
    rates = Rates.of(gpu_sheet("h100"), stack)
    assert rates.matmul == pytest.approx(1978.9e12 * 0.4)
    assert rates.plain == pytest.approx(989.4e12 * 0.5)
    assert rates.attention == pytest.approx(989.4e12 * 0.3)
    assert rates.element_bytes == 1
    assert rates.product_memory == pytest.approx(3.35e12 * PRODUCT_MEMORY)
    plain = Rates.of(gpu_sheet("h100"), dataclasses.replace(stack, precision=Precision("p")))
    assert (plain.matmul, plain.element_bytes) == (pytest.approx(989.4e12 * 0.5), 2)


def test_a_gpu_without_small_products_runs_them_in_bfloat16():
    stack = Stack("s", Precision("p", "float8"), matmul_efficiency=0.5, small_dtype_efficiency=1.0)
    assert Rates.of(gpu_sheet("a100"), stack).matmul == pytest.approx(156e12)


def test_tiles_come_in_waves():
    """100 tiles of 256 x 128 fill the 100 multiprocessors once; one row more opens a second wave for ten of them."""
    inner = 100_000
    one = matmul_seconds(RATES, 2560, inner, 1280, out_bytes=2)
    assert one == pytest.approx(2 * 2560 * 1280 * inner / 100e12 + 2560 * 1280 * 2 / 2e12)
    more = matmul_seconds(RATES, 2561, inner, 1280, out_bytes=2)
    assert 1.2 * one < more < 2 * one  # smaller tiles waste less than a second wave of large ones
    assert matmul_seconds(RATES, 2560, inner, 1280, out_bytes=2, plain=True) == pytest.approx(2 * one, rel=1e-3)


def test_few_rows_cost_as_many_as_a_tile():
    assert matmul_seconds(RATES, 33, 50_000, 12800, out_bytes=2) == matmul_seconds(RATES, 64, 50_000, 12800, out_bytes=2)


def test_memory_is_the_limit_of_thin_products():
    quick = dataclasses.replace(RATES, matmul=1e16)
    seconds = matmul_seconds(quick, 1_000_000, 512, 16, out_bytes=2)
    assert seconds == pytest.approx(((1_000_000 + 16) * 512 * 2 + 16_000_000 * 2) / 2e12)


def test_groups_share_waves():
    """Ten experts of ten tiles each are one wave, not ten."""
    inner = 100_000
    together = matmul_seconds(RATES, 256, inner, 1280, out_bytes=2, groups=10)
    assert together == pytest.approx(matmul_seconds(RATES, 2560, inner, 1280, out_bytes=2))


def test_attention_is_slower_in_short_rows_and_backward():
    long = flash_seconds(RATES, 4e12, 1e9)
    assert long == pytest.approx(0.1)
    assert flash_seconds(RATES, 4e12, HALF_LENGTH) == pytest.approx(0.2)
    assert flash_seconds(RATES, 4e12, 1e9, backward=True) > long


def test_written_scores_cost_their_traffic():
    forward, backward = scores_seconds(RATES, 32 * 1024**2, 32, 1024, 128, 128)
    product = matmul_seconds(RATES, 1024, 128, 1024, out_bytes=2, groups=32, plain=True)
    other = matmul_seconds(RATES, 1024, 1024, 128, out_bytes=2, groups=32, plain=True)
    assert forward == pytest.approx(product + other + 32 * 1024**2 * 9 / 1e12)
    assert backward == pytest.approx(2 * (product + other) + 32 * 1024**2 * 11 / 1e12)


def test_scores_in_wide_numbers_cost_more():
    """In 4 bytes: softmax reads and writes (8), dropout reads, writes and keeps a mask (9); backward 9 and 12."""
    wide = dataclasses.replace(RATES, plain_bytes=4)
    pairs = 32 * 1024**2
    forward, backward = scores_seconds(wide, pairs, 32, 1024, 128, 128)
    both = sum(matmul_seconds(wide, 1024, *shape, out_bytes=4, groups=32, plain=True) for shape in ((128, 1024), (1024, 128)))
    assert forward == pytest.approx(both + pairs * 17 / 1e12)
    assert backward == pytest.approx(2 * both + pairs * 21 / 1e12)
    even, odd = (scores_seconds(wide, 1024**2, 1, 1024, head, head)[0] for head in (112, 108))
    assert odd < even  # 108 x 4 bytes are whole 16 bytes
    assert Rates.of(gpu_sheet("h100"), Stack("s", Precision("p", "float32", compute_bytes=4))).plain_bytes == 4


def test_plain_products_read_numbers_of_activations():
    quick = dataclasses.replace(RATES, plain=1e16, element_bytes=1, plain_bytes=4)
    seconds = matmul_seconds(quick, 1_000_000, 512, 16, out_bytes=4, plain=True)
    assert seconds == pytest.approx(((1_000_000 + 16) * 512 * 4 + 16_000_000 * 4) / 2e12)


def test_heads_that_are_no_multiple_of_16_bytes_are_slow():
    even, odd = (scores_seconds(RATES, 1024**2, 1, 1024, head, head)[0] for head in (112, 108))
    assert odd > 3 * even


def test_columns_are_as_single_calls():
    rows, columns = np.array([100, 1000, 5000]), np.array([64, 4096, 300])
    together = matmul_seconds(RATES, rows, 512, columns, out_bytes=2)
    assert together.tolist() == [float(matmul_seconds(RATES, r, 512, c, out_bytes=2)) for r, c in zip(rows, columns, strict=True)]
    assert traffic_seconds(RATES, np.array([1e12, 2e12])).tolist() == [1, 2]
