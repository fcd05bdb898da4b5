"""Ragged: what a row of a batch has a varying number of, such as its images.

Legend: B rows, N values of all rows together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(eq=False)
class Ragged:
    """Values of B rows, each with its own number of them, one behind the other in one tensor.

    Not frozen: Lightning sets the fields of a copy when it changes the dtype of a batch. A node of torch's pytrees, so that FSDP finds the
    tensors in it. Iterating gives the values of each row.

    Args:
        values: (N, ...), those of row 0 first.
        counts: (B,) int64, how many belong to each row. They stay on the host, whatever device the values are on: cutting rows never
            waits for the device.

    Raises:
        ValueError: for counts that are not the values'.
    """

    values: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        if self.counts.ndim != 1 or self.counts.dtype != torch.int64:
            raise ValueError(
                f"counts are {tuple(self.counts.shape)} {self.counts.dtype}: one whole number for each row, a tensor (B,) of torch.int64"
            )
        if self.values.ndim == 0:
            raise ValueError("values has no dim: dim 0 counts the values of all rows, so give (N, ...)")
        if len(self.counts) and int(self.counts.min()) < 0:
            raise ValueError(f"counts={self.counts.tolist()}: a row has 0 values or more")
        if int(self.counts.sum()) != self.values.shape[0]:
            raise ValueError(
                f"counts sum to {int(self.counts.sum())} and values has {self.values.shape[0]} along dim 0: each value belongs to one row"
            )

    @classmethod
    def of(cls, rows: Sequence[Tensor | None], like: Tensor | None = None) -> Ragged:
        """One tensor (n, ...) for each row; None for a row without any.

        Args:
            rows: of equal dtype and shape but for dim 0.
            like: (any, ...), tells shape and dtype where no row has a tensor.

        Raises:
            ValueError: for rows of different shapes or dtypes, or where nothing tells them.
        """
        given = [row for row in rows if row is not None]
        if not given:
            if like is None:
                raise ValueError(
                    "rows hold no tensor, so nothing tells the shape of a value: give like=, or leave the key out of the batch"
                )
            given = [like[:0]]
        first = given[0]
        for row in given:
            if row.ndim == 0 or row.shape[1:] != first.shape[1:] or row.dtype != first.dtype:
                raise ValueError(
                    f"rows are {tuple(first.shape)} {first.dtype} and {tuple(row.shape)} {row.dtype}: only dim 0 may differ, so resize or "
                    "pad the values to one shape"
                )
        counts = torch.tensor([0 if row is None else row.shape[0] for row in rows], dtype=torch.int64)
        return cls(torch.cat(given), counts)

    @staticmethod
    def cat(parts: Iterable[Ragged]) -> Ragged:
        """The rows of all parts, in their order."""
        parts = list(parts)
        if not parts:
            raise ValueError("cat got no parts: an empty list tells no shape")
        return Ragged(torch.cat([part.values for part in parts]), torch.cat([part.counts for part in parts]))

    def __len__(self) -> int:
        """B."""
        return len(self.counts)

    def __getitem__(self, rows: int | slice) -> Any:
        """The values (n, ...) of one row, or ``Ragged`` of a slice of rows; views, but for a slice with a step."""
        if isinstance(rows, slice):
            first, last, step = rows.indices(len(self))
            if step != 1:
                return self._picked(list(range(first, last, step)))
            begin, end = self._span(first, last)
            return Ragged(self.values[begin:end], self.counts[first:last])
        if not -len(self) <= rows < len(self):
            raise IndexError(f"row {rows} of {len(self)}")
        row = rows % len(self)
        begin, end = self._span(row, row + 1)
        return self.values[begin:end]

    def split_rows(self, sizes: Sequence[int]) -> list[Ragged]:
        """Cuts the rows into parts (views): microbatches, say.

        Args:
            sizes: rows of each part; together B.

        Raises:
            ValueError: for other sizes.
        """
        if sum(sizes) != len(self) or any(size < 0 for size in sizes):
            raise ValueError(f"sizes={list(sizes)} for {len(self)} rows: they are 0 or more, and their sum is the number of rows")
        counts = self.counts.split(list(sizes))
        values = self.values.split([int(part.sum()) for part in counts])
        return [Ragged(*part) for part in zip(values, counts)]

    def to(self, device: torch.device | str, non_blocking: bool | None = None) -> Ragged:
        """The values on a device.

        Args:
            device: for the values.
            non_blocking: as for tensors; None: where they are pinned (Lightning says it for tensors only).
        """
        if non_blocking is None:
            non_blocking = self.values.device.type == "cpu" and torch.device(device).type == "cuda" and self.values.is_pinned()
        return _made(self.values.to(device, non_blocking=non_blocking), self.counts)

    def pin_memory(self) -> Ragged:
        """The values in page-locked memory; ``DataLoader(pin_memory=True)`` calls it."""
        return _made(self.values.pin_memory(), self.counts)

    def __repr__(self) -> str:
        return f"Ragged(values={tuple(self.values.shape)} {self.values.dtype} on {self.values.device}, counts={self.counts.tolist()})"

    def _span(self, first: int, last: int) -> tuple[int, int]:
        begin = int(self.counts[:first].sum())
        return begin, begin + int(self.counts[first:last].sum())

    def _picked(self, rows: list[int]) -> Ragged:
        return Ragged.of([self[row] for row in rows], like=self.values)


def _made(values: Any, counts: Any) -> Ragged:
    """Without looking at the fields: pytrees put any objects there, and counts on a device would be waited for."""
    made = object.__new__(Ragged)
    made.values, made.counts = values, counts
    return made


def _parts(ragged: Ragged) -> tuple[list[Any], None]:
    return [ragged.values, ragged.counts], None


def _keyed_parts(ragged: Ragged) -> tuple[list[tuple[pytree.KeyEntry, Any]], None]:
    return [(pytree.GetAttrKey("values"), ragged.values), (pytree.GetAttrKey("counts"), ragged.counts)], None


pytree.register_pytree_node(
    Ragged,
    _parts,
    lambda parts, _: _made(*parts),
    serialized_type_name="lightning_megascale.data.ragged.Ragged",
    flatten_with_keys_fn=_keyed_parts,
)
