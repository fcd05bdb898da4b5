"""Bytes that a block keeps between its forward and its backward, and that its backward needs beside them.

Columns are float64 (P,), for one microbatch of one rank. Letters: T tokens of a rank before tensor parallelism, D model, N and G query and
key/value heads, F feed-forward, e bytes of an activation.

Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.1 (what a block keeps, equation
1: 34 s b h + 5 a s^2 b), 4.2 (divided by tensor and sequence parallelism, equations 2 to 4) and 5 (recomputation); Dao et al. 2022,
"FlashAttention", section 3.1 (outputs and log-sum-exp in place of scores). The kinds of this package are counted on real ranks in
tests/benchmarks/activation_bytes.py. A gathered input that is not gathered again: torch.distributed.tensor.parallel, counted there too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_megascale.planning.candidates import CHECKPOINTING, METHODS, Candidates
from lightning_megascale.planning.shape import AttentionCore, LayerKind, Matmul, Stream
from lightning_megascale.planning.stack import Stack
from lightning_megascale.planning.workload import Workload


@dataclass(frozen=True)
class Block:
    """Bytes of one block and microbatch, float64 (P,).

    Args:
        kept: between forward and backward.
        working: at work beside what is kept: what is computed again, gradients of activations, gathered inputs.
        buffers: what travels: rows to experts, keys and values to other context-parallel ranks.
    """

    kept: np.ndarray
    working: np.ndarray
    buffers: np.ndarray


class Activations:
    """What blocks of one workload keep under many plans.

    Args:
        workload, stack, plans: as ``memory`` takes them.
    """

    def __init__(self, workload: Workload, stack: Stack, plans: Candidates) -> None:
        self.stack, self.plans, self.hidden = stack, plans, workload.model.hidden_size
        self.element = float(stack.precision.compute_bytes)
        self.lengths = {stream: sum(documents) for stream, documents in workload.documents.items()}
        rows = plans.microbatch_size / plans.cp
        self.tokens_of = {stream: rows * length for stream, length in self.lengths.items()}
        self.part = np.where(plans.sequence_parallel, 1.0 / plans.tp, 1.0)  # of the sequence, between attention and MLP
        self.gathered = self.part if stack.regather else np.ones(len(plans))  # of the input of projections, as it is kept

    @property
    def tokens(self) -> np.ndarray:
        """T of the decoder."""
        return self.tokens_of["tokens"]

    def hidden_bytes(self) -> np.ndarray:
        """Of the hidden state between two blocks."""
        return self.tokens * self.hidden * self.element * self.part

    def block(self, kind: LayerKind) -> Block:
        """Of a block of this kind."""
        mode = self.plans.checkpointing
        full, selective = mode == CHECKPOINTING.index("full"), mode == CHECKPOINTING.index("selective")
        everything, arrived = self._everything(kind), self._arrived(kind)
        kept = np.select([full, selective], [self.hidden_bytes() + arrived, self._selective(kind, everything)], everything)
        gradients = self._gradients(kind)
        return Block(kept, np.maximum(everything - kept, 0.0) + gradients, self._buffers(kind, gradients))

    # ---- nothing recomputed ----

    def _everything(self, kind: LayerKind) -> np.ndarray:
        total = np.zeros(len(self.plans))
        norms = kind.vectors // max(1, self.hidden)  # a layer norm with a bias counts twice, and keeps two statistics
        for core in kind.cores:
            total = total + self._entry(core.queries) + self._attention(kind, core)
        for part, stream in _feed_forwards(kind):
            total = total + self._entry(stream) + self._feed_forward(kind, part, stream)
        if kind_has_experts(kind):
            total = total + self._entry("tokens") + self._mixture(kind)
        return total + norms * 4 * self.tokens * self.part

    def _entry(self, stream: Stream) -> np.ndarray:
        """A norm's input and output (the latter is the input of projections), and the mask of the dropout behind."""
        row = self.tokens_of[stream] * self.hidden
        return row * (self.element * (self.part + self.gathered) + (self.part if self.stack.dropout else 0.0))

    def _attention(self, kind: LayerKind, core: AttentionCore) -> np.ndarray:
        """Queries, keys, values, outputs and what stands for the scores; latents; heads before their norms."""
        queries, keys = self.tokens_of[core.queries], self.tokens_of[core.keys]
        wide = queries * core.heads * (core.query_dim + core.value_dim) + keys * core.kv_heads * (core.query_dim + core.value_dim)
        if _head_norms(kind, core, self.hidden):
            wide = wide + queries * core.heads * core.query_dim + keys * core.kv_heads * core.query_dim
        scores = self._scores(core) if not self.stack.flash else 4 * queries * core.heads
        return (wide * self.element + scores) / self.plans.tp + self._latents(kind)

    def _scores(self, core: AttentionCore) -> np.ndarray:
        """Probabilities; with dropout its mask and what it leaves too."""
        pairs = self.tokens_of[core.queries] * self.lengths[core.keys] * core.heads
        return pairs * (2 * self.element + 1 if self.stack.dropout else self.element)

    def _latents(self, kind: LayerKind) -> np.ndarray:
        """Both latents before and after their norm, whole on every tensor-parallel rank."""
        down = [matmul for matmul in kind.matmuls if matmul.name.endswith(("q_a_proj", "kv_a_proj"))]
        if not down:
            return np.zeros(len(self.plans))
        width = sum(2 * matmul.outputs for matmul in down)
        return self.tokens * self.element * width * self.part

    def _feed_forward(self, kind: LayerKind, part: str, stream: Stream) -> np.ndarray:
        width, gated = _width(kind, part)
        tensors = self.stack.gated_kept if gated else 2
        return tensors * self.tokens_of[stream] * width * self.element / self.plans.tp

    def _mixture(self, kind: LayerKind) -> np.ndarray:
        """The router's scores in float32, and its input where that is too; a row for each expert of a token, and what those keep."""
        router = 4 * self.tokens * self.part * (self.hidden * self.stack.router_float32 + 2 * _experts(kind).copies)
        rows = self._expert_rows(kind)
        inner = self.stack.expert_kept * rows * _experts(kind).outputs / 2 * self.element
        shared = self._feed_forward(kind, "shared", "tokens") if any(matmul.name == "shared.up_proj" for matmul in kind.matmuls) else 0.0
        return router + rows * self.hidden * self.element + inner + shared

    def _expert_rows(self, kind: LayerKind) -> np.ndarray:
        """Rows that this rank's experts compute: tokens of all ranks that share the experts, dealt to them."""
        return self.tokens * _experts(kind).per_token / self.plans.tp * self.stack.expert_imbalance

    # ---- recomputation ----

    def _arrived(self, kind: LayerKind) -> np.ndarray:
        """What came from experts of other ranks, which no recomputation of this package sends again; none of other software."""
        if not kind_has_experts(kind) or self.stack.selective != "elementwise":
            return np.zeros(len(self.plans))
        there = self._expert_rows(kind) * self.hidden * self.element
        back = self.tokens * self.part * self.hidden * self.element
        return np.where(self.plans.ep > 1, there + back, 0.0)

    def _selective(self, kind: LayerKind, everything: np.ndarray) -> np.ndarray:
        if self.stack.selective == "core":
            scores = sum((self._scores(core) / self.plans.tp for core in kind.cores), np.zeros(len(self.plans)))
            return everything if self.stack.flash else everything - scores
        half = self.stack.selective == "half"
        row = self.hidden_bytes()
        total = row + self._arrived(kind)
        for core in kind.cores:
            queries, keys = self.tokens_of[core.queries], self.tokens_of[core.keys]
            projected = queries * core.heads * core.query_dim + keys * core.kv_heads * (
                core.value_dim if half else core.query_dim + core.value_dim
            )
            core_out = queries * core.heads * core.value_dim
            total = total + ((projected + core_out) * self.element + 4 * queries * core.heads) / self.plans.tp + (0.0 if half else row)
            total = total + self._latents(kind)
        for part, stream in _feed_forwards(kind):
            width, gated = _width(kind, part)
            tensors = 1 if half or not gated else 2
            total = total + tensors * self.tokens_of[stream] * width * self.element / self.plans.tp
            total = total + (0.0 if half and self.stack.fused else row)  # a compiler keeps no output that no backward reads
        if not self.stack.regather:  # outputs of row-wise products are whole partial sums, kept beside the sums
            whole = self.tokens * self.hidden * self.element
            total = total + np.where(self.plans.tp > 1, (int(not self.stack.fused) if half else 2) * whole, 0.0)
        return total

    # ---- at work ----

    def _gradients(self, kind: LayerKind) -> np.ndarray:
        """Gradients of activations where a feed-forward's backward needs most, less what it has used up by then, and the residual's.

        That is at its last product (the output's gradient, gathered, and its input's), at the activation (gradients of what went in), or
        at its first products (those, the input gathered again, and its gradient). Without flash, scores and probabilities count as well.
        """
        zero = np.zeros(len(self.plans))
        row = self.tokens * self.hidden * self.element
        gathered, again = np.where(self.plans.sequence_parallel, row, 0.0), np.where(self.part == self.gathered, row * (self.part < 1), 0.0)
        most = zero
        for width, kept, gradients in self._inner(kind):
            wide = self.tokens * width * self.element / self.plans.tp
            # gradients of the input, one for each product of it, and their sum; this package's own products add in place
            sums = np.where(self.plans.tp > 1, 1 if self.stack.regather else 2 * gradients - 1, gradients)
            last, first = wide + gathered, (gradients - kept) * wide + again + sums * row
            most = np.maximum.reduce([most, last, gradients * wide, first])
        if not self.stack.flash:
            pairs = sum((self.tokens_of[core.queries] * self.lengths[core.keys] * core.heads for core in kind.cores), zero)
            most = np.maximum(most, 2 * self.element * pairs / self.plans.tp)
        return most + self.hidden_bytes()

    def _inner(self, kind: LayerKind) -> list[tuple[float, float, int]]:
        """(width for a token, tensors as wide that are kept, gradients of the activation's inputs) of each feed-forward."""
        found = []
        for part, _ in _feed_forwards(kind):
            width, gated = _width(kind, part)
            found.append((float(width), self.stack.gated_kept if gated else 2.0, 2 if gated else 1))
        if kind_has_experts(kind):
            experts = _experts(kind)
            found.append((experts.per_token * experts.outputs / 2 * self.stack.expert_imbalance, self.stack.expert_kept, 2))
        return found

    def _buffers(self, kind: LayerKind, gradients: np.ndarray) -> np.ndarray:
        """Rows on their way to experts, sent and received; keys and values of other ranks, as attention's method moves them.

        Attention's come when a feed-forward's gradients are gone, so only what they need beyond those counts.
        """
        plans = self.plans
        moved = np.zeros(len(plans))
        for core in kind.cores:
            head = (core.query_dim + core.value_dim) * self.element / plans.tp
            keys, queries = self.tokens_of[core.keys] * core.kv_heads * head, self.tokens_of[core.queries] * core.heads * head
            ways = [plans.method == METHODS.index("ring"), plans.method == METHODS.index("allgather")]
            # two blocks and their gradients; all blocks and their gradients; queries, keys, values and outputs, before and after
            moved = moved + np.select(ways, [4 * keys, 2 * keys * plans.cp], 2 * (queries + keys))
        total = np.where(plans.cp > 1, np.maximum(moved - gradients, 0.0), 0.0)
        if kind_has_experts(kind):
            total = total + np.where(plans.ep > 1, 2 * self._expert_rows(kind) * self.hidden * self.element, 0.0)
        return total


