"""Projectors: against transformers with equal weights, against loops written by hand, padding, counts, initialization, refusals."""

import math

import pytest
import torch
from torch import nn

from lightning_megascale.models.projector import QFormerProjector, build_projector
from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, set_microbatch_weight
from lightning_megascale.parallel.init import materialize

DOUBLE = torch.float64
IN, OUT = 6, 10
SMALL = dict(num_queries=3, num_layers=3, num_heads=2, hidden_size=8)
KINDS = [("linear", {}), ("mlp2x_gelu", {}), ("qformer", SMALL)]
every_kind = pytest.mark.parametrize("kind, sizes", KINDS, ids=[kind for kind, _ in KINDS])


def build(kind, sizes, seed=0, std=0.4, dtype=DOUBLE):
    """With biases and norms that are not 0 and 1, so that each one counts."""
    generator = torch.Generator().manual_seed(seed)
    made = build_projector(kind, IN, OUT, init_std=std, generator=generator, **sizes).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return made


def draw(*shape, seed=1, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(ours, theirs, atol=1e-11):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def gradients(tokens, inputs):
    """Of a sum in which every token and every column weighs differently."""
    return torch.autograd.grad((tokens * draw(*tokens.shape, seed=2)).sum(), inputs)


# ---- values and gradients --------------------------------------------------------------------------------------------------------------


def test_linear_by_hand():
    ours, features = build("linear", {}), draw(2, 5, IN)
    weight, bias = (parameter.tolist() for parameter in ours.parameters())
    by_hand = [
        [[sum(f * w for f, w in zip(feature, row)) + b for row, b in zip(weight, bias)] for feature in image] for image in features.tolist()
    ]
    close(ours(features), torch.tensor(by_hand, dtype=DOUBLE))


def test_mlp_equals_transformers_with_its_state_dict():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(hidden_size=IN, num_attention_heads=2),
        text_config=LlamaConfig(hidden_size=OUT, num_attention_heads=1),
    )
    torch.manual_seed(3)
    theirs = LlavaMultiModalProjector(config).double()
    ours = build("mlp2x_gelu", {})
    ours.load_state_dict(theirs.state_dict(), strict=True)
    features = draw(2, 5, IN).requires_grad_()
    tokens, expected = ours(features), theirs(features)
    close(tokens, expected)
    names = [name for name, _ in ours.named_parameters()]
    assert names == ["linear_1.weight", "linear_1.bias", "linear_2.weight", "linear_2.bias"]
    for a, b in zip(gradients(tokens, [features, *ours.parameters()]), gradients(expected, [features, *theirs.parameters()]), strict=True):
        close(a, b)


def attend(attention, queries, source, heads):
    """One image: a softmax written out, for each head and query."""
    size = queries.shape[1] // heads
    q, k, v = (linear(x) for linear, x in ((attention.q_proj, queries), (attention.k_proj, source), (attention.v_proj, source)))
    rows = []
    for query in q:
        parts = []
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            weights = [torch.exp((query[own] * key[own]).sum() / math.sqrt(size)) for key in k]
            parts.append(sum(weight * value[own] for weight, value in zip(weights, v)) / sum(weights))
        rows.append(torch.cat(parts))
    return attention.o_proj(torch.stack(rows))


def normed(norm, rows):
    centred = [row - row.mean() for row in rows]
    return torch.stack([row / (row.square().mean() + 1e-12).sqrt() * norm.weight + norm.bias for row in centred])


def by_loops(ours, features, heads, cross_attention_every, mask=None):
    """Each image for itself, over the features that count and no others."""
    images = []
    for image, source in enumerate(features):
        source = source if mask is None else source[mask[image]]
        x = normed(ours.norm, ours.queries)
        for number, block in enumerate(ours.layers):
            x = normed(block.self_attention_norm, x + attend(block.self_attention, x, x, heads))
            if number % cross_attention_every == 0:
                x = normed(block.cross_attention_norm, x + attend(block.cross_attention, x, source, heads))
            up = block.up_proj(x)
            x = normed(block.mlp_norm, x + block.down_proj(up * (1 + torch.erf(up / math.sqrt(2))) / 2))
        images.append(ours.out_proj(x))
    return torch.stack(images)


