"""``verify``: one device against ranks, for each combination of axes, on a user's own model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch

from lightning_megascale.layout import ModelLayout
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.verification.axes import Axes, parse_axes, stages_of_schedule
from lightning_megascale.verification.compare import Figure, Figures, Reference, compare_on_rank, make_reference, together
from lightning_megascale.verification.divergence import explain, outputs_alone, outputs_on_rank
from lightning_megascale.verification.ranks import RankFailure, run_alone, run_ranks
from lightning_megascale.verification.report import CannotVerify, Refused, Report
from lightning_megascale.verification.subject import Subject
from lightning_megascale.verification.training import Plan, Setting

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
_SET_BY_AXES = ("data_parallel_size", "global_batch_size", "allow_batch_change")


def verify(
    build: Callable[[], Any],
    axes: str | Iterable[str],
    *,
    layout: ModelLayout | Mapping[str, Any] | str = "auto",
    module: str = "auto",
    dtype: torch.dtype = torch.float64,
    steps: int = 3,
    accumulate: int = 1,
    microbatch_size: int | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    timeout: float = 300,
    **plan_fields: Any,
) -> list[Report]:
    """Trains a model on one device and, for each combination of axes, on forked gloo ranks through the strategy, and compares.

    Losses, every gradient before an optimizer step, the norm before clipping, and the parameters after the last step are compared. One
    device trains on whole batches with a plain Trainer; every data-parallel rank gets its rows of them. Runs on the CPU.

    Args:
        build: returns a LightningModule whose ``train_dataloader`` is used, or (LightningModule, batches), or (nn.Module, batches) for a
            model whose output has a ``loss``. Batches: whole ones, of any nest of tensors with rows in dim 0; a list, or a DataLoader.
        axes: combinations such as ``["tp2", "fsdp2xtp2+sp", "pp2:interleaved1f1b"]``, see ``parse_axes``.
        layout, module: as for ``MegascaleStrategy``.
        dtype: torch.float64 or torch.float32.
        steps: optimizer steps.
        accumulate: microbatches of each rank that make an optimizer step.
        microbatch_size: rows of a pipeline's microbatch.
        seed: of first values.
        tolerance: None: 1e-10 in float64, 1e-5 in float32. What rounding errors of gradients alone do to one device's numbers is allowed
            ten times where that is more.
        timeout: seconds for the ranks of a combination.
        **plan_fields: further fields of ``ParallelPlan``.

    Returns:
        A report for each combination, in order.

    Raises:
        CannotVerify: (a ValueError) for arguments, or a model, that allow no proof.
    """
    proof = Proof(
        build,
        [axes] if isinstance(axes, str) else list(axes),
        layout=layout,
        module=module,
        dtype=dtype,
        steps=steps,
        accumulate=accumulate,
        microbatch_size=microbatch_size,
        seed=seed,
        tolerance=tolerance,
        timeout=timeout,
        **plan_fields,
    )
    return [proof.check(axes) for axes in proof.axes]


class Proof:
    """Checks all arguments and trains on one device; then ``check`` proves one combination. Arguments: those of ``verify``."""

    def __init__(
        self,
        build: Callable[[], Any],
        axes: list[str],
        *,
        layout: ModelLayout | Mapping[str, Any] | str = "auto",
        module: str = "auto",
        dtype: torch.dtype = torch.float64,
        steps: int = 3,
        accumulate: int = 1,
        microbatch_size: int | None = None,
        seed: int = 0,
        tolerance: float | None = None,
        timeout: float = 300,
        **plan_fields: Any,
    ) -> None:
        _check_numbers(dict(steps=steps, accumulate=accumulate, microbatch_size=microbatch_size), timeout, tolerance, dtype)
        if not axes:
            raise CannotVerify("axes=[]: name at least one combination, such as tp2")
        if isinstance(layout, Mapping):
            layout = _told(ModelLayout.from_dict, layout)
        self.axes = [_told(parse_axes, text) for text in dict.fromkeys(axes)]
        self._plans = {axes.name: Plan(axes, _fields(axes, layout, module, microbatch_size, plan_fields), accumulate) for axes in self.axes}
        self.tolerance, self._timeout = tolerance or TOLERANCES[dtype], timeout
        self.subject = Subject.of(build, dtype, seed, steps)
        for combination in self.axes:
            self.subject.check_division(combination.name, combination.shares, accumulate)
        self.reference = self._train_alone(wide=dtype == torch.float64 and not plan_fields.get("compile"))
        self.notes = [*self.subject.notes, *_doubts(self.reference, steps)]
        if self.reference.exact.widened:
            self.notes.append("what the model computes in float32 whatever it is given is computed in float64 on both sides")

    def _train_alone(self, wide: bool) -> Reference:
        try:
            return run_alone(make_reference, self.subject, wide, self.tolerance, timeout=self._timeout)
        except RankFailure as failure:
            if isinstance(failure.error, CannotVerify):
                raise CannotVerify(str(failure.error)) from None
            what = str(failure).partition("\n")[2] if failure.error is not None else str(failure)
            raise CannotVerify(f"the model does not train on one device:\n{what.strip()}") from None

    def check(self, axes: Axes) -> Report:
        """Proves one combination."""
        plan, begin = self._plans[axes.name], time.monotonic()
        try:
            seen = run_ranks(compare_on_rank, axes.ranks, self.subject, self.reference, plan, timeout=self._timeout)
        except RankFailure as failure:
            seconds = time.monotonic() - begin
            if isinstance(failure.error, Refused):
                return Report(axes.name, False, refused=str(failure.error), seconds=seconds)
            return Report(axes.name, False, error=str(failure), seconds=seconds)
        seconds = time.monotonic() - begin
        figures = together(self.reference, seen)
        where, hint = (None, None) if figures.ok else self._explain(figures, plan)
        has_norm = any(norm is not None for norm in self.reference.exact.norms)
        return _report(axes.name, figures, has_norm, where, hint, seconds)

    def _explain(self, figures: Figures, plan: Plan) -> tuple[str, str]:
        """Looks for the first module that differs, in a first step that is made again."""
        setting = Setting(1, self.reference.setting.clip, self.reference.setting.wide)
        try:
            alone = run_alone(outputs_alone, self.subject, setting, timeout=self._timeout)
            ranks = run_ranks(outputs_on_rank, plan.axes.ranks, self.subject, setting, plan, timeout=self._timeout)
        except RankFailure:
            alone, ranks = None, []  # the figures tell what there is to tell
        return explain(figures, self.reference, plan, alone, ranks)


def _report(name: str, figures: Figures, has_norm: bool, where: str | None, hint: str | None, seconds: float) -> Report:
    def named(figure: Figure) -> tuple[float, str]:
        return figure.off, figure.name

    return Report(
        name,
        figures.ok,
        loss=figures.loss.off,
        gradient=named(figures.gradient),
        norm=figures.norm.off if has_norm else None,
        parameters=named(figures.parameters),
        first_divergence=where,
        hint=hint,
        seconds=seconds,
    )


# ---- arguments -----------------------------------------------------------------------------------------------------------------------


def _told(function: Callable[[Any], Any], argument: Any) -> Any:
    """The result, or its ValueError as CannotVerify."""
    try:
        return function(argument)
    except ValueError as error:
        raise CannotVerify(str(error)) from None


def _fields(axes: Axes, layout: Any, module: str, microbatch_size: int | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The strategy's arguments besides the sizes; those of pipelines only where there is one."""
    sizes = [name for name in given if name in axes.plan and name != "pipeline_schedule" or name in _SET_BY_AXES]
    if sizes:
        raise CannotVerify(
            f"plan.{sizes[0]}={given[sizes[0]]!r}: sizes come from axes, such as axes=fsdp2xtp2+sp, and rows from the batches"
        )
    _told(ParallelPlan.from_dict, given)
    found = dict(given)
    if axes.is_pipeline:
        schedule = axes.plan.get("pipeline_schedule", given.get("pipeline_schedule", "1F1B"))
        found["pipeline_schedule"] = schedule
        found.setdefault("pipeline_stages_per_rank", stages_of_schedule(schedule))
        found["microbatch_size"] = microbatch_size
    else:
        known = [field.name for field in fields(ParallelPlan) if field.name.startswith("pipeline_")]
        found = {name: value for name, value in found.items() if name not in known}
    return {**found, "layout": layout, "module": module}


