"""Padding of packed sequences at 4K, 32K and 128K tokens: greedy streams against windows planned by best-fit decreasing.

Run: ``python -m tests.benchmarks.packing_padding``. Lengths are log-normal with seed 0, at least 8 sequences' worth of our windows; longer
samples count as a sequence, as they are cut to one. Next-fit keeps one sequence open, first-fit 16: what a loader can do that
packs what comes along. Seconds to plan a window are medians of 7, of one process.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_megascale.data.packing import Packer, choose_groups, choose_window, plan_window

CAPACITIES = (4096, 32768, 131072)
MEDIANS = (403, 1808, 13360)  # e^6, e^7.5, e^9.5 tokens
SIGMA = 1.0
SAMPLES = 131072
REPEATS = 7


def greedy(lengths: list[int], capacity: int, opened: int) -> int:
    """Sequences of a stream that keeps ``opened`` of them open and puts a sample into the first that holds it; the oldest is closed."""
    spaces: list[int] = []
    made = 0
    for length in lengths:
        for place, space in enumerate(spaces):
            if space >= length:
                spaces[place] -= length
                break
        else:
            made += 1
            spaces.append(capacity - length)
            if len(spaces) > opened:
                spaces.pop(0)
    return made


def main() -> None:
    columns = ("tokens of a sequence", "median sample", "cut", "next-fit", "first-fit, 16 open", "ours", "window", "sequences", "plan, ms")
    columns += ("ours, by lanes", "groups")
    table = Table(*columns, title="padding, % of all tokens")
    for capacity in CAPACITIES:
        for median in MEDIANS:
            drawn = np.random.default_rng(0).lognormal(np.log(median), SIGMA, 8 * SAMPLES).astype(np.int64) + 1
            window = choose_window(capacity, float(np.minimum(drawn, capacity).mean()))
            count = max(SAMPLES, 8 * window)
            lengths = np.minimum(drawn[:count], capacity)
            tokens, plain = int(lengths.sum()), lengths.tolist()
            packer = Packer(lambda start, size, of=lengths: of[start : start + size], window, capacity, count)
            assert packer.windows is not None
            ours = packer.padding(0, packer.windows)
            seconds = []
            for number in range(REPEATS):
                part = lengths[number * window : (number + 1) * window]
                start = time.perf_counter()
                plan_window(part, capacity, 0, number)
                seconds.append(time.perf_counter() - start)
            wide, groups = choose_groups(capacity, float(np.minimum(drawn, capacity).mean()), 1024)
            count = max(count, 2 * wide)
            longer = np.minimum(np.resize(drawn, count), capacity)
            laned = Packer(lambda start, size, of=longer: of[start : start + size], wide, capacity, count, groups=groups)
            others = [1 - tokens / (greedy(plain, capacity, opened) * capacity) for opened in (1, 16)]
            cut = float((drawn[:count] > capacity).mean())
            table.add_row(
                f"{capacity:,}",
                f"{median:,}",
                f"{cut:.1%}",
                *(f"{100 * share:.2f}" for share in (*others, ours)),
                f"{window:,}",
                f"{packer.count() / packer.windows:.0f}",
                f"{1000 * statistics.median(seconds):.1f}",
                f"{100 * laned.padding(0, 2):.2f}",
                str(groups),
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
