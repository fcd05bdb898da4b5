"""A loss of a layer's own (router balance, z-loss) that no output carries: it joins the backward with the weight of the step's loss.

What a layer must know of the microbatch it runs on, and cannot see in its input, comes from here as well: which tokens are padding, and
which document of a packed row each belongs to.
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
        documents: integer (B, L), which document of its row a token belongs to; None: rows are whole, or attention knows already.

    Attributes:
        labels_per_token: labels over tokens of all that run together with this microbatch (its rows, on all ranks; the microbatches of a
            pipeline), 0-dim or a number; known when its backward starts.
        is_used: a layer's loss has this weight.
        seen: over how many tokens the first such loss is a mean, 0-dim; None when none says.
    """

    def __init__(
        self,
        value: Tensor | float | None = None,
        unit: Tensor | float | None = None,
        tokens: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> None:
        self.value, self.unit, self.tokens, self.documents = value, unit, tokens, documents
        self.labels_per_token: Tensor | float = 1.0
        self.is_used = False
        self.seen: Tensor | None = None

    def held(self, slices: int) -> Tensor | None:
        """This rank's tokens, 0-dim: counted by the mask, else those that a layer saw; None when neither is known.

        Args:
            slices: in how many equal parts the sequence is dealt out where layers see it.
        """
        if self.tokens is not None:
            return self.tokens.sum()
        return None if self.seen is None else self.seen * slices


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


def current_documents() -> Tensor | None:
    """Integer (B, L): the document of each token of the microbatch that runs, where attention has to keep them apart; None: it has not."""
    return _current[0].documents


def add_auxiliary_loss(hidden: Tensor, loss: Tensor, *, tokens: Tensor | None = None) -> Tensor:
    """``hidden`` unchanged, with ``loss`` added to whatever loss its use ends in.

    The step's loss is a mean over a microbatch, weighted by what the microbatch counts; ``loss``, a mean over the same microbatch, takes
    the same weight, on every pipeline stage and in every microbatch. Without MegascaleStrategy the weight is 1.

    A layer's loss is a mean over tokens, though, and a rank may hold many tokens of which few have a label. With ``tokens`` its weight
    is their share of all tokens that run together (on all ranks, in all microbatches of a pipeline): then the sum is the mean over these
    tokens, however they are dealt out. Batches of an accumulation weigh by their labels, as the step's loss does.

    Args:
        hidden: any tensor on the way to the step's loss.
        loss: 0-dim, differentiable.
        tokens: 0-dim, over how many tokens ``loss`` is a mean; None: over what the step's loss counts.

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
    if tokens is not None and weight.seen is None:
        weight.seen = tokens.detach()
    joined: Tensor = _Join.apply(hidden, loss.reshape(()), weight, None if tokens is None else tokens.detach())
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, weight: MicrobatchWeight, tokens: Tensor | None) -> Tensor:
        ctx.weight, ctx.tokens, ctx.like = weight, tokens, loss.new_empty(0)
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        value = ctx.weight.value
        if value is None:
            raise RuntimeError("a backward ran before the strategy knew what its microbatch counts")
        if ctx.tokens is not None and ctx.weight.unit is not None:
            value = ctx.tokens.double() * ctx.weight.labels_per_token * ctx.weight.unit
        return gradient, torch.as_tensor(value, dtype=ctx.like.dtype, device=ctx.like.device).reshape(()), None, None
