"""What the attention of a context-parallel run has to know: which tokens of the microbatch each rank holds, and which method attends.

``context_seams.py`` sends a model's attention here, ``context_call.py`` gives its calls the positions of the tokens.

Shapes: B rows, N heads, G key/value heads, S tokens of this rank, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megascale.mesh import MeshViews
from lightning_megascale.ops.attention import Kernel, choose_kernel
from lightning_megascale.ops.context_attention import exchanged_attention, gathered_attention, ring_attention
from lightning_megascale.ops.context_blocks import Pattern
from lightning_megascale.ops.sequence_layout import ring_step_ratio
from lightning_megascale.parallel.context_probe import Probe
from lightning_megascale.parallel.context_shard import SequenceShard
from lightning_megascale.plan_rules import RING_TOKENS, choose_method


@dataclass(eq=False)
class Context:
    """What the attention of a run has to know: who holds which tokens of the microbatch that is computed.

    Args:
        views: the mesh.
        method, backend: of the plan.
        device: of the tensors.
    """

    views: MeshViews
    method: str
    backend: str
    device: torch.device
    whole: SequenceShard | None = None
    shard: SequenceShard | None = None
    probe: Probe | None = None
    expected: tuple[str, ...] = ()
    """Attention modules that have to come through; of a transformers model, whose names say little, the blocks that hold them."""
    reached: set[str] = field(default_factory=set)
    told: Callable[[str], None] | None = None
    doubts: list[str] | None = None
    """Where it is a list, what only this rank may see is noted there, for all ranks to raise, and not raised."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        return self

    @property
    def missing(self) -> list[str]:
        """What should have come through by now and has not."""
        return [name for name in self.expected if not any(reached == name or reached.startswith(name + ".") for reached in self.reached)]

    def begin(self, shard: SequenceShard) -> None:
        """A batch whose steps follow."""
        self.whole = self.shard = shard

    def end(self) -> None:
        """The step and its backward are over: attention that runs now belongs to no batch."""
        self.whole = self.shard = None

    def select(self, start: int, rows: int) -> None:
        """The microbatch whose forward or backward follows."""
        assert self.whole is not None
        self.shard = self.whole if rows == self.whole.rows else self.whole.part(start, rows)

    @property
    def laid(self) -> Tensor | None:
        """(B, S) positions of the rows that are computed; None outside of steps."""
        if self.probe is not None:
            return self.probe.positions
        return None if self.shard is None else self.shard.position_ids

    @property
    def gives_positions(self) -> bool:
        """Whether a model that is not given positions gets them."""
        return self.probe is None or self.probe.gives_positions

    def object_to(self, message: str) -> None:
        """Raises what is wrong, or notes it where all ranks raise together."""
        if self.doubts is None:
            raise ValueError(message)
        self.doubts.append(message)

    @property
    def spare(self) -> int:
        """Places at the end of those rows that hold no token: a step may cut them off."""
        if self.probe is not None:
            return self.probe.spare
        return 0 if self.shard is None else self.shard.spare

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, window: int | None, scale: float | None, name: str) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks; V, the values' head dim, may differ from H.

        Args:
            q: (B, N, S, H). k: (B, G, S, H). v: (B, G, S, V), V <= H.
            is_causal, window, scale: as in ``Pattern``.
            name: of the attention module, for messages.

        Returns:
            (B, N, S, V).

        Raises:
            ValueError: for lengths that are not those of the batch.
        """
        if window is not None and not is_causal:
            raise ValueError(
                f"{name}: a window of {window} tokens on both sides is not computed under context parallelism, only a causal one"
            )
        self.reached.add(name)
        if self.probe is not None:
            return self.probe.attend(q, k, v, is_causal, window, scale, name)
        if v.shape[-1] < q.shape[-1]:  # kernels have one head dim: values of 0 add nothing
            wide = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
            return self.attend(q, k, wide, is_causal=is_causal, window=window, scale=scale, name=name)[..., : v.shape[-1]]
        shard = self.shard
        if shard is None:
            raise ValueError(f"{name}: attention runs outside of a step, so nothing tells which tokens the other ranks hold")
        for what, tensor in (("queries", q), ("keys", k), ("values", v)):
            rows, tokens = tensor.shape[0], tensor.shape[2]
            if rows != shard.rows or tokens != q.shape[2] or not 0 <= shard.local_length - tokens <= shard.spare:
                raise ValueError(
                    f"{name}: {what} are (rows, tokens) = {(rows, tokens)} and this rank's part of the batch is "
                    f"{(shard.rows, shard.local_length)}: a cache, cross-attention, or a sequence made inside of the model cannot be "
                    "context parallel"
                )
        if q.device.type == "meta":
            return torch.empty_like(q)
        pattern = shard.pattern(is_causal, window, scale)
        kernel = choose_kernel(self.backend, q.device, q.dtype, q.shape[-1])
        return self._run(q.contiguous(), k.contiguous(), v.contiguous(), pattern, kernel)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, kernel: Kernel) -> Tensor:
        views = self.views
        if views.context is None:
            return ring_attention(q, k, v, pattern, kernel, None)
        group = views.context.get_group()
        method = self.method
        if method == "auto":
            balance = max(ring_step_ratio(tables) for tables in pattern.tables) if q.shape[2] >= RING_TOKENS else 1.0
            method = choose_method(q.shape[1], k.shape[1], q.shape[2], views.context.size(), balance)
        if self.told is not None:
            self.told(f"context_parallel_method={method!r} over {views.context.size()} ranks, attention kernel {kernel.name!r}")
            self.told = None
        if method == "ring":
            return ring_attention(q, k, v, pattern, kernel, group)
        if method == "allgather":
            return gathered_attention(q, k, v, pattern, kernel, group)
        if method == "ulysses":
            return exchanged_attention(q, k, v, pattern, kernel, group)
        assert views.context_heads is not None and views.context_ring is not None
        return exchanged_attention(q, k, v, pattern, kernel, views.context_heads.get_group(), views.context_ring.get_group())
