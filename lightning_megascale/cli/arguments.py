"""Arguments of the verbs that Hydra does not read: positional values and key=value, numbers, words, and how a size is shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from lightning_megascale.cli.errors import UserError, nearest

_T = TypeVar("_T")


def parse(program: str, verb: str, rest: Sequence[str], positional: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
    """Positional and key=value arguments by name.

    Args:
        program, verb: for messages, as "data" and "lint".
        rest: what was typed after the verb.
        positional: names in capitals are needed; one that ends with "..." takes all that is left, as a list.
        keys: of key=value.

    Raises:
        UserError: for a key that is none of these (with the nearest), one given twice, one value too many, or one that is lacking.
    """
    names = [name.lower().rstrip(".") for name in positional]
    lists = {name for name, written in zip(names, positional) if written.endswith("...")}
    values: dict[str, Any] = {}
    for argument in rest:
        key, equals, value = argument.partition("=")
        if equals and (key in names or key in keys):
            name = key
        elif equals and key.isidentifier() and not os.path.exists(argument):
            known = [*names, *keys]
            raise UserError(f"{program} {verb} has no key {key!r}{nearest(key, known)}; keys: {', '.join(known)}")
        else:
            name, value = next((place for place in names if place not in values or place in lists), ""), argument
            if not name:
                raise UserError(f"{program} {verb} takes {' '.join(positional)} and key=value; {argument!r} is one more")
        if name in lists:
            values.setdefault(name, []).append(value)
        elif name in values:
            raise UserError(f"{program} {verb}: {name} is given twice")
        else:
            values[name] = value
    lacking = [written for name, written in zip(names, positional) if written.isupper() and name not in values]
    if lacking:
        raise UserError(f"{program} {verb} needs {' '.join(lacking)}: megascale {program} {verb} {' '.join(positional)}")
    return values


def number(key: str, text: str, kind: Callable[[str], _T], least: float | None = None) -> _T:
    """The number that a value spells.

    Raises:
        UserError: when it is none, or below ``least``.
    """
    what = "a whole number" if kind is int else "a number"
    bound = "" if least is None else f", at least {least:g}"
    try:
        value = kind(text)
    except ValueError:
        raise UserError(f"{key}={text}: must be {what}{bound}") from None
    if least is not None and not value >= least:  # type: ignore[operator]
        raise UserError(f"{key}={text}: must be {what}{bound}")
    return value


def check_output(key: str, path: str) -> None:
    """A file can be written there.

    Raises:
        UserError: for an empty name, a folder, or a place that does not exist or takes no file.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not path or os.path.isdir(path):
        raise UserError(f"{key}={path}: must be a file")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK) or (os.path.exists(path) and not os.access(path, os.W_OK)):
        raise UserError(f"{key}={path}: cannot be written; give a file in a folder that exists and is yours")


def choice(key: str, text: str, options: Iterable[str]) -> str:
    """The value, when it is one of the options.

    Raises:
        UserError: naming the nearest.
    """
    options = list(options)
    if text not in options:
        raise UserError(f"{key}={text}: must be one of {', '.join(options)}{nearest(text, options)}")
    return text


def flag(key: str, text: str) -> bool:
    """true or false."""
    return choice(key, text.lower(), ("true", "false")) == "true"


def size(count: float, unit: str = "B") -> str:
    """A number with three digits and a prefix: 12.3 MB."""
    for prefix in ("", "k", "M", "G", "T"):
        if count < 1000 or prefix == "T":
            return f"{count:.3g} {prefix}{unit}".rstrip() if prefix else f"{count:.0f} {unit}".rstrip()
        count /= 1000
    raise AssertionError


def many(count: int, word: str) -> str:
    """ "1 shard", "2,000 shards"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
