"""Steps that all ranks take together: what fails on one is raised on all, with its cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

T = TypeVar("T")


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank_of(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if distributed() else 0


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if not distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any, group: dist.ProcessGroup | None) -> Any:
    if not distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    return box[0]


def together(what: str, step: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Runs ``step`` on every rank; when it raises on any, raises the same message on all of them."""
    result: Any = None
    own: BaseException | None = None
    try:
        result = step()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 raised again below, on all ranks
        own = error
    failures = gather(None if own is None else (isinstance(own, ValueError), str(own), type(own).__name__), group)
    if any(failures):
        _fail(what, {rank: failure for rank, failure in enumerate(failures) if failure}, len(failures), own)
    return result


def _fail(what: str, failures: dict[int, tuple[bool, str, str]], world: int, own: BaseException | None) -> None:
    """Raises ValueError for the user's mistakes (same text on all ranks: as it is), RuntimeError for failures of the machine."""
    messages: dict[str, list[int]] = {}
    users = all(user for user, _, _ in failures.values())
    for rank, (user, text, kind) in failures.items():
        messages.setdefault(text if user else f"{kind}: {text}", []).append(rank)
    if users and len(messages) == 1:
        raise ValueError(next(iter(messages))) from own
    lines = [f"rank {', '.join(map(str, ranks))}: {text}" if world > 1 else text for text, ranks in messages.items()]
    raise (ValueError if users else RuntimeError)(f"{what}: " + "\n".join(lines)) from own


def dcp_together(what: str, step: Callable[[], T]) -> T:
    """Runs a DCP call, which raises on all ranks by itself, but a BaseException without the causes in its text."""
    try:
        return step()
    except CheckpointException as error:
        failures = {rank: (False, str(cause[0]), type(cause[0]).__name__) for rank, cause in error.failures.items()}
        _fail(what, failures, 2 if distributed() else 1, error)
        raise
