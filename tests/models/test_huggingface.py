"""The decoder equals Transformers' Llama, GPT-2 and Qwen3 with the same weights: logits, loss and gradients."""

from dataclasses import replace

import pytest
import torch
import transformers

from lightning_megascale.models.decoder import Decoder, DecoderConfig

LLAMA = DecoderConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
    norm_eps=1e-6,
    rope_theta=1000.0,
    init_std=0.3,
)
GPT2 = replace(
    LLAMA, num_kv_heads=4, norm="layer", norm_eps=1e-5, positions="learned", mlp="gelu", bias=True, tie_embeddings=True, init_std=0.1
)
QWEN3 = replace(LLAMA, head_dim=16, qk_norm=True, tie_embeddings=True, init_std=0.1)
LLAMA_NAMES = {
    "model.embed_tokens": "embed_tokens",
    "input_layernorm": "attention_norm",
    "self_attn": "attention",
    "post_attention_layernorm": "mlp_norm",
    "model.layers": "layers",
    "model.norm": "norm",
    "lm_head": "head",
}
GPT2_NAMES = {
    "transformer.wte": "embed_tokens",
    "transformer.wpe": "embed_positions",
    "transformer.h": "layers",
    "ln_1": "attention_norm",
    "ln_2": "mlp_norm",
    "attn.c_proj": "attention.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
    "transformer.ln_f": "norm",
    "lm_head": "head",
}


def llama_like(config_class, model_class, config, **more):
    return model_class(
        config_class(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            initializer_range=config.init_std,
            **more,
        )
    )


def gpt2(config):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_position_embeddings,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.intermediate_size,
            initializer_range=config.init_std,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def renamed(state, names, transpose=False):
    """Their state with our names; GPT-2's fused (D, 3D) projection is cut and its Conv1D weights are transposed."""
    ours = {}
    for name, value in state.items():
        conv = transpose and value.ndim == 2 and ".h." in name
        value = value.t() if conv else value
        for old, new in names.items():
            name = name.replace(old, new)
        if "c_attn" in name:
            for part, rows in zip("qkv", value.chunk(3, 0), strict=True):
                ours[name.replace("attn.c_attn", f"attention.{part}_proj")] = rows
        else:
            ours[name] = value
    return ours


def make(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        theirs, config, names = gpt2(GPT2), GPT2, GPT2_NAMES
    elif kind == "llama":
        config, names = LLAMA, LLAMA_NAMES
        theirs = llama_like(transformers.LlamaConfig, transformers.LlamaForCausalLM, config)
    else:
        config, names = QWEN3, LLAMA_NAMES
        theirs = llama_like(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, config)
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases and norms too, so that none of them can be lost
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    ours = Decoder(config)
    ours.load_state_dict(renamed(theirs.state_dict(), names, kind == "gpt2"))
    return ours, theirs.eval(), names


# Transformers' RMSNorm and rotary angles compute in float32 whatever the model's type: float64 can be exact only for GPT-2.
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [(kind, torch.float32, 1e-5) for kind in ("llama", "gpt2", "qwen3")]
    + [("gpt2", torch.float64, 1e-12), ("llama", torch.float64, 2e-6), ("qwen3", torch.float64, 2e-6)],
)
def test_logits_loss_and_gradients(kind, dtype, tolerance):
    ours, theirs, names = make(kind)
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    input_ids = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(1))
    position_ids = torch.arange(20).flip(0).expand(2, 20) if kind != "gpt2" else torch.arange(20).expand(2, 20) + 7
    logits = ours(input_ids, position_ids=position_ids)
    output = theirs(input_ids, position_ids=position_ids)
    assert logits.std() > 0.3
    assert (logits - output.logits).abs().max() <= tolerance * output.logits.abs().max()

    labels = torch.cat([input_ids[:, 1:], torch.full((2, 1), -100)], 1)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
    loss_sum, count = ours(input_ids, position_ids=position_ids, labels=labels)
    loss = loss_sum / count
    loss.backward()
    expected.backward()
    assert count == 38 and (loss - expected).abs() <= tolerance * expected
    gradients = renamed({name: parameter.grad for name, parameter in theirs.named_parameters()}, names, kind == "gpt2")
    norm = sum(gradient.square().sum() for gradient in gradients.values()).sqrt()
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[name]).abs().max() <= tolerance * norm, name
