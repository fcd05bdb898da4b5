"""What a call of a transformers model may ask for: outputs that no rank has whole are refused, not handed out in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_megascale.plan import ParallelPlan


def check_call(model: nn.Module, plan: ParallelPlan, arguments: Mapping[str, Any]) -> None:
    """Looks at the arguments of a call, and at the model's config where they say nothing.

    Args:
        model: of transformers.
        plan: resolved.
        arguments: by name.

    Raises:
        ValueError: the same on all ranks.
    """
    piped, split = plan.pipeline_parallel_size > 1, plan.tensor_parallel_size > 1
    parts = int(plan.data_parallel_size) > 1 or plan.context_parallel_size > 1 or plan.sequence_parallel
    if _asked(model, arguments, "output_router_logits") and (piped or parts):
        raise ValueError(
            "output_router_logits=True adds a balance loss over the routers of all layers and over the tokens of the batch, which no rank "
            "sees whole under data, context, sequence or pipeline parallelism: leave it False (ExpertBalanceMonitor shows how even the "
            "load of experts is), or use tensor parallelism alone"
        )
    if _asked(model, arguments, "output_attentions") and (piped or split):
        where, own = ("pipeline", "layers") if piped else ("tensor-parallel", "heads")
        raise ValueError(
            f"output_attentions=True: a {where} rank has the attention maps of its own {own} only: leave it out, "
            f"or use {'pipeline' if piped else 'tensor'}_parallel_size=1"
        )
    if _asked(model, arguments, "output_hidden_states") and piped:
        raise ValueError(
            "output_hidden_states=True: a pipeline's last stage has the hidden states of its own layers only: leave it out, or use "
            "pipeline_parallel_size=1"
        )


def _asked(model: nn.Module, arguments: Mapping[str, Any], name: str) -> bool:
    if arguments.get(name) is not None:
        return bool(arguments[name])
    config: Any = getattr(model, "config", None)
    inner = config.get_text_config() if hasattr(config, "get_text_config") else None
    return any(bool(getattr(source, name, False)) for source in (config, inner))


def guard_saving(model: Any) -> None:
    """``save_pretrained`` writes what one process holds: refused where that is a part, instead of leaving a folder without weights."""
    if not hasattr(model, "save_pretrained"):
        return
    whole = model.save_pretrained

    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise ValueError(
                f"{type(model).__name__.removeprefix('FSDP')}.save_pretrained: this rank holds a part of the model. Save a "
                "checkpoint and export it: megascale checkpoint export PATH OUT format=safetensors writes what from_pretrained(OUT) reads"
            )
        return whole(*args, **kwargs)

    model.save_pretrained = save_pretrained


def guard_calls(model: nn.Module, plan: ParallelPlan) -> None:
    """Makes every call of the model be looked at first. (A pipeline looks at the calls that it captures.)"""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        check_call(module, plan, kwargs)
        return args, without_cache(module, kwargs)

    model.register_forward_pre_hook(before, with_kwargs=True)


def without_cache(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A training call's arguments. With positions that begin anew transformers keeps the documents of a packed row apart, but not where it
    makes a cache, which is its default: then they would attend to each other without a word."""
    asks = kwargs.get("use_cache") is None and kwargs.get("position_ids") is not None
    if asks and torch.is_grad_enabled() and hasattr(getattr(model, "config", None), "use_cache"):
        return {**kwargs, "use_cache": False}
    return kwargs
