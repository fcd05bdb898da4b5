"""What routers learn from a whole optimizer step, over all ranks and microbatches: the loads that balance the next one.

A router here is a module with ``counts`` (ops/balance.py) and a buffer ``last_step``: assignments of each expert in the last step. Its
global balance loss and its bias are made of these, so they are the same for every plan, and no forward waits for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megascale.mesh import MeshViews
from lightning_megascale.ops.balance import update_bias
from lightning_megascale.ops.tensor_parallel import TensorAxis


class Routers:
    """The routers of this rank's stage.

    Args:
        routers: in module order.
        groups: over all of them together a step's tokens are counted once.
    """

    def __init__(self, routers: Sequence[Any], groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self._routers, self._groups = list(routers), list(groups)
        self._seen: list[Tensor | None] = [None] * len(self._routers)

    @classmethod
    def of(cls, model: nn.Module, views: MeshViews, *, sequence_parallel: bool) -> Routers | None:
        """Those of a model (of a pipeline, of this rank's stages); None where there are none."""
        views_over = [views.loss, views.tensor if sequence_parallel else None]
        return cls.alone(model, [view.get_group() for view in views_over if view is not None and view.size() > 1])

    @classmethod
    def alone(cls, model: nn.Module, groups: Sequence[dist.ProcessGroup] = ()) -> Routers | None:
        """Those of a whole model under another strategy; None where there are none.

        Args:
            groups: of the ranks that have other tokens.
        """
        routers = [module for module in model.modules() if "last_step" in module._buffers]
        return cls(routers, groups) if routers else None

    def count_over(self, group: dist.ProcessGroup) -> None:
        """Rows are cut over the ranks of the group."""
        for router in self._routers:
            count_over(router, group)

    @torch.no_grad()
    def settle(self) -> None:
        """After an optimizer step: its loads become those of the last step, and biases move. One message for all routers."""
        if not self._routers:
            return
        new = []
        for number, router in enumerate(self._routers):
            now = None if router.counts is None else router.counts.snapshot()
            before, self._seen[number] = self._seen[number], now
            new.append(router.last_step.new_zeros(router.num_experts) if now is None else _assigned(now, before, router.num_experts))
        flat = torch.cat(new)
        for group in self._groups:
            dist.all_reduce(flat, group=group)
        for router, counts in zip(self._routers, flat.split([len(part) for part in new])):
            router.last_step.copy_(torch.where(counts.sum() > 0, counts, router.last_step))  # a step without tokens says nothing
            if getattr(router, "expert_bias", None) is not None:
                update_bias(router.expert_bias, counts, router.bias_rate)


def _assigned(now: Tensor, before: Tensor | None, num_experts: int) -> Tensor:
    counts = now[:num_experts]
    return counts if before is None else counts - before[:num_experts].to(counts.device)


def count_over(router: Any, group: dist.ProcessGroup) -> None:
    """Makes a router that counts by row or microbatch add up over ranks that hold other parts of the same rows."""
    if hasattr(router, "share_counts"):
        groups = [] if router.share_counts is None else router.share_counts.groups
        router.share_counts = _Sum([*groups, group])


def take_slice(router: Any, axis: TensorAxis) -> None:
    """Makes a router that sees a slice of each row read that slice of what is known of tokens."""
    if hasattr(router, "own_tokens"):
        router.own_tokens = _Slice(axis)


class _Sum:
    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        self.groups = groups

    def __deepcopy__(self, memo: dict[int, Any]) -> _Sum:
        return self

    def __call__(self, counts: Tensor) -> Tensor:
        counts = counts.clone()
        for group in self.groups:
            dist.all_reduce(counts, group=group)
        return counts


class _Slice:
    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis

    def __call__(self, mask_BL: Tensor) -> Tensor:
        return mask_BL.chunk(self._axis.size, dim=1)[self._axis.rank]
