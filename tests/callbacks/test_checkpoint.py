"""RunCheckpoint: writes at the end and when asked to stop, at a whole optimizer step, and leaves the signals as it found them."""

import os
import signal
from types import SimpleNamespace

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


def fit(folder, *callbacks, ckpt_path=None, **arguments):
    checkpoint = RunCheckpoint(
        dirpath=folder,
        filename="step-{step}",
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
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint, *callbacks],
        **{"max_steps": 10, **arguments},
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(64, 2), batch_size=2), ckpt_path=ckpt_path)
    return module, trainer


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_last_step_is_always_written(tmp_path):
    module, _ = fit(tmp_path)
    assert names(tmp_path) == ["last.ckpt", "step-10.ckpt", "step-8.ckpt"]
    assert os.readlink(tmp_path / "last.ckpt") == "step-10.ckpt"
    saved = torch.load(tmp_path / "step-10.ckpt", weights_only=False)
    assert saved["global_step"] == 10 and torch.equal(saved["state_dict"]["layer.weight"], module.layer.weight.detach())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_that_it_met(tmp_path, number):
    before = signal.getsignal(number)
    with pytest.raises(RunInterrupted) as error:
        fit(tmp_path, Signal(5, number), accumulate_grad_batches=2)
    assert (error.value.signum, error.value.step) == (number, 3)  # batch 5 is the second of step 3
    assert names(tmp_path) == ["last.ckpt", "step-3.ckpt"]
    assert signal.getsignal(number) == before


def test_a_signal_in_the_last_step_is_an_end_as_ever(tmp_path):
    fit(tmp_path, Signal(9, signal.SIGINT))
    assert names(tmp_path) == ["last.ckpt", "step-10.ckpt", "step-8.ckpt"]


def test_a_signal_waits_for_the_end_of_an_accumulation(tmp_path):
    with pytest.raises(RunInterrupted) as error:
        fit(tmp_path, Signal(4, signal.SIGINT), accumulate_grad_batches=2)
    assert error.value.step == 3  # batch 4 is the first of step 3


def test_how_often_ranks_agree_is_checked():
    with pytest.raises(ValueError, match="agree_every_n_steps=0: must be at least 1"):
        RunCheckpoint(agree_every_n_steps=0)


def test_after_a_resume_last_is_the_newest_and_the_old_ones_go(tmp_path):
    fit(tmp_path, max_steps=4)  # this checkpoint knows of no last.ckpt: it was written before
    fit(tmp_path, ckpt_path=str(tmp_path / "step-4.ckpt"))
    assert names(tmp_path) == ["last.ckpt", "step-10.ckpt", "step-8.ckpt"]
    fit(tmp_path, ckpt_path=str(tmp_path / "step-10.ckpt"), max_steps=13)
    assert names(tmp_path) == ["last.ckpt", "step-12.ckpt", "step-13.ckpt"]
    assert os.readlink(tmp_path / "last.ckpt") == "step-13.ckpt"
    fit(tmp_path, ckpt_path=str(tmp_path / "step-12.ckpt"), max_steps=13)  # the same step again
    assert names(tmp_path) == ["last.ckpt", "step-12.ckpt", "step-13.ckpt"]


def test_what_the_folder_holds_counts_when_the_checkpoint_does_not_know_it(tmp_path):
    """After another every_n_train_steps Lightning finds no state of the callback in the checkpoint."""
    for step in (6, 8, 10, 12):
        folder = tmp_path / f"step-{step}.ckpt"
        folder.mkdir()
        (folder / ".metadata").touch()
        (folder / "megascale.json").write_text(f'{{"step": {step}, "files": {{}}}}')
    checkpoint = RunCheckpoint(dirpath=tmp_path, monitor="step", mode="max", save_top_k=2)
    trainer = SimpleNamespace(global_step=10, strategy=SimpleNamespace(broadcast=lambda value: value))
    checkpoint._count_what_is_there(trainer)
    assert [(os.path.basename(path), score) for path, score in checkpoint.best_k_models.items()] == [
        ("step-10.ckpt", 10),
        ("step-8.ckpt", 8),
    ]
    assert checkpoint.kth_best_model_path.endswith("step-8.ckpt") and checkpoint.kth_value == 8
    assert checkpoint.best_model_path.endswith("step-10.ckpt")


class Epochs(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(trainer.current_epoch)


def test_a_run_made_longer_goes_on_in_its_epoch(tmp_path):
    fit(tmp_path, max_steps=10)
    epochs = Epochs()
    fit(tmp_path, epochs, ckpt_path=str(tmp_path / "step-10.ckpt"), max_steps=34)  # 32 batches an epoch
    assert epochs.seen == [0] * 22 + [1] * 2