def _check_numbers(counts: Mapping[str, Any], timeout: float, tolerance: float | None, dtype: torch.dtype) -> None:
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise CannotVerify(f"{name}={value!r}: must be a whole number of at least 1")
    if not timeout > 0:
        raise CannotVerify(f"timeout={timeout!r}: must be a number of seconds above 0")
    if tolerance is not None and not 0 < tolerance <= 1e-2:
        raise CannotVerify(f"tolerance={tolerance!r}: must be above 0, such as 1e-10, and at most 1e-2: more proves nothing")
    if dtype not in TOLERANCES:
        raise CannotVerify(f"dtype={dtype}: must be float64 or float32; half precision rounds more than an error in a gradient shows")


def _doubts(reference: Reference, steps: int) -> list[str]:
    """What makes the figures of this model say less than they seem to."""
    found = []
    moved = reference.moved
    if moved < 1e-6:
        found.append(f"after {steps} steps no parameter has moved by more than {moved:.1e} (a warm-up?), so later steps prove little")
    allowed = max((*reference.losses, *reference.gradients), default=0.0)
    worst = max(reference.parameters, key=lambda name: reference.parameters[name], default="")
    if worst and reference.parameters[worst] > 100 * reference.tolerance:
        most = reference.parameters[worst]
        found.append(
            f"rounding alone moves {worst} by {most / 10:.0e} on one device, so {most:.0e} is allowed there (Adam with a small eps makes "
            "whole steps of gradients that are 0 but for rounding)"
        )
    elif allowed > 100 * reference.tolerance:
        found.append(f"rounding alone moves later losses or gradients on one device, so {allowed:.0e} is allowed there")
    return found
