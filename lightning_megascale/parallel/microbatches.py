"""A batch as microbatches of equal rows, and what a step gave for each of them as one result again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_megascale.data.ragged import Ragged


def split_rows(batch: Any, rows: int, parts: int) -> list[Any]:
    """Cuts a batch into parts of equal rows; what has no rows goes to every part.

    Args:
        batch: a nest of mappings, sequences and dataclasses. Tensors and arrays whose dim 0 has ``rows`` entries are cut (views, no
            copies), and so are lists and tuples of as many strings or numbers; named tuples are taken entry by entry; 0-dim tensors,
            strings and numbers are repeated.
        rows: of the batch.
        parts: a divisor of ``rows``.

    Raises:
        ValueError: for a tensor with another number of rows: nothing tells which part it belongs to.
    """
    return [_part(batch, rows, rows // parts, number, "batch") for number in range(parts)]


def first_rows(batch: Any, rows: int, count: int) -> Any:
    """The first ``count`` rows of a batch, cut as ``split_rows`` cuts."""
    return _part(batch, rows, count, 0, "batch")


def _part(value: Any, rows: int, size: int, number: int, name: str) -> Any:
    begin = number * size

    def cut(path: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return value[begin : begin + size] if len(value) == rows else value
        if not isinstance(value, Ragged) and value.ndim == 0:
            return value
        if len(value) != rows:
            raise ValueError(
                f"{path} has {len(value)} rows and the batch {rows}, so it cannot be cut into microbatches: give each tensor one row "
                "for each sample, or make it a 0-dim tensor"
            )
        return value[begin : begin + size]

    return map_batch(value, cut, name)


def map_batch(value: Any, function: Callable[[str, Any], Any], name: str = "batch") -> Any:
    """A batch of the same kinds with other leaves.

    Args:
        value: a nest of mappings, sequences and dataclasses.
        function: (path such as ``batch['labels']``, leaf) -> leaf; leaves are tensors, arrays, and lists and tuples that hold neither
            tensors nor containers. Anything else stays.
        name: path of ``value``.
    """
    if isinstance(value, (Tensor, np.ndarray, Ragged)):
        return function(name, value)
    if isinstance(value, Mapping):
        return _like(value, {key: map_batch(item, function, f"{name}[{key!r}]") for key, item in value.items()})
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: map_batch(getattr(value, f.name), function, f"{name}.{f.name}") for f in fields(value) if f.init}
        return replace(value, **changed)
    if isinstance(value, (list, tuple)):
        named = hasattr(value, "_fields")
        if not named and not any(isinstance(item, (Tensor, Mapping, list, tuple)) and not _is_strings(item) for item in value):
            return function(name, value)
        items = [map_batch(item, function, f"{name}[{place}]") for place, item in enumerate(value)]
        return type(value)(*items) if named else type(value)(items)
    return value


def _is_strings(value: Any) -> bool:
    """The samples that share a row, by their keys."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _like(mapping: Mapping[Any, Any], pairs: dict[Any, Any]) -> Any:
    """A mapping of the same kind with other values; a copy, for constructors (of a defaultdict, say) take other things."""
    if not isinstance(mapping, MutableMapping):
        return pairs
    made = copy.copy(mapping)
    for key, value in pairs.items():
        made[key] = value
    return made


def merge_results(results: Sequence[Any], weights: Sequence[float], rows: int | None = None) -> Any:
    """What a step returned for each microbatch, as it would have been for the whole batch.

    Args:
        results: alike in structure. 0-dim floating tensors become their weighted mean, other tensors are joined along dim 0, mappings and
            tuples are merged entry by entry, and so are lists of tensors; other lists, with an entry for each row, are joined; anything
            else must be equal, or a list of all values is given.
        weights: what each microbatch counts.
        rows: of a microbatch: a number that is it becomes the sum.
    """
    first = results[0]
    if isinstance(first, Tensor):
        if first.ndim:
            return torch.cat(list(results))
        return weighted_mean(list(results), weights) if first.is_floating_point() else torch.stack(list(results)).sum()
    if isinstance(first, Mapping):
        pairs = {key: merge_results([result[key] for result in results], weights, rows) for key in first}
        return _like(first, pairs)
    if is_dataclass(first) and not isinstance(first, type):
        names = [f.name for f in fields(first) if f.init]
        return replace(first, **{name: merge_results([getattr(result, name) for result in results], weights, rows) for name in names})
    if isinstance(first, tuple):
        items = [merge_results(group, weights, rows) for group in zip(*results)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    if isinstance(first, list):
        whole = all(isinstance(item, Tensor) and (item.ndim == 0 or item.shape[0] == rows) for item in first)
        if first and whole and (len(first) != rows or first[0].ndim) and all(len(result) == len(first) for result in results):
            return [merge_results(group, weights, rows) for group in zip(*results)]
        return [item for result in results for item in result]
    if rows is not None and isinstance(first, int) and not isinstance(first, bool) and all(result == rows for result in results):
        return sum(results)
    return first if all(result == first for result in results) else list(results)


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Mean of 0-dim tensors; what counts nothing adds nothing, whatever its value (a mean over nothing is NaN)."""
    total = sum(weights)
    if not total:
        return torch.stack(list(values)).mean()
    dtype = values[0].dtype
    return torch.stack([value.double() * weight for value, weight in zip(values, weights) if weight]).sum().div(total).to(dtype)
