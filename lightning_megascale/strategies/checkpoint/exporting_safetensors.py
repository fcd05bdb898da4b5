"""The weights of a checkpoint as Hugging Face's safetensors folder: streamed, one tensor of the checkpoint in memory at a time."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_megascale.strategies.checkpoint.archive import Archive
from lightning_megascale.strategies.checkpoint.huggingface import (
    TOKENIZER,
    choose_model,
    main_dtype,
    skeleton,
    views_to_write,
    write_beside,
)
from lightning_megascale.strategies.checkpoint.safetensors_folder import BLOCK, DTYPES, INDEX, Bounds
from lightning_megascale.strategies.checkpoint.views import Stored, View

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Output:
    """A tensor to be written."""

    name: str
    view: View
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return prod(self.view.shape) * self.dtype.itemsize


class _LastRead:
    """The tensors of a checkpoint, the last one read kept: a fused one is read once for all tensors that are cut from it."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.name: str | None = None
        self.tensor: Tensor | None = None

    def whole(self, name: str) -> Tensor:
        if self.name != name or self.tensor is None:
            self.tensor = None
            self.tensor = self.archive.read(self.archive.model[name])
            self.name = name
        return self.tensor

    def read(self, name: str, bounds: Bounds, out: Tensor) -> None:
        part = self.whole(name)
        for dim, (start, stop) in enumerate(bounds):
            part = part.narrow(dim, start, stop - start)
        out.copy_(part)


def write_safetensors(
    archive: Archive,
    folder: Path,
    shard_bytes: int,
    prefix: str | None,
    dtype: torch.dtype | None = None,
    tokenizer: str | os.PathLike | None = None,
    config: str | os.PathLike | None = None,
) -> list[str]:
    """Writes the folder and returns the names of its files; the arguments are those of ``export``.

    Raises:
        ValueError: for a dtype that safetensors does not have, and what ``views_to_write`` refuses.
    """
    chosen = choose_model(archive, prefix, config)
    if chosen is None:
        names = _strip(list(archive.model), prefix)
        views: dict[str, View] = {short: Stored(name, tuple(archive.sizes[archive.model[name]][0])) for name, short in names.items()}
    else:
        views = views_to_write(archive, chosen[0], skeleton(chosen[1]))
    outputs = [_Output(name, view, _dtype(archive, view, dtype)) for name, view in views.items()]
    odd = {str(output.dtype) for output in outputs if output.dtype not in _NAMES}
    if odd:
        raise ValueError(f"safetensors has no dtype for {', '.join(sorted(odd))}; use format=ckpt")
    shards = list(_shards(outputs, shard_bytes))
    folder.mkdir()
    beside = write_beside(
        folder,
        None if chosen is None else chosen[1],
        dtype or main_dtype(views, archive),
        archive.path / TOKENIZER if tokenizer is None else Path(tokenizer),
        tokenizer is not None,
    )
    source = _LastRead(archive)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_one(source, folder / file_name, shard)
        weight_map.update({output.name: file_name for output in shard})
    index = {"metadata": {"total_size": sum(output.size for output in outputs)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return [*sorted(set(weight_map.values())), INDEX, *beside]


def _dtype(archive: Archive, view: View, wanted: torch.dtype | None) -> torch.dtype:
    held = archive.sizes[archive.model[view.names()[0]]][1]
    return wanted if wanted is not None and held.is_floating_point else held


def _shards(outputs: Sequence[_Output], shard_bytes: int) -> Iterator[list[_Output]]:
    shard: list[_Output] = []
    filled = 0
    for output in outputs:
        if shard and filled + output.size > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(output)
        filled += output.size
    yield shard


def _strip(names: Sequence[str], prefix: str | None) -> Mapping[str, str]:
    if prefix is None:
        first = {name.split(".")[0] for name in names}
        prefix = f"{first.pop()}." if len(first) == 1 and all("." in name for name in names) else ""
    elif prefix and not any(name.startswith(prefix) for name in names):
        raise ValueError(f"prefix={prefix!r}: no name starts with it; names are {', '.join(names[:3])}, ...")
    return {name: name.removeprefix(prefix) for name in names}


def _write_one(source: _LastRead, path: Path, shard: Sequence[_Output]) -> None:
    """Source: safetensors' format: 8 bytes little-endian length, a JSON header of that length, the tensors without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in shard:
        end = offset + output.size
        header[output.name] = {"dtype": _NAMES[output.dtype], "shape": list(output.view.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for output in shard:
            _write_tensor(file, source, output)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, source: _LastRead, output: _Output) -> None:
    if isinstance(output.view, Stored):
        tensor = source.whole(output.view.name)
    else:
        held = source.archive.sizes[source.archive.model[output.view.names()[0]]][1]
        tensor = torch.empty(output.view.shape, dtype=held)
        output.view.read(output.view.whole, tensor, source.read)
    flat = tensor.detach().contiguous().view(-1)
    for part in flat.split(BLOCK):
        file.write(part.to(output.dtype).view(torch.uint8).numpy())
