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
    # Fits every test: 8 experts of which a token takes 2, and a shared one, behind a dense layer.
    "tiny_moe": DecoderConfig(
        vocab_size=512,
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        intermediate_size=192,
        max_position_embeddings=256,
        num_experts=8,
        num_experts_per_token=2,
        expert_intermediate_size=96,
        num_shared_experts=1,
        num_dense_layers=1,
        balance_loss=0.01,
        router_z_loss=0.001,
    ),
    # Source: Jiang et al. 2024, "Mixtral of experts", table 1: 46,702,792,704 parameters, 12.9 billion of them for a token. The balance
    # loss is ours, in each layer, with the factor of Fedus et al. 2021, "Switch Transformers", section 2.2.
    "mixtral_8x7b": DecoderConfig(
        vocab_size=32000,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=14336,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
        num_experts=8,
        num_experts_per_token=2,
        balance_loss=0.01,
    ),
    # Source: Yang et al. 2025, "Qwen3", table 2 and the published config of Qwen3-30B-A3B: 30,532,122,624 parameters, 3.3 billion for a
    # token; balanced over the global batch, as Qiu et al. 2025, "Demons in the detail", do.
    "moe_30b": DecoderConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=6144,
        max_position_embeddings=32768,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        qk_norm=True,
        num_experts=128,
        num_experts_per_token=8,
        expert_intermediate_size=768,
        balance_loss=0.001,
    ),
    # About 1.0 trillion parameters, 35 billion for a token: DeepSeek-V3's layers (DeepSeek-AI 2024, section 4.2, which the balance's rate
    # and factor are from as well) with 384 experts of 2,048 as in Moonshot AI 2025, "Kimi K2", table 2, here with grouped-query attention.
    "moe_1t": DecoderConfig(
        vocab_size=163840,
        hidden_size=7168,
        num_layers=61,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=18432,
        max_position_embeddings=4096,
        norm_eps=1e-6,
        rope_theta=50000.0,
        num_experts=384,
        num_experts_per_token=8,
        expert_intermediate_size=2048,
        num_shared_experts=1,
        num_dense_layers=1,
        router_scores="sigmoid",
        router_scale=2.827,
        balance_loss=0.0001,
        balance_scope="sequence",
        balance_bias_rate=0.001,
    ),
}


def count_parameters(config: DecoderConfig) -> int:
    """Parameters of ``Decoder(config)``, a tied weight counted once. Buffers (a router's bias) are none."""
    return _count(config, config.num_experts)


def count_active_parameters(config: DecoderConfig) -> int:
    """Parameters that one token uses: of the routed experts its K; the shared ones, routers and all the rest as they are.

    Embedding and head are counted whole, as Mixtral's 12.9 and Qwen3-30B-A3B's 3.3 billion are, though a token reads one row of the former.
    """
    return _count(config, config.num_experts_per_token)


def _count(config: DecoderConfig, experts: int) -> int:
    """Parameters with so many experts in each mixture."""
    model, heads, groups, head_dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    features_out = [heads * head_dim, groups * head_dim, groups * head_dim, model]  # q, k, v, o
    attention = model * sum(features_out[:3]) + heads * head_dim * model + config.bias * sum(features_out)
    inner = (2 if config.mlp == "swiglu" else 1) * config.intermediate_size
    mlp = model * inner + config.intermediate_size * model + config.bias * (inner + model)
    mixture = 3 * model * config.expert_width * (experts + config.num_shared_experts) + config.num_experts * model  # and the router
    mixtures = config.num_layers - config.num_dense_layers if config.num_experts else 0
    per_feature = 2 if config.norm == "layer" and config.bias else 1  # weight, and bias of a layer norm
    norms = per_feature * (2 * model + (2 * head_dim if config.qk_norm else 0))
    rows = config.vocab_size * (1 if config.tie_embeddings else 2)
    rows += config.max_position_embeddings if config.positions == "learned" else 0
    layers = config.num_layers * (attention + norms) + (config.num_layers - mixtures) * mlp + mixtures * mixture
    return rows * model + layers + per_feature * model
