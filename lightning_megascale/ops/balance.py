"""How evenly tokens are dealt to experts: the losses and the bias that keep it even, and the numbers that tell.

Shapes: B batch, L sequence, E experts, K experts of a token. Functions that only count take any leading dims for (B, L). What a rank does
not see comes in as counts: nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megascale.ops.auxiliary_loss import current_token_mask

Share = Callable[[Tensor], Tensor]
"""Sums a small tensor over the ranks that hold other parts of the same rows."""


# ---- losses ----------------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def expert_fractions(
    indices_BLK: Tensor, num_experts: int, mask_BL: Tensor | None = None, by_row: bool = False, share: Share | None = None
) -> Tensor:
    """The part of all assignments that each expert got: counts / (tokens * K), without gradient. Sums to 1 over the experts.

    Args:
        indices_BLK: (B, L, K) integers in [0, E), before any drop.
        num_experts: E.
        mask_BL: (B, L) bool, the tokens that count; None: all.
        by_row: for every row by itself.
        share: what else the same rows hold elsewhere is added by it, to counts and tokens together.

    Returns:
        (E,), or (B, 1, E) by row; float64.
    """
    batch, length, top_k = indices_BLK.shape
    rows = batch if by_row else 1
    counted_BL = indices_BLK.new_ones(batch, length, dtype=torch.float64) if mask_BL is None else mask_BL.double()
    table = indices_BLK.new_zeros(rows, num_experts + 1, dtype=torch.float64)  # assignments, then tokens
    table[:, :-1] = _counts(indices_BLK.reshape(rows, -1), counted_BL.unsqueeze(-1).expand(-1, -1, top_k).reshape(rows, -1), num_experts)
    table[:, -1] = counted_BL.view(rows, -1).sum(1)
    if share is not None:
        table = share(table)
    fractions = table[:, :-1] / (table[:, -1:] * top_k).clamp(min=1)
    return fractions.unsqueeze(1) if by_row else fractions[0]


def _counts(indices_RN: Tensor, weights_RN: Tensor, num_experts: int) -> Tensor:
    """(R, E) float64: the weights of each expert's assignments in each row; an index of E or more is not counted."""
    counts = weights_RN.new_zeros(indices_RN.shape[0], num_experts + 1)
    return counts.scatter_add_(1, indices_RN.clamp(max=num_experts), weights_RN)[:, :-1]


def load_balancing_loss(
    probabilities_BLE: Tensor,
    fractions: Tensor,
    mask_BL: Tensor | None = None,
    convention: Literal["mean", "hf"] = "mean",
    top_k: int = 1,
) -> Tensor:
    """E * mean over tokens of sum_i f_i p_i, of one layer: 1.0 when experts and probabilities are uniform, for any K; E when collapsed.

    Whatever ``fractions`` counts, the mean is over the tokens given, so the losses of parts of a batch, each weighted by its tokens, add
    up to that of the batch. The gradient goes to the probabilities only.

    Args:
        probabilities_BLE: (B, L, E), summing to 1 over the experts (sigmoid scores: divided by their sum).
        fractions: (E,) or (B, 1, E), from ``expert_fractions`` or ``step_fractions``.
        mask_BL: (B, L) bool, the tokens that count; None: all.
        convention: "hf" multiplies by K, the scale of transformers' ``load_balancing_loss_func`` (which pools layers before the product and
            so cannot see that each collapsed on experts of its own).
        top_k: K; read by "hf".

    Returns:
        0-dim.

    Raises:
        ValueError: for another convention.

    Source: Fedus et al. 2021, "Switch Transformers", equations 4 to 6, with assignments over tokens * K for f; DeepSeek-AI 2024,
        "DeepSeek-V3", equations 17 to 20.
    """
    if convention not in ("mean", "hf"):
        raise ValueError(f"convention={convention!r}: must be 'mean' (1.0 at uniform) or 'hf' (K at uniform)")
    experts = probabilities_BLE.shape[-1]
    scale = experts * (top_k if convention == "hf" else 1)
    loss: Tensor = _TokenMean.apply(probabilities_BLE, fractions.to(probabilities_BLE.dtype), mask_BL)
    return scale * loss


