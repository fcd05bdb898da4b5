"""The byte-offset index of a WebDataset shard: built once, kept in a sidecar file or the cache, opened by mapping it.

The index knows how many samples a shard has, so none can be lost without an error. What it says is checked against the shard's size and
time of change; its checksums tell a damaged copy from a bad sample.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_megascale.data.cache import NO_LOCKS, NO_PLACE, cache_root, lock
from lightning_megascale.data.columns import map_columns, read_header, write_columns
from lightning_megascale.data.index_build import build_index
from lightning_megascale.data.shard_index import VERSION, ShardIndex
from lightning_megascale.data.tar_walk import SIZE_LIMIT, ShardError

__all__ = ["SIZE_LIMIT", "ShardError", "ShardIndex", "build_index", "column", "index_path", "obtain_index", "open_index"]

WAIT_SECONDS = 1800.0  # for another process that builds the same index


def index_path(path: str | os.PathLike[str], cache_dir: str | Path | None = None) -> Path:
    """Where the index of a local shard is written first: beside it, or in the cache when that folder cannot be written."""
    beside, cached = _places(Path(path), cache_dir)
    return beside if os.access(beside.parent, os.W_OK | os.X_OK) else cached


def open_index(
    path: str | os.PathLike[str],
    cache_dir: str | Path | None = None,
    *,
    build: bool = True,
    size_limit: int = SIZE_LIMIT,
    crc: bool = True,
    progress: Callable[[int], None] | None = None,
) -> ShardIndex:
    """The index of a local shard, from its file when that has the shard's size and time of change, else built and written.

    Args:
        path: a tar on a file system.
        cache_dir: where indexes of read-only folders go; None means $MEGASCALE_CACHE, or ~/.cache/lightning_megascale.
        build: whether a missing or outdated index is built; by one process of a node, while the others wait.
        size_limit, crc, progress: as in ``build_index``.

    Raises:
        ShardError: as ``build_index``; also when an existing index has a member above ``size_limit``.
        ValueError: when the index is missing and ``build`` is False, or can be written nowhere.
        FileNotFoundError: when there is no such shard.
        TimeoutError: when another process builds for more than half an hour.
    """
    path = Path(path)
    status = path.stat()
    return obtain_index(
        str(path),
        _places(path, cache_dir),
        (status.st_size, str(status.st_mtime_ns)),
        (lambda: build_index(path, size_limit=size_limit, crc=crc, progress=progress)) if build else None,
        cache_dir,
        size_limit=size_limit,
        crc=crc,
    )


def obtain_index(
    name: str,
    places: tuple[Path, ...],
    state: tuple[int | None, str],
    build: Callable[[], ShardIndex] | None,
    cache_dir: str | Path | None = None,
    *,
    size_limit: int = SIZE_LIMIT,
    crc: bool = True,
) -> ShardIndex:
    """The first current index among ``places``, or the one that ``build`` returns, written to the first place that can be written.

    Args:
        name: the shard, for messages.
        places: index files, best first.
        state: size (None if unknown) and a text that changes with the shard: what makes an index current.
        build: makes the index; None refuses to.
        cache_dir: where the lock file goes.
        size_limit, crc: as in ``open_index``.
    """
    index = _current(places, state, crc)
    if index is None and build is None:
        raise ValueError(f"{name}: no current index; write it with 'megascale data index {name}'")
    if index is None and build is not None:
        with _one_process(places[-1], cache_dir):
            index = _current(places, state, crc)
            if index is None:
                index = build()
                _compare(name, index, places)
                index = _save(index, places, state)
    assert index is not None
    if index.largest > size_limit:
        raise ShardError(f"{name}: a member has {index.largest:,} bytes and exceeds size_limit={size_limit:,}; raise the limit")
    return index


def _places(path: Path, cache_dir: str | Path | None) -> tuple[Path, Path]:
    tag = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
    return path.with_name(path.name + ".idx"), cache_root(cache_dir) / "index" / f"{path.name}-{tag}.idx"


def _current(places: tuple[Path, ...], state: tuple[int | None, str], crc: bool) -> ShardIndex | None:
    size, stamp = state
    for place in places:
        header = read_header(place)
        if header is not None and header.get("index_version") == VERSION and header["stamp"] == stamp:
            if size in (None, header["shard_bytes"]) and (header["crc"] or not crc):
                return ShardIndex(header, None, place)
    return None


def _compare(name: str, index: ShardIndex, places: tuple[Path, ...]) -> None:
    """Warns when an outdated index knew more samples: whoever changed the shard should know."""
    known = max((header["samples"] for header in map(read_header, places) if header is not None and "samples" in header), default=0)
    if known > index.samples:
        warnings.warn(f"{name}: had {known:,} samples when it was indexed before, and has {index.samples:,} now", stacklevel=3)


def _save(index: ShardIndex, places: tuple[Path, ...], state: tuple[int | None, str]) -> ShardIndex:
    header = {
        "index_version": VERSION,
        "stamp": state[1],
        "samples": index.samples,
        "fields": index.fields,
        "shard_bytes": index.shard_bytes,
        "content_hash": index.content_hash,
        "crc": index.has_crc,
        "largest": index.largest,
        "notes": index.notes,
        "noted": index.noted,
    }
    place = _write_first(places, header, index._map())
    return ShardIndex(header, None, place)


def _write_first(places: tuple[Path, ...], header: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> Path:
    """Writes to the first place that can be written; only the last one's folder is made."""
    for place in places:
        try:
            if place is places[-1]:
                place.parent.mkdir(parents=True, exist_ok=True)
            write_columns(place, header, columns)
            return place
        except OSError as error:
            if error.errno not in NO_PLACE | {errno.EEXIST}:
                raise
            last = error
    raise ValueError(
        f"cache_dir: neither {' nor '.join(map(str, places))} can be written ({last}):"
        " set MEGASCALE_CACHE or cache_dir to a folder that can"
    )


