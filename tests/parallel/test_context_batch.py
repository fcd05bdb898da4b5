"""A batch cut along its sequence, without ranks: every token, target and extra tensor on one rank, and the way back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_megascale.ops.sequence_layout import LAYOUTS, PADDING, positions_of
from lightning_megascale.parallel import context_shard
from lightning_megascale.parallel.context_batch import SequenceCut
from lightning_megascale.parallel.context_shard import SequenceShard

IGNORED = -100
Cuts = list[tuple[Any, SequenceShard]]


def cuts(batch: Any, ranks: int = 2, layout: str = "auto", **options: Any) -> Cuts:
    """What each rank gets."""
    return [SequenceCut(ranks, rank, layout, **options)(batch) for rank in range(ranks)]


@contextmanager
def gathers(parts: list[Tensor], own: int) -> Iterator[None]:
    """The other ranks' tensors arrive as from a process group."""

    class Group:
        @staticmethod
        def get_world_size(group: Any) -> int:
            return len(parts)

        @staticmethod
        def all_gather(into: list[Tensor], tensor: Tensor, group: Any) -> None:
            if tensor.ndim < 2:  # nothing of tokens: alike on all
                for place in into:
                    place.copy_(tensor)
                return
            for place, part in zip(into, parts):
                place.copy_(part[:, : place.shape[1]])
            assert torch.equal(tensor, parts[own][:, : tensor.shape[1]])

        @staticmethod
        def all_gather_object(into: list[Any], value: Any, group: Any) -> None:
            into[:] = [value] * len(into)

    with mock.patch.object(context_shard, "dist", Group):
        yield


def whole(found: Cuts, key: Any) -> Tensor:
    """An entry of all ranks' batches as rank 0 puts it together again."""
    parts = [batch[key] for batch, _ in found]
    results = []
    for rank, (batch, shard) in enumerate(found):
        with gathers(parts, rank):
            results.append(shard.whole({"x": batch[key]}, object())["x"])  # type: ignore[arg-type]
    assert all(torch.equal(result, results[0]) for result in results), "ranks put different rows together"
    return results[0]


# ---- random batches -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    batch: dict[str, Tensor]
    ranks: int
    layout: str
    multiple: int


@st.composite
def batches(draw: st.DrawFn) -> Drawn:
    """Rows of any length, with documents or masks or neither; the ids are all different, so that each stands for its token."""
    ranks, multiple = draw(st.sampled_from((1, 2, 3, 4))), draw(st.sampled_from((1, 2, 3)))
    layout = draw(st.sampled_from((*LAYOUTS, "auto")))
    rows, length = draw(st.integers(1, 3)), draw(st.integers(4, 26) | st.sampled_from((1, 2)))
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    ids = torch.arange(rows * length).reshape(rows, length)
    labels = ids + 1000
    labels[torch.from_numpy(generator.random((rows, length)) < 0.3)] = IGNORED
    batch = {"input_ids": ids, "labels": labels, "features": ids[..., None] * torch.tensor([1.0, 2.0, 3.0])}
    kind = draw(st.sampled_from(("plain", "documents", "right padding", "left padding", "both")))
    if kind in ("documents", "both"):
        batch["document_ids"] = torch.from_numpy(np.sort(generator.integers(0, 5, (rows, length)), axis=1))
    if kind in ("right padding", "both", "left padding"):
        kept = torch.from_numpy(generator.integers(1, length + 1, rows))[:, None]
        mask = torch.arange(length) < kept
        batch["attention_mask"] = (mask.flip(1) if kind == "left padding" else mask).long()
    if draw(st.booleans()):
        batch["position_ids"] = torch.arange(length)[None] + 7
    return Drawn(batch, ranks, layout, multiple)


def pairs_of_step(batch: dict[str, Tensor], alignment: str) -> Counter:
    """(token whose logits are scored, target) of everything a step scores."""
    ids, labels = batch["input_ids"], batch["shift_labels" if alignment == "huggingface" else "labels"]
    if alignment == "shift":
        ids, labels = ids[:, :-1], labels[:, 1:]
    counts = labels != IGNORED
    return Counter(zip(ids[counts].tolist(), labels[counts].tolist()))


