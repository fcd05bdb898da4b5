"""From the composed config to the finished one: what is derived is filled in, what cannot work is refused. Before any rank starts."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megascale.cli.errors import UserError, nearest
from lightning_megascale.plan import ParallelPlan, batch_arithmetic


@dataclass(frozen=True)
class Prepared:
    """A run that can start: its finished config, its plan and the words for the header."""

    options: dict[str, Any]
    plan: ParallelPlan
    batch: str  # such as "64 = micro 8 x accumulation 4 x dp 2"


def make_plan(values: Mapping[str, Any], world_size: int) -> ParallelPlan:
    """The resolved plan of a run, still without its batch.

    Raises:
        UserError: listing every rule that the plan violates.
    """
    try:
        return ParallelPlan.from_dict(values).resolve(world_size)
    except ValueError as error:
        raise UserError(str(error)) from error


def add_batch(plan: ParallelPlan, total: int, micro_size: int | None) -> tuple[ParallelPlan, str]:
    """The plan with its batch, and the line that says how the global batch is made.

    Args:
        plan: a resolved plan.
        total: rows of one optimizer step over all ranks.
        micro_size: rows of one forward on one rank; None: the whole share of a rank at once.

    Raises:
        UserError: when the numbers do not multiply out, with the nearest legal global batch and micro sizes.
    """
    data = int(plan.data_parallel_size)
    for name, value in (("batch.global_size", total), ("batch.micro_size", 1 if micro_size is None else micro_size)):
        if value < 1:
            raise UserError(f"{name}={value}: must be at least 1")
    if micro_size is None and total % data:
        raise UserError(f"batch.global_size={total} is no multiple of the data-parallel size {data}: nearest {_multiples(total, data)}")
    micro = micro_size or total // data
    if total % (micro * data):
        fitting = [size for size in range(1, total // data + 1) if total % (size * data) == 0]
        near = sorted(sorted(fitting, key=lambda size: abs(size - micro))[:2])
        other = f", or batch.micro_size={' or '.join(map(str, near))}" if near else ""
        raise UserError(
            f"batch.global_size={total} is no multiple of batch.micro_size {micro} x data-parallel size {data}: "
            f"nearest batch.global_size {_multiples(total, micro * data)}{other}"
        )
    plan = dataclasses.replace(plan, global_batch_size=total, microbatch_size=micro)
    return plan, batch_arithmetic(plan)[2]


def _multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def check_model(model: Any, sequence_length: int) -> None:
    """A decoder's fields are complete and legal, and its positions reach; anything else is a call.

    Raises:
        UserError: naming the field, or the argument that the call does not take.
    """
    if not isinstance(model, dict) or not model:
        raise UserError("there is no model: choose one with model=NAME, or give model._target_")
    if "_target_" in model:
        check_calls("model", model)
        return
    from lightning_megascale.models.config import DecoderConfig

    try:
        decoder = DecoderConfig.from_dict(model)
    except (ValueError, TypeError) as error:
        raise UserError(f"model: {error}") from error
    if sequence_length > decoder.max_position_embeddings:
        raise UserError(
            f"batch.sequence_length={sequence_length} is more than model.max_position_embeddings={decoder.max_position_embeddings}: "
            "shorten the one or raise the other"
        )


def check_calls(section: str, node: Any) -> None:
    """Every ``_target_`` below ``node`` can be imported and takes the arguments that stand beside it.

    Raises:
        UserError: naming the target or the argument, with the nearest.
    """
    if isinstance(node, list):
        for index, value in enumerate(node):
            check_calls(f"{section}[{index}]", value)
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        check_arguments(section, locate(section, node["_target_"]), node)
    for name, value in node.items():
        check_calls(f"{section}.{name}", value)


def locate(section: str, target: str) -> Callable[..., Any]:
    """What a ``_target_`` names; the current folder's modules are found too.

    Raises:
        UserError: when there is no such module or name in it.
    """
    import_current_folder()
    from hydra.utils import get_object

    try:
        return get_object(target)
    except Exception as error:
        cause = error.__cause__ or error
        if not isinstance(cause, (ImportError, AttributeError)) and not isinstance(error, ImportError):
            raise
        raise UserError(f"{section}._target_={target}: {str(error).splitlines()[0]}") from error


def import_current_folder() -> None:
    """Lets ``_target_`` name a user's own modules."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def check_arguments(section: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """The arguments beside a ``_target_`` are arguments of it.

    Raises:
        UserError: for one that is not, with the nearest.
    """
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in given:
        if not name.startswith("_") and name not in parameters:
            raise UserError(f"{section}: {given['_target_']} takes no argument {name!r}{nearest(name, parameters)}")


def check_optim(optim: Any) -> None:
    """The keys of ``optim`` are arguments of ``build_optimizer``, those of ``optim.schedule`` of its kind of schedule.

    Raises:
        UserError: for a key that is not, with the nearest, and for one that is missing.
    """
    if optim is None:
        return
    from lightning_megascale.module import MegascaleModule

    optimizer = {name: value for name, value in optim.items() if name != "schedule"}
    try:
        MegascaleModule(optimizer=optimizer, schedule=optim.get("schedule"))
    except ValueError as error:
        raise UserError(f"optim: {error}") from error
