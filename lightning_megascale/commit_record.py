"""What ``megascale.json`` says, the file that a checkpoint folder of ours gets last: whole or not, its step, its age. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

NAME, LAYOUT = "megascale.json", ".metadata"


def read(folder: Path) -> dict[str, Any] | None:
    """The commit record of a checkpoint folder; None when there is none, or none that can be read."""
    try:
        record = json.loads((folder / NAME).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("files"), dict) else None


def age(record: dict[str, Any]) -> tuple[int, str]:
    """What orders checkpoints: the step, then the time of writing."""
    step = record.get("step")
    return (step if isinstance(step, int) else -1, str(record.get("time") or ""))


def complete(folder: str | os.PathLike) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoint folders of ours in a folder, oldest first; no links, no leftovers of torn saves."""
    found = []
    for path in Path(folder).glob("*.ckpt"):
        if not path.is_symlink() and (path / LAYOUT).is_file() and (record := read(path)) is not None:
            found.append((age(record), path.name, path))
    return [(order[0], path) for order, _, path in sorted(found)]


def wrong_sizes(folder: Path) -> list[str]:
    """The files that are missing or not as long as when they were written."""
    problems = []
    for name, size in (read(folder) or {"files": {}})["files"].items():
        file = folder / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != size:
            problems.append(f"{name} has {file.stat().st_size:,} bytes, {size:,} were written")
    return problems