@contextlib.contextmanager
def _one_process(place: Path, cache_dir: str | Path | None) -> Iterator[None]:
    """Lets one process of a node in at a time; where no lock file can be made all may build, and each writes the same."""
    folder = cache_root(cache_dir) / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        if error.errno not in NO_PLACE | NO_LOCKS:
            raise
        writable = False
    name = hashlib.sha256(os.fsencode(place)).hexdigest()[:3]  # at most 4,096 lock files
    with lock(folder / f"index-{name}.lock", WAIT_SECONDS) if writable else contextlib.nullcontext():
        yield


def column(
    source: str | os.PathLike[str] | ShardIndex,
    name: str,
    identity: str,
    compute: Callable[[int], int],
    *,
    cache_dir: str | Path | None = None,
) -> np.ndarray:
    """One number per sample, such as its token count: computed once, then read from a file beside the index.

    Args:
        source: a local shard, or its index.
        name: lower-case letters, digits and underscores.
        identity: a text that changes with whatever the numbers depend on besides the shard (tokenizer, template, image-token rule).
        compute: row -> number.
        cache_dir: as in ``open_index``.

    Returns:
        (samples,) int32, in memory.

    Raises:
        ValueError: for another kind of name, or a number that is no int32.
    """
    if not re.fullmatch("[a-z0-9_]+", name):
        raise ValueError(f"column name={name!r}: use lower-case letters, digits and underscores")
    index = source if isinstance(source, ShardIndex) else open_index(source, cache_dir)
    tag = f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    cached = cache_root(cache_dir) / "index" / f"{index.content_hash[:32]}.idx.{tag}"
    places = (cached,) if index.path is None else (index.path.with_name(f"{index.path.name}.{tag}"), cached)
    values = _read_column(places, index, identity)
    if values is not None:
        return values
    with _one_process(places[-1], cache_dir):
        values = _read_column(places, index, identity)
        if values is None:
            numbers = [compute(row) for row in range(index.samples)]
            wrong = [number for number in numbers if not -(1 << 31) <= number < 1 << 31]
            if wrong:
                raise ValueError(f"column {name!r}: {wrong[0]} does not fit into int32; count in a larger unit")
            values = np.array(numbers, dtype=np.int32)
            _write_first(places, {"content_hash": index.content_hash, "identity": identity}, {"values": values})
    return values


def _read_column(places: tuple[Path, ...], index: ShardIndex, identity: str) -> np.ndarray | None:
    for place in places:
        header = read_header(place)
        if header is not None and header.get("content_hash") == index.content_hash and header.get("identity") == identity:
            return map_columns(place, header)["values"].copy()
    return None
