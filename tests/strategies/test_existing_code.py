"""LightningModules as people write them, with no change beyond the strategy argument: equal to a plain one-device Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_megascale import MegascaleStrategy
from tests.harness import full, run_ranks, worst

STEPS, ROWS, WIDTH, CLASSES, LENGTH = 3, 8, 8, 5, 6
PLANS: dict[str, dict[str, Any]] = {
    "dp2": dict(data_parallel_replicate_size=2),
    "fsdp2": dict(),
    "tp2": dict(tensor_parallel_size=2, layout=dict(colwise=["layers.*.up"], rowwise=["layers.*.down"])),
    "pp2": dict(pipeline_parallel_size=2, microbatch_size=2, layout=dict(first=["embed"], blocks="layers.*", last=["head"])),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Net(nn.Module):
    """Called as ``net(x)`` or, like Hugging Face's classes, as ``net(**batch).loss`` with labels shifted inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        if labels is None:
            return logits
        return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.build()
        self.double()

    def build(self) -> None:
        self.model = Net()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class CallsModel(Base):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


class CallsModelWithBatch(Base):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss


class CallsItself(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())}


class OwnLayers(Base):
    """Layers and a bare parameter are the LightningModule's own attributes."""

    def build(self) -> None:
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.temperature = nn.Parameter(torch.ones(()))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        hidden = self.embed(batch["input_ids"])
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy((self.head(hidden) * self.temperature).flatten(0, 1), batch["labels"].flatten())


class Llama(Base):
    """A Hugging Face model, called as its documentation does."""

    def build(self) -> None:
        import transformers

        size = dict(vocab_size=CLASSES, hidden_size=WIDTH, intermediate_size=12, num_hidden_layers=3)
        heads = dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=LENGTH, tie_word_embeddings=False)
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **heads, attn_implementation="sdpa"))

    training_step = CallsModelWithBatch.training_step


class WithMetric(Base):
    def build(self) -> None:
        super().build()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.seen = torchmetrics.SumMetric()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["input_ids"]).flatten(0, 1)
        self.accuracy(logits, batch["labels"].flatten())
        self.seen(float(len(batch["input_ids"])))
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch["labels"].flatten())


class Manual(Base):
    """Two optimizers stepped by hand, the first one's gradients accumulated over two backwards."""

    def build(self) -> None:
        self.model, self.critic = Net(), Net()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        first.zero_grad()
        self.manual_backward(loss / 2, retain_graph=True)
        self.manual_backward(loss / 2)
        first.step()
        second.zero_grad()
        self.manual_backward(self.critic(batch["input_ids"]).square().mean())
        second.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.model.parameters(), lr=1e-2), torch.optim.SGD(self.critic.parameters(), lr=0.1)]


