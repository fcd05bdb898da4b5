"""Parity with one device, generated from the support table: every pair of features that is not refused is in a case here.

The default tier covers the pairs on 2 and 4 ranks; ``slow`` covers them again for the other axes, on 4 to 16 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
from allpairspy import AllPairs

from lightning_megascale.models.layers import Attention, FeedForward
from lightning_megascale.support import REFUSED, dimensions, is_refused
from tests import parity
from tests.harness import run_ranks

# The default tier leaves these to the slow one: 8 and 16 ranks, and axes whose parts it holds in other company.
LATER = (
    *("hsdp", "fsdp2 x tp", "fsdp2 x tp+sp", "dp x tp", "dp x tp+sp", "pp4", "pp2 x dp", "pp2 x tp"),
    *("pp2 x tp+sp", "cp4", "cp2 x dp", "cp2 x fsdp2", "cp2 x tp", "cp2 x tp+sp", "pp2 x cp2"),
)
MANY_RANKS = tuple(axes for axes, (ranks, _, _) in parity.AXES.items() if ranks >= 8 or axes in LATER)


CLASHES = {
    one: {other for names in dimensions().values() for other in names if is_refused(one, other) is not None}
    for one in (name for names in dimensions().values() for name in names)
}


def allowed(row: list[str]) -> bool:
    """Whether the last choice goes with those before it, which were allowed already."""
    return CLASHES[row[-1]].isdisjoint(row[:-1])


def covering(table: dict[str, tuple[str, ...]]) -> list[dict[str, str]]:
    """Cases in which every allowed pair stands. AllPairs misses a few where much is refused; these get cases of their own."""
    names = list(table)
    cases = [dict(zip(names, row)) for row in AllPairs([list(table[name]) for name in names], filter_func=allowed)]
    missing = pairs_of(table) - {pair for case in cases for pair in pairs_in(case)}
    while missing:
        case = completed(table, min(missing, key=sorted), missing)
        cases.append(case)
        missing -= pairs_in(case)
    return cases


Pair = frozenset[tuple[str, str]]


def pairs_in(case: dict[str, str]) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def pairs_of(table: dict[str, tuple[str, ...]]) -> set[Pair]:
    found = set()
    for (one, ones), (other, others) in combinations(table.items(), 2):
        found |= {frozenset(((one, a), (other, b))) for a in ones for b in others if allowed([a, b])}
    return {pair for pair in found if completed(table, pair, set())}


def completed(table: dict[str, tuple[str, ...]], pair: Pair, wanted: set[Pair]) -> dict[str, str]:
    """A whole case around a pair that holds many of the wanted ones; empty when every completion is refused."""
    case = dict(pair)
    for name, choices in table.items():
        if name not in case:
            fitting = [choice for choice in choices if allowed([*case.values(), choice])]
            if not fitting:
                return {}
            case[name] = max(fitting, key=lambda choice: len(pairs_in({**case, name: choice}) & wanted)) if wanted else fitting[0]
    return {name: case[name] for name in table}


def small_table() -> dict[str, tuple[str, ...]]:
    table = dimensions()
    return {**table, "axes": tuple(axes for axes in table["axes"] if axes not in MANY_RANKS)}


def many_rank_table() -> dict[str, tuple[str, ...]]:
    return {**dimensions(), "axes": MANY_RANKS}


DEFAULT_CASES = covering(small_table())
SLOW_CASES = covering(many_rank_table())


def identity(case: dict[str, str]) -> str:
    return ", ".join(case[dimension] for dimension in dimensions())


@pytest.mark.parametrize("case", DEFAULT_CASES, ids=identity)
def test_parity(case: dict[str, str]) -> None:
    parity.check(case)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", SLOW_CASES, ids=identity)
def test_parity_slow(case: dict[str, str]) -> None:
    parity.check(case, timeout=400, proofs=False)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("axes", ["fsdp2", "tp+sp"])
def test_parity_with_torchs_default_compiler(axes: str) -> None:
    """The pairs above compile with aot_eager, which needs no C++ compiler; this is what compile=True means."""
    case = parity.default_case(axes=axes, compile="compiled", precision="float32", loss="loss_sum and num_tokens")
    parity.check(case, timeout=500, compile=True)


@pytest.mark.parametrize(
    "choices",
    [
        {"axes": "cp2 x tp+sp", "context method": "ulysses", "documents": "packed documents", "context layout": "packed"},
        {"axes": "pp2 x cp2", "schedule": "1F1B", "checkpointing": "full", "documents": "packed documents"},
        {"axes": "cp2 x fsdp2", "context method": "ring", "context layout": "headtail", "checkpointing": "selective"},
        {"axes": "pp2 x tp+sp", "schedule": "Interleaved1F1B", "documents": "packed documents", "embeddings": "tied head"},
    ],
    ids=lambda choices: choices["axes"],
)
def test_parity_of_axes_together(choices: dict[str, str]) -> None:
    """One case each in the default tier; the slow one has all pairs."""
    parity.check(parity.default_case(**choices))


def test_parity_with_chosen_classes_recomputed() -> None:
    parity.check(parity.default_case(axes="fsdp2 x tp+sp", dropout="dropout"), activation_checkpointing={FeedForward, Attention})


@pytest.mark.parametrize("axes", ["fsdp2", "pp2 x fsdp2"])
def test_sums_in_bfloat16_are_other_sums(axes: str) -> None:
    """Or the cases above would prove nothing of them."""
    schedule = "1F1B" if axes.startswith("pp") else "no pipeline"
    case = parity.default_case(axes=axes, schedule=schedule, precision="bf16-mixed")
    ranks = parity.AXES[axes][0]
    whole, half = (
        parity.merged(run_ranks(parity.train_parallel, ranks, case, dict(reduce_dtype=dtype)))["gradients"][0]
        for dtype in ("float32", "bfloat16")
    )
    assert 1e-5 < parity.distance(whole, half) / parity.global_norm(whole) < 1e-2


def proven_pairs() -> Iterator[tuple[str, str]]:
    for (_, first), (_, second) in combinations(dimensions().items(), 2):
        for one in first:
            for other in second:
                if is_refused(one, other) is None:
                    yield one, other


def test_no_pair_is_called_proven_without_a_case() -> None:
    held = {frozenset(pair) for case in DEFAULT_CASES + SLOW_CASES for pair in combinations(case.values(), 2)}
    missing = [pair for pair in proven_pairs() if frozenset(pair) not in held]
    assert not missing, f"pairs in the support table that no parity case holds: {missing}"


def test_every_pair_but_those_left_for_later_is_in_the_default_tier() -> None:
    held = {frozenset(pair) for case in DEFAULT_CASES for pair in combinations(case.values(), 2)}
    here = [axes for axes in dimensions()["axes"] if axes not in MANY_RANKS]
    missing = [
        pair
        for pair in proven_pairs()
        if frozenset(pair) not in held and not set(pair) & set(MANY_RANKS) and any(is_refused(axes, *pair) is None for axes in here)
    ]
    assert not missing, f"pairs that only the slow tier proves: {missing}"


def test_refused_pairs_exist_and_say_why() -> None:
    known = {name for names in dimensions().values() for name in names}
    for pair, reason in REFUSED.items():
        assert pair <= known, f"the support table refuses a feature it does not know: {pair}"
        assert len(reason) > 40
