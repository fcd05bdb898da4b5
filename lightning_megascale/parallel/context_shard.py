"""How the rows of one batch lie over the context-parallel ranks, and the way back of what a step makes of them.

Shapes: B rows, L tokens of a row, W ranks, S tokens of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_megascale.ops.context_blocks import Pattern, Tables


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
