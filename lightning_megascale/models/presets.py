"""Named decoder shapes and their exact parameter counts. No torch."""

from __future__ import annotations

from lightning_megascale.models.config import DecoderConfig

PRESETS: dict[str, DecoderConfig] = {
    # Fits every test: seconds on one CPU core, four ways divisible.
    "tiny": DecoderConfig(
        vocab_size=512, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4, intermediate_size=192, max_position_embeddings=256
    ),
    # About 10 million parameters: trains on two CPU cores in minutes.
    "small": DecoderConfig(
        vocab_size=4096,
        hidden_size=320,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=896,
        max_position_embeddings=1024,
        tie_embeddings=True,
    ),
    # About 100 million parameters, the width and depth of GPT-2 small with Llama's layers.
    "100m": DecoderConfig(
        vocab_size=32000,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        intermediate_size=2048,
        max_position_embeddings=2048,
        tie_embeddings=True,
    ),
    # Source: shape of Llama 3.2 1B (Meta model card, 2024), 1,235,814,400 parameters, at a sequence of 8192 without rope scaling.
    "1b": DecoderConfig(
        vocab_size=128256,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=8192,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_embeddings=True,
    ),
    # Source: Touvron et al. 2023, "Llama 2", 7B: 6,738,415,616 parameters.
    "7b": DecoderConfig(
        vocab_size=32000, hidden_size=4096, num_layers=32, num_heads=32, intermediate_size=11008, max_position_embeddings=4096
    ),
    # Source: Brown et al. 2020, "GPT-3", table 2.1. The vocabulary of 50,257 is padded to 51,200 (a multiple of 1,024), so that
    # tensor parallelism divides it, as Narayanan et al. 2021, "Efficient large-scale training", section 5 do.
    "dense_175b": DecoderConfig(
        vocab_size=51200,
        hidden_size=12288,
        num_layers=96,
        num_heads=96,
        intermediate_size=49152,
        max_position_embeddings=2048,
        norm="layer",
        positions="learned",
        mlp="gelu",
        bias=True,
        tie_embeddings=True,
    ),
}


def count_parameters(config: DecoderConfig) -> int:
    """Parameters of ``Decoder(config)``, a tied weight counted once."""
    model, heads, groups, head_dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    features_out = [heads * head_dim, groups * head_dim, groups * head_dim, model]  # q, k, v, o
    attention = model * sum(features_out[:3]) + heads * head_dim * model + config.bias * sum(features_out)
    inner = (2 if config.mlp == "swiglu" else 1) * config.intermediate_size
    mlp = model * inner + config.intermediate_size * model + config.bias * (inner + model)
    per_feature = 2 if config.norm == "layer" and config.bias else 1  # weight, and bias of a layer norm
    norms = per_feature * (2 * model + (2 * head_dim if config.qk_norm else 0))
    rows = config.vocab_size * (1 if config.tie_embeddings else 2)
    rows += config.max_position_embeddings if config.positions == "learned" else 0
    return rows * model + config.num_layers * (attention + mlp + norms) + per_feature * model
