"""What the entries of a batch are, by their names: its tokens and labels, and the document and position of each token.

Shapes: B rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_megascale.ops.sequence_layout import PADDING, positions_of

_STALE = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen", "max_length_q", "max_length_k")


@dataclass
class Names:
    """What the entries of a batch are.

    Args:
        tokens: (B, L) or (B, L, ...): tells rows and length.
        labels: (B, L) integers, or None.
        given: entries by name; of a sequence only these two.
        tokens_at, labels_at: their paths, as ``map_batch`` has them: one tensor may be both.
    """

    tokens: Tensor
    labels: Tensor | None
    given: Mapping[str, Any]
    tokens_at: str
    labels_at: str


def names_of(batch: Any) -> Names:
    """Finds tokens and labels.

    Raises:
        ValueError: for a batch without tokens, or with labels that are not (B, L).
    """
    given: Mapping[str, Any]
    if isinstance(batch, Mapping) or (is_dataclass(batch) and not isinstance(batch, type)):
        given = batch if isinstance(batch, Mapping) else vars(batch)
        key = next((key for key in ("input_ids", "inputs_embeds") if isinstance(given.get(key), Tensor)), "input_ids")
        paths = [f"batch[{name!r}]" if isinstance(batch, Mapping) else f"batch.{name}" for name in (key, "labels")]
    else:
        entries = [batch] if isinstance(batch, Tensor) else list(batch) if isinstance(batch, Sequence) else []
        whole = [i for i, e in enumerate(entries) if isinstance(e, Tensor) and e.ndim == 2 and not e.is_floating_point()]
        key, given = "input_ids", dict(zip(("input_ids", "labels"), (entries[i] for i in whole)))
        paths = ["batch" if isinstance(batch, Tensor) else f"batch[{i}]" for i in whole]
    tokens = given.get(key)
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ValueError(
            "context_parallel_size above 1 cuts batches along their sequence, and this one has no tensor of tokens (B, L): give a dict "
            f"with Hugging Face's keys ('input_ids', 'labels'); it is a {type(batch).__name__}"
            + (f" with {', '.join(map(str, given))}" if given else "")
        )
    labels = given.get("labels")
    if labels is not None and (not isinstance(labels, Tensor) or labels.shape != tokens.shape[:2] or labels.is_floating_point()):
        shape = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"labels are {shape} and the tokens {tuple(tokens.shape[:2])}: under context parallelism each rank scores its own tokens, so "
            "labels have to be whole numbers (B, L), one for each token"
        )
    stale = [key for key in _STALE if given.get(key) is not None]
    if stale:
        raise ValueError(
            f"the batch has {', '.join(stale)}, which describe rows that context parallelism cuts up: give document_ids (B, L) instead"
        )
    return Names(tokens, labels, given, paths[0], paths[1] if len(paths) > 1 else "")


def token_documents(names: Names, rows: int, length: int) -> np.ndarray | None:
    """(B, L) documents, ``PADDING`` where a token is none, or None where every row is one document."""
    given, mask = names.given.get("document_ids"), names.given.get("attention_mask")
    for name, tensor in (("document_ids", given), ("attention_mask", mask)):
        if tensor is not None and (not isinstance(tensor, Tensor) or tuple(tensor.shape) != (rows, length)):
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} is {shape}, and must be ({rows}, {length}) under context parallelism: one number for each token")
    if mask is not None and bool((mask != 0).all()):
        mask = None
    if given is None and mask is None:
        return None
    documents = np.zeros((rows, length), dtype=np.int64) if given is None else given.detach().cpu().numpy().astype(np.int64)
    if documents.min() < PADDING:
        raise ValueError(f"document_ids hold {documents.min()}: documents count from 0, and {PADDING} marks padding")
    if mask is not None:
        documents = np.where(mask.detach().cpu().numpy() != 0, documents, PADDING)
    for row, numbers in enumerate(documents):
        starts = numbers[np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]])]
        texts = starts[starts != PADDING]
        if len(set(texts.tolist())) != len(texts):
            name = "document_ids" if given is not None else "attention_mask"
            raise ValueError(
                f"row {row} of {name} takes up a document again after another or after padding: the tokens of a document have to stand "
                "together, and padding before or behind them"
            )
    return None if (documents == documents[:, :1]).all() and documents.min() != PADDING else documents


def token_document_ids(names: Names, documents: np.ndarray | None, rows: int, length: int) -> Tensor:
    """(B, L) what steps and models read."""
    if documents is not None:
        return torch.from_numpy(documents)
    given = names.given.get("document_ids")
    return torch.zeros((rows, length), dtype=torch.int64) if given is None else given.long()


def token_positions(names: Names, documents: np.ndarray | None, rows: int, length: int) -> Tensor:
    """(B, L) what models read as positions: the given ones; else counted inside each document that the batch names, else in the row."""
    given = names.given.get("position_ids")
    if given is None:
        if documents is not None and names.given.get("document_ids") is not None:
            return torch.from_numpy(np.stack([positions_of(row) for row in documents]))
        return torch.arange(length).expand(rows, length)
    if not isinstance(given, Tensor) or given.ndim != 2 or given.shape[1] != length or given.shape[0] not in (1, rows):
        shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"position_ids are {shape}, and must be ({rows}, {length}) under context parallelism: one for each token")
    if names.given.get("document_ids") is None and bool((given[:, 1:] < given[:, :-1]).any()):
        raise ValueError(
            "position_ids start again inside a row, as packed documents do, and the batch has no document_ids: give document_ids (B, L): "
            "which tokens attend to which is never guessed from positions"
        )
    return given.expand(rows, length)
