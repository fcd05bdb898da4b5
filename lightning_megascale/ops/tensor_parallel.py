"""Functions of tensor and sequence parallelism with their gradients, on plain local tensors; the group is an argument.

Shapes: B batch, L sequence, D model, F features of a projection, V vocabulary. Sizes are logical; a sequence shard is (B, L/tp, D), a
column-parallel output (B, L, F/tp), where tp is the size of the axis.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3 (columns, rows, vocabulary); Korthikanti et al. 2022, "Reducing activation
recomputation in large transformer models", section 4.2.2 (sequence parallelism, gathering the shard again in the backward).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

_c10d = torch.ops._c10d_functional


class TensorAxis(NamedTuple):
    """A tensor-parallel group as plain values, which a compiler can trace.

    Attributes:
        name: torch's name of the process group.
        size: its ranks.
        rank: this rank's place in it.
    """

    name: str
    size: int
    rank: int


def tensor_axis(group: dist.ProcessGroup) -> TensorAxis:
    """The values of ``group``."""
    return TensorAxis(group.group_name, dist.get_world_size(group), dist.get_rank(group))


# ---- collectives: start returns at once, finish waits; neither has a gradient ------------------------------------------------------


def start_gather(shard: Tensor, axis: TensorAxis) -> Tensor:
    """Starts gathering ``shard``; the result, (tp * dim 0, ...) in rank order, may be read after ``finish_gather`` only."""
    return _c10d.all_gather_into_tensor(shard.contiguous(), axis.size, axis.name)


def finish_gather(pending: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """Waits for ``start_gather`` and joins the shards along ``dim``."""
    stacked = _c10d.wait_tensor(pending).unflatten(0, (axis.size, -1))  # (tp, B, L/tp, D)
    return stacked.movedim(0, dim).flatten(dim, dim + 1)  # (B, tp, L/tp, D) -> (B, L, D)


def start_scatter(full: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """Starts summing ``full`` over the axis, each rank keeping its part of ``dim``; to be waited for before it is read."""
    stacked = full.unflatten(dim, (axis.size, -1)).movedim(dim, 0).flatten(0, 1)  # (tp * B, L/tp, D)
    return _c10d.reduce_scatter_tensor(stacked.contiguous(), "sum", axis.size, axis.name)


def start_reduce(partial: Tensor, axis: TensorAxis, dim: int, sequence: bool) -> Tensor:
    """Starts the sum over the axis: a reduce-scatter over ``dim`` with ``sequence``, else an all-reduce."""
    return start_scatter(partial, axis, dim) if sequence else _c10d.all_reduce(partial.contiguous(), "sum", axis.name)


@torch.library.custom_op("lightning_megascale::gather_again", mutates_args=())
def _gather_again(shard: Tensor, gradient: Tensor, size: int, name: str) -> Tensor:
    """The gather of a compiled backward. An operator of its own: the compiler would merge two equal gathers of one shard, forward's and
    backward's, and keep the gathered tensor between them without a word. ``gradient`` is not read: it ties the operator to the backward,
    for what does not depend on a gradient may be moved to the forward, and kept from there."""
    return start_gather(shard, TensorAxis(name, size, 0))


@_gather_again.register_fake
def _(shard: Tensor, gradient: Tensor, size: int, name: str) -> Tensor:
    return shard.new_empty((shard.shape[0] * size, *shard.shape[1:]))


def start_gather_again(shard: Tensor, gradient: Tensor, axis: TensorAxis) -> Tensor:
    """``start_gather`` for a backward that repeats the forward's gather; ``gradient`` is any gradient it has got."""
    return _gather_again(shard, gradient, axis.size, axis.name) if torch.compiler.is_compiling() else start_gather(shard, axis)


# ---- columns -----------------------------------------------------------------------------------------------------------------------


