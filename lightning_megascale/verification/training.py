"""Training for a comparison: what one device and ranks share, and the strategy on a rank with its rows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_megascale.strategies.trainer import MegascaleStrategy
from lightning_megascale.verification.axes import Axes
from lightning_megascale.verification.report import Refused
from lightning_megascale.verification.subject import Subject
from lightning_megascale.verification.wide import widened

GradientSeen = Callable[[int, str, Tensor], None]  # step, name, whole gradient before the step


# ---- what both sides share -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """How both sides train.

    Args:
        steps: optimizer steps.
        clip: norm at which gradients are clipped; None clips nothing.
        wide: what asks for float32 inside the model gets float64.
    """

    steps: int
    clip: float | None = None
    wide: bool = False

    def arithmetic(self) -> AbstractContextManager:
        return widened() if self.wide else nullcontext()


class Batches(pl.LightningDataModule):
    """Batches that are there already; ``of`` is asked once the strategy knows which share a rank has."""

    def __init__(self, of: Callable[[Any], list[Any]]) -> None:
        super().__init__()
        self.of = of

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return _Sequence(self.of(self.trainer.strategy))


class _Sequence:
    """Any iterable is a loader for Lightning, but a list is several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


class Recorder(pl.Callback):
    """Loss and norm of every optimizer step, and its gradients as they are before it.

    Args:
        seen: is given every gradient.
        noise: rounding errors are added to the gradients of every step, to learn what they do.
    """

    def __init__(self, seen: GradientSeen, noise: bool = False) -> None:
        self.losses: list[float] = []
        self.norms: list[float | None] = []
        self.steps = 0
        self._seen, self._noise, self._global_step = seen, noise, 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # what it monitors may be a validation's

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        gradients = {name: p.grad for name, p in module.named_parameters() if id(p) in stepped and p.grad is not None}
        for name, gradient in gradients.items():
            self._seen(self.steps, name, whole(gradient))
        if self._noise:
            add_rounding_errors(list(gradients.values()), self.steps)
        self.steps += 1

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not module.automatic_optimization:
            self._note(trainer.strategy)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if module.automatic_optimization and trainer.global_step > self._global_step:
            self._global_step = trainer.global_step
            self._note(trainer.strategy)

    def _note(self, strategy: Any) -> None:
        self.losses.append(float("nan") if strategy.step_loss is None else float(strategy.step_loss))
        self.norms.append(None if strategy.grad_norm is None else float(strategy.grad_norm))


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, whatever its sharding; collective over its mesh."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def add_rounding_errors(gradients: list[Tensor], seed: int) -> None:
    """Adds a few units of rounding to every element that is not exactly 0, in place."""
    if not gradients:  # a step that Lightning skipped
        return
    generator = torch.Generator().manual_seed(seed)
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    typical = norm / sum(gradient.numel() for gradient in gradients) ** 0.5
    for gradient in gradients:
        size = 4 * torch.finfo(gradient.dtype).eps * torch.maximum(gradient.abs().max(), typical)
        errors = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype) * size
        gradient.add_(torch.where(gradient != 0, errors, torch.zeros_like(errors)))


def fit(module: pl.LightningModule, batches: Batches, dtype: torch.dtype, setting: Setting, **arguments: Any) -> None:
    """Trains for one pass over ``batches``, with nothing around it."""
    plugins = [*arguments.pop("plugins", []), *([DoublePrecision()] if dtype == torch.float64 else [])]
    with tempfile.TemporaryDirectory() as folder, setting.arithmetic():
        trainer = pl.Trainer(
            accelerator="cpu",
            plugins=plugins,
            max_epochs=1,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            gradient_clip_val=setting.clip,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **arguments,
        )
        trainer.fit(module, datamodule=batches)


# ---- a rank --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How ranks train.

    Args:
        axes: the combination.
        fields: further arguments of the strategy: fields of the plan, ``layout``, ``module``.
        accumulate: batches of an optimizer step.
    """

    axes: Axes
    fields: dict[str, Any]
    accumulate: int = 1

    def strategy(self, **changes: Any) -> MegascaleStrategy:
        return MegascaleStrategy(**{**self.axes.plan, **self.fields, **changes})


def train_on_rank(subject: Subject, setting: Setting, plan: Plan, callbacks: list[pl.Callback], **changes: Any) -> pl.LightningModule:
    """Trains as one of several ranks; returns the module, still sharded.

    Raises:
        Refused: when the strategy does not take the model or the plan.
    """
    try:
        strategy = plan.strategy(**changes)
        module = subject.make()
        batches = Batches(lambda s: subject.shares(s.data_parallel_size, s.data_parallel_rank, plan.accumulate)[: _count(setting, plan)])
        fit(
            module,
            batches,
            subject.dtype,
            setting,
            devices=plan.axes.ranks,
            strategy=strategy,
            accumulate_grad_batches=plan.accumulate,
            callbacks=callbacks,
        )
    except Exception as error:
        if _is_refusal(error):
            raise Refused(str(error)) from error
        raise
    return module


def _count(setting: Setting, plan: Plan) -> int:
    return setting.steps * plan.accumulate


def _is_refusal(error: BaseException) -> bool:
    """Raised by a file of the package itself, not by torch or the user's code inside of it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = "" if trace is None else trace.tb_frame.f_code.co_filename
    package = __file__.rpartition("/verification/")[0]
    if not file.startswith(package + "/"):
        return False
    return isinstance(error, ValueError) or (isinstance(error, RuntimeError) and file.endswith("guards.py"))
