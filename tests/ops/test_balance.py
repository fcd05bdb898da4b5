"""Balance losses, fractions, counts and metrics against values by hand and against transformers' loss; recomputation and padding."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, set_microbatch_weight
from lightning_megascale.ops.balance import (
    RoutingCounts,
    expert_fractions,
    in_backward,
    is_counted,
    load_balancing_loss,
    metrics,
    router_z_loss,
    step_fractions,
    token_mask,
    update_bias,
)

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def plain_microbatch():
    yield
    set_microbatch_weight(MicrobatchWeight(1.0))


def close(ours, expected, atol=1e-12):
    torch.testing.assert_close(torch.as_tensor(ours, dtype=DOUBLE), torch.as_tensor(expected, dtype=DOUBLE), rtol=0, atol=atol)


# ---- fractions -------------------------------------------------------------------------------------------------------------------------

INDICES = torch.tensor([[[0, 1], [0, 2], [0, 1]], [[3, 0], [3, 1], [3, 2]]])  # B=2, L=3, K=2, E=4 and one without tokens
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_fractions_by_hand():
    close(expert_fractions(INDICES, 5) * 12, [4, 3, 2, 3, 0])
    close(expert_fractions(INDICES, 5, MASK) * 6, [3, 1, 1, 1, 0])
    close(expert_fractions(INDICES, 5, by_row=True) * 6, [[[3, 2, 1, 0, 0]], [[1, 1, 1, 3, 0]]])
    close(expert_fractions(INDICES, 5, MASK, by_row=True) * 4, [[[2, 1, 1, 0, 0]], [[2, 0, 0, 2, 0]]])
    nothing = expert_fractions(INDICES, 5, torch.zeros_like(MASK), by_row=True)
    assert nothing.shape == (2, 1, 5) and not nothing.any()


def test_shared_fractions_are_those_of_whole_rows():
    """Two ranks hold the halves of each row: sums over them give what one rank with whole rows has."""
    indices = torch.rand(3, 8, 6).topk(2).indices
    mask = torch.rand(3, 8) < 0.7
    halves = [(indices[:, :4], mask[:, :4]), (indices[:, 4:], mask[:, 4:])]
    for by_row in (False, True):
        tables = []
        for half, half_mask in halves:
            expert_fractions(half, 6, half_mask, by_row, share=lambda table, tables=tables: tables.append(table) or table)
        for half, half_mask in halves:
            ours = expert_fractions(half, 6, half_mask, by_row, share=lambda table, tables=tables: sum(tables))
            close(ours, expert_fractions(indices, 6, mask, by_row))


# ---- the loss --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_uniform_reads_one_and_hf_reads_k(top_k):
    probabilities = torch.full((2, 12, 6), 1 / 6, dtype=DOUBLE)
    uniform = torch.full((6,), 1 / 6, dtype=DOUBLE)
    close(load_balancing_loss(probabilities, uniform), 1.0)
    close(load_balancing_loss(probabilities, uniform, convention="hf", top_k=top_k), top_k)
    collapsed = torch.eye(6, dtype=DOUBLE)[0]
    close(load_balancing_loss(collapsed.expand(2, 12, 6), collapsed), 6.0)
    with pytest.raises(ValueError, match="convention='mena': must be 'mean'"):
        load_balancing_loss(probabilities, uniform, convention="mena")


def test_loss_by_hand():
    """Two experts, three tokens, one choice: f = (2/3, 1/3), P = (.5, .5): 2 * (1/3 + 1/6) = 1. With P = (.343, .657): below 1."""
    p = torch.tensor([[[0.9, 0.1], [0.6, 0.4], [0.0, 1.0]]], dtype=DOUBLE)
    fractions = torch.tensor([2 / 3, 1 / 3], dtype=DOUBLE)
    close(load_balancing_loss(p, fractions), 2 * (2 / 3 * 1.5 / 3 + 1 / 3 * 1.5 / 3))
    low = torch.tensor([0.343, 0.657], dtype=DOUBLE).expand(1, 3, 2)
    close(load_balancing_loss(low, fractions), 0.8953333333333333)
    mask = torch.tensor([[True, False, True]])
    close(load_balancing_loss(p, fractions, mask), 2 * (2 / 3 * 0.45 + 1 / 3 * 0.55))
    by_row = torch.tensor([[[1.0, 0.0]], [[0.25, 0.75]]], dtype=DOUBLE)
    rows = torch.cat([p, p.flip(-1)])
    close(load_balancing_loss(rows, by_row), 2 * (1.5 + 0.25 * 1.5 + 0.75 * 1.5) / 6)


def test_equals_transformers_for_one_layer():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    logits = torch.randn(3, 20, 8)
    mask = torch.rand(3, 20) < 0.6
    p = logits.softmax(-1)
    indices = p.topk(2).indices
    for given in (None, mask):
        ours = load_balancing_loss(p, expert_fractions(indices, 8, given), given, convention="hf", top_k=2)
        theirs = load_balancing_loss_func((logits.flatten(0, 1),), 8, 2, None if given is None else given.long())
        close(ours, theirs, 1e-5)


def test_four_collapsed_layers_on_disjoint_experts_read_four():
    """Each layer sends every token to its own two of eight experts. Transformers pools the layers first, and reads uniform."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layers = []
    for layer in range(4):
        logits = torch.full((1, 32, 8), -30.0)
        logits[..., 2 * layer : 2 * layer + 2] = 30.0
        layers.append(logits)
    each = [load_balancing_loss(x.softmax(-1), expert_fractions(x.topk(2).indices, 8)) for x in layers]
    close(torch.stack(each), [4.0] * 4, 1e-6)
    pooled = load_balancing_loss_func(tuple(x.flatten(0, 1) for x in layers), 8, 2)
    close(pooled, 2.0, 1e-5)  # exactly what it says of perfectly uniform layers
    counts = [RoutingCounts(8, "cpu") for _ in layers]
    for count, x in zip(counts, layers):
        count.add(x.topk(2).indices, x.softmax(-1), x)
    close([metrics(count.vector, 8, 2)["balance_loss"] for count in counts], [4.0] * 4, 1e-6)


