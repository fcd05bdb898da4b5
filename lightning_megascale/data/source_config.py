"""What a source is: which shards, which members of a sample are its fields, and what encodes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_megascale.data.encode import PICTURES, TEXTS, Encode

DEFAULT_FIELDS = {  # in order: of the texts, the first that a shard has
    "tokens": "tokens.npy",
    "text": "txt;text;caption",
    "conversation": "json",
    "spans": "spans.npy",
    "pixels": "pixels.npy",
    "sizes": "sizes.npy",
    "images": "jpg;jpeg;png;webp;gif;bmp",
}
OPTIONAL_FIELDS = ("images", "pixels", "sizes")  # a conversation says itself how many pictures it has


@dataclass(frozen=True)
class SourceConfig:
    """What a source is.

    Args:
        urls: WebDataset tars, local or remote; ``{000..009}`` and globs stand for many.
        fields: field -> extensions separated by ``;``, of which a sample has the first that is there. ``images`` is a list: the file
            with a plain extension, or those called ``0.jpg``, ``1.png`` and so on. ``images``, ``pixels`` and ``sizes`` may be missing,
            which is right where the text counts its pictures; a sample without another field is a bad one. None takes what
            ``default_fields`` finds in the shards.
        encode: fn(sample, context) -> dict, or its dotted path; None is ``encode.encode_sample``. Its attribute ``version`` goes into
            the identity of the token counts, ``count`` (sample, context) -> int gives them without encoding.

    Raises:
        ValueError: for fields that the default encoder cannot take, or that name no extension.
    """

    urls: str | Sequence[str]
    fields: Mapping[str, str] | None = None
    encode: str | Encode | None = None

    def __post_init__(self) -> None:
        for name, extensions in (self.fields or {}).items():
            if not isinstance(extensions, str) or not all(part.strip() for part in extensions.split(";")):
                raise ValueError(f"fields: {name}={extensions!r}: extensions separated by ';', as 'jpg;png'")
        if self.fields is not None and self.encode is None:
            _check_names(self.fields)


def _check_names(fields: Iterable[str]) -> None:
    names = set(fields)
    unknown = names - set(DEFAULT_FIELDS) - {"image"}
    if unknown or len(names & set(TEXTS)) != 1 or len(names & set(PICTURES)) > 1:
        raise ValueError(
            f"fields {', '.join(sorted(names))}: the default encoder takes exactly one of {', '.join(TEXTS)}, at most one of"
            f" {', '.join(PICTURES)}, and spans and sizes; change them, or give an `encode` function"
        )


def default_fields(extensions: Sequence[str]) -> dict[str, str]:
    """The fields of ``DEFAULT_FIELDS`` of which the shards have an extension; of several texts the first alone.

    Beside ``text``, a caption, a picture becomes ``image``, which must be there; unless the shard numbers its pictures.

    Args:
        extensions: of all members of the shards.

    Raises:
        ValueError: when there is no text.
    """
    plain = {extension.partition(".")[2] if extension.partition(".")[0].isdigit() else extension for extension in extensions}
    found = {name: wanted for name, wanted in DEFAULT_FIELDS.items() if plain & set(wanted.split(";"))}
    texts = [name for name in TEXTS if name in found]
    if not texts:
        raise ValueError(
            f"the shards hold {', '.join(sorted(extensions))}, and no text by a usual name"
            f" ({', '.join(DEFAULT_FIELDS[name] for name in TEXTS)}): say with `fields` which is which"
        )
    for name in texts[1:]:
        del found[name]
    if "pixels" in found:
        found.pop("images", None)
    if texts[0] == "text" and "images" in found and not set(extensions) - plain:
        found["image"] = found.pop("images")
    return found
