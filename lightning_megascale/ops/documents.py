"""Packed rows: where each token stands in its document."""

from __future__ import annotations

import torch
from torch import Tensor


def positions_in(documents_BL: Tensor) -> Tensor:
    """(B, L) int64: 0, 1, 2, ... in every run of equal ids, as a row of that document alone would count.

    Args:
        documents_BL: integer (B, L), the document of each token; neighbours with equal ids are of one.
    """
    places_L = torch.arange(documents_BL.shape[1], device=documents_BL.device)
    starts_BL = torch.zeros_like(documents_BL, dtype=torch.bool)
    starts_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    return places_L - (places_L * starts_BL).cummax(1).values
