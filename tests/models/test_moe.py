"""Router, experts and the whole layer: against transformers with copied weights, by hand, and in a decoder that trains."""

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_megascale.models import moe
from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.models.layers import FeedForward
from lightning_megascale.models.moe import GroupedExperts, MixtureOfExperts, Router, over_capacity
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, set_microbatch_weight
from lightning_megascale.ops.balance import update_bias
from lightning_megascale.parallel.expert_balance import Routers
from lightning_megascale.parallel.init import materialize

DOUBLE = torch.float64
WIDTH, EXPERTS = 16, 8


@pytest.fixture(autouse=True)
def plain_microbatch():
    torch.manual_seed(0)
    yield
    set_microbatch_weight(MicrobatchWeight(1.0))


def router(top_k=2, seed=0, dtype=DOUBLE, **options):
    torch.manual_seed(seed)
    made = Router(WIDTH, EXPERTS, top_k, **options)
    made.reset_parameters(0.5)
    return made.to(dtype)


def draw(*shape, dtype=DOUBLE):
    return torch.randn(*shape, dtype=dtype)


def close(ours, theirs, atol=1e-10):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def by_expert(weights, indices):
    """(T, E): the same whatever the order of the choices."""
    return torch.zeros(len(weights), EXPERTS + 1, dtype=weights.dtype).scatter_add(1, indices, weights)


# ---- the router ------------------------------------------------------------------------------------------------------------------------


def test_softmax_router_equals_transformers():
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    mixtral = MixtralTopKRouter(MixtralConfig(hidden_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=2))
    qwen = [
        Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=3, norm_topk_prob=normalize))
        for normalize in (True, False)
    ]
    for peer, top_k, normalize in ((mixtral, 2, True), (qwen[0], 3, True), (qwen[1], 3, False)):
        ours = router(top_k, dtype=torch.float32, normalize=normalize)
        peer.load_state_dict({"weight": ours.weight.detach()})
        hidden = draw(3, 7, WIDTH, dtype=torch.float32).requires_grad_()
        weights, indices = ours(hidden)
        _, peer_weights, peer_indices = peer(hidden)
        assert torch.equal(indices, peer_indices) and weights.shape == (21, top_k)
        close(weights, peer_weights, 1e-6)
        gradient = draw(21, top_k, dtype=torch.float32)
        for a, b in zip(
            torch.autograd.grad(weights, [hidden, ours.weight], gradient),
            torch.autograd.grad(peer_weights, [hidden, peer.weight], gradient),
            strict=True,
        ):
            close(a, b, 1e-5)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_sigmoid_router_equals_transformers(groups, normalize):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    shape = dict(hidden_size=WIDTH, n_routed_experts=EXPERTS, num_local_experts=EXPERTS, num_experts_per_tok=3, routed_scaling_factor=2.5)
    peer = DeepseekV3TopkRouter(DeepseekV3Config(**shape, n_group=groups[0], topk_group=groups[1], norm_topk_prob=normalize))
    ours = router(
        3, dtype=torch.float32, scores="sigmoid", normalize=normalize, scale=2.5, num_groups=groups[0], groups_per_token=groups[1],
        bias_rate=0.1,
    )  # fmt: skip
    ours.expert_bias.copy_(draw(EXPERTS) / 4)
    peer.load_state_dict({"weight": ours.weight.detach(), "e_score_correction_bias": ours.expert_bias})
    hidden = draw(2, 50, WIDTH, dtype=torch.float32)
    _, peer_weights, peer_indices = peer(hidden)
    close(by_expert(*ours(hidden)), by_expert(peer_weights, peer_indices), 1e-6)


def test_group_limited_softmax_takes_groups_by_their_best():
    ours = router(2, num_groups=4, groups_per_token=1, normalize=False)
    ours.weight.data = torch.zeros(EXPERTS, WIDTH, dtype=DOUBLE)
    ours.weight.data[:, 0] = torch.tensor([3.0, -3.0, 2.0, 2.0, 0.0, 0.0, 1.0, 1.0])  # the best stands alone in its group
    weights, indices = ours(torch.eye(WIDTH, dtype=DOUBLE)[0].view(1, 1, -1))
    assert indices.tolist() == [[0, 1]]
    close(weights[0], ours.weight[:, 0].softmax(-1)[:2].detach())


