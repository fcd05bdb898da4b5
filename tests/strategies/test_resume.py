"""Save under any plan, resume under any other: the next three losses equal those of a run that was never interrupted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megascale import MegascaleStrategy
from tests import parity
from tests.harness import run_ranks

EPOCH = parity.STEPS
# What each plan is saved or resumed with besides its axes: meta or eager, recomputed or not.
CASES = {
    "one": parity.default_case(axes="fsdp2", init="meta"),
    "dp": parity.default_case(axes="dp", init="meta"),
    "fsdp2": parity.default_case(axes="fsdp2", init="meta", checkpointing="full"),
    "hsdp": parity.default_case(axes="hsdp", init="meta"),
    "tp": parity.default_case(axes="tp", init="meta"),
    "tp+sp": parity.default_case(axes="tp+sp", init="meta", checkpointing="selective"),
    "fsdp2 x tp": parity.default_case(axes="fsdp2 x tp", init="meta"),
    "hsdp x tp+sp": parity.default_case(axes="hsdp x tp+sp", init="meta"),
}
SMALL = [name for name in CASES if name != "hsdp x tp+sp"]


class Scheduled(parity.ParityModule):
    """With tied embeddings and a learning rate that changes every step, so that both have to be restored."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def ranks_of(name: str) -> int:
    return 1 if name == "one" else parity.AXES[CASES[name]["axes"]][0]


def run(name: str, epochs: int, folder: str | None, ckpt_path: str | None) -> dict[str, Any]:
    """Trains to the end of ``epochs``; checkpoints each epoch's end into ``folder``."""
    case = {**CASES[name], "embeddings": "tied head"}
    os.environ["PL_GLOBAL_SEED"] = str(parity.SEED)
    module, recorder = Scheduled(case), parity.Recorder()
    plan = {**parity.plan_of(case), **(dict(data_parallel_shard_size=1) if name == "one" else {})}
    saving = [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)] if folder else []
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks_of(name),
        strategy=MegascaleStrategy(**plan),
        max_epochs=epochs,
        gradient_clip_val=parity.CLIP,
        callbacks=[recorder, *saving],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=bool(saving),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return {
        "losses": recorder.losses,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "step": trainer.global_step,
        "buffers": {name: buffer.clone() for name, buffer in module.model.named_buffers()},
    }


def resume_all(name: str, paths: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {source: run(name, 2, None, path) for source, path in paths.items()}


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return run_ranks(run, 1, "one", 2, None, None)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One checkpoint after three steps under each plan of at most 4 ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: save_under(name, folder) for name in SMALL}


def save_under(name: str, folder: Path) -> str:
    run_ranks(run, ranks_of(name), name, 1, str(folder / name), None, timeout=120)
    return str(folder / name / "epoch=0.ckpt")


def assert_continues(results: dict[str, dict[str, Any]], reference: dict[str, Any], target: str) -> None:
    assert len(reference["losses"]) == 2 * EPOCH
    for source, result in results.items():
        assert result["losses"] == pytest.approx(reference["losses"][EPOCH:], abs=1e-10), f"saved under {source}, resumed under {target}"
        assert result["lr"] == pytest.approx(reference["lr"], abs=1e-15) and result["step"] == reference["step"]


DEFAULT_TIER = ("one", "fsdp2 x tp")


@pytest.mark.parametrize("target", [pytest.param(name, marks=() if name in DEFAULT_TIER else pytest.mark.slow) for name in SMALL])
def test_resume_under_another_plan(target: str, saved: dict[str, str], reference: dict[str, Any]) -> None:
    results = run_ranks(resume_all, ranks_of(target), target, saved, timeout=300)
    assert_continues(results[0], reference, target)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resume_from_and_under_8_ranks(saved: dict[str, str], reference: dict[str, Any], tmp_path: Path) -> None:
    name = "hsdp x tp+sp"
    assert_continues(run_ranks(resume_all, 8, name, saved, timeout=600)[0], reference, name)
    path = {name: save_under(name, tmp_path)}
    for target in SMALL:
        assert_continues(run_ranks(resume_all, ranks_of(target), target, path, timeout=120)[0], reference, target)


def test_a_changed_global_batch_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "epoch=0.ckpt")
    run_ranks(batch_run, 2, 4, str(tmp_path), None, False)
    messages = run_ranks(batch_run, 2, 8, None, path, False)
    assert messages[0] == messages[1] and "global_batch_size=8, and the checkpoint was trained with 4" in messages[0]
    assert run_ranks(batch_run, 2, 8, None, path, True) == ["fine", "fine"]


def batch_run(global_batch: int, folder: str | None, ckpt_path: str | None, allow: bool) -> str:
    case = CASES["fsdp2"]
    plan = {**parity.plan_of(case), "global_batch_size": global_batch, "microbatch_size": 2, "allow_batch_change": allow}
    saving = [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)] if folder else []
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegascaleStrategy(**plan),
        max_epochs=1 if folder else 2,
        callbacks=saving,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=bool(saving),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(parity.ParityModule(case), ckpt_path=ckpt_path)
    except ValueError as error:
        return str(error)
    return "fine"
