"""Figures: one device's numbers as the reference, what rounding alone does to them, and how far a combination's numbers are from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_megascale.verification.one_device import Trained, train_alone
from lightning_megascale.verification.report import CannotVerify
from lightning_megascale.verification.subject import Subject
from lightning_megascale.verification.training import Plan, Recorder, Setting, train_on_rank, whole

# Rounding is amplified (an Adam step of a gradient that is zero but for rounding is a full step): this many times what it does to one
# device's numbers is allowed, where that is more than the tolerance.
_AMPLIFIED = 10.0


@dataclass
class Reference:
    """One device's numbers and how near others have to be.

    Args:
        exact: the numbers.
        setting: how they came about.
        tolerance: of losses, of norms, of gradients (relative to ``scales``), of parameters (relative to 1).
        scales: norm of all gradients of each step.
        losses, norms, gradients: what is allowed in each step.
        parameters: what is allowed, by name.
    """

    exact: Trained
    setting: Setting
    tolerance: float
    scales: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    parameters: dict[str, float] = field(default_factory=dict)

    @property
    def moved(self) -> float:
        """The largest change of a parameter over all steps."""
        return max((largest(self.exact.parameters[name], value) for name, value in self.exact.first.items()), default=0.0)

    def gradient(self, step: int, name: str, value: Tensor) -> float:
        """How far a gradient is off, relative to the norm of all gradients of the step."""
        if step >= len(self.scales):
            return math.inf
        wanted = self.exact.gradients[step].get(self.exact.aliases.get(name, name))
        return math.inf if wanted is None else largest(wanted, value) / self.scales[step]

    def parameter(self, name: str, value: Tensor) -> float:
        wanted = self.exact.parameters.get(self.exact.aliases.get(name, name))
        return math.inf if wanted is None else largest(wanted, value)


def largest(wanted: Tensor, got: Tensor) -> float:
    """Largest absolute difference; infinite for other shapes and for what is not a number."""
    if wanted.shape != got.shape:
        return math.inf
    off = (wanted - got).abs().max().item() if wanted.numel() else 0.0
    return off if off == off else math.inf


def relative(wanted: float | None, got: float | None) -> float:
    """Difference relative to the wanted number where it is above 1; infinite when one of the two is missing."""
    if wanted is None or got is None:
        return 0.0 if wanted is got else math.inf
    off = abs(wanted - got) / max(1.0, abs(wanted))
    return off if off == off else math.inf


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    return float(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm()) if gradients else 0.0


# ---- the reference -------------------------------------------------------------------------------------------------------------------


def make_reference(subject: Subject, wide: bool, tolerance: float) -> Reference:
    """Trains on one device: a step to learn the norm, then all steps with a clip that is active, then again with rounding errors.

    Raises:
        CannotVerify: for a model that does not repeat itself, or whose numbers prove nothing.
    """
    first = train_alone(subject, Setting(1, None, wide), run=1)
    _check_first(first)
    clip = norm_of(first.gradients[0]) / 2 if first.clips else None
    setting = Setting(subject.steps, clip, wide)
    exact = train_alone(subject, setting, run=2)
    _check_repeated(first, exact, tolerance)
    noisy = train_alone(subject, setting, run=2, noise=True)
    reference = Reference(exact, setting, tolerance, [norm_of(gradients) or 1.0 for gradients in exact.gradients])
    _allow(reference, noisy)
    return reference


def _allow(reference: Reference, noisy: Trained) -> None:
    exact, tolerance = reference.exact, reference.tolerance

    def allowed(moved: float) -> float:
        return max(tolerance, _AMPLIFIED * moved)

    reference.losses = [allowed(relative(a, b)) for a, b in zip(exact.losses, noisy.losses)]
    reference.norms = [allowed(relative(a, b)) for a, b in zip(exact.norms, noisy.norms)]
    reference.gradients = [
        allowed(max((reference.gradient(step, name, value) for name, value in gradients.items()), default=0.0))
        for step, gradients in enumerate(noisy.gradients)
    ]
    reference.parameters = {name: allowed(reference.parameter(name, value)) for name, value in noisy.parameters.items()}


def _check_first(first: Trained) -> None:
    if not first.gradients or not first.gradients[0]:
        raise CannotVerify(
            "on one device the first batch gave no gradient to any parameter of an optimizer, so there is nothing to compare"
        )
    norm, loss = norm_of(first.gradients[0]), first.losses[0] if first.losses else 0.0
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise CannotVerify(f"on one device the first step's loss is {loss} and its gradient norm {norm}: nothing can be compared with that")
    if norm == 0.0:
        raise CannotVerify("on one device every gradient of the first step is 0, so nothing can be compared")


def _check_repeated(first: Trained, again: Trained, tolerance: float) -> None:
    """A model must give the same numbers twice."""
    for name, value in first.first.items():
        if name not in again.first or largest(value, again.first[name]) > 0:
            raise CannotVerify(
                f"build() does not repeat itself: {name} has other first values when it is called again after the same seed. Draw them "
                "with torch, numpy or random, whose generators are seeded before each call, or load them from a file"
            )
    scale = norm_of(first.gradients[0])
    off = {name: largest(g, again.gradients[0][name]) / scale for name, g in first.gradients[0].items() if name in again.gradients[0]}
    loss = relative(first.losses[0], again.losses[0]) if first.losses else 0.0
    name = max(off, key=lambda key: off[key])
    if max(loss, off[name]) > tolerance / 100:
        cause = (
            f"its step draws random numbers ({', '.join(again.draws)}): noise, masks or samples. Put them into the batch, or switch them "
            "off in build()"
            if again.draws
            else "it depends on something besides weights and batch: time, a counter, a file, the order of a set"
        )
        raise CannotVerify(
            "the model differs from itself on one device: with the same weights and batch the first loss is off by "
            f"{loss:.1e} and the gradient of {name} by {off[name]:.1e} of the norm, so no plan can be equal to it. Likely {cause}"
        )


# ---- a combination -------------------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What one rank found: its losses and norms, and how far its gradients (of each step) and parameters are off, by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    gradients: list[dict[str, float]] = field(default_factory=list)
    parameters: dict[str, float] = field(default_factory=dict)

    def note(self, reference: Reference, step: int, name: str, gradient: Tensor) -> None:
        while len(self.gradients) <= step:
            self.gradients.append({})
        self.gradients[step][name] = reference.gradient(step, name, gradient)


def compare_on_rank(subject: Subject, reference: Reference, plan: Plan) -> Seen:
    """Trains as one rank and compares at once, so that no rank has to hand over its tensors."""
    seen = Seen()
    recorder = Recorder(lambda step, name, gradient: seen.note(reference, step, name, gradient))
    module = train_on_rank(subject, reference.setting, plan, [recorder])
    seen.losses, seen.norms = recorder.losses, recorder.norms
    seen.parameters = {name: reference.parameter(name, whole(parameter)) for name, parameter in module.named_parameters()}
    return seen


@dataclass(frozen=True)
class Figure:
    """The worst of some differences.

    Args:
        off: the difference.
        allowed: what it may be.
        name, step: where it is.
    """

    off: float
    allowed: float
    name: str = ""
    step: int = 0

    @property
    def is_equal(self) -> bool:
        return self.off <= self.allowed


def worst(figures: Iterable[Figure]) -> Figure:
    return max(figures, key=lambda figure: figure.off / figure.allowed, default=Figure(0.0, 1.0))


@dataclass(frozen=True)
class Figures:
    """All ranks' findings together: the worst loss and norm of each step, every gradient of each step, every parameter after the last."""

    losses: list[Figure]
    norms: list[Figure]
    gradients: list[dict[str, Figure]]
    last: dict[str, Figure]
    missing: tuple[str, ...] = ()

    @property
    def loss(self) -> Figure:
        return worst(self.losses)

    @property
    def norm(self) -> Figure:
        return worst(self.norms)

    @property
    def gradient(self) -> Figure:
        return worst(figure for step in self.gradients for figure in step.values())

    @property
    def parameters(self) -> Figure:
        return worst(self.last.values())

    @property
    def first_gradients(self) -> dict[str, Figure]:
        """Of the first step, where both sides still have the same weights."""
        return self.gradients[0] if self.gradients else {}

    @property
    def ok(self) -> bool:
        return not self.missing and all(f.is_equal for f in (self.loss, self.gradient, self.norm, self.parameters))

    @property
    def wrong_at_first(self) -> list[str]:
        """Parameters whose gradient is wrong in the first step already."""
        return [name for name, figure in self.first_gradients.items() if not figure.is_equal]


