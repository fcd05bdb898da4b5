"""The shape of a model as data: its weight matrices and attention cores, layer by layer, with parameters and FLOPs counted from them.

Two streams of tokens exist: "tokens", which every model has, and "source", which the encoder of an encoder-decoder reads. Counts are exact
integers. FLOPs are those of matrix products, two for a multiplication and an addition, as torch.utils.flop_counter counts them; norms,
activations, softmax and rotations are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Stream = Literal["tokens", "source"]
Pairs = Literal["visible", "square"]


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a forward and a backward.

    Args:
        forward: of the forward.
        backward_inputs: of the backward, for the gradients of what came in; the whole backward of an attention core is here.
        backward_weights: of the backward, for the gradients of the weights, which a zero-bubble schedule may put off.
    """

    forward: int = 0
    backward_inputs: int = 0
    backward_weights: int = 0

    @property
    def total(self) -> int:
        """Forward and backward, nothing recomputed but what ``flash`` says."""
        return self.forward + self.backward_inputs + self.backward_weights

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.forward + other.forward,
            self.backward_inputs + other.backward_inputs,
            self.backward_weights + other.backward_weights,
        )

    def __mul__(self, times: int) -> Flops:
        return Flops(self.forward * times, self.backward_inputs * times, self.backward_weights * times)


