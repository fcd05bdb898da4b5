"""TextDataModule: one's own text or the quickstart's as batches of exact sequences; one integer says where a run stands, on any ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_megascale.data.cache import defect
from lightning_megascale.data.own_text import TextFiles, find_files
from lightning_megascale.data.positioned import BatchLoader, PositionedDataModule
from lightning_megascale.data.quickstart import SMALLEST_VOCABULARY, load_tokenizer, prepare_text, text_folder
from lightning_megascale.data.ranks import data_parallel_position
from lightning_megascale.data.shards import TokenShards
from lightning_megascale.data.stream import SequenceStream, ignored

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TextDataModule(PositionedDataModule):
    """Language modelling on text files, or on the text that ships with Python, read from WebDataset shards in a cache folder.

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
        vocab_size: entries of the tokenizer, trained on the training text. From a small ``text`` it gets fewer, as many sequences of bytes
            as occur twice; the model's other entries stay unused.
        validation_fraction: share of the text kept for validation, as whole documents; the same for every seed.
        num_workers: reading processes per rank.
        seed: of the shuffles.
        text: files of one's own: a path, a glob, or a list of them, relative to the current folder; None: the text that ships with Python.
            UTF-8. A ``.jsonl`` file has a document on each line, its ``"text"``; any other file is one document, divided where it has
            two or more blank lines in a row. Validation is whole documents where these fit, else the end of the longest. It is held
            in memory while the shards are written; an edited file makes other shards, and a checkpoint of the old ones is refused.

    Raises:
        ValueError: listing every argument out of range; for files that are missing or empty.
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
        text: TextFiles | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers)
        _check_arguments(sequence_length, batch_size, vocab_size, validation_fraction, num_workers)
        self.sequence_length, self.seed = sequence_length, seed
        self.cache_dir, self.vocab_size, self.validation_fraction = cache_dir, vocab_size, validation_fraction
        self.text = None if text is None else find_files(text)
        self._own_folder: Path | None = None
        self._tokenizer: PreTrainedTokenizerFast | None = None

    @property
    def folder(self) -> Path:
        """The cache folder of these parameters, and of the files as they were when it was first asked for."""
        if self.text is None:
            return text_folder(self.cache_dir, self.vocab_size, self.validation_fraction)
        if self._own_folder is None:
            self._own_folder = text_folder(self.cache_dir, self.vocab_size, self.validation_fraction, self.text)
        return self._own_folder

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, once ``prepare_data`` has run."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._ready_folder())
        return self._tokenizer

    def prepare_data(self) -> None:
        """Writes the shards if they are missing or damaged; Lightning calls it on one rank of each node, the others wait."""
        patience = 120.0 if self.text is None else 3600.0
        written = prepare_text(self.cache_dir, self.vocab_size, self.validation_fraction, patience, self.text)
        if written != self.folder:
            raise ValueError(f"text={self._shown} changed while the run was starting: start again, once the files are as they should be")

    def setup(self, stage: str | None = None) -> None:
        folder = self._ready_folder()
        end: Any = self.tokenizer.eos_token_id
        train, validation = (TokenShards(sorted(folder.glob(f"{split}-*.tar"))) for split in ("train", "validation"))
        if self.text is not None:
            self._check_tokens(train, validation)
        self.train_stream = SequenceStream(train, self.sequence_length, end, self.seed)
        self.validation_stream = SequenceStream(validation, self.sequence_length, end)
        super().setup(stage)

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
    def identity(self) -> dict[str, Any]:
        """The text, how it is cut, and the seed."""
        return {"text": self.folder.name, "sequence_length": self.sequence_length, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        theirs = state_dict["data"].get("text")
        if self.text is not None and theirs != self.folder.name:
            raise ValueError(
                f"text={self._shown} is not the text of the checkpoint: its shards are {theirs!r}, these {self.folder.name!r}. The name"
                " carries a hash of the files' content, vocab_size, validation_fraction and the version of tokenizers. Restore these, or"
                " start a new run (run.name=new), or from the beginning (resume=never)"
            )
        super().load_state_dict(state_dict)

    @property
    def _shown(self) -> str:
        """The files, for messages."""
        names = [path.name for path in self.text or []]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _check_tokens(self, train: TokenShards, validation: TokenShards) -> None:
        """Refuses a text of one's own in which a part makes no sequence."""
        for part, shards, remedy in (
            ("for training", train, "lower validation_fraction"),
            (f"for validation (validation_fraction={self.validation_fraction})", validation, "raise validation_fraction"),
        ):
            tokens = int(shards.lengths.sum()) + len(shards)
            if tokens < self.sequence_length:
                raise ValueError(
                    f"text={self._shown} has {tokens:,} tokens {part}, less than one sequence of {self.sequence_length}: add text,"
                    f" {remedy}, or lower sequence_length (batch.sequence_length of megascale train)"
                )

    def _check_step(self) -> None:
        """Refuses a text of one's own that fills no optimizer step."""
        held, needed = len(self.train_stream), self._global_batch * self._accumulated
        if held < needed:
            shards = (self.train_stream.shards, self.validation_stream.shards)
            size = sum(path.stat().st_size for path in self.text or []) / sum(int(part.lengths.sum()) for part in shards)
            more = (needed - held) * self.sequence_length * size / (1 - self.validation_fraction)
            raise ValueError(
                f"text={self._shown} makes {held} training sequences of {self.sequence_length} tokens, and an optimizer step takes {needed}"
                f" (batch_size {self.batch_size} x data-parallel size {self._global_batch // self.batch_size} x accumulation"
                f" {self._accumulated}): add text (about {more / 1000:,.0f} kB), or lower sequence_length or the batch (of megascale train:"
                " batch.sequence_length, batch.global_size)"
            )

    def _ready_folder(self) -> Path:
        if (problem := defect(self.folder)) is not None:
            raise ValueError(
                f"the text is not ready on this machine: {problem}. Call prepare_data() first; under Lightning one rank of each node"
                " does it, so a cache_dir inside a container or on a node's own disk must be visible to all ranks of that node"
            )
        return self.folder

    def _train_length(self) -> int:
        held = len(self.train_stream)
        if self.text is not None:
            self._check_step()
        return self._epoch_length(held, f"the text has {held} of {self.sequence_length} tokens")

    def _train_batches(self) -> Iterator[list[int]]:
        rank, size = data_parallel_position(self.trainer)
        done = self._progress.current.ready if self.trainer is not None else 0
        first = self.position
        if getattr(self.trainer, "overfit_batches", 0):  # the same few batches in every epoch
            first = done * self._global_batch
        for batch in range(self._train_length() - done):
            start = first + batch * size * self.batch_size + rank * self.batch_size
            yield list(range(start, start + self.batch_size))


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
