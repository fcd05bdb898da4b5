"""The strategy's ``placement`` as a file: the rank at each place of the flattened mesh, one a line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def write_placement(ranks: Sequence[int], path: str | os.PathLike[str], comments: Sequence[str] = ()) -> None:
    """Writes the file, below the comments."""
    lines = [*(f"# {line}" for line in comments), *map(str, ranks)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_placement(path: str | os.PathLike[str]) -> list[int]:
    """The ranks of a file.

    Raises:
        ValueError: there is no such file, or a line is no number, with the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"placement={os.fspath(path)!r}: cannot be read: {error}; give the file of megascale plan ranks=FILE") from None
    ranks = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text and not text.isdecimal():
            raise ValueError(f"placement={os.fspath(path)!r}: line {number} is {text!r} and must be the number of a rank")
        ranks += [int(text)] if text else []
    return ranks
