"""Gradient norm and clipping when parameters lie on several meshes, plain tensors among them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_megascale.parallel.loss_scale import scale_gradients


def total_norm(
    parameters: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    pipeline: dist.ProcessGroup | None = None,
    copies: Collection[int] = (),
) -> torch.Tensor:
    """The p-norm of all gradients together, each logical element counted once, as a 0-dim float tensor equal on all ranks.

    Args:
        parameters: their ``grad`` may be DTensors on different meshes, or plain tensors (equal on all ranks).
        norm_type: p, at least 1; ``inf`` for the largest absolute value.
        pipeline: ranks that hold other parameters of the same model, or None.
        copies: ids of parameters that are counted elsewhere (second copies of tied ones).
    """
    if not norm_type >= 1:
        raise ValueError(f"norm_type={norm_type}: must be at least 1, or inf")
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    device = parameters[0].device if parameters else torch.device("cpu")
    gradients = [parameter.grad for parameter in parameters if id(parameter) not in copies and parameter.grad is not None]
    if not gradients and pipeline is None:
        return torch.tensor(0.0)
    groups: dict[tuple[str, ...], tuple[list[dist.ProcessGroup], list[torch.Tensor]]] = {}
    for gradient in gradients:
        over = _sharded_over(gradient)
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        groups.setdefault(tuple(group.group_name for group in over), (over, []))[1].append(local)
    totals = []
    for over, tensors in groups.values():  # insertion order: the same on all ranks
        total = _power_sum(tensors, norm_type)
        for group in over:
            dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
        totals.append(total)
    dtype = torch.float64 if pipeline is not None else totals[0].dtype
    whole = torch.stack([total.to(dtype) for total in totals]) if totals else torch.zeros(1, dtype=dtype, device=device)
    total = whole.max() if math.isinf(norm_type) else whole.sum()
    if pipeline is not None:  # a stage's own norms may be of another dtype than another's, so all are float64 here
        dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=pipeline)
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    pipeline: dist.ProcessGroup | None = None,
    copies: Collection[int] = (),
) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, over any mix of meshes.

    Args:
        parameters: whose gradients are scaled in place.
        max_norm: the norm they have at most afterwards.
        norm_type: p of the norm.
        pipeline, copies: as for ``total_norm``.
        error_if_nonfinite: raise when the norm is NaN or infinite, on all ranks alike; otherwise the gradients become NaN or 0.

    Returns:
        The norm before clipping, 0-dim, equal on all ranks.

    Raises:
        RuntimeError: for a norm that is not finite, with ``error_if_nonfinite``.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = total_norm(parameters, norm_type, pipeline, copies)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the total gradient norm of order {norm_type} is {norm.item()}, so it cannot be clipped")
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale_gradients((parameter.grad for parameter in parameters if parameter.grad is not None), factor)
    return norm


def _sharded_over(gradient: torch.Tensor) -> list[dist.ProcessGroup]:
    """The groups over which a gradient's elements are spread."""
    if not isinstance(gradient, DTensor):
        return []
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError("a gradient is a pending sum over ranks: its norm is taken after the optimizer step's reductions only")
    mesh = gradient.device_mesh
    return [mesh.get_group(dim) for dim in range(mesh.ndim) if not gradient.placements[dim].is_replicate() and mesh.size(dim) > 1]


def _power_sum(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Sum of |x|^p (largest |x| for inf) of this rank's elements, in float32 or float64."""
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), dtype=dtype, device=tensors[0].device)
    norms = torch.stack([norm.to(dtype) for norm in torch._foreach_norm(filled, norm_type, dtype=dtype)])
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
