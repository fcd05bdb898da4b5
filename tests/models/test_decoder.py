"""The decoder: what its numbers must be, its start, its layout, and the errors of its config."""

import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.models.layers import Attention, LanguageModelHead, Rotation
from lightning_megascale.models.presets import PRESETS

SMALL = DecoderConfig(
    vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, max_position_embeddings=16, init_std=0.3
)
GPT = replace(SMALL, num_kv_heads=4, norm="layer", positions="learned", mlp="gelu", bias=True, tie_embeddings=True)
QWEN = replace(SMALL, qk_norm=True, head_dim=12)
KINDS = {"llama": SMALL, "gpt": GPT, "qwen": QWEN}


def build(config, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return Decoder(config).to(dtype).eval()


def tokens(seed=1, shape=(3, 10)):
    return torch.randint(96, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_that_of_the_logits(kind):
    model, input_ids, labels = build(KINDS[kind]), tokens(), tokens(2)
    labels[0, 3:6] = -100
    logits = model(input_ids)
    loss, count = model(input_ids, labels=labels)
    assert logits.shape == (3, 10, 96) and count == 27
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-11)
    names, parameters = zip(*model.named_parameters(), strict=True)
    for name, ours, theirs in zip(names, torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_no_position_sees_a_later_one(kind):
    model, input_ids = build(KINDS[kind]), tokens()
    changed = input_ids.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 96
    before, after = model(input_ids), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=0, atol=1e-13)
    assert ((before[:, 6:] - after[:, 6:]).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_positions_matter(kind):
    model, input_ids = build(KINDS[kind]), tokens()
    counted = torch.arange(10).expand(3, 10)
    torch.testing.assert_close(model(input_ids, position_ids=counted), model(input_ids), rtol=0, atol=0)
    shuffled = counted[:, torch.randperm(10, generator=torch.Generator().manual_seed(3))]
    assert (model(input_ids, position_ids=shuffled) - model(input_ids)).abs().max() > 1e-3
    row = torch.stack([counted[0], shuffled[0], counted[0]])  # every row keeps its own
    mixed = model(input_ids, position_ids=row)
    torch.testing.assert_close(mixed[0], model(input_ids)[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(mixed[1], model(input_ids, position_ids=shuffled)[1], rtol=0, atol=1e-12)


def test_rope_is_relative():
    model, input_ids = build(SMALL), tokens()
    moved = torch.arange(10).expand(3, 10) + 1000
    torch.testing.assert_close(model(input_ids, position_ids=moved), model(input_ids), rtol=0, atol=1e-9)


def test_rotation_turns_pairs_by_position_times_frequency():
    rotation = Rotation.from_positions(torch.tensor([[0, 3]]), 4, 100.0, torch.float64)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).expand(1, 2, 1, 4)
    out = rotation.apply(x)
    torch.testing.assert_close(out[0, 0, 0], x[0, 0, 0])
    pairs = [complex(1, 3) * complex(math.cos(3), math.sin(3)), complex(2, 4) * complex(math.cos(0.3), math.sin(0.3))]
    expected = torch.tensor([pairs[0].real, pairs[1].real, pairs[0].imag, pairs[1].imag], dtype=torch.float64)
    torch.testing.assert_close(out[0, 1, 0], expected, rtol=0, atol=1e-14)
    assert Rotation.from_positions(torch.tensor([[3]]), 4, 100.0, torch.bfloat16).cos.dtype == torch.float32
    assert rotation.apply(x.bfloat16()).dtype == torch.bfloat16


def test_grouped_heads_equal_repeated_ones():
    grouped, repeated = build(SMALL), build(replace(SMALL, num_kv_heads=4))
    state = grouped.state_dict()
    for name in state:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    repeated.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens()), repeated(tokens()), rtol=0, atol=1e-12)


def test_attention_works_on_a_share_of_the_heads():
    torch.manual_seed(0)
    whole = Attention(16, 4, 2, 4).double()
    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    parts = []
    for rank in range(2):
        part = Attention(16, 2, 1, 4).double()
        for name, rows in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4)):
            getattr(part, name).weight.data = getattr(whole, name).weight.data[rank * rows : (rank + 1) * rows]
        part.o_proj.weight.data = whole.o_proj.weight.data[:, rank * 8 : (rank + 1) * 8]
        parts.append(part(hidden))
    torch.testing.assert_close(sum(parts), whole(hidden), rtol=0, atol=1e-13)


def test_the_core_is_replaceable():
    model = build(SMALL)
    seen = []

    class Core(torch.nn.Module):
        def forward(self, q, k, v, is_causal=True):
            seen.append((q.shape, k.shape, is_causal))
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf)
            return scores.softmax(-1) @ v

    expected = model(tokens())
    for layer in model.layers:
        layer.attention.core = Core()
    torch.testing.assert_close(model(tokens()), expected, rtol=0, atol=1e-12)
    assert seen == [((3, 4, 10, 8), (3, 2, 10, 8), True)] * 2


