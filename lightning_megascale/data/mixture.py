"""MixtureDataModule: WebDataset sources mixed by staged ratios; every batch a function of (config, seed, position)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_megascale.data.ahead import read_ahead
from lightning_megascale.data.cache import cache_root
from lightning_megascale.data.datamodule import validation_batches
from lightning_megascale.data.encode import EncodeContext, encode_sample
from lightning_megascale.data.images import decoder_version
from lightning_megascale.data.mixture_config import check_arguments, collate, digest, key_of, source_config
from lightning_megascale.data.mixture_stream import MixtureStream, PackedStream, Pieces, Source, StoredStream
from lightning_megascale.data.packing import Bucketer, Packer, choose_groups
from lightning_megascale.data.positioned import Batch, BatchLoader, PositionedDataModule
from lightning_megascale.data.quarantine import Quarantine
from lightning_megascale.data.ranks import alike_on_all_ranks, data_parallel_position
from lightning_megascale.data.samples import ShardedSource, SourceConfig
from lightning_megascale.data.sharing import SharedLoader
from lightning_megascale.data.shuffle import SourceOrder
from lightning_megascale.data.stages import normalised
from lightning_megascale.data.staging import agree_until, make_schedule, read_stages
from lightning_megascale.data.storage import ShardStore

_VERSION = 1  # raise it when a position gets another sample for the same config
_MEASURED = 4096  # samples whose lengths decide how many are packed together
_COUNTED = 1 << 25  # samples whose rows are counted for the progress bar; planning takes about a microsecond each
_log = logging.getLogger(__name__)


class MixtureDataModule(PositionedDataModule):
    """Text or tokens from WebDataset shards, mixed by stages, packed or padded; images too in ``ImageTextDataModule``.

    Batches are dicts of Hugging Face's keys with B = ``batch_size`` rows of L = ``sequence_length`` tokens: ``input_ids`` and
    unshifted ``labels`` (B, L) int64; packed rows add ``position_ids`` and ``document_ids`` (B, L), padded ones ``attention_mask``
    (B, L); ``__key__`` lists the samples of each row.

    **Order.** Which sample stands at position p of the run is a function of the config, the seed and p: the stage by position, the source
    by an exact schedule (``schedule.py``), the sample by a keyed shuffle of the source's shards (``shuffle.py``). Optimizer steps take
    consecutive positions, whatever the number of ranks; ranks that share a model replica get equal batches; every rank gets equally many.

    **Resume.** The state is one integer and what it counts. A changed mix is refused, unless as a stage after what was trained.

    Args:
        sources: name -> ``SourceConfig`` or its mapping ``{urls, fields, encode}``.
        stages: ``{name, until: {samples or tokens or steps: n}, mix: {source: weight}, ramp}``; None mixes all sources by their sizes,
            without end. A mix may nest: ``{text: 0.1, instruct: {share: 0.9, chat: 0.7, charts: 0.3}}``.
        tokenizer: a fast tokenizer of transformers, or the folder (or hub name) of one.
        sequence_length: L.
        batch_size: B, per data-parallel rank.
        validation: sources of which every sample is read once, in storage order.
        rows: "packed" puts several samples in a row, planned by their lengths; "padded" one, padded to L; "bucketed" one, padded to a
            multiple of ``pad_multiple``, near others of its length.
        long_documents: "split" cuts what is longer than L into samples of their own (text without pictures), which weights and budgets of
            stages count as such; "truncate" drops the rest.
        weights: what the weights of a mix count: "samples" or "tokens".
        seed: of all shuffles.
        num_workers: reading processes of a rank.
        shuffle_window: samples of a source that are shuffled together; more mix better, fewer open fewer shards.
        lanes: how many classes of positions read neighbouring samples, so that a rank opens few shards; a multiple of the data-parallel
            size; 1 with ``weights="tokens"``. Packed and bucketed rows take at most 64, and hold samples of one class each.
        packing_window: samples whose rows are planned together; None: at least 256 rows' worth, and 256 rows' worth for each lane.
        pad_multiple: of bucketed rows.
        steps_per: samples of an optimizer step, for stages counted in steps; None: from the trainer.
        cache_dir: where remote shards and indexes go; None means $MEGASCALE_CACHE, or ~/.cache/lightning_megascale.
        cache_gigabytes: how much remote shards may take of a node's disk; None without limit.
        quarantine: file that lists bad samples; None: ``quarantine.jsonl`` in the trainer's default_root_dir.
        quarantine_limit: bad samples after which the run stops.
        cu_seqlens: whether packed batches carry the borders that kernels for variable lengths take.
        share: "none": every rank reads its batches; "model": one rank of those that share a model replica reads and sends them to the
            others, of which later pipeline stages get no pixels.

    Raises:
        ValueError: listing every argument out of range.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        stages: Sequence[Mapping[str, Any]] | None = None,
        tokenizer: Any = None,
        sequence_length: int = 2048,
        batch_size: int = 1,
        *,
        validation: Mapping[str, Any] | None = None,
        rows: str = "packed",
        long_documents: str = "split",
        weights: str = "samples",
        seed: int = 0,
        num_workers: int = 0,
        shuffle_window: int = 1 << 18,
        lanes: int = 1024,
        packing_window: int | None = None,
        pad_multiple: int = 64,
        steps_per: int | None = None,
        cache_dir: str | Path | None = None,
        cache_gigabytes: float | None = None,
        quarantine: str | Path | None = None,
        quarantine_limit: int | None = 1000,
        cu_seqlens: bool = False,
        share: str = "none",
    ) -> None:
        super().__init__(batch_size, num_workers)
        check_arguments(
            sources=sources,
            tokenizer=tokenizer,
            sequence_length=sequence_length,
            batch_size=batch_size,
            rows=rows,
            long_documents=long_documents,
            weights=weights,
            num_workers=num_workers,
            shuffle_window=shuffle_window,
            lanes=lanes,
            pad_multiple=pad_multiple,
            cache_gigabytes=cache_gigabytes,
            seed=seed,
            packing_window=packing_window,
            steps_per=steps_per,
            cu_seqlens=cu_seqlens,
            validation=validation,
            share=share,
        )
        self.sources = {name: source_config(name, config) for name, config in sources.items()}
        self.validation = {name: source_config(name, config) for name, config in (validation or {}).items()}
        self.stages = None if stages is None else read_stages(stages)
        self.sequence_length, self.rows, self.long_documents, self.weights, self.seed = sequence_length, rows, long_documents, weights, seed
        self.shuffle_window, self.lanes = shuffle_window, 1 if weights == "tokens" else lanes
        self.packing_window, self.pad_multiple, self.steps_per, self.cu_seqlens = packing_window, pad_multiple, steps_per, cu_seqlens
        self.share = share
        self.cache_dir = cache_root(cache_dir)
        limit = None if cache_gigabytes is None else int(cache_gigabytes * 1e9)
        self.store = ShardStore(self.cache_dir, limit)
        self._quarantine_path, self.quarantine_limit = quarantine, quarantine_limit
        self.quarantine = Quarantine(quarantine or "quarantine.jsonl", quarantine_limit)
        self._given_tokenizer = tokenizer
        self._tokenizer: Any = None
        self.train_stream: MixtureStream | None = None

    # ---- what there is -------------------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        if self._tokenizer is None:
            if isinstance(self._given_tokenizer, (str, os.PathLike)):
                from transformers import AutoTokenizer  # half a second, for those who name one only

                if str(self._given_tokenizer).startswith((".", "/", "~")) and not Path(self._given_tokenizer).expanduser().is_dir():
                    raise ValueError(f"tokenizer={str(self._given_tokenizer)!r}: there is no such folder")
                self._tokenizer = AutoTokenizer.from_pretrained(self._given_tokenizer)
            else:
                self._tokenizer = self._given_tokenizer
        return self._tokenizer

    @property
    def pad_id(self) -> int:
        """The token that fills rows: the tokenizer's own, else its end token; no label and no attention sees it."""
        for name in ("pad_token_id", "eos_token_id"):
            if getattr(self.tokenizer, name, None) is not None:
                return int(getattr(self.tokenizer, name))
        return 0

    def context(self) -> EncodeContext:
        """What encode functions get."""
        return EncodeContext(self.tokenizer, self.sequence_length, seed=self.seed)

    def prepare_data(self) -> None:
        """Builds what indexes and token counts are missing; Lightning calls it on one rank of each node, the others wait."""
        for source in self._open({**self.sources, **self.validation}):
            source.lengths(np.zeros(1, np.int64), np.zeros(1, np.int64))
            for shard in range(len(source.shards)):
                source.lengths(np.array([shard]), np.array([0])) if source.sizes[shard] else None

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if self.train_stream is not None:
            return
        alike_on_all_ranks(self._prepare, lambda: self.identity)

    def _prepare(self) -> None:
        """Opens the shards and plans the run."""
        if self._quarantine_path is None and self.trainer is not None:
            self.quarantine = Quarantine(Path(self.trainer.default_root_dir) / "quarantine.jsonl", self.quarantine_limit)
        names = list(self.sources)
        opened = dict(zip(names, self._open(self.sources)))
        plain = {name: SourceOrder(key_of(name), source.sizes, self.seed, self.shuffle_window) for name, source in opened.items()}
        specs = self.stages
        if specs is None:
            specs = read_stages([{"name": "all", "mix": {name: order.size for name, order in plain.items()}}])
        self.schedule = make_schedule(specs, self.weights, plain, lambda name: opened[name].lengths, self._step_samples)
        used = [opened[name] for name in self.schedule.sources]
        stream = MixtureStream(self.schedule, used, [plain[source.name] for source in used], self.quarantine)
        window, lanes = self._packing(stream)
        self.orders = stream.orders = [self._laned(number, source, lanes) for number, source in enumerate(used)]
        self.packer = None if self.rows == "padded" else self._packer(stream, window, lanes)
        self.train_stream = stream
        self.validation_stream: StoredStream | None = None
        if self.validation:
            capacity = self.sequence_length if self.rows == "packed" else None
            self.validation_stream = StoredStream(self._open(self.validation), self.quarantine, capacity)
        self._unused = sorted(set(names) - set(self.schedule.sources))
        for name in self._unused:
            _log.warning("source %r is in no stage's mix: nothing is drawn from it", name)

    def _open(self, configs: Mapping[str, SourceConfig]) -> list[Source]:
        context = self.context()
        found: list[Source] = []
        for name, config in configs.items():
            source = ShardedSource(name, config, self.store, self.cache_dir, context)
            plain = source.encode is encode_sample and set(source.fields) <= {"text", "tokens", "spans"} and "spans" not in source.fields
            found.append(Pieces(source, self.sequence_length) if plain and self.long_documents == "split" else source)
        return found

    def _laned(self, number: int, source: Source, lanes: int) -> SourceOrder:
        positions = self.schedule.lane_positions if lanes > 1 else None
        own = None if positions is None else partial(_of_source, positions, number)
        return SourceOrder(key_of(source.name), source.sizes, self.seed, self.shuffle_window, lanes, own)

    def _packing(self, plain: MixtureStream) -> tuple[int, int]:
        """Samples of a packing window, and lanes, by the lengths of the first samples: rows that are planned hold one lane's samples."""
        if self.rows == "padded":
            return 0, self.lanes
        mean = float(plain.lengths(0, min(_MEASURED, self.schedule.total or _MEASURED)).mean())
        window, groups = choose_groups(self.sequence_length, mean, self.lanes, self.packing_window)
        held = sum(order.size for order in plain.orders)
        if self.schedule.total is None and self.packing_window is None and window > held:  # rows of one epoch, not of many together
            window, groups = choose_groups(self.sequence_length, mean, self.lanes, held)
        return window, groups

    def _packer(self, stream: MixtureStream, window: int, groups: int) -> Packer:
        starts = [self.schedule.stage_start(number) for number in range(len(self.schedule.stages))]
        kind = Packer if self.rows == "packed" else Bucketer
        return kind(stream.lengths, window, self.sequence_length, self.schedule.total, starts, self.seed, groups)

    @property
    def _step_samples(self) -> int | None:
        if self.rows == "packed" or (self.steps_per is None and self.trainer is None):
            return None
        return self.steps_per or self._global_batch * self._accumulated

    # ---- batches -------------------------------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> BatchLoader | SharedLoader:
        if self.train_stream is None:
            raise ValueError("call prepare_data() and setup() first; a Trainer does")
        stream = self.train_stream if self.packer is None else PackedStream(self.train_stream, self.packer)

        def batches() -> Iterable[list[int]]:
            return read_ahead(self._train_batches(), stream, self.store, self.num_workers)

        loader = BatchLoader(
            stream, batches, self._train_length, self.batch_size, self.num_workers, self._align_restored_progress, self._collate
        )
        return self._shared(loader, "training")

    def val_dataloader(self) -> BatchLoader | SharedLoader | list[Any]:
        stream = self.validation_stream
        if stream is None:
            return []

        def batches() -> list[list[int]]:
            return validation_batches(len(stream), self.batch_size, *data_parallel_position(self.trainer))

        def ahead() -> Iterable[list[int]]:
            return read_ahead(batches(), stream, self.store, self.num_workers)

        loader = BatchLoader(stream, ahead, lambda: len(batches()), self.batch_size, self.num_workers, collate=self._collate)
        return self._shared(loader, "validation")

    def _shared(self, loader: BatchLoader, name: str) -> BatchLoader | SharedLoader:
        return SharedLoader(loader, self.trainer, name) if self.share == "model" else loader

    @property
    def _collate(self) -> Callable[[list[Any]], Batch]:
        return partial(
            collate,
            rows=self.rows,
            length=self.sequence_length,
            pad_id=self.pad_id,
            multiple=self.pad_multiple,
            cu_seqlens=self.cu_seqlens,
        )

    def advance(self, position: int, rows: int) -> int:
        return position + rows if self.packer is None else self.packer.advance(position, rows)

    def take(self, position: int, rows: int) -> list[int]:
        """The next rows of the run from a position on, as many as there are."""
        if self.packer is not None:
            return self.packer.take(position, rows)[0]
        total = self.schedule.total
        return list(range(position, position + rows if total is None else min(position + rows, total)))

    def _train_batches(self) -> Iterator[list[int]]:
        rank, size = data_parallel_position(self.trainer)
        done = self._progress.current.ready if self.trainer is not None else 0
        position = self.position
        if getattr(self.trainer, "overfit_batches", 0):  # the same few batches in every epoch
            position = self.advance(0, done * self._global_batch)
        left = self._train_length() - done
        for batch in range(left):
            if batch % self._accumulated == 0 and len(self.take(position, self._global_batch * self._accumulated)) < (
                self._global_batch * self._accumulated
            ):
                return  # the run's last rows, which fill no optimizer step
            rows = self.take(position, self._global_batch)
            position = self.advance(position, self._global_batch)
            yield rows[rank::size]

    def _align_restored_progress(self, epoch: int) -> None:
        """Beside what the base does: a run whose stages have ended stops, instead of going through empty epochs."""
        super()._align_restored_progress(epoch)
        step = self._global_batch * self._accumulated
        if self.trainer is None or self.schedule.total is None or getattr(self.trainer, "overfit_batches", False):
            return
        if self.position and len(self.take(self.position, step)) < step:
            self.trainer.should_stop = True
            _log.warning("the stages end here, %d samples into the run: for a longer one append a stage", self.schedule.total)

    def _train_length(self) -> int:
        """Batches of an epoch: the whole run where its stages end, else as many as all samples fill."""
        held = self._rows_of_epoch()
        return self._epoch_length(held, f"the run has {held} rows of {self.sequence_length} tokens")

    def _rows_of_epoch(self) -> int:
        total = self.schedule.total
        samples = total if total is not None else sum(order.size for order in self.orders)
        if self.packer is None:
            return samples
        windows = self.packer.window_at(samples - 1) + 1
        if windows * self.packer.window <= _COUNTED:
            return -(-self.packer.count(windows) * samples // self._samples_in(windows))
        if self.trainer is None or self.trainer.max_steps < 0:
            raise ValueError(
                f"this run packs {samples:,} samples in {windows:,} windows, and how many rows they make is only known once they are"
                " planned: set trainer.max_steps"
            )
        return samples  # an upper bound: max_steps ends the run

    def _samples_in(self, windows: int) -> int:
        """Samples of the first packing windows."""
        assert self.packer is not None
        return sum(self.packer.span(windows - 1))

    def metrics(self) -> dict[str, float]:
        """For loggers: the share of each source in what was trained on so far, and how many bad samples are listed.

        Without workers also for how many seconds this process waited for remote shards, once it had to.
        """
        samples = max(self._samples_at(self.position), 1)
        counts = self.schedule.counts(min(samples, self.schedule.total or samples))
        shares = {f"data/ratio/{name}": count / samples for name, count in zip(self.schedule.sources, counts)}
        waited = self.store.wait_seconds if self.num_workers == 0 else 0.0  # workers count their own
        return {**shares, "data/quarantined": float(len(self.quarantine)), **({"data/fetch_seconds": waited} if waited else {})}

    # ---- identity ------------------------------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides which sample a position holds, and how it is encoded; not: ranks, workers, batch size, places of files."""
        assert self.train_stream is not None
        sources = {}
        for source in self.train_stream.sources:
            inner = source.source if isinstance(source, Pieces) else source
            assert isinstance(inner, ShardedSource)
            sources[source.name] = digest([inner.identity(), isinstance(source, Pieces)])
        rows: list[Any] = [self.rows]
        if self.packer is not None:
            rows += [self.packer.window, self.sequence_length, self.packer.groups]
        return {
            "version": _VERSION,
            "seed": self.seed,
            "stages": self._stage_table(),
            "weights": self.weights,
            "sources": sources,
            "rows": rows,
            "order": [self.shuffle_window, self.lanes],
            "encoding": self.context().identity(),
            "decoder": decoder_version(),
        }

    def _stage_table(self) -> list[list[Any]]:
        """(samples or None, mix, ramp) of each stage."""
        table: list[list[Any]] = []
        schedule = self.schedule
        for number, stage in enumerate(schedule.stages):
            last = number + 1 == len(schedule.stages)
            end = schedule.total if last else schedule.stage_start(number + 1)
            mix = normalised(stage.name, stage.mix)
            length = None if end is None else end - schedule.stage_start(number)
            table.append([length, {name: str(weight) for name, weight in sorted(mix.items())}, stage.ramp])
        return table

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the position of a checkpoint; stages may be new after it.

        Raises:
            ValueError: when the checkpoint counted positions of another run, naming what differs; for a changed mix, the stage to append.
        """
        theirs, own = dict(state_dict["data"]), self.identity
        if theirs.get("stages") != own["stages"] and "stages" in theirs:
            reached = self._samples_at(state_dict["position"])
            if not agree_until(theirs["stages"], own["stages"], reached):
                raise ValueError(
                    f"the stages differ from the checkpoint's before its position, {reached} samples into the run, so it means another"
                    f" sample: keep what was trained, end its stage with until: {{samples: n}} at or after that position (n counts from"
                    " the stage's start), and append a stage with the new mix. The checkpoint's stages:"
                    f" {theirs['stages']}; now: {own['stages']}"
                )
            theirs["stages"] = own["stages"]
        old = theirs.get("sources", {})  # a stage behind the position may have been dropped, or have brought others
        theirs["sources"] = {name: old.get(name, content) for name, content in own["sources"].items()}
        super().load_state_dict({**state_dict, "data": theirs})

    def _samples_at(self, position: int) -> int:
        """Samples of the run that lie wholly before a position's packing window, or the position itself."""
        if self.packer is None:
            return position
        start, count = self.packer.span(position >> 20) if position != self.packer.end else (self.schedule.total or 0, 0)
        return start + count


def _of_source(positions: Callable[[int, int, int], np.ndarray], number: int, _: int, first: int, count: int) -> np.ndarray:
    """Positions of draws: an order knows its source by a key of its name, the schedule by its number."""
    return positions(number, first, count)
