"""The cells of one line of a CSV of measured runs: read with a rule, and an error that says where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

Value = TypeVar("Value", int, str)


class Unpredictable(Exception):
    """Why a run cannot be predicted."""


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
        text = self.text(column)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise self.wrong(column, text, f"a number of at least {least:g}")
        return value

    def whole(self, column: str, least: int = 1) -> int | None:
        """A whole number of at least ``least``, or None.

        Raises:
            ValueError: another text.
        """
        value = self.number(column, least)
        if value is not None and value != int(value):
            raise self.wrong(column, self.values[column], f"a whole number of at least {least}")
        return None if value is None else int(value)

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
