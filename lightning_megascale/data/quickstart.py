"""The text of the first run: Python's own help topics, or a user's files, with a tokenizer trained on it, in a cache folder of shards.

The help topics ship with every full Python (``pydoc_data.topics``, licensed as Python is), so nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from lightning_megascale.data.cache import build_once, cache_root
from lightning_megascale.data.own_text import TextFiles, content_hash, find_files, parts, read_files, split_off_end
from lightning_megascale.data.shards import Document, token_dtype, write_shards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"
SMALLEST_VOCABULARY = 256 + 2  # all bytes and the special tokens
_FORMAT = 1  # raise it when the layout of the folder or the way it is made changes
_DOCUMENTS_PER_SHARD = 4096  # of a user's files; of the help topics 16


def prepare_text(
    cache_dir: str | Path | None = None,
    vocab_size: int = 4096,
    validation_fraction: float = 0.1,
    timeout_seconds: float = 120.0,
    text: TextFiles | None = None,
) -> Path:
    """Writes the text, once, and returns its folder: ``train-*.tar``, ``validation-*.tar``, ``tokenizer/``, ``manifest.json``.

    Any number of processes may call it at once: one writes, the others wait. A damaged folder is written again.

    Args:
        cache_dir: where the folder goes; None means $MEGASCALE_CACHE, or ~/.cache/lightning_megascale.
        vocab_size: entries of the tokenizer; from ``text`` it gets fewer when fewer sequences of bytes occur twice.
        validation_fraction: share of the characters kept for validation, as whole documents.
        timeout_seconds: how long to wait for another process.
        text: files of one's own (``own_text.read_files``); None: Python's help topics.

    Raises:
        ValueError: for a vocabulary the help topics cannot fill, a Python that ships without them, or files that hold no text.
    """
    own = None if text is None else read_files(find_files(text))

    def build(folder: Path) -> None:
        if own is None:
            train, validation = split_documents(read_documents(), validation_fraction)
            tokenizer = train_tokenizer(train.values(), vocab_size)
        else:
            train, validation = split_own(own, validation_fraction)
            tokenizer = train_tokenizer((part for text in train.values() for part in parts(text)), vocab_size, fill=False)
        save_tokenizer(tokenizer, folder / "tokenizer")
        for split, texts in (("train", train), ("validation", validation)):
            encoded = (Document(key, text, _encode(tokenizer, text).astype(token_dtype(vocab_size))) for key, text in texts.items())
            write_shards(folder, split, encoded, 16 if own is None else _DOCUMENTS_PER_SHARD)

    return build_once(_folder(cache_dir, vocab_size, validation_fraction, own), build, timeout_seconds)


def text_folder(
    cache_dir: str | Path | None = None, vocab_size: int = 4096, validation_fraction: float = 0.1, text: TextFiles | None = None
) -> Path:
    """Where ``prepare_text`` puts the text of these parameters: the name carries a hash of all that decides the content."""
    return _folder(cache_dir, vocab_size, validation_fraction, None if text is None else read_files(find_files(text)))


def _folder(cache_dir: str | Path | None, vocab_size: int, validation_fraction: float, own: dict[str, str] | None) -> Path:
    content = {
        "format": _FORMAT,
        "text": sorted(read_topics().items()) if own is None else content_hash(own),
        "vocab_size": vocab_size,
        "validation_fraction": float(validation_fraction),
        "tokenizers": version("tokenizers"),
    }
    name = "python-topics" if own is None else "own-text"
    return cache_root(cache_dir) / f"{name}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}"


def read_topics() -> dict[str, str]:
    """Title -> text of Python's help topics.

    Raises:
        ValueError: when this Python was stripped of them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            "the quickstart text is pydoc_data.topics, which this Python lacks (some distributions strip it):"
            " use a Python from python.org, conda, uv or a full system package"
        ) from error
    return dict(topics)


