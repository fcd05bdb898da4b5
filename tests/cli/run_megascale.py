"""Runs the command line as a user does: another process, another folder, what it printed and its exit code."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# Two ranks and a model that trains in a second.
TINY = [
    "model=tiny",
    "launch.ranks=2",
    "batch.sequence_length=32",
    "optim.schedule.warmup_steps=2",
    "trainer.max_steps=4",
    "trainer.val_check_interval=2",
]


def environment(**changes: str) -> dict[str, str]:
    """This process's variables without those of a launcher; the package is found in any folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "SLURM", "OMPI", "HYDRA"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    return {**kept, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "120", **changes}


def megascale(
    *arguments: str, cwd: Path, timeout: float = 240, command: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess:
    """One call of ``megascale``; ``command`` stands before ``-m lightning_megascale.cli`` (torchrun)."""
    start = [sys.executable, *command, "-m", "lightning_megascale.cli", *arguments]
    return subprocess.run(start, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=environment(**variables), check=False)