class StockStyle(Base):
    """Written for Lightning's ModelParallelStrategy: shards by itself in configure_model, on the mesh's stock names."""

    def configure_model(self) -> None:
        if self.device_mesh is None or getattr(self, "sharded", False):
            return
        self.sharded = True
        tensor, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        for layer in self.model.layers:
            if tensor.size() > 1:
                parallelize_module(layer, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(layer, mesh=data)
        fully_shard(self.model, mesh=data)

    training_step = CallsModel.training_step


class Tokens(Dataset):
    """Rows whose labels are masked unequally, the same number in each first position."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(CLASSES, (STEPS * ROWS, LENGTH), generator=generator)
        self.labels = torch.randint(CLASSES, (STEPS * ROWS, LENGTH), generator=generator)
        self.labels[:, 2:][torch.rand((STEPS * ROWS, LENGTH - 2), generator=generator) < 0.4] = -100
        self.labels[:5, 2:] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def train(kind: type[Base], arguments: dict[str, Any] | None) -> dict[str, Any]:
    """One device with Lightning's own strategy (None), or these ranks with ours."""
    module = kind()
    strategy: Any = "auto" if arguments is None else MegascaleStrategy(**arguments)
    ranks = 1 if arguments is None else int(os.environ["WORLD_SIZE"])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    peers = 1 if arguments is None else arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)
    shares = 1 if arguments is None else ranks // peers
    rank = int(os.environ.get("RANK", 0)) // (ranks // shares)
    sampler = DistributedSampler(Tokens(), num_replicas=shares, rank=rank, shuffle=False)
    trainer.fit(module, DataLoader(Tokens(), batch_size=ROWS // shares, sampler=sampler))
    state = {name: full(value) for name, value in module.named_parameters()}
    return {"state": state, "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()}}


def declared(kind: type[Base], plan: str) -> dict[str, Any]:
    """The one thing a scalar mean over unequal labels cannot tell: where a position's target stands."""
    arguments = dict(PLANS[plan])
    arguments["label_alignment"] = "huggingface" if kind in (CallsModelWithBatch, Llama) else "aligned"
    if kind is Llama:
        arguments["layout"] = dict(first=["model.embed_tokens"], blocks="model.layers.*", last=["model.norm", "lm_head"])
    return arguments


KINDS = (CallsModel, CallsModelWithBatch, CallsItself, OwnLayers, WithMetric, StockStyle)
REFUSED_UNDER_A_PIPELINE: dict[type[Base], str] = {
    OwnLayers: "the model must be one child of OwnLayers, called once in each step as self.model(...), and its layers lie in several "
    "children (embed, layers, head)",
    StockStyle: "pipeline_parallel_size: the module's own configure_model has applied fully_shard or parallelize_module already",
    Manual: "manual optimization",
}


def combinations() -> Iterator[Any]:
    for kind in KINDS:
        for plan in PLANS:
            if plan != "pp2" or kind not in REFUSED_UNDER_A_PIPELINE:
                yield pytest.param(kind, plan, id=f"{kind.__name__}-{plan}")
    yield pytest.param(Llama, "pp2", id="Llama-pp2")


@pytest.mark.parametrize(("kind", "plan"), combinations())
def test_unchanged_module_equals_one_device(kind: type[Base], plan: str) -> None:
    arguments = declared(kind, plan)
    if kind is StockStyle:
        arguments.pop("layout", None)
    reference, results = train(kind, None), run_ranks(train, 2, kind, arguments)
    state = {name: value for result in results for name, value in result["state"].items()}  # pipeline stages hold different ones
    off, name = worst(reference["state"], state)
    tolerance = 1e-6 if kind is Llama else 1e-10  # its norms and its loss work in float32, whatever the dtype of the model
    assert off < tolerance, f"{name} is off by {off:.2e}"
    for result in results:
        assert result["metrics"] == pytest.approx(reference["metrics"], abs=1e-12), "metrics differ between one device and the ranks"


@pytest.mark.parametrize("kind", REFUSED_UNDER_A_PIPELINE, ids=lambda kind: kind.__name__)
def test_what_a_pipeline_cannot_run_is_refused_by_name(kind: type[Base]) -> None:
    for message in run_ranks(refusal, 2, kind, {**PLANS["pp2"], "label_alignment": "aligned"}):
        assert REFUSED_UNDER_A_PIPELINE[kind] in message


def refusal(kind: type[Base], arguments: dict[str, Any]) -> str:
    try:
        train(kind, arguments)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("plan", ["dp2", "fsdp2"])
def test_manual_optimization_equals_one_device(plan: str) -> None:
    """The critic's loss is a mean over rows, the model's over labels: equal row and label shares make both exact."""
    reference, results = train(EvenManual, None), run_ranks(train, 2, EvenManual, {**PLANS[plan], "loss_weight": "samples"})
    off, name = worst(reference["state"], results[0]["state"])
    assert off < 1e-10, f"{name} is off by {off:.2e}"


def test_manual_optimization_refuses_labels_whose_place_is_not_declared() -> None:
    messages = run_ranks(refusal, 2, Manual, dict(loss_weight="labels"))
    assert messages[0] == messages[1] and "label_alignment=None" in messages[0]


class EvenManual(Manual):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        super().training_step({**batch, "labels": batch["labels"].clamp(min=0)}, batch_idx)


def test_a_module_is_parallelized_once_for_fit_validate_and_test() -> None:
    for result in run_ranks(fit_then_test, 2):
        assert result["first"] == pytest.approx(result["second"], abs=1e-12)
        assert "other plan" in result["message"] or "another plan" in result["message"]


class Evaluated(CallsModel):
    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("test/loss", self.training_step(batch, batch_idx), sync_dist=True)


def fit_then_test() -> dict[str, Any]:
    module = Evaluated()
    quiet: dict[str, Any] = dict(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)

    def trainer(**sizes: Any) -> L.Trainer:
        strategy = MegascaleStrategy(label_alignment="aligned", **sizes)
        return L.Trainer(**quiet, max_epochs=1, strategy=strategy, enable_model_summary=False)

    first = trainer()
    first.fit(module, DataLoader(Tokens(), batch_size=4))
    loss = first.test(module, DataLoader(Tokens(), batch_size=4), verbose=False)[0]["test/loss"]
    again = trainer().test(module, DataLoader(Tokens(), batch_size=4), verbose=False)[0]["test/loss"]
    try:
        trainer(data_parallel_replicate_size=2).test(module, DataLoader(Tokens(), batch_size=4), verbose=False)
        message = "no error"
    except ValueError as error:
        message = str(error)
    return {"first": loss, "second": again, "message": message}
