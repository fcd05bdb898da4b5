"""A sample's bytes -> tensors: text, captions, conversations with or without pictures, and samples that were prepared when written.

Legend: T tokens, N pictures, S image size in pixels. A field is one member of a sample, found by its extension in the shard.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch

from lightning_megascale.data import images
from lightning_megascale.data.conversation import Encoded, encode_caption, encode_conversation, truncate
from lightning_megascale.data.quarantine import BadSample
from lightning_megascale.data.stored import read_npy, stored_pixels, stored_sizes, stored_tokens
from lightning_megascale.data.turns import read_turns, utf8

Sample = dict[str, Any]
Encode = Callable[[Sample, "EncodeContext"], dict[str, Any]]

TEXTS = ("tokens", "text", "conversation")  # a sample has one of them
PICTURES = ("image", "images", "pixels")  # and at most one of these


@dataclass(frozen=True)
class EncodeContext:
    """What an encode function gets beside the sample.

    Args:
        tokenizer: a fast tokenizer of transformers; its chat template renders conversations.
        sequence_length: samples are cut to so many tokens.
        image_size: S; None for a model without pictures.
        image_tokens: tokens of one picture, from ``images.image_token_count``.
        image_token_id: the tokenizer's special token for a picture.
        image_mode: "clip" (shorter edge, then the centre) or "siglip" (both edges).
        limit_pixels: larger pictures are bad samples.
        seed: for encode functions of one's own that augment: hash it with the sample's key; the default one draws nothing.

    Raises:
        ValueError: listing every argument out of range.
    """

    tokenizer: Any
    sequence_length: int
    image_size: int | None = None
    image_tokens: int = 0
    image_token_id: int | None = None
    image_mode: images.Mode = "clip"
    limit_pixels: int = images.LIMIT_PIXELS
    seed: int = 0

    def __post_init__(self) -> None:
        picture = self.image_size is not None
        picture_rule = f"with image_size={self.image_size} it must {'come' if picture else 'be left out; else it comes'}"
        rules = [
            (self.sequence_length >= 2, f"sequence_length={self.sequence_length}: at least 2, since each token predicts the next"),
            (not picture or (self.image_size or 0) >= 1, f"image_size={self.image_size}: at least 1 pixel, or None without pictures"),
            (picture == (self.image_tokens >= 1), f"image_tokens={self.image_tokens}: {picture_rule} from images.image_token_count"),
            (picture == (self.image_token_id is not None), f"image_token_id={self.image_token_id}: {picture_rule} of the tokenizer"),
            (self.image_mode in get_args(images.Mode), f"image_mode={self.image_mode!r}: one of {', '.join(get_args(images.Mode))}"),
            (self.limit_pixels >= 1, f"limit_pixels={self.limit_pixels}: at least 1"),
        ]
        wrong = [message for holds, message in rules if not holds]
        if wrong:
            raise ValueError("\n".join(wrong))

    def token_identity(self) -> str:
        """A hash of all that decides how many tokens a sample has: tokenizer, template, rule for pictures, cut."""
        rules = [self.sequence_length, self.image_tokens, self.image_token_id]
        content = [_TOKEN_VERSION, _tokenizer_content(self.tokenizer), self.tokenizer.chat_template, rules]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def identity(self) -> str:
        """A hash of all that decides what the default encoder gives, the decoders' versions left out."""
        rules = [self.token_identity(), self.image_size, self.image_mode, self.limit_pixels, self.seed]
        return hashlib.sha256(json.dumps(rules).encode()).hexdigest()[:16]


_TOKEN_VERSION = 1  # raise it when encode_sample gives other tokens for the same bytes


