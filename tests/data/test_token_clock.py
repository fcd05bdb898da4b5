"""Weights in tokens: the order against a merge written down in fractions, and no source further off than the printed bound."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megascale.data.mix_tree import Node
from lightning_megascale.data.schedule import Draw, Stage
from lightning_megascale.data.shuffle import SourceOrder
from lightning_megascale.data.token_clock import TokenClock, TokenSchedule, TokenStage
from lightning_megascale.data.token_order import TokenOrder

NAMES = "abcdef"


class Table:
    """Token counts of rows, by shard."""

    def __init__(self, shards: list[list[int]]) -> None:
        self.shards = shards

    def __call__(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.array([self.shards[s][r] for s, r in zip(shards.tolist(), rows.tolist())], np.int32)


class Plain:
    """The least an order needs."""

    def __init__(self, order: SourceOrder) -> None:
        self.order, self.size = order, order.size

    def many(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.order.many(first, count)


@st.composite
def sources(draw: st.DrawFn, most: int = 4) -> list[tuple[SourceOrder, Table]]:
    rng, found = random.Random(draw(st.integers(0, 10**6))), []
    longest = draw(st.sampled_from([1, 2, 9, 60]))
    for number in range(draw(st.integers(1, most))):
        shards = [[rng.randint(0 if longest > 2 else 1, longest) for _ in range(rng.randint(0, 12))] for _ in range(3)] + [[longest]]
        found.append((SourceOrder(number, [len(s) for s in shards], 3, draw(st.sampled_from([1, 5, 16, 100]))), Table(shards)))
    return found


@st.composite
def token_stages(draw: st.DrawFn, names: str) -> list[Stage]:
    stages: list[Stage] = []
    weight = st.one_of(st.integers(0, 6), st.sampled_from([0.05, 0.405, 0.333]))
    for number in range(draw(st.integers(1, 3))):
        mix = draw(st.fixed_dictionaries(dict.fromkeys(names, weight)).filter(lambda m: any(m.values())))
        tokens = draw(st.integers(100, 700))
        if number and draw(st.booleans()):
            stages.append(TokenStage(f"s{number}", None, mix, draw(st.integers(0, tokens)), tokens))
        else:
            stages.append(Stage(f"s{number}", draw(st.integers(1, 60)), mix))
    if draw(st.booleans()):
        stages[-1] = Stage("endless", None, stages[-1].mix, 40 if len(stages) > 1 else 0)
    return stages


def merged(order: TokenOrder, node: Node, count: int, lengths: list[list[int]]) -> list[tuple[int, int, int]]:
    """A node's first samples (source, draw, tokens), merged as defined, in fractions: only right until the first child runs out."""
    if node.source is not None:
        return [(node.source, k, n) for k, n in enumerate(lengths[node.source][:count])]
    keyed = []
    for side, child in enumerate(node.children):
        begin = 0
        for item in merged(order, child, count, lengths):
            middle = Fraction(2 * begin + item[2], 2)
            segment = max(s for s, knot in enumerate(child.knots) if Fraction(knot, order.tree.scale) <= middle)
            late = middle - Fraction(child.knots[segment], order.tree.scale)
            keyed.append(
                (Fraction(node.knots[segment], order.tree.scale) + late * node.weights[segment] / child.weights[segment], side, item)
            )
            begin += item[2]
    return [item for _, _, item in sorted(keyed, key=lambda key: key[:2])][:count]


def lengths_of(source: tuple[SourceOrder, Table], first: int, count: int) -> list[int]:
    _, shards, rows = source[0].many(first, count)
    return np.maximum(source[1](shards, rows), 1).tolist()


def run(given_sources: list[tuple[SourceOrder, Table]], stages: list[Stage]) -> TokenSchedule:
    return TokenSchedule([Stage("all", 1, dict.fromkeys(NAMES[: len(given_sources)], 1)), *stages], *map(list, zip(*given_sources)))


@settings(max_examples=40, deadline=None)
@given(sources(most=5), st.data())
def test_the_order_is_the_merge_by_definition(given_sources: list[tuple[SourceOrder, Table]], data: st.DataObject) -> None:
    stages = data.draw(token_stages(NAMES[: len(given_sources)]))
    schedule = run(given_sources, stages)
    for part in schedule._parts:
        size = min(60, part.total if part.total is not None else 60)
        order = part.order
        assert isinstance(order, TokenOrder)
        lengths = [lengths_of(given_sources[i], part.base[i], 60) for i in part.numbers.tolist()]
        want = merged(order, order.tree.root, 60, lengths)[:size]
        got_sources, got_draws = order.window(0, size)
        assert list(zip(got_sources.tolist(), got_draws.tolist())) == [item[:2] for item in want]


