"""``megascale data stats`` of shards: how many samples, how large, how many tokens, pictures of which sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_megascale.cli.arguments import many, size
from lightning_megascale.cli.data_index import Counted, count, how_counted, tokens_of
from lightning_megascale.cli.data_sets import ShardSet
from lightning_megascale.cli.data_work import each
from lightning_megascale.data.source_config import DEFAULT_FIELDS
from lightning_megascale.data.storage import ShardStore

_TEXTS = set(f"{DEFAULT_FIELDS['text']};{DEFAULT_FIELDS['conversation']}".split(";"))
_BAR = 40  # characters


@dataclass
class Measured:
    """What the index of one or more shards says: bytes of each field's members (n,), and pictures' (height, width), (n, 2)."""

    fields: dict[str, np.ndarray] = field(default_factory=dict)
    pictures: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))


def stats_of_shards(console: Console, sets: Sequence[ShardSet], options: Mapping[str, Any], processes: int | None, out: str | None) -> int:
    """Prints, and draws, what each set holds."""
    counted = count(sets, options, processes)
    jobs = [(url, options.get("cache_dir")) for shards, found in counted for url, one in zip(shards.urls, found) if not one.damage]
    parts = iter(each(measure, jobs, processes, "measuring"))
    drawn: list[tuple[str, str, np.ndarray, np.ndarray]] = []
    damaged = [one.damage for _, found in counted for one in found if one.damage]
    for shards, found in counted:
        measured = _joined([next(parts) for one in found if not one.damage])
        what, lengths = lengths_of(found, measured)
        _show(console, shards, found, measured, what, lengths)
        drawn.append((shards.name, what, lengths, measured.pictures))
    if "tokenizer" in options:
        console.print(how_counted(options), highlight=False, markup=False, soft_wrap=True)
    for damage in damaged:
        console.print(damage, highlight=False, markup=False, soft_wrap=True)
    if out is not None:
        from lightning_megascale.cli.data_plots import save_shards

        console.print(save_shards(drawn, out), highlight=False, markup=False, soft_wrap=True)
    return 1 if damaged else 0


def measure(job: tuple[str, str | None]) -> Measured:
    """Sizes in a shard, from its index."""
    index = ShardStore(job[1]).index(job[0])
    pictures = []
    for name in (name for name in index.fields if name.rpartition(".")[2] in ("jpg", "jpeg", "png")):
        pictures += [found for row in range(index.samples) if (found := index.image_size(row, name)) is not None]
    sizes = {name: index.sizes(name) for name in index.fields}
    return Measured({name: found[found >= 0] for name, found in sizes.items()}, np.array(pictures, np.int64).reshape(-1, 2))


def _joined(parts: Sequence[Measured]) -> Measured:
    names = sorted({name for part in parts for name in part.fields})
    fields = {name: np.concatenate([part.fields[name] for part in parts if name in part.fields]) for name in names}
    return Measured(fields, np.concatenate([part.pictures for part in parts]) if parts else Measured().pictures)


def lengths_of(found: Sequence[Counted], measured: Measured) -> tuple[str, np.ndarray]:
    """Lengths of samples and in what: tokens where they were counted (bad ones left out), else bytes of text."""
    tokens = tokens_of(found)
    if tokens is not None:
        return "tokens", tokens[tokens > 0]
    texts = [sizes for name, sizes in measured.fields.items() if name in _TEXTS]
    return "bytes of text", np.concatenate(texts) if texts else np.empty(0, np.int64)


def _show(console: Console, shards: ShardSet, found: Sequence[Counted], measured: Measured, what: str, lengths: np.ndarray) -> None:
    good = [one for one in found if not one.damage]
    samples, read = sum(one.samples for one in good), sum(one.bytes for one in good)
    least, most = (min((one.samples for one in good), default=0), max((one.samples for one in good), default=0))
    console.print(Text(shards.name, style="bold"))
    each_has = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    console.print(f"{many(len(good), 'shard')} of {each_has} samples, {samples:,} in all, {size(read)}", highlight=False)
    tokens = tokens_of(found)
    if tokens is not None and (bad := int((tokens == 0).sum())):
        console.print(f"{many(bad, 'bad sample')}: megascale data lint says why", highlight=False)
    table = _table("field", "samples", "mean", "largest", "together")
    for name, sizes in measured.fields.items():
        together = int(sizes.sum())
        table.add_row(Text(name), f"{len(sizes):,}", size(sizes.mean()), size(int(sizes.max())), size(together))
    console.print(table)
    heights, widths = measured.pictures.T
    rows = {what: lengths, "picture height": heights, "picture width": widths}
    table = _table("", "least", "5 %", "median", "mean", "95 %", "most", "sum")
    for name, values in rows.items():
        if len(values):
            low, middle, high = np.quantile(values, (0.05, 0.5, 0.95))
            total = f"{int(values.sum()):,}" if values is lengths else ""
            table.add_row(name, *(f"{value:,.0f}" for value in (values.min(), low, middle, values.mean(), high, values.max())), total)
    if table.row_count:
        console.print(table)
    _histogram(console, what, lengths)


def _table(*titles: str) -> Table:
    table = Table()
    for number, title in enumerate(titles):
        table.add_column(title, overflow="fold", justify="right" if number else "left")
    return table


def edges_of(lengths: np.ndarray, most: int = 16) -> np.ndarray:
    """Borders of a histogram's classes: round numbers, evenly spaced where lengths are alike, else doubling."""
    low, high = int(lengths.min()), int(lengths.max())
    if high >= 16 * max(low, 1):
        return 2 ** np.arange(int(np.log2(max(low, 1))), int(np.log2(max(high, 1))) + 2)
    step = next(s * 10**p for p in range(12) for s in (1, 2, 5) if (high - low) // (s * 10**p) < most)
    return np.arange(low // step * step, high + step + 1, step)


def _histogram(console: Console, what: str, lengths: np.ndarray) -> None:
    if not len(lengths):
        return
    edges = edges_of(lengths)
    counts, _ = np.histogram(lengths, edges)
    table = _table(what, "samples", "")
    table.columns[2].justify = "left"
    for low, high, number in zip(edges.tolist(), edges[1:].tolist(), counts.tolist()):
        filled = "█" * -(-number * _BAR // int(counts.max()))
        table.add_row(f"{low:,} to {high - 1:,}" if high > low + 1 else f"{low:,}", f"{number:,}", filled)
    console.print(table)
