"""Experts in grouped products against every expert on every token, in every type and shape, with memory that holds NaN."""

import pytest
import torch
import torch.nn.functional as F

from lightning_megascale.ops import experts as subject
from lightning_megascale.ops.experts import has_grouped_mm, swiglu_experts


def dense(hidden, indices, weights, gate_up, down):
    """Every expert on every token, weighted: no sorting, no gathering."""
    gate, up = torch.einsum("td,egd->teg", hidden, gate_up).chunk(2, dim=-1)
    each = torch.einsum("tef,edf->ted", F.silu(gate) * up, down)
    chosen = F.one_hot(indices, gate_up.shape[0] + 1)[..., :-1].to(hidden.dtype)  # no expert: a row of zeros
    return torch.einsum("ted,tke,tk->td", each, chosen, weights.to(hidden.dtype))


def inputs(tokens=13, top_k=3, experts=5, width=16, inner=24, dtype=torch.float64, seed=0):
    made = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=made, dtype=torch.float64)  # noqa: E731
    indices = torch.rand(tokens, experts, generator=made).topk(top_k).indices
    values = draw(tokens, width), draw(tokens, top_k).abs(), draw(experts, 2 * inner, width) / 4, draw(experts, width, inner) / 4
    hidden, weights, gate_up, down = values
    kept = weights.to(torch.promote_types(dtype, torch.float32))
    return [tensor.requires_grad_() for tensor in (hidden.to(dtype), kept, gate_up.to(dtype), down.to(dtype))], indices


def both(function, tensors, indices, seed=1):
    """The output, then every gradient."""
    hidden, weights, gate_up, down = tensors
    out = function(hidden, indices, weights, gate_up, down)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, gradient)]


