"""``megascale data preview``: takes samples and packed rows as a run sees them and hands them to the HTML or PNG renderer."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console

from lightning_megascale.cli.arguments import many
from lightning_megascale.cli.data_sets import Mix, ShardSet, make_module
from lightning_megascale.data import images
from lightning_megascale.data.conversation import IGNORED
from lightning_megascale.data.mixture import MixtureDataModule
from lightning_megascale.data.mixture_stream import PackedStream, Pieces
from lightning_megascale.data.quarantine import BadSample
from lightning_megascale.data.samples import ShardedSource
from lightning_megascale.data.shuffle import permutation
from lightning_megascale.data.source_config import SourceConfig
from lightning_megascale.data.storage import ShardStore
from lightning_megascale.data.stored import read_npy
from lightning_megascale.data.turns import read_turns, to_messages, utf8

TOKENS_SHOWN = 1200  # of a sample, or of a document in a row
CHARACTERS_SHOWN = 3000
_PICTURE = 480  # pixels of the longer edge
_WINDOW = 256  # samples packed together where no mix says how many


@dataclass
class Span:
    """A stretch of text: "label" (a loss counts it), "plain", "image" (a picture's tokens), or "role" (who speaks)."""

    text: str
    kind: str


@dataclass
class Card:
    """A sample: what it is called, its pictures, those as the model sees them, its text; or why it is bad."""

    title: str
    detail: str
    pictures: list[Image.Image] = field(default_factory=list)
    seen: list[Image.Image] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    problem: str | None = None


@dataclass
class Row:
    """A row of a batch: its documents' keys, sizes in tokens and text, and the padding behind them."""

    title: str
    keys: list[str]
    sizes: list[int]
    documents: list[list[Span]]
    padding: int


@dataclass
class Page:
    """All that is drawn."""

    title: str
    notes: list[str]
    cards: list[Card]
    rows: list[Row]


def preview(console: Console, mix: Mix, out: str, count: int, rows: int, position: int) -> int:
    """Writes the picture of ``count`` samples and ``rows`` rows from a position of the run on."""
    page = _encoded_page(mix, count, rows, position) if mix.options.get("tokenizer") is not None else _plain_page(mix, count)
    path = Path(out).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".png":
        from lightning_megascale.cli.data_png import draw

        draw(page).save(path)
    else:
        from lightning_megascale.cli.data_html import render

        path.write_text(render(page), encoding="utf-8")
    shown = many(len(page.cards), "sample") + (f" and {many(len(page.rows), 'row')}" if page.rows else "")
    console.print(f"{shown}: {path}", highlight=False, markup=False, soft_wrap=True)
    return 0


def mix_to_preview(sets: Sequence[ShardSet], options: Mapping[str, Any]) -> Mix:
    """Sets of shards as a mix; rows are packed from few samples at a time, so that little is counted and small sets do not repeat."""
    sources = {shards.name: shards.source() for shards in sets}
    if "tokenizer" not in options:
        return Mix(sources, None, options)
    store = ShardStore(options.get("cache_dir"))
    samples = sum(index.samples for shards in sets for index in store.indexes(shards.urls))
    return Mix(sources, None, {"packing_window": min(samples, _WINDOW), **options})


def _plain_page(mix: Mix, count: int) -> Page:
    """Samples in a mixed order, as texts."""
    store = ShardStore(mix.options.get("cache_dir"))
    sources = [ShardedSource(name, _config(name, written), store) for name, written in mix.sources.items()]
    ends = np.cumsum([len(source) for source in sources])
    cards = []
    for place in permutation(int(ends[-1]), 0)[:count].tolist():
        number = int(np.searchsorted(ends, place, side="right"))
        source, inside = sources[number], place - (int(ends[number - 1]) if number else 0)
        shards = np.cumsum(source.sizes)
        shard = int(np.searchsorted(shards, inside, side="right"))
        row = inside - (int(shards[shard - 1]) if shard else 0)
        card = Card(source.key(shard, row), f"{source.shards[shard]}, row {row:,}")
        try:
            sample = source.read(shard, row)
            card.spans = [Span(text[:CHARACTERS_SHOWN], kind) for text, kind in _texts(sample)]
            card.pictures = _pictures(sample)
        except BadSample as error:
            card.problem = str(error)
        cards.append(card)
    notes = [f"{len(cards)} of {int(ends[-1]):,} samples, drawn at random; with tokenizer=FOLDER labels and packed rows are shown"]
    return Page(", ".join(mix.sources), notes, cards, [])


def _config(name: str, written: Any) -> SourceConfig:
    from lightning_megascale.data.mixture_config import source_config

    return source_config(name, written)


def _texts(sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A sample's text without a tokenizer, and what each part is."""
    if "text" in sample:
        return [(utf8(sample["text"]), "plain")]
    if "conversation" in sample:
        parts: list[tuple[str, str]] = []
        for message in to_messages(read_turns(sample["conversation"])):
            parts += [(f"{message['role']}: ", "role"), (message["content"] + "\n", "plain")]
        return parts
    if "tokens" in sample:
        return [(f"{len(read_npy(sample['tokens'])):,} tokens", "plain")]
    return [(f"{name}: {len(data):,} bytes", "plain") for name, data in sample.items() if isinstance(data, bytes)]


def _pictures(sample: Mapping[str, Any]) -> list[Image.Image]:
    if "pixels" in sample:
        return [Image.fromarray(picture.transpose(1, 2, 0)) for picture in read_npy(sample["pixels"])]
    files = [sample["image"]] if "image" in sample else sample.get("images", [])
    found = [Image.fromarray(images.decode(data)) for data in files]
    for picture in found:
        picture.thumbnail((_PICTURE, _PICTURE))
    return found


def _encoded_page(mix: Mix, count: int, rows: int, position: int) -> Page:
    """Samples and rows of the run that this mix makes, from a position on."""
    module = make_module(mix)
    stream = module.train_stream
    assert stream is not None
    total = module.schedule.total
    end = position + count if total is None else min(position + count, total)
    cards = [_card(module, at) for at in range(min(position, end), end)]
    made = _rows(module, position, rows) if rows else []
    notes = [
        f"positions {position:,} to {end - 1:,} of the run"
        + ("" if total is None else f" of {total:,}")
        + f", sequence_length {module.sequence_length:,}, rows {module.rows}"
        + (f"; rows from the start of the window that holds position {position:,}" if made and module.packer is not None else "")
    ]
    return Page(", ".join(mix.sources), notes, cards, made)


def _card(module: MixtureDataModule, position: int) -> Card:
    stream = module.train_stream
    assert stream is not None
    stage, number, draw = module.schedule.at(position)
    source, row = stream.sources[number], module.orders[number].at(draw)
    inner = source.source if isinstance(source, Pieces) else source
    assert isinstance(inner, ShardedSource)
    where = f"{source.name} · {source.shards[row.shard]}" if len(stream.sources) > 1 else source.shards[row.shard]
    card = Card(source.key(row.shard, row.row), where)
    if len(module.schedule.stages) > 1:
        card.detail = f"{module.schedule.stages[stage].name} · {card.detail}"
    try:
        if inner is source:
            card.pictures = _pictures(inner.read(row.shard, row.row))
        sample = source.load(row.shard, row.row)
    except BadSample as error:
        card.problem = str(error)
        return card
    ids, labels = sample["input_ids"].numpy(), sample["labels"].numpy()
    card.detail += f" · {len(ids):,} tokens, {int((labels != IGNORED).sum()):,} labelled"
    card.spans = spans(ids, labels, module)
    card.seen = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in sample.get("pixel_values", [])]
    return card


def spans(ids: np.ndarray, labels: np.ndarray, module: MixtureDataModule) -> list[Span]:
    """Tokens as text in stretches that are labelled or not, pictures as one stretch each.

    Args:
        ids, labels: (T,) int64.
        module: whose tokenizer and rule for pictures are used.
    """
    context = module.context()
    cut, left_out = ids[:TOKENS_SHOWN], len(ids) - TOKENS_SHOWN
    is_image = cut == (-1 if context.image_token_id is None else context.image_token_id)
    kinds = np.where(is_image, 2, (labels[:TOKENS_SHOWN] != IGNORED).astype(np.int64))
    borders = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(cut)]
    found: list[Span] = []
    for first, last in zip(borders, borders[1:]):
        if kinds[first] == 2:
            each = max(context.image_tokens, 1)
            found += [Span(f"image of {min(each, last - at):,} tokens", "image") for at in range(first, last, each)]
        else:
            text = module.tokenizer.decode(cut[first:last].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            found.append(Span(text, "label" if kinds[first] else "plain"))
    return found + ([Span(f" … {left_out:,} more tokens", "role")] if left_out > 0 else [])


def _rows(module: MixtureDataModule, position: int, count: int) -> list[Row]:
    """The rows that hold a position of the run, and those behind it, as the loader makes them."""
    stream, packer = module.train_stream, module.packer
    assert stream is not None
    if packer is None:
        items: list[Any] = [stream[at] for at in module.take(position, count)]
    else:
        states = packer.take(packer.window_at(position) << 20, count)[0]
        items = [PackedStream(stream, packer)[state] for state in states]
    collate = module.train_dataloader().collate
    assert collate is not None
    batch = collate(items) if items else {"input_ids": []}
    return [_row(module, batch, number) for number in range(len(batch["input_ids"]))]


def _row(module: MixtureDataModule, batch: Mapping[str, Any], number: int) -> Row:
    ids, labels = batch["input_ids"][number].numpy(), batch["labels"][number].numpy()
    documents = batch["document_ids"][number].numpy() if "document_ids" in batch else batch["attention_mask"][number].numpy() - 1
    places = [np.flatnonzero(documents == document) for document in range(int(documents.max()) + 1)]
    padding, labelled = int((documents < 0).sum()), int((labels != IGNORED).sum())
    many = "1 document" if len(places) == 1 else f"{len(places)} documents"
    title = f"Row {number}: {many}, {labelled:,} of {len(ids):,} tokens labelled, {padding / len(ids):.1%} padding"
    texts = [spans(ids[place], labels[place], module) for place in places]
    return Row(title, batch["__key__"][number], [len(place) for place in places], texts, padding)


def as_jpeg(picture: Image.Image) -> bytes:
    """The bytes of a picture for a page."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=88)
    return buffer.getvalue()
