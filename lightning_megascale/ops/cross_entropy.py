"""Cross-entropy of a language-model head that never holds the whole logits, on one device or with the vocabulary split over a group.

Shapes: T tokens, C tokens of a chunk, D model, V vocabulary (rows of the weight on this rank).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    chunk_tokens: int = 1024,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum over tokens of -log softmax(hidden @ weight.T + bias)[label], in chunks of tokens.

    Logits are computed once: when gradients are needed, those of hidden, weight and bias are made in the same walk and kept (as large
    as hidden and weight) instead of logits (T x V). Logits, softmax and loss are float32 (float64 for float64 inputs); the gradient of
    the weight is accumulated in the same type. Matmuls run in the type of ``hidden``, or in autocast's type inside autocast.

    With ``group`` every rank passes the same hidden and labels and its equal share of the rows of weight and bias, in rank order. The
    loss is the global one on every rank. The gradient of ``hidden`` is this rank's PARTIAL sum: the caller adds it over the group.

    Args:
        hidden: (..., D) activations before the head.
        weight: (V, D) head weight, or this rank's rows of it.
        labels: (...) integer targets, aligned with ``hidden``; ``ignore_index`` is not counted.
        bias: (V,) or None.
        ignore_index: label that does not count.
        chunk_tokens: tokens whose logits exist at a time; bounds the extra memory to chunk_tokens x V values.
        group: ranks that share the vocabulary, or None.

    Returns:
        loss_sum: 0-dim float32 (float64 for float64 inputs), differentiable once.
        num_tokens: 0-dim int64, the labels that count.

    Raises:
        ValueError: for shapes that do not fit, and on CPU for a label outside [0, vocabulary). On other devices, where looking would
            stall the stream, such a label makes loss and gradients NaN instead of silently wrong.

    Source: Hsu et al. 2024, "Liger Kernel", section 3.2 (gradients in the forward, chunk by chunk); Shoeybi et al. 2019,
        "Megatron-LM", section 3 (cross-entropy over a split vocabulary).
    """
    _check_shapes(hidden, weight, labels, bias, chunk_tokens)
    labels_T = labels.reshape(-1)
    _check_labels(labels_T, weight.shape[0] * _size(group), ignore_index)
    hidden_TD = hidden.reshape(-1, hidden.shape[-1])
    loss_sum = _LinearCrossEntropy.apply(
        hidden_TD, weight, bias, labels_T, ignore_index, chunk_tokens, group, _compute_dtype(hidden), torch.is_grad_enabled()
    )
    return loss_sum, (labels_T != ignore_index).sum()


def cross_entropy_from_shards(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Sum over tokens of the cross-entropy of logits whose last dimension is this rank's share of the vocabulary.

    Args:
        logits: (..., V) this rank's columns, equal in number on every rank, in rank order; the whole logits without ``group``.
        labels: (...) integer targets, the same on every rank of the group.
        ignore_index: label that does not count.
        group: ranks that share the vocabulary, or None.

    Returns:
        loss_sum (0-dim, float32 or float64; the gradient is that of this rank's columns) and num_tokens (0-dim int64).

    Raises:
        ValueError: as ``linear_cross_entropy``.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels have shape {tuple(labels.shape)}, must be {tuple(logits.shape[:-1])}: logits without their last dim")
    labels_T = labels.reshape(-1)
    _check_labels(labels_T, logits.shape[-1] * _size(group), ignore_index)
    loss_sum = _ShardedCrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), labels_T, ignore_index, group)
    return loss_sum, (labels_T != ignore_index).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Walks the tokens in chunks and leaves the gradients ready for the backward."""

    backward_only_scales = True  # running it twice, as zero-bubble pipelines do, costs no matmul

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        ignore_index: int,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        grad_enabled: bool,
    ) -> Tensor:
        wants = [grad_enabled and need for need in ctx.needs_input_grad[:3]]
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        grad_hidden_TD = torch.empty_like(hidden_TD) if wants[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=exact) if wants[1] else None
        grad_bias_V = torch.zeros_like(weight_VD[:, 0], dtype=exact) if wants[2] else None
        loss_sum = torch.zeros((), dtype=exact, device=hidden_TD.device)
        matrix_VD, offset_V = weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)
        for start in range(0, hidden_TD.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden_CD = hidden_TD[rows].to(dtype)
            logits_CV = F.linear(hidden_CD, matrix_VD, offset_V).to(exact)
            loss_C, grad_CV = _loss_and_gradient(logits_CV, labels_T[rows], ignore_index, group, any(wants))
            loss_sum += loss_C.sum()
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            factor_CV = grad_CV.to(dtype) if any(wants) else grad_CV
            if grad_hidden_TD is not None:
                grad_hidden_TD[rows] = factor_CV @ matrix_VD
            if grad_weight_VD is not None:
                _add_outer(grad_weight_VD, factor_CV, hidden_CD)
        ctx.save_for_backward(grad_hidden_TD, grad_weight_VD, grad_bias_V)
        ctx.dtypes = (hidden_TD.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if grad is None else (grad * grad_loss).to(dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return (*grads, None, None, None, None, None, None)


class _ShardedCrossEntropy(torch.autograd.Function):
    """The softmax of this rank's columns, kept for the backward as the gradient it is."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, ignore_index: int, group: dist.ProcessGroup | None) -> Tensor:
        exact = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
        loss_T, grad_TV = _loss_and_gradient(logits_TV.to(exact, copy=True), labels_T, ignore_index, group, True)
        ctx.save_for_backward(grad_TV.to(logits_TV.dtype))
        return loss_T.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TV,) = ctx.saved_tensors
        return (grad_TV * grad_loss).to(grad_TV.dtype), None, None, None


