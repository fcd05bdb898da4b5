"""The pool of forked ranks: results, first tracebacks, and who is missing when the time is up."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_megascale.verification.ranks import RankFailure, run_alone, run_ranks


def total(value: int) -> torch.Tensor:
    print("a rank's output stays with the rank")
    number = torch.tensor(value + dist.get_rank())
    dist.all_reduce(number)
    return number


def alone() -> dict[str, Any]:
    return {"group": dist.is_initialized(), "rank": os.environ.get("RANK"), "threads": torch.get_num_threads()}


def test_results_come_in_rank_order_and_output_stays_away(capfd: pytest.CaptureFixture[str]) -> None:
    assert [int(number) for number in run_ranks(total, 2, 5)] == [11, 11]
    assert capfd.readouterr() == ("", "")


def test_alone_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert run_alone(alone) == {"group": False, "rank": None, "threads": 1}


class Odd(ValueError):
    """An error that cannot be made again from its message."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fails(kind: str) -> None:
    if dist.get_rank() == 1:
        raise ValueError("first") if kind == "plain" else Odd(1, 2)
    dist.barrier()


@pytest.mark.parametrize(("kind", "message"), [("plain", "ValueError: first"), ("odd", "Odd: 1 and 2")])
def test_the_first_error_is_raised_with_its_traceback(kind: str, message: str) -> None:
    with pytest.raises(RankFailure, match=rf"(?s)rank 1:.*in fails.*{message}") as caught:
        run_ranks(fails, 2, kind, timeout=30)
    assert (str(caught.value.error) == "first") == (kind == "plain")


def dawdle() -> None:
    while True:
        time.sleep(0.02)


def waits() -> None:
    if dist.get_rank() == 1:
        dawdle()


def test_who_is_missing_is_named_with_its_place() -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(waits, 2, timeout=6)
    assert time.monotonic() - begin > 5.9
    text = str(caught.value)
    assert text.startswith("ranks [1] did not finish in 6 s\n  rank 1 is at "), text
    assert "test_ranks.py:" in text and " in dawdle" in text


def dies() -> None:
    sys.stdout.flush()
    os._exit(7)


def test_a_rank_that_dies_without_a_word_is_named() -> None:
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] died: exit codes \[7, 7\]"):
        run_ranks(dies, 2)
