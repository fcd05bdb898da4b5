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

    def _wrong_values(self) -> list[str]:
        wrong = []
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_position_embeddings",
                     "loss_chunk_tokens", "mlp_chunk_tokens", "num_kv_heads", "head_dim"):  # fmt: skip
            value = getattr(self, name)
            optional = name in ("num_kv_heads", "head_dim", "mlp_chunk_tokens") and value is None
            if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                wrong.append(f"{name}={value!r}: must be an integer of at least 1")
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
        if wrong:
            return wrong
        if self.head_dim is None and self.hidden_size % self.num_heads:
            wrong.append(f"num_heads={self.num_heads}: must divide hidden_size={self.hidden_size}, or give head_dim")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            wrong.append(f"num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}, so that every group is full")
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
