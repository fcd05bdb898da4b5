"""Parameter counts: the formula against the model itself, and against the numbers the papers and model cards publish."""

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from lightning_megascale.models.decoder import Decoder
from lightning_megascale.models.presets import PRESETS, count_active_parameters, count_parameters


def counted(config):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


@pytest.mark.parametrize("name", list(PRESETS))
def test_the_formula_counts_every_parameter(name):
    assert count_parameters(PRESETS[name]) == counted(PRESETS[name])


def test_every_choice_is_counted():
    for norm, positions, mlp, qk_norm, bias, tied, groups in product(
        ("rms", "layer"), ("rope", "learned"), ("swiglu", "gelu"), (False, True), (False, True), (False, True), (1, 4)
    ):
        config = replace(
            PRESETS["tiny"], norm=norm, positions=positions, mlp=mlp, qk_norm=qk_norm, bias=bias, tie_embeddings=tied, num_kv_heads=groups,
            head_dim=24,
        )  # fmt: skip
        assert count_parameters(config) == counted(config), config


def test_every_choice_of_experts_is_counted():
    for shared, dense, width, bias_rate in product((0, 1, 3), (0, 1, 2), (None, 40), (0.0, 0.001)):
        config = replace(
            PRESETS["tiny_moe"], num_shared_experts=shared, num_dense_layers=dense, expert_intermediate_size=width,
            balance_bias_rate=bias_rate,
        )  # fmt: skip
        assert count_parameters(config) == counted(config), config
        assert count_active_parameters(config) == used_by_one_token(config), config


def used_by_one_token(config):
    """The parameters with a gradient, of experts those rows with one, after a forward of one token; the embedding counted whole."""
    torch.manual_seed(0)
    model = Decoder(config)
    model(torch.zeros(1, 1, dtype=torch.long), labels=torch.zeros(1, 1, dtype=torch.long))[0].backward()
    total = 0
    for name, parameter in model.named_parameters():
        if "mlp.experts." in name:
            total += sum(part.numel() for part in parameter.grad if part.any())
        else:
            total += parameter.numel()
    return total


def test_published_numbers_of_mixtures():
    assert count_parameters(PRESETS["mixtral_8x7b"]) == 46_702_792_704
    assert count_active_parameters(PRESETS["mixtral_8x7b"]) == 12_879_925_248  # "12.9 billion"
    assert count_parameters(PRESETS["moe_30b"]) == 30_532_122_624
    assert 3.3e9 < count_active_parameters(PRESETS["moe_30b"]) < 3.4e9
    assert 1.0e12 < count_parameters(PRESETS["moe_1t"]) < 1.05e12
    assert 34e9 < count_active_parameters(PRESETS["moe_1t"]) < 36e9
    assert all(count_active_parameters(config) == count_parameters(config) for config in PRESETS.values() if not config.num_experts)


def test_mixtures_count_as_transformers_do():
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    mixtral, qwen = PRESETS["mixtral_8x7b"], PRESETS["moe_30b"]
    with torch.device("meta"):
        peers = {
            MixtralForCausalLM(MixtralConfig()): mixtral,  # whose defaults are those of 8x7B
            Qwen3MoeForCausalLM(
                Qwen3MoeConfig(
                    vocab_size=qwen.vocab_size, hidden_size=qwen.hidden_size, num_hidden_layers=qwen.num_layers, num_experts=128,
                    num_attention_heads=qwen.num_heads, num_key_value_heads=qwen.num_kv_heads, head_dim=qwen.head_dim,
                    intermediate_size=qwen.intermediate_size, moe_intermediate_size=768, num_experts_per_tok=8,
                )
            ): qwen,
        }  # fmt: skip
    for peer, config in peers.items():
        assert sum(parameter.numel() for parameter in peer.parameters()) == count_parameters(config)


def test_published_numbers():
    assert count_parameters(PRESETS["7b"]) == 6_738_415_616
    assert count_parameters(PRESETS["1b"]) == 1_235_814_400
    # Narayanan et al. 2021, equation 2: 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)); the final norm's 2 h is left out there.
    layers, width = 96, 12288
    assert count_parameters(PRESETS["dense_175b"]) == 12 * layers * width**2 + 13 * layers * width + (51200 + 2048) * width + 2 * width
    assert 174e9 < count_parameters(PRESETS["dense_175b"]) < 176e9
    assert 8e6 < count_parameters(PRESETS["small"]) < 12e6
    assert 95e6 < count_parameters(PRESETS["100m"]) < 105e6


def test_presets_load_without_torch():
    code = "import sys, lightning_megascale.models.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
