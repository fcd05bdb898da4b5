"""Constants of software stacks, by kind of GPU: fitted on published runs where there are any, else assumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_megascale.planning.stack import Precision, Stack

_MEGATRON: Mapping[str, Any] = {"scatter_sends": True, "joined": True}
# Name of a stack -> facts that its speed depends on and its memory does not. Source: Megatron-LM (Narayanan et al. 2021, section 4.1;
# core/transformer/attention.py); Megatron-Bridge's recipes (perf_recipes: reductions overlap under a
# pipeline too, userbuffers, DeepEP or HybridEP, fused cross-entropy); llm-foundry (fused_crossentropy by default); SimuMax ("cef" cases).
FACTS: Mapping[str, Mapping[str, Any]] = {
    "megatron-2021": _MEGATRON,
    "megatron-2022": _MEGATRON,
    "megatron-deepspeed": _MEGATRON,
    "megatron-simumax": {**_MEGATRON, "fused_loss": True},
    "megatron-bridge": {**_MEGATRON, "fused_loss": True, "overlap_piped": True, "overlap_tensor": True, "dispatch_hops": 2},
    "foundry": {"fused_loss": True},
    "automodel": {"fused_loss": True, "dispatch_hops": 2},
    "megascale": {"whole_logits": True},
}

# GPU's sheet -> what a data sheet alone leads to expect of large products, attention and kernels between, where no run was measured.
# Assumed, by generation: newer GPUs reach less of their peaks, which power limits and which memory has not kept up with.
_AMPERE, _HOPPER, _BLACKWELL = (
    {"matmul_efficiency": products, "attention_efficiency": attention, "memory_efficiency": memory}
    for products, attention, memory in ((0.8, 0.4, 0.65), (0.65, 0.3, 0.5), (0.65, 0.4, 0.45))
)
ASSUMED: Mapping[str, Mapping[str, float]] = {
    **dict.fromkeys(("a100", "a100_40gb"), _AMPERE),
    **dict.fromkeys(("h100", "h100_96gb", "h200", "h800"), _HOPPER),
    **dict.fromkeys(("b200", "b300", "gb200", "gb300"), _BLACKWELL),
}

# (name of a stack, GPU's sheet) -> constants. FITTED is filled by `python -m tests.benchmarks.planner fit`.
FITTED: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("megatron-deepspeed", "a100"): {
        "matmul_efficiency": 0.778, "attention_efficiency": 0.4, "memory_efficiency": 0.757, "kernel_seconds": 3.74e-05, "nvlink_efficiency": 0.697, "network_efficiency": 0.828, "hidden_share": 0.6,
    },
    ("foundry", "h100"): {
        "matmul_efficiency": 0.829, "small_dtype_efficiency": 0.923, "attention_efficiency": 0.201, "memory_efficiency": 0.317, "kernel_seconds": 3.01e-05, "nvlink_efficiency": 0.817, "network_efficiency": 0.44, "hidden_share": 0.578,
    },
    ("foundry", "a100"): {
        "matmul_efficiency": 0.9, "attention_efficiency": 0.347, "memory_efficiency": 0.471, "kernel_seconds": 3e-05, "nvlink_efficiency": 0.708, "network_efficiency": 0.75, "hidden_share": 0.957,
    },
    ("foundry", "a100_40gb"): {
        "matmul_efficiency": 0.823, "attention_efficiency": 0.348, "memory_efficiency": 0.67, "kernel_seconds": 2.99e-05, "nvlink_efficiency": 0.703, "network_efficiency": 0.61, "hidden_share": 0.194,
    },
    ("torchtitan", "h100_96gb"): {
        "matmul_efficiency": 0.573, "small_dtype_efficiency": 0.89, "attention_efficiency": 0.272, "memory_efficiency": 0.599, "kernel_seconds": 3e-05, "nvlink_efficiency": 0.598, "network_efficiency": 0.712, "hidden_share": 0.605,
    },
    ("torchtitan", "h200"): {
        "matmul_efficiency": 0.681, "small_dtype_efficiency": 0.92, "attention_efficiency": 0.36, "memory_efficiency": 0.529, "kernel_seconds": 3e-05, "nvlink_efficiency": 0.7, "network_efficiency": 0.754, "hidden_share": 0.614,
    },
    ("megatron-2022", "a100"): {
        "matmul_efficiency": 0.825, "attention_efficiency": 0.4, "memory_efficiency": 0.716, "kernel_seconds": 3.38e-05, "nvlink_efficiency": 0.703, "network_efficiency": 0.744, "hidden_share": 0.6,
    },
    ("megatron-2021", "a100"): {
        "matmul_efficiency": 0.75, "attention_efficiency": 0.4, "memory_efficiency": 0.673, "kernel_seconds": 4.46e-05, "nvlink_efficiency": 0.817, "network_efficiency": 0.819, "hidden_share": 0.6,
    },
    ("megatron-bridge", "gb300"): {
        "matmul_efficiency": 0.81, "small_dtype_efficiency": 0.997, "attention_efficiency": 0.389, "memory_efficiency": 0.537, "kernel_seconds": 5.02e-05, "nvlink_efficiency": 0.798, "network_efficiency": 0.75, "hidden_share": 0.681,
    },
    ("megatron-bridge", "gb200"): {
        "matmul_efficiency": 0.628, "small_dtype_efficiency": 1, "attention_efficiency": 0.364, "memory_efficiency": 0.426, "kernel_seconds": 2.07e-05, "nvlink_efficiency": 0.695, "network_efficiency": 0.75, "hidden_share": 0.722,
    },
    ("megatron-bridge", "h100"): {
        "matmul_efficiency": 0.78, "small_dtype_efficiency": 0.991, "attention_efficiency": 0.464, "memory_efficiency": 0.629, "kernel_seconds": 4.79e-05, "nvlink_efficiency": 0.757, "network_efficiency": 0.867, "hidden_share": 0.593,
    },
    ("megatron-bridge", "b300"): {
        "matmul_efficiency": 0.677, "small_dtype_efficiency": 0.916, "attention_efficiency": 0.462, "memory_efficiency": 0.532, "kernel_seconds": 2.96e-05, "nvlink_efficiency": 0.727, "network_efficiency": 0.75, "hidden_share": 0.6,
    },
    ("megatron-bridge", "b200"): {
        "matmul_efficiency": 0.727, "small_dtype_efficiency": 0.953, "attention_efficiency": 0.469, "memory_efficiency": 0.409, "kernel_seconds": 2.43e-05, "nvlink_efficiency": 0.646, "network_efficiency": 0.75, "hidden_share": 0.607,
    },
    ("megatron-simumax", "b200"): {
        "matmul_efficiency": 0.476, "attention_efficiency": 0.457, "memory_efficiency": 0.306, "kernel_seconds": 7.42e-05, "nvlink_efficiency": 0.599, "network_efficiency": 0.75, "hidden_share": 0.241,
    },
    ("automodel", "h100"): {
        "matmul_efficiency": 0.696, "attention_efficiency": 0.394, "memory_efficiency": 0.567, "kernel_seconds": 2.98e-05, "nvlink_efficiency": 0.726, "network_efficiency": 0.75, "hidden_share": 0.604,
    },
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
    return dataclasses.replace(from_sheet(stack, gpu), **FITTED.get((stack.name, gpu), {}))
