"""Rules for single values of a run, checked before any rank starts: numbers in range, words that exist, folders and services in reach."""

from __future__ import annotations

import importlib.util
import netrc
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning_megascale.cli.errors import UserError, nearest

_NUMBERS = {"int": (int,), "float": (int, float), "bool": (bool,), "None": (type(None),)}
_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "None": "null"}
_START_METHODS = ("forkserver", "spawn")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")  # organization/name, perhaps of a revision


def check_values(options: Mapping[str, Any]) -> None:
    """Values that no schema can refuse.

    Raises:
        UserError: with every rule that is broken, one a line.
    """
    trainer, launch, resume = options["trainer"], options["launch"], options["resume"]
    length, steps, clip = options["batch"]["sequence_length"], trainer["max_steps"], trainer["gradient_clip_val"]
    wrong = []
    if not 0 <= options["seed"] < 2**32:
        wrong.append(f"seed={options['seed']}: must be a whole number of at least 0 and below 2**32, such as seed=0")
    if launch["start_method"] not in _START_METHODS:
        hint = nearest(launch["start_method"], _START_METHODS)
        wrong.append(f"launch.start_method={launch['start_method']}: must be {' or '.join(_START_METHODS)}{hint}")
    for name in ("max_restarts", "shutdown_seconds"):
        if launch[name] < 0:
            wrong.append(f"launch.{name}={launch[name]}: must be at least 0")
    if length < 2:
        wrong.append(f"batch.sequence_length={length}: must be at least 2, since each token predicts the next")
    if steps == 0 or steps < -1:
        wrong.append(f"trainer.max_steps={steps}: must be at least 1, or -1 for no limit")
    if clip is not None and not clip >= 0:
        wrong.append(f"trainer.gradient_clip_val={clip}: must be at least 0; trainer.gradient_clip_val=null clips nothing")
    hint = nearest(resume, ("auto", "never"))
    if resume not in ("auto", "never") and hint and not os.path.exists(resume):
        wrong.append(f"resume={resume}: there is no such checkpoint{hint} (resume is auto, never, or a checkpoint's path)")
    if wrong:
        raise UserError("\n".join(wrong))


def check_init_from(value: Any) -> None:
    """Each path exists, or is a name of the hub. What is in it is read, and judged, by the ranks.

    Raises:
        UserError: naming those that are neither.
    """
    named = {f".{name}": path for name, path in value.items()} if isinstance(value, Mapping) else {} if value is None else {"": value}
    wrong = []
    for name, path in named.items():
        where = Path(str(path)).expanduser()
        if not isinstance(path, str) or not path:
            wrong.append(f"init_from{name}={path}: must be a path, such as a Hugging Face folder, or a name of its hub")
        elif not where.exists() and not _HUB_NAME.fullmatch(path):
            near = nearest(str(where), [str(other) for other in where.parent.glob("*")] if where.parent.is_dir() else [])
            wrong.append(f"init_from{name}={path}: there is no such file or folder{near}")
    if wrong:
        raise UserError("\n".join(wrong))


def wrong_type(annotation: Any, value: Any) -> str | None:
    """What a value must be, in words, when it is annotated as a number and is none; None when it may pass.

    Args:
        annotation: of a parameter or field, as text or a type; unions of other types are not judged.
        value: as the config gives it.
    """
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    names = [name.strip() for name in text.split("|")]
    if any(name not in _NUMBERS for name in names):
        return None
    fits = any(isinstance(value, _NUMBERS[name]) and (name == "bool" or not isinstance(value, bool)) for name in names)
    return None if fits else f"must be {' or '.join(_WORDS[name] for name in names)}"


def check_run_length(schedule: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
    """The run is longer than its warm-up (and decay), as far as the config tells its length.

    Raises:
        UserError: naming the two keys and a value that works.
    """
    fast = trainer["fast_dev_run"]
    steps = int(fast) if fast else trainer["max_steps"]
    if steps < 1:
        return
    given = f"trainer.fast_dev_run={str(fast).lower()}" if fast else f"trainer.max_steps={steps}"
    warmup = schedule.get("warmup_steps", 0)
    if schedule.get("kind", "cosine") == "cosine" and "total_steps" not in schedule and steps <= warmup:
        what = f"{given} must exceed optim.schedule.warmup_steps={warmup}"
        remedy = f"add optim.schedule.warmup_steps={min(1, steps - 1)}"
        raise UserError(f"{what}: {remedy}")
    if schedule.get("kind") == "wsd" and "stable_steps" not in schedule and steps < warmup + schedule["decay_steps"]:
        parts = f"optim.schedule.warmup_steps={warmup} + optim.schedule.decay_steps={schedule['decay_steps']}"
        fitting = f"optim.schedule.warmup_steps={steps // 10} optim.schedule.decay_steps={steps // 2}"
        raise UserError(f"{given} must be at least {parts}: add {fitting}")


def check_logger(logger: Any) -> None:
    """The logger's package is installed, and Weights & Biases has a key: it would ask for one on the terminal of a rank.

    Raises:
        UserError: with the ways out.
    """
    target = str(logger.get("_target_", "")) if isinstance(logger, Mapping) else ""
    if target.endswith(".TensorBoardLogger") and not any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX"))):
        raise UserError("logger=tensorboard needs the package tensorboard: pip install tensorboard, or say logger=csv")
    if not target.endswith(".WandbLogger"):
        return
    if importlib.util.find_spec("wandb") is None:
        raise UserError("logger=wandb needs the package wandb: pip install wandb, or say logger=csv")
    offline = logger.get("offline") or os.environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun")
    if not offline and not os.environ.get("WANDB_API_KEY") and not _wandb_login():
        raise UserError(
            "logger=wandb needs an account, and there is no key: run wandb login once (or set WANDB_API_KEY), "
            "log on this machine only with WANDB_MODE=offline, or say logger=csv"
        )


def _wandb_login() -> bool:
    """Whether ``wandb login`` has left a key for its host."""
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    files = [Path(os.environ["NETRC"])] if "NETRC" in os.environ else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        try:
            entry = netrc.netrc(str(file.expanduser())).hosts.get(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if entry and entry[2]:
            return True
    return False
