"""A CSV of measured runs: its header and lines, and the cells of a line, read with a rule and an error that says where it stands."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value", int, str)


class Unpredictable(Exception):
    """Why a run cannot be predicted."""


def read_table(path: str | Path, columns: Sequence[str]) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """The header of a CSV file, and its lines that are not blank.

    Args:
        path: of the file.
        columns: that are read; the first must be in the header.

    Returns:
        (names without spaces around them, for each line its number and column -> text; cells at a line's end may be missing).

    Raises:
        ValueError: no such file, no CSV, a header without the first column or with one twice, or a line longer than the header.
    """
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"rows={path}: is a folder; give a CSV file")
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            lines = [(reader.line_num, cells) for cells in reader if cells]
    except FileNotFoundError:
        raise ValueError(f"rows={path}: there is no such file; give a CSV file with the columns {', '.join(columns)}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"rows={path}: is no CSV in UTF-8: {error}; save it so") from None
    except OSError as error:
        raise ValueError(f"rows={path}: cannot be read: {error.strerror}; give a CSV file") from None
    header = [name.strip() for name in lines[0][1]] if lines else []
    _check_header(file, header, columns[0])
    for line, cells in lines[1:]:
        if len(cells) > len(header):
            found = f"has {len(cells)} cells, and the header names {len(header)} columns"
            raise ValueError(f"{file}, line {line}: {found}; put quotes around a cell that has a comma in it, or take the cells away")
    return header, [(line, dict(zip(header, cells, strict=False))) for line, cells in lines[1:]]


def _check_header(file: Path, header: Sequence[str], needed: str) -> None:
    if needed not in header:
        near = _nearest(needed, header)
        hint = f"; is {near!r} that column?" if near else ""
        raise ValueError(f"{file}: the header has no column {needed}{hint}; add it, with an id of its own for each row")
    twice = next((name for name in header if name and header.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{file}: the header names the column {twice} {header.count(twice)} times; leave one")


def misspelt(header: Iterable[str], columns: Iterable[str]) -> dict[str, str]:
    """The names of a header that are no column but close to one that the header lacks -> the nearest such column."""
    names, known = list(header), set(columns)
    lacking = sorted(known - set(names))
    near = {name: _nearest(name, lacking) for name in names if name and name not in known}
    return {name: column for name, column in near.items() if column is not None}


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest in any case of letters; None where nothing is (difflib's 0.75, chosen: global_batch_size is close to global_batch)."""
    lower = {other.lower(): other for other in names}
    near = difflib.get_close_matches(name.lower(), lower, 1, cutoff=0.75)
    return lower[near[0]] if near else None


class Cells:
    """A line, and what was assumed where it says nothing.

    Args:
        file, line: where it stands.
        values: column -> text, None for a cell that is not there.

    Attributes:
        assumed: sentences.
    """

    def __init__(self, file: str, line: int, values: Mapping[str, Any]) -> None:
        self.file, self.line, self.values = file, line, values
        self.assumed: list[str] = []

    def text(self, column: str) -> str | None:
        """The cell without spaces around it; None where it is empty or missing."""
        value = self.values.get(column)
        return value.strip() or None if isinstance(value, str) else None

    def number(self, column: str, least: float = 0.0) -> float | None:
        """A finite number of at least ``least``, or None.

        Raises:
            ValueError: another text.
        """
        return self._number(column, least, f"a number of at least {least:g}")

    def positive(self, column: str) -> float | None:
        """A finite number above 0, or None.

        Raises:
            ValueError: another text.
        """
        value = self._number(column, 0.0, "a number above 0")
        if value == 0:
            raise self.wrong(column, self.text(column), "a number above 0")
        return value

    def whole(self, column: str, least: int = 1) -> int | None:
        """A whole number of at least ``least``, also written as 5.0 or 1e3, or None.

        Raises:
            ValueError: another text.
        """
        rule = f"a whole number of at least {least}"
        value = self._number(column, least, rule)
        if value is not None and not value.is_integer():
            raise self.wrong(column, self.text(column), rule)
        return None if value is None else int(value)

    def _number(self, column: str, least: float, rule: str) -> float | None:
        text = self.text(column)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise self.wrong(column, text, rule)
        return value

    def flag(self, column: str) -> bool | None:
        """True for 1, true and yes; False for 0, false and no; None where it is empty.

        Raises:
            ValueError: another text.
        """
        text = self.text(column)
        known = {"1": True, "true": True, "yes": True, "1.0": True, "0": False, "false": False, "no": False, "0.0": False}
        if text is not None and text.lower() not in known:
            raise self.wrong(column, text, "0 or 1")
        return None if text is None else known[text.lower()]

    def default(self, column: str, value: Value) -> Value:
        """``value``, and a note that it was assumed."""
        self.assumed.append(f"{column}={value}")
        return value

    def wrong(self, column: str, value: object, rule: str) -> ValueError:
        """The error for a cell."""
        return ValueError(f"{self.file}, line {self.line}, column {column}: {value!r} must be {rule}; correct or empty the cell")
