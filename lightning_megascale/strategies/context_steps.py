"""Context parallelism between Lightning and a step: batches are cut, and what a step logs becomes the mean over whole rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_megascale.callbacks.context_sharding import RingContextSharding
from lightning_megascale.mesh import MeshViews
from lightning_megascale.parallel.context import Context
from lightning_megascale.parallel.context_batch import SequenceCut
from lightning_megascale.parallel.context_call import prepare_call
from lightning_megascale.parallel.context_shard import SequenceShard
from lightning_megascale.parallel.loss_scale import rows_of, weigh
from lightning_megascale.parallel.rng import derive_seed
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.strategies.context_proof import ContextProof
from lightning_megascale.strategies.guards import check_same_batch
from lightning_megascale.strategies.pipeline_logs import Entry, LogRecorder

_LOGGED = 63  # values of a step that one message holds


def open_context(strategy: Any, trainer: pl.Trainer, module: pl.LightningModule, model: nn.Module, context: Context) -> ContextSteps:
    """Makes batches be cut along their sequence, and calls of the model be given the positions of what is left.

    Args:
        strategy: a ``MegascaleStrategy`` whose model is parallelized.
        trainer: gets the callback that cuts, if it has none.
        module, model: the LightningModule and its parallelized child.
        context: what the model's attention reads.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callback = next((callback for callback in callbacks if isinstance(callback, RingContextSharding)), None)
    if callback is None:
        callback = RingContextSharding()
        callbacks.append(callback)
        rank_zero_info("RingContextSharding was added: batches are cut along their sequence")
    if strategy.plan.pipeline_parallel_size == 1 and "_megascale_positions" not in model.__dict__:  # a pipeline captures its calls
        model.__dict__["_megascale_positions"] = model.register_forward_pre_hook(
            lambda called, args, kwargs: prepare_call(called, context, args, kwargs), with_kwargs=True, prepend=True
        )
    return ContextSteps(
        strategy.plan, strategy.mesh_views, strategy.root_device, context, module, model, callback, strategy._largest_over_ranks
    )


class ContextSteps:
    """Cuts the batches of one run, and makes the means of its logs; ``proof`` tries its first batch.

    Args:
        plan, views, device: of the run.
        context: what the model's attention reads.
        module, model: the LightningModule and its parallelized child.
        callback: cuts and restores.
        agree: (numbers) -> the largest over all ranks of each.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        views: MeshViews,
        device: torch.device,
        context: Context,
        module: pl.LightningModule,
        model: nn.Module,
        callback: RingContextSharding,
        agree: Callable[[Sequence[float]], list[float]],
    ) -> None:
        assert views.context is not None
        self.context, self.batch_tokens, self.batch_length = context, 0, 0
        self._multiple = plan.tensor_parallel_size if plan.sequence_parallel else 1
        self.proof = ContextProof(plan, device, context, module, model, agree, self._multiple)
        self._plan, self._views, self._device = plan, views, device
        self._module, self._callback = module, callback
        self._group = views.context.get_group()
        self._compared: set[str] = set()
        self._shard: SequenceShard | None = None

    def shard(self, batch: Any, loop: str) -> Any:
        """This rank's part of a whole batch that lies on its device.

        Args:
            batch: from the loader, through the module's hooks.
            loop: "train", "predict", ...
        """
        if loop not in self._compared:
            self._compared.add(loop)
            check_same_batch(batch, self._group, self._device)
        self.proof.keep(batch)
        cut = SequenceCut(
            self._views.sizes["cp"],
            self._views.context_rank,
            self._plan.context_parallel_layout,
            self._plan.label_alignment,
            self._multiple,
            training=loop != "predict",
        )
        batch, shard = self._callback.shard(batch, cut)
        shard = shard.to(self._device)
        self.batch_length = shard.length
        self.batch_tokens = (
            shard.rows * shard.length
            if not shard.has_documents
            else sum(run.length for row in shard.tables for runs in row for run in runs)
        )
        self._shard = shard
        self.context.begin(shard)
        return batch

    @property
    def real_tokens(self) -> Tensor | None:
        """Bool (B, S): which places of this rank hold a token."""
        return None if self._shard is None else self._shard.document_ids >= 0

    def restore(self, result: Any) -> Any:
        """A prediction of the whole rows."""
        assert self._shard is not None
        return self._callback.restore(result, self._shard, self._group)

    @contextmanager
    def shared_logs(self, batch: Any) -> Iterator[None]:
        """Around a step: what it logs as a mean becomes the mean over the whole rows, as one device logs it, also where a part of a row
        counts nothing. One message; ranks that log other things keep their own values."""
        with LogRecorder(self._module) as logs:
            yield
        shared = [entry for entry in logs.entries if isinstance(entry.value, Tensor) and _is_mean(entry)][:_LOGGED]
        counted = weigh(batch, "auto", self._plan.label_alignment, self._device)
        count = torch.ones((), dtype=torch.float64, device=self._device) if counted is None else counted.used.double()
        rows = rows_of(batch)
        table = torch.zeros(_LOGGED + 1, 2, dtype=torch.float64, device=self._device)
        table[0, 0] = float(derive_seed(*(entry.name for entry in shared)) % 2**52)
        for place, entry in enumerate(shared, 1):
            size = entry.options.get("batch_size")  # rows, as Lightning means it, weigh no part of a row
            table[place, 0] = count if size is None or size == rows else size
            table[place, 1] = entry.value.to(self._device, torch.float64)
        tables = [torch.empty_like(table) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(tables, table, group=self._group)
        every = torch.stack(tables)  # (W, entries, 2)
        alike = (every[:, 0, 0] == table[0, 0]).all()
        counts, values = every[:, 1:, 0], every[:, 1:, 1]
        total = counts.sum(0)
        mean = torch.where(counts > 0, counts * values, 0.0).sum(0) / total
        mean = torch.where((values == values[0]).all(0) | (total == 0), table[1:, 1], mean)
        for place, entry in enumerate(shared):
            entry.value = torch.where(alike, mean[place].to(entry.value.device, entry.value.dtype), entry.value)
        for entry in logs.entries:
            entry.log(self._module)


def _is_mean(entry: Entry) -> bool:
    reduce = entry.options.get("reduce_fx", "mean")
    return getattr(reduce, "__name__", reduce) == "mean" and entry.value.is_floating_point()
