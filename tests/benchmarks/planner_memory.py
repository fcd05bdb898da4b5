"""The planner's memory against published figures: torchtitan, SimuMax, and two tables of Korthikanti et al. 2022.

Run: ``python -m tests.benchmarks.planner_memory [rows]``; with ``rows`` every row is printed. PUBLISHED_RUNS names the folder of the files.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_megascale.planning.candidates import CHECKPOINTING, SHARDING, Candidates
from lightning_megascale.planning.known_models import known
from lightning_megascale.planning.measured_software import cluster_for, software_of
from lightning_megascale.planning.memory import Memory, memory, memory_by_rank
from lightning_megascale.planning.rows import MeasuredRow, read_rows
from lightning_megascale.planning.workload import Workload
from lightning_megascale.support import SCHEDULES
from tests.planning.published import FOLDER

GIB = 2**30
# Rows on which constants of memory were fitted: torchtitan's reserve (4, 8, 9, 31) and bytes of a logit whose vocabulary is split (11, 12);
# SimuMax's bytes of a weight's gradient.
FITTED = {
    "torchtitan": (4, 8, 9, 11, 12, 31),
    "simumax_b200": (2, 4, 9, 10, 11, 13, 14, 20, 22, 37, 38, 41, 42),
}
# Korthikanti et al. 2022, table 3: microbatch, global batch, stages of a rank.
_TABLE_3 = {"22B": (4, 4, 1, 8, 1), "175B": (1, 64, 3, 8, 8), "530B": (1, 280, 3, 8, 35), "1T": (1, 512, 1, 8, 64)}
_MODES = {"none": (False, None), "seq_par": (True, None), "selective": (False, "selective"), "seq_par+selective": (True, "selective"),
          "full": (False, "full")}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """One figure: of which table and row, in bytes (or per cent), and whether a constant was fitted on it."""

    table: str
    row: str
    measured: float
    predicted: float
    fitted: bool = False

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.measured - 1


def predicted(row: MeasuredRow) -> Memory:
    """Of a measured run."""
    return memory(row.workload, row.cluster, row.stack, row.candidates)


def of_rows(name: str, folder: Path = FOLDER) -> list[Found]:
    """Every row of a file that has a measured memory."""
    fitted = {f"{name}:{number}" for number in FITTED.get(name, ())}
    rows = [row for row in read_rows(folder / f"{name}.csv") if row.memory_bytes]
    return [Found(name, row.row_id, row.memory_bytes or 0.0, float(predicted(row).total[0]), row.row_id in fitted) for row in rows]


def korthikanti(model: str, sequence: bool, checkpointing: str | None, vocabulary: int = 51200) -> Memory:
    """The first pipeline rank of a model of their table 3."""
    micro, batch, virtual, tensor, pipeline = _TABLE_3[model]
    software = software_of("korthikanti2022")
    architecture = known(f"GPT-{model}")
    assert architecture is not None
    architecture = dataclasses.replace(architecture, vocab=vocabulary, learned=vocabulary > 8)
    workload = Workload(architecture.shape(model, 2048), 2048, batch)
    plan = Candidates.of([{
        "tp": tensor, "pp": pipeline, "stages_per_rank": virtual, "microbatch_size": micro, "sequence_parallel": sequence,
        "schedule": SCHEDULES.index("Interleaved1F1B" if virtual > 1 else "1F1B"), "sharding": SHARDING.index("none"),
        "checkpointing": CHECKPOINTING.index(checkpointing),
    }])  # fmt: skip
    cluster = cluster_for("a100", tensor * pipeline, 8, software)
    return memory_by_rank(workload, cluster, software.stack, plan)[0]


def of_korthikanti(folder: Path = FOLDER) -> list[Found]:
    """Figure 1 (states, activations) and figure 7 (activations of a block over those with nothing saved).

    Its states are 18 bytes x 12 L D^2 / (t p) to the last digit, so they leave the embedding out, as is done here. With it the first rank
    has 1.6% (22B) to 8.7% (1T) more.
    """
    found = []
    for row in _read(folder / "korthikanti2022_memory.csv"):
        mode = "seq_par+selective" if row["recompute"] == "seqpar+selective" else row["recompute"]
        held = korthikanti(row["model"], *_MODES[mode])
        blocks = korthikanti(row["model"], *_MODES[mode], vocabulary=8)
        states = float(blocks.parameters[0] + blocks.gradients[0] + blocks.optimizer[0])
        name = f"{row['model']} {mode}"
        found.append(Found("korthikanti figure 1, states", name, float(row["params_optimizer_gib"]) * GIB, states))
        found.append(Found("korthikanti figure 1, activations", name, float(row["activations_gib"]) * GIB, float(held.activations[0])))
    for row in _read(folder / "korthikanti2022_activation_pct.csv"):
        whole = float(korthikanti(row["model"], *_MODES["none"]).activations[0])
        for mode, how in list(_MODES.items())[1:]:
            share = 100 * float(korthikanti(row["model"], *how).activations[0]) / whole
            found.append(Found("korthikanti figure 7", f"{row['model']} {mode}", float(row[mode]), share))
    return found


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def all_found(folder: Path = FOLDER) -> list[Found]:
    """Of every table that is there."""
    found: list[Found] = []
    for name in ("torchtitan", "simumax_b200"):
        found += of_rows(name, folder) if (folder / f"{name}.csv").is_file() else []
    return found + (of_korthikanti(folder) if (folder / "korthikanti2022_memory.csv").is_file() else [])


def summary(found: Iterable[Found]) -> list[dict[str, float | str | int]]:
    """For each table, fitted rows and others apart: n, mean of the absolute errors, mean error, spread and largest, all in per cent."""
    groups: dict[tuple[str, bool], list[float]] = {}
    for each in found:
        groups.setdefault((each.table, each.fitted), []).append(100 * each.error)
    lines: list[dict[str, float | str | int]] = []
    for (table, fitted), values in groups.items():
        errors = np.array(values)
        lines.append({
            "table": table, "rows": "fitted" if fitted else "test", "n": len(errors), "mean": float(np.abs(errors).mean()),
            "bias": float(errors.mean()), "spread": float(errors.std()), "largest": float(np.abs(errors).max()),
        })  # fmt: skip
    return lines


def main(arguments: list[str]) -> None:
    found, console = all_found(), Console(width=140)
    if "rows" in arguments:
        table = Table("table", "row", "measured", "predicted", "error %", "fitted")
        for each in found:
            scale = 1.0 if "figure 7" in each.table else GIB
            cells = (f"{each.measured / scale:.2f}", f"{each.predicted / scale:.2f}", f"{100 * each.error:+.1f}")
            table.add_row(each.table, each.row, *cells, "yes" if each.fitted else "")
        console.print(table)
    table = Table("memory", "rows", "n", "mean |error| %", "mean error %", "spread", "largest")
    for line in summary(found):
        table.add_row(str(line["table"]), str(line["rows"]), str(line["n"]),
                      *(f"{line[name]:.2f}" for name in ("mean", "bias", "spread", "largest")))  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