def test_gradients_of_both_losses():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, dtype=DOUBLE, requires_grad=True)
    fractions = torch.rand(4, dtype=DOUBLE)
    by_row = torch.rand(2, 1, 4, dtype=DOUBLE)
    for mask in (None, MASK):
        for f in (fractions, by_row):
            assert torch.autograd.gradcheck(lambda x, f=f, m=mask: load_balancing_loss(x.softmax(-1), f, m), (logits,))
        assert torch.autograd.gradcheck(lambda x, m=mask: router_z_loss(x, m), (logits,))
    chosen = logits.detach()[MASK].logsumexp(-1)
    close(router_z_loss(logits, MASK), (chosen**2).mean())
    close(router_z_loss(logits), (logits.logsumexp(-1) ** 2).mean())
    nobody = torch.zeros_like(MASK)
    loss = load_balancing_loss(logits.softmax(-1), fractions, nobody) + router_z_loss(logits, nobody)
    assert loss == 0 and not torch.autograd.grad(loss, logits)[0].any()


def test_padding_neither_counts_nor_learns():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, dtype=DOUBLE)
    other = torch.where(MASK.unsqueeze(-1), logits, torch.full_like(logits, torch.nan))
    found = []
    for given in (logits, other):
        given = given.clone().requires_grad_()
        p = given.softmax(-1)
        loss = load_balancing_loss(p, expert_fractions(logits.topk(2).indices, 4, MASK), MASK)
        found.append((loss.detach(), torch.autograd.grad(loss, p)[0]))
    close(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1]) and not found[0][1][~MASK].any()


def test_parts_weighted_by_their_tokens_add_up_to_the_whole():
    """With the fractions of the last step, however a batch is dealt out: value and gradient are those of the whole."""
    torch.manual_seed(0)
    logits = torch.randn(4, 6, 5, dtype=DOUBLE, requires_grad=True)
    mask = torch.rand(4, 6) < 0.6
    fractions = step_fractions(torch.tensor([5.0, 1, 2, 2, 10], dtype=DOUBLE))
    whole = load_balancing_loss(logits.softmax(-1), fractions, mask) + router_z_loss(logits, mask)
    expected = torch.autograd.grad(whole, logits)[0]
    for parts in ([[0], [1, 2], [3]], [[0, 3], [1, 2]]):
        loss = sum(
            (load_balancing_loss(logits[rows].softmax(-1), fractions, mask[rows]) + router_z_loss(logits[rows], mask[rows]))
            * (mask[rows].sum() / mask.sum())
            for rows in parts
        )
        close(loss, whole)
        close(torch.autograd.grad(loss, logits)[0], expected)


def test_second_run_of_a_checkpoint_keeps_mask_and_fractions_of_the_first():
    """As in a pipeline: when the layer runs again, another microbatch is current."""
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, dtype=DOUBLE, requires_grad=True)
    now = {"mask": MASK, "f": torch.rand(4, dtype=DOUBLE)}
    run = lambda x: load_balancing_loss(x.softmax(-1), now["f"], now["mask"]) + router_z_loss(x, now["mask"])  # noqa: E731
    expected = torch.autograd.grad(run(logits), logits)[0]
    loss = checkpoint(run, logits, use_reentrant=False)
    now.update(mask=~MASK, f=torch.rand(4, dtype=DOUBLE))
    close(torch.autograd.grad(loss, logits)[0], expected)


def test_last_step():
    close(step_fractions(torch.zeros(4, dtype=DOUBLE)), [0.25] * 4)
    close(step_fractions(torch.tensor([6.0, 2, 0, 0], dtype=DOUBLE)), [0.75, 0.25, 0, 0])


