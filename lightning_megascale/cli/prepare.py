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
from lightning_megascale.cli.values import check_run_length, wrong_type
from lightning_megascale.plan import ParallelPlan, batch_arithmetic

OWN_MODEL = (
    "A model of your own is a file: write _target_: module.Class and its arguments to FOLDER/model/NAME.yaml, "
    "then say model=NAME --config-dir FOLDER"
)


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
        plan = ParallelPlan.from_dict(values)
    except ValueError as error:
        raise UserError(str(error)) from error
    try:
        return plan.resolve(world_size)
    except ValueError as error:
        others = 0 if plan.check_without_world() else plan.model_parallel_size * _given_data_ranks(plan)
        remedy = f"\nStart as many ranks as it needs: launch.ranks={others}" if others and world_size % others else ""
        raise UserError(f"{error}{remedy}") from error


def _given_data_ranks(plan: ParallelPlan) -> int:
    """Ranks of data parallelism that the plan asks for, 1 where it takes what is left."""
    if plan.data_parallel_size != "auto":
        return int(plan.data_parallel_size)
    shard = 1 if plan.data_parallel_shard_size == "auto" else int(plan.data_parallel_shard_size)
    return plan.data_parallel_replicate_size * shard


def add_batch(plan: ParallelPlan, total: int, micro_size: int | None) -> tuple[ParallelPlan, str]:
    """The plan with its batch, and the line that says how the global batch is made.

    Args:
        plan: a resolved plan.
        total: rows of one optimizer step over all ranks.
        micro_size: rows of one forward on one rank; None: the whole share of a rank at once, under a pipeline as large as gives two
            microbatches for each of its ranks, one, or else single rows.

    Raises:
        UserError: when the numbers do not multiply out, with the nearest legal global batch and micro sizes.
    """
    data = int(plan.data_parallel_size)
    for name, value in (("batch.global_size", total), ("batch.micro_size", 1 if micro_size is None else micro_size)):
        if value < 1:
            raise UserError(f"{name}={value}: must be at least 1")
    if micro_size is None and total % data:
        raise UserError(f"batch.global_size={total} is no multiple of the data-parallel size {data}: nearest {_multiples(total, data)}")
    share, ranks = total // data, plan.pipeline_parallel_size
    parts = next((count for count in (2 * ranks, ranks, share) if count and share % count == 0), 1) if ranks > 1 else 1
    micro = micro_size or share // parts
    if total % (micro * data):
        fitting = [size for size in range(1, total // data + 1) if total % (size * data) == 0]
        near = sorted(sorted(fitting, key=lambda size: abs(size - micro))[:2])
        other = f", or batch.micro_size={' or '.join(map(str, near))}" if near else ""
        raise UserError(
            f"batch.global_size={total} is no multiple of batch.micro_size {micro} x data-parallel size {data}: "
            f"nearest batch.global_size {_multiples(total, micro * data)}{other}"
        )
    plan = dataclasses.replace(plan, global_batch_size=total, microbatch_size=micro)
    wrong = plan.check_microbatches(share // micro) if ranks > 1 else []
    if wrong:
        raise UserError(f"{wrong[0]}; batch.global_size={total} over a data-parallel size of {data} gives a rank {share} rows")
    return plan, batch_arithmetic(plan)[2]


def loader_rows(plan: ParallelPlan) -> int:
    """Rows that a loader gives each data-parallel rank: one microbatch, or under a pipeline all microbatches of a step."""
    assert plan.microbatch_size is not None and plan.global_batch_size is not None
    return plan.microbatch_size if plan.pipeline_parallel_size == 1 else plan.global_batch_size // int(plan.data_parallel_size)


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
        try:
            check_calls("model", model)
        except UserError as error:
            raise UserError(f"{error}\n{OWN_MODEL}") from error
        return
    from lightning_megascale.models.config import DecoderConfig

    fields = dataclasses.fields(DecoderConfig)
    annotations = {field.name: f"{field.type} | None" if field.default is None else field.type for field in fields}
    check_types("model", annotations, model)
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
    check_types(section, {name: parameter.annotation for name, parameter in parameters.items()}, given)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in given:
        if not name.startswith("_") and name not in parameters:
            raise UserError(f"{section}: {given['_target_']} takes no argument {name!r}{nearest(name, parameters)}")


def check_types(section: str, annotations: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Where a number is wanted, there is one.

    Raises:
        UserError: with every key that has something else.
    """
    rules = [(name, value, wrong_type(annotations[name], value)) for name, value in given.items() if name in annotations]
    wrong = [f"{section}.{name}={value}: {rule}" for name, value, rule in rules if rule and not isinstance(value, dict)]
    if wrong:
        raise UserError("\n".join(wrong))


def check_data(data: Any) -> None:
    """The values of our own text data are in range and its cache can be written, which its shards else find out on a rank.

    Raises:
        UserError: naming key and value.
    """
    if not isinstance(data, dict) or data.get("_target_") != "lightning_megascale.data.datamodule.TextDataModule":
        return
    from lightning_megascale.data.cache import check_place
    from lightning_megascale.data.datamodule import TextDataModule

    try:
        module = TextDataModule(**{name: value for name, value in data.items() if not name.startswith("_")})
    except ValueError as error:
        raise UserError("\n".join(f"data.{line}" for line in str(error).splitlines())) from error
    try:
        check_place(module.folder)
    except ValueError as error:
        raise UserError(f"data: {error}") from error


def check_optim(optim: Any, trainer: Mapping[str, Any] | None = None) -> None:
    """``optim`` fits ``build_optimizer``, ``optim.schedule`` its kind of schedule, and the schedule the length of the run.

    Raises:
        UserError: for a key that does not exist, with the nearest, one that is missing, and a value out of range.
    """
    if optim is None:
        return
    from lightning_megascale.module import MegascaleModule
    from lightning_megascale.optim import check_values

    if not isinstance(optim, dict):
        raise UserError(f"optim={optim}: must be one of the optim group, such as optim=adamw")
    optimizer, schedule = {name: value for name, value in optim.items() if name != "schedule"}, optim.get("schedule")
    if schedule is not None and not isinstance(schedule, dict):
        raise UserError(f"optim.schedule={schedule}: must be null, or kind and the steps of a schedule")
    try:
        MegascaleModule(optimizer=optimizer, schedule=schedule)
    except ValueError as error:
        raise UserError(f"optim: {error}") from error
    try:
        check_values(**optimizer)
    except ValueError as error:
        raise UserError("\n".join(f"optim.{line.removeprefix('optimizer ')}" for line in str(error).splitlines())) from error
    if schedule is not None:
        _check_schedule(schedule)
        if trainer is not None:
            check_run_length(schedule, trainer)


def _check_schedule(schedule: Mapping[str, Any]) -> None:
    """The values of a schedule whose keys are right, whatever the length of the run."""
    from lightning_megascale.optim import schedule_function

    kind = schedule.get("kind", "cosine")
    arguments = {name: value for name, value in schedule.items() if name != "kind"}
    if kind == "cosine" and "total_steps" not in arguments:
        warmup = arguments.get("warmup_steps")
        arguments["total_steps"] = warmup + 1 if isinstance(warmup, int) else 1
    if kind == "wsd":
        arguments.setdefault("stable_steps", 0)
    try:
        schedule_function(kind)(**arguments)
    except ValueError as error:
        raise UserError(f"optim.schedule.{error}") from error
