"""A source of samples: shards read by offset, fields by extension, encoded, and their tokens counted once."""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lightning_megascale.data.encode import (
    EncodeContext,
    check_encoded,
    count_tokens,
    encode_sample,
    resolve_encode,
)
from lightning_megascale.data.expand import expand, shown
from lightning_megascale.data.index import ShardIndex, column
from lightning_megascale.data.quarantine import BadSample, Quarantine
from lightning_megascale.data.source_config import DEFAULT_FIELDS, OPTIONAL_FIELDS, SourceConfig, default_fields
from lightning_megascale.data.storage import ShardStore

__all__ = ["BadSample", "DEFAULT_FIELDS", "Quarantine", "ShardedSource", "SourceConfig", "default_fields"]

_log = logging.getLogger(__name__)
_COLUMNS_KEPT = 1024  # token counts in memory, in shards


class ShardedSource:
    """The samples of a source's shards, by shard and row.

    Args:
        name: of the source.
        config: what it is.
        store: reads the shards.
        cache_dir: where token counts go that cannot be written beside the shard; None takes the store's.
        context: for encoding; without it samples can only be read.

    Attributes:
        urls, shards: addresses of the shards, sorted, and their base names.
        indexes: of the shards; opening them costs a header each, remote ones come with the first run.
        sizes: samples of each shard (shards,) int64.
        fields: field -> extensions.

    Raises:
        ValueError: for no shards, or a field whose extensions no shard has.
        ShardError: for a damaged shard.
    """

    def __init__(
        self, name: str, config: SourceConfig, store: ShardStore, cache_dir: str | Path | None = None, context: EncodeContext | None = None
    ) -> None:
        self.name, self.config, self.store, self.context = name, config, store, context
        self.cache_dir = cache_dir if cache_dir is not None else store.cache_dir
        self.encode = resolve_encode(config.encode)
        self.urls = expand(config.urls)
        self.shards = [shown(url).rstrip("/").rsplit("/", 1)[-1] for url in self.urls]
        self.indexes: list[ShardIndex] = store.indexes(self.urls)
        self.sizes = np.array([index.samples for index in self.indexes], dtype=np.int64)
        self.fields = (
            dict(config.fields)
            if config.fields is not None
            else default_fields(sorted({name for index in self.indexes for name in index.fields}))
        )
        self._check_fields()
        self._tell_what_was_skipped()
        self._counts: OrderedDict[int, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        """Samples in all shards."""
        return int(self.sizes.sum())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counts": OrderedDict()}

    def identity(self) -> dict[str, Any]:
        """All that decides what a (shard, row) of this source is, for the hash of a run; places and addresses are not in it."""
        shards = [(name, index.samples, index.shard_bytes, index.content_hash) for name, index in zip(self.shards, self.indexes)]
        return {"shards": shards, "fields": sorted(self.fields.items()), "encode": self._encode_name()}

    def key(self, shard: int, row: int) -> str:
        """The sample's key."""
        return self.indexes[shard].key(row)

    def read(self, shard: int, row: int, *, pictures: bool = True) -> dict[str, Any]:
        """The fields of a sample as bytes (``images``: a list of bytes), ``__key__``, and ``__shard__``, the shard's base name.

        Args:
            shard, row: which one.
            pictures: False leaves the files of ``image`` and ``images`` empty, for counting.

        Raises:
            BadSample: when a field is missing.
            OSError: when bytes cannot be read, or are not those that were indexed, also in a fresh copy.
        """
        index = self.indexes[shard]
        sample: dict[str, Any] = {"__key__": index.key(row), "__shard__": self.shards[shard]}
        for field, extensions in self.fields.items():
            if field == "images":
                names = _numbered(index, row, extensions)
                sample[field] = [self._member(shard, row, name) if pictures else b"" for name in names]
            elif index.span(row, extensions) is None:
                if field in OPTIONAL_FIELDS:
                    continue
                raise BadSample(f"the field {field!r} ({extensions}) is missing")
            else:
                sample[field] = self._member(shard, row, extensions) if pictures or field != "image" else b""
        return sample

    def load(self, shard: int, row: int) -> dict[str, Any]:
        """The encoded sample.

        Raises:
            BadSample: when its bytes cannot be used.
            ValueError, OSError, RuntimeError: what the encode function raises otherwise, with the place of the sample in front.
        """
        if self.context is None:
            raise ValueError(f"source {self.name!r} was made without a context: give ShardedSource the EncodeContext to encode with")
        sample, context = self.read(shard, row), self.context
        encoded = self._placed(shard, row, lambda: check_encoded(self.encode(sample, context), self._encode_name(), len(context.tokenizer)))
        return {**encoded, "__key__": sample["__key__"]}

    def _placed(self, shard: int, row: int, call: Callable[[], Any]) -> Any:
        """What ``call`` gives; what it raises, but for bad samples, says where the sample lies."""
        try:
            return call()
        except BadSample:
            raise
        except Exception as error:
            kind = next((kind for kind in (ValueError, OSError) if isinstance(error, kind)), RuntimeError)
            place = f"source {self.name!r}, shard {self.shards[shard]}, row {row}, key {self.key(shard, row)!r}"
            raise kind(f"{place}: {self._encode_name()} raised {type(error).__name__}: {error}") from error

    def lengths(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Tokens of samples (n,) int64, 0 for bad ones; counted once per shard and then kept beside its index.

        Args:
            shards, rows: (n,) integers.
        """
        shards, rows = np.asarray(shards), np.asarray(rows)
        result = np.empty(len(shards), dtype=np.int64)
        order = np.argsort(shards, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(shards[order])) + 1) if len(order) else []:
            result[part] = self.shard_lengths(int(shards[part[0]]))[rows[part]]
        return result

    def shard_lengths(self, shard: int) -> np.ndarray:
        """Tokens of all samples of a shard, (samples,) int32."""
        if shard not in self._counts:
            self._counts[shard] = column(
                self.indexes[shard], "tokens", self._count_identity(), lambda row: self._count(shard, row), cache_dir=self.cache_dir
            )
            while len(self._counts) > _COLUMNS_KEPT:
                self._counts.popitem(last=False)
        self._counts.move_to_end(shard)
        return self._counts[shard]

    def _count(self, shard: int, row: int) -> int:
        context = self.context
        assert context is not None
        try:
            sample = self.read(shard, row, pictures=self.encode is not encode_sample)
        except BadSample:
            return 0
        return int(self._placed(shard, row, lambda: count_tokens(sample, context, self.encode)))

    def _count_identity(self) -> str:
        if self.context is None:
            raise ValueError(f"source {self.name!r} was made without a context, which counting tokens needs: give it an EncodeContext")
        own = "" if self.encode is encode_sample else self.context.identity()
        return repr((self.context.token_identity(), own, sorted(self.fields.items()), self._encode_name()))

    def _encode_name(self) -> str:
        name = f"{getattr(self.encode, '__module__', '')}.{getattr(self.encode, '__qualname__', type(self.encode).__qualname__)}"
        version = getattr(self.encode, "version", None)
        return name if version is None else f"{name} version {version}"

    def _member(self, shard: int, row: int, extensions: str) -> bytes:
        """The bytes of a member, compared with the checksum of the index."""
        url, index = self.urls[shard], self.indexes[shard]
        span, expected = index.span(row, extensions), index.crc32(row, extensions)
        assert span is not None
        data = self.store.read(url, *span)
        if expected is None or zlib.crc32(data) == expected:
            return data
        self.store.discard(url)  # a damaged copy: from where it came it may come whole
        data = self.store.read(url, *span)
        if zlib.crc32(data) != expected:
            raise OSError(
                f"{shown(url)}: sample {index.key(row)!r} ({extensions}) at byte {span[0]:,} is twice not what was indexed (CRC-32"
                f" {zlib.crc32(data):#010x}, {expected:#010x} expected): restore the shard, or index it again if it was meant to change"
            )
        return data

    def _tell_what_was_skipped(self) -> None:
        """Members that are no part of any sample (links, names without an extension): seldom meant, so not passed over in silence."""
        odd = [(name, index) for name, index in zip(self.shards, self.indexes) if index.noted]
        if odd:
            _log.warning(
                "source %r: %d members of %d shards are part of no sample, the first in %s: %s. megascale data lint lists them",
                self.name,
                sum(index.noted for _, index in odd),
                len(odd),
                odd[0][0],
                odd[0][1].notes[0],
            )

    def _check_fields(self) -> None:
        there = {extension for index in self.indexes for extension in index.fields}
        for field, extensions in self.fields.items():
            wanted = {extension.strip().lower() for extension in extensions.split(";")}
            plain = there | ({name.partition(".")[2] for name in there if name.partition(".")[0].isdigit()} if field == "images" else set())
            if not wanted & plain:
                raise ValueError(
                    f"source {self.name!r}: no shard has the field {field!r} by the extensions {extensions!r}; there are"
                    f" {', '.join(sorted(there))}: correct `fields`"
                )


def _numbered(index: ShardIndex, row: int, extensions: str) -> list[str]:
    """The plain extensions when the sample has one of them, otherwise those of 0.jpg, 1.jpg, ... as far as they go."""
    if index.field(row, extensions) is not None:
        return [extensions]
    names: list[str] = []
    while True:
        numbered = ";".join(f"{len(names)}.{extension.strip()}" for extension in extensions.split(";"))
        if index.field(row, numbered) is None:
            return names
        names.append(numbered)
