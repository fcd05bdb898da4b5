"""Clipping over several meshes, the one scale, and first values that no plan changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_megascale.mesh import build_mesh
from lightning_megascale.models.decoder import Decoder
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.parallel.clip import clip_grad_norm_, total_norm
from lightning_megascale.parallel.init import materialize
from lightning_megascale.parallel.loss_scale import LossScale, Weights, weigh, weighted
from lightning_megascale.parallel.parallelize import parallelize
from lightning_megascale.plan import ParallelPlan
from tests.harness import full, run_ranks, worst

CPU = torch.device("cpu")


# ---- clipping --------------------------------------------------------------------------------------------------------------


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 4), (5, 3), (7,), (4, 8))]


def clip_on_meshes(norm_type: float, poison: float | None) -> tuple[Any, list[torch.Tensor]]:
    """One gradient on (dp, tp), an unevenly sharded one on dp, a plain one, one on tp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    values = gradients()
    if poison is not None:
        values[1][4, 2] = poison
    placed = [
        distribute_tensor(values[0], mesh, [Shard(0), Shard(1)]),
        distribute_tensor(values[1], mesh["dp_shard"], [Shard(0)]),
        values[2],
        distribute_tensor(values[3], mesh["tp"], [Shard(0)]),
    ]
    parameters = [nn.Parameter(torch.zeros_like(value)) for value in placed]
    for parameter, value in zip(parameters, placed):
        parameter.grad = value
    try:
        norm = clip_grad_norm_(parameters, 1.0, norm_type, error_if_nonfinite=poison is not None)
    except RuntimeError as error:
        return str(error), []
    return norm.item(), [full(parameter.grad) for parameter in parameters]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_clipping_over_several_meshes_equals_torchs_on_one_device(norm_type: float) -> None:
    parameters = [nn.Parameter(torch.zeros_like(value)) for value in gradients()]
    for parameter, value in zip(parameters, gradients()):
        parameter.grad = value
    expected = torch.nn.utils.clip_grad_norm_(parameters, 1.0, norm_type).item()
    for norm, clipped in run_ranks(clip_on_meshes, 4, norm_type, None):
        assert norm == pytest.approx(expected, rel=1e-12)
        for mine, parameter in zip(clipped, parameters):
            assert torch.allclose(mine, parameter.grad, atol=1e-13, rtol=0)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_raises_on_every_rank(poison: float) -> None:
    messages = [message for message, _ in run_ranks(clip_on_meshes, 4, 2.0, poison)]
    assert len(set(messages)) == 1 and "cannot be clipped" in messages[0]


def test_no_gradient_has_norm_zero_and_a_wrong_order_is_refused() -> None:
    assert total_norm([nn.Parameter(torch.ones(2))]) == 0.0
    with pytest.raises(ValueError, match="norm_type=0.5"):
        total_norm([], 0.5)


# ---- the one scale ---------------------------------------------------------------------------------------------------------


def test_what_a_batch_counts() -> None:
    labels = torch.tensor([[1, -100, 2], [-100, 3, -100]])
    batch = {"input_ids": labels, "labels": labels}

    def used(**options: Any) -> float:
        found = weigh(batch, **{"loss_weight": "auto", "label_alignment": None, "device": CPU, **options})
        assert found is not None
        return found.used.item()

    assert used(label_alignment="aligned") == 3
    assert used(label_alignment="shift") == used(label_alignment="huggingface") == 2
    assert used(loss_weight="samples") == 2
    both = weigh(batch, "auto", None, CPU)
    assert both is not None and (both.used.item(), both.other.item()) == (2, 3)
    classes = weigh({"labels": torch.tensor([0, -100, 4])}, "auto", None, CPU)
    assert classes is not None and classes.used.item() == 2
    rows = weigh((torch.zeros(5, 2), torch.zeros(5)), "auto", None, CPU)
    assert rows is not None and rows.used.item() == 5
    regression = weigh({"x": torch.zeros(4, 2), "labels": torch.zeros(4)}, "auto", None, CPU)
    assert regression is not None and regression.used.item() == 4
    assert weigh(object(), "auto", None, CPU) is None
    with pytest.raises(ValueError, match="loss_weight='labels' needs"):
        weigh((torch.zeros(2),), "labels", None, CPU)


