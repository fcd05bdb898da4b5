"""``megascale dryrun recipe=dense_175b``: a run of any size on ranks that do not exist, for its bytes, operations, traffic and memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from lightning_megascale.cli import config, prepare, train, values
from lightning_megascale.cli.errors import USER_ERROR_EXIT_CODE, UserError, explain, wants_traceback
from lightning_megascale.cli.setting import cluster_of
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.planning.plan_file import read_plan

if TYPE_CHECKING:
    from lightning_megascale.verification.dryrun.result import DryRun, StageTrace
    from lightning_megascale.verification.dryrun.subject import Subject

USAGE = """megascale dryrun [recipe=NAME] [key=value ...] [--full] [--schedule]

  Takes the arguments of megascale train and runs the same code on ranks that do not exist: torch's fake
  process group, tensors without storage. Prints, for each distinct stage of the pipeline, the bytes of
  parameters, gradients and optimizer, FLOPs, the bytes of each axis' messages, groups of a rank, and the
  peak of memory; and fails where the planner's bytes or FLOPs are more than 5% off (peaks are shown).

  The number of ranks is launch.ranks=N; or what the plan's sizes make, where it gives
  data_parallel_size or data_parallel_shard_size as a number; or the GPUs of cluster=NAME.

  --full                    traces all layers and microbatches instead of extending two and three
  --schedule                prints what each traced rank does in which order
  --config-dir FOLDER       as for megascale train

  Exit code: 0, 1 where planner and dry run disagree, 2 for a run that cannot be."""

_GB = 1e9
NOTES = (
    "TFLOP of one rank in one step: two for a multiplication and an addition; attention over the pairs that causality leaves, five "
    "products in its backward. Every expert is given as many tokens, and eight ranks share a node"
)


@dataclass(frozen=True)
class Arguments:
    """What was asked for: ``overrides`` are those of ``megascale train``."""

    overrides: list[str]
    folders: tuple[str, ...] = ()
    full: bool = False
    schedule: bool = False


def main(arguments: list[str] | None = None) -> int:
    """Runs dry, prints, and returns the exit code.

    Args:
        arguments: what follows ``megascale dryrun``; None: this process's command line, which then also ends with the code.
    """
    code = _run(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and code:
        raise SystemExit(code)
    return code


def _run(arguments: list[str]) -> int:
    if any(argument in ("--help", "-h", "help") for argument in arguments):
        print(USAGE)
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # traced ranks are forked and on the CPU
    try:
        asked = parse(arguments)
        return _show(asked, subject_of(asked))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        message = str(error) if isinstance(error, ValueError) and not isinstance(error, UserError) else explain(error)
        if message is None or wants_traceback():
            raise
        print(f"megascale: {message}", file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE


def parse(arguments: Sequence[str]) -> Arguments:
    """Flags and overrides.

    Raises:
        UserError: for a flag that does not exist.
    """
    overrides, folders, flags = [], [], set()
    left = list(arguments)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            folders.append(value if equals else left.pop(0) if left else "")
        elif argument in ("--full", "--schedule"):
            flags.add(argument)
        elif argument.startswith("-"):
            raise UserError(f"dryrun has no flag {argument}: its flags are --full, --schedule and --config-dir FOLDER")
        else:
            overrides.append(argument)
    for folder in folders:
        if not os.path.isdir(folder):
            raise UserError(f"--config-dir {folder}: there is no such folder")
    return Arguments(overrides, tuple(folders), "--full" in flags, "--schedule" in flags)


@contextmanager
def composed(asked: Arguments) -> Iterator[DictConfig]:
    """The config of the run, as ``megascale train`` composes it; inside, Hydra says what was chosen."""
    config.register(asked.folders)
    search = [f"hydra.searchpath=[{','.join(f'file://{os.path.abspath(folder)}' for folder in asked.folders)}]"] if asked.folders else []
    with initialize_config_dir(str(config.CONF), version_base="1.3"):
        cfg = compose("train", [*asked.overrides, *search], return_hydra_config=True)
    choices, hydra = cfg.hydra.runtime.choices, HydraConfig.instance()
    before = hydra.cfg
    hydra.set_config(cfg)
    try:
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
        for group in ("optim", "callbacks", "logger"):
            if choices[group] == "none":
                cfg[group] = None
        OmegaConf.set_struct(cfg, True)
        yield cfg
    finally:
        hydra.cfg = before


def number_of_ranks(cfg: DictConfig) -> int:
    """How many ranks the run is for: ``launch.ranks``, what the plan's own sizes make, or the GPUs of the cluster.

    Raises:
        UserError: where nothing says it.
    """
    if cfg.launch.ranks != "auto":
        return train.number_of_ranks(cfg.launch.ranks)
    try:
        if cfg.plan_file is not None:
            plan = read_plan(cfg.plan_file)
        else:
            plan = ParallelPlan.from_dict(OmegaConf.to_container(cfg.plan, resolve=True))  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(str(error)) from error
    total, shard, replicate = plan.data_parallel_size, plan.data_parallel_shard_size, plan.data_parallel_replicate_size
    sizes = [size for size in (total, shard) if size != "auto"]
    if not sizes and cfg.cluster is not None:
        return cluster_of(OmegaConf.to_container(cfg.cluster, resolve=True)).num_gpus
    if not sizes:
        raise UserError(
            "a dry run is of any number of ranks, and nothing says of how many: add launch.ranks=N or cluster=NAME, or give the plan's "
            "data_parallel_shard_size as a number"
        )
    if wrong := plan.check_without_world():
        raise UserError("\n".join(wrong))
    return plan.model_parallel_size * int(total if total != "auto" else int(shard) * replicate)


def subject_of(asked: Arguments) -> Subject:
    """The run that is meant.

    Raises:
        UserError: for everything ``megascale train`` refuses before it starts ranks, and for models that are no decoders of ours.
    """
    with composed(asked) as cfg:
        ready = train.finish(cfg, number_of_ranks(cfg))
    options = ready.options
    values.check_values(options)
    model, optim, trainer = options["model"], options["optim"], options["trainer"]
    if "_target_" in model:
        raise UserError(
            f"model._target_={model['_target_']}: a dry run is of the decoders that a config's numbers describe, since it makes smaller "
            "ones of the same kind; choose one, such as model=7b"
        )
    prepare.check_model(model, options["batch"]["sequence_length"])
    if model["num_experts"] and not precision_name(trainer["precision"]).startswith("bf16"):
        raise UserError(
            f"trainer.precision={trainer['precision']}: experts are traced as grouped products, which are of bfloat16: add "
            "trainer.precision=bf16-mixed"
        )
    prepare.check_optim(optim, trainer)
    if optim is None:
        raise UserError("optim=none: a dry run counts the bytes of an optimizer; choose one, such as optim=adamw")
    from lightning_megascale.models.config import DecoderConfig
    from lightning_megascale.verification.dryrun.subject import Subject

    norm = trainer["gradient_clip_val"] if trainer["gradient_clip_algorithm"] in (None, "norm") else None
    return Subject(
        DecoderConfig.from_dict(model),
        ready.plan,
        options["batch"]["sequence_length"],
        precision_name(trainer["precision"]),
        {name: value for name, value in optim.items() if name != "schedule"},
        norm or None,
    )


def precision_name(given: Any) -> str:
    """Lightning's full name of a precision that may be given short."""
    return {"None": "32-true", "32": "32-true", "64": "64-true", "bf16": "bf16-mixed"}.get(str(given), str(given))


