"""What `megascale data` is pointed at: shards by paths, or a mix of sources in a YAML file; and the data module that reads either."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_megascale.cli.arguments import choice, number
from lightning_megascale.cli.errors import UserError, nearest

if TYPE_CHECKING:
    from lightning_megascale.data.mixture import MixtureDataModule

SOURCE_KEYS = ("fields", "encode", "cache_dir")
_NUMBERS = {"sequence_length": 2, "image_size": 1, "image_patch": 1, "image_merge": 1, "image_extra": 0}
ENCODING_KEYS = ("tokenizer", *_NUMBERS, "image_mode", "image_token")
_DIGITS = re.compile(r"\d+(?=\.tar$|$)")


@dataclass(frozen=True)
class ShardSet:
    """Shards that belong together: ``train-000000.tar``, ``train-000001.tar`` and so on are ``train-*.tar``."""

    name: str
    urls: tuple[str, ...]
    fields: Mapping[str, str] | None = None
    encode: str | None = None

    def source(self) -> dict[str, Any]:
        """As a recipe writes it."""
        return {"urls": list(self.urls), "fields": self.fields, "encode": self.encode}


@dataclass(frozen=True)
class Mix:
    """Sources, perhaps their stages, and further arguments of the data module."""

    sources: Mapping[str, Any]
    stages: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def is_mix(paths: Sequence[str]) -> bool:
    """Whether a YAML file was given, not shards.

    Raises:
        UserError: for one beside something else.
    """
    files = [path for path in paths if path.endswith((".yaml", ".yml"))]
    if files and len(paths) > 1:
        raise UserError(f"{files[0]} is a mix of sources, and stands alone; leave out {', '.join(p for p in paths if p != files[0])}")
    return bool(files)


def shard_sets(paths: Sequence[str], fields: str | None = None, encode: str | None = None) -> list[ShardSet]:
    """The shards that paths, patterns, addresses and folders name, by set.

    Args:
        paths: of a folder all ``.tar`` files in it and below.
        fields: YAML of a mapping, as ``{text: cap}``.
        encode: dotted path.

    Raises:
        UserError, ValueError: for what names no shard.
    """
    from lightning_megascale.data.expand import expand, shown

    wanted = _mapping("fields", fields)
    found: dict[str, list[str]] = {}
    for path in paths:
        folder = Path(path).expanduser()
        urls = sorted(map(str, folder.rglob("*.tar"))) if "://" not in path and folder.is_dir() else expand(path)
        if not urls:
            raise UserError(f"{path}: no .tar file in this folder and below it; megascale data write makes shards")
        for url in urls:
            place, _, name = shown(url).rpartition("/")
            urls_of = found.setdefault(f"{place}/{_DIGITS.sub('*', name)}" if place else _DIGITS.sub("*", name), [])
            if url not in urls_of:
                urls_of.append(url)
    return [ShardSet(name, tuple(urls), wanted, encode) for name, urls in found.items()]


def _mapping(key: str, text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise UserError(f"{key}={text}: must be a mapping, as {key}='{{image: jpg;png, text: txt}}'")
    return value


def encoding_options(values: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of the data module among the key=value of a verb, and ``cache_dir``.

    Raises:
        UserError: for a value out of range, or a folder that is no tokenizer.
    """
    options: dict[str, Any] = {key: number(key, values[key], int, least) for key, least in _NUMBERS.items() if key in values}
    if "image_mode" in values:
        options["image_mode"] = choice("image_mode", values["image_mode"], ("clip", "siglip"))
    options |= {key: values[key] for key in ("image_token", "cache_dir") if key in values}
    if "tokenizer" in values:
        options["tokenizer"] = checked_tokenizer(values["tokenizer"])
    return options