@pytest.mark.parametrize("heads, every, masked", [(2, 2, False), (4, 1, True), (1, 3, True)])
def test_qformer_equals_loops(heads, every, masked):
    ours = build("qformer", {**SMALL, "num_heads": heads, "cross_attention_every": every})
    features = draw(3, 5, IN).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool() if masked else None
    tokens, expected = ours(features, mask), by_loops(ours, features, heads, every, mask)
    assert tokens.shape == (3, SMALL["num_queries"], OUT)
    close(tokens, expected)
    names, parameters = zip(*ours.named_parameters())
    assert sum("cross_attention." in name for name in names) == 8 * math.ceil(3 / every)
    for name, a, b in zip(("features", *names), gradients(tokens, [features, *parameters]), gradients(expected, [features, *parameters])):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


BLIP2_NAMES = {
    "layernorm": "norm",
    "encoder.layer": "layers",
    "crossattention.output.LayerNorm": "cross_attention_norm",
    "crossattention.output.dense": "cross_attention.o_proj",
    "crossattention.attention": "cross_attention",
    "attention.output.LayerNorm": "self_attention_norm",
    "attention.output.dense": "self_attention.o_proj",
    "attention.attention": "self_attention",
    "intermediate_query.dense": "up_proj",
    "output_query.dense": "down_proj",
    "output_query.LayerNorm": "mlp_norm",
    ".query.": ".q_proj.",
    ".key.": ".k_proj.",
    ".value.": ".v_proj.",
}


def test_qformer_equals_transformers_blip2():
    from transformers import Blip2QFormerConfig, Blip2QFormerModel

    size = SMALL["hidden_size"]
    config = Blip2QFormerConfig(
        hidden_size=size, num_hidden_layers=3, num_attention_heads=2, intermediate_size=4 * size, encoder_hidden_size=IN
    )
    theirs, ours = Blip2QFormerModel(config).double().eval(), build("qformer", SMALL)
    state = ours.state_dict()
    renamed = {}
    for name in theirs.state_dict():
        new = name
        for old, our in BLIP2_NAMES.items():
            new = new.replace(old, our)
        renamed[name] = state.pop(new)
    theirs.load_state_dict(renamed)
    assert set(state) == {"queries", "out_proj.weight", "out_proj.bias"}
    features = draw(2, 5, IN).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    hidden = theirs(ours.queries.expand(2, -1, -1), encoder_hidden_states=features, encoder_attention_mask=mask.long()).last_hidden_state
    tokens, expected = ours(features, mask), ours.out_proj(hidden)
    close(tokens, expected)
    for a, b in zip(gradients(tokens, [features, ours.queries]), gradients(expected, [features, ours.queries])):
        close(a, b)


# ---- padding, images without features, batches without images ---------------------------------------------------------------------------


@every_kind
def test_padding_changes_nothing(kind, sizes):
    ours, features = build(kind, sizes), draw(1, 4, IN)
    alone = features.clone().requires_grad_()
    expected = ours(alone)
    want = gradients(expected, [alone, *ours.parameters()])
    for filler in (0.0, 7.0, math.nan, math.inf):
        padded = torch.cat([features, torch.full((1, 3, IN), filler, dtype=DOUBLE)], dim=1).requires_grad_()
        mask = torch.tensor([[True] * 4 + [False] * 3])
        tokens = ours(padded, mask)
        counted = tokens if kind == "qformer" else tokens[:, :4]
        close(counted, expected)
        assert kind == "qformer" or not tokens[:, 4:].any()
        weights = torch.zeros_like(tokens) + 5.0  # what becomes of padding's tokens does not reach a parameter either
        weights[:, : counted.shape[1]] = draw(*counted.shape, seed=2)
        of_padded, *got = torch.autograd.grad((tokens * weights).sum(), [padded, *ours.parameters()])
        close(of_padded[:, :4], want[0])
        assert not of_padded[:, 4:].any()
        for a, b in zip(got, want[1:], strict=True):
            close(a, b)


