"""Seconds of what a block sends inside of tensor, context and expert parallelism and does not hide. Arrays (U,) as in ``cuts``."""

from __future__ import annotations

import numpy as np

from lightning_megascale.planning.candidates import METHODS
from lightning_megascale.planning.cuts import Cut, Machine
from lightning_megascale.planning.kernels import traffic_seconds
from lightning_megascale.planning.shape import AttentionCore, LayerKind

# Of tensor parallelism's collectives that run in pieces beside products; the first piece in and the last out do not, and pieces are
# slower than the whole. Assumed; torchtitan's fitted rows with and without differ by about that.
TENSOR_HIDDEN = 0.4


def tensor_seconds(machine: Machine, kind: LayerKind, cut: Cut, matmuls: np.ndarray) -> np.ndarray:
    """Exposed communication of tensor parallelism, forward and backward (2, U).

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3 (an all-reduce of attention and one of the MLP, each way); Korthikanti et
        al. 2022, section 4.2.2 (all-gather and reduce-scatter instead, and a third all-gather in the backward).
    """
    parts = {matmul.part for matmul in kind.matmuls if matmul.copies == 1} - {"router"}
    sent = np.zeros((2, len(cut.tp)))
    for part in parts:
        stream = next(matmul.stream for matmul in kind.matmuls if matmul.part == part)
        whole = machine.tokens(cut, stream) * machine.workload.model.hidden_size * machine.stack.precision.compute_bytes
        reduce, scatter = (
            machine.links.all_reduce_seconds(whole, cut.tp, cut.tp_stride),
            machine.links.ring_seconds(whole, cut.tp, cut.tp_stride),
        )
        gather = scatter
        if machine.rates.element_bytes < 2:  # what is gathered for products in a small dtype travels as parameters do
            gather = scatter * (machine.stack.precision.gather_bytes / machine.stack.precision.compute_bytes)
        sent[0] += np.where(cut.sequence_parallel, gather + scatter, reduce)
        sent[1] += np.where(cut.sequence_parallel, gather + scatter + gather * machine.stack.regather, reduce)
    if any(matmul.copies > 1 for matmul in kind.matmuls):
        sent += _experts_over_tensor(machine, cut)
    if not machine.stack.overlap_tensor:
        return sent
    return sent - np.minimum(TENSOR_HIDDEN * sent, np.array([matmuls[0], matmuls[1] + matmuls[2]]))


def _experts_over_tensor(machine: Machine, cut: Cut) -> np.ndarray:
    """What tensor-parallel ranks send of a mixture when all have the same tokens, one way; (U,). With tokens of their own, nothing.

    Source: ``parallel/tensor_experts.py`` (ranks add up what their experts gave: an all-reduce of the hidden state, of its gradient in the
        backward); ``parallel/expert.py`` (with expert parallelism each sends a part of the tokens, and all parts are gathered).
    """
    whole = machine.tokens(cut) * machine.workload.model.hidden_size * machine.stack.precision.compute_bytes
    added = machine.links.all_reduce_seconds(whole, cut.tp, cut.tp_stride)
    gathered = machine.links.ring_seconds(whole, cut.tp, cut.tp_stride)
    return np.where(cut.sequence_parallel, 0.0, np.where(cut.ep > 1, gathered, added))


def context_seconds(machine: Machine, core: AttentionCore, cut: Cut, seconds: np.ndarray) -> np.ndarray:
    """Exposed communication of a core's context parallelism, forward and backward (2, U).

    Source: Liu et al. 2023, "Ring attention with blockwise transformers", section 3 (a block's sends behind its computation);
        Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.2 (four all-to-alls); Llama Team 2024, section 3.3.2 (all-gather of keys
        and values).
    """
    element = machine.stack.precision.compute_bytes
    tokens = machine.tokens(cut, core.keys)
    heads = core.heads if machine.stack.repeats_keys else core.kv_heads
    pairs = tokens * np.ceil(heads / cut.tp) * (core.query_dim + core.value_dim) * element
    steps, back = np.maximum(cut.cp - 1, 0), 1 + 4 / element  # backward: keys and values again, and sums of their gradients in float32
    send = machine.links.send_seconds(pairs, cut.cp_stride)
    ring = np.array([steps * np.maximum(send - seconds[0] / cut.cp, 0), steps * np.maximum(back * send - seconds[1] / cut.cp, 0)])
    gather = machine.links.ring_seconds(pairs * cut.cp, cut.cp, cut.cp_stride)
    queries = machine.tokens(cut, core.queries) * core.heads / cut.tp * (core.query_dim + core.value_dim) * element
    swap = machine.links.all_to_all_seconds(queries + pairs, cut.cp, cut.cp_stride)
    # What a step of a ring finds is merged with what is there, in float32: bytes for each number of the output, counted by hand.
    merged = traffic_seconds(machine.rates, steps * machine.tokens(cut, core.queries) * core.heads / cut.tp * core.value_dim)
    ring, gather = ring + np.array([24 * merged, 36 * merged]), np.array([gather + 24 * merged, back * gather + 36 * merged])
    ways = {"ring": ring, "ulysses": np.array([swap, swap]), "allgather": gather}
    return np.select([cut.method == METHODS.index(name) for name in METHODS], [ways[name] for name in METHODS]) * (cut.cp > 1)


def expert_seconds(machine: Machine, kind: LayerKind, cut: Cut) -> np.ndarray:
    """Exposed communication of expert parallelism one way, (U,): to the experts and back."""
    routed = [matmul for matmul in kind.matmuls if matmul.copies > 1]
    if not routed:
        return np.zeros(len(cut.tp))
    choices = routed[0].per_token
    bytes_ = (
        machine.tokens(cut, "tokens")
        / cut.tp
        * choices
        * routed[0].inputs
        * machine.stack.precision.compute_bytes
        * machine.stack.expert_imbalance
    )
    if machine.stack.dispatch_hops == 2:
        return 2 * machine.links.two_hop_seconds(bytes_, choices, cut.ep, cut.tp_stride, machine.workload.model.expert_groups)
    return 2 * machine.links.all_to_all_seconds(bytes_, cut.ep, cut.tp_stride)