def pairs_of_one_device(batch: dict[str, Tensor], alignment: str) -> Counter:
    ids, labels = batch["input_ids"], batch["labels"]
    if alignment != "aligned":
        ids, labels = ids[:, :-1], labels[:, 1:]
    counts = labels != IGNORED
    return Counter(zip(ids[counts].tolist(), labels[counts].tolist()))


@settings(deadline=None, max_examples=150)
@given(batches(), st.sampled_from(("aligned", "shift", "huggingface")))
def test_every_token_and_target_is_on_one_rank(drawn: Drawn, alignment: str) -> None:
    batch = drawn.batch
    rows, length = batch["input_ids"].shape
    found = cuts(batch, drawn.ranks, drawn.layout, label_alignment=alignment, multiple=drawn.multiple)
    scored: Counter = Counter()
    for own, _ in found:
        scored += pairs_of_step(own, alignment)
    assert scored == pairs_of_one_device(batch, alignment)
    for key in ("input_ids", "features"):
        assert torch.equal(whole(found, key), batch[key])
    documents = batch.get("document_ids", torch.zeros(rows, length, dtype=torch.int64)).clone()
    if "attention_mask" in batch:
        documents[batch["attention_mask"] == 0] = PADDING
    assert torch.equal(whole(found, "document_ids"), documents)
    if "position_ids" in batch:
        positions = batch["position_ids"].expand(rows, length)
    elif "document_ids" in batch:
        positions = torch.from_numpy(np.stack([positions_of(row) for row in documents.numpy()]))
    else:
        positions = torch.arange(length).expand(rows, length)
    assert torch.equal(whole(found, "position_ids"), positions)
    assert len({shard.local_length for _, shard in found}) == 1 and found[0][1].local_length % drawn.multiple == 0
    for own, shard in found:
        assert own["input_ids"].shape == own["labels"].shape == (rows, shard.local_length)
        assert own["features"].shape == (rows, shard.local_length, 3)
        lengths = [sum(run.length for run in runs) for runs in (table[shard.rank] for table in shard.tables)]
        wanted = (own["document_ids"] != PADDING).sum(1).tolist()
        assert lengths == (wanted if len(lengths) > 1 else wanted[:1])


@settings(deadline=None, max_examples=60)
@given(batches(), st.data())
def test_runs_say_what_the_documents_say(drawn: Drawn, data: st.DataObject) -> None:
    """Attention reads the tables, the model reads the tensors: both name the same tokens; a microbatch's part too."""
    found = cuts(drawn.batch, drawn.ranks, drawn.layout, multiple=drawn.multiple)
    own, shard = found[data.draw(st.integers(0, drawn.ranks - 1))]
    start = data.draw(st.integers(0, shard.rows - 1))
    for part, first in ((shard, 0), (shard.part(start, shard.rows - start), start)):
        tables = part.tables if len(part.tables) > 1 or part.rows == 1 else part.tables * part.rows
        assert len(tables) == part.rows
        for row, table in enumerate(tables):
            named = {run.start + i: run.document for run in table[shard.rank] for i in range(run.length)}
            documents = own["document_ids"][first + row].tolist()
            documents = documents if part.has_documents else [min(number, 0) for number in documents]  # a single one is called 0
            assert named == {i: document for i, document in enumerate(documents) if document != PADDING}
            assert torch.equal(part.document_ids[row], own["document_ids"][first + row])


# ---- kinds of batches -----------------------------------------------------------------------------------------------------------------

IDS = torch.arange(16).reshape(2, 8)
LABELS = IDS + 100


@dataclass
class Texts:
    input_ids: Tensor
    labels: Tensor
    names: list[str]


class Pair(NamedTuple):
    ids: Tensor
    labels: Tensor


def test_a_dict_with_other_things_in_it() -> None:
    picture, lengths, nested = torch.randn(2, 3, 4, 4), torch.tensor([8, 8]), {"mask": IDS > 3, "deep": [IDS * 2, "text"]}
    batch = {"input_ids": IDS, "labels": LABELS, "pixels": picture, "lengths": lengths, "names": ["a", "b"], "scale": 2.0, "more": nested}
    (own, _), _ = cuts({**batch, "numbers": IDS.numpy(), "lr": torch.tensor(0.5)}, layout="headtail")
    places = [0, 1, 6, 7]
    assert torch.equal(own["input_ids"], IDS[:, places]) and torch.equal(own["labels"], LABELS[:, places])
    assert own["pixels"] is picture and own["lengths"] is lengths and own["names"] == ["a", "b"] and own["scale"] == 2.0
    assert torch.equal(own["more"]["mask"], (IDS > 3)[:, places]) and torch.equal(own["more"]["deep"][0], IDS[:, places] * 2)
    assert own["more"]["deep"][1] == "text" and float(own["lr"]) == 0.5
    assert isinstance(own["numbers"], np.ndarray) and own["numbers"].tolist() == IDS[:, places].tolist()
    assert own["position_ids"].tolist() == [places, places] and own["document_ids"].tolist() == [[0] * 4, [0] * 4]


