"""The reference: Lightning's Trainer on one device with whole batches."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, set_microbatch_weight
from lightning_megascale.parallel.expert_balance import Routers
from lightning_megascale.parallel.init import materialize, on_meta
from lightning_megascale.parallel.layouts import target_of
from lightning_megascale.parallel.loss_scale import documents_of, real_tokens, weigh
from lightning_megascale.parallel.rng import seed_step
from lightning_megascale.strategies.steps import read_output
from lightning_megascale.verification.subject import Subject
from lightning_megascale.verification.training import Batches, Recorder, Setting, fit
from lightning_megascale.verification.wide import has_widened


class OneDevice(SingleDeviceStrategy):
    """Lightning's own strategy for one device; it also takes ``loss_sum`` and ``num_tokens``, and notes loss and norm."""

    data_parallel_rank, data_parallel_size = 0, 1
    settles_routers = True

    def __init__(self, seed: int) -> None:
        super().__init__("cpu")
        self._seed = seed
        self.step_loss: Tensor | None = None
        self.grad_norm: Tensor | None = None
        self._routers: Routers | None = None

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
        self._routers = Routers.alone(module)
        super().setup(trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch = args[0] if args else next(iter(kwargs.values()))
        layers = MicrobatchWeight(1.0, tokens=real_tokens(batch), documents=documents_of(batch))
        set_microbatch_weight(layers)
        output, loss, weights = read_output(super().training_step(*args, **kwargs))
        weights = weights or weigh(batch, "auto", None, self.root_device)
        labels, held = None if weights is None else weights.used, layers.held(1)
        layers.unit = None if labels is None else 1.0 / torch.where(labels > 0, labels, 1.0)
        if labels is not None and held is not None:
            layers.labels_per_token = labels / held.clamp(min=1)
        self.step_loss = None if loss is None else loss.detach()
        return output

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        set_microbatch_weight(MicrobatchWeight(1.0))
        if self._routers is not None:
            self._routers.settle()
        return result

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
        widened: something was to be computed in float32 and was computed in float64.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    draws: list[str] = field(default_factory=list)
    clips: bool = True
    widened: bool = False

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
    trained.widened = has_widened()
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
