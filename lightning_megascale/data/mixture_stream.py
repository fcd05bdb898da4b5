"""Position -> sample: a schedule, the orders of its sources and their shards joined into datasets that any rank or worker can ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from lightning_megascale.data.packing import Packer, best_fit_decreasing
from lightning_megascale.data.quarantine import BadSample, Quarantine
from lightning_megascale.data.samples import ShardedSource
from lightning_megascale.data.schedule import Schedule
from lightning_megascale.data.shuffle import Row, SourceOrder

IGNORED = -100  # the label that no loss counts
TRIES = 1000  # bad ones in a row; the quarantine's limit stops most runs before
_WHOLE = 1 << 40  # tokens: no document is cut


class Source(Protocol):
    """Rows of a source by shard: ``samples.ShardedSource``, or its documents in pieces."""

    name: str
    shards: list[str]
    sizes: np.ndarray

    def lengths(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray: ...

    def load(self, shard: int, row: int) -> dict[str, Any]: ...

    def key(self, shard: int, row: int) -> str: ...


class Pieces:
    """A source of documents cut into pieces of at most ``sequence_length`` tokens, each of them a row; no token is lost.

    Args:
        source: documents without pictures, encoded by the default encoder.
        sequence_length: tokens of a piece.
    """

    def __init__(self, source: ShardedSource, sequence_length: int) -> None:
        assert source.context is not None
        source.context = dataclasses.replace(source.context, sequence_length=_WHOLE)
        self.source, self.sequence_length, self.name, self.shards = source, sequence_length, source.name, source.shards
        self._firsts: dict[int, np.ndarray] = {}
        self.sizes = np.array([self._before(shard)[-1] for shard in range(len(source.shards))], dtype=np.int64)

    def lengths(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        documents, pieces = self._places(shards, rows)
        return np.clip(self.source.lengths(shards, documents) - pieces * self.sequence_length, 0, self.sequence_length)

    def load(self, shard: int, row: int) -> dict[str, Any]:
        (document,), (piece,) = self._places(np.array([shard]), np.array([row]))
        sample = self.source.load(shard, int(document))
        part = slice(int(piece) * self.sequence_length, (int(piece) + 1) * self.sequence_length)
        return {**sample, "input_ids": sample["input_ids"][part], "labels": sample["labels"][part]}

    def key(self, shard: int, row: int) -> str:
        return self.source.key(shard, int(self._places(np.array([shard]), np.array([row]))[0][0]))

    def _before(self, shard: int) -> np.ndarray:
        """Rows before each document of a shard, and in all."""
        if shard not in self._firsts:
            counts = self.source.shard_lengths(shard).astype(np.int64)
            self._firsts[shard] = np.concatenate([[0], np.cumsum(np.maximum(-(-counts // self.sequence_length), 1))])
        return self._firsts[shard]

    def _places(self, shards: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        documents, pieces = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            before = self._before(shard)
            documents[here] = np.searchsorted(before, rows[here], side="right") - 1
            pieces[here] = rows[here] - before[documents[here]]
        return documents, pieces

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_firsts": {}}


class MixtureStream(Dataset):
    """The samples of all positions.

    Args:
        schedule: which source's which draw a position holds.
        sources, orders: of every source of the schedule, by its number.
        quarantine: where bad samples are listed.

    A bad draw k of N rows is replaced by draw k + N, k + 2N, ...: what a later epoch has there. Every other position stays as it is.
    """

    def __init__(self, schedule: Schedule, sources: Sequence[Source], orders: Sequence[SourceOrder], quarantine: Quarantine) -> None:
        self.schedule, self.sources, self.orders, self.quarantine = schedule, list(sources), list(orders), quarantine

    def __getitem__(self, position: int) -> dict[str, Any]:
        sample = self.sample(position)
        assert sample is not None
        return sample

    def sample(self, position: int, room: int | None = None) -> dict[str, Any] | None:
        """The encoded sample of a position; None when no replacement of a bad one fits.

        Args:
            position: of the run.
            room: tokens planned for it; replacements that need more are passed over.

        Raises:
            ValueError: when ``TRIES`` draws in a row are bad, or the quarantine's limit is passed.
        """
        number, draw = self.schedule.at(position)[1:]
        source, reasons = self.sources[number], []
        for attempt in range(TRIES):
            row = self._row(number, draw, attempt)
            try:
                sample = source.load(row.shard, row.row)
            except BadSample as error:
                shard, key = source.shards[row.shard], source.key(row.shard, row.row)
                self.quarantine.add(source.name, shard, key, row.row, str(error))
                reasons.append(f"{shard}, key {key!r}: {error}")
                continue
            if room is None or len(sample["input_ids"]) <= room:
                return sample
            if not attempt:
                raise ValueError(
                    f"source {source.name!r}, shard {source.shards[row.shard]}, key {source.key(row.shard, row.row)!r}: {room} tokens were"
                    f" counted and {len(sample['input_ids'])} encoded: the encode function's `count` must give what it encodes, and a "
                    "change of it another `version`"
                )
        if len(reasons) < TRIES:
            return None
        raise self._all_bad(number, draw, reasons[-1])

    def lengths(self, start: int, count: int) -> np.ndarray:
        """Tokens (count,) int64 of the samples of positions start .. start + count - 1, as counted; of a bad one its replacement's."""
        _, numbers, draws = self.schedule.window(start, count)
        found = np.empty(count, np.int64)
        for number in np.unique(numbers).tolist():
            where = np.flatnonzero(numbers == number)
            found[where] = self._counted(number, draws[where])
        return found

    def _counted(self, number: int, draws: np.ndarray) -> np.ndarray:
        order, source = self.orders[number], self.sources[number]
        _, shards, rows = order.many(int(draws[0]), len(draws))  # the draws of neighbouring positions are neighbours
        found = source.lengths(shards, rows)
        for place in np.flatnonzero(found == 0).tolist():
            for attempt in range(1, TRIES):
                row = self._row(number, int(draws[place]), attempt)
                found[place] = source.lengths(np.array([row.shard]), np.array([row.row]))[0]
                if found[place]:
                    break
            else:
                raise self._all_bad(number, int(draws[place]), "by their token counts")
        return found

    def _row(self, number: int, draw: int, attempt: int = 0) -> Row:
        return self.orders[number].at(draw + attempt * self.orders[number].size)

    def key(self, position: int) -> str:
        """The key of the sample that a position holds, bad or not."""
        number, draw = self.schedule.at(position)[1:]
        row = self._row(number, draw)
        return self.sources[number].key(row.shard, row.row)

    def _all_bad(self, number: int, draw: int, last: str) -> ValueError:
        return ValueError(
            f"source {self.sources[number].name!r}: draw {draw} and its {TRIES - 1} replacements, each an epoch later, are all bad samples;"
            f" the last: {last}. They are listed in {self.quarantine.path}: repair the data, or correct `fields` or `encode`"
        )


