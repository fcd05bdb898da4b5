"""What fields of a plan beside its columns do to an estimate: those that change the stack, and those that are not modelled."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from lightning_megascale.plan import ParallelPlan
from lightning_megascale.plan_rules import choose_method
from lightning_megascale.planning.shape import ModelShape
from lightning_megascale.planning.stack import Stack
from lightning_megascale.planning.stages import cut_points
from lightning_megascale.planning.workload import Workload

_IGNORED = ("compile", "activation_offload", "expert_payload_dtype", "context_parallel_layout", "attention_backend")


def stack_under(stack: Stack, plan: Mapping[str, Any]) -> Stack:
    """The stack with the sums and the dispatcher that a plan names.

    Args:
        plan: fields of a ParallelPlan.
    """
    if plan.get("reduce_dtype") == "bfloat16":
        stack = dataclasses.replace(stack, precision=dataclasses.replace(stack.precision, reduce_bytes=2, accumulate_bytes=2))
    if str(plan.get("expert_dispatcher")).startswith("two_hop"):
        stack = dataclasses.replace(stack, dispatch_hops=2)
    return stack


def not_modelled(plan: Mapping[str, Any], model: ModelShape | None = None) -> tuple[str, ...]:
    """Fields that were given and change no estimate, as "name=value".

    Args:
        plan: fields of a ParallelPlan.
        model: its shape, where "auto" is to be told from a cut by what a token goes through.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(ParallelPlan)}
    found = [f"{name}={plan[name]}" for name in _IGNORED if name in plan and plan[name] != defaults[name]]
    if plan.get("context_parallel_method") == "ring+ulysses":
        found.append("context_parallel_method=ring+ulysses (counted as a ring)")
    if plan.get("expert_dispatcher") == "two_hop_dedup":
        found.append("expert_dispatcher=two_hop_dedup (counted as two_hop)")
    if not isinstance(plan.get("activation_checkpointing"), (str, type(None))):
        found.append("activation_checkpointing of chosen classes (counted as full)")
    stages = int(plan.get("pipeline_parallel_size", 1)) * int(plan.get("pipeline_stages_per_rank", 1))
    routed = model is not None and any(matmul.copies > 1 for kind in model.kinds for matmul in kind.matmuls)
    if routed and stages > 1 and plan.get("pipeline_split", "auto") == "auto":
        found.append("pipeline_split=auto of a mixture of experts (counted as cut by what a token goes through; out=FILE names that cut)")
    return tuple(found)


def auto_method(plan: ParallelPlan, workload: Workload) -> str:
    """What ``context_parallel_method="auto"`` becomes on a rank, for rows whose causal work is dealt evenly."""
    cores = [core for kind in workload.model.kinds for core in kind.cores]
    if not cores:
        return "ring"
    tp, cp = plan.tensor_parallel_size, plan.context_parallel_size
    return choose_method(cores[0].heads // tp, cores[0].kv_heads // tp, workload.sequence_length // cp, cp)


def check_split(plan: ParallelPlan, model: ModelShape) -> list[str]:
    """A message where a plan cuts the model otherwise than estimates do, by cost."""
    split = plan.pipeline_split
    if isinstance(split, str):
        return []
    last = len(model.layers) + 1
    numbers = [re.search(r"(\d+)$", str(name)) for name in split]
    starts = tuple(last if name == "last" else int(found[1]) + 1 if found else -1 for name, found in zip(split, numbers, strict=True))
    stages = plan.pipeline_parallel_size * plan.pipeline_stages_per_rank
    if stages <= last + 1 and starts == cut_points(model, stages):
        return []
    return [
        f"pipeline_split={list(split)}: estimates are for stages cut by cost; leave it 'auto', or take the cut of megascale plan out=FILE"
    ]
