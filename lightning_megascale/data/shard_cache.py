"""The copies of remote shards on a node's disk: each fetched by one process, whole or not at all, the oldest removed at a limit.

Whoever reads or writes a copy holds a shared lock on it, which the operating system frees with the process; a copy is removed only by
who gets it exclusively. So nobody's shard disappears, and what a killed process left behind does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_megascale.data.cache import NO_LOCKS, NO_PLACE, lock
from lightning_megascale.data.patience import StorageError

WAIT_SECONDS = 3600.0  # for another process that fetches the same shard
_AT_ONCE = 64  # copies removed for one that is fetched ahead
_GRACE_SECONDS = 600.0  # a file that is being fetched may be unlocked for a moment, and always where there are no locks


class Busy(Exception):
    """Another process is fetching the shard."""


class Full(Exception):
    """There is no room for a shard that nobody needs yet."""


class Handle:
    """An open file; closed when the last user drops it, so that no thread reads from a closed one."""

    def __init__(self, path: Path, cached: bool = False) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.path, self.cached, self._process = path, cached, os.getpid()
        if cached:
            with contextlib.suppress(OSError):  # without the lock the copy may be removed, and this file stays readable
                fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self.touch()

    def touch(self) -> None:
        """Writes down that a cached file is in use now; its time of change stays."""
        if self.cached:
            with contextlib.suppress(OSError):
                os.utime(self.path, ns=(time.time_ns(), os.fstat(self.descriptor).st_mtime_ns))

    def __del__(self) -> None:
        if self.descriptor >= 0:
            if self.cached and self._process == os.getpid():  # a process that was forked meanwhile has a copy, and the lock with it
                with contextlib.suppress(OSError):
                    fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)


class ShardCache:
    """Files by name in one folder.

    Args:
        folder: made when it is first needed.
        limit_bytes: what all files may take together, or None.
    """

    def __init__(self, folder: Path, limit_bytes: int | None) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes

    def open(self, name: str, size: int | None, transfer: Callable[[Path], None], label: str, ahead: bool = False) -> Handle:
        """Opens the file, which ``transfer`` writes to the path it gets if no process has done so.

        Args:
            name: must change with the content.
            size: bytes of the complete file, or None when unknown.
            label: the shard, for messages.
            ahead: nobody waits for it yet.

        Raises:
            ValueError: when the file is larger than the limit, or the folder cannot be written.
            Busy, Full: ahead, instead of waiting for another process, and of exceeding the limit.
        """
        if self.limit_bytes is not None and (size or 0) > self.limit_bytes:
            raise ValueError(
                f"limit_bytes={self.limit_bytes:,}: {label} alone has {size:,} bytes; raise the limit, or write smaller shards"
            )
        place = self.folder / name
        handle = self._complete(place, size)
        if handle is not None:
            return handle
        with self._locked(f"shard-{name[:3]}.lock", label, None if ahead else WAIT_SECONDS):  # at most 4,096 lock files
            handle = self._complete(place, size)
            return handle or self._fetch(place, size, transfer, label, ahead)

    def _complete(self, place: Path, size: int | None) -> Handle | None:
        try:
            handle = Handle(place, cached=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        found = os.fstat(handle.descriptor).st_size
        return handle if found == size or (size is None and found) else None

    def _fetch(self, place: Path, size: int | None, transfer: Callable[[Path], None], label: str, ahead: bool) -> Handle:
        for rest in place.parent.glob(f"{place.name}.*.tmp"):  # of a process that ended while it held the lock that this one holds
            _remove(rest)
        self._make_room(size or 0, label, ahead)
        temporary = place.with_name(f"{place.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
        try:
            temporary.touch(exist_ok=False)
            handle = Handle(temporary, cached=True)
            transfer(temporary)
            found = os.fstat(handle.descriptor).st_size
            if found != size and (size is not None or not found):
                raise OSError(f"{found:,} of {size or 1:,} bytes arrived")
            os.fsync(handle.descriptor)
            os.replace(temporary, place)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise StorageError(f"{self.folder} is full ({label} did not fit): set limit_bytes below the size of the disk") from error
            raise
        finally:
            temporary.unlink(missing_ok=True)
        handle.path = place
        return handle

    def _make_room(self, size: int, label: str, ahead: bool) -> None:
        if self.limit_bytes is None:
            return
        with self._locked("eviction.lock", label), contextlib.ExitStack() as claims:
            files = sorted(self._files())
            used, claimed = sum(length for _, length, _ in files), list[Path]()
            for _, length, path in files:
                if used + size <= self.limit_bytes or len(claimed) == _AT_ONCE:
                    break
                if not ahead:
                    used -= length if _remove(path) else 0
                elif (claim := _claim(path)) is not None:  # all or nothing: what does not make enough room stays
                    claims.callback(os.close, claim)
                    claimed.append(path)
                    used -= length
            if ahead and used + size > self.limit_bytes:
                raise Full
            for path in claimed:
                _unlink(path)
        if used + size > self.limit_bytes:
            warnings.warn(
                f"{self.folder} grows to {used + size:,} bytes, above limit_bytes={self.limit_bytes:,}: the rest is open in running"
                " processes, up to 32 shards each; raise the limit, write smaller shards or use fewer workers",
                stacklevel=2,
            )

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Time of last use in ns, bytes, and path of every copy, finished or not."""
        for path in [*self.folder.glob("*.tar"), *self.folder.glob("*.tar.*.tmp")]:
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                yield status.st_atime_ns, status.st_size, path

    @contextlib.contextmanager
    def _locked(self, name: str, label: str, seconds: float | None = WAIT_SECONDS) -> Iterator[None]:
        """Holds a lock; seconds: how long to wait for it, None not at all (then Busy)."""
        folder = self.folder.with_name("locks")
        with contextlib.ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock(folder / name, seconds or 0.0))
            except TimeoutError as error:
                if seconds is None:
                    raise Busy from None
                raise StorageError(f"{label}: {error}") from error
            except OSError as error:
                if error.errno in NO_PLACE:
                    raise ValueError(
                        f"cache_dir={str(self.folder.parent)!r} cannot be written ({error}): set MEGASCALE_CACHE or cache_dir"
                        " to a folder that can"
                    ) from error
                raise
            yield


def _remove(path: Path) -> bool:
    """Removes a copy, and what was written beside it, unless a process has it open or is writing it."""
    claim = _claim(path)
    if claim is None:
        return not path.exists()
    try:
        _unlink(path)
    finally:
        os.close(claim)
    return True


def _claim(path: Path) -> int | None:
    """A descriptor with the only lock of a copy; None when somebody has it open, or is writing it, or when it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        grace = 5.0
    except OSError as error:
        if error.errno not in NO_LOCKS:
            os.close(descriptor)
            return None
        grace = _GRACE_SECONDS
    if path.name.endswith(".tmp") and time.time() - os.fstat(descriptor).st_mtime < grace:
        os.close(descriptor)
        return None
    return descriptor


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
    if not path.name.endswith(".tmp"):
        for beside in path.parent.glob(path.name + ".idx*"):
            beside.unlink(missing_ok=True)
