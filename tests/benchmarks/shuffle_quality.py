"""How well the two-level shuffle mixes against a full shuffle, and how many shards a rank opens with and without lanes.

Run: ``python -m tests.benchmarks.shuffle_quality [quality|opens]``; about a minute each, one core.

Quality: 1,000,000 samples in 100 shards, two epochs. Columns: rank correlation of an epoch's order with storage, and of two epochs' orders
(both have a standard deviation of 0.1 where only the 100 shards' order moves, so the bound is 4 / sqrt(shards)); the share of samples
whose storage neighbour is in the same batch of 1,024; distinct shards in a batch; how often two samples of a batch meet again in a
batch of the next epoch.

Opens: the mix 40.5 / 22.5 / 27 / 10 of four sources of 1,000 to 4,000 shards with 5,000 to 15,000 samples, 3,000 samples for each of
1,024 ranks (rank r reads the positions equal to r modulo 1,024), 32 files kept open by each. Then the same for packed rows of samples of
about 500 tokens (lognormal), of which rank r reads those equal to r modulo 1,024.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_megascale.data.packing import Packer, choose_groups
from lightning_megascale.data.schedule import Schedule, Stage
from lightning_megascale.data.shuffle import SourceOrder

BATCH, RANKS, LANES = 1024, 1024, 1024
MIX = {"text_only": 0.1, "llava": 0.405, "chart": 0.225, "doc": 0.27}


def quality_of(places: list[np.ndarray], shards: int) -> list[float]:
    """The five columns of two epochs' storage places (samples,) int64 in the order of their draws."""
    size = len(places[0])
    at = [np.argsort(order) for order in places]  # storage place -> draw
    batch = [draws // BATCH for draws in at]
    whole = places[0][: size // BATCH * BATCH].reshape(-1, BATCH)
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, BATCH, (2, 2000)), None
    second = (first[0] + 1 + rng.integers(0, BATCH - 1, 2000)) % BATCH
    met = [float((batch[1][row[first[0]]] == batch[1][row[second]]).mean()) for row in whole]
    distinct = float(np.mean([len(np.unique(row // (size // shards))) for row in whole]))
    return [
        float(np.corrcoef(at[0], np.arange(size))[0, 1]),
        float(np.corrcoef(at[0], at[1])[0, 1]),
        float((batch[0][1:] == batch[0][:-1]).mean()),
        distinct,
        float(np.mean(met)),
    ]


def quality(console: Console, size: int = 1_000_000, shards: int = 100) -> None:
    """Prints the table of the shuffle's quality."""
    schedule = Schedule([Stage("s", None, {"x": 0.405, "y": 0.595})])
    table = Table(title=f"Shuffle of {size:,} samples in {shards} shards; bound of the correlations {4 / shards**0.5:.2f}")
    for column in ("order", "storage", "between epochs", "neighbours in a batch", f"shards / {BATCH:,}", "pair meets again"):
        table.add_column(column, justify="left" if column == "order" else "right")
    orders: list[tuple[str, list[np.ndarray]]] = []
    rng = np.random.default_rng(1)
    orders.append(("full shuffle", [rng.permutation(size) for _ in range(2)]))
    for window, lanes in ((1 << 12, 1), (1 << 16, 1), (1 << 18, 1), (1 << 18, LANES), (1 << 20, LANES)):
        order = SourceOrder(0, [size // shards] * shards, 3, window, lanes, schedule.lane_positions)
        drawn = [order.many(epoch * size, size) for epoch in range(2)]
        orders.append(
            (f"window {window >> 10}K" + (f", {lanes:,} lanes" if lanes > 1 else ""), [s * (size // shards) + r for _, s, r in drawn])
        )
    for name, places in orders:
        figures = quality_of(places, shards)
        table.add_row(name, f"{figures[0]:+.4f}", f"{figures[1]:+.4f}", f"{figures[2]:.2e}", f"{figures[3]:.1f}", f"{figures[4]:.2e}")
    console.print(table)


def opens_of(files: np.ndarray, kept: int = 32) -> int:
    """Opens of a rank that reads these files (samples,) in turn and keeps the last ``kept`` open."""
    held: OrderedDict[int, None] = OrderedDict()
    opened = 0
    changes = np.concatenate([[True], files[1:] != files[:-1]])
    for file in files[changes].tolist():
        if file in held:
            held.move_to_end(file)
            continue
        opened += 1
        held[file] = None
        if len(held) > kept:
            held.popitem(last=False)
    return opened


def opens(console: Console, samples: int = 3000) -> None:
    """Prints the table of opened shards."""
    schedule = Schedule([Stage("mix", None, MIX)])
    rng = np.random.default_rng(5)
    sizes = [rng.integers(5_000, 15_001, shards) for shards in (1000, 2000, 3000, 4000)]
    _, sources, draws = schedule.window(0, samples * RANKS)
    counts = schedule.counts(samples * RANKS)
    table = Table(title=f"{RANKS:,} ranks, {samples:,} samples each")
    for column in ("order", "opens / 1,000 samples", "worst rank", f"shards / {BATCH:,} positions", "a window's plan, s"):
        table.add_column(column, justify="left" if column == "order" else "right")
    for lanes in (1, LANES):
        for window in (1 << 16, 1 << 18, 1 << 20):
            files, seconds, plans = np.empty(samples * RANKS, np.int64), 0.0, 0
            for source, count in enumerate(counts):
                order = SourceOrder(source, sizes[source], 3, window, lanes, schedule.lane_positions)
                begun = time.perf_counter()
                _, shards, _ = order.many(0, count)
                seconds, plans = seconds + time.perf_counter() - begun, plans + -(-count // window)
                files[sources == source] = shards + 10_000 * source
            opened = [opens_of(files[rank::RANKS]) * 1000 / samples for rank in range(RANKS)]
            distinct = np.mean([len(np.unique(files[start : start + BATCH])) for start in range(0, len(files), 50 * BATCH)])
            name = f"window {window >> 10}K" + (f", {lanes:,} lanes" if lanes > 1 else "")
            table.add_row(name, f"{np.mean(opened):.1f}", f"{max(opened):.1f}", f"{distinct:.0f}", f"{seconds / plans:.2f}")
    console.print(table)
    console.print(_packed_opens(schedule, sizes, samples))


def _packed_opens(schedule: Schedule, sizes: list[np.ndarray], samples: int) -> Table:
    table = Table(title=f"Packed rows, {RANKS:,} ranks, about {samples:,} samples each, shuffle window 256K")
    for column in ("rows", "window", "groups", "opens / 1,000 samples", "worst rank", "padding"):
        table.add_column(column, justify="left" if column == "rows" else "right")
    total = 1 << 21 if samples >= 2000 else 1 << 18
    _, sources, _ = schedule.window(0, total)
    lengths = np.clip(np.exp(np.random.default_rng(7).normal(5.8, 0.9, total)).astype(np.int64), 1, None)
    for capacity in (4096, 32768, 131072):
        for most in (1, LANES):
            window, groups = choose_groups(capacity, float(np.minimum(lengths, capacity).mean()), most)
            files = np.empty(total, np.int64)
            for source, count in enumerate(schedule.counts(total)):
                order = SourceOrder(source, sizes[source], 3, 1 << 18, groups, schedule.lane_positions)
                files[sources == source] = order.many(0, count)[1] + 10_000 * source
            packer = Packer(lambda start, count: lengths[start : start + count], window, capacity, total, seed=0, groups=groups)
            rows = [packer.sequence(state) for state in packer.take(0, total)[0]]
            opened = []
            for rank in range(min(RANKS, len(rows))):
                read = np.array([position for row in rows[rank::RANKS] for position in row])
                opened.append(opens_of(files[read]) * 1000 / len(read))
            padding = packer.padding(0, packer.windows or 0)
            cells = [f"{capacity:,}", f"{window:,}", str(groups), f"{np.mean(opened):.1f}", f"{max(opened):.1f}", f"{padding:.2%}"]
            table.add_row(*cells)
    return table


def main() -> None:
    """Prints both tables, or the one named."""
    console = Console(width=130)
    wanted = sys.argv[1:] or ["quality", "opens"]
    for name in wanted:
        {"quality": quality, "opens": opens}[name](console)


if __name__ == "__main__":
    main()
