"""Constants of software stacks, by kind of GPU: fitted on published runs where there are any, else assumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lightning_megascale.planning.stack import Precision, Stack

# (name of a stack, GPU's sheet) -> constants. FITTED is filled by `python -m tests.benchmarks.planner fit`.
FITTED: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("megatron-deepspeed", "a100"): {
        "matmul_efficiency": 0.794, "attention_efficiency": 0.45, "memory_efficiency": 0.642, "kernel_seconds": 3.83e-05, "nvlink_efficiency": 0.738, "network_efficiency": 0.857, "hidden_share": 0.8,
    },
    ("foundry", "h100"): {
        "matmul_efficiency": 0.752, "small_dtype_efficiency": 0.887, "attention_efficiency": 0.199, "memory_efficiency": 0.3, "kernel_seconds": 1e-05, "nvlink_efficiency": 0.728, "network_efficiency": 0.635, "hidden_share": 0.311,
    },
    ("foundry", "a100"): {
        "matmul_efficiency": 0.868, "attention_efficiency": 0.347, "memory_efficiency": 0.398, "kernel_seconds": 1e-05, "nvlink_efficiency": 0.731, "network_efficiency": 0.75, "hidden_share": 0.666,
    },
    ("foundry", "a100_40gb"): {
        "matmul_efficiency": 0.798, "attention_efficiency": 0.347, "memory_efficiency": 0.546, "kernel_seconds": 1e-05, "nvlink_efficiency": 0.72, "network_efficiency": 0.603, "hidden_share": 0.174,
    },
    ("torchtitan", "h100_96gb"): {
        "matmul_efficiency": 0.503, "small_dtype_efficiency": 0.999, "attention_efficiency": 0.267, "memory_efficiency": 0.531, "kernel_seconds": 1e-05, "nvlink_efficiency": 0.611, "network_efficiency": 0.692, "hidden_share": 0.824,
    },
    ("torchtitan", "h200"): {
        "matmul_efficiency": 0.657, "small_dtype_efficiency": 0.804, "attention_efficiency": 0.335, "memory_efficiency": 0.679, "kernel_seconds": 1e-05, "nvlink_efficiency": 0.75, "network_efficiency": 0.746, "hidden_share": 0.777,
    },
    ("megatron-2022", "a100"): {
        "matmul_efficiency": 0.794, "attention_efficiency": 0.45, "memory_efficiency": 0.745, "kernel_seconds": 1.23e-05, "nvlink_efficiency": 0.754, "network_efficiency": 0.746, "hidden_share": 0.8,
    },
    ("megatron-2021", "a100"): {
        "matmul_efficiency": 0.732, "attention_efficiency": 0.45, "memory_efficiency": 0.684, "kernel_seconds": 2.63e-05, "nvlink_efficiency": 0.877, "network_efficiency": 0.825, "hidden_share": 0.8,
    },
    ("megatron-bridge", "gb300"): {
        "matmul_efficiency": 0.831, "small_dtype_efficiency": 0.936, "attention_efficiency": 0.361, "memory_efficiency": 0.615, "kernel_seconds": 7.65e-05, "nvlink_efficiency": 0.696, "network_efficiency": 0.75, "hidden_share": 0.706,
    },
    ("megatron-bridge", "gb200"): {
        "matmul_efficiency": 0.645, "small_dtype_efficiency": 0.957, "attention_efficiency": 0.318, "memory_efficiency": 0.446, "kernel_seconds": 9.9e-06, "nvlink_efficiency": 0.708, "network_efficiency": 0.75, "hidden_share": 0.714,
    },
    ("megatron-bridge", "h100"): {
        "matmul_efficiency": 0.793, "small_dtype_efficiency": 0.909, "attention_efficiency": 0.42, "memory_efficiency": 0.715, "kernel_seconds": 7.39e-05, "nvlink_efficiency": 0.788, "network_efficiency": 0.837, "hidden_share": 0.707,
    },
    ("megatron-bridge", "b300"): {
        "matmul_efficiency": 0.695, "small_dtype_efficiency": 0.832, "attention_efficiency": 0.354, "memory_efficiency": 0.655, "kernel_seconds": 1e-05, "nvlink_efficiency": 0.725, "network_efficiency": 0.75, "hidden_share": 0.8,
    },
    ("megatron-bridge", "b200"): {
        "matmul_efficiency": 0.768, "small_dtype_efficiency": 0.891, "attention_efficiency": 0.434, "memory_efficiency": 0.399, "kernel_seconds": 3.67e-05, "nvlink_efficiency": 0.661, "network_efficiency": 0.75, "hidden_share": 0.806,
    },
    ("megatron-simumax", "b200"): {
        "matmul_efficiency": 0.481, "attention_efficiency": 0.455, "memory_efficiency": 0.3, "kernel_seconds": 6.04e-05, "nvlink_efficiency": 0.459, "network_efficiency": 0.75, "hidden_share": 0.3,
    },
    ("automodel", "h100"): {
        "matmul_efficiency": 0.676, "attention_efficiency": 0.315, "memory_efficiency": 0.662, "kernel_seconds": 1e-05, "nvlink_efficiency": 0.726, "network_efficiency": 0.75, "hidden_share": 0.796,
    },
}


def stack_for(gpu: str, name: str = "megascale", precision: Precision | None = None) -> Stack:
    """This package's stack on a GPU.

    Args:
        gpu: name of a sheet.
        name: of the stack whose constants are taken.
        precision: "bf16-mixed" by default.
    """
    return with_constants(Stack(name, precision or Precision("bf16-mixed"), whole_logits=name == "megascale"), gpu)


def with_constants(stack: Stack, gpu: str) -> Stack:
    """The same stack with the constants that were fitted for it on a GPU; unchanged where there are none."""
    found = FITTED.get((stack.name, gpu))
    return dataclasses.replace(stack, **found) if found else stack
