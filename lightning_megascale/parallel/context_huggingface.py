"""transformers models under context parallelism: attention through the public registries, masks from our document ids only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from lightning_megascale.parallel.context import Context

NAME = "megascale_context"
_KINDS = ("full_attention", "sliding_attention")


def check_published(model: nn.Module) -> list[str]:
    """A message for every setting of a transformers model that context parallelism cannot honour."""
    wrong = []
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values()
    for config in configs:
        kinds = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind not in _KINDS})
        if kinds:
            wrong.append(f"layers of kind {', '.join(kinds)} mix tokens otherwise than attention over all or a window of them")
        for name, what in (("attention_chunk_size", "chunked attention"), ("attn_logit_softcapping", "a cap on attention scores")):
            if getattr(config, name, None):
                wrong.append(f"{name}={getattr(config, name)}: {what} is not computed under context parallelism")
        for name in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"):
            if getattr(config, name, 0.0):
                wrong.append(f"{name}={getattr(config, name)}: dropout in attention has no counterpart; set config.{name} = 0")
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
            kind = rope.get("rope_type", rope.get("type"))
            wrong.append(f"rotary positions of type {kind!r} follow the largest position in a forward, which differs between ranks")
        for name in ("vision_config", "audio_config"):
            if getattr(config, name, None) is not None:
                wrong.append(f"its {name.partition('_')[0]} encoder attends to a sequence of its own, and one is cut")
        if getattr(config, "is_encoder_decoder", False):
            wrong.append("an encoder and a decoder have two sequences, and one is cut")
    if not getattr(model, "_supports_attention_backend", False) and not getattr(model, "_supports_sdpa", False):
        wrong.append("its attention does not come through transformers' attention registry, so it cannot be reached")
    return [f"context parallelism of {type(model).__name__}: {message}" for message in dict.fromkeys(wrong)]


def apply_published(model: Any, context: Context) -> None:
    """Puts the registered attention in place.

    Raises:
        ValueError: where transformers keeps another one (it only warns).
    """
    model.set_attn_implementation(NAME)
    for name, module in model.named_modules():
        module.__dict__["_megascale_context"] = (context, name)
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "_attn_implementation", NAME) != NAME:
            raise ValueError(
                f"{name or type(model).__name__} keeps its attention {config._attn_implementation!r}, and does not take the registered one "
                "that context parallelism needs: use context_parallel_size=1"
            )


def published_arguments(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments: no cache, which would be of a part of the row; labels where they stand, for classes that know how.

    Raises:
        ValueError: for arguments from which the model would make masks.
    """
    if kwargs.get("token_type_ids") is not None:
        raise ValueError("token_type_ids: masks that a model makes from them cannot be honoured under context parallelism: leave them out")
    if kwargs.get("use_cache") is None and hasattr(model.config, "use_cache"):
        kwargs = {**kwargs, "use_cache": False}
    return kwargs


@torch.compiler.disable
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each attention; see ``Context.attend``."""
    known = module.__dict__.get("_megascale_context")
    if known is None:
        raise ValueError(f"{type(module).__name__}: {NAME!r} is the attention of a context-parallel run, and this module is in none")
    context, name = known
    refused = [key for key in ("softcap", "s_aux", "output_attentions", "position_bias", "head_mask") if _is_set(options.get(key))]
    if attention_mask is not None:
        refused.append("attention_mask")
    if dropout:
        refused.append(f"dropout={dropout}")
    kinds, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and isinstance(index, int) and index < len(kinds) and kinds[index] == "sliding_attention" and sliding_window is None:
        refused.append("a window that only its mask knows")
    if refused:
        raise ValueError(f"{name} ({type(module).__name__}): {', '.join(refused)} cannot be honoured under context parallelism")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = context.attend(query, key, value, is_causal=causal, window=sliding_window, scale=scaling, name=name)
    return out.transpose(1, 2).contiguous(), None


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _mask(*args: Any, attention_mask: Tensor | None = None, use_vmap: bool = False, **options: Any) -> None:
    """No mask is ever made: documents and windows come with the batch. One that is asked for is refused, or it would be dropped."""
    if attention_mask is not None and not (attention_mask.ndim == 2 and bool(attention_mask.all())):  # some models make one of ones
        raise ValueError("attention_mask reached the model under context parallelism: put it into the batch, which the callback reads")
    if use_vmap:
        raise ValueError("the model makes a mask of its own (a prefix, blocks of an image), which context parallelism cannot honour")


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
