"""DecoderConfig: the numbers that make a decoder. No torch here, so a planner reads presets without loading it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder; checked as a whole when made.

    Args:
        vocab_size: rows of the embedding and of the head.
        hidden_size: width D of the residual stream.
        num_layers: blocks.
        num_heads: query heads.
        intermediate_size: width F of the feed-forward.
        max_position_embeddings: longest sequence, in tokens; with learned positions also the rows of their table.
        num_kv_heads: key and value heads (grouped-query attention); None means num_heads.
        head_dim: width of a head; None means hidden_size / num_heads.
        norm: "rms" or "layer".
        norm_eps: added to the variance.
        positions: "rope" or "learned".
        rope_theta: base of the rotary frequencies.
        mlp: "swiglu" or "gelu" (tanh form, as GPT-2).
        qk_norm: normalize each query and key head, as Qwen3.
        bias: biases in the linears of the blocks and in layer norms; the head has none.
        tie_embeddings: the head uses the embedding's weight.
        dropout: probability on the embedding and on what each sub-layer adds to the residual stream; in training only.
        init_std: standard deviation of the initial weights.
        loss_chunk_tokens: tokens whose logits exist at a time in the loss.
        mlp_chunk_tokens: tokens of a rank whose F-wide activations exist at a time, in forward and backward: the feed-forward runs them
            in chunks and runs each again in the backward. None runs them together and keeps what they made. The numbers are the same.
        num_experts: E, feed-forwards that a router chooses from in every layer; 0: none, and nothing below may be given.
        num_experts_per_token: K of them for each token.
        expert_intermediate_size: width F of an expert; None means intermediate_size.
        num_shared_experts: experts that every token takes, without a router: one feed-forward of so many times their width.
        num_dense_layers: the first layers, which have an ordinary feed-forward of intermediate_size.
        router_scores: "softmax" or "sigmoid" of the router's logits.
        normalize_top_k: the weights of a token's experts sum to 1, before router_scale.
        router_scale: multiplies these weights.
        num_expert_groups, num_groups_per_token: a token chooses within its best groups of experts only (DeepSeek-V3).
        capacity_factor: None drops no token; else an expert takes ceil(capacity_factor * L * K / E) tokens of each row.
        balance_loss: factor of each layer's balance loss, which is 1.0 at uniform.
        balance_scope: whose fractions it takes: "global" (the last optimizer step's batch), "sequence" or "microbatch".
        router_z_loss: factor of each layer's z-loss.
        balance_bias_rate: how far a step moves the bias that balances by choice instead of by loss (DeepSeek-V3); 0: there is none.

    Raises:
        ValueError: listing every rule that is broken.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_position_embeddings: int
    num_kv_heads: int = None  # type: ignore[assignment]  # an int once made
    head_dim: int = None  # type: ignore[assignment]
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10000.0
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    qk_norm: bool = False
    bias: bool = False
    tie_embeddings: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    loss_chunk_tokens: int = 1024
    mlp_chunk_tokens: int | None = None
    num_experts: int = 0
    num_experts_per_token: int = 2
    expert_intermediate_size: int | None = None
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True
    router_scale: float = 1.0
    num_expert_groups: int = 1
    num_groups_per_token: int = 1
    capacity_factor: float | None = None
    balance_loss: float = 0.0
    balance_scope: Literal["global", "sequence", "microbatch"] = "global"
    router_z_loss: float = 0.0
    balance_bias_rate: float = 0.0

    def __post_init__(self) -> None:
        wrong = self._wrong_values()
        if not wrong:
            if self.num_kv_heads is None:
                object.__setattr__(self, "num_kv_heads", self.num_heads)
            if self.head_dim is None:
                object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
            if self.positions == "rope" and self.head_dim % 2:
                wrong.append(f"head_dim={self.head_dim}: must be even with positions='rope', which rotates pairs; or 'learned'")
        if wrong:
            raise ValueError("decoder config:\n  " + "\n  ".join(wrong))

    @property
    def expert_width(self) -> int:
        """F of one expert."""
        return self.expert_intermediate_size or self.intermediate_size

    def _wrong_values(self) -> list[str]:
        wrong = []
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_position_embeddings",
                     "loss_chunk_tokens", "mlp_chunk_tokens", "num_kv_heads", "head_dim"):  # fmt: skip
            optional = name in ("num_kv_heads", "head_dim", "mlp_chunk_tokens") and getattr(self, name) is None
            wrong += [] if optional else self._wrong_integer(name, 1)
        for name, choices in (("norm", ("rms", "layer")), ("positions", ("rope", "learned")), ("mlp", ("swiglu", "gelu"))):
            if getattr(self, name) not in choices:
                wrong.append(f"{name}={getattr(self, name)!r}: must be one of {', '.join(choices)}")
        if not 0.0 <= self.dropout < 1.0:
            wrong.append(f"dropout={self.dropout}: must be in [0, 1); 0 turns it off")
        for name in ("norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                wrong.append(f"{name}={getattr(self, name)}: must be positive")
        if not self.init_std >= 0:
            wrong.append(f"init_std={self.init_std}: must not be negative")
        wrong += self._wrong_expert_values()
        if wrong:
            return wrong
        if self.head_dim is None and self.hidden_size % self.num_heads:
            wrong.append(f"num_heads={self.num_heads}: must divide hidden_size={self.hidden_size}, or give head_dim")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            wrong.append(f"num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}, so that every group is full")
        return wrong

    def _wrong_integer(self, name: str, least: int) -> list[str]:
        value = getattr(self, name)
        right = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return [] if right else [f"{name}={value!r}: must be an integer of at least {least}"]

    def _wrong_expert_values(self) -> list[str]:
        if wrong := self._wrong_integer("num_experts", 0):
            return wrong
        if not self.num_experts:
            return [
                f"{field.name}={getattr(self, field.name)!r}: is of no use without num_experts; give num_experts, or leave it out"
                for field in fields(self)
                if field.name in _EXPERT_FIELDS and getattr(self, field.name) != field.default
            ]
        for name, least in (("num_experts_per_token", 1), ("num_shared_experts", 0), ("num_dense_layers", 0), ("num_expert_groups", 1),
                            ("num_groups_per_token", 1)):  # fmt: skip
            wrong += self._wrong_integer(name, least)
        if self.expert_intermediate_size is not None:
            wrong += self._wrong_integer("expert_intermediate_size", 1)
        for name, choices in (("router_scores", ("softmax", "sigmoid")), ("balance_scope", ("global", "sequence", "microbatch"))):
            if getattr(self, name) not in choices:
                wrong.append(f"{name}={getattr(self, name)!r}: must be one of {', '.join(choices)}")
        for name in ("balance_loss", "router_z_loss", "balance_bias_rate"):
            if not getattr(self, name) >= 0:
                wrong.append(f"{name}={getattr(self, name)}: must not be negative; 0 turns it off")
        for name in ("router_scale", "capacity_factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                wrong.append(f"{name}={value}: must be positive" + (", or None to drop no token" if name == "capacity_factor" else ""))
        return wrong or self._wrong_expert_relations()

    def _wrong_expert_relations(self) -> list[str]:
        wrong, experts, groups = [], self.num_experts, self.num_expert_groups
        if self.mlp != "swiglu":
            wrong.append(f"mlp={self.mlp!r}: must be 'swiglu' with num_experts={experts}: experts have no other form")
        if self.bias:
            wrong.append(f"bias=True: must be False with num_experts={experts}: experts have no bias")
        if self.mlp_chunk_tokens is not None:
            wrong.append(
                f"mlp_chunk_tokens={self.mlp_chunk_tokens}: must be None with num_experts={experts}: experts do not run in chunks; "
                "recompute the layers instead (activation_checkpointing)"
            )
        if isinstance(self.num_layers, int) and self.num_dense_layers >= self.num_layers:
            wrong.append(f"num_dense_layers={self.num_dense_layers}: must be below num_layers={self.num_layers}, or leave num_experts out")
        if self.num_experts_per_token > experts:
            wrong.append(f"num_experts_per_token={self.num_experts_per_token}: must be at most num_experts={experts}")
        if experts % groups:
            return [*wrong, f"num_expert_groups={groups}: must divide num_experts={experts}"]
        if self.num_groups_per_token > groups:
            return [*wrong, f"num_groups_per_token={self.num_groups_per_token}: must be at most num_expert_groups={groups}"]
        reachable = experts // groups * self.num_groups_per_token
        if groups > 1 and self.num_experts_per_token > reachable:
            wrong.append(
                f"num_experts_per_token={self.num_experts_per_token}: must be at most the {reachable} experts of "
                f"num_groups_per_token={self.num_groups_per_token} groups"
            )
        if groups > 1 and self.router_scores == "sigmoid" and experts // groups < 2:
            wrong.append(f"num_expert_groups={groups}: groups must hold 2 experts at least with router_scores='sigmoid', the score of one "
                         "being the sum of its two best")  # fmt: skip
        return wrong

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecoderConfig:
        """A config from a plain dict.

        Raises:
            ValueError: naming keys that do not exist, with the nearest, and keys that are missing.
        """
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                raise ValueError(
                    f"decoder config has no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}")
                )
        missing = [name for name in known[:6] if name not in values]
        if missing:
            raise ValueError(f"decoder config needs {', '.join(missing)}: give them, or name a preset")
        return cls(**values)


_NAMES = [field.name for field in fields(DecoderConfig)]
_EXPERT_FIELDS = _NAMES[_NAMES.index("num_experts") + 1 :]