def _tokenizer_content(tokenizer: Any) -> Any:
    """All that decides a tokenizer's tokens, without the state that a call with padding or truncation leaves behind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return type(tokenizer).__name__, tokenizer.get_vocab()
    content = json.loads(backend.to_str())
    return {key: value for key, value in content.items() if key not in ("padding", "truncation")}, str(tokenizer.special_tokens_map)


def encode_sample(sample: Sample, context: EncodeContext) -> dict[str, Any]:
    """The default encoder: what it does follows from the fields that are there.

    One of

    - ``text``: UTF-8, all of it labelled, an end token after it;
    - ``conversation``: JSON, a list of turns or a mapping with ``conversations`` or ``messages``; labels on the assistant's turns;
    - ``tokens``: a NumPy vector of integers, placeholders expanded, all labelled, or only what ``spans`` (n, 2) says;

    and beside it ``image`` (one file), ``images`` (a list of files) or ``pixels`` (N, 3, S, S) uint8 with ``sizes`` (N, 2).

    Returns:
        ``input_ids`` and unshifted ``labels`` (T,) int64, ``__key__``, and with pictures ``pixel_values`` (N, 3, S, S) uint8 and
        ``image_sizes`` (N, 2) int64, height and width before resizing. Pictures that truncation cut off are not there.

    Raises:
        BadSample: for bytes that hold no such sample.
        ValueError: for fields that do not go together, or pictures without an ``image_size``.
    """
    encoded = encode_tokens(sample, context)
    result = {
        "input_ids": torch.from_numpy(encoded.input_ids),
        "labels": torch.from_numpy(encoded.labels),
        "__key__": sample.get("__key__", ""),
    }
    if count_pictures(sample):
        pixels, sizes = load_pixels(sample, context)  # all of them: a broken picture makes a bad sample wherever the cut is
        if encoded.images:
            result["pixel_values"] = torch.from_numpy(pixels[: encoded.images])
            result["image_sizes"] = torch.from_numpy(sizes[: encoded.images])
    return result


def encode_tokens(sample: Sample, context: EncodeContext) -> Encoded:
    """The tokens of ``encode_sample``, without decoding a picture. See there."""
    text, _ = _fields(sample)
    pictures = count_pictures(sample)
    if pictures and context.image_size is None:
        raise ValueError(f"the sample {sample.get('__key__')!r} has pictures and image_size is None: set it, or leave the field out")
    if text == "tokens":
        vocabulary = len(context.tokenizer)
        ids, labels, spans = stored_tokens(sample, vocabulary, pictures, context.image_tokens, context.image_token_id)
        return truncate(ids, labels, [spans, []], context.sequence_length)
    image_tokens = [context.image_tokens] * pictures
    if text == "text":
        return encode_caption(utf8(sample["text"]), context.tokenizer, image_tokens, context.image_token_id, context.sequence_length)
    turns = read_turns(sample["conversation"])
    return encode_conversation(turns, context.tokenizer, image_tokens, context.image_token_id, context.sequence_length)


def count_tokens(sample: Sample, context: EncodeContext, encode: Encode | None = None) -> int:
    """Tokens of an encoded sample, 0 for a bad one; no picture is decoded.

    Args:
        sample: its fields.
        context: as for ``encode_sample``.
        encode: a function of one's own; its attribute ``count`` (sample, context) -> int is asked if it has one, otherwise it is called.
    """
    try:
        if encode is None or encode is encode_sample:
            return len(encode_tokens(sample, context).input_ids)
        count = getattr(encode, "count", None)
        if count is None:
            return len(encode(sample, context)["input_ids"])
        found = count(sample, context)
        if isinstance(found, bool) or not isinstance(found, (int, np.integer)) or found < 1:
            raise ValueError(f"its count gave {found!r}: it must be the number of tokens, at least 1")
        return int(found)
    except BadSample:
        return 0


def count_pictures(sample: Sample) -> int:
    """Pictures of a sample, from its fields; of stored pixels the header is read."""
    if "image" in sample:
        return 1
    if "images" in sample:
        return len(sample["images"])
    return read_npy(sample["pixels"]).shape[0] if "pixels" in sample else 0


def load_pixels(sample: Sample, context: EncodeContext) -> tuple[np.ndarray, np.ndarray]:
    """All pictures of a sample: (N, 3, S, S) uint8, and their heights and widths before resizing (N, 2) int64."""
    size = context.image_size
    assert size is not None
    if "pixels" in sample:
        return stored_pixels(sample, size)
    files = [sample["image"]] if "image" in sample else sample["images"]
    pixels = np.empty((len(files), 3, size, size), dtype=np.uint8)
    sizes = np.empty((len(files), 2), dtype=np.int64)
    for number, data in enumerate(files):
        picture = images.decode(data, limit_pixels=context.limit_pixels)
        sizes[number] = picture.shape[:2]
        pixels[number] = images.resize(picture, size, context.image_mode, limit_pixels=context.limit_pixels).transpose(2, 0, 1)
    if "sizes" in sample:
        sizes = stored_sizes(sample, len(files))
    return pixels, sizes


def resolve_encode(encode: str | Encode | None) -> Encode:
    """A function, or the dotted path of one ("package.module.function"); None is ``encode_sample``.

    Raises:
        ValueError: naming the part of the path that is not there, or what is no function.
    """
    if encode is None:
        return encode_sample
    if not isinstance(encode, str):
        found: Any = encode
    else:
        module, _, name = encode.rpartition(".")
        if not module:
            raise ValueError(f"encode={encode!r}: a dotted path as package.module.function")
        try:
            found = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise ValueError(f"encode={encode!r}: {module} cannot be imported ({error}); is its folder on PYTHONPATH?") from error
        except AttributeError as error:
            raise ValueError(f"encode={encode!r}: {module} has no {name!r}") from error
    if not callable(found):
        raise ValueError(f"encode={encode!r} is a {type(found).__name__}: give fn(sample, context) -> dict")
    return found


def check_encoded(result: Any, name: str, vocabulary: int) -> dict[str, Any]:
    """Refuses what an encode function of one's own may not return.

    Args:
        result: what it returned.
        name: of the function.
        vocabulary: ids the tokenizer has.

    Raises:
        ValueError: naming the key and the rule.
    """
    if not isinstance(result, dict):
        raise ValueError(f"{name} must return a dict, not {type(result).__name__}")
    wrong = []
    for key in ("input_ids", "labels"):
        value = result.get(key)
        if not (isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.ndim == 1):
            wrong.append(f"{key!r}: a tensor (T,) of int64, not {_kind(value)}")
    if not wrong:
        ids, labels = result["input_ids"], result["labels"]
        if not len(ids) == len(labels) > 0:
            wrong.append(f"'labels' as long as 'input_ids' and not empty, not {len(labels)} for {len(ids)}")
        if len(ids):
            low, high = (int(value) for value in ids.aminmax())
            if not 0 <= low <= high < vocabulary:
                wrong.append(f"ids from 0 to {vocabulary - 1}, as the tokenizer has, not {low} to {high}")
    if wrong:
        raise ValueError(f"{name} must return {'; '.join(wrong)}")
    return result


def _kind(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, (torch.Tensor, np.ndarray)) else type(value).__name__


def _fields(sample: Mapping[str, Any]) -> tuple[str, str | None]:
    """The one text field and the picture field, if any.

    Raises:
        ValueError: for none or several.
    """
    texts, pictures = [name for name in TEXTS if name in sample], [name for name in PICTURES if name in sample]
    if len(texts) != 1 or len(pictures) > 1:
        raise ValueError(
            f"fields {', '.join(name for name in sample if not name.startswith('__'))}: exactly one of {', '.join(TEXTS)} and at most one"
            f" of {', '.join(PICTURES)}; change `fields` of the source, or give it an `encode` function"
        )
    return texts[0], pictures[0] if pictures else None
