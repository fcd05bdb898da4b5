"""What ``megascale data lint`` asks of a sample's fields: all that the default encoder would refuse, apart from what a tokenizer knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lightning_megascale.data.quarantine import BadSample
from lightning_megascale.data.stored import read_npy, stored_pixels, stored_sizes, stored_tokens
from lightning_megascale.data.turns import AUDIO, IMAGE, read_turns, to_messages, utf8


def files_of(data: Mapping[str, bytes], name: str, extensions: str) -> list[bytes]:
    """The files of a field: of ``images`` all that are numbered, where none has a plain extension."""
    wanted = [extension.strip().lower() for extension in extensions.split(";")]
    plain = next(([data[extension]] for extension in wanted if extension in data), [])
    if name != "images" or plain:
        return plain
    files: list[bytes] = []
    while (found := next((data[f"{len(files)}.{one}"] for one in wanted if f"{len(files)}.{one}" in data), None)) is not None:
        files.append(found)
    return files


def check_text(sample: Mapping[str, bytes], pictures: int) -> None:
    text = utf8(sample["text"])
    if not text.strip():
        raise BadSample("the text is empty")
    _placeholders([text], pictures, optional=True)


def check_conversation(sample: Mapping[str, bytes], pictures: int) -> None:
    messages = to_messages(read_turns(sample["conversation"]))
    if "pixels" in sample:
        pictures = len(read_npy(sample["pixels"]))
    _placeholders([message["content"] for message in messages], pictures, optional=False)
    if not any(message["role"] == "assistant" and message["content"].strip() for message in messages):
        raise BadSample("the assistant says nothing, so nothing is labelled")


def _placeholders(texts: Sequence[str], pictures: int, optional: bool) -> None:
    for placeholder, count in ((IMAGE, pictures), (AUDIO, 0)):
        found = sum(text.count(placeholder) for text in texts)
        if found != count and not (optional and not found):
            raise BadSample(f"the text has {found} {placeholder} for {count} of them in the sample")


def check_tokens(sample: Mapping[str, bytes], pictures: int) -> None:
    stored_tokens(sample, np.iinfo(np.int32).max, 0, 0, None)
    if "sizes" in sample and "pixels" not in sample:
        stored_sizes(sample, pictures)


def check_pixels(sample: Mapping[str, bytes], pictures: int) -> None:
    pixels = read_npy(sample["pixels"])
    stored_pixels(sample, pixels.shape[-1] if pixels.ndim else 0)


# By field: (files of the sample's fields, number of pictures) -> BadSample when they cannot be used.
CHECKS: dict[str, Callable[[Mapping[str, bytes], int], None]] = {
    "text": check_text,
    "conversation": check_conversation,
    "tokens": check_tokens,
    "pixels": check_pixels,
}