def _loss_and_gradient(
    logits_CV: Tensor, labels_C: Tensor, ignore_index: int, group: dist.ProcessGroup | None, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Loss per token and, in the memory of the logits, its gradient with respect to them: softmax minus one-hot.

    Args:
        logits_CV: (C, V) float32 or float64 scores of this rank's vocabulary; overwritten.
        labels_C: (C,) targets in the whole vocabulary.
        ignore_index: label that does not count.
        group: ranks that share the vocabulary, or None.
        with_gradient: whether the second result is wanted.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3: one maximum and one sum over the group per token, never the logits.
    """
    size = logits_CV.shape[1]
    counted_C = labels_C != ignore_index
    local_C = labels_C.long() - size * (0 if group is None else dist.get_rank(group))
    mine_C = counted_C & (local_C >= 0) & (local_C < size)
    index_C1 = local_C.where(mine_C, 0)[:, None]

    max_C = logits_CV.amax(1)
    if group is not None:
        dist.all_reduce(max_C, op=dist.ReduceOp.MAX, group=group)
    logits_CV -= max_C[:, None]
    target_C = logits_CV.gather(1, index_C1)[:, 0].where(mine_C, 0.0)
    sum_C = logits_CV.exp_().sum(1)  # logits_CV now holds the exponentials
    if group is not None:
        sums_2C = torch.stack([sum_C, target_C])
        dist.all_reduce(sums_2C, group=group)
        sum_C, target_C = sums_2C.unbind(0)

    outside_C = counted_C & ((labels_C < 0) | (labels_C >= size * _size(group)))
    sum_C = sum_C.masked_fill(outside_C, float("nan"))  # a label that does not exist is never silently wrong
    loss_C = (sum_C.log() - target_C).where(counted_C, 0.0)
    if with_gradient:
        logits_CV /= sum_C[:, None]
        logits_CV.scatter_add_(1, index_C1, -mine_C.to(logits_CV.dtype)[:, None])
        logits_CV.masked_fill_(~counted_C[:, None], 0.0)
    return loss_C, logits_CV


def _add_outer(total_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    """Adds grad_CV.T @ hidden_CD to ``total_VD`` in the type of the total: a half-precision product is not rounded between chunks."""
    if grad_CV.dtype == total_VD.dtype:
        total_VD.addmm_(grad_CV.t(), hidden_CD)
    elif grad_CV.device.type == "cuda":  # tensor cores take half-precision factors and give the float32 they add in
        total_VD += torch.mm(grad_CV.t(), hidden_CD, out_dtype=total_VD.dtype)
    else:
        total_VD.addmm_(grad_CV.t().to(total_VD.dtype), hidden_CD.to(total_VD.dtype))


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Type of the matmuls: autocast's where it is on and applies (it leaves float64 alone, as F.linear under it does)."""
    device = hidden.device.type
    if device != "meta" and hidden.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk_tokens: int) -> None:
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(f"labels have shape {tuple(labels.shape)}, must be {tuple(hidden.shape[:-1])}: hidden without its last dim")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, must be (vocabulary, {hidden.shape[-1]}): the last dim of hidden")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}, must be ({weight.shape[0]},): the rows of weight")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: must be at least 1; 1024 is the default")


def _check_labels(labels_T: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Refuses labels that do not exist, where looking costs nothing: on CPU, outside tracing and fake tensors."""
    if type(labels_T) is not Tensor or labels_T.device.type != "cpu" or torch.compiler.is_compiling():
        return
    outside_T = (labels_T != ignore_index) & ((labels_T < 0) | (labels_T >= vocabulary))
    if outside_T.any():
        label = labels_T[outside_T][0].item()
        raise ValueError(
            f"labels hold {label}, must be in [0, {vocabulary}) or ignore_index={ignore_index}: "
            "use a larger vocabulary or mark the position as ignored"
        )
