"""A batch cut into microbatches and a step's results merged again: every kind of nest, values, and what is refused."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from transformers import BatchEncoding
from transformers.utils import ModelOutput

from lightning_megascale.parallel.microbatches import merge_results, split_rows, weighted_mean

NAN = float("nan")


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Sample:
    x: Any
    name: str = "a"
    length: int = field(init=False, default=5)


@dataclass
class Answer(ModelOutput):
    x: Any = None
    s: Any = None
    missing: Any = None


def rows(*shape: int) -> torch.Tensor:
    """Numbered entries, so that a wrong row is seen."""
    return torch.arange(int(np.prod(shape))).view(shape)


# ---- split_rows ------------------------------------------------------------------------------------------------------------


def test_tensors_are_cut_by_rows_as_views() -> None:
    batch = rows(6, 2)
    parts = split_rows(batch, 6, 3)
    assert [part.tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    parts[1].zero_()
    assert batch[2:4].eq(0).all() and batch[4].tolist() == [8, 9], "parts must be views"


def test_one_part_is_the_whole_batch() -> None:
    batch = {"x": rows(3, 2), "names": ["a", "b", "c"]}
    (part,) = split_rows(batch, 3, 1)
    assert torch.equal(part["x"], batch["x"]) and part["names"] == batch["names"]


def test_a_nest_of_everything() -> None:
    batch = {
        "x": rows(4, 2),
        "names": ["a", "b", "c", "d"],
        "numbers": (1.0, 2.0, 3.0, 4.0),
        "pair": Pair(rows(4), {"deep": [rows(4, 1), "same"]}),
        "sample": Sample(rows(4, 3)),
        "scalar": torch.tensor(7),
        "task": "translate",
        "temperature": 0.5,
        "few": ["p", "q", "r"],
        "nothing": None,
        "array": np.arange(8).reshape(4, 2),
    }
    first, second = split_rows(batch, 4, 2)
    assert list(first) == list(batch)
    assert second["x"].tolist() == [[4, 5], [6, 7]]
    assert first["names"] == ["a", "b"] and second["names"] == ["c", "d"]
    assert second["numbers"] == (3.0, 4.0)
    assert isinstance(second["pair"], Pair) and second["pair"].x.tolist() == [2, 3]
    assert second["pair"].y["deep"][0].tolist() == [[2], [3]] and second["pair"].y["deep"][1] == "same"
    assert isinstance(second["sample"], Sample) and second["sample"].x.tolist() == [[6, 7, 8], [9, 10, 11]]
    assert (second["sample"].name, second["sample"].length) == ("a", 5)
    for part in (first, second):
        assert part["scalar"] is batch["scalar"] and part["task"] == "translate" and part["temperature"] == 0.5
        assert part["few"] == ["p", "q", "r"] and part["nothing"] is None
    assert second["array"].tolist() == [[4, 5], [6, 7]]
    assert batch["names"] == ["a", "b", "c", "d"] and batch["sample"].x.shape == (4, 3), "the batch itself must stay whole"


def test_a_named_tuple_of_as_many_numbers_as_rows_is_no_list_of_rows() -> None:
    class Size(NamedTuple):
        height: int
        width: int

    for part in split_rows({"x": rows(2, 3), "size": Size(224, 160)}, 2, 2):
        assert part["size"] == Size(224, 160) and part["size"].width == 160


@pytest.mark.parametrize(
    "batch",
    [
        OrderedDict(x=rows(4), s="a"),
        defaultdict(list, x=rows(4), s="a"),
        BatchEncoding({"x": rows(4), "s": "a"}),
        Answer(x=rows(4), s="a"),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_mapping_keeps_its_kind(batch: Any) -> None:
    first, second = split_rows(batch, 4, 2)
    assert type(first) is type(batch) and list(first.keys()) == ["x", "s"]
    assert second["x"].tolist() == [2, 3] and first["x"].tolist() == [0, 1] and batch["x"].tolist() == [0, 1, 2, 3]
    if isinstance(batch, defaultdict):
        assert second["missing"] == []


def test_a_mapping_that_cannot_change_becomes_a_dict() -> None:
    assert split_rows(MappingProxyType({"x": rows(2)}), 2, 2)[1]["x"].tolist() == [1]


def test_what_torchs_collate_makes_is_cut() -> None:
    batch = default_collate([(torch.tensor([n, n]), {"text": f"t{n}", "label": n}) for n in range(4)])
    second = split_rows(batch, 4, 2)[1]
    assert second[0].tolist() == [[2, 2], [3, 3]]
    assert list(second[1]["text"]) == ["t2", "t3"] and second[1]["label"].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ({"x": rows(4), "table": rows(3, 2)}, "batch['table'] has 3 rows and the batch 4"),
        ({"x": rows(4), "deep": {"a": [rows(4), rows(5)]}}, "batch['deep']['a'][1] has 5 rows"),
        (Sample(rows(2)), "batch.x has 2 rows"),
        ((rows(4), rows(1, 4)), "batch[1] has 1 rows"),
        (Pair(rows(4), rows(8)), "batch[1] has 8 rows"),
        ({"x": rows(4), "array": np.zeros((6, 4))}, "batch['array'] has 6 rows"),
    ],
)
def test_another_number_of_rows_is_refused_by_name(batch: Any, name: str) -> None:
    with pytest.raises(ValueError) as caught:
        split_rows(batch, 4, 2)
    assert str(caught.value).startswith(name)
    assert "cannot be cut into microbatches: give each tensor one row for each sample, or make it a 0-dim tensor" in str(caught.value)


def nests() -> Any:
    leaf = st.sampled_from([rows(6), rows(6, 2), rows(6, 1, 2), torch.tensor(3.0), "text", 4, None, [1, 2, 3, 4, 5, 6]])
    return st.recursive(
        leaf,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner), st.builds(Pair, inner, inner)),
    )


@settings(max_examples=60, deadline=None)
@given(nests(), st.sampled_from([1, 2, 3, 6]))
def test_joined_parts_are_the_batch(batch: Any, parts: int) -> None:
    found = split_rows(batch, 6, parts)
    assert len(found) == parts
    assert_joined(batch, found)


def assert_joined(whole: Any, parts: list[Any]) -> None:
    if isinstance(whole, torch.Tensor) and whole.ndim:
        assert torch.equal(torch.cat(parts), whole)
    elif isinstance(whole, dict):
        for key in whole:
            assert_joined(whole[key], [part[key] for part in parts])
    elif whole == [1, 2, 3, 4, 5, 6]:
        assert [entry for part in parts for entry in part] == whole
    elif isinstance(whole, (list, tuple)):
        assert {type(part) for part in parts} == {type(whole)}
        for place, item in enumerate(whole):
            assert_joined(item, [part[place] for part in parts])
    else:
        assert all(part is whole for part in parts)


# ---- merge_results ---------------------------------------------------------------------------------------------------------


def scalars(*values: float, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=dtype) for value in values]


def test_scalars_become_their_weighted_mean() -> None:
    merged = merge_results(scalars(1.0, 2.0, 6.0), [1.0, 2.0, 5.0])
    assert merged.item() == pytest.approx((1 + 4 + 30) / 8, abs=1e-7) and merged.dtype == torch.float32 and merged.ndim == 0


def test_a_microbatch_that_counts_nothing_adds_nothing_though_its_mean_is_nan() -> None:
    assert merge_results(scalars(2.0, NAN, 4.0), [1.0, 0.0, 3.0]).item() == 3.5
    assert weighted_mean(scalars(NAN, 4.0), [0.0, 2.0]).item() == 4.0
    assert weighted_mean(scalars(NAN, NAN), [0.0, 0.0]).isnan(), "a mean over nothing at all is what one device gives"
    assert weighted_mean(scalars(NAN, 1.0), [1.0, 1.0]).isnan(), "a NaN that counts must be seen"


def test_the_mean_is_taken_in_double_precision() -> None:
    values = scalars(*[1.0 + 2**-9] * 3, dtype=torch.bfloat16)
    assert weighted_mean(values, [1e9, 1.0, 1e9]).dtype == torch.bfloat16
    big, small = scalars(1e8, 1.0)
    assert weighted_mean([big, small, -big], [1.0, 1.0, 1.0]).item() == pytest.approx(1 / 3, rel=1e-6)


def test_rows_are_joined_and_counts_added() -> None:
    merged = merge_results([{"logits": rows(2, 3), "correct": torch.tensor(n)} for n in (3, 4)], [1.0, 9.0])
    assert torch.equal(merged["logits"], torch.cat([rows(2, 3), rows(2, 3)])) and merged["correct"].item() == 7


def test_containers_are_merged_entry_by_entry() -> None:
    results: list[Any] = [(scalars(1.0)[0], Pair(rows(1), ["a"])), (scalars(3.0)[0], Pair(rows(1) + 1, ["b", "c"]))]
    loss, pair = merge_results(results, [3.0, 1.0])
    assert loss.item() == 1.5 and isinstance(pair, Pair) and pair.x.tolist() == [0, 1] and pair.y == ["a", "b", "c"]


@pytest.mark.parametrize("kind", [OrderedDict, lambda **pairs: defaultdict(list, **pairs), Answer, Sample])
def test_a_result_keeps_its_kind(kind: Any) -> None:
    results = [kind(x=scalars(value)[0]) for value in (1.0, 3.0)]
    merged = merge_results(results, [1.0, 1.0])
    assert type(merged) is type(results[0]) and (merged.x if hasattr(merged, "x") else merged["x"]).item() == 2.0
    assert (results[0].x if hasattr(results[0], "x") else results[0]["x"]).item() == 1.0, "the results themselves stay"


def test_what_is_equal_stays_and_what_differs_becomes_a_list() -> None:
    assert merge_results(["name", "name"], [1, 1]) == "name" and merge_results([None, None], [1, 1]) is None
    assert merge_results([0.5, 0.25], [1, 1]) == [0.5, 0.25]
    assert merge_results([{"loss": scalars(1.0)[0], "n": 2}, {"loss": scalars(2.0)[0], "n": 2}], [1, 1])["n"] == 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 5)), min_size=1, max_size=6).filter(lambda pairs: any(n for _, n in pairs)))
def test_the_merged_mean_is_the_mean_over_all_that_counts(pairs: list[tuple[float, int]]) -> None:
    every = torch.tensor([value for value, count in pairs for _ in range(count)], dtype=torch.float64)
    values = [torch.tensor(value if count else NAN, dtype=torch.float64) for value, count in pairs]
    merged = weighted_mean(values, [float(count) for _, count in pairs])
    assert merged.item() == pytest.approx(every.mean().item(), abs=1e-12)