def test_samples_a_fraction_of_a_token_apart_are_in_order() -> None:
    pair = [(SourceOrder(i, [7], 0), Table([[1] * 7])) for i in (0, 1)]
    order = run(pair, [Stage("s", None, {"a": 0.333, "b": 0.405})])._parts[1].order
    assert isinstance(order, TokenOrder)
    got = list(zip(*(column.tolist() for column in order.window(0, 300))))
    assert got == [item[:2] for item in merged(order, order.tree.root, 300, [[1] * 300] * 2)]


@settings(max_examples=25, deadline=None)
@given(sources(most=6), st.data())
def test_every_access_agrees_and_no_prefix_leaves_the_bound(given_sources: list[tuple[SourceOrder, Table]], data: st.DataObject) -> None:
    stages = data.draw(token_stages(NAMES[: len(given_sources)]))
    schedule = run(given_sources, stages)
    count = schedule.total if schedule.total is not None else schedule.stage_start(-1) + 150
    numbers, chosen, draws = schedule.window(0, count)
    seen, tokens = [0] * len(schedule.sources), [0] * len(schedule.sources)
    all_lengths = [lengths_of(source, 0, int((chosen == i).sum()) + 1) for i, source in enumerate(given_sources)]
    parts = {part.start: part for part in schedule._parts}
    bounds = {bound.first: bound.error for bound in schedule.bounds()}
    longest = max(clock.longest for clock in schedule.clocks)
    for p in range(count):
        if p in parts:
            part, begin = parts[p], list(tokens)
            assert len(part.numbers) > 4 or bounds[p] <= longest
        source = int(chosen[p])
        assert draws[p] == seen[source]
        if p % 29 == 0:
            assert schedule.at(p) == Draw(int(numbers[p]), source, int(draws[p]))
            assert schedule.counts(p) == seen and schedule.tokens(p) == tokens
        tokens[source] += all_lengths[source][seen[source]]
        seen[source] += 1
        given_tokens = sum(tokens) - sum(begin)
        for leaf, number in enumerate(part.numbers.tolist()):
            wanted = part.order.tree.target(leaf, given_tokens)
            assert abs(tokens[number] - begin[number] - wanted) <= bounds[part.start]
        assert source in part.numbers
    for source, total in enumerate(seen):
        places = np.flatnonzero(chosen == source)
        first = data.draw(st.integers(0, total))
        assert np.array_equal(schedule.positions(source, first, total - first), places[first:])
    start = data.draw(st.integers(0, count - 1))
    assert all(np.array_equal(a[start:], b) for a, b in zip((numbers, chosen, draws), schedule.window(start, count - start)))
    for number, stage in enumerate(schedule.stages[: len(schedule._starts) - 1]):
        begin, end = (sum(schedule.tokens(schedule._starts[at])) for at in (number, number + 1))
        budget = getattr(stage, "tokens", None)
        if budget is not None:
            assert budget <= end - begin < budget + longest
        else:
            assert schedule._starts[number + 1] - schedule._starts[number] == stage.samples


def test_many_light_sources_that_come_due_together_do_not_push_a_heavy_one_aside() -> None:
    names = ["heavy", *(f"light{i}" for i in range(5))]
    orders = [SourceOrder(i, [10], 0) for i in range(6)]
    schedule = TokenSchedule([Stage("s", None, dict.fromkeys(names, 0.08) | {"heavy": 0.6})], orders, [Table([[10] * 10])] * 6)
    chosen = schedule.window(0, 3000)[1]
    heavy = np.cumsum(chosen == 0) * 10 - 0.6 * 10 * np.arange(1, 3001)
    assert np.abs(heavy).max() <= schedule.bounds()[0].error <= 15 and np.abs(heavy).max() <= 10  # one merge of all six: 15


