"""Reads ahead in the plan of a run: the remote shards that coming rows need are fetched while earlier rows are trained on."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_megascale.data.expand import local_path
from lightning_megascale.data.mixture_stream import MixtureStream, PackedStream, Pieces, Source, StoredStream
from lightning_megascale.data.samples import ShardedSource
from lightning_megascale.data.storage import ShardStore

SAMPLES = 8192  # of this rank that are looked at before they are due
_FIRST, _FASTER = 256, 4  # samples looked at before the first batch, and for each one handed out until the window is full

Stream = MixtureStream | PackedStream | StoredStream


class ReadAhead:
    """The same batches of rows, while a store fetches the remote shards that the next ones need, in the order of first use.

    It belongs around what a ``DataLoader`` takes its batches from, in the process of the rank, and looks at this rank's rows only. A
    shard is needed from the moment its first row enters the window until its last one has been handed out and read. The window is
    counted in samples. It grows in the first steps, so that no batch waits for it.

    Args:
        batches: rows of each batch.
        shards_of: row -> the number of its samples and their remote shards; see ``remote_shards``.
        store: fetches.
        outstanding: batches that may be handed out and not be read yet: 2 for each worker of a ``DataLoader``.
        samples: of the window.
    """

    def __init__(
        self,
        batches: Iterable[list[int]],
        shards_of: Callable[[int], tuple[int, list[str]]],
        store: ShardStore,
        outstanding: int = 0,
        samples: int = SAMPLES,
    ) -> None:
        self._batches, self._shards_of, self._store = iter(batches), shards_of, store
        self._outstanding, self._samples, self._reach = outstanding, samples, min(_FIRST, samples)
        self._coming: collections.deque[tuple[list[int], int, set[str]]] = collections.deque()  # batch, samples, shards
        self._looked = 0  # samples in it
        self._passed: collections.deque[set[str]] = collections.deque()  # shards of batches that may not be read yet
        self._uses: dict[str, int] = {}  # shard -> batches of both that need it, in the order of first use

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        changed = self._look()
        if not self._coming:
            raise StopIteration  # what is on its way stays wanted until close(): workers may still have to read it
        batch, samples, shards = self._coming.popleft()
        self._looked -= samples
        self._reach = min(self._samples, self._reach + _FASTER * samples)
        self._passed.append(shards)
        while len(self._passed) > self._outstanding + 1:
            changed |= self._let_go(self._passed.popleft())
        if changed:
            self._store.prefetch(list(self._uses), self)
        return batch

    def close(self) -> None:
        """Nothing more is needed; a transfer that is under way ends by itself."""
        self._coming.clear()
        self._passed.clear()
        self._uses.clear()
        self._batches = iter(())
        self._store.prefetch([], self)

    def _look(self) -> bool:
        """Takes batches into the window until it is full; whether they need other shards than those before."""
        known = len(self._uses)
        while not self._coming or self._looked < self._reach:
            batch = next(self._batches, None)
            if batch is None:
                break
            samples, shards = 0, dict[str, None]()
            for row in batch:
                count, urls = self._shards_of(row)
                samples += count
                shards.update(dict.fromkeys(urls))
            for url in shards:
                self._uses[url] = self._uses.get(url, 0) + 1
            self._coming.append((batch, samples, set(shards)))
            self._looked += samples
        return len(self._uses) > known

    def _let_go(self, shards: set[str]) -> bool:
        """Counts a batch as read; whether that leaves a shard that no batch of the window needs."""
        known = len(self._uses)
        for url in shards:
            self._uses[url] -= 1
            if not self._uses[url]:
                del self._uses[url]
        return len(self._uses) < known


def read_ahead(batches: Iterable[list[int]], stream: Stream, store: ShardStore, num_workers: int = 0) -> Iterable[list[int]]:
    """The batches, reading ahead in them if any shard of the stream is remote; otherwise as they are."""
    shards_of = remote_shards(stream)
    return batches if shards_of is None else ReadAhead(batches, shards_of, store, outstanding=2 * num_workers)


def remote_shards(stream: Stream) -> Callable[[int], tuple[int, list[str]]] | None:
    """From a row of a stream to the number of its samples and their remote shards; None when all shards are local.

    Rows that replace bad ones are not among them: which samples are bad is only known once they are read.
    """
    mixture = stream.stream if isinstance(stream, PackedStream) else stream
    remote = [_remote(source) for source in mixture.sources]
    if not any(url is not None for urls in remote for url in urls):
        return None

    def shards_of(row: int) -> tuple[int, list[str]]:
        places = _places(stream, row)
        urls = (remote[source][shard] for source, shard in places)
        return len(places), [url for url in urls if url is not None]

    return shards_of


def _remote(source: Source) -> list[str | None]:
    """The address of each shard that is remote."""
    inner: Any = source.source if isinstance(source, Pieces) else source
    urls = inner.urls if isinstance(inner, ShardedSource) else []
    return [url if local_path(url) is None else None for url in urls] or [None] * len(source.shards)


def _places(stream: Stream, row: int) -> list[tuple[int, int]]:
    """Source and shard of each sample of a row."""
    if isinstance(stream, StoredStream):
        return [(source, shard) for source, shard, _ in stream.rows[row if row >= 0 else -1 - row]]
    mixture, positions = (stream.stream, stream.packer.sequence(row)) if isinstance(stream, PackedStream) else (stream, [row])
    found = []
    for position in positions:
        _, source, draw = mixture.schedule.at(position)
        found.append((source, mixture.orders[source].at(draw).shard))
    return found
