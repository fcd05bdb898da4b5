"""Tensors made of stored ones: stacked, joined, cut and swapped views that read only the pieces they are asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_megascale.strategies.checkpoint.safetensors_folder import Bounds

Read = Callable[[str, Bounds, Tensor], None]


class View(ABC):
    """A tensor made of stored ones.

    Args:
        shape: of the whole.
    """

    shape: tuple[int, ...]

    @abstractmethod
    def read(self, bounds: Bounds, out: Tensor, read: Read) -> None:
        """Copies a rectangle into ``out`` (of its shape), with ``read(name, bounds, out)`` for the stored tensors."""

    @abstractmethod
    def names(self) -> list[str]:
        """The stored tensors it is made of."""

    @property
    def whole(self) -> Bounds:
        return tuple((0, length) for length in self.shape)


@dataclass(frozen=True)
class Stored(View):
    """A stored tensor as it is."""

    name: str
    shape: tuple[int, ...]

    def read(self, bounds: Bounds, out: Tensor, read: Read) -> None:
        read(self.name, bounds, out)

    def names(self) -> list[str]:
        return [self.name]


class Stacked(View):
    """Equal tensors along a new dim."""

    def __init__(self, parts: Sequence[View], dim: int) -> None:
        _same(parts, None)
        self.parts, self.dim = list(parts), dim
        self.shape = (*parts[0].shape[:dim], len(parts), *parts[0].shape[dim:])

    def read(self, bounds: Bounds, out: Tensor, read: Read) -> None:
        start, stop = bounds[self.dim]
        inner = (*bounds[: self.dim], *bounds[self.dim + 1 :])
        for index in range(start, stop):
            self.parts[index].read(inner, out.select(self.dim, index - start), read)

    def names(self) -> list[str]:
        return [name for part in self.parts for name in part.names()]


class Joined(View):
    """Tensors one after the other along a dim."""

    def __init__(self, parts: Sequence[View], dim: int) -> None:
        _same(parts, dim)
        self.parts, self.dim = list(parts), dim
        length = sum(part.shape[dim] for part in parts)
        self.shape = (*parts[0].shape[:dim], length, *parts[0].shape[dim + 1 :])

    def read(self, bounds: Bounds, out: Tensor, read: Read) -> None:
        start, stop = bounds[self.dim]
        begin = 0
        for part in self.parts:
            low, high = max(start - begin, 0), min(stop - begin, part.shape[self.dim])
            if low < high:
                box = (*bounds[: self.dim], (low, high), *bounds[self.dim + 1 :])
                part.read(box, out.narrow(self.dim, begin + low - start, high - low), read)
            begin += part.shape[self.dim]

    def names(self) -> list[str]:
        return [name for part in self.parts for name in part.names()]


class Part(View):
    """A range of a tensor along a dim; ``squeeze``: the dim, then of length 1, is dropped."""

    def __init__(self, of: View, dim: int, start: int, length: int, squeeze: bool = False) -> None:
        self.of, self.dim, self.start, self.squeeze = of, dim, start, squeeze
        middle = () if squeeze else (length,)
        self.shape = (*of.shape[:dim], *middle, *of.shape[dim + 1 :])

    def read(self, bounds: Bounds, out: Tensor, read: Read) -> None:
        low, high = (0, 1) if self.squeeze else bounds[self.dim]
        rest = bounds[self.dim :] if self.squeeze else bounds[self.dim + 1 :]
        box = (*bounds[: self.dim], (self.start + low, self.start + high), *rest)
        self.of.read(box, out.unsqueeze(self.dim) if self.squeeze else out, read)

    def names(self) -> list[str]:
        return self.of.names()


class Swapped(View):
    """A tensor with two dims swapped."""

    def __init__(self, of: View, one: int, other: int) -> None:
        self.of, self.dims = of, (one, other)
        self.shape = self._swap(of.shape)

    def _swap(self, values: Sequence[Any]) -> tuple[Any, ...]:
        swapped = list(values)
        one, other = self.dims
        swapped[one], swapped[other] = swapped[other], swapped[one]
        return tuple(swapped)

    def read(self, bounds: Bounds, out: Tensor, read: Read) -> None:
        self.of.read(self._swap(bounds), out.transpose(*self.dims), read)

    def names(self) -> list[str]:
        return self.of.names()


def _same(parts: Sequence[View], but: int | None) -> None:
    """All parts have one shape, ``but`` for a dim."""
    first = parts[0]
    for part in parts:
        if len(part.shape) != len(first.shape) or any(a != b for dim, (a, b) in enumerate(zip(part.shape, first.shape)) if dim != but):
            raise ValueError(
                f"{first.names()[0]} {tuple(first.shape)} and {part.names()[0]} {tuple(part.shape)} become one tensor, and their shapes "
                "differ: tensors are missing, or the folder holds parts of two models"
            )
