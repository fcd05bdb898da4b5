"""Builds the index of a shard by one pass over its tar.

A sample's files are neighbours in the tar and share the name up to the first dot of the last path component (the key); the rest, in
lower case, is the field ("jpg", "seg.png"). These are WebDataset's rules, so what it reads, this reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import BinaryIO

import numpy as np

from lightning_megascale.data.columns import narrow
from lightning_megascale.data.picture_size import picture_size
from lightning_megascale.data.shard_index import ShardIndex, content_hash
from lightning_megascale.data.tar_walk import SIZE_LIMIT, Member, ShardError, TarWalk

FIELD_LIMIT = 256

_SPECIAL = re.compile(r"__[^/]*__($|/)")  # WebDataset's own metadata
_PICTURES = ("jpg", "jpeg", "png")


def build_index(
    source: str | os.PathLike[str] | BinaryIO,
    *,
    name: str | None = None,
    size_limit: int = SIZE_LIMIT,
    crc: bool = True,
    progress: Callable[[int], None] | None = None,
) -> ShardIndex:
    """Reads a shard once and returns its index, in memory.

    Args:
        source: a tar, or a binary file at its beginning.
        name: what messages call the shard; the path by default.
        size_limit: bytes; a larger member is refused.
        crc: read the data too, for CRC-32 and image sizes; without, only headers are read.
        progress: called with the bytes done so far.

    Raises:
        ShardError: for a tar that is damaged, cut, empty, compressed, or whose samples cannot be told apart.
    """
    if isinstance(source, (str, os.PathLike)):
        with open(source, "rb", buffering=1 << 20) as file:
            before = os.fstat(file.fileno())
            index = build_index(file, name=name or os.fspath(source), size_limit=size_limit, crc=crc, progress=progress)
            after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise ShardError(f"{name or source}: the shard changed while it was indexed; index it when it is complete")
        return index
    walk = TarWalk(source, name or str(getattr(source, "name", "shard")), size_limit, crc, progress)
    keys, cells = _group(walk)
    if not keys:
        raise walk.error(
            "no samples: a sample's files are named KEY.FIELD, as 000001.jpg and 000001.txt; write the shard so", walk.position
        )
    columns = _columns(keys, cells, crc)
    fields = tuple(sorted(cells))
    header = {
        "samples": len(keys),
        "fields": fields,
        "shard_bytes": walk.position,
        "content_hash": content_hash(columns, fields, walk.position),
        "crc": crc,
        "largest": walk.largest,
        "notes": walk.notes,
        "noted": walk.noted,
    }
    return ShardIndex(header, columns)


_Cell = tuple[int, int, int, int, int, int]  # row, offset, size, CRC-32, height, width


def _group(walk: TarWalk) -> tuple[list[bytes], dict[str, list[_Cell]]]:
    """Keys in order and, by field, the cells of the samples that have it."""
    keys: list[bytes] = []
    seen: set[str] = set()
    cells: dict[str, list[_Cell]] = {}
    current, row = None, -1
    for member in walk.members():
        parts = key_and_field(member, walk)
        if parts is None:
            continue
        key, field = parts
        if key != current:
            if key in seen:
                raise walk.error(
                    f"duplicate key {key!r}: its files are not neighbours, or two samples have one key; write the shard again",
                    member.header,
                )
            seen.add(key)
            keys.append(key.encode())
            current, row = key, row + 1
        column = cells.get(field)
        if column is None:
            column = cells[field] = []
            if len(cells) > FIELD_LIMIT:
                raise walk.error(
                    f"more than {FIELD_LIMIT} fields, the last from {member.name!r}: a key ends at the first dot, so keys must not"
                    " contain dots; replace them, for example by dashes",
                    member.header,
                )
        if column and column[-1][0] == row:
            raise walk.error(f"duplicate: sample {key!r} has the field {field!r} twice; write the shard again", member.header)
        height, width = picture_size(member.head) if member.head and field.rpartition(".")[2] in _PICTURES else (0, 0)
        column.append((row, member.offset, member.size, member.crc32, height, width))
        walk.samples = row + 1
    return keys, cells


def key_and_field(member: Member, walk: TarWalk) -> tuple[str, str] | None:
    name = member.name
    if name.startswith("__") and _SPECIAL.match(name):
        return None
    start = name.rfind("/") + 1
    dot = name.find(".", start)
    if dot <= start or dot + 1 == len(name):
        walk.note(member.header, f"{name!r} belongs to no sample, because its name is not KEY.FIELD: skipped")
        return None
    return name[:dot], name[dot + 1 :].lower()


def _columns(keys: list[bytes], cells: Mapping[str, list[_Cell]], crc: bool) -> dict[str, np.ndarray]:
    columns = {}
    for field in sorted(cells):
        table = np.array(cells[field], dtype=np.int64)
        offsets, *others = np.full(len(keys), -1, np.int64), *np.zeros((4, len(keys)), np.int64)
        for column, values in zip([offsets, *others], table.T[1:], strict=True):
            column[table[:, 0]] = values
        columns[field + ".offset"], columns[field + ".size"] = offsets, narrow(others[0])
        if crc:
            columns[field + ".crc32"] = others[1].astype(np.uint32)
            if field.rpartition(".")[2] in _PICTURES:
                columns[field + ".height"], columns[field + ".width"] = narrow(others[2]), narrow(others[3])
    ends = np.cumsum([len(key) for key in keys], dtype=np.int64)
    return {**columns, "key.end": narrow(ends), "key": np.frombuffer(b"".join(keys), np.uint8)}
