"""The first module whose output differs, among outputs that are put together by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_megascale.verification.divergence import Outputs, first_other_output

X, Y, Z = (torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))


def calls(*pairs: tuple[str, Tensor]) -> list[tuple[str, list[Tensor]]]:
    return [(name, [tensor]) for name, tensor in pairs]


ALONE = Outputs(calls(("a", X), ("b.c", Y), ("b", Z)))


def find(*ranks: Outputs) -> str | None:
    found = first_other_output(ALONE, ranks, 1e-10)
    return None if found is None else found[0]


def spoilt(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[0, 0, 0] += 1e-6
    return tensor


def test_the_first_in_the_order_of_one_device_is_named_with_its_size() -> None:
    assert find(Outputs(ALONE.calls)) is None
    name, off = first_other_output(ALONE, [Outputs(calls(("b", spoilt(Z)), ("b.c", Y + 1), ("a", X)))], 1e-10) or ("", 0.0)
    assert name == "b.c" and off == pytest.approx(1 / float(Y.abs().max()))
    assert find(Outputs(calls(("a", X), ("b", spoilt(Z))))) == "b", "a module that a rank does not call is left out"


def shares(x: Tensor, y: Tensor, z: Tensor, place: tuple[int, int, int], parts: int = 1) -> Outputs:
    """Outputs of a rank that takes its rows in microbatches."""
    rows = zip(x.chunk(parts), y.chunk(parts), z.chunk(parts))
    return Outputs([call for a, c, b in rows for call in calls(("a", a), ("b.c", c), ("b", b))], place)


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_are_joined_over_microbatches_and_data_parallel_ranks(parts: int) -> None:
    first, second = ([tensor.chunk(2)[rank] for tensor in (X, Y, Z)] for rank in (0, 1))
    ranks = [shares(*second, (0, 1, 0), parts), shares(*first, (0, 0, 0), parts)]  # in any order
    assert find(*ranks) is None
    assert find(ranks[0], shares(first[0], first[1], spoilt(first[2]), (0, 0, 0), parts)) == "b"
    assert find(shares(*first, (0, 1, 0), parts), shares(*second, (0, 0, 0), parts)) == "a", "rows in another order"


def test_parts_of_the_sequence_are_joined_and_parts_of_features_left_out() -> None:
    sequence = [Outputs(calls(("a", X.chunk(2, 1)[rank]), ("b", Z)), (0, 0, rank)) for rank in (0, 1)]
    assert find(*sequence) is None and find(sequence[0], Outputs(calls(("a", X.chunk(2, 1)[0])), (0, 0, 1))) == "a"
    features = [Outputs(calls(("a", X.chunk(2, 2)[rank] + 1), ("b", Z)), (0, 0, rank)) for rank in (0, 1)]
    assert find(*features) is None
    assert find(features[0], Outputs(calls(("a", X.chunk(2, 2)[1]), ("b", spoilt(Z))), (0, 0, 1))) == "b", "the second replica differs"


def test_of_what_pipeline_stages_share_the_first_stage_counts() -> None:
    stages = [Outputs(calls(("a", X), ("b.c", Y)), (0, 0, 0)), Outputs(calls(("a", X + 1), ("b", spoilt(Z))), (1, 0, 0))]
    assert find(*stages) == "b"


def test_what_is_the_same_for_all_rows_is_not_joined() -> None:
    table = Outputs(calls(("angles", X[:1]), ("b", Z)))
    ranks = [Outputs(calls(("angles", X[:1]), ("b", Z.chunk(2)[rank])), (0, rank, 0)) for rank in (0, 1)]
    assert first_other_output(table, ranks, 1e-10) is None
    ranks[1].calls[0] = ("angles", [spoilt(X[:1])])
    assert (first_other_output(table, ranks, 1e-10) or ("",))[0] == "angles"


def test_a_module_that_is_called_twice() -> None:
    alone = Outputs(calls(("a", X), ("a", Y)))
    assert first_other_output(alone, [Outputs(calls(("a", X), ("a", Y)))], 1e-10) is None
    assert first_other_output(alone, [Outputs(calls(("a", X), ("a", Z)))], 1e-10) is not None
    assert first_other_output(alone, [Outputs(calls(("a", Z), ("a", Y), ("a", X)))], 1e-10) is None, "another number of calls: left out"


def test_what_is_not_a_number_differs() -> None:
    assert find(Outputs(calls(("a", X * float("nan"))))) == "a"
