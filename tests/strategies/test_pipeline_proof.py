"""Once in a pipelined run a loss must prove that it may be cut into microbatches; and a step's traces on the module reach every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests import parity
from tests.harness import run_ranks

CASE = parity.default_case(axes="pp2", schedule="1F1B")


def logits_of(module: parity.ParityModule, batch: dict[str, Tensor]) -> Tensor:
    return module.model(batch["input_ids"])


class Sum(parity.ParityModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return F.cross_entropy(logits_of(self, batch).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


class Contrastive(parity.ParityModule):
    """Each row against the others of the batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        pooled = logits_of(self, batch).mean(1)
        return F.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))


class ClassWeights(parity.ParityModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        weight = torch.linspace(0.1, 2, 32, dtype=torch.float64)
        return F.cross_entropy(logits_of(self, batch).flatten(0, 1), batch["labels"].flatten(), weight=weight)


class Noisy(parity.ParityModule):
    """Draws random numbers after the model's call, so nothing can be compared; it is a mean all the same."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = logits_of(self, batch)
        return F.cross_entropy((logits + 0.1 * torch.randn_like(logits)).flatten(0, 1), batch["labels"].flatten())


class Traces(parity.ParityModule):
    """Keeps what it sees on itself, before and after the model's call."""

    def __init__(self, case: parity.Case) -> None:
        super().__init__(case)
        self.first_tokens: list[int] = []
        self.losses: list[Tensor] = []
        self.by_name: dict[str, float] = {}
        self.steps = 0
        self.register_buffer("calls", torch.zeros(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.first_tokens.append(int(batch["input_ids"][0, 0]))
        self.calls += 1
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        self.by_name[f"step {batch_idx}"] = float(loss.detach())
        self.steps += 1
        return loss


def outcomes(kinds: list[type[parity.ParityModule]]) -> list[str]:
    found = []
    plain = parity.ParityModule
    for kind in kinds:
        parity.ParityModule = kind  # type: ignore[misc]
        try:
            parity.train_parallel({**CASE, "labels": "90% of one rank masked"}, {})
            found.append("trained")
        except ValueError as error:
            found.append(str(error))
        finally:
            parity.ParityModule = plain  # type: ignore[misc]
    return found


def test_a_loss_that_is_no_mean_over_labels_is_refused_on_every_rank() -> None:
    for found in run_ranks(outcomes, 2, [Sum, Contrastive, ClassWeights, Noisy, parity.ParityModule]):
        assert all("training_step's loss cannot be cut into microbatches: two of them give" in message for message in found[:3]), found
        assert found[3:] == ["trained", "trained"]


def traces() -> dict[str, Any]:
    plain, made = parity.ParityModule, []
    parity.ParityModule = lambda case: made.append(Traces(case)) or made[-1]  # type: ignore[assignment, misc, func-returns-value]
    try:
        parity.train_parallel(CASE, {})
    finally:
        parity.ParityModule = plain  # type: ignore[misc]
    module = made[0]
    names = ("first_tokens", "losses", "by_name", "steps")
    return {name: getattr(module, name) for name in names} | {"calls": float(module.calls)}


def test_what_a_step_leaves_on_the_module_is_on_every_rank_once() -> None:
    """One entry for each microbatch: captured steps leave none, nor does the proof of the loss."""
    one, other = run_ranks(traces, 2)
    parts = parity.microbatches_of(CASE)
    rows = [int(row[0]) for batch in parity.batches(CASE) for row in batch["input_ids"]]
    for found in (one, other):
        assert found["first_tokens"] == rows and found["steps"] == found["calls"] == parity.STEPS * parts
        assert len(found["losses"]) == parity.STEPS * parts and len(found["by_name"]) == parity.STEPS
    assert torch.equal(torch.stack(one["losses"]), torch.stack(other["losses"])) and one["by_name"] == other["by_name"]


class ClipsInHook(parity.ParityModule):
    """By the norm of what this rank holds."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class ClampsInHook(parity.ParityModule):
    """Element by element, which needs no other stage."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.to_local().clamp_(-0.01, 0.01)


class ClipsAsLightningSays(parity.ParityModule):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm="norm")


def test_clipping_by_the_norm_of_a_stage_is_refused_on_every_rank() -> None:
    for found in run_ranks(outcomes, 2, [ClipsInHook, ClampsInHook, ClipsAsLightningSays]):
        assert "a hook scaled the gradients of pipeline stages by different factors" in found[0], found
        assert found[1:] == ["trained", "trained"]


class MinGPTGroups(parity.ParityModule):
    """Groups by module class, by attribute and by rest, as many codes make them: all modules are there while an optimizer is made."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        names = {name for name, _ in self.named_parameters()}
        linear = {
            f"{n}.{k}" for n, m in self.named_modules() for k, _ in m.named_parameters(recurse=False) if isinstance(m, torch.nn.Linear)
        }
        groups = [
            {"params": [p for n, p in self.named_parameters() if n in linear and "head" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in self.named_parameters() if n in names - linear], "weight_decay": 0.0},
            {"params": [self.model.head.weight], "lr": 0.02},
        ]
        self.counts = [len(group["params"]) for group in groups]
        return torch.optim.AdamW(groups, lr=1e-2)


def counted_groups() -> tuple[list[int], list[int]]:
    plain, made = parity.ParityModule, []
    parity.ParityModule = lambda case: made.append(MinGPTGroups(case)) or made[-1]  # type: ignore[assignment, misc, func-returns-value]
    try:
        parity.train_parallel(CASE, {})
    finally:
        parity.ParityModule = plain  # type: ignore[misc]
    return made[0].counts, [len(group["params"]) for group in made[0].trainer.optimizers[0].param_groups]


def test_an_optimizer_is_made_over_the_whole_model() -> None:
    (whole, first), (same, second) = run_ranks(counted_groups, 2)
    assert whole == same == [a + b for a, b in zip(first, second)] and min(whole) > 0
