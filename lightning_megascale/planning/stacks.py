"""Constants of software stacks, by kind of GPU: fitted on published runs where there are any, else assumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_megascale.planning.stack import Precision, Stack

_MEGATRON: Mapping[str, Any] = {"copies_gathered": False, "scatter_sends": True, "joined": True}
# Name of a stack -> facts that its speed depends on and its memory does not. Source: Megatron-LM (Narayanan et al. 2021, section 4.1;
# core/transformer/attention.py); Megatron-Bridge's recipes (perf_recipes: reductions overlap under a pipeline too, userbuffers, DeepEP or
# HybridEP, fused cross-entropy); torchtitan (repeat_kv); llm-foundry (fused_crossentropy by default; FSDP1); SimuMax ("cef" cases).
FACTS: Mapping[str, Mapping[str, Any]] = {
    "megatron-2021": _MEGATRON,
    "megatron-2022": _MEGATRON,
    "megatron-deepspeed": _MEGATRON,
    "megatron-simumax": {**_MEGATRON, "fused_loss": True},
    "megatron-bridge": {**_MEGATRON, "fused_loss": True, "overlap_piped": True, "overlap_tensor": True, "dispatch_hops": 2},
    "torchtitan": {"repeats_keys": True},
    "foundry": {"fused_loss": True, "copies_gathered": False},
    "automodel": {"fused_loss": True, "dispatch_hops": 2},
}

# GPU's sheet -> what a data sheet alone leads to expect of large products, attention and kernels between, where no run was measured.
# Assumed, by generation, in round numbers near what the fitted rows of all stacks reach: newer GPUs reach less of their peaks, which power
# limits and which memory has not kept up with.
_AMPERE, _HOPPER, _BLACKWELL = (
    {"matmul_efficiency": products, "attention_efficiency": attention, "memory_efficiency": memory}
    for products, attention, memory in ((0.8, 0.4, 0.65), (0.65, 0.3, 0.5), (0.65, 0.4, 0.45))
)
ASSUMED: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("a100", "a100_40gb"), _AMPERE),
    **dict.fromkeys(("h100", "h100_96gb", "h200", "h800"), _HOPPER),
    **dict.fromkeys(("b200", "b300", "gb200", "gb300"), _BLACKWELL),
}

# (name of a stack, GPU's sheet) -> constants in the order of CONSTANTS, fitted by `python -m tests.benchmarks.planner fit` on the rows of
# tests/planning/published_split.py. None: no row speaks of it, and the sheet's holds.
CONSTANTS = ("matmul_efficiency", "small_dtype_efficiency", "attention_efficiency", "memory_efficiency", "kernel_seconds",
             "nvlink_efficiency", "network_efficiency", "hidden_share")  # fmt: skip
FITTED: Mapping[tuple[str, str], tuple[float | None, ...]] = {
    ("megatron-deepspeed", "a100"): (0.788, None, None, 0.789, 3.74e-05, 0.685, 0.826, None),
    ("foundry", "h100"): (0.808, 0.912, 0.201, 0.356, None, 0.755, 0.503, 0.479),
    ("foundry", "a100"): (0.901, None, 0.347, 0.487, None, 0.719, None, 0.819),
    ("foundry", "a100_40gb"): (0.821, None, 0.348, 0.744, None, None, 0.611, 0.181),
    ("torchtitan", "h100_96gb"): (0.606, 0.921, 0.271, 0.614, None, 0.627, 0.718, 0.613),
    ("torchtitan", "h200"): (0.692, 0.928, 0.378, 0.542, None, None, None, 0.62),
    ("megatron-2022", "a100"): (0.884, None, None, 0.674, 2.71e-05, None, None, None),
    ("megatron-2021", "a100"): (0.764, None, None, 0.682, 4.14e-05, 0.801, 0.813, None),
    ("megatron-bridge", "gb300"): (0.852, 0.951, 0.387, 0.742, 5.06e-05, 0.654, None, 0.77),
    ("megatron-bridge", "gb200"): (0.703, 0.978, 0.325, 0.524, 1.71e-05, 0.651, None, None),
    ("megatron-bridge", "h100"): (0.836, 1, 0.487, 0.652, 4.77e-05, 0.772, 0.869, 0.574),
    ("megatron-bridge", "b300"): (0.684, 0.921, 0.479, 0.553, None, 0.736, None, None),
    ("megatron-bridge", "b200"): (0.738, 0.96, 0.483, 0.433, 2.42e-05, 0.646, None, None),
    ("megatron-simumax", "b200"): (0.503, None, 0.446, 0.328, 6.89e-05, 0.519, None, 0.253),
    ("automodel", "h100"): (0.707, None, 0.414, 0.584, None, 0.734, None, None),
}


def stack_for(gpu: str, name: str = "megascale", precision: Precision | None = None) -> Stack:
    """This package's stack on a GPU.

    Args:
        gpu: name of a sheet.
        name: of the stack whose constants are taken.
        precision: "bf16-mixed" by default.
    """
    return with_constants(Stack(name, precision or Precision("bf16-mixed")), gpu)


def from_sheet(stack: Stack, gpu: str) -> Stack:
    """The same stack with what is known of how it runs, and the constants that the GPU's sheet alone leads to expect."""
    return dataclasses.replace(stack, **FACTS.get(stack.name, {}), **ASSUMED.get(gpu, {}))


def with_constants(stack: Stack, gpu: str) -> Stack:
    """The same with the constants that were fitted for this stack on this GPU, where there are any."""
    values = dict(zip(CONSTANTS, FITTED.get((stack.name, gpu), ()), strict=False))
    fitted: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if fitted:
        fitted["source"] = "fitted on published runs: tests/planning/published_split.py"
    return dataclasses.replace(from_sheet(stack, gpu), **fitted)
