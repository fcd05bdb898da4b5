"""``megascale data``: what each verb finds, prints, draws and returns."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image, ImageDraw

from lightning_megascale.cli import data_preview
from lightning_megascale.cli.data import main
from lightning_megascale.cli.data_mix import mix_stats
from lightning_megascale.cli.data_sets import Mix, make_module, read_mix, shard_sets
from lightning_megascale.data import samples as samples_module
from lightning_megascale.data.collate import padding_share
from lightning_megascale.data.image_text import ImageTextDataModule
from lightning_megascale.data.mixture import MixtureDataModule
from lightning_megascale.data.mixture_stream import PackedStream
from tests.cli.run_megascale import megascale
from tests.data import mixes
from tests.data.chat import make_tokenizer
from tests.data.tars import header_offsets, tar_bytes, write_tar

Files = list[tuple[str, bytes]]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("MEGASCALE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def jpg(color: str = "#cc3333", size: tuple[int, int] = (48, 32)) -> bytes:
    picture = Image.new("RGB", size, "white")
    ImageDraw.Draw(picture).ellipse((8, 4, 30, 26), fill=color)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG")
    return buffer.getvalue()


def turns(question: str, answer: str) -> bytes:
    return json.dumps([{"from": "human", "value": question}, {"from": "gpt", "value": answer}]).encode()


def pairs(count: int, first: int = 0) -> Files:
    return [part for n in range(first, first + count) for part in ((f"{n:04d}.jpg", jpg()), (f"{n:04d}.txt", f"a red circle {n}".encode()))]


def chats(count: int) -> Files:
    made: Files = []
    for n in range(count):
        made += [(f"{n:04d}.jpg", jpg("#3355cc")), (f"{n:04d}.json", turns("<image>\nWhat is in the picture?", f"A blue circle {n}."))]
    return made


def shard(path: Path, content: Files) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(content))
    return str(path)


def lint(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["lint", *arguments, "format=json"])
    return code, json.loads(capsys.readouterr().out)


def found(content: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[tuple[str | None, int | None, str]]:
    code, report = lint(capsys, shard(tmp_path / "lint" / "x.tar", content), *arguments)
    assert code == (1 if report["findings"] else 0)
    return [(one["key"], one["offset"], one["reason"]) for one in report["findings"]]


# lint


def test_lint_of_sound_shards_is_0_and_counts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard(tmp_path / "s" / "a-000.tar", pairs(5))
    shard(tmp_path / "s" / "below" / "b-000.tar", chats(3))
    (tmp_path / "s" / "note.txt").write_text("no shard")
    code, report = lint(capsys, str(tmp_path / "s"))
    assert code == 0 and report["findings"] == [] and (report["shards"], report["samples"]) == (2, 8)
    assert report["bytes"] == sum(path.stat().st_size for path in (tmp_path / "s").rglob("*.tar"))
    assert main(["lint", str(tmp_path / "s" / "a-000.tar")]) == 0
    assert "1 shard, 5 samples" in (out := capsys.readouterr().out) and "nothing found" in out


@pytest.mark.parametrize(
    ("change", "where", "reason"),
    [
        (lambda c: [*c, c[0]], ("0000", 6), "duplicate key: its files are not neighbours"),
        (lambda c: [c[0], c[0], *c[1:]], ("0000", 1), "duplicate: the sample has the field 'jpg' twice"),
        (lambda c: [*c[:3], *c[4:]], ("0001", 2), "the field 'text' (txt;text;caption) is missing; the sample has jpg"),
        (lambda c: [*c[:2], *c[3:]], ("0001", 2), "the field 'image' (jpg;jpeg;png;webp;gif;bmp) is missing; the sample has txt"),
        (lambda c: [*c[:2], ("0001.jpg", c[2][1][:-100]), *c[3:]], ("0001", 2), "jpg: the picture cannot be decoded"),
        (lambda c: [*c[:2], ("0001.jpg", b"GIF"), *c[3:]], ("0001", 2), "jpg: 3 bytes are no JPEG"),
        (lambda c: [*c[:3], ("0001.txt", b"\xff\xfe")], ("0001", 2), "the text is not UTF-8"),
        (lambda c: [*c[:3], ("0001.txt", b" \n")], ("0001", 2), "the text is empty"),
        (lambda c: [*c[:3], ("0001.txt", b"<image> and <image>")], ("0001", 2), "the text has 2 <image> for 1 of them"),
        (lambda c: [*c, ("README", b"x")], (None, 6), "'README' belongs to no sample"),
        (lambda c: [("../0000.jpg", c[0][1]), ("../0000.txt", c[1][1]), *c[2:]], (None, 0), "'../0000.jpg' has an absolute path, '..'"),
    ],
)
def test_lint_lists_what_is_wrong_with_a_sample(
    change: Any, where: tuple[str | None, int], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = change(pairs(3))
    first = found(content, tmp_path, capsys)[0]
    assert first[:2] == (where[0], header_offsets(tar_bytes(content))[where[1]]) and first[2].startswith(reason)


@pytest.mark.parametrize(
    ("json_text", "reason"),
    [
        (turns("What?", "A circle."), "the text has 0 <image> for 1 of them"),
        (turns("<image> What?", " "), "the assistant says nothing"),
        (b'{"conversations": 3}', "the conversation is no list of turns"),
        (b"[", "the conversation is no JSON"),
    ],
)
def test_lint_reads_conversations(json_text: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = [*chats(2), ("9.jpg", jpg()), ("9.json", json_text)]
    ((key, _, text),) = found(content, tmp_path, capsys)
    assert key == "9" and text.startswith(reason)


def test_lint_checks_prepared_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def npy(array: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, array)
        return buffer.getvalue()

    def sample(key: str, spans: list[list[int]]) -> Files:
        return [(f"{key}.tokens.npy", npy(np.arange(6, dtype=np.int32))), (f"{key}.spans.npy", npy(np.array(spans, np.int32)))]

    assert found(sample("a", [[1, 6]]), tmp_path, capsys) == []
    (finding,) = found([*sample("a", [[1, 6]]), *sample("b", [[2, 7]])], tmp_path, capsys)
    assert finding[0] == "b" and "label span 2 .. 7 in 6 tokens" in finding[2]


def test_lint_goes_on_to_the_damage_of_a_tar_and_to_the_next_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = pairs(4)
    data = tar_bytes([*content[:2], ("0001.jpg", b"no picture"), *content[3:]])
    at = header_offsets(data)
    (tmp_path / "a-000.tar").write_bytes(data[: at[5] + 700])
    (tmp_path / "a-001.tar").write_bytes(data[: at[6]] + bytes(512) + data[at[6] + 512 :])
    shard(tmp_path / "a-002.tar", content)
    code, report = lint(capsys, str(tmp_path / "a-*.tar"))
    assert code == 1 and report["samples"] == 3 + 3 + 4
    reasons = {(Path(one["shard"]).name, one["key"], one["offset"]): one["reason"] for one in report["findings"]}
    assert list(reasons) == [
        (name, key, at[n]) for name, cut in (("a-000.tar", 5), ("a-001.tar", 6)) for key, n in (("0001", 2), (None, cut))
    ]
    assert "no JPEG" in reasons["a-000.tar", "0001", at[2]] and "no JPEG" in reasons["a-001.tar", "0001", at[2]]
    assert reasons["a-000.tar", None, at[5]].startswith("after 3 samples: truncated: '0002.txt'")
    assert reasons["a-001.tar", None, at[6]].startswith("after 3 samples: a block of zeros, but data follows")
    assert main(["lint", str(tmp_path)]) == 1
    assert "findings in 2 shards" in capsys.readouterr().out


def test_lint_of_a_cut_shard_names_the_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tar_bytes(pairs(3))
    at = header_offsets(data)
    (tmp_path / "x.tar").write_bytes(data[: at[4] + 600])
    code, report = lint(capsys, str(tmp_path / "x.tar"))
    (finding,) = report["findings"]
    assert (code, finding["key"], finding["offset"]) == (1, None, at[4])
    assert finding["reason"].startswith("after 2 samples: truncated: '0002.jpg'")


def test_lint_compares_with_the_index_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tar(tmp_path / "x.tar", 6)
    assert main(["index", str(path)]) == 0
    capsys.readouterr()
    data, status = bytearray(path.read_bytes()), path.stat()
    place = bytes(data).index(b"caption 3")
    data[place] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    code, report = lint(capsys, str(path))
    (finding,) = report["findings"]
    assert code == 1 and finding["key"] == "000003" and "not those that were indexed" in finding["reason"]
    write_tar(path, 4)
    assert lint(capsys, str(path))[1]["findings"][0]["reason"].startswith("had 6 samples when it was indexed, and has 4 now")


def test_lint_says_the_same_with_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        shard(tmp_path / f"x-{number}.tar", [*pairs(2), ("bad.jpg", b""), ("bad.txt", b"x")])
    assert lint(capsys, str(tmp_path), "processes=2") == lint(capsys, str(tmp_path), "processes=1")
    assert capsys.readouterr().err == ""  # no bar where there is no terminal


def test_lint_takes_the_fields_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = [("1.cap", b"a circle"), ("1.jpg", jpg())]
    assert "no text by a usual name" in found(content, tmp_path, capsys)[0][2]
    assert found(content, tmp_path, capsys, "fields={text: cap, image: jpg}") == []


# index


def test_index_counts_by_set_and_a_run_reads_its_token_counts(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "s"
    shard(folder / "chat-000.tar", chats(4))
    shard(folder / "chat-001.tar", [("text.json", turns("What is round?", "A circle."))])  # no picture in this shard
    shard(folder / "text-000.tar", [("a.txt", b"the cat " * 30)])
    options = dict(image_size=28, sequence_length=64)
    assert main(["index", str(folder), f"tokenizer={tokenizer}", *(f"{k}={v}" for k, v in options.items()), "processes=2"]) == 0
    lines = {
        line.split("│")[1].strip(): [part.strip() for part in line.split("│")[2:-1]]
        for line in capsys.readouterr().out.splitlines()
        if "│" in line
    }
    monkeypatch.setattr(samples_module, "count_tokens", lambda *_: pytest.fail("counted again"))
    for name, samples, fields in (("chat", 5, "jpg json"), ("text", 1, "txt")):
        module = ImageTextDataModule({name: str(folder / f"{name}-*.tar")}, tokenizer=tokenizer, rows="padded", **options)  # type: ignore[arg-type]
        module.setup()
        (source,) = module.train_stream.sources
        counts = np.concatenate([source.shard_lengths(number) for number in range(len(source.shards))])
        loaded = [len(source.load(at, row)["input_ids"]) for at, size in enumerate(source.sizes) for row in range(size)]
        assert counts.tolist() == loaded
        row = lines[str(folder / f"{name}-*.tar")]
        assert row[:2] == [str(len(source.shards)), str(samples)] and row[3:] == [fields, str(sum(loaded)), str(max(loaded)), "0"]


def test_index_counts_whole_documents_of_text_as_a_run_that_cuts_them(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shard(tmp_path / "text-000.tar", [("a.txt", b"the cat " * 300), ("b.txt", b" ")])
    assert main(["index", path, f"tokenizer={tokenizer}", "sequence_length=64"]) == 0
    out = capsys.readouterr().out
    monkeypatch.setattr(samples_module, "count_tokens", lambda *_: pytest.fail("counted again"))
    module = MixtureDataModule({"text": path}, tokenizer=tokenizer, sequence_length=64, rows="padded")
    module.setup()
    (pieces,) = module.train_stream.sources
    counts = pieces.source.shard_lengths(0).tolist()
    assert counts[0] > 128 and counts[1] == 0 and re.search(rf"│\s*{sum(counts):,} │\s*{counts[0]:,} │\s*1 │", out)


def test_index_leaves_out_a_damaged_shard_and_returns_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = Path(shard(tmp_path / "x-0.tar", pairs(2)))
    (tmp_path / "x-1.tar").write_bytes(good.read_bytes()[:700])
    assert main(["index", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "x-1.tar: at byte 0, after 0 samples: truncated" in out
    assert (tmp_path / "x-0.tar.idx").is_file() and not (tmp_path / "x-1.tar.idx").exists()


# preview


def spans_of(page: str, kind: str) -> list[str]:
    return [html.unescape(text) for text in re.findall(rf'<span class="{kind}">(.*?)</span>', page, re.S)]


def test_preview_colours_what_is_labelled_and_parts_the_documents(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shard(tmp_path / "chat-000.tar", chats(6))
    out = tmp_path / "p" / "preview.html"
    options = [f"tokenizer={tokenizer}", "image_size=28", "sequence_length=200", "count=4", "rows=2"]
    assert main(["preview", path, f"out={out}", *options]) == 0
    assert f"4 samples and 2 rows: {out}" in capsys.readouterr().out
    page = out.read_text()
    cards, rows = page.split("<h2>Rows of a batch</h2>")
    assert [re.fullmatch(r"A blue circle \d\.<\|im_end\|>", text) is not None for text in spans_of(cards, "label")] == [False] + [True] * 4
    assert all("assistant\n" in text or "user\n" in text for text in spans_of(cards, "plain")[1:] if "\n" in text.strip())
    assert spans_of(cards, "image")[1:] == ["image of 4 tokens"] * 4
    uris = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)
    pictures = [Image.open(io.BytesIO(base64.b64decode(uri))) for uri in uris]
    assert [picture.size for picture in pictures] == [(48, 32), (28, 28)] * 4
    red, green, blue = pictures[0].getpixel((18, 14))
    assert blue > 150 > red and not re.search(r"""(src|href)=["'](?!data:)""", page)  # nothing is loaded from elsewhere
    documents, sizes = len(re.findall('class="document"', rows)), [int(n) for n in re.findall(r"· (\d+) tokens", rows)]
    assert len(spans_of(rows, "label")) == documents == len(sizes) and sum(sizes) <= 400
    widths = [int(n) for n in re.findall(r'style="flex:(\d+)', rows)]
    assert sum(widths) == 400 and [w for w in widths if w in sizes][: len(sizes)]


