"""Own layers of experts: losses that weigh by this batch's tokens, modules that blocks share, and what is refused instead of trained."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megascale import MegascaleStrategy, ModelLayout, ParallelPlan
from lightning_megascale.models.moe import GroupedExperts, MixtureOfExperts, Router
from lightning_megascale.parallel.model_check import check_model
from tests.harness import full, run_ranks, worst

WORDS, WIDTH, EXPERTS, LENGTH = 16, 8, 4, 8
LAYOUT = dict(first="embed", blocks="blocks.*", last="head", experts="blocks.*.mlp.experts", router="blocks.*.mlp.router")
QUIET: dict[str, Any] = dict(
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1
)


class Block(nn.Module):
    def __init__(self, experts: nn.Module | None, router: nn.Module | None, **losses: Any) -> None:
        super().__init__()
        made = GroupedExperts(EXPERTS, WIDTH, 6)
        made.reset_parameters(0.2)
        own = Router(WIDTH, EXPERTS, 2, **losses)
        own.reset_parameters(0.5)
        self.mlp = MixtureOfExperts(router or own, experts or made)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(hidden)


class Net(nn.Module):
    def __init__(self, layers: int = 2, shared: str = "", **losses: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        first = Block(None, None, **losses)
        experts, router = (getattr(first.mlp, name) if shared == name else None for name in ("experts", "router"))
        self.blocks = nn.ModuleList([first, *(Block(experts, router, **losses) for _ in range(layers - 1))])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Module(L.LightningModule):
    """Keeps each step's gradients and the parameters at the end."""

    def __init__(self, net: nn.Module, batches: list[dict[str, Tensor]]) -> None:
        super().__init__()
        self.net, self.batches, self.gradients = net.double(), batches, []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        strategy = self.trainer.strategy
        rank, size = getattr(strategy, "data_parallel_rank", 0), getattr(strategy, "data_parallel_size", 1)
        batches: Any = [{key: value.chunk(size)[rank] for key, value in batch.items()} for batch in self.batches]
        return DataLoader(batches, batch_size=None)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: full(p.grad) for name, p in self.named_parameters()})


def batches_of(counts: tuple[int, ...], rows: int = 4) -> list[dict[str, Tensor]]:
    """A batch for each count: so many labels in each row but the last, which has one."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for count in counts:
        ids = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
        labels = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
        labels[:, count:], labels[-1, 1:] = -100, -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def trained(net: Net, batches: list[dict[str, Tensor]], plan: dict[str, Any]) -> dict[str, Any]:
    module = Module(net, batches)
    strategy: Any = MegascaleStrategy(layout=ModelLayout(**LAYOUT), label_alignment="aligned", **plan)  # type: ignore[arg-type]
    world = torch.distributed.get_world_size()
    L.Trainer(strategy=strategy, devices=world, plugins=[DoublePrecision()], use_distributed_sampler=False, **QUIET).fit(module)
    return {"gradients": module.gradients, "parameters": {name: full(p) for name, p in module.named_parameters()}}


# ---- weights of losses -----------------------------------------------------------------------------------------------------------------


def by_hand(losses: dict[str, Any], batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Plain torch: the mean over labels, and of each layer its formulas as means over all tokens."""
    net = Net().double()
    terms: list[Tensor] = []

    def note(router: Router, args: Any, output: Any) -> None:
        logits = args[0] @ router.weight.t()
        p = logits.softmax(-1)
        chosen = F.one_hot(output[1].view(*args[0].shape[:2], 2), EXPERTS).sum(2).double()  # (B, L, E)
        fractions = chosen.sum(1, keepdim=True) / (2 * LENGTH)
        terms.append(
            losses["balance_loss"] * EXPERTS * (p * fractions).sum(-1).mean() + losses["z_loss"] * logits.logsumexp(-1).square().mean()
        )

    for block in net.blocks:
        block.mlp.router.register_forward_hook(note)  # type: ignore[union-attr, operator]
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    gradients = []
    for batch in batches:
        terms.clear()
        loss = F.cross_entropy(net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        (loss + sum(terms)).backward()
        gradients.append({f"net.{name}": p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
        optimizer.step()
    return {"gradients": gradients, "parameters": {f"net.{name}": p.detach() for name, p in net.named_parameters()}}


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ({}, 1),
        ({"expert_parallel_size": 2}, 2),
        ({"pipeline_parallel_size": 2, "microbatch_size": 1}, 2),
        pytest.param({"expert_parallel_size": 2, "pipeline_parallel_size": 2, "microbatch_size": 1}, 4, marks=pytest.mark.slow),
    ],
    ids=["one", "ep2", "pp2", "pp2 x ep2"],
)
def test_losses_weigh_by_the_tokens_of_their_batch(plan: dict[str, Any], ranks: int) -> None:
    """The share of labels is another one in every step, and on every rank: a mean over tokens does not see it."""
    losses = dict(balance_loss=0.3, balance_scope="sequence", z_loss=0.1)
    batches = batches_of((8, 2, 6))
    wanted = by_hand(losses, batches)
    for mine in run_ranks(_with_losses, ranks, losses, batches, plan):
        for step, gradients in enumerate(wanted["gradients"]):
            held = mine["gradients"][step]
            assert held and worst(held, {name: gradients[name] for name in held})[0] < 1e-10, step
        held = mine["parameters"]
        assert worst(held, {name: wanted["parameters"][name] for name in held})[0] < 1e-10


def _with_losses(losses: dict[str, Any], batches: list[dict[str, Tensor]], plan: dict[str, Any]) -> dict[str, Any]:
    return trained(Net(**losses), batches, plan)


# ---- shared modules --------------------------------------------------------------------------------------------------------------------


def test_experts_that_blocks_share_over_pipeline_stages() -> None:
    """One module in four blocks, two of them on a stage: one parameter, by whichever of its names."""
    batches = batches_of((8, 8, 8))
    net = Net(4, "experts").double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()).backward()
        optimizer.step()
    wanted = {f"net.{name}": p.detach() for name, p in net.named_parameters(remove_duplicate=False)}
    plan = {"expert_parallel_size": 2, "pipeline_parallel_size": 2, "microbatch_size": 1}
    for mine in run_ranks(_shared, 4, batches, plan):
        assert worst(mine["parameters"], {name: wanted[name] for name in mine["parameters"]})[0] < 1e-10


