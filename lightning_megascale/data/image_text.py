"""ImageTextDataModule: image-text pairs, conversations with pictures and plain text in one staged mix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lightning_megascale.data import images
from lightning_megascale.data.encode import EncodeContext
from lightning_megascale.data.mixture import MixtureDataModule
from lightning_megascale.data.positioned import Batch
from lightning_megascale.data.ragged import Ragged


class ImageTextDataModule(MixtureDataModule):
    """``MixtureDataModule`` for samples with pictures: none, one or several in each.

    Batches have two keys more: ``pixel_values``, a ``Ragged`` of pictures (N, 3, S, S), uint8 from the loader and normalised to float32 on
    the device, in the order of their placeholders in the rows, and ``image_sizes``, a ``Ragged`` (N, 2) of heights and widths before
    resizing. A batch without pictures has empty ones, so that every rank can run its vision encoder.

    In the text a picture is ``image_token``, once; here it becomes as many as the encoder makes of the picture
    (``images.image_token_count``). Truncation never cuts a picture in two.

    Args:
        sources, stages, tokenizer, sequence_length, batch_size: as ``MixtureDataModule``.
        image_size: S, in pixels.
        image_patch, image_merge, image_extra: of the vision encoder: edge of a patch in pixels, edge of the squares of patches that become
            one token, tokens beside the patches.
        image_mode: "clip" (shorter edge to S, then the centre) or "siglip" (both edges to S).
        image_mean, image_std: of each channel, for pixels from 0 to 1; None: those of ``image_mode``.
        image_token: the placeholder, a special token of the tokenizer.
        options: further arguments of ``MixtureDataModule``; documents are truncated here by default.

    Raises:
        ValueError: as ``MixtureDataModule``; for a placeholder that is no special token.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        stages: Sequence[Mapping[str, Any]] | None = None,
        tokenizer: Any = None,
        sequence_length: int = 2048,
        batch_size: int = 1,
        *,
        image_size: int = 336,
        image_patch: int = 14,
        image_merge: int = 1,
        image_extra: int = 0,
        image_mode: images.Mode = "clip",
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        image_token: str = "<image>",
        **options: Any,
    ) -> None:
        super().__init__(sources, stages, tokenizer, sequence_length, batch_size, **{"long_documents": "truncate", **options})
        self.image_size, self.image_mode, self.image_token = image_size, image_mode, image_token
        self.image_tokens = images.image_token_count(image_size, image_size, image_patch, merge=image_merge, extra=image_extra)
        of_mode = (images.CLIP_MEAN, images.CLIP_STD) if image_mode == "clip" else (images.SIGLIP_MEAN, images.SIGLIP_STD)
        self.image_mean, self.image_std = image_mean or of_mode[0], image_std or of_mode[1]
        if self.image_tokens >= sequence_length:
            raise ValueError(
                f"sequence_length={sequence_length}: one picture of image_size={image_size} takes {self.image_tokens} tokens; choose a "
                "longer sequence, a smaller picture, or image_merge"
            )

    def context(self) -> EncodeContext:
        """What encode functions get."""
        token = self.tokenizer.convert_tokens_to_ids(self.image_token)
        added = self.tokenizer.added_tokens_decoder.get(token)
        if added is None or not added.special or added.content != self.image_token:
            raise ValueError(
                f"image_token={self.image_token!r} is no special token of the tokenizer: add it with tokenizer.add_special_tokens("
                f"{{'additional_special_tokens': [{self.image_token!r}]}}), and give the model an embedding for it"
            )
        return EncodeContext(
            self.tokenizer,
            self.sequence_length,
            image_size=self.image_size,
            image_tokens=self.image_tokens,
            image_token_id=int(token),
            image_mode=self.image_mode,
            seed=self.seed,
        )

    @property
    def _collate(self) -> Callable[[list[Any]], Batch]:
        return partial(_with_pictures, super()._collate, self.image_size)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalises the pictures where they now are."""
        pixels = batch.get("pixel_values") if isinstance(batch, dict) else None
        if isinstance(pixels, Ragged) and pixels.values.dtype == torch.uint8:
            batch = {**batch, "pixel_values": Ragged(images.normalise(pixels.values, self.image_mean, self.image_std), pixels.counts)}
        return batch


def _with_pictures(collate: Callable[[list[Any]], Batch], size: int, items: list[Any]) -> Batch:
    batch = collate(items)
    nothing = {"pixel_values": torch.empty((0, 3, size, size), dtype=torch.uint8), "image_sizes": torch.empty((0, 2), dtype=torch.int64)}
    for key, like in nothing.items():
        if key not in batch:
            batch[key] = Ragged(like, torch.zeros(len(batch["input_ids"]), dtype=torch.int64))
    return batch
