"""Staged schedules: window, single look-up and inverse agree, and no source strays further than the printed bound."""

from __future__ import annotations

import pickle
import random
from fractions import Fraction
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megascale.data.mix_tree import Line
from lightning_megascale.data.schedule import RAMP_LEVELS, Draw, Schedule, Stage, nested

SEED_MIX = {"text_only": 0.1, "instruct": {"share": 0.9, "llava": 0.45, "chart": 0.25, "doc": 0.30}}
NAMES = "abcdefgh"


@st.composite
def stage_lists(draw: st.DrawFn, most_sources: int = 4, endless: bool = True) -> list[Stage]:
    """One to four stages with ramps over up to ``most_sources`` sources, zeros and awkward decimals among the weights."""
    names = NAMES[: draw(st.integers(1, most_sources))]
    weight = st.one_of(st.integers(0, 5), st.sampled_from([0.0, 0.001, 0.1, 0.333, "0.405", 1e-7, 0.3333333333333333]))
    stages: list[Stage] = []
    for number in range(draw(st.integers(1, 4))):
        mix = draw(st.dictionaries(st.sampled_from(names), weight, min_size=1).filter(lambda m: any(float(w) for w in m.values())))
        samples = draw(st.integers(1, 120))
        ramp = draw(st.one_of(st.just(0), st.just(samples), st.integers(0, samples))) if number else 0
        stages.append(Stage(f"s{number}", samples, mix, ramp))
    if endless and draw(st.booleans()):
        stages[-1] = Stage(stages[-1].name, None, stages[-1].mix, stages[-1].ramp)
    return stages


