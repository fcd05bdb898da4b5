"""What one step of a plan sends in each kind of group, by which a placement is chosen."""

from __future__ import annotations

import numpy as np

from lightning_megascale.planning.candidates import CHECKPOINTING, METHODS, SHARDING, Candidates
from lightning_megascale.planning.shape import LayerKind
from lightning_megascale.planning.stack import Stack
from lightning_megascale.planning.stages import split_model, stage_owners
from lightning_megascale.planning.workload import Workload
from lightning_megascale.support import LOOPED_SCHEDULES, SCHEDULES
from lightning_megascale.topology.placement_groups import Traffic


def plan_traffic(workload: Workload, stack: Stack, plan: Candidates) -> list[Traffic]:
    """Of the pipeline rank with most parameters; groups that send nothing are left out.

    Args:
        workload: what is trained.
        stack: bytes of numbers, and whether the input of a tensor-parallel layer is gathered again in the backward.
        plan: columns of length 1.

    Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2 (two all-gathers and
        two reduce-scatters of a layer in each pass); Rajbhandari et al. 2020, "ZeRO", section 7; Liu et al. 2023, "Ring attention",
        section 3; Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.2; Lepikhin et al. 2020, "GShard", section 3.3 (four exchanges of a
        token for each of its experts).
    """
    one = {name: int(column[0]) for name, column in plan.columns().items()}
    one |= {"expert_owners": int(plan.expert_owners[0]), "expert_shard": int(plan.expert_shard[0])}
    held = _Held(workload, one)
    count = workload.global_batch_size // (one["dp_replicate"] * one["dp_shard"] * one["microbatch_size"])
    sent = [*_tensor(workload, stack, one, held, count), *_context(workload, stack, one, held, count)]
    sent += [*_parameters(stack, one, held, count), *_experts(workload, stack, one, held, count), *_stages(workload, stack, one, count)]
    return [traffic for traffic in sent if traffic.bytes_ > 0]


class _Held:
    """Blocks and parameters of the pipeline rank that holds most, a tensor-parallel part of them."""

    def __init__(self, workload: Workload, one: dict[str, int]) -> None:
        model = workload.model
        stages = one["pp"] * one["stages_per_rank"]
        counts, owners = split_model(model, stages), stage_owners(stages, one["pp"], SCHEDULES[one["schedule"]])
        by_rank = np.stack([counts[owners == rank].sum(0) for rank in range(one["pp"])])
        kinds = list(model.kinds)
        weights = by_rank @ np.array([kind.parameters for kind in kinds], dtype=float)
        weights[0] += model.embedding_parameters
        weights[owners[-1]] += model.head_parameters + model.vectors + model.tied_parameters * (stages > 1)
        busiest = int(weights.argmax())
        self.blocks = dict(zip(kinds, by_rank[busiest].tolist(), strict=True))
        routed = sum(_routed(kind) * number for kind, number in self.blocks.items())
        self.experts = routed / one["expert_owners"]
        self.dense = (float(weights[busiest]) - routed) / one["tp"]


def _routed(kind: LayerKind) -> int:
    """Parameters of a block's experts."""
    return sum(matmul.parameters for matmul in kind.matmuls if matmul.copies > 1)


def _tokens(workload: Workload, one: dict[str, int]) -> float:
    """Of a microbatch on one rank."""
    return one["microbatch_size"] * workload.sequence_length / one["cp"]


def _again(one: dict[str, int]) -> int:
    """Forwards that run a second time."""
    return int(CHECKPOINTING[one["checkpointing"]] == "full")


def _tensor(workload: Workload, stack: Stack, one: dict[str, int], held: _Held, count: int) -> list[Traffic]:
    """A part of a block that tensor parallelism splits gathers and scatters in each pass, or all-reduces, which is as much."""
    each = 4 + 2 * _again(one) + (1 if one["sequence_parallel"] and stack.regather else 0)
    parts = sum(_split_parts(kind, one) * number for kind, number in held.blocks.items())
    whole = _tokens(workload, one) * workload.model.hidden_size * stack.precision.compute_bytes
    total = each * parts
    if one["ep"] > 1 and not one["sequence_parallel"]:  # each rank sends its part of the tokens, and the results are gathered both ways
        total += 2 * sum(number for kind, number in held.blocks.items() if _is_mixture(kind))
    return [Traffic("tp", "ring", total * count * whole * (1 - 1 / one["tp"]))]