def _shared(batches: list[dict[str, Tensor]], plan: dict[str, Any]) -> dict[str, Any]:
    return trained(Net(4, "experts"), batches, plan)


def refused(net: nn.Module, ranks: int, **plan: Any) -> str:
    module = L.LightningModule()
    module.net = net
    layout = ModelLayout(**LAYOUT)  # type: ignore[arg-type]
    return "\n".join(check_model(module, net, ParallelPlan(**plan).resolve(ranks), layout))


@pytest.mark.parametrize("part", ["router", "experts"])
def test_a_module_of_two_blocks_is_refused_by_name(part: str) -> None:
    words = f"blocks.0.mlp.{part} and blocks.1.mlp.{part} are one module in blocks that are sharded apart"
    assert words in refused(Net(shared=part), 2)
    assert (words in refused(Net(shared=part), 2, expert_parallel_size=2)) == (part == "router")
    assert refused(Net(), 2) == ""


def test_a_buffer_by_expert_is_refused() -> None:
    net = Net()
    net.blocks[1].mlp.experts.register_buffer("scale", torch.ones(EXPERTS))  # type: ignore[union-attr, operator]
    found = refused(net, 2, expert_parallel_size=2)
    assert "blocks.1.mlp.experts.scale is a buffer of shape (4,), with num_experts=4 as a dim" in found
    assert "requires_grad=False" in found and refused(net, 2) == ""
    plain = Net()
    plain.blocks[1].mlp.experts.register_buffer("scale", torch.ones(WIDTH))  # type: ignore[union-attr, operator]
    assert refused(plain, 2, expert_parallel_size=2) == ""


# ---- what a router may choose ----------------------------------------------------------------------------------------------------------


def chosen(**others: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = dict(hidden=torch.randn(3, WIDTH), indices=torch.tensor([[0, 1], [2, 3], [1, 4]]), weights=torch.rand(3, 2))
    given.update(others)
    return given["hidden"], given["indices"], given["weights"]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"indices": torch.tensor([[0, -1], [2, 3], [1, 3]])}, "indices from -1 to 3: its experts are 0 to 3, and 4 means no expert"),
        ({"indices": torch.tensor([[0, 5], [2, 3], [1, 3]])}, "indices from 0 to 5"),
        ({"indices": torch.rand(3, 2)}, "indices of torch.float32"),
        ({"weights": torch.ones(3, 2, dtype=torch.int64)}, "weights of torch.int64"),
        ({"indices": torch.zeros(2, 2, dtype=torch.int64), "weights": torch.rand(2, 2)}, r"hidden \(3, 8\), indices \(2, 2\)"),
        ({"weights": torch.rand(3, 1)}, r"weights \(3, 1\)"),
        ({"hidden": torch.randn(1, 3, WIDTH)}, r"hidden \(1, 3, 8\)"),
    ],
)
def test_choices_that_no_router_may_make(others: dict[str, Any], words: str) -> None:
    experts = GroupedExperts(EXPERTS, WIDTH, 6)
    experts(*chosen())
    with pytest.raises(ValueError, match=f"GroupedExperts is called with .*{words}"):
        experts(*chosen(**others))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 5}, "top_k=5: from 1 to num_experts=4"),
        ({"top_k": 0}, "top_k=0"),
        ({"scores": "tanh"}, "scores='tanh'"),
        ({"num_groups": 3}, "num_groups=3: must divide num_experts=4"),
        ({"num_groups": 2, "top_k": 3}, "top_k=3: 1 groups hold 2 experts"),
        ({"num_groups": 4, "scores": "sigmoid", "top_k": 1}, "num_groups=4: sigmoid scores a group by its two best"),
        ({"capacity_factor": -1.0}, "capacity_factor=-1.0"),
        ({"balance_scope": "rows"}, "balance_scope='rows'"),
        ({"z_loss": -1.0}, "must be 0 or more"),
    ],
)
def test_routers_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Router(WIDTH, EXPERTS, **{"top_k": 2, **options})
