"""The rules of a parallel plan: every violated one as a message with the name, the value, the rule and the remedy. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_megascale.support import LOOPED_SCHEDULES, SCHEDULES, V_SCHEDULES, schedule_name

if TYPE_CHECKING:
    from lightning_megascale.plan import ParallelPlan

_SIZES = (
    "data_parallel_replicate_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "activation_checkpointing": (None, "selective", "full"),
    "reduce_dtype": ("float32", "bfloat16", None),
    "reduce_gradients": ("last", "every"),
    "loss_weight": ("auto", "labels", "samples"),
    "label_alignment": (None, "aligned", "shift", "huggingface"),
    "context_parallel_method": ("auto", "ring", "ulysses", "allgather", "ring+ulysses"),
    "context_parallel_layout": ("auto", "contiguous", "headtail", "packed"),
    "expert_payload_dtype": (None, "bfloat16"),
    "attention_backend": ("auto", "sdpa", "flash2", "flash3", "flash4", "cpu", "math"),
}


def check_values(plan: ParallelPlan) -> list[str]:
    """A message for every field whose value is none that it can have."""
    wrong = []
    for name in (*_SIZES, "pipeline_stages_per_rank"):
        value = getattr(plan, name)
        if not _is_size(value):
            wrong.append(f"{name}={value!r}: must be a whole number of at least 1")
    for name in ("data_parallel_size", "data_parallel_shard_size"):
        value = getattr(plan, name)
        if value != "auto" and not _is_size(value):
            wrong.append(f"{name}={value!r}: must be 'auto' or a whole number of at least 1")
    for name in ("microbatch_size", "global_batch_size"):
        value = getattr(plan, name)
        if value is not None and not _is_size(value):
            wrong.append(f"{name}={value!r}: must be None or a whole number of at least 1")
    for name, choices in _CHOICES.items():
        value = getattr(plan, name)
        if isinstance(value, (set, frozenset, list, tuple)) and name == "activation_checkpointing":
            if not value or not all(isinstance(kind, type) for kind in value):
                wrong.append(f"{name}={value!r}: a set must hold module classes, such as {{MyBlock}}")
        elif value not in choices:
            near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            wrong.append(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}{hint}")
    if not isinstance(plan.compile, (bool, Mapping)):
        wrong.append(f"compile={plan.compile!r}: must be False, True or a dict of torch.compile's arguments")
    reshard = plan.reshard_after_forward
    if not (reshard == "auto" or isinstance(reshard, bool) or _is_size(reshard)):
        wrong.append(f"reshard_after_forward={reshard!r}: must be 'auto', True, False or a group size")
    if schedule_name(plan.pipeline_schedule) not in SCHEDULES:
        near = difflib.get_close_matches(str(plan.pipeline_schedule), SCHEDULES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        wrong.append(f"pipeline_schedule={plan.pipeline_schedule!r}: must be one of {', '.join(SCHEDULES)}{hint}")
    split = plan.pipeline_split
    if split != "auto" and not (isinstance(split, (list, tuple)) and split and all(isinstance(name, str) for name in split)):
        wrong.append(f"pipeline_split={split!r}: must be 'auto' or a list of block names such as ['layers.4']")
    for name in ("sequence_parallel", "activation_offload", "cpu_offload", "allow_batch_change", "loss_parallel"):
        if not isinstance(getattr(plan, name), bool):
            wrong.append(f"{name}={getattr(plan, name)!r}: must be True or False")
    return wrong


def check_world(plan: ParallelPlan, world_size: int) -> list[str]:
    """A message for every rule that holds for a number of ranks."""
    wrong = []
    others = plan.model_parallel_size
    if world_size % others:
        used = " x ".join(
            f"{name}={getattr(plan, name)}"
            for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
            if getattr(plan, name) > 1
        )
        tensor = f"; nearest tensor_parallel_size: {_near_divisors(world_size, plan.tensor_parallel_size)}"
        product = f" = {others}" if " x " in used else ""
        wrong.append(f"{used}{product} does not divide the {world_size} ranks: use a multiple of {others} ranks{tensor}")
    else:
        replicate, shard = plan.data_parallel_sizes(world_size)
        if replicate * shard * others != world_size:
            left = world_size // others
            wrong.append(
                f"data_parallel_replicate_size={plan.data_parallel_replicate_size} x "
                f"data_parallel_shard_size={plan.data_parallel_shard_size} with data_parallel_size={plan.data_parallel_size}: "
                f"the other axes leave {left} rank{'s'[: left != 1]} for data parallelism; nearest "
                f"data_parallel_replicate_size: {_near_divisors(left, plan.data_parallel_replicate_size)}, "
                "and leave data_parallel_size and data_parallel_shard_size at 'auto'"
            )
        elif plan.expert_parallel_size > 1 and (world_size // plan.pipeline_parallel_size // replicate) % plan.expert_parallel_size:
            size = world_size // plan.pipeline_parallel_size // replicate
            wrong.append(
                f"expert_parallel_size={plan.expert_parallel_size} must divide dp_shard x cp x tp = {size}: "
                f"nearest {_near_divisors(size, plan.expert_parallel_size)}"
            )
        elif _is_size(plan.reshard_after_forward) and plan.reshard_after_forward is not True:
            size = shard * plan.context_parallel_size
            if size % int(plan.reshard_after_forward) or plan.reshard_after_forward in (1, size):
                wrong.append(
                    f"reshard_after_forward={plan.reshard_after_forward}: a group size must divide dp_shard x cp = {size} "
                    "and differ from 1 and from it; True and False are the two ends"
                )
    wrong += check_options(plan)
    if plan.global_batch_size is not None and not wrong:
        wrong += _batch(plan, world_size)
    return wrong


def check_options(plan: ParallelPlan) -> list[str]:
    """A message for every option that contradicts another."""
    wrong = []
    if plan.sequence_parallel and plan.tensor_parallel_size == 1:
        wrong.append(
            "sequence_parallel=True needs tensor_parallel_size above 1 (it shards norms over the tensor-parallel axis); "
            "for long sequences see context_parallel_size"
        )
    if plan.loss_parallel and plan.tensor_parallel_size == 1:
        wrong.append("loss_parallel=True needs tensor_parallel_size above 1: nothing shards the vocabulary otherwise")
    wrong += _pipeline(plan) + _context(plan)
    if (plan.global_batch_size is None) != (plan.microbatch_size is None) and plan.pipeline_parallel_size == 1:
        wrong.append(
            f"global_batch_size={plan.global_batch_size} and microbatch_size={plan.microbatch_size}: give both (the accumulation is "
            "derived from them) or neither (the loader's batch and accumulate_grad_batches hold)"
        )
    return wrong


def _pipeline(plan: ParallelPlan) -> list[str]:
    wrong = []
    schedule, stages = schedule_name(plan.pipeline_schedule), plan.pipeline_stages_per_rank
    if plan.pipeline_parallel_size == 1:
        given = {"pipeline_schedule": "1F1B", "pipeline_stages_per_rank": 1, "pipeline_split": "auto"}
        for name, default in given.items():
            value = schedule if name == "pipeline_schedule" else getattr(plan, name)
            if value != default:
                wrong.append(f"{name}={value!r} needs pipeline_parallel_size above 1: there is no pipeline otherwise")
        return wrong
    if schedule in LOOPED_SCHEDULES and stages == 1:
        wrong.append(f"pipeline_schedule={schedule!r} alternates between stages of a rank: set pipeline_stages_per_rank=2 or more")
    elif schedule in V_SCHEDULES and stages != 2:
        wrong.append(f"pipeline_schedule={schedule!r} goes down and up again: set pipeline_stages_per_rank=2 (it is {stages})")
    elif schedule not in LOOPED_SCHEDULES + V_SCHEDULES and stages != 1:
        names = ", ".join(LOOPED_SCHEDULES + V_SCHEDULES)
        wrong.append(
            f"pipeline_stages_per_rank={stages}: pipeline_schedule={schedule!r} has one stage on each rank; use 1, or one of {names}"
        )
    if plan.global_batch_size is not None and not wrong:
        micro = plan.microbatch_size or 1
        if plan.global_batch_size % micro:
            wrong.append(f"global_batch_size={plan.global_batch_size} is no multiple of microbatch_size={micro}")
    return wrong


def _context(plan: ParallelPlan) -> list[str]:
    if plan.context_parallel_size == 1:
        return [
            f"{name}={getattr(plan, name)!r} needs context_parallel_size above 1: rows lie whole on a rank otherwise"
            for name in ("context_parallel_method", "context_parallel_layout", "attention_backend")
            if getattr(plan, name) != "auto"
        ]
    wrong = []
    if plan.label_alignment is None:
        wrong.append(
            f"context_parallel_size={plan.context_parallel_size} needs label_alignment, for each rank sees part of a row: "
            "'aligned' (the target of position i stands at i), 'shift' (at i + 1, and the step or model shifts), or 'huggingface' "
            "(at i + 1, and the model takes shift_labels)"
        )
    if plan.loss_weight == "samples":
        wrong.append(
            f"loss_weight='samples' and context_parallel_size={plan.context_parallel_size}: each rank scores a part of each row, so rows "
            "cannot weigh its loss: use 'labels' or 'auto', with labels in the batch"
        )
    if plan.context_parallel_method == "ring+ulysses" and ulysses_size(plan.context_parallel_size) == 1:
        wrong.append(
            f"context_parallel_method='ring+ulysses' splits context_parallel_size={plan.context_parallel_size} into two factors, and "
            "it has none: use a size such as 4, 6 or 8, or 'ring'"
        )
    return wrong


def check_microbatches(plan: ParallelPlan, microbatches: int) -> list[str]:
    """The rules on how many microbatches go through a pipeline in one step."""
    schedule, ranks = schedule_name(plan.pipeline_schedule), plan.pipeline_parallel_size
    count = f"{microbatches} microbatch{'es'[: 2 * (microbatches != 1)]}"
    rows = f"the loader's batch makes {count} of microbatch_size={plan.microbatch_size or 1}"
    if schedule == "1F1B" and microbatches < ranks:
        return [f"{rows}, and pipeline_schedule='1F1B' needs at least pipeline_parallel_size={ranks}: give more rows, or use 'GPipe'"]
    rounds = max(1, microbatches // ranks)
    if schedule in LOOPED_SCHEDULES and (microbatches < ranks or microbatches % rounds):
        near = f"{rounds * ranks} or {(rounds + 1) * ranks}"
        rule = f"pipeline_schedule={schedule!r} works in rounds of pipeline_parallel_size={ranks} microbatches"
        return [f"{rows}, and {rule}: use {near} microbatches"]
    return []


def _batch(plan: ParallelPlan, world_size: int) -> list[str]:
    replicate, shard = plan.data_parallel_sizes(world_size)
    assert plan.global_batch_size is not None
    micro = plan.microbatch_size or 1
    unit = micro * replicate * shard
    if plan.global_batch_size % unit == 0:
        return []
    below = plan.global_batch_size // unit * unit
    near = f"{below} or {below + unit}" if below else f"{unit}"
    product = f"microbatch_size {micro} x data-parallel size {replicate * shard} = {unit}"
    return [f"global_batch_size={plan.global_batch_size} is no multiple of {product}: nearest {near}"]


def ulysses_size(context_parallel_size: int) -> int:
    """How many neighbouring ranks exchange heads for tokens under "ring+ulysses": the largest divisor of the axis up to its square root,
    so that both message sizes shrink."""
    return max(
        size for size in range(1, context_parallel_size + 1) if context_parallel_size % size == 0 and size**2 <= context_parallel_size
    )


RING_TOKENS = 4096
"""Tokens of a rank from which a hop's transfer hides behind its products on an H100 over 400 Gbit/s with a quarter as many key heads:
2 x (G / N) x FLOP/s / bytes per second; the rule "one rank per 4,096 tokens" of Megatron-Bridge's guide says the same."""
RING_BALANCE = 1.25  # a ring waits for its slowest rank at every step; above this ratio the other methods, which wait once, win


def choose_method(heads: int, kv_heads: int, tokens: int, size: int, balance: float = 1.0) -> str:
    """The method that "auto" means.

    Args:
        heads, kv_heads: of this rank.
        tokens: of this rank.
        size: context-parallel ranks.
        balance: ``ring_step_ratio`` of the rows.
    """
    if tokens >= RING_TOKENS and balance <= RING_BALANCE:
        return "ring"
    return "ulysses" if heads % size == 0 and kv_heads % size == 0 else "allgather"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _near_divisors(number: int, wanted: int) -> str:
    """The divisors of ``number`` on both sides of ``wanted``."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    below = [size for size in divisors if size <= wanted][-1:]
    above = [size for size in divisors if size > wanted][:1]
    return " or ".join(map(str, below + above))
