"""What routers add to a loss and learn from a step, written out for one device: the reference of the parity machine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megascale.models.moe import Router


class OneDeviceRouting:
    """The auxiliary losses of all routers of a model, by their formulas on whole rows: fractions of the step before (none yet: even), means
    over all tokens of a batch. As a sum over labels, which the loop divides by their number at the end."""

    def __init__(self) -> None:
        self._pending: list[Tensor] = []
        self._counts: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        self.mask: Tensor | None = None
        """(B, L), the tokens of the next forward that are no padding; None: all."""
        self.labels_per_token = 1.0
        """Of the batch, over all ranks, that the next forward is a part of."""

    def attach(self, model: torch.nn.Module) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for name, module in model.named_modules():
            if isinstance(module, Router):
                self._counts[name] = torch.zeros(module.num_experts, dtype=torch.float64)
                coefficients = module.__dict__.setdefault("_coefficients", (module.balance_loss, module.z_loss))
                module.balance_loss = module.z_loss = 0.0  # added here instead
                self._handles.append(
                    module.register_forward_hook(lambda m, args, out, n=name, c=coefficients: self._note(n, m, args[0], out[1], *c))
                )

    def _note(self, name: str, router: Router, hidden: Tensor, indices: Tensor, balance: float, z: float) -> None:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logits = hidden.to(wide) @ router.weight.to(wide).t()  # (B, L, E)
        scores = logits.softmax(-1) if router.scores == "softmax" else logits.sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
        counted = torch.ones(hidden.shape[:2], dtype=wide) if self.mask is None else self.mask.to(wide)
        chosen = F.one_hot(indices.view(*hidden.shape[:2], -1), router.num_experts + 1).sum(2)[..., :-1] * counted[..., None]  # (B, L, E)
        fractions = self._last.get(name, torch.full((router.num_experts,), 1 / router.num_experts, dtype=torch.float64))
        if router.balance_scope == "microbatch":
            fractions = chosen.sum((0, 1)) / chosen.sum()
        elif router.balance_scope == "sequence":
            fractions = chosen.sum(1, keepdim=True) / chosen.sum((1, 2), keepdim=True)
        per_token = balance * router.num_experts * (scores * fractions.to(wide)).sum(-1) + z * logits.logsumexp(-1) ** 2
        self._pending.append(self.labels_per_token * (per_token * counted).sum())
        self._counts[name] += chosen.sum((0, 1))

    def losses(self) -> Tensor | float:
        """Of the forwards since the last call."""
        total = sum(self._pending, torch.zeros(())) if self._pending else 0.0
        self._pending = []
        return total

    def settle(self, model: torch.nn.Module) -> None:
        """After an optimizer step."""
        for name, counts in self._counts.items():
            router: Any = model.get_submodule(name)
            self._last[name] = counts / counts.sum()
            if router.expert_bias is not None:
                router.expert_bias += router.bias_rate * torch.sign(counts.mean() - counts).float()
