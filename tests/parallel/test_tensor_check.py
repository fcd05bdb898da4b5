"""Rules of tensor parallelism, on meta modules and without a process group: each violation has its message, a right model has none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_megascale.layout import ModelLayout
from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.parallel.tensor import check_tensor_parallel

SIZES = dict(vocab_size=48, hidden_size=32, num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=48, max_position_embeddings=32)


def decoder(**shape) -> Decoder:  # type: ignore[no-untyped-def]
    with torch.device("meta"):
        return Decoder(DecoderConfig(**{**SIZES, **shape}))


def messages(model: Decoder, tp: int = 2, sequence_parallel: bool = True, layout: ModelLayout | None = None) -> list[str]:
    return check_tensor_parallel(model, layout or model.megascale_layout, tp, sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_right_models_have_no_message(sequence_parallel: bool) -> None:
    for shape in ({}, dict(positions="learned", norm="layer", bias=True, tie_embeddings=True, mlp="gelu", dropout=0.1), dict(qk_norm=True)):
        assert messages(decoder(**shape), 4, sequence_parallel) == []


def test_presets_are_legal_at_their_usual_sizes() -> None:
    for name in ("7b", "dense_175b"):
        with torch.device("meta"):
            model = Decoder(replace(PRESETS[name], num_layers=1))
        assert [m for m in messages(model, 8) if "vocab" not in m and "num_embeddings" not in m and "head" not in m] == []


def test_pattern_that_matches_nothing_names_the_nearest() -> None:
    model = decoder()
    (message,) = messages(model, layout=replace(model.megascale_layout, mlp=["layers.*.mlp", "layers.*.mpl"]))
    assert message == "layout.mlp: pattern 'layers.*.mpl' matches no module; the nearest name is 'layers.*.mlp'"


def test_missing_roles() -> None:
    model = decoder()
    empty = replace(model.megascale_layout, colwise=(), norms=())
    found = messages(model, layout=empty)
    assert any(m.startswith("layout.colwise names no module, tensor parallelism needs it") for m in found)
    assert any(m.startswith("layout.norms names no module, sequence_parallel needs it") for m in found)
    assert not any("layout.norms" in m for m in messages(model, 2, False, layout=empty))


def test_sizes_that_do_not_divide_come_with_the_nearest_legal_ones() -> None:
    found = messages(decoder(intermediate_size=50, vocab_size=49), tp=4)
    legal = "is not divisible by tensor_parallel_size=4; the nearest legal size is {}, the nearest legal tensor_parallel_size {}"
    assert f"layers.0.mlp.up_proj (and 2 more like it): out_features=50 {legal.format('48 or 52', 5)}" in found
    assert f"layers.0.mlp.down_proj (and 2 more like it): in_features=50 {legal.format('48 or 52', 5)}" in found
    assert f"embed_tokens: num_embeddings=49 {legal.format('48 or 52', 7)}" in found
    assert f"head: out_features=49 {legal.format('48 or 52', 7)}" in found


def test_heads_must_be_whole() -> None:
    """Two key/value heads of 4 are 8 features, which 4 ranks divide."""
    found = messages(decoder(num_kv_heads=2), tp=4)
    wanted = "2 heads of head_dim=4 are not divisible by tensor_parallel_size=4; the nearest legal size is 4, the nearest legal "
    assert [m for m in found if "k_proj" in m] == [f"layers.0.attention.k_proj (and 2 more like it): {wanted}tensor_parallel_size 2"]
    model = decoder()
    model.layers[1].attention.num_key_value_heads = 3
    assert messages(model, 2)[0].startswith("layers.1.attention: num_key_value_heads=3 is not divisible by tensor_parallel_size=2")


class Wrapped(nn.Linear):
    """A linear that is more than a linear, such as one with adapters."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.layers[0].mlp, "up_proj", Wrapped(32, 48)), "layers.0.mlp.up_proj: is Wrapped, a colwise layer must be a"),
        (lambda m: setattr(m, "embed_tokens", nn.EmbeddingBag(48, 32)), "embed_tokens: is EmbeddingBag, an embedding must be a plain"),
        (lambda m: setattr(m.embed_tokens, "max_norm", 1.0), "embed_tokens: max_norm, scale_grad_by_freq and sparse cannot be split"),
        (lambda m: setattr(m, "head", Wrapped(32, 48)), "head: is Wrapped, a head must be a plain nn.Linear, or a subclass whose forward"),
        (lambda m: m.layers[0].attention.add_module("drop", nn.Dropout(0.1)), "layers.0.attention.drop: p=0.1: dropout inside attention"),
        (lambda m: setattr(m.layers[1].mlp, "dropout_p", 0.2), "layers.1.mlp: dropout_p=0.2: dropout inside attention or mlp is not"),
        (lambda m: setattr(m, "embed_dropout", nn.AlphaDropout(0.1)), "embed_dropout: is AlphaDropout with p=0.1; only nn.Dropout"),
        (lambda m: m.layers[2].mlp.add_module("norm", nn.LayerNorm(48)), "layers.2.mlp.norm: LayerNorm has parameters inside attention or"),
        (lambda m: m.layers[2].add_module("extra", nn.RMSNorm(32)), "layers.2.extra: RMSNorm has parameters but no role; under sequence_p"),
        (lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))), "the model itself: Decoder has parameters but no role"),
        (lambda m: setattr(m.layers[0].mlp, "up_proj", nn.Linear(32, 96)), "layers.0.mlp.up_proj: out_features=96 are more than the"),
        (lambda m: setattr(m.layers[0].mlp, "forward", lambda x: x), "layers.0.mlp: its forward was replaced on the instance"),
        (lambda m: setattr(m.layers[0].attention_norm, "weight", m.norm.weight), None),
        (lambda m: setattr(m.norm, "weight", m.embed_tokens.weight), "embed_tokens: shares a parameter with norm, which is not split the"),
    ],
)
def test_modules_that_cannot_be_split_are_named(change, message: str | None) -> None:  # type: ignore[no-untyped-def]
    model = decoder(mlp="gelu")
    change(model)
    found = messages(model)
    assert [m[: len(message)] for m in found] == [message] if message else not found


