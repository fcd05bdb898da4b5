"""``megascale data index``: builds the indexes of shards, and token counts, in parallel; ``write``: makes shards."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_megascale.cli.arguments import many, size
from lightning_megascale.cli.data_sets import ShardSet, find_own_code
from lightning_megascale.cli.data_work import bar, each
from lightning_megascale.cli.errors import UserError
from lightning_megascale.data.encode import PICTURES, EncodeContext
from lightning_megascale.data.image_text import ImageTextDataModule
from lightning_megascale.data.index import ShardError
from lightning_megascale.data.mixture import MixtureDataModule
from lightning_megascale.data.mixture_stream import Pieces
from lightning_megascale.data.samples import ShardedSource, default_fields
from lightning_megascale.data.storage import ShardStore
from lightning_megascale.data.write import Pixels, write_samples

_COUNTING = {
    name: parameter.default
    for name, parameter in inspect.signature(ImageTextDataModule).parameters.items()
    if name in ("sequence_length", "image_size", "image_patch", "image_merge", "image_extra", "image_token")
}


@dataclass(frozen=True)
class Job:
    """A shard of a set, and how its tokens are counted: the arguments of the data module."""

    url: str
    source: Mapping[str, Any]
    options: Mapping[str, Any]
    pictures: bool


@dataclass
class Counted:
    """What a shard holds; ``lengths`` are its samples' tokens (samples,), 0 for bad ones."""

    samples: int = 0
    bytes: int = 0
    fields: tuple[str, ...] = ()
    notes: int = 0
    lengths: np.ndarray | None = None
    damage: str | None = None


def index(console: Console, sets: Sequence[ShardSet], options: Mapping[str, Any], processes: int | None) -> int:
    """Builds what indexes and token counts are missing, and prints what each set holds.

    Args:
        options: arguments of the data module; with ``tokenizer``, tokens are counted.

    Returns:
        0, or 1 when a shard is damaged.
    """
    counted = count(sets, options, processes)
    table = Table()
    titles = ["shards of", "shards", "samples", "size", "fields"] + ["tokens", "longest", "bad"] * ("tokenizer" in options)
    for title in titles:
        table.add_column(title, overflow="fold", justify="left" if title in ("shards of", "fields") else "right")
    for shards, found in counted:
        fields = sorted({name for one in found for name in one.fields})
        total = [sum(one.samples for one in found), sum(one.bytes for one in found)]
        cells = [shards.name, f"{len(found):,}", f"{total[0]:,}", size(total[1]), " ".join(fields)]
        lengths = tokens_of(found)
        if lengths is not None:
            cells += [f"{int(lengths.sum()):,}", f"{int(lengths.max(initial=0)):,}", f"{int((lengths == 0).sum()):,}"]
        table.add_row(*map(Text, cells))
    console.print(table)
    if "tokenizer" in options:
        console.print(how_counted(options), highlight=False, markup=False, soft_wrap=True)
    damaged = [one.damage for _, found in counted for one in found if one.damage]
    for damage in damaged:
        console.print(damage, highlight=False, markup=False, soft_wrap=True)
    odd = sum(one.notes for _, found in counted for one in found)
    if odd:
        console.print(f"{many(odd, 'member')} skipped or with odd names: megascale data lint lists them", highlight=False)
    return 1 if damaged else 0


def how_counted(options: Mapping[str, Any]) -> str:
    """The arguments that decide a sample's tokens: a run of others counts again."""
    given = {name: options.get(name, default) for name, default in _COUNTING.items()}
    return f"tokens as counted with {', '.join(f'{name}={value}' for name, value in given.items())} (pictures' only where there are some)"


def tokens_of(found: Sequence[Counted]) -> np.ndarray | None:
    """Tokens of all samples, (samples,); None when they were not counted."""
    lengths = [one.lengths for one in found if one.lengths is not None]
    return np.concatenate(lengths) if lengths else None


