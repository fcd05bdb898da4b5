"""LossCurve: keeps the losses of a run, through resumes, and draws them as a PNG."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

_MOST_POINTS = 2000
_NAMES = {"train/loss": "training", "val/loss": "validation"}


class LossCurve(Callback):
    """Notes ``train/loss`` and ``val/loss`` against the optimizer step; its state travels in the checkpoint.

    Args:
        path: the PNG, written by the first rank when training ends or stops.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.losses: dict[str, list[tuple[int, float]]] = {name: [] for name in _NAMES}
        self._stride = 1

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step % self._stride == 0:
            self._note(trainer, "train/loss")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._note(trainer, "val/loss")

    def _note(self, trainer: pl.Trainer, name: str) -> None:
        points, step = self.losses[name], trainer.global_step
        if name not in trainer.callback_metrics or (points and points[-1][0] >= step):
            return
        points.append((step, float(trainer.callback_metrics[name])))
        if len(points) > _MOST_POINTS:  # keep every second one: any length of run fits
            del points[::2]
            self._stride *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"losses": {name: [list(point) for point in points] for name, points in self.losses.items()}, "stride": self._stride}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = {name: [(int(step), float(loss)) for step, loss in points] for name, points in state_dict["losses"].items()}
        self._stride = state_dict["stride"]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and any(self.losses.values()):
            draw(self.losses, self.path)


def smooth(points: list[tuple[int, float]], share: float = 0.8) -> list[tuple[int, float]]:
    """An exponential moving average without the bias of its start.

    Source: bias correction as in Adam, Kingma and Ba 2015, section 3.
    """
    average, weight, result = 0.0, 0.0, []
    for step, loss in points:
        average, weight = share * average + (1 - share) * loss, share * weight + (1 - share)
        result.append((step, average / weight))
    return result


def draw(losses: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Writes the curves.

    Args:
        losses: metric name -> (optimizer step, loss in nats per token).
        path: the PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    train, validation = losses["train/loss"], losses["val/loss"]
    finite = [(step, loss) for step, loss in train if math.isfinite(loss)]
    if finite:
        axes.plot(*zip(*finite), color="#9ec5e8", linewidth=0.9, label="training, each step")
        axes.plot(*zip(*smooth(finite)), color="#1f5fa8", linewidth=1.8, label="training, averaged")
    if validation:
        axes.plot(*zip(*validation), color="#d1495b", marker="o", markersize=4, linewidth=1.4, label="validation")
        axes.annotate(f"{validation[-1][1]:.3f}", validation[-1], xytext=(4, 6), textcoords="offset points", color="#d1495b")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
