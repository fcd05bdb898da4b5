"""The same work for every shard, in several processes, with a progress bar on a terminal."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_megascale.cli.errors import UserError

Job = TypeVar("Job")
Result = TypeVar("Result")


def bar(unit: str) -> Progress:
    """A progress bar on stderr; where that is no terminal, none is drawn."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def processes_for(jobs: int, asked: int | None) -> int:
    """How many processes work: as asked, else one for each core this process may use, at most one for each job."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(asked or cores, jobs))


def each(function: Callable[[Job], Result], jobs: Sequence[Job], processes: int | None, label: str, unit: str = "shards") -> list[Result]:
    """``function`` of every job, in the order of the jobs.

    Args:
        function: of a module, so that other processes find it.
        jobs: its arguments.
        processes: that work; None takes the cores, 1 works in this one.
        label, unit: of the bar.

    Raises:
        UserError: when a process is killed. What ``function`` raises, otherwise.
    """
    count = processes_for(len(jobs), processes)
    results: dict[int, Result] = {}
    pool = None if count == 1 else concurrent.futures.ProcessPoolExecutor(count, mp_context=_context())
    try:  # the processes start with the first job, so before the bar, whose thread holds locks that a fork would copy
        waiting = {} if pool is None else {pool.submit(function, job): number for number, job in enumerate(jobs)}
        with bar(unit) as progress:
            task = progress.add_task(label, total=len(jobs))
            for number, job in enumerate(jobs if pool is None else ()):
                results[number] = function(job)
                progress.advance(task)
            for future in concurrent.futures.as_completed(waiting):
                results[waiting[future]] = future.result()
                progress.advance(task)
    except concurrent.futures.BrokenExecutor as error:
        raise UserError(f"one of {count} processes was killed ({error}): if memory ran out, say processes=1") from error
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    return [results[number] for number in range(len(jobs))]


def _context() -> BaseContext:
    """Forks on Linux, as torch's loaders do: a new process would first import torch, for longer than most sets take."""
    return multiprocessing.get_context("fork" if sys.platform.startswith("linux") else "spawn")
