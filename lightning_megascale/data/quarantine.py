"""Bad samples: what makes one, and the file that lists them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

_REASON_CHARACTERS = 500


class BadSample(ValueError):
    """A sample that no rank can use, for a reason that its bytes alone decide: so all ranks agree without a word between them.

    Raise it from an ``encode`` function to have the sample listed and replaced. A file that cannot be read is no bad sample.
    """


class Listed(NamedTuple):
    """One line of a quarantine file; (source, shard, row) names the sample."""

    source: str
    shard: str
    key: str
    row: int
    reason: str


class Quarantine:
    """Lists bad samples in a file of JSON lines that all processes append to, and stops the run past a limit.

    A line is one append of few bytes, whole on local file systems; one that another machine tore (network file systems) is skipped
    when reading. The file keeps its lines over restarts, and each sample counts once, whoever met it and however often.

    Args:
        path: the file; its folder is made with the first bad sample.
        limit: distinct bad samples that a run may meet; None is no limit.

    Raises:
        ValueError: for a negative limit.
    """

    def __init__(self, path: str | Path, limit: int | None = 1000) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"limit={limit} bad samples: 0 stops at the first, None never stops; give one of them or a positive number")
        self.path, self.limit = Path(path), limit
        self._met: set[tuple[str, str, int]] = set()  # by this process
        self._known: dict[tuple[str, str, int], Listed] = {}
        self._read_bytes = 0

    def __len__(self) -> int:
        """Distinct samples listed so far, by all processes."""
        self._refresh()
        return len(self._known)

    @property
    def counts(self) -> dict[str, int]:
        """Distinct samples listed so far, by source."""
        counts: dict[str, int] = {}
        for listed in self.samples():
            counts[listed.source] = counts.get(listed.source, 0) + 1
        return counts

    def samples(self) -> list[Listed]:
        """What is listed, each sample once, in the order of the file."""
        self._refresh()
        return list(self._known.values())

    def add(self, source: str, shard: str, key: str, row: int, reason: str) -> None:
        """Lists a sample, unless this process has done so.

        Args:
            source: name of the source.
            shard: base name of the shard.
            key: the sample's key.
            row: its number in the shard.
            reason: why it cannot be used, in words; cut after 500 characters.

        Raises:
            ValueError: when more samples than the limit are listed, or the file cannot be written.
        """
        identity = (source, shard, row)
        if identity in self._met:
            return
        self._append(Listed(source, shard, key, row, reason[:_REASON_CHARACTERS]))
        self._met.add(identity)
        if self.limit is not None and len(self) > self.limit:
            shares = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
            raise ValueError(
                f"{len(self)} bad samples are more than the limit of {self.limit} ({shares}); they stand in {self.path}, the last:"
                f" {shard}, key {key!r}: {reason[:_REASON_CHARACTERS]}. Repair the data, or raise the limit"
            )

    def _append(self, listed: Listed) -> None:
        line = json.dumps(listed._asdict()).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, line)
            finally:
                os.close(file)
        except OSError as error:
            raise ValueError(f"the quarantine file {self.path} cannot be written ({error}): choose a folder that can") from error

    def _refresh(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._read_bytes)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            listed = _parse(line)
            if listed is not None:
                self._known.setdefault((listed.source, listed.shard, listed.row), listed)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "limit": self.limit, "_met": set(), "_known": {}, "_read_bytes": 0}


def _parse(line: bytes) -> Listed | None:
    try:
        return Listed(**json.loads(line))
    except (ValueError, TypeError):
        return None
