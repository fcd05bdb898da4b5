"""What is proven and what is refused, as one table. The plan reads it, README prints it, the parity tests are generated from it.

A *feature* is one choice a run can make. Two features either work together by a passing parity test ("proven"), or the pair is
refused with a reason. Nothing else exists: a pair that is in neither state fails a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
LOOPED_SCHEDULES = ("Interleaved1F1B", "InterleavedZeroBubble")  # two or more stages on a rank, round robin
V_SCHEDULES = ("ZBVZeroBubble",)  # two stages on a rank, down and up again
CONTEXT_METHODS = ("ring", "ulysses", "allgather", "ring+ulysses")
CONTEXT_LAYOUTS = ("contiguous", "headtail", "packed")
ZERO_BUBBLE_SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble")  # the backward of inputs and of weights apart


def schedule_name(schedule: str) -> str:
    """Torch's spelling of a schedule's name, which is given in any case; unchanged when there is none."""
    return next((name for name in SCHEDULES if name.lower() == str(schedule).lower()), schedule)


@dataclass(frozen=True)
class Feature:
    """One choice: its dimension (what it is a choice of), its name, and how it is seen in a plan (None: not a plan's matter)."""

    dimension: str
    name: str
    uses: Callable[[Any], bool] | None = None


def _axes(
    replicate: bool = False,
    shard: bool = False,
    tensor: bool = False,
    sequence: bool = False,
    pipeline: bool = False,
    context: bool = False,
) -> Callable[[Any], bool]:
    def uses(plan: Any) -> bool:
        return (
            (plan.pipeline_parallel_size > 1) == pipeline
            and (plan.context_parallel_size > 1) == context
            and (plan.data_parallel_replicate_size != 1) == replicate
            and (plan.data_parallel_shard_size not in (1, "auto")) == shard
            and (plan.tensor_parallel_size > 1) == tensor
            and plan.sequence_parallel == sequence
        )

    return uses


def _scheduled(name: str) -> Callable[[Any], bool]:
    return lambda plan: plan.pipeline_parallel_size > 1 and schedule_name(plan.pipeline_schedule) == name


def _contextual(name: str, value: str) -> Callable[[Any], bool]:
    return lambda plan: plan.context_parallel_size > 1 and getattr(plan, name) == value


FEATURES = (
    Feature("axes", "dp", _axes(replicate=True)),
    Feature("axes", "fsdp2", _axes(shard=True)),
    Feature("axes", "hsdp", _axes(replicate=True, shard=True)),
    Feature("axes", "tp", _axes(tensor=True)),
    Feature("axes", "tp+sp", _axes(tensor=True, sequence=True)),
    Feature("axes", "fsdp2 x tp", _axes(shard=True, tensor=True)),
    Feature("axes", "fsdp2 x tp+sp", _axes(shard=True, tensor=True, sequence=True)),
    Feature("axes", "dp x tp", _axes(replicate=True, tensor=True)),
    Feature("axes", "dp x tp+sp", _axes(replicate=True, tensor=True, sequence=True)),
    Feature("axes", "hsdp x tp", _axes(replicate=True, shard=True, tensor=True)),
    Feature("axes", "hsdp x tp+sp", _axes(replicate=True, shard=True, tensor=True, sequence=True)),
    Feature("axes", "pp2", _axes(pipeline=True)),
    Feature("axes", "pp4"),  # the same axes as pp2; a middle stage is neither first nor last
    Feature("axes", "pp2 x dp", _axes(replicate=True, pipeline=True)),
    Feature("axes", "pp2 x fsdp2", _axes(shard=True, pipeline=True)),
    Feature("axes", "pp2 x tp", _axes(tensor=True, pipeline=True)),
    Feature("axes", "pp2 x tp+sp", _axes(tensor=True, sequence=True, pipeline=True)),
    Feature("axes", "pp2 x hsdp", _axes(replicate=True, shard=True, pipeline=True)),
    Feature("axes", "pp2 x fsdp2 x tp", _axes(shard=True, tensor=True, pipeline=True)),
    Feature("axes", "pp2 x fsdp2 x tp+sp", _axes(shard=True, tensor=True, sequence=True, pipeline=True)),
    Feature("axes", "pp2 x dp x tp", _axes(replicate=True, tensor=True, pipeline=True)),
    Feature("axes", "pp2 x dp x tp+sp", _axes(replicate=True, tensor=True, sequence=True, pipeline=True)),
    Feature("axes", "pp2 x hsdp x tp", _axes(replicate=True, shard=True, tensor=True, pipeline=True)),
    Feature("axes", "pp2 x hsdp x tp+sp", _axes(replicate=True, shard=True, tensor=True, sequence=True, pipeline=True)),
    Feature("axes", "cp2", _axes(context=True)),
    Feature("axes", "cp4"),
    Feature("axes", "cp2 x dp", _axes(replicate=True, context=True)),
    Feature("axes", "cp2 x fsdp2", _axes(shard=True, context=True)),
    Feature("axes", "cp2 x hsdp", _axes(replicate=True, shard=True, context=True)),
    Feature("axes", "cp2 x tp", _axes(tensor=True, context=True)),
    Feature("axes", "cp2 x tp+sp", _axes(tensor=True, sequence=True, context=True)),
    Feature("axes", "cp2 x fsdp2 x tp", _axes(shard=True, tensor=True, context=True)),
    Feature("axes", "cp2 x fsdp2 x tp+sp", _axes(shard=True, tensor=True, sequence=True, context=True)),
    Feature("axes", "pp2 x cp2", _axes(pipeline=True, context=True)),
    Feature("axes", "pp2 x cp2 x fsdp2", _axes(pipeline=True, shard=True, context=True)),
    Feature("axes", "pp2 x cp2 x tp+sp", _axes(pipeline=True, tensor=True, sequence=True, context=True)),
    Feature("axes", "pp2 x cp2 x fsdp2 x tp+sp", _axes(pipeline=True, shard=True, tensor=True, sequence=True, context=True)),
    Feature("context method", "no context", lambda plan: plan.context_parallel_size == 1),
    *(Feature("context method", name, _contextual("context_parallel_method", name)) for name in CONTEXT_METHODS),
    Feature("context layout", "whole rows", lambda plan: plan.context_parallel_size == 1),
    *(Feature("context layout", name, _contextual("context_parallel_layout", name)) for name in CONTEXT_LAYOUTS),
    Feature("documents", "one a row"),
    Feature("documents", "packed documents"),
    Feature("schedule", "no pipeline", lambda plan: plan.pipeline_parallel_size == 1),
    *(Feature("schedule", name, _scheduled(name)) for name in SCHEDULES),
    Feature("split", "split by cost", lambda plan: plan.pipeline_split == "auto"),
    Feature("split", "split by hand", lambda plan: plan.pipeline_split != "auto"),
    Feature("checkpointing", "none", lambda plan: plan.activation_checkpointing is None),
    Feature("checkpointing", "selective", lambda plan: plan.activation_checkpointing == "selective"),
    Feature("checkpointing", "full", lambda plan: plan.activation_checkpointing not in (None, "selective")),
    Feature("offload", "kept on the device", lambda plan: not plan.activation_offload),
    Feature("offload", "block inputs offloaded", lambda plan: plan.activation_offload),
    Feature("compile", "eager", lambda plan: not plan.compile),
    Feature("compile", "compiled", lambda plan: bool(plan.compile)),
    Feature("precision", "float64"),
    Feature("precision", "float32"),
    Feature("precision", "bf16-mixed"),
    Feature("precision", "bf16-true"),
    Feature("reduction", "sums in float32", lambda plan: plan.reduce_dtype == "float32"),
    Feature("reduction", "sums in bfloat16", lambda plan: plan.reduce_dtype == "bfloat16"),
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
    Feature("family", "moe-like"),
    Feature("family", "ep2", lambda plan: plan.expert_parallel_size > 1),  # the same model, its experts dealt out over 2 or 4 ranks
    Feature("family", "ep4"),
)

# (feature, feature) -> why the pair is refused.
REFUSED: dict[frozenset[str], str] = {
    frozenset(("selective", "compiled")): (
        "a selective policy cannot see into a compiled block: use activation_checkpointing='full' or None, or compile=False"
    ),
    frozenset(("none", "block inputs offloaded")): (
        "activation_offload=True moves the inputs of recomputed blocks, and without recomputation everything else stays on the device: use "
        "activation_checkpointing='full', or activation_offload=False"
    ),
    frozenset(("selective", "block inputs offloaded")): (
        "activation_offload=True moves the inputs of blocks, and selective recomputation keeps the larger outputs of matmuls: use "
        "activation_checkpointing='full', or activation_offload=False"
    ),
}
_TENSOR_PIPELINES = tuple(f.name for f in FEATURES if f.dimension == "axes" and f.name.startswith("pp") and "tp" in f.name)
for _schedule in ZERO_BUBBLE_SCHEDULES:
    REFUSED |= {
        frozenset((_schedule, "selective")): (
            "a zero-bubble schedule runs the backward of inputs and of weights apart, and torch's selective checkpointing fails in the "
            "second: use 'Interleaved1F1B', or activation_checkpointing=None"
        ),
        frozenset((_schedule, "full")): (
            "a zero-bubble schedule would run a checkpointed block's forward again for each of its weights: use 'Interleaved1F1B', or "
            "activation_checkpointing=None"
        ),
        frozenset((_schedule, "block inputs offloaded")): (
            "a zero-bubble schedule refuses recomputed blocks, whose inputs are what activation_offload=True moves: use 'Interleaved1F1B', "
            "or activation_offload=False"
        ),
        frozenset((_schedule, "compiled")): (
            "a zero-bubble schedule cannot split the backward of a compiled block: use 'Interleaved1F1B', or compile=False"
        ),
        frozenset((_schedule, "reshard always")): (
            "a zero-bubble schedule looks for the weights after the forward, and resharded ones lose their gradients without an error: use "
            "reshard_after_forward='auto' or False"
        ),
        frozenset((_schedule, "moe-like")): (
            "experts own their weights in one function, whose backward a zero-bubble schedule runs twice: use 'Interleaved1F1B' or '1F1B'"
        ),
        **{
            frozenset((_schedule, _experts)): "a zero-bubble schedule takes no model with experts: use 'Interleaved1F1B' or '1F1B'"
            for _experts in ("ep2", "ep4")
        },
        frozenset((_schedule, "accumulate 2, reduce every")): (
            "a zero-bubble schedule adds weight gradients up by itself, after the backward that a reduction follows: use "
            "reduce_gradients='last'"
        ),
        **{
            frozenset((_schedule, axes)): (
                "a tensor-parallel linear owns its weights in one function, whose backward (and its collectives) a zero-bubble schedule "
                "runs twice: use 'Interleaved1F1B' or '1F1B'"
            )
            for axes in _TENSOR_PIPELINES
        },
    }


def _expert_ranks(axes: str) -> int:
    """dp_shard x cp x tp of the case that proves a choice of axes."""
    sizes = {"fsdp2": 2, "hsdp": 2, "cp2": 2, "cp4": 4, "tp": 2, "tp+sp": 2}
    return prod(sizes.get(part, 1) for part in axes.split(" x "))


def _meaningless() -> frozenset[frozenset[str]]:
    """Pairs that do not exist: a schedule or a split without a pipeline, a pipeline without a schedule, half sums of whole gradients."""
    axes = [feature.name for feature in FEATURES if feature.dimension == "axes"]
    piped = [name for name in axes if name.startswith("pp")]
    cut = [name for name in axes if "cp" in name]
    pairs = [(name, other) for name in cut for other in ("no context", "whole rows")]
    pairs += [(name, other) for name in axes if name not in cut for other in (*CONTEXT_METHODS, *CONTEXT_LAYOUTS)]
    pairs += [(name, "ring+ulysses") for name in cut if "cp4" not in name]  # needs two factors
    pairs += [("ring+ulysses", other) for other in (*SCHEDULES, "split by hand")]  # four ranks of it, and no pipeline with them
    pairs += [("no context", other) for other in CONTEXT_LAYOUTS]
    pairs += [("whole rows", other) for other in CONTEXT_METHODS]
    pairs += [(name, "no pipeline") for name in piped]
    pairs += [(name, other) for name in axes if name not in piped for other in (*SCHEDULES, "split by hand")]
    pairs += [("no pipeline", "split by hand")]
    pairs += [(experts, name) for experts, size in (("ep2", 2), ("ep4", 4)) for name in axes if _expert_ranks(name) % size]
    pairs += [("sums in bfloat16", precision) for precision in ("float64", "float32")]
    return frozenset(map(frozenset, pairs))


MEANINGLESS = _meaningless()

# Choices that no test proves yet: asked for, they are refused by name.
_UNPROVEN: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda p: p.cpu_offload, "cpu_offload=True: parameters and optimizer state in host memory"),
    (lambda p: p.loss_parallel, "loss_parallel=True: logits that stay sharded over the vocabulary"),
    (
        lambda p: p.reshard_after_forward != "auto" and not isinstance(p.reshard_after_forward, bool),
        "reshard_after_forward={p.reshard_after_forward}: resharding to smaller groups",
    ),
    (lambda p: p.reduce_dtype is None, "reduce_dtype=None: a gradient sum in the parameters' dtype"),
)


