"""Ranks on one machine: forked gloo processes that share the parent's imports, so a rank starts in well under a second."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def _rank_main(function: Callable[..., Any], rank: int, world: int, folder: Path, args: tuple) -> None:
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
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    code = 0
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        torch.save(function(*args), folder / f"{rank}.pt")
        dist.barrier()
    except BaseException:  # noqa: BLE001 - written down, and reported by the parent
        code = 1
        (folder / f"{rank}.err").write_text(traceback.format_exc())
    sys.stdout.flush()
    os._exit(code)  # no destroy: a failed peer must not be waited for


class RankFailure(RuntimeError):
    """A rank raised or hung; the message holds the first traceback."""


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Runs ``function(*args)`` on ``world`` forked gloo ranks and returns their results in rank order.

    Results travel through files: tensors in a multiprocessing queue die with the child that owns the memory.

    Raises:
        RankFailure: with the traceback of the rank that failed first, or naming the ranks that did not finish in ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ranks_") as name:
        folder = Path(name)
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=_rank_main, args=(function, rank, world, folder, args)) for rank in range(world)]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            if any(process.exitcode not in (None, 0) for process in processes):
                end = min(end, time.monotonic() + 5)
            time.sleep(0.02)
        stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        errors = sorted((file.stat().st_mtime_ns, int(file.stem)) for file in folder.glob("*.err"))
        if errors:
            rank = errors[0][1]
            raise RankFailure(f"rank {rank}:\n" + (folder / f"{rank}.err").read_text())
        if stuck:
            logs = "\n".join((folder / f"{rank}.log").read_text()[-2000:] for rank in stuck)
            raise RankFailure(f"ranks {stuck} did not finish in {timeout} s\n{logs}")
        dead = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
        if dead:
            raise RankFailure(f"ranks {dead} died: exit codes {[processes[rank].exitcode for rank in dead]}")
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, whatever its sharding."""
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest absolute difference over two dicts of tensors, and the name where it is."""
    if a.keys() != b.keys():
        raise AssertionError(f"different names: {sorted(a.keys() ^ b.keys())}")
    differences = {name: (a[name].double() - b[name].double()).abs().max().item() for name in a}
    name = max(differences, key=lambda key: differences[key] if differences[key] == differences[key] else float("inf"))
    return differences[name], name
