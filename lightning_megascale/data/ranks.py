"""Which share of the data a rank reads: by its place on the data-parallel axis, never by its global rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def data_parallel_position(trainer: Any) -> tuple[int, int]:
    """``(rank, size)`` on the data-parallel axis; ranks that share a model replica (tensor-parallel peers) share it.

    Taken from ``trainer.strategy.data_parallel_rank`` and ``.data_parallel_size`` where the strategy has them, else from what the
    strategy tells Lightning's own samplers (the stock ModelParallelStrategy knows its mesh), else from the trainer's
    global rank and world size. ``(0, 1)`` without a trainer.
    """
    if trainer is None:
        return 0, 1
    strategy = trainer.strategy
    if hasattr(strategy, "data_parallel_rank") and hasattr(strategy, "data_parallel_size"):
        return int(strategy.data_parallel_rank), int(strategy.data_parallel_size)
    sampler = getattr(strategy, "distributed_sampler_kwargs", None)
    if sampler:
        return int(sampler["rank"]), int(sampler["num_replicas"])
    return int(trainer.global_rank), int(trainer.world_size)


def alike_on_all_ranks(prepare: Callable[[], None], identity: Callable[[], dict[str, Any]]) -> None:
    """Runs ``prepare`` on every rank, and makes sure that afterwards all say the same ``identity``; what fails on one is raised on all.

    Ranks on nodes with copies of their own may lack a shard, or hold an older one: they would read other samples at the same position.

    Raises:
        ValueError: naming the rank and what differs; or what ``prepare`` raises.
    """
    error: Exception | None = None
    try:
        prepare()
    except Exception as caught:  # noqa: BLE001 - raised on all ranks together
        error = caught
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        if error is not None:
            raise error
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (None, identity()) if error is None else (f"{type(error).__name__}: {error}", {}))
    if error is not None:
        raise error
    for rank, (words, own) in enumerate(everyone):
        if words is not None:
            raise ValueError(f"rank {rank} cannot prepare its data: {words}")
        differing = [key for key in own if own[key] != everyone[0][1].get(key)]
        if differing:
            said = "; ".join(f"{key} {own[key]} and {everyone[0][1].get(key)}" for key in differing)
            raise ValueError(
                f"ranks {rank} and 0 read different data: {said}. A node lacks a shard, or has another version of one: compare their "
                "copies, or read from one place"
            )


def split_by_data_parallel_rank(
    trainer: Any = None, *, rank: int | None = None, size: int | None = None
) -> Callable[[Iterable[T]], Iterator[T]]:
    """A nodesplitter for one's own WebDataset: every ``size``-th shard, starting at ``rank``, of the data-parallel axis.

    ``wds.split_by_node`` counts global ranks, so tensor-parallel peers would read different samples and train on
    nonsense without an error. Use, inside ``train_dataloader`` or ``setup``, where the strategy knows its mesh::

        wds.WebDataset(urls, nodesplitter=split_by_data_parallel_rank(self.trainer), shardshuffle=False)

    The rank is read once, here; the splitter holds two integers and travels to loader workers. Shards are dealt whole: where
    their sample counts differ, ranks get different numbers of batches, so end epochs with ``.with_epoch(n)``.

    Args:
        trainer: a Lightning trainer that is running, or None when ``rank`` and ``size`` are given.
        rank, size: the place on the data-parallel axis, for loops without a trainer.

    Raises:
        ValueError: when neither is given, or when the splitter meets fewer shards than ranks (a rank without data hangs its peers).
    """
    if trainer is not None:
        if not hasattr(trainer, "strategy") or rank is not None or size is not None:
            raise ValueError(
                f"split_by_data_parallel_rank({type(trainer).__name__}, rank={rank}, size={size}): give a Trainer, or rank= and size=."
                " It makes the splitter: write nodesplitter=split_by_data_parallel_rank(trainer)"
            )
        rank, size = data_parallel_position(trainer)
    if rank is None or size is None or not 0 <= rank < size:
        raise ValueError(f"rank={rank}, size={size}: both must be given, with 0 <= rank < size; or give the trainer instead")
    return partial(_every_nth, rank=rank, size=size)


def _every_nth(shards: Iterable[T], rank: int, size: int) -> Iterator[T]:
    shards = iter(shards)
    first = list(islice(shards, size))
    if len(first) < size:
        raise ValueError(
            f"{len(first)} shards for data_parallel_size={size}: every data-parallel rank needs a shard of its own, or its peers wait"
            " for it for ever; write more shards or use fewer data-parallel ranks"
        )
    yield first[rank]
    yield from islice(shards, rank, None, size)
