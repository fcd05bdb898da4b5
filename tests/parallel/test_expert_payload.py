"""Hidden states that travel to experts in bfloat16: the error that this makes, and none where they are bfloat16 anyway."""

from __future__ import annotations

from tests import parity
from tests.harness import run_ranks


def gradients(case: parity.Case, payload: str | None) -> dict[str, object]:
    arguments = {"expert_dispatcher": "alltoall", "expert_payload_dtype": payload}
    return parity.merged(run_ranks(parity.train_parallel, 2, case, arguments))["gradients"][0]


def test_the_error_is_that_of_rounding_to_eight_bits() -> None:
    """Of a model of two layers; README states it."""
    case = parity.default_case(axes="fsdp2", family="ep2", precision="float32")
    exact, rounded = gradients(case, None), gradients(case, "bfloat16")
    error = parity.distance(exact, rounded) / parity.global_norm(exact)  # type: ignore[arg-type]
    assert 2**-12 < error < 2**-7, error


def test_nothing_changes_where_they_are_bfloat16() -> None:
    case = parity.default_case(axes="fsdp2", family="ep2", precision="bf16-mixed")
    exact, rounded = gradients(case, None), gradients(case, "bfloat16")
    assert parity.distance(exact, rounded) == 0  # type: ignore[arg-type]
