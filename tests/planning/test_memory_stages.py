"""Microbatches in flight against torch's own schedules, and which ranks tell how much a pipeline needs."""

from unittest import mock

import numpy as np
import pytest
from torch.distributed.pipelining import schedules

from lightning_megascale.planning.candidates import Candidates
from lightning_megascale.planning.known_models import known
from lightning_megascale.planning.memory_stages import holdings, in_flight, stage_plans
from lightning_megascale.planning.stack import Precision, Stack
from lightning_megascale.planning.stages import stage_owners
from lightning_megascale.planning.workload import Workload
from lightning_megascale.support import SCHEDULES

TORCH = {"Interleaved1F1B": schedules.ScheduleInterleaved1F1B, "InterleavedZeroBubble": schedules.ScheduleInterleavedZeroBubble,
         "ZBVZeroBubble": schedules.ScheduleZBVZeroBubble}  # fmt: skip


def order_of(name, ranks, virtual, microbatches):
    """Rank -> actions of torch's schedule, which needs no process group to write them down."""
    owners = stage_owners(ranks * virtual, ranks, name)
    stages = [
        mock.Mock(stage_index=int(stage), num_stages=ranks * virtual, group_size=ranks, group_rank=0, has_backward=True, device="cpu")
        for stage in np.flatnonzero(owners == 0)
    ]
    return TORCH[name](stages, microbatches, loss_fn=lambda *_: None).pipeline_order


def kept_at_most(actions):
    """The most microbatches whose activations are kept: from the forward to the backward, or to that of the weights."""
    alive = most = 0
    for action in filter(None, actions):
        kind = action.computation_type.value
        alive += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        most = max(most, alive)
    return most


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_as_many_are_in_flight_as_in_torchs_schedule(name, ranks, rounds):
    virtual = 2
    microbatches = ranks * rounds
    if name == "ZBVZeroBubble" and microbatches < 2 * ranks:
        microbatches = 2 * ranks
    order = order_of(name, ranks, virtual, microbatches)
    for rank in range(ranks):
        expected = in_flight(name, ranks, virtual, rank, np.array([microbatches])).sum()
        assert expected == kept_at_most(order[rank]), (rank, microbatches)


@pytest.mark.parametrize("virtual", [3, 4])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_with_more_stages_too(name, virtual):
    order = order_of(name, 4, virtual, 8)
    for rank in range(4):
        assert in_flight(name, 4, virtual, rank, np.array([8])).sum() == kept_at_most(order[rank])


def test_one_stage_a_rank_as_traced():
    # tests of the dry run traced these on real ranks: 4 ranks, 8 microbatches
    assert [in_flight("GPipe", 4, 1, rank, np.array([8])).sum() for rank in range(4)] == [8, 8, 8, 8]
    assert [in_flight("1F1B", 4, 1, rank, np.array([8])).sum() for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight("Interleaved1F1B", 4, 2, rank, np.array([8])).sum() for rank in (0, 3)] == [11, 5]
    assert in_flight("1F1B", 8, 1, 0, np.array([2, 100])).tolist() == [[2, 8]]


def test_an_interleaved_rank_has_most_of_its_first_stage():
    assert in_flight("Interleaved1F1B", 4, 2, 0, np.array([8])).tolist() == [[7], [4]]


def test_stages_are_cut_as_the_software_does():
    model = known("Llama-3.1-405B").shape("405b", 8192)
    workload, plan = Workload(model, 8192, 64), Candidates.of([dict(pp=8, schedule=SCHEDULES.index("1F1B"))])
    even = Stack("torchtitan", Precision("bf16-mixed"), even_split=True)
    for stack, smallest in ((even, 15), (Stack("megascale", Precision("bf16-mixed")), 14)):
        _, ((found, place),) = stage_plans(workload, stack, plan)
        assert found.counts.sum() == 126
        assert found.counts.min() >= smallest
        assert (place.start, place.stop) == (0, 1)


def test_experts_lie_on_their_owners():
    """Tensor parallelism deals them out, but not under sequence parallelism; expert parallelism always does."""
    model = known("Mixtral-8x7B").shape("mixtral", 4096)
    plans = Candidates.of([dict(tp=2), dict(tp=2, sequence_parallel=True), dict(tp=2, dp_shard=2, ep=4)])
    (_, ((found, _),)) = stage_plans(Workload(model, 4096, 64), Stack("megascale", Precision("bf16-mixed")), plans)
    experts = model.parameters_by_part()["experts"]
    assert holdings(model, found, 0, plans).experts.tolist() == [experts / 2, experts, experts / 4]


def test_ranks_that_others_outdo_are_not_looked_at():
    model = known("GPT-175B").shape("175b", 2048)
    plan = Candidates.of([dict(pp=8, schedule=SCHEDULES.index("1F1B"))])
    _, ((found, _),) = stage_plans(Workload(model, 2048, 64), Stack("megatron", Precision("16-true"), even_split=True), plan)
    assert found.telling_ranks() == [0, 1, 7]  # the embedding and most in flight; most boundaries; the head
