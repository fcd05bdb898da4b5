"""TextDataModule: the quickstart text as batches of exact sequences; one integer says where a run stands, under any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_megascale.data.cache import defect
from lightning_megascale.data.quickstart import SMALLEST_VOCABULARY, load_tokenizer, prepare_text, text_folder
from lightning_megascale.data.ranks import data_parallel_position
from lightning_megascale.data.shards import TokenShards
from lightning_megascale.data.stream import SequenceStream, ignored

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Batch = dict[str, torch.Tensor]


class BatchLoader:
    """A loader of known length that decides what to read when the first batch is asked for, not when it is made.

    Lightning creates iterators before it restores a checkpoint, for example when ``configure_optimizers`` asks for
    ``trainer.estimated_stepping_batches``; an iterator that had chosen its start by then would begin the epoch again. It is no
    ``DataLoader``, so Lightning puts no sampler of its own into it. Workers only change who reads, never what or in which order.

    Args:
        stream: the sequences.
        batches: gives the positions of every batch from here to the end of the epoch.
        length: batches in a whole epoch.
        batch_size: rows per batch.
        num_workers: reading processes; 0 reads in this one.
        on_epoch: called by Lightning with the epoch's number, after restoring and before the first batch.
    """

    def __init__(
        self,
        stream: SequenceStream,
        batches: Callable[[], Iterable[list[int]]],
        length: Callable[[], int],
        batch_size: int,
        num_workers: int = 0,
        on_epoch: Callable[[int], None] | None = None,
    ) -> None:
        self.stream, self.batches, self.length, self.on_epoch = stream, batches, length, on_epoch
        self.batch_size, self.num_workers = batch_size, num_workers
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
        yield from DataLoader(self.stream, batch_sampler=self.batches(), num_workers=self.num_workers, pin_memory=torch.cuda.is_available())


class TextDataModule(LightningDataModule):
    """Language modelling on the text that ships with Python, read from WebDataset shards in a cache folder.

    Batches are dicts of Hugging Face's keys: ``input_ids`` and ``labels``, both (batch_size, sequence_length) int64, the labels an
    unshifted copy. Documents are joined by <|end|> and cut: no padding in training.

    **Order.** Training reads one endless stream, a function of ``seed`` alone: position p holds sequence p mod S of the p div S-th
    shuffle of the S training sequences. Global batch b is positions b x G to b x G + G - 1 with G = batch_size x data-parallel size,
    and data-parallel rank r takes the r-th batch_size of them. So any division of G gives the same global batches, ranks that
    share a replica (tensor-parallel peers) get equal batches, and every rank gets equally many. A Lightning epoch is as many
    batches as S holds in whole optimizer steps (accumulation included); the next goes on where it stopped, and nothing is dropped.

    **Resume.** The state is the number of sequences trained on: counted by finished batches, not by fetched ones. A run continues with
    the very next sequence, in the middle of an epoch or not, under another data-parallel size, batch size or worker count.

    **Validation** is in storage order, all of it. Its sequences are spread evenly over the batches, and rows that fill up a
    batch carry labels of -100 (with ``batch_size=1`` up to data-parallel size - 1 sequences are left out instead, so that no rank
    has an empty batch).

    Args:
        cache_dir: where the shards go; None means $MEGASCALE_CACHE, or ~/.cache/lightning_megascale.
        sequence_length: tokens per row.
        batch_size: rows per data-parallel rank and batch.
        vocab_size: entries of the tokenizer, trained on the training text.
        validation_fraction: share of the text kept for validation, as whole documents; the same for every seed.
        num_workers: reading processes per rank.
        seed: of the shuffles.

    Raises:
        ValueError: listing every argument out of range.
    """

    def __init__(
        self,
        cache_dir: str | Path | None = None,
        sequence_length: int = 128,
        batch_size: int = 8,
        vocab_size: int = 4096,
        validation_fraction: float = 0.1,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_arguments(sequence_length, batch_size, vocab_size, validation_fraction, num_workers)
        self.sequence_length, self.batch_size, self.num_workers, self.seed = sequence_length, batch_size, num_workers, seed
        self.cache_dir, self.vocab_size, self.validation_fraction = cache_dir, vocab_size, validation_fraction
        self._tokenizer: PreTrainedTokenizerFast | None = None
        self._run: Any = None  # the trainer that the position below belongs to
        self._start, self._start_batches = 0, 0  # sequences trained on when Lightning had finished so many batches
        self._restored_global_batch: int | None = None

    @property
    def folder(self) -> Path:
        """The cache folder of these parameters."""
        return text_folder(self.cache_dir, self.vocab_size, self.validation_fraction)

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, once ``prepare_data`` has run."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._ready_folder())
        return self._tokenizer

    def prepare_data(self) -> None:
        """Writes the shards if they are missing or damaged; Lightning calls it on one rank of each node, the others wait."""
        prepare_text(self.cache_dir, self.vocab_size, self.validation_fraction)

    def setup(self, stage: str | None = None) -> None:
        folder = self._ready_folder()
        end: Any = self.tokenizer.eos_token_id
        train, validation = (TokenShards(sorted(folder.glob(f"{split}-*.tar"))) for split in ("train", "validation"))
        self.train_stream = SequenceStream(train, self.sequence_length, end, self.seed)
        self.validation_stream = SequenceStream(validation, self.sequence_length, end)
        if self.trainer is not self._run:
            self._run, self._start, self._start_batches = self.trainer, 0, 0

    def train_dataloader(self) -> BatchLoader:
        return BatchLoader(
            self.train_stream, self._train_batches, self._train_length, self.batch_size, self.num_workers, self._align_restored_progress
        )

    def val_dataloader(self) -> BatchLoader:
        return BatchLoader(
            self.validation_stream,
            lambda: validation_batches(len(self.validation_stream), self.batch_size, *data_parallel_position(self.trainer)),
            lambda: len(validation_batches(len(self.validation_stream), self.batch_size, *data_parallel_position(self.trainer))),
            self.batch_size,
            self.num_workers,
        )

    @property
    def position(self) -> int:
        """Sequences of the training stream trained on so far, over all ranks; the next one is this position's."""
        finished = self._progress.total.processed - self._start_batches if self.trainer is not None else 0
        return self._start + finished * self._global_batch

    def state_dict(self) -> dict[str, Any]:
        finished = self._progress.total.processed if self.trainer is not None else 0
        return {"position": self.position, "batches": finished, "global_batch": self._global_batch, "data": self._identity}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the position of a checkpoint.

        Raises:
            ValueError: when the checkpoint counted positions of another stream, naming what differs.
        """
        changed = [f"{key} {old!r} -> {self._identity[key]!r}" for key, old in state_dict["data"].items() if self._identity[key] != old]
        if changed:
            raise ValueError(
                f"the checkpoint's position is of other data: {', '.join(changed)}."
                " Restore these values, or start a new run (run.name=new), or from the beginning (resume=never)"
            )
        self._start, self._start_batches = state_dict["position"], state_dict["batches"]
        self._restored_global_batch = state_dict["global_batch"]

    @property
    def _identity(self) -> dict[str, Any]:
        """All that decides what a position means."""
        return {"text": self.folder.name, "sequence_length": self.sequence_length, "seed": self.seed}

    @property
    def _progress(self) -> Any:
        assert self.trainer is not None
        return self.trainer.fit_loop.epoch_loop.batch_progress

    @property
    def _global_batch(self) -> int:
        return self.batch_size * data_parallel_position(self.trainer)[1]

    def _ready_folder(self) -> Path:
        if (problem := defect(self.folder)) is not None:
            raise ValueError(
                f"the text is not ready on this machine: {problem}. Call prepare_data() first; under Lightning one rank of each node"
                " does it, so a cache_dir inside a container or on a node's own disk must be visible to all ranks of that node"
            )
        return self.folder

    def _train_length(self) -> int:
        accumulated = self.trainer.accumulate_grad_batches if self.trainer is not None else 1
        steps = len(self.train_stream) // (self._global_batch * accumulated)
        if not steps:
            raise ValueError(
                f"one optimizer step needs batch_size {self.batch_size} x data-parallel size {self._global_batch // self.batch_size}"
                f" x accumulation {accumulated} = {self._global_batch * accumulated} sequences, the text has {len(self.train_stream)} of"
                f" {self.sequence_length} tokens: lower batch_size, accumulation or sequence_length"
            )
        return steps * accumulated

    def _train_batches(self) -> Iterator[list[int]]:
        rank, size = data_parallel_position(self.trainer)
        done = self._progress.current.ready if self.trainer is not None else 0
        first = self.position
        if getattr(self.trainer, "overfit_batches", 0):  # the same few batches in every epoch
            first = done * self._global_batch
        for batch in range(self._train_length() - done):
            start = first + batch * size * self.batch_size + rank * self.batch_size
            yield list(range(start, start + self.batch_size))

    def _align_restored_progress(self, epoch: int) -> None:
        """After a restore under another global batch: Lightning's count of this epoch's batches, converted to batches of this run.

        Lightning ends an epoch when its restored count reaches the loader's length; a count in other units would end it early or late.
        """
        old, self._restored_global_batch = self._restored_global_batch, None
        if old is None or old == self._global_batch:
            return
        current = self._progress.current
        shift = current.processed * old // self._global_batch - current.processed
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, getattr(current, name) + shift)


def validation_batches(sequences: int, batch_size: int, rank: int, size: int) -> list[list[int]]:
    """Positions of a rank's validation batches: every sequence once over all ranks, ``batch_size`` rows each, no batch empty.

    Args:
        sequences: how many there are.
        batch_size: rows per batch.
        rank, size: place on the data-parallel axis.

    Raises:
        ValueError: for fewer sequences than ranks.
    """
    if sequences < size:
        raise ValueError(
            f"validation has {sequences} sequences for data-parallel size {size}, and every rank needs one:"
            " raise validation_fraction or lower sequence_length"
        )
    count = -(-sequences // (batch_size * size))
    if sequences // count < size:  # only with batch_size 1
        count, sequences = sequences // size, sequences - sequences % size
    batches = []
    for batch in range(count):
        first, last = sequences * batch // count, sequences * (batch + 1) // count
        rows = list(range(first, last))[rank::size]
        batches.append(rows + [ignored(rows[-1])] * (batch_size - len(rows)))
    return batches


def _check_arguments(sequence_length: int, batch_size: int, vocab_size: int, validation_fraction: float, num_workers: int) -> None:
    rules = [
        (sequence_length >= 2, f"sequence_length={sequence_length}: at least 2, since each token predicts the next"),
        (batch_size >= 1, f"batch_size={batch_size}: at least 1 row per data-parallel rank"),
        (vocab_size >= SMALLEST_VOCABULARY, f"vocab_size={vocab_size}: at least {SMALLEST_VOCABULARY} (256 bytes and two special tokens)"),
        (
            0 < validation_fraction < 1,
            f"validation_fraction={validation_fraction}: above 0 and below 1; to skip validation, limit_val_batches=0",
        ),
        (num_workers >= 0, f"num_workers={num_workers}: 0 reads in the training process, more in processes of their own"),
    ]
    wrong = [message for holds, message in rules if not holds]
    if wrong:
        raise ValueError("\n".join(wrong))