def test_dropout_is_on_the_embedding_and_what_is_added_only():
    model = build(replace(SMALL, dropout=0.5))
    torch.testing.assert_close(model(tokens()), model(tokens()), rtol=0, atol=0)
    model.train()
    assert not torch.equal(model(tokens()), model(tokens()))
    dropouts = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)]
    assert dropouts == ["embed_dropout"] + [f"layers.{i}.{part}_dropout" for i in range(2) for part in ("attention", "mlp")]
    for name in dropouts:  # each one is used
        for other in dropouts:
            model.get_submodule(other).p = 0.5 if other == name else 0.0
        assert not torch.equal(model(tokens()), model(tokens())), name


def test_the_start():
    model = Decoder(replace(PRESETS["tiny"], norm="layer", bias=True, qk_norm=True, init_std=0.05, num_layers=8, vocab_size=4096))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.05 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.05
            error = 4 * std / math.sqrt(2 * parameter.numel())  # four standard errors
            assert abs(parameter.std().item() - std) < error and abs(parameter.mean().item()) < 4 * std / math.sqrt(parameter.numel()), name


def test_the_start_follows_the_generator_and_module_by_module():
    first, second, other = build(GPT, 7), build(GPT, 7), build(GPT, 8)
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and (torch.equal(a, c) == (a.ndim == 1)), name
    with torch.device("meta"):
        model = Decoder(GPT)
    assert all(parameter.is_meta for parameter in model.parameters())
    model = model.to_empty(device="cpu")
    model.tie_weights()
    assert model.head.weight is model.embed_tokens.weight
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    for name, module in model.named_modules():
        model.init_module(module, name)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_meta_device(kind):
    with torch.device("meta"):
        model = Decoder(KINDS[kind])
        input_ids = torch.zeros(2, 8, dtype=torch.long)
    loss, count = model(input_ids, labels=input_ids)
    loss.backward()
    assert model(input_ids).shape == (2, 8, 96) and loss.is_meta and count.is_meta
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def test_tied_head():
    model = build(GPT)
    assert "head.weight" not in dict(model.named_parameters())
    before = model(tokens())
    with torch.no_grad():
        model.embed_tokens.weight.mul_(2)
    assert not torch.allclose(before, model(tokens()))
    assert build(SMALL).head.weight is not build(SMALL).embed_tokens.weight


def test_head_with_bias_and_chunks():
    torch.manual_seed(0)
    head = LanguageModelHead(8, 20, chunk_tokens=3).double()
    hidden, labels = torch.randn(2, 5, 8, dtype=torch.float64), tokens(shape=(2, 5)) % 20
    loss, count = head(hidden, labels)
    expected = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    assert count == 10 and head.bias is None


@pytest.mark.parametrize("kind", KINDS)
def test_layout_names_every_part_once(kind):
    model = build(KINDS[kind])
    names = [name for name, _ in model.named_modules()]
    roles = model.megascale_layout.resolve(names)
    assert roles["blocks"] == ("layers.0", "layers.1") and roles["head"] == ("head",)
    assert roles["embedding"] == (("embed_tokens", "embed_positions") if kind == "gpt" else ("embed_tokens",))
    owners = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    taken = [name for role in ("colwise", "rowwise", "norms", "replicated", "embedding", "head") for name in roles[role]]
    assert sorted(taken) == sorted(owners)
    outside = [name for name in names if name and "." not in name and name != "layers"]
    assert sorted(roles["first"] + roles["last"]) == sorted(outside)
    if kind == "qwen":
        assert roles["replicated"] == tuple(f"layers.{i}.attention.{n}_norm" for i in range(2) for n in "qk")
    assert roles["rowwise"] == tuple(f"layers.{i}.{n}" for i in range(2) for n in ("attention.o_proj", "mlp.down_proj"))


def test_a_row_longer_than_the_learned_positions_is_refused():
    with pytest.raises(ValueError, match="input_ids have 17 tokens in a row, must be at most max_position_embeddings=16"):
        build(GPT)(tokens(shape=(1, 17)))


def test_config_lists_everything_wrong():
    with pytest.raises(ValueError) as error:
        replace(SMALL, num_layers=0, norm="batch", dropout=1.0, hidden_size=2.5)
    for part in ("num_layers=0: must be an integer", "norm='batch': must be one of rms, layer", "dropout=1.0", "hidden_size=2.5"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="num_kv_heads=3: must divide num_heads=4"):
        replace(SMALL, num_kv_heads=3)
    with pytest.raises(ValueError, match="num_heads=3: must divide hidden_size=32, or give head_dim"):
        replace(SMALL, num_heads=3, num_kv_heads=None, head_dim=None)
    with pytest.raises(ValueError, match="head_dim=7: must be even"):
        replace(SMALL, head_dim=7)
    replace(GPT, head_dim=7)


def test_config_from_dict():
    assert DecoderConfig.from_dict(asdict(QWEN)) == QWEN
    with pytest.raises(ValueError, match="no key 'num_layer'; did you mean 'num_layers'?"):
        DecoderConfig.from_dict({"num_layer": 2})
    with pytest.raises(ValueError, match="needs hidden_size, num_layers"):
        DecoderConfig.from_dict({"vocab_size": 2})
