"""RingContextSharding: cuts every batch along its sequence over the context-parallel ranks, and puts predictions together again."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megascale.parallel.context_batch import SequenceCut
from lightning_megascale.parallel.context_shard import SequenceShard


class RingContextSharding(Callback):
    """Gives each context-parallel rank its tokens of every training, validation, test and prediction batch.

    The strategy calls it from ``batch_to_device`` (a callback of Lightning cannot replace a batch) and adds it by itself when
    ``context_parallel_size`` is above 1. Method and layout are the plan's; the callback has no settings. A dict gets ``position_ids`` and
    ``document_ids`` (B, S) of the rank's tokens, where it has none; rows whose length does not divide are padded with places that no
    document, loss or attention counts.

    Subclass it to change how batches are cut: ``shard`` and ``restore`` are all that the strategy calls.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a strategy that would never call it.

        Raises:
            ValueError: without ``MegascaleStrategy(context_parallel_size=...)``.
        """
        if getattr(getattr(trainer.strategy, "plan", None), "context_parallel_size", 1) == 1:
            raise ValueError(
                f"RingContextSharding cuts batches for context-parallel ranks, and {type(trainer.strategy).__name__} has none: use "
                "Trainer(strategy=MegascaleStrategy(context_parallel_size=2, label_alignment=...)), which adds the callback by itself"
            )

    def shard(self, batch: Any, cut: SequenceCut) -> tuple[Any, SequenceShard]:
        """This rank's part of a batch, on its device.

        Args:
            batch: the whole batch, equal on all context-parallel ranks.
            cut: how batches are cut.
        """
        return cut(batch)

    def restore(self, result: Any, shard: SequenceShard, group: dist.ProcessGroup | None) -> Any:
        """A prediction in the order of the row: tensors (B, S, ...) become (B, L, ...), on every rank.

        Args:
            result: of ``predict_step``.
            shard: how its batch was cut.
            group: the context-parallel ranks.
        """
        return shard.whole(result, group)
