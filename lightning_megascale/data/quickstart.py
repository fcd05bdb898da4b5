"""The text of the first run: Python's own help topics, a tokenizer trained on them, and both in a cache folder of WebDataset shards.

The text ships with every full Python (``pydoc_data.topics``, licensed as Python is), so nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lightning_megascale.data.cache import build_once
from lightning_megascale.data.shards import Document, token_dtype, write_shards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"
SMALLEST_VOCABULARY = 256 + 2  # all bytes and the special tokens
_FORMAT = 1  # raise it when the layout of the folder or the way it is made changes


def prepare_text(
    cache_dir: str | Path | None = None, vocab_size: int = 4096, validation_fraction: float = 0.1, timeout_seconds: float = 120.0
) -> Path:
    """Writes the text, once, and returns its folder: ``train-*.tar``, ``validation-*.tar``, ``tokenizer/``, ``manifest.json``.

    Any number of processes may call it at once: one writes, the others wait. A damaged folder is written again.

    Args:
        cache_dir: where the folder goes; None means $MEGASCALE_CACHE, or ~/.cache/lightning_megascale.
        vocab_size: entries of the tokenizer.
        validation_fraction: share of the characters kept for validation, as whole documents.
        timeout_seconds: how long to wait for another process.

    Raises:
        ValueError: for a vocabulary the text cannot fill, or a Python that ships without the text.
    """

    def build(folder: Path) -> None:
        train, validation = split_documents(read_documents(), validation_fraction)
        tokenizer = train_tokenizer(train.values(), vocab_size)
        _save_tokenizer(tokenizer, folder / "tokenizer")
        for split, texts in (("train", train), ("validation", validation)):
            encoded = (
                Document(key, text, np.array(tokenizer.encode(text).ids, dtype=token_dtype(vocab_size))) for key, text in texts.items()
            )
            write_shards(folder, split, encoded)

    return build_once(text_folder(cache_dir, vocab_size, validation_fraction), build, timeout_seconds)


def text_folder(cache_dir: str | Path | None = None, vocab_size: int = 4096, validation_fraction: float = 0.1) -> Path:
    """Where ``prepare_text`` puts the text of these parameters: the name carries a hash of all that decides the content."""
    root = Path(cache_dir or os.environ.get("MEGASCALE_CACHE") or Path.home() / ".cache" / "lightning_megascale").expanduser()
    content = {
        "format": _FORMAT,
        "text": sorted(read_topics().items()),
        "vocab_size": vocab_size,
        "validation_fraction": float(validation_fraction),
        "tokenizers": version("tokenizers"),
    }
    return root / f"python-topics-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}"


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
    budget = validation_fraction * sum(map(len, documents.values()))
    order = sorted(documents, key=lambda title: hashlib.sha256(title.encode()).digest())
    chosen: set[str] = set()
    for title in order:
        if len(documents[title]) <= budget:
            chosen.add(title)
            budget -= len(documents[title])
    chosen = chosen or {min(order, key=lambda title: len(documents[title]))}
    train = {title: text for title, text in documents.items() if title not in chosen}
    if not train:
        raise ValueError(f"validation_fraction={validation_fraction} leaves none of {len(documents)} documents for training; choose less")
    return train, {title: text for title, text in documents.items() if title in chosen}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly ``vocab_size`` entries; <|end|> is 0 and <|pad|> is 1. Any text survives encode and decode.

    Source: byte-level byte-pair encoding, Radford et al. 2019 (GPT-2), section 2.2.

    Raises:
        ValueError: when the text holds fewer merges than asked for.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}: from this text a tokenizer gets {tokenizer.get_vocab_size()} entries;"
            f" choose one from {SMALLEST_VOCABULARY} up to what the text gives"
        )
    return tokenizer


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast  # half a second, needed only here and in load_tokenizer

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False).save_pretrained(
        folder
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder that ``prepare_text`` wrote."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", local_files_only=True)
