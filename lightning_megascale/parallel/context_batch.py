"""One batch cut along its sequence: this rank's tokens of every tensor, targets that no shard border cuts, and the way back.

The whole batch is known on every rank, so nothing is sent: which tokens go where, and what attention then computes, are index maths
(``ops/sequence_layout.py``). Shapes: B rows, L tokens of a row, W ranks, S tokens of a rank.

A shard is ``L / W`` tokens and, where they are needed, a few *spare* places at its end that belong to no document: a step that
shifts labels itself drops the last logits of what it is given and the first label, so its labels are laid one place later and the spare
place takes the loss. Every target then stands where that step looks for it, and the step stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_megascale.ops.context_blocks import Pattern, Tables
from lightning_megascale.ops.sequence_layout import PADDING, assign, positions_of, runs_of
from lightning_megascale.parallel.loss_scale import IGNORE_INDEX
from lightning_megascale.parallel.microbatches import map_batch

_STALE = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen", "max_length_q", "max_length_k")
_PER_TOKEN = re.compile("token|mask|weight|label|target|position|score|prob|reward|advantage|value|loss|embed")  # names of floats (B, L)
_SHIFTED = ("shift", "huggingface")
_OVER_LABELS = ("labels", "mask", "weight")  # in a path: a step that shifts labels shifts these with them


@dataclass(frozen=True)
class SequenceShard:
    """How the rows of one batch lie over the ranks.

    Args:
        tables: for each row the runs of every rank; one entry where all rows are alike.
        order: (B, W, L' / W) which token of the row each rank holds at each place; L' is L with padding.
        rank: this rank.
        length: L, before padding.
        spare: places at the end of each shard that hold no token.
        position_ids, document_ids: (B, S) of this rank's tokens; ``PADDING`` is the document of what is none.
        has_documents: rows hold several documents, or padding.
        left_padded: padding stands before tokens.
    """

    tables: tuple[Tables, ...]
    order: Tensor
    rank: int
    length: int
    spare: int
    position_ids: Tensor
    document_ids: Tensor
    has_documents: bool = False
    left_padded: bool = False
    patterns: dict[Any, Pattern] = field(default_factory=dict, compare=False)

    @property
    def local_length(self) -> int:
        """S."""
        return self.order.shape[2] + self.spare

    @property
    def rows(self) -> int:
        return self.order.shape[0]

    def pattern(self, is_causal: bool, window: int | None, scale: float | None) -> Pattern:
        """What attention over these rows computes."""
        key = (is_causal, window, scale)
        if key not in self.patterns:
            self.patterns[key] = Pattern(self.tables, is_causal, window, scale)
        return self.patterns[key]

    def part(self, start: int, count: int) -> SequenceShard:
        """Some of the rows: a microbatch."""
        rows = slice(start, start + count)
        tables = self.tables if len(self.tables) == 1 else self.tables[rows]
        return SequenceShard(
            tables,
            self.order[rows],
            self.rank,
            self.length,
            self.spare,
            self.position_ids[rows],
            self.document_ids[rows],
            self.has_documents,
            self.left_padded,
        )

    def to(self, device: torch.device) -> SequenceShard:
        """The tensors that models read, on their device."""
        moved = (self.position_ids.to(device), self.document_ids.to(device))
        return SequenceShard(self.tables, self.order, self.rank, self.length, self.spare, *moved, self.has_documents, self.left_padded)

    def whole(self, result: Any, group: dist.ProcessGroup | None) -> Any:
        """A step's result with the layout undone: what is (B, S, ...) becomes (B, L, ...), in the order of the row, on every rank.

        Raises:
            ValueError: on all ranks, for what is of no row and differs between them.
        """
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if group is not None:
            everyone: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(everyone, shapes, group=group)
            if any(other != shapes for other in everyone):
                other = next(other for other in everyone if other != everyone[0])
                raise ValueError(
                    f"predict_step returned tensors of shapes {everyone[0]} on a rank and {other} on another that holds a part of the same "
                    "rows: return a value for each token, and choose tokens from the whole prediction"
                )

        def everywhere(own: Tensor) -> list[Tensor]:
            parts = [own]
            if group is not None:
                parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, own, group=group)
            return parts

        def joined(tensor: Tensor) -> Tensor:
            cut = tensor.ndim > 1 and tensor.shape[0] == self.rows and 0 <= self.local_length - tensor.shape[1] <= self.spare
            if not cut:
                if any(not torch.equal(part, tensor) for part in everywhere(tensor.contiguous())):
                    raise ValueError(
                        f"predict_step returned a tensor of shape {tuple(tensor.shape)}, which is no {(self.rows, self.local_length)} of "
                        "this rank's rows and tokens and differs between ranks that hold parts of one row: return a value for each token, "
                        "and make what you need of a row from the whole prediction"
                    )
                return tensor
            places = self.order.flatten(1).argsort(1).to(tensor.device)  # (B, L')
            every = torch.cat(everywhere(tensor[:, : self.order.shape[2]].contiguous()), 1)
            return every[torch.arange(self.rows, device=tensor.device)[:, None], places][:, : self.length]

        return tree_map_only(Tensor, joined, result)


@dataclass(frozen=True)
class SequenceCut:
    """How batches are cut; equal on all ranks.

    Args:
        ranks, rank: of the context-parallel axis.
        layout: "contiguous", "headtail", "packed", or "auto": "packed" where rows hold documents or padding, else "headtail".
        label_alignment: "aligned", "shift" or "huggingface", as the plan has it.
        multiple: S is a multiple of it: the tensor-parallel ranks that split the sequence again.
        training: labels count; without it (prediction) there may be none.
        order: another order of the tokens of a single rank, for trials.
    """

    ranks: int
    rank: int
    layout: str = "auto"
    label_alignment: str | None = "aligned"
    multiple: int = 1
    training: bool = True
    order: tuple[int, ...] | None = None

    def __call__(self, batch: Any) -> tuple[Any, SequenceShard]:
        """This rank's part of a batch.

        Args:
            batch: a dict or dataclass with Hugging Face's keys, or a sequence whose first whole-number (B, L) tensor holds the tokens
                and whose second the labels.

        Returns:
            The batch of the same kind, with ``position_ids`` and ``document_ids`` added to a dict, and how it was cut.

        Raises:
            ValueError: for what cannot be cut right, in the same words on all ranks.
        """
        names = names_of(batch)
        tokens = names.tokens
        rows, length = tokens.shape[:2]
        documents = _documents(names, rows, length)
        has_documents = documents is not None
        layout = self.layout if self.layout != "auto" else "packed" if has_documents else "headtail"
        unit = 2 * self.ranks if layout == "headtail" and self.ranks > 1 else self.ranks
        padded = -(-length // unit) * unit
        local = padded // self.ranks
        shifts = self.label_alignment == "shift" and names.labels is not None
        spare = next(spare for spare in range(int(shifts), self.multiple + 1) if (local + spare) % self.multiple == 0)
        named = isinstance(batch, Mapping) or is_dataclass(batch)
        if (spare or padded != length) and not named and self.training:
            raise ValueError(
                f"rows of {length} tokens over context_parallel_size={self.ranks} need places that hold no token, which are left out of "
                "the loss by labels of -100, and in a tuple nothing says which the labels are: give a dict with 'input_ids' and 'labels'"
            )
        if (spare or padded != length) and names.labels is None and self.training:
            raise ValueError(
                f"rows of {length} tokens over context_parallel_size={self.ranks} need "
                f"{padded - length + spare} places that hold no token, and the batch has no 'labels' to leave them out of the loss: put "
                f"integer labels (-100 where nothing counts) into the batch, or give rows of a multiple of {unit * self.multiple} tokens"
            )
        positions = _positions(names, documents, rows, length)
        order, tables = _tables(documents, rows, length, padded, self.ranks, layout)
        if self.order is not None:
            order = np.broadcast_to(np.array(self.order), order.shape)
        own = torch.from_numpy(order[:, self.rank].copy())  # (B, S - spare)
        taker = _Taker(rows, length, padded, spare, own)
        shard = SequenceShard(
            tables,
            torch.from_numpy(order.copy()),
            self.rank,
            length,
            spare,
            taker.take(positions, 0),
            taker.take(_document_ids(names, documents, rows, length), PADDING),
            has_documents,
            documents is not None and bool((documents[:, 0] == PADDING).any()),
        )
        shifted = names.labels is not None and self.label_alignment in _SHIFTED

        def place(path: str, leaf: Any) -> Any:
            """Labels go where the step looks for them, and with them what it lays over them (attention reads no mask)."""
            if path == names.labels_at:
                return taker.leaf("labels", leaf, self.label_alignment if shifted else None)
            follows = shifted and path != names.tokens_at and any(word in path for word in _OVER_LABELS) and "shift_labels" not in path
            return taker.leaf(path, leaf, self.label_alignment if follows else None)

        cut = map_batch(batch, place)
        if isinstance(cut, dict):
            cut["position_ids"], cut["document_ids"] = shard.position_ids, shard.document_ids
            if self.label_alignment == "huggingface" and names.labels is not None:
                cut.setdefault("shift_labels", cut["labels"])
        return cut, shard


@dataclass
class Names:
    """What the entries of a batch are.

    Args:
        tokens: (B, L) or (B, L, ...): tells rows and length.
        labels: (B, L) integers, or None.
        given: entries by name; of a sequence only these two.
        tokens_at, labels_at: their paths, as ``map_batch`` has them: one tensor may be both.
    """

    tokens: Tensor
    labels: Tensor | None
    given: Mapping[str, Any]
    tokens_at: str
    labels_at: str


def names_of(batch: Any) -> Names:
    """Finds tokens and labels.

    Raises:
        ValueError: for a batch without tokens, or with labels that are not (B, L).
    """
    given: Mapping[str, Any]
    if isinstance(batch, Mapping) or (is_dataclass(batch) and not isinstance(batch, type)):
        given = batch if isinstance(batch, Mapping) else vars(batch)
        key = next((key for key in ("input_ids", "inputs_embeds") if isinstance(given.get(key), Tensor)), "input_ids")
        paths = [f"batch[{name!r}]" if isinstance(batch, Mapping) else f"batch.{name}" for name in (key, "labels")]
    else:
        entries = [batch] if isinstance(batch, Tensor) else list(batch) if isinstance(batch, Sequence) else []
        whole = [i for i, e in enumerate(entries) if isinstance(e, Tensor) and e.ndim == 2 and not e.is_floating_point()]
        key, given = "input_ids", dict(zip(("input_ids", "labels"), (entries[i] for i in whole)))
        paths = ["batch" if isinstance(batch, Tensor) else f"batch[{i}]" for i in whole]
    tokens = given.get(key)
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ValueError(
            "context_parallel_size above 1 cuts batches along their sequence, and this one has no tensor of tokens (B, L): give a dict "
            f"with Hugging Face's keys ('input_ids', 'labels'); it is a {type(batch).__name__}"
            + (f" with {', '.join(map(str, given))}" if given else "")
        )
    labels = given.get("labels")
    if labels is not None and (not isinstance(labels, Tensor) or labels.shape != tokens.shape[:2] or labels.is_floating_point()):
        shape = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"labels are {shape} and the tokens {tuple(tokens.shape[:2])}: under context parallelism each rank scores its own tokens, so "
            "labels have to be whole numbers (B, L), one for each token"
        )
    stale = [key for key in _STALE if given.get(key) is not None]
    if stale:
        raise ValueError(
            f"the batch has {', '.join(stale)}, which describe rows that context parallelism cuts up: give document_ids (B, L) instead"
        )
    return Names(tokens, labels, given, paths[0], paths[1] if len(paths) > 1 else "")


class _Taker:
    """Takes this rank's tokens of tensors (B, L, ...)."""

    def __init__(self, rows: int, length: int, padded: int, spare: int, own: Tensor) -> None:
        self.rows, self.length, self.padded, self.spare, self.own = rows, length, padded, spare, own

    def take(self, tensor: Tensor, fill: float) -> Tensor:
        """(B, S, ...), with ``fill`` where there is no token."""
        lacking = self.padded - self.length
        if lacking:
            tensor = torch.cat([tensor, tensor.new_full((self.rows, lacking, *tensor.shape[2:]), fill)], 1)
        own = self.own.to(tensor.device)
        taken = tensor[torch.arange(self.rows, device=tensor.device)[:, None], own]
        if self.spare:
            taken = torch.cat([taken, taken.new_full((self.rows, self.spare, *tensor.shape[2:]), fill)], 1)
        return taken

    def next(self, tensor: Tensor, fill: float) -> Tensor:
        """(B, S, ...) of the places that follow this rank's in the row, ``fill`` after its last."""
        following = torch.full_like(tensor, fill)
        following[:, :-1] = tensor[:, 1:]
        return self.take(following, fill)

    def leaf(self, name: str, leaf: Any, alignment: str | None = None) -> Any:
        """A leaf of the batch: cut where it is (B, L, ...), else as it is.

        Args:
            name: its path.
            leaf: a tensor, an array or anything.
            alignment: of what lies where targets do: "huggingface": a token's place holds what follows it; "shift": one place later,
                for the last place is a spare one.
        """
        if isinstance(leaf, np.ndarray):
            is_cut = leaf.shape[:2] == (self.rows, self.length)
            return self.leaf(name, torch.from_numpy(leaf), alignment).numpy() if is_cut else leaf
        if not isinstance(leaf, Tensor) or leaf.ndim < 2:
            return leaf
        if leaf.ndim > 2 and self.length > 1 and leaf.shape[-2:] == (self.length, self.length):
            raise ValueError(
                f"{name} has shape {tuple(leaf.shape)}, which looks like an attention mask between all tokens: under context parallelism "
                "no rank sees them all. Say which tokens belong together with document_ids (B, L), and which are none with a 2-D mask"
            )
        if tuple(leaf.shape) == (self.rows, self.length - 1):
            raise ValueError(
                f"{name} has one entry less than the row has tokens ({self.length}), so it is unknown which tokens it belongs to: give it "
                f"the shape ({self.rows}, {self.length}), with an entry for each token"
            )
        if tuple(leaf.shape[:2]) != (self.rows, self.length):
            return leaf
        if leaf.ndim == 2 and leaf.is_floating_point() and not _PER_TOKEN.search(name):
            raise ValueError(
                f"{name} has a number for each row and token, ({self.rows}, {self.length}), or that many features of each row: which, its "
                "name does not say. If it is one for each token call it token_...; else give it the shape (B, 1, features)"
            )
        labels = "labels" in name and not leaf.is_floating_point() and leaf.dtype != torch.bool
        fill = IGNORE_INDEX if labels else PADDING if "document_ids" in name else 0
        if alignment is None:
            return self.take(leaf, fill)
        return self.next(leaf, fill).roll(1, 1) if alignment == "shift" else self.next(leaf, fill)


def _documents(names: Names, rows: int, length: int) -> np.ndarray | None:
    """(B, L) documents, ``PADDING`` where a token is none, or None where every row is one document."""
    given, mask = names.given.get("document_ids"), names.given.get("attention_mask")
    for name, tensor in (("document_ids", given), ("attention_mask", mask)):
        if tensor is not None and (not isinstance(tensor, Tensor) or tuple(tensor.shape) != (rows, length)):
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} is {shape}, and must be ({rows}, {length}) under context parallelism: one number for each token")
    if mask is not None and bool((mask != 0).all()):
        mask = None
    if given is None and mask is None:
        return None
    documents = np.zeros((rows, length), dtype=np.int64) if given is None else given.detach().cpu().numpy().astype(np.int64)
    if documents.min() < PADDING:
        raise ValueError(f"document_ids hold {documents.min()}: documents count from 0, and {PADDING} marks padding")
    if mask is not None:
        documents = np.where(mask.detach().cpu().numpy() != 0, documents, PADDING)
    for row, numbers in enumerate(documents):
        starts = numbers[np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]])]
        texts = starts[starts != PADDING]
        if len(set(texts.tolist())) != len(texts):
            name = "document_ids" if given is not None else "attention_mask"
            raise ValueError(
                f"row {row} of {name} takes up a document again after another or after padding: the tokens of a document have to stand "
                "together, and padding before or behind them"
            )
    return None if (documents == documents[:, :1]).all() and documents.min() != PADDING else documents