def test_bias_changes_the_choice_and_never_the_weights():
    ours = router(2, scores="sigmoid", bias_rate=0.01, normalize=False)
    hidden = draw(1, 30, WIDTH)
    scores = F.linear(hidden, ours.weight).sigmoid().squeeze(0)
    ours.expert_bias[5] = 10.0
    weights, indices = ours(hidden)
    assert (indices[:, 0] == 5).all()
    close(weights, scores.gather(1, indices))
    ours.expert_bias.zero_()[:6] = -10.0
    assert ours(hidden)[1].min() == 6


def test_bias_evens_out_the_load():
    ours = router(2, scores="sigmoid", bias_rate=0.02).train()
    hidden = draw(4, 64, WIDTH) + 1.5
    loads = []
    for _ in range(60):
        before = 0 if ours.counts is None else ours.counts.assignments.clone()
        ours(hidden)
        loads.append(ours.counts.assignments - before)
        update_bias(ours.expert_bias, loads[-1], ours.bias_rate)
    assert loads[0].max() > 2 * loads[0].mean() and loads[-1].max() < 1.3 * loads[-1].mean()


def test_scores_are_wide():
    """In bfloat16 some tokens would go to other experts; logits are made in float32 of the same values, also under autocast."""
    ours = router(dtype=torch.bfloat16)
    hidden = draw(2, 200, WIDTH).bfloat16()
    weights, indices = ours(hidden)
    exact = F.linear(hidden.float(), ours.weight.float()).softmax(-1).topk(2).indices.flatten(0, 1)
    assert weights.dtype == torch.float32 and torch.equal(indices, exact)
    assert not torch.equal(F.linear(hidden, ours.weight).softmax(-1).topk(2).indices.flatten(0, 1), exact)
    wide, values = router(dtype=torch.float32), draw(2, 200, WIDTH, dtype=torch.float32)
    expected = wide(values)
    with torch.autocast("cpu", torch.bfloat16):
        ours = wide(values)
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])
    assert router()(draw(1, 3, WIDTH))[0].dtype == DOUBLE


def test_buffers_keep_their_types():
    ours = router(dtype=torch.float32, bias_rate=0.1)
    ours.expert_bias.copy_(torch.linspace(0.1, 1, EXPERTS))
    ours.last_step.copy_(torch.arange(EXPERTS) + 2**40 + 1)
    before = {name: buffer.clone() for name, buffer in ours.named_buffers()}
    assert {name: buffer.dtype for name, buffer in before.items()} == {"expert_bias": torch.float32, "last_step": DOUBLE}
    for moved in (nn.Sequential(ours).bfloat16()[0], ours.half(), ours.double(), ours.to(torch.bfloat16), copy.deepcopy(ours)):
        for name, buffer in before.items():
            assert torch.equal(getattr(moved, name), buffer) and getattr(moved, name).dtype == buffer.dtype
    assert ours.weight.dtype == torch.bfloat16 and set(ours.state_dict()) == {"weight", "expert_bias", "last_step"}
    with torch.device("meta"):
        meta = Router(WIDTH, EXPERTS, 2, bias_rate=0.1)
    meta = meta.bfloat16()
    assert meta.last_step.dtype == DOUBLE and meta.last_step.is_meta and meta.to_empty(device="cpu").last_step.dtype == DOUBLE
    assert Router(WIDTH, EXPERTS, 2).expert_bias is None


# ---- capacity --------------------------------------------------------------------------------------------------------------------------


def test_drops_by_hand():
    indices = torch.tensor([[[0, 1], [0, 1], [0, 2], [1, 0]], [[2, 0], [2, 0], [2, 1], [2, 1]]])
    weights = torch.tensor([[[0.6, 0.4], [0.9, 0.1], [0.6, 0.4], [0.7, 0.3]], [[0.5, 0.5], [0.5, 0.5], [0.8, 0.2], [0.5, 0.5]]])
    expected = torch.zeros(2, 4, 2, dtype=torch.bool)
    expected[0, 2, 0] = expected[0, 3, 1] = True  # expert 0 keeps tokens 1 and 0; of the equal 0 and 2 the earlier
    expected[0, 1, 1] = True  # expert 1 keeps tokens 3 and 0
    expected[1, 1, 0] = expected[1, 3, 0] = True  # expert 2 keeps tokens 2 and 0
    assert torch.equal(over_capacity(indices, weights, 2), expected)
    assert not over_capacity(indices, weights, 4).any() and over_capacity(indices, weights, 0).all()