@dataclass(frozen=True)
class Matmul:
    """A weight matrix, or ``copies`` of equal shape of which a token goes through ``per_token``.

    Args:
        name: "part.matrix", as in "attention.q_proj"; the part sorts the counts.
        inputs, outputs: features.
        bias: a vector of ``outputs`` in each copy.
        copies: experts that a router chooses from, else 1.
        per_token: of them that one token goes through.
        stream: whose tokens go through it.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    per_token: int = 1
    stream: Stream = "tokens"

    @property
    def part(self) -> str:
        """What stands before the dot of the name."""
        return self.name.partition(".")[0]

    @property
    def parameters(self) -> int:
        """Weights and biases of all copies."""
        return self.copies * self._parameters_of_one

    @property
    def active_parameters(self) -> int:
        """Weights and biases that one token goes through."""
        return self.per_token * self._parameters_of_one

    @property
    def _parameters_of_one(self) -> int:
        return self.inputs * self.outputs + self.bias * self.outputs

    def flops(self, tokens: int) -> Flops:
        """Of ``tokens`` tokens, none dropped: one product forward; backward one for the inputs and one of the same size for the weights.

        Source: Kaplan et al. 2020, "Scaling laws for neural language models", section 2.1 (2 forward, 4 backward for each weight).
        """
        each = 2 * tokens * self.per_token * self.inputs * self.outputs
        return Flops(each, each, each)


@dataclass(frozen=True)
class AttentionCore:
    """softmax(q k^T) v: two products without weights, over the pairs of a query and a key.

    Args:
        name: of the attention it belongs to.
        heads: query heads.
        kv_heads: key and value heads.
        query_dim: features of a query or key head.
        value_dim: features of a value head.
        causal: a query sees keys up to its own position.
        window: a causal query sees so many keys at most, its own among them; None: all.
        queries, keys: the streams that queries and keys come from.
    """

    name: str
    heads: int
    kv_heads: int
    query_dim: int
    value_dim: int
    causal: bool = True
    window: int | None = None
    queries: Stream = "tokens"
    keys: Stream = "tokens"

    def flops(self, documents: Mapping[Stream, tuple[int, ...]], pairs: Pairs = "visible", flash: bool = False) -> Flops:
        """Of one row that holds documents of the given lengths; each attends inside of itself.

        Args:
            documents: stream -> lengths, in tokens. Both streams of a cross-attention have as many.
            pairs: "visible" counts what a mask leaves, "square" every query with every key of its document, as torch's counter and
                Chowdhery et al. 2022 do.
            flash: the backward makes the scores again, a fifth product.

        Source: Chowdhery et al. 2022, "PaLM", appendix B (12 L H Q T for each token with "square"); Dao et al. 2022, "FlashAttention",
            algorithm 4 (five products in the backward).
        """
        seen = 0
        for queries, keys in zip(documents[self.queries], documents[self.keys], strict=True):
            seen += queries * keys if pairs == "square" or not self.causal else causal_pairs(queries, self.window)
        scores, values = 2 * seen * self.heads * self.query_dim, 2 * seen * self.heads * self.value_dim
        return Flops(scores + values, 2 * (scores + values) + (scores if flash else 0), 0)


def causal_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a query and a key it sees: the sum over i from 1 to ``length`` of min(i, window)."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


@dataclass(frozen=True)
class LayerKind:
    """A block. Blocks of one model that are equal are of one kind.

    Args:
        name: of the kind, as in "dense" or "moe".
        matmuls: its weight matrices.
        cores: its attention cores.
        vectors: parameters that are in no matrix: weights and biases of norms, attention sinks.
    """

    name: str
    matmuls: tuple[Matmul, ...]
    cores: tuple[AttentionCore, ...]
    vectors: int

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.vectors + sum(matmul.parameters for matmul in self.matmuls)

    @property
    def active_parameters(self) -> int:
        """Those that one token goes through."""
        return self.vectors + sum(matmul.active_parameters for matmul in self.matmuls)

    def flops(self, documents: Mapping[Stream, tuple[int, ...]], pairs: Pairs = "visible", flash: bool = False) -> Flops:
        """Of one row; arguments as ``AttentionCore.flops`` takes them."""
        return sum(
            (core.flops(documents, pairs, flash) for core in self.cores),
            sum((matmul.flops(sum(documents[matmul.stream])) for matmul in self.matmuls), Flops()),
        )


@dataclass(frozen=True)
class Table:
    """An embedding: rows that are looked up, without a product."""

    name: str
    rows: int
    width: int

    @property
    def parameters(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True)
class ModelShape:
    """A whole model.

    Args:
        name: for tables.
        hidden_size: D, the width of the residual stream.
        vocab_size: V.
        layers: the kind of each block, in module order; an encoder's blocks come first.
        tables: embeddings; the first is that of the tokens.
        head: matrices after the last block; the last of them makes the logits.
        vectors: norms that belong to no block, and other parameters in no matrix.
        tied: the logits use the token embedding's weight.
        longest: tokens of a row that learned positions allow; None: any length.
        expert_groups: groups of experts, one to a node, from which a token's experts are chosen; None: they may be anywhere.
    """

    name: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerKind, ...]
    tables: tuple[Table, ...]
    head: tuple[Matmul, ...]
    vectors: int
    tied: bool
    longest: int | None = None
    expert_groups: int | None = None

    @cached_property
    def kinds(self) -> dict[LayerKind, int]:
        """Each kind of block, in order, with how many blocks are of it."""
        return dict(Counter(self.layers))

    @cached_property
    def kind_numbers(self) -> tuple[int, ...]:
        """For each block the place of its kind in ``kinds``."""
        number = {kind: index for index, kind in enumerate(self.kinds)}
        return tuple(number[kind] for kind in self.layers)

    @property
    def has_source(self) -> bool:
        """An encoder reads a second stream."""
        return any(matmul.stream == "source" for kind in self.kinds for matmul in kind.matmuls)

    @property
    def embedding_parameters(self) -> int:
        """Of all tables, a tied weight included."""
        return sum(table.parameters for table in self.tables)

    @property
    def head_parameters(self) -> int:
        """Of the matrices after the last block, without a tied weight."""
        return sum(matmul.parameters for matmul in self.head) - self.tied_parameters

    @property
    def tied_parameters(self) -> int:
        """Of the weight that embedding and logits share; counted with the embedding. 0 when nothing is tied."""
        return self.head[-1].inputs * self.head[-1].outputs if self.tied else 0

    @property
    def parameters(self) -> int:
        """All, each once. Buffers are none."""
        blocks = sum(kind.parameters * count for kind, count in self.kinds.items())
        return blocks + self.embedding_parameters + self.head_parameters + self.vectors

    @property
    def active_parameters(self) -> int:
        """Those of which one token makes use: of the routed experts its own; embeddings and head are counted whole."""
        blocks = sum(kind.active_parameters * count for kind, count in self.kinds.items())
        return blocks + self.embedding_parameters + self.head_parameters + self.vectors

    def parameters_by_part(self) -> dict[str, int]:
        """Part ("attention", "mlp", "experts", "router", "norms", "embedding", "head", ...) -> parameters; the sum is ``parameters``."""
        parts: Counter[str] = Counter()
        for kind, count in self.kinds.items():
            for matmul in kind.matmuls:
                parts[matmul.part] += matmul.parameters * count
            parts["norms"] += kind.vectors * count
        parts["norms"] += self.vectors
        parts["embedding"] += self.embedding_parameters
        parts["head"] += self.head_parameters
        return dict(parts)
