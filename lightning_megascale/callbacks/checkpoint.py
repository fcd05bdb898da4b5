"""RunCheckpoint: ModelCheckpoint that also writes when a run is asked to stop (Ctrl-C, SIGTERM) and when it ends."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint


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

    Args:
        agree_every_n_steps: how often, in optimizer steps, the ranks ask each other whether one was signalled.
        **kwargs: those of ModelCheckpoint.
    """

    def __init__(self, *args: Any, agree_every_n_steps: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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
        self._agreed_step, self._signum, self._interrupted = trainer.global_step, 0, None
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._note)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        step = trainer.global_step
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