@every_kind
def test_an_image_of_padding_alone_is_finite_and_leaves_the_others_alone(kind, sizes):
    ours, features = build(kind, sizes), draw(2, 4, IN)
    mask = torch.tensor([[False] * 4, [True] * 4])
    tokens = ours(features, mask)
    assert tokens.isfinite().all()
    close(tokens[1:], ours(features[1:]))
    other = ours(features * 3 + 1, mask)
    close(other[0], tokens[0])
    assert all(gradient.isfinite().all() for gradient in gradients(tokens, list(ours.parameters())))
    if kind == "qformer":
        close(tokens[:1], by_loops(ours, torch.zeros(1, 4, IN, dtype=DOUBLE), heads=2, cross_attention_every=2))


@every_kind
@pytest.mark.parametrize("masked", [False, True])
def test_no_images_give_no_tokens_and_gradients_of_zero(kind, sizes, masked):
    ours = build(kind, sizes)
    tokens = ours(torch.zeros(0, 4, IN, dtype=DOUBLE), torch.ones(0, 4, dtype=torch.bool) if masked else None)
    assert tokens.shape == (0, ours.tokens_out(4), OUT)
    tokens.sum().backward()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_documents_of_the_tokens_do_not_reach_the_queries():
    ours, features = build("qformer", SMALL), draw(2, 4, IN)
    expected = ours(features)
    try:
        set_microbatch_weight(MicrobatchWeight(1.0, documents=torch.tensor([[0, 0, 1], [0, 1, 1]])))  # as many as queries
        close(ours(features), expected, 0)
    finally:
        set_microbatch_weight(MicrobatchWeight(1.0))


def test_every_query_learns_for_itself():
    ours = build("qformer", SMALL)
    (gradient,) = gradients(ours(draw(2, 4, IN)), [ours.queries])
    assert (gradient.norm(dim=1) > 1e-3).all()
    assert torch.linalg.matrix_rank(gradient) == SMALL["num_queries"]
    tokens = ours(draw(2, 4, IN))
    assert (tokens[:, 0] - tokens[:, 1]).abs().max() > 0.1  # and two of them are not the same token


# ---- how many tokens -------------------------------------------------------------------------------------------------------------------


@every_kind
def test_count_is_the_forwards(kind, sizes):
    ours = build(kind, sizes)
    for tokens_in in (1, 2, 7, 50):
        assert ours(draw(1, tokens_in, IN)).shape[1] == ours.tokens_out(tokens_in)
    assert [ours.tokens_out(n) for n in (1, 576, 729)] == ([3, 3, 3] if kind == "qformer" else [1, 576, 729])
    with torch.device("meta"):
        assert build_projector(kind, IN, OUT, **sizes).tokens_out(576) == ours.tokens_out(576)


@every_kind
def test_count_refuses_what_is_no_count(kind, sizes):
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=rf"tokens_in={wrong!r}: must be an integer of at least 1"):
            build(kind, sizes).tokens_out(wrong)


# ---- initialization --------------------------------------------------------------------------------------------------------------------


@every_kind
def test_same_generator_same_start(kind, sizes):
    def start(seed, global_seed=0):
        torch.manual_seed(global_seed)
        return build_projector(kind, IN, OUT, generator=torch.Generator().manual_seed(seed), **sizes).state_dict()

    one, again, other = start(5), start(5, global_seed=1), start(6)
    for name, value in one.items():
        assert torch.equal(value, again[name]), name
        assert torch.equal(value, other[name]) == (value.ndim == 1), name
        assert value.ndim > 1 or torch.equal(value, torch.full_like(value, float("norm.weight" in name))), name


def test_start_has_the_deviation_asked_for():
    generator = torch.Generator().manual_seed(0)
    ours = build_projector("qformer", 96, 128, num_queries=64, num_layers=2, num_heads=4, hidden_size=64, generator=generator)
    for name, value in ours.named_parameters():
        if value.ndim > 1:  # at least 4096 values: three standard errors are 3.4%
            assert 0.02 * 0.96 < value.std() < 0.02 * 1.04 and abs(value.mean()) < 0.001, name
    wide = build_projector("linear", 96, 128, init_std=0.5, generator=generator)
    assert 0.48 < wide.linear.weight.std() < 0.52