# transformers classes -> plans under which a test proves them equal to one device, with the layout that they publish or that is known.
_TEXT = ("tp2", "fsdp2", "fsdp2xtp2", "pp2", "pp2:interleaved1f1b", "pp2xtp2")
_CONTEXT = ("cp2", "fsdp2xcp2", "cp2xtp2", "pp2xcp2")
_EXPERTS = ("fsdp2xep2", "tp2xep2", "fsdp2xtp2xep4", "cp2xep2", "pp2xfsdp2xep2")
_SEVERAL_LISTS = ("tp2", "fsdp2", "fsdp2xtp2")  # no pipeline: an encoder and a decoder, two towers
TRANSFORMERS: dict[str, tuple[str, ...]] = {
    "Llama": (*_TEXT, *_CONTEXT),
    "Qwen3": (*_TEXT, *_CONTEXT),
    "GPT2": (*_TEXT, *_CONTEXT),
    "Mixtral": (*_TEXT, "cp2", "cp2xtp2", *_EXPERTS),
    "Llava": _TEXT,
    "Mistral": ("tp2", "fsdp2", "pp2", "cp2"),
    "Gemma": ("tp2", "fsdp2", "pp2", "cp2"),
    "Gemma3": ("tp2", "fsdp2", "pp2", "cp2"),
    "Phi3": ("tp2", "fsdp2", "pp2", "cp2"),
    "Qwen3Moe": ("tp2", "fsdp2", "fsdp2xtp2", "pp2", "cp2", *_EXPERTS),
    "DeepseekV3": ("tp2", "fsdp2", "fsdp2xtp2", "pp2", "cp2", *_EXPERTS),
    "Siglip": ("tp2", "fsdp2", "pp2"),
    "CLIP": _SEVERAL_LISTS,
    "Whisper": _SEVERAL_LISTS,
}


