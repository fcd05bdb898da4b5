"""Tries again what may succeed the next time, and gives up on what stands still: for file systems and networks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_FOR_GOOD = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_PACKAGES = {  # whose errors are no OSError; only looked up when something imported them
    "aiohttp": ("ClientError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "azure.core.exceptions": ("AzureError",),
    "requests.exceptions": ("RequestException",),
}
_LONGEST_PAUSE = 10.0  # seconds
_log = logging.getLogger(__name__)


class StorageError(OSError):
    """What was tried for the last time."""


def failures() -> tuple[type[BaseException], ...]:
    """The exceptions with which file systems and networks fail."""
    found: list[type[BaseException]] = [OSError, EOFError, asyncio.TimeoutError]
    for package, names in _PACKAGES.items():
        module = sys.modules.get(package)
        found += [getattr(module, name) for name in names if hasattr(module, name)]
    return tuple(found)


def attempt(what: str, action: Callable[[], _T], retries: int, pause_seconds: float) -> _T:
    """Returns what ``action`` returns, after up to ``retries`` further tries, with pauses that double.

    Args:
        what: for messages, as "reading x.tar".

    Raises:
        StorageError: after the last try; at once (or FileNotFoundError, PermissionError, ...) when another cannot help.
    """
    for tried in range(1, retries + 2):
        try:
            return action()
        except failures() as error:
            if isinstance(error, StorageError):
                raise
            if isinstance(error, FileNotFoundError) and _is_final(error):
                raise FileNotFoundError(f"{what}: there is no such file ({_text(error)})") from error
            if _is_final(error):
                raise StorageError(f"{what}: {_text(error)}") from error
            if tried > retries:
                raise StorageError(f"{what}: attempt {tried} of {retries + 1} failed: {_text(error)}") from error
            _log.info("%s: attempt %d of %d failed: %s", what, tried, retries + 1, _text(error))
            time.sleep(min(pause_seconds * 2 ** (tried - 1), _LONGEST_PAUSE))
    raise AssertionError(retries)


def watched(action: Callable[[], _T], timeout_seconds: float, progress: Callable[[], int] = lambda: 0) -> _T:
    """Runs ``action`` in a thread and returns its result; leaves the thread when ``progress`` stood still for too long.

    Raises:
        TimeoutError: when it stood still; else whatever ``action`` raises.
    """
    result: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(action())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread, which raises it
            result.set_exception(error)

    threading.Thread(target=run, name="storage transfer", daemon=True).start()
    last, since = progress(), time.monotonic()
    while not concurrent.futures.wait([result], min(timeout_seconds / 4, 1.0)).done:
        now = progress()
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since >= timeout_seconds:
            raise TimeoutError(f"no byte arrived for {timeout_seconds:g} s")
    return result.result()


def _is_final(error: BaseException) -> bool:
    """Whether trying again cannot help: it is not there, not allowed, refused by the server (4xx), or the disk is full."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, failures()):
        return _is_final(error.__cause__)  # fsspec's HTTP file system calls every failure FileNotFoundError
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429):
        return True
    return isinstance(error, _FOR_GOOD) or getattr(error, "errno", None) in _FULL


def _text(error: BaseException) -> str:
    """The error in words, without the query of an address, which may hold a secret."""
    return re.sub(r"(://[^\s'\"?]*)\?[^\s'\"]*", r"\1", str(error)) or type(error).__name__
