"""MixtureDataModule under MegascaleStrategy, on 4 ranks: peers read alike, a killed run goes on under another plan, no row is lost, and the
loss of packed rows is that of one device."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megascale.module import MegascaleModule
from lightning_megascale.strategies.trainer import MegascaleStrategy
from tests.data.chat import make_tokenizer
from tests.data.mixes import STAGES, module, sources
from tests.harness import run_ranks

MODEL: dict[str, Any] = dict(vocab_size=320, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, max_position_embeddings=32)


class Recorder(MegascaleModule):
    """Keeps the keys of its rows; a pipeline captures a step more than once, so they are noted before it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.__dict__.setdefault("rows", []).append(batch["__key__"])

    def on_train_batch_end(self, *args: Any) -> None:
        self.__dict__.setdefault("losses", []).append(float(self.trainer.strategy.step_loss))  # type: ignore[attr-defined]


def train(folder: str, urls: dict[str, str], plan: dict[str, Any], batch_size: int, rows: str, resume: str | None, steps: int) -> Any:
    warnings.simplefilter("ignore")
    world = torch.distributed.get_world_size()
    recorder = Recorder(MODEL, optimizer={"lr": 1e-2}, schedule={"warmup_steps": 1, "total_steps": 64})
    data = module(urls, Path(folder), STAGES, rows=rows, batch_size=batch_size, packing_window=32)
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=MegascaleStrategy(**plan),
        max_steps=steps,
        max_epochs=1,
        logger=False,
        callbacks=[ModelCheckpoint(folder, filename="at", every_n_train_steps=5, save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(recorder, data, ckpt_path=resume)
    return {"rows": recorder.rows, "losses": recorder.losses, "rank": trainer.strategy.data_parallel_rank, "position": data.position}  # type: ignore[attr-defined]


def joined(ranks: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the data-parallel ranks in the order of the run; those that share a replica must have read the same."""
    by_rank: dict[int, list[Any]] = {}
    for one in ranks:
        assert by_rank.setdefault(one["rank"], one["rows"]) == one["rows"]
    return [row for batches in zip(*(by_rank[rank] for rank in sorted(by_rank))) for rows in zip(*batches) for row in rows]


PLANS: dict[str, tuple[dict[str, Any], int]] = {  # and the batch of a data-parallel rank
    "fsdp2": ({}, 2),
    "dp2 x tp2": ({"tensor_parallel_size": 2}, 4),
    "pp2 x dp2": ({"pipeline_parallel_size": 2, "microbatch_size": 2}, 4),
    "cp2 x dp2": ({"context_parallel_size": 2, "label_alignment": "shift"}, 4),
}


@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_four_ranks_read_what_one_reads_and_go_on_under_another_plan(rows: str, tmp_path: Path) -> None:
    """Killed after 5 steps of fsdp2, 5 more under another plan, then to the end of the run on one rank."""
    make_tokenizer()
    urls = sources(tmp_path)
    (one,) = run_ranks(train, 1, str(tmp_path / "one"), urls, {}, 8, rows, None, -1, timeout=120)
    wanted, batches = joined([one]), len(one["rows"])
    assert batches > 11
    begun = run_ranks(train, 4, str(tmp_path / "run"), urls, PLANS["fsdp2"][0], PLANS["fsdp2"][1], rows, None, 5, timeout=120)
    plan, batch_size = PLANS["dp2 x tp2" if rows == "padded" else "pp2 x dp2"]
    path = str(tmp_path / "run" / "at.ckpt")
    more = run_ranks(train, 4, str(tmp_path / "more"), urls, plan, batch_size, rows, path, 10, timeout=120)
    (rest,) = run_ranks(train, 1, str(tmp_path / "rest"), urls, {}, 8, rows, str(tmp_path / "more" / "at.ckpt"), -1, timeout=120)
    assert joined(begun) + joined(more) + joined([rest]) == wanted
    assert one["position"] == rest["position"]
    losses = [*begun[0]["losses"], *more[0]["losses"], *rest["losses"]]
    assert len(losses) == batches and losses == pytest.approx(one["losses"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp2 x tp2", "pp2 x dp2", "cp2 x dp2"])
def test_packed_rows_under_every_axis(name: str, tmp_path: Path) -> None:
    urls = sources(tmp_path)
    (one,) = run_ranks(train, 1, str(tmp_path / "one"), urls, {}, 8, "packed", None, 4, timeout=120)
    plan, batch_size = PLANS[name]
    ranks = run_ranks(train, 4, str(tmp_path / "run"), urls, plan, batch_size, "packed", None, 4, timeout=120)
    assert joined(ranks) == joined([one])[: len(joined(ranks))]
    assert ranks[0]["losses"] == pytest.approx(one["losses"], rel=1e-4)