# ---- what is printed -----------------------------------------------------------------------------------------------------------------


def _show(asked: Arguments, subject: Subject) -> int:
    from lightning_megascale.verification.dryrun.compare import PEAK_BYTES, PlannerDisagrees, check, judged
    from lightning_megascale.verification.dryrun.result import PEAK
    from lightning_megascale.verification.dryrun.run import dry_run

    console = Console(highlight=False)
    console.print(header(subject), markup=False, soft_wrap=True)
    run = dry_run(subject, full=asked.full)
    console.print(table(run))
    console.print(
        "\nmessages of a rank in one step, GB: of an all-gather what comes out, of a reduce-scatter what goes in; from 10 kB on",
        soft_wrap=True,
    )
    console.print(traffic_table(run))
    console.print(f"\n{NOTES}\n{PEAK}", markup=False, soft_wrap=True)
    if asked.schedule:
        for trace in run.stages:
            count = 1 + max(int(entry.partition(".")[2]) for entry in trace.schedule)
            console.print(f"\nstage {places(trace)}, {count} microbatches: {' '.join(trace.schedule)}", markup=False, soft_wrap=True)
    try:
        check(run.differences)
    except PlannerDisagrees as error:
        print(f"megascale: {error}", file=sys.stderr, flush=True)
        return 1
    far = max(judged(run.differences), key=lambda entry: entry.relative)
    peaks = [f"{entry.planned / _GB:.3f} of stage {entry.stage}" for entry in run.differences if entry.name == PEAK_BYTES]
    console.print(f"\nthe planner agrees: at most {far.relative:.2%} off, in {far.name} of stage {far.stage}", markup=False)
    if peaks:
        console.print(f"its peaks, GB: {', '.join(peaks)}", markup=False, soft_wrap=True)
    return 0


