"""The timeline of a schedule: every piece once, none before what it needs, one at a time on a rank, and the bubble of the papers."""

import pytest

from lightning_megascale.planning.stages import stage_owners
from lightning_megascale.planning.timeline import timeline
from lightning_megascale.support import ZERO_BUBBLE_SCHEDULES

CASES = [("GPipe", 4, 1, 6), ("1F1B", 4, 1, 8), ("1F1B", 1, 1, 3), ("Interleaved1F1B", 4, 2, 8), ("Interleaved1F1B", 2, 3, 6),
         ("InterleavedZeroBubble", 4, 2, 8), ("ZBVZeroBubble", 4, 2, 8), ("ZBVZeroBubble", 2, 2, 3)]  # fmt: skip


def played(schedule, ranks, each, microbatches, **seconds):
    stages = ranks * each
    lengths = {"forward": 1.0, "backward_inputs": 1.0, "backward_weights": 1.0} | seconds
    values = {name: value if isinstance(value, list) else [value] * stages for name, value in lengths.items()}
    return timeline(schedule, ranks=ranks, stages_per_rank=each, microbatches=microbatches, **values)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_piece_runs_once_after_what_it_needs_and_alone_on_its_rank(case):
    schedule, ranks, each, microbatches = case
    stages = ranks * each
    pieces = played(*case, forward=[1 + 0.1 * stage for stage in range(stages)])
    owners = stage_owners(stages, ranks, schedule)
    split = schedule in ZERO_BUBBLE_SCHEDULES
    kinds = ("forward", "inputs", "weights") if split else ("forward", "backward")
    done = {(piece.kind, piece.stage, piece.microbatch): piece for piece in pieces}
    assert len(done) == len(pieces) == len(kinds) * stages * microbatches
    for (kind, stage, number), piece in done.items():
        assert piece.rank == owners[stage]
        needs = []
        if kind == "forward" and stage:
            needs.append(("forward", stage - 1, number))
        if kind in ("backward", "inputs"):
            needs.append((kind, stage + 1, number) if stage + 1 < stages else ("forward", stage, number))
        if kind == "weights":
            needs.append(("inputs", stage, number))
        assert all(done[need].end <= piece.start + 1e-9 for need in needs)
    for rank in range(ranks):
        own = sorted((piece for piece in pieces if piece.rank == rank), key=lambda piece: piece.start)
        assert all(first.end <= second.start + 1e-9 for first, second in zip(own, own[1:], strict=False))


def test_the_bubbles_are_those_of_the_papers():
    def waits(schedule, ranks, each, microbatches):
        pieces = played(schedule, ranks, each, microbatches)
        return max(piece.end for piece in pieces) - 3 * each * microbatches

    assert waits("GPipe", 4, 1, 6) == waits("1F1B", 4, 1, 8) == 3 * 3  # (pp - 1)(forward + backward)
    assert waits("Interleaved1F1B", 4, 2, 8) == 3 * 3  # of chunks of half a stage: half of the above
    assert waits("InterleavedZeroBubble", 4, 2, 8) <= 3 and waits("ZBVZeroBubble", 4, 2, 8) <= 4


def test_1f1b_keeps_as_many_microbatches_as_ranks_are_left():
    pieces = played("1F1B", 4, 1, 8)
    for rank in range(4):
        order = [piece.kind for piece in sorted(pieces, key=lambda piece: piece.start) if piece.rank == rank]
        assert order.index("backward") == 4 - rank


def test_durations_of_other_stages_are_refused():
    with pytest.raises(ValueError, match="durations of 2 stages; the plan has 2 x 2 = 4"):
        timeline(
            "ZBVZeroBubble", ranks=2, stages_per_rank=2, microbatches=2, forward=[1, 1], backward_inputs=[1, 1], backward_weights=[1, 1]
        )