class PackedStream(Dataset):
    """The packed sequences of a stream: from a packer's state to the samples that share a row."""

    def __init__(self, stream: MixtureStream, packer: Packer) -> None:
        self.stream, self.packer = stream, packer

    def __getitem__(self, state: int) -> list[dict[str, Any]]:
        positions = self.packer.sequence(state)
        found = [self.stream.sample(position, room) for position, room in zip(positions, self.packer.rooms(state))]
        return [sample for sample in found if sample is not None]


class StoredStream(Dataset):
    """All rows of some sources in storage order, each once: what validation reads. Bad ones are listed and left empty.

    Args:
        sources: in order.
        quarantine: where bad samples are listed.
        capacity: tokens of a row of the batch, into which samples are packed in groups; None has one sample in each.
    """

    _GROUP = 4096  # samples packed together

    def __init__(self, sources: Sequence[Source], quarantine: Quarantine, capacity: int | None) -> None:
        self.sources, self.quarantine = list(sources), quarantine
        self.rows: list[list[tuple[int, int, int]]] = []
        for number, source in enumerate(self.sources):
            places = [(number, shard, row) for shard, size in enumerate(source.sizes.tolist()) for row in range(size)]
            for begin in range(0, len(places), self._GROUP):
                group = places[begin : begin + self._GROUP]
                if capacity is None:
                    self.rows += [[place] for place in group]
                    continue
                counts = source.lengths(np.array([shard for _, shard, _ in group]), np.array([row for _, _, row in group]))
                packed = best_fit_decreasing(np.clip(counts, 1, capacity), capacity)
                self.rows += [[group[i] for i in sorted(sequence)] for sequence in packed]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> list[dict[str, Any]]:
        """The samples of a row; of a negative number those of row -1 - number, with no label."""
        found = []
        for source, shard, row in self.rows[number if number >= 0 else -1 - number]:
            owner = self.sources[source]
            try:
                sample = owner.load(shard, row)
            except BadSample as error:
                self.quarantine.add(owner.name, owner.shards[shard], owner.key(shard, row), row, str(error))
                continue
            if number < 0:
                sample = {**sample, "labels": sample["labels"].new_full(sample["labels"].shape, IGNORED)}
            found.append(sample)
        return found
