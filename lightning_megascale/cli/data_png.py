"""A preview as one PNG, drawn with Pillow and the font that comes with matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from lightning_megascale.cli.data_html import COLORS, LEGEND
from lightning_megascale.cli.data_preview import Card, Page, Row, Span

WIDTH, MARGIN, GAP, COLUMNS = 1500, 24, 16, 3
CARD_LINES, DOCUMENT_LINES, ROW_DOCUMENTS = 14, 4, 12
_LINE = 20
_INK = {
    "label": "#00662b",
    "plain": "#505050",
    "image": "#224477",
    "role": "#8080a0",
    "title": "#202020",
    "detail": "#666677",
    "problem": "#b01010",
}
_PAPER = {"label": "#c9efcf", "image": "#d5e3f7"}
_PIECES = re.compile(r"\n|\s+|[^\s]+")


def draw(page: Page) -> Image.Image:
    """The whole picture."""
    cards = [_card(card, (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) // COLUMNS) for card in page.cards]
    lines = [cards[start : start + COLUMNS] for start in range(0, len(cards), COLUMNS)]
    rows = [_row(row, WIDTH - 2 * MARGIN) for row in page.rows]
    blocks: list[list[Image.Image]] = [[_head(page)], *lines, *([row] for row in rows)]
    heights = [max(block.height for block in line) for line in blocks]
    sheet = Image.new("RGB", (WIDTH, 2 * MARGIN + sum(heights) + GAP * (len(blocks) - 1)), "#f5f6f8")
    top = MARGIN
    for line, height in zip(blocks, heights):
        left = MARGIN
        for block in line:
            sheet.paste(block, (left, top))
            left += block.width + GAP
        top += height + GAP
    return sheet


@lru_cache(maxsize=8)
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)


class _Sheet:
    """A white card that grows as it is written on."""

    def __init__(self, width: int, paper: str = "#ffffff") -> None:
        self.width, self.top, self.pad = width, 12, 12
        self.image = Image.new("RGB", (width, 4000), paper)
        self.pen = ImageDraw.Draw(self.image)

    def heading(self, text: str, kind: str, size: int, bold: bool = False) -> None:
        font = _font(size, bold)
        self.pen.text((self.pad, self.top), _fitting(text, font, self.width - 2 * self.pad), _INK[kind], font)
        self.top += size + 8

    def write(self, spans: Sequence[Span], limit: int, left: int = 0) -> None:
        """Text in lines, at most ``limit`` of them; what is left out shows as an ellipsis."""
        font, start, x, lines = _font(13), self.pad + left, self.pad + left, 1
        while spans and (last := spans[-1].text.rstrip("\n")) != spans[-1].text:  # a last line of nothing takes room
            spans = [*spans[:-1], *([Span(last, spans[-1].kind)] if last else [])]
        for span in spans:
            for piece in _PIECES.findall(span.text):
                for part in _cut(piece, font, self.width - self.pad - start):
                    length = int(font.getlength(part)) if part != "\n" else 0
                    if part == "\n" or x + length > self.width - self.pad:
                        if lines == limit:
                            self.pen.text((min(x, self.width - self.pad - 14), self.top), "…", _INK["detail"], font)
                            self.top += _LINE
                            return
                        x, lines, self.top = start, lines + 1, self.top + _LINE
                        if part.isspace():
                            continue
                    if span.kind in _PAPER:
                        self.pen.rectangle((x, self.top - 1, x + length - 1, self.top + _LINE - 4), fill=_PAPER[span.kind])
                    self.pen.text((x, self.top), part, _INK[span.kind], font)
                    x += length
        self.top += _LINE if spans else 0

    def done(self) -> Image.Image:
        made = self.image.crop((0, 0, self.width, min(self.top + 8, self.image.height)))
        ImageDraw.Draw(made).rectangle((0, 0, made.width - 1, made.height - 1), outline="#d5d5e0")
        return made


def _fitting(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The text, or its two ends when it is too long: names differ at their ends."""
    if font.getlength(text) <= width:
        return text
    keep = len(text)
    while keep > 4 and font.getlength(f"{text[: keep // 2]}…{text[-(keep // 2) :]}") > width:
        keep -= 1
    return f"{text[: keep // 2]}…{text[-(keep // 2) :]}"


