"""Batches: padded and packed rows hold what their samples hold, and nothing predicts across a border."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megascale.data.collate import IGNORED, PADDING, pack_rows, pad_rows, padding_share
from lightning_megascale.data.packing import bucketed
from lightning_megascale.data.ragged import Ragged
from lightning_megascale.models.config import DecoderConfig
from lightning_megascale.models.decoder import Decoder
from lightning_megascale.module import MegascaleModule
from lightning_megascale.ops import sequence_layout
from lightning_megascale.parallel.context_batch import SequenceCut

PAD = 77
LENGTH = 12


def sample(tokens: int, start: int = 100, images: int | None = None, key: str | None = None) -> dict[str, Any]:
    """Tokens ``start``, ``start + 1``, ...; labels are the tokens, but for the second."""
    ids = torch.arange(start, start + tokens)
    labels = ids.clone()
    labels[1:2] = IGNORED
    made: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if images is not None:
        made["pixel_values"] = (torch.arange(images * 12) + start).to(torch.uint8).reshape(images, 3, 2, 2)
        made["image_sizes"] = torch.full((images, 2), start)
    return made if key is None else {**made, "__key__": key}


ROWS = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=4).filter(any)


def samples_of(rows: list[list[int]]) -> list[list[dict[str, Any]]]:
    return [[sample(n, 1000 * i + 100 * j) for j, n in enumerate(row)] for i, row in enumerate(rows)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 5), st.one_of(st.none(), st.integers(9, 14)))
def test_padded_rows_hold_their_samples(sizes: list[int], multiple: int, length: int | None) -> None:
    given_samples = [sample(n, 100 * i) for i, n in enumerate(sizes)]
    batch = pad_rows(given_samples, length=length, multiple=multiple, pad_id=PAD)
    assert list(batch)[0] == "input_ids"  # Lightning takes the rows of the first tensor
    wide = length or -(-max(sizes) // multiple) * multiple
    assert all(batch[key].shape == (len(sizes), wide) and batch[key].dtype == torch.int64 for key in batch)
    for row, one in enumerate(given_samples):
        n = sizes[row]
        assert batch["input_ids"][row].tolist() == one["input_ids"].tolist() + [PAD] * (wide - n)
        assert batch["labels"][row].tolist() == [IGNORED] + one["labels"].tolist()[1:] + [IGNORED] * (wide - n)
        assert batch["attention_mask"][row].tolist() == [1] * n + [0] * (wide - n)
    assert padding_share(batch) == pytest.approx(1 - sum(sizes) / (len(sizes) * wide))


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_packed_rows_hold_their_samples(rows: list[list[int]]) -> None:
    given_rows = samples_of(rows)
    batch = pack_rows(given_rows, length=LENGTH, pad_id=PAD)
    assert list(batch)[0] == "input_ids"
    for row, one in enumerate(given_rows):
        rest = LENGTH - sum(rows[row])
        expected: dict[str, list[int]] = {
            "input_ids": [int(t) for s in one for t in s["input_ids"]] + [PAD] * rest,
            "labels": [int(t) for s in one for t in [IGNORED, *s["labels"][1:]]] + [IGNORED] * rest,
            "position_ids": [p for s in one for p in range(len(s["input_ids"]))] + [0] * rest,
            "document_ids": [d for d, s in enumerate(one) for _ in s["input_ids"]] + [PADDING] * rest,
        }
        for key, values in expected.items():
            assert batch[key].dtype == torch.int64 and batch[key][row].tolist() == values, key
        assert batch["position_ids"][row].tolist() == sequence_layout.positions_of(batch["document_ids"][row].numpy()).tolist()
    assert padding_share(batch) == pytest.approx(1 - sum(map(sum, rows)) / (len(rows) * LENGTH))


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_borders_are_those_of_documents_and_padding(rows: list[list[int]]) -> None:
    batch = pack_rows(samples_of(rows), length=LENGTH, pad_id=PAD)
    borders, longest = batch["cu_seqlens"], 0
    assert borders.dtype == torch.int32 and borders.device.type == "cpu"
    segments = borders.shape[1] - 1
    assert segments & (segments - 1) == 0
    for row, sizes in enumerate(rows):
        real = sizes + [LENGTH - sum(sizes)] * (sum(sizes) < LENGTH)
        assert borders[row].tolist() == [0, *np.cumsum(real).tolist()] + [LENGTH] * (segments - len(real))
        longest = max(longest, *real)
        for begin, end in zip(borders[row, :-1].tolist(), borders[row, 1:].tolist()):
            assert len(set(batch["document_ids"][row, begin:end].tolist())) <= 1
    assert type(batch["max_seqlen"]) is int and batch["max_seqlen"] == longest
    without = pack_rows(samples_of(rows), length=LENGTH, pad_id=PAD, cu_seqlens=False)
    assert set(batch) - set(without) == {"cu_seqlens", "max_seqlen"}


def test_the_mark_of_padding_is_that_of_context_parallelism() -> None:
    assert PADDING == sequence_layout.PADDING


@pytest.mark.parametrize("packed", [False, True])
def test_what_varies_is_ragged_in_the_order_of_documents(packed: bool) -> None:
    first, second, third = sample(3, 10, 2, "a"), sample(2, 20, key="b"), sample(4, 30, 1, "c")
    if packed:
        batch = pack_rows([[first, second], [], [third]], length=6, pad_id=PAD)
        assert batch["__key__"] == [["a", "b"], [], ["c"]] and batch["pixel_values"].counts.tolist() == [2, 0, 1]
    else:
        batch = pad_rows([first, second, third], pad_id=PAD)
        assert batch["__key__"] == [["a"], ["b"], ["c"]] and batch["pixel_values"].counts.tolist() == [2, 0, 1]
    pixels = batch["pixel_values"]
    assert isinstance(pixels, Ragged) and pixels.values.dtype == torch.uint8
    assert torch.equal(pixels.values, torch.cat([first["pixel_values"], third["pixel_values"]]))
    assert batch["image_sizes"].values.tolist() == [[10, 10], [10, 10], [30, 30]]


def test_a_batch_whose_first_sample_has_no_image() -> None:
    batch = pad_rows([sample(2, 10), sample(2, 20, 1), {**sample(2, 30), "caption": "x"}], pad_id=PAD)
    assert batch["pixel_values"].counts.tolist() == [0, 1, 0] and batch["image_sizes"].values.tolist() == [[20, 20]]
    assert batch["caption"] == [[""], [""], ["x"]]


def test_two_documents_with_images_in_a_row() -> None:
    batch = pack_rows([[sample(2, 10, 1), sample(2, 20, 0), sample(2, 30, 2)]], length=6, pad_id=PAD)
    assert batch["pixel_values"].counts.tolist() == [3]
    assert batch["image_sizes"].values[:, 0].tolist() == [10, 30, 30]


def test_arrays_of_numpy() -> None:
    one = {key: value.numpy() for key, value in sample(3, images=1).items()}
    for batch in (pad_rows([one], pad_id=PAD), pack_rows([[one]], length=4, pad_id=PAD)):
        assert batch["input_ids"][0, :3].tolist() == [100, 101, 102] and batch["pixel_values"].values.shape == (1, 3, 2, 2)


def test_images_without_any_keep_the_key_and_nothing_drops_it() -> None:
    assert pad_rows([sample(3, images=0)], pad_id=PAD)["pixel_values"].values.shape == (0, 3, 2, 2)
    assert "pixel_values" not in pad_rows([{**sample(3), "pixel_values": None}], pad_id=PAD)


def test_a_packed_batch_is_what_its_documents_are_apart() -> None:
    """Through the package's own shift of labels: the same targets are counted as in rows of their own."""
    module = MegascaleModule("tiny")
    documents = [sample(5, 10), sample(1, 20), sample(4, 30)]
    packed = module._aligned_labels(pack_rows([documents], length=LENGTH, pad_id=PAD))[0]
    apart = [module._aligned_labels(pad_rows([one], pad_id=PAD))[0].tolist() for one in documents]
    assert packed.tolist() == [label for row in apart for label in row] + [IGNORED] * 2
    assert apart == [[IGNORED, 12, 13, 14, IGNORED], [IGNORED], [IGNORED, 32, 33, IGNORED]]


