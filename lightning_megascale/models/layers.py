"""Layers of the decoder: rotary positions, attention, feed-forward, block and head.

Shapes: B batch, L sequence, D model, N query heads, G key/value heads, H head dim, F feed-forward, V vocabulary. On a
tensor-parallel rank N, G and F are the local shares: every size is read from a projected tensor, never from a setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megascale.ops.auxiliary_loss import current_documents
from lightning_megascale.ops.cross_entropy import linear_cross_entropy


@dataclass(frozen=True, eq=False)
class Rotation:
    """Cosine and sine of the rotary angles, (B, L, 1, H/2), float32 or float64.

    Made once per forward and shared by all layers. A class of its own and no tuple, so that a mixed-precision policy that casts the
    floating inputs of every block leaves the angles exact.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def from_positions(cls, position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
        """Angles position * theta^(-2i / H) for i in [0, H/2).

        Args:
            position_ids: (B, L) integer positions.
            head_dim: H, even.
            theta: base of the frequencies.
            dtype: type of the activations; float64 keeps float64, anything else gives float32.

        Source: Su et al. 2021, "RoFormer", equations 15 and 34.
        """
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        exponents = torch.arange(0, head_dim, 2, dtype=exact, device=position_ids.device) / head_dim
        angles_BLH = position_ids[..., None].to(exact) * theta**-exponents  # (B, L, H/2)
        return cls(angles_BLH.cos().unsqueeze(2), angles_BLH.sin().unsqueeze(2))

    def apply(self, x_BLNH: Tensor) -> Tensor:
        """Rotates the pairs (i, i + H/2) of every head: the convention of Llama's published weights."""
        first, second = x_BLNH.chunk(2, dim=-1)
        rotated = torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)
        return rotated.to(x_BLNH.dtype)


class ScaledDotProductAttention(nn.Module):
    """The attention core: softmax(q k^T / sqrt(H)) v. One replaceable attribute of ``Attention``, without parameters.

    Source: Vaswani et al. 2017, "Attention is all you need", equation 1; grouped heads: Ainslie et al. 2023, "GQA".
    """

    def forward(self, q_BNLH: Tensor, k_BGLH: Tensor, v_BGLH: Tensor, is_causal: bool = True) -> Tensor:
        """Attention of each query head over its key/value head; in a packed row (``current_documents``) inside of each document.

        Args:
            q_BNLH: (B, N, L, H) queries.
            k_BGLH, v_BGLH: (B, G, L, H) keys and values; G divides N, neighbouring query heads share one.
            is_causal: position i sees positions up to i.

        Returns:
            (B, N, L, H).
        """
        grouped = q_BNLH.shape[1] != k_BGLH.shape[1]
        documents_BL = current_documents()
        if documents_BL is not None:
            rows, length = q_BNLH.shape[0], q_BNLH.shape[2]
            if tuple(documents_BL.shape) != (rows, length):
                raise ValueError(
                    f"attention over {rows} rows of {length} tokens, and document_ids of {tuple(documents_BL.shape)}: one id "
                    "for each token is needed"
                )
            mask_B1LL = documents_BL[:, None, :, None] == documents_BL[:, None, None, :]
            mask_B1LL = mask_B1LL.tril() if is_causal else mask_B1LL
            return F.scaled_dot_product_attention(q_BNLH, k_BGLH, v_BGLH, attn_mask=mask_B1LL, enable_gqa=grouped)
        return F.scaled_dot_product_attention(q_BNLH, k_BGLH, v_BGLH, is_causal=is_causal, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads and optional q/k norm (Henry et al. 2020; per head as in Qwen3).

    Args:
        hidden_size: D.
        num_heads, num_kv_heads, head_dim: N, G, H of the whole layer.
        bias: biases in the four projections.
        qk_norm: None, or the kind of norm ("rms", "layer") on each query and key head.
        norm_eps: of that norm.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        qk_norm: str | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)
        self.q_norm = make_norm(qk_norm, head_dim, norm_eps, bias) if qk_norm else None
        self.k_norm = make_norm(qk_norm, head_dim, norm_eps, bias) if qk_norm else None
        self.core: nn.Module = ScaledDotProductAttention()

    def forward(self, hidden_BLD: Tensor, rotation: Rotation | None = None) -> Tensor:
        q_BLNH = self.q_proj(hidden_BLD).unflatten(-1, (-1, self.head_dim))
        k_BLGH = self.k_proj(hidden_BLD).unflatten(-1, (-1, self.head_dim))
        v_BLGH = self.v_proj(hidden_BLD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLGH = self.q_norm(q_BLNH), self.k_norm(k_BLGH)
        if rotation is not None:
            q_BLNH, k_BLGH = rotation.apply(q_BLNH), rotation.apply(k_BLGH)
        o_BNLH = self.core(q_BLNH.transpose(1, 2), k_BLGH.transpose(1, 2), v_BLGH.transpose(1, 2), is_causal=True)
        return self.o_proj(o_BNLH.transpose(1, 2).flatten(2))  # (B, L, N, H) -> (B, L, N*H) -> (B, L, D)


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) for "swiglu", down(gelu(up(x))) for "gelu".

    Each token is computed by itself, so they may run in chunks: chunked, a call runs ``forward`` (and hooks) once a chunk, and again in
    the backward, so that of what is F wide only one chunk's exists at a time. Nothing is drawn inside, so no random state is kept.

    Args:
        hidden_size, intermediate_size: D, F of the whole layer.
        kind: "swiglu" or "gelu".
        bias: biases in the linears.
        chunk_tokens: tokens of a chunk; None runs all of them together and keeps what they made.

    Source: Shazeer 2020, "GLU variants improve Transformer", equation 6; Hendrycks & Gimpel 2016, "GELUs" (the tanh form); Bekman et al.
        2025, "Arctic long sequence training", section 3.1 (chunks of the sequence).
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, kind: str = "swiglu", bias: bool = False, chunk_tokens: int | None = None
    ) -> None:
        super().__init__()
        self.mlp_chunk_tokens = chunk_tokens
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias) if kind == "swiglu" else None
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def __call__(self, hidden_BLD: Tensor) -> Tensor:
        """All tokens of (B, L, D), in chunks where asked. Outside of ``forward``, so that what tensor parallelism does is chunked too."""
        if self.mlp_chunk_tokens is None:
            return super().__call__(hidden_BLD)
        chunks = hidden_BLD.flatten(0, -2).split(self.mlp_chunk_tokens)  # (T, D): as many on every rank, whose T are equal
        if torch.is_grad_enabled():
            done = [checkpoint(self._run_chunk, chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        else:
            done = [self._run_chunk(chunk) for chunk in chunks]
        return torch.cat(done).view(hidden_BLD.shape)

    def _run_chunk(self, hidden_CD: Tensor) -> Tensor:
        return super().__call__(hidden_CD)

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(hidden_BLD), approximate="tanh"))
        return self.down_proj(F.silu(self.gate_proj(hidden_BLD)) * self.up_proj(hidden_BLD))


class DecoderBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)); dropout only on what is added to the residual stream.

    Source: Radford et al. 2019, "GPT-2", section 2.3 (norm moved to the input of each sub-block).
    """

    def __init__(self, attention: Attention, mlp: nn.Module, attention_norm: nn.Module, mlp_norm: nn.Module, dropout: float = 0.0):
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_dropout = nn.Dropout(dropout)
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_dropout = nn.Dropout(dropout)

    def forward(self, hidden_BLD: Tensor, rotation: Rotation | None = None) -> Tensor:
        hidden_BLD = hidden_BLD + self.attention_dropout(self.attention(self.attention_norm(hidden_BLD), rotation))
        return hidden_BLD + self.mlp_dropout(self.mlp(self.mlp_norm(hidden_BLD)))


class LanguageModelHead(nn.Linear):
    """Projection to the vocabulary, without bias. Given labels it returns the summed loss and never holds the whole logits.

    Attributes:
        chunk_tokens: tokens whose logits exist at a time in the loss.
        group: process group whose ranks share the rows of the weight; None on one device.
    """

    def __init__(self, in_features: int, out_features: int, *, chunk_tokens: int = 1024) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.chunk_tokens = chunk_tokens
        self.group: Any = None

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Logits (B, L, V), or with aligned labels (B, L) the pair (loss_sum, num_tokens)."""
        if labels is None:
            return F.linear(hidden, self.weight, self.bias)
        return linear_cross_entropy(hidden, self.weight, labels, bias=self.bias, chunk_tokens=self.chunk_tokens, group=self.group)


def make_norm(kind: str, size: int, eps: float, bias: bool) -> nn.Module:
    """Root-mean-square or layer norm over the last dimension.

    Source: Zhang & Sennrich 2019, "Root mean square layer normalization", equation 4; Ba et al. 2016, "Layer normalization".
    """
    return nn.RMSNorm(size, eps=eps) if kind == "rms" else nn.LayerNorm(size, eps=eps, bias=bias)
