"""One batch cut along its sequence: this rank's tokens of every tensor, with targets that no shard border cuts.

The whole batch is known on every rank, so nothing is sent: which tokens go where, and what attention then computes, are index maths
(``ops/sequence_layout.py``). Shapes: B rows, L tokens of a row, W ranks, S tokens of a rank.

A shard is ``L / W`` tokens and, where they are needed, a few *spare* places at its end that belong to no document: a step that
shifts labels itself drops the last logits of what it is given and the first label, so its labels are laid one place later and the spare
place takes the loss. Every target then stands where that step looks for it, and the step stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_megascale.ops.context_blocks import Tables
from lightning_megascale.ops.sequence_layout import PADDING, assign, positions_of, runs_of
from lightning_megascale.parallel.context_names import names_of, token_document_ids, token_documents, token_positions
from lightning_megascale.parallel.context_shard import SequenceShard
from lightning_megascale.parallel.loss_scale import IGNORE_INDEX
from lightning_megascale.parallel.microbatches import map_batch

_PER_TOKEN = re.compile("token|mask|weight|label|target|position|score|prob|reward|advantage|value|loss|embed")  # names of floats (B, L)
_SHIFTED = ("shift", "huggingface")
_OVER_LABELS = ("labels", "mask", "weight")  # in a path: a step that shifts labels shifts these with them


@dataclass(frozen=True)
class SequenceCut:
    """How batches are cut; equal on all ranks.

    Args:
        ranks, rank: of the context-parallel axis.
        layout: "contiguous", "headtail", "packed", or "auto": "packed" where rows hold documents or padding, else "headtail".
        label_alignment: "aligned", "shift" or "huggingface", as the plan has it.
        multiple: S is a multiple of it: the tensor-parallel ranks that split the sequence again.
        training: labels count; without it (prediction) there may be none.
        order: another order of the tokens of a single rank, for trials.
    """

    ranks: int
    rank: int
    layout: str = "auto"
    label_alignment: str | None = "aligned"
    multiple: int = 1
    training: bool = True
    order: tuple[int, ...] | None = None

    def __call__(self, batch: Any) -> tuple[Any, SequenceShard]:
        """This rank's part of a batch.

        Args:
            batch: a dict or dataclass with Hugging Face's keys, or a sequence whose first whole-number (B, L) tensor holds the tokens
                and whose second the labels.

        Returns:
            The batch of the same kind, with ``position_ids`` and ``document_ids`` added to a dict, and how it was cut.

        Raises:
            ValueError: for what cannot be cut right, in the same words on all ranks.
        """
        names = names_of(batch)
        tokens = names.tokens
        rows, length = tokens.shape[:2]
        documents = token_documents(names, rows, length)
        has_documents = documents is not None
        layout = self.layout if self.layout != "auto" else "packed" if has_documents else "headtail"
        unit = 2 * self.ranks if layout == "headtail" and self.ranks > 1 else self.ranks
        padded = -(-length // unit) * unit
        local = padded // self.ranks
        shifts = self.label_alignment == "shift" and names.labels is not None
        spare = next(spare for spare in range(int(shifts), self.multiple + 1) if (local + spare) % self.multiple == 0)
        named = isinstance(batch, Mapping) or is_dataclass(batch)
        if (spare or padded != length) and not named and self.training:
            raise ValueError(
                f"rows of {length} tokens over context_parallel_size={self.ranks} need places that hold no token, which are left out of "
                "the loss by labels of -100, and in a tuple nothing says which the labels are: give a dict with 'input_ids' and 'labels'"
            )
        if (spare or padded != length) and names.labels is None and self.training:
            raise ValueError(
                f"rows of {length} tokens over context_parallel_size={self.ranks} need "
                f"{padded - length + spare} places that hold no token, and the batch has no 'labels' to leave them out of the loss: put "
                f"integer labels (-100 where nothing counts) into the batch, or give rows of a multiple of {unit * self.multiple} tokens"
            )
        positions = token_positions(names, documents, rows, length)
        order, tables = _tables(documents, rows, length, padded, self.ranks, layout)
        if self.order is not None:
            order = np.broadcast_to(np.array(self.order), order.shape)
        own = torch.from_numpy(order[:, self.rank].copy())  # (B, S - spare)
        taker = _Taker(rows, length, padded, spare, own)
        shard = SequenceShard(
            tables,
            torch.from_numpy(order.copy()),
            self.rank,
            length,
            spare,
            taker.take(positions, 0),
            taker.take(token_document_ids(names, documents, rows, length), PADDING),
            has_documents,
            documents is not None and bool((documents[:, 0] == PADDING).any()),
        )
        shifted = names.labels is not None and self.label_alignment in _SHIFTED

        def place(path: str, leaf: Any) -> Any:
            """Labels go where the step looks for them, and with them what it lays over them (attention reads no mask)."""
            if path == names.labels_at:
                return taker.leaf("labels", leaf, self.label_alignment if shifted else None)
            follows = shifted and path != names.tokens_at and any(word in path for word in _OVER_LABELS) and "shift_labels" not in path
            return taker.leaf(path, leaf, self.label_alignment if follows else None)

        cut = map_batch(batch, place)
        if isinstance(cut, dict):
            cut["position_ids"], cut["document_ids"] = shard.position_ids, shard.document_ids
            if self.label_alignment == "huggingface" and names.labels is not None:
                cut.setdefault("shift_labels", cut["labels"])
        return cut, shard


class _Taker:
    """Takes this rank's tokens of tensors (B, L, ...)."""

    def __init__(self, rows: int, length: int, padded: int, spare: int, own: Tensor) -> None:
        self.rows, self.length, self.padded, self.spare, self.own = rows, length, padded, spare, own

    def take(self, tensor: Tensor, fill: float) -> Tensor:
        """(B, S, ...), with ``fill`` where there is no token."""
        lacking = self.padded - self.length
        if lacking:
            tensor = torch.cat([tensor, tensor.new_full((self.rows, lacking, *tensor.shape[2:]), fill)], 1)
        own = self.own.to(tensor.device)
        taken = tensor[torch.arange(self.rows, device=tensor.device)[:, None], own]
        if self.spare:
            taken = torch.cat([taken, taken.new_full((self.rows, self.spare, *tensor.shape[2:]), fill)], 1)
        return taken

    def next(self, tensor: Tensor, fill: float) -> Tensor:
        """(B, S, ...) of the places that follow this rank's in the row, ``fill`` after its last."""
        following = torch.full_like(tensor, fill)
        following[:, :-1] = tensor[:, 1:]
        return self.take(following, fill)

    def leaf(self, name: str, leaf: Any, alignment: str | None = None) -> Any:
        """A leaf of the batch: cut where it is (B, L, ...), else as it is.

        Args:
            name: its path.
            leaf: a tensor, an array or anything.
            alignment: of what lies where targets do: "huggingface": a token's place holds what follows it; "shift": one place later,
                for the last place is a spare one.
        """
        if isinstance(leaf, np.ndarray):
            is_cut = leaf.shape[:2] == (self.rows, self.length)
            return self.leaf(name, torch.from_numpy(leaf), alignment).numpy() if is_cut else leaf
        if not isinstance(leaf, Tensor) or leaf.ndim < 2:
            return leaf
        if leaf.ndim > 2 and self.length > 1 and leaf.shape[-2:] == (self.length, self.length):
            raise ValueError(
                f"{name} has shape {tuple(leaf.shape)}, which looks like an attention mask between all tokens: under context parallelism "
                "no rank sees them all. Say which tokens belong together with document_ids (B, L), and which are none with a 2-D mask"
            )
        if tuple(leaf.shape) == (self.rows, self.length - 1):
            raise ValueError(
                f"{name} has one entry less than the row has tokens ({self.length}), so it is unknown which tokens it belongs to: give it "
                f"the shape ({self.rows}, {self.length}), with an entry for each token"
            )
        if tuple(leaf.shape[:2]) != (self.rows, self.length):
            return leaf
        if leaf.ndim == 2 and leaf.is_floating_point() and not _PER_TOKEN.search(name):
            raise ValueError(
                f"{name} has a number for each row and token, ({self.rows}, {self.length}), or that many features of each row: which, its "
                "name does not say. If it is one for each token call it token_...; else give it the shape (B, 1, features)"
            )
        labels = "labels" in name and not leaf.is_floating_point() and leaf.dtype != torch.bool
        fill = IGNORE_INDEX if labels else PADDING if "document_ids" in name else 0
        if alignment is None:
            return self.take(leaf, fill)
        return self.next(leaf, fill).roll(1, 1) if alignment == "shift" else self.next(leaf, fill)


def _tables(
    documents: np.ndarray | None, rows: int, length: int, padded: int, ranks: int, layout: str
) -> tuple[np.ndarray, tuple[Tables, ...]]:
    """((B, W, L' / W) tokens of each rank, the tables of each row or of all)."""
    if documents is None:
        order, table = _single(length, padded, ranks, layout)
        return np.broadcast_to(order, (rows, *order.shape)).copy(), (table,)
    found = [_row(np.r_[row, np.full(padded - length, PADDING)], ranks, layout) for row in documents]
    return np.stack([order for order, _ in found]), tuple(table for _, table in found)


@lru_cache(maxsize=64)
def _single(length: int, padded: int, ranks: int, layout: str) -> tuple[np.ndarray, Tables]:
    return _row(np.r_[np.zeros(length, np.int64), np.full(padded - length, PADDING)], ranks, layout)


def _row(documents: np.ndarray, ranks: int, layout: str) -> tuple[np.ndarray, Tables]:
    order, positions = assign(documents, ranks, layout), positions_of(documents)
    return order, [runs_of(documents[own], positions[own]) for own in order]
