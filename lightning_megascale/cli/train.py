"""``megascale train``: compose the config, finish and check it, start the ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_megascale.cli import config, launch, prepare, resume, values
from lightning_megascale.cli.errors import UserError, explain, stop
from lightning_megascale.plan import ParallelPlan

_ASKED = os.environ.get("HYDRA_FULL_ERROR")
_COMPOSED: list[bool] = []  # not empty while a run is ours, no longer Hydra's
_RESULTS: list[tuple[str, dict[str, Any] | None]] = []  # of a sweep's runs


def main() -> None:
    """The verb. A user's mistake ends it with exit code 2 and one message from one rank."""
    sys.argv[1:] = flags_first(sys.argv[1:])
    config.register(_config_dirs(sys.argv[1:]))
    config.note_swept(sys.argv[1:])
    _COMPOSED.clear()
    if launch.rank() > 0:  # one rank writes the run's .hydra folder
        sys.argv.append("hydra.output_subdir=null")
    try:
        with _environment("HYDRA_FULL_ERROR", "1"):  # Hydra then leaves its errors to us
            _compose_and_run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if isinstance(error, OSError) and not _COMPOSED and explain(error) is None:  # Hydra makes the run's folder before it calls us
            place = f"cannot make or write the run's folder: {error.strerror}: {error.filename}"
            stop(error, f"run.dir: {place}; choose another with run.dir=FOLDER", show=launch.rank() == 0)
        _stop_if_user_error(error)
        raise
    _print_sweep()


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Sets a variable, or removes it (None), for a while."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _stop_if_user_error(error: Exception) -> None:
    message = explain(error)
    if message is not None:
        stop(error, message, show=launch.rank() == 0)


def flags_first(arguments: list[str]) -> list[str]:
    """The same arguments with the overrides behind the flags: argparse wants all overrides in one place."""
    overrides: list[str] = []
    flags: list[str] = []
    for argument in arguments:
        is_folder = bool(flags) and flags[-1] in ("--config-dir", "-cd")
        is_override = not argument.startswith("-") and ("=" in argument or argument.startswith("~"))
        (overrides if is_override and not is_folder else flags).append(argument)
    return flags + overrides


def _config_dirs(arguments: list[str]) -> tuple[str, ...]:
    """The folders of ``--config-dir`` (``-cd``), whose recipes are registered beside ours."""
    folders = []
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            folders += [value] if equals else arguments[position + 1 : position + 2]
    for folder in folders:
        if not os.path.isdir(folder):
            stop(UserError(), f"--config-dir {folder}: there is no such folder", show=launch.rank() == 0)
    return tuple(folders)


@hydra.main(version_base="1.3", config_path=str(config.CONF), config_name="train")
def _compose_and_run(cfg: DictConfig) -> None:
    _COMPOSED.append(True)
    with _environment("HYDRA_FULL_ERROR", _ASKED):
        try:
            _run(cfg)
        except Exception as error:  # here already, because Hydra would add a line of its own
            _stop_if_user_error(error)
            raise
    _COMPOSED.clear()


def _run(cfg: DictConfig) -> None:
    """One run: alone, or one of a sweep."""
    resume.check_name(cfg.run)
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if in_sweep and launch.inside_launcher():
        raise UserError("a sweep starts the ranks of its runs one after the other: run megascale train itself, not inside a launcher")
    cfg.run.dir = os.path.relpath(HydraConfig.get().runtime.output_dir) if in_sweep else cfg.run.dir
    for group in ("optim", "callbacks", "logger"):
        if HydraConfig.get().runtime.choices[group] == "none":  # whatever keys a recipe sets in it
            cfg[group] = None
    ranks = launch.world_size() if launch.inside_launcher() else number_of_ranks(cfg.launch.ranks)
    ready = finish(cfg, ranks)
    values.check_values(ready.options)
    with resume.claim(ready.options["run"]["dir"]) if launch.rank() == 0 else nullcontext():
        start = resume.decide(ready.options)
        if start.finished is None:
            if start.checkpoint is None:
                values.check_init_from(ready.options["init_from"])
            check(ready.options, ranks)
            start_ranks(ready, ranks)
        elif launch.rank() == 0:
            print(finished_line(ready.options, start.finished), flush=True)
    if in_sweep:
        _RESULTS.append((config.swept(HydraConfig.get()), resume.read_finished(ready.options["run"]["dir"])))


def number_of_ranks(asked: Any) -> int:
    """``launch.ranks``: a number, or "auto": the GPUs of this machine, or two CPU ranks.

    Raises:
        UserError: for anything else.
    """
    if asked == "auto":
        import torch

        return torch.cuda.device_count() or 2
    if isinstance(asked, int) and asked >= 1:
        return asked
    raise UserError(f"launch.ranks={asked}: must be auto or a whole number of at least 1")