def test_what_fills_places_without_a_token() -> None:
    """5 tokens over 2 ranks: places 5 to 7 of the row are none. Labels there count nothing, documents are padding."""
    ids = torch.arange(1, 6)[None]
    batch = {"input_ids": ids, "labels": ids, "other_labels": ids, "weights": ids + 0.5, "attention_mask": torch.ones_like(ids)}
    _, (own, shard) = cuts(batch, layout="contiguous")
    assert shard.length == 5 and shard.local_length == 3
    assert own["input_ids"].tolist() == [[4, 5, 0]] and own["labels"].tolist() == own["other_labels"].tolist() == [[4, 5, IGNORED]]
    assert own["weights"].tolist() == [[4.5, 5.5, 0.0]] and own["attention_mask"].tolist() == [[1, 1, 0]]
    assert own["document_ids"].tolist() == [[0, 0, PADDING]] and own["position_ids"].tolist() == [[3, 4, 0]]


def test_a_dataclass_and_tuples() -> None:
    (own, _), _ = cuts(Texts(IDS, LABELS, ["a", "b"]), layout="contiguous", label_alignment="shift")
    assert isinstance(own, Texts) and own.names == ["a", "b"]
    assert own.input_ids.tolist() == [[0, 1, 2, 3, 0], [8, 9, 10, 11, 0]]  # the last place is a spare one
    assert own.labels.tolist() == [[IGNORED, 101, 102, 103, 104], [IGNORED, 109, 110, 111, 112]]
    for batch in ((IDS, LABELS), [IDS, LABELS], Pair(IDS, LABELS)):
        _, (pair, _) = cuts(batch, layout="contiguous")
        assert type(pair) is type(batch)
        assert torch.equal(pair[0], IDS[:, 4:]) and torch.equal(pair[1], LABELS[:, 4:])
    _, (alone, shard) = cuts(IDS, layout="contiguous")
    assert torch.equal(alone, IDS[:, 4:]) and torch.equal(shard.position_ids, torch.tensor([[4, 5, 6, 7]] * 2))


@pytest.mark.parametrize("alignment", ["aligned", "shift", "huggingface"])
def test_ids_that_are_the_labels(alignment: str) -> None:
    """``{"input_ids": x, "labels": x}``: one tensor in two roles."""
    found = cuts({"input_ids": IDS, "labels": IDS}, label_alignment=alignment)
    assert torch.equal(whole(found, "input_ids"), IDS)
    scored: Counter = Counter()
    for own, _ in found:
        scored += pairs_of_step(own, alignment)
    assert scored == pairs_of_one_device({"input_ids": IDS, "labels": IDS}, alignment)
    if alignment == "aligned":
        for own, _ in cuts((IDS, IDS)):
            assert torch.equal(own[0], own[1]) and own[0].shape == (2, 4)


def test_what_says_which_targets_count_follows_them() -> None:
    """A step that shifts ``labels[:, 1:]`` also shifts the mask and the weights it multiplies them with: both stand where labels do."""
    ids = torch.arange(8)[None]
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
    batch = {"input_ids": ids, "labels": ids + 100, "attention_mask": mask, "loss_weights": ids * 0.5, "loss_mask": ids % 3 == 0}
    for layout in LAYOUTS:
        scored: list[tuple[int, int, float, bool]] = []
        for own, _ in cuts(batch, layout=layout, label_alignment="shift"):
            labels = own["labels"].masked_fill(own["attention_mask"] == 0, IGNORED)[:, 1:]
            named = (own["input_ids"][:, :-1], labels, own["loss_weights"][:, 1:], own["loss_mask"][:, 1:])
            counts = labels != IGNORED
            scored += zip(*(tensor[counts].tolist() for tensor in named))
        assert sorted(scored) == [(i, i + 101, (i + 1) * 0.5, (i + 1) % 3 == 0) for i in range(4)], layout


