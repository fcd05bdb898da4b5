"""A plain script by Lightning's own launcher and by torchrun, and the strategy by its registered name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys
import lightning_megascale  # the import registers the name
import lightning as L, torch
from torch.utils.data import DataLoader
from tests.strategies.test_existing_code import CallsModel, Tokens
from lightning_megascale import MegascaleStrategy

strategy = "megascale" if sys.argv[1] == "name" else MegascaleStrategy(**eval(sys.argv[1]))
torch.set_num_threads(1)
trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=2, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)
rows = [{**row, "labels": row["labels"].clamp(min=0)} for row in (Tokens()[i] for i in range(len(Tokens())))]
trainer.fit(CallsModel(), DataLoader(rows, batch_size=4))
print(f"rank {trainer.global_rank} of {trainer.strategy.data_parallel_size}: {trainer.strategy.step_loss:.6f}", flush=True)
torch.distributed.barrier()  # the launcher ends the others when rank 0 ends, printed or not
"""


def start(command: list[str], folder: Path, argument: str) -> subprocess.CompletedProcess:
    (folder / "script.py").write_text(SCRIPT)
    root = Path(__file__).resolve().parents[2]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("RANK", "LOCAL_", "WORLD_", "TORCHELASTIC", "MASTER_"))
    }
    environment |= {"PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(folder / "script.py"), argument],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=folder,
        check=False,
    )


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [[sys.executable], TORCHRUN], ids=["Lightning's launcher", "torchrun"])
def test_a_script_runs_under_either_launcher(command: list[str], tmp_path: Path) -> None:
    done = start(command, tmp_path, "name")
    assert done.returncode == 0, done.stderr[-3000:]
    said = sorted(re.findall(r"rank (\d) of 2: ([\d.e+-]+)", done.stdout))  # ranks share a pipe, so lines may run into each other
    assert [rank for rank, _ in said] == ["0", "1"]
    assert said[0][1] == said[1][1]


@pytest.mark.slow
def test_a_refusal_ends_every_process_of_lightnings_launcher(tmp_path: Path) -> None:
    done = start([sys.executable], tmp_path, "dict(tensor_parallel_size=3)")
    assert done.returncode != 0
    assert "tensor_parallel_size=3 does not divide the 2 ranks" in done.stderr
    end = time.monotonic() + 20  # the launcher's kill takes a moment on a busy machine
    while (left := running(str(tmp_path / "script.py"))) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left, f"processes left behind: {left}"


def running(script: str) -> list[str]:
    return subprocess.run(["pgrep", "-f", script], capture_output=True, text=True, check=False).stdout.split()