def exact(tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


CHOICES = {
    "all": lambda indices: indices,
    "one expert gets nothing": lambda indices: torch.where(indices == 2, 5, indices),
    "the first and the last get nothing": lambda indices: torch.where((indices == 0) | (indices == 4), 5, indices),
    "all to one": lambda indices: torch.full_like(indices, 3),
    "some to none": lambda indices: torch.where(torch.arange(13)[:, None] % 3 == 0, 5, indices),
    "none to any": lambda indices: torch.full_like(indices, 5),
    "of one choice": lambda indices: indices[:, :1],
}


@pytest.mark.parametrize("choice", CHOICES)
def test_loop_equals_dense(choice):
    tensors, indices = inputs()
    indices = CHOICES[choice](indices)
    tensors[1] = tensors[1].detach()[:, : indices.shape[1]].contiguous().requires_grad_()
    for ours, theirs in zip(both(swiglu_experts, tensors, indices), both(dense, tensors, indices), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("shape", [(16, 24), (10, 6)], ids=["grouped", "odd widths"])
def test_float32_equals_dense(choice, shape):
    tensors, indices = inputs(width=shape[0], inner=shape[1], dtype=torch.float32)
    indices = CHOICES[choice](indices)
    tensors[1] = tensors[1].detach()[:, : indices.shape[1]].contiguous().requires_grad_()
    assert has_grouped_mm(tensors[0], *shape) == (shape == (16, 24))
    for ours, theirs in zip(both(swiglu_experts, tensors, indices), both(dense, exact(tensors), indices), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm().clamp(min=1e-30)


@pytest.mark.parametrize("shape", [(32, 64), (36, 20)], ids=["grouped", "odd widths"])
def test_bfloat16_errs_as_little_as_transformers(shape):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    tensors, indices = inputs(tokens=257, top_k=2, experts=4, width=shape[0], inner=shape[1], dtype=torch.bfloat16)
    assert tensors[1].dtype == torch.float32  # weights of a router stay wide
    config = MixtralConfig(hidden_size=shape[0], intermediate_size=shape[1], num_local_experts=4, num_experts_per_tok=2)
    peer = MixtralExperts(config).bfloat16()

    def theirs(hidden, indices, weights, gate_up, down):
        return torch.func.functional_call(peer, {"gate_up_proj": gate_up, "down_proj": down}, (hidden, indices, weights))

    results = both(swiglu_experts, tensors, indices), both(theirs, tensors, indices), both(dense, exact(tensors), indices)
    for ours, peers, true in zip(*results, strict=True):
        error, allowed = (ours.double() - true).norm(), 1.5 * (peers.double() - true).norm()
        assert error <= allowed, (error / allowed).item()


def test_a_grouped_product_is_used_where_there_is_one(monkeypatch):
    calls = []
    monkeypatch.setattr(subject.F, "grouped_mm", lambda *a, real=F.grouped_mm, **k: calls.append(1) or real(*a, **k))
    tensors, indices = inputs(dtype=torch.float32)
    both(swiglu_experts, tensors, indices)
    assert len(calls) == 6  # two forward, four backward
    both(swiglu_experts, exact(tensors), indices)
    assert len(calls) == 6


def test_what_no_expert_computes_is_never_read(monkeypatch):
    """Memory that a grouped product leaves as it was holds NaN here."""

    def poisoned(a, b, *, offs, real=F.grouped_mm):
        out = real(a, b, offs=offs)
        if a.ndim == 2 and b.ndim == 3:
            out = out.clone()
            out[offs[-1] :] = torch.nan
        return out

    monkeypatch.setattr(subject.F, "grouped_mm", poisoned)
    tensors, indices = inputs(dtype=torch.float32)
    indices = CHOICES["some to none"](indices)
    indices[1] = torch.tensor([5, 0, 5])  # a token that two of its three choices lost
    indices[2] = torch.tensor([7, 7, 7])
    results = both(swiglu_experts, tensors, indices)
    for ours, theirs in zip(results, both(dense, exact(tensors), indices.clamp(max=5)), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-4)
    out, d_hidden, d_weights, *_ = results
    assert not out[2].any() and not d_hidden[2].any() and not d_weights[indices >= 5].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_tokens_every_parameter_has_a_gradient(dtype):
    tensors, _ = inputs(dtype=dtype)
    hidden, weights = (tensor.detach()[:0].requires_grad_() for tensor in tensors[:2])
    out = swiglu_experts(hidden, torch.zeros(0, 3, dtype=torch.long), weights, *tensors[2:])
    assert out.shape == (0, 16)
    for gradient, tensor in zip(torch.autograd.grad(out.sum(), tensors[2:]), tensors[2:]):
        assert gradient.shape == tensor.shape and not gradient.any()


def test_a_gradient_that_is_not_dense():
    tensors, indices = inputs(dtype=torch.float32)
    hidden, weights, gate_up, down = tensors
    doubles = exact(tensors)
    theirs = torch.autograd.grad(dense(doubles[0], indices, *doubles[1:]).sum(), doubles)
    ours = torch.autograd.grad(swiglu_experts(hidden, indices, weights, gate_up, down).sum(), tensors)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("frozen", [[0], [1], [2], [3], [0, 1, 2], [1, 2, 3], [0, 2], [2, 3]])
def test_frozen_inputs(frozen):
    tensors, indices = inputs()
    whole = both(swiglu_experts, tensors, indices)[1:]
    hidden, weights, gate_up, down = (t.detach().requires_grad_(i not in frozen) for i, t in enumerate(tensors))
    out = swiglu_experts(hidden, indices, weights, gate_up, down)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    for i, tensor in enumerate((hidden, weights, gate_up, down)):
        assert (tensor.grad is None) if i in frozen else torch.equal(tensor.grad, whole[i])


def test_autocast_computes_in_its_type():
    tensors, indices = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        results = both(swiglu_experts, tensors, indices)
    assert results[0].dtype == torch.bfloat16 and all(gradient.dtype == torch.float32 for gradient in results[1:])
    for ours, theirs in zip(results, both(dense, exact(tensors), indices), strict=True):
        assert 1e-4 * theirs.norm() < (ours - theirs).norm() < 2e-2 * theirs.norm()


def test_little_is_kept_for_the_backward():
    tensors, indices = inputs(tokens=256, top_k=2, dtype=torch.float32)
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        swiglu_experts(tensors[0], indices, tensors[1], *tensors[2:])
    given = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    rows = 256 * 2 + 1
    assert sum(kept.values()) - given == rows * 2 * 24 * 4 + 512 * 8 + 5 * 4  # both projections; order; ends


def test_the_same_numbers_every_time():
    tensors, indices = inputs(tokens=300, dtype=torch.float32)
    for first, second in zip(both(swiglu_experts, tensors, indices), both(swiglu_experts, tensors, indices), strict=True):
        assert torch.equal(first, second)
