"""Recomputed blocks with experts of other ranks: tokens travel once, and keep their experts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megascale.ops.all_to_all import ALL_TO_ALL, SUM_ROWS_BACK
from tests import parity
from tests.harness import run_ranks


class Sent(TorchDispatchMode):
    """Counts what is really sent: an operator whose result a checkpoint kept is not run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = {ALL_TO_ALL: "rows", SUM_ROWS_BACK: "results", torch.ops.aten.topk.default: "choices"}
        if func in names:
            self.counts[names[func]] += 1
        return func(*args, **(kwargs or {}))


def sent_in_a_run(case: parity.Case) -> dict[str, int]:
    with Sent() as mode:
        parity.train_parallel(case, {"expert_dispatcher": "alltoall"})
    return dict(mode.counts)


@pytest.mark.parametrize("offload", ["kept on the device", pytest.param("block inputs offloaded", marks=pytest.mark.slow)])
def test_tokens_are_sent_once(offload: str) -> None:
    case = parity.default_case(axes="fsdp2", family="ep2")
    recomputed = {**case, "checkpointing": "full", "offload": offload}
    plain, again = (run_ranks(sent_in_a_run, 2, one)[0] for one in (case, recomputed))
    layers, steps = 2, parity.STEPS
    assert plain["results"] == plain["choices"] == layers * steps
    assert plain["rows"] == layers * steps * (2 + 3), "forward: tokens and weights; backward: those back, and gradients of results"
    assert again == plain


@pytest.mark.slow
def test_selective_recomputation_sends_once_as_well() -> None:
    case = parity.default_case(axes="fsdp2", family="ep2")
    plain, again = (run_ranks(sent_in_a_run, 2, one)[0] for one in (case, {**case, "checkpointing": "selective"}))
    assert again == plain
