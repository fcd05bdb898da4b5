"""Faults of other projects' mixtures of experts, as their public reports describe them, each replayed on expert-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_megascale.models.moe import GroupedExperts, Router
from lightning_megascale.ops.balance import load_balancing_loss, metrics, step_fractions
from lightning_megascale.ops.dispatch import ExpertRanks
from lightning_megascale.ops.tensor_parallel import tensor_axis
from lightning_megascale.parallel.expert import SharedExperts, SharedState, _deal
from lightning_megascale.parallel.mixin import become
from tests import parity
from tests.harness import run_ranks

EP2 = parity.default_case(axes="fsdp2", family="ep2")


class Watched(parity.ParityModule):
    """The module of the parity machine, kept where a test finds it; with ``evaluates`` other forwards run before every step."""

    last: Watched
    evaluates = False

    def __init__(self, case: parity.Case) -> None:
        super().__init__(case)
        Watched.last = self

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.evaluates:
            return
        with torch.no_grad():
            self.model(torch.zeros_like(batch["input_ids"]))  # a forward of training that trains nothing
            self.model.eval()
            self.model(torch.zeros_like(batch["input_ids"]))
            self.model.train()

    def routers(self) -> dict[str, Router]:
        return {name: module for name, module in self.model.named_modules() if isinstance(module, Router)}


def watched(case: parity.Case, evaluates: bool = False) -> dict[str, Any]:
    """Trains on a rank; what its routers counted and know afterwards."""
    parity.ParityModule, Watched.evaluates = Watched, evaluates  # type: ignore[misc]
    result = parity.train_parallel(case, {})
    routers = Watched.last.routers()
    result["counts"] = {name: router.counts.vector.clone() for name, router in routers.items() if router.counts is not None}
    result["buffers"] = {f"{name}.{key}": b.clone() for name, router in routers.items() for key, b in router.named_buffers()}
    return result


# ---- Megatron-LM #5047 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["tp", "tp+sp", "cp2"])
def test_megatron_5047_gradients_of_router_losses_do_not_depend_on_tp_or_cp(axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses so large that they make the routers' gradients; one device has their formulas written out (tests/routing.py)."""
    monkeypatch.setitem(parity.MIXTURE, "balance_loss", 5.0)
    monkeypatch.setitem(parity.MIXTURE, "router_z_loss", 1.0)
    parity.check(parity.default_case(axes=axes, family="ep2"))


# ---- Megatron-LM #1330 and #1331, torchtitan #1593, NeMo Automodel #3247 -------------------------------------------------------------


def test_megatron_1330_torchtitan_1593_tokens_are_counted_once_under_recomputation() -> None:
    plain, *others = (run_ranks(watched, 2, {**EP2, "checkpointing": mode}) for mode in ("none", "full", "selective"))
    tokens, top_k = parity.ROWS // 2 * parity.LENGTH * parity.STEPS, parity.MIXTURE["num_experts_per_token"]
    for rank, result in enumerate(plain):
        for name, vector in result["counts"].items():
            assert vector[: parity.MIXTURE["num_experts"]].sum() == tokens * top_k
            for other in others:
                assert torch.equal(other[rank]["counts"][name], vector), name
        for name, value in result["buffers"].items():
            assert all(torch.equal(other[rank]["buffers"][name], value) for other in others), name


# ---- torchtitan #4148 ----------------------------------------------------------------------------------------------------------------


def test_torchtitan_4148_evaluation_between_steps_moves_no_bias() -> None:
    plain, evaluated = (run_ranks(watched, 2, EP2, evaluates) for evaluates in (False, True))
    for one, other in zip(plain, evaluated):
        assert one["losses"] == other["losses"]
        for name, value in one["buffers"].items():
            assert torch.equal(other["buffers"][name], value), name
    biases = [value for name, value in plain[0]["buffers"].items() if name.endswith("expert_bias")]
    assert biases and all(bias.abs().sum() > 0 for bias in biases)


# ---- PyTorch #160285, Megatron-LM #5956, DeepSpeed #5259 -----------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["fsdp2", "tp+sp"])
def test_pytorch_160285_deepspeed_5259_gradients_of_experts_are_not_ep_times_too_large(axes: str) -> None:
    """The same ranks with and without expert parallelism, so that nothing else differs."""
    apart, dealt = (
        run_ranks(parity.train_parallel, 2, parity.default_case(axes=axes, family=family), {"expert_dispatcher": "auto"})[0]
        for family in ("moe-like", "ep2")
    )
    for step in range(parity.STEPS):
        for name, gradient in apart["gradients"][step].items():
            if ".experts." in name:
                ratio = float(dealt["gradients"][step][name].norm() / gradient.norm())
                assert ratio == pytest.approx(1, abs=1e-8), f"step {step}: {name} is {ratio} times as large"
        assert dealt["norms"][step] == pytest.approx(apart["norms"][step], rel=1e-10)


# ---- transformers #48205 and #48687 --------------------------------------------------------------------------------------------------


