"""The cut of a model into pipeline stages: optimal by brute force, as good as the strategy's own, and who owns the stages."""

import dataclasses
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megascale.models.presets import PRESETS
from lightning_megascale.parallel.pipeline_split import cut_by_cost, owners_of
from lightning_megascale.planning.model_config import from_decoder_config
from lightning_megascale.planning.stages import cut, cut_points, split_model, stage_owners
from lightning_megascale.support import SCHEDULES


def preset(name):
    return from_decoder_config(dataclasses.asdict(PRESETS[name]), name)


def _sums(costs, starts):
    return [sum(costs[a:b]) for a, b in pairwise((0, *starts, len(costs)))]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.data())
@settings(max_examples=150, deadline=None)
def test_no_other_cut_has_a_cheaper_dearest_stage_or_is_more_even(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    every = [_sums(costs, starts) for starts in combinations(range(1, len(costs)), stages - 1)]
    best = min((max(sums), sum(value**2 for value in sums)) for sums in every)
    found = _sums(costs, cut(tuple(costs), stages))
    assert (max(found), sum(value**2 for value in found)) == best


@given(st.lists(st.floats(0.5, 9), min_size=3, max_size=14), st.data())
@settings(max_examples=60, deadline=None)
def test_it_is_as_good_as_the_strategys_own(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    ours, theirs = _sums(costs, cut(tuple(costs), stages)), _sums(costs, cut_by_cost(costs, stages))
    assert max(ours) == pytest.approx(max(theirs)) and sum(x * x for x in ours) == pytest.approx(sum(x * x for x in theirs))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_belong_to_the_ranks_that_the_strategy_gives_them(schedule):
    assert stage_owners(8, 4, schedule).tolist() == list(owners_of(8, 4, schedule))


def test_the_head_of_a_large_vocabulary_takes_the_place_of_blocks():
    model = preset("1b")
    counts = split_model(model, 4)[:, 0]
    assert counts.sum() == 16 and counts.tolist() == [5, 5, 5, 1]  # the head of 128,256 tokens weighs 4.3 blocks


def test_routed_experts_weigh_what_a_token_goes_through():
    model = preset("moe_1t")
    counts = split_model(model, 16)
    assert counts.sum(0).tolist() == [list(model.layers).count(kind) for kind in model.kinds]
    assert counts[-1].sum() < counts[3].sum()  # the head is as dear as several sparse blocks; counted whole, it were none


def test_what_cannot_be_cut_is_refused():
    model = preset("tiny")
    parts = len(model.layers) + 2
    assert len(cut_points(model, parts)) == parts - 1
    assert split_model(model, parts).sum() == len(model.layers) and split_model(model, parts)[0].sum() == 0
    with pytest.raises(ValueError, match=rf"stages={parts + 1}: .* has {parts} parts"):
        split_model(model, parts + 1)
    assert np.array_equal(split_model(model, 1).sum(0), [len(model.layers)])
