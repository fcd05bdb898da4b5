"""ModelSummary of the whole module: a rank holds shards of it or some of its layers, so the figures are taken before it is parallelized."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary as ModelSummaryCallback
from lightning.pytorch.utilities.model_summary import ModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import UNKNOWN_SIZE
from torch import nn

_KEPT = "_megascale_whole"


@dataclass
class Row:
    """A module's line in a summary, under the names of Lightning's ``LayerSummary``."""

    layer_type: str
    num_parameters: int
    training: bool
    in_size: Any = UNKNOWN_SIZE
    out_size: Any = UNKNOWN_SIZE


@dataclass(frozen=True)
class Whole:
    """A module before it was parallelized.

    Args:
        rows: of all modules below it, by name, in module order.
        parameters, trainable: numbers of elements.
        modes: how many modules are in "train" and in "eval" mode.
    """

    rows: dict[str, Row]
    parameters: int
    trainable: int
    modes: dict[str, int]

    @classmethod
    def of(cls, module: nn.Module) -> Whole:
        rows = {
            name: Row(type(child).__name__, sum(p.numel() for p in child.parameters()), child.training)
            for name, child in module.named_modules()
            if name
        }
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
        modes = [row.training for row in rows.values()]
        trainable = sum(size for size, trains in sizes if trains)
        return cls(rows, sum(size for size, _ in sizes), trainable, {"train": modes.count(True), "eval": modes.count(False)})


class WholeSummary(ModelSummary):
    """Lightning's summary with the figures of the whole module.

    Args:
        module: the LightningModule, parallelized.
        max_depth: as in ``ModelSummary``.
        whole: its figures from before.
        runs_example: the example input goes through the module for sizes and FLOPs; else both are unknown (a rank of a tensor-parallel
            group or a pipeline would show its part).
    """

    def __init__(self, module: pl.LightningModule, max_depth: int, whole: Whole, runs_example: bool) -> None:
        self._whole, self._runs_example = whole, runs_example
        super().__init__(module, max_depth)

    def summarize(self) -> Any:
        depth = self._max_depth
        rows = OrderedDict((name, row) for name, row in self._whole.rows.items() if depth == -1 or name.count(".") < depth)
        if self._runs_example and self._model.example_input_array is not None:
            for name, layer in super().summarize().items():
                rows[name].in_size, rows[name].out_size = layer.in_size, layer.out_size
        return rows

    @property
    def total_parameters(self) -> int:
        return self._whole.parameters

    @property
    def trainable_parameters(self) -> int:
        return self._whole.trainable

    @property
    def total_training_modes(self) -> dict[str, int]:
        return self._whole.modes


def keep_whole_summary(trainer: pl.Trainer, module: pl.LightningModule, *, runs_example: bool) -> None:
    """Lets every summary callback show the whole module. Before the module is parallelized; later runs show what was kept then.

    Args:
        trainer, module: of the run.
        runs_example: see ``WholeSummary``.
    """
    whole = module.__dict__.setdefault(_KEPT, Whole.of(module))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummaryCallback):
            callback.__dict__["_summary"] = partial(_summary, callback, whole, runs_example)


def _summary(callback: Any, whole: Whole, runs_example: bool, trainer: pl.Trainer, module: pl.LightningModule) -> WholeSummary:
    return WholeSummary(module, callback._max_depth, whole, runs_example)
