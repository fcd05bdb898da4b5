"""Writing shards: deterministic, nothing lost silently, preprocessed ones give the batches of raw ones."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_megascale.data.encode import EncodeContext
from lightning_megascale.data.samples import ShardedSource, SourceConfig
from lightning_megascale.data.storage import ShardStore
from lightning_megascale.data.write import write_samples
from tests.data.test_encode import context, text_context
from tests.data.test_images import file, picture


def members(shard: Path) -> dict[str, bytes]:
    with tarfile.open(shard) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def open_source(folder: Path, setting: EncodeContext) -> ShardedSource:
    return ShardedSource("s", SourceConfig(str(folder / "*.tar")), ShardStore(folder / "cache"), context=setting)


def llava(folder: Path) -> Path:
    """Seven records: one picture, none, two, a missing one, a broken one, a wrong number, a PNG called jpg."""
    (folder / "pictures" / "deep").mkdir(parents=True)
    (folder / "pictures" / "deep" / "one.jpg").write_bytes(file(picture(30, 50), "JPEG"))
    (folder / "pictures" / "two.png").write_bytes(file(picture(40, 20, seed=1), "PNG"))
    (folder / "pictures" / "three.JPG").write_bytes(file(picture(33, 33, seed=2), "PNG"))
    (folder / "pictures" / "broken.jpg").write_bytes(b"<html>404</html>")
    records = [
        {"id": "a.b/c", "image": "deep/one.jpg", "conversations": _turns("<image>\nWhat?", "A cat é.")},
        {"id": 7, "conversations": _turns("Why?", "So.")},
        {"image": ["two.png", "deep/one.jpg"], "conversations": _turns("<image> and <image>", "A dog.")},
        {"image": "gone/x.jpg", "conversations": _turns("<image>", "Gone.")},
        {"image": "broken.jpg", "conversations": _turns("<image>", "Broken.")},
        {"image": "two.png", "conversations": _turns("no placeholder", "Bad.")},
        {"image": "three.JPG", "conversations": _turns("<image>", "A red circle.")},
    ]
    path = folder / "data.json"
    path.write_text(json.dumps(records))
    (folder / "data.jsonl").write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return path


def _turns(question: str, answer: str) -> list[dict]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def test_llava_records_become_shards(tmp_path: Path) -> None:
    source = llava(tmp_path)
    seen: list[int] = []
    report = write_samples(source, tmp_path / "out", image_folder=tmp_path / "pictures", samples_per_shard=3, progress=seen.append)
    assert [shard.name for shard in report.shards] == ["samples-000000.tar", "samples-000001.tar"] and report.samples == 4
    assert seen == list(range(1, 8))
    assert report.missing == [("000000003", str(tmp_path / "pictures" / "gone" / "x.jpg"))]
    assert [key for key, _ in report.bad] == ["000000004", "000000005"]
    assert "no JPEG, PNG" in report.bad[0][1] and report.bad[1][1] == "the text has 0 <image> for 1 pictures"
    first, second = (members(shard) for shard in report.shards)
    assert set(first) == {
        "000000000.jpg", "000000000.json", "000000001.json", "000000002.0.png", "000000002.1.jpg", "000000002.json"
    }  # fmt: skip
    assert set(second) == {"000000006.png", "000000006.json"}  # by its real format
    assert first["000000000.jpg"] == (tmp_path / "pictures" / "deep" / "one.jpg").read_bytes()
    assert json.loads(first["000000000.json"]) == {"id": "a.b/c", "conversations": _turns("<image>\nWhat?", "A cat é.")}
    listed = json.loads((tmp_path / "out" / "samples.json").read_text())
    assert listed["missing"] == [list(entry) for entry in report.missing] and len(listed["bad"]) == 2 and listed["preprocessed"] is None
    samples = open_source(tmp_path / "out", context())
    assert [len(samples.load(0, row).get("pixel_values", ())) for row in range(3)] == [1, 0, 2]


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    source = llava(tmp_path)
    lines = source.with_suffix(".jsonl")
    for name, (path, threads, extra) in {
        "a": (source, 0, {}),
        "b": (lines, 3, {}),
        "c": (source, 0, {"preprocessed": True, "context": context()}),
        "d": (lines, 3, {"preprocessed": True, "context": context()}),
    }.items():
        write_samples(path, tmp_path / name, image_folder=tmp_path / "pictures", samples_per_shard=3, threads=threads, **extra)
    for left, right in ("ab", "cd"):
        for shard in sorted((tmp_path / left).iterdir()):
            assert shard.read_bytes() == (tmp_path / right / shard.name).read_bytes(), shard
    assert json.loads((tmp_path / "c" / "samples.json").read_text())["preprocessed"] == {"identity": context().identity(), "pixels": "npy"}


@pytest.mark.parametrize("pixels", ["npy", "png", "jpg"])
@pytest.mark.parametrize("length", [64, 30])
def test_preprocessed_shards_give_the_batches_of_raw_ones(tmp_path: Path, pixels: str, length: int) -> None:
    source, setting = llava(tmp_path), context(sequence_length=length)
    write_samples(source, tmp_path / "raw", image_folder=tmp_path / "pictures")
    report = write_samples(
        source, tmp_path / "done", image_folder=tmp_path / "pictures", preprocessed=True, context=setting, pixels=pixels, threads=2
    )
    raw, done = open_source(tmp_path / "raw", setting), open_source(tmp_path / "done", setting)
    rows = {done.key(0, row): row for row in range(len(done))}
    assert report.samples == len(done) and len(rows) >= (4 if length == 64 else 2)
    assert "tokens" in done.fields and "conversation" not in done.fields
    for row in range(len(raw)):
        if raw.key(0, row) not in rows:
            assert "no label left" in dict(report.bad)[raw.key(0, row)]
            continue
        expected, found = raw.load(0, row), done.load(0, rows[raw.key(0, row)])
        assert set(expected) == set(found)
        for key in ("input_ids", "labels", "image_sizes"):
            assert key not in expected or torch.equal(expected[key], found[key])
        if "pixel_values" in expected:
            difference = (expected["pixel_values"].int() - found["pixel_values"].int()).abs()
            assert difference.max() == 0 if pixels != "jpg" else difference.float().mean() < 4, difference.float().mean()
        assert done.shard_lengths(0)[rows[raw.key(0, row)]] == raw.shard_lengths(0)[row] == len(expected["input_ids"])
    size = {path.name.split(".", 1)[1] for path in map(Path, members(report.shards[0]))}
    assert ("pixels.npy" in size) == (pixels == "npy")


def test_links_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("b")
    (folder / "sub" / "a.txt").write_text("a")
    (folder / "sub" / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    (folder / "sub" / "rows.jsonl").write_text("{}")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    report = write_samples(folder, tmp_path / "out")
    assert list(members(report.shards[0])) == ["linked/b.txt", "sub/a.txt"]
    assert report.missing == [("sub/gone", str(folder / "sub" / "gone.txt"))]
    assert "1 files of other kinds are left out, the first is sub/rows.jsonl" in caplog.text
    (folder / "sub" / "round").symlink_to(folder)
    with pytest.raises(ValueError, match="sub/round is a link that leads back to .*in, above .*sub: remove it"):
        write_samples(folder, tmp_path / "again")


def test_a_folder_of_pictures_and_captions(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "cats").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name in ("z", "cats/a", "cats/b"):
        (folder / f"{name}.png").write_bytes(file(picture(20, 30), "PNG"))
    (folder / "z.txt").write_text("A zebra.")
    (folder / "cats" / "a.CAPTION").write_text("A cat.")
    (folder / "words.json").write_text(json.dumps(_turns("Why?", "So.")))
    (folder / "notes.md").write_text("no sample")
    (folder / ".hidden" / "x.txt").write_text("no sample")
    (folder / ".y.txt").write_text("no sample")
    report = write_samples(folder, tmp_path / "out", prefix="train")
    content = members(tmp_path / "out" / "train-000000.tar")
    assert list(content) == ["cats/a.png", "cats/a.txt", "words.json", "z.png", "z.txt"]
    assert content["z.txt"] == b"A zebra." and report.missing == []
    assert [(key, reason[:22]) for key, reason in report.bad] == [("cats/b", "a picture without text")]
    text = write_samples(folder, tmp_path / "tokens", preprocessed=True, context=context())
    assert text.samples == 3 and open_source(tmp_path / "tokens", context()).load(0, 2)["pixel_values"].shape == (1, 3, 28, 28)


@pytest.mark.parametrize(
    "names, message",
    [
        (["a.b.txt", "c.d.jpg", "e.txt"], r"2 names with a dot before the extension, such as 'a.b': WebDataset ends"),
        (["v1.0/a.txt"], "1 names with a dot before the extension, such as 'v1.0/a'"),
        (["a.txt", "a.json"], "'a' has txt, json; one text and one picture make a sample"),
        (["a.jpg", "a.png", "a.txt"], "'a' has txt, jpg, png; one text and one picture"),
        (["a.txt", "a.TXT"], "'a' has two files 'txt' whose extensions differ in case only"),
        (["__a__.txt"], "1 names that begin with '__' or are not UTF-8, such as '__a__'"),
        ([b"\xff.txt"], "names that begin with '__' or are not UTF-8"),
        (["a.doc"], "no sample; it is made of files txt"),
    ],
)
def test_folders_that_are_no_samples_are_refused(tmp_path: Path, names: list, message: str) -> None:
    for name in names:
        path = tmp_path / "in" / (name if isinstance(name, str) else name.decode("utf-8", "surrogateescape"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    with pytest.raises(ValueError, match=message):
        write_samples(tmp_path / "in", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(
    "content, message",
    [
        ("[", "is no JSON"),
        ('{"conversations": []}', "a list of records with `conversations` and `image` is due, not dict"),
        ("[3]", "record 0 is no mapping"),
        ('[{"image": 3}]', "record 0 is no mapping with `conversations` and `image`, a name or a list of names"),
        ('[{"image": "../x.jpg"}]', "record 0 names the picture '../x.jpg'; names are relative to the image folder and stay in it"),
        ('[{"image": ["/etc/x.jpg"]}]', "record 0 names the picture '/etc/x.jpg'"),
        (
            '[{"image": "x.jpg"}]',
            "no sample could be written; 1 files are missing, the first is .*x.jpg' of '000000000': set image_folder",
        ),
        ('[{"id": 1}]', "no sample could be written; 1 are bad, the first is '000000000': the conversation is no list of turns"),
        ("[]", "no sample could be written; there is none"),
    ],
)
def test_files_that_are_no_records_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        write_samples(tmp_path / "x.json", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_an_error_leaves_no_half_of_the_shards(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"conversations": _turns("Why?", "So.")}) + "\n{\n")
    with pytest.raises(ValueError, match="line 2 is no JSON"):
        write_samples(tmp_path / "x.jsonl", tmp_path / "out", samples_per_shard=1)
    assert not list((tmp_path / "out").glob("*"))


def test_arguments_are_checked_together(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="(?s)source .* does not exist.*samples_per_shard=0.*a context comes with.*pixels='gif'.*prefix='a/b'"
    ):
        write_samples(tmp_path / "no", tmp_path, samples_per_shard=0, preprocessed=True, pixels="gif", prefix="a/b")  # type: ignore[arg-type]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    write_samples(tmp_path / "in", tmp_path / "out")
    before = (tmp_path / "out" / "samples-000000.tar").read_bytes()
    with pytest.raises(ValueError, match=r"holds shards samples-\*.tar already"):
        write_samples(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out" / "samples-000000.tar").read_bytes() == before
    (tmp_path / "data.csv").write_text("")
    with pytest.raises(ValueError, match="whose name ends with .json or .jsonl"):
        write_samples(tmp_path / "data.csv", tmp_path / "other")


def test_threads_stay_near_the_writer(tmp_path: Path) -> None:
    """Records are taken as they are needed: a file of any size fits."""
    from lightning_megascale.data.write import _in_order

    taken: list[int] = []

    def records():
        for number in range(100):
            taken.append(number)
            yield number

    for written, (record, result) in enumerate(_in_order(lambda number: number * 2, records(), threads=2)):  # type: ignore[arg-type, return-value]
        assert (record, result) == (written, written * 2)  # type: ignore[comparison-overlap]
        assert len(taken) <= written + 9
    assert len(taken) == 100


def test_small_vocabularies_are_stored_in_two_bytes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("A cat.")
    report = write_samples(tmp_path / "in", tmp_path / "out", preprocessed=True, context=text_context())
    content = members(report.shards[0])
    assert np.load(_file(content["a.tokens.npy"])).dtype == np.uint16 and np.load(_file(content["a.spans.npy"])).dtype == np.int32


def _file(data: bytes):
    import io

    return io.BytesIO(data)
