"""Loaders without a length, as of streams: ranks say to each other whether they have a batch, so that none waits for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist


class EvenLoader:
    """Yields a loader's batches as long as every rank has one.

    Args:
        loader: any iterable of batches; its attributes are seen through.
        group: a group of all ranks whose backend works on the CPU.

    Raises:
        ValueError: on every rank, where some ranks have another batch and some have none.
    """

    def __init__(self, loader: Iterable[Any], group: dist.ProcessGroup | None) -> None:
        self.loader, self._group = loader, group

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_group"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches, count = iter(self.loader), 0
        while True:
            batch = next(batches, _END)
            have = torch.tensor([int(batch is not _END), -int(batch is not _END)])
            dist.all_reduce(have, dist.ReduceOp.MIN, group=self._group)
            all_have, any_has = bool(have[0]), bool(have[1])
            if not any_has:
                return
            if not all_have:
                raise ValueError(
                    f"after {count} batches some ranks have another batch and this stream ended on others, which would wait for ever. "
                    "Give every data-parallel rank the same number of batches (trainer.strategy.data_parallel_rank and "
                    ".data_parallel_size divide a stream), or limit it with limit_train_batches or max_steps"
                )
            count += 1
            yield batch


_END = object()
