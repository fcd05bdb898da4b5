"""Parameter counts: the formula against the model itself, and against the numbers the papers and model cards publish."""

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from lightning_megascale.models.decoder import Decoder
from lightning_megascale.models.presets import PRESETS, count_parameters


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
