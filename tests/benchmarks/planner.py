"""Step times and memory of the planner against published runs: `python -m tests.benchmarks.planner` prints tables, `... fit` fits anew.

Constants are fitted on the rows of tests/planning/published_split.py and on no other; the table tests the rest. MEASURED_RUNS names the
folder with the CSV files, ../shared/published beside the checkout is the default.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from lightning_megascale.planning.candidates import CHECKPOINTING, Candidates
from lightning_megascale.planning.rows import MeasuredRow, read_rows
from lightning_megascale.planning.stacks import CONSTANTS, from_sheet, with_constants
from lightning_megascale.planning.step_time import step_time
from tests.benchmarks import planner_memory
from tests.planning.published_split import FITTED_ROWS

FOLDER = Path(os.environ.get("MEASURED_RUNS", Path(__file__).resolve().parents[3] / "shared" / "published"))
TABLES = ("vtrain_multi_a100", "vtrain_single_a100", "mosaic_llm_foundry", "torchtitan", "korthikanti2022_a100", "megatron_sc21_a100",
          "nemo_megatron_bridge", "simumax_b200", "nemo_automodel_h100", "megatron_moe_modelzoo")  # fmt: skip
# Constant -> (least, most, spread): a fit may not leave the range, and each constant is pulled a little to what the sheet leads to expect.
PRIOR = 0.02  # what a constant one spread away costs, as an error of one row
RANGES = {
    "matmul_efficiency": (0.3, 0.95, 0.15),
    "small_dtype_efficiency": (0.3, 1.0, 0.15),
    "attention_efficiency": (0.1, 0.9, 0.2),
    "memory_efficiency": (0.3, 0.95, 0.2),
    "kernel_seconds": (1e-6, 8e-5, 3e-5),
    "nvlink_efficiency": (0.3, 0.95, 0.15),
    "network_efficiency": (0.2, 0.95, 0.2),
    "hidden_share": (0.0, 1.0, 0.25),
}


def tables() -> dict[str, list[MeasuredRow]]:
    """Table -> rows with a time."""
    return {
        name: [row for row in read_rows(FOLDER / f"{name}.csv") if row.seconds] for name in TABLES if (FOLDER / f"{name}.csv").is_file()
    }


def is_fitted(row: MeasuredRow) -> bool:
    return int(row.row_id.partition(":")[2]) in FITTED_ROWS.get(row.dataset, ())


def join(rows: list[Candidates]) -> Candidates:
    """Plans of several as one."""
    return Candidates(**{name: np.concatenate([plans.columns()[name] for plans in rows]) for name in rows[0].columns()})


class Runs:
    """Rows in groups that one call predicts."""

    def __init__(self, rows: list[MeasuredRow]) -> None:
        self.measured = np.array([row.seconds for row in rows])
        groups: dict[tuple, list[int]] = defaultdict(list)
        for place, row in enumerate(rows):
            groups[row.workload, id(row.cluster), row.stack].append(place)
        self.groups = [(rows[places[0]], join([rows[place].candidates for place in places]), places) for places in groups.values()]

    def predict(self, constants: dict[str, float] | None = None) -> np.ndarray:
        """Seconds; of the given constants, or of those that stand in the package."""
        out = np.empty(len(self.measured))
        for row, plans, places in self.groups:
            known = with_constants(row.stack, row.cluster.gpu.name)
            stack = known if constants is None else dataclasses.replace(from_sheet(row.stack, row.cluster.gpu.name), **constants)
            out[places] = step_time(row.workload, row.cluster, stack, plans).total
        return out


def fit(rows: list[MeasuredRow]) -> dict[str, float]:
    """Constants of one stack on one GPU: least absolute errors of logarithms (soft), each pulled a little to what is expected."""
    from scipy.optimize import least_squares

    runs = Runs(rows)
    names = [
        name for name in RANGES if name != "small_dtype_efficiency" or any("float8" in row.stack.precision.matmul_dtype for row in rows)
    ]
    low, high, spread = (np.array([RANGES[name][part] for name in names]) for part in range(3))
    expected = from_sheet(rows[0].stack, rows[0].cluster.gpu.name)
    middle = np.array([getattr(expected, name) for name in names])
    weight = np.array([1 / sum(other.dataset == row.dataset for other in rows) for row in rows])
    weight = np.sqrt(weight / weight.mean())

    def residuals(scaled: np.ndarray) -> np.ndarray:
        values = low + scaled * (high - low)
        error = np.log(runs.predict(dict(zip(names, values, strict=True))) / runs.measured)
        return np.concatenate([weight * error, PRIOR * (values - middle) / spread])

    start = (middle - low) / (high - low)
    best = least_squares(residuals, start, bounds=(0, 1), loss="soft_l1", f_scale=0.05, diff_step=0.03, max_nfev=20, ftol=1e-3)
    values = low + best.x * (high - low)
    moved = abs(values - middle) > 0.05 * spread  # else no row speaks of it
    return {name: float(f"{value:.3g}") for name, value, kept in zip(names, values, moved, strict=True) if kept}


def stacks(found: dict[str, list[MeasuredRow]]) -> dict[tuple[str, str], list[MeasuredRow]]:
    """(Stack, GPU) -> rows that its constants are fitted on."""
    groups: dict[tuple[str, str], list[MeasuredRow]] = defaultdict(list)
    for row in itertools.chain(*found.values()):
        if is_fitted(row):
            groups[row.stack.name, row.cluster.gpu.name].append(row)
    return groups


def baseline(rows: list[MeasuredRow], fitted: list[MeasuredRow]) -> np.ndarray:
    """Seconds by one efficiency for each stack and GPU, the geometric mean over ``fitted``: FLOPs of model and full recompute over peak."""

    def ideal(row: MeasuredRow) -> float:
        flops = row.workload.flops_per_step()
        full = CHECKPOINTING[int(row.candidates.checkpointing[0])] == "full"
        dtype = row.stack.precision.matmul_dtype
        peak = row.cluster.gpu.peak_flops_per_s(dtype if dtype in row.cluster.gpu.peak_tflops else "bfloat16")
        return (flops.total + full * flops.forward) / peak / row.cluster.num_gpus

    key = {(row.stack.name, row.cluster.gpu.name): [] for row in rows}
    for row in fitted:
        key.setdefault((row.stack.name, row.cluster.gpu.name), []).append(np.log(row.seconds / ideal(row)))
    every = np.mean([value for values in key.values() for value in values]) if fitted else np.log(2)
    mean = {name: np.mean(values) if values else every for name, values in key.items()}
    return np.array([ideal(row) * np.exp(mean[row.stack.name, row.cluster.gpu.name]) for row in rows])


def percent(predicted: np.ndarray, measured: np.ndarray) -> str:
    """Mean absolute error, median, worst, spread of errors and bias, all in percent."""
    error = 100 * (predicted / measured - 1)
    return f"{abs(error).mean():7.2f} {np.median(abs(error)):7.2f} {abs(error).max():7.1f} {error.std():7.2f} {error.mean():+7.2f}"


def ranking(rows: list[MeasuredRow], predicted: np.ndarray) -> list[tuple[str, int, float, float]]:
    """(Group, plans, Kendall's tau, regret of the first pick) of rows with equal model, GPUs and batch."""
    groups: dict[tuple, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        groups[row.workload.model.name, row.cluster.num_gpus, row.workload.global_batch_size].append(place)
    out = []
    for (model, gpus, _), places in groups.items():
        if len(places) < 3:
            continue
        real, guess = np.array([rows[place].seconds for place in places]), predicted[places]
        pairs = [np.sign(real[a] - real[b]) * np.sign(guess[a] - guess[b]) for a, b in itertools.combinations(range(len(places)), 2)]
        out.append((f"{model} on {gpus}", len(places), float(np.mean(pairs)), float(real[guess.argmin()] / real.min() - 1)))
    return out


def table() -> None:
    """Prints everything."""
    found = tables()
    print("errors in %; 'one number': the baseline, one efficiency for each stack and GPU; 'sheet': no constant fitted")
    print(f"{'':30} {'fit':>4} {'test':>4}  mean|e| median   worst  spread    bias   one number  sheet  fitted rows")
    sheet_all = []
    for name, rows in found.items():
        fitted, rest = [row for row in rows if is_fitted(row)], [row for row in rows if not is_fitted(row)]
        for gpu in ["", *sorted({row.cluster.gpu.name for row in rows})] if len({row.cluster.gpu.name for row in rows}) > 1 else [""]:
            some = [row for row in rest if not gpu or row.cluster.gpu.name == gpu]
            kept = [row for row in fitted if not gpu or row.cluster.gpu.name == gpu]
            if not some:
                continue
            runs = Runs(some)
            sheet = runs.predict({})
            if not gpu:
                sheet_all += list(abs(sheet / runs.measured - 1))
            fit_error = abs(Runs(kept).predict() / Runs(kept).measured - 1).mean() * 100 if kept else float("nan")
            naive = abs(baseline(some, fitted) / runs.measured - 1).mean() * 100
            print(f"{name + ' ' + gpu:31} {len(kept):3} {len(some):4} {percent(runs.predict(), runs.measured)}   {naive:7.2f} "
                  f"{abs(sheet / runs.measured - 1).mean() * 100:7.2f}   {fit_error:7.2f}")  # fmt: skip
    print(f"sheet only, test rows pooled: {100 * np.mean(sheet_all):.2f}")
    rows = found.get("vtrain_multi_a100", [])
    print("ranking, vtrain_multi_a100 (tau, regret of the first pick in %)")
    found_ranks = ranking(rows, Runs(rows).predict()) if rows else []
    for group, count, tau, regret in found_ranks:
        print(f"  {group:24} {count:3} {tau:6.2f} {100 * regret:6.2f}")
    if found_ranks:
        tau, regret = (np.mean([one[place] for one in found_ranks]) for place in (2, 3))
        print(f"  {'mean of groups':28} {tau:6.2f} {100 * regret:6.2f}")


def fit_all() -> None:
    """Prints constants as they stand in planning/stacks.py."""
    for (name, gpu), rows in stacks(tables()).items():
        found = fit(rows)
        print(f'    ("{name}", "{gpu}"): ({", ".join(f"{found[key]:g}" if key in found else "None" for key in CONSTANTS)}),')


def main(arguments: list[str]) -> None:
    """Fits, or prints the tables of step time and of memory."""
    if arguments == ["fit"]:
        fit_all()
        return
    table()
    planner_memory.main([])


if __name__ == "__main__":
    main(sys.argv[1:])
