"""The place on the data-parallel axis, and the nodesplitter made of it."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import webdataset as wds

from lightning_megascale.data import data_parallel_position, split_by_data_parallel_rank
from lightning_megascale.data.shards import Document, write_shards


def trainer(**strategy: object) -> Namespace:
    return Namespace(strategy=Namespace(**strategy), global_rank=5, world_size=8)


def test_place_comes_from_the_strategy_before_the_global_rank() -> None:
    sampler = {"rank": 1, "num_replicas": 2}
    assert data_parallel_position(trainer(data_parallel_rank=2, data_parallel_size=4, distributed_sampler_kwargs=sampler)) == (2, 4)
    assert data_parallel_position(trainer(distributed_sampler_kwargs=sampler)) == (1, 2)
    assert data_parallel_position(trainer()) == (5, 8)
    assert data_parallel_position(None) == (0, 1)


def test_peers_share_shards_and_the_union_is_all() -> None:
    shards = [f"{i}.tar" for i in range(7)]
    of_rank = {}
    for global_rank in range(8):  # 4 data-parallel x 2 tensor-parallel
        split = split_by_data_parallel_rank(trainer(data_parallel_rank=global_rank // 2, data_parallel_size=4))
        of_rank[global_rank] = list(split(shards))
    assert of_rank[0] == ["0.tar", "4.tar"] and of_rank[3] == of_rank[2] == ["1.tar", "5.tar"]
    assert all(of_rank[2 * i] == of_rank[2 * i + 1] for i in range(4))
    assert sorted(sum((of_rank[i] for i in range(0, 8, 2)), [])) == shards


def test_endless_shards_are_split_lazily() -> None:
    import itertools

    split = split_by_data_parallel_rank(rank=1, size=3)
    assert list(itertools.islice(split(itertools.count()), 4)) == [1, 4, 7, 10]


def test_it_is_a_nodesplitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(
        tmp_path, "train", [Document(f"d{i}", f"text {i}", np.arange(i + 1, dtype=np.uint16)) for i in range(6)], documents_per_shard=2
    )
    urls = sorted(map(str, tmp_path.glob("*.tar")))
    monkeypatch.setenv("RANK", "1")  # must not matter
    monkeypatch.setenv("WORLD_SIZE", "2")
    splitter = pickle.loads(pickle.dumps(split_by_data_parallel_rank(trainer(data_parallel_rank=1, data_parallel_size=3))))
    samples = list(wds.WebDataset(urls, nodesplitter=splitter, shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == ["d2", "d3"]
    assert samples[1]["tokens.npy"].tolist() == [0, 1, 2, 3] and samples[1]["txt"] == "text 3"


def test_too_few_shards_are_refused_on_every_rank() -> None:
    for rank in range(3):
        with pytest.raises(ValueError, match="2 shards for data_parallel_size=3: every data-parallel rank needs a shard"):
            next(split_by_data_parallel_rank(rank=rank, size=3)(["a", "b"]))


@pytest.mark.parametrize(
    ("arguments", "keywords", "words"),
    [
        ((["a.tar"],), {}, r"nodesplitter=split_by_data_parallel_rank\(trainer\)"),  # given to WebDataset without a call
        ((), {}, "both must be given"),
        ((), {"rank": 2, "size": 2}, "0 <= rank < size"),
        ((trainer(),), {"rank": 0, "size": 2}, "give a Trainer, or rank= and size="),
    ],
)
def test_wrong_use_is_refused(arguments: tuple, keywords: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split_by_data_parallel_rank(*arguments, **keywords)