def _cut(piece: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """A word in parts no wider than a line."""
    if "\n" in piece:
        return ["\n"] * piece.count("\n")
    if font.getlength(piece) <= width:
        return [piece]
    letters = max(1, int(len(piece) * width / font.getlength(piece)) - 1)
    return [piece[start : start + letters] for start in range(0, len(piece), letters)]


def _head(page: Page) -> Image.Image:
    sheet = _Sheet(WIDTH - 2 * MARGIN, "#f5f6f8")
    sheet.pad = 0
    sheet.heading(page.title, "title", 20, bold=True)
    for note in page.notes:
        sheet.heading(note, "detail", 13)
    if page.rows:
        spans = [part for kind, text in LEGEND.items() for part in (Span(text, kind), Span("   ", "plain"))]
        sheet.write(spans, 1)
    return sheet.image.crop((0, 0, sheet.width, sheet.top))


def _card(card: Card, width: int) -> Image.Image:
    sheet = _Sheet(width)
    sheet.heading(card.title, "title", 15, bold=True)
    sheet.heading(card.detail, "detail", 12)
    _pictures(sheet, card)
    if card.problem:
        sheet.pen.text((sheet.pad, sheet.top), "bad sample:", _INK["problem"], _font(13, True))
        sheet.top += _LINE
        sheet.write([Span(card.problem, "plain")], CARD_LINES)
    sheet.write(card.spans, CARD_LINES)
    return sheet.done()


def _pictures(sheet: _Sheet, card: Card) -> None:
    """The pictures side by side, each with what the model sees of it at its right."""
    room = sheet.width - 2 * sheet.pad
    shown = card.pictures[:3]
    seen_edge = 84 if card.seen else 0
    x = sheet.pad
    tallest = 0
    for number, picture in enumerate(shown):
        box = (room // len(shown) - (seen_edge + 12 if number < len(card.seen) else 6), 200)
        small = picture.convert("RGB")
        small.thumbnail(box)
        sheet.image.paste(small, (x, sheet.top))
        sheet.pen.rectangle((x, sheet.top, x + small.width - 1, sheet.top + small.height - 1), outline="#d5d5e0")
        x += small.width + 6
        tallest = max(tallest, small.height)
        if number < len(card.seen):
            sheet.image.paste(card.seen[number].resize((seen_edge, seen_edge)), (x, sheet.top))
            sheet.pen.rectangle((x, sheet.top, x + seen_edge - 1, sheet.top + seen_edge - 1), outline="#d5d5e0")
            sheet.pen.text((x, sheet.top + seen_edge + 2), "model's view", _INK["detail"], _font(10))
            x += seen_edge + 6
            tallest = max(tallest, seen_edge + 16)
    sheet.top += tallest + 8 if shown else 0


def _row(row: Row, width: int) -> Image.Image:
    sheet = _Sheet(width)
    sheet.heading(row.title, "title", 15, bold=True)
    total, x = sum(row.sizes) + row.padding, float(sheet.pad)
    scale = (width - 2 * sheet.pad) / total
    for number, size in enumerate([*row.sizes, row.padding]):
        box = (int(x), sheet.top, int(x + size * scale) - (number < len(row.sizes)), sheet.top + 14)
        if number < len(row.sizes):
            sheet.pen.rectangle(box, fill=COLORS[number % len(COLORS)])
        else:
            sheet.pen.rectangle(box, fill="#e4e4e4")
            for stripe in range(box[0], box[2], 8):
                sheet.pen.line((stripe, box[3], min(stripe + 14, box[2]), box[1]), fill="#c0c0c0")
        x += size * scale
    sheet.top += 24
    for number, (key, size, spans) in enumerate(zip(row.keys[:ROW_DOCUMENTS], row.sizes, row.documents)):
        begin = sheet.top
        sheet.pen.text((sheet.pad + 12, sheet.top), f"{key} · {size:,} tokens", _INK["detail"], _font(11))
        sheet.top += 16
        sheet.write([Span(span.text.rstrip("\n").replace("\n", " ↵ "), span.kind) for span in spans], DOCUMENT_LINES, 12)
        sheet.pen.rectangle((sheet.pad, begin, sheet.pad + 4, sheet.top - 4), fill=COLORS[number % len(COLORS)])
        sheet.top += 6
    if len(row.keys) > ROW_DOCUMENTS:
        sheet.heading(f"and {len(row.keys) - ROW_DOCUMENTS} more documents (an .html shows all)", "detail", 12)
    return sheet.done()
