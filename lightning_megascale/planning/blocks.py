"""Seconds of one block, of the embedding and of the head on one rank, for a microbatch. Arrays (U,) as in ``cuts``."""

from __future__ import annotations

import dataclasses

import numpy as np

from lightning_megascale.planning.candidates import CHECKPOINTING
from lightning_megascale.planning.cuts import Cost, Cut, Machine
from lightning_megascale.planning.exchanges import context_seconds, expert_seconds, tensor_seconds
from lightning_megascale.planning.kernels import traffic_seconds
from lightning_megascale.planning.operators import between, core_seconds, launches, product, products
from lightning_megascale.planning.shape import LayerKind

# How sharply a device's and a host's time are joined where they are alike: chosen on vTrain's fitted rows among 2, 3, 4 and 8.
HOST_POWER = 4


def block_cost(machine: Machine, kind: LayerKind, cut: Cut) -> Cost:
    """Of one block."""
    matmuls, half = products(machine, kind, cut)
    core = np.zeros((2, len(cut.tp)))
    context = np.zeros((2, len(cut.tp)))
    for each in kind.cores:
        seconds = core_seconds(machine, each, cut)
        core += seconds
        context += context_seconds(machine, each, cut, seconds)
    moved = between(machine, kind, cut)
    tensor = tensor_seconds(machine, kind, cut, matmuls)
    expert = expert_seconds(machine, kind, cut)
    host = launches(machine, kind) * machine.stack.kernel_seconds
    forward = matmuls[0] + core[0] + moved[0]
    forward = forward + _waits(forward + tensor[0] + context[0] + expert, host)
    backward = matmuls[1] + core[1] + moved[1]
    backward = backward + _waits(backward + matmuls[2] + tensor[1] + context[1] + expert, 2 * host)
    selective = {"core": core[0], "elementwise": moved[0], "half": moved[0] + half}[machine.stack.selective]
    full = cut.checkpointing == CHECKPOINTING.index("full")
    recompute = np.select([full, cut.checkpointing == CHECKPOINTING.index("selective")], [forward, selective], 0.0)
    again = np.where(full, 1.0, 0.0)
    # torchtitan's policy keeps what reduce-scatters give and runs all-gathers again: half of a forward's collectives.
    halved = (cut.checkpointing == CHECKPOINTING.index("selective")) & cut.sequence_parallel & (machine.stack.selective == "half")
    return Cost(
        forward, backward, matmuls[2], recompute,
        tensor[0], tensor[1] + np.where(halved, 0.5, again) * tensor[0],
        context[0], context[1] + again * context[0],
        expert, expert * (1 + again * (machine.stack.selective != "elementwise")),  # this package keeps what came
    )  # fmt: skip


def end_costs(machine: Machine, cut: Cut) -> tuple[Cost, Cost]:
    """Of the embedding, and of what follows the last block with the loss."""
    model, zero = machine.workload.model, np.zeros(len(cut.tp))
    tokens = machine.tokens(cut, "tokens")
    row = tokens * model.hidden_size
    element = machine.stack.precision.compute_bytes
    whole = row * element
    scatter = np.where(cut.sequence_parallel, machine.links.ring_seconds(whole, cut.tp, cut.tp_stride), 0.0)
    reduce = machine.links.all_reduce_seconds(whole, cut.tp, cut.tp_stride)
    first = dataclasses.replace(
        Cost.nothing(len(zero)),
        forward=traffic_seconds(machine.rates, row * 2 * element),
        backward_weights=traffic_seconds(machine.rates, row * 4 * element),
        tensor_forward=np.where(cut.sequence_parallel, scatter, reduce),
        tensor_backward=scatter,
    )
    forward, inputs, weights = zero, zero, zero
    for matmul in model.head:
        sizes = tokens, matmul.inputs, np.ceil(matmul.outputs / cut.tp)
        one, two, three = product(machine, *sizes, plain=True)
        forward, inputs, weights = forward + one, inputs + two, weights + three
    logits = tokens * model.vocab_size / (1 if machine.stack.whole_logits else cut.tp)
    gathered = machine.links.ring_seconds(logits * element, cut.tp, cut.tp_stride) if machine.stack.whole_logits else zero
    # Cross-entropy, of 2-byte numbers: fused, it reads logits and writes their gradient (4; 4). Else logits become float32 (6), log-softmax
    # reads them twice and writes (12), and the backward writes one gradient, reads and writes another (16) and makes it small (6). Wider
    # numbers stay as they are.
    exact, cast = max(4, element), element + 4 if element < 4 else 0
    loss = (2 * element, 2 * element) if machine.stack.fused_loss else (cast + 3 * exact, 4 * exact + cast)
    return first, dataclasses.replace(
        Cost.nothing(len(zero)),
        forward=forward + traffic_seconds(machine.rates, logits * loss[0] + row * 2 * element),
        backward_inputs=inputs + traffic_seconds(machine.rates, logits * loss[1] + row * 3 * element),
        backward_weights=weights,
        tensor_forward=scatter + gathered,
        tensor_backward=np.where(cut.sequence_parallel, scatter, reduce),
    )


def _waits(device: np.ndarray, host: float) -> np.ndarray:
    """Seconds that the device waits for the host, which launches kernels in as long as ``host``, while they take as long as ``device``.

    A host that is about as slow as the device is ahead of it in long kernels and behind in short ones: so the longer of both is the limit,
    and where they are alike it takes longer than either. Assumed; seen on vTrain's fitted rows.
    """
    return (device**HOST_POWER + host**HOST_POWER) ** (1 / HOST_POWER) - device
