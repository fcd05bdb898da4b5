"""Jobs in processes of their own, a few at a time, each forked from this one, so that nothing is imported twice."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def in_processes(function: Callable[[Given], Made], jobs: Sequence[Given], at_once: int) -> list[Made]:
    """``[function(job) for job in jobs]``, each in a new process.

    Args:
        function, jobs: results can be pickled.
        at_once: processes that run at a time.

    Raises:
        the first exception of a job; RuntimeError for a process that ended without a result.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(enumerate(jobs))
    results: dict[int, Any] = {}
    running: dict[Any, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                place, job = waiting.pop(0)
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(function, job, writer))
                process.start()
                writer.close()
                running[reader] = (place, process)
            for ready in connection.wait(list(running)):
                place, process = running.pop(ready)
                results[place] = _received(ready, process)
        return [results[place] for place in range(len(jobs))]
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _received(reader: Any, process: Any) -> Any:
    try:
        ok, value = reader.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"a process of the dry run ended with exit code {process.exitcode}: out of memory?") from None
    process.join()
    if ok:
        return value
    error, text = value
    raise error if isinstance(error, ValueError) else RuntimeError(f"a process of the dry run failed:\n{text}")


def _child(function: Callable[[Any], Any], job: Any, writer: Any) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        message: Any = (True, function(job))
    except BaseException as error:  # noqa: BLE001 - raised again by the parent
        message = (False, (error if isinstance(error, ValueError) else None, traceback.format_exc()))
    writer.send(message)
    writer.close()
    os._exit(0)  # groups that do not exist need no farewell