def count(sets: Sequence[ShardSet], options: Mapping[str, Any], processes: int | None) -> list[tuple[ShardSet, list[Counted]]]:
    """What every shard of every set holds; indexes and token counts are built where they are missing.

    Raises:
        ValueError: when no field of a set is a text by a usual name.
    """
    cache_dir = options.get("cache_dir")
    plain = [Job(url, {}, {"cache_dir": cache_dir}, False) for shards in sets for url in shards.urls]
    found = iter(each(open_shard, plain, processes, "indexing"))
    counted = [(shards, [next(found) for _ in shards.urls]) for shards in sets]
    if "tokenizer" not in options:
        return counted
    jobs, places = [], []
    for shards, ready in counted:
        good = {url: one for url, one in zip(shards.urls, ready) if not one.damage}
        if not good:
            continue
        fields = (
            shards.fields
            if shards.fields is not None
            else default_fields(sorted({name for index in good.values() for name in index.fields}))
        )
        witnesses = {name: url for url, one in reversed(good.items()) for name in one.fields}  # a field may be in some shards only
        source = {**shards.source(), "fields": dict(fields)}
        pictures = "image_size" in options or bool(set(fields) & set(PICTURES))
        for url, one in good.items():
            jobs.append(Job(url, {**source, "urls": sorted({url, *witnesses.values()})}, options, pictures))
            places.append(one)
    for one, lengths in zip(places, each(count_shard, jobs, processes, "counting tokens")):
        one.lengths = lengths
    return counted


def open_shard(job: Job) -> Counted:
    """Opens the shard's index, which builds it when it is missing."""
    try:
        found = ShardStore(job.options["cache_dir"]).index(job.url)
    except ShardError as error:
        return Counted(damage=str(error))
    return Counted(found.samples, found.shard_bytes, found.fields, found.noted)


def count_shard(job: Job) -> np.ndarray:
    """Tokens (samples,) of a shard, kept beside its index as a run of these arguments would keep them."""
    source = sharded(opened(job.source, job.options, job.pictures))
    return source.shard_lengths(source.urls.index(job.url))


def opened(source: Mapping[str, Any], options: Mapping[str, Any], pictures: bool) -> Any:
    """The only source of a data module, as it reads it."""
    find_own_code()
    kind = ImageTextDataModule if pictures else MixtureDataModule
    given = {**options, "tokenizer": _tokenizer(options["tokenizer"]), "rows": "padded"}
    module = kind({"one": source}, **given)
    module.setup()
    assert module.train_stream is not None
    return module.train_stream.sources[0]


def sharded(source: Any) -> ShardedSource:
    """The documents of a source that may be cut in pieces."""
    return source.source if isinstance(source, Pieces) else source


@lru_cache(maxsize=1)
def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def write(
    console: Console,
    source: str,
    out: str,
    options: Mapping[str, Any],
    *,
    per_shard: int,
    preprocessed: bool,
    pixels: Pixels,
    prefix: str,
    image_folder: str | None,
    threads: int,
) -> int:
    """Makes shards of a folder or a LLaVA-style file, and says what was left out.

    Raises:
        ValueError: as ``write_samples``.
    """
    context = _context(options) if preprocessed else None
    with bar("samples") as progress:
        task = progress.add_task("writing", total=None)
        written = write_samples(
            source,
            out,
            image_folder=image_folder,
            samples_per_shard=per_shard,
            preprocessed=preprocessed,
            context=context,
            pixels=pixels,
            prefix=prefix,
            threads=threads,
            progress=lambda done: progress.update(task, completed=done),
        )
    total = sum(shard.stat().st_size for shard in written.shards)
    console.print(
        f"{many(written.samples, 'sample')} in {many(len(written.shards), 'shard')}, {size(total)}: {out}", highlight=False, markup=False
    )
    left_out = [(key, f"the file {name} is missing") for key, name in written.missing] + written.bad
    for key, reason in left_out[:10]:
        console.print(f"left out {key}: {reason}", highlight=False, markup=False, soft_wrap=True)
    if left_out:
        console.print(f"{many(len(left_out), 'sample')} left out; {Path(out) / prefix}.json lists them", highlight=False, markup=False)
    return 0


def _context(options: Mapping[str, Any]) -> EncodeContext:
    """What the data module of these arguments encodes with.

    Raises:
        UserError: without a tokenizer.
    """
    if "tokenizer" not in options:
        raise UserError("data write preprocessed=true tokenizes now: add tokenizer=FOLDER (and image_size=336 when there are pictures)")
    kind = ImageTextDataModule if any(key.startswith("image_") for key in options) else MixtureDataModule
    return kind({"one": "none"}, **options).context()
