"""``megascale checkpoint``: what it prints, writes and returns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_megascale.cli.checkpoint import main
from lightning_megascale.strategies import checkpoint as checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (20, 3):
        model = nn.Sequential(nn.Linear(2, 3))
        checkpoints.save(tmp_path / "run" / f"epoch=0-step={step}.ckpt", {"global_step": step, "epoch": 0}, model)
    return tmp_path


def test_list_shows_checkpoints_by_step_and_what_an_interrupted_save_left(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    (folder / "run" / "last.ckpt.tmp-0123abcd").mkdir()
    assert main(["list", str(folder)]) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert out.index("step=3") < out.index("step=20")
    assert "left by an interrupted save" in out and "megascale" in out


def test_check_is_0_for_a_whole_and_1_for_a_broken_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "run")
    assert main(["check", "epoch=0-step=3.ckpt"]) == 0  # a path with "=" is a path
    out = capsys.readouterr().out
    assert "9 elements, 36 B" in out and "yes" in out
    (folder / "run" / "epoch=0-step=3.ckpt" / "__0_0.distcp").unlink()
    assert main(["check", "path=epoch=0-step=3.ckpt"]) == 1
    out = capsys.readouterr().out
    assert "NO" in out and "__0_0.distcp is missing" in out


def test_export_and_reshard_write_what_they_print(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(folder / "run" / "epoch=0-step=20.ckpt")
    assert main(["export", source, str(folder / "out"), "format=safetensors", "shard_gb=0.00000002"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(str(path) for path in (folder / "out").iterdir())
    assert (folder / "out" / "model-00002-of-00002.safetensors").is_file()
    assert main(["export", source, f"out={folder / 'one.ckpt'}"]) == 0
    assert torch.load(folder / "one.ckpt")["state_dict"]["0.weight"].shape == (3, 2)
    assert main(["reshard", source, str(folder / "two"), "ranks=2"]) == 0
    assert len(list((folder / "two").glob("*.distcp"))) == 2 and checkpoints.check(folder / "two").complete


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lst", "x"], "checkpoint has no verb 'lst'; did you mean 'list'? Verbs: list, check, reshard, export"),
        (["export", "RUN", "fromat=ckpt"], "checkpoint export has no key 'fromat'; did you mean 'format'?"),
        (["export", "RUN", "format=safetensor"], "format=safetensor: must be one of ckpt, safetensors; did you mean 'safetensors'?"),
        (["export", "RUN", "shard_gb=many"], "shard_gb=many: must be a number"),
        (["export"], "checkpoint export needs PATH: megascale checkpoint export PATH out"),
        (["reshard", "RUN"], "checkpoint reshard needs OUT"),
        (["reshard", "RUN", "OUT", "ranks=0"], "ranks=0: the number of files must be at least 1"),
        (["check", "RUN", "more"], "checkpoint check takes 1 positional arguments (PATH); 'more' is one more"),
        (["check", "RUN", "path=other"], "checkpoint check: path is given twice"),
        (["list", "EMPTY"], "there is no checkpoint in"),
        (["check", "NOTHING"], "there is no checkpoint"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    paths = {
        "RUN": folder / "run" / "epoch=0-step=3.ckpt",
        "OUT": folder / "o",
        "EMPTY": folder / "empty",
        "NOTHING": folder / "run" / "no",
    }
    assert main([str(paths.get(argument, argument)) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("megascale: ") and message in captured.err
    assert "Traceback" not in captured.err


def test_without_arguments_it_takes_the_command_line_and_ends_with_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 0
    assert "reshard PATH OUT [ranks=N]" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["megascale", "chek"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2


def test_an_export_goes_beside_the_folder_that_runs_resume_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(tmp_path / "checkpoints" / "step-3.ckpt", {"global_step": 3}, nn.Linear(2, 2))
    assert main(["export", str(tmp_path / "checkpoints" / "step-3.ckpt")]) == 0
    assert (tmp_path / "step-3-export.ckpt").is_file()
    monkeypatch.chdir(tmp_path / "checkpoints")
    assert main(["export", "step-3.ckpt", "format=safetensors"]) == 0
    assert (tmp_path / "step-3-export").is_dir()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3.ckpt"]


@pytest.mark.parametrize("verb", ["export", "reshard"])
def test_a_place_that_cannot_be_written_is_one_message(verb: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "file").touch()
    assert main([verb, str(folder / "run" / "epoch=0-step=3.ckpt"), str(folder / "file" / "x.ckpt")]) == 2
    assert "x.ckpt cannot be written: " in capsys.readouterr().err
    assert main([verb, str(folder / "run" / "epoch=0-step=3.ckpt"), "/proc/x.ckpt"]) == 2  # for root, too
    assert "/proc/x.ckpt cannot be written: " in capsys.readouterr().err


def test_tied_parameters_are_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    checkpoints.save(tmp_path / "tied.ckpt", {"global_step": 3}, model)
    assert main(["check", str(tmp_path / "tied.ckpt")]) == 0
    assert "15 elements, 60 B" in capsys.readouterr().out
