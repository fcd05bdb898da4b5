"""Lightning's precision choice for sharded models: dtypes go to FSDP2, autocast stays out, clipping sees every mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.optim import Optimizer

from lightning_megascale.parallel.clip import clip_grad_norm_


class ShardedMixedPrecision(Precision):
    """``precision="bf16-mixed"`` without autocast: FSDP2 gathers and computes in bfloat16, keeps float32 parameters and optimizer.

    Autocast over FSDP2 would gather float32 parameters and cast them on each use: twice the bytes for the same numbers.
    """

    precision = "bf16-mixed"
    param_dtype = torch.bfloat16


def for_sharded_model(plugin: Precision) -> tuple[Precision, torch.dtype | None]:
    """The plugin to use with FSDP2 in place of Lightning's choice, and FSDP2's ``param_dtype``.

    Raises:
        ValueError: for a precision that no parity test proves on shards.
    """
    if isinstance(plugin, ShardedMixedPrecision) or (isinstance(plugin, MixedPrecision) and plugin.precision == "bf16-mixed"):
        return ShardedMixedPrecision(), ShardedMixedPrecision.param_dtype
    if type(plugin) in (Precision, DoublePrecision) or (type(plugin) is HalfPrecision and plugin.precision == "bf16-true"):
        return plugin, None
    reason = "its loss scaler does not work on sharded gradients" if isinstance(plugin, MixedPrecision) else "no test proves it on shards"
    raise ValueError(
        f"precision={getattr(plugin, 'precision', type(plugin).__name__)!r}: {reason}; use 'bf16-mixed', 'bf16-true', '32-true', or "
        "plugins=[DoublePrecision()] for float64"
    )


def reduction_dtype(module: torch.nn.Module, param_dtype: torch.dtype | None, wanted: str | None) -> torch.dtype | None:
    """FSDP2's ``reduce_dtype``: the wanted one where gradients are half precision; None (their own dtype) where they are wider.

    Args:
        module: whose floating parameters tell the dtype of gradients when ``param_dtype`` is None.
        param_dtype: dtype of forward and backward under mixed precision.
        wanted: "float32", "bfloat16" or None, from the plan.
    """
    computed = param_dtype or next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    return getattr(torch, wanted) if wanted is not None and computed.itemsize < 4 else None


def install_clipping(
    plugin: Precision,
    seen: Callable[[torch.Tensor], None],
    spread: Callable[[], tuple[dist.ProcessGroup | None, Collection[int]]] = lambda: (None, ()),
) -> None:
    """Lets the plugin clip over several meshes; torch's own function fails on them.

    Args:
        plugin: any precision plugin.
        seen: is given the norm before clipping.
        spread: the pipeline group and the copies of ``total_norm``, asked at each step.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        pipeline, copies = spread()
        seen(clip_grad_norm_(plugin.main_params(optimizer), float(clip_val), pipeline=pipeline, copies=copies))

    def clip_grad_by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        for parameter in plugin.main_params(optimizer):
            if parameter.grad is not None:
                local: Any = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                local.clamp_(-clip_val, clip_val)

    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]
    plugin.clip_grad_by_value = clip_grad_by_value  # type: ignore[method-assign]
