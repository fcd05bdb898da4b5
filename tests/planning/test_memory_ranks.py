"""The planner's bytes against all tensors of real ranks at their peak."""

import pytest

from lightning_megascale.plan import ParallelPlan
from tests.planning.memory_ranks import compare

PIPELINE = dict(pipeline_parallel_size=2, microbatch_size=1, pipeline_split=["layers.2"], label_alignment="aligned")
TENSOR = dict(tensor_parallel_size=2, sequence_parallel=True, label_alignment="aligned")


@pytest.mark.parametrize(
    "world,plan,precision",
    [
        (4, PIPELINE, "bf16-mixed"),
        (4, {**PIPELINE, "activation_checkpointing": "full"}, "bf16-mixed"),
        (2, TENSOR, "bf16-mixed"),
        (2, {**TENSOR, "activation_checkpointing": "full"}, "32-true"),
    ],
    ids=["pp2 x fsdp2", "pp2 x fsdp2, full", "tp2", "tp2, full"],
)
def test_bytes_of_real_ranks_are_met_within_five_per_cent(world, plan, precision):
    for measured, expected, kinds in compare(ParallelPlan(**plan), precision, world):
        assert abs(expected / measured - 1) <= 0.05, (measured, expected, kinds)
