"""A software stack on a kind of GPU: what it keeps in memory as facts, how fast it is as at most eight constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Selective = Literal["elementwise", "core", "half"]


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
        cast_bytes: moved to bring an operand's number into a ``matmul_dtype`` of less than two bytes: read and written once, or several
            times where rows and columns have scales of their own.
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
    cast_bytes: float = 3


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
        fused_loss: cross-entropy is one kernel that writes no float32 logits.
        overlap_data: gradients are reduced and parameters gathered while the GPU computes.
        overlap_piped: the same under a pipeline; torch reduces there after the last microbatch, with nothing to hide behind.
        overlap_tensor: collectives of tensor parallelism run in pieces beside the products (asynchronous tensor parallelism).
        copies_gathered: what data-parallel ranks gather is copied from the collective's buffer into parameters (FSDP2), which FSDP1's
            views of one flat buffer spare.
        scatter_sends: a tensor-parallel rank sends its part of what every rank of its group holds, and the receivers gather it.
        overlap_pipeline: sends between stages run beside computation.
        selective: what activation_checkpointing="selective" runs again: "core", the attention core (Megatron-LM); "elementwise", all but
            products and attention (this package); "half", that and every second product (torchtitan).
        even_split: stages hold equal numbers of blocks (Megatron); else they are cut by cost, the head among it.
        joined: projections of the same input run as one product.
        whole_logits: under tensor parallelism each rank gathers the logits of the whole vocabulary for the loss.
        repeats_keys: keys and values are copied for each query head before attention, so that context parallelism sends them so too.
        dispatch_hops: 1: a token goes straight to its experts' ranks; 2: once to each node, and from there over NVLink.
        expert_imbalance: tokens of the busiest expert rank over the mean; 1 when routing is forced to be even.
        copies_weights: parameters are gathered into tensors of their own, by one rank too (FSDP2); else they are used where they are kept.
        zeroes_late: without a pipeline, gradients of the step before are there until the backward, as Lightning zeroes after the forward.
        receive_all: every microbatch of a pipeline has receive buffers of its own, and a stage's output is kept (torch); else two are in
            use, and what was sent is freed (Megatron).
        dropout: masks of dropout are kept, a byte a number.
        gated_kept: tensors as wide as the feed-forward that a gated one keeps: gate, up, activated gate and product; fused kernels
            keep fewer.
        expert_kept: the same of an expert's feed-forward.
        router_float32: a router's input is kept in float32.
        loss_chunk: tokens whose logits exist at a time; None: all of a microbatch.
        logit_bytes: of a 2-byte logit where the loss needs most: in the compute type, in float32, and its gradient.
        split_logit_bytes: the same where tensor-parallel ranks share the vocabulary.
        weight_gradient_bytes: of a weight's gradient before it is added to those of earlier microbatches, where nothing is sharded.

    Constants, fitted or assumed (``source`` says which):

    Args:
        matmul_efficiency: of the peak that large matrix products reach, in bfloat16.
        small_dtype_efficiency: times that in float8 and smaller.
        attention_efficiency: of the peak that attention's products reach.
        memory_efficiency: of the bandwidth of memory that element-wise kernels reach.
        kernel_seconds: in which the host launches a kernel; a device that is done sooner waits.
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
    fused_loss: bool = False
    overlap_data: bool = True
    overlap_piped: bool = False
    overlap_tensor: bool = False
    copies_gathered: bool = True
    scatter_sends: bool = False
    overlap_pipeline: bool = True
    selective: Selective = "elementwise"
    even_split: bool = False
    joined: bool = False
    whole_logits: bool = False
    repeats_keys: bool = False
    dispatch_hops: int = 1
    expert_imbalance: float = 1.0
    copies_weights: bool = True
    zeroes_late: bool = True
    receive_all: bool = True
    dropout: bool = False
    gated_kept: float = 4
    expert_kept: float = 2
    router_float32: bool = True
    loss_chunk: int | None = 1024
    logit_bytes: float = 6
    split_logit_bytes: float = 6
    weight_gradient_bytes: float = 2
    matmul_efficiency: float = 0.7
    small_dtype_efficiency: float = 0.9
    attention_efficiency: float = 0.35
    memory_efficiency: float = 0.55
    kernel_seconds: float = 3e-5
    nvlink_efficiency: float = 0.7
    network_efficiency: float = 0.75
    hidden_share: float = 0.6
    reserve_bytes: float = 4e9
    source: str = "assumed: a data sheet's rates and what large kernels and collectives usually reach of them"
