"""From a composed run to what the planner needs: workload, cluster and stack; and the plan that ``plan=auto`` finds. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_megascale.cli.errors import UserError
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.plan_rules import check_values
from lightning_megascale.planning.candidates import CHECKPOINTING, METHODS, SHARDING
from lightning_megascale.planning.estimates import Setting
from lightning_megascale.planning.model_config import from_decoder_config
from lightning_megascale.planning.nearest import explain_nothing
from lightning_megascale.planning.plan_effects import stack_under
from lightning_megascale.planning.precisions import precision_named
from lightning_megascale.planning.search import search
from lightning_megascale.planning.shape import ModelShape
from lightning_megascale.planning.stacks import stack_for
from lightning_megascale.planning.workload import Workload
from lightning_megascale.support import SCHEDULES, schedule_name
from lightning_megascale.topology.cluster import Cluster
from lightning_megascale.topology.describe import cluster_from

_COLUMNS = {
    "data_parallel_replicate_size": "dp_replicate",
    "data_parallel_shard_size": "dp_shard",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
    "pipeline_stages_per_rank": "stages_per_rank",
    "data_parallel_size": "dp",
}
_CODES: dict[str, tuple[str, dict[Any, int]]] = {
    "activation_checkpointing": ("checkpointing", {name: number for number, name in enumerate(CHECKPOINTING)}),
    "reshard_after_forward": ("sharding", {True: SHARDING.index("parameters"), False: SHARDING.index("gradients")}),
    "reduce_gradients": ("reduce_every", {"last": 0, "every": 1}),
    "sequence_parallel": ("sequence_parallel", {False: 0, True: 1}),
    "context_parallel_method": ("method", {name: number for number, name in enumerate(METHODS)}),
}
_BATCH = ("microbatch_size", "global_batch_size")
_KEPT = ("loss_weight", "label_alignment", "attention_backend", "context_parallel_layout", "expert_dispatcher", "compile",
         "allow_batch_change", "reduce_dtype", "expert_payload_dtype")  # fmt: skip


def model_shape(model: Any, name: str) -> ModelShape:
    """The shape of a run's model.

    Args:
        model: the ``model`` group.
        name: for tables.

    Raises:
        UserError: for a model that is no decoder of ours.
    """
    from lightning_megascale.models.config import DecoderConfig

    if not isinstance(model, dict) or not model:
        raise UserError("there is no model: choose one with recipe=NAME, model=NAME or hf=FOLDER")
    if "_target_" in model:
        raise UserError(f"model._target_={model['_target_']}: the planner reads decoders (model=NAME) and Hugging Face configs (hf=FOLDER)")
    try:
        return from_decoder_config(dataclasses.asdict(DecoderConfig.from_dict(model)), name)
    except (ValueError, TypeError) as error:
        raise UserError(f"model: {error}") from error


def setting_of(
    model: ModelShape, cluster: Cluster, *, sequence_length: int, global_batch_size: int, precision: Any, source_length: int | None = None
) -> Setting:
    """What a search needs.

    Raises:
        UserError: for a batch, a row or a precision that cannot be.
    """
    try:
        workload = Workload(model, sequence_length, global_batch_size, source_length=source_length)
        stack = dataclasses.replace(stack_for(cluster.gpu.name), precision=precision_named(precision))
    except ValueError as error:
        raise UserError(str(error)) from error
    return Setting(workload, cluster, stack)


def cluster_of(group: Any) -> Cluster:
    """The cluster of a run's ``cluster`` group.

    Raises:
        UserError: it describes none.
    """
    try:
        return cluster_from(group)
    except ValueError as error:
        raise UserError(f"cluster: {error}") from error


def fixed_columns(plan: Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, int]:
    """Column of ``Candidates`` -> its only value, from those fields of a plan that were given.

    Args:
        plan: all fields; those that are not the default were given.
        overrides: of the command line, where "plan.tensor_parallel_size=1" gives a default.

    Raises:
        UserError: for a field that a search cannot hold to.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(ParallelPlan)}
    _check_values(plan)
    fixed: dict[str, int] = {}
    for name, value in plan.items():
        typed = any(item.startswith(f"plan.{name}=") for item in overrides)
        if (value == defaults.get(name, value) and not typed) or value == "auto" or name in (*_KEPT, *_BATCH):
            continue
        if name in _COLUMNS:
            fixed[_COLUMNS[name]] = int(value)
        elif name == "pipeline_schedule" and schedule_name(value) in SCHEDULES:
            fixed["schedule"] = SCHEDULES.index(schedule_name(value))
        elif name in _CODES and value in _CODES[name][1]:
            fixed[_CODES[name][0]] = _CODES[name][1][value]
        else:
            raise UserError(
                f"plan.{name}={value}: a search cannot hold to it; give all sizes (plan=NAME or plan_file=FILE) or leave it out"
            )
    return fixed


def _check_values(plan: Mapping[str, Any]) -> None:
    """What a field cannot be is said in the plan's own words, with what it can be."""
    try:
        wrong = check_values(ParallelPlan.from_dict(plan))
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    if wrong:
        raise UserError("\n".join(f"plan.{line}" for line in wrong))


def kept_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that were given and no search chooses; every plan of it has them."""
    defaults = {field.name: field.default for field in dataclasses.fields(ParallelPlan)}
    return {name: values[name] for name in _KEPT if name in values and values[name] != defaults[name]}


def planned(setting: Setting, ranks: int, values: Mapping[str, Any], micro_size: int | None, overrides: Sequence[str] = ()) -> ParallelPlan:
    """The best plan of so many ranks, with those fields of ``values`` that were given.

    Raises:
        UserError: the cluster has fewer GPUs, or no plan fits.
    """
    if ranks > setting.cluster.num_gpus:
        raise UserError(f"plan=auto: {ranks} ranks, and cluster {setting.cluster.name!r} has {setting.cluster.num_gpus} GPUs")
    setting = dataclasses.replace(setting, stack=stack_under(setting.stack, values))
    fixed = fixed_columns(values, overrides) | ({} if micro_size is None else {"microbatch_size": micro_size})
    result = search(setting, ranks, top=1, fixed=fixed, given=kept_fields(values))
    if not result.best:
        raise UserError(explain_nothing(result, fixed))
    return result.plan()