def test_weights_count_tokens_not_samples() -> None:
    long_and_short = [(SourceOrder(i, [100], 1), Table([[length] * 100])) for i, length in enumerate((500, 5))]
    schedule = TokenSchedule([TokenStage("s", None, {"a": 1, "b": 1}, tokens=10**6)], *map(list, zip(*long_and_short)))
    a, b = schedule.tokens(schedule.total or 0)
    assert abs(a - b) <= 500 and 10**6 <= a + b < 10**6 + 500
    assert schedule.counts(schedule.total or 0) == [a // 500, b // 5]
    assert "no source is ever more than 250.000 tokens off" in schedule.describe() and "500,000" in schedule.describe().replace(".0 ", " ")


def test_a_far_position_is_reached_without_the_way_there() -> None:
    rng = np.random.default_rng(0)
    tables = [rng.integers(1, 200, size) for size in (3000, 5000)]

    def lengths(table: np.ndarray) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        return lambda shards, rows: table[rows]

    orders = [SourceOrder(i, [len(table)], 2, window=512) for i, table in enumerate(tables)]
    schedule = TokenSchedule([Stage("s", None, {"a": 0.3, "b": 0.7})], orders, [lengths(table) for table in tables])
    far = 10**10
    a, b = schedule.tokens(far)
    assert abs(0.7 * a - 0.3 * b) <= 200
    _, chosen, draws = schedule.window(far, 1000)
    counts = schedule.counts(far)
    for source in (0, 1):
        assert draws[chosen == source].tolist() == list(range(counts[source], counts[source] + int((chosen == source).sum())))


@settings(max_examples=40, deadline=None)
@given(sources(most=1), st.integers(0, 200), st.integers(0, 90))
def test_clocks_agree_with_plain_sums_and_with_those_of_orders_without_shards(
    given_sources: list[tuple[SourceOrder, Table]], first: int, count: int
) -> None:
    order, table = given_sources[0]
    clock, plain = TokenClock(order, table), TokenClock(Plain(order), table)
    sums = [0, *accumulate(lengths_of((order, table), 0, first + count + 2))]
    epoch = lengths_of((order, table), 0, order.size)
    for c in (clock, plain, pickle.loads(pickle.dumps(clock))):
        assert (c.epoch_tokens, c.longest) == (sum(epoch), max(epoch))
        assert c.marks(first, count).tolist() == sums[first : first + count + 1]
        assert c.tokens(first) == sums[first]
        assert [c.find(t) for t in range(sums[first], sums[first + 1])] == [first] * (sums[first + 1] - sums[first])


def test_schedules_travel_to_workers() -> None:
    schedule = TokenSchedule(
        [Stage("s", 200, {"a": 1, "b": 2})], *map(list, zip(*[(SourceOrder(i, [9], 1), Table([list(range(9))])) for i in (0, 1)]))
    )
    want = schedule.at(77)
    assert pickle.loads(pickle.dumps(schedule)).at(77) == want


A, B = {"a": 1}, {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([TokenStage("s", 5, B, tokens=5)], "samples=5 and tokens=5, but a stage has one length"),
        ([TokenStage("s", None, B), Stage("t", 5, B)], "stage 's': without samples and tokens it never ends"),
        ([TokenStage("s", None, B, tokens=0)], "stage 's': tokens=0 must be a whole number >= 1"),
        ([Stage("s", 5, B), TokenStage("t", None, B, 9, tokens=8)], "stage 't': ramp=9 is longer than its tokens=8"),
        ([Stage("s", 5, A), Stage("t", 2, B, ramp=400)], "stage 't': ramp=400 tokens is longer than its samples=2"),
        ([Stage("s", 5, B), Stage("t", 2, {"a": 2, "b": 1}, ramp=400)], "stage 't': ramp=400 tokens is longer than its samples=2"),
        ([Stage("s", 5, {"b": 1}), Stage("t", 2, A, ramp=400)], "stage 't': ramp=400 tokens is longer than its samples=2"),
        ([Stage("s", 5, {"a": 1, "b": 1, "c": 1})], "orders: 2 for 3 sources a, b, c"),
    ],
)
def test_what_makes_no_sense_is_refused(stages: list[Stage], message: str) -> None:
    orders = {name: SourceOrder(i, [5], 0) for i, name in enumerate("ab")}
    with pytest.raises(ValueError, match=message):
        TokenSchedule(stages, orders, dict.fromkeys("ab", Table([[3] * 5])))


def test_orders_with_lanes_are_refused() -> None:
    order = SourceOrder(0, [5], 0, lanes=2, positions=lambda source, first, count: np.arange(first, first + count))
    with pytest.raises(ValueError, match="lanes=2: weights in tokens need orders without lanes"):
        TokenSchedule([Stage("s", 5, {"a": 1})], [order], [Table([[1] * 5])])
