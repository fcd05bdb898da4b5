"""``megascale data stats`` of a mix: what each stage draws, against what was wanted; epochs, tokens, padding and open shards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_megascale.cli.arguments import size
from lightning_megascale.cli.data_sets import Mix, make_module
from lightning_megascale.cli.errors import UserError
from lightning_megascale.data.mixture import MixtureDataModule
from lightning_megascale.data.shuffle import SourceOrder
from lightning_megascale.data.storage import OPEN_FILES
from lightning_megascale.data.token_clock import TokenClock, TokenSchedule

_LOOKED_AT = 4096  # samples of a rank whose shards are counted, and rows whose padding is measured
_WINDOWS = 4  # of packing


@dataclass
class StageStats:
    """What a stage does, by source where lists; tokens and padding are None where tokens were not counted.

    ``wanted`` and ``drawn`` are in the unit of the weights.
    """

    name: str
    start: int
    end: int
    endless: bool
    samples: list[int]
    wanted: list[float]
    drawn: list[int]
    epochs: list[float]
    tokens: list[int] | None
    padding: float | None
    opened: float
    shards: int


@dataclass
class MixStats:
    """The stages of a mix, and what was measured over it."""

    sources: tuple[str, ...]
    unit: str
    stages: list[StageStats]
    bounds: list[tuple[str, int, float]]
    bound: float
    epochs: list[float]
    curve: tuple[np.ndarray, np.ndarray, np.ndarray]  # positions (n + 1,), drawn and wanted shares (n, sources)
    lengths: dict[str, np.ndarray] | None


def stats_of_mix(console: Console, mix: Mix, samples: int, ranks: int, out: str | None) -> int:
    """Prints, and draws, what a mix's stages draw.

    Args:
        samples: looked at of a last stage without end.
        ranks: data-parallel ranks among which positions are dealt, for the shards that one opens.
    """
    found = mix_stats(mix, samples, ranks)
    for stage in found.stages:
        _show_stage(console, found, stage)
    for name, first, error in found.bounds:
        bound = f"from position {first:,} ({name}) no source is ever more than {error:,.3f} {found.unit} off"
        console.print(bound, highlight=False, markup=False)
    console.print(f"over all of it, no source is more than {found.bound:,.3f} {found.unit} off", highlight=False)
    _show_all(console, found, ranks)
    if out is not None:
        from lightning_megascale.cli.data_plots import save_mix

        console.print(save_mix(found, out), highlight=False, markup=False, soft_wrap=True)
    return 0


class _NoTokenizer:
    """Stands for the tokenizer where only shares are asked for."""

    def __getattr__(self, name: str) -> Any:
        raise UserError("these stages count tokens: add tokenizer=FOLDER")


def _module(mix: Mix) -> MixtureDataModule:
    steps = [stage for stage in mix.stages or [] if isinstance(stage, Mapping) and "steps" in (stage.get("until") or {})]
    if steps and mix.options.get("steps_per") is None:
        raise UserError(f"stage {steps[0].get('name')!r} is counted in steps: add steps_per, the samples of a step (the global batch size)")
    if mix.options.get("tokenizer") is not None:
        return make_module(mix)
    kept = {key: mix.options[key] for key in ("seed", "weights", "shuffle_window", "lanes", "steps_per", "cache_dir") if key in mix.options}
    module = MixtureDataModule(mix.sources, mix.stages, _NoTokenizer(), rows="padded", long_documents="truncate", **kept)
    module.setup()
    return module


def mix_stats(mix: Mix, samples: int, ranks: int) -> MixStats:
    """All that is shown of a mix.

    Raises:
        UserError, ValueError: for sources or stages that make no run, or that need a tokenizer.
    """
    module = _module(mix)
    schedule, stream = module.schedule, module.train_stream
    assert stream is not None
    counted = mix.options.get("tokenizer") is not None
    clocks = _clocks(module) if counted else None
    stages = []
    for number, stage in enumerate(schedule.stages):
        start, last = schedule.stage_start(number), number + 1 == len(schedule.stages)
        end = schedule.total if last else schedule.stage_start(number + 1)
        stages.append(_stage(module, clocks, stage.name, start, start + samples if end is None else end, end is None, ranks))
    end = stages[-1].end
    epochs = [drawn / order.size for drawn, order in zip(schedule.counts(end), module.orders)]
    bounds = [(bound.stage, bound.first, bound.error) for bound in schedule.bounds()]
    lengths = None
    if counted:
        lengths = {
            source.name: np.concatenate([_all_lengths(source, shard) for shard in range(len(source.sizes))]) for source in stream.sources
        }
    curve = _curve(module, clocks, end)
    return MixStats(schedule.sources, schedule.unit, stages, bounds, schedule.bound(end), epochs, curve, lengths)


def _all_lengths(source: Any, shard: int) -> np.ndarray:
    rows = np.arange(int(source.sizes[shard]), dtype=np.int64)
    return source.lengths(np.full(len(rows), shard, np.int64), rows)


def _clocks(module: MixtureDataModule) -> list[TokenClock]:
    """Tokens of each source's draws; without lanes, which move rows inside of a shuffle window only."""
    if isinstance(module.schedule, TokenSchedule):
        return module.schedule.clocks
    assert module.train_stream is not None
    plain = [SourceOrder(order.number, order.sizes, order.seed, order.window) for order in module.orders]
    return [TokenClock(order, source.lengths) for order, source in zip(plain, module.train_stream.sources)]


