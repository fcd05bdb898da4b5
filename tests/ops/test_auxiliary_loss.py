"""A layer's own loss: its gradient, its weight, and equal numbers with and without ranks and pipeline stages."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megascale import MegascaleStrategy, ModelLayout
from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, add_auxiliary_loss, set_microbatch_weight
from tests.harness import full, run_ranks

ROWS, STEPS = 8, 2


def test_gradient_and_value() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    out = add_auxiliary_loss(hidden, (weight**2).sum())
    assert torch.equal(out, hidden)
    (out.sum() * 5).backward()
    torch.testing.assert_close(weight.grad, 2 * weight)
    torch.testing.assert_close(hidden.grad, torch.full_like(hidden, 5.0))


def test_the_weight_is_read_when_the_backward_runs() -> None:
    later = MicrobatchWeight()
    set_microbatch_weight(later)
    weight = torch.ones(2, requires_grad=True)
    out = add_auxiliary_loss(torch.ones(1, requires_grad=True), weight.sum())
    set_microbatch_weight(MicrobatchWeight(1.0))
    later.value = torch.tensor(7.0, dtype=torch.float64)
    assert later.is_used
    out.sum().backward()
    assert weight.grad.tolist() == [7.0, 7.0]


def test_a_loss_of_several_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\): it must be a single number"):
        add_auxiliary_loss(torch.ones(1), torch.ones(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        return add_auxiliary_loss(x, 0.1 * self.linear(x).square().mean())  # a mean over positions, as labels are all valid


class Model(nn.Module):
    megascale_layout = ModelLayout(first="embed", blocks="blocks.*", last="head")

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(11, 8), nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model().double()
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append({name: full(parameter.grad) for name, parameter in self.named_parameters()})


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"ids": torch.randint(11, (5,), generator=generator), "labels": torch.randint(11, (5,), generator=generator)}
        for _ in range(2 * ROWS * STEPS)
    ]


def train(accumulate: int, strategy: dict[str, Any] | None) -> list[dict[str, Tensor]]:
    made = MegascaleStrategy(label_alignment="aligned", **strategy) if strategy is not None else "auto"
    module, data, size, rank = Module(), rows(), 1, 0
    if strategy is not None:
        import torch.distributed as dist

        size = dist.get_world_size() // strategy.get("pipeline_parallel_size", 1)
        rank = dist.get_rank() % size
    batch = ROWS // accumulate // size
    mine = [row for index, row in enumerate(data) if index // batch % size == rank]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if strategy is None else dist.get_world_size(),
        strategy=made,
        max_steps=STEPS,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(mine, batch_size=batch))
    return module.seen


PLANS = {
    "fsdp2": (2, 1, {}),
    "fsdp2, accumulate 2": (2, 2, {}),
    "pp2": (2, 1, dict(pipeline_parallel_size=2)),
    "pp2 interleaved, accumulate 2": (
        2,
        2,
        dict(pipeline_parallel_size=2, pipeline_schedule="Interleaved1F1B", pipeline_stages_per_rank=2),
    ),
    "pp2 zero bubble": (2, 1, dict(pipeline_parallel_size=2, pipeline_schedule="ZBVZeroBubble", pipeline_stages_per_rank=2)),
    "pp2 recomputed": (2, 1, dict(pipeline_parallel_size=2, activation_checkpointing="full")),
}


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_gives_one_devices_gradients(plan: str) -> None:
    """A mean of squares over positions, and microbatches of equal positions: the mean over microbatches is the whole batch's."""
    ranks, accumulate, strategy = PLANS[plan]
    reference = train(1, None)
    plain = {name: gradient.abs().sum() for name, gradient in reference[0].items()}
    results = run_ranks(train, ranks, accumulate, strategy)
    for step in range(STEPS):
        merged = {name: gradient for result in results for name, gradient in result[step].items()}
        assert merged.keys() == plain.keys()
        for name, gradient in reference[step].items():
            torch.testing.assert_close(merged[name], gradient, atol=1e-10, rtol=0, msg=f"step {step}: {name}")
