"""Models that are named in published measurements: their shapes by name, and the shape that a row's own columns describe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_megascale.planning.layers import block, feed_forward, grouped_attention, latent_attention, mixture
from lightning_megascale.planning.shape import LayerKind, Matmul, ModelShape, Table


@dataclass(frozen=True)
class Architecture:
    """What a shape is made of.

    Args:
        layers, hidden, heads, kv_heads, ffn_hidden, vocab: L, D, N, G, F, V.
        gated: three matrices in a feed-forward, not two.
        experts, topk, expert_ffn, shared_experts: of the blocks with experts; experts 0: all blocks are dense.
        first_dense_layers: dense blocks before those with experts.
        head_dim: H; None: D / N.
        latent: (query rank or None, key and value rank, plain, rotary, value features of a head) of latent attention; None: grouped.
        tied: the logits use the embedding's weight.
        bias: of all linears, and of layer norms, which go with it.
        learned: positions are a table.
        layer_norm: two vectors a norm where there is a bias; else root mean squares.
        qk_norm: norms on query and key heads.
        expert_groups: groups of experts that a token is limited to, one to a node.
        window: tokens that every second block's queries see.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    gated: bool = True
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    first_dense_layers: int = 0
    head_dim: int | None = None
    latent: tuple[int | None, int, int, int, int] | None = None
    tied: bool = False
    bias: bool = False
    learned: bool = False
    layer_norm: bool = False
    qk_norm: bool = False
    window: int | None = None
    expert_groups: int | None = None

    def shape(self, name: str, longest: int) -> ModelShape:
        """As a ``ModelShape``; ``longest``: rows of a table of learned positions.

        Raises:
            ValueError: sizes that do not divide.
        """
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"heads={self.heads}: must divide hidden={self.hidden}; correct one of them")
        if self.latent is None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads}: must divide heads={self.heads}; correct one of them")
        if self.topk > self.experts:
            raise ValueError(f"topk={self.topk}: must be at most experts={self.experts}; correct one of them")
        dense = min(self.first_dense_layers, self.layers) if self.experts else self.layers
        kinds = [self._block(layer, layer < dense) for layer in range(self.layers)]
        norms = 2 if self.layer_norm and self.bias else 1
        positions = (Table("embed_positions", longest, self.hidden),) if self.learned else ()
        return ModelShape(
            name=name,
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            layers=tuple(kinds),
            tables=(Table("embed_tokens", self.vocab, self.hidden), *positions),
            head=(Matmul("head.weight", self.hidden, self.vocab),),
            vectors=norms * self.hidden,
            tied=self.tied,
            longest=longest if self.learned else None,
            expert_groups=self.expert_groups,
        )

    def _block(self, layer: int, dense: bool) -> LayerKind:
        window = self.window if layer % 2 == 0 else None
        per_feature = 2 if self.layer_norm and self.bias else 1
        if self.latent is None:
            head_dim = self.head_dim or self.hidden // self.heads
            attention = grouped_attention(self.hidden, self.heads, self.kv_heads, head_dim, bias=self.bias, window=window)
            vectors = per_feature * (2 * self.hidden + (2 * head_dim if self.qk_norm else 0))
        else:
            query, key, plain, rotary, value = self.latent
            *attention, latents = latent_attention(  # type: ignore[assignment]
                self.hidden, self.heads, query_rank=query, kv_rank=key, plain_dim=plain, rotary_dim=rotary, value_dim=value
            )
            vectors = 2 * self.hidden + latents  # type: ignore[operator]
        if dense:
            inner = feed_forward(self.hidden, self.ffn_hidden, gated=self.gated, bias=self.bias)
        else:
            shared = self.shared_experts * self.expert_ffn
            inner = mixture(self.hidden, self.experts, self.topk, self.expert_ffn, shared_width=shared, bias=self.bias)
        name = ("dense" if dense else "moe") + (", window" if window else "")
        return block(name, tuple(attention), inner, vectors)  # type: ignore[arg-type]


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> Architecture:
    return Architecture(layers, hidden, heads, heads, 4 * hidden, vocab, gated=False, tied=True, bias=True, learned=True, layer_norm=True)


