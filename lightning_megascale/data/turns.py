"""Turns of a conversation as data sets write them -> messages of a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_megascale.data.quarantine import BadSample

IMAGE, AUDIO = "<image>", "<audio>"
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant", "system": "system"}
_TEXT_KEYS, _ROLE_KEYS = ("value", "content"), ("from", "role")

Message = dict[str, str]


def to_messages(turns: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Turns in either notation, ``from`` and ``value`` or ``role`` and ``content`` -> messages with ``role`` and ``content``.

    Raises:
        BadSample: for what is no conversation.
    """
    if not isinstance(turns, Sequence) or isinstance(turns, (str, bytes)) or not turns:
        raise BadSample(f"the conversation is no list of turns but {type(turns).__name__}" if turns else "the conversation has no turns")
    messages = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise BadSample(f"turn {number} is no mapping but {type(turn).__name__}")
        role = next((turn[key] for key in _ROLE_KEYS if key in turn), None)
        content = next((turn[key] for key in _TEXT_KEYS if key in turn), None)
        if not isinstance(role, str) or role not in _ROLES:
            raise BadSample(f"turn {number} has the role {role!r}; known are {', '.join(_ROLES)}")
        text = _text(content, number)
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):  # JSON's \\ud800: no character
            raise BadSample(f"turn {number} holds half a surrogate pair, which no tokenizer reads")
        messages.append({"role": _ROLES[role], "content": text})
    return messages


def _text(content: Any, number: int) -> str:
    """A turn's text; of a list of parts (text, image, audio) the texts with placeholders between them."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        parts = [{"image": IMAGE, "audio": AUDIO}.get(str(part.get("type")), part.get("text")) for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)
    raise BadSample(f"turn {number} has no text but {type(content).__name__}")


def utf8(data: bytes) -> str:
    """The bytes as text, without a byte order mark.

    Raises:
        BadSample: for bytes that are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample(f"the text is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from error


def read_turns(data: bytes) -> Any:
    """The turns of a conversation: the JSON itself, or its ``conversations`` or ``messages``.

    Raises:
        BadSample: for what is no JSON, or holds neither.
    """
    text = utf8(data)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for an integer of thousands of digits
        raise BadSample(f"the conversation is no JSON: {error}") from error
    if isinstance(content, dict):
        content = content.get("conversations", content.get("messages"))
    if not isinstance(content, list):
        raise BadSample("the conversation is no list of turns, and no mapping with 'conversations' or 'messages'")
    return content
