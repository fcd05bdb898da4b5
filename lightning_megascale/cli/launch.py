"""Starts this machine's ranks, unless somebody else (torchrun, a Slurm step, MPI) already did.

The parent composes the config once and hands the finished object to every rank: no rank parses the command line again, so all
ranks hold the same config and the same run folder, in sweeps too.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import select
import shutil
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_megascale.cli.errors import USER_ERROR_EXIT_CODE

_RANK_VARIABLES = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK")
_LOST_PEER = re.compile("Connection (closed|reset) by peer|Broken pipe|DistNetworkError|ncclRemoteError|connectFullMesh failed")
_PRELOAD = ["torch", "lightning.pytorch", "torch.distributed.elastic.multiprocessing.api", "lightning_megascale.cli.preload"]
_KEPT_LOGS = 5
_OURS, _USER_ERROR = "MEGASCALE_PARENT", "user_error.txt"
_SIGNAL_EXIT_CODES = {128 + signal.SIGINT, 128 + signal.SIGTERM}


def inside_launcher() -> bool:
    """True when this process is already one rank of a job.

    SLURM_STEP_ID means that srun started it; SLURM_PROCID is no sign, since the batch script has it too. An interactive Slurm
    shell (``srun --pty bash``) is a step, yet no rank.
    """
    if "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return False
    return any(name in os.environ for name in _RANK_VARIABLES)


def rank() -> int:
    """This process's global rank as far as the environment tells; 0 outside any launcher."""
    return int(_first_set("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", default="0")) if inside_launcher() else 0


def world_size() -> int:
    """All ranks of the job that this process is a rank of."""
    return int(_first_set("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", default="1"))


def local_world_size() -> int:
    """The ranks on this node, of the job that this process is a rank of."""
    names = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    return int(re.split("[(,]", _first_set(*names, default="1"))[0])  # Slurm says "4" or "4(x2)"


def attempt() -> int:
    """How often the launcher has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _first_set(*names: str, default: str) -> str:
    return next((os.environ[name] for name in names if name in os.environ), default)


def warm_up(ranks: int, start_method: str) -> None:
    """Starts the process that the ranks are forked from, which imports torch and Lightning while this one goes on.

    It has no threads and no CUDA context, so each rank forks from it in milliseconds.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # One store for all restarts leaves the last attempt's addresses in it (pytorch #135712): each attempt gets a fresh one.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ[_OURS] = str(os.getpid())
    if start_method == "forkserver":
        from multiprocessing import forkserver

        multiprocessing.set_forkserver_preload(_PRELOAD)
        forkserver.ensure_running()


def launch(
    run: Callable[..., None], *args: Any, ranks: int, run_dir: str, max_restarts: int, start_method: str, shutdown_seconds: int
) -> None:
    """Runs ``run(*args)`` on ``ranks`` processes of this machine and returns when all are done.

    Rank 0 keeps this terminal (live progress bar); the others write to ``run_dir/logs``. When a rank fails, the process exits with
    1 after that rank's traceback, or with 2 after the message of a user's error. Ctrl-C and SIGTERM reach every rank, which may
    take ``shutdown_seconds`` to write a checkpoint; the process then exits with 130 or 143.
    """
    warm_up(ranks, start_method)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):  # they would print each traceback a second time; each has its own level
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    logs = Path(run_dir) / "logs"
    _prune(logs)
    run_id = uuid.uuid4().hex[:8]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        start_method=start_method,
        shutdown_timeout=shutdown_seconds,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=dict.fromkeys(range(1, ranks), Std.ALL)),
    )
    try:
        elastic_launch(config, run)(*args)
    except ChildFailedError as error:
        attempts = sorted(logs.glob(f"{run_id}_*/attempt_*"), key=lambda folder: int(folder.name.rpartition("_")[2]))
        message, code = describe_failure(error, attempts[-1])
        if code == 1 and stdout_has_no_reader():  # such as: megascale train | head
            raise SystemExit(128 + signal.SIGPIPE) from None
        print(message, file=sys.stderr, flush=True)
        raise SystemExit(code) from None
    except SignalException as error:
        for process in multiprocessing.active_children():  # nobody, unless more signals cut that time short
            process.kill()
        raise SystemExit(128 + error.sigval) from None


