"""Samples to batches: padded rows and packed rows.

Legend: T tokens of a sample, B rows, L tokens of a row, N values of all rows together, S segments of a row.

An encoded sample is a dict: ``input_ids`` and ``labels`` (T,) int64, labels unshifted with -100 where nothing counts; any further
arrays (n, ...), such as ``pixel_values`` (images, C, H, W) uint8 and ``image_sizes`` (images, 2), whose dim 0 counts values in the order
of their placeholders; strings such as ``__key__``. A batch is a dict with ``input_ids`` first, for Lightning counts the rows of the first
tensor it meets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_megascale.data.ragged import Ragged

IGNORED = -100  # the label that no loss counts
PADDING = -1  # the document of a token that is none
_TOKENS = ("input_ids", "labels")
_MADE = ("attention_mask", "position_ids", "document_ids", "cu_seqlens", "max_seqlen")

Sample = Mapping[str, Any]


def pad_rows(samples: Sequence[Sample], *, length: int | None = None, multiple: int = 1, pad_id: int) -> dict[str, Any]:
    """One sample for each row, padded on the right.

    Args:
        samples: B encoded samples.
        length: L; None: that of the longest sample.
        multiple: L is rounded up to one (without ``length``).
        pad_id: the token that fills.

    Returns:
        ``input_ids``, ``labels``, ``attention_mask`` (B, L) int64, further arrays as ``Ragged``, strings as lists, one for each row. The
        first label of a row is -100: nothing stands before it that could predict it.

    Raises:
        ValueError: for samples that are no encoded samples, or longer than ``length``.
    """
    _check_samples(samples)
    if multiple < 1:
        raise ValueError(f"multiple={multiple}: must be 1 or more")
    longest = max(len(sample["input_ids"]) for sample in samples)
    if length is None:
        length = -(-longest // multiple) * multiple
    rows = [[sample] for sample in samples]
    batch = _filled(rows, length, pad_id)
    mask = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, sample in enumerate(samples):
        mask[row, : len(sample["input_ids"])] = 1
    return {**batch, "attention_mask": mask, **_others(rows)}


def pack_rows(rows: Sequence[Sequence[Sample]], *, length: int, pad_id: int, cu_seqlens: bool = True) -> dict[str, Any]:
    """Several samples for each row, one behind the other; what is left of a row is padding.

    Args:
        rows: for each of B rows its encoded samples; a row may be empty.
        length: L.
        pad_id: the token that fills.
        cu_seqlens: also the borders that kernels for variable lengths take; without, for context parallelism, which cuts rows up.

    Returns:
        * ``input_ids``, ``labels`` (B, L) int64; the first label of each document is -100, so that nothing predicts across a border.
        * ``position_ids`` (B, L) int64, from 0 in each document; 0 where there is none.
        * ``document_ids`` (B, L) int64, from 0 in each row; -1 where there is none.
        * ``cu_seqlens`` (B, S + 1) int32 on the host as long as the batch is: where segments start in their row, then L. Segments are the
          documents and, as the last, the padding; a row with fewer than S has empty ones at its end. S is a power of two, so that shapes
          seldom change.
        * ``max_seqlen``: int, tokens of the longest segment of the batch.
        * further arrays as ``Ragged``, in the order of documents; strings as lists, one for each row.

    Raises:
        ValueError: for samples that are no encoded samples, or a row of more than L tokens.
    """
    _check_samples([sample for row in rows for sample in row])
    batch = _filled(rows, length, pad_id)
    positions = torch.zeros(len(rows), length, dtype=torch.int64)
    documents = torch.full((len(rows), length), PADDING, dtype=torch.int64)
    segments: list[list[int]] = []
    for row, samples in enumerate(rows):
        sizes = [len(sample["input_ids"]) for sample in samples]
        used = sum(sizes)
        if sizes:
            documents[row, :used] = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
            torch.cat([torch.arange(size) for size in sizes], out=positions[row, :used])
        segments.append(sizes + [length - used] * (used < length))
    batch |= {"position_ids": positions, "document_ids": documents}
    if cu_seqlens:
        batch |= {"cu_seqlens": _borders(segments, length), "max_seqlen": max(size for sizes in segments for size in sizes)}
    return {**batch, **_others(rows)}


def padding_share(batch: Mapping[str, Any]) -> float:
    """Share of a batch's tokens that are padding, by its ``document_ids``, else ``attention_mask``; 0 where it has neither."""
    for key, real in (("document_ids", lambda ids: ids != PADDING), ("attention_mask", lambda mask: mask != 0)):
        if isinstance(batch.get(key), Tensor):
            return 1 - real(batch[key]).double().mean().item()
    return 0.0


def _name(sample: Sample) -> str:
    return f"sample {sample['__key__']}" if "__key__" in sample else "a sample"