def checked_tokenizer(path: str) -> str:
    """The folder of a tokenizer, or a name of the hub.

    Raises:
        UserError: for a folder that is not there.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() or re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not folder.parent.is_dir():
        return str(folder) if folder.is_dir() else path
    near = nearest(str(folder), [str(other) for other in folder.parent.glob("*")] if folder.parent.is_dir() else [])
    raise UserError(f"tokenizer={path}: there is no such folder{near}; give the folder of a Hugging Face tokenizer")


def read_mix(path: str, overrides: Mapping[str, Any]) -> Mix:
    """A YAML file with ``sources``, ``stages`` and further arguments of the data module; or a recipe with ``data.sources`` and ``stages``.

    Raises:
        UserError: for no file, no sources, a key that is no argument (with the nearest), or a value that another file must fill in.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = nearest(path, map(str, Path(path).parent.glob("*.y*ml")))
        raise UserError(f"{path}: there is no such file{near}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: no YAML: {error}") from None
    data = dict(content) if isinstance(content, dict) else {}
    if isinstance(data.get("data"), dict) and "sources" in data["data"]:
        batch = data.get("batch") or {}
        inner = {key: value for key, value in data["data"].items() if not key.startswith("_")}
        data = {key: data[key] for key in ("stages", "seed") if key in data} | inner
        named = {"sequence_length": batch.get("sequence_length"), "steps_per": batch.get("global_size")}
        data |= {key: value for key, value in named.items() if value is not None and _open(data.get(key))}
    if not isinstance(data.get("sources"), dict) or not data["sources"]:
        has = ", ".join(map(str, data)) or "no keys"
        raise UserError(f"{path} has {has}: it needs sources: {{NAME: {{urls: ...}}}}, as a recipe's data.sources, and may have stages")
    data |= overrides
    for key, value in data.items():
        if key not in _arguments():
            raise UserError(f"{path} has the key {key!r}{nearest(str(key), _arguments())}; keys: {', '.join(_arguments())}")
        if isinstance(value, str) and "${" in value:
            raise UserError(f"{path}: {key}: {value} is filled in by a run; give its value here, as {key}=VALUE")
    return Mix(data.pop("sources"), data.pop("stages", None), data)


def _open(value: Any) -> bool:
    return value is None or isinstance(value, str) and "${" in value


def _arguments() -> list[str]:
    """Arguments of the data modules that a file may give."""
    from lightning_megascale.data.image_text import ImageTextDataModule
    from lightning_megascale.data.mixture import MixtureDataModule

    names = [*inspect.signature(MixtureDataModule).parameters, *inspect.signature(ImageTextDataModule).parameters]
    return [name for name in dict.fromkeys(names) if name != "options"]


def mix_of(sets: Sequence[ShardSet], options: Mapping[str, Any]) -> Mix:
    """Sets of shards as sources, mixed by their sizes."""
    return Mix({shards.name: shards.source() for shards in sets}, None, options)


def make_module(mix: Mix) -> MixtureDataModule:
    """The data module of a mix, set up: with pictures where a source has some, or where ``image_size`` is given.

    What is bad is not listed in the quarantine file of runs.

    Raises:
        ValueError: as the data module.
    """
    from lightning_megascale.data.image_text import ImageTextDataModule
    from lightning_megascale.data.mixture import MixtureDataModule

    find_own_code()
    given = {**mix.options, "quarantine": os.devnull, "quarantine_limit": None}
    kind = ImageTextDataModule if any(key.startswith("image_") for key in given) or has_pictures(mix) else MixtureDataModule
    module = kind(mix.sources, mix.stages, **given)  # type: ignore[arg-type]
    module.setup()
    return module


def has_pictures(mix: Mix) -> bool:
    """Whether a source has a field of pictures, as its shards tell."""
    from lightning_megascale.data.encode import PICTURES
    from lightning_megascale.data.mixture_config import source_config
    from lightning_megascale.data.source_config import default_fields
    from lightning_megascale.data.storage import ShardStore, expand

    store = ShardStore(mix.options.get("cache_dir"))
    for name, written in mix.sources.items():
        config = source_config(name, written)
        fields: Any = config.fields
        if fields is None:
            fields = default_fields(sorted({extension for index in store.indexes(expand(config.urls)) for extension in index.fields}))
        if set(fields) & set(PICTURES):
            return True
    return False


def find_own_code() -> None:
    """Makes the current folder's modules importable, for ``encode`` functions."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
