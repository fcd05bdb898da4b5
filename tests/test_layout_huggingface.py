"""Layouts read from what transformers models publish, as data: which roles come out, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_megascale.layout import ModelLayout
from lightning_megascale.layout_huggingface import Published, layout_of
from lightning_megascale.parallel.layouts import find_layout, published_by
from lightning_megascale.parallel.tensor_check import check_tensor_parallel
from tests import huggingface


def model_of(family: str) -> nn.Module:
    with torch.device("meta"):
        return huggingface.FAMILIES[family]()


def published(family: str) -> Published:
    return published_by(model_of(family))


def test_a_decoder_with_query_and_key_norms() -> None:
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    assert layout_of(published("Qwen3"), tensor_parallel=True) == ModelLayout(
        blocks="model.layers.*",
        first=["model.embed_tokens"],
        last=["model.norm", "lm_head"],
        attention=[attention],
        mlp=[mlp],
        colwise=[f"{attention}.{name}_proj" for name in "qkv"] + [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
        rowwise=[f"{attention}.o_proj", f"{mlp}.down_proj"],
        replicated=[f"{attention}.q_norm", f"{attention}.k_norm"],
        embedding="model.embed_tokens",
        head="lm_head",
    )


def test_without_tensor_parallelism_the_plan_is_not_read() -> None:
    strange = replace(published("Qwen3"), tp_plan={"nothing.*": "unheard_of"})
    assert layout_of(strange, tensor_parallel=False) == ModelLayout(
        blocks="model.layers.*", first=["model.embed_tokens"], last=["model.norm", "lm_head"]
    )


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
def test_without_tensor_parallelism_experts_are_read_where_they_are_needed(family: str) -> None:
    known = published(family)
    apart = layout_of(known, tensor_parallel=False)
    assert apart.experts == ()
    assert layout_of(known, tensor_parallel=False, expert_parallel=True) == replace(apart, experts=("model.layers.*.mlp.experts",))


def test_a_given_layout_wins_over_published_experts() -> None:
    given = ModelLayout(blocks="model.layers.*")
    assert find_layout(model_of("Mixtral"), given, expert_parallel=True) is given


def test_a_model_without_experts_has_none_to_deal_out() -> None:
    assert layout_of(published("Llama"), tensor_parallel=False, expert_parallel=True).experts == ()


def test_dense_and_expert_layers_side_by_side() -> None:
    layout = layout_of(published("DeepseekV3"), tensor_parallel=True)
    assert layout.mlp == ("model.layers.0.mlp", "model.layers.*.mlp.shared_experts")
    assert layout.experts == ("model.layers.*.mlp.experts",)
    assert "model.layers.*.self_attn.kv_a_proj_with_mqa" in layout.replicated


def test_an_encoder_before_the_language_model() -> None:
    layout = layout_of(published("Llava"), tensor_parallel=True)
    assert layout.blocks == ("model.language_model.layers.*",)
    assert layout.units == ("model.vision_tower.encoder.layers.*",)
    assert layout.first == ("model.vision_tower", "model.multi_modal_projector", "model.language_model.embed_tokens")
    assert layout.first_inputs == ("pixel_values",)


def test_two_lists_of_layers_make_no_pipeline() -> None:
    layout = layout_of(published("Whisper"), tensor_parallel=False)
    assert layout.blocks == ("model.encoder.layers.*", "model.decoder.layers.*")
    assert layout.first == layout.last == ()


@pytest.mark.parametrize(
    ("key", "style", "part"),
    [
        ("model.layers.*.self_attn.q_proj", "colwise_of_tomorrow", "the style is not known; known are colwise, rowwise"),
        ("model.layers.*.attention.q_proj", "colwise", "matches no module and no parameter"),
        ("model.layers.*.self_attn.q_proj.weight", "colwise", "a split of a single parameter is understood for experts only"),
    ],
)
def test_what_is_not_understood_is_refused(key: str, style: str, part: str) -> None:
    plan = published("Llama")
    with pytest.raises(ValueError) as caught:
        layout_of(replace(plan, tp_plan={**plan.tp_plan, key: style}), tensor_parallel=True)
    for text in (repr(key), repr(style), part, "layout=ModelLayout"):
        assert text in str(caught.value)


@pytest.mark.parametrize("family", [name for name in huggingface.FAMILIES if "," not in name])
def test_every_layout_can_be_split(family: str) -> None:
    model = model_of(family)
    layout = find_layout(model, "auto", tensor_parallel=True)
    assert layout is not None and check_tensor_parallel(model, layout, 2, False) == []
    assert layout.unmatched(name for name, _ in model.named_modules()) == []


@pytest.mark.parametrize(("family", "part"), [("Mixtral", "num_experts=4 is not divisible"), ("GPT2", "projection of 32 features")])
def test_sizes_that_do_not_divide(family: str, part: str) -> None:
    model = model_of(family)
    layout = find_layout(model, "auto", tensor_parallel=True)
    assert layout is not None
    assert any(part in line for line in check_tensor_parallel(model, layout, 3, False))


# ---- fields that layouts have for them -----------------------------------------------------------------------------------------------


def test_fields_that_are_no_roles() -> None:
    layout = ModelLayout(colwise="h.*.qkv", packed={"h.*.qkv": (4, 2, 2)}, divided="h.*.attn.heads", first_inputs="pixels")
    assert layout.parts_of("h.3.qkv") == (4, 2, 2) and layout.parts_of("h.3.up") is None
    assert layout.divided_of("h.0.attn") == ("heads",)
    part = layout.only(["h.1", "h.1.qkv", "h.1.attn"])
    assert part.packed == (("h.1.qkv", (4, 2, 2)),) and part.divided == ("h.1.attn.heads",) and part.first_inputs == ("pixels",)
    assert eval(layout.paste(), {"ModelLayout": ModelLayout}) == layout
    assert len(layout.unmatched(["h", "h.0", "h.0.qkv"])) == 1  # h.*.attn


@pytest.mark.parametrize("wrong", [{"packed": {"a": 1}}, {"packed": {"a": []}}, {"packed": {"": 2}}, {"divided": "heads"}])
def test_fields_that_make_no_sense(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"layout\.(packed|divided)="):
        ModelLayout(**wrong)
