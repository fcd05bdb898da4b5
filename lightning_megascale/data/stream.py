"""Position -> sequence: the endless stream of training sequences as a pure function of (seed, position).

Legend: L sequence, T tokens. One integer says where a run stands, whatever the number of ranks and workers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_megascale.data.shards import TokenShards
from lightning_megascale.data.shuffle import permutation

IGNORED = -100  # the label that no loss counts
_DOCUMENTS, _SEQUENCES = 1, 2


def ignored(position: int) -> int:
    """The position that gives the same sequence with all labels ignored: a row that fills a batch and counts nothing."""
    return -1 - position


class SequenceStream(Dataset):
    """Documents joined by the end token and cut in sequences of exactly L tokens; position p is sequence p % len of epoch p // len.

    Each epoch shuffles the documents, joins them, cuts, and shuffles the sequences. What does not fill a last sequence (less
    than L tokens) is left out of that epoch; another order leaves out others in the next.

    Args:
        shards: the documents.
        sequence_length: L, in tokens.
        end_token: id that follows every document.
        seed: of the shuffles; None keeps the storage order.

    Raises:
        ValueError: when all documents together are shorter than one sequence.
    """

    def __init__(self, shards: TokenShards, sequence_length: int, end_token: int, seed: int | None = None) -> None:
        self.shards, self.sequence_length, self.end_token, self.seed = shards, sequence_length, end_token, seed
        tokens = int(shards.lengths.sum()) + len(shards)
        self.sequences = tokens // sequence_length
        if not self.sequences:
            raise ValueError(
                f"sequence_length={sequence_length}: the {len(shards)} documents hold {tokens} tokens in all; choose a smaller one"
            )
        self._cached: tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None

    def __len__(self) -> int:
        """Sequences per epoch."""
        return self.sequences

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        """``input_ids`` and unshifted ``labels``, both (L,) int64; negative positions are those of ``ignored``."""
        tokens = torch.from_numpy(self.tokens(position if position >= 0 else ignored(position)))
        labels = tokens.clone() if position >= 0 else torch.full_like(tokens, IGNORED)
        return {"input_ids": tokens, "labels": labels}

    def tokens(self, position: int) -> np.ndarray:
        """The tokens (L,) int64 at a position of the stream."""
        epoch, index = divmod(position, self.sequences)
        documents, ends, sequences = self._layout(epoch)
        start = int(sequences[index]) * self.sequence_length
        parts: list[np.ndarray] = []
        missing = self.sequence_length
        place = int(np.searchsorted(ends, start, side="right"))
        while missing:
            document = self.shards[documents[place]]
            offset = start - (int(ends[place]) - len(document) - 1)
            part = np.append(document[offset : offset + missing].astype(np.int64), self.end_token)[:missing]
            parts.append(part)
            missing -= len(part)
            start += len(part)
            place += 1
        return np.concatenate(parts)

    def _layout(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Document order, running end of each document in tokens (with its end token), and sequence order of an epoch."""
        if self._cached is None or self._cached[0] != epoch:
            if self.seed is None:
                documents, sequences = np.arange(len(self.shards)), np.arange(self.sequences)
            else:
                documents = permutation(len(self.shards), self.seed, epoch, _DOCUMENTS)
                sequences = permutation(self.sequences, self.seed, epoch, _SEQUENCES)
            self._cached = epoch, (documents, np.cumsum(self.shards.lengths[documents] + 1), sequences)
        return self._cached[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": None}