def test_huggingface_labels_stand_twice() -> None:
    """transformers computes a loss only where it is given labels."""
    (own, _), _ = cuts({"input_ids": IDS, "labels": LABELS}, layout="contiguous", label_alignment="huggingface")
    assert own["labels"].tolist() == own["shift_labels"].tolist() == [[101, 102, 103, 104], [109, 110, 111, 112]]


def test_shift_labels_of_the_loader_stay() -> None:
    """A collator that has shifted them itself knows better (no target across documents)."""
    targets = torch.full_like(IDS, IGNORED)
    targets[:, :3] = LABELS[:, 1:4]
    found = cuts({"input_ids": IDS, "labels": LABELS, "shift_labels": targets}, label_alignment="huggingface")
    scored: Counter = Counter()
    for own, _ in found:
        scored += pairs_of_step(own, "huggingface")
    assert scored == Counter({(0, 101): 1, (1, 102): 1, (2, 103): 1, (8, 109): 1, (9, 110): 1, (10, 111): 1})


def test_predictions_come_back_whatever_their_dtype_and_nest() -> None:
    found = cuts({"input_ids": torch.arange(7)[None]}, training=False)
    parts = [batch["input_ids"] for batch, _ in found]
    with gathers([part.double()[..., None] * torch.ones(2) for part in parts], 0):
        logits = parts[0].double()[..., None] * torch.ones(2)
        result = found[0][1].whole({"logits": logits, "kept": (torch.zeros(3), "text"), "count": 4}, object())  # type: ignore[arg-type]
    assert torch.equal(result["logits"], torch.arange(7).double()[None, :, None] * torch.ones(2))
    assert result["kept"][0].shape == (3,) and result["kept"][1] == "text" and result["count"] == 4


