"""One rank's whole life: build the objects of a run, fit, and say how it went."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import warnings
from pathlib import Path
from typing import Any

from lightning_megascale.cli import launch, resume
from lightning_megascale.cli.errors import USER_ERROR_EXIT_CODE, UserError, wants_traceback
from lightning_megascale.cli.prepare import Prepared, import_current_folder, locate

_PACKAGE = str(Path(__file__).resolve().parents[1])


def run_rank(ready: Prepared) -> None:
    """Trains one run, as one of its ranks.

    A ``ValueError`` that this package raises is a user's mistake: one rank shows its message and the process ends with code 2. Any
    other exception travels on with its traceback.
    """
    import_current_folder()
    quiet()
    options = ready.options
    try:
        train(ready, _decide(options))
    except ValueError as error:
        if wants_traceback() or not _is_ours(error):
            raise
        launch.report_user_error(str(error), options["run"]["dir"])
        raise SystemExit(USER_ERROR_EXIT_CODE) from None


def _is_ours(error: BaseException) -> bool:
    """True when a file of this package raised it, or when it is about the arguments of a call in the config."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return isinstance(error, UserError) or (trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE))


def _decide(options: dict[str, Any]) -> resume.Start:
    """Where this rank starts. After a restart by the launcher, from the last checkpoint, whatever ``resume`` said at first."""
    if launch.attempt() > 0:
        last = resume.last_checkpoint(Path(options["run"]["dir"]))
        return resume.Start(last) if last or options["resume"] in ("auto", "never") else resume.decide(options)
    return resume.decide(options)


def train(ready: Prepared, start: resume.Start) -> None:
    """Builds everything and fits."""
    import lightning.pytorch as pl

    from lightning_megascale.callbacks.checkpoint import RunInterrupted

    options = ready.options
    first = launch.rank() == 0
    if first:
        if options["resume"] == "never" and launch.attempt() == 0 and (moved := resume.move_earlier(options["run"]["dir"])):
            print(f"the earlier run is kept in {moved}")
        resume.write_config(options)
        print(header(ready, start), flush=True)
    pl.seed_everything(options["seed"], workers=True, verbose=False)
    data = build(options["data"], "data")
    if type(data).state_dict is not pl.LightningDataModule.state_dict:  # Lightning looks for it on the loader only
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
    module = build_module(options)
    trainer = build_trainer(ready)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=start.checkpoint)
    except RunInterrupted as error:
        if trainer.is_global_zero:
            print(f"{error}; the checkpoint is in {_folder(options)}: the same command goes on from there", flush=True)
        raise SystemExit(128 + error.signum) from None
    if trainer.is_global_zero:
        _finish(options, trainer)


def header(ready: Prepared, start: resume.Start) -> str:
    """What is about to run: model, parameters, ranks, plan, batch arithmetic, run folder."""
    model, options = ready.options["model"], ready.options
    if "_target_" in model:
        what = model["_target_"]
    else:
        from lightning_megascale.models.config import DecoderConfig
        from lightning_megascale.models.presets import count_parameters

        config = DecoderConfig.from_dict(model)
        layers = f"{config.num_layers} layer{'s'[: config.num_layers != 1]}"
        what = f"decoder {_count(count_parameters(config))} parameters, {layers} x {config.hidden_size}"
    ranks = ready.plan.model_parallel_size * int(ready.plan.data_parallel_size)
    device = "GPU" if _accelerator(options) == "cuda" else "CPU"
    rows = [
        ("model", what),
        ("ranks", f"{ranks} x {device}, plan {ready.plan.summary()}"),
        ("batch", f"{ready.batch}, {options['batch']['sequence_length']} tokens each"),
        *([("from", f"weights of {options['init_from']}")] if options["init_from"] and not start.checkpoint else []),
        ("run", f"{options['run']['dir']}" + (f", resumes from {start.checkpoint}" if start.checkpoint else "")),
    ]
    return "\n".join(f"{name:<7}{text}" for name, text in rows)


