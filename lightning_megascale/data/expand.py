"""Turns what a user writes for the shards of a source, patterns and remote addresses included, into a sorted list of them."""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
from collections.abc import Iterable
from typing import Any

import braceexpand

URL_LIMIT = 1_000_000
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http", "abfs": "abfs", "abfss": "abfs", "az": "abfs"}
_RANGE = re.compile(r"\{(-?\d{1,18})\.\.(-?\d{1,18})")
_OWN_FILES = re.compile(r"\.idx(\..*)?$")  # what this package writes beside shards


def expand(urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """The shards that ``urls`` name, sorted, each once.

    Args:
        urls: one or more paths or addresses (s3://, gs://, http://, https://, file://, whatever fsspec knows); ``{000..009}`` and
            ``{a,b}`` stand for each of the names, and ``*``, ``?`` and ``[...]`` for the files that match.

    Raises:
        ValueError: when a pattern matches nothing, a local file is missing, braces are unbalanced, or the package that reads a
            scheme is not installed.
    """
    patterns = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    if not patterns:
        raise ValueError("urls=[]: name at least one shard, as folder/*.tar")
    found: set[str] = set()
    for pattern in patterns:
        for name in _braces(os.fspath(pattern)):
            found.update(_matches(name))
    return sorted(found)


def local_path(url: str) -> str | None:
    """The path of a local shard, or None for a remote one."""
    if url.startswith("file://"):
        return url[7:]
    return None if "://" in url else os.path.expanduser(url)


def shown(url: str) -> str:
    """The address without user, password and query, which may hold a secret: for messages."""
    if "://" not in url:
        return url
    scheme, rest = url.split("://", 1)
    return f"{scheme}://{re.sub('^[^/@]*@', '', rest.split('?', 1)[0])}"


def filesystem(url: str, timeout_seconds: float = 60.0) -> tuple[Any, str]:
    """fsspec's file system of a remote address, and the path in it. Do not keep it: it does not survive a fork.

    Raises:
        ValueError: for an unknown scheme, or one whose package is not installed.
    """
    import fsspec

    scheme = url.split("://", 1)[0]
    options: dict[str, Any] = {}
    try:
        if scheme in ("http", "https"):
            import aiohttp  # its own limit is 300 s for a whole file, which a large shard needs more than

            limit = aiohttp.ClientTimeout(total=None, sock_connect=timeout_seconds, sock_read=timeout_seconds)
            options = {"client_kwargs": {"timeout": limit}}
        system, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra = _EXTRAS.get(scheme, scheme)
        raise ValueError(f"urls={shown(url)!r}: {scheme}:// needs a package ({error}): pip install 'fsspec[{extra}]'") from error
    except ValueError as error:
        raise ValueError(f"urls={shown(url)!r}: {error}; use a path, s3://, gs://, http(s):// or another scheme of fsspec") from error
    return system, path


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message about a missing name: which existing ones are like it, or how many there are."""
    base = name.rstrip("/").rsplit("/", 1)[-1]
    bases = sorted({other.rstrip("/").rsplit("/", 1)[-1] for other in names})
    close = difflib.get_close_matches(base, bases, 3, 0.4)
    if close:
        return f"; the nearest existing names are {', '.join(map(repr, close))}"
    return f"; its folder holds {len(bases)} other names" if bases else "; its folder is empty"


def missing(url: str) -> str:
    """Says that a local file does not exist, with the nearest name that does."""
    path = os.path.abspath(url)
    folder = os.path.dirname(path)
    if os.path.isdir(folder):
        return f"{url!r} does not exist" + nearest(path, os.listdir(folder))
    while not os.path.isdir(os.path.dirname(folder)):
        folder = os.path.dirname(folder)
    return f"{url!r} does not exist: there is no folder {folder!r}" + nearest(folder, os.listdir(os.path.dirname(folder)))


def _braces(pattern: str) -> Iterable[str]:
    count = math.prod(abs(int(last) - int(first)) + 1 for first, last in _RANGE.findall(pattern))  # at most, for several in a choice
    if count > URL_LIMIT:
        raise ValueError(f"urls={shown(pattern)!r}: stands for more than {URL_LIMIT:,} names; split the source")
    try:
        names = list(itertools.islice(braceexpand.braceexpand(pattern), URL_LIMIT + 1)) if "{" in pattern or "}" in pattern else [pattern]
    except ValueError as error:
        raise ValueError(f"urls={shown(pattern)!r}: {error}; write ranges as {{000..009}} and choices as {{a,b}}") from error
    if len(names) > URL_LIMIT:
        raise ValueError(f"urls={shown(pattern)!r}: stands for more than {URL_LIMIT:,} names; split the source")
    return names


def _matches(name: str) -> list[str]:
    path = local_path(name)
    if path is None:
        return _remote_matches(name) if _is_pattern(name.split("://", 1)[1]) else [name]
    if os.path.isfile(path):  # also one whose name has a bracket
        return [path]
    if os.path.isdir(path):
        raise ValueError(f"urls={name!r} is a folder; write {os.path.join(name, '*.tar')!r}")
    if not _is_pattern(path):
        raise ValueError(f"urls={missing(path)}")
    import glob

    found = [match for match in glob.glob(path, recursive=True) if os.path.isfile(match) and not _OWN_FILES.search(match)]
    if not found:
        folder = os.path.dirname(path)
        fixed = os.path.isdir(folder or ".")
        hint = nearest(path, os.listdir(folder or ".")) if fixed else f"; there is no folder {folder!r}" if not _is_pattern(folder) else ""
        raise ValueError(f"urls={name!r} matches no file{hint}")
    return found


def _is_pattern(path: str) -> bool:
    scheme_free = path.split("?", 1)[0] if "=" in path else path  # the query of a signed address is no pattern
    return any(character in scheme_free for character in "*?[")


def _remote_matches(name: str) -> list[str]:
    system, path = filesystem(name)
    found = [match for match in system.glob(path) if not _OWN_FILES.search(match)]
    if not found:
        folder = path.rsplit("/", 1)[0]
        hint = ""
        if not _is_pattern(folder):
            try:
                hint = nearest(path, [str(other) for other in system.ls(folder, detail=False)])
            except FileNotFoundError:
                hint = f"; there is no folder {shown(system.unstrip_protocol(folder))!r}"
        raise ValueError(f"urls={shown(name)!r} matches nothing{hint}")
    return [system.unstrip_protocol(match) for match in found]