_DEEPSEEK = (1536, 512, 128, 64, 128)

# A pattern of the name in lower case without signs -> its shape.
# Source: the config.json that each model was published with; GPT of 22B to 1T: Korthikanti et al. 2022, table 3; 175B: Brown et al. 2020.
_KNOWN: tuple[tuple[str, Architecture], ...] = (
    (r"llama3[1-3]?405b", Architecture(126, 16384, 128, 8, 53248, 128256)),
    (r"llama3[1-3]?70b", Architecture(80, 8192, 64, 8, 28672, 128256)),
    (r"llama3[1-3]?8b", Architecture(32, 4096, 32, 8, 14336, 128256)),
    (r"llama270b", Architecture(80, 8192, 64, 8, 28672, 32000)),
    (r"llama213b", Architecture(40, 5120, 40, 40, 13824, 32000)),
    (r"llama27b", Architecture(32, 4096, 32, 32, 11008, 32000)),
    (r"deepseekv3", Architecture(61, 7168, 128, 128, 18432, 129280, True, 256, 8, 2048, 1, 3, latent=_DEEPSEEK, expert_groups=4)),
    (r"deepseekv2(?!lite)", Architecture(60, 5120, 128, 128, 12288, 102400, True, 160, 6, 1536, 2, 1, latent=_DEEPSEEK, expert_groups=3)),
    (r"kimik2", Architecture(61, 7168, 64, 64, 18432, 163840, True, 384, 8, 2048, 1, 1, latent=_DEEPSEEK)),
    (r"qwen3235b", Architecture(94, 4096, 64, 4, 12288, 151936, True, 128, 8, 1536, head_dim=128, qk_norm=True)),
    (r"qwen330b", Architecture(48, 2048, 32, 4, 6144, 151936, True, 128, 8, 768, head_dim=128, qk_norm=True)),
    (r"gptoss120b", Architecture(36, 2880, 64, 8, 2880, 201088, True, 128, 4, 2880, head_dim=64, bias=True, window=128)),
    (r"gptoss20b", Architecture(24, 2880, 64, 8, 2880, 201088, True, 32, 4, 2880, head_dim=64, bias=True, window=128)),
    (r"mixtral8x7b", Architecture(32, 4096, 32, 8, 14336, 32000, True, 8, 2, 14336)),
    (r"mixtral8x22b", Architecture(56, 6144, 48, 8, 16384, 32768, True, 8, 2, 16384)),
    (r"gpt22b", _gpt(48, 6144, 64)),
    (r"gpt3?175b", _gpt(96, 12288, 96)),
    (r"gpt530b", _gpt(105, 20480, 128)),
    (r"gpt1t", _gpt(128, 25600, 160)),
)


def known(name: str) -> Architecture | None:
    """The architecture called ``name``, in any spelling; a suffix such as "-L12" does not matter. None: there is no such name."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((architecture for pattern, architecture in _KNOWN if re.match(pattern, plain)), None)


def described(given: Mapping[str, int], *, bias: bool, latent: bool) -> Architecture | None:
    """The architecture of columns alone: Llama's line where the feed-forward is gated, else GPT's.

    Args:
        given: the columns that are filled, by the field of ``Architecture``.
        bias: of a model that is not gated.
        latent: attention through latents, of DeepSeek's widths.

    Returns:
        None where layers, hidden or heads are not given.
    """
    if not {"layers", "hidden", "heads"} <= set(given):
        return None
    hidden, heads, gated = given["hidden"], given["heads"], bool(given.get("gated", given.get("experts", 0)))
    values = {"kv_heads": heads, "ffn_hidden": 4 * hidden, "vocab": 51200, "topk": min(2, given.get("experts", 0)), **given}
    values.setdefault("expert_ffn", values["ffn_hidden"])
    values["gated"] = gated
    style = {} if gated else {"tied": True, "bias": bias, "learned": True, "layer_norm": True}
    return Architecture(**values, **style, latent=_DEEPSEEK if latent else None)  # type: ignore[arg-type]