def header(subject: Subject) -> str:
    """What is run dry."""
    plan = subject.plan
    batch = f"{plan.global_batch_size} rows of {subject.sequence_length} tokens, {subject.microbatches} microbatches of {subject.rows}"
    return f"{subject.world_size} ranks, {plan.summary()}\n{batch}, {subject.precision}\n"


def table(run: DryRun) -> Table:
    """A column for each distinct stage."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    found.add_column("a rank of stage", no_wrap=True)
    for trace in run.stages:
        found.add_column(places(trace), justify="right")
    rows: list[tuple[str, Callable[[StageTrace], str]]] = [
        ("layers", lambda trace: " + ".join(f"{count} {kind}" for kind, count in trace.layers.items()) or "none"),
        ("stages' parameters, 1e9", lambda trace: _digits(trace.parameters / 1e9)),
        ("parameters, GB", lambda trace: _gb(trace.parameters_bytes)),
        ("gradients, GB", lambda trace: _gb(trace.gradient_bytes)),
        ("optimizer, GB", lambda trace: _gb(trace.optimizer_bytes)),
        ("peak, GB (estimate)", lambda trace: _gb(trace.peak_bytes)),
        ("TFLOP", lambda trace: _digits(trace.flops / 1e12)),
        ("TFLOP run again", lambda trace: _digits(trace.recomputed_flops / 1e12)),
        ("microbatches in flight", lambda trace: str(trace.in_flight)),
        ("process groups", lambda trace: str(trace.groups)),
    ]
    for title, cell in rows:
        found.add_row(title, *map(cell, run.stages))
    return found


def _gb(bytes_: int) -> str:
    return _digits(bytes_ / _GB)


def _digits(value: float) -> str:
    """Three decimals; three digits of what is smaller."""
    return f"{value:,.3f}" if value >= 1 or value == 0 else f"{value:.3g}"


def places(trace: StageTrace) -> str:
    """Such as "0", "1-6" or "1, 3"."""
    alike = trace.alike
    if len(alike) > 2 and alike == tuple(range(alike[0], alike[-1] + 1)):
        return f"{alike[0]}-{alike[-1]}"
    return ", ".join(map(str, alike))


def traffic_table(run: DryRun) -> Table:
    """A row for each kind of message that carries ten kilobytes or more on some rank, a column for each distinct stage."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("axis", "operation", "dtype"):
        found.add_column(title, no_wrap=True)
    for trace in run.stages:
        found.add_column(places(trace), justify="right")
    entries = [{(row.axis, row.operation, row.dtype): row for row in trace.traffic} for trace in run.stages]
    for key in sorted({key for rows in entries for key in rows}):
        if any(rows[key].bytes_ >= 1e4 for rows in entries if key in rows):
            found.add_row(*key, *(_gb(rows[key].bytes_) if key in rows else "" for rows in entries))
    return found
