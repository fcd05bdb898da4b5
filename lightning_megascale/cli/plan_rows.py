"""``megascale plan rows=FILE.csv``: predicts measured runs, writes the predictions and prints how far they are off."""

from __future__ import annotations

import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_megascale.cli.errors import UserError
from lightning_megascale.planning.accuracy import Errors, Ranking
from lightning_megascale.planning.estimates import Estimate, estimate
from lightning_megascale.planning.rows import MeasuredRow, RowFile, read_row_file, write_predictions
from lightning_megascale.planning.stacks import with_constants

_KEYS = ("rows", "out")


def predict(own: Mapping[str, str], overrides: Sequence[str]) -> int:
    """The mode ``rows=``.

    Args:
        own: rows, and out where the predictions are to be written.
        overrides: of keys that belong to a search; none may be given.

    Raises:
        UserError: for keys of a search, or an out that cannot be written or is the file of rows.
        ValueError: for a file that cannot be read.
    """
    others = [*overrides, *(f"{key}={value}" for key, value in own.items() if key not in _KEYS)]
    if others:
        raise UserError(f"{', '.join(others)}: rows=FILE takes model, GPUs and plan from the file, and only out=FILE beside it")
    if not own["rows"].strip():
        raise UserError("rows= is empty; give rows=FILE.csv")
    if "out" in own:
        _check_out(own["out"], own["rows"])
    file = read_row_file(own["rows"])
    found = [(row, predicted(row)) for row in file.rows]
    console = Console(highlight=False, width=None if Console().is_terminal else 140)
    for name, column in file.misspelt.items():
        console.print(f"warning: column {name} is not read; did you mean {column}?", markup=False, soft_wrap=True)
    if found:
        errors = _error_table(found)
        if errors.row_count:
            console.print(errors)
        else:
            _print_predictions(console, found)
        _print_rankings(console, found)
        _print_decisions(console, found)
    _print_notes(console, file)
    if not found:
        raise UserError(f"rows={own['rows']}: no row can be predicted")
    if "out" in own:
        write_predictions(own["out"], [_written(row, guess) for row, guess in found] + [{"row_id": row_id} for row_id in file.reasons])
        console.print(f"wrote {own['out']}: memory in GiB", markup=False)
    return 0


def _check_out(out: str, rows: str) -> None:
    """Refuses before any work what could not be written after it, or would replace the input; leaves nothing behind."""
    path = Path(out)
    if path.is_symlink() and not path.exists():
        path = Path(os.path.realpath(path))  # what is not there yet is made where the link points
    if not out.strip():
        raise UserError("out= is empty; give out=FILE.csv")
    if path.is_dir():
        raise UserError(f"out={out}: is a folder; give a file in it")
    if path.exists() and Path(rows).exists() and path.samefile(rows):
        raise UserError(f"out={out}: is the file of rows={rows}, which holds the measurements; give another file")
    if not path.parent.is_dir():
        raise UserError(f"out={out}: there is no folder {path.parent}; make it, or give another file")
    try:  # a trial tells more than the permission bits: a file system may be mounted to be read only
        if path.exists():
            os.close(os.open(path, os.O_WRONLY))
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"out={out}: cannot be written: {error.strerror}; give a file in a folder that can") from None


def _print_notes(console: Console, file: RowFile) -> None:
    """What was not predicted and why, and what was assumed."""
    groups: dict[str, list[str]] = defaultdict(list)
    for row_id, reason in file.reasons.items():
        groups[reason].append(row_id)
    for reason, ids in sorted(groups.items(), key=lambda item: -len(item[1])):
        console.print(f"{_count(ids)} not predicted ({_first(ids)}): {reason}", markup=False, soft_wrap=True)
    differ: dict[str, list[str]] = defaultdict(list)
    for row in file.rows:
        for text in row.assumed:
            if text.startswith("params_b="):
                differ[text].append(row.row_id)
    for text, ids in differ.items():
        console.print(f"{text} ({_count(ids)}: {_first(ids)})", markup=False, soft_wrap=True)
    assumed = Counter(text.partition(":")[0] for row in file.rows for text in row.assumed if text not in differ)
    for text, count in assumed.most_common(8):
        console.print(f"assumed for {count} row{'s'[: count != 1]}: {text}", markup=False, soft_wrap=True)


def _count(ids: Sequence[str]) -> str:
    return f"{len(ids)} row{'s'[: len(ids) != 1]}"


def _first(ids: Sequence[str], most: int = 5) -> str:
    return ", ".join(ids[:most]) + (f" and {len(ids) - most} more" if len(ids) > most else "")


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


def _print_predictions(console: Console, found: Sequence[tuple[MeasuredRow, Estimate]], most: int = 20) -> None:
    """The first ``most`` predictions, for a file that has nothing to compare them with."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("row_id", "predicted seconds", "GB a GPU", "fits"):
        table.add_column(name, justify="left" if name == "row_id" else "right", overflow="fold")
    for row, guess in found[:most]:
        fits = "yes" if guess.fits else "no"
        table.add_row(Text(row.row_id), f"{guess.step_seconds:.4g}", f"{guess.memory_bytes / 1e9:.1f}", fits)
    console.print("no row has a measured time of a run that fit, or a memory: only predictions", markup=False)
    console.print(table)
    if len(found) > most:
        console.print(f"and {len(found) - most} more; out=FILE.csv writes all of them", markup=False)


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
