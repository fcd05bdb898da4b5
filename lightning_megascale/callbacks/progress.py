"""TrainProgress: one live line on a terminal (step, loss, val, tokens/s, time left), and a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class TrainProgress(ProgressBar):
    """The progress of a fit in optimizer steps.

    Args:
        plain_seconds: where the output is no terminal, how many seconds lie between two lines.
    """

    def __init__(self, plain_seconds: float = 10.0) -> None:
        super().__init__()
        if not plain_seconds >= 0:
            raise ValueError(f"plain_seconds={plain_seconds}: must not be negative")
        self._plain_seconds = plain_seconds
        self._enabled = True
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total: int | None = None
        self._begin = self._printed = (0.0, 0)  # time, step

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.console.print(*args)
        else:
            print(*args, flush=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not (self._enabled and trainer.is_global_zero):
            return
        steps = trainer.estimated_stepping_batches
        self._total = int(steps) if steps not in (-1, float("inf")) else None
        self._begin = self._printed = (time.monotonic(), trainer.global_step)
        if sys.stdout.isatty():
            console = Console()
            columns = TextColumn("{task.fields[step]}"), BarColumn(24), TextColumn("{task.fields[text]}")
            self._bar = Progress(*columns, console=console, refresh_per_second=4)
            self._task = self._bar.add_task("", total=self._total, completed=trainer.global_step, step="", text="first step ...")
            self._bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._show(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._bar is not None and self._task is not None and not trainer.sanity_checking:
            self._bar.update(self._task, text="validating ...", refresh=True)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._show(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show(trainer, last=True)
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, trainer: pl.Trainer, last: bool = False) -> None:
        if not (self._enabled and trainer.is_global_zero):
            return
        now, step = time.monotonic(), trainer.global_step
        of = f"/{self._total}" if self._total else ""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, step=f"step {step}{of}", text=self._text(trainer, now, step), refresh=last)
        elif (last or now - self._printed[0] >= self._plain_seconds) and step > self._printed[1]:
            self._printed = (now, step)
            print(f"step {step}{of}  {self._text(trainer, now, step)}", flush=True)

    def _text(self, trainer: pl.Trainer, now: float, step: int) -> str:
        metrics = trainer.callback_metrics
        parts = [
            f"{label} {float(metrics[name]):{spec}}"
            for label, name, spec in (("loss", "train/loss", ".3f"), ("val", "val/loss", ".3f"))
            if name in metrics
        ]
        if "perf/tokens_per_second" in metrics:
            parts.append(f"{float(metrics['perf/tokens_per_second']):,.0f} tokens/s")
        done, seconds = step - self._begin[1], now - self._begin[0]
        if self._total and done > 0 and step < self._total:
            parts.append(f"ETA {_clock(seconds / done * (self._total - step))}")
        elif self._total and step >= self._total:
            parts.append(f"took {_clock(seconds)}")
        return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
