"""The example of README's "Your own model": an ordinary GPT, equal to one device under its layout."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megascale.verification import verify
from tests.test_readme import blocks


def names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(next(block for block in blocks("python") if "def build():" in block), found)
    return found


@pytest.mark.parametrize("axes", ["tp2", "pp2", pytest.param("fsdp2xtp2", marks=pytest.mark.slow)])
def test_the_example_is_equal_to_one_device(axes: str) -> None:
    example = names()
    (report,) = verify(example["build"], axes=[axes], layout=example["own_layout"])
    assert report.ok, str(report)


def test_a_count_of_heads_that_is_not_divided_is_found() -> None:
    example = names()
    layout = {role: value for role, value in example["own_layout"].items() if role != "divided"}
    (report,) = verify(example["build"], axes=["tp2"], layout=layout)
    assert not report.ok and "heads" in str(report.refused)