def test_capacity_of_the_router():
    ours = router(2, capacity_factor=0.5, balance_loss=0.1).train()
    hidden = draw(3, 12, WIDTH)
    free = copy.deepcopy(ours)
    free.capacity_factor = None
    weights, indices = ours(hidden)
    free_weights, free_indices = free(hidden)
    rows = indices.view(3, 24)
    assert all((rows == expert).sum(1).max() <= math.ceil(0.5 * 12 * 2 / EXPERTS) for expert in range(EXPERTS))
    dropped = indices == EXPERTS
    assert dropped.any() and not weights[dropped].any()
    assert torch.equal(indices[~dropped], free_indices[~dropped]) and torch.equal(weights[~dropped], free_weights[~dropped])
    assert torch.equal(ours.counts.assignments, free.counts.assignments) and ours.counts.dropped == dropped.sum()
    split = [router(2, capacity_factor=0.5).train()(hidden[row : row + 1])[1] for row in range(3)]  # whatever rows come together
    assert torch.equal(torch.cat(split), indices)
    roomy = copy.deepcopy(ours)
    roomy.capacity_factor = float(EXPERTS)
    assert torch.equal(roomy(hidden)[1], free_indices)


# ---- losses and counts of the router ---------------------------------------------------------------------------------------------------

BALANCED = dict(balance_loss=0.3, z_loss=0.2)


def expected_losses(made, hidden, mask, fractions):
    logits = F.linear(hidden, made.weight)
    scores = logits.softmax(-1) if made.scores == "softmax" else logits.sigmoid()
    p = scores / scores.sum(-1, keepdim=True)
    chosen = logits.logsumexp(-1)[mask]
    return 0.3 * EXPERTS * (p * fractions).sum(-1)[mask].mean() + 0.2 * (chosen**2).mean()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", ["global", "sequence", "microbatch"])
def test_losses_join_the_backward(scope, scores):
    made = router(balance_scope=scope, scores=scores, **BALANCED).train()
    made.last_step.copy_(torch.tensor([9.0, 1, 2, 3, 4, 5, 6, 2]))
    hidden, mask = draw(3, 9, WIDTH), torch.rand(3, 9) < 0.7
    set_microbatch_weight(MicrobatchWeight(1.0, tokens=mask))
    weights, indices = made(hidden)
    gradient = draw(*weights.shape)
    ours = torch.autograd.grad(weights, made.weight, gradient)[0]
    made.eval()
    silent = torch.autograd.grad(made(hidden)[0], made.weight, gradient)[0]
    counted = F.one_hot(indices.view(3, 9, 2), EXPERTS).sum(2).double() * mask.unsqueeze(-1)
    fractions = {
        "global": made.last_step / 32,
        "microbatch": counted.sum((0, 1)) / (2 * mask.sum()),
        "sequence": counted.sum(1, keepdim=True) / (2 * mask.sum(1).view(3, 1, 1)),
    }[scope]
    expected = torch.autograd.grad(expected_losses(made, hidden, mask, fractions), made.weight)[0]
    close(ours - silent, expected)


def test_weight_of_the_losses_is_that_of_their_tokens():
    """A step of 10 labels and 20 tokens, of which this rank has 3 and 7: its tokens weigh 7 * (10 / 20) / 10."""
    made = router(**BALANCED).train()
    hidden, mask = draw(1, 9, WIDTH), torch.arange(9).view(1, 9) < 7
    weight = MicrobatchWeight(0.3, unit=0.1, tokens=mask)
    set_microbatch_weight(weight)
    weights, _ = made(hidden)
    assert weight.is_used and int(weight.held(1)) == 7
    weight.labels_per_token = 0.5
    ours = torch.autograd.grad(weights, made.weight, torch.zeros_like(weights))[0]
    loss = expected_losses(made, hidden, mask, torch.full((EXPERTS,), 1 / 8, dtype=DOUBLE))
    close(ours, 7 * 0.5 * 0.1 * torch.autograd.grad(loss, made.weight)[0])


