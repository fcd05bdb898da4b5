"""The table of ``megascale plan``: what is trained and where, the best plans, where their time goes, and what ruled the others out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_megascale.cli.arguments import size
from lightning_megascale.planning.candidates import CHECKPOINTING, METHODS, SHARDING
from lightning_megascale.support import SCHEDULES

if TYPE_CHECKING:
    from lightning_megascale.planning.estimates import Estimate
    from lightning_megascale.planning.search import SearchResult

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


def show(result: SearchResult, assumed: Sequence[str], given: Estimate | None = None, ignored: Sequence[str] = ()) -> None:
    """Prints the answer.

    Args:
        result: of the search.
        assumed: keys that nobody gave, with the values taken.
        given: a plan to be shown as it is written.
        ignored: fields that no estimate depends on.
    """
    console = Console(highlight=False, width=None if Console().is_terminal else 170)
    ignored = [*ignored, *(given.not_modelled if given is not None else ())]
    for name, text in _header(result, assumed) + ([("ignored", f"not modelled: {', '.join(dict.fromkeys(ignored))}")] if ignored else []):
        console.print(f"{name:<9}{text}", markup=False, soft_wrap=True)
    if given is not None:
        console.print(_table([given], "the plan as written"))
        verdict = "fits" if given.fits else f"does not fit: a GPU has {given.setting.memory_bytes / 1e9:.1f} GB"
        parts = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in given.memory.row().items() if value >= 5e7)
        console.print(f"needs {given.memory_bytes / 1e9:.1f} GB ({parts}) and {verdict}", markup=False, soft_wrap=True)
    if not result.best:
        return
    console.print(_table(result.best, None))
    if given is not None and not given.fits:
        console.print("the plan as written cannot run: it needs more memory than there is", markup=False)
    elif given is not None:
        ratio = given.goodput.seconds_per_useful_step / result.best[0].goodput.seconds_per_useful_step
        console.print(f"the best plan needs {1 / ratio:.2f} of the time of the plan as written, for the same useful steps", markup=False)
    console.print("\nwhat ruled the others out:", markup=False)
    for reason, count in list(result.rejected.items())[:10]:
        console.print(f"  {count:>10,}  {reason}", markup=False, soft_wrap=True)


def _header(result: SearchResult, assumed: Sequence[str]) -> list[tuple[str, str]]:
    setting = result.setting
    work, cluster = setting.workload, setting.cluster
    model = work.model
    active = f" ({size(model.active_parameters, '')} active)" if model.active_parameters != model.parameters else ""
    failures = f"{cluster.failures_per_1000_node_days:g} failures per 1,000 node-days"
    rows = [
        ("model", f"{model.name}, {size(model.parameters, '')} parameters{active}, {len(model.layers)} blocks"),
        ("batch", f"{work.global_batch_size:,} rows of {work.sequence_length:,} tokens a step, {setting.stack.precision.name}"),
        ("cluster", f"{cluster.name}: {result.gpus:,} {cluster.gpu.name}, {setting.memory_bytes / 1e9:.1f} GB a GPU, {failures}"),
        ("stack", f"{setting.stack.name}: {setting.stack.source}"),
        ("searched", f"{result.considered:,} combination{'s'[: result.considered != 1]}"),
    ]
    return rows + ([("assumed", ", ".join(assumed))] if assumed else [])


def _table(plans: Sequence[Estimate], title: str | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("plan", no_wrap=True)
    for name in ("micro", "saves", "GB", "s/step", "tokens/s", "MFU", "comp.", "comm.", "bubble", "stor.", "goodput", "s/useful"):
        table.add_column(name, justify="right" if name != "saves" else "left")
    for plan in plans:
        shares = plan.shares
        cells = [
            axes(plan), str(int(plan.candidates.microbatch_size[0])), _saves(plan), f"{plan.memory_bytes / 1e9:.1f}",
            f"{plan.step_seconds:.3g}", size(plan.tokens_per_second, ""), f"{plan.mfu:.1%}", f"{shares['compute']:.1%}",
            f"{shares['communication']:.1%}", f"{shares['bubble']:.1%}", f"{shares['storage']:.1%}", f"{plan.goodput.share:.1%}",
            f"{plan.goodput.seconds_per_useful_step:.3g}",
        ]  # fmt: skip
        table.add_row(*cells)
    table.caption = (
        "MFU: nothing recomputed, attention's causal half. Shares are of wall time; communication is what nothing hides.\n"
        "saves: recomputed blocks; reshard: parameters freed after each use; reduce: gradients reduced after each microbatch"
    )
    table.caption_justify = "left"
    return table


def axes(plan: Estimate) -> str:
    """The sizes above 1 and the schedule in short: "pp8 (Interleaved1F1B x2) dp_shard16 tp8"."""
    columns = {name: int(column[0]) for name, column in plan.candidates.columns().items()}
    parts = [f"{name}{columns[name]}" for name in _AXES if columns[name] > 1] or ["one rank"]
    if columns["sequence_parallel"]:
        parts[parts.index(f"tp{columns['tp']}")] += "+sp"
    if columns["cp"] > 1:
        parts.insert(parts.index(f"cp{columns['cp']}") + 1, f"({METHODS[columns['method']]})")
    if columns["pp"] > 1:
        stages = f" x{columns['stages_per_rank']}" if columns["stages_per_rank"] > 1 else ""
        parts.insert(1, f"({SCHEDULES[columns['schedule']]}{stages})")
    return " ".join(parts)


def _saves(plan: Estimate) -> str:
    """What is done to save memory: recomputation, resharding, early reduction."""
    columns = {name: int(column[0]) for name, column in plan.candidates.columns().items()}
    parts = [str(CHECKPOINTING[columns["checkpointing"]])] if columns["checkpointing"] else []
    parts += ["reshard"] if SHARDING[columns["sharding"]] == "parameters" else []
    parts += ["reduce"] if columns["reduce_every"] else []
    return "+".join(parts) or "-"