def _prune(logs: Path) -> None:
    """Keeps the logs of the last few starts."""
    if logs.is_dir():
        starts = sorted((folder for folder in logs.iterdir() if folder.is_dir()), key=lambda folder: folder.stat().st_mtime_ns)
        for folder in starts[: -(_KEPT_LOGS - 1)]:
            shutil.rmtree(folder, ignore_errors=True)


def report_user_error(message: str, run_dir: str) -> None:
    """Called on a rank: leaves the message for the parent, or prints it here when no parent of ours waits for it.

    Inside somebody else's launcher all ranks of a node share a parent: the first to claim a file of that name prints.
    """
    if os.environ.get(_OURS):
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(_USER_ERROR).write_text(message)
        return
    claim = Path(run_dir) / "logs" / f".{_USER_ERROR}.{os.getppid()}.{attempt()}"
    claim.parent.mkdir(parents=True, exist_ok=True)
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return
    print(f"megascale: {message}", file=sys.stderr, flush=True)


def describe_failure(error: Any, attempt_folder: Path) -> tuple[str, int]:
    """What to print about a failed launch, and the exit code.

    torch reports the rank whose exit it saw first, often a healthy one that lost its peer, and stamps errors in whole seconds. So
    read what every rank of the last attempt wrote: a lost connection never explains another rank's error.

    Args:
        error: torch's ChildFailedError.
        attempt_folder: logs of the last attempt, one folder per rank.

    Returns:
        The message of a user's error and 2; or the root cause's traceback with its rank and 1.
    """
    seen_rank, failure = error.get_first_failure()
    told = sorted(attempt_folder.glob(f"*/{_USER_ERROR}"), key=lambda file: (file.stat().st_mtime_ns, file.parent.name))
    if told:
        return f"megascale: {told[0].read_text()}", USER_ERROR_EXIT_CODE
    reports = []
    for file in attempt_folder.glob("*/error.json"):
        message = json.loads(file.read_text())["message"]
        text = message["extraInfo"]["py_callstack"] if isinstance(message, dict) else str(message)
        reports.append((bool(_LOST_PEER.search(text)), file.stat().st_mtime_ns, int(file.parent.name), text.strip()))
    reports.sort()
    if not reports and failure.exitcode in _SIGNAL_EXIT_CODES:
        return f"megascale: rank {seen_rank} was asked to stop, and all ranks stopped with it", failure.exitcode
    if not reports or reports[0][0]:  # nobody raised on its own: a rank was killed
        return _describe_kill(error, attempt_folder, reports), 1
    _, _, first, text = reports[0]
    others = sorted(report[2] for report in reports[1:])
    fell = f"; ranks {others} fell with it" if others else ""
    return f"{text}\n\nmegascale: rank {first} failed first{fell}; logs of the ranks: {attempt_folder}", 1


def _describe_kill(error: Any, attempt_folder: Path, reports: list[tuple[bool, int, int, str]]) -> str:
    """Which rank was killed: one that torch saw end by a signal of its own, else those that left no report of a lost peer."""
    rank, failure = error.get_first_failure()
    code, how = failure.exitcode, "a rank was killed from outside (out of memory?)"
    for other, seen in sorted(error.failures.items()):
        if seen.exitcode < 0 and -seen.exitcode != signal.SIGTERM:
            rank, code = other, seen.exitcode
            break
    where = f"logs of the ranks: {attempt_folder}"
    if code < 0 or not reports:
        return f"megascale: rank {rank} ended with exit code {code}: {how}; {where}"
    silent = sorted({int(path.name) for path in attempt_folder.iterdir() if path.name.isdigit()} - {report[2] for report in reports})
    if silent:
        who = f"rank {silent[0]}" if len(silent) == 1 else f"one of the ranks {silent}"
        return f"megascale: {who} ended without a word and the others lost it: {how}; {where}"
    return f"{reports[0][3]}\n\nmegascale: rank {rank} ended with exit code {code}: all ranks lost a peer; {where}"


def stdout_has_no_reader() -> bool:
    """True when standard output is a pipe whose other end is closed."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # no such call, or no file
        return False
