"""Measured training runs from a CSV file as workload, cluster, stack and plan, and predictions of them back into one.

A row may leave any column out or empty; what is then assumed is said with the row. The columns are those of ``COLUMNS``; others are
not read. Two rules are not in a column's default: a row without ``iteration_time_s`` has that of its ``tokens_per_s_per_gpu``, and a row
whose name is known (``known_models``) has the sizes of that model where a column is empty.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lightning_megascale.planning.candidates import Candidates
from lightning_megascale.planning.known_models import Architecture, described, known
from lightning_megascale.planning.measured_software import Software, cluster_for, software_of
from lightning_megascale.planning.row_cells import Cells, Unpredictable, misspelt, read_table
from lightning_megascale.planning.row_plan import row_plan, row_stack
from lightning_megascale.planning.shape import ModelShape
from lightning_megascale.planning.stack import Stack
from lightning_megascale.planning.workload import Workload
from lightning_megascale.topology.cluster import Cluster

COLUMNS = ("row_id", "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "gated_ffn",
           "experts", "topk", "expert_ffn", "shared_experts", "first_dense_layers", "attention", "gpus", "gpu_type", "gpus_per_node",
           "global_batch", "micro_batch", "tp", "pp", "vpp", "cp", "ep", "dp", "zero", "fsdp_group", "recompute", "sequence_parallel",
           "precision", "iteration_time_s", "tokens_per_s_per_gpu", "memory_gb", "memory_unit", "oom", "notes", "source")  # fmt: skip

# Columns of published tables that say more of a run than is read; none of them is a misspelt one.
_NOT_READ = ("source_ref", "iteration_time_derived", "tflops_per_gpu", "mfu_pct", "hfu_pct", "from_memory")


@dataclass(frozen=True)
class MeasuredRow:
    """A run that can be predicted.

    Args:
        row_id: unique in its file; what stands before the colon names its data set.
        workload, cluster, candidates: what ran; ``candidates`` holds one plan.
        stack: facts and precision of the software; its constants are the assumed ones, to be replaced by fitted ones.
        seconds: measured, of one optimizer step; None: not given.
        memory_bytes: measured, of the fullest GPU.
        oom: it did not fit.
        assumed: what the row did not say.
    """

    row_id: str
    workload: Workload
    cluster: Cluster
    stack: Stack
    candidates: Candidates
    seconds: float | None
    memory_bytes: float | None
    oom: bool | None
    assumed: tuple[str, ...]

    @property
    def stack_name(self) -> str:
        """The software, whose constants are fitted together for each kind of GPU."""
        return self.stack.name

    @property
    def dataset(self) -> str:
        """What stands before the colon of the id."""
        return self.row_id.partition(":")[0]


@dataclass(frozen=True)
class RowFile:
    """What a file holds.

    Args:
        rows: that can be predicted, in order.
        reasons: id of each other row -> why it cannot.
        misspelt: name in the header that is not read -> the column it is close to, which the header lacks.
    """

    rows: list[MeasuredRow]
    reasons: dict[str, str]
    misspelt: dict[str, str]


def read_rows(path: str | Path) -> list[MeasuredRow]:
    """The rows of a file that can be predicted, in order; arguments and errors as ``read_row_file``."""
    return read_row_file(path).rows


def read_rows_and_reasons(path: str | Path) -> tuple[list[MeasuredRow], dict[str, str]]:
    """(rows in order, id of each other row -> reason); arguments and errors as ``read_row_file``."""
    found = read_row_file(path)
    return found.rows, found.reasons


def read_row_file(path: str | Path) -> RowFile:
    """The rows of a file that can be predicted, and why the others cannot.

    Args:
        path: a CSV file with a header.

    Raises:
        ValueError: with file, line and column: a cell that cannot be read, an id that is missing or stands twice; a header without
            row_id or with a column twice; a line longer than the header; or a file that cannot be read.
    """
    header, lines = read_table(path, COLUMNS)
    rows: list[MeasuredRow] = []
    reasons: dict[str, str] = {}
    seen: dict[str, int] = {}
    for line, values in lines:
        cells = Cells(str(Path(path)), line, values)
        row_id = cells.text("row_id")
        if row_id is None or row_id in seen:
            found = "is empty" if row_id is None else f"{row_id!r} stands on line {seen[row_id]} too"
            raise ValueError(f"{cells.file}, line {line}, column row_id: {found}; give each row an id of its own")
        seen[row_id] = line
        try:
            rows.append(_row(row_id, cells))
        except Unpredictable as error:
            reasons[row_id] = str(error)
    return RowFile(rows, reasons, misspelt((name for name in header if name not in _NOT_READ), COLUMNS))


def write_predictions(path: str | Path, predictions: Iterable[Mapping[str, Any]]) -> None:
    """A CSV of ``row_id, predicted_seconds, predicted_memory_gb, predicted_oom``.

    Args:
        path: of the file, which is replaced.
        predictions: for each row ``row_id`` and, where there are any, ``seconds``, ``memory_bytes`` (written in 2**30 bytes) and ``oom``.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as stream:
            _write(stream, predictions)
    except OSError as error:
        raise ValueError(f"out={path}: cannot be written: {error.strerror}; give a file in a folder that can") from None


