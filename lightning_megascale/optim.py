"""Optimizers with parameter groups that hold on any mesh, and learning-rate schedules as functions of the step."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Schedule = Callable[[int], float]
DEFAULT_NO_DECAY = ("bias", "norm")


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    *,
    name: str = "adamw",
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    no_decay: Sequence[str] = DEFAULT_NO_DECAY,
    lr_patterns: Mapping[str, float] | None = None,
    fused: bool | str = "auto",
    all_names: Collection[str] = (),
) -> Optimizer:
    """AdamW over groups of equal weight decay, learning rate and device mesh; frozen parameters are left out.

    A pattern with ``*``, ``?`` or ``[`` is matched against the whole name (as in a shell); any other is looked for as words between
    dots and underscores: "norm" finds ``layers.0.attention_norm.weight`` and ``norm.weight``.

    Args:
        named_parameters: as ``module.named_parameters()``.
        name: "adamw".
        lr: learning rate of parameters that no pattern names.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay; 0 for parameters with fewer than two dims and those that ``no_decay`` names.
        no_decay: patterns without decay.
        lr_patterns: learning rate by pattern; the first that matches counts.
        fused: one kernel per group. "auto": when every parameter is floating point on CPU or CUDA.
        all_names: of the whole model's trainable parameters, where ``named_parameters`` are those of a pipeline's rank: a pattern has to
            match one of them.

    Raises:
        ValueError: for values out of range, a pattern that matches no trainable parameter, nothing to train, or fused where it cannot be.

    Source: Loshchilov & Hutter 2019, "Decoupled weight decay regularization", algorithm 2.
    """
    named = [(key, parameter) for key, parameter in named_parameters if parameter.requires_grad]
    check_values(name=name, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, lr_patterns=lr_patterns, no_decay=no_decay)
    if not named:
        raise ValueError("no parameter to train: every one has requires_grad=False, or the module has none yet (see configure_model)")
    _check_patterns(list(all_names) or [key for key, _ in named], no_decay, lr_patterns or {})
    groups: dict[Any, dict[str, Any]] = {}
    for key, parameter in named:
        rate = next((rate for pattern, rate in (lr_patterns or {}).items() if matches(key, pattern)), None)
        decays = parameter.ndim >= 2 and not any(matches(key, pattern) for pattern in no_decay)
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None  # fused kernels take one mesh at a time
        values = {"lr": lr if rate is None else rate, "weight_decay": weight_decay if decays else 0.0}
        group = groups.setdefault((rate is not None, *values.values(), mesh), {"params": [], **values})
        group["params"].append(parameter)
    ordered = [groups[key] for key in sorted(groups, key=lambda key: key[0])]  # the plain learning rate first: it is the one logged
    return torch.optim.AdamW(ordered, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=_fused(named, fused))


def matches(name: str, pattern: str) -> bool:
    """Whether a parameter's name matches a pattern of ``build_optimizer``."""
    if re.search(r"[*?\[]", pattern):
        return fnmatchcase(name, pattern)
    return re.search(rf"(^|[._]){re.escape(pattern)}($|[._])", name) is not None


def constant_schedule(warmup_steps: int = 0) -> Schedule:
    """Linear warm-up, then 1."""
    _check_steps(1.0, warmup_steps=warmup_steps)
    return lambda step: _warmup(step, warmup_steps) if step < warmup_steps else 1.0


def cosine_schedule(warmup_steps: int, total_steps: int, min_ratio: float = 0.1) -> Schedule:
    """Linear warm-up, then half a cosine from 1 down to ``min_ratio`` at ``total_steps``, and ``min_ratio`` after it.

    Args:
        warmup_steps: steps before the peak; step 0 already learns, with 1 / (warmup_steps + 1).
        total_steps: optimizer steps of the run.
        min_ratio: last factor, in [0, 1].

    Raises:
        ValueError: when ``warmup_steps`` does not leave a step for the cosine, or for values out of range.

    Source: Loshchilov & Hutter 2017, "SGDR", equation 5, one period.
    """
    _check_steps(min_ratio, warmup_steps=warmup_steps, total_steps=total_steps)
    if total_steps <= warmup_steps:
        raise ValueError(f"total_steps={total_steps}: must exceed warmup_steps={warmup_steps}; train longer or warm up for less")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return _warmup(step, warmup_steps)
        progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2

    return factor


def wsd_schedule(warmup_steps: int, stable_steps: int, decay_steps: int, min_ratio: float = 0.0) -> Schedule:
    """Warm-up, a plateau of 1 for ``stable_steps``, a straight line to ``min_ratio`` over ``decay_steps``, and ``min_ratio`` after it.

    Args:
        warmup_steps, stable_steps, decay_steps: optimizer steps of each part.
        min_ratio: last factor, in [0, 1].

    Raises:
        ValueError: for values out of range.

    Source: Hu et al. 2024, "MiniCPM", equation 1 (warmup-stable-decay), with a linear decay.
    """
    _check_steps(min_ratio, warmup_steps=warmup_steps, stable_steps=stable_steps, decay_steps=decay_steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return _warmup(step, warmup_steps)
        into_decay = step - warmup_steps - stable_steps
        if into_decay <= 0:
            return 1.0
        return 1 - (1 - min_ratio) * min(1.0, into_decay / decay_steps) if decay_steps else min_ratio

    return factor


SCHEDULES: dict[str, Callable[..., Schedule]] = {"constant": constant_schedule, "cosine": cosine_schedule, "wsd": wsd_schedule}


class StepSchedule(LambdaLR):
    """LambdaLR whose state is the step alone, so that it fits any grouping of parameters: groups change with the parallel plan."""

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["_step_count"]
        self._last_lr = [base * scale(self.last_epoch) for base, scale in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


def build_scheduler(optimizer: Optimizer, kind: str = "cosine", **steps: Any) -> StepSchedule:
    """A scheduler that multiplies the learning rate of every group by the schedule's factor; to be stepped once per optimizer step.

    Args:
        optimizer: with each group at its peak learning rate.
        kind: "constant", "cosine" or "wsd".
        **steps: arguments of ``constant_schedule``, ``cosine_schedule`` or ``wsd_schedule``.

    Raises:
        ValueError: for an unknown kind or argument, a missing one, or values out of range.
    """
    return StepSchedule(optimizer, schedule_function(kind)(**check_arguments(schedule_function(kind), steps, f"{kind} schedule")))


def schedule_function(kind: str) -> Callable[..., Schedule]:
    """The function that makes a schedule of this kind."""
    if kind not in SCHEDULES:
        raise ValueError(f"schedule kind={kind!r}: must be one of {', '.join(SCHEDULES)}")
    return SCHEDULES[kind]


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any], what: str, later: Sequence[str] = ()) -> Mapping[str, Any]:
    """Returns ``given`` when it fits the function's arguments.

    Args:
        function: whose signature counts.
        given: keyword arguments.
        what: how a message calls it.
        later: arguments that somebody else gives.

    Raises:
        ValueError: naming unknown arguments, with the nearest, and missing ones.
    """
    parameters = {key: value for key, value in inspect.signature(function).parameters.items() if key not in later}
    for key in given:
        if key not in parameters:
            near = difflib.get_close_matches(key, parameters, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(parameters)}"
            raise ValueError(f"{what} has no argument {key!r}{hint}")
    missing = [key for key, value in parameters.items() if value.default is inspect.Parameter.empty and key not in given]
    if missing:
        raise ValueError(f"{what} needs {', '.join(missing)}")
    return given


def _warmup(step: int, warmup_steps: int) -> float:
    """Rises to 1 at ``warmup_steps`` without a step at 0, which would learn nothing."""
    return (step + 1) / (warmup_steps + 1)


def _check_steps(min_ratio: float, **steps: int) -> None:
    for key, value in steps.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{key}={value!r}: must be an integer of at least 0")
    if not _is_number(min_ratio) or not 0 <= min_ratio <= 1:
        raise ValueError(f"min_ratio={min_ratio!r}: must be in [0, 1], the share of the peak learning rate at the end")


def check_values(
    *,
    lr: Any,
    name: Any = "adamw",
    betas: Any = (0.9, 0.95),
    eps: Any = 1e-8,
    weight_decay: Any = 0.1,
    lr_patterns: Any = None,
    no_decay: Any = DEFAULT_NO_DECAY,
    fused: Any = "auto",
) -> None:
    """Checks the arguments of ``build_optimizer`` as far as they can be judged without parameters.

    Raises:
        ValueError: with every rule that is broken, one a line, each with its argument and value.
    """
    wrong = [] if name == "adamw" else [f"optimizer name={name!r}: must be 'adamw'; bring others in your own configure_optimizers"]
    if lr_patterns is not None and not isinstance(lr_patterns, Mapping):
        wrong.append(f"lr_patterns={lr_patterns!r}: must map patterns to learning rates")
        lr_patterns = None
    rates = {"lr": lr} | {f"lr_patterns[{pattern!r}]": rate for pattern, rate in (lr_patterns or {}).items()}
    for key, value in (rates | {"eps": eps, "weight_decay": weight_decay}).items():
        if not _is_number(value) or not 0 <= value < math.inf:
            wrong.append(f"{key}={value!r}: must be a finite number of at least 0")
    pair = list(betas) if isinstance(betas, Sequence) and not isinstance(betas, str) else []
    if len(pair) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in pair):
        wrong.append(f"betas={betas!r}: must be two numbers in [0, 1), such as [0.9, 0.95]")
    if not isinstance(no_decay, Sequence) or isinstance(no_decay, str) or not all(isinstance(pattern, str) for pattern in no_decay):
        wrong.append(f"no_decay={no_decay!r}: must be a list of patterns, such as ['bias', 'norm']")
    if fused not in (True, False, "auto"):
        wrong.append(f"fused={fused!r}: must be true, false or 'auto'")
    if wrong:
        raise ValueError("\n".join(wrong))


