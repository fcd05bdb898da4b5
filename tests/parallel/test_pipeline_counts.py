"""What a pipelined step costs: forwards of each block, gathers, reductions and messages, counted for every schedule and checkpointing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning as L
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megascale import MegascaleStrategy
from lightning_megascale.models.decoder import DecoderBlock
from lightning_megascale.support import SCHEDULES, is_refused
from tests import parity
from tests.harness import run_ranks

AXES = "pp2 x fsdp2"
MODES = [(schedule, mode) for schedule in SCHEDULES for mode in ("none", "selective", "full") if is_refused(schedule, mode) is None]


class Collectives(TorchDispatchMode):
    """Counts c10d operators by name."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::").strip("_")] += 1
        return func(*args, **(kwargs or {}))


class Snapshot(L.Callback):
    """The counts of the second step, when schedules and groups exist."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts, self.first, self.step = counts, Counter[str](), Counter[str]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.first = Counter(self.counts)

    def on_train_batch_end(self, *_: Any) -> None:
        self.step = self.counts - self.first


def count(cases: list[dict[str, Any]]) -> list[dict[str, int]]:
    return [_count_one(case) for case in cases]


def _count_one(case: dict[str, Any]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    snapshot = Snapshot(counts)
    module = parity.ParityModule({**case, "labels": "all labels"})
    strategy = MegascaleStrategy(**parity.plan_of(case))
    plain = DecoderBlock.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["block forward"] += 1
        return plain(self, *args, **kwargs)

    DecoderBlock.forward = counted  # type: ignore[method-assign]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=parity.AXES[case["axes"]][0],
        strategy=strategy,
        max_steps=2,
        callbacks=[snapshot],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        with Collectives(counts):
            trainer.fit(module)
    finally:
        DecoderBlock.forward = plain  # type: ignore[method-assign]
    done = strategy._done
    assert done is not None and done.pipeline is not None
    sent = sum(stage < len(done.pipeline.stages) - 1 for stage in done.pipeline.own_stages if not _next_is_here(done.pipeline, stage))
    got = sum(stage > 0 for stage in done.pipeline.own_stages if not _next_is_here(done.pipeline, stage - 1))
    return {**snapshot.step, "blocks": len(done.blocks), "units": _units_with_parameters(done), "messages": sent + got}


def _next_is_here(pipeline: Any, stage: int) -> bool:
    return stage >= 0 and stage in pipeline.own_stages and stage + 1 in pipeline.own_stages


def _units_with_parameters(done: Any) -> int:
    return sum(any(True for group in unit._get_fsdp_state()._fsdp_param_groups for _ in group.fsdp_params) for unit in done.units)


def case_of(schedule: str, mode: str, reshard: str = "reshard auto", accumulation: str = "accumulate 1") -> dict[str, str]:
    return parity.default_case(axes=AXES, schedule=schedule, checkpointing=mode, reshard=reshard, accumulation=accumulation)


@pytest.fixture(scope="module")
def counted() -> list[list[dict[str, int]]]:
    return run_ranks(count, 4, [case_of(*pair) for pair in MODES], timeout=120)


@pytest.mark.slow
def test_a_block_runs_forward_at_most_twice_for_a_microbatch(counted: list[list[dict[str, int]]]) -> None:
    for found in counted:
        for (schedule, mode), result in zip(MODES, found):
            times = result["block forward"] / (result["blocks"] * parity.microbatches_of(case_of(schedule, mode)))
            assert times == (1 if mode == "none" else 2), (schedule, mode, times)


@pytest.mark.slow
def test_one_gather_and_one_reduction_for_each_unit_and_step(counted: list[list[dict[str, int]]]) -> None:
    for found in counted:
        for (schedule, mode), result in zip(MODES, found):
            assert result["allgather_base"] == result["units"], (schedule, mode, result)
            assert result["reduce_scatter_base"] == result["units"], (schedule, mode, result)


@pytest.mark.slow
def test_one_message_for_each_boundary_microbatch_and_direction(counted: list[list[dict[str, int]]]) -> None:
    for found in counted:
        for (schedule, mode), result in zip(MODES, found):
            expected = result["messages"] * parity.microbatches_of(case_of(schedule, mode))
            assert result["send"] == result["recv"] == expected, (schedule, mode, result)


def test_the_other_modes_gather_and_reduce_more() -> None:
    """With resharding a unit is gathered for each forward and for each backward; reducing every microbatch
    reduces each unit each time."""
    cases = [case_of("1F1B", "none", reshard="reshard always"), case_of("1F1B", "none", accumulation="accumulate 2, reduce every")]
    for resharded, reduced in run_ranks(count, 4, cases):
        parts = parity.microbatches_of(cases[0])
        assert resharded["allgather_base"] == 2 * parts * resharded["units"] and resharded["reduce_scatter_base"] == resharded["units"]
        assert reduced["allgather_base"] == reduced["units"] and reduced["reduce_scatter_base"] == parts * reduced["units"]
