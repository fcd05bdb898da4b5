"""What a LightningModule's training_step returned, read as (loss, what it counts)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_megascale.parallel.loss_scale import Weights


def read_output(output: Any) -> tuple[Any, torch.Tensor | None, Weights | None]:
    """Reads a step's output.

    Args:
        output: a 0-dim loss, a mapping with ``loss``, or a mapping with ``loss_sum`` and ``num_tokens``.

    Returns:
        (what Lightning gets to see, its loss or None, the weights if the step gave them). ``loss_sum`` becomes a mean under
        ``loss``; the scale undoes that division exactly where it multiplies by ``num_tokens``.

    Raises:
        ValueError: for ``loss_sum`` without ``num_tokens`` or the other way round, or a loss that is no scalar.
    """
    if isinstance(output, torch.Tensor):
        return output, _scalar(output, "loss"), None
    if not isinstance(output, Mapping):
        return output, None, None
    if ("loss_sum" in output) != ("num_tokens" in output):
        raise ValueError("training_step returned one of 'loss_sum' and 'num_tokens': return both, or a scalar mean as 'loss'")
    if "loss_sum" not in output:
        loss = output.get("loss")
        return output, _scalar(loss, "loss") if isinstance(loss, torch.Tensor) else None, None
    loss_sum = _scalar(output["loss_sum"], "loss_sum")
    tokens = torch.as_tensor(output["num_tokens"], device=loss_sum.device).detach().double()
    loss = loss_sum / tokens.clamp(min=1.0).to(loss_sum.dtype)
    return {**output, "loss": loss}, loss, Weights(tokens)


def _scalar(loss: torch.Tensor, name: str) -> torch.Tensor:
    if loss.numel() != 1:
        raise ValueError(f"training_step's {name} has shape {tuple(loss.shape)}: it must be a single number (a mean, or a sum of tokens)")
    return loss.reshape(())
