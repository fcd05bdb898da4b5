"""A preview as one HTML file that needs nothing else: styles inside, pictures as data URIs."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from PIL import Image

from lightning_megascale.cli.data_preview import Card, Page, Row, Span, as_jpeg

COLORS = ("#4477aa", "#ee8866", "#228833", "#aa3377", "#ccbb44", "#66ccee")  # of a row's documents in turn (Tol's bright set)
LEGEND = {"label": "labelled: the loss counts it", "plain": "read only", "image": "a picture's tokens"}
_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:24px;background:#f5f6f8;color:#222}
h1{font-size:20px;margin:0 0 4px;overflow-wrap:anywhere} h2{font-size:16px;margin:28px 0 8px} .note{color:#667;margin:0 0 10px}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(340px,1fr));gap:14px}
.card,.row{background:#fff;border:1px solid #dde;border-radius:8px;padding:12px;overflow-wrap:anywhere}
.row{margin-bottom:14px}.title{font-weight:600}.detail{color:#667;font-size:12px;margin-bottom:6px}
.pictures{display:flex;flex-wrap:wrap;gap:6px;align-items:flex-end;margin-bottom:8px}
.pictures img{border:1px solid #d5d5e0;max-width:100%;max-height:220px;border-radius:4px}
.pictures figure{margin:0} .pictures .seen img{height:84px}
figcaption{font-size:11px;color:#667}.text{white-space:pre-wrap;max-height:320px;overflow:auto;font-size:13px}
.label{background:#c9efcf;color:#083;border-radius:3px}.plain{color:#555}.role{color:#88a;font-style:italic}
.image{background:#d5e3f7;color:#247;border-radius:3px;padding:0 4px;margin:0 2px;font-size:12px}.problem{color:#b11}
.bar{display:flex;height:14px;border-radius:3px;overflow:hidden;margin:6px 0 10px}
.bar .padding{background:repeating-linear-gradient(45deg,#ddd 0 5px,#f4f4f4 5px 10px)}
.document{border-left:5px solid;padding:2px 0 2px 8px;margin-bottom:8px}
"""


def render(page: Page) -> str:
    """The whole file."""
    legend = " ".join(f'<span class="{kind}">{escape(text)}</span> &nbsp;' for kind, text in LEGEND.items()) if page.rows else ""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in page.notes)
    cards = f'<h2>Samples</h2><div class="cards">{"".join(map(_card, page.cards))}</div>' if page.cards else ""
    rows = f"<h2>Rows of a batch</h2>{''.join(map(_row, page.rows))}" if page.rows else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(page.title)}</title><style>{_STYLE}</style></head>'
        f"<body><h1>{escape(page.title)}</h1>{notes}<p>{legend}</p>{cards}{rows}</body></html>\n"
    )


def _card(card: Card) -> str:
    pictures = "".join(f"<figure>{_picture(picture)}</figure>" for picture in card.pictures)
    pictures += "".join(
        f'<figure class="seen">{_picture(picture)}<figcaption>as the model sees it</figcaption></figure>' for picture in card.seen
    )
    problem = f'<div class="problem">bad sample: {escape(card.problem)}</div>' if card.problem else ""
    return (
        f'<div class="card"><div class="title">{escape(card.title)}</div><div class="detail">{escape(card.detail)}</div>'
        f'<div class="pictures">{pictures}</div>{problem}<div class="text">{_text(card.spans)}</div></div>'
    )


def _row(row: Row) -> str:
    bar = "".join(f'<div style="flex:{size};background:{color}"></div>' for size, color in zip(row.sizes, _colors(len(row.sizes))))
    padding = f'<div class="padding" style="flex:{row.padding}"></div>' if row.padding else ""
    documents = "".join(
        f'<div class="document" style="border-color:{color}"><div class="detail">{escape(key)} · {size:,} tokens</div>'
        f'<div class="text">{_text(spans)}</div></div>'
        for key, size, spans, color in zip(row.keys, row.sizes, row.documents, _colors(len(row.sizes)))
    )
    return f'<div class="row"><div class="title">{escape(row.title)}</div><div class="bar">{bar}{padding}</div>{documents}</div>'


def _colors(count: int) -> list[str]:
    return [COLORS[number % len(COLORS)] for number in range(count)]


def _text(spans: Sequence[Span]) -> str:
    return "".join(f'<span class="{span.kind}">{escape(span.text)}</span>' for span in spans)


def _picture(picture: Image.Image) -> str:
    return f'<img src="data:image/jpeg;base64,{base64.b64encode(as_jpeg(picture)).decode()}" alt="">'
