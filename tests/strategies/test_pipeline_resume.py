"""Checkpoints of pipelined runs: resumed under other plans and from them; named, counted and exported as without a pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import DataLoader

from lightning_megascale.cli.checkpoint import main
from tests import parity
from tests.harness import run_ranks, worst
from tests.strategies import test_resume as resume

LAYERS = 5  # of every plan's model: more than four pipeline stages need, and not divisible by them
CASES = {
    "one": resume.CASES["one"],
    "tp": resume.CASES["tp"],
    "dp4": resume.CASES["hsdp"],
    "pp2 x tp": parity.default_case(axes="pp2 x tp", schedule="1F1B", init="meta"),
    "interleaved": parity.default_case(axes="pp2", schedule="Interleaved1F1B", init="meta"),
    "pp4": parity.default_case(axes="pp4", schedule="1F1B", init="meta"),
    "pp2 x fsdp2": parity.default_case(axes="pp2 x fsdp2", schedule="GPipe", init="meta", checkpointing="full", split="split by hand"),
    "pp2 x tp+sp": parity.default_case(axes="pp2 x tp+sp", schedule="Interleaved1F1B", init="meta"),
    "zero bubble": parity.default_case(axes="pp2", schedule="ZBVZeroBubble", init="meta"),
}
SAVED = ("one", "pp2 x tp", "interleaved")
RESUMED = {
    "one": ("pp2 x tp", "interleaved"),
    "dp4": ("pp2 x tp",),
    "tp": ("interleaved",),
    "pp4": ("interleaved",),
    "pp2 x tp": ("one",),
    "interleaved": ("pp2 x tp",),
    "zero bubble": ("one",),  # first and last stage, and both copies of the tied parameter, are on one rank
}
ONWARDS = ("dp4", "tp", "pp4", "zero bubble")


@pytest.fixture(scope="module", autouse=True)
def plans() -> Iterator[None]:
    """The table of ``test_resume`` with these plans, all of one model; its embedding and head are tied."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "CASES", CASES)
        patch.setattr(parity, "layers_of", lambda case: LAYERS)
        yield


@pytest.fixture(scope="module")
def reference(plans: None) -> dict[str, Any]:
    """Six steps on one device, never interrupted."""
    return run_ranks(resume.run, 1, "one", 2, None, None)[0]


@pytest.fixture(scope="module")
def saved(plans: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One checkpoint after three steps under each plan of ``SAVED``."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: resume.save_under(name, folder) for name in SAVED}


DEFAULT_TIER = ("one", "dp4", "pp4", "pp2 x tp")


@pytest.mark.parametrize("target", [pytest.param(name, marks=() if name in DEFAULT_TIER else pytest.mark.slow) for name in RESUMED])
def test_resume_with_and_without_a_pipeline(target: str, saved: dict[str, str], reference: dict[str, Any]) -> None:
    sources = {name: saved[name] for name in RESUMED[target]}
    for result in run_ranks(resume.resume_all, resume.ranks_of(target), target, sources, timeout=120):
        resume.assert_continues(result, reference, target)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_resume_under_and_from_every_plan(name: str, saved: dict[str, str], reference: dict[str, Any], tmp_path: Path) -> None:
    for result in run_ranks(resume.resume_all, resume.ranks_of(name), name, saved, timeout=300):
        resume.assert_continues(result, reference, name)
    path = {name: resume.save_under(name, tmp_path)}
    for target in ONWARDS:
        resume.assert_continues(run_ranks(resume.resume_all, resume.ranks_of(target), target, path, timeout=120)[0], reference, target)


def keys_of(path: str) -> dict[str, Any]:
    """Name and shape of every tensor, of the model and of the optimizer."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: tuple(entry.size) for name, entry in metadata.items()}


@pytest.mark.parametrize("name", ["pp2 x tp", "interleaved"])
def test_a_checkpoint_of_a_pipeline_holds_the_tensors_of_one_device(name: str, saved: dict[str, str]) -> None:
    """A tied parameter, which two stages hold, has one name and one state."""
    assert keys_of(saved[name]) == keys_of(saved["one"])
    assert any(key.startswith("optimizer.0.state.model.embed_tokens") for key in keys_of(saved["one"]))


def test_megascale_checkpoint_lists_checks_and_exports_it(
    saved: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["list", str(Path(saved["pp2 x tp"]).parent)]) == 0
    assert "epoch=0.ckpt" in capsys.readouterr().out.replace("\n", "")
    said, exported = {}, {}
    for name in ("one", "pp2 x tp", "interleaved"):
        assert main(["check", saved[name]]) == 0
        said[name] = re.findall(r"[0-9,]+ elements, [0-9.]+ \w+", capsys.readouterr().out)
        out = tmp_path / f"{name}.ckpt"
        assert main(["export", saved[name], str(out)]) == 0
        capsys.readouterr()
        exported[name] = torch.load(out)
    for name in ("pp2 x tp", "interleaved"):
        assert said[name] == said["one"] and said["one"]
        off, where = worst(exported["one"]["state_dict"], exported[name]["state_dict"])
        assert off < 1e-10, f"{name}: {where} is off by {off:.2e}"
        assert exported[name]["global_step"] == parity.STEPS


class Plain(resume.Scheduled):
    """For Lightning's own strategies: all rows on one device."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(parity.Rows(self.case, 0, 1), batch_size=parity.rows_of(self.case))


class Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


def plain_run(folder: str) -> list[float]:
    """Six steps with the plain Trainer; a ``.ckpt`` after three, in which the optimizer numbers its parameters."""
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        gradient_clip_val=parity.CLIP,
        callbacks=[losses, ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Plain({**CASES["pp4"], "init": "eager", "embeddings": "tied head"}))
    return losses.seen


def test_a_checkpoint_of_the_plain_trainer_resumes_under_a_pipeline(tmp_path: Path) -> None:
    expected = run_ranks(plain_run, 1, str(tmp_path))[0]
    for name in ("pp2 x tp", "interleaved"):
        path = {"plain": str(tmp_path / "epoch=0.ckpt")}
        for results in run_ranks(resume.resume_all, resume.ranks_of(name), name, path, timeout=120):
            assert results["plain"]["losses"] == pytest.approx(expected[parity.STEPS :], abs=1e-10), name
