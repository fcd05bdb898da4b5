"""A parameter that two pipeline stages share is one equal copy on each: their gradients are added up, and both take the same steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_megascale.parallel.pipeline import Pipeline


def sum_tied_gradients(model: nn.Module, pipeline: Pipeline, group: dist.ProcessGroup) -> None:
    """Replaces the gradient of each copy by the sum over all copies, once per optimizer step. Only the copies' ranks communicate.

    Args:
        model: what ``pipeline.tied`` names parameters of; stages of other ranks are pass-throughs in it.
        pipeline: this rank's stages.
        group: the pipeline axis.
    """
    for names in pipeline.tied:
        owners = [pipeline.stages.owners[pipeline.stages.stage_of(name)] for name in names]  # type: ignore[index]
        mine = [_local_gradient(model.get_parameter(name)) for name, owner in zip(names, owners) if owner == pipeline.rank]
        if not mine or not model.get_parameter(next(n for n, o in zip(names, owners) if o == pipeline.rank)).requires_grad:
            continue
        parts = _exchange(mine[0] if len(mine) == 1 else torch.stack(mine).sum(0), sorted(set(owners)), pipeline.rank, group)
        total = torch.stack(parts).sum(0)  # in the owners' order, so that every copy gets the same bits
        for gradient in mine:
            gradient.copy_(total)


def broadcast_tied(model: nn.Module, pipeline: Pipeline, group: dist.ProcessGroup) -> None:
    """Gives every copy the value of the first: copies that were drawn apart (meta device) start equal."""
    with torch.no_grad():
        for names in pipeline.tied:
            owners = [pipeline.stages.owners[pipeline.stages.stage_of(name)] for name in names]  # type: ignore[index]
            mine = [_local(model.get_parameter(name)) for name, owner in zip(names, owners) if owner == pipeline.rank]
            if mine:
                first = _exchange(mine[0].contiguous(), sorted(set(owners)), pipeline.rank, group)[sorted(set(owners)).index(owners[0])]
                for value in mine:
                    value.copy_(first)


def _exchange(mine: torch.Tensor, owners: Sequence[int], rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every owner's tensor, in the order of ``owners``."""
    parts = [mine if owner == rank else torch.empty_like(mine) for owner in owners]
    transfers = []
    for owner, part in zip(owners, parts):
        if owner != rank:
            transfers += [
                dist.P2POp(dist.isend, mine, group=group, group_peer=owner),
                dist.P2POp(dist.irecv, part, group=group, group_peer=owner),
            ]
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
    return parts


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return _local(parameter.grad)
