"""Conversations and captions -> tokens and labels: by the tokenizer's chat template, labels on what the assistant says only.

Legend: T tokens. Placeholders ``<image>`` and ``<audio>`` in the text become as many tokens as the medium takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jinja2 import TemplateError

from lightning_megascale.data.quarantine import BadSample
from lightning_megascale.data.turns import AUDIO, IMAGE, Message, to_messages

IGNORED = -100  # the label that no loss counts
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Encoded(NamedTuple):
    """Tokens and labels of a sample, both (T,) int64, and how many of its pictures and sounds are inside after truncation."""

    input_ids: np.ndarray
    labels: np.ndarray
    images: int
    audios: int


class Medium(NamedTuple):
    """A placeholder, the token that stands for it (None when the tokenizer has none), and how many of them each occurrence takes."""

    placeholder: str
    token_id: int | None
    counts: Sequence[int]


def encode_conversation(
    turns: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    image_tokens: Sequence[int] = (),
    image_token_id: int | None = None,
    max_length: int | None = None,
    *,
    audio_tokens: Sequence[int] = (),
    audio_token_id: int | None = None,
) -> Encoded:
    """Renders a conversation by the chat template, expands its placeholders, and labels the assistant's tokens.

    Which tokens are the assistant's: those that ``{% generation %}`` marks, where the template has it; otherwise what a turn adds to
    the text that ends with its generation prompt, up to the token that ends the turn. A token across a border counts as inside, as in
    transformers. Labels are unshifted; those of pictures and sounds are ignored wherever they stand.

    Args:
        turns: {"from": "human" or "gpt" or "system", "value": text}, or {"role", "content"}.
        tokenizer: a fast tokenizer of transformers with a chat template.
        image_tokens: tokens that each picture takes, in the order of their placeholders.
        image_token_id: the tokenizer's own special token for a picture.
        max_length: of the result, in tokens; a picture that would be cut goes as a whole, with all that follows.
        audio_tokens, audio_token_id: the same for sounds.

    Raises:
        BadSample: for turns that are no conversation, a wrong number of placeholders, or when no label is left.
        ValueError: for a tokenizer or a template that cannot give the labels.
    """
    media = (Medium(IMAGE, image_token_id, image_tokens), Medium(AUDIO, audio_token_id, audio_tokens))
    mode = label_mode(tokenizer)
    messages = to_messages(turns)
    _check_placeholders([message["content"] for message in messages], media)
    messages = [{**message, "content": _with_tokens(message["content"], tokenizer, media)} for message in messages]
    try:
        ids, inside = _by_generation(messages, tokenizer) if mode == "generation" else _by_prefix(messages, tokenizer)
    except TemplateError as error:
        raise BadSample(f"the chat template refuses the conversation: {error}") from error
    return _finish(ids, np.where(inside, ids, IGNORED), media, max_length)


def encode_caption(
    text: str,
    tokenizer: Any,
    image_tokens: Sequence[int] = (),
    image_token_id: int | None = None,
    max_length: int | None = None,
    *,
    audio_tokens: Sequence[int] = (),
    audio_token_id: int | None = None,
) -> Encoded:
    """Text, alone or with pictures, without a template: begin token if the tokenizer adds one, text, end token; labels on all of it.

    Where the text has no placeholder, pictures stand first. See ``encode_conversation`` for the arguments.

    Raises:
        BadSample: for empty text, a wrong number of placeholders, or when no label is left.
        ValueError: for a tokenizer without the special token of a medium that is there.
    """
    if not text.strip():
        raise BadSample("the text is empty")
    media = (Medium(IMAGE, image_token_id, image_tokens), Medium(AUDIO, audio_token_id, audio_tokens))
    for medium in reversed(media):
        if medium.placeholder not in text:
            text = medium.placeholder * len(medium.counts) + text
    _check_placeholders([text], media)
    ids = list(tokenizer(_with_tokens(text, tokenizer, media), add_special_tokens=False, verbose=False)["input_ids"])
    if adds_begin_token(tokenizer):
        ids.insert(0, tokenizer.bos_token_id)
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    ids_T = np.asarray(ids, dtype=np.int64)
    return _finish(ids_T, ids_T.copy(), media, max_length)


def adds_begin_token(tokenizer: Any) -> bool:
    """Whether the tokenizer itself puts its begin token in front of a text (Llama's does, GPT-2's does not)."""
    return tokenizer.bos_token_id is not None and list(tokenizer("")["input_ids"])[:1] == [tokenizer.bos_token_id]


def truncate(ids: np.ndarray, labels: np.ndarray, media: Sequence[Sequence[tuple[int, int]]], max_length: int | None) -> Encoded:
    """The first ``max_length`` tokens, less if the cut would fall inside a medium.

    Args:
        ids, labels: (T,) int64.
        media: per kind (pictures, sounds) the (first token, end) of each.
        max_length: in tokens; None cuts nothing.

    Raises:
        BadSample: when no label is left that a token before it could predict.
    """
    cut = len(ids) if max_length is None else min(max_length, len(ids))
    for start, end in (span for spans in media for span in spans):
        if start < cut < end:
            cut = start
    kept = [sum(end <= cut for _, end in spans) for spans in media]
    if not (labels[1:cut] != IGNORED).any():
        where = "in the sample" if cut == len(ids) else f"in the {cut} of {len(ids)} tokens that fit max_length={max_length}"
        raise BadSample(f"no label left {where}")
    return Encoded(ids[:cut], labels[:cut], *kept)


def label_mode(tokenizer: Any) -> str:
    """How the labels of this tokenizer's chat template are found: "generation" or "prefix"; tried once on two questions and answers.

    Raises:
        ValueError: for a tokenizer that is not fast or has no template, and for a template that neither way can read.
    """
    template = _template(tokenizer)
    known = _MODES.get(tokenizer)
    if known is None or known[0] != template:
        known = template, _probe(tokenizer, template)
        _MODES[tokenizer] = known
    return known[1]


_MODES: WeakKeyDictionary[Any, tuple[str, str]] = WeakKeyDictionary()


def _template(tokenizer: Any) -> str:
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} is no fast tokenizer, and labels need the places of its tokens in the text: load the fast one"
        )
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat_template, which says how a conversation becomes text: set tokenizer.chat_template")
    return tokenizer.get_chat_template()


def _probe(tokenizer: Any, template: str) -> str:
    """Renders two questions and answers and compares what is labelled with the answers."""
    answers = ["The sky is blue.", "No, red."]
    messages = to_messages(
        [{"from": role, "value": text} for pair in zip(["Why?", "Green?"], answers) for role, text in zip(("human", "gpt"), pair)]
    )
    mode, find = ("generation", _by_generation) if _GENERATION.search(template) else ("prefix", _by_prefix)
    try:
        ids, inside = find(messages, tokenizer)
        text = _render(messages, tokenizer)
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        parts = [text[offsets[first][0] : offsets[last - 1][1]].strip() for first, last in _runs(inside)]
        problem = None
        if len(parts) != 2 or any(not part.startswith(answer) for part, answer in zip(parts, answers)):
            problem = f"of the answers {answers} it labels {parts}"
    except (TemplateError, BadSample) as error:
        problem = str(error)
    if problem is not None:
        raise ValueError(
            f"the chat template gives no labels by {'{% generation %}' if mode == 'generation' else 'comparing prefixes'}: {problem}."
            " Put {% generation %} ... {% endgeneration %} around what the assistant says, its end token included"
        )
    return mode


def _runs(inside: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], inside.astype(np.int8), [0]))))
    return [(int(first), int(last)) for first, last in zip(edges[::2], edges[1::2])]


def _check_placeholders(texts: Sequence[str], media: Sequence[Medium]) -> None:
    for medium in media:
        found = sum(text.count(medium.placeholder) for text in texts)
        if found != len(medium.counts):
            raise BadSample(f"the text has {found} {medium.placeholder} for {len(medium.counts)} of them in the sample")


def _with_tokens(text: str, tokenizer: Any, media: Sequence[Medium]) -> str:
    """The text with each placeholder replaced by the tokenizer's special token of the medium."""
    for medium in media:
        if not medium.counts:
            continue
        token = None if medium.token_id is None else tokenizer.convert_ids_to_tokens(medium.token_id)
        if token is None or token not in tokenizer.get_added_vocab():
            raise ValueError(
                f"the token id {medium.token_id} for {medium.placeholder} is no special token of the tokenizer: call"
                f" tokenizer.add_tokens(AddedToken({medium.placeholder!r}, special=True)), resize the model's embedding, and give its id"
            )
        text = text.replace(medium.placeholder, token)
    return text


