"""Attention of one block of queries and keys with its log-sum-exp, forward and backward: what exact distributed attention is made of.

A kernel computes softmax(q k^T scale) v over the keys it is given and the log of the sum it divided by, so that results over disjoint keys
can be merged; its backward takes the log-sum-exp over *all* keys, and gives this block's part of the gradients.
Shapes: B batch, N query heads, G key/value heads (G divides N; keys are never expanded), L queries, S keys, H head dim.

Source: Dao 2023, "FlashAttention-2", section 3.1 and algorithms 1 and 2 (forward with log-sum-exp, backward from it).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Kernel(Protocol):
    """One way to compute a block. Tensors are q (B, N, L, H), k and v (B, G, S, H); lse is (B, N, L), float32 (float64 for float64).

    A causal block has L = S and row i sees keys up to i. With ``window`` row i sees the key j only if i + ahead - j < window.
    """

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, window: int | None, ahead: int
    ) -> tuple[Tensor, Tensor]:
        """Returns (out (B, N, L, H), lse). Every row must see a key."""
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        is_causal: bool,
        window: int | None,
        ahead: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this block's (dq, dk, dv); ``out`` and ``lse`` are those over all keys."""
        ...


def visible(length: int, keys: int, is_causal: bool, window: int | None, ahead: int, device: torch.device) -> Tensor | None:
    """(L, S) True where a query sees a key; None where all are seen, or where causality alone says which."""
    if window is None or (is_causal and length <= window) or (not is_causal and ahead + length - 1 < window):
        return None
    distance = torch.arange(length, device=device)[:, None] + ahead - torch.arange(keys, device=device)
    return (distance < window) & (distance >= 0) if is_causal else distance < window


class Math:
    """Plain matrix products; any device and dtype, quadratic memory."""

    name = "math"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, window: int | None, ahead: int
    ) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, scale, is_causal, window, ahead)  # (B, G, N/G, L, S)
        lse = scores.logsumexp(-1)
        out = torch.einsum("bgrls,bgsh->bgrlh", (scores - lse.unsqueeze(-1)).exp(), v.to(scores.dtype))
        return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        is_causal: bool,
        window: int | None,
        ahead: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = k.shape[1]
        scores = self._scores(q, k, scale, is_causal, window, ahead)
        weights = (scores - lse.unflatten(1, (groups, -1)).unsqueeze(-1)).exp()
        grad, out = (x.to(scores.dtype).unflatten(1, (groups, -1)) for x in (grad, out))
        grad_v = torch.einsum("bgrls,bgrlh->bgsh", weights, grad)
        grad_weights = torch.einsum("bgrlh,bgsh->bgrls", grad, v.to(scores.dtype))
        grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) * scale
        grad_q = torch.einsum("bgrls,bgsh->bgrlh", grad_scores, k.to(scores.dtype)).flatten(1, 2)
        grad_k = torch.einsum("bgrls,bgrlh->bgsh", grad_scores, q.to(scores.dtype).unflatten(1, (groups, -1)))
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, scale: float, is_causal: bool, window: int | None, ahead: int) -> Tensor:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = torch.einsum("bgrlh,bgsh->bgrls", q.to(wide).unflatten(1, (k.shape[1], -1)), k.to(wide)) * scale
        seen = visible(q.shape[2], k.shape[2], is_causal, window, ahead, q.device)
        if seen is None and is_causal:
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


class CpuFlash:
    """Torch's flash attention for CPUs; float64 and bfloat16 too, groups of heads without expanding keys."""

    name = "cpu"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, window: int | None, ahead: int
    ) -> tuple[Tensor, Tensor]:
        mask = self._mask(q, k, is_causal, window, ahead)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal and mask is None, attn_mask=mask, scale=scale
        )

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        is_causal: bool,
        window: int | None,
        ahead: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = self._mask(q, k, is_causal, window, ahead)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal and mask is None, attn_mask=mask, scale=scale
        )

    def _mask(self, q: Tensor, k: Tensor, is_causal: bool, window: int | None, ahead: int) -> Tensor | None:
        seen = visible(q.shape[2], k.shape[2], is_causal, window, ahead, q.device)
        return None if seen is None else torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)


KERNELS: dict[str, Kernel] = {"cpu": CpuFlash(), "math": Math()}


def choose_kernel(name: str, device: torch.device) -> Kernel:
    """The kernel of a name.

    Args:
        name: "auto" (torch's flash attention on CPUs, plain math elsewhere), or one of ``KERNELS``.
        device: where the tensors lie.

    Raises:
        ValueError: for a name that is none, or a kernel that does not run there.
    """
    if name == "auto":
        return KERNELS["cpu" if device.type == "cpu" else "math"]
    if name not in KERNELS:
        raise ValueError(f"attention_backend={name!r}: must be 'auto' or one of {', '.join(map(repr, KERNELS))}")
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"attention_backend='cpu' runs on CPUs, and the tensors lie on {device.type!r}: use 'auto'")
    return KERNELS[name]