def test_counts_are_exact_under_checkpoints_evaluation_and_padding():
    made = router(**BALANCED, capacity_factor=1.0).train()
    hidden, mask = draw(2, 10, WIDTH).requires_grad_(), torch.rand(2, 10) < 0.7
    assert made.counts is None
    with torch.no_grad():
        made(hidden)
    made.eval()(hidden)
    assert made.counts is None
    made.train()
    set_microbatch_weight(MicrobatchWeight(1.0, tokens=mask))
    weights, indices = made(hidden)
    once = made.counts.snapshot()
    expected = F.one_hot(router().eval()(hidden)[1], EXPERTS).sum(1)[mask.flatten()].sum(0)
    assert torch.equal(made.counts.assignments, expected.double()) and made.counts.tokens == mask.sum() and made.counts.calls == 1
    assert made.counts.dropped == (indices == EXPERTS)[mask.flatten()].sum()
    plain = torch.autograd.grad(weights.sum(), made.weight)[0]
    again = checkpoint(lambda x: made(x)[0], hidden, use_reentrant=False)
    set_microbatch_weight(MicrobatchWeight(1.0, tokens=~mask))  # another microbatch is current by then
    recomputed = torch.autograd.grad(again.sum(), made.weight)[0]
    assert torch.equal(made.counts.vector, 2 * once)
    close(recomputed, plain)