def router_z_loss(logits_BLE: Tensor, mask_BL: Tensor | None = None) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2, which keeps logits small. 0-dim.

    Args:
        logits_BLE: (B, L, E).
        mask_BL: (B, L) bool, the tokens that count; None: all.

    Source: Zoph et al. 2022, "ST-MoE", equation 5.
    """
    loss: Tensor = _TokenMean.apply(logits_BLE.logsumexp(-1).square().unsqueeze(-1), None, mask_BL)
    return loss


class _TokenMean(torch.autograd.Function):
    """Mean over the tokens of sum_i values_i * factors_i.

    Factors and mask stay with the node and are not "saved": a checkpoint that runs the layer again in the backward, maybe while another
    microbatch is the current one, must not replace those of the first run. Values are not kept: the mean is linear in them.
    """

    @staticmethod
    def forward(ctx: Any, values_BLE: Tensor, factors: Tensor | None, mask_BL: Tensor | None) -> Tensor:
        ctx.factors, ctx.shape, ctx.dtype = factors, values_BLE.shape, values_BLE.dtype
        tokens = math.prod(values_BLE.shape[:-1])
        sums_BL = (values_BLE if factors is None else values_BLE * factors).sum(-1)
        ctx.mask = None if mask_BL is None else mask_BL
        if mask_BL is None:
            ctx.count = max(tokens, 1)
            return sums_BL.sum() / ctx.count
        ctx.count = mask_BL.sum().clamp(min=1)
        return torch.where(mask_BL, sums_BL, 0).sum() / ctx.count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        each = gradient / ctx.count
        of_token = each.expand(ctx.shape[:-1]) if ctx.mask is None else torch.where(ctx.mask, each, 0)
        of_token = of_token.unsqueeze(-1).to(ctx.dtype)
        return (of_token.expand(ctx.shape).contiguous() if ctx.factors is None else of_token * ctx.factors), None, None


def step_fractions(last_step: Tensor) -> Tensor:
    """(E,) float64: the fractions of the last optimizer step, over all ranks, microbatches and accumulation; uniform before the first.

    The scope "global": the number is the same for every way to deal a global batch out over ranks, microbatches and pipeline stages, and
    costs no communication in the forward. Others use a running count inside the step, which depends on the way (Qiu et al. 2025, "Demons
    in the detail", arXiv 2501.11873); this one is a step late instead.

    Args:
        last_step: (E,), assignments per expert.
    """
    total = last_step.sum()
    return torch.where(total > 0, last_step / total.clamp(min=1), 1.0 / last_step.shape[0])


@torch.no_grad()
def update_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """bias += rate * sign(mean - count), in place: an expert with too few tokens is chosen more often from now on.

    Args:
        bias_E: (E,) added to the scores for the choice only.
        counts_E: (E,) assignments of a whole step.
        rate: how far a step moves it.

    Source: Wang et al. 2024, "Auxiliary-loss-free load balancing", arXiv 2408.15664, algorithm 1.
    """
    bias_E.add_((counts_E.mean() - counts_E).sign().to(bias_E.dtype), alpha=rate)


# ---- what counts -----------------------------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    """True while a backward runs in this thread: a forward is then a checkpoint's second run. (Private to torch; asked here only.)"""
    return torch._C._current_graph_task_id() != -1


def is_counted(module: nn.Module) -> bool:
    """True for a forward that a step trains on: in training mode, with gradients, and not run again by a checkpoint.

    A checkpoint with ``use_reentrant=True`` runs the first time without gradients, as evaluation does, and is never counted.
    """
    return module.training and torch.is_grad_enabled() and not in_backward()


def token_mask(shape: Sequence[int], own: Callable[[Tensor], Tensor] | None = None) -> Tensor | None:
    """Bool tensor of ``shape``: the tokens of the current microbatch that are no padding; None: all of them.

    Args:
        shape: of the tokens that a layer sees, (B, L) or (T,). A step may leave the last tokens of its rows out.
        own: takes from (B, L) the tokens that the layer sees, where those are a slice.

    Raises:
        ValueError: when the mask is of another number of tokens.
    """
    mask = current_token_mask()
    if mask is None:
        return None
    if own is not None:
        mask = own(mask)
    if len(shape) == 2 and mask.shape[0] == shape[0] and mask.shape[1] > shape[1]:
        mask = mask[:, : shape[1]]
    if mask.numel() != math.prod(shape):
        raise ValueError(
            f"the microbatch's mask of tokens has shape {tuple(mask.shape)}, the layer's tokens {tuple(shape)}: both must hold the same "
            "tokens, so that padding can be left out; a layer that sees other tokens than the batch has cannot be balanced"
        )
    return mask.reshape(tuple(shape))


class RoutingCounts:
    """Running sums of what a router did, one float64 vector on its device; readers take differences of snapshots.

    ``vector``: [assignments of each expert (E), before drops | sum of the probabilities of each expert (E) | tokens, dropped assignments,
    sum of logsumexp^2, sum of entropies of the probabilities (nats), calls].

    Args:
        num_experts: E.
        device: where the sums are.
    """

    def __init__(self, num_experts: int, device: torch.device | str) -> None:
        self.num_experts = num_experts
        self.vector = torch.zeros(2 * num_experts + 5, dtype=torch.float64, device=device)

    @property
    def assignments(self) -> Tensor:
        return self.vector[: self.num_experts]

    @property
    def probabilities(self) -> Tensor:
        return self.vector[self.num_experts : 2 * self.num_experts]

    @property
    def tokens(self) -> Tensor:
        return self.vector[-5]

    @property
    def dropped(self) -> Tensor:
        return self.vector[-4]

    @property
    def z(self) -> Tensor:
        """Sum of logsumexp^2."""
        return self.vector[-3]

    @property
    def entropy(self) -> Tensor:
        """Sum of the entropies, in nats."""
        return self.vector[-2]

    @property
    def calls(self) -> Tensor:
        return self.vector[-1]

    @torch.no_grad()
    def add(
        self, indices: Tensor, probabilities: Tensor, logits: Tensor, mask: Tensor | None = None, dropped: Tensor | None = None
    ) -> None:
        """Adds the tokens of one call. No value is copied to the host.

        Args:
            indices: (..., K) integers, before drops; E or more means no expert and is not counted as an assignment.
            probabilities: (..., E), summing to 1 over the experts.
            logits: (..., E).
            mask: (...) bool, the tokens that count; None: all.
            dropped: (..., K) bool, assignments that capacity dropped; None: none.
        """
        top_k, experts = indices.shape[-1], self.num_experts
        indices_TK, p_TE, logits_TE = indices.reshape(-1, top_k), probabilities.reshape(-1, experts), logits.reshape(-1, experts)
        counted_T = indices_TK.new_ones(indices_TK.shape[0], dtype=torch.float64) if mask is None else mask.reshape(-1).double()
        counted_TK = counted_T.unsqueeze(1).expand(-1, top_k)
        sums = [
            _counts(indices_TK.reshape(1, -1), counted_TK.reshape(1, -1), experts)[0],
            (p_TE if mask is None else torch.where(mask.reshape(-1, 1), p_TE, 0)).sum(0, dtype=torch.float64),
            counted_T.sum().view(1),
            (counted_T.new_zeros(()) if dropped is None else (dropped.reshape(-1, top_k) * counted_TK).sum()).view(1),
            torch.where(counted_T > 0, logits_TE.logsumexp(-1).square().double(), 0).sum().view(1),
            torch.where(counted_T > 0, torch.special.entr(p_TE).sum(-1).double(), 0).sum().view(1),
            counted_T.new_ones(1),
        ]
        self.vector += torch.cat(sums)

    def snapshot(self) -> Tensor:
        """The vector as it is now, a copy."""
        return self.vector.clone()


# ---- what the counts say ---------------------------------------------------------------------------------------------------------------


def metrics(vector: Tensor, num_experts: int, top_k: int) -> dict[str, Any]:
    """What sums of ``RoutingCounts`` (of one layer, or a difference of two snapshots) say. Pure; NaN where nothing was counted.

    Args:
        vector: (2 * E + 5,), laid out as ``RoutingCounts.vector``.
        num_experts: E.
        top_k: K.

    Returns:
        load: list of E numbers, assignments over the mean (1.0 ideal, 0 dead).
        max_violation: max / mean - 1 (arXiv 2408.15664, equation 4); min_violation: 1 - min / mean.
        cv: standard deviation over mean.
        load_entropy: entropy of the load over ln E, 1.0 ideal.
        dead_experts: experts without any token.
        dropped_fraction: of all assignments, dropped by capacity.
        z: mean of logsumexp^2. balance_loss: E * sum_i f_i P_i (1.0 at uniform). router_entropy: of a token's probabilities, in nats.
    """
    vector = vector.detach().double().cpu()
    counts_E, p_E = vector[:num_experts], vector[num_experts : 2 * num_experts]
    tokens, dropped, z, entropy, _ = vector[2 * num_experts :].tolist()
    mean = counts_E.mean()
    load_E = counts_E / mean
    share_E = counts_E / counts_E.sum()
    per_token = 1.0 / tokens if tokens else math.nan
    return {
        "load": load_E.tolist(),
        "max_violation": load_E.max().item() - 1,
        "min_violation": 1 - load_E.min().item(),
        "cv": load_E.std(correction=0).item(),
        "load_entropy": torch.special.entr(share_E).sum().item() / math.log(num_experts) if num_experts > 1 else 1.0,
        "dead_experts": int((counts_E == 0).sum()) if tokens else math.nan,
        "dropped_fraction": dropped * per_token / top_k,
        "z": z * per_token,
        "balance_loss": num_experts * (share_E * p_E).sum().item() * per_token,
        "router_entropy": entropy * per_token,
    }
