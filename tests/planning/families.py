"""Small configs of each supported family of transformers, their models on a device, and the shapes the planner reads from their files."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedConfig

from lightning_megascale.planning.model_config import from_hf
from lightning_megascale.planning.shape import ModelShape

VOCAB = 250
_GROUPED = dict(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, vocab_size=VOCAB,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_EXPERTS = dict(moe_intermediate_size=32, num_experts_per_tok=2)
_LATENT = dict(_GROUPED, **_EXPERTS, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=8,
               n_shared_experts=2, first_k_dense_replace=1, n_group=2, topk_group=1, num_key_value_heads=4)  # fmt: skip
_T5 = dict(d_model=64, d_kv=24, d_ff=96, num_layers=2, num_decoder_layers=3, num_heads=4, vocab_size=VOCAB)

CASES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", _GROUPED),
    "llama with biases, tied": ("llama", dict(_GROUPED, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "mistral": ("mistral", dict(_GROUPED, sliding_window=16)),
    "qwen2": ("qwen2", dict(_GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen3": ("qwen3", dict(_GROUPED, head_dim=32)),
    "phi3": ("phi3", dict(_GROUPED, sliding_window=None)),
    "gemma": ("gemma", dict(_GROUPED, head_dim=32)),
    "mixtral": ("mixtral", dict(_GROUPED, num_local_experts=4)),
    "qwen2_moe": ("qwen2_moe", dict(_GROUPED, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=48, decoder_sparse_step=2)),
    "qwen3_moe": ("qwen3_moe", dict(_GROUPED, **_EXPERTS, num_experts=4, head_dim=16, mlp_only_layers=[1])),
    "gpt_oss": ("gpt_oss", dict(_GROUPED, num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=8, rope_parameters=None)),
    "deepseek_v3": ("deepseek_v3", dict(_LATENT, q_lora_rank=40, attention_bias=True)),
    "deepseek_v2": ("deepseek_v2", dict(_LATENT, q_lora_rank=None)),
    "gpt2": ("gpt2", dict(n_embd=64, n_layer=3, n_head=4, vocab_size=VOCAB, n_positions=128, bos_token_id=1, eos_token_id=2)),
    "gpt2 wide": (
        "gpt2",
        dict(
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_inner=80,
            vocab_size=VOCAB,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
        ),
    ),  # fmt: skip
    "bert": (
        "bert",
        dict(
            hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, vocab_size=VOCAB, max_position_embeddings=128
        ),
    ),  # fmt: skip
    "t5": ("t5", _T5),
    "t5 gated, untied": ("t5", dict(_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
}


def config_of(case: str) -> PreTrainedConfig:
    kind, values = CASES[case]
    return AutoConfig.for_model(kind, **values)


def model_of(case: str, device: str) -> torch.nn.Module:
    """The model for language modelling, with attention written out in products that torch's counter sees."""
    config = config_of(case)
    classes = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}
    with torch.device(device):
        model = classes.get(config.model_type, AutoModelForCausalLM).from_config(config, attn_implementation="eager")
    model.tie_weights()
    return model


def shape_of(case: str, folder) -> ModelShape:
    """What the planner makes of the config that transformers saves."""
    config_of(case).save_pretrained(folder)
    return from_hf(folder)
