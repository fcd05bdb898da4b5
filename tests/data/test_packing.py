"""Packing: every sample once, sequences that fit, plans and states that are pure functions."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megascale.data.packing import (
    LARGEST_WINDOW,
    Bucketer,
    Packer,
    best_fit_decreasing,
    choose_groups,
    choose_window,
    plan_window,
)
from lightning_megascale.data.schedule import Schedule, Stage
from lightning_megascale.data.shuffle import SourceOrder

CAPACITY = 20
SIZES = st.lists(st.integers(1, CAPACITY), max_size=40)


def lengths(start: int, count: int) -> np.ndarray:
    """Token counts of positions, 1 to 23: some are longer than a sequence of 20."""
    return 1 + (np.arange(start, start + count) * 7919) % 23


def plain(sizes: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing as the book says it: quadratic."""
    bins: list[list[int]] = []
    for sample in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        spaces = [(capacity - sum(sizes[i] for i in one), number) for number, one in enumerate(bins)]
        fitting = [pair for pair in spaces if pair[0] >= sizes[sample]]
        if fitting:
            bins[min(fitting)[1]].append(sample)
        else:
            bins.append([sample])
    return bins


@settings(max_examples=150, deadline=None)
@given(SIZES)
def test_best_fit_decreasing_is_that_of_the_book(sizes: list[int]) -> None:
    found = best_fit_decreasing(sizes, CAPACITY)
    assert found == plain(sizes, CAPACITY)
    assert sorted(itertools.chain(*found)) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in one) <= CAPACITY for one in found)
    fewest = -(-sum(sizes) // CAPACITY)
    assert len(found) <= 2 * fewest  # any two sequences together are more than full


def test_known_plans() -> None:
    assert best_fit_decreasing([], 10) == []
    assert best_fit_decreasing([4, 5, 6, 5], 10) == [[2, 0], [1, 3]]
    assert best_fit_decreasing([10, 10], 10) == [[0], [1]]
    assert best_fit_decreasing([7, 6, 3], 10) == [[0, 2], [1]]  # the smallest space that holds it, not the first or the largest


@pytest.mark.parametrize("size", [0, -3, 11])
def test_lengths_that_no_sequence_takes(size: int) -> None:
    with pytest.raises(ValueError, match=rf"lengths\[1\]={size} and capacity=10: a sample needs 1 to 10 tokens"):
        best_fit_decreasing([5, size], 10)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, CAPACITY + 10), min_size=1, max_size=40), st.integers(0, 3))
def test_a_window_holds_each_sample_once_whatever_its_length(sizes: list[int], key: int) -> None:
    found = plan_window(sizes, CAPACITY, key)
    assert sorted(itertools.chain(*found)) == list(range(len(sizes)))
    counted = [min(max(size, 1), CAPACITY) for size in sizes]
    assert all(sum(counted[i] for i in one) <= CAPACITY for one in found)
    unmixed = {frozenset(one) for one in best_fit_decreasing(counted, CAPACITY)}
    assert {frozenset(one) for one in found} == unmixed
    assert found == plan_window(np.array(sizes), CAPACITY, key)


def test_order_in_a_window_does_not_follow_length() -> None:
    """Best-fit decreasing opens with long samples and closes with many short ones; a batch of each would have another mix."""
    sizes = np.minimum(np.random.default_rng(0).lognormal(6, 1, 4096).astype(int) + 1, 4096)
    raw, mixed = best_fit_decreasing(sizes, 4096), plan_window(sizes, 4096, 7)
    bound = 4 / np.sqrt(len(raw))

    def trend(plan: list[list[int]]) -> float:
        return abs(np.corrcoef(np.arange(len(plan)), [len(one) for one in plan])[0, 1])

    assert trend(raw) > 0.5 > bound > trend(mixed)
    first = [sizes[one[0]] > sizes[one[-1]] for one in mixed if len(one) > 1]
    assert abs(np.mean(first) - 0.5) < 4 * 0.5 / np.sqrt(len(first))
    assert plan_window(sizes, 4096, 8) != mixed


def test_the_plan_is_the_same_everywhere() -> None:
    """A changed plan would break resumes of runs that are saved: these are the values of the first release."""
    assert plan_window(lengths(0, 12), CAPACITY, 5, 0) == PLAN


