"""What is proven and what is refused, as one table. The plan reads it, README prints it, the parity tests are generated from it.

A *feature* is one choice a run can make. Two features either work together by a passing parity test ("proven"), or the pair is
refused with a reason. Nothing else exists: a pair that is in neither state fails a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


@dataclass(frozen=True)
class Feature:
    """One choice: its dimension (what it is a choice of), its name, and how it is seen in a plan (None: not a plan's matter)."""

    dimension: str
    name: str
    uses: Callable[[Any], bool] | None = None


def _axes(replicate: bool = False, shard: bool = False, tensor: bool = False, sequence: bool = False) -> Callable[[Any], bool]:
    def uses(plan: Any) -> bool:
        return (
            (plan.data_parallel_replicate_size != 1) == replicate
            and (plan.data_parallel_shard_size not in (1, "auto")) == shard
            and (plan.tensor_parallel_size > 1) == tensor
            and plan.sequence_parallel == sequence
        )

    return uses


FEATURES = (
    Feature("axes", "dp", _axes(replicate=True)),
    Feature("axes", "fsdp2", _axes(shard=True)),
    Feature("axes", "hsdp", _axes(replicate=True, shard=True)),
    Feature("axes", "tp", _axes(tensor=True)),
    Feature("axes", "tp+sp", _axes(tensor=True, sequence=True)),
    Feature("axes", "fsdp2 x tp", _axes(shard=True, tensor=True)),
    Feature("axes", "fsdp2 x tp+sp", _axes(shard=True, tensor=True, sequence=True)),
    Feature("axes", "hsdp x tp", _axes(replicate=True, shard=True, tensor=True)),
    Feature("axes", "hsdp x tp+sp", _axes(replicate=True, shard=True, tensor=True, sequence=True)),
    Feature("checkpointing", "none", lambda plan: plan.activation_checkpointing is None),
    Feature("checkpointing", "selective", lambda plan: plan.activation_checkpointing == "selective"),
    Feature("checkpointing", "full", lambda plan: plan.activation_checkpointing not in (None, "selective")),
    Feature("compile", "eager", lambda plan: not plan.compile),
    Feature("compile", "compiled", lambda plan: bool(plan.compile)),
    Feature("precision", "float64"),
    Feature("precision", "float32"),
    Feature("precision", "bf16-mixed"),
    Feature("precision", "bf16-true"),
    Feature("init", "eager"),
    Feature("init", "meta"),
    Feature("embeddings", "free head"),
    Feature("embeddings", "tied head"),
    Feature("accumulation", "accumulate 1"),
    Feature("accumulation", "accumulate 2, reduce last", lambda plan: plan.reduce_gradients == "last"),
    Feature("accumulation", "accumulate 2, reduce every", lambda plan: plan.reduce_gradients == "every"),
    Feature("reshard", "reshard auto", lambda plan: plan.reshard_after_forward == "auto"),
    Feature("reshard", "reshard always", lambda plan: plan.reshard_after_forward is True),
    Feature("reshard", "reshard never", lambda plan: plan.reshard_after_forward is False),
    Feature("loss", "scalar mean"),
    Feature("loss", "loss_sum and num_tokens"),
    Feature("labels", "all labels"),
    Feature("labels", "90% of one rank masked"),
    Feature("dropout", "no dropout"),
    Feature("dropout", "dropout"),
    Feature("family", "llama-like"),
    Feature("family", "gpt-like"),
)

# (feature, feature) -> why the pair is refused.
REFUSED: dict[frozenset[str], str] = {
    frozenset(("selective", "compiled")): (
        "a selective policy cannot see into a compiled block: use activation_checkpointing='full' or None, or compile=False"
    ),
}

# Choices that no test proves yet: asked for, they are refused by name.
_UNPROVEN: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda p: p.pipeline_parallel_size > 1, "pipeline_parallel_size={p.pipeline_parallel_size}: pipeline parallelism"),
    (lambda p: p.context_parallel_size > 1, "context_parallel_size={p.context_parallel_size}: context parallelism"),
    (lambda p: p.expert_parallel_size > 1, "expert_parallel_size={p.expert_parallel_size}: expert parallelism"),
    (lambda p: p.activation_offload, "activation_offload=True: offloading of activations"),
    (lambda p: p.cpu_offload, "cpu_offload=True: parameters and optimizer state in host memory"),
    (lambda p: p.loss_parallel, "loss_parallel=True: logits that stay sharded over the vocabulary"),
    (
        lambda p: p.reshard_after_forward != "auto" and not isinstance(p.reshard_after_forward, bool),
        "reshard_after_forward={p.reshard_after_forward}: resharding to smaller groups",
    ),
    (lambda p: p.reduce_dtype != "float32", "reduce_dtype={p.reduce_dtype!r}: a gradient sum in less than float32"),
    (lambda p: p.pipeline_schedule != "1F1B", "pipeline_schedule={p.pipeline_schedule!r}: a pipeline schedule"),
    (lambda p: p.pipeline_stages_per_rank != 1, "pipeline_stages_per_rank={p.pipeline_stages_per_rank}: several stages on a rank"),
    (lambda p: p.pipeline_split != "auto", "pipeline_split: a pipeline split"),
    (lambda p: p.context_parallel_method != "auto", "context_parallel_method={p.context_parallel_method!r}: a context-parallel method"),
    (lambda p: p.context_parallel_layout != "auto", "context_parallel_layout={p.context_parallel_layout!r}: a context-parallel layout"),
    (lambda p: p.expert_dispatcher != "auto", "expert_dispatcher={p.expert_dispatcher!r}: an expert dispatcher"),
    (lambda p: p.attention_backend != "auto", "attention_backend={p.attention_backend!r}: a choice of attention backend"),
)


