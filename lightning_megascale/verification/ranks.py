"""Ranks on one machine: forked gloo processes that share the parent's imports, so a rank starts in well under a second."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')


class RankFailure(RuntimeError):
    """A rank raised or hung; the message holds the first traceback, ``error`` what was raised where that can be pickled."""

    error: BaseException | None = None


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Runs ``function(*args)`` on ``world`` forked gloo ranks and returns their results in rank order.

    Results travel through files: tensors in a multiprocessing queue die with the child that owns the memory.

    Raises:
        RankFailure: with the traceback of the rank that failed first, or naming the ranks that did not finish in ``timeout`` seconds and
            where they were.
    """
    return _run(function, world, args, timeout, together=True)


def run_alone(function: Callable[..., Any], *args: Any, timeout: float = 60) -> Any:
    """Runs ``function(*args)`` in one forked process without a process group, as a script on one device.

    Raises:
        RankFailure: as ``run_ranks``.
    """
    return _run(function, 1, args, timeout, together=False)[0]


def _run(function: Callable[..., Any], world: int, args: tuple, timeout: float, together: bool) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="ranks_") as name:
        folder = Path(name)
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=_rank_main, args=(function, rank, world, folder, args, together)) for rank in range(world)]
        try:
            for process in processes:
                process.start()
            _wait(processes, timeout)
            stuck = _stuck(processes, folder)
            where = _where(processes, stuck, folder)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        errors = sorted((file.stat().st_mtime_ns, int(file.stem)) for file in folder.glob("*.err"))
        silent = [rank for rank in range(world) if not any((folder / f"{rank}.{kind}").exists() for kind in ("pt", "err"))]
        dead = [rank for rank in silent if rank not in stuck]
        if dead:  # before the errors: those of others are about the connection that it took down
            raise RankFailure(f"ranks {dead} died: exit codes {[processes[rank].exitcode for rank in dead]}{_last_words(folder, dead)}")
        if errors:
            rank = errors[0][1]
            failure = RankFailure(f"rank {rank}:\n" + (folder / f"{rank}.err").read_text())
            failure.error = _unpickled(folder / f"{rank}.error")
            raise failure
        if stuck:
            logs = "\n".join((folder / f"{rank}.log").read_text()[-2000:] for rank in stuck)
            raise RankFailure(f"ranks {stuck} did not finish in {timeout:g} s{where}\n{logs}".rstrip())
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _last_words(folder: Path, ranks: Sequence[int]) -> str:
    logs = [(folder / f"{rank}.log").read_text()[-1000:].strip() for rank in ranks if (folder / f"{rank}.log").exists()]
    return "".join(f"\n{log}" for log in logs if log)


def _wait(processes: Sequence[Any], timeout: float) -> None:
    """Until all have ended, or the time is up, or five seconds after the first has failed."""
    end = time.monotonic() + timeout
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode not in (None, 0) for process in processes):
            end = min(end, time.monotonic() + 5)
        time.sleep(0.02)


def _stuck(processes: Sequence[Any], folder: Path) -> list[int]:
    """The ranks that others wait for: those that have no result yet, or else all that still run."""
    alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
    return [rank for rank in alive if not (folder / f"{rank}.pt").exists()] or alive


def _where(processes: Sequence[Any], stuck: Sequence[int], folder: Path) -> str:
    """Where each stuck rank is, asked with a signal: the innermost line that is not torch's or Lightning's."""
    places = []
    for rank in stuck:
        if processes[rank].is_alive():
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.3 if stuck else 0)
    for rank in stuck:
        dump = (folder / f"{rank}.where").read_text() if (folder / f"{rank}.where").exists() else ""
        frames = list(_FRAME.finditer(dump))
        own = next((frame for frame in frames if not re.search(r"/(torch|lightning)/|/<", frame["file"])), frames[0] if frames else None)
        if own is not None:
            places.append(f"\n  rank {rank} is at {own['file']}:{own['line']} in {own['name']}, in {frames[0]['name']}")
    return "".join(places)


def _forget_compiled() -> None:
    """What the process that a rank was forked from has compiled is none of the rank's business."""
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()


def _rank_main(function: Callable[..., Any], rank: int, world: int, folder: Path, args: tuple, together: bool) -> None:
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(os.dup(log), "w", buffering=1)  # the parent's may be no longer on 1 and 2
    faulthandler.register(signal.SIGUSR1, file=(folder / f"{rank}.where").open("w"), all_threads=False)
    torch.set_num_threads(1)
    _forget_compiled()
    code = 0
    try:
        _environment(rank, world, together)
        if together:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        result = function(*args)
        torch.save(result, folder / f"{rank}.tmp")
        (folder / f"{rank}.tmp").rename(folder / f"{rank}.pt")
        if together:
            dist.barrier()
    except BaseException as error:  # noqa: BLE001 - written down, and reported by the parent
        code = 1
        with contextlib.suppress(Exception):  # what holds a lock or a process group cannot be pickled
            (folder / f"{rank}.error").write_bytes(pickle.dumps(error))
        (folder / f"{rank}.err").write_text(traceback.format_exc())
    sys.stdout.flush()
    os._exit(code)  # no destroy: a failed peer must not be waited for


def _unpickled(file: Path) -> BaseException | None:
    try:
        return pickle.loads(file.read_bytes())
    except Exception:  # noqa: BLE001 - an exception class may take other arguments than it hands on
        return None


def _environment(rank: int, world: int, together: bool) -> None:
    for name in _LAUNCHERS:
        os.environ.pop(name, None)
    if together:
        os.environ.update(
            GLOO_SOCKET_IFNAME="lo",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            GROUP_RANK="0",
            MASTER_ADDR="localhost",
            MASTER_PORT="0",
            TORCHELASTIC_RUN_ID="harness",  # Lightning then takes the ranks as they are
        )