PLAN = [[4, 5], [3], [6], [2, 0, 7], [1], [11, 8], [10, 9]]


def test_windows_are_large_enough() -> None:
    assert choose_window(4096, 4096) == 8192 and choose_window(4096, 1e9) == 8192
    assert choose_window(131072, 16384) == 8192 and choose_window(131072, 4096) == 8192
    assert choose_window(131072, 4095) == 16384 and choose_window(131072, 403) == 131072
    assert choose_window(1 << 20, 10) == LARGEST_WINDOW
    for capacity, mean in ((32768, 403.7), (131072, 1801.2), (131072, 403.0)):
        window = choose_window(capacity, mean)
        assert window & (window - 1) == 0 and 256 * capacity <= window * mean < 512 * capacity
    for capacity, mean in ((0, 5.0), (5, 0.0), (5, -1.0), (5, float("nan"))):
        with pytest.raises(ValueError, match="both must be above 0"):
            choose_window(capacity, mean)


PARTS = st.tuples(st.integers(1, 12), st.lists(st.integers(1, 40), min_size=1, max_size=4))


@settings(max_examples=100, deadline=None)
@given(PARTS, st.booleans())
def test_windows_tile_the_stream_and_span_no_border(parts: tuple[int, list[int]], with_zero: bool) -> None:
    window, sizes = parts
    starts = [0, *itertools.accumulate(sizes)]
    total = starts.pop()
    packer = Packer(lengths, window, CAPACITY, total, starts if with_zero else starts[1:])
    assert packer.windows is not None
    spans = [packer.span(number) for number in range(packer.windows)]
    wanted = [(a, min(window, start + size - a)) for start, size in zip(starts, sizes) for a in range(start, start + size, window)]
    assert spans == wanted
    assert [packer.window_at(p) for p in range(total)] == [number for number, (_, count) in enumerate(spans) for _ in range(count)]
    for number in (-1, packer.windows):
        with pytest.raises(ValueError, match=f"window {number} of a stream of {packer.windows} windows"):
            packer.span(number)


