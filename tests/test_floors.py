"""The floors hold: the contracts of import-linter, the bans of ruff, and what a plain import loads. Each ban is seen biting."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def run(*command, cwd=REPOSITORY, **kwargs):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False, **kwargs)


def lint_imports(folder):
    code = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    return run(sys.executable, "-c", code, cwd=folder)


def test_the_contracts_hold():
    done = lint_imports(REPOSITORY)
    assert done.returncode == 0 and "0 broken" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("parallel/clip.py", "import lightning_megascale.strategies", "own floor and the floors below BROKEN"),
        ("parallel/clip.py", "import lightning_megascale.models.presets", "parallel/ knows no models BROKEN"),
        ("data/shards.py", "import lightning_megascale.plan", "data/ knows nothing of the package BROKEN"),
        ("layout.py", "import torch", "What a planner reads imports no torch BROKEN"),
        ("module.py", "import omegaconf", "Hydra and OmegaConf only in cli/ BROKEN"),
        ("brand_new.py", "import os", "own floor and the floors below BROKEN"),  # a file without a floor
    ],
)
def test_each_contract_bites(tmp_path, file, line, broken):
    shutil.copytree(REPOSITORY / "lightning_megascale", tmp_path / "lightning_megascale", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    target = tmp_path / "lightning_megascale" / file
    target.write_text((target.read_text() if target.exists() else '"""New."""\n') + f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1 and broken in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("file", "banned"), [("models/decoder.py", True), ("models/new/deep.py", True), ("parallel/clip.py", False)])
def test_models_may_not_import_torch_distributed(file, banned):
    source = '"""A file."""\n\nimport torch.distributed.tensor\n\nprint(torch.distributed.tensor)\n'
    done = run(
        sys.executable, "-m", "ruff", "check", "--select", "TID", "--stdin-filename", f"lightning_megascale/{file}", "-", input=source
    )
    assert ("TID251" in done.stdout) == banned, done.stdout + done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "",
        ".plan",
        ".support",
        ".layout",
        ".layout_huggingface",
        ".models.config",
        ".models.presets",
        ".topology.readers",
        ".topology.describe",
        ".planning.model_config",
        ".planning.workload",
        ".planning.goodput",
        ".cli.__main__",
        ".cli.config",
    ],
)
def test_what_a_planner_reads_loads_no_torch(module):
    code = (
        f"import sys, lightning_megascale{module}; print([name for name in ('torch', 'lightning', 'transformers') if name in sys.modules])"
    )
    done = run(sys.executable, "-c", code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_every_file_says_what_it_is_for():
    silent = []
    for folder in ("lightning_megascale", "tests", "conf", "recipes"):
        for file in sorted((REPOSITORY / folder).rglob("*")):
            first = file.read_text().partition("\n")[0] if file.suffix in (".py", ".yaml", ".toml") else "#"
            if not first.startswith(('"""', "#", 'r"""')):
                silent.append(str(file.relative_to(REPOSITORY)))
    assert silent == []