def _write(stream: TextIO, predictions: Iterable[Mapping[str, Any]]) -> None:
    writer = csv.writer(stream)
    writer.writerow(("row_id", "predicted_seconds", "predicted_memory_gb", "predicted_oom"))
    for row in predictions:
        seconds, memory, oom = row.get("seconds"), row.get("memory_bytes"), row.get("oom")
        writer.writerow((
            row["row_id"],
            "" if seconds is None else f"{seconds:.6g}",
            "" if memory is None else f"{memory / 2**30:.6g}",
            "" if oom is None else int(oom),
        ))  # fmt: skip


def _row(row_id: str, cells: Cells) -> MeasuredRow:
    software, notes = software_of(row_id), (cells.text("notes") or "").lower()
    sizes = _sizes(cells, software)
    gpu, gpus, per_node = _machine(cells, software, sizes)
    architecture = _architecture(cells, software)
    if software.pads_vocabulary:
        unit = 128 * sizes["tp"]
        architecture = dataclasses.replace(architecture, vocab=-(-architecture.vocab // unit) * unit)
    length = cells.whole("seq_len") or cells.default("seq_len", 2048)
    plan = row_plan(cells, software, sizes, architecture, gpus, notes)
    batch = cells.whole("global_batch") or cells.default(
        "global_batch", sizes["dp"] * plan["microbatch_size"] * max(1, 4 * sizes["pp"] - 4)
    )
    step = sizes["dp"] * plan["microbatch_size"]
    if batch % step:
        raise Unpredictable(f"global_batch={batch} is no multiple of dp={sizes['dp']} x micro_batch={plan['microbatch_size']}")
    try:
        cluster = cluster_for(gpu, gpus, per_node, software)
        shape = architecture.shape(cells.text("model") or "unnamed", length)
    except ValueError as error:
        raise Unpredictable(str(error)) from None
    _compare_parameters(cells, shape)
    seconds, memory = _measured(cells, batch * length / gpus)
    return MeasuredRow(
        row_id=row_id,
        workload=Workload(shape, length, batch),
        cluster=cluster,
        stack=row_stack(cells, software, notes),
        candidates=Candidates.of([plan]),
        seconds=seconds,
        memory_bytes=memory,
        oom=cells.flag("oom"),
        assumed=tuple(cells.assumed),
    )


def _compare_parameters(cells: Cells, shape: ModelShape) -> None:
    """Notes a params_b that is more than 10% (chosen; names round) off the shape's; 1e9 parameters, all experts counted."""
    given, made = cells.positive("params_b"), shape.parameters / 1e9
    if given is not None and abs(given - made) > 0.1 * made:
        cells.assumed.append(f"params_b={given:g} and the shape makes {made:.3g}: the shape is taken")


def _measured(cells: Cells, tokens_per_gpu: float) -> tuple[float | None, float | None]:
    """(seconds of a step, bytes)."""
    seconds, rate, memory = cells.positive("iteration_time_s"), cells.positive("tokens_per_s_per_gpu"), cells.positive("memory_gb")
    unit = (cells.text("memory_unit") or "GiB").lower()
    if unit not in ("gib", "gb"):
        raise cells.wrong("memory_unit", unit, "GiB or GB")
    seconds = tokens_per_gpu / rate if seconds is None and rate else seconds
    return seconds, None if memory is None else memory * (2**30 if unit == "gib" else 1e9)


def _sizes(cells: Cells, software: Software) -> dict[str, int]:
    """tp, pp, cp, dp and ep; the last two may be worked out."""
    sizes = {name: cells.whole(name) or cells.default(name, 1) for name in ("tp", "pp", "cp")}
    model, gpus, dp = sizes["tp"] * sizes["pp"] * sizes["cp"], cells.whole("gpus"), cells.whole("dp")
    if dp is None:
        dp = (gpus or model) // model
        cells.assumed.append(f"dp={dp}: what tp x pp x cp leave of the GPUs")
    if not dp or (gpus is not None and gpus != model * dp):
        raise Unpredictable(f"gpus={gpus} are not tp={sizes['tp']} x pp={sizes['pp']} x cp={sizes['cp']} x dp={dp}")
    return {**sizes, "dp": dp, "gpus": model * dp}


# The beginning of a GPU's name without signs -> its sheet.
_GPU_NAMES = (("a10040", "a100_40gb"), ("a100", "a100"), ("h10096", "h100_96gb"), ("h100", "h100"), ("h800", "h800"), ("h200", "h200"),
              ("b200", "b200"), ("b300", "b300"), ("gb200", "gb200"), ("gb300", "gb300"))  # fmt: skip


def _machine(cells: Cells, software: Software, sizes: Mapping[str, int]) -> tuple[str, int, int]:
    """(sheet, GPUs, GPUs of a node)."""
    name = cells.text("gpu_type") or cells.default("gpu_type", software.gpu)
    plain = re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia"))
    gpu = next((sheet for start, sheet in _GPU_NAMES if plain.startswith(start)), None)
    if gpu is None:
        raise Unpredictable(f"gpu_type={name!r} is not known; there are {', '.join(sheet for _, sheet in _GPU_NAMES)}")
    per_node = cells.whole("gpus_per_node") or cells.default("gpus_per_node", 4 if gpu.startswith("gb") else 8)
    return gpu, sizes["gpus"], per_node


_ARCHITECTURE = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads", "ffn_hidden": "ffn_hidden",
                 "vocab": "vocab", "experts": "experts", "topk": "topk", "expert_ffn": "expert_ffn",
                 "shared_experts": "shared_experts", "first_dense_layers": "first_dense_layers"}  # fmt: skip


def _architecture(cells: Cells, software: Software) -> Architecture:
    """By the columns; what they leave open, by the model's name."""
    attention = (cells.text("attention") or "").lower()
    if "mamba" in attention or "linear" in attention:
        raise Unpredictable(f"attention={attention!r} is not modelled")
    zero = ("experts", "topk", "expert_ffn", "shared_experts", "first_dense_layers")
    found = {field: cells.whole(column, least=int(column not in zero)) for column, field in _ARCHITECTURE.items()}
    given: dict[str, Any] = {field: value for field, value in found.items() if value is not None}
    gated, name = cells.flag("gated_ffn"), cells.text("model") or ""
    if gated is not None:
        given["gated"] = gated
    base = known(name)
    if base is not None:
        missing = [field for field in ("layers", "hidden", "heads") if field not in given]
        if missing:
            cells.assumed.append(f"{', '.join(missing)}: of the model called {name}")
        if (given.get("hidden", base.hidden), given.get("heads", base.heads)) == (base.hidden, base.heads):
            return dataclasses.replace(base, **given)
    made = described(given, bias=software.bias, latent="mla" in attention)
    if made is None:
        raise Unpredictable(f"model={name!r} is not known, and its layers, hidden and heads are not all given")
    for field in ("kv_heads", "ffn_hidden", "vocab"):
        if field not in given:
            cells.assumed.append(f"{field}={getattr(made, field)}")
    return made
