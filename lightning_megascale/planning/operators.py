"""Seconds of a block's operators on one rank: products, attention cores, and the kernels between them. Arrays (U,) as in ``cuts``."""

from __future__ import annotations

import numpy as np

from lightning_megascale.planning.cuts import Cut, Machine
from lightning_megascale.planning.kernels import Number, flash_seconds, matmul_seconds, scores_seconds, traffic_seconds
from lightning_megascale.planning.shape import AttentionCore, LayerKind, Matmul

# Projections whose inputs are cut over tp; all others of attention and MLP have their outputs cut, but these, which every rank computes.
_INPUTS_CUT = ("o_proj", "down_proj")
_WHOLE = ("q_a_proj", "kv_a_proj", "weight", "gate")
# Bytes that kernels between products move for each element, counted in 2-byte numbers: a norm reads and writes (4; backward 6), a residual
# reads two and writes one (6; 6), an activation likewise by its inputs. Eager kernels, one for each operation, move this many times as
# much. Counted by hand from the kernels of a block; the factor is assumed.
EAGER_TRAFFIC = 2.0


def product(
    machine: Machine, rows: Number, inner: Number, columns: Number, groups: Number = 1, *, plain: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of a product, of its inputs' gradient and of its weights', which is added to what other microbatches left."""
    wide, grown = machine.stack.precision.compute_bytes, 2 * machine.stack.precision.accumulate_bytes
    cast = machine.stack.precision.cast_bytes if not plain and machine.rates.element_bytes < 2 else 0.0
    forward = matmul_seconds(machine.rates, rows, inner, columns, out_bytes=wide, groups=groups, plain=plain)
    inputs = matmul_seconds(machine.rates, rows, columns, inner, out_bytes=wide, groups=groups, plain=plain)
    weights = matmul_seconds(machine.rates, inner, rows, columns, out_bytes=grown, groups=groups, plain=plain)
    return (
        forward + traffic_seconds(machine.rates, cast * groups * (rows * inner + inner * columns)),
        inputs + traffic_seconds(machine.rates, cast * groups * rows * columns),
        weights,
    )


def products(machine: Machine, kind: LayerKind, cut: Cut) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of all products: forward, gradient of inputs, of weights (3, U); and of every second one's forward (U,)."""
    total, half = np.zeros((3, len(cut.tp))), np.zeros(len(cut.tp))
    for number, (matmul, outputs) in enumerate(_joined(kind.matmuls, machine.stack.joined)):
        passes = np.array(np.broadcast_arrays(*_one(machine, matmul, outputs, cut), total[0])[:3])
        total += passes
        half += passes[0] * (number % 2)
    return total, half


def _one(machine: Machine, matmul: Matmul, outputs: int, cut: Cut) -> tuple:
    tokens = machine.tokens(cut, matmul.stream)
    name = matmul.name.partition(".")[2]
    if matmul.copies > 1:
        # Whole experts lie on their owners, which share out the tokens of tp between them; as many come as go.
        local = np.maximum(matmul.copies / cut.expert_owners, 1)
        rows = tokens / cut.tp * matmul.per_token * machine.stack.expert_imbalance / local
        return product(machine, rows, matmul.inputs, outputs, local)
    if name in _WHOLE:
        return product(
            machine, np.where(cut.sequence_parallel, tokens / cut.tp, tokens), matmul.inputs, outputs, plain=matmul.part == "router"
        )
    if name in _INPUTS_CUT:
        return product(machine, tokens, matmul.inputs / cut.tp, outputs)
    return product(machine, tokens, matmul.inputs, np.ceil(outputs / cut.tp))


def core_seconds(machine: Machine, core: AttentionCore, cut: Cut) -> np.ndarray:
    """Forward and backward of an attention core, (2, U)."""
    documents = machine.workload.documents
    share = cut.microbatch_size / cut.cp / cut.tp
    if machine.stack.flash:
        flops = core.flops(documents, "visible", flash=True)
        length = sum(documents[core.queries]) / len(documents[core.queries])
        length = min(length, core.window or length)
        backward = flops.backward_inputs * share
        return np.array([
            flash_seconds(machine.rates, flops.forward * share, length),
            flash_seconds(machine.rates, backward, length, backward=True),
        ])  # fmt: skip
    queries, keys = sum(documents[core.queries]), sum(documents[core.keys])
    heads = core.heads / cut.tp * cut.microbatch_size
    return np.array(scores_seconds(machine.rates, heads * queries * keys / cut.cp, heads / cut.cp, queries, core.query_dim, core.value_dim))


def between(machine: Machine, kind: LayerKind, cut: Cut) -> np.ndarray:
    """Kernels between products, forward and backward (2, U)."""
    tokens = machine.tokens(cut, "source" if all(core.queries == "source" for core in kind.cores) else "tokens")
    hidden = machine.workload.model.hidden_size
    own = tokens * np.where(cut.sequence_parallel, 1 / cut.tp, 1.0) * hidden * (1 + len(kind.cores))
    moved = np.array([10 * own, 12 * own])
    for matmul in kind.matmuls:
        name, rows = matmul.name.partition(".")[2], tokens / cut.tp * matmul.per_token
        if name == "down_proj":
            inputs = sum(other.outputs for other in kind.matmuls if other.part == matmul.part and other is not matmul)
            wide = rows * matmul.inputs
            moved += np.array([2 * rows * inputs + 2 * wide, 4 * rows * inputs + 2 * wide])
        if name == "down_proj" and matmul.copies > 1:  # rows are sorted by expert and back, and weighed
            moved += np.array([10 * rows * hidden, 12 * rows * hidden])
        if name in ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "o_proj"):  # heads into the attention kernel's layout, and back
            copies = kind.cores[0].heads // kind.cores[0].kv_heads if machine.stack.repeats_keys and name in ("k_proj", "v_proj") else 1
            moved += 4 * rows * (matmul.inputs if name == "o_proj" else matmul.outputs * copies)
        if name in ("q_proj", "k_proj", "q_b_proj") and machine.workload.model.longest is None:  # rotation
            moved += 4 * rows * matmul.outputs
    moved *= machine.stack.precision.compute_bytes / 2
    return traffic_seconds(machine.rates, moved * (1.0 if machine.stack.fused else EAGER_TRAFFIC))


def launches(machine: Machine, kind: LayerKind) -> int:
    """Kernels of a forward: products, attention, and those between, many more when eager. Counted by hand, and rough."""
    attention = 1 if machine.stack.flash else 6
    count = len(_joined(kind.matmuls, machine.stack.joined)) + attention * len(kind.cores) + (12 if machine.stack.fused else 30)
    # A router's choice, counting, sorting, sending and unsorting.
    return count + (40 if any(matmul.copies > 1 for matmul in kind.matmuls) else 0)


def _joined(matmuls: tuple[Matmul, ...], joined: bool) -> list[tuple[Matmul, int]]:
    """Products with their columns: each alone, or those of one part and the same input as one."""
    out: list[tuple[Matmul, int]] = []
    for matmul in matmuls:
        last = out[-1][0] if out else None
        same = last and joined and (last.part, last.inputs, last.copies) == (matmul.part, matmul.inputs, matmul.copies)
        if same and last and matmul.name.partition(".")[2] not in (*_INPUTS_CUT, *_WHOLE) and last.name.partition(".")[2] not in _WHOLE:
            out[-1] = (last, out[-1][1] + matmul.outputs)
        else:
            out.append((matmul, matmul.outputs))
    return out
