"""Ranks of a run: the mesh, who loads which rows, and what Lightning means when it says "all ranks"."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from lightning_megascale.data.sharing import Replica
from lightning_megascale.mesh import MeshViews
from lightning_megascale.parallel.data import GatherRows
from lightning_megascale.parallel.pipeline import Pipeline
from lightning_megascale.strategies import guards
from lightning_megascale.strategies.loaders import EvenLoader


class Ranks(ModelParallelStrategy):
    """The communication of ``MegascaleStrategy``; its mesh is built in ``setup_environment``."""

    _views: MeshViews | None = None
    _control: Any = None
    _batch_groups: dict[tuple[int, ...], Any] | None = None

    @property
    def mesh_views(self) -> MeshViews:
        if self._views is None:
            raise RuntimeError("the mesh exists once the Trainer has started its processes (from setup() on)")
        return self._views

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the rows this rank works on: the same for its tensor-parallel peers."""
        return self.mesh_views.data_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        """Number of different shares of the rows: dp_replicate x dp_shard."""
        return self.mesh_views.data_parallel_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def _set_metric_groups(self) -> None:
        """torchmetrics objects reduce over those who see other rows or tokens, not over all ranks."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if hasattr(module, "process_group") and hasattr(module, "dist_sync_fn") and module.process_group is None:
                module.process_group = self.mesh_views.loss.get_group()

    def process_dataloader(self, dataloader: object) -> object:
        """Workers are seeded by the share of rows they load, so tensor-parallel peers augment alike."""
        if int(os.environ.get("PL_SEED_WORKERS", "0")) and getattr(dataloader, "worker_init_fn", ...) is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.data_parallel_rank)  # type: ignore[attr-defined]
        dataloader = super().process_dataloader(dataloader)
        if guards.check_loader_lengths(dataloader, self.root_device) or self.world_size == 1:
            return dataloader
        return EvenLoader(dataloader, self._control_group())  # type: ignore[arg-type]

    def _control_group(self) -> Any:
        """A group of all ranks for words between hosts; a wait on it never waits for a GPU."""
        if self._control is None and torch.distributed.get_backend() != "gloo":
            self._control = torch.distributed.new_group(backend="gloo", timeout=self._timeout)
        return self._control

    def _replica(self, pipeline: Pipeline | None) -> Replica | None:
        """Who works on this rank's rows; the first in mesh order reads for all, on the first pipeline stage."""
        ranks = self.mesh_views.replica_ranks()
        if len(ranks) == 1:
            return None
        group = self._batch_group(ranks)
        if pipeline is None:
            return Replica(group, ranks[0])
        inputs = pipeline.chunks[0].first_inputs
        peers, first = (self.mesh_views.replica_ranks(rank) for rank in (pipeline.rank, pipeline.stages.owners[0]))
        own = self._batch_group(peers) if inputs and len(peers) > 1 else None  # on every stage: torch numbers groups by their count
        return Replica(group, first[0], inputs, peers == first, own if peers == first else None)

    def _batch_group(self, ranks: Sequence[int]) -> Any:
        """A group that works on the CPU and carries nothing but batches, made once by its members alone."""
        groups = self._batch_groups = {} if self._batch_groups is None else self._batch_groups
        if tuple(ranks) not in groups:
            groups[tuple(ranks)] = torch.distributed.new_group(
                list(ranks), backend="gloo", timeout=self._timeout, use_local_synchronization=True
            )
        return groups[tuple(ranks)]

    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Over the ranks that count other tokens, unless a group is given. A mean of whole numbers is not rounded."""
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group if group is not None else self.mesh_views.loss.get_group(), reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over all ranks: whoever stops, stops with everybody."""
        value = torch.tensor(int(decision), device=self.root_device)
        op = torch.distributed.ReduceOp.MIN if all else torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(value, op)
        return bool(value.item())

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Over the ranks that see other rows or tokens, also where Lightning says "all ranks", unless another group is given."""
        if group is None or group is torch.distributed.group.WORLD:
            group = self.mesh_views.loss.get_group()
        return GatherRows.apply(tensor, group) if sync_grads else super().all_gather(tensor, group)

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks; with gloo a time-out names those that are missing."""
        if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
            torch.distributed.monitored_barrier(timeout=self._timeout, wait_all_ranks=True)
        else:
            super().barrier(name)

    def _largest_over_ranks(self, numbers: Sequence[float]) -> list[float]:
        """The largest over all ranks of each of a few host numbers; no device is waited for."""
        values = torch.tensor(numbers, dtype=torch.float64)
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self._control_group())
        return [float(value) for value in values]
