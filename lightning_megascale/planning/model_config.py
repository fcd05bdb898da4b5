"""Shapes of models from configs: our ``DecoderConfig`` as a mapping, and the config.json of a Hugging Face model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_megascale.planning.huggingface import FAMILIES
from lightning_megascale.planning.layers import block, feed_forward, grouped_attention, mixture
from lightning_megascale.planning.shape import LayerKind, Matmul, ModelShape, Table

_DECODER_KEYS = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
                 "max_position_embeddings", "norm", "positions", "mlp", "qk_norm", "bias", "tie_embeddings", "num_experts",
                 "num_experts_per_token", "expert_intermediate_size", "num_shared_experts", "num_dense_layers")  # fmt: skip


def from_decoder_config(values: Mapping[str, Any], name: str = "decoder") -> ModelShape:
    """The shape of ``Decoder(config)``.

    Args:
        values: ``dataclasses.asdict`` of a ``DecoderConfig``, which has checked them; keys that no count depends on are not read. A
            capacity factor is one: no dropped token is taken off.
        name: of the model, for tables.

    Raises:
        ValueError: naming the keys that are missing.
    """
    missing = [key for key in _DECODER_KEYS if key not in values]
    if missing:
        raise ValueError(f"decoder config has no {', '.join(missing)}: give dataclasses.asdict(DecoderConfig(...)), which holds every key")
    hidden, layers, vocab = values["hidden_size"], values["num_layers"], values["vocab_size"]
    learned = values["positions"] == "learned"
    positions = (Table("embed_positions", values["max_position_embeddings"], hidden),) if learned else ()
    per_feature = 2 if values["norm"] == "layer" and values["bias"] else 1  # a norm's weight, and a layer norm's bias
    dense = values["num_dense_layers"] if values["num_experts"] else layers
    return ModelShape(
        name=name,
        hidden_size=hidden,
        vocab_size=vocab,
        layers=(_decoder_block(values, "dense", per_feature),) * dense + (_decoder_block(values, "moe", per_feature),) * (layers - dense),
        tables=(Table("embed_tokens", vocab, hidden), *positions),
        head=(Matmul("head.weight", hidden, vocab),),
        vectors=per_feature * hidden,
        tied=values["tie_embeddings"],
        longest=values["max_position_embeddings"] if learned else None,
    )


def _decoder_block(values: Mapping[str, Any], kind: str, per_feature: int) -> LayerKind:
    hidden, head_dim = values["hidden_size"], values["head_dim"]
    attention = grouped_attention(hidden, values["num_heads"], values["num_kv_heads"], head_dim, bias=values["bias"])
    vectors = per_feature * (2 * hidden + (2 * head_dim if values["qk_norm"] else 0))
    if kind == "dense":
        inner = feed_forward(hidden, values["intermediate_size"], gated=values["mlp"] == "swiglu", bias=values["bias"])
    else:
        width = values["expert_intermediate_size"] or values["intermediate_size"]
        shared = values["num_shared_experts"] * width
        inner = mixture(hidden, values["num_experts"], values["num_experts_per_token"], width, shared_width=shared)
    return block(kind, attention, inner, vectors)


def from_hf(path: str | Path) -> ModelShape:
    """The shape of a Hugging Face model for language modelling, from its config.json.

    Args:
        path: a folder with a config.json, or such a file.

    Raises:
        ValueError: for a missing or malformed file, an unknown or unsupported ``model_type``, or a key that is missing or wrong.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"hf={path}: there is no {file}; give the folder of a model, or its config.json") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"hf={path}: {file} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"hf={path}: {file} holds a {type(values).__name__}, must hold an object with the model's config")
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        inner = [key for key in ("text_config", "llm_config", "thinker_config") if isinstance(values.get(key), dict)]
        hint = f"; its {inner[0]} is a model of its own: save that alone to plan the language part" if inner else ""
        raise ValueError(f"hf={path}: model_type={kind!r} is not supported, must be one of {', '.join(sorted(FAMILIES))}{hint}")
    return FAMILIES[kind](values)
