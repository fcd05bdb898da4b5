"""Reads bytes of shards wherever they are: local files by offset, remote shards fetched whole into a cache of limited size.

Nothing here decides whether a sample is good: what storage cannot deliver is tried again and then an OSError that names the shard.
"""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightning_megascale.data.cache import cache_root
from lightning_megascale.data.columns import read_bytes
from lightning_megascale.data.expand import expand, filesystem, local_path, missing, shown
from lightning_megascale.data.index import SIZE_LIMIT, ShardIndex, build_index, obtain_index, open_index
from lightning_megascale.data.patience import attempt, failures, watched
from lightning_megascale.data.shard_cache import Busy, Full, Handle, ShardCache
from lightning_megascale.data.shard_index import VERSION

__all__ = ["ShardStore", "expand"]

OPEN_FILES = 32
KEPT_FILES = 128  # open ones that are needed next, where the cache has a limit
_VERSIONS = (  # what fsspec's file systems say of an object's content or time, the surest first
    *("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "generation", "mtime"),
    *("LastModified", "last_modified", "Last-Modified", "updated", "created"),
)
_AT_ONCE = 1 << 30  # bytes one pread is asked for; Linux gives 2 GiB at most
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class ShardStore:
    """Shards by their address, for one process and its threads; a pickled or forked copy opens everything anew.

    Args:
        cache_dir: where remote shards go; None means $MEGASCALE_CACHE, or ~/.cache/lightning_megascale. Use a disk of the node.
        limit_bytes: how much the remote shards of this cache may take together; None for no limit. The least recently used ones go
            first, but never one that a process has open (32 for each process), nor one that is being fetched.
        retries: further attempts after a failed one, after 0.5, 1, 2, ... 10 s.
        timeout_seconds: for how long a remote transfer may stand still before it counts as failed.

    Attributes:
        wait_seconds: how long callers of ``local`` and ``read`` waited for remote shards so far.
    """

    def __init__(
        self,
        cache_dir: str | Path | None = None,
        limit_bytes: int | None = None,
        retries: int = 3,
        timeout_seconds: float = 60.0,
        backoff_seconds: float = 0.5,
    ) -> None:
        rules: list[tuple[str, float | None, bool, str]] = [
            ("limit_bytes", limit_bytes, limit_bytes is None or limit_bytes > 0, "positive, or None for no limit")
        ]
        rules += [("retries", retries, retries >= 0, "0 or more")]
        rules += [("timeout_seconds", timeout_seconds, timeout_seconds > 0, "positive")]
        for name, value, good, rule in rules:
            if not good:
                raise ValueError(f"{name}={value}: must be {rule}")
        self.cache_dir, self.limit_bytes, self.retries = cache_root(cache_dir), limit_bytes, retries
        self.timeout_seconds, self.backoff_seconds = timeout_seconds, backoff_seconds
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self.wait_seconds = 0.0
        self._lock = threading.Lock()
        self._files: collections.OrderedDict[str, Handle] = collections.OrderedDict()
        self._states: dict[str, tuple[int | None, str]] = {}
        self._wanted: dict[object, list[str]] = {}  # who reads ahead -> the remote shards it needs next
        self._ahead: collections.deque[str] = collections.deque()  # those of them that are not here
        self._kept: dict[str, Handle | None] = {}  # those that are here, open so that they stay; None: nothing to keep open
        self._thread: threading.Thread | None = None
        self._cache = ShardCache(self.cache_dir / "shards", self.limit_bytes)

    def _own(self) -> None:
        if self._process != os.getpid():  # a fork copies locks as they are, and no threads
            self._start()

    def __getstate__(self) -> dict[str, Any]:
        names = ("cache_dir", "limit_bytes", "retries", "timeout_seconds", "backoff_seconds")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def local(self, url: str) -> Path:
        """A file with the shard's bytes: itself, or its copy in the cache, which is fetched first if need be.

        The copy stays while it is among the 32 shards this process used last.

        Raises:
            FileNotFoundError: when there is no such shard.
            OSError: when it cannot be fetched.
            ValueError: when it is larger than ``limit_bytes``, or its scheme's package is not installed.
        """
        return self._handle(url).path

    def read(self, url: str, offset: int, size: int) -> bytes:
        """Bytes ``offset`` .. ``offset + size`` of the shard.

        Raises:
            OSError: when they cannot be read, also after retrying; as in ``local``.
        """
        data = _read(self._handle(url), offset, size)
        if data is not None:
            return data
        return self._try(url, "reading", lambda: self._read_anew(url, offset, size))

    def index(self, url: str, *, size_limit: int = SIZE_LIMIT, build: bool = True) -> ShardIndex:
        """The shard's index: a remote shard's is kept in the cache, or fetched from beside it (``x.tar.idx``), before it is built.

        Raises:
            ShardError: for a damaged shard, see ``build_index``.
            OSError: as in ``local``.
        """
        self._own()
        path = local_path(url)
        if path is not None:
            return open_index(self.local(url), self.cache_dir, size_limit=size_limit, build=build)
        state = self._state(url)
        place = self.cache_dir / "index" / f"{_digest(url)}.idx"

        def make() -> ShardIndex:
            found = self._remote_index(url, state[0])
            if found is None and not build:
                raise ValueError(f"{shown(url)}: no current index, in the cache or beside it; write it with 'megascale data index'")
            return found or build_index(self.local(url), name=shown(url), size_limit=size_limit)

        return obtain_index(shown(url), (place,), state, make, self.cache_dir, size_limit=size_limit)

    def indexes(self, urls: Sequence[str], threads: int = 16, **options: Any) -> list[ShardIndex]:
        """The indexes of many shards, several at a time, since each remote one costs a round trip at least."""
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda url: self.index(url, **options), urls))

    def prefetch(self, urls: Sequence[str], owner: object = None) -> None:
        """Fetches the remote ones of these shards in the background, in order, instead of those its owner asked for before.

        With ``limit_bytes``, they stay in the cache until they are asked for no more: the first ones, as many as half of the limit holds.
        One is only fetched if there is room, or can be made without removing one that a process has open, or keeps for later. A shard
        that fails, or that another process is fetching, is left to ``local``.
        """
        self._own()
        with self._lock:
            self._wanted[owner] = [url for url in urls if local_path(url) is None]
            if not self._wanted[owner]:
                del self._wanted[owner]
            needed = self._needed()
            for url in [url for url in self._kept if url not in needed]:
                del self._kept[url]
            self._ahead = collections.deque(url for url in needed if url not in self._kept)
            if self._ahead and self._thread is None:
                self._thread = threading.Thread(target=self._fetch_ahead, name="shard prefetch", daemon=True)
                self._thread.start()

    def discard(self, url: str) -> None:
        """Closes the shard, and removes the copy of a remote one: for a copy whose bytes are not those that were indexed."""
        self._own()
        with self._lock:
            handle = self._files.pop(url, None)
            self._kept.pop(url, None)
            self._states.pop(url, None)
        if handle is not None and handle.cached:
            handle.path.unlink(missing_ok=True)

    def _handle(self, url: str) -> Handle:
        self._own()
        with self._lock:
            handle = self._files.get(url)
            if handle is not None:
                self._files.move_to_end(url)
                return handle
        path = local_path(url)
        if path is not None:
            try:
                handle = self._try(url, "opening", lambda: Handle(Path(path)))
            except FileNotFoundError:
                raise FileNotFoundError(missing(path)) from None
        else:
            start = time.perf_counter()
            try:
                handle = self._try(url, "fetching", lambda: self._fetch(url))
            finally:
                self.wait_seconds += time.perf_counter() - start
        with self._lock:
            self._files[url] = handle
            while len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)[1].touch()  # closed when the last thread that reads it is done
        return handle

    def _read_anew(self, url: str, offset: int, size: int) -> bytes:
        with self._lock:
            self._files.pop(url, None)
        handle = self._handle(url)
        data = _read(handle, offset, size, strict=True)
        if data is None:
            length = os.fstat(handle.descriptor).st_size
            raise OSError(f"it ends at byte {length:,}, and bytes {offset:,} .. {offset + size:,} were asked for: changed since indexed?")
        return data

    def _state(self, url: str) -> tuple[int | None, str]:
        """Size and version of a remote shard, asked for once in a process."""
        state = self._states.get(url)
        if state is None:
            information = self._try(
                url, "asking for", lambda: watched(lambda: _information(url, self.timeout_seconds), self.timeout_seconds)
            )
            self._states[url] = state = _size_and_version(information)
        return state

    def _fetch(self, url: str, ahead: bool = False) -> Handle:
        size, version = self._state(url)
        name = _digest(f"{url} {size} {version}") + ".tar"

        def transfer(temporary: Path) -> None:
            system, path = filesystem(url, self.timeout_seconds)
            watched(lambda: system.get_file(path, str(temporary)), self.timeout_seconds, lambda: temporary.stat().st_size)

        return self._cache.open(name, size, transfer, shown(url), ahead)

    def _remote_index(self, url: str, size: int | None) -> ShardIndex | None:
        beside = url.split("?", 1)[0] + ".idx"
        if "?" in url:  # a signed address is for one file only
            return None
        try:
            content = watched(lambda: _content(beside, self.timeout_seconds), self.timeout_seconds)
        except FileNotFoundError:
            return None
        except failures() as error:
            _log.info("%s: %s; the index is built from the shard", shown(beside), error)
            return None
        header, columns = read_bytes(content) or ({}, {})
        if header.get("index_version") != VERSION or (size is not None and header["shard_bytes"] != size):
            _log.info("%s is not the index of this shard; the index is built from the shard", shown(beside))
            return None
        return ShardIndex(header, columns)

    def _try(self, url: str, what: str, action: Callable[[], _T]) -> _T:
        return attempt(f"{what} {shown(url)}", action, self.retries, self.backoff_seconds)

    def _needed(self) -> dict[str, None]:
        return dict.fromkeys(itertools.chain.from_iterable(self._wanted.values()))

    def _fetch_ahead(self) -> None:
        while True:
            with self._lock:
                ahead = self._ahead
                if not ahead:
                    self._thread = None
                    return
                url = ahead.popleft()
                if url in self._kept:
                    continue
                handle = self._files.get(url)
            try:
                self._check_share(url)
                handle = handle or self._fetch(url, ahead=True)
            except Full:
                with self._lock:
                    if self._ahead is ahead:  # nobody has asked for others since
                        self._ahead = collections.deque()
                continue
            except Busy:
                continue
            except Exception as error:  # noqa: BLE001 - whatever it is, who reads the shard meets it, and tries again
                _log.info("prefetch of %s: %s; it is fetched when it is needed", shown(url), error)
            with self._lock:
                if url in self._needed():
                    self._kept[url] = handle if self.limit_bytes is not None else None

    def _check_share(self, url: str) -> None:
        """Raises Full when half of the limit, or of the files that may be open, is taken by what is kept."""
        if self.limit_bytes is None:
            return
        with self._lock:
            kept = [os.fstat(handle.descriptor).st_size for handle in self._kept.values() if handle is not None]
        if 2 * (sum(kept) + (self._state(url)[0] or 0)) > self.limit_bytes or len(kept) >= KEPT_FILES:
            raise Full


def _read(handle: Handle, offset: int, size: int, strict: bool = False) -> bytes | None:
    """The bytes, or None when the file ends before, or cannot be read and ``strict`` is False."""
    try:
        data = os.pread(handle.descriptor, min(size, _AT_ONCE), offset)
        while len(data) < size:
            more = os.pread(handle.descriptor, min(size - len(data), _AT_ONCE), offset + len(data))
            if not more:
                return None
            data += more
    except OSError:
        if strict:
            raise
        return None
    return data


def _information(url: str, timeout_seconds: float) -> dict[str, Any]:
    system, path = filesystem(url, timeout_seconds)
    return dict(system.info(path))


def _content(url: str, timeout_seconds: float) -> bytes:
    system, path = filesystem(url, timeout_seconds)
    return bytes(system.cat_file(path))


def _size_and_version(information: dict[str, Any]) -> tuple[int | None, str]:
    for name in _VERSIONS:
        if information.get(name):
            return information.get("size"), f"{name}={information[name]}"
    return information.get("size"), ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
