"""Samples that were prepared when they were written: tokens, label spans, pixels and sizes as NumPy files.

Legend: T tokens, N pictures, S image size in pixels.
"""

from __future__ import annotations

import ast
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_megascale.data.conversation import IGNORED
from lightning_megascale.data.quarantine import BadSample

_HEADER_LIMIT = 10_000  # of a NumPy header, in bytes; NumPy's own


def read_npy(data: bytes) -> np.ndarray:
    """A NumPy file as a read-only view of its bytes: nothing is unpickled, and no size is believed that the bytes do not have.

    Raises:
        BadSample: for what is none.
    """
    file = io.BytesIO(data)
    try:
        major = np.lib.format.read_magic(file)[0]
        header = int.from_bytes(file.read(2 if major == 1 else 4), "little")
        if not 0 < header <= min(_HEADER_LIMIT, len(data)):
            raise ValueError(f"a header of {header} bytes")
        fields = ast.literal_eval(file.read(header).decode("latin1" if major < 3 else "utf-8"))
        shape, dtype = tuple(int(n) for n in fields["shape"]), np.dtype(fields["descr"])
        fortran = bool(fields["fortran_order"])
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError, EOFError) as error:
        raise BadSample(f"no NumPy file: {error}") from error
    values = int(np.prod(shape, dtype=object))
    if dtype.kind not in "iuf" or min(shape, default=1) < 0 or values * dtype.itemsize != len(data) - file.tell():
        raise BadSample(f"a NumPy file of shape {shape} and dtype {dtype} in {len(data)} bytes; plain numbers of just that size are read")
    return np.frombuffer(data, dtype, values, file.tell()).reshape(shape, order="F" if fortran else "C")


def _integers(data: bytes, name: str, ndim: int) -> np.ndarray:
    array = read_npy(data)
    if array.dtype.kind not in "iu" or array.ndim != ndim or (ndim == 2 and array.shape[1] != 2):
        raise BadSample(f"{name} has shape {array.shape} and dtype {array.dtype}; {'(T,)' if ndim == 1 else '(n, 2)'} integers are due")
    return array.astype(np.int64)


def stored_tokens(
    sample: Mapping[str, Any], vocabulary: int, pictures: int, image_tokens: int, image_token_id: int | None
) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """The fields ``tokens`` and ``spans`` (n, 2): what stands in no span is not labelled; without spans all is.

    Args:
        sample: its fields.
        vocabulary: entries of the tokenizer.
        pictures, image_tokens, image_token_id: how many there are, the tokens of each, and the token.

    Returns:
        Tokens and labels, both (T,) int64, and the (first token, end) of each picture.

    Raises:
        BadSample: for tokens that are not this tokenizer's, or pictures of another rule.
    """
    ids = _integers(sample["tokens"], "tokens", 1)
    if not len(ids) or ids.min() < 0 or ids.max() >= vocabulary:
        raise BadSample(f"{len(ids)} stored tokens, not all of them in 0 .. {vocabulary - 1}, as this tokenizer's are")
    labels = ids.copy()
    if "spans" in sample:
        labels[:] = IGNORED
        for first, last in _integers(sample["spans"], "spans", 2):
            if not 0 <= first < last <= len(ids):
                raise BadSample(f"a label span {first} .. {last} in {len(ids)} tokens")
            labels[first:last] = ids[first:last]
    places = np.flatnonzero(ids == image_token_id) if image_token_id is not None else np.empty(0, dtype=np.int64)
    labels[places] = IGNORED
    runs = places.reshape(pictures, image_tokens) if len(places) == pictures * image_tokens else None
    if runs is None or (np.diff(runs, axis=1) != 1).any():
        raise BadSample(f"{len(places)} stored image tokens for {pictures} pictures of {image_tokens}: written by another rule")
    return ids, labels, [(int(run[0]), int(run[-1]) + 1) for run in runs]


def stored_pixels(sample: Mapping[str, Any], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The field ``pixels`` (N, 3, S, S) uint8, and ``sizes`` (N, 2) int64, S where there are none.

    Raises:
        BadSample: for pixels of another size.
    """
    pixels = read_npy(sample["pixels"])
    if pixels.dtype != np.uint8 or pixels.shape[1:] != (3, size, size):
        raise BadSample(f"stored pixels have shape {pixels.shape} and dtype {pixels.dtype}; (N, 3, {size}, {size}) uint8 are due")
    sizes = stored_sizes(sample, len(pixels)) if "sizes" in sample else np.full((len(pixels), 2), size, dtype=np.int64)
    return pixels.copy(), sizes


def stored_sizes(sample: Mapping[str, Any], pictures: int) -> np.ndarray:
    """The field ``sizes``: height and width (N, 2) int64 of each picture before it was resized.

    Raises:
        BadSample: for another number of them.
    """
    sizes = _integers(sample["sizes"], "sizes", 2)
    if len(sizes) != pictures:
        raise BadSample(f"{len(sizes)} stored sizes for {pictures} pictures")
    return sizes
