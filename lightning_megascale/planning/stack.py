"""A software stack on a kind of GPU: what it keeps in memory as facts, how fast it is as at most eight constants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """Bytes of a number in each place, and the unit that multiplies.

    Args:
        name: as Lightning spells it, such as "bf16-mixed".
        matmul_dtype: key of ``Gpu.peak_tflops`` for matrix products.
        compute_bytes: of an activation, and of a parameter as it is used.
        shard_bytes: of a parameter as a rank keeps it.
        gradient_bytes: of a gradient as the optimizer reads it.
        optimizer_bytes: of the optimizer's state for a parameter; a master copy that is no shard counts here.
        gather_bytes, reduce_bytes: of a parameter and of a gradient on the wire.
        accumulate_bytes: of an unsharded gradient while microbatches add up.
    """

    name: str
    matmul_dtype: str = "bfloat16"
    compute_bytes: int = 2
    shard_bytes: int = 4
    gradient_bytes: int = 4
    optimizer_bytes: int = 8
    gather_bytes: int = 2
    reduce_bytes: int = 4
    accumulate_bytes: int = 4


@dataclass(frozen=True)
class Stack:
    """A software and how fast it runs on one kind of GPU.

    Facts of the software:

    Args:
        name: such as "megascale" or "megatron-2021".
        precision: bytes of numbers.
        flash: attention never writes its scores to memory.
        regather: under sequence parallelism the input of attention and MLP is gathered again in the backward and not kept whole.
        fused: norms, activations and residuals run as few kernels (compiled or hand-written).
        overlap_data: gradients are reduced and parameters gathered while the GPU computes.
        overlap_tensor: collectives of tensor parallelism run in pieces beside the products (asynchronous tensor parallelism).
        overlap_pipeline: sends between stages run beside computation.

    Constants, fitted or assumed (``source`` says which):

    Args:
        matmul_efficiency: of the peak that large matrix products reach.
        attention_efficiency: of the peak that attention's products reach.
        memory_efficiency: of the bandwidth of memory that element-wise kernels reach.
        kernel_seconds: that each kernel costs beside its work.
        nvlink_efficiency: of the link's rate that collectives reach inside of an NVLink domain.
        network_efficiency: of the network's rate that collectives reach between nodes.
        hidden_share: of communication that is overlapped and does hide where there is work to hide behind.
        reserve_bytes: of memory that is no tensor: context, communicators, libraries, fragments.
        source: of the constants.
    """

    name: str
    precision: Precision
    flash: bool = True
    regather: bool = True
    fused: bool = True
    overlap_data: bool = True
    overlap_tensor: bool = False
    overlap_pipeline: bool = True
    matmul_efficiency: float = 0.75
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    kernel_seconds: float = 4e-6
    nvlink_efficiency: float = 0.75
    network_efficiency: float = 0.8
    hidden_share: float = 0.9
    reserve_bytes: float = 4e9
    source: str = "assumed: a data sheet's rates and what large kernels and collectives usually reach of them"
