"""Public scripts whose step is the point: two towers and a contrastive loss, torchmetrics, gradients accumulated by hand."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.harness import full, run_ranks, worst
from tests.strategies.script_runs import ROWS, STEPS, Pool, Script, play

FEATURES, WIDTH, CLASSES = 6, 8, 3


def pairs() -> Dataset:
    """(image features, word, class)."""
    generator = torch.Generator().manual_seed(2)
    count = STEPS * ROWS
    images = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(images, *(torch.randint(high, (count,), generator=generator) for high in (9, CLASSES)))


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


# ---- two towers ------------------------------------------------------------------------------------------------------------


class TwoTowers(L.LightningModule):
    """Negatives are the other rows of this rank, as in DDP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.image_encoder = tower()
        self.text_encoder = nn.Sequential(nn.Embedding(9, FEATURES), tower())
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.double()

    def embed(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image_encoder(batch[0]), dim=-1), F.normalize(self.text_encoder(batch[1]), dim=-1)

    def loss(self, images: Tensor, texts: Tensor) -> Tensor:
        logits = self.logit_scale.exp() * images @ texts.T
        targets = torch.arange(len(logits))
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(*self.embed(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class GatheredTowers(TwoTowers):
    """Every rank scores everybody's pairs."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, texts = self.embed(batch)
        images = self.all_gather(images, sync_grads=True).reshape(-1, WIDTH)
        texts = self.all_gather(texts, sync_grads=True).reshape(-1, WIDTH)
        return self.loss(images, texts)


class LocalTowers(TwoTowers):
    """A rank scores its own images against everybody's texts, and its own texts against everybody's images."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, texts = self.embed(batch)
        everybody = [self.all_gather(part, sync_grads=True).reshape(-1, WIDTH) for part in (images, texts)]
        rank = self.trainer.strategy.data_parallel_rank if self.trainer.world_size > 1 else 0
        targets = torch.arange(len(images)) + rank * len(images)
        scale = self.logit_scale.exp()
        image_loss = F.cross_entropy(scale * images @ everybody[1].T, targets)
        return (image_loss + F.cross_entropy(scale * texts @ everybody[0].T, targets)) / 2


# ---- torchmetrics ----------------------------------------------------------------------------------------------------------


class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = tower(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Metered(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.model = Probe().double()
        options: dict[str, Any] = dict(task="multiclass", num_classes=CLASSES)
        metrics = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.Accuracy(**options),
                "precision": torchmetrics.Precision(**options, average="macro"),
                "recall": torchmetrics.Recall(**options, average="macro"),
            }
        )
        self.train_metrics, self.val_metrics = metrics.clone(prefix="train/"), metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")
        self.mean_loss = torchmetrics.MeanMetric()
        self.confusion = torchmetrics.ConfusionMatrix(**options)

    def step(self, batch: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        images, _, labels = batch
        logits = self.model(images)
        return F.cross_entropy(logits, labels), logits.softmax(1), labels

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss, guess, labels = self.step(batch)
        self.train_metrics(guess, labels)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        self.mean_loss(loss.detach(), weight=len(labels))
        self.log("train/mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        _, guess, labels = self.step(batch)
        self.val_metrics.update(guess, labels)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        _, guess, labels = self.step(batch)
        self.test_metrics.update(guess, labels)
        self.confusion.update(guess, labels)

    def on_test_epoch_end(self) -> None:
        self.log_dict(self.test_metrics.compute())
        self.log("test/diagonal", self.confusion.compute().diag().sum().double())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=5e-2)


# ---- gradients accumulated by hand -----------------------------------------------------------------------------------------


class AccumulatesByHand(L.LightningModule):
    """A parameter of the LightningModule itself lies in no FSDP2 unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.automatic_optimization = False
        self.model, self.temperature = nn.Sequential(tower(), nn.Linear(WIDTH, CLASSES)), nn.Parameter(torch.ones(()))
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        every = 3
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        loss = F.cross_entropy(self.model(batch[0]) * self.temperature, batch[2]) / every
        self.manual_backward(loss)
        if (batch_idx + 1) % every == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


GATHERED, LOCAL = Script(GatheredTowers, pairs), Script(LocalTowers, pairs)
PER_RANK = Script(TwoTowers, pairs)
METRICS = Script(Metered, pairs, evaluates=True, tests=True)
BY_HAND = Script(AccumulatesByHand, pairs, options=dict(max_epochs=2))

DP2 = dict(data_parallel_replicate_size=2)
PIPELINE: dict[str, Any] = dict(pipeline_parallel_size=2, microbatch_size=4)
TOWER_PAIRS = dict(colwise=["image_encoder.0", "text_encoder.1.0"], rowwise=["image_encoder.2", "text_encoder.1.2"])
EQUAL = {
    "gathered towers dp2": (GATHERED, DP2),
    "gathered towers fsdp2": (GATHERED, {}),
    "local towers fsdp2": (LOCAL, {}),
    "towers tp2": (PER_RANK, dict(tensor_parallel_size=2, layout=TOWER_PAIRS)),
    "metrics dp2": (METRICS, DP2),
    "metrics fsdp2": (METRICS, {}),
    "metrics tp2": (METRICS, dict(tensor_parallel_size=2, layout=dict(colwise=["body.0"], rowwise=["body.2"]))),
    "metrics pp2": (METRICS, dict(**PIPELINE, layout=dict(first=["body.0", "body.1"], blocks=["body.2"], last=["head"]))),
    "by hand dp2": (BY_HAND, DP2),
    "by hand fsdp2": (BY_HAND, {}),
}
REFUSED: dict[str, tuple[Script, dict[str, Any], list[str]]] = {
    "by hand pp2": (BY_HAND, PIPELINE, ["manual optimization: the pipeline's schedule", "pipeline_parallel_size=1"]),
    "towers pp2": (PER_RANK, PIPELINE, ["the model must be one child of TwoTowers", "(image_encoder, text_encoder)"]),
}
POOL = Pool({**EQUAL, **{name: (script, arguments) for name, (script, arguments, _) in REFUSED.items()}})


@pytest.mark.parametrize("name", EQUAL)
def test_script_equals_one_device(name: str) -> None:
    POOL.assert_equals_one_device(name, of_metrics=1e-6)  # torchmetrics adds up in float32


@pytest.mark.parametrize("name", REFUSED)
def test_script_is_refused_by_name(name: str) -> None:
    first, second = POOL.refusals(name)
    assert first == second
    for part in REFUSED[name][2]:
        assert part in first, first


class Halves(TwoTowers):
    """What two ranks do, on one device: the loss of each rank's rows by itself, and the mean of both."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return sum(self.loss(*self.embed([part[rank::2] for part in batch])) for rank in range(2)) / 2  # type: ignore[return-value]


def test_in_batch_negatives_are_those_of_a_rank() -> None:
    """No plan can give one device's number here; it is the mean over ranks of their own losses, as in DDP."""
    reference = play(Script(Halves, pairs), None)
    for result in run_ranks(play, 2, PER_RANK, {}):
        off, name = worst(reference["state"], {key: full(value) for key, value in result["state"].items()})
        assert off < 1e-10, f"{name} is off by {off:.2e}"
