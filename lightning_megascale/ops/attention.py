"""Attention of one block of queries and keys with its log-sum-exp, forward and backward: what exact distributed attention is made of.

A kernel computes softmax(q k^T scale) v over the keys it is given and the log of the sum it divided by, so that results over disjoint keys
can be merged; its backward takes the log-sum-exp over *all* keys, and gives this block's part of the gradients. Those for GPUs are in
``attention_cuda.py``. Shapes: B batch, N query heads, G key/value heads (G divides N; keys are never expanded), L queries, S keys, H head
dim.

Source: Dao 2023, "FlashAttention-2", section 3.1 and algorithms 1 and 2 (forward with log-sum-exp, backward from it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_megascale.ops.attention_cuda import FLASH_KERNELS, activate, missing


@dataclass(frozen=True)
class BlockOptions:
    """What a block computes.

    Args:
        scale: of the scores.
        is_causal: L = S and row i sees keys up to i; False: all keys.
        window: row i sees the key j only if i + ahead - j < window; None: however far.
        ahead: by how many positions the first query stands after the first key; 0 in a causal block.
    """

    scale: float
    is_causal: bool = False
    window: int | None = None
    ahead: int = 0

    def binding_window(self, length: int) -> int | None:
        """The window; None where it hides nothing from ``length`` rows."""
        return None if self.window is None or self.ahead + length <= self.window else self.window


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def visible(length: int, keys: int, options: BlockOptions, device: torch.device) -> Tensor | None:
    """(L, S) True where a query sees a key; None where all are seen, or where causality alone says which."""
    window = options.binding_window(length)
    if window is None:
        return None
    distance = torch.arange(length, device=device)[:, None] + options.ahead - torch.arange(keys, device=device)
    return (distance < window) & (distance >= 0) if options.is_causal else distance < window


class Kernel(Protocol):
    """One way to compute a block. q, out and grad are (B, N, L, H), k and v (B, G, S, H); lse is (B, N, L), in the wide dtype."""

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: BlockOptions) -> tuple[Tensor, Tensor]:
        """Returns (out, lse). Every row must see a key."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: BlockOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this block's (dq, dk, dv); ``out`` and ``lse`` (contiguous) are those over all keys."""
        ...


class Math:
    """Plain matrix products; any device and dtype, quadratic memory."""

    name = "math"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: BlockOptions) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, options)  # (B, G, N/G, L, S)
        lse = scores.logsumexp(-1)
        out = torch.einsum("bgrls,bgsh->bgrlh", (scores - lse.unsqueeze(-1)).exp(), v.to(scores.dtype))
        return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: BlockOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = k.shape[1]
        scores = self._scores(q, k, options)
        weights = (scores - lse.unflatten(1, (groups, -1)).unsqueeze(-1)).exp()
        grad, out = (x.to(scores.dtype).unflatten(1, (groups, -1)) for x in (grad, out))
        grad_v = torch.einsum("bgrls,bgrlh->bgsh", weights, grad)
        grad_weights = torch.einsum("bgrlh,bgsh->bgrls", grad, v.to(scores.dtype))
        grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) * options.scale
        grad_q = torch.einsum("bgrls,bgsh->bgrlh", grad_scores, k.to(scores.dtype)).flatten(1, 2)
        grad_k = torch.einsum("bgrls,bgrlh->bgsh", grad_scores, q.to(scores.dtype).unflatten(1, (groups, -1)))
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, options: BlockOptions) -> Tensor:
        wide, groups = wide_dtype(q.dtype), k.shape[1]
        scores = torch.einsum("bgrlh,bgsh->bgrls", q.to(wide).unflatten(1, (groups, -1)), k.to(wide)) * options.scale
        seen = visible(q.shape[2], k.shape[2], options, q.device)
        if seen is None and options.is_causal:
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


class CpuFlash:
    """Torch's flash attention for CPUs; float64 and bfloat16 too, groups of heads without expanding keys."""

    name = "cpu"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: BlockOptions) -> tuple[Tensor, Tensor]:
        mask = self._mask(q, k, options)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, options.is_causal and mask is None, attn_mask=mask, scale=options.scale
        )

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: BlockOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = self._mask(q, k, options)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, options.is_causal and mask is None, attn_mask=mask, scale=options.scale
        )

    def _mask(self, q: Tensor, k: Tensor, options: BlockOptions) -> Tensor | None:
        seen = visible(q.shape[2], k.shape[2], options, q.device)
        return None if seen is None else torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)


# ---- which one ----------------------------------------------------------------------------------------------------------------------

KERNELS: dict[str, Kernel] = {"cpu": CpuFlash(), "math": Math(), **FLASH_KERNELS}


def check_backend(name: str, device_type: str, dtype: torch.dtype | None = None, head_dim: int | None = None) -> list[str]:
    """A message for everything that keeps a backend from running: before training, to refuse a plan.

    Args:
        name: "auto" or one of ``KERNELS``.
        device_type: "cpu", "cuda", ...
        dtype, head_dim: of queries, where they are known.
    """
    if name not in ("auto", *KERNELS):
        return [f"attention_backend={name!r}: must be 'auto' or one of {', '.join(map(repr, KERNELS))}"]
    if name == "cpu" and device_type != "cpu":
        return [f"attention_backend='cpu' runs on CPUs, and the tensors lie on {device_type!r}: use 'auto' or 'math'"]
    return missing(FLASH_KERNELS[name], device_type, dtype, head_dim) if name in FLASH_KERNELS else []


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int | None = None) -> Kernel:
    """The kernel of a name.

    Args:
        name: one of ``KERNELS``, or "auto": torch's flash attention where the device, the dtype and the head dim allow it, else plain math.
        device: where the tensors lie.
        dtype, head_dim: of queries; None: not looked at.

    Raises:
        ValueError: for a name that is none, or a kernel that does not run there: what is missing and what to use instead.
    """
    if name == "auto":
        fast = {"cpu": "cpu", "cuda": "sdpa"}.get(device.type, "math")
        name = "math" if check_backend(fast, device.type, dtype, head_dim) else fast
    wrong = check_backend(name, device.type, dtype, head_dim)
    if wrong:
        raise ValueError("; ".join(wrong))
    if name in FLASH_KERNELS:
        activate(FLASH_KERNELS[name])
    return KERNELS[name]