def refusals(plan: Any) -> list[str]:
    """A message for every pair of features of this plan that is refused, and for every feature that no test proves."""
    wrong = [
        message.format(p=plan) + " is not proven equal to one device in this version, so it is refused; leave it at its default"
        for uses, message in _UNPROVEN
        if uses(plan)
    ]
    resolved = "auto" not in (plan.data_parallel_size, plan.data_parallel_shard_size) and _ranks(plan) > 1
    if not wrong and resolved and not any(f.uses is not None and f.uses(plan) for f in FEATURES if f.dimension == "axes"):
        wrong.append("this combination of axes is proven by no test: see the support table in README")
    used = [feature.name for feature in FEATURES if feature.uses is not None and feature.uses(plan)]
    for first, second in combinations(used, 2):
        reason = REFUSED.get(frozenset((first, second)))
        if reason:
            wrong.append(f"{first} x {second}: {reason}")
    return wrong


def _ranks(plan: Any) -> int:
    sizes = (plan.data_parallel_size, plan.tensor_parallel_size, plan.pipeline_parallel_size, plan.context_parallel_size)
    return prod(int(size) for size in sizes)


def dimensions() -> dict[str, tuple[str, ...]]:
    """The choices of each dimension, in table order."""
    table: dict[str, list[str]] = {}
    for feature in FEATURES:
        table.setdefault(feature.dimension, []).append(feature.name)
    return {dimension: tuple(names) for dimension, names in table.items()}


