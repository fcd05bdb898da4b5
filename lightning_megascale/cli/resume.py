"""Start, resume, refuse or stop: what a run folder says about the run that is asked for. Plain files, no torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_megascale import commit_record
from lightning_megascale.cli.errors import UserError, nearest

_IDENTITY = ("model", "optim", "data", "seed", "init_from", "batch.global_size", "batch.sequence_length")
_NEUTRAL = ("data.cache_dir", "data.num_workers", "data.batch_size")  # where and how data is read, not which
_LENGTH = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time", "trainer.limit_train_batches", "trainer.overfit_batches")
_CONFIG, _FINISHED, _EARLIER, _LOCK = "config.json", "finished.json", "earlier", "run.lock"
# What a run leaves in its folder; .hydra, logs and run.lock belong to the present start already.
_WRITTEN = ("checkpoints", "metrics", "tensorboard", "wandb", "lightning_logs", "loss.png", _CONFIG, _FINISHED)
_SECTIONS = ("run", "model", "data", "trainer", "batch")  # of every config of ours


@dataclass(frozen=True)
class Start:
    """How a run begins: from ``checkpoint`` (None: from scratch), unless it is ``finished`` (then what its marker file says)."""

    checkpoint: str | None = None
    finished: dict[str, Any] | None = None


def decide(options: dict[str, Any]) -> Start:
    """Reads the run folder and applies ``resume``.

    Args:
        options: the finished config of the run.

    Raises:
        UserError: when the folder holds a run of another model, optimizer or data, naming the differing keys and the two ways
            out; when ``resume`` names a checkpoint that does not exist; when the folder's ``config.json`` is not one of ours.
    """
    folder, resume = Path(options["run"]["dir"]), options["resume"]
    saved = _read_config(folder)
    if resume == "never":
        return Start()
    if resume != "auto":
        return Start(_existing(Path(resume), folder))
    checkpoint = last_checkpoint(folder)
    finished = read_finished(str(folder))
    if checkpoint is None and finished is None:
        return Start()
    if saved is not None:
        _refuse_other_run(saved, options, folder)
    if finished is not None and finished["fingerprint"] == fingerprint(options):
        return Start(checkpoint, finished)
    return Start(checkpoint)


def last_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint of a run, by the step and then the time that were written into it."""
    found = commit_record.complete(folder / "checkpoints")
    return str(found[-1][1]) if found else None


def write_config(options: dict[str, Any]) -> None:
    """Leaves the config in the run folder, for the next start to compare with. One rank only."""
    folder = Path(options["run"]["dir"])
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _CONFIG, options)
    (folder / _FINISHED).unlink(missing_ok=True)


def write_finished(options: dict[str, Any], result: dict[str, Any]) -> None:
    """Marks the run as finished, with its result. One rank only."""
    _write(Path(options["run"]["dir"]) / _FINISHED, {"fingerprint": fingerprint(options), **result})


def read_finished(run_dir: str) -> dict[str, Any] | None:
    """What ``write_finished`` left; None when that is damaged: the run is then not finished."""
    result = _read(Path(run_dir) / _FINISHED)
    return result if isinstance(result, dict) and {"fingerprint", "step"} <= result.keys() else None


@contextmanager
def claim(run_dir: str) -> Iterator[None]:
    """Holds the run folder while a run is going on. By the process that starts it; a process that ends, however, lets go.

    Raises:
        UserError: when another process holds it.
    """
    folder = Path(run_dir)
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except (ImportError, OSError):  # nothing to lock with; what cannot be written says so itself
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"{folder} is in use: another process trains in it at this moment. Wait until it ends, or give this run a folder of its own "
            "with run.name=NEW"
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def check_name(run: Any) -> None:
    """Raises a UserError for a run without a name or a folder: what it would write, and move, are other runs."""
    for key in ("name", "dir"):
        if not str(run[key]).strip():
            raise UserError(f"run.{key}={run[key]!r}: must not be empty; leave it out, or say run.name=NEW")


def move_earlier(run_dir: str) -> Path | None:
    """Moves what an earlier run left in the folder to ``earlier/N``: starting over deletes nothing, and touches nothing else.

    Returns:
        That folder, or None when no run of ours has been there.
    """
    folder = Path(run_dir)
    if _read_config(folder) is None:
        return None
    old = [folder / name for name in _WRITTEN if (folder / name).exists()]
    number = 1 + max((int(path.name) for path in (folder / _EARLIER).glob("*") if path.name.isdigit()), default=0)
    target = folder / _EARLIER / str(number)
    target.mkdir(parents=True)
    for path in old:
        shutil.move(str(path), target / path.name)
    return target


def fingerprint(options: dict[str, Any]) -> str:
    """A hash of everything that decides a run's result and length."""
    values = {**_select(options, _IDENTITY), **_select(options, _LENGTH)}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, lists as they are."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _select(options: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    def chosen(name: str) -> bool:
        return name not in _NEUTRAL and any(name == key or name.startswith(key + ".") for key in keys)

    flat = flatten(options)
    for added in ("init_from", "data.text"):  # as in runs from before there were such keys
        if flat.get(added) is None:
            flat.pop(added, None)
    return {name: value for name, value in flat.items() if chosen(name)}


def _refuse_other_run(saved: dict[str, Any], options: dict[str, Any], folder: Path) -> None:
    before, now = _select(saved, _IDENTITY), _select(json.loads(json.dumps(options, default=str)), _IDENTITY)
    if options["plan"].get("allow_batch_change"):
        before.pop("batch.global_size", None), now.pop("batch.global_size", None)
    differing = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if differing:
        rows = "\n".join(f"  {name}: {before.get(name, 'absent')} there, {now.get(name, 'absent')} now" for name in differing)
        raise UserError(
            f"{folder} holds a run with another configuration:\n{rows}\n"
            f"Give this run a folder of its own with run.name=NEW, or start over in this one with resume=never "
            f"(the earlier run is kept in {folder / _EARLIER})"
        )


def _existing(path: Path, folder: Path) -> str:
    if path.exists():
        return str(path)
    near = nearest(str(path), [str(other) for other in path.parent.glob("*")] if path.parent.is_dir() else [])
    raise UserError(f"resume={path}: there is no such checkpoint{near}; resume is auto, never, or a checkpoint's path")


def _read(file: Path) -> Any:
    """The content; None when there is no file or no JSON in it."""
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _read_config(folder: Path) -> dict[str, Any] | None:
    file = folder / _CONFIG
    saved = _read(file)
    if isinstance(saved, dict) and all(name in saved for name in _SECTIONS):
        return saved
    if file.exists():
        raise UserError(
            f"{file} is not the config of a run (damaged, or another program's), so what this folder holds is unknown: "
            "give this run a folder of its own with run.name=NEW, or move that file away"
        )
    return None


def _write(file: Path, values: dict[str, Any]) -> None:
    """Whole or not at all: a reader never sees half a file."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(values, indent=2, default=str))
    partial.replace(file)
