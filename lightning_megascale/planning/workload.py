"""A training workload: a model, the length of its rows and the global batch, and the FLOPs of a row, a step and a token."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megascale.planning.shape import Flops, LayerKind, ModelShape, Pairs, Stream


@dataclass(frozen=True)
class Workload:
    """What one optimizer step computes, whatever plan runs it.

    Args:
        model: its shape.
        sequence_length: tokens of a row.
        global_batch_size: rows of one optimizer step over all ranks.
        document_lengths: tokens of each document of a representative packed row, whose attention stays inside of documents; they sum to
            ``sequence_length``. None: a row is one document.
        source_length: tokens that the encoder of an encoder-decoder reads for a row.

    Raises:
        ValueError: listing every rule that is broken.
    """

    model: ModelShape
    sequence_length: int
    global_batch_size: int
    document_lengths: tuple[int, ...] | None = None
    source_length: int | None = None

    def __post_init__(self) -> None:
        wrong = []
        for name in ("sequence_length", "global_batch_size", "source_length"):
            value = getattr(self, name)
            if not (_is_count(value) or (name == "source_length" and value is None)):
                wrong.append(f"{name}={value!r}: must be an integer of at least 1")
        if not wrong:
            wrong = self._wrong_rows()
        if wrong:
            raise ValueError(f"workload of {self.model.name}:\n  " + "\n  ".join(wrong))

    def _wrong_rows(self) -> list[str]:
        wrong, longest, packed = [], self.model.longest, self.document_lengths
        if longest is not None and self.sequence_length > longest:
            wrong.append(f"sequence_length={self.sequence_length}: must be at most {longest}, the rows of the model's learned positions")
        if self.model.has_source and self.source_length is None:
            wrong.append("source_length=None: must be given, the model has an encoder that reads a row of its own")
        if not self.model.has_source and self.source_length is not None:
            wrong.append(f"source_length={self.source_length}: must be left out, the model has no encoder beside its decoder")
        if packed is None:
            return wrong
        if self.model.has_source:
            wrong.append("document_lengths: must be left out with an encoder-decoder, whose rows hold one document")
        if not packed or not all(_is_count(length) for length in packed) or sum(packed) != self.sequence_length:
            shown = f"{len(packed)} lengths" if len(packed) > 8 else f"{packed}"
            wrong.append(f"document_lengths={shown}: must be positive integers that sum to sequence_length={self.sequence_length}; "
                         "count padding as a document of its own")  # fmt: skip
        return wrong

    @property
    def documents(self) -> dict[Stream, tuple[int, ...]]:
        """Stream -> lengths of one row's documents."""
        row = self.document_lengths or (self.sequence_length,)
        return {"tokens": row} if self.source_length is None else {"tokens": row, "source": (self.source_length,)}

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch; those of an encoder's source are not counted."""
        return self.sequence_length * self.global_batch_size

    def layer_flops(self, kind: LayerKind, pairs: Pairs = "visible", flash: bool = False) -> Flops:
        """Of one block of this kind, for one row."""
        return kind.flops(self.documents, pairs, flash)

    def head_flops(self) -> Flops:
        """Of what follows the last block, for one row: logits at every position."""
        return sum((matmul.flops(self.sequence_length) for matmul in self.model.head), Flops())

    def flops_per_row(self, pairs: Pairs = "visible", flash: bool = False) -> Flops:
        """Of one row.

        Args:
            pairs: "visible" counts the pairs that causality, window and documents leave; "square" all pairs of a document, the convention
                of PaLM and Megatron-LM.
            flash: the attention's backward makes its scores again, as flash kernels do.
        """
        blocks = (self.layer_flops(kind, pairs, flash) * count for kind, count in self.model.kinds.items())
        return sum(blocks, self.head_flops())

    def flops_per_step(self, pairs: Pairs = "visible", flash: bool = False) -> Flops:
        """Of the global batch; arguments as ``flops_per_row``."""
        return self.flops_per_row(pairs, flash) * self.global_batch_size

    def flops_per_token(self, pairs: Pairs = "visible", flash: bool = False) -> float:
        """Forward and backward, mean over a row's tokens; arguments as ``flops_per_row``."""
        return self.flops_per_row(pairs, flash).total / self.sequence_length


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