def is_refused(*names: str) -> str | None:
    """The reason why these features cannot be combined, or None."""
    for pair in map(frozenset, combinations(names, 2)):
        if pair in REFUSED:
            return REFUSED[pair]
        if pair in MEANINGLESS:
            return "one without the other"
    return None


def markdown() -> str:
    """The table as README shows it: every choice of every dimension, then the refused pairs and the refused choices."""
    rows = ["| choice of | proven with every other row, pair by pair |", "|---|---|"]
    rows += [f"| {dimension} | {', '.join(names)} |" for dimension, names in dimensions().items()]
    rows += ["", "| refused | why |", "|---|---|"]
    rows += [f"| {_together(reason)} | {reason} |" for reason in dict.fromkeys(REFUSED.values())]
    rows += [f"| {label} | no test proves it yet |" for label in UNPROVEN_LABELS]
    return "\n".join(rows)


def transformers_markdown() -> str:
    """The table of transformers classes as README shows it."""
    plans = tuple(dict.fromkeys(axes for proven in TRANSFORMERS.values() for axes in proven))
    rows = [f"| class | {' | '.join(plans)} |", "|---" * (len(plans) + 1) + "|"]
    rows += [f"| {name} | {' | '.join('equal' if axes in proven else '' for axes in plans)} |" for name, proven in TRANSFORMERS.items()]
    return "\n".join(rows)


def _together(reason: str) -> str:
    """All pairs refused for one reason, as ``a or b x c or d``."""
    pairs = [_table_order(pair) for pair, why in REFUSED.items() if why == reason]
    sides = [list(dict.fromkeys(pair[side] for pair in pairs)) for side in (0, 1)]
    return " with ".join(", ".join(side) for side in sides)


def _table_order(pair: frozenset[str]) -> list[str]:
    return [feature.name for feature in FEATURES if feature.name in pair]


UNPROVEN_LABELS = tuple(message.rpartition(": ")[2] for _, message in _UNPROVEN)