def _is_number(value: Any) -> bool:
    """True for a real number or a tensor of one; a bool is none."""
    return (isinstance(value, numbers.Real) and not isinstance(value, bool)) or (isinstance(value, Tensor) and value.numel() == 1)


def _check_patterns(names: Sequence[str], no_decay: Sequence[str], lr_patterns: Mapping[str, float]) -> None:
    """A pattern that matches nothing is a misspelling; the default ones may match nothing."""
    given = [("no_decay", pattern) for pattern in no_decay if pattern not in DEFAULT_NO_DECAY]
    for argument, pattern in given + [("lr_patterns", pattern) for pattern in lr_patterns]:
        if not any(matches(name, pattern) for name in names):
            parts = sorted({part for name in names for part in (name, *name.split("."))})
            near = difflib.get_close_matches(pattern, parts, 1)
            hint = f"the nearest name is {near[0]!r}" if near else f"names look like {names[0]!r}"
            raise ValueError(f"{argument}: pattern {pattern!r} matches no trainable parameter; {hint}")


def _fused(named: Sequence[tuple[str, Tensor]], wanted: bool | str) -> bool:
    if wanted not in (True, False, "auto"):
        raise ValueError(f"fused={wanted!r}: must be true, false or 'auto'")
    unfit = next((name for name, value in named if not value.is_floating_point() or value.device.type not in ("cpu", "cuda")), None)
    if wanted is True and unfit is not None:
        raise ValueError(f"fused=True: {unfit!r} must be a floating-point tensor on CPU or CUDA; use fused='auto'")
    return wanted is True or (wanted == "auto" and unfit is None)
