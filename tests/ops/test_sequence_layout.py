"""Layouts of a sequence over ranks: every token once, equal shares, balanced work, and blocks that are exactly the mask's pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megascale.ops.sequence_layout import (
    LAYOUTS,
    PADDING,
    Run,
    assign,
    blocks_between,
    fused,
    imbalance,
    positions_of,
    ring_step_ratio,
    runs_of,
    work_of,
)


def tables_of(documents: np.ndarray, ranks: int, layout: str) -> list[list[Run]]:
    positions = positions_of(documents)
    return [runs_of(documents[own], positions[own]) for own in assign(documents, ranks, layout)]


def test_positions_count_from_the_start_of_each_document() -> None:
    documents = np.array([4, 4, 4, 7, 2, 2, PADDING, PADDING])
    assert positions_of(documents).tolist() == [0, 1, 2, 0, 0, 1, 0, 0]


def test_head_tail_gives_each_rank_an_early_and_a_late_chunk() -> None:
    assert assign(np.zeros(8, int), 2, "headtail").tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert assign(np.zeros(8, int), 4, "contiguous").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_runs_of_a_rank() -> None:
    documents = np.array([0, 0, 1, 1, 1, PADDING, 1, 2])
    positions = np.array([3, 4, 0, 1, 5, 0, 6, 0])
    assert runs_of(documents, positions) == [Run(0, 3, 0, 2), Run(1, 0, 2, 2), Run(1, 5, 4, 1), Run(1, 6, 6, 1), Run(2, 0, 7, 1)]


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, int, str]:
    ranks, layout = draw(st.sampled_from((1, 2, 3, 4))), draw(st.sampled_from(LAYOUTS))
    length = draw(st.integers(1, 8)) * 2 * ranks
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=6))) if length > 1 else []
    documents = np.searchsorted(cuts, np.arange(length), side="right")
    padding = draw(st.integers(0, length // 2))
    documents[length - padding :] = PADDING
    return documents, ranks, layout


@settings(deadline=None, max_examples=150)
@given(rows(), st.booleans(), st.sampled_from((None, 1, 3, 7)), st.booleans())
def test_blocks_are_exactly_the_pairs_of_the_mask(
    row: tuple[np.ndarray, int, str], is_causal: bool, window: int | None, larger: bool
) -> None:
    documents, ranks, layout = row
    places, positions, length = assign(*row), positions_of(documents), len(documents)
    assert sorted(places.flatten().tolist()) == list(range(length))  # every token once, equal shares
    window = window if is_causal and not larger else None
    tables = [runs_of(documents[own], positions[own]) for own in places]
    seen = np.zeros((length, length), int)
    for rank, own in enumerate(places):
        for source, theirs in enumerate(places):
            blocks = blocks_between(tables[rank], tables[source], is_causal=is_causal, window=window)
            for block in fused(blocks) if larger else blocks:
                for i in range(block.query_length):
                    for j in range(block.key_length):
                        distance = i + block.ahead - j
                        if (block.is_causal and j > i) or (window is not None and distance >= window):
                            continue
                        seen[own[block.query_start + i], theirs[block.key_start + j]] += 1
    place = np.arange(length)
    wanted = (documents[:, None] == documents) & (documents != PADDING)[:, None]
    if is_causal:
        wanted &= place[:, None] >= place
    if window is not None:
        wanted &= place[:, None] - place < window
    assert np.array_equal(seen, wanted)
    if is_causal and window is None:
        assert sum(map(work_of, tables)) == wanted.sum()


def test_head_tail_is_one_block_a_step() -> None:
    """Of its own keys a rank computes a square, of those of a rank before it half of the keys, for those behind it half of its queries."""
    tables = tables_of(np.zeros(32, int), 4, "headtail")
    shapes = [[[(b.query_length, b.key_length, b.is_causal) for b in fused(blocks_between(q, k))] for k in tables] for q in tables]
    for rank, row in enumerate(shapes):
        for source, found in enumerate(row):
            assert found == [(8, 8, True) if source == rank else (8, 4, False) if source < rank else (4, 8, False)]


def packing(generator: np.random.Generator, length: int) -> np.ndarray:
    """Documents of log-normal lengths, of medians from 200 to 8,000 tokens, the last one cut at the row's end."""
    median, sigma = 10 ** generator.uniform(np.log10(200), np.log10(8000)), generator.uniform(0.5, 2)
    lengths: list[int] = []
    while sum(lengths) < length:
        lengths.append(max(1, int(generator.lognormal(np.log(median), sigma))))
    return np.repeat(np.arange(len(lengths)), lengths)[:length]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_packed_documents_are_balanced(ranks: int) -> None:
    """Head-tail of the row and contiguous parts are not, on the same rows."""
    generator = np.random.default_rng(ranks)
    packings = [packing(generator, 8192) for _ in range(40)]
    tables = [tables_of(documents, ranks, "packed") for documents in packings]
    assert max(map(imbalance, tables)) <= 1.02
    assert np.median([ring_step_ratio(table) for table in tables[:12]]) <= 1.05
    assert np.median([imbalance(tables_of(documents, ranks, "headtail")) for documents in packings]) > 1.05


def test_pieces_are_traded_where_folding_alone_does_not_balance() -> None:
    """A row on which no number of folded documents comes below 1.02."""
    lengths = [130, 149, 439, 276, 358, 174, 207, 266, 268, 314, 153, 552, 223, 142, 235, 317, 479, 217, 679, 230, 306, 238, 124, 141, 289]
    documents = np.repeat(np.arange(29), [*lengths, 101, 142, 154, 889])
    assert sorted(assign(documents, 16, "packed").flatten()) == list(range(8192))
    assert imbalance(tables_of(documents, 16, "packed")) <= 1.02


def test_one_document_is_laid_out_head_tail() -> None:
    assert np.array_equal(assign(np.zeros(32, int), 4, "packed"), assign(np.zeros(32, int), 4, "headtail"))


@pytest.mark.parametrize(
    ("length", "layout", "part"), [(10, "headtail", "to 8 or 12"), (9, "packed", "to 8 or 10"), (9, "zigzag", "one of")]
)
def test_refusals(length: int, layout: str, part: str) -> None:
    with pytest.raises(ValueError) as caught:
        assign(np.zeros(length, int), 2, layout)
    assert part in str(caught.value)
