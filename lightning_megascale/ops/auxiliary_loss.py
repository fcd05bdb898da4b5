"""A loss of a layer's own (router balance, z-loss) that no output carries: it joins the backward with the weight of the step's loss.

What a layer must know of the microbatch it runs on, and cannot see in its input, comes from here as well: which tokens are padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class MicrobatchWeight:
    """What multiplies the mean loss of one microbatch in its backward; known at the latest when that backward starts.

    Args:
        value: 0-dim tensor or number; None until it is known.
        unit: what one label of the microbatch weighs, 0-dim tensor or number: ``value`` over the labels that it counts; None where a step's
            loss is not weighted at all.
        tokens: bool (B, L), this rank's tokens that are no padding; None: all of them.
    """

    def __init__(self, value: Tensor | float | None = None, unit: Tensor | float | None = None, tokens: Tensor | None = None) -> None:
        self.value, self.unit, self.tokens = value, unit, tokens
        self.is_used = False


_current: list[MicrobatchWeight] = [MicrobatchWeight(1.0)]


def set_microbatch_weight(weight: MicrobatchWeight) -> None:
    """The auxiliary losses of the forward that follows are weighted by it. For the strategy, not for models."""
    _current[0] = weight


@contextmanager
def weighed_as(weight: MicrobatchWeight) -> Iterator[None]:
    """Inside, auxiliary losses have this weight; afterwards again the one they had."""
    before = _current[0]
    set_microbatch_weight(weight)
    try:
        yield
    finally:
        set_microbatch_weight(before)


def current_token_mask() -> Tensor | None:
    """Bool (B, L): the tokens of the microbatch that runs that are no padding; None: all of them, or nothing is known."""
    return _current[0].tokens


def add_auxiliary_loss(hidden: Tensor, loss: Tensor, *, tokens: Tensor | None = None, labels_per_token: Tensor | float = 1.0) -> Tensor:
    """``hidden`` unchanged, with ``loss`` added to whatever loss its use ends in.

    The step's loss is a mean over a microbatch, weighted by what the microbatch counts; ``loss``, a mean over the same microbatch, takes
    the same weight, on every pipeline stage and in every microbatch. Without MegascaleStrategy the weight is 1.

    A layer's loss is a mean over tokens, though, and a microbatch may hold many tokens of which few have a label. With ``tokens`` its
    weight is that of so many labels, times ``labels_per_token``: then the sum over microbatches and ranks is the mean over all tokens of
    the step, however they are dealt out.

    Args:
        hidden: any tensor on the way to the step's loss.
        loss: 0-dim, differentiable.
        tokens: 0-dim, over how many tokens ``loss`` is a mean; None: over what the step's loss counts.
        labels_per_token: labels that a whole step counts over the tokens it holds, 0-dim or a number.

    Returns:
        ``hidden``, of the same shape and values.

    Raises:
        ValueError: for a loss that is no single number.
    """
    if loss.numel() != 1:
        raise ValueError(f"the auxiliary loss has shape {tuple(loss.shape)}: it must be a single number, a mean over the microbatch")
    if not (torch.is_grad_enabled() and loss.requires_grad):
        return hidden
    weight = _current[0]
    weight.is_used = True
    labels = None if tokens is None else tokens.detach() * labels_per_token
    joined: Tensor = _Join.apply(hidden, loss.reshape(()), weight, labels)
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, weight: MicrobatchWeight, labels: Tensor | None) -> Tensor:
        ctx.weight, ctx.labels, ctx.like = weight, labels, loss.new_empty(0)
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        value = ctx.weight.value
        if value is None:
            raise RuntimeError("a backward ran before the strategy knew what its microbatch counts")
        if ctx.labels is not None and ctx.weight.unit is not None:
            value = ctx.labels * ctx.weight.unit
        return gradient, torch.as_tensor(value, dtype=ctx.like.dtype, device=ctx.like.device).reshape(()), None, None