def test_packed_documents_give_the_loss_of_documents_apart() -> None:
    """Float64, with a mask between documents laid into the attention of the package's decoder."""
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=50, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_position_embeddings=32)
    model = Decoder(config).double()
    documents = [sample(5, 10), sample(3, 20), sample(2, 30)]
    batch = pack_rows([documents], length=LENGTH, pad_id=0)
    ids, places = batch["document_ids"][0], torch.arange(LENGTH)
    allowed = (ids[:, None] == ids[None]) & (places[:, None] >= places[None])

    class Core(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)

    def loss(of: dict[str, Any]) -> torch.Tensor:
        labels = torch.nn.functional.pad(of["labels"][:, 1:], (0, 1), value=IGNORED)
        return model(of["input_ids"], position_ids=of.get("position_ids"), labels=labels)[0]

    apart = torch.stack([loss(pad_rows([one], pad_id=0)) for one in documents]).sum()
    for block in model.layers:
        block.attention.core = Core()
    torch.testing.assert_close(loss(batch), apart, rtol=1e-10, atol=1e-10)


def test_context_parallelism_takes_a_packed_batch() -> None:
    batch = pack_rows([[sample(5, 10), sample(3, 20)], [sample(7, 30)]], length=LENGTH, pad_id=PAD, cu_seqlens=False)
    cuts = [SequenceCut(2, rank, "packed")(batch)[0] for rank in range(2)]
    for row, wanted in enumerate(([*range(10, 15), *range(20, 23)], [*range(30, 37)])):
        tokens = torch.cat([cut["input_ids"][row][cut["document_ids"][row] != PADDING] for cut in cuts])
        assert sorted(tokens.tolist()) == wanted


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 2))
def test_buckets_hold_each_sample_once_and_pad_least(sizes: list[int], batch_size: int, key: int) -> None:
    batches = bucketed(sizes, batch_size, key)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    assert sorted(map(len, batches), reverse=True) == [min(batch_size, len(sizes) - start) for start in range(0, len(sizes), batch_size)]
    spans = sorted((min(sizes[i] for i in batch), max(sizes[i] for i in batch)) for batch in batches)
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
    assert batches == bucketed(np.array(sizes), batch_size, key)


