"""The chunked cross-entropy against torch's own: values, every gradient, a split vocabulary, masks, types, messages."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_megascale.ops.cross_entropy import cross_entropy_from_shards, linear_cross_entropy
from tests.harness import RankFailure, run_ranks

MODEL, VOCABULARY = 12, 32


def problem(shape=(3, 7), dtype=torch.float64, ignored=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: (2 * torch.randn(*size, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()  # noqa: E731
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < ignored] = -100
    return draw(*shape, MODEL), draw(VOCABULARY, MODEL), draw(VOCABULARY), labels


def reference(hidden, weight, bias, labels, **options):
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", **options)


def gradients(loss, *tensors, scale=0.37):
    return torch.autograd.grad(loss * scale, tensors)


@pytest.mark.parametrize("shape", [(3, 7), (21,), (2, 3, 4)])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 21, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
def test_value_and_gradients(shape, chunk_tokens, with_bias):
    hidden, weight, bias, labels = problem(shape)
    inputs = (hidden, weight, bias) if with_bias else (hidden, weight)
    bias = bias if with_bias else None
    loss, count = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=chunk_tokens)
    expected = reference(hidden, weight, bias, labels)
    assert loss.shape == count.shape == () and loss.dtype == torch.float64 and count.dtype == torch.int64
    assert 0 < count == (labels != -100).sum() < labels.numel()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients(loss, *inputs), gradients(expected, *inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_gradients_by_finite_differences():
    hidden, weight, bias, labels = problem((5,))
    assert torch.autograd.gradcheck(lambda h, w, b: linear_cross_entropy(h, w, labels, bias=b, chunk_tokens=2)[0], (hidden, weight, bias))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(frozen):
    tensors = list(problem())
    labels = tensors.pop()
    expected = gradients(reference(*tensors, labels), *tensors)
    tensors[frozen].requires_grad_(False)
    loss, _ = linear_cross_entropy(tensors[0], tensors[1], labels, bias=tensors[2], chunk_tokens=4)
    loss.backward(torch.tensor(0.37, dtype=torch.float64))
    for index, (tensor, theirs) in enumerate(zip(tensors, expected, strict=True)):
        if index == frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, theirs, rtol=0, atol=1e-12)


def test_another_ignored_label():
    hidden, weight, bias, labels = problem(ignored=0)
    loss, count = linear_cross_entropy(hidden, weight, labels, bias=bias, ignore_index=24)
    torch.testing.assert_close(loss, reference(hidden, weight, bias, labels, ignore_index=24), rtol=0, atol=1e-12)
    assert count == (labels != 24).sum() < labels.numel()


@pytest.mark.parametrize("shape", [(3, 7), (0,)])
def test_nothing_counted_gives_zero_and_no_nan(shape):
    hidden, weight, bias, labels = problem(shape, ignored=2)
    loss, count = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=4)
    assert loss == 0 and count == 0
    for gradient in gradients(loss, hidden, weight, bias):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_huge_logits_do_not_overflow():
    hidden, weight, bias, labels = problem()
    big = (hidden.detach() * 1e3).requires_grad_()
    loss, _ = linear_cross_entropy(big, weight, labels, chunk_tokens=4)
    torch.testing.assert_close(loss, reference(big, weight, None, labels), rtol=1e-13, atol=0)
    assert all(gradient.isfinite().all() for gradient in gradients(loss, big, weight))


def test_float32():
    hidden, weight, bias, labels = problem(dtype=torch.float32)
    loss, _ = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=4)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    expected = reference(*exact, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(gradients(loss, hidden, weight, bias), gradients(expected, *exact), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5 * theirs.norm().item())


@pytest.mark.parametrize("chunk_tokens", [16, 64, 512])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_bfloat16_error_is_that_of_one_kernel(chunk_tokens, scale):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(512, 64, generator=generator).bfloat16().requires_grad_()
    weight = (0.3 * torch.randn(256, 64, generator=generator)).bfloat16().requires_grad_()
    labels = torch.randint(256, (512,), generator=generator)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    truth = reference(*exact, None, labels)
    truths = gradients(truth, *exact, scale=scale)
    kernel = reference(hidden, weight, None, labels)
    kernels = gradients(kernel, hidden, weight, scale=scale)
    loss, _ = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)
    ours = gradients(loss, hidden, weight, scale=scale)
    assert loss.dtype == torch.float32 and all(gradient.dtype == torch.bfloat16 for gradient in ours)
    assert (loss - truth).abs() <= 1.5 * (kernel - truth).abs() + 1e-6 * truth
    for mine, theirs, true in zip(ours, kernels, truths, strict=True):
        assert (mine.double() - true).norm() <= 1.5 * (theirs.double() - true).norm()


def test_autocast_runs_the_matmuls_in_its_type_and_keeps_the_gradient_types():
    hidden, weight, bias, labels = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, labels, bias=bias)
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight, bias)]
    expected, _ = linear_cross_entropy(*half[:2], labels, bias=half[2])
    assert torch.equal(loss, expected) and loss.dtype == torch.float32
    ours = gradients(loss, hidden, weight, bias)
    assert [gradient.dtype for gradient in ours] == [torch.float32] * 3
    for mine, theirs in zip(ours, gradients(expected, *half), strict=True):
        assert torch.equal(mine.bfloat16(), theirs)
    exact, _ = linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert loss != exact


def test_without_gradients_nothing_of_them_is_made():
    hidden, weight, bias, labels = problem()

    class Matmuls(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default)
            return function(*args, **(kwargs or {}))

    with Matmuls() as with_gradients:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=7)
    with torch.no_grad(), Matmuls() as without:
        loss, _ = linear_cross_entropy(hidden, weight, labels, chunk_tokens=7)
    assert not loss.requires_grad
    assert (with_gradients.seen, without.seen) == (9, 3)  # three chunks


def test_logits_never_exist_whole():
    hidden, weight, bias, labels = problem((64,))
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Sizes():
        loss, _ = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4)
        loss.backward()
    assert largest == hidden.numel() < 64 * VOCABULARY


@pytest.mark.parametrize("label", [VOCABULARY, -1, -7])
def test_a_label_outside_the_vocabulary_is_refused(label):
    hidden, weight, bias, labels = problem()
    labels[1, 2] = label
    with pytest.raises(ValueError, match=rf"labels hold {label}, must be in \[0, {VOCABULARY}\) or ignore_index=-100"):
        linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(ValueError, match=f"labels hold {label}"):
        cross_entropy_from_shards(F.linear(hidden, weight), labels)


def test_a_label_outside_is_nan_where_it_is_not_looked_at(monkeypatch):
    monkeypatch.setattr("lightning_megascale.ops.cross_entropy._check_labels", lambda *_: None)  # as on an accelerator
    hidden, weight, bias, labels = problem()
    labels[1, 2] = VOCABULARY
    loss, _ = linear_cross_entropy(hidden, weight, labels)
    gradient, _ = gradients(loss, hidden, weight)
    assert loss.isnan() and gradient[1, 2].isnan().all() and gradient[0].isfinite().all()


def test_shapes_are_checked():
    hidden, weight, bias, labels = problem()
    with pytest.raises(ValueError, match=r"labels have shape \(3, 6\), must be \(3, 7\): hidden without its last dim"):
        linear_cross_entropy(hidden, weight, labels[:, 1:])
    with pytest.raises(ValueError, match=r"weight has shape \(12, 32\), must be \(vocabulary, 12\)"):
        linear_cross_entropy(hidden, weight.t(), labels)
    with pytest.raises(ValueError, match=r"bias has shape \(31,\), must be \(32,\)"):
        linear_cross_entropy(hidden, weight, labels, bias=bias[1:])
    with pytest.raises(ValueError, match="chunk_tokens=0: must be at least 1"):
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=0)


def split(ignored, chunk_tokens):
    hidden, weight, bias, labels = problem(ignored=ignored)
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * VOCABULARY // world, (rank + 1) * VOCABULARY // world)
    mine = [weight.detach()[rows].clone().requires_grad_(), bias.detach()[rows].clone().requires_grad_()]
    loss, count = linear_cross_entropy(hidden, mine[0], labels, bias=mine[1], chunk_tokens=chunk_tokens, group=dist.group.WORLD)
    grad_hidden, *others = gradients(loss, hidden, *mine)
    logits = F.linear(hidden, mine[0], mine[1])
    sharded, sharded_count = cross_entropy_from_shards(logits, labels, group=dist.group.WORLD)
    sharded_grads = gradients(sharded, hidden, *mine)
    with torch.no_grad():
        evaluated, _ = linear_cross_entropy(hidden, mine[0], labels, bias=mine[1], group=dist.group.WORLD)
    return loss.detach(), count, grad_hidden, others, sharded.detach(), sharded_count, sharded_grads, evaluated


@pytest.mark.parametrize(("world", "ignored", "chunk_tokens"), [(2, 0.3, 4), (4, 0.3, 1000), (2, 2, 4)])
def test_a_split_vocabulary(world, ignored, chunk_tokens):
    hidden, weight, bias, labels = problem(ignored=ignored)
    expected = reference(hidden, weight, bias, labels) if ignored < 1 else (hidden.sum() + weight.sum() + bias.sum()) * 0
    truths = gradients(expected, hidden, weight, bias)
    results = run_ranks(split, world, ignored, chunk_tokens)
    for loss, count, _, _, sharded, sharded_count, _, evaluated in results:
        for value in (loss, sharded, evaluated):
            torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-12)
        assert count == sharded_count == (labels != -100).sum()
    close = lambda ours, theirs: torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)  # noqa: E731
    close(sum(result[2] for result in results), truths[0])
    close(sum(result[6][0] for result in results), truths[0])
    for index in (0, 1):
        close(torch.cat([result[3][index] for result in results]), truths[index + 1])
        close(torch.cat([result[6][index + 1] for result in results]), truths[index + 1])
    if ignored < 1:
        assert not torch.allclose(results[0][2], truths[0])  # one rank's part is not the whole


def outside_on_ranks():
    hidden, weight, _, labels = problem()
    labels[0, 0] = VOCABULARY
    linear_cross_entropy(hidden, weight[: VOCABULARY // 2], labels, group=dist.group.WORLD)


def test_a_label_outside_a_split_vocabulary_is_refused():
    with pytest.raises(RankFailure, match=rf"labels hold {VOCABULARY}, must be in \[0, {VOCABULARY}\)"):
        run_ranks(outside_on_ranks, 2)
