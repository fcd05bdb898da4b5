"""Samples on their way into shards: the files of a folder, or the records of a LLaVA-style JSON file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

_log = logging.getLogger(__name__)
TEXT_FILES, CONVERSATION_FILES = ("txt", "text", "caption"), ("json",)
IMAGE_FILES = ("jpg", "jpeg", "png", "webp", "gif", "bmp")


@dataclass(frozen=True)
class Record:
    """A sample before it is written: its key, its text (extension, content), and the files of its pictures."""

    key: str
    extension: str | None
    text: Path | bytes | None
    pictures: tuple[Path, ...]


def read_folder(folder: Path) -> Iterator[Record]:
    """The samples of a folder and those below it, sorted by key; names that begin with a dot are left out.

    Raises:
        ValueError: for keys with dots, no samples, a link in a circle, or a key with two texts or two pictures.
    """
    found: dict[str, dict[str, Path]] = {}
    others: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if (here := Path(place).resolve()).is_relative_to(target := (Path(place) / name).resolve()):
                raise ValueError(f"{Path(place) / name} is a link that leads back to {target}, above {here}: remove it")
        for path in (Path(place) / name for name in names if not name.startswith(".")):
            if (extension := path.suffix[1:].lower()) in TEXT_FILES + CONVERSATION_FILES + IMAGE_FILES:
                key = path.relative_to(folder).with_suffix("").as_posix()
                if extension in found.setdefault(key, {}):
                    raise ValueError(f"{folder}: {key!r} has two files {extension!r} whose extensions differ in case only; rename one")
                found[key][extension] = path
            else:
                others.append(path)
    if others:
        _log.warning("%s: %d files of other kinds are left out, the first is %s", folder, len(others), others[0].relative_to(folder))
    _refuse_names(folder, found)
    if not found:
        known = ", ".join(TEXT_FILES + CONVERSATION_FILES + IMAGE_FILES)
        raise ValueError(f"{folder}: no sample; it is made of files {known}, those of the same name together")
    for key in sorted(found):
        texts = [extension for extension in TEXT_FILES + CONVERSATION_FILES if extension in found[key]]
        pictures = [extension for extension in IMAGE_FILES if extension in found[key]]
        if len(texts) > 1 or len(pictures) > 1:
            raise ValueError(
                f"{folder}: {key!r} has {', '.join(texts + pictures)}; one text and one picture make a sample, rename the others"
            )
        text = texts[0] if texts else None
        yield Record(key, text, found[key][text] if text else None, tuple(found[key][extension] for extension in pictures))


def _refuse_names(folder: Path, keys: Iterable[str]) -> None:
    """Refuses keys that WebDataset would cut, or that the index of a shard would skip or not read."""
    dotted = sorted(key for key in keys if "." in key)
    if dotted:
        raise ValueError(
            f"{folder}: {len(dotted)} names with a dot before the extension, such as {dotted[0]!r}: WebDataset ends a sample's key at the"
            " first dot; rename the files, for example with dashes"
        )
    odd = sorted(key for key in keys if key.startswith("__") or any("\ud800" <= character <= "\udfff" for character in key))
    if odd:
        raise ValueError(f"{folder}: {len(odd)} names that begin with '__' or are not UTF-8, such as {odd[0]!r}; rename the files")


def read_records(file: Path, image_folder: Path) -> Iterator[Record]:
    """The records of a LLaVA-style .json (a list) or .jsonl file (one per line), with the number of each as its key.

    Raises:
        ValueError: for another file, a record that is no mapping, or a picture outside the folder.
    """
    records: Iterable[Any]
    if file.suffix == ".jsonl":
        records = _lines(file)
    elif file.suffix == ".json":
        try:
            records = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is no JSON: {error}") from error
    else:
        raise ValueError(f"{file}: give a folder, or a file whose name ends with .json or .jsonl")
    if isinstance(records, dict) or not isinstance(records, Iterable):
        raise ValueError(f"{file}: a list of records with `conversations` and `image` is due, not {type(records).__name__}")
    for number, record in enumerate(records):
        names = record.get("image", record.get("images")) if isinstance(record, dict) else 0
        names = [names] if isinstance(names, str) else names or []
        if not isinstance(record, dict) or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{file}: record {number} is no mapping with `conversations` and `image`, a name or a list of names")
        for name in names:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(
                    f"{file}: record {number} names the picture {name!r}; names are relative to the image folder and stay in it"
                )
        content = {key: value for key, value in record.items() if key not in ("image", "images")}
        text = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
        yield Record(f"{number:09d}", "json", text, tuple(image_folder / name for name in names))


def _lines(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{file}: line {number} is no JSON: {error}") from error
