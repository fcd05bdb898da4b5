"""Shapes from configs: every count equals that of the real model on the meta device; wrong files are named."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from lightning_megascale.models.decoder import Decoder
from lightning_megascale.models.presets import PRESETS, count_active_parameters
from lightning_megascale.planning.model_config import from_decoder_config, from_hf
from tests.planning.families import CASES, model_of, shape_of


def count(parameters):
    return sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_our_decoder(name):
    config = PRESETS[name]
    with torch.device("meta"):
        model = Decoder(config)
    model.tie_weights()
    shape = from_decoder_config(dataclasses.asdict(config), name)
    assert shape.parameters == count(model.parameters())
    assert shape.active_parameters == count_active_parameters(config)
    assert [kind.parameters for kind in shape.layers] == [count(layer.parameters()) for layer in model.layers]
    tables = [model.embed_tokens, model.embed_positions]
    assert shape.embedding_parameters == sum(count(table.parameters()) for table in tables if table is not None)
    assert shape.head_parameters == (0 if config.tie_embeddings else count(model.head.parameters()))
    assert shape.tied_parameters == (count(model.head.parameters()) if config.tie_embeddings else 0)
    parts = shape.parameters_by_part()
    assert sum(parts.values()) == shape.parameters
    routers = [layer.mlp.router for layer in model.layers if hasattr(layer.mlp, "router")]
    experts = [layer.mlp.experts for layer in model.layers if hasattr(layer.mlp, "experts")]
    linears = [module for layer in model.layers for module in layer.attention.modules() if isinstance(module, torch.nn.Linear)]
    assert parts["attention"] == sum(count(linear.parameters()) for linear in linears)
    assert parts.get("router", 0) == sum(count(router.parameters()) for router in routers)
    assert parts.get("experts", 0) == sum(count(each.parameters()) for each in experts)


def test_every_detail_of_our_decoder_counts():
    config = dataclasses.replace(PRESETS["tiny"], norm="layer", bias=True, qk_norm=True, mlp="gelu", positions="learned")
    with torch.device("meta"):
        model = Decoder(config)
    shape = from_decoder_config(dataclasses.asdict(config))
    inside = count(
        parameter for layer in model.layers for name in ("q_norm", "k_norm") for parameter in getattr(layer.attention, name).parameters()
    )
    assert inside > 0 and shape.parameters - count(model.parameters()) == 0


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_transformers(case, tmp_path):
    model, shape = model_of(case, "meta"), shape_of(case, tmp_path)
    assert shape.parameters == count(model.parameters())
    assert sum(shape.parameters_by_part().values()) == shape.parameters
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert shape.tied == (head.weight is embedding.weight)
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    if "t5" not in case:  # whose first block holds the table of the stack
        assert [kind.parameters for kind in shape.layers] == [count(block.parameters()) for block in blocks]


def test_active_parameters_of_experts(tmp_path):
    """Each of 4 experts of Mixtral but the token's 2 is left out, in 3 layers."""
    model, shape = model_of("mixtral", "meta"), shape_of("mixtral", tmp_path)
    experts = count(parameter for name, parameter in model.named_parameters() if ".experts." in name)
    assert shape.active_parameters == count(model.parameters()) - experts // 2


@pytest.mark.parametrize(
    ("values", "billions", "active"),
    [
        # Source: DeepSeek-AI 2024, "DeepSeek-V3", section 4.2 (671B, 37B active) and its published config.
        (
            dict(model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, num_hidden_layers=61, num_attention_heads=128,
                 intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
                 first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
            671, 37,
        ),
        # Source: OpenAI 2025, "gpt-oss model card", table 1 (116.8B; 5.1B active leaves out the embedding, which is 0.6B).
        (
            dict(model_type="gpt_oss", vocab_size=201088, hidden_size=2880, num_hidden_layers=36, num_attention_heads=64,
                 num_key_value_heads=8, head_dim=64, intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4),
            116.8, 5.7,
        ),
        # Source: Raffel et al. 2020, "T5", section 3.7: 3B and 11B; those of 11B.
        (dict(model_type="t5", vocab_size=32128, d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128), 11.3, 11.3),
    ],
    ids=["deepseek_v3", "gpt_oss", "t5"],
)  # fmt: skip
def test_published_sizes(values, billions, active, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = from_hf(tmp_path / "config.json")
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


LLAMA = dict(model_type="llama", vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON: Expecting property name"),
        ("[1]", "holds a list, must hold an object"),
        (json.dumps({"model_type": "mamba2"}), "model_type='mamba2' is not supported, must be one of bert, deepseek_v2, .*t5"),
        ("{}", "model_type=None is not supported"),
        (json.dumps({"model_type": ["llama"]}), r"model_type=\['llama'\] is not supported"),
        (json.dumps({"model_type": "llava", "text_config": LLAMA}), "its text_config is a model of its own: save that alone"),
        (json.dumps({**LLAMA, "hidden_size": None}), "model_type='llama': hidden_size is missing, must be an integer of at least 1"),
        (json.dumps({**LLAMA, "vocab_size": "32"}), "vocab_size='32', must be an integer of at least 1; correct the file"),
        (json.dumps({**LLAMA, "num_attention_heads": 3}), "num_attention_heads=3, must be a divisor of hidden_size=16; or give head_dim"),
        (json.dumps({**LLAMA, "num_key_value_heads": 3}), "num_key_value_heads=3, must be a divisor of num_attention_heads=4"),
        (
            json.dumps({**LLAMA, "model_type": "gpt_oss", "sliding_window": 8, "layer_types": ["full_attention"]}),
            r"layer_types=\['full_attention'\], must be a list of num_hidden_layers=2 names",
        ),
        (
            json.dumps({**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": 1}),
            "mlp_only_layers=1, must be a list of layers",
        ),
        (
            json.dumps({**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5}),
            "num_experts_per_tok=5, must be at most",
        ),
    ],
)
def test_a_wrong_config_is_named(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        from_hf(tmp_path)


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"hf=.*there is no .*config\.json; give the folder of a model"):
        from_hf(tmp_path)
    with pytest.raises(ValueError, match="decoder config has no qk_norm, num_experts: give dataclasses.asdict"):
        values = dataclasses.asdict(PRESETS["tiny"])
        from_decoder_config({key: values[key] for key in sorted(values) if key not in ("num_experts", "qk_norm")})


def test_planning_loads_no_torch():
    modules = ", ".join(f"lightning_megascale.planning.{name}" for name in ("model_config", "workload", "goodput"))
    banned = ("torch", "transformers", "lightning", "numpy")
    code = f"import sys, {modules}; print([name for name in {banned} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
