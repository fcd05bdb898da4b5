"""What one step of a plan sends in each kind of group, by which a placement is chosen."""

from __future__ import annotations

import math

import numpy as np

from lightning_megascale.planning.candidates import CHECKPOINTING, METHODS, SHARDING, Candidates
from lightning_megascale.planning.shape import LayerKind
from lightning_megascale.planning.stack import Stack
from lightning_megascale.planning.stages import split_model
from lightning_megascale.planning.workload import Workload
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
        counts = split_model(model, stages)
        by_rank = np.stack([counts[rank :: one["pp"]].sum(0) for rank in range(one["pp"])])
        kinds = list(model.kinds)
        weights = by_rank @ np.array([kind.parameters for kind in kinds], dtype=float)
        weights[0] += model.embedding_parameters
        weights[-1] += model.head_parameters + model.vectors + model.tied_parameters * (one["pp"] > 1)
        busiest = int(weights.argmax())
        self.blocks = dict(zip(kinds, by_rank[busiest].tolist(), strict=True))
        routed = sum(_routed(kind) * number for kind, number in self.blocks.items())
        spread = one["ep"] if one["ep"] > 1 else one["tp"]
        self.experts = routed / spread
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
    passes = 8 + 4 * _again(one) + (2 if one["sequence_parallel"] and stack.regather else 0)
    whole = _tokens(workload, one) * workload.model.hidden_size * stack.precision.compute_bytes
    return [Traffic("tp", "ring", passes * sum(held.blocks.values()) * count * whole * (1 - 1 / one["tp"]))]


def _context(workload: Workload, stack: Stack, one: dict[str, int], held: _Held, count: int) -> list[Traffic]:
    size, method = one["cp"], METHODS[one["method"]]
    total = 0.0
    for kind, number in held.blocks.items():
        for core in kind.cores:
            keys = core.kv_heads * (core.query_dim + core.value_dim)
            queries = core.heads * (core.query_dim + core.value_dim)
            if method == "ulysses":
                total += number * (keys + queries) * (1 - 1 / size) * (2 + _again(one))
            else:  # keys and values forward; again and with their gradients backward
                total += number * keys * (size - 1) * (3 + _again(one))
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
    others = shard * one["tp"] // one["ep"] if one["ep"] > 1 else shard
    replicas = one["dp_replicate"]
    across = 2 * (1 - 1 / replicas) * reductions * precision.reduce_bytes
    sent = [Traffic("fsdp", "ring", held.dense * (1 - 1 / shard) * each)]
    groups = "expert_shard" if one["ep"] > 1 else "fsdp"
    sent += [Traffic(groups, "ring", held.experts * (1 - 1 / others) * each)]
    return [*sent, Traffic("dp_replicate", "ring", across * (held.dense / shard + held.experts / others))]


def _experts(workload: Workload, stack: Stack, one: dict[str, int], held: _Held, count: int) -> list[Traffic]:
    if one["ep"] == 1:
        return []
    chosen = sum(max((m.per_token for m in kind.matmuls if m.copies > 1), default=0) * number for kind, number in held.blocks.items())
    tokens = _tokens(workload, one) / (one["tp"] if one["sequence_parallel"] else 1)
    hidden = workload.model.hidden_size * stack.precision.compute_bytes
    return [Traffic("ep", "alltoall", (4 + 2 * _again(one)) * tokens * chosen * hidden * count * (1 - 1 / one["ep"]))]


def _stages(workload: Workload, stack: Stack, one: dict[str, int], count: int) -> list[Traffic]:
    if one["pp"] == 1:
        return []
    part = one["tp"] if one["sequence_parallel"] else 1
    row = _tokens(workload, one) * workload.model.hidden_size * stack.precision.compute_bytes / part
    turns = math.ceil(one["stages_per_rank"])
    return [Traffic("pp", "ring" if turns > 1 else "chain", row * count * turns * (2 if turns > 1 else 1))]