def _split_parts(kind: LayerKind, one: dict[str, int]) -> int:
    """Attentions, feed-forwards and shared experts; a mixture's own experts where tensor parallelism deals them to all ranks' tokens."""
    dealt = one["ep"] == 1 and not one["sequence_parallel"] and _is_mixture(kind)
    inner = {matmul.part for matmul in kind.matmuls if matmul.copies == 1 and matmul.name.endswith("down_proj")}
    return len(kind.cores) + len(inner) + dealt


def _is_mixture(kind: LayerKind) -> bool:
    return any(matmul.copies > 1 for matmul in kind.matmuls)


def _context(workload: Workload, stack: Stack, one: dict[str, int], held: _Held, count: int) -> list[Traffic]:
    size, method = one["cp"], METHODS[one["method"]]
    total = 0.0
    for kind, number in held.blocks.items():
        for core in kind.cores:
            keys = core.kv_heads * (core.query_dim + core.value_dim)
            queries = core.heads * (core.query_dim + core.value_dim)
            if method == "ulysses":
                total += number * (keys + queries) * (1 - 1 / size) * (2 + _again(one))
            else:  # keys and values forward, again backward, and their gradients in float32
                total += number * keys * (size - 1) * (2 + 4 / stack.precision.compute_bytes + _again(one))
    bytes_ = total / one["tp"] * _tokens(workload, one) * stack.precision.compute_bytes * count
    return [Traffic("cp", "alltoall" if method == "ulysses" else "ring", bytes_ if size > 1 else 0.0)]


def _parameters(stack: Stack, one: dict[str, int], held: _Held, count: int) -> list[Traffic]:
    """Gathered parameters and reduced gradients of what is no expert, and of experts."""
    kind = SHARDING[one["sharding"]]
    gathers = {"none": 0, "optimizer": 1, "gradients": 1, "parameters": 2 * count}[kind]
    reductions = count if one["reduce_every"] else 1
    precision = stack.precision
    each = gathers * precision.gather_bytes + reductions * precision.reduce_bytes
    shard = one["dp_shard"] * one["cp"]
    others = one["expert_shard"]
    replicas = one["dp_replicate"]
    across = 2 * (1 - 1 / replicas) * precision.reduce_bytes  # once, whatever is reduced in between
    sent = [Traffic("fsdp", "ring", held.dense * (1 - 1 / shard) * each)]
    groups = "fsdp" if one["expert_owners"] == one["tp"] and one["ep"] == 1 else "expert_shard"
    sent += [Traffic(groups, "ring", held.experts * (1 - 1 / others) * each)]
    return [*sent, Traffic("dp_replicate", "ring", across * (held.dense / shard + held.experts / others))]


def _experts(workload: Workload, stack: Stack, one: dict[str, int], held: _Held, count: int) -> list[Traffic]:
    if one["ep"] == 1:
        return []
    chosen = sum(max((m.per_token for m in kind.matmuls if m.copies > 1), default=0) * number for kind, number in held.blocks.items())
    tokens = _tokens(workload, one) / one["tp"]
    hidden = workload.model.hidden_size * stack.precision.compute_bytes
    again = _again(one) if stack.selective != "elementwise" else 0  # this package keeps what arrived
    return [Traffic("ep", "alltoall", (4 + 2 * again) * tokens * chosen * hidden * count * (1 - 1 / one["ep"]))]


def _stages(workload: Workload, stack: Stack, one: dict[str, int], count: int) -> list[Traffic]:
    if one["pp"] == 1:
        return []
    part = one["tp"] if one["sequence_parallel"] else 1
    row = _tokens(workload, one) * workload.model.hidden_size * stack.precision.compute_bytes / part
    turns, wraps = one["stages_per_rank"], SCHEDULES[one["schedule"]] in LOOPED_SCHEDULES
    return [Traffic("pp", "ring" if wraps else "chain", row * count * turns * (2 if wraps else 1))]