@settings(max_examples=60, deadline=None)
@given(PARTS, st.integers(1, 9), st.integers(0, 5))
def test_every_position_is_in_one_sequence_and_any_state_resumes(parts: tuple[int, list[int]], size: int, seed: int) -> None:
    window, sizes = parts
    total = sum(sizes)
    packer = Packer(lengths, window, CAPACITY, total, list(itertools.accumulate(sizes))[:-1], seed)
    states, end = packer.take(0, 10_000)
    assert end == packer.end and len(states) == packer.count() and states == sorted(set(states))
    delivered = [packer.sequence(state) for state in states]
    assert sorted(itertools.chain(*delivered)) == list(range(total))
    assert all(sum(min(int(lengths(p, 1)[0]), CAPACITY) for p in one) <= CAPACITY for one in delivered)
    fresh = Packer(lengths, window, CAPACITY, total, list(itertools.accumulate(sizes))[:-1], seed)
    for place in {0, len(states) // 2, len(states) - 1}:
        assert fresh.sequence(states[place]) == delivered[place]
        batch, after = fresh.take(states[place], size)
        assert batch == states[place : place + size]
        assert after == fresh.advance(states[place], size) == [*states, end][min(place + size, len(states))]
    assert packer.take(end, 3) == ([], end) and packer.advance(end, 3) == end


def test_a_state_is_window_and_sequence() -> None:
    packer = Packer(lengths, 64, CAPACITY, 200)
    number = packer.sequences(0)
    states, after = packer.take((0 << 20) | number - 1, 2)
    assert states == [number - 1, 1 << 20] and after == (1 << 20) + 1
    assert packer.windows == 4 and packer.end == 4 << 20
    assert packer.count(2) == packer.sequences(0) + packer.sequences(1) and packer.count(99) == packer.count()


def test_endless_streams() -> None:
    packer = Packer(lengths, 64, CAPACITY, None, [100])
    assert packer.end is None and packer.windows is None
    assert packer.span(1) == (64, 36) and packer.span(2) == (100, 64) and packer.span(10**12) == (100 + 64 * (10**12 - 2), 64)
    far = 10**9 << 20
    assert all(p >= 100 + 64 * (10**9 - 2) for p in packer.sequence(far))
    assert packer.take(far, 3)[0] == [far, far + 1, far + 2]
    with pytest.raises(ValueError, match="limit_windows=None: an endless stream"):
        packer.count()


def test_other_seeds_and_windows_are_other_plans() -> None:
    def shape(seed: int, window: int) -> list[list[int]]:
        packer = Packer(lambda start, count: lengths(0, count), 64, CAPACITY, None, seed=seed)
        start = packer.span(window)[0]
        return [[p - start for p in packer.sequence(state)] for state in packer.take(window << 20, packer.sequences(window))[0]]

    assert shape(0, 0) == shape(0, 0)
    assert len({str(shape(seed, window)) for seed in (0, 1) for window in (0, 1)}) == 4


def test_padding_is_what_the_sequences_leave_empty() -> None:
    packer = Packer(lengths, 64, CAPACITY, 200)
    tokens = int(np.minimum(lengths(64, 136), CAPACITY).sum())
    made = sum(packer.sequences(window) for window in (1, 2, 3))
    assert packer.padding(1, 3) == pytest.approx(1 - tokens / (made * CAPACITY), abs=1e-12)


def test_each_window_is_planned_once_and_two_are_kept_for_a_batch_over_a_border() -> None:
    asked: list[tuple[int, int]] = []

    def noted(start: int, count: int) -> np.ndarray:
        asked.append((start, count))
        return lengths(start, count)

    packer = Packer(noted, 16, CAPACITY, 1600)
    states, _ = packer.take(0, 10_000)
    assert len(asked) == 100
    asked.clear()
    for state in states:
        packer.sequence(state)
    assert len(asked) == 100  # counts are kept for all windows, plans of the last few, so memory stays
    copied = pickle.loads(pickle.dumps(Packer(lengths, 16, CAPACITY, 1600)))
    assert copied.sequence(5 << 20) == packer.sequence(5 << 20)
    small = Packer(lengths, 16, CAPACITY, 1600)
    before = len(pickle.dumps(small))
    small.sequence(0)
    assert len(pickle.dumps(small)) < before + 50


def test_a_sequence_is_a_copy() -> None:
    packer = Packer(lengths, 16, CAPACITY, 100)
    packer.sequence(0).clear()
    assert packer.sequence(0)


@pytest.mark.parametrize("state", [4 << 20, -1, 999, (3 << 20) | 999, 5 << 20])
def test_states_of_another_configuration(state: int) -> None:
    with pytest.raises(ValueError, match=f"state={state} is sequence .* resume with those, or start anew"):
        Packer(lengths, 64, CAPACITY, 200).sequence(state)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 10, 100), "window=0: must be 1 to 1048576"),
        ((LARGEST_WINDOW + 1, 10, 100), "window=1048577"),
        ((4, 0, 100), "capacity=0"),
        ((4, 10, 0), "total=0"),
        ((4, 10, 100, [50, 50]), r"borders=\[50, 50\] of total=100: must ascend"),
        ((4, 10, 100, [100]), "must ascend, and lie inside the stream"),
        ((4, 10, None, [30, 20]), "must ascend"),
        ((4, 10, 100, [-2]), "must ascend"),
    ],
)
def test_arguments_out_of_range(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Packer(lengths, *arguments)


def test_lengths_that_are_not_one_for_each_position() -> None:
    for wrong in (np.ones(3, dtype=int), np.ones(4)):
        with pytest.raises(ValueError, match=r"lengths\(0, 4\) gave .* must be whole numbers \(4,\)"):
            Packer(lambda start, count, wrong=wrong: wrong, 4, 10, 100).sequence(0)
    with pytest.raises(ValueError, match="count=-1: a stream goes forward"):
        Packer(lengths, 4, 10, 100).advance(0, -1)


# ---- groups: a sequence holds positions of one lane


def long_lengths(start: int, count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(1, 400, 20_000)[start : start + count]


@pytest.mark.parametrize(("window", "total", "border"), [(4096, 12_000, 5000), (2048, 2048, 0), (512, 700, 0)])
def test_sequences_of_groups_hold_neighbours_and_every_sample_once(window: int, total: int, border: int) -> None:
    packer = Packer(long_lengths, window, 1000, total, [0, border] if border else [0], seed=3, groups=8)
    states, end = packer.take(0, 10**6)
    rows = [packer.sequence(state) for state in states]
    assert end == packer.end and sorted(position for row in rows for position in row) == list(range(total))
    assert max(sum(long_lengths(0, total)[row]) for row in rows) <= 1000
    assert packer.windows is not None
    for number in range(packer.windows):
        count, samples = packer.sequences(number), packer.span(number)[1]
        groups = 8
        while samples * 8 < groups * window:
            groups //= 2
        assert count % groups == 0, (number, samples, groups)
        own = [packer.sequence(number << 20 | place) for place in range(count)]
        strange = [place for place, row in enumerate(own) if {position % groups for position in row} != {place % groups}]
        near = [place for place in strange if {(position - place) % groups for position in own[place]} <= {0, 1, groups - 1}]
        assert len(strange) < 0.35 * count and near == strange  # borders of groups move by less than one group
        assert packer.padding(number, 1) < 0.05 + groups / count


def test_groups_are_a_part_of_the_plan() -> None:
    one, other = (Packer(long_lengths, 4096, 1000, 12_000, groups=groups) for groups in (8, 4))
    again = Packer(long_lengths, 4096, 1000, 12_000, groups=8)
    assert again.sequence(2 << 20 | 7) == one.sequence(2 << 20 | 7) != other.sequence(2 << 20 | 7)


def test_single_samples_are_not_halved() -> None:
    """Rows that hold one sample each cannot be made more: their number stays, and every sample is there once."""
    packer = Packer(lambda start, count: np.full(count, 600), 100, 1000, 99, groups=4)
    rows = [packer.sequence(state) for state in packer.take(0, 1000)[0]]
    assert sorted(rows) == [[position] for position in range(99)]


def test_buckets_of_groups_take_turns_and_are_alike() -> None:
    bucketer = Bucketer(long_lengths, 4096, 1000, 8192, groups=16)
    rows = [bucketer.sequence(state) for state in bucketer.take(0, 4096)[0]]
    assert sorted(row[0] for row in rows) == list(range(4096))
    assert all(row[0] % 16 == place % 16 for place, row in enumerate(rows))
    spreads = [np.ptp(long_lengths(0, 8192)[[row[0] for row in rows[first : first + 64]]]) for first in range(0, 4096, 64)]
    assert np.mean(spreads) < 60  # of 400, and a random 64 spans nearly all of it


@pytest.mark.parametrize("groups", [0, 3, 128])
def test_groups_out_of_range_are_refused(groups: int) -> None:
    with pytest.raises(ValueError, match=f"groups={groups}: must be a power of two, at most the window's 64 samples"):
        Packer(long_lengths, 64, 1000, 200, groups=groups)


def test_windows_of_groups() -> None:
    assert choose_groups(4096, 491, 1024) == (262_144, 64) and choose_groups(4096, 491, 1) == (8192, 1)
    assert choose_groups(131_072, 495, 1024) == (262_144, 2) and choose_groups(4096, 491, 48) == (131_072, 16)
    assert choose_groups(4096, 491, 1024, 8192) == (8192, 2)  # a window that is given stays


def test_ranks_that_take_packed_rows_in_turn_read_few_shards() -> None:
    schedule, total, ranks = Schedule([Stage("all", None, {"x": 1})]), 1 << 15, 16
    found = {}
    for groups in (1, ranks):
        order = SourceOrder(0, [500] * 80, 0, 1 << 14, groups, schedule.lane_positions)
        shards = order.many(0, total)[1]
        packer = Packer(lambda start, count: 1 + np.arange(start, start + count) % 397, 1 << 13, 1000, total, groups=groups)
        states = packer.take(0, total)[0]
        read = [np.concatenate([shards[packer.sequence(state)] for state in states[rank::ranks]]) for rank in range(ranks)]
        found[groups] = np.mean([np.count_nonzero(np.diff(one)) for one in read]), np.mean([len(np.unique(one)) for one in read])
    assert found[ranks][1] < 12 < 60 < found[1][1]  # of 80 shards
    assert found[ranks][0] < 0.8 * found[1][0]
