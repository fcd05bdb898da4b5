"""Sources of samples: fields by extension, bad draws replaced without moving others, a quarantine that every process adds to."""

from __future__ import annotations

import io
import json
import multiprocessing
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds

from lightning_megascale.data.encode import EncodeContext
from lightning_megascale.data.mixture_stream import MixtureStream
from lightning_megascale.data.samples import BadSample, Quarantine, ShardedSource, SourceConfig, default_fields
from lightning_megascale.data.schedule import Schedule, Stage
from lightning_megascale.data.shuffle import SourceOrder
from lightning_megascale.data.storage import ShardStore
from tests.data import chat
from tests.data.test_encode import context, text_context
from tests.data.test_images import file, picture

GOOD = file(picture(20, 24), "JPEG")


def write(path: Path, samples: list[dict]) -> str:
    with wds.TarWriter(str(path), encoder=False, mtime=0) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{path.stem}-{number}", **sample})
    return str(path)


def source(folder: Path, fields: dict | None = None, setting: EncodeContext | None = None, encode=None, **options) -> ShardedSource:
    config = SourceConfig(str(folder / "*.tar"), fields, encode)
    return ShardedSource("cats", config, ShardStore(folder / "cache"), context=setting or text_context(), **options)


def test_fields_by_extension(tmp_path: Path) -> None:
    write(tmp_path / "b.tar", [{"txt": b"two", "png": b"P", "jpg": b"J"}, {"caption": b"three"}])
    write(tmp_path / "a.tar", [{"TXT": b"one", "1.jpg": b"B", "0.png": b"A", "3.jpg": b"D"}])
    cats = source(tmp_path, {"text": "txt;caption", "images": "jpg;png"})
    assert cats.shards == ["a.tar", "b.tar"] and cats.sizes.tolist() == [1, 2] and cats.sizes.dtype == np.int64 and len(cats) == 3
    assert cats.read(0, 0) == {"__key__": "a-0", "__shard__": "a.tar", "text": b"one", "images": [b"A", b"B"]}  # 2.* is missing: the end
    assert cats.read(1, 0)["images"] == [b"J"] and cats.read(1, 0, pictures=False)["images"] == [b""]
    assert cats.read(1, 1) == {"__key__": "b-1", "__shard__": "b.tar", "text": b"three", "images": []}
    one = source(tmp_path, {"text": "txt", "image": "png;jpg"})
    assert one.read(1, 0)["image"] == b"P" and one.read(1, 0, pictures=False)["image"] == b""
    with pytest.raises(BadSample, match=r"the field 'image' \(png;jpg\) is missing"):
        one.read(0, 0)
    again = pickle.loads(pickle.dumps(cats))
    assert again.read(1, 0) == cats.read(1, 0)


def test_usual_fields_are_found() -> None:
    assert default_fields(("jpg", "json", "txt")) == {"text": "txt;text;caption", "image": "jpg;jpeg;png;webp;gif;bmp"}
    assert set(default_fields(("0.jpg", "1.jpg", "txt"))) == {"text", "images"} and set(default_fields(("jpg", "json"))) == {
        "conversation",
        "images",
    }
    assert set(default_fields(("json", "0.jpg", "1.png"))) == {"conversation", "images"}
    assert set(default_fields(("tokens.npy", "spans.npy", "pixels.npy", "sizes.npy"))) == {"tokens", "spans", "pixels", "sizes"}
    assert set(default_fields(("tokens.npy", "txt"))) == {"tokens"}
    with pytest.raises(ValueError, match="the shards hold cls, jpg, and no text by a usual name .*say with `fields`"):
        default_fields(("jpg", "cls"))


def test_a_caption_without_its_picture_is_bad_and_not_text_alone(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [{"txt": b"one", "jpg": GOOD}, {"txt": b"two"}])
    cats = source(tmp_path, setting=context())
    assert len(cats.load(0, 0)["pixel_values"]) == 1
    with pytest.raises(BadSample, match="the field 'image' .* is missing"):
        cats.load(0, 1)


def test_wrong_configurations_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [{"txt": b"one"}])
    for fields, message in [
        ({"text": ""}, "fields: text='': extensions separated by ';'"),
        ({"text": ["txt"]}, r"fields: text=\['txt'\]"),
        ({"text": "txt", "label": "cls"}, "fields label, text: the default encoder takes exactly one of"),
        ({"image": "jpg"}, "fields image: the default encoder"),
        ({"text": "txt", "image": "jpg", "images": "png"}, "at most one of image, images, pixels"),
        ({"text": "tex"}, "source 'cats': no shard has the field 'text' by the extensions 'tex'; there are txt"),
    ]:
        with pytest.raises(ValueError, match=message):
            source(tmp_path, fields)
    assert source(tmp_path, {"anything": "txt"}, encode=len).read(0, 0)["anything"] == b"one"
    with pytest.raises(ValueError, match="was made without a context"):
        ShardedSource("cats", SourceConfig(str(tmp_path / "a.tar")), ShardStore(tmp_path / "cache")).load(0, 0)


