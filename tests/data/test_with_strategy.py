"""TextDataModule under MegascaleStrategy: tensor-parallel peers read alike, and a run that stops in an epoch goes on under another plan."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megascale.callbacks.throughput import ThroughputMonitor
from lightning_megascale.data.datamodule import TextDataModule
from lightning_megascale.module import MegascaleModule
from lightning_megascale.strategies.trainer import MegascaleStrategy
from tests.harness import run_ranks

CONFIG = {"vocab_size": 512, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64}


class Recorder(MegascaleModule):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.__dict__.setdefault("rows", []).extend(batch["input_ids"].tolist())
        return super().training_step(batch, batch_idx)


def train(folder: str, plan: dict[str, int], batch_size: int, resume: str | None, steps: int) -> tuple[list, list, int, dict]:
    warnings.simplefilter("ignore")
    module = Recorder(CONFIG, optimizer={"lr": 1e-3}, schedule={"warmup_steps": 1})
    data = TextDataModule(folder, sequence_length=64, batch_size=batch_size, vocab_size=512)
    monitor = ThroughputMonitor(2)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegascaleStrategy(**plan),
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=1,
        val_check_interval=4,
        logger=False,
        callbacks=[monitor, ModelCheckpoint(folder, filename="at", every_n_train_steps=5)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data, ckpt_path=resume)
    return module.rows, [data.train_stream.tokens(p).tolist() for p in range(80)], data.position, monitor.latest


def test_stop_under_tp2_and_go_on_under_dp2(tmp_path: Path) -> None:
    tensor, data = {"tensor_parallel_size": 2, "data_parallel_size": 1}, {"data_parallel_size": 2}
    first, second = run_ranks(train, 2, str(tmp_path), tensor, 8, None, 5, timeout=120)
    rows, stream, position, latest = first
    assert rows == second[0] == stream[:40] and position == 40
    assert {"perf/tokens_per_second", "perf/step_seconds", "perf/data_wait_share"} <= latest.keys()

    first, second = run_ranks(train, 2, str(tmp_path), data, 4, str(tmp_path / "at.ckpt"), 8, timeout=120)
    batches = [first[0][4 * i : 4 * i + 4] + second[0][4 * i : 4 * i + 4] for i in range(3)]
    assert sum(batches, []) == stream[40:64] and first[2] == second[2] == 64