def poisoned(case: parity.Case) -> dict[str, Any]:
    """Trains with grouped products whose rows past the last offset are NaN, as uninitialised memory may be."""
    real, poisoned_rows = F.grouped_mm, []

    def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor, **options: Any) -> Tensor:
        out = real(a, b, offs=offs, **options)
        if b.ndim == 3:
            tail = out[int(offs[-1]) :]
            poisoned_rows.append(len(tail))
            tail.fill_(float("nan"))
        return out

    F.grouped_mm = grouped_mm  # type: ignore[assignment]
    return {**parity.train_parallel(case, {}), "poisoned": sum(poisoned_rows), "products": len(poisoned_rows)}


def test_transformers_48205_rows_that_a_grouped_product_leaves_uninitialised_reach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("balance_loss", "router_z_loss", "balance_bias_rate"):
        monkeypatch.setitem(parity.MIXTURE, name, 0.0)
    monkeypatch.setitem(parity.MIXTURE, "capacity_factor", 0.5)  # rows of no expert, where there is no ep; with it they do not travel
    for family in ("moe-like", "ep2"):
        case = parity.default_case(axes="fsdp2", family=family, precision="float32")
        results = run_ranks(poisoned, 2, case)
        assert all(result["products"] > 0 for result in results)
        assert family == "ep2" or results[0]["poisoned"] > 0, "no row was left over, so this case proves nothing"
        parity.compare(case, parity.merged(results))


def test_transformers_48687_router_and_embedding_get_their_whole_gradients() -> None:
    """A loss that looks right says nothing of them."""
    results = run_ranks(parity.train_parallel, 2, EP2, {})
    wanted = parity.train_single(EP2)["gradients"][0]
    for name in (key for key in wanted if "router" in key or "embed" in key):
        assert wanted[name].norm() > 0
        torch.testing.assert_close(results[0]["gradients"][0][name], wanted[name], rtol=0, atol=1e-10)


# ---- NeMo Automodel #1260 ------------------------------------------------------------------------------------------------------------


def input_gradients(copies: bool, count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of what enters experts on this rank, dealt out and whole; ``copies``: all ranks have the same ``count`` tokens."""
    mesh = init_device_mesh("cpu", (2,))
    axis = tensor_axis(mesh.get_group())
    torch.manual_seed(0)
    whole, dealt = (GroupedExperts(4, 8, 6).double() for _ in range(2))
    dealt.load_state_dict(whole.state_dict())
    torch.manual_seed(1 if copies else 1 + axis.rank)
    hidden, indices, weights = torch.randn(count, 8).double(), torch.randint(5, (count, 2)), torch.rand(count, 2).double()
    probe = torch.randn(count, 8).double()
    _deal(dealt, mesh)
    become(dealt, SharedExperts).ep = SharedState(ExpertRanks(4, axis), "alltoall", axis if copies else None)
    found = []
    for experts in (dealt, whole):
        inputs = [hidden.clone().requires_grad_(), weights.masked_fill(indices == 4, 0).requires_grad_()]
        output = experts(inputs[0], indices, inputs[1])
        (output * probe).sum().backward()
        found.append({"output": output.detach(), "hidden": inputs[0].grad, "weights": inputs[1].grad})
    return found[0], found[1]


@pytest.mark.parametrize(("copies", "count"), [(False, 7), (True, 8), (True, 7)])
def test_automodel_1260_gradients_of_gathered_tokens_are_whole(copies: bool, count: int) -> None:
    """A gather whose backward is a slice of this rank's gradient loses what other ranks know."""
    for dealt, whole in run_ranks(input_gradients, 2, copies, count):
        for name, value in whole.items():
            assert value is not None and value.norm() > 0
            torch.testing.assert_close(dealt[name], value, rtol=0, atol=1e-12)


# ---- transformers #28255 and #31464 --------------------------------------------------------------------------------------------------


def test_transformers_28255_layers_that_collapsed_on_experts_of_their_own_do_not_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pooled over layers their load is even; each layer for itself reads as many times too much as there are experts."""
    experts = parity.MIXTURE["num_experts"]
    make = parity.Decoder

    def collapsed(config: Any) -> Any:
        model = make(config)
        for layer, router in enumerate(module for module in model.modules() if isinstance(module, Router)):
            assert router.expert_bias is not None
            router.expert_bias.copy_(10.0 * F.one_hot(torch.tensor(layer), experts))
        return model

    monkeypatch.setattr(parity, "Decoder", collapsed)
    monkeypatch.setattr(parity, "layers_of", lambda case: experts + 1)  # the first is dense
    monkeypatch.setitem(parity.MIXTURE, "num_experts_per_token", 1)
    results = run_ranks(watched, 2, EP2)
    last = [value for name, value in results[0]["buffers"].items() if name.endswith("last_step")]
    assert len(last) == experts
    p = torch.eye(experts, dtype=torch.float64)  # all of a layer's tokens sure of one expert
    for layer, step in enumerate(last):
        assert float(load_balancing_loss(p[layer].view(1, 1, -1), step_fractions(step))) == pytest.approx(experts)
    pooled = torch.stack(last).sum(0)
    assert torch.equal(pooled, pooled.mean().expand(experts))
    assert all(torch.equal(one["buffers"][name], value) for one in results for name, value in results[0]["buffers"].items())
    for vector in results[0]["counts"].values():
        seen = metrics(vector, experts, 1)
        assert seen["max_violation"] == pytest.approx(experts - 1) and seen["dead_experts"] == experts - 1