def test_spans_split_pictures_and_say_how_much_is_left_out(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = shard(tmp_path / "chat-000.tar", chats(1))
    module = make_module(Mix({"chat": url}, None, {"tokenizer": tokenizer, "image_size": 28, "sequence_length": 64}))
    image = module.context().image_token_id
    text = module.tokenizer("red blue", add_special_tokens=False)["input_ids"]
    ids = np.array([image] * 8 + text)
    labels = np.where(np.arange(len(ids)) < 8 + len(text) // 2, -100, ids)
    found = data_preview.spans(ids, labels, module)
    assert [(span.text, span.kind) for span in found[:2]] == [("image of 4 tokens", "image")] * 2
    assert "".join(span.text for span in found[2:]) == "red blue" and [span.kind for span in found[2:]] == ["plain", "label"]
    monkeypatch.setattr(data_preview, "TOKENS_SHOWN", 4)
    assert [span.text for span in data_preview.spans(ids, labels, module)] == ["image of 4 tokens", f" … {len(ids) - 4} more tokens"]


def test_preview_as_png_shows_pictures_and_label_colours(tmp_path: Path, tokenizer: str) -> None:
    path = shard(tmp_path / "chat-000.tar", [*chats(3), ("bad.jpg", b"none"), ("bad.json", turns("<image> What?", "None."))])
    out = tmp_path / "p.png"
    assert main(["preview", path, f"out={out}", f"tokenizer={tokenizer}", "image_size=28", "sequence_length=200", "count=4", "rows=1"]) == 0
    colors = {tuple(color) for color in np.unique(np.asarray(Image.open(out)).reshape(-1, 3), axis=0).tolist()}
    label, picture, problem, document = (0xC9, 0xEF, 0xCF), (0xD5, 0xE3, 0xF7), (0xB0, 0x10, 0x10), (0x44, 0x77, 0xAA)
    assert {label, picture, problem, document} <= colors
    assert any(blue > 180 and red < 90 for red, _, blue in colors)  # the pictures' circles
    assert not list(tmp_path.rglob("quarantine*"))  # which runs count


def test_preview_without_a_tokenizer_shows_texts(tmp_path: Path) -> None:
    shard(tmp_path / "s" / "chat-000.tar", chats(2))
    shard(tmp_path / "s" / "pairs-000.tar", [*pairs(2), ("bad.txt", b"\xff"), ("bad.jpg", jpg()), ("lone.txt", b"<b>")])
    assert main(["preview", str(tmp_path / "s"), f"out={tmp_path / 'p.html'}"]) == 0
    page = (tmp_path / "p.html").read_text()
    assert page.count('class="card"') == 6 and "a red circle 1" in page and "A blue circle 0." in page and "Rows of a batch" not in page
    problems = re.findall(r'class="problem">bad sample: (.*?)</div>', page)
    assert sorted(text[:13] for text in problems) == ["the field &#x", "the text is n"] and page.count("<img") == 4


# stats


def test_stats_of_shards(tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = [*pairs(3), ("wide.jpg", jpg(size=(96, 32))), ("wide.txt", b"a wide one")]
    shard(tmp_path / "p-000.tar", content)
    shard(tmp_path / "p-001.tar", pairs(1))
    out = tmp_path / "s.png"
    assert main(["stats", str(tmp_path), f"tokenizer={tokenizer}", "image_size=28", "sequence_length=64", f"out={out}"]) == 0
    text = capsys.readouterr().out
    assert "2 shards of 1 to 4 samples, 5 in all" in text
    rows = {
        line.split("│")[1].strip(): [part.strip() for part in line.split("│")[2:-1]] for line in text.splitlines() if line.count("│") > 5
    }
    sizes = [len(data) for name, data in [*content, *pairs(1)] if name.endswith("txt")]
    assert rows["txt"] == ["5", f"{sum(sizes) / 5:.0f} B", f"{max(sizes)} B", f"{sum(sizes)} B"]
    assert (rows["picture width"][0], rows["picture width"][5]) == ("48", "96") and rows["picture height"][3] == "32"
    module = ImageTextDataModule({"p": str(tmp_path / "p-*.tar")}, None, tokenizer, 64, rows="padded", image_size=28)
    module.setup()
    lengths = [len(module.train_stream.sources[0].load(at, row)["input_ids"]) for at, size in ((0, 4), (1, 1)) for row in range(size)]
    assert rows["tokens"][0] == str(min(lengths)) and rows["tokens"][6] == str(sum(lengths))
    picture = np.asarray(Image.open(out).convert("RGB"))
    assert picture.shape[0] > 300 and (picture.reshape(-1, 3) == (0x44, 0x77, 0xAA)).all(1).sum() > 500  # the histogram's bars


def written(path: Path, content: Any) -> str:
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return str(path)


def test_stats_of_a_mix_agree_with_every_position_of_the_run(tmp_path: Path, tokenizer: str) -> None:
    options = dict(tokenizer=tokenizer, sequence_length=32, lanes=1, shuffle_window=16, packing_window=64, seed=3)
    mix = read_mix(written(tmp_path / "m.yaml", {"sources": mixes.sources(tmp_path), "stages": mixes.STAGES, **options}), {})
    stats = mix_stats(mix, 1000, 2)
    module = make_module(mix)
    stream, packer = module.train_stream, module.packer
    assert [(stage.start, stage.end) for stage in stats.stages] == [(0, 64), (64, 160), (160, 256)]
    for stage in stats.stages:
        sources = [module.schedule.at(p).source for p in range(stage.start, stage.end)]
        assert stage.samples == stage.drawn == [sources.count(number) for number in range(3)]
        lengths = stream.lengths(stage.start, stage.end - stage.start)
        assert stage.tokens == [int(lengths[np.array(sources) == number].sum()) for number in range(3)]
        assert all(abs(drawn - wanted) <= stats.bound for drawn, wanted in zip(stage.drawn, stage.wanted))
        windows = range(packer.window_at(stage.start), packer.window_at(stage.end - 1) + 1)
        states = [window << 20 | number for window in windows for number in range(packer.sequences(window))]
        batch = module.train_dataloader().collate([PackedStream(stream, packer)[state] for state in states])
        assert stage.padding == pytest.approx(padding_share(batch))
    ramp = [0.5 * 32 / 2 + 0.5 * 64, 0.65 * 32 + 0.3 * 64, 0.2 * 32 / 2 + 0.2 * 64]  # from 100 % b over 32 samples, then 64
    assert stats.stages[1].wanted == pytest.approx(ramp) and stats.stages[0].wanted == [0, 64, 0]
    counts = module.schedule.counts(256)
    assert stats.epochs == pytest.approx([counts[0] / 20, counts[1] / 55, counts[2] / 5])
    edges, drawn, wanted = stats.curve
    assert edges[0] == 0 and edges[-1] == 256 and np.allclose(drawn.sum(1), 1) and np.allclose(wanted.sum(1), 1)
    assert (drawn * np.diff(edges)[:, None]).sum(0) == pytest.approx(counts)


def test_stats_count_the_shards_that_a_rank_opens(tmp_path: Path) -> None:
    urls = mixes.write(tmp_path, "a", (3,) * 40)
    mix = Mix({"a": urls}, [{"name": "all", "mix": {"a": 1}}], {"lanes": 1, "shuffle_window": 3, "seed": 0})
    (stage,) = mix_stats(mix, 120, 1).stages  # a window is a shard: each is opened once, though only 32 stay open
    assert stage.opened == pytest.approx(1000 * 40 / 120) and stage.shards == 40
    (stage,) = mix_stats(mix, 240, 1).stages  # an epoch later most are closed again
    assert 1000 * 48 / 240 <= stage.opened <= 1000 * 80 / 240 and stage.shards == 40


@pytest.mark.parametrize("rows", ["packed", "bucketed"])
def test_stats_of_fewer_samples_than_are_planned_together(rows: str, tmp_path: Path, tokenizer: str) -> None:
    urls = mixes.write(tmp_path, "a", (3,) * 40)
    mix = Mix({"a": urls}, [{"name": "all", "mix": {"a": 1}}], {"tokenizer": tokenizer, "sequence_length": 64, "rows": rows})
    (stage,) = mix_stats(mix, 8, 2).stages
    assert stage.samples == [8] and 0 < stage.opened <= 1000 and 1 <= stage.shards <= 40


def test_stats_of_a_mix_print_shares_and_bounds_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [{"name": "one", "until": {"steps": 10}, "mix": {"b": 1}}, {"name": "two", "mix": {"a": 0.25, "b": 0.75}}]
    recipe = {"stages": stages, "batch": {"global_size": 8, "sequence_length": 32}, "model": {"x": 1}, "seed": 1}
    recipe["data"] = {"_target_": "x.Y", "sources": mixes.sources(tmp_path), "sequence_length": "${batch.sequence_length}"}
    path = written(tmp_path / "recipe.yaml", recipe)
    assert main(["stats", path, "samples=400", f"out={tmp_path / 'm.png'}"]) == 0
    out = capsys.readouterr().out
    assert "one: positions 0 to 79, 80 samples" in out and "two: positions 80 to 479, 400 samples of no end" in out
    assert re.search(r"a\s+│ 25\.000%\s+│ 25\.000%\s+│\s+100 │\s+[+-]0\.00 │\s+5\.000", out)
    assert "from position 80 (two) no source is ever more than 0.500 samples off" in out and "padding" not in out
    colors = np.asarray(Image.open(tmp_path / "m.png").convert("RGB")).reshape(-1, 3)
    assert all((colors == color).all(1).sum() > 500 for color in ((0x44, 0x77, 0xAA), (0xEE, 0x88, 0x66)))


def test_stats_of_weights_in_tokens(tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [{"name": "one", "until": {"tokens": 3000}, "mix": {"a": 0.5, "b": 0.5}}]
    content = {"sources": mixes.sources(tmp_path), "stages": stages, "weights": "tokens", "sequence_length": 32}
    path = written(tmp_path / "m.yaml", content)
    assert main(["stats", path]) == 2
    assert "these stages count tokens: add tokenizer=FOLDER" in capsys.readouterr().err
    (stage,) = mix_stats(read_mix(path, {"tokenizer": tokenizer}), 10, 2).stages
    assert (
        stage.drawn == stage.tokens and 3000 <= sum(stage.drawn) < 3032 and max(abs(d - w) for d, w in zip(stage.drawn, stage.wanted)) <= 32
    )


# write


def test_write_makes_shards_that_lint_and_index_take(tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.jpg").write_bytes(jpg() if number else b"broken")
        (folder / f"{number}.txt").write_text(f"a circle {number}")
    assert main(["write", str(folder), str(tmp_path / "raw"), "per_shard=3", "prefix=pairs", "threads=2"]) == 0
    out = capsys.readouterr().out
    assert "4 samples in 2 shards" in out and "left out 0: 6 bytes are no JPEG" in out and "pairs.json lists them" in out
    options = [f"tokenizer={tokenizer}", "image_size=28", "sequence_length=64", "pixels=png"]
    assert main(["write", str(folder), str(tmp_path / "done"), "preprocessed=true", *options]) == 0
    capsys.readouterr()
    code, report = lint(capsys, str(tmp_path / "raw"), str(tmp_path / "done"))
    assert code == 0 and report["samples"] == 8
    with tarfile.open(tmp_path / "done" / "samples-000000.tar") as tar:
        assert sorted(name for name in tar.getnames() if name.startswith("1.")) == ["1.png", "1.sizes.npy", "1.spans.npy", "1.tokens.npy"]
    assert main(["index", str(tmp_path / "raw"), str(tmp_path / "done"), *options[:3]]) == 0
    rows = [line.split("│")[6].strip() for line in capsys.readouterr().out.splitlines() if "samples-*" in line or "pairs-*" in line]
    assert len(rows) == 2 and rows[0] == rows[1]  # as many tokens


# wrong use


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lnt", "x"], "data has no verb 'lnt'; did you mean 'lint'?"),
        (["lint"], "data lint needs PATH...: megascale data lint PATH..."),
        (["lint", "{folder}", "fromat=json"], "data lint has no key 'fromat'; did you mean 'format'?"),
        (["lint", "{folder}", "format=jsn"], "format=jsn: must be one of table, json; did you mean 'json'?"),
        (["lint", "{folder}", "processes=0"], "processes=0: must be a whole number, at least 1"),
        (["lint", "{folder}", "fields=[a]"], "fields=[a]: must be a mapping"),
        (["lint", "{folder}/a-00.tar"], "the nearest existing names are 'a-000.tar'"),
        (["lint", "{folder}/empty"], "no .tar file in this folder"),
        (["index", "{folder}", "tokenizer=nowhere/at/all"], "tokenizer=nowhere/at/all: there is no such folder"),
        (["index", "{folder}", "sequence_length=long"], "sequence_length=long: must be a whole number, at least 2"),
        (["preview", "{folder}", "out=x.jpg"], "out=x.jpg: must end in .html or .png"),
        (["stats", "{folder}", "out=x.txt"], "out=x.txt: must end in .png, .svg or .pdf"),
        (["stats", "{folder}/mxi.yaml"], "there is no such file; did you mean '{folder}/mix.yaml'?"),
        (["stats", "{folder}/mix.yaml", "{folder}"], "mix.yaml is a mix of sources, and stands alone"),
        (["lint", "{folder}/mix.yaml"], "mix.yaml: this verb reads shards"),
        (["stats", "{folder}/mix.yaml"], "has the key 'stagse'; did you mean 'stages'?"),
        (["stats", "{folder}/bare.yaml"], "it needs sources: {NAME: {urls: ...}}"),
        (["stats", "{folder}/steps.yaml"], "stage 'one' is counted in steps: add steps_per"),
        (["stats", "{folder}/unknown.yaml"], "mix names 'b', which is no source"),
        (["write", "{folder}"], "data write needs OUT"),
        (["write", "{folder}", "out", "more"], "data write takes INPUT OUT and key=value; 'more' is one more"),
        (["write", "{folder}", "out", "image_size=28"], "image_size=28 is for preprocessed=true"),
        (["write", "{folder}", "out", "preprocessed=true"], "add tokenizer=FOLDER"),
        (["write", "{folder}", "out", "preprocessed=yes"], "preprocessed=yes: must be one of true, false"),
        (["write", "{folder}", "out", "out=again"], "data write: out is given twice"),
    ],
)
def test_wrong_use_is_2_and_one_message(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = shard(tmp_path / "a-000.tar", [("1.txt", b"x")])
    (tmp_path / "empty").mkdir()
    stage = {"name": "one", "until": {"steps": 3}, "mix": {"a": 1}}
    written(tmp_path / "mix.yaml", {"sources": {"a": url}, "stagse": []})
    written(tmp_path / "bare.yaml", {"stages": []})
    written(tmp_path / "steps.yaml", {"sources": {"a": url}, "stages": [stage]})
    written(tmp_path / "unknown.yaml", {"sources": {"a": url}, "stages": [{"name": "one", "mix": {"b": 1}}]})
    assert main([argument.format(folder=tmp_path) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("megascale: ") and message.replace("{folder}", str(tmp_path)) in captured.err
    assert captured.out == "" and "Traceback" not in captured.err


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["lint", "--help"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(f"\n  {verb} " in out for verb in ("index", "lint", "preview", "stats", "write"))


def test_sets_are_told_apart_by_their_numbers(tmp_path: Path) -> None:
    for name in ("a-000.tar", "a-001.tar", "b.tar"):
        shard(tmp_path / name, [("1.txt", b"x")])
    sets = shard_sets([str(tmp_path / "a-{000..001}.tar"), str(tmp_path), str(tmp_path / "a-000.tar")])
    assert [(Path(one.name).name, [Path(url).name for url in one.urls]) for one in sets] == [
        ("a-*.tar", ["a-000.tar", "a-001.tar"]),
        ("b.tar", ["b.tar"]),
    ]


def test_the_command_ends_with_the_code(tmp_path: Path) -> None:
    shard(tmp_path / "a-000.tar", [*pairs(1), ("x.txt", b"no picture")])
    done = megascale("data", "lint", "a-000.tar", "format=json", cwd=tmp_path)
    assert done.returncode == 1 and json.loads(done.stdout)["findings"][0]["key"] == "x" and done.stderr == ""
