"""Position -> sequence: permutations, cutting, epochs, ignored rows."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_megascale.data.shards import Document, TokenShards, write_shards
from lightning_megascale.data.stream import SequenceStream, ignored, permutation

END = 9999


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    """Documents of 1, 4, 0, 30, 7 tokens, all tokens different: 47 with their ends."""
    start, documents = 0, []
    for i, length in enumerate((1, 4, 0, 30, 7)):
        documents.append(Document(f"d{i}", "", np.arange(start, start + length, dtype=np.uint16)))
        start += length
    return TokenShards(write_shards(tmp_path, "train", documents, documents_per_shard=2))


def test_splitmix64_is_the_published_one() -> None:
    """The first outputs for seed 0 of the authors' splitmix64.c."""
    from lightning_megascale.data.shuffle import _mix

    golden = np.uint64(0x9E3779B97F4A7C15)
    states = np.arange(3, dtype=np.uint64) * golden
    assert [hex(int(x)) for x in _mix(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_permutations_are_complete_and_differ_by_key() -> None:
    for size in (1, 2, 63, 1000):
        assert sorted(permutation(size, 3, 4).tolist()) == list(range(size))
    seen = {tuple(permutation(50, seed, epoch, kind)) for seed in range(4) for epoch in range(4) for kind in (1, 2)}
    assert len(seen) == 32
    assert permutation(6, 0, 0, 1).tolist() == permutation(6, 0, 0, 1).tolist()


def test_storage_order_is_joined_by_the_end_token_and_cut(shards: TokenShards) -> None:
    stream = SequenceStream(shards, 5, END)
    joined = [0, END, 1, 2, 3, 4, END, END, *range(5, 35), END, *range(35, 42), END]
    assert len(joined) == 47 and len(stream) == 9
    assert [stream.tokens(p).tolist() for p in range(9)] == [joined[i : i + 5] for i in range(0, 45, 5)]
    assert stream.tokens(9).tolist() == joined[:5]  # the next epoch


def test_each_epoch_holds_each_token_once_but_for_the_remainder(shards: TokenShards) -> None:
    stream = SequenceStream(shards, 5, END, seed=1)
    orders = []
    for epoch in range(6):
        tokens = np.concatenate([stream.tokens(p) for p in range(epoch * 9, epoch * 9 + 9)])
        words = tokens[tokens != END]
        assert len(set(words.tolist())) == len(words) and len(tokens) == 45
        assert (tokens == END).sum() >= 3 and len(words) >= 40
        orders.append(tuple(tokens))
    assert len(set(orders)) == 6


def test_sequences_follow_the_shuffled_documents(shards: TokenShards) -> None:
    """Joined again in the order of their places, the sequences of an epoch are the documents in the shuffled order."""
    stream = SequenceStream(shards, 5, END, seed=7)
    documents, places = permutation(5, 7, 2, 1), permutation(9, 7, 2, 2)
    joined = np.concatenate([np.append(shards[i].astype(np.int64), END) for i in documents])
    for index in range(9):
        start = 5 * places[index]
        np.testing.assert_array_equal(stream.tokens(18 + index), joined[start : start + 5])


def test_seeds_differ_and_access_is_random(shards: TokenShards) -> None:
    a, b, c = (SequenceStream(shards, 5, END, seed=seed) for seed in (1, 1, 2))
    forward = [a.tokens(p).tolist() for p in range(30)]
    assert [b.tokens(p).tolist() for p in reversed(range(30))] == forward[::-1]
    assert [c.tokens(p).tolist() for p in range(30)] != forward
    assert pickle.loads(pickle.dumps(a)).tokens(13).tolist() == forward[13]


def test_items_are_int64_with_unshifted_labels_or_none(shards: TokenShards) -> None:
    stream = SequenceStream(shards, 5, END, seed=1)
    item = stream[4]
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert torch.equal(item["input_ids"], item["labels"]) and item["labels"].data_ptr() != item["input_ids"].data_ptr()
    filler = stream[ignored(4)]
    assert torch.equal(filler["input_ids"], item["input_ids"]) and filler["labels"].tolist() == [-100] * 5
    assert stream[ignored(0)]["labels"].tolist() == [-100] * 5


def test_a_text_shorter_than_a_sequence_is_refused(shards: TokenShards) -> None:
    with pytest.raises(ValueError, match="sequence_length=48: the 5 documents hold 47 tokens in all"):
        SequenceStream(shards, 48, END)
