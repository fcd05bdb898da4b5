"""Callbacks and Trainer options that people bring along: those that cannot hold on several ranks are refused by name, with what to do."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import BaseFinetuning, BatchSizeFinder, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.tuner.lr_finder import _LRCallback

from lightning_megascale.plan import ParallelPlan

AVERAGES = (
    "averages whole copies of the module, which sharded parameters do not allow: in on_fit_start register a buffer with a clone of each of "
    "self.named_parameters(), and update it in place in on_train_batch_end (shards are averaged, and saved, like the parameters)"
)
BATCH_SIZE = (
    "raises the batch until a rank runs out of memory, and the other ranks would wait for that one for ever: set the batch size by hand, "
    "or look for it with devices=1"
)
PRUNES = "rewrites parameters as masks and originals, which sharded parameters do not allow: prune an exported checkpoint on one device"
FINETUNES = (
    "compares parameters to add groups to the optimizer, which tensor-parallel and pipelined ones do not allow: with tensor parallelism "
    "give all parameters to the optimizer and set requires_grad in on_train_epoch_start; in a pipeline freeze before the fit, or use FSDP2 "
    "alone"
)
SEQUENTIAL = (
    "overfit_batches replaces a loader's own sampler by a sequential one, and use_distributed_sampler=False keeps Lightning from dividing "
    "it, so all ranks would train on the same rows: leave use_distributed_sampler at True, or use limit_train_batches"
)


def refused_habits(trainer: Any, plan: ParallelPlan) -> list[str]:
    """A message for every callback and option that would not do here what it does on one device. Same on all ranks.

    Args:
        trainer: of the run.
        plan: resolved.
    """
    wrong = []
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            wrong.append(f"callback {name} {AVERAGES}")
        if isinstance(callback, BatchSizeFinder) and trainer.world_size > 1:
            wrong.append(f"callback {name} (or Tuner.scale_batch_size) {BATCH_SIZE}")
        if isinstance(callback, ModelPruning):
            wrong.append(f"callback {name} {PRUNES}")
        if isinstance(callback, BaseFinetuning) and plan.tensor_parallel_size * plan.pipeline_parallel_size > 1:
            wrong.append(f"callback {name} {FINETUNES}")
    checkpoint_io = trainer.strategy._checkpoint_io
    if checkpoint_io is not None and type(checkpoint_io) is not TorchCheckpointIO:
        wrong.append(
            f"plugin {type(checkpoint_io).__name__}: a checkpoint is a folder that torch.distributed.checkpoint writes, so a CheckpointIO "
            "would never be asked: leave it out"
        )
    divides = trainer._accelerator_connector.use_distributed_sampler
    if trainer.overfit_batches and not divides and int(plan.data_parallel_size) > 1:
        wrong.append(f"overfit_batches={trainer.overfit_batches} with use_distributed_sampler=False: {SEQUENTIAL}")
    return wrong


def give_finder_the_step_loss(trainer: Any, strategy: Any) -> None:
    """The learning rate finder reads a step's output, which is the mean over this rank's rows: it gets the one over all."""
    for callback in trainer.callbacks:
        if isinstance(callback, _LRCallback):
            callback.__dict__["on_train_batch_end"] = partial(_with_step_loss, type(callback).on_train_batch_end, callback, strategy)


def _with_step_loss(
    hook: Any, callback: Any, strategy: Any, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any
) -> None:
    hook(callback, trainer, module, {"loss": strategy.step_loss} if outputs else outputs, *args)
