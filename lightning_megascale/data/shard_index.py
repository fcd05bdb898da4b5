"""Where every sample of one shard lies: number columns, in memory or mapped from the index file."""

from __future__ import annotations

import collections
import hashlib
import weakref
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lightning_megascale.data.columns import map_columns, read_header
from lightning_megascale.data.tar_walk import ShardError

VERSION = 1  # of the columns' meaning; change it and older index files are built again
_OPEN_LIMIT = 256  # mapped indexes; each holds a file descriptor, of which a process often may have 1,024
_open: collections.deque[weakref.ref[ShardIndex]] = collections.deque()


class ShardIndex:
    """Where every sample of one shard lies. Opening reads a header; the columns are mapped when they are first used.

    Attributes:
        samples: number of samples.
        fields: the fields that occur, sorted.
        shard_bytes: size of the tar.
        content_hash: SHA-256 (hex) of keys, offsets, sizes and checksums, so of what the shard holds when ``has_crc``.
        has_crc: whether the members' CRC-32 were computed.
        notes: the first 100 remarks on what was skipped or looks odd; ``noted`` counts all.
        largest: bytes of the largest member.
        path: the index file, or None while it is only in memory.
    """

    def __init__(self, header: Mapping[str, Any], columns: dict[str, np.ndarray] | None, path: Path | None = None) -> None:
        self.samples, self.fields = int(header["samples"]), tuple(header["fields"])
        self.shard_bytes, self.content_hash = int(header["shard_bytes"]), str(header["content_hash"])
        self.has_crc, self.largest = bool(header["crc"]), int(header["largest"])
        self.notes, self.noted = tuple(header["notes"]), int(header["noted"])
        self.path, self._columns = path, columns

    def __len__(self) -> int:
        return self.samples

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ if self.path is None else {**self.__dict__, "_columns": None}

    def key(self, row: int) -> str:
        """The key of a sample."""
        columns = self._check(row)
        ends = columns["key.end"]
        return bytes(columns["key"][int(ends[row - 1]) if row else 0 : int(ends[row])]).decode()

    def field(self, row: int, extensions: str) -> str | None:
        """The first of the extensions (separated by ``;``) that the sample has, or None."""
        columns = self._check(row)
        for extension in _split(extensions):
            offsets = columns.get(extension + ".offset")
            if offsets is not None and offsets[row] >= 0:
                return extension
        return None

    def span(self, row: int, extensions: str) -> tuple[int, int] | None:
        """Byte offset and size, in the tar, of the first of the extensions that the sample has, or None."""
        columns = self._check(row)
        for extension in _split(extensions):
            offsets = columns.get(extension + ".offset")
            if offsets is not None and (offset := int(offsets[row])) >= 0:
                return offset, int(columns[extension + ".size"][row])
        return None

    def crc32(self, row: int, extensions: str) -> int | None:
        """The CRC-32 of that member, or None when the sample lacks it or the index was built without."""
        field = self.field(row, extensions)
        return int(self._map()[field + ".crc32"][row]) if field is not None and self.has_crc else None

    def image_size(self, row: int, extensions: str = "jpg;jpeg;png") -> tuple[int, int] | None:
        """Height and width in pixels as the header of a JPEG or PNG states them, before any EXIF rotation, or None."""
        field = self.field(row, extensions)
        columns = self._map()
        if field is None or field + ".height" not in columns or not columns[field + ".height"][row]:
            return None
        return int(columns[field + ".height"][row]), int(columns[field + ".width"][row])

    def offsets(self, field: str) -> np.ndarray:
        """Byte offsets (samples,) int64 of one field's members, -1 where missing."""
        return self._map()[field + ".offset"]

    def sizes(self, field: str) -> np.ndarray:
        """Sizes (samples,) int64 in bytes of one field's members, -1 where missing."""
        columns = self._map()
        return np.where(columns[field + ".offset"] < 0, -1, columns[field + ".size"].astype(np.int64))

    def is_intact(self) -> bool:
        """Whether the columns still have the content hash."""
        return content_hash(self._map(), self.fields, self.shard_bytes) == self.content_hash

    def _check(self, row: int) -> dict[str, np.ndarray]:
        if not 0 <= row < self.samples:
            raise IndexError(f"row {row} of a shard with {self.samples} samples")
        return self._map()

    def _map(self) -> dict[str, np.ndarray]:
        columns = self._columns
        if columns is None:
            assert self.path is not None
            header = read_header(self.path)
            if header is None or header.get("content_hash") != self.content_hash:
                raise ShardError(f"{self.path}: this index was removed or replaced by that of another shard while in use; start again")
            columns = self._columns = map_columns(self.path, header)
            _open.append(weakref.ref(self))
            while len(_open) > _OPEN_LIMIT:
                oldest = _open.popleft()()
                if oldest is not None and oldest is not self:
                    oldest._columns = None  # a reader that holds the arrays keeps the map
        return columns


def content_hash(columns: Mapping[str, np.ndarray], fields: tuple[str, ...], shard_bytes: int) -> str:
    """Independent of how wide a column is stored, and of when and where the shard was indexed."""
    digest = hashlib.sha256(f"{VERSION} {shard_bytes}".encode())
    for name in ["key", "key.end", *(f"{field}.{part}" for field in fields for part in ("offset", "size", "crc32"))]:
        if name in columns:
            digest.update(f" {name} ".encode())
            digest.update(np.ascontiguousarray(columns[name] if name == "key" else columns[name].astype("<i8")).data)
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _split(extensions: str) -> tuple[str, ...]:
    return tuple(extension.strip().lower() for extension in extensions.split(";"))