def test_samples_are_encoded(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [{"json": json.dumps(TURNS).encode(), "jpg": GOOD} for TURNS in [_turns("A cat."), _turns("A dog.")]])
    setting = context()
    cats = source(tmp_path, setting=setting)
    sample = cats.load(0, 1)
    assert sample["__key__"] == "a-1" and sample["pixel_values"].shape == (1, 3, 28, 28)
    assert setting.tokenizer.decode(sample["labels"][sample["labels"] != -100]) == "A dog.<|im_end|>"


def _turns(answer: str) -> list[dict]:
    return [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": answer}]


def test_what_an_own_function_raises_names_the_sample(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [{"txt": b"one"}])
    for error, kind in [(KeyError("x"), RuntimeError), (ValueError("x"), ValueError), (ConnectionError("x"), OSError)]:

        def encode(sample, context, error=error):
            raise error

        with pytest.raises(kind, match=r"source 'cats', shard a.tar, row 0, key 'a-0': .*encode raised .*x") as caught:
            source(tmp_path, encode=encode).load(0, 0)
        assert caught.value.__cause__ is error and not isinstance(caught.value, BadSample)
    with pytest.raises(ValueError, match="must return a dict, not list"):
        source(tmp_path, encode=lambda sample, context: []).load(0, 0)


def test_lengths_are_counted_once_without_reading_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("a", 3), ("b", 2)):
        samples = [{"json": json.dumps(_turns("A cat. " * (n + 1))).encode(), "jpg": GOOD} for n in range(count)]
        samples[1]["json"] = b"[]"
        write(tmp_path / f"{name}.tar", samples)
    cats = source(tmp_path, setting=context())
    shards, rows = np.array([1, 0, 0, 1, 0]), np.array([0, 2, 1, 1, 0])
    expected = [0 if row == 1 else len(cats.load(shard, row)["input_ids"]) for shard, row in zip(shards, rows)]
    monkeypatch.setattr(ShardStore, "read", _refuse_pictures(ShardStore.read))
    assert cats.lengths(shards, rows).tolist() == expected and expected[0] < expected[1]
    monkeypatch.setattr(ShardStore, "read", None)  # from now on from the file
    again = source(tmp_path, setting=context())
    assert again.lengths(shards, rows).tolist() == expected and again.lengths([], []).tolist() == []
    with pytest.raises(TypeError):  # another tokenizer must count anew
        source(tmp_path, setting=context(image_tokens=5)).lengths(shards, rows)


def _refuse_pictures(read):
    def checked(self, url, offset, size):
        data = read(self, url, offset, size)
        assert data != GOOD
        return data

    return checked


def test_counts_of_own_functions_know_their_version(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [{"txt": b"one"}, {"txt": b"three"}])

    def encode(sample, context):
        return {"input_ids": torch.arange(len(sample["text"]) + 2), "labels": torch.arange(len(sample["text"]) + 2)}

    assert source(tmp_path, encode=encode).shard_lengths(0).tolist() == [5, 7]
    encode.count = lambda sample, context: len(sample["text"])
    encode.version = 2
    assert source(tmp_path, encode=encode).shard_lengths(0).tolist() == [3, 5]


def test_identity_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    identities = []
    for name, text in (("x", b"one"), ("y", b"one"), ("z", b"two")):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.tar", [{"txt": text}])
        identities.append(source(tmp_path / name).identity())
    assert identities[0] == identities[1] != identities[2]
    assert identities[0] != source(tmp_path / "x", {"text": "txt"}).identity()
    json.dumps(identities)


def test_a_changed_byte_is_a_damaged_copy_and_no_bad_sample(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.tar", [{"txt": b"one two three"}]))
    cats = source(tmp_path)
    assert cats.read(0, 0)["text"] == b"one two three"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"one two", b"one_two"))
    expected = f"{zlib.crc32(b'one two three'):#010x} expected"
    with pytest.raises(OSError, match=rf"a.tar: sample 'a-0' \(txt;text;caption\) at byte 512 is twice not what was indexed .*{expected}"):
        cats.read(0, 0)
    with pytest.raises(OSError, match="twice not what was indexed"):
        drawn(SourceOrder(0, cats.sizes, 0), cats, 0, Quarantine(tmp_path / "q", 0))
    assert not (tmp_path / "q").exists()


def test_a_damaged_copy_of_a_remote_shard_is_fetched_again(tmp_path: Path) -> None:
    import fsspec

    content = Path(write(tmp_path / "a.tar", [{"txt": b"one two three"}])).read_bytes()
    fsspec.filesystem("memory").pipe("/samples-test/a.tar", content)
    store = ShardStore(tmp_path / "cache")
    cats = ShardedSource("cats", SourceConfig("memory://samples-test/a.tar"), store, context=text_context())
    copy = store.local(cats.urls[0])
    copy.chmod(0o644)
    with copy.open("r+b") as file_:
        file_.seek(512)
        file_.write(b"ONE")
    assert cats.read(0, 0)["text"] == b"one two three"
    assert store.local(cats.urls[0]).read_bytes() == content


