"""README tells the truth: its table is the support table, its Python runs, and every command in it is run here."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_megascale import support

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SETUP = ["pip install . && megascale train", 'pip install -e ".[test]" && pytest']  # run by tests/test_package.py and .ci/run
QUICK = [
    "trainer.max_steps=4",
    "trainer.val_check_interval=2",
    "model.num_layers=1",
    "optim.schedule.warmup_steps=1",
]  # what makes a real run short


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line and line not in SETUP]


def test_the_support_table_is_the_real_one() -> None:
    shown = README.split("support.markdown(), kept equal by a test -->\n")[1].split("\n<!-- end of support table")[0]
    assert shown.strip() == support.markdown().strip()
    shown = README.split("transformers_markdown(), kept equal by a test -->\n")[1].split("\n<!-- end of transformers table")[0]
    assert shown.strip() == support.transformers_markdown().strip()


def test_both_set_up_commands_are_there_and_ci_runs_the_second() -> None:
    for command in SETUP:
        assert f"```bash\n{command}\n```" in README
    script = (ROOT / ".ci" / "run").read_text()
    steps = [line for line in script.splitlines() if line.startswith(("pip install", "pytest"))]
    assert steps[:2] == ['pip install --quiet -e ".[test]"', "pytest --durations=15"]  # what checks style and types may stand between


def test_every_file_named_in_the_readme_exists() -> None:
    for name in re.findall(r"`((?:lightning_megascale|tests|conf|recipes)/[\w./]*)`", README):
        assert (ROOT / name).exists(), name


def test_the_python_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a Trainer that does not train; the training itself is what all other tests are about."""
    fitted: list[Any] = []
    monkeypatch.setattr(L.Trainer, "fit", lambda self, *arguments: fitted.append(arguments))
    monkeypatch.setenv("WORLD_SIZE", "1")
    names: dict[str, Any] = {"MyLightningModule": L.LightningModule, "my_datamodule": L.LightningDataModule()}
    for block in blocks("python"):
        exec(block.replace("L.Trainer(", 'L.Trainer(accelerator="cpu", devices=1, logger=False, '), names)
    assert len(fitted) == 1
    assert names["layout"].head == ("lm_head",)


def test_every_command_begins_with_a_known_verb() -> None:
    found = commands()
    assert len(found) >= 6 and all(command.startswith("megascale ") for command in found), found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    """In one folder and in README's order, after the run of the quickstart that README starts with; training cut short."""
    (tmp_path / "own_model.py").write_text(next(block for block in blocks("python") if "def build():" in block))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "MEGASCALE_CACHE": str(tmp_path / "cache")}
    for command in ["megascale train", *commands()]:
        words = shlex.split(command)[1:]
        trains = words[0] == "train" and not any(word.startswith("--") for word in words)
        done = subprocess.run(
            [sys.executable, "-m", "lightning_megascale.cli", *words, *(QUICK if trains else [])],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
