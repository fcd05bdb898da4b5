"""ThroughputMonitor: tokens per second, seconds per optimizer step, share of waiting for data, and model FLOPs utilization."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megascale.data.ranks import data_parallel_position

# Dense bf16 tensor-core FLOP/s by device name; the first pattern that matches holds. Sources: the vendors' data sheets; where one states
# only the figure with sparsity (marked s), half of it.
PEAK_BF16_FLOPS = (
    (r"GB200", 2500e12),  # NVIDIA GB200 NVL72 data sheet, s (360 PFLOP/s for 72)
    (r"B200", 2250e12),  # NVIDIA DGX B200 data sheet, s (36 PFLOP/s for 8)
    (r"GH200", 989.4e12),  # NVIDIA GH200 data sheet, s
    (r"H200 NVL", 835.5e12),  # NVIDIA H200 data sheet, s
    (r"H200", 989.4e12),  # NVIDIA H200 data sheet, s
    (r"H100 PCIe", 756e12),  # NVIDIA H100 architecture white paper, table 2
    (r"H100 NVL", 835.5e12),  # NVIDIA H100 data sheet, s
    (r"H100", 989.4e12),  # SXM5: NVIDIA H100 architecture white paper, table 2
    (r"A100", 312e12),  # NVIDIA A100 data sheet
    (r"A30\b", 165e12),  # NVIDIA A30 data sheet
    (r"A40\b", 149.7e12),  # NVIDIA A40 data sheet
    (r"A10\b", 125e12),  # NVIDIA A10 data sheet
    (r"L40S", 362.05e12),  # NVIDIA L40S data sheet
    (r"L40\b", 181.05e12),  # NVIDIA L40 data sheet
    (r"L4\b", 121e12),  # NVIDIA L4 data sheet, s
    (r"MI300X", 1307.4e12),  # AMD Instinct MI300X data sheet
    (r"MI250X", 383e12),  # AMD Instinct MI250X data sheet, both dies
)

_MUCH_WAITING = 0.25
_log = logging.getLogger(__name__)


class ThroughputMonitor(Callback):
    """Logs, once per ``window`` optimizer steps, the means over that window.

    * ``perf/tokens_per_second``: over all ranks: this rank's tokens times the data-parallel size (not the world size: tensor-parallel
      peers read the same tokens). Tokens are the elements of ``input_ids``, or those that ``attention_mask`` or ``document_ids``
      (0 or more) tell from padding; for a batch without ``input_ids`` the rows are counted. Under context parallelism those of the
      whole rows.
    * ``perf/step_seconds``: per optimizer step, with all of its accumulated batches and their reading. Not in it: validation, and
      writing checkpoints (of a checkpoint with ``save_weights_only`` callbacks hear nothing, so it is in), together with the reading
      of the one batch that follows. The first optimizer step of a fit, with its compilation and allocation, is left out.
    * ``perf/data_wait_share``: part of that time between the end of a batch and the start of the next. The host's clock: on a GPU, work
      that is still queued may hide it, so it is an upper bound of what reading costs. Above a quarter of the time, a warning says so,
      once.
    * what the data module's ``metrics()`` tells, if it has one: ``data/ratio/NAME``, ``data/quarantined``.
    * ``perf/mfu``: model FLOPs utilization, tokens per second x FLOPs per token / (peak FLOP/s x world size); only when both are known.
      Convention: forward and backward FLOPs per token = 6 x N_matmul + 12 x layers x hidden x sequence, with N_matmul the weights
      that take part in matrix products (the head does, the embedding does not), causal masking not discounted, recomputation not
      counted. The peak is always that of dense bf16. Source: PaLM, Chowdhery et al. 2022, appendix B.

    The device is synchronized only where a window begins or ends, and before and after a validation or checkpoint; never per step. No
    rank talks to another. ``latest`` holds the last window's values.

    Args:
        window: optimizer steps per value. With manual optimization, calls of optimizers' ``step``.
        flops_per_token: a number; "auto" asks ``flops_per_token(sequence_length)`` of the LightningModule or its ``model``, and takes
            6 x number of parameters where neither has it; None leaves MFU out.
        peak_flops: FLOP/s of one device; "auto" looks the device's name up; None leaves MFU out.
        clock: seconds as a float; for tests.

    Raises:
        ValueError: for a window below 1, or a number that is not positive.
    """

    def __init__(
        self,
        window: int = 20,
        flops_per_token: float | Literal["auto"] | None = "auto",
        peak_flops: float | Literal["auto"] | None = "auto",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"window={window}: at least 1 optimizer step")
        for name, value in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops)):
            if value is not None and value != "auto" and (isinstance(value, str) or not value > 0):
                raise ValueError(f'{name}={value!r}: a positive number, "auto", or None')
        self.window, self.flops_per_token, self.peak_flops, self.clock = window, flops_per_token, peak_flops, clock
        self._warned = False
        self.latest: dict[str, float] = {}
        self._measuring = False
        self._tokens: int | torch.Tensor = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measuring = False  # until the first optimizer step is over
        self._paused: float | None = None
        self._step = trainer.global_step
        self._peak = peak_bf16_flops(trainer.strategy.root_device) if self.peak_flops == "auto" else self.peak_flops
        if self.peak_flops == "auto" and self._peak is None and trainer.strategy.root_device.type == "cuda":
            name = torch.cuda.get_device_name(trainer.strategy.root_device)
            rank_zero_info(f"perf/mfu is not logged: no peak FLOP/s known for {name!r}; give ThroughputMonitor(peak_flops=...)")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._paused is not None:
            self._resume(trainer)
        elif self._measuring:
            self._waited += self.clock() - self._batch_end

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._paused is not None:
            self._resume(trainer)
        if self._measuring:
            whole = whole_shape(trainer)
            self._tokens += count_tokens(batch) if whole is None else whole[0]
        steps = trainer.global_step - self._step
        if not self._measuring and steps:
            self._begin(trainer)
        elif self._measuring and steps >= self.window:
            self._finish(trainer, pl_module, batch, steps)
            self._begin(trainer)
        self._batch_end = self.clock()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._pause(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measuring = False

    def _begin(self, trainer: Trainer) -> None:
        _synchronize(trainer)
        self._measuring, self._step = True, trainer.global_step
        self._begun, self._waited, self._excluded = self.clock(), 0.0, 0.0
        self._tokens = 0

    def _pause(self, trainer: Trainer) -> None:
        if self._measuring and self._paused is None:
            _synchronize(trainer)
            self._paused = self.clock()

    def _resume(self, trainer: Trainer) -> None:
        _synchronize(trainer)
        assert self._paused is not None
        self._excluded += self.clock() - self._paused
        self._paused = None

    def _finish(self, trainer: Trainer, pl_module: LightningModule, batch: Any, steps: int) -> None:
        """Closes a window: values to the loggers at this step, and to the progress bar."""
        _synchronize(trainer)
        seconds = self.clock() - self._begun - self._excluded
        if not seconds > 0:
            return
        tokens_per_second = float(self._tokens) * data_parallel_position(trainer)[1] / seconds
        values = {
            "perf/tokens_per_second": tokens_per_second,
            "perf/step_seconds": seconds / steps,
            "perf/data_wait_share": self._waited / seconds,
        }
        flops = self._flops_per_token(pl_module, batch)
        if flops is not None and self._peak is not None:
            values["perf/mfu"] = tokens_per_second * flops / (float(self._peak) * trainer.world_size)
        self._warn_of_waiting(values["perf/data_wait_share"], trainer)
        if callable(own := getattr(getattr(trainer, "datamodule", None), "metrics", None)):
            values |= own()
        self.latest = values
        for logger in trainer.loggers:  # at once: self.log would wait for a multiple of log_every_n_steps, which may never fall here
            logger.log_metrics(values, step=trainer.global_step - 1)  # Lightning numbers the first step 0
        for name, value in values.items():
            pl_module.log(name, value, prog_bar=name == "perf/tokens_per_second", logger=False, on_step=True, on_epoch=False)

    def _warn_of_waiting(self, share: float, trainer: Trainer) -> None:
        if share > _MUCH_WAITING and not self._warned and trainer.is_global_zero:
            self._warned = True
            workers = getattr(getattr(trainer, "datamodule", None), "num_workers", None)
            _log.warning(
                "%.0f%% of the time goes by between batches: reading data limits this run. Raise num_workers%s, or prepare the shards once "
                "(megascale data write ... preprocessed=true)",
                100 * share,
                "" if workers is None else f" (now {workers})",
            )

    def _flops_per_token(self, module: LightningModule, batch: Any) -> float | None:
        if self.flops_per_token != "auto":
            return self.flops_per_token
        if not (isinstance(batch, Mapping) and "input_ids" in batch):
            return None
        for owner in (module, getattr(module, "model", None)):
            if callable(own := getattr(owner, "flops_per_token", None)):
                whole_rows = whole_shape(module._trainer)
                return float(own(batch["input_ids"].shape[1] if whole_rows is None else whole_rows[1]))
        strategy = getattr(module._trainer, "strategy", None)
        whole = getattr(strategy, "num_parameters", None)  # a pipeline's rank holds a part of them
        return 6.0 * (whole or sum(parameter.numel() for parameter in module.parameters()))


def whole_shape(trainer: Any) -> tuple[int, int] | None:
    """(tokens, tokens of a row) of a batch that the strategy has cut along its sequence; None where it cuts none."""
    return getattr(getattr(trainer, "strategy", None), "batch_shape", None)


def count_tokens(batch: Any) -> int | torch.Tensor:
    """Tokens of a batch (or its rows, without ``input_ids``); a masked count stays on the device, so that nothing waits for it."""
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
        mask, documents = batch.get("attention_mask"), batch.get("document_ids")
        if mask is None and isinstance(documents, torch.Tensor) and documents.shape == batch["input_ids"].shape:
            mask = documents >= 0
        return batch["input_ids"].numel() if mask is None else mask.sum()
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else 1
    for value in batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ():
        if rows := count_tokens(value):
            return rows
    return 0


def peak_bf16_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a CUDA or ROCm device by its name; None when it is unknown, and for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for pattern, peak in PEAK_BF16_FLOPS if re.search(pattern, name)), None)


def _synchronize(trainer: Trainer) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.root_device)