def _amounts(module: MixtureDataModule, clocks: Sequence[TokenClock] | None, n: int) -> list[int]:
    """What every source gave among the first n positions, in the unit of the weights."""
    counts = module.schedule.counts(n)
    if module.schedule.unit == "samples":
        return counts
    assert clocks is not None
    return [clock.tokens(count) for clock, count in zip(clocks, counts)]


def _stage(
    module: MixtureDataModule, clocks: Sequence[TokenClock] | None, name: str, start: int, end: int, endless: bool, ranks: int
) -> StageStats:
    schedule = module.schedule
    before, after = schedule.counts(start), schedule.counts(end)
    samples = [b - a for a, b in zip(before, after)]
    wanted = [float(b - a) for a, b in zip(schedule.targets(start), schedule.targets(end))]
    drawn = [b - a for a, b in zip(_amounts(module, clocks, start), _amounts(module, clocks, end))]
    tokens = None if clocks is None else [clock.tokens(b) - clock.tokens(a) for clock, a, b in zip(clocks, before, after)]
    epochs = [count / order.size for count, order in zip(samples, module.orders)]
    opened, shards = _opened(module, start, end, ranks)
    padding = None if clocks is None else _padding(module, start, end)
    return StageStats(name, start, end, endless, samples, wanted, drawn, epochs, tokens, padding, opened, shards)


def _opened(module: MixtureDataModule, start: int, end: int, ranks: int) -> tuple[float, int]:
    """Shards that rank 0 opens for 1,000 samples, keeping ``OPEN_FILES`` of them open, and how many different ones it meets."""
    packer = module.packer
    if packer is not None:  # its rows hold samples from all over a window, also those behind `end`
        rows = 64 if module.rows == "packed" else min(end - start, _LOOKED_AT)
        states = packer.take(packer.window_at(start) << 20, ranks * rows)[0][::ranks]
        positions = np.array([at for state in states for at in packer.sequence(state)][:_LOOKED_AT], np.int64)
    else:
        positions = np.arange(start, min(end, start + ranks * _LOOKED_AT), ranks)
    span = int(positions.max()) - start + 1
    _, numbers, draws = module.schedule.window(start, span)
    shards = np.empty(span, np.int64)
    for number in np.unique(numbers).tolist():
        where = np.flatnonzero(numbers == number)
        shards[where] = module.orders[number].many(int(draws[where[0]]), len(where))[1]
    met: OrderedDict[tuple[int, int], None] = OrderedDict()
    different, opens = set(), 0
    for place in (positions - start).tolist():
        shard = (int(numbers[place]), int(shards[place]))
        different.add(shard)
        opens += shard not in met
        met[shard] = None
        met.move_to_end(shard)
        if len(met) > OPEN_FILES:
            met.popitem(last=False)
    return 1000 * opens / len(positions), len(different)