def test_what_only_sequence_parallelism_needs() -> None:
    model = decoder()
    model.layers[2].add_module("extra", nn.RMSNorm(32))
    assert messages(model, sequence_parallel=False) == []


ATTENTION, NORMS = "layers.*.attention", ["layers.*.attention_norm", "layers.*.mlp_norm", "norm"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(colwise=["layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"], replicated=[f"{ATTENTION}.{x}" for x in "qkv"]),
            "layers.0.attention.o_proj (and 2 more like it): is row-parallel, but no column-parallel linear is in the same attention or",
        ),
        (
            dict(norms=[*NORMS, f"{ATTENTION}.q_norm"]),
            "layers.0.attention.q_norm (and 2 more like it): is in layout.norms but inside attention or mlp",
        ),
        (
            dict(replicated=[f"{ATTENTION}.k_norm", f"{ATTENTION}.q_norm", "norm"], norms=NORMS[:2]),
            "norm: is in layout.replicated but outside of attention and mlp, where its gradient is whole: list it in layout.norms",
        ),
        (
            dict(rowwise=[f"{ATTENTION}.o_proj", "layers.*.mlp.down_proj", "layers.*.mlp.up_proj"]),
            "layers.0.mlp.up_proj (and 2 more like it): is in layout.colwise and layout.rowwise; a module has one of these roles",
        ),
    ],
)
def test_roles_in_the_wrong_place_are_named(changes: dict, message: str) -> None:
    model = decoder(qk_norm=True)
    found = messages(model, layout=replace(model.megascale_layout, **changes))
    assert any(line.startswith(message) for line in found), found


def test_tied_head_without_its_role() -> None:
    model = decoder(tie_embeddings=True)
    found = messages(model, sequence_parallel=False, layout=replace(model.megascale_layout, head=()))
    assert found == ["embed_tokens: shares a parameter with head, which is not split the same way; list both"]


def test_several_rules_come_together() -> None:
    model = decoder(intermediate_size=50, vocab_size=49)
    model.layers[0].attention.add_module("drop", nn.Dropout(0.1))
    assert len(messages(model, 4)) == 6  # gate, up, down; embedding, head; dropout
