"""A folder that is built once: by one process, atomically, and verified by a manifest; what is broken is built again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

MANIFEST = "manifest.json"
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # network file systems mounted without locks

NO_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """The cache folder: ``cache_dir``, else $MEGASCALE_CACHE, else ~/.cache/lightning_megascale; it is not made here."""
    return Path(cache_dir or os.environ.get("MEGASCALE_CACHE") or Path.home() / ".cache" / "lightning_megascale").expanduser()


def build_once(folder: Path, build: Callable[[Path], None], timeout_seconds: float = 120.0) -> Path:
    """Makes sure that ``folder`` holds what ``build`` writes, whoever builds it, and returns it.

    The first process builds in a temporary folder beside it, adds the manifest and renames; the others wait for its lock, which
    the operating system frees when the process ends, however it ends. On a file system without locks all build and the
    first to rename wins. A folder that does not match its manifest is replaced.

    Args:
        folder: the final place; its name must change with whatever changes the content.
        build: writes all files into the empty folder it gets; must be deterministic.
        timeout_seconds: how long to wait for another process that is building.

    Raises:
        TimeoutError: naming the process that holds the lock.
        ValueError: when the place cannot be written.
    """
    check_place(folder)
    if defect(folder) is None:
        return folder
    try:
        with lock(folder.with_name(folder.name + ".lock"), timeout_seconds) as locked:
            if defect(folder) is not None:  # still: nobody built it while this process waited
                if locked:
                    for leftover in folder.parent.glob(f"{folder.name}.*.tmp"):  # of builders that were killed
                        shutil.rmtree(leftover, ignore_errors=True)
                _build(folder, build)
    except OSError as error:
        if error.errno in NO_PLACE:
            raise _unwritable(folder, error) from error
        raise
    return folder


def check_place(folder: Path) -> None:
    """Makes the folder that ``folder`` lies in, unless ``folder`` is there.

    Raises:
        ValueError: when that folder cannot be made or written.
    """
    try:
        if folder.is_dir():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    if not os.access(folder.parent, os.W_OK | os.X_OK):
        raise _unwritable(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder.parent)))


def _unwritable(folder: Path, error: OSError) -> ValueError:
    place = str(folder.parent)
    return ValueError(f"cache_dir={place!r} cannot be written ({error}): set MEGASCALE_CACHE or cache_dir to a folder that can")


def defect(folder: Path) -> str | None:
    """What is wrong with a built folder, in words, or None when every file has the size and SHA-256 of the manifest."""
    if not folder.is_dir():
        return f"{folder} does not exist"
    try:
        expected = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder / MANIFEST} cannot be read: {error!r}"
    for name, recorded in expected.items():
        try:
            found = _fingerprint(folder / name)
        except OSError as error:
            return f"{folder / name} cannot be read: {error!r}"
        if found != recorded:
            return f"{folder / name} has changed: {found['bytes']} bytes, {recorded['bytes']} expected, or other content"
    return None


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    tag = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    temporary, broken = (folder.with_name(f"{folder.name}.{tag}-{kind}.tmp") for kind in ("new", "old"))
    temporary.mkdir()
    try:
        build(temporary)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        manifest = {"files": {str(path.relative_to(temporary)): _fingerprint(path) for path in files}}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        if folder.exists() and defect(folder) is not None:
            folder.rename(broken)
        try:
            temporary.rename(folder)
        except OSError as error:  # without locks another process may have been first; what it built is the same
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or defect(folder) is not None:
                raise
    finally:
        for leftover in (temporary, broken):
            shutil.rmtree(leftover, ignore_errors=True)


def _fingerprint(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


@contextlib.contextmanager
def lock(path: Path, timeout_seconds: float) -> Iterator[bool]:
    """Holds an exclusive lock on ``path``; yields False where the file system has no locks."""
    with path.open("a+") as file:
        end = time.monotonic() + timeout_seconds
        locked = False
        while not locked:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except OSError as error:
                if error.errno in NO_LOCKS:
                    break
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if time.monotonic() > end:
                    file.seek(0)
                    raise TimeoutError(
                        f"waited {timeout_seconds:g} s for {path}; it is held by {file.read().strip() or 'an unknown process'},"
                        " which is building this cache: see whether that process still works, end it, and start again"
                    ) from None
                time.sleep(0.1)
        if locked:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        try:
            yield locked
        finally:
            if locked:  # closing the file would not free it while a process that was forked meanwhile has it open
                fcntl.flock(file, fcntl.LOCK_UN)