def _render(messages: list[Message], tokenizer: Any, prompt: bool = False) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


def _by_generation(messages: list[Message], tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (T,) int64 and which of them ``{% generation %}`` marks (T,) bool."""
    out = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
    )
    return np.asarray(out["input_ids"], dtype=np.int64), np.asarray(out["assistant_masks"], dtype=bool)


def _by_prefix(messages: list[Message], tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (T,) int64 and which of them the assistant's turns add (T,) bool."""
    text = _render(messages, tokenizer)
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, ends = np.asarray(out["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(starts), dtype=bool)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            first, last = _turn_span(messages, number, text, tokenizer)
            inside |= (starts < last) & (ends > first)
    return np.asarray(out["input_ids"], dtype=np.int64), inside


def _turn_span(messages: list[Message], number: int, text: str, tokenizer: Any) -> tuple[int, int]:
    """Characters of ``text`` from the end of a turn's generation prompt to the end of the turn; white space after an end token is out."""
    before = _render(messages[:number], tokenizer, prompt=True)
    after = _render(messages[: number + 1], tokenizer)
    if not (after.startswith(before) and text.startswith(after)):
        raise BadSample(f"the chat template writes turn {number} in another way when turns follow, or without its generation prompt")
    turn = after[len(before) :].rstrip()
    ends_by_token = any(turn.endswith(token) for token in tokenizer.get_added_vocab())
    return len(before), len(before) + len(turn) if ends_by_token else len(after)


def _finish(ids: np.ndarray, labels: np.ndarray, media: Sequence[Medium], max_length: int | None) -> Encoded:
    """Expands the media's tokens, ignores their labels, cuts."""
    repeats = np.ones(len(ids), dtype=np.int64)
    places = []
    for medium in media:
        found = np.flatnonzero(ids == medium.token_id) if medium.token_id is not None else np.empty(0, dtype=np.int64)
        if len(found) != len(medium.counts):
            raise BadSample(
                f"the tokens hold {len(found)} of {medium.placeholder} for {len(medium.counts)} in the sample: its text holds the"
                " special token itself, or the chat template drops the placeholder"
            )
        if any(count < 1 for count in medium.counts):
            raise ValueError(f"{medium.placeholder} of {min(medium.counts)} tokens: each takes at least one")
        repeats[found] = medium.counts
        labels[found] = IGNORED
        places.append(found)
    ends = np.cumsum(repeats)
    spans = [[(int(ends[place] - repeats[place]), int(ends[place])) for place in found] for found in places]
    return truncate(np.repeat(ids, repeats), np.repeat(labels, repeats), spans, max_length)
