"""Graphs that a pipeline refuses: functions that own weights under zero-bubble schedules, losses that use parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_megascale.ops.cross_entropy import linear_cross_entropy
from lightning_megascale.parallel.pipeline_functions import uses_parameters, weight_functions
from tests import parity
from tests.harness import run_ranks


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


def test_a_function_that_takes_a_weight_and_its_input_is_named() -> None:
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    assert weight_functions([Times.apply(x * other, weight), 3], [weight, other]) == ["Times"]
    assert weight_functions([x * weight], [weight]) == []  # torch's own operators are split by torch
    assert weight_functions([Times.apply(torch.ones(3), weight)], [weight]) == []  # nothing but the weight waits for it
    assert weight_functions([Times.apply(x * 2, x * weight)], [weight]) == []  # the weight's own node is apart


def test_gradients_made_in_the_forward_may_be_scaled_twice() -> None:
    weight, hidden = nn.Parameter(torch.randn(5, 3)), torch.randn(2, 3, requires_grad=True)
    loss_sum, _ = linear_cross_entropy(hidden * 1, weight, torch.tensor([1, 2]))
    assert weight_functions([loss_sum], [weight]) == []


def test_a_loss_past_the_outputs() -> None:
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    output = torch.ones(3) * weight
    assert not uses_parameters(output.square().sum(), [output])
    assert not uses_parameters(output, [output])
    assert uses_parameters(output.sum() + other.square().sum(), [output])
    assert uses_parameters((output * weight).sum(), [output])
    leaf = torch.ones(3, requires_grad=True)
    assert not uses_parameters(leaf.sum(), [leaf])


class Penalty(parity.ParityModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.parameters())


class HeadPenalty(parity.ParityModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.model.head.weight.square().sum()


class LoggedNorm(parity.ParityModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("norm", sum(p.detach().norm() for p in self.model.parameters()))
        return loss


class AsksForDevice(parity.ParityModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        assert next(self.model.parameters()).device == self.device
        return super().training_step(batch, batch_idx)


def outcomes(kinds: list[type[parity.ParityModule]]) -> list[str]:
    found = []
    plain = parity.ParityModule
    for kind in kinds:
        parity.ParityModule = kind  # type: ignore[misc]
        try:
            parity.train_parallel(parity.default_case(axes="pp2", schedule="1F1B"), {})
            found.append("trained")
        except ValueError as error:
            found.append(str(error))
        finally:
            parity.ParityModule = plain  # type: ignore[misc]
    return found


def test_a_step_that_uses_parameters_is_refused_on_every_rank() -> None:
    for found in run_ranks(outcomes, 2, [Penalty, HeadPenalty, LoggedNorm, AsksForDevice]):
        assert all("the step uses the model's parameters outside of its forward" in message for message in found[:3]), found
        assert found[3] == "trained"