def shares(stages: list[Stage], sources: tuple[str, ...], count: int) -> list[list[Fraction]]:
    """The wanted share of every source at each of the first positions, written down position by position."""

    def flat(stage: Stage) -> list[Fraction]:
        weights = [Fraction(str(stage.mix.get(name, 0))) for name in sources]
        return [weight / sum(weights) for weight in weights]

    rows = []
    for number, stage in enumerate(stages):
        length = count - len(rows) if stage.samples is None else min(stage.samples, count - len(rows))
        levels = min(RAMP_LEVELS, stage.ramp)
        ends = [(level + 1) * stage.ramp // levels for level in range(levels)]
        before, after = flat(stages[number - 1]), flat(stage)
        for offset in range(length):
            level = sum(end <= offset for end in ends)
            if offset < stage.ramp and level and offset not in ends:
                rows.append(rows[-1])
            elif offset < stage.ramp:
                rows.append([a + (b - a) * Fraction(2 * level + 1, 2 * levels) for a, b in zip(before, after)])
            else:
                rows.append(after)
    return rows


@settings(max_examples=80, deadline=None)
@given(stage_lists(most_sources=8), st.randoms(use_true_random=False))
def test_window_look_up_inverse_and_counts_agree(stages: list[Stage], rng: random.Random) -> None:
    schedule = Schedule(stages)
    count = schedule.total if schedule.total is not None else schedule.stage_start(-1) + 400
    numbers, sources, draws = schedule.window(0, count)
    assert (numbers.dtype, sources.dtype, draws.dtype) == (np.int32, np.int32, np.int64)
    seen = [0] * len(schedule.sources)
    for p in range(count):
        assert schedule.at(p) == Draw(int(numbers[p]), int(sources[p]), int(draws[p]))
        assert draws[p] == seen[sources[p]]
        if p % 41 == 0:
            assert schedule.counts(p) == seen
        seen[sources[p]] += 1
    assert schedule.counts(count) == seen
    for source, total in enumerate(seen):
        places = np.flatnonzero(sources == source)
        assert np.array_equal(schedule.positions(source, 0, total), places)
        first = rng.randint(0, total)
        size = rng.randint(0, total - first)
        assert np.array_equal(schedule.positions(source, first, size), places[first : first + size])
    start = rng.randint(0, count)
    for whole, part in zip((numbers, sources, draws), schedule.window(start, count - start)):
        assert np.array_equal(whole[start:], part)


@settings(max_examples=80, deadline=None)
@given(stage_lists(most_sources=4))
def test_no_prefix_is_further_off_than_one_sample_per_part(stages: list[Stage]) -> None:
    check_bounds(stages, most=1.0)


@settings(max_examples=50, deadline=None)
@given(stage_lists(most_sources=8))
def test_no_prefix_is_further_off_than_the_printed_bound(stages: list[Stage]) -> None:
    check_bounds(stages, most=2.0)


def check_bounds(stages: list[Stage], most: float) -> None:
    """Every prefix of every part, and of the whole run, against targets added up position by position; zero weights give no sample."""
    schedule = Schedule(stages)
    count = schedule.total if schedule.total is not None else schedule.stage_start(-1) + 300
    sources = schedule.window(0, count)[1]
    rows = shares(stages, schedule.sources, count)
    bounds = {bound.first: bound for bound in schedule.bounds()}
    assert all(bound.error <= most for bound in bounds.values())
    assert 0 in bounds and all(first in bounds for first in range(1, count) if support(rows[first]) != support(rows[first - 1]))
    scale = lcm(*(share.denominator for row in rows for share in row))  # integers: fractions take a minute here
    overall, inside, error = [0] * len(rows[0]), [0] * len(rows[0]), Fraction(0)
    for p in range(count):
        if p in bounds:
            inside, error = [0] * len(inside), Fraction(bounds[p].error) * scale
        assert rows[p][sources[p]] > 0
        for source, share in enumerate(rows[p]):
            step = share.numerator * (scale // share.denominator) - scale * int(source == sources[p])
            overall[source] += step
            inside[source] += step
        assert max(map(abs, inside)) <= error
        assert max(map(abs, overall)) <= Fraction(schedule.bound(p + 1)) * scale
        if p % 53 == 0:
            assert schedule.targets(p + 1) == [Fraction(off, scale) + got for off, got in zip(overall, schedule.counts(p + 1))]


def support(row: list[Fraction]) -> frozenset[int]:
    return frozenset(source for source, share in enumerate(row) if share)


def test_the_mix_of_the_paper_is_exact_and_bounded() -> None:
    schedule = Schedule([Stage("pairs", 10**6, {"pairs": 1}), Stage("mix", 5 * 10**9, SEED_MIX, ramp=10**6)])
    assert [schedule.sources[i] for i in range(5)] == ["chart", "doc", "llava", "pairs", "text_only"]
    start, end = 2 * 10**6, 2 * 10**6 + 4 * 10**9
    got = [b - a for a, b in zip(schedule.counts(start), schedule.counts(end))]
    assert [round(x / 10**6) for x in got] == [900, 1080, 1620, 0, 400]
    assert all(abs(x - share * 4 * 10**9) <= 1.7 for x, share in zip(got, (0.225, 0.27, 0.405, 0, 0.1)))
    assert [bound.first for bound in schedule.bounds()] == [0, 10**6, 2 * 10**6]
    assert schedule.bounds()[0].error == 0 and 0.84 < schedule.bounds()[2].error < 0.86
    numbers = schedule.window(10**6 - 2, 4)[0]
    assert numbers.tolist() == [0, 0, 1, 1] and schedule.stage_start(1) == 10**6


def test_two_sources_alternate_as_the_line_says() -> None:
    schedule = Schedule([Stage("only", None, {"a": 1, "b": 3})])
    assert schedule.total is None and schedule.window(0, 8)[1].tolist() == [1, 0, 1, 1, 1, 0, 1, 1]  # a: floor(n / 4 + 1/2)


def test_an_endless_stage_is_exact_far_beyond_64_bits() -> None:
    schedule = Schedule([Stage("first", 10, {"a": 1}), Stage("rest", None, {"a": 0.405, "b": 0.225, "c": 0.27, "d": 0.1})])
    n = 10 + 10**25
    assert schedule.counts(n) == [10 + 405 * 10**22, 225 * 10**22, 27 * 10**23, 10**24]
    stage, source, draw = schedule.at(n)
    assert stage == 1 and draw == schedule.counts(n)[source]
    far = 10**17
    sources, draws = schedule.window(far, 1000)[1:]
    assert [schedule.at(far + i) for i in range(0, 1000, 97)] == [(1, int(sources[i]), int(draws[i])) for i in range(0, 1000, 97)]
    for source in range(4):
        places = np.flatnonzero(sources == source)
        assert np.array_equal(schedule.positions(source, int(draws[places[0]]), len(places)), places + far)


def test_a_ramp_follows_its_line() -> None:
    ramp = 64 * 1000
    schedule = Schedule([Stage("a", 100, {"a": 1, "b": 1}), Stage("b", ramp, {"a": 3, "b": 1}, ramp=ramp)])
    for n in range(0, ramp + 1, 500):  # share of a: 1/2 + n / (4 ramp), so 1/2 n + n^2 / (8 ramp) in all
        line = n / 2 + n * n / (8 * ramp)
        staircase = ramp * 0.25 / (8 * 64**2)
        assert abs(schedule.counts(100 + n)[0] - 50 - line) <= staircase + schedule.bound(100 + n)


def test_a_source_of_weight_zero_never_comes_and_draws_go_on() -> None:
    schedule = Schedule([Stage("x", 7, {"a": 2, "b": 1}), Stage("y", 5, {"a": 1, "b": 0}), Stage("z", 6, {"b": 1, "a": 1})])
    _, sources, draws = schedule.window(0, 18)
    assert set(sources[7:12]) == {0}
    for source in (0, 1):
        assert draws[sources == source].tolist() == list(range(int((sources == source).sum())))
    assert len(schedule.positions(1, 0, 50)) == 50  # draws past the end get some number, quietly


@settings(max_examples=40, deadline=None)
@given(stage_lists(most_sources=6, endless=False), stage_lists(most_sources=6), st.integers(1, 200))
def test_the_past_depends_neither_on_stages_to_come_nor_on_the_length_of_its_own(
    stages: list[Stage], more: list[Stage], longer: int
) -> None:
    schedule, last = Schedule(stages), stages[-1]
    assert schedule.total is not None and last.samples is not None
    extended = Schedule([*stages, *(Stage(f"more {stage.name}", stage.samples, stage.mix, stage.ramp) for stage in more)])
    begin = max(last.ramp, 1)  # a stage that is all ramp ends with it
    endless = Schedule([*stages[:-1], Stage(last.name, last.samples + longer, last.mix, last.ramp)])
    for other in (extended, *([endless] if last.samples > begin else [])):
        for draws, theirs in ((schedule, other), (other, schedule)):
            a, b = (s.window(0, schedule.total) for s in (draws, theirs))
            names = [[s.sources[i] for i in w[1]] for s, w in ((draws, a), (theirs, b))]
            assert names[0] == names[1] and np.array_equal(a[2], b[2])


def test_another_mix_of_the_same_sources_afterwards_moves_nothing() -> None:
    first = Stage("s", 100, {"a": 1, "b": 2})
    alone, followed = Schedule([first]), Schedule([first, Stage("t", 900, {"a": 9, "b": 1})])
    assert np.array_equal(alone.window(0, 100)[1], followed.window(0, 100)[1])
    assert [bound.first for bound in followed.bounds()] == [0, 100]


def test_nested_shares_multiply_exactly() -> None:
    flat = nested(SEED_MIX)
    assert flat == {"text_only": Fraction("0.1"), "llava": Fraction("0.405"), "chart": Fraction("0.225"), "doc": Fraction("0.27")}
    assert nested({"g": {"share": 2, "h": {"share": 1, "x": 5}, "y": 3}}) == {"x": Fraction(1, 2), "y": Fraction(3, 2)}


def test_lines_of_huge_numbers_are_exact() -> None:
    line = Line([0, 1000], [(3, 10**30 + 7, 3 * 10**30), (-(10**31), 10**29, 10**30)])
    x = np.arange(0, 3000, 7)
    assert line.many(x).tolist() == [line.at(int(v)) for v in x] and line.at(999) == 333 and line.at(1200) == 110


def test_schedules_travel_to_workers() -> None:
    schedule = Schedule([Stage("s", 500, {"a": 1, "b": 2, "c": 4})])
    copy = pickle.loads(pickle.dumps(schedule))
    assert np.array_equal(copy.window(0, 500)[1], schedule.window(0, 500)[1])


def test_the_description_names_stages_shares_counts_and_bounds() -> None:
    text = Schedule([Stage("warm", 1000, {"a": 1, "b": 3}), Stage("end", None, {"b": 1}, ramp=10)]).describe()
    assert "warm: positions 0 to 999 (1,000 samples)" in text and "a: 25.0000%, 250.0 samples expected" in text
    assert "end: positions 1,000 on, without end, ramp over 10 samples" in text
    assert "from position 0 (warm): no source is ever more than 0.500 samples off" in text
    assert "from position 1,010 (end): no source is ever more than 0.000 samples off" in text


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], r"stages=\[\] is empty; give at least one"),
        ([Stage("a", 5, {"x": -1, "y": 2})], r"stage 'a': mix: the weight of 'x' is -1, but must be a number >= 0"),
        ([Stage("a", 5, {"x": float("nan")})], "the weight of 'x' is nan"),
        ([Stage("a", 5, {"x": float("inf")})], "the weight of 'x' is inf"),
        ([Stage("a", 5, {"x": "1e999999999"})], "the weight of 'x' is '1e999999999'"),
        ([Stage("a", 5, {"x": "half"})], "the weight of 'x' is 'half'"),
        ([Stage("a", 5, {"x": True})], "the weight of 'x' is True"),
        ([Stage("a", 5, {"x": 0, "y": 0.0})], "stage 'a': all weights of mix are zero"),
        ([Stage("a", 5, {})], "stage 'a': mix={} names no source"),
        ([Stage("a", 0, {"x": 1})], r"stage 'a': samples=0 must be a whole number >= 1"),
        ([Stage("a", 1.5, {"x": 1})], r"samples=1.5 must be a whole number"),  # type: ignore[arg-type]
        ([Stage("a", None, {"x": 1}), Stage("b", 5, {"x": 1})], "stage 'a': samples=None never ends, so no stage may follow"),
        ([Stage("a", 5, {"x": 1}), Stage("a", 5, {"x": 1})], r"stages\[1\].name='a' is also the name of stages\[0\]"),
        ([Stage("", 5, {"x": 1})], r"stages\[0\].name='' must be a text"),
        ([Stage("a", 5, {"x": 1}, ramp=2)], "stage 'a': ramp=2, but the first stage has none before it"),
        ([Stage("a", 5, {"x": 1}), Stage("b", 5, {"y": 1}, ramp=6)], "stage 'b': ramp=6 is longer than its samples=5"),
        ([Stage("a", 5, {"x": 1}), Stage("b", 5, {"y": 1}, ramp=-1)], "stage 'b': ramp=-1 must be a whole number >= 0"),
        ([Stage("a", 5, {"g": {"x": 1}})], "the group 'g' has no share; add share"),
        ([Stage("a", 5, {"g": {"share": 1, "x": 0}})], "the group 'g' has no source with a weight above zero"),
        ([Stage("a", 5, {"g": {"share": 1, "x": 1}, "x": 1})], "the source 'x' is named twice"),
        ([Stage("a", 5, {"share": 1})], "'share' is no name of a source"),
        ([Stage("a", 5, {"imags": 1})], "mix names 'imags', which is no source; did you mean 'images'?"),
        ([Stage("a", 5, {"qqq": 1})], "which is no source; the sources are 'images', 'text'"),
    ],
)
def test_what_makes_no_sense_is_refused(stages: list[Stage], message: str) -> None:
    known = ["images", "text"] if any(name in ("imags", "qqq") for stage in stages for name in stage.mix) else None
    with pytest.raises(ValueError, match=message):
        Schedule(stages, known)


def test_positions_outside_the_run_are_refused() -> None:
    schedule = Schedule([Stage("a", 5, {"x": 1})])
    for ask in (lambda: schedule.at(5), lambda: schedule.at(-1), lambda: schedule.window(3, 3), lambda: schedule.counts(6)):
        with pytest.raises(ValueError, match="outside this run of 5 positions"):
            ask()
