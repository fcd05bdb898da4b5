"""Which candidates a model, a batch and the support table allow, and for every one that they do not, the rule that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from lightning_megascale.planning.candidates import METHODS, Candidates
from lightning_megascale.planning.shape import ModelShape
from lightning_megascale.planning.workload import Workload
from lightning_megascale.support import LOOPED_SCHEDULES, SCHEDULES, V_SCHEDULES, ZERO_BUBBLE_SCHEDULES

_REFUSALS: dict[tuple[int, str], str | None] = {}  # choices of features, and further fields -> what the plan's rules say of them
Rule = tuple[str, np.ndarray]  # what is wrong, and for which candidates: bool (P,)


def model_rules(model: ModelShape, tp: np.ndarray, ep: np.ndarray) -> Iterator[Rule]:
    """What must divide where heads, features, vocabulary and experts are split; arrays (P,)."""
    cores = [core for kind in model.kinds for core in kind.cores]
    for name, counts in (("num_heads", {core.heads for core in cores}), ("num_kv_heads", {core.kv_heads for core in cores})):
        for count in sorted(counts):
            yield f"{name}={count} is not divisible by tensor_parallel_size", count % tp != 0
    for matmul in {matmul.name: matmul for kind in model.kinds for matmul in kind.matmuls}.values():
        if matmul.copies == 1 and matmul.name.endswith(("gate_proj", "up_proj")):
            yield f"{matmul.part} features={matmul.outputs} are not divisible by tensor_parallel_size", matmul.outputs % tp != 0
    yield f"vocab_size={model.vocab_size} is not divisible by tensor_parallel_size", model.vocab_size % tp != 0
    experts = expert_counts(model)
    for count in experts:
        yield f"num_experts={count} is not divisible by expert_parallel_size", count % ep != 0
    if not experts:
        yield "the model has no experts: expert_parallel_size must be 1", ep > 1


def expert_counts(model: ModelShape) -> tuple[int, ...]:
    """How many experts the mixtures of a model have; empty for a dense one."""
    return tuple(sorted({matmul.copies for kind in model.kinds for matmul in kind.matmuls if matmul.copies > 1}))


def batch_rules(workload: Workload, plans: Candidates) -> Iterator[Rule]:
    """The global batch, the rows' length and the depth against the axes."""
    length = workload.sequence_length
    yield (
        f"global_batch_size={workload.global_batch_size} is no multiple of microbatch_size x data-parallel size",
        (workload.global_batch_size % (plans.dp * plans.microbatch_size) != 0),
    )
    yield f"sequence_length={length} is not divisible by 2 x context_parallel_size", (plans.cp > 1) & (length % (2 * plans.cp) != 0)
    for count in expert_counts(workload.model):  # dealt over tp where all its ranks have the same tokens
        dealt = (plans.ep == 1) & ~plans.sequence_parallel
        yield f"num_experts={count} is not divisible by tensor_parallel_size", dealt & (count % plans.tp != 0)
    local = length // plans.cp
    yield (
        f"the {length} tokens of a row, over context_parallel_size, are not divisible by tensor_parallel_size (sequence_parallel)",
        (plans.sequence_parallel & (local % plans.tp != 0)),
    )
    cores = [core for kind in workload.model.kinds for core in kind.cores]
    exchanging = (plans.cp > 1) & (plans.method == METHODS.index("ulysses"))
    narrow = np.zeros(len(plans), dtype=bool)
    for core in cores:
        narrow |= (core.heads % (plans.tp * plans.cp) != 0) | (core.kv_heads % (plans.tp * plans.cp) != 0)
    yield "heads are not divisible by tensor_parallel_size x context_parallel_size (context_parallel_method='ulysses')", exchanging & narrow
    parts = len(workload.model.layers) + 2
    yield (
        f"pipeline stages: the model has {parts} parts (embedding, blocks, head), fewer than stages",
        (plans.pp * plans.stages_per_rank > parts),
    )
    if workload.model.has_source:
        yield "a model with an encoder beside its decoder runs without a pipeline", plans.pp > 1
        yield "a model with an encoder beside its decoder runs without context parallelism", plans.cp > 1


