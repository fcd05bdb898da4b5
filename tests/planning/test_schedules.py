"""Closed forms of pipeline schedules against an event simulation of the very orders that torch makes."""

import numpy as np
import pytest
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.pipelining.stage import _PipelineStageBase

from lightning_megascale.planning.schedules import Stages, makespan, rank_seconds
from lightning_megascale.planning.stages import stage_owners
from lightning_megascale.support import SCHEDULES, V_SCHEDULES


class FakeStage(_PipelineStageBase):
    """As much of a stage as a schedule asks for while it makes its order."""

    def __init__(self, index, stages, ranks):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, 0
        self.has_backward, self.submod, self.device, self.group = True, None, "cpu", None


FakeStage.__abstractmethods__ = frozenset()


def order_of(schedule, ranks, virtual, microbatches):
    """Rank -> (kind, stage, microbatch) in order. GPipe and 1F1B, which torch runs without a list, are written out."""
    if virtual == 1:
        return {rank: one_stage(rank, microbatches if schedule == "GPipe" else min(microbatches, ranks - rank), microbatches)
                for rank in range(ranks)}  # fmt: skip
    mine = np.flatnonzero(stage_owners(ranks * virtual, ranks, schedule) == 0)
    made = get_schedule_class(schedule)([FakeStage(int(i), ranks * virtual, ranks) for i in mine], microbatches, loss_fn=max)
    kept = {rank: [action for action in actions if action is not None] for rank, actions in made.pipeline_order.items()}
    return {rank: [(action.computation_type.value, action.stage_index, action.microbatch_index) for action in actions
                   if action.computation_type.value in "FBIW"] for rank, actions in kept.items()}  # fmt: skip


def one_stage(stage, ahead, microbatches):
    actions = [("F", stage, number) for number in range(ahead)]
    for number in range(microbatches):
        actions.append(("B", stage, number))
        if ahead + number < microbatches:
            actions.append(("F", stage, ahead + number))
    return actions


def simulate(order, seconds, last):
    """When the last action ends: each begins once the one before on its rank and the one it needs are done."""
    done, clock, place = {}, dict.fromkeys(order, 0.0), dict.fromkeys(order, 0)
    moved = True
    while moved:
        moved = False
        for rank, actions in order.items():
            while place[rank] < len(actions):
                kind, stage, number = actions[place[rank]]
                if kind == "F":
                    need = ("F", stage - 1, number) if stage else None
                elif kind == "W":
                    need = ("I", stage, number)
                else:
                    need = ("F", stage, number) if stage == last else (kind, stage + 1, number)
                if need is not None and need not in done:
                    break
                clock[rank] = max(clock[rank], done.get(need, 0.0)) + seconds[kind][stage]
                done[kind, stage, number] = clock[rank]
                place[rank] += 1
                moved = True
    assert all(place[rank] == len(actions) for rank, actions in order.items())
    return max(clock.values())


def busy(schedule, stages, ranks, microbatches):
    """Seconds that the busiest rank works, (N,)."""
    return microbatches * rank_seconds(stages.each, ranks, schedule).max(1)


def errors(schedule, uneven):
    """Of the closed form, over sizes: (predicted / simulated - 1) of each."""
    random, found = np.random.default_rng(0), []
    virtual = (1,) if schedule in ("GPipe", "1F1B") else (2,) if schedule in V_SCHEDULES else (2, 4)
    for ranks, v, times in ((ranks, v, times) for ranks in (2, 4, 8) for v in virtual for times in (1, 2, 4, 8)):
        forward = 1 + uneven * random.uniform(-1, 1, ranks * v)
        inputs, weights = 1.2 * forward, 0.9 * forward
        seconds = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
        simulated = simulate(order_of(schedule, ranks, v, ranks * times), seconds, ranks * v - 1)
        stages = Stages(forward[None], inputs[None], weights[None])
        microbatches = np.array([ranks * times])
        bubble = makespan(schedule, stages, ranks, microbatches).bubble
        found.append((busy(schedule, stages, ranks, microbatches) + bubble)[0] / simulated - 1)
    return np.array(found)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_are_exact(schedule):
    assert abs(errors(schedule, 0.0)).max() < (2e-3 if schedule not in V_SCHEDULES else 2e-2)


@pytest.mark.parametrize(("schedule", "mean", "worst"), [("GPipe", 1e-9, 1e-9), ("1F1B", 0.03, 0.07), ("Interleaved1F1B", 0.04, 0.12),
                                                         ("InterleavedZeroBubble", 0.03, 0.1), ("ZBVZeroBubble", 0.06, 0.15)])  # fmt: skip
def test_unlike_stages_are_near(schedule, mean, worst):
    found = errors(schedule, 0.2)
    assert abs(found).mean() < mean and abs(found).max() < worst


def test_numbers_by_hand():
    """Narayanan et al. 2021: 4 ranks, 8 microbatches, F 1, B 2: 3 x 3 of waiting, half of that with two stages a rank."""
    whole, half = (Stages(*[np.full((1, count), value / scale) for value in (1, 1, 1)]) for count, scale in ((4, 1), (8, 2)))
    assert makespan("1F1B", whole, 4, np.array([8])).bubble[0] == pytest.approx(9)
    assert makespan("Interleaved1F1B", half, 4, np.array([8])).bubble[0] == pytest.approx(4.5)


def test_the_busiest_rank_is_found():
    forward = np.array([[1.0, 1, 3, 1]])
    found = makespan("1F1B", Stages(forward, forward, forward), 4, np.array([10]))
    assert found.rank.tolist() == [2]
    assert found.bubble.tolist() == [9]


def test_many_plans_at_once_are_as_one_by_one():
    random = np.random.default_rng(1)
    parts = [random.uniform(1, 2, (5, 8)) for _ in range(3)]
    microbatches = np.array([4, 8, 12, 16, 32])
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        together = makespan(schedule, Stages(*parts), 4, microbatches)
        for row in range(5):
            alone = makespan(schedule, Stages(*(part[row : row + 1] for part in parts)), 4, microbatches[row : row + 1])
            assert together.bubble[row] == pytest.approx(alone.bubble[0]) and together.rank[row] == alone.rank[0]
