"""Lines of a text file with their numbers, and the error that names file, line and what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 256 * 2**20  # a dump of 100,000 ports has 60 MB


def read_text(path: str | Path) -> str:
    """The file's text, without the byte order mark that some editors put first.

    Raises:
        ValueError: there is no such file, it is no text, or too large for a description of a fabric.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"path={str(path)!r}: there is no such file; give one that exists")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(
            f"path={str(path)!r}: {path.stat().st_size} bytes; a fabric's file has at most {MOST_BYTES}, look for another file"
        )
    try:
        return path.read_text(encoding="utf-8").removeprefix("\ufeff")  # not utf-8-sig, which counts a bad byte's place from the mark
    except UnicodeDecodeError as error:
        raise ValueError(f"path={str(path)!r}: byte {error.start} is no UTF-8; give a text file") from error


def malformed(path: str | Path, number: int, line: str, expected: str) -> ValueError:
    """An error for line ``number`` (from 1) of ``path``."""
    shown = line.strip()
    shown = shown if len(shown) <= 200 else shown[:200] + " ..."
    return ValueError(f"{path}:{number}: {shown!r}\n  expected: {expected}")


def joined_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, text) of each line that says something: comments from # taken away, lines ending in a backslash joined."""
    start, held = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.split("#", 1)[0].rstrip()
        start = start or number
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        if (held + line).strip():
            yield start, (held + line).strip()
        start, held = 0, ""
    if held.strip():
        yield start, held.strip()
