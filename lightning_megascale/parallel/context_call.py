"""What a model is called with under context parallelism: the positions of this rank's tokens, and no mask of the row's own shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megascale.parallel.context import Context
from lightning_megascale.parallel.layouts import is_published


def prepare_call(
    model: nn.Module, context: Context, args: tuple, kwargs: dict[str, Any], forward: Callable[..., Any] | None = None
) -> tuple[tuple, dict[str, Any]]:
    """A call of the model with what follows from the layout of the batch: positions, and no mask of the row's own shape.

    Args:
        model: the parallelized module.
        context: of the run.
        args, kwargs: what the step gave.
        forward: whose arguments count; None: the model's.

    Raises:
        ValueError: for positions that are not those of this rank's tokens.
    """
    laid = context.laid
    if laid is None:
        return args, kwargs
    signature = inspect.signature(forward or model.forward)
    try:
        given = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return args, kwargs  # the call itself says what is wrong
    names = list(signature.parameters)
    more = next((name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
    takes = {*names, *(["position_ids"] if more and is_published(model) else [])}
    everything = {**given, **given.get(more, {})} if more else given
    laid = _fitting(everything, laid, context)

    def put(name: str, value: Tensor | None) -> None:
        nonlocal args, kwargs
        if name in names and names.index(name) < len(args):
            args = tuple(value if place == names.index(name) else old for place, old in enumerate(args))
        else:
            kwargs = {**kwargs, name: value}

    own = everything.get("position_ids")
    if context.gives_positions and own is None and "position_ids" in takes:
        put("position_ids", laid)
    elif own is not None and own is not laid and context.probe is None and not _are_positions(own, laid):
        context.object_to(OWN_POSITIONS)
    mask = everything.get("attention_mask")
    if isinstance(mask, Tensor) and tuple(mask.shape) == tuple(laid.shape):
        put("attention_mask", None)
    elif mask is None and context.probe is None and context.shard is not None and context.shard.left_padded:
        context.object_to(LEFT_PADDED)
    if is_published(model):
        from lightning_megascale.parallel.context_huggingface import published_arguments

        kwargs = published_arguments(model, kwargs)
    return args, kwargs


def _fitting(given: dict[str, Any], positions: Tensor, context: Context) -> Tensor:
    """The positions of the tokens that are in the call: a step that shifts may have cut the last place off.

    Raises:
        ValueError: for another number of tokens.
    """
    tokens = next((x for x in given.values() if isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point()), None)
    if tokens is None or tuple(tokens.shape) == tuple(positions.shape):
        return positions
    if tokens.shape[0] == positions.shape[0] and 0 < positions.shape[1] - tokens.shape[1] <= context.spare:
        return positions[:, : tokens.shape[1]]
    raise ValueError(
        f"the model is called with (rows, tokens) = {tuple(tokens.shape)} and this rank's part of the batch is {tuple(positions.shape)}: "
        "under context parallelism a step passes the rows that it gets, whole (generation and rows made in the step cannot be cut)"
    )


def _are_positions(given: Any, positions: Tensor) -> bool:
    if not isinstance(given, Tensor) or given.ndim != 2 or given.shape[1] != positions.shape[1]:
        return False
    return torch.equal(given.to(positions).expand_as(positions), positions)


LEFT_PADDED = (
    "the batch's attention_mask leaves out tokens at the start of rows, and the step does not give it to the model, which on one device "
    "would attend to them: under context parallelism padding is never attended to. Give it to the model, or leave it out of the batch"
)
OWN_POSITIONS = (
    "training_step gives the model position_ids that are not those of this rank's tokens (counted from the length of what it got?): "
    "leave them out, or pass batch['position_ids']"
)
