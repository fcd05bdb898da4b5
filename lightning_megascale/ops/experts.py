"""The feed-forwards of all experts of a layer in a few matrix products, with a backward that keeps little.

Shapes: T tokens, K experts of a token, E experts, D model, F feed-forward of an expert, R = T * K + 1 rows: one token for one expert each,
sorted by expert. Row 0 is all zeros and stands for every choice of no expert; rows of no expert come last, where grouped products leave
memory as it was (NaN, it may be), and nothing reads them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def check_choice(hidden_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor, num_experts: int, name: str) -> None:
    """Refuses what no router may choose. Indices themselves are looked at on a CPU only: elsewhere that would wait for the device.

    Args:
        hidden_TD, indices_TK, weights_TK: as experts are called.
        num_experts: E.
        name: of the experts' class, for the message.

    Raises:
        ValueError: for other shapes, indices that are no integers, or none of 0 .. E (E: no expert).
    """
    shapes = [tuple(tensor.shape) for tensor in (hidden_TD, indices_TK, weights_TK)]
    if hidden_TD.ndim != 2 or indices_TK.ndim != 2 or shapes[1] != shapes[2] or len(hidden_TD) != len(indices_TK):
        found = f"hidden {shapes[0]}, indices {shapes[1]}, weights {shapes[2]}"
        raise ValueError(f"{name} is called with {found}: it takes hidden (T, D), indices (T, K) and weights (T, K)")
    if indices_TK.is_floating_point() or indices_TK.dtype == torch.bool or not weights_TK.is_floating_point():
        raise ValueError(
            f"{name} is called with indices of {indices_TK.dtype} and weights of {weights_TK.dtype}: indices (T, K) are integers and come "
            "before weights (T, K)"
        )
    if not torch.compiler.is_compiling() and indices_TK.device.type == "cpu" and indices_TK.numel():
        low, high = (int(value) for value in indices_TK.aminmax())
        if low < 0 or high > num_experts:
            raise ValueError(
                f"{name} is called with indices from {low} to {high}: its experts are 0 to {num_experts - 1}, and {num_experts} means "
                "no expert"
            )


@torch.compiler.disable
def swiglu_experts(hidden_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor) -> Tensor:
    """sum_k weights[t, k] * down_e(silu(gate_e(x_t)) * up_e(x_t)), e = indices[t, k].

    Kept for the backward: what came in, the sorted order, and the two projections of each row (2 F numbers); rows are gathered and
    activated again. The weight multiplies the F numbers before the last product, which is linear, so no unweighted output is kept either.
    Nothing waits for a device, but for the loop that replaces a grouped product where there is none (``has_grouped_mm``).

    Args:
        hidden_TD: (T, D).
        indices_TK: (T, K) integers; E means no expert: the row is not computed, adds 0, and gets gradients of 0.
        weights_TK: (T, K), in float32 or as ``hidden_TD``; multiplied in the wider of the two types.
        gate_up_EGD: (E, 2 * F, D), rows of the gate first, then those of up.
        down_EDF: (E, D, F).

    Returns:
        (T, D), in the type of ``hidden_TD``, or in autocast's where that is on.

    Source: Shazeer 2020, "GLU variants improve Transformer", equation 6; Gale et al. 2022, "MegaBlocks", section 3 (no token is dropped).
    """
    device = hidden_TD.device.type
    if device != "meta" and hidden_TD.dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_TD, gate_up_EGD, down_EDF = hidden_TD.to(dtype), gate_up_EGD.to(dtype), down_EDF.to(dtype)
    out_TD: Tensor = _SwigluExperts.apply(hidden_TD, indices_TK, weights_TK, gate_up_EGD, down_EDF)
    return out_TD


def has_grouped_mm(like: Tensor, *widths: int) -> bool:
    """True where torch multiplies groups of rows in one call: types of up to 32 bits, rows of whole 16 bytes, no GPU older than Ampere."""
    if like.dtype not in (torch.float32, torch.bfloat16, torch.float16) or any(width * like.itemsize % 16 for width in widths):
        return False
    return like.device.type != "cuda" or torch.cuda.get_device_capability(like.device) >= (8, 0)


class _Groups:
    """Which rows belong to which expert.

    Args:
        order_S: (T * K,) the choices, flattened, in the order of their experts: those of rows 1, 2, ...
        offsets_E: (E,) int32: where the rows of each expert end.
        top_k: K.
    """

    def __init__(self, order_S: Tensor, offsets_E: Tensor, top_k: int) -> None:
        self.order_S, self.offsets_E = order_S, offsets_E
        self.token_S = order_S // top_k
        rows_S = torch.arange(1, order_S.shape[0] + 1, device=order_S.device)
        row_S = torch.empty_like(order_S).scatter_(0, order_S, rows_S.masked_fill(rows_S >= offsets_E[-1], 0))
        self.row_TK = row_S.view(-1, top_k)

    @classmethod
    def of(cls, indices_TK: Tensor, num_experts: int) -> _Groups:
        """The groups of (T, K) integers; each expert's rows in the order of the tokens."""
        sorted_S, order_S = indices_TK.flatten().sort(stable=True)
        experts_E = torch.arange(num_experts, device=indices_TK.device, dtype=sorted_S.dtype)
        offsets_E = torch.searchsorted(sorted_S, experts_E, right=True, out_int32=True) + 1  # row 0 is one more of expert 0
        return cls(order_S, offsets_E, indices_TK.shape[1])

    def gather(self, x_TD: Tensor) -> Tensor:
        """(R, D): zeros, then the token of each row."""
        x_RD = x_TD.new_empty(self.token_S.shape[0] + 1, x_TD.shape[1])
        x_RD[0] = 0
        torch.index_select(x_TD, 0, self.token_S, out=x_RD[1:])
        return x_RD

    def gather_weights(self, weights_TK: Tensor) -> Tensor:
        """(R, 1): 0, then the weight of each row."""
        return torch.cat([weights_TK.new_zeros(1), weights_TK.flatten()[self.order_S]]).unsqueeze(1)

    def combine(self, x_RD: Tensor) -> Tensor:
        """(T, D): the sum of each token's rows, always in the same order, added up in float32 at least."""
        return F.embedding_bag(self.row_TK, x_RD, mode="sum")

    def matmul(self, x_RI: Tensor, w_EIO: Tensor) -> Tensor:
        """(R, O): each row times the matrix of its expert."""
        if x_RI.is_meta:
            return x_RI.new_empty(x_RI.shape[0], w_EIO.shape[2])
        if has_grouped_mm(x_RI, *w_EIO.shape[1:]):
            return F.grouped_mm(x_RI, w_EIO, offs=self.offsets_E)
        out_RO = x_RI.new_empty(x_RI.shape[0], w_EIO.shape[2])
        for expert, (start, end) in enumerate(self._bounds()):
            torch.mm(x_RI[start:end], w_EIO[expert], out=out_RO[start:end])
        return out_RO

    def outer(self, a_RI: Tensor, b_RO: Tensor) -> Tensor:
        """(E, I, O): for each expert the sum over its rows of a^T b; zeros for one without rows."""
        shape = (self.offsets_E.shape[0], a_RI.shape[1], b_RO.shape[1])
        if a_RI.is_meta:
            return a_RI.new_empty(shape)
        if has_grouped_mm(a_RI, *shape[1:]):
            return F.grouped_mm(a_RI.t(), b_RO, offs=self.offsets_E)
        out_EIO = a_RI.new_empty(shape)
        for expert, (start, end) in enumerate(self._bounds()):
            torch.mm(a_RI[start:end].t(), b_RO[start:end], out=out_EIO[expert])
        return out_EIO

    def _bounds(self) -> list[tuple[int, int]]:
        ends = self.offsets_E.tolist()
        return list(zip([0, *ends], ends))


