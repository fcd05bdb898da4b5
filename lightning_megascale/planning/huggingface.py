"""Shapes of the families of transformers, from the values of their config.json.

Each function gives the model for language modelling of its family, as transformers builds it (extra prediction layers that published
weights hold, as DeepSeek-V3's, are none of it). Defaults stand here only where a saved config may leave a key out.

Source: the modelling file of each family in transformers 5.24, against whose models on the meta device the counts are tested.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lightning_megascale.planning.layers import block, feed_forward, grouped_attention, latent_attention, mixture
from lightning_megascale.planning.shape import LayerKind, Matmul, ModelShape, Table

Values = Mapping[str, Any]


def _count(values: Values, key: str, default: int | None = None, least: int = 1) -> int:
    """An integer of the config, or the default where it is missing or null."""
    value = values.get(key)
    value = default if value is None else value
    if value is None:
        raise _wrong(values, f"{key} is missing", f"an integer of at least {least}", "complete the file")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _wrong(values, f"{key}={value!r}", f"an integer of at least {least}", "correct the file")
    return value


def _wrong(values: Values, found: str, rule: str, remedy: str) -> ValueError:
    return ValueError(f"config.json of model_type={values['model_type']!r}: {found}, must be {rule}; {remedy}")


def _head_dim(values: Values) -> int:
    hidden, heads = _count(values, "hidden_size"), _count(values, "num_attention_heads")
    if values.get("head_dim") is None and hidden % heads:
        raise _wrong(values, f"num_attention_heads={heads}", f"a divisor of hidden_size={hidden}", "or give head_dim")
    return _count(values, "head_dim", hidden // heads)


def _window(values: Values, layer: int) -> int | None:
    """Tokens that a query of this layer sees, or None for all."""
    kind = values["model_type"]
    if kind in ("llama", "gemma") or not values.get("sliding_window") or (kind.startswith("qwen") and not values.get("use_sliding_window")):
        return None
    types = values.get("layer_types")
    if types is None and kind == "gpt_oss":
        slides = layer % 2 == 0
    elif types is None and kind in ("qwen2", "qwen3"):
        slides = layer >= _count(values, "max_window_layers", 28, least=0)
    elif types is None and kind == "qwen2_moe":
        slides = layer % 2 == 0 and layer < _count(values, "max_window_layers", 28, least=0)
    elif types is None:
        slides = True
    elif not isinstance(types, list) or len(types) != _count(values, "num_hidden_layers"):
        raise _wrong(
            values, f"layer_types={types!r}", f"a list of num_hidden_layers={values['num_hidden_layers']} names", "correct the file"
        )
    else:
        slides = types[layer] == "sliding_attention"
    return _count(values, "sliding_window") if slides else None


def _decoder(values: Values, layers: tuple[LayerKind, ...], tied: bool = False) -> ModelShape:
    """Rotary positions and root-mean-square norms around the blocks."""
    hidden, vocab = _count(values, "hidden_size"), _count(values, "vocab_size")
    tables, head = (Table("embed_tokens", vocab, hidden),), (Matmul("head.weight", hidden, vocab),)
    return ModelShape(values["model_type"], hidden, vocab, layers, tables, head, hidden, bool(values.get("tie_word_embeddings", tied)))


def _grouped_block(values: Values, layer: int) -> LayerKind:
    """A block of Llama's line: dense, or with the experts of its family."""
    kind, hidden, heads = values["model_type"], _count(values, "hidden_size"), _count(values, "num_attention_heads")
    head_dim = _head_dim(values)
    bias, out_bias = bool(values.get("attention_bias", kind == "gpt_oss")), None
    if kind in ("qwen2", "qwen2_moe"):
        bias, out_bias = bool(values.get("qkv_bias", True)), False
    elif kind in ("mistral", "mixtral", "phi3"):
        bias = False
    kv_heads = _count(values, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise _wrong(values, f"num_key_value_heads={kv_heads}", f"a divisor of num_attention_heads={heads}", "correct the file")
    attention = grouped_attention(hidden, heads, kv_heads, head_dim, bias=bias, out_bias=out_bias, window=_window(values, layer))
    vectors = 2 * hidden + (2 * head_dim if kind.startswith("qwen3") else 0) + (heads if kind == "gpt_oss" else 0)
    inner = _experts(values, layer)
    name = "dense" if inner is None else "moe"
    if inner is None:
        mlp_bias = kind == "llama" and bool(values.get("mlp_bias", False))
        inner = feed_forward(hidden, _count(values, "intermediate_size"), gated=True, bias=mlp_bias)
    return block(name if attention[1].window is None else f"{name}, window", attention, inner, vectors)


def _experts(values: Values, layer: int) -> tuple[Matmul, ...] | None:
    """The mixture of this layer, or None where its feed-forward is dense."""
    kind, hidden = values["model_type"], _count(values, "hidden_size")
    if kind in ("mixtral", "gpt_oss"):
        experts, width = _count(values, "num_local_experts", values.get("num_experts")), _count(values, "intermediate_size")
        return mixture(hidden, experts, _chosen(values, experts), width, bias=kind == "gpt_oss")
    if kind not in ("qwen2_moe", "qwen3_moe"):
        return None
    experts = _count(values, "num_experts", values.get("num_local_experts"), least=0)
    every, dense = _count(values, "decoder_sparse_step", 1), values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise _wrong(values, f"mlp_only_layers={dense!r}", "a list of layers", "correct the file")
    if not experts or layer in dense or (layer + 1) % every:
        return None
    shared = _count(values, "shared_expert_intermediate_size") if kind == "qwen2_moe" else 0
    width = _count(values, "moe_intermediate_size")
    return mixture(hidden, experts, _chosen(values, experts), width, shared_width=shared, shared_gate=kind == "qwen2_moe")


def _chosen(values: Values, experts: int) -> int:
    """Experts of a token."""
    chosen = _count(values, "num_experts_per_tok")
    if chosen > experts:
        raise _wrong(values, f"num_experts_per_tok={chosen}", f"at most the number of experts, {experts}", "correct the file")
    return chosen


def _grouped(values: Values) -> ModelShape:
    """Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma (whose embedding is tied unless the config says otherwise), and their mixtures."""
    layers = tuple(_grouped_block(values, layer) for layer in range(_count(values, "num_hidden_layers")))
    return _decoder(values, layers, tied=values["model_type"] == "gemma")


def _latent(values: Values) -> ModelShape:
    """DeepSeek-V2 and -V3, Kimi-K2."""
    hidden, layers = _count(values, "hidden_size"), _count(values, "num_hidden_layers")
    matmuls, core, latents = latent_attention(
        hidden,
        _count(values, "num_attention_heads"),
        query_rank=None if values.get("q_lora_rank") is None else _count(values, "q_lora_rank"),
        kv_rank=_count(values, "kv_lora_rank"),
        plain_dim=_count(values, "qk_nope_head_dim"),
        rotary_dim=_count(values, "qk_rope_head_dim"),
        value_dim=_count(values, "v_head_dim"),
        bias=bool(values.get("attention_bias", False)),
    )
    dense = min(_count(values, "first_k_dense_replace", 0, least=0), layers)
    if values.get("mlp_bias"):
        raise _wrong(values, f"mlp_bias={values['mlp_bias']!r}", "false", "biases of these feed-forwards are not counted")
    width, shared = _count(values, "moe_intermediate_size"), _count(values, "n_shared_experts", 0, least=0)
    routed = _count(values, "n_routed_experts")
    experts = mixture(hidden, routed, _chosen(values, routed), width, shared_width=shared * width)
    attention, vectors = (matmuls, core), 2 * hidden + latents
    mlp = feed_forward(hidden, _count(values, "intermediate_size"), gated=True)
    kinds = (block("dense", attention, mlp, vectors),) * dense + (block("moe", attention, experts, vectors),) * (layers - dense)
    grouped = _count(values, "n_group", 1) > 1
    return dataclasses.replace(_decoder(values, kinds), expert_groups=_count(values, "topk_group", 1) if grouped else None)


def _gpt2(values: Values) -> ModelShape:
    hidden, heads, vocab = _count(values, "n_embd"), _count(values, "n_head"), _count(values, "vocab_size")
    longest = _count(values, "n_positions", values.get("n_ctx"))
    if hidden % heads:
        raise _wrong(values, f"n_head={heads}", f"a divisor of n_embd={hidden}", "correct the file")
    mlp = feed_forward(hidden, _count(values, "n_inner", 4 * hidden), gated=False, bias=True)
    kind = block("dense", grouped_attention(hidden, heads, heads, hidden // heads, bias=True), mlp, 4 * hidden)
    return ModelShape(
        name="gpt2",
        hidden_size=hidden,
        vocab_size=vocab,
        layers=(kind,) * _count(values, "n_layer"),
        tables=(Table("embed_tokens", vocab, hidden), Table("embed_positions", longest, hidden)),
        head=(Matmul("head.weight", hidden, vocab),),
        vectors=2 * hidden,
        tied=bool(values.get("tie_word_embeddings", True)),
        longest=longest,
    )


def _bert(values: Values) -> ModelShape:
    """An encoder with the head of masked language modelling, whose logits are made at every position."""
    hidden, heads, vocab = _count(values, "hidden_size"), _count(values, "num_attention_heads"), _count(values, "vocab_size")
    longest, types = _count(values, "max_position_embeddings"), _count(values, "type_vocab_size", 2)
    mlp = feed_forward(hidden, _count(values, "intermediate_size"), gated=False, bias=True)
    kind = block("encoder", grouped_attention(hidden, heads, heads, _head_dim(values), bias=True, causal=False), mlp, 4 * hidden)
    tables = [("embed_tokens", vocab), ("embed_positions", longest), ("embed_types", types)]
    return ModelShape(
        name="bert",
        hidden_size=hidden,
        vocab_size=vocab,
        layers=(kind,) * _count(values, "num_hidden_layers"),
        tables=tuple(Table(name, rows, hidden) for name, rows in tables),
        head=(Matmul("head.transform", hidden, hidden, True), Matmul("head.weight", hidden, vocab, True)),
        vectors=4 * hidden,  # the norms of the embedding and of the head
        tied=bool(values.get("tie_word_embeddings", True)),
        longest=longest,
    )


def _t5(values: Values) -> ModelShape:
    """An encoder-decoder; one embedding serves both streams, a table of relative positions each stack."""
    hidden, heads, head_dim = _count(values, "d_model"), _count(values, "num_heads"), _count(values, "d_kv")
    width, vocab, encoders = _count(values, "d_ff"), _count(values, "vocab_size"), _count(values, "num_layers")
    gated = str(values.get("feed_forward_proj", "relu")).startswith("gated")
    attend = (hidden, heads, heads, head_dim)
    encoder = block("encoder", grouped_attention(*attend, causal=False, queries="source", keys="source"),
                    feed_forward(hidden, width, gated=gated, stream="source"), 2 * hidden)  # fmt: skip
    own, core = grouped_attention(*attend)
    cross, cross_core = grouped_attention(*attend, causal=False, name="cross_attention", keys="source")
    decoder = LayerKind("decoder", (*own, *cross, *feed_forward(hidden, width, gated=gated)), (core, cross_core), 3 * hidden)
    buckets = _count(values, "relative_attention_num_buckets", 32)
    return ModelShape(
        name="t5",
        hidden_size=hidden,
        vocab_size=vocab,
        layers=(encoder,) * encoders + (decoder,) * _count(values, "num_decoder_layers", encoders),
        tables=(Table("embed_tokens", vocab, hidden), *(Table(f"{stack}_positions", buckets, heads) for stack in ("encoder", "decoder"))),
        head=(Matmul("head.weight", hidden, vocab),),
        vectors=2 * hidden,
        tied=bool(values.get("tie_word_embeddings", True)),
    )


FAMILIES: dict[str, Callable[[Values], ModelShape]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"), _grouped),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _latent),
    "gpt2": _gpt2,
    "bert": _bert,
    "t5": _t5,
}
"""model_type -> its shape from the values of its config."""
