"""Mixture of experts: a router that chooses experts for each token, the experts, and the layer that joins them.

Shapes: B batch, L sequence, T = B * L tokens, D model, E experts, K experts of a token, F feed-forward of an expert.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megascale.ops.auxiliary_loss import add_auxiliary_loss
from lightning_megascale.ops.balance import (
    RoutingCounts,
    Share,
    expert_fractions,
    is_counted,
    load_balancing_loss,
    router_z_loss,
    step_fractions,
    token_mask,
)
from lightning_megascale.ops.experts import check_choice, swiglu_experts

_UNTOLD = 1000  # training forwards; no optimizer step has as many microbatches


class Router(nn.Module):
    """Chooses K of E experts for each token, and their weights; in training it also counts, and adds the losses that balance.

    Scores are made in float32 whatever the model computes in (float64 stays): in bfloat16 some tokens would get other experts.

    Args:
        hidden_size, num_experts, top_k: D, E, K.
        scores: "softmax" or "sigmoid" of the logits.
        normalize: the weights of a token sum to 1, before ``scale``.
        scale: multiplies the weights.
        num_groups, groups_per_token: experts stand in groups; a token chooses among those of its best groups only. A group's score is its
            best one for softmax (DeepSeek-V2), the sum of its two best, with their bias, for sigmoid (DeepSeek-V3).
        capacity_factor: None: no token is dropped. Else an expert takes ceil(capacity_factor * L * K / E) tokens of each row of the batch,
            those with the largest weights (of equal ones the earlier); padding competes too. What is dropped gets index E and weight 0.
        balance_loss, balance_scope: factor of the balance loss; of what the fractions in it are: "microbatch" (and what cp and tp ranks
            have of it), "sequence" (each row for itself), or "global": the last optimizer step's whole batch (``step_fractions``).
        z_loss: factor of the z-loss.
        bias_rate: above 0 there is a bias that changes the choice and never the weights; the strategy moves it by this once a step.

    Attributes:
        expert_bias: float32 buffer (E,), where bias_rate > 0.
        last_step: float64 buffer (E,): assignments of each expert (before drops) in the last optimizer step over all ranks and
            microbatches. Zeros before the first; the strategy writes it.
        counts: what was counted so far, None before the first forward of training.
        share_counts: sums a tensor over the ranks that hold other parts of the same rows; the strategy sets it.
        own_tokens: takes the tokens that this router sees from a (B, L) mask of the rank's; the strategy sets it.

    Source: Shazeer et al. 2017, "Outrageously large neural networks"; DeepSeek-AI 2024, "DeepSeek-V3", equations 12 to 16; Lepikhin et
        al. 2020, "GShard", arXiv 2006.16668, section 3 (groups and capacity).
    """

    kept = ("expert_bias", "last_step")
    """Buffers whose type no move of the model changes."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        scores: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        groups_per_token: int = 1,
        capacity_factor: float | None = None,
        balance_loss: float = 0.0,
        balance_scope: Literal["global", "sequence", "microbatch"] = "global",
        z_loss: float = 0.0,
        bias_rate: float = 0.0,
    ) -> None:
        super().__init__()
        each = num_experts // max(num_groups, 1)
        rules = [
            (1 <= top_k <= num_experts, f"top_k={top_k}: from 1 to num_experts={num_experts}"),
            (scores in ("softmax", "sigmoid"), f"scores={scores!r}: must be 'softmax' or 'sigmoid'"),
            (num_groups >= 1 and num_experts % max(num_groups, 1) == 0, f"num_groups={num_groups}: must divide num_experts={num_experts}"),
            (1 <= groups_per_token <= num_groups, f"groups_per_token={groups_per_token}: from 1 to num_groups={num_groups}"),
            (top_k <= each * groups_per_token, f"top_k={top_k}: {groups_per_token} groups hold {each * groups_per_token} experts"),
            (num_groups == 1 or scores == "softmax" or each >= 2, f"num_groups={num_groups}: sigmoid scores a group by its two best"),
            (capacity_factor is None or capacity_factor > 0, f"capacity_factor={capacity_factor}: above 0, or None to drop no token"),
            (
                balance_scope in ("global", "sequence", "microbatch"),
                f"balance_scope={balance_scope!r}: must be global, sequence, microbatch",
            ),
            (min(balance_loss, z_loss, bias_rate) >= 0, "balance_loss, z_loss and bias_rate must be 0 or more"),
        ]
        wrong = [message for holds, message in rules if not holds]
        if wrong:
            raise ValueError(f"Router: {'; '.join(wrong)}")
        self.num_experts, self.top_k = num_experts, top_k
        self.scores, self.normalize, self.scale = scores, normalize, scale
        self.num_groups, self.groups_per_token = num_groups, groups_per_token
        self.capacity_factor = capacity_factor
        self.balance_loss, self.balance_scope, self.z_loss, self.bias_rate = balance_loss, balance_scope, z_loss, bias_rate
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_buffer("expert_bias", torch.empty(num_experts, dtype=torch.float32) if bias_rate > 0 else None)
        self.register_buffer("last_step", torch.empty(num_experts, dtype=torch.float64))
        self.expert_bias: Tensor | None
        self.last_step: Tensor
        self.counts: RoutingCounts | None = None
        self._forwards = 0
        self.share_counts: Share | None = None
        self.own_tokens: Share | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Draws the weight and forgets every step."""
        nn.init.normal_(self.weight, std=std)
        self.last_step.zero_()
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before = {name: self._buffers[name] for name in self.kept}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = torch.empty_like(new, dtype=old.dtype) if old.is_meta else old.to(new.device)
        return self

    def forward(self, hidden_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices, (T, K) each: float32 (float64 for float64) and int64, best first; index E with weight 0 for no expert."""
        logits_BLE = self._logits(hidden_BLD)
        scores_BLE = logits_BLE.softmax(-1) if self.scores == "softmax" else logits_BLE.sigmoid()
        indices_BLK = self._choose(scores_BLE.detach())
        weights_BLK = scores_BLE.gather(-1, indices_BLK)
        if self.normalize:
            tiny = 0.0 if self.scores == "softmax" else 1e-20
            weights_BLK = weights_BLK / (weights_BLK.sum(-1, keepdim=True) + tiny)
        weights_BLK = weights_BLK * self.scale
        dropped_BLK = None
        if self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * hidden_BLD.shape[1] * self.top_k / self.num_experts)
            dropped_BLK = over_capacity(indices_BLK, weights_BLK.detach(), capacity)
        weights_BLK = self._observe(logits_BLE, scores_BLE, indices_BLK, weights_BLK, dropped_BLK)
        if dropped_BLK is not None:
            weights_BLK = weights_BLK.masked_fill(dropped_BLK, 0)
            indices_BLK = indices_BLK.masked_fill(dropped_BLK, self.num_experts)
        return weights_BLK.flatten(0, 1), indices_BLK.flatten(0, 1)

    def _logits(self, hidden_BLD: Tensor) -> Tensor:
        """(B, L, E), in float32 or float64, whatever autocast says."""
        wide = torch.float64 if hidden_BLD.dtype == torch.float64 else torch.float32
        device = hidden_BLD.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return F.linear(hidden_BLD.to(wide), self.weight.to(wide))
        with torch.autocast(device, enabled=False):
            return F.linear(hidden_BLD.to(wide), self.weight.to(wide))

    def _choose(self, scores_BLE: Tensor) -> Tensor:
        """(B, L, K): the experts with the largest scores, with their bias, within the best groups."""
        if self.expert_bias is not None:
            scores_BLE = scores_BLE + self.expert_bias
        if self.num_groups > 1:
            groups_BLGE = scores_BLE.unflatten(-1, (self.num_groups, -1))
            best = groups_BLGE.amax(-1) if self.scores == "softmax" else groups_BLGE.topk(2, dim=-1).values.sum(-1)
            chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(self.groups_per_token, dim=-1).indices, True)
            scores_BLE = groups_BLGE.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores_BLE.topk(self.top_k, dim=-1).indices

    @torch.compiler.disable
    def _observe(
        self, logits_BLE: Tensor, scores_BLE: Tensor, indices_BLK: Tensor, weights_BLK: Tensor, dropped_BLK: Tensor | None
    ) -> Tensor:
        """Counts a training forward, and joins the losses to the weights. A checkpoint's second run must make the same numbers, which its
        backward reads, and does not count."""
        wanted = self.training and torch.is_grad_enabled() and (self.balance_loss > 0 or self.z_loss > 0)
        counted = is_counted(self) and not logits_BLE.is_meta
        if not (wanted or counted):
            return weights_BLK
        mask_BL = token_mask(logits_BLE.shape[:-1], self.own_tokens)
        normal = self.scores == "softmax"
        p_BLE = scores_BLE if normal else scores_BLE / (scores_BLE.sum(-1, keepdim=True) + 1e-20)
        if counted:
            self._count(indices_BLK, p_BLE.detach(), logits_BLE.detach(), mask_BL, dropped_BLK)
        if not wanted:
            return weights_BLK
        loss = logits_BLE.new_zeros(())
        if self.balance_loss > 0:
            loss = loss + self.balance_loss * load_balancing_loss(p_BLE, self._fractions(indices_BLK, mask_BL), mask_BL)
        if self.z_loss > 0:
            loss = loss + self.z_loss * router_z_loss(logits_BLE, mask_BL)
        tokens = loss.new_tensor(logits_BLE.shape[:-1].numel()) if mask_BL is None else mask_BL.sum()
        return add_auxiliary_loss(weights_BLK, loss, tokens=tokens)

    def _fractions(self, indices_BLK: Tensor, mask_BL: Tensor | None) -> Tensor:
        if self.balance_scope == "global":
            return step_fractions(self.last_step)
        by_row = self.balance_scope == "sequence"
        return expert_fractions(indices_BLK, self.num_experts, mask_BL, by_row=by_row, share=self.share_counts)

    def _count(self, indices_BLK: Tensor, p_BLE: Tensor, logits_BLE: Tensor, mask_BL: Tensor | None, dropped_BLK: Tensor | None) -> None:
        if self.counts is None:
            self.counts = RoutingCounts(self.num_experts, logits_BLE.device)
        elif self.counts.vector.device != logits_BLE.device:
            self.counts.vector = self.counts.vector.to(logits_BLE.device)
        self.counts.add(indices_BLK, p_BLE, logits_BLE, mask_BL, dropped_BLK)
        self._forwards += 1
        learns = self.bias_rate > 0 or (self.balance_loss > 0 and self.balance_scope == "global")
        if self._forwards == _UNTOLD and learns and not bool(self.last_step.any()):
            warnings.warn(
                f"after {_UNTOLD} training forwards nothing has told this router the loads of an optimizer step, so its bias never moves, "
                "and its global balance loss balances nothing: train with MegascaleStrategy or MegascaleModule, or make one "
                "lightning_megascale.parallel.expert_balance.Routers.alone(model) and call its settle() after each optimizer step",
                stacklevel=2,
            )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, num_experts={self.num_experts}, top_k={self.top_k}, scores={self.scores}"