def test_auto_layout() -> None:
    assert cuts({"input_ids": IDS})[0][1].order[0].tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]] * 2)
    shard = cuts({"input_ids": IDS, "document_ids": documents})[0][1]
    assert shard.has_documents and shard.order[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]  # a document each: nothing to exchange
    full = cuts({"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "document_ids": torch.full_like(IDS, 4)})[0][1]
    assert not full.has_documents and full.order[0, 0].tolist() == [0, 1, 6, 7]


def test_a_cut_leaves_the_batch_as_it_was() -> None:
    batch = {"input_ids": IDS.clone(), "labels": LABELS.clone()}
    cuts(batch, label_alignment="huggingface")
    assert list(batch) == ["input_ids", "labels"] and torch.equal(batch["input_ids"], IDS) and torch.equal(batch["labels"], LABELS)


# ---- refusals -------------------------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, str]] = {
    "no tokens": ({"x": IDS}, "this one has no tensor of tokens (B, L): give a dict with Hugging Face's keys"),
    "tokens of one row": ({"input_ids": IDS[0]}, "no tensor of tokens (B, L)"),
    "no batch": ("text", "it is a str"),
    "labels of another length": ({"input_ids": IDS, "labels": LABELS[:, 1:]}, "labels are (2, 7) and the tokens (2, 8)"),
    "labels of a row": ({"input_ids": IDS, "labels": LABELS[:, 0]}, "labels are (2,) and the tokens (2, 8)"),
    "float labels": ({"input_ids": IDS, "labels": LABELS.float()}, "labels have to be whole numbers (B, L), one for each token"),
    "labels as a list": ({"input_ids": IDS, "labels": LABELS.tolist()}, "labels are list"),
    "cu_seqlens": ({"input_ids": IDS, "cu_seqlens": torch.tensor([0, 3, 8])}, "the batch has cu_seqlens, which describe rows"),
    "flattened": ({"input_ids": IDS, "cu_seq_lens_q": IDS[0], "max_length_q": 5}, "cu_seq_lens_q, max_length_q"),
    "a mask between tokens": (
        {"input_ids": IDS, "labels": LABELS, "attention_mask_4d": torch.ones(2, 1, 8, 8)},
        "batch['attention_mask_4d'] has shape (2, 1, 8, 8), which looks like an attention mask between all tokens",
    ),
    "a 4-D attention_mask": (
        {"input_ids": IDS, "labels": LABELS, "attention_mask": torch.ones(2, 1, 8, 8)},
        "attention_mask is (2, 1, 8, 8), and must be (2, 8)",
    ),
    "a mask of another length": (
        {"input_ids": IDS, "labels": LABELS, "attention_mask": torch.ones(2, 9)},
        "attention_mask is (2, 9), and must be (2, 8) under context parallelism: one number for each token",
    ),
    "documents of a row": ({"input_ids": IDS, "document_ids": torch.zeros(8)}, "document_ids is (8,), and must be (2, 8)"),
    "a document below -1": ({"input_ids": IDS, "document_ids": IDS - 3}, "document_ids hold -3: documents count from 0"),
    "a document in two parts": (
        {"input_ids": IDS, "labels": LABELS, "document_ids": torch.tensor([[0] * 8, [0, 0, 1, 1, 0, 0, 0, 0]])},
        "row 1 of document_ids takes up a document again after another or after padding",
    ),
    "a mask with a hole": (
        {"input_ids": IDS, "labels": LABELS, "attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]] * 2)},
        "row 0 of attention_mask takes up a document again after another or after padding",
    ),
    "positions of another length": ({"input_ids": IDS, "position_ids": IDS[:, :4]}, "position_ids are (2, 4), and must be (2, 8)"),
    "positions for two coordinates": ({"input_ids": IDS, "position_ids": torch.zeros(3, 2, 8)}, "position_ids are (3, 2, 8)"),
    "packed positions alone": (
        {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)},
        "position_ids start again inside a row, as packed documents do, and the batch has no document_ids",
    ),
    "no labels and an odd length": (
        {"input_ids": IDS[:, :7]},
        "need 1 places that hold no token, and the batch has no 'labels' to leave them out of the loss",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    batch, words = REFUSED[name]
    told = []
    for rank in range(2):
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            SequenceCut(2, rank)(batch)
        told.append(str(error.value))
    assert told[0] == told[1]


def test_a_tuple_whose_labels_would_have_to_be_told() -> None:
    """Places without a token, which labels of -100 leave out, and a second tensor that may be anything."""
    for batch, alignment in (((IDS, LABELS), "shift"), ((IDS[:, :7], LABELS[:, :7]), "aligned")):
        with pytest.raises(ValueError, match="in a tuple nothing says which the labels are: give a dict with 'input_ids' and 'labels'"):
            SequenceCut(2, 0, label_alignment=alignment)(batch)


def test_a_prediction_that_is_of_no_row_and_differs_between_ranks() -> None:
    found = cuts({"input_ids": IDS}, layout="contiguous")

    class Group:
        get_world_size = staticmethod(lambda group: 2)

        @staticmethod
        def all_gather(into: list[Tensor], tensor: Tensor, group: Any) -> None:
            into[0].copy_(tensor)
            into[1].copy_(tensor + 1)

        @staticmethod
        def all_gather_object(into: list[Any], value: Any, group: Any) -> None:
            into[:] = [value, value]

    with mock.patch.object(context_shard, "dist", Group), pytest.raises(ValueError, match=re.escape("returned a tensor of shape (2,)")):
        found[0][1].whole(torch.zeros(2), object())  # type: ignore[arg-type]


def test_a_float_that_may_be_features_of_a_row() -> None:
    with pytest.raises(ValueError, match=re.escape("batch['x'] has a number for each row and token, (2, 8), or that many features")):
        SequenceCut(2, 0)({"input_ids": IDS, "labels": LABELS, "x": torch.randn(2, 8)})


def test_rows_that_do_not_divide_name_the_lengths_that_do() -> None:
    with pytest.raises(ValueError, match="give rows of a multiple of 8 tokens"):
        SequenceCut(2, 0, "headtail", multiple=2)({"input_ids": IDS[:, :7]})
    own, _ = SequenceCut(2, 0, "headtail", training=False)({"input_ids": IDS[:, :7]})  # a prediction trains nothing
    assert own["input_ids"].shape == (2, 4)


def test_an_unknown_layout() -> None:
    with pytest.raises(ValueError, match="context_parallel_layout='striped': must be one of contiguous, headtail, packed"):
        SequenceCut(2, 0, "striped")({"input_ids": IDS, "labels": LABELS})