class _SwigluExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor
    ) -> Tensor:  # fmt: skip
        ctx.top_k = indices_TK.shape[1]
        if indices_TK.numel() == 0:
            ctx.save_for_backward(hidden_TD, weights_TK, gate_up_EGD, down_EDF)
            return torch.zeros_like(hidden_TD)
        groups = _Groups.of(indices_TK, gate_up_EGD.shape[0])
        gate_up_RG = groups.matmul(groups.gather(hidden_TD), gate_up_EGD.transpose(1, 2))
        ctx.save_for_backward(hidden_TD, weights_TK, gate_up_EGD, down_EDF, gate_up_RG, groups.order_S, groups.offsets_E)
        gate_RF, up_RF = gate_up_RG.chunk(2, dim=-1)
        activated_RF = F.silu(gate_RF).mul_(up_RF).mul_(groups.gather_weights(weights_TK))
        return groups.combine(groups.matmul(activated_RF, down_EDF.transpose(1, 2)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, Tensor | None]:
        saved = ctx.saved_tensors  # asked for once, as checkpoints want it
        if len(saved) == 4:  # no token came: nothing to learn, but every parameter has a gradient
            hidden, weights, gate_up, down = map(torch.zeros_like, saved)
            return hidden, None, weights, gate_up, down
        hidden_TD, weights_TK, gate_up_EGD, down_EDF, gate_up_RG, order_S, offsets_E = saved
        groups = _Groups(order_S, offsets_E, ctx.top_k)
        needs_hidden, _, needs_weights, needs_gate_up, needs_down = ctx.needs_input_grad
        gate_RF, up_RF = gate_up_RG.chunk(2, dim=-1)
        weight_R1 = groups.gather_weights(weights_TK)
        gradient_RD = groups.gather(gradient_TD)
        silu_RF = F.silu(gate_RF)
        activated_RF = silu_RF * up_RF
        d_activated_RF = groups.matmul(gradient_RD, down_EDF)  # of the weighted ones
        d_weights_TK = d_down_EDF = d_hidden_TD = d_gate_up_EGD = None
        if needs_weights:
            wide = torch.promote_types(weights_TK.dtype, hidden_TD.dtype)
            d_weight_R = (activated_RF * d_activated_RF).sum(-1, dtype=wide)
            d_weights_TK = d_weight_R[groups.row_TK].to(weights_TK.dtype)
        if needs_down:
            d_down_EDF = groups.outer(gradient_RD, activated_RF.mul_(weight_R1))
        del gradient_RD, activated_RF
        if needs_hidden or needs_gate_up:
            d_activated_RF.mul_(weight_R1)
            d_gate_up_RG = torch.empty_like(gate_up_RG)
            d_gate_RF, d_up_RF = d_gate_up_RG.chunk(2, dim=-1)
            torch.mul(d_activated_RF, silu_RF, out=d_up_RF)
            torch.ops.aten.silu_backward.grad_input(d_activated_RF.mul_(up_RF), gate_RF, grad_input=d_gate_RF)
            del d_activated_RF, silu_RF
            if needs_hidden:
                d_hidden_TD = groups.combine(groups.matmul(d_gate_up_RG, gate_up_EGD))
            if needs_gate_up:
                d_gate_up_EGD = groups.outer(d_gate_up_RG, groups.gather(hidden_TD))
        return d_hidden_TD, None, d_weights_TK, d_gate_up_EGD, d_down_EDF