def read_documents(overlap: float = 0.5) -> dict[str, str]:
    """The topics without those that are mostly excerpts of larger ones, in order of their titles.

    A third of the topics repeat paragraphs of others ("while" stands inside "compound"): a split by document would
    otherwise put the same text into training and validation.

    Args:
        overlap: a topic goes when at least this share of its characters stands, as whole paragraphs, in larger topics.
    """
    seen: set[str] = set()
    kept: dict[str, str] = {}
    for title, text in sorted(read_topics().items(), key=lambda item: (-len(item[1]), item[0])):
        paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)]
        repeated = sum(len(paragraph) for paragraph in paragraphs if paragraph in seen)
        if repeated < overlap * sum(map(len, paragraphs)):
            kept[title] = text
            seen.update(paragraphs)
    return dict(sorted(kept.items()))


def split_documents(documents: dict[str, str], validation_fraction: float) -> tuple[dict[str, str], dict[str, str]]:
    """Training and validation documents: in an order given by the hash of their titles, as many as fit the fraction, at least one.

    Raises:
        ValueError: when the fraction leaves no document for training.
    """
    order = _by_hash(documents)
    chosen = _fitting(documents, validation_fraction) or {min(order, key=lambda title: len(documents[title]))}
    train = {title: text for title, text in documents.items() if title not in chosen}
    if not train:
        raise ValueError(f"validation_fraction={validation_fraction} leaves none of {len(documents)} documents for training; choose less")
    return train, {title: text for title, text in documents.items() if title in chosen}


def split_own(documents: dict[str, str], validation_fraction: float) -> tuple[dict[str, str], dict[str, str]]:
    """As ``split_documents``; but when whole documents make less than half of the fraction, the end of the longest other fills it up."""
    chosen = _fitting(documents, validation_fraction)
    validation = {key: text for key, text in documents.items() if key in chosen}
    train = {key: text for key, text in documents.items() if key not in chosen}
    budget = validation_fraction * sum(map(len, documents.values()))
    missing = budget - sum(map(len, validation.values()))
    if missing > budget / 2:
        train, end = split_off_end(train, round(missing))
        validation |= end
    return train, validation


def _by_hash(documents: dict[str, str]) -> list[str]:
    return sorted(documents, key=lambda title: hashlib.sha256(title.encode()).digest())


def _fitting(documents: dict[str, str], fraction: float) -> set[str]:
    """Titles of documents that together have at most this share of the characters."""
    budget = fraction * sum(map(len, documents.values()))
    chosen: set[str] = set()
    for title in _by_hash(documents):
        if len(documents[title]) <= budget:
            chosen.add(title)
            budget -= len(documents[title])
    return chosen


def train_tokenizer(texts: Iterable[str], vocab_size: int, fill: bool = True) -> Tokenizer:
    """A byte-level BPE tokenizer of ``vocab_size`` entries; <|end|> is 0 and <|pad|> is 1. Any text survives encode and decode.

    Source: byte-level byte-pair encoding, Radford et al. 2019 (GPT-2), section 2.2.

    Args:
        texts: to learn from.
        vocab_size: entries.
        fill: True makes exactly so many or fails; False makes fewer where nothing more occurs twice.

    Raises:
        ValueError: when the text holds fewer merges than asked for.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=0 if fill else 2,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if fill and tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}: from this text a tokenizer gets {tokenizer.get_vocab_size()} entries;"
            f" choose one from {SMALLEST_VOCABULARY} up to what the text gives"
        )
    return tokenizer


def _encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Tokens (T,) int64."""
    return np.concatenate([np.array(tokenizer.encode(part).ids, np.int64) for part in parts(text)])


def save_tokenizer(tokenizer: Tokenizer, folder: Path, special: Sequence[str] = ()) -> None:
    """Writes the folder that ``load_tokenizer`` reads; further special tokens get the next ids."""
    from transformers import PreTrainedTokenizerFast  # half a second, needed only here and in load_tokenizer

    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False).save_pretrained(
        folder
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder that ``prepare_text`` or ``prepare_pictures`` wrote."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", local_files_only=True)
