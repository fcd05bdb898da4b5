"""Safetensors files read by pieces: headers first, then only the rows that are asked for, through one small buffer.

Plain reads and no memory map: mapped pages would count as this process's memory, and come one fault at a time from a network file system.

Source: safetensors' format: 8 bytes little-endian length, a JSON header of that length, the tensors without gaps.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
BLOCK = 16 * 2**20  # bytes of the buffer
Bounds = Sequence[tuple[int, int]]  # (start, stop) of each dim


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: ``offset`` bytes into ``file``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int


class SafetensorsFolder:
    """A folder of safetensors, or one file of them.

    Args:
        path: Hugging Face's folder (``model.safetensors``, or ``model.safetensors.index.json`` and its files), or one such file.

    Raises:
        ValueError: not such a folder, saying what is in it; a file that is missing, cut, or no safetensors; an adapter's folder; weights
            that are quantized.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.tensors: dict[str, StoredTensor] = {}
        self._buffer: Tensor | None = None
        self._opened: tuple[Path, BinaryIO] | None = None
        if self.path.is_dir():
            _refuse_quantized(self.path)
        files, listed = _files_of(self.path)
        digest = hashlib.sha256()
        for file in files:
            header = _read_header(file)
            digest.update(header[0])
            self.tensors.update(_entries(file, *header))
        self.digest = digest.hexdigest()
        """Of all headers: equal where names, shapes and places are."""
        lost = [name for name in listed if name not in self.tensors]
        if lost:
            raise ValueError(f"{self.path / INDEX} lists {', '.join(lost[:3])}, which no file holds: the folder is damaged, copy it anew")

    def read(self, name: str, bounds: Bounds, out: Tensor) -> None:
        """Copies a rectangle of a stored tensor into ``out``, converting its dtype.

        Args:
            name: of the tensor.
            bounds: (start, stop) in each dim.
            out: of the rectangle's shape, any dtype, device and strides.

        Raises:
            ValueError: when the file ends too early.
        """
        stored = self.tensors[name]
        if self._opened is None or self._opened[0] != stored.file:
            self.close()
            self._opened = stored.file, open(stored.file, "rb", buffering=0)  # noqa: SIM115 closed by close()
        shape, box = (stored.shape, tuple(bounds)) if stored.shape else ((1,), ((0, 1),))
        self._read(stored, stored.offset, shape, box, out if stored.shape else out.view(1))

    def close(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None
        self._buffer = None

    def _read(self, stored: StoredTensor, offset: int, shape: tuple[int, ...], bounds: Bounds, out: Tensor) -> None:
        if out.numel() == 0:
            return
        (start, stop), inner = bounds[0], bounds[1:]
        row = prod(shape[1:]) * stored.dtype.itemsize
        if len(shape) > 1 and row > BLOCK:
            for index in range(start, stop):
                self._read(stored, offset + index * row, shape[1:], inner, out[index - start])
            return
        whole_rows = all(bound == (0, length) for bound, length in zip(inner, shape[1:]))
        if whole_rows and out.dtype == stored.dtype and out.device.type == "cpu" and out.is_contiguous():
            self._fill(stored, offset + start * row, out.view(-1).view(torch.uint8))
            return
        step = max(1, BLOCK // row)
        for first in range(start, stop, step):
            count = min(step, stop - first)
            block = self._block(stored, offset + first * row, count * row).view(stored.dtype).view(count, *shape[1:])
            for dim, (low, high) in enumerate(inner, 1):
                block = block.narrow(dim, low, high - low)
            out.narrow(0, first - start, count).copy_(block)

    def _block(self, stored: StoredTensor, offset: int, size: int) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(BLOCK, dtype=torch.uint8)
        self._fill(stored, offset, self._buffer[:size])
        return self._buffer[:size]

    def _fill(self, stored: StoredTensor, offset: int, target: Tensor) -> None:
        """Fills bytes; ``readinto`` may bring fewer than asked for."""
        assert self._opened is not None
        file = self._opened[1]
        file.seek(offset)
        view = memoryview(target.detach().numpy())  # type: ignore[arg-type]
        while view:
            got = file.readinto(view)  # type: ignore[attr-defined]
            if not got:
                raise ValueError(f"{stored.file} ends inside of {stored.name}: it was cut while it was read; copy it anew")
            view = view[got:]


def is_safetensors(path: Path) -> bool:
    """Whether a folder or file is to be read as safetensors."""
    return path.suffix == ".safetensors" if path.is_file() else (path / SINGLE).is_file() or (path / INDEX).is_file()


def _files_of(path: Path) -> tuple[list[Path], list[str]]:
    """The files, and the names that an index says they hold."""
    if path.is_file():
        return [path], []
    if (path / SINGLE).is_file():
        return [path / SINGLE], []
    if (path / INDEX).is_file():
        try:
            weight_map = json.loads((path / INDEX).read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path / INDEX} is no index of safetensors ({type(error).__name__}: {error}): copy it anew") from error
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ValueError(f"{path}: {INDEX} names {len(names)} files, and {_some(missing)} missing: the copy or download is unfinished")
        return [path / name for name in names], list(weight_map)
    raise ValueError(f"{path} holds no weights that can be read: {_what_is_there(path)}")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def _what_is_there(path: Path) -> str:
    names = sorted(child.name for child in path.iterdir())
    if any(name.startswith("adapter_") for name in names):
        return "it is the folder of an adapter (adapter_config.json), which has no weights of the base model: give the base model's folder"
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        return (
            f"only pickled ones ({', '.join(pickled[:3])}): convert them with transformers' save_pretrained, which writes safetensors, once"
        )
    other = [name for name in names if name.endswith(".safetensors")]
    if other:
        return f"neither {SINGLE} nor {INDEX}, but {', '.join(other[:3])}: give the path of one file, or rename it to {SINGLE}"
    inside = [child.name for child in sorted(path.iterdir()) if child.is_dir() and is_safetensors(child)]
    hint = f"; its folder {inside[0]} has some" if inside else ""
    return f"neither {SINGLE} nor {INDEX}, nor a checkpoint; it has {', '.join(names[:6]) or 'nothing'}{hint}"


def _refuse_quantized(path: Path) -> None:
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return
    method = (config.get("quantization_config") or {}).get("quant_method") if isinstance(config, dict) else None
    if method:
        raise ValueError(f"{path} holds weights quantized with {method} (config.json): train from the unquantized ones, or dequantize them")


def _read_header(file: Path) -> tuple[bytes, int]:
    """The header's text, and where the tensors begin; the file is as long as the header says."""
    size = file.stat().st_size
    with open(file, "rb") as handle:
        start = handle.read(8)
        if start == b"version ":
            raise ValueError(f"{file} is the pointer that git leaves without git-lfs, no weights: run git lfs pull in that folder")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, 10**9):
            raise ValueError(f"{file} is no safetensors file, or is cut ({size:,} bytes): copy or download it anew")
        return handle.read(length), 8 + length


def _entries(file: Path, text: bytes, begin: int) -> dict[str, StoredTensor]:
    found = {}
    end = 0
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{file}: {name} has dtype {entry['dtype']}, which training does not know; dtypes are {', '.join(DTYPES)}")
            dtype = DTYPES[entry["dtype"]]
            if last - first != prod(shape) * dtype.itemsize:
                raise ValueError(f"{file}: {name} has {last - first:,} bytes, its shape and dtype need {prod(shape) * dtype.itemsize:,}")
            found[name] = StoredTensor(name, shape, dtype, file, begin + first)
            end = max(end, last)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no safetensors file (its header cannot be read): copy or download it anew") from error
    if begin + end != file.stat().st_size:
        raise ValueError(
            f"{file} has {file.stat().st_size:,} bytes and its header says {begin + end:,}: the copy or download is not finished"
        )
    return found
