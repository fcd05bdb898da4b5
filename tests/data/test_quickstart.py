"""The quickstart text: documents, split, tokenizer, cache folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from lightning_megascale.data.quickstart import (
    END,
    PAD,
    load_tokenizer,
    prepare_text,
    read_documents,
    read_topics,
    split_documents,
    text_folder,
    train_tokenizer,
)
from lightning_megascale.data.shards import TokenShards


def test_excerpts_go_so_that_validation_is_not_in_training() -> None:
    documents = read_documents()
    assert "compound" in documents and "while" in read_topics() and "while" not in documents

    def paragraphs(text: str) -> list[str]:
        return [p for p in (" ".join(p.split()) for p in re.split(r"\n\s*\n", text)) if len(p) > 60]

    train, validation = split_documents(documents, 0.1)
    known = {p for text in train.values() for p in paragraphs(text)}
    found = [p for text in validation.values() for p in paragraphs(text)]
    assert sum(len(p) for p in found if p in known) < 0.02 * sum(map(len, found))


def test_the_split_is_by_document_close_to_the_fraction_and_stable() -> None:
    documents = read_documents()
    total = sum(map(len, documents.values()))
    for fraction in (0.05, 0.1, 0.3):
        train, validation = split_documents(documents, fraction)
        assert not train.keys() & validation.keys() and train.keys() | validation.keys() == documents.keys()
        assert 0.9 * fraction * total < sum(map(len, validation.values())) <= fraction * total
    assert split_documents(dict(reversed(documents.items())), 0.1)[1].keys() == split_documents(documents, 0.1)[1].keys()
    assert list(split_documents({"a": "x" * 10, "b": "y" * 5}, 0.01)[1]) == ["b"]  # at least one
    with pytest.raises(ValueError, match="leaves none of 1 documents for training"):
        split_documents({"a": "x"}, 0.1)


def test_any_text_survives_the_tokenizer(cache: Path) -> None:
    tokenizer = load_tokenizer(text_folder(cache))
    assert len(tokenizer) == 4096
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token, tokenizer.pad_token_id) == (END, 0, PAD, 1)
    for text in ("The with statement\n   is used", " it 's , fine .", "naïve 漢字 🙂\t\r\n", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a<|end|>")[-1] == 0
    everything = "".join(read_topics().values())
    assert len(everything) / len(tokenizer.encode(everything)) > 3  # characters per token: it learnt words


@pytest.mark.slow
def test_the_tokenizer_is_deterministic_over_processes(tmp_path: Path) -> None:
    code = (
        "from lightning_megascale.data.quickstart import read_documents, train_tokenizer\n"
        "import hashlib; print(hashlib.sha256(train_tokenizer(read_documents().values(), 1000).to_str().encode()).hexdigest())"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1


def test_a_vocabulary_the_text_cannot_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size=5000: from this text a tokenizer gets 26"):
        train_tokenizer(["a few words"], 5000)


def test_shards_hold_the_documents_with_their_tokens(cache: Path) -> None:
    folder = text_folder(cache)
    tokenizer = load_tokenizer(folder)
    train, validation = split_documents(read_documents(), 0.1)
    for split, texts in (("train", train), ("validation", validation)):
        paths = sorted(folder.glob(f"{split}-*.tar"))
        samples = list(wds.WebDataset([str(p) for p in paths], shardshuffle=False).decode())
        assert {sample["__key__"]: sample["txt"] for sample in samples} == texts
        shards = TokenShards(paths)
        for i, sample in enumerate(samples):
            np.testing.assert_array_equal(shards[i], sample["tokens.npy"])
            assert tokenizer.decode(sample["tokens.npy"]) == sample["txt"]
        assert shards[0].dtype == np.uint16


def test_other_parameters_or_text_make_another_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {text_folder(cache), text_folder(cache, vocab_size=512), text_folder(cache, validation_fraction=0.2)}
    monkeypatch.setattr("lightning_megascale.data.quickstart.read_topics", lambda: {"a": "b"})
    folders.add(text_folder(cache))
    assert len(folders) == 4 and all(folder.parent == cache for folder in folders)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGASCALE_CACHE", str(tmp_path / "a"))
    assert text_folder().parent == tmp_path / "a" and text_folder(tmp_path / "b").parent == tmp_path / "b"
    monkeypatch.delenv("MEGASCALE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert text_folder().parent == tmp_path / ".cache" / "lightning_megascale"
    assert text_folder("~/c").parent == tmp_path / "c"


def test_a_damaged_cache_is_written_again_with_the_same_bytes(tmp_path: Path) -> None:
    folder = prepare_text(tmp_path, vocab_size=300)
    before = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    shard = folder / "train-000001.tar"
    shard.write_bytes(shard.read_bytes()[:-1000])
    (folder / "tokenizer" / "tokenizer.json").unlink()
    assert prepare_text(tmp_path, vocab_size=300) == folder
    assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_python_without_the_text_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="pydoc_data.topics, which this Python lacks"):
        prepare_text()