def test_buckets_are_mixed() -> None:
    sizes = np.random.default_rng(0).integers(1, 500, 4096)
    batches = bucketed(sizes, 8, 3)
    means = [sizes[batch].mean() for batch in batches]
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 4 / np.sqrt(len(means))
    assert bucketed(sizes, 8, 4) != batches
    ties = [bucketed([5] * 12, 4, key) for key in range(4)]
    assert len({frozenset(map(frozenset, one)) for one in ties}) == 4  # equal lengths meet others every time
    with pytest.raises(ValueError, match="batch_size=0"):
        bucketed(sizes, 0, 1)


OTHER = {**sample(3, 20, 1, "k"), "pixel_values": torch.zeros(1, 3, 4, 4, dtype=torch.uint8)}
REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "none": ([], "no samples: a batch needs at least one"),
    "no labels": ([{"input_ids": torch.ones(2).long(), "__key__": "k"}], "sample k has no labels, only input_ids, __key__"),
    "ragged labels": ([{**sample(3, key="k"), "labels": torch.zeros(2).long()}], "sample k has 3 input_ids and 2 labels"),
    "floats": ([{**sample(3), "labels": torch.zeros(3)}], r"labels of a sample are (3,) torch.float32: must be (T,) torch.int64"),
    "batched": ([{**sample(3), "input_ids": torch.zeros(1, 3).long()}], "input_ids of a sample are (1, 3)"),
    "empty": ([sample(0, key="k")], "sample k has no tokens"),
    "long": ([sample(13, key="k")], "sample k of 13 tokens ends at 13 in a row of length=12"),
    "shapes": ([sample(3, 10, 1, "j"), OTHER], "pixel_values of sample k is (1, 3, 4, 4) torch.uint8 and of sample j, in the same batch"),
    "numbers": ([{**sample(3, key="k"), "score": 3.0}], "score of sample k is a float"),
    "0-dim": ([{**sample(3, key="k"), "score": torch.tensor(3.0)}], "make it an array (1,)"),
    "ours": ([{**sample(3, key="k"), "attention_mask": torch.ones(3)}], "sample k has attention_mask, which the batch makes itself"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    samples, message = REFUSED[case]
    for make in (lambda: pad_rows(samples, length=LENGTH, pad_id=PAD), lambda: pack_rows([samples], length=LENGTH, pad_id=PAD)):
        with pytest.raises(ValueError) as raised:
            make()
        assert message in str(raised.value)


def test_a_row_that_is_too_full() -> None:
    with pytest.raises(ValueError, match="sample b of 7 tokens ends at 13 in a row of length=12: cut it where it is encoded"):
        pack_rows([[sample(6, key="a"), sample(7, key="b")]], length=LENGTH, pad_id=PAD)
    with pytest.raises(ValueError, match="multiple=0"):
        pad_rows([sample(3)], multiple=0, pad_id=PAD)


def test_a_batch_without_marks_has_no_padding() -> None:
    assert padding_share({"input_ids": torch.zeros(2, 3)}) == 0.0
