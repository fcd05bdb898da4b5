"""What a plan refuses of pipelines before any rank exists: fields, schedules, stages, microbatches, and pairs of features by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_megascale import MegascaleStrategy, ParallelPlan
from lightning_megascale.support import SCHEDULES, ZERO_BUBBLE_SCHEDULES, schedule_name

STAGES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2}


def said(**arguments: Any) -> str:
    """What the strategy says at construction."""
    with pytest.raises(ValueError) as caught:
        MegascaleStrategy(**arguments)
    return str(caught.value)


def plan(schedule: str = "1F1B", ranks: int = 2, **arguments: Any) -> ParallelPlan:
    stages = arguments.pop("pipeline_stages_per_rank", STAGES[schedule])
    return ParallelPlan(pipeline_parallel_size=ranks, pipeline_schedule=schedule, pipeline_stages_per_rank=stages, **arguments)


# ---- fields ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [dict(pipeline_schedule="GPipe"), dict(pipeline_stages_per_rank=2), dict(pipeline_split=["layers.1"])],
    ids=lambda f: next(iter(f)),
)
def test_a_pipeline_field_without_a_pipeline_is_refused(field: dict[str, Any]) -> None:
    ((name, value),) = field.items()
    assert f"{name}={value!r} needs pipeline_parallel_size above 1: there is no pipeline otherwise" in said(**field)


@pytest.mark.parametrize(
    ("field", "rule"),
    [
        (dict(pipeline_parallel_size=0), "pipeline_parallel_size=0: must be a whole number of at least 1"),
        (dict(pipeline_parallel_size="2"), "pipeline_parallel_size='2': must be a whole number"),
        (dict(expert_parallel_size="2"), "expert_parallel_size='2': must be a whole number"),
        (dict(pipeline_parallel_size=2.0), "pipeline_parallel_size=2.0: must be a whole number"),
        (dict(pipeline_stages_per_rank=0), "pipeline_stages_per_rank=0: must be a whole number of at least 1"),
        (dict(microbatch_size=0), "microbatch_size=0: must be None or a whole number of at least 1"),
        (
            dict(pipeline_schedule="1FB1"),
            "pipeline_schedule='1FB1': must be one of GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBV",
        ),
        (dict(pipeline_schedule="Interleaved1FB"), "did you mean 'Interleaved1F1B'?"),
        (dict(pipeline_schedule=None), "pipeline_schedule=None: must be one of GPipe"),
        (dict(pipeline_schedule=3), "pipeline_schedule=3: must be one of GPipe"),
        (dict(pipeline_split="layers.1"), "pipeline_split='layers.1': must be 'auto' or a list of block names such as ['layers.4']"),
        (dict(pipeline_split=[]), "pipeline_split=[]: must be 'auto' or a list"),
        (dict(pipeline_split=[1, 2]), "pipeline_split=[1, 2]: must be 'auto' or a list"),
        (dict(pipline_schedule="GPipe"), "no argument 'pipline_schedule'; did you mean 'pipeline_schedule'?"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_named(field: dict[str, Any], rule: str) -> None:
    assert rule in said(**{"pipeline_parallel_size": 2, **field})


def test_schedules_are_known_in_any_case() -> None:
    for name in SCHEDULES:
        for spelling in (name, name.lower(), name.upper()):
            given = ParallelPlan(pipeline_parallel_size=2, pipeline_schedule=spelling, pipeline_stages_per_rank=STAGES[name])
            assert given.check(2) == [] and schedule_name(spelling) == name
            assert f"pp 2, {name}" in given.resolve(2).summary()


# ---- schedules and stages --------------------------------------------------------------------------------------------------

FITS = {"GPipe": (1,), "1F1B": (1,), "Interleaved1F1B": (2, 3), "InterleavedZeroBubble": (2, 3), "ZBVZeroBubble": (2,)}
RULES = {
    "GPipe": "pipeline_schedule='GPipe' has one stage on each rank; use 1, or one of Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble",
    "1F1B": "pipeline_schedule='1F1B' has one stage on each rank; use 1, or one of",
    "Interleaved1F1B": "pipeline_schedule='Interleaved1F1B' alternates between stages of a rank: set pipeline_stages_per_rank=2 or more",
    "InterleavedZeroBubble": "alternates between stages of a rank: set pipeline_stages_per_rank=2 or more",
    "ZBVZeroBubble": "pipeline_schedule='ZBVZeroBubble' goes down and up again: set pipeline_stages_per_rank=2",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_each_schedule_wants_its_number_of_stages(schedule: str, stages: int) -> None:
    wrong = plan(schedule, pipeline_stages_per_rank=stages).check(2)
    if stages in FITS[schedule]:
        assert wrong == []
    else:
        assert len(wrong) == 1 and RULES[schedule] in wrong[0], wrong


def test_ranks_that_the_pipeline_does_not_divide_are_refused() -> None:
    (message,) = plan(ranks=3).check(4)
    assert message.startswith("pipeline_parallel_size=3 does not divide the 4 ranks: use a multiple of 3 ranks")


def test_a_global_batch_must_hold_whole_microbatches() -> None:
    wrong = plan(global_batch_size=7, microbatch_size=2).check(2)
    assert wrong == ["global_batch_size=7 is no multiple of microbatch_size=2"]
    assert "global_batch_size=6 is no multiple of microbatch_size 2 x data-parallel size 2 = 4: nearest 4 or 8" in str(
        plan(global_batch_size=6, microbatch_size=2).check(4)
    )
    assert plan(global_batch_size=8, microbatch_size=2).check(4) == [] == plan(global_batch_size=8).check(2)


# ---- microbatches ----------------------------------------------------------------------------------------------------------


def test_1f1b_needs_as_many_microbatches_as_ranks() -> None:
    four = plan("1F1B", 4)
    assert [n for n in range(1, 9) if not four.check_microbatches(n)] == [4, 5, 6, 7, 8]
    (message,) = four.check_microbatches(3)
    assert message == (
        "the loader's batch makes 3 microbatches of microbatch_size=1, and pipeline_schedule='1F1B' needs at least "
        "pipeline_parallel_size=4: give more rows, or use 'GPipe'"
    )
    assert (
        plan("1F1B", 2, microbatch_size=4).check_microbatches(1)[0].startswith("the loader's batch makes 1 microbatch of microbatch_size=4")
    )


def test_gpipe_and_zbv_take_any_number() -> None:
    for schedule in ("GPipe", "ZBVZeroBubble"):
        assert all(not plan(schedule, ranks).check_microbatches(n) for ranks in (2, 4) for n in range(1, 13))


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_looped_schedules_work_in_rounds(schedule: str) -> None:
    four = plan(schedule, 4)
    # torch's rule: the number of rounds, n // ranks, must divide n
    assert [n for n in range(1, 17) if not four.check_microbatches(n)] == [n for n in range(4, 17) if n % (n // 4) == 0]
    rule = f"pipeline_schedule={schedule!r} works in rounds of pipeline_parallel_size=4 microbatches: use"
    assert f"{rule} 8 or 12 microbatches" in four.check_microbatches(9)[0]
    assert f"{rule} 4 or 8 microbatches" in four.check_microbatches(1)[0]


# ---- pairs -----------------------------------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[dict[str, Any], str]] = {
    "selective": (dict(activation_checkpointing="selective"), "torch's selective checkpointing fails in the second: use 'Interleaved1F1B'"),
    "full": (dict(activation_checkpointing="full"), "run a checkpointed block's forward again for each of its weights"),
    "full by class": (dict(activation_checkpointing={nn.Linear}), "run a checkpointed block's forward again for each of its weights"),
    "compiled": (dict(compile=True), "cannot split the backward of a compiled block: use 'Interleaved1F1B', or compile=False"),
    "compiled with arguments": (dict(compile={"backend": "eager"}), "cannot split the backward of a compiled block"),
    "reshard always": (
        dict(reshard_after_forward=True),
        "lose their gradients without an error: use reshard_after_forward='auto' or False",
    ),
    "reduce every": (dict(reduce_gradients="every"), "after the backward that a reduction follows: use reduce_gradients='last'"),
    "tp": (dict(tensor_parallel_size=2), "a tensor-parallel linear owns its weights in one function"),
    "tp+sp": (dict(tensor_parallel_size=2, sequence_parallel=True), "a tensor-parallel linear owns its weights in one function"),
    "fsdp2 x tp": (dict(tensor_parallel_size=2, data_parallel_shard_size=2), "a tensor-parallel linear owns its weights"),
    "hsdp x tp": (
        dict(tensor_parallel_size=2, data_parallel_shard_size=2, data_parallel_replicate_size=2),
        "a tensor-parallel linear owns",
    ),
}


@pytest.mark.parametrize("schedule", ZERO_BUBBLE_SCHEDULES)
@pytest.mark.parametrize("pair", PAIRS)
def test_what_a_zero_bubble_schedule_cannot_do_is_refused_by_name(schedule: str, pair: str) -> None:
    arguments, reason = PAIRS[pair]
    for ranks in (2, 4, 8):
        text = said(pipeline_parallel_size=ranks, pipeline_schedule=schedule.lower(), pipeline_stages_per_rank=2, **arguments)
        assert schedule in text and reason in text, text
        assert pair.split(" by ")[0].split(" with ")[0] in text


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ZERO_BUBBLE_SCHEDULES])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_other_schedules_do_all_of_it(schedule: str, pair: str) -> None:
    assert plan(schedule, **PAIRS[pair][0]).check_without_world() == []


@pytest.mark.parametrize("schedule", ZERO_BUBBLE_SCHEDULES)
def test_tensor_parallelism_is_refused_however_the_ranks_are_spread(schedule: str) -> None:
    for world in (4, 8, 16):
        for sizes in (dict(), dict(data_parallel_replicate_size=world // 4), dict(sequence_parallel=True)):
            wrong = plan(schedule, tensor_parallel_size=2, **sizes).check(world)
            assert any("a tensor-parallel linear owns its weights" in message for message in wrong), (world, sizes, wrong)


def test_several_violated_rules_come_together() -> None:
    text = said(pipeline_parallel_size=2, pipeline_schedule="ZBVZeroBubble", activation_checkpointing="full", compile=True)
    assert "set pipeline_stages_per_rank=2 (it is 1)" in text and "ZBVZeroBubble x full" in text and "ZBVZeroBubble x compiled" in text
