"""Proof that a loss may be cut into microbatches: once, two microbatches together must give the weighted mean of what they give apart.

A loss that looks at a whole batch (in-batch negatives, a deviation over logits), a sum in place of a mean, or a mean over something that no
label tells would give another number under a pipeline without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_megascale.strategies import pipeline_guards as guards

LARGEST_BYTES = 2**30  # of the joined outputs


def is_opaque(leaves: Iterable[Any]) -> bool:
    """Whether an output holds objects that may hide tensors."""
    return any(not isinstance(leaf, (Tensor, bool, int, float, str, type(None))) for leaf in leaves)


class LossProof:
    """Notes the first microbatch of a step and compares with the second; see the file's first lines."""

    def __init__(self) -> None:
        self.is_done = False
        self._first: tuple[list[Any], Any, float, float] | None = None

    def note(self, index: int, rows: int, output: Any, loss: Tensor, weight: Tensor, loss_of: Callable[[Any], Tensor | None]) -> None:
        """A microbatch's outputs and loss.

        Args:
            index, rows: of the microbatch.
            output: what the model returned for it.
            loss: its mean loss.
            weight: what it counts.
            loss_of: (joined output of microbatches 0 and 1) -> their mean loss by the step itself; None when it draws random numbers.

        Raises:
            ValueError: when the joined loss is another number.
        """
        if self.is_done or index > 1:
            return
        leaves, spec = tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # with one row a tensor of one number may be anything
        cut = bool(tensors) and not is_opaque(leaves) and all(leaf.ndim > (rows == 1) and leaf.shape[0] == rows for leaf in tensors)
        size = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
        if not cut or size > LARGEST_BYTES // 2 or not float(weight) > 0:
            self.is_done, self._first = not cut or size > LARGEST_BYTES // 2, None  # nothing to join, or too much; masked: next time
            return
        if index == 0:
            self._first = ([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec, float(loss), float(weight))
            return
        first, self._first = self._first, None
        if first is None or first[1] != spec:
            return
        self.is_done = True
        joined = [torch.cat([a, b.detach()]) if isinstance(b, Tensor) else b for a, b in zip(first[0], leaves)]
        with torch.no_grad():
            together = loss_of(tree_unflatten(joined, spec))
        if together is None:
            return
        apart = (first[2] * first[3] + float(loss) * float(weight)) / (first[3] + float(weight))
        half = any(leaf.dtype.itemsize < 4 for leaf in tensors if leaf.is_floating_point())
        tolerance = 1e-2 if half else 1e-8 if loss.dtype == torch.float64 else 1e-4
        if not abs(float(together) - apart) <= tolerance * max(1.0, abs(apart)):
            raise ValueError(guards.NOT_A_MEAN.format(apart=apart, together=float(together)))
