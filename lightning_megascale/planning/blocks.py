"""Seconds of one block, of the embedding and of the head on one rank, for a microbatch: what is computed and what is sent.

U is the number of different ways to cut a block that the plans of a search have between them; every figure is float64 (U,).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_megascale.planning.candidates import CHECKPOINTING, METHODS, Candidates
from lightning_megascale.planning.collectives import Links
from lightning_megascale.planning.kernels import Rates, flash_seconds, matmul_seconds, scores_seconds, traffic_seconds
from lightning_megascale.planning.shape import AttentionCore, LayerKind, Matmul
from lightning_megascale.planning.stack import Stack
from lightning_megascale.planning.workload import Workload

# Projections whose inputs are cut over tp; all others of attention and MLP have their outputs cut, but these, which every rank computes.
_INPUTS_CUT = ("o_proj", "down_proj")
_WHOLE = ("q_a_proj", "kv_a_proj", "weight", "gate")
# Bytes that kernels between products move for each element, in 2-byte numbers: a norm reads and writes (4; backward 6), a residual reads
# two and writes one (6; 6), an activation likewise by its inputs. Eager kernels, one for each operation, move this many times as much.
# Counted by hand from the kernels of a block; the factor is assumed.
EAGER_TRAFFIC = 2.0
HOST_POWER = 4
# Of tensor parallelism's collectives that run in pieces beside products; the first piece in and the last out do not, and pieces are
# slower than the whole. Assumed; torchtitan's fitted rows with and without differ by about that.
TENSOR_HIDDEN = 0.4


@dataclass(frozen=True)
class Cut:
    """How a block lies on ranks, and of what a microbatch consists there. Columns (U,) as in ``Candidates``."""

    tp: np.ndarray
    cp: np.ndarray
    ep: np.ndarray
    microbatch_size: np.ndarray
    checkpointing: np.ndarray
    sequence_parallel: np.ndarray
    method: np.ndarray
    tp_stride: np.ndarray
    cp_stride: np.ndarray

    @classmethod
    def of(cls, plans: Candidates, strides: Mapping[str, np.ndarray]) -> tuple[Cut, np.ndarray]:
        """The different cuts, and which of them each plan has, int (P,).

        Args:
            plans: all of them.
            strides: axis -> ranks from one coordinate to the next, int (P,).
        """
        columns = {field.name: getattr(plans, field.name, None) for field in dataclasses.fields(cls)}
        columns |= {"tp_stride": strides["tp"], "cp_stride": strides["cp"]}
        rows, places = distinct(*columns.values())  # type: ignore[arg-type]
        return cls(**dict(zip(columns, rows, strict=True))), places


@dataclass(frozen=True)
class Cost:
    """Seconds of a part of a model, forward and backward of one microbatch. All (U,).

    Args:
        forward: computing.
        backward_inputs: computing, up to what the stage before needs.
        backward_weights: computing, which a zero-bubble schedule may put off.
        recompute: of the forward again in the backward.
        tensor_forward, tensor_backward: exposed communication of tensor parallelism, a repeated forward's in the backward.
        context_forward, context_backward: of context parallelism.
        expert_forward, expert_backward: of expert parallelism.
    """

    forward: np.ndarray
    backward_inputs: np.ndarray
    backward_weights: np.ndarray
    recompute: np.ndarray
    tensor_forward: np.ndarray
    tensor_backward: np.ndarray
    context_forward: np.ndarray
    context_backward: np.ndarray
    expert_forward: np.ndarray
    expert_backward: np.ndarray

    def table(self) -> np.ndarray:
        """The fields in order, (fields, U)."""
        return np.array([getattr(self, field.name) for field in dataclasses.fields(self)])


@dataclass(frozen=True)
class Machine:
    """What costs are computed from: a workload, the rates of a GPU, links and the software's facts."""

    workload: Workload
    rates: Rates
    links: Links
    stack: Stack

    def block(self, kind: LayerKind, cut: Cut) -> Cost:
        """Of one block."""
        zero = np.zeros(len(cut.tp))
        matmuls, half = self._matmuls(kind, cut)
        core = np.zeros((2, len(cut.tp)))
        context = np.zeros((2, len(cut.tp)))
        for each in kind.cores:
            seconds = self._core(each, cut)
            core += seconds
            context += self._context(each, cut, seconds)
        between = self._between(kind, cut)
        tensor = self._tensor(kind, cut, matmuls)
        expert = self._expert(kind, cut)
        host = self._launches(kind) * self.stack.kernel_seconds
        forward = matmuls[0] + core[0] + between[0]
        forward = forward + _waits(forward + tensor[0] + context[0] + expert, host)
        backward = matmuls[1] + core[1] + between[1]
        backward = backward + _waits(backward + matmuls[2] + tensor[1] + context[1] + expert, 2 * host)
        selective = {"core": core[0], "elementwise": between[0], "half": between[0] + half}[self.stack.selective]
        full = cut.checkpointing == CHECKPOINTING.index("full")
        recompute = np.select([full, cut.checkpointing == CHECKPOINTING.index("selective")], [forward, selective], 0.0)
        again = np.where(full, 1.0, 0.0)
        # torchtitan's policy keeps what reduce-scatters give and runs all-gathers again: half of a forward's collectives.
        halved = (cut.checkpointing == CHECKPOINTING.index("selective")) & cut.sequence_parallel & (self.stack.selective == "half")
        return Cost(
            forward, backward, matmuls[2], recompute,
            tensor[0], tensor[1] + np.where(halved, 0.5, again) * tensor[0],
            context[0], context[1] + again * context[0],
            expert, expert * (1 + again),
        )  # fmt: skip

    def ends(self, cut: Cut) -> tuple[Cost, Cost]:
        """Of the embedding, and of what follows the last block with the loss."""
        model, zero = self.workload.model, np.zeros(len(cut.tp))
        tokens = self._tokens(cut, "tokens")
        row = tokens * model.hidden_size
        whole = row * self.stack.precision.compute_bytes
        reduce = self.links.all_reduce_seconds(whole, cut.tp, cut.tp_stride)
        first = dataclasses.replace(_nothing(zero), forward=traffic_seconds(self.rates, row * 4), backward_weights=traffic_seconds(self.rates, row * 8),
                                    tensor_forward=np.where(cut.sequence_parallel, reduce / 2, reduce))  # fmt: skip
        forward, inputs, weights = zero, zero, zero
        for matmul in model.head:
            sizes = tokens, matmul.inputs, np.ceil(matmul.outputs / cut.tp)
            one, two, three = self._passes(*sizes, plain=True)
            forward, inputs, weights = forward + one, inputs + two, weights + three
        logits = tokens * model.vocab_size / (1 if self.stack.whole_logits else cut.tp)
        gathered = self.links.ring_seconds(logits * self.stack.precision.compute_bytes, cut.tp, cut.tp_stride) if self.stack.whole_logits else zero
        # Cross-entropy: fused, it reads logits and writes their gradient (4; 4). Else logits become float32 (6), log-softmax reads them twice
        # and writes (12), and the backward writes one gradient, reads and writes another (16) and makes it small (6).
        loss = (4, 4) if self.stack.fused_loss else (18, 22)
        return first, dataclasses.replace(
            _nothing(zero),
            forward=forward + traffic_seconds(self.rates, logits * loss[0] + row * 4),
            backward_inputs=inputs + traffic_seconds(self.rates, logits * loss[1] + row * 6),
            backward_weights=weights,
            tensor_forward=np.where(cut.sequence_parallel, self.links.ring_seconds(whole, cut.tp, cut.tp_stride), 0.0) + gathered,
            tensor_backward=np.where(cut.sequence_parallel, self.links.ring_seconds(whole, cut.tp, cut.tp_stride), reduce),
        )

    def _tokens(self, cut: Cut, stream: str) -> np.ndarray:
        length = self.workload.sequence_length if stream == "tokens" else self.workload.source_length or 0
        return cut.microbatch_size * length / cut.cp

    def _passes(self, rows: np.ndarray, inner: np.ndarray, columns: np.ndarray, groups: np.ndarray | int = 1, *, plain: bool = False) -> tuple:
        """Seconds of a product, of its inputs' gradient and of its weights', which is added to what other microbatches left."""
        wide, grown = self.stack.precision.compute_bytes, 2 * self.stack.precision.accumulate_bytes
        cast = self.stack.precision.cast_bytes if not plain and self.rates.element_bytes < 2 else 0.0
        forward = matmul_seconds(self.rates, rows, inner, columns, out_bytes=wide, groups=groups, plain=plain)
        inputs = matmul_seconds(self.rates, rows, columns, inner, out_bytes=wide, groups=groups, plain=plain)
        weights = matmul_seconds(self.rates, inner, rows, columns, out_bytes=grown, groups=groups, plain=plain)
        return (
            forward + traffic_seconds(self.rates, cast * groups * (rows * inner + inner * columns)),
            inputs + traffic_seconds(self.rates, cast * groups * rows * columns),
            weights,
        )

    def _matmuls(self, kind: LayerKind, cut: Cut) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of all products: forward, gradient of inputs, of weights (3, U); and of every second one's forward (U,)."""
        total, half = np.zeros((3, len(cut.tp))), np.zeros(len(cut.tp))
        for number, (matmul, outputs) in enumerate(_joined(kind.matmuls, self.stack.joined)):
            passes = np.array(np.broadcast_arrays(*self._one(matmul, outputs, cut), total[0])[:3])
            total += passes
            half += passes[0] * (number % 2)
        return total, half

    def _one(self, matmul: Matmul, outputs: int, cut: Cut) -> tuple:
        tokens = self._tokens(cut, matmul.stream)
        name = matmul.name.partition(".")[2]
        if matmul.copies > 1:
            # Experts lie whole on the ranks of ep, which share out the tokens of tp; as many come as go.
            local = np.maximum(matmul.copies / cut.ep, 1)
            rows = tokens / cut.tp * matmul.per_token * self.stack.expert_imbalance / local
            return self._passes(rows, matmul.inputs, outputs, local)
        if name in _WHOLE:
            return self._passes(np.where(cut.sequence_parallel, tokens / cut.tp, tokens), matmul.inputs, outputs, plain=matmul.part == "router")
        if name in _INPUTS_CUT:
            return self._passes(tokens, matmul.inputs / cut.tp, outputs)
        return self._passes(tokens, matmul.inputs, np.ceil(outputs / cut.tp))

    def _core(self, core: AttentionCore, cut: Cut) -> np.ndarray:
        """Forward and backward of an attention core, (2, U)."""
        documents = self.workload.documents
        share = cut.microbatch_size / cut.cp / cut.tp
        if self.stack.flash:
            flops = core.flops(documents, "visible", flash=True)
            length = sum(documents[core.queries]) / len(documents[core.queries])
            length = min(length, core.window or length)
            backward = flops.backward_inputs * share
            return np.array([
                flash_seconds(self.rates, flops.forward * share, length),
                flash_seconds(self.rates, backward, length, backward=True),
            ])  # fmt: skip
        queries, keys = sum(documents[core.queries]), sum(documents[core.keys])
        heads = core.heads / cut.tp * cut.microbatch_size
        return np.array(scores_seconds(self.rates, heads * queries * keys / cut.cp, heads / cut.cp, queries, core.query_dim, core.value_dim))

    def _context(self, core: AttentionCore, cut: Cut, seconds: np.ndarray) -> np.ndarray:
        """Exposed communication of a core's context parallelism, forward and backward (2, U).

        Source: Liu et al. 2023, "Ring attention with blockwise transformers", section 3 (a block's sends behind its computation);
            Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.2 (four all-to-alls); Llama Team 2024, section 3.3.2 (all-gather of keys
            and values).
        """
        element = self.stack.precision.compute_bytes
        tokens = self._tokens(cut, core.keys)
        pairs = tokens * np.ceil(core.kv_heads / cut.tp) * (core.query_dim + core.value_dim) * element
        steps = np.maximum(cut.cp - 1, 0)
        send = self.links.send_seconds(pairs, cut.cp_stride)
        ring = np.array([steps * np.maximum(send - seconds[0] / cut.cp, 0), steps * np.maximum(2 * send - seconds[1] / cut.cp, 0)])
        gather = self.links.ring_seconds(pairs * cut.cp, cut.cp, cut.cp_stride)
        queries = self._tokens(cut, core.queries) * core.heads / cut.tp * (core.query_dim + core.value_dim) * element
        swap = self.links.all_to_all_seconds(queries + pairs, cut.cp, cut.cp_stride)
        # What a step of a ring finds is merged with what is there, in float32: bytes for each number of the output, counted by hand.
        merged = traffic_seconds(self.rates, steps * self._tokens(cut, core.queries) * core.heads / cut.tp * core.value_dim)
        ring, gather = ring + np.array([24 * merged, 36 * merged]), np.array([gather + 24 * merged, 2 * gather + 36 * merged])
        ways = {"ring": ring, "ulysses": np.array([swap, swap]), "allgather": gather}
        return np.select([cut.method == METHODS.index(name) for name in METHODS], [ways[name] for name in METHODS]) * (cut.cp > 1)

    def _tensor(self, kind: LayerKind, cut: Cut, matmuls: np.ndarray) -> np.ndarray:
        """Exposed communication of tensor parallelism, forward and backward (2, U).

        Source: Shoeybi et al. 2019, "Megatron-LM", section 3 (an all-reduce of attention and one of the MLP, each way); Korthikanti et
            al. 2022, section 4.2.2 (all-gather and reduce-scatter instead, and a third all-gather in the backward).
        """
        parts = {matmul.part for matmul in kind.matmuls if matmul.copies == 1} - {"router"}
        sent = np.zeros((2, len(cut.tp)))
        for part in parts:
            stream = next(matmul.stream for matmul in kind.matmuls if matmul.part == part)
            whole = self._tokens(cut, stream) * self.workload.model.hidden_size * self.stack.precision.compute_bytes
            reduce, scatter = self.links.all_reduce_seconds(whole, cut.tp, cut.tp_stride), self.links.ring_seconds(whole, cut.tp, cut.tp_stride)
            gather = scatter
            if self.rates.element_bytes < 2:  # what is gathered for products in a small dtype travels as parameters do
                gather = scatter * (self.stack.precision.gather_bytes / self.stack.precision.compute_bytes)
            sent[0] += np.where(cut.sequence_parallel, gather + scatter, reduce)
            sent[1] += np.where(cut.sequence_parallel, gather + scatter + gather * self.stack.regather, reduce)
        if not self.stack.overlap_tensor:
            return sent
        return sent - np.minimum(TENSOR_HIDDEN * sent, np.array([matmuls[0], matmuls[1] + matmuls[2]]))

    def _expert(self, kind: LayerKind, cut: Cut) -> np.ndarray:
        """Exposed communication of expert parallelism one way, (U,): to the experts and back."""
        routed = [matmul for matmul in kind.matmuls if matmul.copies > 1]
        if not routed:
            return np.zeros(len(cut.tp))
        choices = routed[0].per_token
        bytes_ = self._tokens(cut, "tokens") / cut.tp * choices * routed[0].inputs * self.stack.precision.compute_bytes * self.stack.expert_imbalance
        if self.stack.dispatch_hops == 2:
            return 2 * self.links.two_hop_seconds(bytes_, choices, cut.ep, cut.tp_stride)
        return 2 * self.links.all_to_all_seconds(bytes_, cut.ep, cut.tp_stride)

    def _between(self, kind: LayerKind, cut: Cut) -> np.ndarray:
        """Kernels between products, forward and backward (2, U)."""
        tokens = self._tokens(cut, "source" if all(core.queries == "source" for core in kind.cores) else "tokens")
        hidden = self.workload.model.hidden_size
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
                moved += 4 * rows * (matmul.inputs if name == "o_proj" else matmul.outputs)
            if name in ("q_proj", "k_proj", "q_b_proj") and self.workload.model.longest is None:  # rotation
                moved += 4 * rows * matmul.outputs
        return traffic_seconds(self.rates, moved * (1.0 if self.stack.fused else EAGER_TRAFFIC))

    def _launches(self, kind: LayerKind) -> int:
        """Kernels of a forward: products, attention, and those between, many more when eager. Counted by hand, and rough."""
        attention = 1 if self.stack.flash else 6
        count = len(_joined(kind.matmuls, self.stack.joined)) + attention * len(kind.cores) + (12 if self.stack.fused else 30)
        # A router's choice, counting, sorting, sending and unsorting.
        return count + (40 if any(matmul.copies > 1 for matmul in kind.matmuls) else 0)


def _waits(device: np.ndarray, host: float) -> np.ndarray:
    """Seconds that the device waits for the host, which launches kernels in as long as ``host``, while they take as long as ``device``.

    A host that is as slow as the device is ahead of it in long kernels and behind in short ones; so the two are joined smoothly, as the
    root of the sum of squares, of which the longer one is the limit. Assumed; seen on vTrain's fitted rows.
    """
    return (device**HOST_POWER + host**HOST_POWER) ** (1 / HOST_POWER) - device


def distinct(*columns: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """The different rows of these columns of non-negative integers, as columns, and which of them each row is."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, places = np.unique(key, return_index=True, return_inverse=True)
    return [column[first] for column in columns], places


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


def _nothing(zero: np.ndarray) -> Cost:
    return Cost(*[zero] * len(dataclasses.fields(Cost)))
