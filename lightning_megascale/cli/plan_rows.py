"""``megascale plan rows=FILE.csv``: predicts measured runs, writes the predictions and prints how far they are off."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_megascale.cli.errors import UserError
from lightning_megascale.planning.accuracy import Errors, Ranking
from lightning_megascale.planning.estimates import Estimate, estimate
from lightning_megascale.planning.rows import MeasuredRow, read_rows_and_reasons, write_predictions
from lightning_megascale.planning.stacks import with_constants

_KEYS = ("rows", "out")


def predict(own: Mapping[str, str], overrides: Sequence[str]) -> int:
    """The mode ``rows=``.

    Args:
        own: rows, and out where the predictions are to be written.
        overrides: of keys that belong to a search; none may be given.

    Raises:
        UserError: for keys of a search, or a file that cannot be read.
    """
    others = [*overrides, *(f"{key}={value}" for key, value in own.items() if key not in _KEYS)]
    if others:
        raise UserError(f"{', '.join(others)}: rows=FILE takes model, GPUs and plan from the file, and only out=FILE beside it")
    rows, reasons = read_rows_and_reasons(own["rows"])
    found = [(row, predicted(row)) for row in rows]
    console = Console(highlight=False, width=None if Console().is_terminal else 140)
    if found:
        console.print(_error_table(found))
        _print_rankings(console, found)
        _print_decisions(console, found)
    for reason, count in Counter(reasons.values()).most_common():
        console.print(f"{count} row{'s'[: count != 1]} not predicted: {reason}", markup=False, soft_wrap=True)
    assumed = Counter(text.partition(":")[0] for row in rows for text in row.assumed)
    for text, count in assumed.most_common(8):
        console.print(f"assumed for {count} rows: {text}", markup=False, soft_wrap=True)
    if not found:
        raise UserError(f"rows={own['rows']}: no row can be predicted")
    if "out" in own:
        write_predictions(own["out"], [_written(row, guess) for row, guess in found] + [{"row_id": row_id} for row_id in reasons])
        console.print(f"wrote {own['out']}: memory in GiB", markup=False)
    return 0


def predicted(row: MeasuredRow) -> Estimate:
    """What the planner says of a measured row, with the constants of its software on its GPU."""
    stack = with_constants(row.stack, row.cluster.gpu.name)
    return estimate(row.workload, row.cluster, row.candidates, stack=stack)


def _written(row: MeasuredRow, guess: Estimate) -> dict[str, Any]:
    return {"row_id": row.row_id, "seconds": guess.step_seconds, "memory_bytes": guess.memory_bytes, "oom": not guess.fits}


def _error_table(found: Sequence[tuple[MeasuredRow, Estimate]]) -> Table:
    """Errors of step time and of memory, for each data set."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rows of")
    table.add_column("what")
    for name in ("n", "mean error %", "median", "worst", "spread", "bias"):
        table.add_column(name, justify="right")
    sets = list(dict.fromkeys(row.dataset for row, _ in found))
    for name in [*sets, *(["all"] if len(sets) > 1 else [])]:
        chosen = [(row, guess) for row, guess in found if name in (row.dataset, "all")]
        times = [(guess.step_seconds, row.seconds) for row, guess in chosen if row.seconds and not row.oom]
        sizes = [(guess.memory_bytes, row.memory_bytes) for row, guess in chosen if row.memory_bytes]
        for what, pairs in (("step time", times), ("memory", sizes)):
            if pairs:
                errors = Errors.of([guess for guess, _ in pairs], [real for _, real in pairs])
                figures = (errors.mean, errors.median, errors.worst, errors.spread, errors.bias)
                table.add_row(name, what, str(errors.count), *(f"{value:.2f}" for value in figures))
    return table


def _print_rankings(console: Console, found: Sequence[tuple[MeasuredRow, Estimate]]) -> None:
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for row, guess in found:
        if row.seconds and not row.oom:
            work = row.workload
            key = (row.dataset, work.model.name, guess.gpus, work.global_batch_size, work.sequence_length, row.cluster.gpu.name)
            groups[key].append((guess.step_seconds, row.seconds))
    for dataset in dict.fromkeys(key[0] for key in groups):
        ranking = Ranking.of({key: pairs for key, pairs in groups.items() if key[0] == dataset})
        if ranking is not None:
            text = f"tau {ranking.tau:.2f}, regret of the first {ranking.regret:.2f}% (worst {ranking.worst_regret:.2f}%)"
            console.print(f"{dataset}: ranking in {ranking.groups} groups of equal model, GPUs and batch: {text}", markup=False)


def _print_decisions(console: Console, found: Sequence[tuple[MeasuredRow, Estimate]]) -> None:
    known = [(bool(row.oom), not guess.fits) for row, guess in found if row.oom is not None or row.memory_bytes]
    if known:
        failed = [guess for real, guess in known if real]
        ran = [guess for real, guess in known if not real]
        text = f"{sum(failed)} of {len(failed)} that did not fit are refused, {sum(ran)} of {len(ran)} that ran are"
        console.print(f"out of memory: {text}", markup=False)
