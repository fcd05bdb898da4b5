"""Keyed shuffles: each epoch once, another order next, local by lanes, the same values on every machine."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megascale.data import stream
from lightning_megascale.data.schedule import Schedule, Stage
from lightning_megascale.data.shuffle import Row, SourceOrder, hash64, hashes, permutation


def test_hashes_are_those_of_splitmix64() -> None:
    # the generator's published first outputs from state 1234567 (the state after k steps is seed + k * golden)
    golden = 0x9E3779B97F4A7C15
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [hash64((1234567 + k * golden) % 2**64) for k in range(3)] == published
    assert hashes(3, 5, start=7).tolist() == [hash64((hash64(5) + k) % 2**64) for k in (7, 8, 9)]
    assert hash64(1, 2) != hash64(2, 1) and hash64(-1) == hash64(2**64 - 1)


def test_permutations_keep_their_values() -> None:
    assert permutation(6, 0, 0, 1).tolist() == [2, 1, 5, 3, 4, 0]
    assert permutation(8, 7, 3).tolist() == [2, 7, 6, 1, 0, 3, 4, 5]
    assert permutation(0, 1).tolist() == [] and permutation(1, 1).dtype == np.int64
    assert stream.permutation is permutation


sizes_of = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 0)


@settings(max_examples=100, deadline=None)
@given(sizes_of, st.integers(0, 2**40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_each_epoch_visits_every_row_once_whatever_the_window_and_lanes(
    sizes: list[int], seed: int, window: int, lanes: int, weight: int, exact: bool
) -> None:
    schedule = Schedule([Stage("a", 37, {"x": weight, "y": 1}), Stage("b", None, {"x": 1, "y": weight})])
    positions = schedule.positions if exact else schedule.lane_positions
    order = SourceOrder(0, sizes, seed, window, lanes, positions if lanes > 1 else None)
    rows = {(shard, row) for shard, size in enumerate(sizes) for row in range(size)}
    n = order.size
    epochs, shards, places = order.many(0, 3 * n)
    assert n == len(rows) and epochs.tolist() == sorted([0, 1, 2] * n)
    for epoch in range(3):
        part = slice(epoch * n, (epoch + 1) * n)
        assert set(zip(shards[part].tolist(), places[part].tolist())) == rows
    copy = pickle.loads(pickle.dumps(order))
    for k in range(3 * n - 1, -1, -7):
        assert copy.at(k) == Row(int(epochs[k]), int(shards[k]), int(places[k]))
    for first in range(0, 3 * n, max(1, n // 2)):
        for whole, part in zip((epochs, shards, places), copy.many(first, 3 * n - first)):
            assert np.array_equal(whole[first:], part)


def test_epochs_sources_and_seeds_have_their_own_orders() -> None:
    def order(number: int, seed: int, epoch: int) -> tuple[tuple[int, int], ...]:
        o = SourceOrder(number, [40, 60], seed, window=64)
        _, shards, rows = o.many(epoch * 100, 100)
        return tuple(zip(shards.tolist(), rows.tolist()))

    seen = {order(number, seed, epoch) for number in range(3) for seed in range(3) for epoch in range(3)}
    assert len(seen) == 27 and order(1, 2, 0) == order(1, 2, 0)


@pytest.mark.parametrize("lanes", [1, 4])
def test_all_orders_of_a_small_source_come_equally_often(lanes: int) -> None:
    schedule = Schedule([Stage("s", None, {"x": 1, "y": 2, "z": 4})])
    order = SourceOrder(1, [1, 1, 1], 11, lanes=lanes, positions=schedule.positions)
    _, shards, _ = order.many(0, 3 * 6000)
    counts = Counter(map(tuple, shards.reshape(-1, 3).tolist()))
    assert set(counts) == set(permutations(range(3)))
    chi_square = sum((count - 1000) ** 2 / 1000 for count in counts.values())
    assert chi_square < 20.5  # 5 degrees of freedom: one run of a thousand by chance, and the seed is fixed


def test_a_window_shuffles_only_its_own_stretch_of_the_stream() -> None:
    order = SourceOrder(0, [10] * 10, 3, window=20)
    _, shards, _ = order.many(0, 100)
    stream_order = order.stream(0)[0]
    for window in range(5):
        assert set(shards[20 * window : 20 * (window + 1)]) == set(stream_order[2 * window : 2 * window + 2].tolist())


def test_a_rank_that_owns_lanes_opens_few_shards_and_a_batch_still_sees_many() -> None:
    schedule = Schedule([Stage("s", None, {"x": 0.4, "y": 0.6})])
    sizes, window, lanes = [500] * 64, 16000, 16

    def shards_per_rank(given: int) -> tuple[float, int]:
        order = SourceOrder(0, sizes, 5, window, given, schedule.lane_positions)
        shards = order.many(0, 2 * window)[1]
        rank = schedule.positions(0, 0, 2 * window) % lanes
        return float(np.mean([len(set(shards[rank == r])) for r in range(lanes)])), len(set(shards[:256].tolist()))

    (with_lanes, mixed), (without, _) = shards_per_rank(lanes), shards_per_rank(1)
    assert with_lanes <= 7 and without == 64  # 1,000 rows of a window are 2 shards and the edges of 2
    assert mixed >= 16


def test_the_order_with_lanes_does_not_depend_on_stages_to_come() -> None:
    first = Stage("a", 100, {"x": 1, "y": 1})
    ends = (
        [Stage("b", 900, {"x": 1, "y": 2})],
        [Stage("b", 300, {"x": 1, "y": 2}), Stage("c", 500, {"x": 3, "y": 1})],
        [Stage("b", None, {"x": 1, "y": 2})],
    )
    orders = []
    for end in ends:  # as planned, ended early for another mix, without end
        schedule = Schedule([first, *end])
        assert schedule.counts(400)[0] == 150
        orders.append(SourceOrder(0, [70, 80, 90], 1, 128, 8, schedule.lane_positions).many(0, 150))
    assert all(np.array_equal(a, b) for other in orders[1:] for a, b in zip(orders[0], other))


def test_a_huge_source_is_cheap_to_enter() -> None:
    order = SourceOrder(0, np.full(100_000, 10_000), 1, window=1 << 14)
    epoch, shard, row = order.at(7 * 10**9 + 123_456_789)
    assert epoch == 7 and 0 <= shard < 100_000 and 0 <= row < 10_000
    assert len(pickle.dumps(order)) < 1_000_000  # the sizes, no cache


def test_storage_order_is_gone_and_epochs_are_unrelated() -> None:
    order = SourceOrder(0, [100] * 400, 2, window=40_000)
    place = [shards * 100 + rows for _, shards, rows in (order.many(epoch * 40_000, 40_000) for epoch in (0, 1))]
    limit = 5 / np.sqrt(40_000)
    assert abs(np.corrcoef(place[0], np.arange(40_000))[0, 1]) < limit
    assert abs(np.corrcoef(np.argsort(place[0]), np.argsort(place[1]))[0, 1]) < limit
    assert abs(np.corrcoef(place[0][1:], place[0][:-1])[0, 1]) < limit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": []}, "the 0 shards of source 0 hold no row"),
        ({"sizes": [0, 0]}, "the 2 shards of source 0 hold no row"),
        ({"sizes": [3, -2]}, r"sizes\[1\]=-2: a shard has at least 0 rows"),
        ({"window": 0}, "window=0 must be at least 1 row"),
        ({"lanes": 0}, "lanes=0 must be from 1 to 65536"),
        ({"lanes": 1 << 17}, "lanes=131072 must be from 1 to 65536"),
        ({"lanes": 4}, "lanes=4 needs positions"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SourceOrder(**{"number": 0, "sizes": [3], "seed": 0, **arguments})


def test_draws_before_the_first_are_refused() -> None:
    with pytest.raises(ValueError, match="k=-1: draws count from 0"):
        SourceOrder(0, [3], 0).at(-1)


def test_lanes_do_not_undo_the_shuffle_of_a_small_source() -> None:
    """With a lane for each draw, rows would come as they lie in their shard, in every epoch."""
    order = SourceOrder(3, [20], seed=0, lanes=1024, positions=lambda source, first, count: np.arange(first, first + count))
    epochs = [order.many(20 * epoch, 20)[2].tolist() for epoch in range(8)]
    assert all(sorted(rows) == list(range(20)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 8 and list(range(20)) not in epochs
    assert len({rows[3] for rows in epochs}) > 3
