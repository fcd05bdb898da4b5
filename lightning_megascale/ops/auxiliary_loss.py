"""A loss of a layer's own (router balance, z-loss) that no output carries: it joins the backward with the weight of the step's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class MicrobatchWeight:
    """What multiplies the mean loss of one microbatch in its backward; known at the latest when that backward starts.

    Args:
        value: 0-dim tensor or number; None until it is known.
    """

    def __init__(self, value: Tensor | float | None = None) -> None:
        self.value = value
        self.is_used = False


_current: list[MicrobatchWeight] = [MicrobatchWeight(1.0)]


def set_microbatch_weight(weight: MicrobatchWeight) -> None:
    """The auxiliary losses of the forward that follows are weighted by it. For the strategy, not for models."""
    _current[0] = weight


def add_auxiliary_loss(hidden: Tensor, loss: Tensor) -> Tensor:
    """``hidden`` unchanged, with ``loss`` added to whatever loss its use ends in.

    The step's loss is a mean over a microbatch, weighted by what the microbatch counts; ``loss``, a mean over the same microbatch, takes
    the same weight, on every pipeline stage and in every microbatch. Without MegascaleStrategy the weight is 1.

    Args:
        hidden: any tensor on the way to the step's loss.
        loss: 0-dim, differentiable.

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
    joined: Tensor = _Join.apply(hidden, loss.reshape(()), weight)
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, weight: MicrobatchWeight) -> Tensor:
        ctx.weight, ctx.like = weight, loss.new_empty(0)
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        value = ctx.weight.value
        if value is None:
            raise RuntimeError("a backward ran before the strategy knew what its microbatch counts")
        return gradient, torch.as_tensor(value, dtype=ctx.like.dtype, device=ctx.like.device).reshape(()), None
