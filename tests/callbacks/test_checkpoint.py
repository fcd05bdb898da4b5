"""RunCheckpoint: writes at the end and when asked to stop, at a whole optimizer step, and leaves the signals as it found them."""

import os
import signal

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_megascale.callbacks.checkpoint import RunCheckpoint, RunInterrupted


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Signal(Callback):
    def __init__(self, batch, number):
        self.batch, self.number = batch, number

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.batch:
            os.kill(os.getpid(), self.number)


def fit(folder, *callbacks, **arguments):
    checkpoint = RunCheckpoint(
        dirpath=folder,
        filename="step={step}",
        auto_insert_metric_name=False,
        monitor="step",
        mode="max",
        save_top_k=2,
        save_last="link",
        every_n_train_steps=4,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=10,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint, *callbacks],
        **arguments,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(64, 2), batch_size=2), ckpt_path=arguments.get("ckpt_path"))
    return module, trainer


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_last_step_is_always_written(tmp_path):
    module, _ = fit(tmp_path)
    assert names(tmp_path) == ["last.ckpt", "step=10.ckpt", "step=8.ckpt"]
    assert os.readlink(tmp_path / "last.ckpt") == "step=10.ckpt"
    saved = torch.load(tmp_path / "step=10.ckpt", weights_only=False)
    assert saved["global_step"] == 10 and torch.equal(saved["state_dict"]["layer.weight"], module.layer.weight.detach())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_that_it_met(tmp_path, number):
    before = signal.getsignal(number)
    with pytest.raises(RunInterrupted) as error:
        fit(tmp_path, Signal(5, number), accumulate_grad_batches=2)
    assert (error.value.signum, error.value.step) == (number, 3)  # batch 5 is the second of step 3
    assert names(tmp_path) == ["last.ckpt", "step=3.ckpt"]
    assert signal.getsignal(number) == before


def test_a_signal_in_the_last_step_is_an_end_as_ever(tmp_path):
    fit(tmp_path, Signal(9, signal.SIGINT))
    assert names(tmp_path) == ["last.ckpt", "step=10.ckpt", "step=8.ckpt"]


def test_a_signal_waits_for_the_end_of_an_accumulation(tmp_path):
    with pytest.raises(RunInterrupted) as error:
        fit(tmp_path, Signal(4, signal.SIGINT), accumulate_grad_batches=2)
    assert error.value.step == 3  # batch 4 is the first of step 3


def test_how_often_ranks_agree_is_checked():
    with pytest.raises(ValueError, match="agree_every_n_steps=0: must be at least 1"):
        RunCheckpoint(agree_every_n_steps=0)
