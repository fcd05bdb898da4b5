"""The two trainings that are compared: Lightning's Trainer on one device with whole batches, and the strategy on a rank with its rows."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_megascale.parallel.init import materialize, on_meta
from lightning_megascale.parallel.layouts import target_of
from lightning_megascale.parallel.rng import seed_step
from lightning_megascale.strategies.steps import read_output
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


# ---- one device ----------------------------------------------------------------------------------------------------------------------


class OneDevice(SingleDeviceStrategy):
    """Lightning's own strategy for one device; it also takes ``loss_sum`` and ``num_tokens``, and notes loss and norm."""

    data_parallel_rank, data_parallel_size = 0, 1

    def __init__(self, seed: int) -> None:
        super().__init__("cpu")
        self._seed = seed
        self.step_loss: Tensor | None = None
        self.grad_norm: Tensor | None = None

    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        if on_meta(module):
            materialize(target_of(module, "auto")[1], "cpu", self._seed)
            materialize(module, "cpu", self._seed)
        plugin = self.precision_plugin

        def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(plugin.main_params(optimizer), clip_val)

        plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]
        super().setup(trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output, loss, _ = read_output(super().training_step(*args, **kwargs))
        self.step_loss = None if loss is None else loss.detach()
        return output

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.step_loss = closure_loss.detach()
        return super().backward(closure_loss, *args, **kwargs)


@dataclass
class Trained:
    """One device's numbers.

    Args:
        losses, norms: of every step.
        gradients: of every step, by name, before it.
        parameters: after the last, by name.
        first: parameters before the first step.
        aliases: further names of tied parameters, and the name under which they stand here.
        draws: which generators the step drew from: "torch", "random", "numpy".
        clips: a norm can be clipped from outside.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    draws: list[str] = field(default_factory=list)
    clips: bool = True

    def note(self, step: int, name: str, gradient: Tensor) -> None:
        while len(self.gradients) <= step:
            self.gradients.append({})
        self.gradients[step][name] = gradient.clone()


class _Draws(pl.Callback):
    """Seeds every step differently from run to run, and sees whether it draws."""

    def __init__(self, trained: Trained, run: int) -> None:
        self._trained, self._run = trained, run
        self._before: dict[str, Any] = {}

    def on_train_batch_start(self, *_: Any) -> None:
        seed_step("verification", self._run)
        self._before = _generators()

    def on_before_optimizer_step(self, *_: Any) -> None:
        now = _generators()
        drawn = [name for name, state in self._before.items() if state != now[name]]
        self._trained.draws = sorted({*self._trained.draws, *drawn})


def _generators() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes(), "random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = repr(sys.modules["numpy"].random.get_state())
    return states


def train_alone(subject: Subject, setting: Setting, run: int = 0, noise: bool = False, watch: Any = None) -> Trained:
    """Trains on one device. In a process of its own.

    Args:
        subject, setting: what, and how.
        run: its random numbers follow it.
        noise: see ``Recorder``.
        watch: another callback.
    """
    module, trained = subject.make(), Trained()
    recorder = Recorder(trained.note, noise)
    batches = Batches(lambda strategy: subject.batches[: setting.steps])
    trained.clips = module.automatic_optimization and not is_overridden("configure_gradient_clipping", module)
    callbacks = [recorder, _Draws(trained, run), _First(trained), *([watch] if watch is not None else [])]
    fit(
        module,
        batches,
        subject.dtype,
        setting,
        devices=1,
        strategy=OneDevice(subject.seed),
        plugins=[LightningEnvironment()],
        callbacks=callbacks,
    )
    trained.losses, trained.norms = recorder.losses, recorder.norms
    trained.parameters = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    trained.aliases = {name: names[id(p)] for name, p in module.named_parameters(remove_duplicate=False) if names[id(p)] != name}
    return trained


class _First(pl.Callback):
    """Parameters before the first step."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trained.first = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


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
