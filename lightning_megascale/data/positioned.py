"""A data module whose whole state is one integer, counted by finished batches: exact resumes under any number of ranks and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_megascale.data.ranks import data_parallel_position

Batch = dict[str, Any]


class BatchLoader:
    """A loader of known length that decides what to read when the first batch is asked for, not when it is made.

    Lightning creates iterators before it restores a checkpoint, for example when ``configure_optimizers`` asks for
    ``trainer.estimated_stepping_batches``; an iterator that had chosen its start by then would begin the epoch again. It is no
    ``DataLoader``, so Lightning puts no sampler of its own into it. Workers only change who reads, never what or in which order.

    Args:
        stream: a map-style dataset of the rows.
        batches: gives the rows of every batch from here to the end of the epoch.
        length: batches in a whole epoch.
        batch_size: rows per batch.
        num_workers: reading processes; 0 reads in this one.
        on_epoch: called by Lightning with the epoch's number, after restoring and before the first batch.
        collate: rows -> batch; None stacks them.
    """

    def __init__(
        self,
        stream: Any,
        batches: Callable[[], Iterable[list[Any]]],
        length: Callable[[], int],
        batch_size: int,
        num_workers: int = 0,
        on_epoch: Callable[[int], None] | None = None,
        collate: Callable[[list[Any]], Batch] | None = None,
    ) -> None:
        self.stream, self.batches, self.length, self.on_epoch = stream, batches, length, on_epoch
        self.batch_size, self.num_workers, self.collate = batch_size, num_workers, collate
        self.batch_sampler = None  # Lightning looks for one where there is a sampler

    @property
    def sampler(self) -> BatchLoader:
        """Itself: where Lightning looks for ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        if self.on_epoch is not None:
            self.on_epoch(epoch)

    def __len__(self) -> int:
        return self.length()

    def __iter__(self) -> Iterator[Batch]:
        batches = self.batches()
        try:
            yield from DataLoader(
                self.stream,
                batch_sampler=batches,  # type: ignore[arg-type]
                num_workers=self.num_workers,
                pin_memory=torch.cuda.is_available(),
                collate_fn=self.collate,
            )
        finally:
            if (close := getattr(batches, "close", None)) is not None:
                close()  # it may be reading ahead


class PositionedDataModule(LightningDataModule):
    """What data modules of one endless (or staged) stream share: where a run stands, and what a checkpoint says of it.

    The state is a position of the stream: rows trained on, over all ranks. It counts finished batches, not fetched ones. A run continues
    with the very next row, in the middle of an epoch or not, under another data-parallel size, batch size or worker count.

    Subclasses say ``identity`` (all that decides what a position means) and, where positions are not plain counts, ``advance``.

    Args:
        batch_size: rows per data-parallel rank and batch.
        num_workers: reading processes per rank.
    """

    def __init__(self, batch_size: int, num_workers: int) -> None:
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers
        self._run: Any = None  # the trainer that the position below belongs to
        self._start, self._start_batches = 0, 0  # where the run stood when Lightning had finished so many batches
        self._restored: tuple[int, int] | None = None  # global batch and accumulation that Lightning's restored counts are of

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides what a position means; a checkpoint of another one is refused."""
        raise NotImplementedError

    def advance(self, position: int, rows: int) -> int:
        """The position after ``rows`` more rows."""
        return position + rows

    def setup(self, stage: str | None = None) -> None:
        if self.trainer is not self._run:
            self._run, self._start, self._start_batches = self.trainer, 0, 0

    @property
    def position(self) -> int:
        """Where training stands, over all ranks; the next row is this position's."""
        finished = self._progress.total.processed - self._start_batches if self.trainer is not None else 0
        return self.advance(self._start, finished * self._global_batch)

    def state_dict(self) -> dict[str, Any]:
        finished = self._progress.total.processed if self.trainer is not None else 0
        counted = {"batches": finished, "global_batch": self._global_batch, "accumulated": self._accumulated}
        return {"position": self.position, **counted, "data": self.identity}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the position of a checkpoint.

        Raises:
            ValueError: when the checkpoint counted positions of another stream, naming what differs.
        """
        own, theirs = self.identity, state_dict["data"]
        changed = [f"{key} {theirs.get(key)!r} -> {own.get(key)!r}" for key in {**theirs, **own} if theirs.get(key) != own.get(key)]
        if changed:
            raise ValueError(
                f"the checkpoint's position is of other data: {', '.join(changed)}."
                " Restore these values, or start a new run (run.name=new), or from the beginning (resume=never)"
            )
        self._start, self._start_batches = state_dict["position"], state_dict["batches"]
        self._restored = state_dict["global_batch"], state_dict.get("accumulated", self._accumulated)

    @property
    def _progress(self) -> Any:
        assert self.trainer is not None
        return self.trainer.fit_loop.epoch_loop.batch_progress

    @property
    def _global_batch(self) -> int:
        return self.batch_size * data_parallel_position(self.trainer)[1]

    @property
    def _accumulated(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer is not None else 1

    def _epoch_length(self, rows: int, what: str) -> int:
        """Batches of an epoch: as many as ``rows`` fill in whole optimizer steps.

        Raises:
            ValueError: when they do not fill one; ``what`` says what they are.
        """
        accumulated = self._accumulated
        steps = rows // (self._global_batch * accumulated)
        if not steps:
            raise ValueError(
                f"one optimizer step needs batch_size {self.batch_size} x data-parallel size {self._global_batch // self.batch_size}"
                f" x accumulation {accumulated} = {self._global_batch * accumulated} sequences, {what}: lower batch_size, accumulation"
                " or sequence_length"
            )
        return steps * accumulated

    def _align_restored_progress(self, epoch: int) -> None:
        """After a restore under another global batch: Lightning's count of this epoch's batches, converted to batches of this run.

        Lightning ends an epoch when its restored count reaches the loader's length; a count in other units would end it early or late.
        It also tells by the count where an optimizer step begins, so the count is rounded down to whole steps.
        """
        old, self._restored = self._restored, None
        if old is None or old == (self._global_batch, self._accumulated):
            return
        current = self._progress.current
        batches = current.processed * old[0] // self._global_batch
        shift = batches - batches % self._accumulated - current.processed
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, getattr(current, name) + shift)
