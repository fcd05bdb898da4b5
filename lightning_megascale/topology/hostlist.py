"""Slurm's hostlists: ``node[001-003,7]`` to names and back.

An own file of a hundred lines: python-hostlist is GPL, and ClusterShell's NodeSet (LGPL) is a package of 220 kB for a cluster's shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

MOST_NAMES = 1_000_000  # a typing error such as [1-10000000000] must not fill the memory
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_NUMBERED = re.compile(r"(.*?)(\d{1,18})", re.DOTALL | re.ASCII)


def expand(hostlist: str) -> list[str]:
    """The names that ``hostlist`` stands for, in its order, repetitions kept; several brackets run like an odometer.

    Raises:
        ValueError: a bracket is open, empty or nested, a range runs backwards or is no number, a name is empty, or there are too many.
    """
    names: list[str] = []
    for item in _split(hostlist):
        parts: list[list[str]] = [[""]]
        count = 1
        for prefix, bracket in _pieces(item, hostlist):
            values = _numbers(bracket, hostlist) if bracket is not None else [""]
            parts.append([prefix + value for value in values])
            count *= len(values)
            _check_count(hostlist, len(names) + count)
        products = [""]
        for part in parts:
            products = [left + right for left in products for right in part]
        names.extend(products)
    return names


def compress(names: Iterable[str]) -> str:
    """A hostlist that expands to ``names`` in their order: runs over the last number become ranges.

    Raises:
        ValueError: a name is empty or holds a comma, bracket or white space.
    """
    items: list[str] = []
    runs: list[tuple[int, int, int]] = []  # (first, last, width) of the prefix at hand
    prefix = ""
    for name in names:
        if not name or re.search(r"[\[\],\s]", name):
            raise ValueError(f"name={name!r}: a host's name must not be empty nor hold a comma, bracket or white space; rename the host")
        match = _NUMBERED.fullmatch(name)
        if match is None:
            items.extend(_written(prefix, runs))
            runs = []
            items.append(name)
            continue
        number, width = int(match[2]), len(match[2])
        if runs and match[1] != prefix:
            items.extend(_written(prefix, runs))
            runs = []
        prefix = match[1]
        if runs and number == runs[-1][1] + 1 and _same_width(runs[-1], number, width):
            runs[-1] = (runs[-1][0], number, runs[-1][2])
        else:
            runs.append((number, number, width))
    items.extend(_written(prefix, runs))
    return ",".join(items)


def _same_width(run: tuple[int, int, int], number: int, width: int) -> bool:
    """Whether ``number`` of ``width`` digits is what padding to the run's width writes."""
    return width == max(run[2], len(str(number)))


def _written(prefix: str, runs: list[tuple[int, int, int]]) -> Iterator[str]:
    if not runs:
        return
    texts = [f"{first:0{width}}" + (f"-{last:0{width}}" if last > first else "") for first, last, width in runs]
    yield prefix + (texts[0] if len(texts) == 1 and "-" not in texts[0] else f"[{','.join(texts)}]")


def _split(hostlist: str) -> Iterator[str]:
    """The parts between the commas outside brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(hostlist):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"hostlist={hostlist!r}: brackets must be closed in turn, at character {place + 1}; write name[1-3,5]")
        if letter == "," and depth == 0:
            yield hostlist[start:place]
            start = place + 1
    if depth:
        raise ValueError(f"hostlist={hostlist!r}: a bracket is never closed; write name[1-3,5]")
    yield hostlist[start:]


def _pieces(item: str, hostlist: str) -> Iterator[tuple[str, str | None]]:
    """(text, bracket behind it or None) of one part."""
    if not item or re.search(r"\s", item):
        raise ValueError(f"hostlist={hostlist!r}: {item!r} is no host's name; separate names by one comma and no space")
    *texts, tail = re.split(r"\[([^\]]*)\]", item)
    yield from zip(texts[::2], texts[1::2])
    if tail:
        yield tail, None


def _numbers(bracket: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for piece in bracket.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise ValueError(f"hostlist={hostlist!r}: [{bracket}] must hold numbers and ranges such as 001-016, not {piece!r}")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"hostlist={hostlist!r}: the range {piece} runs backwards; write {last}-{first}")
        _check_count(hostlist, len(numbers) + int(last) - int(first) + 1)
        numbers.extend(f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
    return numbers


def _check_count(hostlist: str, count: int) -> None:
    if count > MOST_NAMES:
        raise ValueError(f"hostlist={hostlist!r}: stands for {count} names or more; at most {MOST_NAMES}, look for a wrong digit")