def test_microbatches_with_unequal_labels_give_the_whole_batchs_gradient() -> None:
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    inputs, labels = torch.randn(10, 4, dtype=torch.float64), torch.tensor([0, 1, 2, -100, -100, -100, 1, -100, -100, -100])
    expected = torch.autograd.grad(F.cross_entropy(inputs @ weight, labels), weight)[0]
    scale = LossScale()
    for rows in (slice(0, 3), slice(3, 6), slice(6, 10)):  # the middle one counts nothing: its mean is NaN
        loss = F.cross_entropy(inputs[rows] @ weight, labels[rows])
        weights = Weights((labels[rows] != -100).sum().double())
        scale.add(loss, weights)
        weighted(loss, weights.used).backward()
    scale.finish([weight.grad], None)
    assert torch.allclose(weight.grad, expected, atol=1e-14, rtol=0)
    assert scale.step_loss.item() == pytest.approx(F.cross_entropy(inputs @ weight, labels).item(), abs=1e-14)


def test_a_step_that_counts_nothing_has_zero_gradients() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    labels = torch.full((2,), -100)
    scale = LossScale()
    loss, weights = F.cross_entropy(torch.ones(2, 2) @ weight, labels), Weights(torch.zeros(()))
    scale.add(loss, weights)
    weighted(loss, weights.used).backward()
    scale.finish([weight.grad], None)
    assert torch.equal(weight.grad, torch.zeros(2, 3))


def test_ambiguous_labels_are_refused_at_the_next_step_and_proportional_ones_are_not() -> None:
    def step(scale: LossScale, rows: list[tuple[float, float]]) -> None:
        for used, other in rows:
            scale.add(torch.tensor(1.0), Weights(torch.tensor(used), torch.tensor(other)))
        scale.finish([], None)

    fine = LossScale()
    step(fine, [(10.0, 12.0), (20.0, 24.0)])
    fine.raise_if_wrong()
    ambiguous = LossScale()
    step(ambiguous, [(10.0, 12.0), (20.0, 22.0)])
    with pytest.raises(ValueError, match="label_alignment=None"):
        ambiguous.raise_if_wrong()


def test_bfloat16_gradients_are_scaled_in_full_precision() -> None:
    from lightning_megascale.parallel.loss_scale import scale_gradients

    gradient = torch.full((4,), 3.0, dtype=torch.bfloat16)
    scale_gradients([gradient], torch.tensor(1 / 3 + 1e-4, dtype=torch.float64))
    assert gradient[0].item() == torch.tensor(3.0 * (1 / 3 + 1e-4)).to(torch.bfloat16).item()


# ---- first values ----------------------------------------------------------------------------------------------------------

PLANS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, dict(data_parallel_replicate_size=2)),
    (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    (4, dict(tensor_parallel_size=2)),
]


def first_values(sizes: dict[str, Any], preset: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Decoder(PRESETS[preset]).to(dtype)
    if torch.distributed.is_initialized():
        plan = ParallelPlan(**sizes).resolve(torch.distributed.get_world_size())
        parallelize(model, model, plan, build_mesh(plan, "cpu"), model.megascale_layout)
    before = torch.random.get_rng_state()
    materialize(model, "cpu", 11)
    assert torch.equal(before, torch.random.get_rng_state()), "the run's own generator moved"
    return {name: full(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks, sizes", PLANS, ids=str)
def test_first_values_are_bit_equal_for_every_plan(ranks: int, sizes: dict[str, Any], dtype: torch.dtype) -> None:
    expected = first_values({}, "tiny", dtype)
    assert 0.015 < expected["embed_tokens.weight"].float().std() < 0.025
    for values in run_ranks(first_values, ranks, sizes, "tiny", dtype):
        assert worst(expected, values)[0] == 0.0


def test_names_and_seeds_give_different_values() -> None:
    values = first_values({}, "tiny", torch.float32)
    assert not torch.equal(values["layers.0.mlp.up_proj.weight"], values["layers.1.mlp.up_proj.weight"])


def test_a_module_nothing_can_initialize_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Bare())
    with pytest.raises(ValueError, match=r"module '1' \(Bare\) lies on the meta device"):
        materialize(model, "cpu", 0)


def uneven_first_values() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    if torch.distributed.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    materialize(model, "cpu", 1)
    result = {name: full(value) for name, value in model.state_dict().items()}
    if torch.distributed.is_initialized():
        model(torch.ones(2, 3)).sum().backward()
    return result


def test_shards_of_unequal_size() -> None:
    for values in run_ranks(uneven_first_values, 4):
        assert worst(uneven_first_values(), values)[0] == 0.0