def build(node: dict[str, Any] | None, section: str) -> Any:
    """Calls what a ``_target_`` names, inner ones first."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    if not node:
        return None
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError) and _is_ours(cause) or isinstance(cause, TypeError):
            raise UserError(f"{section}: {cause}") from error
        raise


def build_module(options: dict[str, Any]) -> Any:
    """The LightningModule: ``MegascaleModule`` around the model, or the user's own.

    Raises:
        UserError: when a LightningModule of its own meets an ``optim`` that nobody would read.
    """
    import lightning.pytorch as pl

    from lightning_megascale.module import MegascaleModule

    model, optim = options["model"], options["optim"]
    if "_target_" in model:
        target = locate("model", model["_target_"])
        if inspect.isclass(target) and issubclass(target, pl.LightningModule):
            if optim is not None:
                raise UserError(f"model._target_={model['_target_']} is a LightningModule, which brings its own optimizers: say optim=none")
            return build(model, "model")
        model = functools.partial(build, model, "model")  # built by the strategy, when and where it wants it
    if optim is None:
        raise UserError("optim=none is for a LightningModule of your own; this model needs an optimizer, such as optim=adamw")
    optimizer = {name: value for name, value in optim.items() if name != "schedule"}
    return MegascaleModule(model=model, optimizer=optimizer, schedule=optim.get("schedule"))


def build_trainer(ready: Prepared) -> Any:
    """Lightning's Trainer with the strategy, the callbacks and the logger of the run.

    Raises:
        UserError: for arguments that the Trainer refuses.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ProgressBar
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from lightning_megascale.strategies.trainer import MegascaleStrategy

    options = ready.options
    settings = {**options["trainer"], "accelerator": _accelerator(options)}
    callbacks = [build(node, f"callbacks.{name}") for name, node in (options["callbacks"] or {}).items() if node]
    if settings["enable_progress_bar"] is False:
        callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    local = launch.local_world_size()
    strategy = MegascaleStrategy(plan=ready.plan, init_from=options["init_from"])
    logger = build(options["logger"], "logger") or False
    try:
        return pl.Trainer(
            **settings,
            strategy=strategy,
            devices=local,
            num_nodes=max(1, launch.world_size() // local),
            callbacks=callbacks,
            logger=logger,
            default_root_dir=options["run"]["dir"],
        )
    except (ValueError, TypeError, MisconfigurationException) as error:
        raise UserError(f"trainer: {error}") from error


def _accelerator(options: dict[str, Any]) -> str:
    """Lightning's accelerator; "auto" means CUDA when there is one, else the CPU (a Mac's GPU has no process groups)."""
    import torch

    asked = options["trainer"]["accelerator"]
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _finish(options: dict[str, Any], trainer: Any) -> None:
    """Marks the run as finished and says what came out and what to try next."""
    checkpoint = resume.last_checkpoint(Path(options["run"]["dir"]))
    loss = trainer.callback_metrics.get("val/loss")
    result = {"step": trainer.global_step, "val_loss": None if loss is None else float(loss), "checkpoint": checkpoint}
    resume.write_finished(options, result)
    rows = [("checkpoint", checkpoint)]
    for callback in trainer.callbacks:
        if getattr(callback, "text", None):
            print(f"\nthe model writes:\n{_indent(callback.text)}\n")
        if getattr(callback, "losses", None) and callback.path.is_file():
            rows.append(("loss curve", os.path.relpath(callback.path)))
    print("\n".join(f"{name:<12}{value}" for name, value in rows))
    if options["run"]["next"]:
        print("\nwhat to try next:\n" + "\n".join(f"  {command}" for command in options["run"]["next"]), flush=True)


def _folder(options: dict[str, Any]) -> str:
    return os.path.join(options["run"]["dir"], "checkpoints")


def _indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.strip().splitlines())


def _count(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def quiet() -> None:
    """Silences what Lightning and torch say on every start and no user can act on."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_Unasked())
    for message in (
        "The `srun` command is available",
        ".*_pytree.*",
        ".*isinstance.treespec.*",
        ".*does not have many workers.*",
        "Checkpoint directory .* exists and is not empty",
    ):
        warnings.filterwarnings("ignore", message=message)


class _Unasked(logging.Filter):
    """Drops tips and the lines that repeat what the header says."""

    _drop = re.compile(
        r"\btip\b|litlogger|litmodels|[GTH]PU available|restor|^batch: |`Trainer|max_steps.*reached"
        r"|initializing distributed|^-{20}|distributed_backend|all distributed processes|Loading .train_dataloader",
        re.IGNORECASE,
    )

    def filter(self, record: logging.LogRecord) -> bool:
        return not self._drop.search(record.getMessage())