@every_kind
def test_starts_from_the_meta_device(kind, sizes):
    with torch.device("meta"):
        ours = build_projector(kind, IN, OUT, **sizes)
    assert all(parameter.is_meta for parameter in ours.parameters())
    materialize(ours, "cpu", seed=3)
    for name, value in ours.named_parameters():
        assert value.isfinite().all() and (value.ndim == 1 or 0 < value.abs().max() < 0.2), name
        assert value.ndim > 1 or torch.equal(value, torch.full_like(value, float("norm.weight" in name))), name
    assert ours(draw(1, 2, IN, dtype=torch.float32)).isfinite().all()


def test_refuses_to_draw_what_it_does_not_know():
    ours = build("linear", {})
    with pytest.raises(ValueError, match=r"module 'extra' is a Conv1d: a projector draws Linear, LayerNorm and queries only"):
        ours.init_module(nn.Conv1d(1, 1, 1), "extra")


def test_numbers_of_blip2_where_none_are_given():
    with torch.device("meta"):
        ours = build_projector("qformer", 1408, 2560)
    assert isinstance(ours, QFormerProjector) and ours.tokens_out(257) == 32 and tuple(ours.queries.shape) == (32, 768)
    crossing = [number for number, block in enumerate(ours.layers) if block.cross_attention is not None]
    assert len(ours.layers) == 12 and crossing == [0, 2, 4, 6, 8, 10] and ours.layers[0].self_attention.num_heads == 12


# ---- refusals --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(kind="mlp2x-gelu"), r"projector kind='mlp2x-gelu': must be one of linear, mlp2x_gelu, qformer; did you mean 'mlp2x_gelu'\?"),
        (dict(kind=None), r"projector kind=None: must be one of linear, mlp2x_gelu, qformer$"),
        (dict(inputs=0, outputs=-1), r"inputs=0: must be an integer of at least 1; outputs=-1: must be an integer of at least 1"),
        (dict(kind="linear", outputs=2.5), r"LinearProjector: outputs=2.5: must be an integer"),
        (dict(num_queries=0), r"QFormerProjector: num_queries=0: must be an integer of at least 1"),
        (dict(num_layers=0), r"num_layers=0: must be an integer of at least 1"),
        (dict(cross_attention_every=0), r"cross_attention_every=0: must be an integer of at least 1"),
        (dict(num_heads=3), r"num_heads=3: must divide hidden_size=8, so that all heads are as wide"),
        (dict(init_std=0.0), r"init_std=0.0: must be positive"),
        (dict(init_std=math.nan), r"init_std=nan: must be positive"),
        (
            dict(kind="mlp2x_gelu"),
            r"num_queries=3, num_layers=3, num_heads=2, hidden_size=8: of no use to a projector of kind='mlp2x_gelu'",
        ),
    ],
)
def test_refuses(changed, message):
    options = dict(kind="qformer", inputs=IN, outputs=OUT, **SMALL)
    if changed.get("kind") == "linear":
        options = dict(inputs=IN, outputs=OUT)
    with pytest.raises(ValueError, match=message):
        build_projector(**{**options, **changed})


@every_kind
@pytest.mark.parametrize(
    "shape, mask, message",
    [
        ((2, 4, IN + 1), None, rf"features of shape \(2, 4, 7\): must be \(images, features of each, inputs={IN}\)"),
        ((4, IN), None, r"features of shape \(4, 6\)"),
        ((2, 0, IN), None, r"one feature at least"),
        ((2, 4, IN), torch.ones(2, 3, dtype=torch.bool), r"mask of shape \(2, 3\), torch.bool: must be \(2, 4\), torch.bool"),
        ((2, 4, IN), torch.ones(2, 4, dtype=torch.long), r"mask of shape \(2, 4\), torch.int64: must be \(2, 4\), torch.bool"),
    ],
)
def test_refuses_features(kind, sizes, shape, mask, message):
    with pytest.raises(ValueError, match=message):
        build(kind, sizes)(draw(*shape), mask)
