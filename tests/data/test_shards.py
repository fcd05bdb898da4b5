"""Shards: webdataset's writer, read by offset."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from lightning_megascale.data.shards import Document, TokenShards, token_dtype, write_shards


def documents(count: int, dtype: type = np.uint16) -> list[Document]:
    return [Document(f"d{i:03}", "é" * i, (np.arange(i * 3) + 1000 * i).astype(dtype)) for i in range(1, count + 1)]


def test_tokens_come_back_in_order_over_shards(tmp_path: Path) -> None:
    for dtype in (np.uint16, np.int32):
        folder = tmp_path / np.dtype(dtype).name
        folder.mkdir()
        paths = write_shards(folder, "train", documents(7, dtype), documents_per_shard=3)
        assert [path.name for path in paths] == ["train-000000.tar", "train-000001.tar", "train-000002.tar"]
        shards = TokenShards(paths)
        again = pickle.loads(pickle.dumps(shards))
        assert shards.lengths.tolist() == [3, 6, 9, 12, 15, 18, 21]
        for i, document in enumerate(documents(7, dtype)):
            np.testing.assert_array_equal(shards[i], document.tokens)
            np.testing.assert_array_equal(again[i], document.tokens)
            assert shards[i].dtype == dtype


def test_a_pickled_reader_carries_no_data(tmp_path: Path) -> None:
    shards = TokenShards(write_shards(tmp_path, "train", [Document("a", "", np.zeros(100_000, dtype=np.int32))]))
    assert shards[0].sum() == 0
    assert len(pickle.dumps(shards)) < 2000


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, "train", documents(3))
    assert (tmp_path / "a" / "train-000000.tar").read_bytes() == (tmp_path / "b" / "train-000000.tar").read_bytes()


def test_extended_headers_are_no_documents(tmp_path: Path) -> None:
    """TarWriter without a fixed time writes one PAX header per member; a walk over headers that does not know them counts double."""
    with wds.TarWriter(str(tmp_path / "x.tar")) as writer:
        for i in range(3):
            writer.write({"__key__": f"k{i}", "tokens.npy": np.full(5, i, dtype=np.uint16)})
    shards = TokenShards([tmp_path / "x.tar"])
    assert [shards[i].tolist() for i in range(len(shards))] == [[i] * 5 for i in range(3)]


def test_dtype_holds_the_vocabulary() -> None:
    assert token_dtype(65_536) is np.uint16 and token_dtype(65_537) is np.int32


def test_what_is_no_token_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="key 'a.b'.*must not contain a dot"):
        write_shards(tmp_path, "train", [Document("a.b", "", np.zeros(1, dtype=np.uint16))])
    with pytest.raises(ValueError, match="no shards given"):
        TokenShards([])
    with wds.TarWriter(str(tmp_path / "text.tar")) as writer:
        writer.write({"__key__": "a", "txt": "x"})
    with pytest.raises(ValueError, match="text.tar holds no document with 'tokens.npy'"):
        TokenShards([tmp_path / "text.tar"])
    with wds.TarWriter(str(tmp_path / "square.tar")) as writer:
        writer.write({"__key__": "a", "tokens.npy": np.zeros((2, 2))})
    with pytest.raises(ValueError, match=r"shape \(2, 2\) and dtype float64"):
        TokenShards([tmp_path / "square.tar"])
    raw = io.BytesIO()
    np.lib.format.write_array(raw, np.zeros(2, dtype=np.uint16), version=(2, 0))
    with wds.TarWriter(str(tmp_path / "new.tar"), encoder=False) as writer:
        writer.write({"__key__": "a", "tokens.npy": raw.getvalue()})
    with pytest.raises(ValueError, match="not a NumPy file of version 1.0"):
        TokenShards([tmp_path / "new.tar"])
