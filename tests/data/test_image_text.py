"""ImageTextDataModule: pictures beside their placeholders in every row, of every kind of sample, whole under packing and microbatches."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image
from transformers import CLIPImageProcessorPil

from lightning_megascale.data.image_text import ImageTextDataModule
from lightning_megascale.data.ragged import Ragged
from lightning_megascale.parallel.microbatches import split_rows
from tests.data.chat import IMAGE, image_id, make_tokenizer
from tests.data.mixes import run

SIZE, PATCH, TOKENS = 8, 4, 4


def picture(number: int, width: int = 11, height: int = 9) -> bytes:
    """A PNG whose mean tells its number."""
    pixels = np.full((height, width, 3), number % 250, dtype=np.uint8)
    pixels[::2, 1::2, 0] += 5
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pictures")
    with wds.TarWriter(str(folder / "caption-000.tar"), mtime=0) as tar:
        for number in range(20):
            tar.write({"__key__": f"caption{number:03d}", "png": picture(number), "txt": f"{IMAGE}a red square"})
    with wds.TarWriter(str(folder / "chat-000.tar"), mtime=0) as tar:
        for number in range(15):
            turns = [{"from": "human", "value": f"{IMAGE} and {IMAGE}?"}, {"from": "gpt", "value": "blue"}]
            pair = {"0.png": picture(100 + 2 * number, 20, 30), "1.png": picture(101 + 2 * number)}
            tar.write({"__key__": f"chat{number:03d}", **pair, "json": json.dumps({"conversations": turns}).encode()})
    with wds.TarWriter(str(folder / "text-000.tar"), mtime=0) as tar:
        for number in range(10):
            tar.write({"__key__": f"text{number:03d}", "txt": "the cat " * (1 + number % 4)})
    return {name: str(folder / f"{name}-*.tar") for name in ("caption", "chat", "text")}


def module(urls: dict[str, str], folder: Path, stages: Any, **options: Any) -> ImageTextDataModule:
    given: dict[str, Any] = dict(sequence_length=64, batch_size=2, image_size=SIZE, image_patch=PATCH, cache_dir=folder, packing_window=16)
    given["quarantine"] = folder / "quarantine.jsonl"
    return ImageTextDataModule(urls, stages, make_tokenizer(), **{**given, **options})


MIX = [{"name": "mix", "until": {"samples": 60}, "mix": {"text": 0.2, "instruct": {"share": 0.8, "caption": 1, "chat": 1}}}]


def batches(data: ImageTextDataModule) -> list[dict[str, Any]]:
    data.prepare_data()
    data.setup()
    return list(data.train_dataloader())


def numbers_of(key: str) -> list[int]:
    number = int(key[-3:])
    return [number] if key.startswith("caption") else [100 + 2 * number, 101 + 2 * number] if key.startswith("chat") else []


@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_pictures_lie_where_their_placeholders_are(rows: str, urls: dict[str, str], tmp_path: Path) -> None:
    """Each row has as many pictures as runs of placeholders, in the order of its samples, and they are those of its samples."""
    found = batches(module(urls, tmp_path, MIX, rows=rows))
    token, kinds = image_id(make_tokenizer()), Counter()  # type: ignore[var-annotated]
    for batch in found:
        for row, keys in enumerate(batch["__key__"]):
            wanted = [number for key in keys for number in numbers_of(key)]
            pixels = batch["pixel_values"][row]
            assert pixels.dtype == torch.uint8 and pixels.shape == (len(wanted), 3, SIZE, SIZE)
            assert [round(float(one[2].double().mean())) for one in pixels] == wanted
            assert int((batch["input_ids"][row] == token).sum()) == TOKENS * len(wanted)
            assert not (batch["labels"][row] == token).any(), "no placeholder is to be predicted"
            assert batch["image_sizes"][row].tolist() == [[30, 20] if n >= 100 and n % 2 == 0 else [9, 11] for n in wanted]
            kinds.update(key[:4] for key in keys)
    assert set(kinds) == {"capt", "chat", "text"}


def test_a_batch_without_pictures_has_none_of_the_right_shape(urls: dict[str, str], tmp_path: Path) -> None:
    (batch, *_) = batches(module(urls, tmp_path, [{"name": "t", "until": {"samples": 4}, "mix": {"text": 1}}], rows="padded"))
    assert batch["pixel_values"].values.shape == (0, 3, SIZE, SIZE) and batch["pixel_values"].counts.tolist() == [0, 0]
    assert batch["image_sizes"].values.shape == (0, 2)


def test_pixels_are_those_of_transformers(urls: dict[str, str], tmp_path: Path) -> None:
    data = module(urls, tmp_path, [{"name": "c", "until": {"samples": 4}, "mix": {"chat": 1}}], rows="padded")
    batch = data.on_after_batch_transfer(batches(data)[0], 0)
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    first = numbers_of(batch["__key__"][0][0])
    theirs = processor([Image.open(io.BytesIO(picture(first[0], 20, 30))), Image.open(io.BytesIO(picture(first[1])))], return_tensors="pt")
    assert batch["pixel_values"].values.dtype == torch.float32
    torch.testing.assert_close(batch["pixel_values"][0], theirs["pixel_values"], rtol=0, atol=1e-6)


def test_microbatches_take_their_rows_pictures(urls: dict[str, str], tmp_path: Path) -> None:
    for batch in batches(module(urls, tmp_path, MIX, batch_size=4))[:3]:
        parts = split_rows(batch, 4, 2)
        assert isinstance(parts[0]["pixel_values"], Ragged)
        for number, part in enumerate(parts):
            for row in range(2):
                assert torch.equal(part["pixel_values"][row], batch["pixel_values"][2 * number + row])
            assert part["__key__"] == batch["__key__"][2 * number : 2 * number + 2]


def test_broken_pictures_are_replaced_and_listed(urls: dict[str, str], tmp_path: Path) -> None:
    """Every other position stays; the same on all ranks; the file lists them; too many stop the run."""
    with wds.TarWriter(str(tmp_path / "caption-000.tar"), mtime=0) as tar:
        for number in range(20):
            data = picture(number)
            data = data[: len(data) // 2] if number in (3, 11) else data
            tar.write({"__key__": f"caption{number:03d}", "png": data, "txt": f"{IMAGE}a red square"})
    broken = {**urls, "caption": str(tmp_path / "caption-*.tar")}
    stages = [{"name": "c", "until": {"samples": 36}, "mix": {"caption": 1}}]
    options = dict(rows="padded", batch_size=2)
    whole = [row[0] for batch in run(module(urls, tmp_path / "a", stages, **options)).rows for row in batch]
    ranks = [run(module(broken, tmp_path / "b", stages, **options), rank, 2) for rank in range(2)]
    mine = [row[0] for batches in zip(*(rank.rows for rank in ranks)) for rows in zip(*batches) for row in rows]
    assert len(mine) == len(whole) == 36
    bad = {"caption003", "caption011"}
    changed = [place for place, key in enumerate(whole) if mine[place] != key]
    assert [whole[place] in bad for place in range(36)] == [place in changed for place in range(36)] and changed
    lines = [json.loads(line) for line in (tmp_path / "b" / "quarantine.jsonl").read_text().splitlines()]
    assert {line["key"] for line in lines} == bad and {line["shard"] for line in lines} == {"caption-000.tar"}
    with pytest.raises(ValueError, match="2 bad samples are more than the limit of 1"):
        run(module(broken, tmp_path / "c", stages, quarantine_limit=1, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(image_token="<picture>"), "image_token='<picture>' is no special token of the tokenizer"),
        (dict(sequence_length=4), "sequence_length=4: one picture of image_size=8 takes 4 tokens"),
        (dict(image_mode="vit"), "image_mode='vit'"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], words: str, urls: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        module(urls, tmp_path, MIX, **options).setup()