def _padding(module: MixtureDataModule, start: int, end: int) -> float:
    """Share of padding in the first rows of a stage."""
    stream, packer, length = module.train_stream, module.packer, module.sequence_length
    assert stream is not None
    if packer is None:
        return 1 - float(np.minimum(stream.lengths(start, min(end - start, _LOOKED_AT)), length).mean()) / length
    first = packer.window_at(start)
    windows = min(_WINDOWS, packer.window_at(end - 1) - first + 1)
    if module.rows == "packed":
        return packer.padding(first, windows)
    rows = [packer.rooms(state)[0] for state in packer.take(first << 20, min(end - start, _LOOKED_AT))[0]]
    batches = [rows[at : at + module.batch_size] for at in range(0, len(rows), module.batch_size)]
    multiple = module.pad_multiple
    return 1 - sum(rows) / sum(-(-max(batch) // multiple) * multiple * len(batch) for batch in batches)


def _curve(module: MixtureDataModule, clocks: Sequence[TokenClock] | None, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shares of every source in stretches of the run, drawn and wanted."""
    borders = {module.schedule.stage_start(number) for number in range(len(module.schedule.stages))}
    edges = np.array(sorted({*np.linspace(0, end, min(end, 120) + 1).astype(int).tolist(), *borders}), np.int64)
    drawn = np.diff([_amounts(module, clocks, n) for n in edges.tolist()], axis=0).astype(float)
    wanted = np.diff([[float(part) for part in module.schedule.targets(n)] for n in edges.tolist()], axis=0)
    return edges, drawn / np.maximum(drawn.sum(1, keepdims=True), 1), wanted / np.maximum(wanted.sum(1, keepdims=True), 1e-9)


def _table(*titles: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, name in enumerate(titles):
        table.add_column(name, overflow="fold", justify="right" if number else "left")
    return table


def _show_stage(console: Console, found: MixStats, stage: StageStats) -> None:
    looked = f"{stage.end - stage.start:,} samples" + (" of no end" if stage.endless else "")
    titles = ["source", "wanted", "drawn", "samples", f"{found.unit} off", "epochs"] + (["tokens"] if stage.tokens else [])
    table = _table(*titles)
    all_wanted, all_drawn = sum(stage.wanted) or 1.0, sum(stage.drawn) or 1
    for number, name in enumerate(found.sources):
        if not stage.wanted[number] and not stage.samples[number]:
            continue
        wanted, drawn = stage.wanted[number], stage.drawn[number]
        cells = [f"{wanted / all_wanted:.3%}", f"{drawn / all_drawn:.3%}", f"{stage.samples[number]:,}", f"{drawn - wanted:+,.2f}"]
        cells += [f"{stage.epochs[number]:,.3f}"] + ([f"{stage.tokens[number]:,}"] if stage.tokens else [])
        table.add_row(Text(name), *cells)
    console.print(Text(f"{stage.name}: positions {stage.start:,} to {stage.end - 1:,}, {looked}", style="bold"))
    console.print(table)


def _show_all(console: Console, found: MixStats, ranks: int) -> None:
    counted = found.lengths is not None
    titles = ["stage", "samples", f"shards rank 0 of {ranks} opens per 1,000 samples", "different ones"]
    table = _table(*titles, *(["tokens", "padding"] if counted else []))
    for stage in found.stages:
        cells = [f"{stage.end - stage.start:,}", f"{stage.opened:,.1f}", f"{stage.shards:,}"]
        if stage.tokens is not None and stage.padding is not None:
            cells += [size(sum(stage.tokens), ""), f"{stage.padding:.2%}"]
        table.add_row(Text(stage.name), *cells)
    console.print(table)
    table = _table("source", "epochs in all", *(["tokens of a sample", "longest"] if counted else []))
    for name, epochs in zip(found.sources, found.epochs):
        cells = [f"{epochs:,.3f}"]
        if found.lengths is not None:
            cells += [f"{found.lengths[name].mean():,.1f}", f"{int(found.lengths[name].max()):,}"]
        table.add_row(Text(name), *cells)
    console.print(table)
