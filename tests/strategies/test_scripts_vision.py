"""Public scripts that look at pictures: an image classifier, a GAN with two optimizers, an autoencoder in two children."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.strategies.script_runs import ROWS, STEPS, Pool, Script

SIDE, CLASSES, LATENT = 6, 3, 4


def pictures() -> Dataset:
    """(picture, class, noise for a generator)."""
    generator = torch.Generator().manual_seed(1)
    count = STEPS * ROWS
    images = torch.randn(count, 1, SIDE, SIDE, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, LATENT, generator=generator, dtype=torch.float64)
    return TensorDataset(images, torch.randint(CLASSES, (count,), generator=generator), noise)


# ---- image classifier ------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.stages = nn.Sequential(*[Stage(norm) for _ in range(3)])
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


class ImageClassifier(L.LightningModule):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = ConvNet(norm).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def shared_step(self, batch: list[Tensor], stage: str) -> Tensor:
        images, labels, _ = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log(f"{stage}/accuracy", (logits.argmax(1) == labels).double().mean(), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.shared_step(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.shared_step(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.shared_step(batch, "test")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# ---- GAN -------------------------------------------------------------------------------------------------------------------


class GAN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.automatic_optimization = False
        pixels = SIDE * SIDE
        self.generator = nn.Sequential(nn.Linear(LATENT, 16), nn.LeakyReLU(0.2), nn.Linear(16, pixels), nn.Tanh()).double()
        self.discriminator = nn.Sequential(nn.Linear(pixels, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def adversarial_loss(self, guess: Tensor, is_real: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(guess, torch.full_like(guess, is_real))

    def training_step(self, batch: list[Tensor]) -> None:
        images, _, z = batch
        optimizer_g, optimizer_d = self.optimizers()

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), 1.0)
        self.log("g_loss", g_loss, prog_bar=True, on_step=False, on_epoch=True, sync_dist=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real = self.adversarial_loss(self.discriminator(images.flatten(1)), 1.0)
        fake = self.adversarial_loss(self.discriminator(self(z).detach()), 0.0)
        d_loss = (real + fake) / 2
        self.log("d_loss", d_loss, prog_bar=True, on_step=False, on_epoch=True, sync_dist=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self) -> Any:
        options = dict(lr=2e-2, betas=(0.5, 0.999))
        return [torch.optim.Adam(part.parameters(), **options) for part in (self.generator, self.discriminator)], []


# ---- autoencoder -----------------------------------------------------------------------------------------------------------


class LitAutoEncoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.encoder = nn.Sequential(nn.Linear(SIDE * SIDE, 16), nn.ReLU(), nn.Linear(16, LATENT)).double()
        self.decoder = nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, SIDE * SIDE)).double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].view(batch[0].size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


CLASSIFIER = Script(partial(ImageClassifier, partial(nn.GroupNorm, 2)), pictures, evaluates=True, tests=True, options=dict(max_epochs=2))
WITH_BATCH_NORM = Script(partial(ImageClassifier, nn.BatchNorm2d), pictures)
ADVERSARIAL = Script(GAN, pictures)
AUTOENCODER = Script(LitAutoEncoder, pictures)

PIPELINE: dict[str, Any] = dict(pipeline_parallel_size=2, microbatch_size=2)
STAGES = dict(first=["stem"], blocks="stages.*", last=["head"])
MLP_PAIRS = dict(colwise=["encoder.0", "decoder.0"], rowwise=["encoder.2", "decoder.2"])
EQUAL = {
    "classifier dp2": (CLASSIFIER, dict(data_parallel_replicate_size=2)),
    "classifier fsdp2": (CLASSIFIER, dict()),
    "classifier pp2": (CLASSIFIER, dict(**PIPELINE, layout=STAGES)),
    "GAN dp2": (ADVERSARIAL, dict(data_parallel_replicate_size=2)),
    "GAN fsdp2": (ADVERSARIAL, dict()),
    "autoencoder dp2": (AUTOENCODER, dict(data_parallel_replicate_size=2)),
    "autoencoder fsdp2": (AUTOENCODER, dict()),
    "autoencoder tp2": (AUTOENCODER, dict(tensor_parallel_size=2, layout=MLP_PAIRS)),
}
REFUSED: dict[str, tuple[Script, dict[str, Any], list[str]]] = {
    "batch norm dp2": (
        WITH_BATCH_NORM,
        dict(data_parallel_replicate_size=2),
        [
            "module 'model.stages.0.norm' is a BatchNorm2d: it takes its statistics from this rank's rows only",
            "Use group, layer or RMS norm",
        ],
    ),
    "batch norm pp2": (WITH_BATCH_NORM, dict(**PIPELINE, layout=STAGES), ["is a BatchNorm2d", "in a pipeline from one microbatch"]),
    "GAN pp2": (
        ADVERSARIAL,
        dict(**PIPELINE),
        ["manual optimization: the pipeline's schedule runs forward", "use automatic optimization or"],
    ),
    "autoencoder pp2": (
        AUTOENCODER,
        dict(**PIPELINE),
        ["the model must be one child of LitAutoEncoder", "(encoder, decoder)", "put them into one nn.Module"],
    ),
}
POOL = Pool({**EQUAL, **{name: (script, arguments) for name, (script, arguments, _) in REFUSED.items()}})


@pytest.mark.parametrize("name", EQUAL)
def test_script_equals_one_device(name: str) -> None:
    POOL.assert_equals_one_device(name)


@pytest.mark.parametrize("name", REFUSED)
def test_script_is_refused_by_name(name: str) -> None:
    first, second = POOL.refusals(name)
    assert first == second
    for part in REFUSED[name][2]:
        assert part in first, first
