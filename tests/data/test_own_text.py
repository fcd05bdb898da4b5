"""data.text: which files, how they are divided into documents, a small text's tokenizer, the folder's name, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Trainer

from lightning_megascale.data.datamodule import TextDataModule
from lightning_megascale.data.own_text import find_files, parts, read_files, split_off_end
from lightning_megascale.data.quickstart import split_own, text_folder, train_tokenizer
from tests.data.mixes import QUIET, OnRank
from tests.data.test_datamodule import Recorder

WORDS = ("the", "cat", "sees", "a", "round", "naïve", "漢字", "🙂", "picture,", "house.")


def prose(words: int, seed: int = 0) -> str:
    """Paragraphs of three lines of six words."""
    draw = random.Random(seed)
    lines = [" ".join(draw.choices(WORDS, k=6)) for _ in range(words // 6)]
    return "\n\n".join("\n".join(lines[at : at + 3]) for at in range(0, len(lines), 3))


def module(folder: Path, text: Any, **options: Any) -> TextDataModule:
    return TextDataModule(folder / "cache", **{"sequence_length": 16, "batch_size": 4, "vocab_size": 1024, "text": text, **options})


def fit(data: TextDataModule, folder: Path, size: int = 1, max_steps: int = 3, resume: Path | None = None) -> Trainer:
    trainer = Trainer(strategy=OnRank(0, size), default_root_dir=folder, max_steps=max_steps, limit_val_batches=0, **QUIET)
    trainer.fit(Recorder(), datamodule=data, ckpt_path=resume, weights_only=True)
    return trainer


def test_two_blank_lines_or_json_lines_divide_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\nstill\r\n\r\nstill one\r\n\r\n \t\r\ntwo\n\n\n\n\n  three\n".encode())
    (tmp_path / "b.jsonl").write_text('{"text": "four\\n\\n\\nfour"}\n\n{"text": " "}\n{"text": "fünf", "id": 1}\n')
    (tmp_path / "c.md").write_text("six")
    files = find_files([str(tmp_path / "*.txt"), tmp_path / "b.jsonl", str(tmp_path / "[c].md"), tmp_path / "a.txt"])
    assert [path.name for path in files] == ["a.txt", "b.jsonl", "c.md"]
    found = read_files(files)
    assert list(found) == [f"{number:08d}" for number in range(6)]
    assert list(found.values()) == ["one\nstill\n\nstill one", "two", "  three", "four\n\n\nfour", "fünf", "six"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a\.txt is empty"),
        ("a.txt", b" \n\n", r"a\.txt holds only blanks"),
        ("a.txt", b"caf\xe9", r"a\.txt is not UTF-8: byte 0xe9 at offset 3\..*iconv -f latin1 -t utf-8 a\.txt > a-utf8\.txt"),
        ("a.txt", "é".encode("utf-16"), r"byte 0xff at offset 0.*iconv -f utf-16"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}', r"a\.jsonl, line 2 has the keys 'txt'; a line is one document"),
        ("a.jsonl", b"[1]", r"a\.jsonl, line 1 has a list"),
        ("a.jsonl", b'\n{"text"', r"a\.jsonl, line 2 is no JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl, line 1 has half a character"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_files(find_files(str(tmp_path / "*.*")))


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "book.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert module(tmp_path, "book.txt").text == [tmp_path / "book.txt"]  # of the folder in which it was said
    for given, message in (
        ("bok.txt", r"text='.*bok\.txt' does not exist; the nearest existing names are 'book\.txt'"),
        ("*.tex", r"text='\*\.tex' matches no file"),
        (str(tmp_path), r"is a folder; write which files in it, as '.*/\*\.txt'"),
        ([], r"text=\[\]: name at least one"),
        ([3], r"text=3: must be a file"),
    ):
        with pytest.raises(ValueError, match=message):
            module(tmp_path, given)


def test_validation_is_whole_documents_or_the_end_of_the_longest() -> None:
    texts = {f"{number:08d}": prose(120, number) for number in range(40)}
    train, validation = split_own(texts, 0.1)
    total = sum(map(len, texts.values()))
    assert {**train, **validation} == texts and not train.keys() & validation.keys()
    assert 0.05 * total < sum(map(len, validation.values())) <= 0.1 * total

    long = {"00000000": prose(6000), "00000001": "short"}
    train, validation = split_own(long, 0.1)
    assert sum(map(len, validation.values())) == pytest.approx(0.1 * sum(map(len, long.values())), rel=0.05)
    assert train["00000000"] + "\n\n" + validation["00000000-end"] == long["00000000"]  # cut between paragraphs, nothing lost
    for text in ("one two three four", "abcdefgh", "a"):
        head, end = split_off_end({"k": text}, 4)
        assert head["k"] + end["k-end"] == text and len(end["k-end"]) <= 4


def test_parts_have_the_tokens_of_the_whole() -> None:
    text = prose(600) + "\n  indented\n\n\n tail \n"
    tokenizer = train_tokenizer(parts(text, 100), 400, fill=False)
    assert tokenizer.to_str() == train_tokenizer([text], 400, fill=False).to_str()
    for size in (1, 10, 1000):
        assert "".join(parts(text, size)) == text
        assert [i for part in parts(text, size) for i in tokenizer.encode(part).ids] == tokenizer.encode(text).ids
    assert len(list(parts(text, 10))) > 50


def test_a_small_text_gets_a_small_tokenizer_and_trains(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text(prose(1500))
    data = module(tmp_path, tmp_path / "my.txt")
    data.prepare_data()
    data.setup()
    assert 258 < len(data.tokenizer) < 600  # ten words, and pairs of them are never joined
    assert data.train_stream.shards[0].dtype == np.uint16
    text = (tmp_path / "my.txt").read_text()
    shards = (data.train_stream.shards, data.validation_stream.shards)
    assert "\n\n".join(data.tokenizer.decode(part[0]) for part in shards) == text
    assert fit(data, tmp_path).global_step == 3


def test_other_content_makes_another_folder(tmp_path: Path) -> None:
    file, other = tmp_path / "a.txt", tmp_path / "b.txt"
    file.write_text("one\n\n\ntwo"), other.write_text("one\n\n\ntwo")
    first = text_folder(tmp_path, text=file)
    assert first == text_folder(tmp_path, text=other) and first.name.startswith("own-text-")  # a file may move
    other.write_text("one\n\n\ntw\n\n\no")
    assert len({first, text_folder(tmp_path, text=other), text_folder(tmp_path, 512, text=file), text_folder(tmp_path)}) == 4


def test_an_edited_file_is_refused_at_a_resume_and_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "my.txt"
    file.write_text(prose(1500))
    before = module(tmp_path, file)
    fit(before, tmp_path).save_checkpoint(tmp_path / "at.ckpt")
    again = module(tmp_path, file)
    assert fit(again, tmp_path, max_steps=5, resume=tmp_path / "at.ckpt").global_step == 5 and again.position == 20
    file.write_text(prose(1500) + " more")
    edited = module(tmp_path, file)
    names = rf"its shards are '{before.folder.name}', these '{edited.folder.name}'"
    with pytest.raises(ValueError, match=rf"text=my\.txt is not the text of the checkpoint: {names}"):
        fit(edited, tmp_path, max_steps=5, resume=tmp_path / "at.ckpt")
    file.write_text(prose(1500) + " and more")
    with pytest.raises(ValueError, match=r"text=my\.txt changed while the run was starting"):
        edited.prepare_data()


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (6, {"validation_fraction": 0.9}, r"has \d+ tokens for training, less than one sequence of 16: add text"),
        (60, {}, r"has \d tokens for validation \(validation_fraction=0\.1\), less than one sequence of 16: add text, raise"),
        (
            300,
            {"batch_size": 64},
            r"makes \d+ training sequences of 16 tokens, and an optimizer step takes 128 \(batch_size 64 x data-para",
        ),
    ],
)
def test_too_little_text_says_what_to_do(tmp_path: Path, words: int, options: dict[str, Any], message: str) -> None:
    (tmp_path / "my.txt").write_text(prose(words))
    with pytest.raises(ValueError, match=r"text=my\.txt " + message) as error:
        fit(module(tmp_path, tmp_path / "my.txt", **options), tmp_path, size=2)
    assert "batch.sequence_length" in str(error.value)


def test_the_help_topics_keep_their_folder_and_state(tmp_path: Path) -> None:
    """What a checkpoint of the quickstart says of its data has no word of ``text``'s files."""
    data = TextDataModule(tmp_path)
    assert data.folder == text_folder(tmp_path) and data.folder.name.startswith("python-topics-")
    assert data.identity == {"text": data.folder.name, "sequence_length": 128, "seed": 0}