def finish(cfg: DictConfig, ranks: int) -> prepare.Prepared:
    """Resolves the plan, derives the batch arithmetic and resolves the config.

    Raises:
        UserError: for a plan or a batch that cannot be.
    """
    plan = _plan(cfg, ranks)
    plan, batch = prepare.add_batch(
        plan, cfg.batch.global_size, plan.microbatch_size if cfg.batch.micro_size is None else cfg.batch.micro_size
    )
    cfg.batch.micro_size = plan.microbatch_size  # data and others refer to these
    cfg.batch.loader_size = prepare.loader_rows(plan)
    options: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    return prepare.Prepared(options, plan, batch)


def _plan(cfg: DictConfig, ranks: int) -> ParallelPlan:
    """The resolved plan: of ``plan_file``, of the search where plan=auto knows the cluster, or of the plan group."""
    values: dict[str, Any] = OmegaConf.to_container(cfg.plan, resolve=True)  # type: ignore[assignment]
    choice = HydraConfig.get().runtime.choices["plan"] if HydraConfig.initialized() else None
    if cfg.plan_file is not None:
        return _plan_of_file(cfg, ranks)
    if choice != "auto" or cfg.cluster is None:
        return prepare.make_plan(values, ranks)
    from lightning_megascale.cli.setting import cluster_of, model_shape, planned, setting_of

    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    setting = setting_of(
        model_shape(plain["model"], HydraConfig.get().runtime.choices["model"]),
        cluster_of(plain["cluster"]),
        sequence_length=cfg.batch.sequence_length,
        global_batch_size=cfg.batch.global_size,
        precision=cfg.trainer.precision,
    )
    return planned(setting, ranks, values, cfg.batch.micro_size, HydraConfig.get().overrides.task).resolve(ranks)


def _plan_of_file(cfg: DictConfig, ranks: int) -> ParallelPlan:
    """The plan of ``plan_file``, which says the batch too.

    Raises:
        UserError: for another global batch or microbatch than the run's, and for what the plan violates.
    """
    from lightning_megascale.planning.plan_file import read_plan

    try:
        plan = read_plan(cfg.plan_file)
        for name, key in (("global_batch_size", "global_size"), ("microbatch_size", "micro_size")):
            ours, theirs = cfg.batch[key], getattr(plan, name)
            if ours is not None and theirs is not None and ours != theirs:
                raise UserError(f"plan_file={cfg.plan_file}: its {name} is {theirs}, and batch.{key}={ours}: say batch.{key}={theirs}")
        return plan.resolve(ranks)
    except ValueError as error:
        raise UserError(str(error)) from error


def check(options: dict[str, Any], ranks: int) -> None:
    """Checks what the groups call and with which arguments, while the process that the ranks come from is starting.

    Raises:
        UserError: for the first thing that cannot work.
    """
    if launch.rank() == 0:
        values.check_logger(options["logger"])
    prepare.check_model(options["model"], options["batch"]["sequence_length"])
    if not launch.inside_launcher():
        launch.warm_up(ranks, options["launch"]["start_method"])
    prepare.check_optim(options["optim"], options["trainer"])
    for section in ("data", "callbacks", "logger"):
        prepare.check_calls(section, options[section])
    prepare.check_data(options["data"])


def start_ranks(ready: prepare.Prepared, ranks: int) -> None:
    """Starts this machine's ranks and waits for them; inside somebody else's launcher this process is one of them."""
    from lightning_megascale.cli.run import run_rank

    if launch.inside_launcher():
        run_rank(ready)
        return
    settings = ready.options["launch"]
    launch.launch(
        run_rank,
        ready,
        ranks=ranks,
        run_dir=ready.options["run"]["dir"],
        max_restarts=settings["max_restarts"],
        start_method=settings["start_method"],
        shutdown_seconds=settings["shutdown_seconds"],
    )


def finished_line(options: dict[str, Any], result: dict[str, Any]) -> str:
    """What a start says when there is nothing left to do."""
    name = options["run"]["dir"]
    loss = f", val loss {result['val_loss']:.3f}" if result.get("val_loss") is not None else ""
    return (
        f"{name} is finished: {result['step']} steps{loss}; checkpoint {result.get('checkpoint')}\n"
        "Another run: run.name=NEW; the same one from the start: resume=never"
    )


def _print_sweep() -> None:
    """A sweep's runs with their validation losses, best first."""
    if not _RESULTS:
        return
    rows = sorted(((result or {}).get("val_loss") or float("inf"), name) for name, result in _RESULTS)
    print("\nval loss   run")
    for loss, name in rows:
        print(f"{loss:8.4f}   {name}")
