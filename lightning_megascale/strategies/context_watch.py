"""What a step hands to torch by itself: the targets of its cross-entropies, and attention outside of the parallelized module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megascale.parallel.loss_scale import IGNORE_INDEX

OUTSIDE = (
    "training_step calls F.scaled_dot_product_attention outside of the parallelized module (another model, a teacher, a probe on hidden "
    "states), where it would see this rank's tokens only: make it part of that module, in a module named by layout.attention"
)


class SeamWatch(TorchFunctionMode):
    """Collects the targets of torch's cross-entropies."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Tensor] = []
        self.outside = False

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self.outside = True  # ours never gets here
        if function in (F.cross_entropy, F.nll_loss):
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            if isinstance(target, Tensor) and not target.is_floating_point():
                self._seen.append(target.detach())
        return function(*args, **kwargs)

    def targets(self) -> Tensor | None:
        """Those that count, in order; None when there were none at all."""
        return torch.cat([counted_labels(target) for target in self._seen]) if self._seen else None


def counted_labels(labels: Tensor) -> Tensor:
    """Those that are not ignored, in order."""
    labels = labels.flatten()
    return labels[labels != IGNORE_INDEX]