def _check_samples(samples: Sequence[Sample]) -> None:
    """Refuses what a batch could be wrong by without an error."""
    if not samples:
        raise ValueError("no samples: a batch needs at least one, for the shapes of images and the like are theirs")
    for sample in samples:
        missing = [key for key in _TOKENS if key not in sample]
        if missing:
            raise ValueError(
                f"{_name(sample)} has no {' and no '.join(missing)}, only {', '.join(sample)}: encode it to input_ids and labels"
            )
        ids, labels = (torch.as_tensor(sample[key]) for key in _TOKENS)
        for name, tensor in zip(_TOKENS, (ids, labels)):
            if tensor.ndim != 1 or tensor.dtype != torch.int64:
                raise ValueError(f"{name} of {_name(sample)} are {tuple(tensor.shape)} {tensor.dtype}: must be (T,) torch.int64")
        if len(ids) != len(labels):
            raise ValueError(f"{_name(sample)} has {len(ids)} input_ids and {len(labels)} labels: labels are unshifted, one for each token")
        if not len(ids):
            raise ValueError(f"{_name(sample)} has no tokens: a document has at least one; leave it out")


def _filled(rows: Sequence[Sequence[Sample]], length: int, pad_id: int) -> dict[str, Any]:
    """Tokens and labels (B, L)."""
    ids = torch.full((len(rows), length), pad_id, dtype=torch.int64)
    labels = torch.full((len(rows), length), IGNORED, dtype=torch.int64)
    for row, samples in enumerate(rows):
        place = 0
        for sample in samples:
            size = len(sample["input_ids"])
            if place + size > length:
                raise ValueError(
                    f"{_name(sample)} of {size} tokens ends at {place + size} in a row of length={length}: cut it where it is encoded (here"
                    " nobody knows where its images are), or leave it out"
                )
            ids[row, place : place + size] = torch.as_tensor(sample["input_ids"])
            labels[row, place + 1 : place + size] = torch.as_tensor(sample["labels"])[1:]
            place += size
    return {"input_ids": ids, "labels": labels}


def _borders(segments: list[list[int]], length: int) -> Tensor:
    """(B, S + 1) int32."""
    most = max(len(sizes) for sizes in segments)
    borders = np.full((len(segments), (1 << (most - 1).bit_length()) + 1), length, dtype=np.int32)
    for row, sizes in zip(borders, segments):
        row[0] = 0
        row[1 : len(sizes) + 1] = np.cumsum(sizes)
    return torch.from_numpy(borders)


def _others(rows: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """All but tokens and labels, by row: arrays as ``Ragged``, strings as lists."""
    samples = [sample for row in rows for sample in row]
    made: dict[str, Any] = {}
    for key in dict.fromkeys(key for sample in samples for key in sample if key not in _TOKENS):
        owner = next((sample for sample in samples if sample.get(key) is not None), None)
        if owner is None:
            continue
        if key in _MADE:
            raise ValueError(f"{_name(owner)} has {key}, which the batch makes itself: leave it out where the sample is encoded")
        if isinstance(owner[key], str):
            made[key] = [[sample.get(key) or "" for sample in row] for row in rows]
        elif isinstance(owner[key], (Tensor, np.ndarray)) and owner[key].ndim:
            made[key] = _ragged(key, rows)
        else:
            raise ValueError(
                f"{key} of {_name(owner)} is a {type(owner[key]).__name__}: besides input_ids and labels a sample holds strings, and arrays"
                " whose dim 0 counts values; make it an array (1,)"
            )
    return made


def _ragged(key: str, rows: Sequence[Sequence[Sample]]) -> Ragged:
    """The arrays of all samples that have one, joined (one copy)."""
    owners = [(row, sample) for row, samples in enumerate(rows) for sample in samples if sample.get(key) is not None]
    values = [torch.as_tensor(sample[key]) for _, sample in owners]
    counts = torch.zeros(len(rows), dtype=torch.int64)
    for (row, sample), value in zip(owners, values):
        if value.ndim == 0 or value.shape[1:] != values[0].shape[1:] or value.dtype != values[0].dtype:
            raise ValueError(
                f"{key} of {_name(sample)} is {tuple(value.shape)} {value.dtype} and of {_name(owners[0][1])}, in the same batch, "
                f"{tuple(values[0].shape)} {values[0].dtype}: only dim 0 may differ, so resize or pad them to one shape"
            )
        counts[row] += len(value)
    return Ragged(_joined(values), counts)


def _joined(values: list[Tensor]) -> Tensor:
    """All values, one behind the other; those of equal lengths, in a loader's worker, written where the main process reads them."""
    if len({len(value) for value in values}) > 1:
        return torch.cat(values)
    joined: Tensor = default_collate(values)
    return joined.flatten(0, 1)