@torch.no_grad()
def over_capacity(indices_BLK: Tensor, weights_BLK: Tensor, capacity: int) -> Tensor:
    """(B, L, K) bool: the assignments that come after the first ``capacity`` of their expert in their row, by weight, then by token.

    Args:
        indices_BLK: (B, L, K) integers.
        weights_BLK: (B, L, K).
        capacity: tokens of a row that an expert takes.
    """
    experts_BN, weights_BN = indices_BLK.flatten(1), weights_BLK.flatten(1)
    order_BN = weights_BN.argsort(dim=1, descending=True, stable=True)
    order_BN = order_BN.gather(1, experts_BN.gather(1, order_BN).argsort(dim=1, stable=True))
    sorted_BN = experts_BN.gather(1, order_BN)
    place_BN = torch.arange(sorted_BN.shape[1], device=sorted_BN.device) - torch.searchsorted(sorted_BN, sorted_BN)  # within its expert
    return torch.zeros_like(experts_BN, dtype=torch.bool).scatter_(1, order_BN, place_BN >= capacity).view(indices_BLK.shape)


class GroupedExperts(nn.Module):
    """E feed-forwards of one shape, whose weights are two tensors: experts(hidden (T, D), indices (T, K), weights (T, K)) -> (T, D).

    The number of experts is read from ``num_experts`` at every call, sizes from tensors, so the module also runs a part of the experts.

    Args:
        num_experts, hidden_size, intermediate_size: E, D, F.

    Attributes:
        gate_up_proj: (E, 2 * F, D), rows of the gate first: the layout of transformers.
        down_proj: (E, D, F).
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02, residual_std: float | None = None) -> None:
        """Draws the weights; those that write to the residual stream with a deviation of their own."""
        nn.init.normal_(self.gate_up_proj, std=std)
        nn.init.normal_(self.down_proj, std=std if residual_std is None else residual_std)

    def forward(self, hidden_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor, meanwhile: Callable[[], Any] | None = None) -> Any:
        """(T, D): the weighted sum of each token's experts.

        Args:
            hidden_TD: (T, D).
            indices_TK: (T, K) integers; ``num_experts`` means no expert.
            weights_TK: (T, K).
            meanwhile: what may be computed while tokens travel; its result is returned second. Here it is just called.
        """
        if self.gate_up_proj.shape[0] != self.num_experts:
            raise ValueError(f"num_experts={self.num_experts}, but gate_up_proj holds {self.gate_up_proj.shape[0]}: both must be equal")
        check_choice(hidden_TD, indices_TK, weights_TK, self.num_experts, type(self).__name__)
        out_TD = swiglu_experts(hidden_TD, indices_TK, weights_TK, self.gate_up_proj, self.down_proj)
        return out_TD if meanwhile is None else (out_TD, meanwhile())

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, hidden={self.down_proj.shape[1]}, intermediate={self.down_proj.shape[2]}"


class MixtureOfExperts(nn.Module):
    """The feed-forward of a block: each token goes to the experts its router chose, and all of them to the shared one.

    Args:
        router: (B, L, D) -> weights (T, K), indices (T, K).
        experts: (hidden (T, D), indices, weights) -> (T, D); with ``shared`` it takes ``meanwhile`` as ``GroupedExperts`` does.
        shared: (B, L, D) -> (B, L, D), added for every token; None for none.

    Source: Dai et al. 2024, "DeepSeekMoE", equations 9 to 11 (shared experts).
    """

    def __init__(self, router: nn.Module, experts: nn.Module, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        weights_TK, indices_TK = self.router(hidden_BLD)
        hidden_TD = hidden_BLD.flatten(0, 1)
        if self.shared is None:
            return self.experts(hidden_TD, indices_TK, weights_TK).view(hidden_BLD.shape)
        shared = self.shared
        out_TD, shared_BLD = self.experts(hidden_TD, indices_TK, weights_TK, meanwhile=lambda: shared(hidden_BLD))
        return out_TD.view(hidden_BLD.shape) + shared_BLD
