"""Ragged: rows, slices, cutting, and the way through loaders, Lightning and torch's pytrees."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from lightning_megascale.data.ragged import Ragged

COUNTS = st.lists(st.integers(0, 4), max_size=6)


def ragged(counts: list[int]) -> Ragged:
    """Values 0, 1, ... of shape (N, 2): all different."""
    return Ragged(torch.arange(2 * sum(counts)).reshape(-1, 2), torch.tensor(counts, dtype=torch.int64))


def rows(of: Ragged) -> list[list[list[int]]]:
    return [row.tolist() for row in of]


def expected(counts: list[int]) -> list[list[list[int]]]:
    numbers = iter(range(2 * sum(counts)))
    return [[[next(numbers), next(numbers)] for _ in range(count)] for count in counts]


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.slices(6))
def test_rows_and_slices_are_those_of_a_list(counts: list[int], part: slice) -> None:
    found, wanted = ragged(counts), expected(counts)
    assert len(found) == len(counts) and rows(found) == wanted
    assert [found[-1 - place].tolist() for place in range(len(counts))] == wanted[::-1]
    assert rows(found[part]) == wanted[part]
    assert found[part].values.shape[1:] == (2,)


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.data())
def test_parts_have_the_rows_and_join_to_the_whole(counts: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(counts)), max_size=3)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, len(counts)])]
    whole = ragged(counts)
    parts = whole.split_rows(sizes)
    assert [len(part) for part in parts] == sizes
    assert [row for part in parts for row in rows(part)] == expected(counts)
    joined = Ragged.cat(parts)
    assert torch.equal(joined.values, whole.values) and torch.equal(joined.counts, whole.counts)


def test_cutting_copies_no_values() -> None:
    whole = ragged([1, 0, 2, 3])
    storage = whole.values.untyped_storage().data_ptr()
    for part in (*whole.split_rows([1, 3]), whole[1:3]):
        assert part.values.untyped_storage().data_ptr() == storage
    assert whole[2].untyped_storage().data_ptr() == storage


def test_rows_become_one_tensor() -> None:
    made = Ragged.of([torch.ones(2, 3), None, torch.zeros(0, 3), torch.full((1, 3), 7.0)])
    assert made.counts.tolist() == [2, 0, 0, 1] and made.values[:, 0].tolist() == [1, 1, 7]
    empty = Ragged.of([None, None], like=torch.ones(5, 3, dtype=torch.uint8))
    assert empty.values.shape == (0, 3) and empty.values.dtype == torch.uint8 and empty.counts.tolist() == [0, 0]


WRONG: dict[str, tuple[Any, str]] = {
    "sum": (lambda: Ragged(torch.zeros(3, 2), torch.tensor([1, 1])), "counts sum to 2 and values has 3 along dim 0"),
    "negative": (lambda: Ragged(torch.zeros(1), torch.tensor([2, -1])), "counts=[2, -1]: a row has 0 values or more"),
    "dtype": (lambda: Ragged(torch.zeros(1), torch.tensor([1], dtype=torch.int32)), "counts are (1,) torch.int32"),
    "scalar": (lambda: Ragged(torch.tensor(1.0), torch.tensor([1])), "values has no dim"),
    "parts": (lambda: ragged([1, 2]).split_rows([1]), "sizes=[1] for 2 rows"),
    "negative parts": (lambda: ragged([1, 2]).split_rows([3, -1]), "sizes=[3, -1] for 2 rows"),
    "shapes": (lambda: Ragged.of([torch.ones(2, 3), torch.ones(2, 4)]), "rows are (2, 3) torch.float32 and (2, 4)"),
    "dtypes": (lambda: Ragged.of([torch.ones(2), torch.ones(2).int()]), "(2,) torch.int32: only dim 0 may differ"),
    "nothing": (lambda: Ragged.of([None]), "rows hold no tensor"),
    "no parts": (lambda: Ragged.cat([]), "cat got no parts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(ValueError) as raised:
        make()
    assert message in str(raised.value)


def test_a_row_that_is_not_there() -> None:
    with pytest.raises(IndexError, match="row 2 of 2"):
        ragged([1, 2])[2]


def test_lightning_moves_values_and_leaves_counts_on_the_host() -> None:
    moved = move_data_to_device({"a": ragged([2, 1]), "keys": [["x"], ["y"]]}, torch.device("meta"))
    assert isinstance(moved["a"], Ragged) and moved["a"].values.device.type == "meta"
    assert moved["a"].counts.tolist() == [2, 1] and moved["keys"] == [["x"], ["y"]]
    assert [len(part) for part in moved["a"].split_rows([1, 1])] == [1, 1]  # and no value is read for it


def test_lightning_changes_the_dtype_of_values() -> None:
    """As its precision plugins do: field by field, into a copy."""
    batch = {"a": Ragged(torch.ones(3, 2), torch.tensor([1, 2])), "b": torch.ones(2)}
    half = apply_to_collection(batch, torch.Tensor, lambda t: t.half() if t.is_floating_point() else t)
    assert half["a"].values.dtype == torch.float16 and half["a"].counts.dtype == torch.int64
    assert batch["a"].values.dtype == torch.float32


def test_pinned_values_move_without_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Values(torch.Tensor):
        def pin_memory(self, device: Any = None) -> Values:  # type: ignore[override]
            seen.append("pin")
            return self

        def is_pinned(self, device: Any = None) -> bool:  # type: ignore[override]
            return "pin" in seen

        def to(self, device: Any, non_blocking: bool = False) -> Values:  # type: ignore[override]
            seen.append((str(device), non_blocking))
            return self

    whole = Ragged(torch.ones(2).as_subclass(Values), torch.tensor([2]))
    whole.to("cuda")
    pinned = whole.pin_memory()
    pinned.to("cuda")
    pinned.to("cuda", non_blocking=False)
    pinned.to("cpu")
    assert seen == [("cuda", False), "pin", ("cuda", True), ("cuda", False), ("cpu", False)]


def test_it_is_a_node_of_pytrees() -> None:
    """FSDP looks for tensors that need gradients through them; any objects may stand in the fields in between."""
    whole = Ragged(torch.ones(3, 2, requires_grad=True), torch.tensor([1, 2]))
    leaves, spec = pytree.tree_flatten({"a": whole})
    assert leaves[0] is whole.values and leaves[1] is whole.counts
    assert pytree.tree_unflatten(leaves, spec)["a"].values is whole.values
    assert pytree.tree_map(lambda t: t.ndim, whole).values == 2
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path({"a": whole})[0]]
    assert paths == ["['a'].values", "['a'].counts"]


class Rows(torch.utils.data.Dataset):
    """Batch i is a Ragged with the counts [i, 1]."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"a": ragged([index, 1])}


def test_it_comes_through_worker_processes() -> None:
    found = list(DataLoader(Rows(), batch_size=None, num_workers=1))
    assert [batch["a"].counts.tolist() for batch in found] == [[0, 1], [1, 1], [2, 1], [3, 1]]
    assert all(rows(batch["a"]) == expected(batch["a"].counts.tolist()) for batch in found)


def test_copies_and_text() -> None:
    whole = ragged([2, 0])
    for other in (pickle.loads(pickle.dumps(whole)), copy.deepcopy(whole)):
        assert torch.equal(other.values, whole.values) and torch.equal(other.counts, whole.counts)
    assert repr(whole) == "Ragged(values=(2, 2) torch.int64 on cpu, counts=[2, 0])"