def refusals(plan: Any) -> list[str]:
    """A message for every pair of features of this plan that is refused, and for every feature that no test proves."""
    wrong = [
        message.format(p=plan) + " is not proven equal to one device in this version, so it is refused; leave it at its default"
        for uses, message in _UNPROVEN
        if uses(plan)
    ]
    used = [feature.name for feature in FEATURES if feature.uses is not None and feature.uses(plan)]
    for first, second in combinations(used, 2):
        reason = REFUSED.get(frozenset((first, second)))
        if reason:
            wrong.append(f"{first} x {second}: {reason}")
    return wrong


def dimensions() -> dict[str, tuple[str, ...]]:
    """The choices of each dimension, in table order."""
    table: dict[str, list[str]] = {}
    for feature in FEATURES:
        table.setdefault(feature.dimension, []).append(feature.name)
    return {dimension: tuple(names) for dimension, names in table.items()}


def is_refused(*names: str) -> str | None:
    """The reason why these features cannot be combined, or None."""
    for pair in combinations(names, 2):
        if frozenset(pair) in REFUSED:
            return REFUSED[frozenset(pair)]
    return None


def markdown() -> str:
    """The table as README shows it: every choice of every dimension, then the refused pairs and the refused choices."""
    rows = ["| choice of | proven with every other row, pair by pair |", "|---|---|"]
    rows += [f"| {dimension} | {', '.join(names)} |" for dimension, names in dimensions().items()]
    rows += ["", "| refused | why |", "|---|---|"]
    rows += [f"| {' x '.join(name for name in _table_order(pair))} | {reason} |" for pair, reason in REFUSED.items()]
    rows += [f"| {label} | no test proves it yet |" for label in UNPROVEN_LABELS]
    return "\n".join(rows)


def _table_order(pair: frozenset[str]) -> list[str]:
    return [feature.name for feature in FEATURES if feature.name in pair]


UNPROVEN_LABELS = tuple(message.rpartition(": ")[2] for _, message in _UNPROVEN)
