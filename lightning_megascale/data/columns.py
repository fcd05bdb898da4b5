"""A file of named number columns with a JSON header, written atomically and opened by mapping it into memory.

Layout: 8 bytes magic with the version, 8 bytes length of the JSON header, 8 bytes CRC-32 of it (little-endian), the JSON header padded to
64 bytes, then the columns, each at a multiple of 64 bytes. The header's ``columns`` lists dtype, offset and count of each.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"LMSCOL01"  # change the number with any change of the layout: older files are then built again
_ALIGNMENT = 64
_HEADER_LIMIT = 1 << 24
_STALE_SECONDS = 600.0  # a temporary file is written within a second or so; one this old belongs to a killed process


def write_columns(path: Path, header: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> None:
    """Writes the file under a temporary name beside ``path`` and renames it: a reader sees the old file or the whole new one."""
    layout, offset = {}, 0
    for name, column in columns.items():
        layout[name] = [column.dtype.str, offset, len(column)]
        offset += column.nbytes + -column.nbytes % _ALIGNMENT
    text = json.dumps({**header, "columns": layout, "column_bytes": offset}).encode()
    text += b" " * (-(24 + len(text)) % _ALIGNMENT)
    _remove_stale(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(MAGIC + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little") + text)
            for column in columns.values():
                file.write(np.ascontiguousarray(column).data)
                file.write(bytes(-column.nbytes % _ALIGNMENT))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_header(path: Path) -> dict[str, Any] | None:
    """The header, or None when there is no readable file of this version, or one that is incomplete."""
    try:
        with path.open("rb") as file:
            start = file.read(24)
            text = file.read(min(int.from_bytes(start[8:16], "little"), _HEADER_LIMIT))
            size = file.seek(0, 2)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    return _header(start, text, size)


def map_columns(path: Path, header: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The columns as read-only arrays on a memory map of the file; the map ends with the last array."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return _arrays(content, header)


def read_bytes(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """Header and columns of a file's content, or None when it is none of this version or incomplete."""
    header = _header(content[:24], content[24 : 24 + min(int.from_bytes(content[8:16], "little"), _HEADER_LIMIT)], len(content))
    return None if header is None else (header, _arrays(content, header))


def _header(start: bytes, text: bytes, size: int) -> dict[str, Any] | None:
    if start[:8] != MAGIC or not text or zlib.crc32(text) != int.from_bytes(start[16:24], "little"):
        return None
    header = json.loads(text)
    header["base"] = 24 + len(text)
    return header if size == header["base"] + header["column_bytes"] else None


def _arrays(content: bytes | mmap.mmap, header: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(content, np.dtype(dtype), count, header["base"] + offset)
        for name, (dtype, offset, count) in header["columns"].items()
    }


def narrow(column: np.ndarray) -> np.ndarray:
    """The column in the smallest of uint16, uint32 and int64 that holds it; uint16 zeros stay uint16."""
    top, low = (int(column.max()), int(column.min())) if len(column) else (0, 0)
    if low < 0:
        return column.astype(np.int64)
    return column.astype(np.uint16 if top < 1 << 16 else np.uint32 if top < 1 << 32 else np.int64)


def _remove_stale(path: Path) -> None:
    for leftover in path.parent.glob(f"{path.name}.*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                leftover.unlink()
