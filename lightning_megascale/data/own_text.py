"""A user's own text files as documents: which files are meant, how each is divided, and what is no text."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_megascale.data.expand import missing, nearest

TextFiles = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_BETWEEN = re.compile(r"\n(?:[ \t]*\n){2,}")  # two or more blank lines
_LINE_END = re.compile(r"(?<=\S)\n(?=\S)")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_LINES = (".jsonl", ".ndjson")
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def find_files(text: TextFiles) -> list[Path]:
    """The files that ``text`` names, absolute, in the order given, those of a glob sorted; each once.

    Raises:
        ValueError: for a name or pattern without a file, a folder, or an empty file, by its name.
    """
    names = [text] if isinstance(text, (str, os.PathLike)) else list(text)
    if not names:
        raise ValueError("text=[]: name at least one file, or leave it out for the text that ships with Python")
    found: dict[Path, None] = {}
    for name in names:
        if not isinstance(name, (str, os.PathLike)) or not os.fspath(name):
            raise ValueError(f"text={name!r}: must be a file, a pattern such as 'books/*.txt', or a list of them")
        found.update(dict.fromkeys(_matches(os.fspath(name))))
    for path in found:
        if not path.stat().st_size:
            raise ValueError(f"text: {path} is empty; take it out, or write text into it")
    return list(found)


def _matches(name: str) -> list[Path]:
    path = os.path.abspath(os.path.expanduser(name))
    if os.path.isfile(path):  # also one whose name has a bracket
        return [Path(path)]
    if os.path.isdir(path):
        raise ValueError(f"text={name!r} is a folder; write which files in it, as {os.path.join(name, '*.txt')!r}")
    if not glob.has_magic(path):
        raise ValueError(f"text={missing(path)}")
    files = sorted(Path(match) for match in glob.glob(path, recursive=True) if os.path.isfile(match))
    if not files:
        folder = os.path.dirname(path)
        raise ValueError(f"text={name!r} matches no file{nearest(path, os.listdir(folder)) if os.path.isdir(folder) else ''}")
    return files


def read_files(files: Sequence[Path]) -> dict[str, str]:
    """Number -> document, in order.

    A ``.jsonl`` file has a document on each line, its ``"text"``. Any other file is one document; where it has two or more blank lines in a
    row it is divided there.

    Raises:
        ValueError: for bytes that are not UTF-8, with their offset; for a line of a .jsonl file without a text; for a file without any.
    """
    found: list[str] = []
    for path in files:
        content = _decoded(path)
        parts = _texts(path, content) if path.suffix.lower() in _LINES else _BETWEEN.split(content)
        documents = [part for part in (part.strip("\n") for part in parts) if part.strip()]
        if not documents:
            raise ValueError(f"text: {path} holds only blanks; take it out, or write text into it")
        found += documents
    return {f"{number:08d}": document for number, document in enumerate(found)}


def content_hash(documents: dict[str, str]) -> str:
    """A hash of the documents and where each ends."""
    digest = hashlib.sha256()
    for document in documents.values():
        data = document.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def split_off_end(documents: dict[str, str], characters: int) -> tuple[dict[str, str], dict[str, str]]:
    """All documents, the longest without its end; and that end, of about ``characters``.

    The cut is where a paragraph begins; if none does in the first half of the end, where a line does, or a word, or anywhere.
    """
    key = max(documents, key=lambda name: len(documents[name]))
    text = documents[key]
    wanted = max(len(text) - max(characters, 1), 1)
    place = wanted
    for border in ("\n\n", "\n", " "):
        at = text.find(border, wanted, wanted + (len(text) - wanted) // 2)
        if at > 0:
            place = at + len(border)
            break
    return {**documents, key: text[:place].rstrip("\n")}, {f"{key}-end": text[place:].lstrip("\n")}


def parts(text: str, characters: int = 1 << 18) -> Iterator[str]:
    """A text in parts of about so many characters, cut where one line ends and the next begins with a letter: a tokenizer with GPT-2's rule
    for words makes the same tokens of the parts as of the whole, with less memory."""
    first = 0
    while border := _LINE_END.search(text, first + characters - 1):
        yield text[first : border.end()]
        first = border.end()
    yield text[first:]


def _decoded(path: Path) -> str:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        kind = "utf-16" if data.startswith(_UTF16) else "latin1"
        raise ValueError(
            f"text: {path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}. If it is text, convert it, for example:"
            f" iconv -f {kind} -t utf-8 {path.name} > {path.stem}-utf8{path.suffix}"
        ) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _texts(path: Path, content: str) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f'text: {path}, line {number} is no JSON ({error}); a line is one document: {{"text": "..."}}') from error
        value = record.get("text") if isinstance(record, dict) else None
        if not isinstance(value, str):
            has = f"the keys {', '.join(map(repr, record))}" if isinstance(record, dict) else f"a {type(record).__name__}"
            raise ValueError(f'text: {path}, line {number} has {has}; a line is one document: {{"text": "..."}}')
        if _SURROGATE.search(value):
            raise ValueError(f"text: {path}, line {number} has half a character (\\ud800 to \\udfff alone); mend or remove it")
        yield value
