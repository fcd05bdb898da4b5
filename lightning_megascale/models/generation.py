"""Greedy and sampled continuation, one whole forward per token: small, and right for any model and any plan.

Shapes: B batch, L sequence, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD_TO = 64  # rows given to the model have a multiple of this length, so that ranks can split the sequence


@torch.no_grad()
def generate(
    model: nn.Module, input_ids: Tensor, max_new_tokens: int, temperature: float = 0.0, generator: torch.Generator | None = None
) -> Tensor:
    """Continues every row. Beyond the model's longest row (``model.config.max_position_embeddings``) the window slides.

    Args:
        model: causal, maps ``input_ids`` to logits (or to an object with ``logits``); evaluated in eval mode, then put back.
        input_ids: (B, L) integer prompts of equal length, at least one token.
        max_new_tokens: tokens to append.
        temperature: divides the logits before sampling; 0 takes the likeliest token.
        generator: for sampling, on the logits' device; give equal seeds on the ranks of one model.

    Returns:
        (B, L + max_new_tokens).

    Raises:
        ValueError: for an empty prompt or negative numbers.
    """
    if input_ids.ndim != 2 or input_ids.shape[1] < 1:
        raise ValueError(f"input_ids have shape {tuple(input_ids.shape)}: must be (rows, tokens) with at least one token")
    if temperature < 0 or max_new_tokens < 0:
        raise ValueError(f"temperature={temperature}, max_new_tokens={max_new_tokens}: must not be negative")
    config = getattr(model, "config", None)
    longest = getattr(config, "max_position_embeddings", None) or input_ids.shape[1] + max_new_tokens
    training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            window_BL = input_ids[:, -longest:]
            length = window_BL.shape[1]
            padding = max(0, min(-length % PAD_TO, longest - length))  # on the right, where causal attention never looks
            logits_BV = logits_of(model(F.pad(window_BL, (0, padding))))[:, length - 1].float()
            input_ids = torch.cat([input_ids, _choose(logits_BV, temperature, generator)], dim=1)
    finally:
        model.train(training)
    return input_ids


def logits_of(output: Any) -> Tensor:
    """(B, L, V) of a model's output: a tensor, or an object with ``logits`` as Hugging Face's.

    Raises:
        ValueError: when it is neither.
    """
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise ValueError(f"the model returned {type(output).__name__}: it must return logits, or an object with .logits")
    return logits


def _choose(logits_BV: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """(B, 1) tokens."""
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True)
    return torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)
