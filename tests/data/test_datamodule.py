"""TextDataModule: order over ranks and workers, exact resume through a real Trainer, validation that counts every sequence once."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_megascale.data.datamodule import TextDataModule, validation_batches
from lightning_megascale.data.stream import IGNORED
from tests.harness import run_ranks

LENGTH = 64  # tokens, here bytes: 18 x 565 make 158 training sequences, that is epochs of 19 batches of 8


class OnRank(SingleDeviceStrategy):
    """One process that believes it is a rank of a data-parallel axis."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("cpu")
        self.data_parallel_rank, self.data_parallel_size = rank, size


class Recorder(LightningModule):
    """Keeps every row it is trained on; asks for the number of steps early, as schedules do, when told to."""

    def __init__(self, ask_early: bool = False, die_at: int = -1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.ask_early, self.die_at = ask_early, die_at
        self.rows: list[list[int]] = []
        self.validation: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if len(self.rows) // len(batch["input_ids"]) == self.die_at:
            raise RuntimeError("killed")
        self.rows += batch["input_ids"].tolist()
        return self.weight.square()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.validation.append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.ask_early:
            self.total_steps = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache for 20 texts of 564 random letters, two of which go to validation; so no number here depends on Python's own text."""
    letters = random.Random(0)
    texts = {f"text{i}": "".join(letters.choices("abcdefgh ", k=562)) + f"{i:02}" for i in range(20)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_megascale.data.quickstart.read_topics", lambda: texts)
        yield tmp_path_factory.mktemp("cache")


def data(cache: Path, **arguments: Any) -> TextDataModule:
    module = TextDataModule(cache, **{"sequence_length": LENGTH, "vocab_size": 258, **arguments})
    module.prepare_data()
    return module


def trainer(folder: Path, rank: int = 0, size: int = 1, **arguments: Any) -> Trainer:
    defaults = {"limit_val_batches": 0, "max_epochs": 1, "logger": False, "enable_checkpointing": bool(arguments.get("callbacks"))}
    return Trainer(
        strategy=OnRank(rank, size),
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **arguments},
    )


def stretch(module: TextDataModule, first: int, last: int) -> list[list[int]]:
    """Rows of the training stream from position ``first`` up to ``last``."""
    return [module.train_stream.tokens(position).tolist() for position in range(first, last)]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_batches_are_hugging_faces(cache: Path) -> None:
    module = data(cache, batch_size=3)
    module.setup()
    batch = next(iter(module.train_dataloader()))
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (3, LENGTH) and batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    text = module.tokenizer.decode(batch["input_ids"][0])
    assert len(text.replace("<|end|>", "e")) == LENGTH and set(text.replace("<|end|>", "")) <= set("abcdefgh 0123456789")
    assert len(module.tokenizer) == 258


@pytest.mark.parametrize("workers", [0, 2])
def test_any_division_over_ranks_and_workers_gives_the_same_global_batches(cache: Path, tmp_path: Path, workers: int) -> None:
    batches = []
    for size, batch_size in ((1, 8), (2, 4), (4, 2)):
        ranks = []
        for rank in range(size):
            module = data(cache, batch_size=batch_size, num_workers=workers if size == 2 else 0)
            recorder = Recorder()
            trainer(tmp_path, rank, size, limit_train_batches=3, max_epochs=2, num_sanity_val_steps=0).fit(recorder, module)
            ranks.append(torch.tensor(recorder.rows).view(6, batch_size, LENGTH))
        batches.append(torch.cat(ranks, dim=1))
    assert torch.equal(batches[0], batches[1]) and torch.equal(batches[0], batches[2])
    expected = [torch.from_numpy(module.train_stream.tokens(p)) for p in range(48)]
    assert torch.equal(batches[0].flatten(0, 1), torch.stack(expected))


def test_epochs_continue_the_stream_and_drop_nothing(cache: Path, tmp_path: Path) -> None:
    module, recorder = data(cache), Recorder()
    run = trainer(tmp_path, max_epochs=2)
    run.fit(recorder, module)
    assert len(module.train_stream) == 158 and run.num_training_batches == 19 == len(module.train_dataloader())
    assert recorder.rows == stretch(module, 0, 2 * 19 * 8)
    assert run.global_step == 38 and module.position == 304


def test_seed_decides_the_order(cache: Path) -> None:
    first = []
    for seed in (0, 0, 1):
        module = data(cache, seed=seed)
        module.setup()
        first.append(next(iter(module.train_dataloader()))["input_ids"])
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


def stop_at_7(how: str, cache: Path, folder: Path, ask_early: bool) -> str:
    """A run of batch 8 on one rank that has finished 7 batches; returns the checkpoint."""
    recorder = Recorder(ask_early, die_at=7 if how in ("exception", "killed") else -1)
    callbacks: list[Any] = []
    if how in ("step", "killed"):
        callbacks = [ModelCheckpoint(folder, filename="at", every_n_train_steps=7, save_top_k=-1)]
    if how == "exception":
        callbacks = [OnExceptionCheckpoint(folder, "at")]
    limits = {"max_steps": 7} if how in ("step", "after fit") else {}
    run = trainer(folder, callbacks=callbacks, **limits)
    if how in ("exception", "killed"):
        with pytest.raises(RuntimeError, match="killed"):
            run.fit(recorder, data(cache))
    else:
        run.fit(recorder, data(cache))
    if how == "after fit":
        run.save_checkpoint(folder / "at.ckpt")
    return str(folder / "at.ckpt")


@pytest.mark.parametrize("ask_early", [False, True])
@pytest.mark.parametrize("how", ["step", "killed", "exception", "after fit"])
def test_resume_goes_on_with_the_next_sequence(cache: Path, tmp_path: Path, how: str, ask_early: bool) -> None:
    checkpoint = stop_at_7(how, cache, tmp_path, ask_early)
    module, recorder = data(cache), Recorder(ask_early)
    run = trainer(tmp_path, max_steps=25, max_epochs=-1)
    run.fit(recorder, module, ckpt_path=checkpoint, weights_only=True)
    assert recorder.rows == stretch(module, 56, 200)
    assert run.global_step == 25 and module.position == 200


@pytest.mark.parametrize("ask_early", [False, True])
def test_resume_finishes_the_epoch(cache: Path, tmp_path: Path, ask_early: bool) -> None:
    checkpoint = stop_at_7("killed", cache, tmp_path, ask_early)
    module, recorder = data(cache), Recorder(ask_early)
    run = trainer(tmp_path, max_epochs=2)
    run.fit(recorder, module, ckpt_path=checkpoint)
    assert recorder.rows == stretch(module, 56, 304) and run.global_step == 38


@pytest.mark.parametrize("ask_early", [False, True])
@pytest.mark.parametrize(
    ("size", "batch_size", "accumulate", "workers"), [(2, 4, 1, 0), (1, 4, 2, 0), (2, 2, 2, 0), (4, 1, 2, 0), (1, 8, 1, 2), (2, 8, 1, 0)]
)
def test_resume_under_another_division(
    cache: Path, tmp_path: Path, size: int, batch_size: int, accumulate: int, workers: int, ask_early: bool
) -> None:
    """One rank with batch 8 stops after 7 batches; any other division goes on at sequence 56 and ends the epoch where it should."""
    checkpoint = stop_at_7("step", cache, tmp_path, ask_early)
    rows, steps = [], set()
    for rank in range(size):
        module, recorder = data(cache, batch_size=batch_size, num_workers=workers), Recorder(ask_early)
        run = trainer(tmp_path, rank, size, accumulate_grad_batches=accumulate)
        run.fit(recorder, module, ckpt_path=checkpoint)
        rows.append(torch.tensor(recorder.rows).unflatten(0, (-1, batch_size)))
        steps.add(run.global_step)
    assert torch.cat(rows, dim=1).flatten(0, 1).tolist() == stretch(module, 56, 152)
    assert steps == {7 + (152 - 56) // (size * batch_size * accumulate)}
    assert module.position == 152


def test_a_second_resume_keeps_counting(cache: Path, tmp_path: Path) -> None:
    checkpoint = stop_at_7("step", cache, tmp_path, False)
    run = trainer(tmp_path, 0, 2, max_steps=9, max_epochs=-1)
    run.fit(Recorder(), data(cache, batch_size=2), ckpt_path=checkpoint)  # 2 steps of 4
    run.save_checkpoint(tmp_path / "second.ckpt")
    module, recorder = data(cache), Recorder()
    trainer(tmp_path, max_steps=11, max_epochs=-1).fit(recorder, module, ckpt_path=str(tmp_path / "second.ckpt"))
    assert recorder.rows == stretch(module, 64, 80)


def test_validation_in_the_middle_and_checkpoints_there_do_not_move_the_stream(cache: Path, tmp_path: Path) -> None:
    module, recorder = data(cache), Recorder()
    checkpoint = ModelCheckpoint(
        tmp_path, filename="at-{step}", monitor=None, save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=False
    )
    trainer(tmp_path, callbacks=[checkpoint], limit_val_batches=1.0, val_check_interval=5).fit(recorder, module)
    assert recorder.rows == stretch(module, 0, 152)
    module, recorder = data(cache), Recorder()
    trainer(tmp_path, limit_val_batches=1.0, val_check_interval=5).fit(recorder, module, ckpt_path=str(tmp_path / "at-step=10.ckpt"))
    assert recorder.rows == stretch(module, 80, 152)


def test_a_new_trainer_begins_at_the_start_and_the_same_one_goes_on(cache: Path, tmp_path: Path) -> None:
    module = data(cache)
    for _ in range(2):
        recorder = Recorder()
        run = trainer(tmp_path, max_steps=3, max_epochs=-1)
        run.fit(recorder, module)
        assert recorder.rows == stretch(module, 0, 24)
    run.fit_loop.epoch_loop.max_steps = 5
    run.fit(recorder, module)
    assert recorder.rows == stretch(module, 0, 40)


def test_overfitting_repeats_its_batches(cache: Path, tmp_path: Path) -> None:
    module, recorder = data(cache), Recorder()
    trainer(tmp_path, overfit_batches=2, max_epochs=3).fit(recorder, module)
    assert recorder.rows == stretch(module, 0, 16) * 3


def test_other_data_is_refused_at_resume(cache: Path, tmp_path: Path) -> None:
    checkpoint = stop_at_7("step", cache, tmp_path, False)
    with pytest.raises(ValueError, match=r"sequence_length 64 -> 32, seed 0 -> 3.*run\.name=new.*resume=never"):
        trainer(tmp_path).fit(Recorder(), data(cache, sequence_length=32, seed=3), ckpt_path=checkpoint)


def test_validation_counts_every_sequence_once(cache: Path, tmp_path: Path) -> None:
    for size, batch_size in ((1, 8), (2, 4), (3, 2), (2, 8)):
        tokens, shapes = [], set()
        for rank in range(size):
            module, recorder = data(cache, batch_size=batch_size, sequence_length=32), Recorder()
            trainer(tmp_path, rank, size, limit_val_batches=1.0).validate(recorder, module, verbose=False)
            for batch in recorder.validation:
                shapes.add(tuple(batch["labels"].shape))
                counted = (batch["labels"] != IGNORED).all(1)
                assert counted.any() and torch.equal(counted, (batch["labels"] != IGNORED).any(1))
                assert torch.equal(batch["labels"][counted], batch["input_ids"][counted])
                tokens += batch["input_ids"][counted].tolist()
        stream = module.validation_stream
        assert sorted(tokens) == sorted(stream.tokens(p).tolist() for p in range(len(stream)))
        assert shapes == {(batch_size, 32)}


def test_validation_batches_for_all_small_sizes() -> None:
    for sequences in range(1, 40):
        for batch_size in (1, 2, 3, 8):
            for size in (1, 2, 3, 5):
                if sequences < size:
                    continue
                ranks = [validation_batches(sequences, batch_size, rank, size) for rank in range(size)]
                assert len({len(batches) for batches in ranks}) == 1
                assert all(len(rows) == batch_size and rows[0] >= 0 for batches in ranks for rows in batches)
                real = sorted(row for batches in ranks for rows in batches for row in rows if row >= 0)
                left_out = sequences % size if batch_size == 1 and sequences % size else 0
                assert real == list(range(sequences - left_out)), (sequences, batch_size, size)
    with pytest.raises(ValueError, match="validation has 2 sequences for data-parallel size 3"):
        validation_batches(2, 4, 0, 3)


def test_too_large_a_batch_is_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch_size 40 x data-parallel size 2 x accumulation 2 = 160 sequences, the text has 158 of 64"):
        trainer(tmp_path, 0, 2, accumulate_grad_batches=2).fit(Recorder(), data(cache, batch_size=40))


def test_every_wrong_argument_is_listed() -> None:
    with pytest.raises(ValueError) as error:
        TextDataModule(sequence_length=1, batch_size=0, vocab_size=257, validation_fraction=1.0, num_workers=-1)
    for words in (
        "sequence_length=1: at least 2",
        "batch_size=0",
        "vocab_size=257: at least 258",
        "validation_fraction=1.0",
        "num_workers=-1",
    ):
        assert words in str(error.value)


def test_setup_without_the_text_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the text is not ready on this machine: .* does not exist. Call prepare_data\(\) first"):
        TextDataModule(tmp_path).setup()


def train_on_rank(cache: str, folder: str) -> list[list[int]]:
    warnings.simplefilter("ignore")
    recorder = Recorder()
    run = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=4,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    run.fit(recorder, TextDataModule(cache, sequence_length=LENGTH, batch_size=4, vocab_size=258))
    return recorder.rows


def test_two_real_ranks_prepare_one_cache_and_share_the_batches(cache: Path, tmp_path: Path) -> None:
    ranks = run_ranks(train_on_rank, 2, str(tmp_path / "cache"), str(tmp_path), timeout=60)
    module = data(tmp_path / "cache")
    module.setup()
    rows = torch.cat([torch.tensor(rows).view(4, 4, LENGTH) for rows in ranks], dim=1)
    assert rows.flatten(0, 1).tolist() == stretch(module, 0, 32)