def together(reference: Reference, seen: Sequence[Seen]) -> Figures:
    """The worst of all ranks; a pipeline's ranks have other parameters, all others the same."""
    exact, steps = reference.exact, len(reference.scales)
    rows = [[one.gradients[step] for one in seen if step < len(one.gradients)] for step in range(steps)]
    gradients = [_merged(row, dict.fromkeys(_names(row), reference.gradients[step]), step) for step, row in enumerate(rows)]
    last = [one.parameters for one in seen]
    parameters = _merged(last, {name: reference.parameters.get(exact.aliases.get(name, name), 1.0) for name in _names(last)})
    losses = _numbers(exact.losses, [one.losses for one in seen], reference.losses)
    norms = _numbers(exact.norms, [one.norms for one in seen], reference.norms)
    held = {exact.aliases.get(name, name) for name in parameters}
    stepped = [{exact.aliases.get(name, name) for name in step} for step in gradients]
    missing = [f"{name}: no rank holds it" for name in exact.parameters if name not in held]
    missing += [
        f"{name}: no rank has its gradient in step {step + 1}"
        for step, names in enumerate(stepped)
        for name in exact.gradients[step]
        if name not in names
    ]
    return Figures(losses, norms, gradients, parameters, tuple(missing))


def _numbers(wanted: Sequence[float | None], got: Sequence[Sequence[float | None]], allowed: Sequence[float]) -> list[Figure]:
    """For each step the largest difference that a rank has found; infinite where a rank has fewer steps."""
    return [
        Figure(max(relative(number, row[step] if step < len(row) else math.nan) for row in got), allowed[step], step=step)
        for step, number in enumerate(wanted)
    ]


def _names(rows: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _merged(rows: Sequence[Mapping[str, float]], allowed: Mapping[str, float], step: int = 0) -> dict[str, Figure]:
    """For each name the largest difference that a rank has found."""
    return {name: Figure(max(row[name] for row in rows if name in row), allowed[name], name, step) for name in _names(rows)}
