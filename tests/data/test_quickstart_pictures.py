"""The first image-text mix: photos, captions, texts and tokenizer in the cache; batches, stages, preview and stats of them."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image

from lightning_megascale.cli.data import main
from lightning_megascale.data.images import decode, resize
from lightning_megascale.data.quickstart import load_tokenizer, read_documents
from lightning_megascale.data.quickstart_pictures import IMAGE, PHOTOS, QuickstartPictures, pictures_folder, prepare_pictures
from lightning_megascale.data.ragged import Ragged


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    prepare_pictures(cache, 1024)
    return cache


def samples(path: Path) -> dict[str, dict[str, Any]]:
    return {sample["__key__"]: sample for sample in wds.WebDataset(str(path), shardshuffle=False)}


def test_each_photo_has_three_captions_of_its_own(place: Path) -> None:
    found = samples(pictures_folder(place, 1024) / "photos.tar")
    assert len(PHOTOS) == 8 and list(found) == [f"{name}-{number}" for name in PHOTOS for number in range(3)]
    captions = [sample["txt"].decode() for sample in found.values()]
    assert captions == [IMAGE + caption for _, three in PHOTOS.values() for caption in three] and len(set(captions)) == 24
    pictures = {name: Image.open(io.BytesIO(found[f"{name}-0"]["jpg"])) for name in PHOTOS}
    assert all(picture.format == "JPEG" and picture.mode == "RGB" and min(picture.size) == 256 for picture in pictures.values())
    assert pictures["rocket"].size == (384, 256)  # 640 x 427
    means = {name: np.asarray(picture).mean((0, 1)) for name, picture in pictures.items()}
    assert means["retina"][0] > 1.5 * means["retina"][2] and means["rocket"][2] > means["rocket"][0]  # red; blue
    assert np.ptp(means["photographer"]) < 1 and means["galaxies"].max() < 40  # grey; dark


def test_texts_and_tokenizer(place: Path) -> None:
    folder = pictures_folder(place, 1024)
    texts = [samples(folder / f"{name}.tar") for name in ("text", "validation")]
    assert {key: sample["txt"].decode() for part in texts for key, sample in part.items()} == read_documents()
    assert not texts[0].keys() & texts[1].keys()
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer) == 1024 and tokenizer(IMAGE + "A cat")["input_ids"][0] == 1023
    assert tokenizer.decode(tokenizer(IMAGE + "A cat.")["input_ids"]) == IMAGE + "A cat."


def test_stages_bring_pairs_then_text_beside_them(place: Path) -> None:
    data = QuickstartPictures(place, vocab_size=1024, batch_size=4, rows="padded", sequence_length=128, image_size=64)
    data.prepare_data()
    data.setup()
    token = data.tokenizer.convert_tokens_to_ids(IMAGE)
    keys: list[str] = []
    photos = samples(data.folder / "photos.tar")
    for _, batch in zip(range(24), data.train_dataloader()):
        pixels = batch["pixel_values"]
        assert isinstance(pixels, Ragged)
        for row, (key,) in enumerate(batch["__key__"]):
            keys.append(key)
            shown = int(key in photos)
            assert (batch["input_ids"][row] == token).sum() == 16 * shown == 16 * len(pixels[row])
            if shown:
                wanted = resize(decode(photos[key]["jpg"]), 64, "clip").transpose(2, 0, 1)
                assert torch.equal(pixels[row][0], torch.tensor(wanted))
    assert sorted(keys[:24]) == sorted(keys[24:48]) == sorted(photos)  # each pair once an epoch
    assert keys[:24] != keys[24:48]
    assert sum(key in photos for key in keys[48:]) == 24  # half of the 48 that follow
    assert len(list(data.val_dataloader())) > 0
    other = QuickstartPictures(place, vocab_size=1024, stages=[{"name": "t", "mix": {"text": 1}}])
    other.setup()
    assert next(iter(other.train_dataloader()))["pixel_values"].counts.sum() == 0


def test_the_tools_show_it(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mix = str(pictures_folder(place, 1024) / "mix.yaml")
    assert main(["preview", mix, f"out={tmp_path / 'p.png'}", "count=3", "rows=1"]) == 0
    assert Image.open(tmp_path / "p.png").width > 500 and "3 samples and 1 row" in capsys.readouterr().out
    assert main(["stats", mix, "samples=400", f"cache_dir={place}"]) == 0
    out = capsys.readouterr().out
    assert "align: positions 0 to 47" in out and "instruct: positions 48 to 447" in out and "50.000%" in out


def test_written_once_and_again_when_damaged(place: Path) -> None:
    folder = prepare_pictures(place, 1024)
    before = (folder / "photos.tar").read_bytes()
    (folder / "photos.tar").write_bytes(before[:-2000])
    assert prepare_pictures(place, 1024) == folder and (folder / "photos.tar").read_bytes() == before


def test_without_scikit_image_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "skimage" else find(name, *more))
    with pytest.raises(ValueError, match=r'scikit-image is not installed: pip install "lightning-megascale\[demo\]"'):
        QuickstartPictures(tmp_path)