def kind_has_experts(kind: LayerKind) -> bool:
    """Whether a router deals its tokens."""
    return any(matmul.copies > 1 for matmul in kind.matmuls)


def _experts(kind: LayerKind) -> Matmul:
    """The first matrices of the experts: gate and up in one, 2 F wide."""
    return next(matmul for matmul in kind.matmuls if matmul.copies > 1)


def _feed_forwards(kind: LayerKind) -> list[tuple[str, Stream]]:
    """(part, stream) of each dense feed-forward; a shared one counts with the mixture."""
    return [(matmul.part, matmul.stream) for matmul in kind.matmuls if matmul.name.endswith(".up_proj") and matmul.part != "shared"]


def _width(kind: LayerKind, part: str) -> tuple[int, bool]:
    """(F, gated)."""
    names = {matmul.name: matmul for matmul in kind.matmuls}
    return names[f"{part}.up_proj"].outputs, f"{part}.gate_proj" in names


def _head_norms(kind: LayerKind, core: AttentionCore, hidden: int) -> bool:
    """Whether query and key heads have norms: by the vectors that those of the hidden state do not explain."""
    latent = any(matmul.name.endswith("kv_a_proj") for matmul in kind.matmuls)
    return not latent and kind.vectors % hidden >= 2 * core.query_dim > 0
