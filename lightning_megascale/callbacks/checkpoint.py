"""RunCheckpoint: ModelCheckpoint that also writes when a run is asked to stop (Ctrl-C, SIGTERM) and when it ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megascale import commit_record


class RunInterrupted(Exception):
    """Ends training on all ranks together, after the checkpoint of an interrupted run was written."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum, self.step = signum, step


class RunCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint, for runs that are interrupted and resumed.

    A signal that any rank receives is noticed by all at the end of the same optimizer step: they write a checkpoint together and
    raise ``RunInterrupted`` before anything else runs. Lightning's own handlers act inside the signal handler, in the middle of
    whatever a rank does.

    After a resume ``save_top_k`` counts what the folder holds, the checkpoint that was resumed from too, and ``last.ckpt`` goes on
    being the newest: names get no ``-v1`` (``enable_version_counter=False``), a step that is reached again replaces its checkpoint.

    Args:
        agree_every_n_steps: how often, in optimizer steps, the ranks ask each other whether one was signalled.
        **kwargs: those of ModelCheckpoint.
    """

    def __init__(self, *args: Any, agree_every_n_steps: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **{"enable_version_counter": False, **kwargs})
        if agree_every_n_steps < 1:
            raise ValueError(f"agree_every_n_steps={agree_every_n_steps}: must be at least 1")
        self._agree_every_n_steps = agree_every_n_steps
        self._signum = 0
        self._agreed_step = -1
        self._interrupted: RunInterrupted | None = None
        self._handlers: dict[int, Any] = {}

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._signum = self._signum or signum

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._count_what_is_there(trainer)
        self._agreed_step, self._signum, self._interrupted = trainer.global_step, 0, None
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._note)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        step = trainer.global_step
        if step == trainer.max_steps:
            self._save_before_the_epoch_ends(trainer)
        if step == self._agreed_step or step % self._agree_every_n_steps:
            return  # in the middle of an accumulation
        self._agreed_step = step
        if trainer.strategy.reduce_boolean_decision(bool(self._signum), all=False):
            self._save(trainer)
            self._interrupted = RunInterrupted(self._signum or signal.SIGTERM, step)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._stop()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def _stop(self) -> None:
        """Raises only now, when the loggers have the metrics of the last step; a run that ends with that step ends as ever."""
        if self._interrupted is not None:
            raise self._interrupted

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer)
        super().on_train_end(trainer, pl_module)
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._restore()

    def _count_what_is_there(self, trainer: pl.Trainer) -> None:
        """Rebuilds the record of ``save_top_k`` from the folder: a checkpoint remembers only what was there when it was written."""
        scores = {path: score.item() for path, score in self.best_k_models.items() if os.path.exists(path)}
        if self.monitor == "step" and self.dirpath is not None:
            scores |= {str(path): step for step, path in commit_record.complete(self.dirpath) if step <= trainer.global_step}
        best = sorted(scores.items(), key=lambda item: item[1], reverse=self.mode == "max")
        best = trainer.strategy.broadcast(best if self.save_top_k < 0 else best[: self.save_top_k])  # one rank's view of the disk
        self.best_k_models = {path: torch.tensor(score) for path, score in best}
        if best:
            self.best_model_path, self.kth_best_model_path = best[0][0], best[-1][0]
            self.best_model_score, self.kth_value = self.best_k_models[best[0][0]], self.best_k_models[best[-1][0]]

    def _should_remove_checkpoint(self, trainer: pl.Trainer, previous: str, current: str) -> bool:
        """Lightning keeps the checkpoint that was resumed from for ever; by now there is a newer one."""
        if super()._should_remove_checkpoint(trainer, previous, current):
            return True
        assert self.dirpath is not None
        return previous != current and Path(self.dirpath).absolute() in Path(previous).absolute().parents

    def _save_before_the_epoch_ends(self, trainer: pl.Trainer) -> None:
        """At ``max_steps`` in the middle of an epoch: Lightning counts the epoch as done before ``on_train_end``, so that a run made
        longer would go on in the next one. A metric of a validation that is still to come has to be waited for."""
        if self.monitor in (None, "step", "epoch") and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        """Writes the present step, unless its checkpoint exists."""
        if self._last_global_step_saved == trainer.global_step:
            return
        candidates = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
