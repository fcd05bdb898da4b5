"""The bytes of a pipeline stage: the formula against counted bytes on 4 ranks, and its terms against sums done by hand."""

from __future__ import annotations

import pytest

from lightning_megascale.parallel.pipeline_bytes import StageBytes, stage_bytes
from tests.benchmarks.pipeline_bytes import compare

BLOCKS = [100, 100]


@pytest.mark.parametrize(
    ("precision", "reduce", "reshard"), [("bf16-mixed", "last", "auto"), ("32-true", "every", "auto"), ("bf16-mixed", "every", True)]
)
def test_formula_is_what_is_counted(precision: str, reduce: str, reshard: str | bool) -> None:
    for result in compare(precision, reduce, reshard, microbatches=2):
        measured, wanted = result["measured"], result["formula"]
        assert abs(sum(measured.values()) / sum(wanted.values()) - 1) < 0.05, (measured, wanted)
        for name in ("shards", "optimizer", "receive"):
            assert measured[name] == pytest.approx(wanted[name], rel=0.01), name
        assert measured["receive"] > 0
        # nothing of size is left out: what is not named is the batch, the cosines and sines, and an input gloo may still hold
        assert result["other"] < 0.1 * sum(measured.values())


def test_gradients_kept_whole_by_hand() -> None:
    """bf16-mixed, middle stage, 2 shards: 2 + 4 bytes for each parameter, and one block's gradients in bf16."""
    found = stage_bytes(0, BLOCKS, is_last=False, shard_size=2, microbatches=4, received=10, sent=10, compute=2)
    assert found == StageBytes(shards=400, optimizer=800, receive=80, gathered=400, gradients=800, working=200)
    assert found.total == 2680


def test_the_heads_gradients_wait_by_hand() -> None:
    """bf16-mixed, last stage: the head's gradients in bf16 are there while a block's are made; on the first stage they are not."""
    last = stage_bytes(20, BLOCKS, is_last=True, shard_size=2, microbatches=2, compute=2)
    first = stage_bytes(20, BLOCKS, is_last=False, shard_size=2, microbatches=2, compute=2)
    assert (last.gathered, last.gradients, last.working) == (2 * 220, 4 * 220, 2 * 20 + 2 * 100)
    assert last.total - first.total == 2 * 20


def test_resharding_keeps_three_blocks_by_hand() -> None:
    """float32: the block at work, the one gathered ahead, and the output of that gather, however many blocks there are."""
    kept = stage_bytes(0, BLOCKS * 4, is_last=False, shard_size=2, microbatches=2)
    freed = stage_bytes(0, BLOCKS * 4, is_last=False, shard_size=2, microbatches=2, reshard_after_forward=True)
    assert (kept.gathered, kept.gradients, kept.working) == (4 * 800, 4 * 800, 0)
    assert (freed.gathered, freed.gradients, freed.working) == (4 * 100, 4 * 800, 4 * 200)


def test_resharding_and_reducing_every_microbatch_by_hand() -> None:
    """bf16: first stage, a block's gradients as made and as reduced beside one gather; last stage, the head's beside two blocks."""
    arguments = dict(shard_size=2, microbatches=2, compute=2, reduce_gradients="every", reshard_after_forward=True)
    first, last = (stage_bytes(50, BLOCKS, is_last=is_last, **arguments) for is_last in (False, True))
    assert (first.gathered, first.gradients, first.working) == (2 * 150, 4 * 125, 6 * 100 + 2 * 100)
    assert (last.gathered, last.gradients, last.working) == (2 * 150, 4 * 125, 6 * 50 + 2 * 200)


def test_reduction_is_the_peak_with_a_heavy_root_by_hand() -> None:
    """First stage, embedding of 1000: while it is reduced its parameters are free, its gradients there twice and the sum's shard once."""
    found = stage_bytes(1000, BLOCKS, is_last=False, shard_size=2, microbatches=2, compute=2)
    assert (found.gathered, found.gradients, found.working) == (2 * 200, 4 * 1200, 4 * 1000 + 2 * 1000)


def test_reducing_every_microbatch_by_hand() -> None:
    """Last stage: the head's bf16 gradients wait, one block's in bf16 and as input of the reduce-scatter; shards for all."""
    found = stage_bytes(50, BLOCKS, is_last=True, shard_size=2, microbatches=2, compute=2, reduce_gradients="every")
    assert (found.gathered, found.gradients, found.working) == (2 * 250, 4 * 125, 2 * 50 + 6 * 100)


def test_gradients_of_an_earlier_schedule_call_are_added() -> None:
    once = stage_bytes(0, BLOCKS, is_last=False, shard_size=2, microbatches=2, compute=2)
    again = stage_bytes(0, BLOCKS, is_last=False, shard_size=2, microbatches=2, compute=2, accumulated=True)
    assert again.total - once.total == 4 * 100


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="reduce_gradients='never': must be 'last' or 'every'"):
        stage_bytes(0, BLOCKS, is_last=False, shard_size=2, microbatches=2, reduce_gradients="never")
