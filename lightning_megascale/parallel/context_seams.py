"""Where tokens of other ranks come in: every attention of a model is sent through ``ops/context_attention.py``, by one of three seams.

By what a model is: an attention module with a replaceable, parameter-free ``core`` gets ours; a transformers model comes
through its public attention registry (``context_huggingface.py``); any other attention module has its calls of
``F.scaled_dot_product_attention`` taken over while its forward runs (not around the whole model: a recomputed block would then
attend inside its shard). What none of them reaches is found by the probe (``context_probe.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megascale.layout import ModelLayout
from lightning_megascale.parallel.context import Context
from lightning_megascale.parallel.layouts import block_names, is_published
from lightning_megascale.parallel.mixin import become
from lightning_megascale.plan import ParallelPlan


class ContextCore(nn.Module):
    """Takes the place of an attention module's ``core``."""

    def __init__(self, context: Context, name: str) -> None:
        super().__init__()
        self.context, self.name = context, name

    @torch.compiler.disable
    def forward(self, q_BNSH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, is_causal: bool = True) -> Tensor:
        return self.context.attend(q_BNSH, k_BGSH, v_BGSH, is_causal=is_causal, window=None, scale=None, name=self.name)


class _Taken(TorchFunctionMode):
    """While an attention module runs: its calls of ``F.scaled_dot_product_attention`` go over all ranks."""

    def __init__(self, context: Context, name: str, training: bool) -> None:
        super().__init__()
        self.context, self.name, self.training = context, name, training

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is F.multi_head_attention_forward:
            raise ValueError(
                f"{self.name}: nn.MultiheadAttention attends inside of torch, where other ranks' tokens cannot be brought in: call "
                "F.scaled_dot_product_attention on projected queries, keys and values"
            )
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise ValueError(
                f"{self.name}: attn_mask of shape {tuple(attn_mask.shape)} cannot be honoured under context parallelism, where no rank has "
                "all keys: use is_causal=True, document_ids in the batch for packed documents, and a 2-D attention_mask there for padding"
            )
        if dropout_p:
            raise ValueError(f"{self.name}: dropout_p={dropout_p} in attention has no counterpart under context parallelism: set it to 0")
        if query.ndim != 4 or value.shape[-1] != query.shape[-1]:
            raise ValueError(
                f"{self.name}: queries {tuple(query.shape)} and values {tuple(value.shape)}: context parallelism takes (B, heads, tokens, "
                "head dim) with one head dim"
            )
        if not enable_gqa and key.shape[1] != query.shape[1]:
            key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))  # as torch broadcasts a single head
        return self.context.attend(query, key, value, is_causal=is_causal, window=None, scale=scale, name=self.name)


class ContextAttention:
    """Mixin of an attention module that calls ``F.scaled_dot_product_attention``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        context, name = self.__dict__["_megascale_context"]
        with _Taken(context, name, self.training):  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def attention_names(model: nn.Module, layout: ModelLayout | None) -> tuple[str, ...]:
    """The attention modules: by the layout, else those whose class says so, outermost first."""
    names = [name for name, _ in model.named_modules()]
    if layout is not None and layout.attention:
        return layout.resolve(names)["attention"]
    found = [name for name, module in model.named_modules() if "attention" in type(module).__name__.lower() or _is_attn(type(module))]
    return tuple(name for name in found if not any(name.startswith(other + ".") for other in found))


def _is_attn(kind: type) -> bool:
    return kind.__name__.lower().endswith("attn")


def check_context(model: nn.Module, layout: ModelLayout | None, plan: ParallelPlan) -> list[str]:
    """A message for every rule of context parallelism that a model violates."""
    if is_published(model):
        from lightning_megascale.parallel.context_huggingface import check_published

        return check_published(model)
    wrong = []
    if hasattr(model, "training_step"):
        wrong.append(
            f"context_parallel_size={plan.context_parallel_size}: the layers of {type(model).__name__} are its own attributes, so no call "
            "of a model can be given this rank's positions: put them into one child module with a forward of its own, and where it has "
            "several children name one, as in MegascaleStrategy(module='model')"
        )
    elif not attention_names(model, layout):
        wrong.append(
            f"context_parallel_size={plan.context_parallel_size}: no module of {type(model).__name__} is called attention by its class, so "
            "it is unknown where tokens of other ranks come in: name them with layout=ModelLayout(attention='...')"
        )
    multi = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    if multi:
        wrong.append(
            f"{', '.join(multi[:4])}: nn.MultiheadAttention attends inside of torch, where other ranks' tokens cannot be brought in: call "
            "F.scaled_dot_product_attention on projected queries, keys and values"
        )
    return wrong


def apply_context(model: nn.Module, layout: ModelLayout | None, context: Context) -> None:
    """Sends the attention of a model, or of this rank's stages of it, through ``context``."""
    if is_published(model):
        from lightning_megascale.parallel.context_huggingface import apply_published

        apply_published(model, context)
        blocks = block_names(model, layout)
        context.expected = tuple(name for name in blocks if any(True for _ in model.get_submodule(name).parameters()))
    else:
        context.expected = tuple(n for n in attention_names(model, layout) if any(True for _ in model.get_submodule(n).parameters()))
        for name in attention_names(model, layout):
            module = model.get_submodule(name)
            core = getattr(module, "core", None)
            if isinstance(core, nn.Module) and not any(True for _ in core.parameters()):
                module.core = ContextCore(context, name)
            elif name in context.expected:
                become(module, ContextAttention).__dict__["_megascale_context"] = (context, name)