class _Columns(torch.autograd.Function):
    """(input, weights, biases) -> (whole input, one output per weight); see ``column_linears``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: TensorAxis, sequence: bool, regather: bool, count: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        dim = x.ndim - 2
        full = finish_gather(start_gather(x, axis), axis, dim) if sequence else x.view_as(x)
        ctx.axis, ctx.sequence, ctx.regather, ctx.count, ctx.dim = axis, sequence, sequence and regather, count, dim
        ctx.save_for_backward((x if ctx.regather or not sequence else full) if count else None, *weights)
        ctx.set_materialize_grads(False)
        return (full, *[F.linear(full, weight, bias) for weight, bias in zip(weights, biases)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_full: Tensor | None, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, *weights = ctx.saved_tensors
        count, axis, dim, needs = ctx.count, ctx.axis, ctx.dim, ctx.needs_input_grad
        used = [i for i in range(count) if grads[i] is not None]
        wants_weight = [i for i in used if needs[5 + i]]
        pending = None
        if wants_weight and ctx.regather:
            pending = start_gather_again(kept, grads[wants_weight[0]], axis)  # in flight during the matmuls of grad_x

        grad_x = _sum_of_products(grad_full, [(grads[i], weights[i]) for i in used]) if needs[0] else None
        if grad_x is not None:
            grad_x = start_reduce(grad_x, axis, dim, ctx.sequence)  # in flight during the matmuls of the weights

        grad_weights: list[Tensor | None] = [None] * count
        grad_biases: list[Tensor | None] = [None] * count
        if wants_weight:
            full = kept if pending is None else finish_gather(pending, axis, dim)
            full_TD = full.flatten(0, -2)
            for i in wants_weight:
                grad_weights[i] = grads[i].flatten(0, -2).t() @ full_TD  # (F, T) @ (T, D)
        for i in used:
            if needs[5 + count + i]:
                grad_biases[i] = grads[i].flatten(0, -2).sum(0)
        if grad_x is not None:
            grad_x = _c10d.wait_tensor(grad_x)
        return (grad_x, None, None, None, None, *grad_weights, *grad_biases)


def _sum_of_products(first: Tensor | None, products: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """``first`` plus the sum of grad @ weight, added in place of one fresh tensor."""
    total_TD = None
    for grad, weight in products:
        grad_TF = grad.flatten(0, -2)
        total_TD = grad_TF @ weight if total_TD is None else total_TD.addmm_(grad_TF, weight)
    if total_TD is None:
        return first
    total = total_TD.unflatten(0, products[0][0].shape[:-1])
    return total if first is None else total.add_(first)


def column_linears(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], axis: TensorAxis, *, sequence: bool, regather: bool = True
) -> tuple[Tensor, ...]:
    """The column-parallel linears of one module, over one common gather of its input.

    Only the shard is kept for the backward, which gathers again: in flight during the matmuls of the input's gradient, whose own sum over
    the axis is in flight during those of the weights.

    Args:
        x: (B, L/tp, D) this rank's sequence shard with ``sequence``, else (B, L, D), the same on every rank.
        weights: each (F/tp, D), this rank's rows.
        biases: each (F/tp,) or None.
        axis: the tensor-parallel group.
        sequence: x is split over the sequence (dim -2): gather it, and scatter the sum of its gradients. Otherwise all-reduce that sum.
        regather: False keeps the gathered input, for modules that are recomputed: they gather again anyway.

    Returns:
        (B, L, D) the whole input, differentiable too (every rank's gradient of it is a part of a sum), then (B, L, F/tp) per weight.
    """
    dtype = _autocast_dtype(x)
    if dtype is not None:
        x, weights = x.to(dtype), [weight.to(dtype) for weight in weights]
        biases = [None if bias is None else bias.to(dtype) for bias in biases]
    return _Columns.apply(x, axis, sequence, regather, len(weights), *weights, *biases)


def copied_to_parts(x: Tensor, axis: TensorAxis) -> Tensor:
    """``x``, the same on every rank, for a computation of which each rank does a part: its gradients are summed over the axis."""
    return _Columns.apply(x, axis, False, False, 0)[0]


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type autocast gives to matmuls of ``x``, or None where it leaves them alone. (Own functions must cast by themselves.)"""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


# ---- rows --------------------------------------------------------------------------------------------------------------------------


class _Reduce(torch.autograd.Function):
    """Partial sums -> their sum over the axis, scattered over the sequence or whole on every rank. Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: TensorAxis, sequence: bool) -> Tensor:
        ctx.axis, ctx.sequence, ctx.dim = axis, sequence, partial.ndim - 2
        return _c10d.wait_tensor(start_reduce(partial, axis, ctx.dim, sequence))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return finish_gather(start_gather(grad, ctx.axis), ctx.axis, ctx.dim) if ctx.sequence else grad, None, None


def reduce_partial(partial: Tensor, axis: TensorAxis, *, sequence: bool) -> Tensor:
    """Sum over the axis of (B, L, D) partial sums: (B, L/tp, D) with ``sequence``, else (B, L, D) on every rank."""
    return _Reduce.apply(partial, axis, sequence)


@torch.library.custom_op("lightning_megascale::row_linear", mutates_args=())
def _row_linear(x: Tensor, weight: Tensor, size: int, name: str, sequence: bool) -> Tensor:
    axis = TensorAxis(name, size, 0)
    return _c10d.wait_tensor(start_reduce(F.linear(x, weight), axis, x.ndim - 2, sequence))


@_row_linear.register_fake
def _(x: Tensor, weight: Tensor, size: int, name: str, sequence: bool) -> Tensor:
    shape = [*x.shape[:-1], weight.shape[0]]
    if sequence:
        shape[-2] //= size
    return x.new_empty(shape)


def _save_row(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, ctx.size, ctx.name, ctx.sequence = inputs
    ctx.save_for_backward(x, weight)


def _row_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    if ctx.sequence:
        axis = TensorAxis(ctx.name, ctx.size, 0)
        grad = finish_gather(start_gather(grad, axis), axis, grad.ndim - 2)
    grad_x = grad @ weight if ctx.needs_input_grad[0] else None
    grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None, None, None


_row_linear.register_autograd(_row_backward, setup_context=_save_row)
ROW_LINEAR = torch.ops.lightning_megascale.row_linear.default


@register_flop_formula(torch.ops.lightning_megascale.row_linear)
def _row_flops(x_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return 2 * x_shape.numel() * weight_shape[0]


def row_linear(x: Tensor, weight: Tensor, axis: TensorAxis, *, sequence: bool, fused: bool) -> Tensor:
    """Row-parallel linear without bias: x @ weight.T summed over the axis.

    Args:
        x: (B, L, F/tp) this rank's features.
        weight: (D, F/tp) this rank's columns.
        axis: the tensor-parallel group.
        sequence: scatter the sum over the sequence (dim -2), else all ranks get it whole.
        fused: matmul and sum as one operator, so that a recompute policy can save the sum and never the partial products, which are as
            large as the whole activation. Not under full recompute: an operator of ours keeps its inputs only after it has run, so the
            last matmul of a block would be repeated for nothing.

    Returns:
        (B, L/tp, D) or (B, L, D).
    """
    dtype = _autocast_dtype(x)
    if dtype is not None:
        x, weight = x.to(dtype), weight.to(dtype)
    if fused:
        return _row_linear(x, weight, axis.size, axis.name, sequence)
    return reduce_partial(F.linear(x, weight), axis, sequence=sequence)


# ---- vocabulary --------------------------------------------------------------------------------------------------------------------


def vocabulary_embedding(ids: Tensor, weight: Tensor, axis: TensorAxis, *, sequence: bool, padding_idx: int | None = None) -> Tensor:
    """Embedding whose rows are split over the axis, in equal parts in rank order: each rank looks up its own ids, the rest are zero.

    Args:
        ids: (B, L) integers, the same on every rank.
        weight: (V/tp, D) this rank's rows.
        axis: the tensor-parallel group.
        sequence: scatter the result over the sequence (the last dim of ids).
        padding_idx: id whose row gets no gradient, or None.

    Returns:
        (B, L/tp, D) or (B, L, D).

    Raises:
        ValueError: on CPU for an id outside [0, V). On other devices, where looking would stall the stream, such an id gives NaN.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """
    rows = weight.shape[0]
    outside = (ids < 0) | (ids >= rows * axis.size)
    if type(ids) is Tensor and ids.device.type == "cpu" and not torch.compiler.is_compiling() and outside.any():
        raise ValueError(
            f"ids hold {ids[outside][0].item()}, must be in [0, {rows * axis.size}): the rows of the embedding; use a larger embedding"
        )
    local = ids - axis.rank * rows
    foreign = (local < 0) | (local >= rows)
    padding = None if padding_idx is None else padding_idx - axis.rank * rows
    if padding is not None and not 0 <= padding < rows:
        padding = None
    partial = F.embedding(local.masked_fill(foreign, 0), weight, padding).masked_fill(foreign.unsqueeze(-1), 0)
    if ids.device.type != "cpu":
        partial = partial.masked_fill(outside.unsqueeze(-1), float("nan"))  # foreign on every rank: never silently zero
    return reduce_partial(partial, axis, sequence=sequence)


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return finish_gather(start_gather(logits, axis), axis, logits.ndim - 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.axis.size, dim=-1)[ctx.axis.rank].contiguous(), None


def gather_vocabulary(logits: Tensor, axis: TensorAxis) -> Tensor:
    """(B, L, V/tp) -> (B, L, V). Every rank then computes the same loss, so its gradient is not summed: each keeps its own columns."""
    return _GatherVocabulary.apply(logits, axis)


# ---- dropout -----------------------------------------------------------------------------------------------------------------------


def sequence_dropout(x: Tensor, p: float, axis: TensorAxis) -> Tensor:
    """Dropout of a sequence shard by the mask one device would draw: the whole mask from a generator that agrees on the axis, and a slice.

    Args:
        x: (B, L/tp, D) this rank's shard.
        p: probability of zero.
        axis: the tensor-parallel group.
    """
    dim = x.ndim - 2
    whole = torch.ones([size * axis.size if i == dim else size for i, size in enumerate(x.shape)], dtype=x.dtype, device=x.device)
    scale = F.dropout(whole, p, training=True).chunk(axis.size, dim)[axis.rank].clone()  # a view would keep the whole mask
    return x * scale
