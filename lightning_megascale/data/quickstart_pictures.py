"""A first image-text mix: eight photos that ship with scikit-image under captions of our own, and Python's help topics.

``python -m lightning_megascale.data.quickstart_pictures`` writes it and names commands that show it. No picture comes with this package,
and none is downloaded: the photos (public domain or CC0; the Hubble picture is NASA's, for free use) lie in scikit-image's wheel.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import PIL
import webdataset as wds
from PIL import Image

from lightning_megascale.data.cache import build_once, cache_root
from lightning_megascale.data.image_text import ImageTextDataModule
from lightning_megascale.data.quickstart import read_documents, save_tokenizer, split_documents, train_tokenizer

IMAGE = "<image>"
PHOTOS: dict[str, tuple[str, tuple[str, str, str]]] = {  # name -> file of scikit-image, captions
    "astronaut": (
        "astronaut.png",
        (
            "A smiling astronaut in an orange space suit, her helmet beside her.",
            "A portrait of a woman in an orange pressure suit before a flag and a model of the space shuttle.",
            "An astronaut with short hair sits for an official photograph.",
        ),
    ),
    "cat": (
        "chelsea.png",
        (
            "The face of a tabby cat with green eyes.",
            "A close view of a striped cat that looks to the side.",
            "A ginger and grey cat with long white whiskers.",
        ),
    ),
    "coffee": (
        "coffee.png",
        (
            "A cup of espresso on a red saucer.",
            "A small cup of coffee and a spoon on a wooden table.",
            "A red and white cup with a little coffee in it, seen from above.",
        ),
    ),
    "rocket": (
        "rocket.jpg",
        (
            "A white rocket on its launch pad at dusk.",
            "A tall rocket stands upright between four towers under a dark blue sky.",
            "Bright lights shine on a rocket before its launch.",
        ),
    ),
    "galaxies": (
        "hubble_deep_field.jpg",
        (
            "Hundreds of distant galaxies on a black sky.",
            "A deep view into space by the Hubble telescope, full of small coloured galaxies.",
            "Many faint red, blue and white spots of light in the dark.",
        ),
    ),
    "retina": (
        "retina.jpg",
        (
            "The retina of a human eye with its blood vessels.",
            "A round red picture of the back of an eye; the optic nerve is the bright spot on the left.",
            "A medical photograph of the inside of an eye.",
        ),
    ),
    "photographer": (
        "camera.png",
        (
            "A man in a dark coat looks through a camera on a tripod.",
            "A black and white photograph of a photographer on a lawn.",
            "A photographer at work, a tower and low buildings far behind him.",
        ),
    ),
    "clock": (
        "clock_motion.png",
        (
            "A blurred clock on a grey wall.",
            "A black and white photograph of a round clock, smeared by motion.",
            "A bright oval, too blurred to read the time on it.",
        ),
    ),
}
STAGES: list[dict[str, Any]] = [  # first all pairs twice, then text beside them
    {"name": "align", "until": {"samples": 48}, "mix": {"photos": 1}},
    {"name": "instruct", "mix": {"photos": 0.5, "text": 0.5}},
]
_EDGE, _QUALITY = 256, 85  # pixels of the shorter edge; of JPEG
_FORMAT = 1  # raise it when the layout of the folder or the way it is made changes


class QuickstartPictures(ImageTextDataModule):
    """The photos with their captions (24 pairs) and the help topics, streamed as ``ImageTextDataModule`` streams any sources.

    It shows the way of pictures from shards to batches; nobody learns to see from eight of them.

    Args:
        cache_dir: where the shards go; None means $MEGASCALE_CACHE, or ~/.cache/lightning_megascale.
        sequence_length: tokens per row.
        batch_size: rows per data-parallel rank and batch.
        vocab_size: entries of the tokenizer, ``<image>`` among them.
        stages: of the sources "photos" and "text"; None: ``STAGES``.
        image_size, image_patch: of the vision encoder; a picture is (size / patch)^2 tokens.
        options: further arguments of ``ImageTextDataModule``.

    Raises:
        ValueError: without scikit-image, and as ``ImageTextDataModule``.
    """

    def __init__(
        self,
        cache_dir: str | Path | None = None,
        sequence_length: int = 256,
        batch_size: int = 8,
        vocab_size: int = 4096,
        stages: Sequence[Mapping[str, Any]] | None = None,
        *,
        image_size: int = 128,
        image_patch: int = 16,
        **options: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.folder = pictures_folder(cache_dir, vocab_size)
        mix = {**_mix(self.folder), "stages": stages or STAGES, "sequence_length": sequence_length}
        sizes = {"image_size": image_size, "image_patch": image_patch}
        validation = {"text": str(self.folder / "validation.tar")}
        super().__init__(**{**mix, **sizes, "batch_size": batch_size, "cache_dir": cache_dir, "validation": validation, **options})

    def prepare_data(self) -> None:
        """Writes the shards if they are missing or damaged, and their indexes."""
        prepare_pictures(self.cache_dir, self.vocab_size)
        super().prepare_data()


def prepare_pictures(cache_dir: str | Path | None = None, vocab_size: int = 4096, timeout_seconds: float = 120.0) -> Path:
    """Writes photos, texts and tokenizer, once, and returns their folder.

    It holds ``photos.tar`` (jpg, txt), ``text.tar`` and ``validation.tar`` (txt), ``tokenizer/``, and ``mix.yaml`` for ``megascale data``.

    Args:
        cache_dir: where the folder goes; None means $MEGASCALE_CACHE, or ~/.cache/lightning_megascale.
        vocab_size: entries of the tokenizer.
        timeout_seconds: how long to wait for another process.

    Raises:
        ValueError: without scikit-image.
    """
    folder = pictures_folder(cache_dir, vocab_size)

    def build(place: Path) -> None:
        train, validation = split_documents(read_documents(), 0.1)
        captions = [caption for _, three in PHOTOS.values() for caption in three]
        save_tokenizer(train_tokenizer([*train.values(), *captions], vocab_size - 1), place / "tokenizer", [IMAGE])
        for name, documents in (("text", train), ("validation", validation)):
            _write(place / f"{name}.tar", [{"__key__": key, "txt": text} for key, text in documents.items()])
        _write(place / "photos.tar", _pairs())
        (place / "mix.yaml").write_text(json.dumps(_mix(folder), indent=1))  # JSON is YAML

    return build_once(folder, build, timeout_seconds)


def pictures_folder(cache_dir: str | Path | None = None, vocab_size: int = 4096) -> Path:
    """Where ``prepare_pictures`` puts them: the name carries a hash of all that decides the content.

    Raises:
        ValueError: without scikit-image.
    """
    content = {
        "format": [_FORMAT, _EDGE, _QUALITY],
        "photos": {name: [hashlib.sha256(_file(file)).hexdigest(), captions] for name, (file, captions) in PHOTOS.items()},
        "text": sorted(read_documents().items()),
        "mix": _mix(Path()),
        "vocab_size": vocab_size,
        "versions": [version("tokenizers"), PIL.__version__],
    }
    return cache_root(cache_dir) / f"pictures-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}"


def _mix(folder: Path) -> dict[str, Any]:
    """The sources in a folder, as ``ImageTextDataModule`` and ``megascale data`` take them."""
    return {
        "sources": {"photos": str(folder / "photos.tar"), "text": str(folder / "text.tar")},
        "stages": STAGES,
        "tokenizer": str(folder / "tokenizer"),
        "sequence_length": 256,
        "long_documents": "split",
        "packing_window": 256,  # small, as the sources are
        "image_size": 128,
        "image_patch": 16,
    }


def _pairs() -> list[dict[str, Any]]:
    """A sample of each photo with each of its captions."""
    found = []
    for name, (file, captions) in PHOTOS.items():
        picture = Image.open(io.BytesIO(_file(file))).convert("RGB")
        scale = _EDGE / min(picture.size)
        picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=_QUALITY)
        found += [
            {"__key__": f"{name}-{number}", "jpg": buffer.getvalue(), "txt": IMAGE + caption} for number, caption in enumerate(captions)
        ]
    return found


def _file(name: str) -> bytes:
    """A file of scikit-image's wheel, read without its loader, which might download.

    Raises:
        ValueError: when it is not there.
    """
    found = importlib.util.find_spec("skimage")
    path = Path(str(found.origin)).parent / "data" / name if found is not None else None
    if path is None or not path.is_file():
        problem = "scikit-image is not installed" if path is None else f"this scikit-image has no {path}"
        raise ValueError(f'the photos of the quickstart come with scikit-image, and {problem}: pip install "lightning-megascale[demo]"')
    return path.read_bytes()


def _write(path: Path, samples: Sequence[dict[str, Any]]) -> None:
    with wds.TarWriter(str(path), mtime=0) as tar:
        for sample in samples:
            tar.write(sample)


if __name__ == "__main__":
    mix = prepare_pictures() / "mix.yaml"
    print(f"megascale data preview {mix} out=preview.html\nmegascale data stats {mix} samples=400 out=stats.png")
