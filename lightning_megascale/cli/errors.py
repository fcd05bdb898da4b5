"""What went wrong, said to a user: one message that names the value, the rule, the remedy and the nearest thing that exists."""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterable
from typing import Any, NoReturn

USER_ERROR_EXIT_CODE = 2

# Keys that people know from elsewhere, and where their meaning lives here.
MOVED = {
    "trainer.strategy": "the strategy is MegascaleStrategy and its arguments are plan.*",
    "trainer.devices": "the number of ranks on this machine is launch.ranks",
    "trainer.num_nodes": "start one process per rank with torchrun or srun; the nodes are then found",
    "trainer.accumulate_grad_batches": "accumulation is derived from batch.global_size and batch.micro_size",
    "trainer.callbacks": "callbacks are callbacks.NAME._target_",
    "trainer.logger": "choose a logger with logger=csv, wandb, tensorboard or none",
    "trainer.default_root_dir": "the run's folder is run.dir",
    "trainer.plugins": "precision is trainer.precision; checkpoints and ranks belong to the strategy",
    "model._target_": "write _target_: module.Class and its arguments to FOLDER/model/NAME.yaml and say model=NAME --config-dir FOLDER",
    "plan.global_batch_size": "the global batch is batch.global_size",
    "batch.loader_size": "the rows of a loader's batch follow from batch.global_size, batch.micro_size and the plan",
    "plan.microbatch_size": "the rows of one forward are batch.micro_size",
}


class UserError(ValueError):
    """Something the user can put right. Shown as it is, without a traceback; the process exits with code 2."""


def nearest(name: str, names: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing when no name is close."""
    near = difflib.get_close_matches(name, list(names), 1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def wants_traceback() -> bool:
    return os.environ.get("HYDRA_FULL_ERROR", "0") == "1"


def stop(error: BaseException, message: str, *, show: bool = True) -> NoReturn:
    """Ends this process with code 2 after one message (or the traceback, when HYDRA_FULL_ERROR=1 asks for it)."""
    if show and wants_traceback():
        traceback.print_exception(error)
    elif show:
        print(f"megascale: {message}", file=sys.stderr, flush=True)
    raise SystemExit(USER_ERROR_EXIT_CODE)


def explain(error: BaseException) -> str | None:
    """The message for a user's mistake in the command line or in a config file; None when it is no such mistake."""
    import yaml
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, yaml.YAMLError):
        from lightning_megascale.cli.config import yaml_mistake

        return yaml_mistake(error)
    if isinstance(error, MissingConfigException):
        return _missing_config(error)
    if isinstance(error, OverrideParseException):
        return _not_an_override(error)
    cause: Any = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    place = re.match(r"In '([^']+)': ", str(error))
    where = f"{place[1]}: " if place else ""  # the file
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        return where + _unknown_key(str(cause.full_key or cause.key), cause.parent_node)
    if isinstance(cause, OmegaConfBaseException):
        key = f"{cause.full_key}: " if cause.full_key else ""
        return f"{where}{key}{str(cause).splitlines()[0]}"
    if isinstance(error, HydraException):
        return str(error).strip()
    return None


def unknown_key(full_key: str, known: Iterable[str]) -> str:
    """The message for a key that does not exist.

    Args:
        full_key: the dotted key as it was given.
        known: all dotted keys that exist.
    """
    if full_key in MOVED:
        return f"{full_key} is no key of a run: {MOVED[full_key]}"
    known = list(known)
    parent, _, leaf = full_key.rpartition(".")
    siblings = [key for key in known if key.rpartition(".")[0] == parent]
    same = [key for key in known if key.rpartition(".")[2] == leaf]  # the right word in the wrong place, such as lr=1e-3
    hint = f"; did you mean {same[0]!r}?" if same else nearest(full_key, siblings) or nearest(full_key, known)
    elsewhere = f"; keys of {parent}: {', '.join(key.rpartition('.')[2] for key in siblings)}" if siblings and parent and not hint else ""
    return f"there is no key {full_key!r}{hint}{elsewhere}"


def _unknown_key(full_key: str, parent: Any) -> str:
    from omegaconf import OmegaConf

    root = parent._get_root() if parent is not None else None
    plain = OmegaConf.to_container(root, resolve=False) if root is not None else {}
    assert isinstance(plain, dict)
    groups = ["recipe"]
    return unknown_key(full_key, [*groups, *flat_keys({k: v for k, v in plain.items() if k != "hydra"})])


def flat_keys(tree: dict[Any, Any], prefix: str = "") -> list[str]:
    """All dotted keys of a nested dict, inner nodes too."""
    keys = []
    for name, value in tree.items():
        keys.append(f"{prefix}{name}")
        if isinstance(value, dict):
            keys += flat_keys(value, f"{prefix}{name}.")
    return keys


def _missing_config(error: Any) -> str:
    group, _, name = (error.missing_cfg_file or "").partition("/")
    if not name:
        return str(error).strip()
    options = list(error.options or [])
    if group == "recipe":
        from lightning_megascale.cli.config import UNREADABLE, recipe_names

        if name in UNREADABLE:
            return f"recipe={name}: {UNREADABLE[name]}"
        options = recipe_names()
    listed = f"\nThere are: {', '.join(options)}" if options else ""
    own = "\nRecipes of your own: recipe=NAME --config-dir FOLDER" if group == "recipe" else ""
    return f"there is no {group} {name!r}{nearest(name, options)}{listed}{own}"


def _not_an_override(error: Any) -> str:
    from lightning_megascale.cli.config import recipe_names

    if "=" in error.override:
        return f"cannot read {error.override!r}: {str(error).splitlines()[0]}"
    if error.override in recipe_names():
        return f"arguments are key=value: write recipe={error.override}"
    return f"arguments are key=value; {error.override!r} has no '='"