def schedule_rules(workload: Workload, plans: Candidates) -> Iterator[Rule]:
    """Which schedule takes how many stages and microbatches, and which models."""
    piped, count, v = plans.pp > 1, plans.microbatches(workload.global_batch_size), plans.stages_per_rank
    looped, vee = _is(plans, LOOPED_SCHEDULES), _is(plans, V_SCHEDULES)
    plain = ~looped & ~vee
    yield (
        "pipeline_stages_per_rank does not suit the schedule",
        np.where(piped, (plain & (v != 1)) | (looped & (v < 2)) | (vee & (v != 2)), (v != 1) | (plans.schedule != SCHEDULES.index("1F1B"))),
    )
    yield "1F1B needs as many microbatches as pipeline ranks", piped & _is(plans, ("1F1B",)) & (count < plans.pp)
    rounds = np.maximum(1, count // plans.pp)
    yield (
        "an interleaved schedule works in rounds of pipeline_parallel_size microbatches",
        (piped & looped & ((count < plans.pp) | (count % rounds != 0))),
    )
    if expert_counts(workload.model):
        yield "a zero-bubble schedule takes no model with experts", piped & _is(plans, ZERO_BUBBLE_SCHEDULES)


def support_rules(plans: Candidates, global_batch_size: int, given: Mapping[str, Any] | None = None) -> Iterator[Rule]:
    """What the support table and the plan's own rules refuse: asked once for each choice of features, in the plan's words.

    Args:
        plans: that break no other rule.
        global_batch_size: rows of a step.
        given: further fields of every plan, which no column holds.
    """
    many = plans.microbatches(global_batch_size) > 1
    sizes = (plans.pp, plans.dp_replicate, plans.dp_shard, plans.cp, plans.tp, plans.ep)
    choices = [size > 1 for size in sizes] + [plans.schedule, plans.checkpointing, plans.sharding]
    choices += [plans.sequence_parallel, plans.method, plans.reduce_every, many]
    code = reduce(lambda total, column: total * 8 + column.astype(np.int64), choices, np.zeros(len(plans), dtype=np.int64))
    codes, firsts, owners = np.unique(code, return_index=True, return_inverse=True)
    refused: dict[str, list[int]] = {}
    examples, more = plans.take(firsts), repr(sorted((given or {}).items()))
    ranks = examples.world_size
    for number, choice in enumerate(codes.tolist()):
        if (choice, more) not in _REFUSALS:
            plan = dataclasses.replace(examples.plan(number, global_batch_size), **(given or {}))
            _REFUSALS[choice, more] = next(iter(plan.check(int(ranks[number]))), None)
        message = _REFUSALS[choice, more]
        if message is not None:
            refused.setdefault(message, []).append(number)
    for message, numbers in refused.items():
        yield message, np.isin(owners, numbers)


def broken_rules(workload: Workload, plan: Candidates) -> list[str]:
    """Every rule of model, batch and schedule that one plan breaks.

    Args:
        plan: columns of length 1.
    """
    rules = [*model_rules(workload.model, plan.tp, plan.ep), *batch_rules(workload, plan), *schedule_rules(workload, plan)]
    sizes = {"tensor_parallel_size": plan.tp, "context_parallel_size": plan.cp, "expert_parallel_size": plan.ep, "stages": plan.pp}
    sizes |= {"microbatch_size": plan.microbatch_size, "data-parallel size": plan.dp}
    found = []
    for message, wrong in rules:
        if bool(np.broadcast_to(wrong, 1)[0]):
            said = ", ".join(f"{name}={int(size[0])}" for name, size in sizes.items() if name in message)
            found.append(f"{message} ({said})" if said else message)
    return found


def first_broken(rules: Iterator[Rule], number: int) -> tuple[np.ndarray, list[str]]:
    """For each candidate the first rule that it breaks.

    Args:
        rules: of candidates (P,).
        number: P.

    Returns:
        (index into the messages or -1, int (P,); the messages).
    """
    broken = np.full(number, -1)
    messages: list[str] = []
    for message, wrong in rules:
        fresh = np.broadcast_to(wrong, number) & (broken < 0)
        if fresh.any():
            broken[fresh] = len(messages)
            messages.append(message)
    return broken, messages


def _is(plans: Candidates, names: Sequence[str]) -> np.ndarray:
    return np.isin(plans.schedule, [SCHEDULES.index(name) for name in names])
