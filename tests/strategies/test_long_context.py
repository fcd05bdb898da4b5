"""A row of 16,384 tokens on four context-parallel ranks gives one device's numbers, also with all that saves memory."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megascale import MegascaleStrategy
from tests.benchmarks.long_context import LongModule, config, rows
from tests.harness import full, run_alone, run_ranks

TOKENS = 16384
SAVING = dict(activation_checkpointing="full", activation_offload=True)


class Recorded(LongModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = {name: full(parameter.grad) for name, parameter in self.model.named_parameters()}


def on_ranks(plan: dict[str, Any], mlp_chunk_tokens: int | None) -> tuple[float, dict[str, Tensor]]:
    module = Recorded(config(TOKENS, mlp_chunk_tokens))
    strategy = MegascaleStrategy(context_parallel_size=4, label_alignment="aligned", **plan)
    quiet: dict[str, Any] = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = L.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_steps=1, use_distributed_sampler=False, **quiet)
    trainer.fit(module, DataLoader(rows(TOKENS), batch_size=1))  # type: ignore[arg-type]
    return float(strategy.step_loss), module.gradients


def alone() -> tuple[float, dict[str, Tensor]]:
    """The plain model on one device, its feed-forward in one piece."""
    model, row = LongModule(config(TOKENS, None)).model, rows(TOKENS)[0]
    loss_sum, num_tokens = model(row["input_ids"][None], labels=row["labels"][None])
    loss = loss_sum / num_tokens
    loss.backward()
    return float(loss), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_ranks_give_one_devices_numbers() -> None:
    loss, gradients = run_alone(alone, timeout=600)
    scale = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    for plan, chunk in (({}, None), (SAVING, 2048)):
        for mine, theirs in run_ranks(on_ranks, 4, plan, chunk, timeout=900)[:2]:
            assert abs(mine - loss) < 1e-5 * loss, (plan, mine, loss)
            for name, gradient in gradients.items():
                assert (theirs[name] - gradient).abs().max() < 1e-5 * scale, (plan, name)