def drawn(order: SourceOrder, cats: ShardedSource, draw: int, quarantine: Quarantine) -> Any:
    """The sample of a draw: of one source, draws are positions."""
    return MixtureStream(Schedule([Stage("all", None, {"cats": 1})]), [cats], [order], quarantine)[draw]


def test_a_bad_draw_is_replaced_by_the_one_an_epoch_later(tmp_path: Path) -> None:
    bad = {3: b"", 7: b"\xff", 11: b" "}
    for name in "ab":
        write(tmp_path / f"{name}.tar", [{"txt": bad.get(n + 10 * (name == "b"), b"text %d" % n)} for n in range(10)])
    write(tmp_path / "c.tar", [{"cls": b"0"}])  # lacks the field
    cats = source(tmp_path, {"text": "txt"})
    order = SourceOrder(0, cats.sizes, seed=3)
    quarantine = Quarantine(tmp_path / "folder" / "bad.jsonl", 4)
    wrong = {(0, 3), (0, 7), (1, 1), (2, 0)}
    replaced = 0
    for draw in range(3 * order.size):
        attempt = 0
        while (order.at(draw + attempt * order.size).shard, order.at(draw + attempt * order.size).row) in wrong:
            attempt += 1
        row = order.at(draw + attempt * order.size)
        assert drawn(order, cats, draw, quarantine)["__key__"] == cats.key(row.shard, row.row)
        replaced += attempt > 0
    assert replaced == 4 * 3 and len(quarantine) == 4
    listed = {(entry.shard, entry.row): entry for entry in Quarantine(tmp_path / "folder" / "bad.jsonl").samples()}
    assert set(listed) == {("a.tar", 3), ("a.tar", 7), ("b.tar", 1), ("c.tar", 0)}
    assert listed["a.tar", 7][:3] == ("cats", "a.tar", "a-7") and "not UTF-8" in listed["a.tar", 7].reason
    assert "'text' (txt) is missing" in listed["c.tar", 0].reason
    assert quarantine.counts == {"cats": 4}
    lines = (tmp_path / "folder" / "bad.jsonl").read_text().splitlines()
    assert len(lines) == 4  # each once, however often it was drawn
    with pytest.raises(ValueError, match=r"4 bad samples are more than the limit of 3 \(cats 4\).*Repair the data, or raise the limit"):
        for draw in range(order.size):
            drawn(order, cats, draw, Quarantine(tmp_path / "folder" / "bad.jsonl", 3))


def test_a_source_that_is_all_bad_stops(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [{"txt": b""}, {"txt": b""}])
    cats = source(tmp_path)
    with pytest.raises(ValueError, match=r"draw 5 and its 999 replacements, each an epoch later, are all bad.*the text is empty") as caught:
        drawn(SourceOrder(0, cats.sizes, 0), cats, 5, Quarantine(tmp_path / "q", None))
    assert not isinstance(caught.value, BadSample)


def _add_many(path: Path, first: int) -> None:
    quarantine = Quarantine(path, None)
    for row in range(first, first + 60):
        quarantine.add("s", "a.tar", f"key {row}", row, "é" * 1000)


def test_many_processes_add_to_one_quarantine(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    spawn = multiprocessing.get_context("fork")
    processes = [spawn.Process(target=_add_many, args=(path, 30 * n)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    quarantine = Quarantine(path, 150)
    assert sorted(entry.row for entry in quarantine.samples()) == list(range(150))
    assert all(len(entry.reason) == 500 for entry in quarantine.samples())
    pickle.loads(pickle.dumps(quarantine)).add("s", "a.tar", "key 3", 3, "known to the file")
    with pytest.raises(ValueError, match="151 bad samples are more than the limit of 150"):
        quarantine.add("t", "a.tar", "key 3", 3, "of another source")


def test_a_torn_line_is_skipped_and_an_unfinished_one_read_later(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    quarantine = Quarantine(path, 5)
    quarantine.add("s", "a", "k", 0, "r")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"source": "s"}\n[]\n{"sour\n' + whole.replace(b'"row": 0', b'"row": 1')[:-5])
    assert len(quarantine) == 1
    with path.open("ab") as file_:
        file_.write(whole[-5:])
    assert [entry.row for entry in quarantine.samples()] == [0, 1]


def test_quarantine_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit=-1 bad samples: 0 stops at the first"):
        Quarantine(tmp_path / "q", -1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="the quarantine file .*file/q cannot be written"):
        Quarantine(tmp_path / "file" / "q").add("s", "a", "k", 0, "r")
    assert len(Quarantine(tmp_path / "nothing")) == 0


def test_a_tokenizer_is_not_needed_to_read_arrays(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(5, 9, dtype=np.uint16))
    write(tmp_path / "a.tar", [{"tokens.npy": buffer.getvalue()}])
    assert source(tmp_path, setting=text_context(tokenizer=chat.make_tokenizer(None))).load(0, 0)["input_ids"].tolist() == [5, 6, 7, 8]
