"""What MixtureDataModule is told, checked, and how its samples become a batch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from lightning_megascale.data.collate import pack_rows, pad_rows
from lightning_megascale.data.packing import LARGEST_WINDOW
from lightning_megascale.data.positioned import Batch
from lightning_megascale.data.sharing import SHARES
from lightning_megascale.data.shuffle import LARGEST_LANES
from lightning_megascale.data.source_config import SourceConfig

ROWS = ("packed", "padded", "bucketed")
_KEYS = ("urls", "fields", "encode")


def check_arguments(**given: Any) -> None:
    """Refuses arguments out of range, all at once; each by its name.

    Raises:
        ValueError: listing them.
    """
    at_least = {"sequence_length": 2, "batch_size": 1, "num_workers": 0, "shuffle_window": 1, "pad_multiple": 1, "lanes": 1}
    wrong = [
        f"{name}={given[name]!r}: a whole number, at least {least}" for name, least in at_least.items() if not _whole(given[name], least)
    ]
    if not given["sources"]:
        wrong.append("sources: give at least one, name: {urls, fields, encode}")
    if given["tokenizer"] is None:
        wrong.append("tokenizer=None: give a fast tokenizer of transformers, or the folder of one")
    for name, choices in (
        ("rows", ROWS),
        ("long_documents", ("split", "truncate")),
        ("weights", ("samples", "tokens")),
        ("share", SHARES),
    ):
        if given[name] not in choices:
            wrong.append(f"{name}={given[name]!r}: must be one of {', '.join(choices)}")
    for name, least in (("packing_window", 1), ("steps_per", 1)):
        if given[name] is not None and not _whole(given[name], least):
            wrong.append(f"{name}={given[name]!r}: None, or a whole number, at least {least}")
    for name, most in (("packing_window", LARGEST_WINDOW), ("lanes", LARGEST_LANES)):
        if _whole(given[name], 1) and given[name] > most:
            wrong.append(f"{name}={given[name]}: at most {most}")
    if not isinstance(given["seed"], int):
        wrong.append(f"seed={given['seed']!r}: a whole number")
    if given["cu_seqlens"] and given["rows"] != "packed":
        wrong.append(f"cu_seqlens=True with rows={given['rows']!r}: only packed rows have borders of documents")
    for name in ("sources", "validation"):
        if not isinstance(given[name] or {}, Mapping):
            wrong.append(f"{name}={given[name]!r}: a mapping, name: {{urls, fields, encode}}")
    if given["cache_gigabytes"] is not None and not given["cache_gigabytes"] > 0:
        wrong.append(f"cache_gigabytes={given['cache_gigabytes']}: above 0, or None without limit")
    if wrong:
        raise ValueError("\n".join(wrong))


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def source_config(name: str, config: Any) -> SourceConfig:
    """A source as a recipe writes it: ``{urls, fields, encode}``, or its urls alone.

    Raises:
        ValueError: for other keys.
    """
    if isinstance(config, SourceConfig):
        return config
    if isinstance(config, (str, list, tuple)):
        return SourceConfig(config)
    if not isinstance(config, Mapping) or "urls" not in config or not set(config) <= set(_KEYS):
        found = ", ".join(map(str, config)) if isinstance(config, Mapping) else repr(config)
        raise ValueError(f"source {name!r} has {found}: it is a mapping of {', '.join(_KEYS)}, of which urls is needed")
    return SourceConfig(config["urls"], config.get("fields"), config.get("encode"))


def key_of(name: str) -> int:
    """A source's key in its shuffles: of its name, so that another source in the mix changes nothing."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def digest(value: Any) -> str:
    """A short hash of data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def collate(items: list[Any], *, rows: str, length: int, pad_id: int, multiple: int, cu_seqlens: bool) -> Batch:
    """Samples, or lists of samples that share a row -> a batch."""
    groups = [item if isinstance(item, list) else [item] for item in items]
    if rows == "packed":
        return pack_rows(groups, length=length, pad_id=pad_id, cu_seqlens=cu_seqlens)
    nothing = {"input_ids": torch.full((1,), pad_id), "labels": torch.full((1,), -100), "__key__": ""}  # for a bad sample of the validation
    samples = [group[0] if group else nothing for group in groups]
    return pad_rows(samples, length=length if rows == "padded" else None, multiple=multiple, pad_id=pad_id)
