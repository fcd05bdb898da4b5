"""Documents in WebDataset shards: written with webdataset's own writer, read by byte offset.

Any WebDataset reader can read the shards. This one maps the files into memory instead of streaming them, so that document i is
found at once and an interrupted epoch continues where it stopped without reading what came before.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds

TOKENS = "tokens.npy"


@dataclass(frozen=True)
class Document:
    """One document: a key without dots, its text, and its tokens (T,), uint16 or int32."""

    key: str
    text: str
    tokens: np.ndarray


def token_dtype(vocab_size: int) -> type[np.generic]:
    """The smallest of uint16 and int32 that holds every token of the vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def write_shards(folder: Path, split: str, documents: Iterable[Document], documents_per_shard: int = 16) -> list[Path]:
    """Writes ``{split}-000000.tar`` and so on: per document a ``txt`` and a ``tokens.npy``; equal input gives equal bytes.

    Raises:
        ValueError: for a key with a dot, at which WebDataset would cut it.
    """
    pattern = str(folder / split).replace("%", "%%") + "-%06d.tar"
    with wds.ShardWriter(pattern, maxcount=documents_per_shard, verbose=0, mtime=0) as writer:
        for document in documents:
            if "." in document.key:
                raise ValueError(f"key {document.key!r}: a WebDataset key must not contain a dot; replace it, for example by a dash")
            writer.write({"__key__": document.key, "txt": document.text, TOKENS: document.tokens})
    return sorted(folder.glob(f"{split}-*.tar"))


class TokenShards:
    """The token arrays of all documents in the given shards, in storage order, mapped from the files.

    Args:
        paths: the shards, in order.

    Raises:
        ValueError: for a shard without any ``*.tokens.npy`` member, or one whose tokens are no integer vector.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise ValueError("TokenShards: no shards given; the folder must hold SPLIT-000000.tar and so on")
        self.paths = [Path(path) for path in paths]
        self.rows = [row for number, path in enumerate(self.paths) for row in _index(number, path)]
        self.lengths = np.array([count for _, _, count, _ in self.rows], dtype=np.int64)
        self._maps: dict[int, np.memmap] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, document: int) -> np.ndarray:
        """The tokens (T,) of one document, read-only, straight from the file."""
        shard, offset, count, dtype = self.rows[document]
        if shard not in self._maps:
            self._maps[shard] = np.memmap(self.paths[shard], dtype=np.uint8, mode="r")
        return np.frombuffer(self._maps[shard], dtype=dtype, count=count, offset=offset)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # a worker maps the files itself instead of receiving their content


def _index(number: int, path: Path) -> list[tuple[int, int, int, str]]:
    """Rows (shard, byte offset of the first token, token count, dtype) of a shard's documents."""
    rows = []
    with tarfile.open(path, "r:") as tar, path.open("rb") as file:
        for member in tar:
            if not member.name.endswith("." + TOKENS):
                continue
            file.seek(member.offset_data)
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError(f"{path}: {member.name} is not a NumPy file of version 1.0; write it with numpy.save")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            if len(shape) != 1 or dtype.kind not in "iu":
                raise ValueError(f"{path}: {member.name} has shape {shape} and dtype {dtype}; tokens must be one vector of integers")
            rows.append((number, file.tell(), shape[0], dtype.str))
    if not rows:
        raise ValueError(f"{path} holds no document with {TOKENS!r}; write shards with write_shards")
    return rows