def test_a_mask_of_other_tokens_is_refused():
    set_microbatch_weight(MicrobatchWeight(1.0, tokens=torch.ones(2, 9, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"shape \(2, 9\), the layer's tokens \(2, 10\)"):
        router().train()(draw(2, 10, WIDTH))


def test_fractions_are_shared():
    made = router(balance_scope="microbatch", **BALANCED).train()
    tables = []
    made.share_counts = lambda table: tables.append(table) or table
    made(draw(2, 5, WIDTH))
    made.balance_scope = "global"
    made(draw(2, 5, WIDTH))
    assert len(tables) == 1 and tables[0].shape == (1, EXPERTS + 1) and tables[0][0, -1] == 10


# ---- the layer -------------------------------------------------------------------------------------------------------------------------


def test_layer_equals_transformers():
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    shape = dict(hidden_size=WIDTH, moe_intermediate_size=24, n_routed_experts=EXPERTS, num_local_experts=EXPERTS, num_experts_per_tok=3)
    peer = DeepseekV3MoE(DeepseekV3Config(**shape, n_shared_experts=2, n_group=4, topk_group=2, routed_scaling_factor=2.5))
    for parameter in peer.parameters():
        nn.init.normal_(parameter, std=0.3)
    sigmoid = router(3, dtype=torch.float32, scores="sigmoid", scale=2.5, num_groups=4, groups_per_token=2, bias_rate=0.1)
    ours = MixtureOfExperts(sigmoid, GroupedExperts(EXPERTS, WIDTH, 24), FeedForward(WIDTH, 48))
    names = {"router.": "gate.", "shared.": "shared_experts."}
    state = peer.state_dict()
    for name, parameter in ours.named_parameters():
        for mine, theirs in names.items():
            name = name.replace(mine, theirs)
        parameter.data.copy_(state[name])
    hidden = draw(2, 11, WIDTH, dtype=torch.float32).requires_grad_()
    close(ours(hidden), peer(hidden), 1e-4)
    gradient = draw(2, 11, WIDTH, dtype=torch.float32)
    a = torch.autograd.grad(ours(hidden), [hidden, ours.router.weight, *ours.experts.parameters(), *ours.shared.parameters()], gradient)
    b = torch.autograd.grad(
        peer(hidden), [hidden, peer.gate.weight, *peer.experts.parameters(), *peer.shared_experts.parameters()], gradient
    )
    for one, other in zip(a, b, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_experts_equal_transformers_both_ways():
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=WIDTH, intermediate_size=24, num_local_experts=EXPERTS, num_experts_per_tok=2)
    for implementation in ("eager", "grouped_mm"):
        config._experts_implementation = implementation
        ours, peer = GroupedExperts(EXPERTS, WIDTH, 24), MixtralExperts(config)
        peer.load_state_dict(ours.state_dict())
        hidden, weights = (draw(30, size, dtype=torch.float32).requires_grad_() for size in (WIDTH, 2))
        indices = torch.rand(30, EXPERTS).topk(2).indices
        gradient = draw(30, WIDTH, dtype=torch.float32)
        for a, b in zip(
            torch.autograd.grad(ours(hidden, indices, weights), [hidden, weights, *ours.parameters()], gradient),
            torch.autograd.grad(peer(hidden, indices, weights), [hidden, weights, *peer.parameters()], gradient),
            strict=True,
        ):
            assert (a - b).norm() <= 1e-5 * b.norm()


def test_meanwhile_and_a_part_of_the_experts():
    experts = GroupedExperts(EXPERTS, WIDTH, 24).double()
    hidden, weights, indices = draw(9, WIDTH), draw(9, 2), torch.rand(9, EXPERTS).topk(2).indices
    whole = experts(hidden, indices, weights)
    out, other = experts(hidden, indices, weights, meanwhile=lambda: "shared")
    assert torch.equal(out, whole) and other == "shared"
    parts = []
    for part in range(2):
        half = GroupedExperts(EXPERTS, WIDTH, 24)
        half.num_experts = 4
        for name, parameter in experts.named_parameters():
            setattr(half, name, nn.Parameter(parameter[4 * part : 4 * part + 4]))
        local = torch.where(indices // 4 == part, indices % 4, 4)
        parts.append(half(hidden, local, weights))
    close(sum(parts), whole)
    half.num_experts = EXPERTS
    with pytest.raises(ValueError, match="num_experts=8, but gate_up_proj holds 4"):
        half(hidden, indices, weights)


# ---- the decoder -----------------------------------------------------------------------------------------------------------------------

TINY = replace(PRESETS["tiny_moe"], vocab_size=64, hidden_size=32, intermediate_size=48, expert_intermediate_size=32)
SIGMOID = replace(TINY, router_scores="sigmoid", balance_bias_rate=0.01, num_expert_groups=4, num_groups_per_token=2, router_scale=2.0)
CAPPED = replace(TINY, num_dense_layers=0, num_shared_experts=0, capacity_factor=1.0, balance_scope="microbatch")


@pytest.mark.parametrize("config", [TINY, SIGMOID, CAPPED], ids=["shared", "sigmoid", "capacity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_decoder_trains(config, dtype):
    torch.manual_seed(0)
    model = Decoder(config).to(dtype).train()
    ids = torch.randint(64, (4, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss, count = model(ids[:, :-1], labels=ids[:, 1:])
        (loss / count).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / count.item())
    assert losses[-1] < 0.7 * losses[0], losses


def test_decoder_under_checkpoints_is_the_same():
    torch.manual_seed(0)
    model, ids = Decoder(SIGMOID).double().train(), torch.randint(64, (2, 16))

    def gradients():
        model.zero_grad()
        model(ids, labels=ids)[0].backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    counted = [layer.mlp.router.counts.snapshot() for layer in model.layers[1:]]
    for layer in model.layers:
        layer.forward = lambda *a, run=layer.forward: checkpoint(run, *a, use_reentrant=False)
    for ours, theirs in zip(gradients(), expected, strict=True):
        close(ours, theirs, 1e-12)
    for layer, before in zip(model.layers[1:], counted, strict=True):
        assert torch.equal(layer.mlp.router.counts.vector, 2 * before)


def test_dense_layers_come_first_and_the_layout_names_all_parts():
    for config in (TINY, CAPPED, replace(TINY, num_shared_experts=0), replace(TINY, num_dense_layers=0)):
        model = Decoder(config)
        names = [name for name, _ in model.named_modules()]
        roles = model.megascale_layout.resolve(names)
        moe = [f"layers.{i}.mlp" for i in range(config.num_dense_layers, 3)]
        assert roles["experts"] == tuple(f"{name}.experts" for name in moe) and roles["router"] == tuple(f"{name}.router" for name in moe)
        dense = [f"layers.{i}.mlp" for i in range(config.num_dense_layers)]
        plain = dense + ([f"{name}.shared" for name in moe] if config.num_shared_experts else [])
        assert roles["mlp"] == tuple(plain)
        owners = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
        taken = [
            name for role in ("colwise", "rowwise", "norms", "replicated", "embedding", "head", "experts", "router") for name in roles[role]
        ]
        assert sorted(taken) == sorted(owners)
        assert [type(layer.mlp) for layer in model.layers] == [FeedForward] * len(dense) + [MixtureOfExperts] * len(moe)


def test_start_of_the_decoder():
    config = replace(TINY, balance_bias_rate=0.1, init_std=0.05, num_layers=8, expert_intermediate_size=256)
    built = Decoder(config)
    with torch.device("meta"):
        meta = Decoder(config)
    assert all(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))
    for model in (built, materialize(meta, "cpu", 3)):
        for layer in model.layers[1:]:
            parts = layer.mlp.router.weight, layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, layer.mlp.shared.down_proj.weight
            for parameter, std in zip(parts, (0.05, 0.05, 0.05 / 4, 0.05 / 4), strict=True):
                assert abs(parameter.std().item() - std) < 4 * std / math.sqrt(2 * parameter.numel())
            buffers = dict(layer.mlp.router.named_buffers())
            assert {name: (buffer.dtype, buffer.any().item()) for name, buffer in buffers.items()} == {
                "expert_bias": (torch.float32, False),
                "last_step": (DOUBLE, False),
            }


@pytest.mark.parametrize("config", [TINY, SIGMOID, CAPPED], ids=["shared", "sigmoid", "capacity"])
def test_decoder_on_the_meta_device(config):
    with torch.device("meta"):
        model = Decoder(config)
        ids = torch.zeros(2, 8, dtype=torch.long)
    loss, _ = model.train()(ids, labels=ids)
    loss.backward()
    assert loss.is_meta and all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def test_compiled_blocks_give_the_same():
    torch.manual_seed(0)
    model, ids = Decoder(TINY).train(), torch.randint(64, (2, 16))
    expected = torch.autograd.grad(model(ids, labels=ids)[0], list(model.parameters()))
    counted = model.layers[1].mlp.router.counts.snapshot()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    ours = torch.autograd.grad(model(ids, labels=ids)[0], list(model.parameters()))
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm().clamp(min=1e-6)
    assert torch.equal(model.layers[1].mlp.router.counts.vector[:EXPERTS], 2 * counted[:EXPERTS])


def test_wrong_configs_are_named():
    wrong = {
        "num_experts=-1: must be an integer of at least 0": dict(num_experts=-1),
        "num_experts_per_token=9: must be at most num_experts=8": dict(num_experts_per_token=9),
        "num_dense_layers=3: must be below num_layers=3": dict(num_dense_layers=3),
        "num_expert_groups=3: must divide num_experts=8": dict(num_expert_groups=3),
        "num_groups_per_token=3: must be at most num_expert_groups=2": dict(num_expert_groups=2, num_groups_per_token=3),
        "num_experts_per_token=3: must be at most the 2 experts": dict(num_expert_groups=4, num_experts_per_token=3),
        "groups must hold 2 experts at least": dict(num_expert_groups=8, num_groups_per_token=2, router_scores="sigmoid"),
        "router_scores='relu': must be one of softmax, sigmoid": dict(router_scores="relu"),
        "balance_scope='batch': must be one of": dict(balance_scope="batch"),
        "capacity_factor=0: must be positive, or None to drop no token": dict(capacity_factor=0),
        "balance_loss=-1: must not be negative": dict(balance_loss=-1),
        "expert_intermediate_size=0: must be an integer of at least 1": dict(expert_intermediate_size=0),
        "bias=True: must be False with num_experts=8": dict(bias=True),
        "mlp='gelu': must be 'swiglu' with num_experts=8": dict(mlp="gelu"),
        "mlp_chunk_tokens=4: must be None with num_experts=8": dict(mlp_chunk_tokens=4),
        "num_shared_experts=1: is of no use without num_experts": dict(num_experts=0),
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError) as error:
            replace(PRESETS["tiny_moe"], **change)
        assert message in str(error.value), str(error.value)
    with pytest.raises(ValueError, match="hidden_size"):
        DecoderConfig.from_dict({"vocab_size": 4, "num_experts": 8})


def test_a_router_that_nobody_tells_its_loads_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a Trainer without the strategy the bias would stay where it is, silently."""
    monkeypatch.setattr(moe, "_UNTOLD", 3)
    told, untold = (Router(8, 4, 2, bias_rate=0.1) for _ in range(2))
    hidden = torch.randn(2, 4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(5):
            told(hidden)
            if number == 0:
                Routers.alone(told).settle()  # type: ignore[union-attr]
        for _ in range(2):
            untold(hidden)
    with pytest.warns(UserWarning, match="so its bias never moves"):
        untold(hidden)
    assert told.expert_bias.any() and not untold.expert_bias.any()  # type: ignore[union-attr]