def test_update_of_the_bias():
    bias = torch.tensor([0.5, 0.0, -0.5, 0.25])
    update_bias(bias, torch.tensor([10.0, 2, 4, 0], dtype=DOUBLE), 0.001)  # the mean is 4
    close(bias, [0.499, 0.001, -0.5, 0.251], 1e-7)
    assert bias.dtype == torch.float32


# ---- what counts -----------------------------------------------------------------------------------------------------------------------


def test_counted_are_training_forwards_only_and_once():
    module, seen = nn.Linear(2, 2), []

    def run(x):
        seen.append((is_counted(module), in_backward()))
        return module(x).sin()

    x = torch.randn(3, 2, requires_grad=True)
    run(x)
    checkpoint(run, x, use_reentrant=False).sum().backward()
    with torch.no_grad():
        run(x)
    module.eval()
    run(x)
    assert seen == [(True, False), (True, False), (False, True), (False, False), (False, False)]


def test_mask_of_the_microbatch():
    assert token_mask((2, 3)) is None
    set_microbatch_weight(MicrobatchWeight(1.0, tokens=MASK))
    assert torch.equal(token_mask((2, 3)), MASK) and torch.equal(token_mask((6,)), MASK.flatten())
    with pytest.raises(ValueError, match=r"mask of tokens has shape \(2, 3\), the layer's tokens \(2, 4\)"):
        token_mask((2, 4))


def test_counts_by_hand():
    counts = RoutingCounts(4, "cpu")
    p = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(2, 3, 4)
    logits = p.log() + 2  # logsumexp 2
    dropped = torch.zeros(2, 3, 2, dtype=torch.bool)
    dropped[0, 0, 1] = dropped[0, 2, 0] = True  # the second one is padding under MASK
    counts.add(INDICES, p, logits, MASK, dropped)
    entropy = -sum(x * math.log(x) for x in (0.4, 0.3, 0.2, 0.1))
    expected = [3, 1, 1, 1, 1.2, 0.9, 0.6, 0.3, 3, 1, 12, 3 * entropy, 1]
    close(counts.vector, expected, 1e-5)
    before = counts.snapshot()
    counts.add(INDICES.flatten(0, 1), p.flatten(0, 1), logits.flatten(0, 1))
    difference = counts.vector - before
    close(difference, [4, 3, 2, 3, 2.4, 1.8, 1.2, 0.6, 6, 0, 24, 6 * entropy, 1], 1e-5)
    close(counts.assignments, [7, 4, 3, 4])
    close(counts.probabilities, [3.6, 2.7, 1.8, 0.9], 1e-5)
    named = [counts.tokens, counts.dropped, counts.z, counts.entropy, counts.calls]
    close(torch.stack(named), [9, 1, 36, 9 * entropy, 2], 1e-5)
    counts.add(torch.full((1, 2), 4), p[0, :1], logits[0, :1])  # no expert, as of a rank that holds others
    close(counts.assignments, [7, 4, 3, 4])


def test_masked_values_may_be_anything():
    counts = RoutingCounts(4, "cpu")
    p = torch.full((2, 3, 4), 0.25)
    bad = torch.where(MASK.unsqueeze(-1), p, torch.nan)
    counts.add(INDICES, bad, bad, MASK)
    assert counts.vector.isfinite().all() and counts.tokens == 3


def test_metrics_by_hand():
    # four experts, eight assignments of four tokens
    vector = torch.tensor([4, 2, 2, 0, 2.0, 1.0, 0.8, 0.2, 4, 1, 36, 2, 7], dtype=DOUBLE)
    found = metrics(vector, 4, 2)
    close(found["load"], [2, 1, 1, 0])
    assert found["max_violation"] == 1 and found["min_violation"] == 1 and found["dead_experts"] == 1
    close(found["cv"], math.sqrt(0.5))
    close(found["load_entropy"], (0.5 * math.log(2) + 2 * 0.25 * math.log(4)) / math.log(4))
    close(found["dropped_fraction"], 1 / 8)
    close(found["z"], 9.0)
    close(found["router_entropy"], 0.5)
    close(found["balance_loss"], 4 * (0.5 * 0.5 + 0.25 * 0.25 + 0.25 * 0.2))
    even = metrics(torch.tensor([2, 2, 2, 2, 1, 1, 1, 1, 4, 0, 0, 0, 1], dtype=DOUBLE), 4, 2)
    close([even[key] for key in ("max_violation", "min_violation", "cv", "dead_experts", "dropped_fraction")], [0.0] * 5)
    close([even["load_entropy"], even["balance_loss"]], [1.0, 1.0])
    assert all(math.isnan(value) for value in metrics(torch.zeros(13), 4, 2).values() if not isinstance(value, list))