def _document_ids(names: Names, documents: np.ndarray | None, rows: int, length: int) -> Tensor:
    """(B, L) what steps and models read."""
    if documents is not None:
        return torch.from_numpy(documents)
    given = names.given.get("document_ids")
    return torch.zeros((rows, length), dtype=torch.int64) if given is None else given.long()


def _positions(names: Names, documents: np.ndarray | None, rows: int, length: int) -> Tensor:
    """(B, L) what models read as positions: the given ones; else counted inside each document that the batch names, else in the row."""
    given = names.given.get("position_ids")
    if given is None:
        if documents is not None and names.given.get("document_ids") is not None:
            return torch.from_numpy(np.stack([positions_of(row) for row in documents]))
        return torch.arange(length).expand(rows, length)
    if not isinstance(given, Tensor) or given.ndim != 2 or given.shape[1] != length or given.shape[0] not in (1, rows):
        shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"position_ids are {shape}, and must be ({rows}, {length}) under context parallelism: one for each token")
    if names.given.get("document_ids") is None and bool((given[:, 1:] < given[:, :-1]).any()):
        raise ValueError(
            "position_ids start again inside a row, as packed documents do, and the batch has no document_ids: give document_ids (B, L): "
            "which tokens attend to which is never guessed from positions"
        )
    return given.expand(rows, length)


def _tables(
    documents: np.ndarray | None, rows: int, length: int, padded: int, ranks: int, layout: str
) -> tuple[np.ndarray, tuple[Tables, ...]]:
    """((B, W, L' / W) tokens of each rank, the tables of each row or of all)."""
    if documents is None:
        order, table = _single(length, padded, ranks, layout)
        return np.broadcast_to(order, (rows, *order.shape)).copy(), (table,)
    found = [_row(np.r_[row, np.full(padded - length, PADDING)], ranks, layout) for row in documents]
    return np.stack([order for order, _ in found]), tuple(table for _, table in found)


@lru_cache(maxsize=64)
def _single(length: int, padded: int, ranks: int, layout: str) -> tuple[np.ndarray, Tables]:
    return _row(np.r_[np.zeros(length, np.int64), np.full(padded - length, PADDING)], ranks, layout)


def _row(documents: np.ndarray, ranks: int, layout: str) -> tuple[np.ndarray, Tables]:
    order, positions = assign(documents, ranks, layout), positions_of(documents)
    return order, [runs_of(documents[own], positions[own]) for own in order]
