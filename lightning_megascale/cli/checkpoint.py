"""``megascale checkpoint list | check | reshard | export``: looks at checkpoints and rewrites them, in one process, without a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lightning_megascale.cli.errors import USER_ERROR_EXIT_CODE, UserError, nearest

if TYPE_CHECKING:
    from lightning_megascale.strategies.checkpoint import CheckpointReport

USAGE = """megascale checkpoint VERB PATH ...

  list PATH                     the checkpoints in a folder and below it
  check PATH                    reads everything once: complete, every tensor readable
  reshard PATH OUT [ranks=N]    one of our folders rewritten with whole tensors in N files (default 1)
  export PATH [OUT] [format=ckpt|safetensors] [shard_gb=5] [prefix=model.] [dtype=bfloat16] [tokenizer=DIR] [config=DIR] [trust=false]
                                ckpt: one file for load_from_checkpoint; safetensors: Hugging Face's folder, which from_pretrained reads
                                when the model is of transformers (config and tokenizer come with it, or from the folders given).
                                trust=true unpickles hyper-parameters of own classes (this can run code of the file)"""


def main(arguments: list[str] | None = None) -> int:
    """Runs one verb and returns the exit code: 2 after a user's mistake (one message), 1 when ``check`` finds a broken checkpoint.

    Args:
        arguments: what follows ``megascale checkpoint``; None: this process's command line, which then also ends with the code.
    """
    code = _run(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and code:
        raise SystemExit(code)
    return code


def _run(arguments: list[str]) -> int:
    console = Console()
    try:
        if not arguments or arguments[0] in ("--help", "-h", "help"):
            console.print(USAGE, highlight=False, markup=False, soft_wrap=True)
            return 0
        verb, *rest = arguments
        if verb not in _VERBS:
            raise UserError(f"checkpoint has no verb {verb!r}{nearest(verb, _VERBS)} Verbs: {', '.join(_VERBS)}")
        run, positional, keys = _VERBS[verb]
        if rest and rest[0] in ("--help", "-h"):
            console.print(USAGE, highlight=False, markup=False, soft_wrap=True)
            return 0
        return run(console, **_parse(verb, rest, positional, keys))
    except (ValueError, OSError) as error:  # OSError: a full disk, a folder that may not be read
        if os.environ.get("HYDRA_FULL_ERROR", "0") == "1":
            raise
        Console(stderr=True, soft_wrap=True).print(f"megascale: {error}", highlight=False, markup=False)
        return USER_ERROR_EXIT_CODE


def _parse(verb: str, rest: Sequence[str], positional: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Positional and key=value arguments by name; a name in capitals is required."""
    names = [name.lower() for name in positional]
    values: dict[str, str] = {}
    places = iter(names)
    for argument in rest:
        key, equals, value = argument.partition("=")
        if equals and (key in names or key in keys):
            name = key
        elif equals and key.isidentifier() and not os.path.exists(argument):
            raise UserError(f"checkpoint {verb} has no key {key!r}{nearest(key, [*names, *keys])} Keys: {', '.join([*names, *keys])}")
        else:
            name, value = next((place for place in places if place not in values), ""), argument
            if not name:
                raise UserError(
                    f"checkpoint {verb} takes {len(names)} positional arguments ({' '.join(positional)}); {argument!r} is one more"
                )
        if name in values:
            raise UserError(f"checkpoint {verb}: {name} is given twice")
        values[name] = value
    lacking = [name for name in positional if name.isupper() and name.lower() not in values]
    if lacking:
        raise UserError(f"checkpoint {verb} needs {' '.join(lacking)}: megascale checkpoint {verb} {' '.join(positional)}")
    return values


def _number(key: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{key}={text}: must be a number") from None


def _choice(key: str, text: str, options: dict[str, Any]) -> Any:
    if text not in options:
        raise UserError(f"{key}={text}: must be one of {', '.join(options)}{nearest(text, options)}")
    return options[text]


def _size(count: float, unit: str = "B") -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if count < 1000 or prefix == "T":
            return f"{count:.3g} {prefix}{unit}" if prefix else f"{count:.0f} {unit}"
        count /= 1000
    raise AssertionError


def _list(console: Console, path: str) -> int:
    from lightning_megascale.strategies.checkpoint import list_checkpoints

    reports = list_checkpoints(path)
    if not reports:
        raise UserError(f"there is no checkpoint in {path} and three folders below it")
    table = Table()
    for title in ("checkpoint", "step", "epoch", "parameters", "size", "ranks", "kind"):
        table.add_column(title, overflow="fold")
    for report in reports:
        table.add_row(_name(report.path, path), *_row(report), report.kind)
    console.print(table)
    for report in reports:
        for problem in report.problems:
            console.print(f"{_name(report.path, path)}: {problem}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _name(path: Path, root: str) -> str:
    return str(path.relative_to(root)) if path != Path(root) and path.is_relative_to(root) else str(path)


def _row(report: CheckpointReport) -> list[str]:
    step, epoch, ranks = ("?" if value is None else str(value) for value in (report.step, report.epoch, report.world_size))
    return [step, epoch, _size(report.parameters, ""), _size(report.size), ranks]


def _check(console: Console, path: str) -> int:
    from lightning_megascale.strategies.checkpoint import check

    report = check(path)
    table = Table("what", "value", show_header=False)
    rows = {
        "checkpoint": str(report.path),
        "kind": report.kind,
        "step, epoch": f"{report.step}, {report.epoch}",
        "written": f"{report.time or '?'} by {report.world_size or '?'} ranks",
        "tensors": f"{report.tensors:,}",
        "model": f"{report.parameters:,} elements, {_size(report.model_bytes)}",
        "optimizer": _size(report.optimizer_bytes),
        "on disk": _size(report.size),
        "complete": "yes" if report.complete else "NO",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    for problem in report.problems:
        console.print(f"  {problem}", highlight=False, markup=False, soft_wrap=True)
    return 0 if report.complete else 1


def _reshard(console: Console, path: str, out: str, ranks: str = "1") -> int:
    from lightning_megascale.strategies.checkpoint import reshard_checkpoint

    written = reshard_checkpoint(path, out, _number("ranks", ranks, int))
    console.print(f"{path} -> {written}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _export(
    console: Console,
    path: str,
    out: str | None = None,
    format: str = "ckpt",
    shard_gb: str = "5",
    prefix: str | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    config: str | None = None,
    trust: str = "false",
) -> int:
    from lightning_megascale.strategies.checkpoint import export

    written = export(
        path,
        out,
        _choice("format", format, {"ckpt": "ckpt", "safetensors": "safetensors"}),
        shard_bytes=int(_number("shard_gb", shard_gb, float) * 10**9),
        prefix=prefix,
        weights_only=_choice("trust", trust, {"false": None, "true": False}),
        dtype=dtype,
        tokenizer=tokenizer,
        config=config,
    )
    for file in written:
        console.print(f"{file}  {_size(file.stat().st_size)}", highlight=False, markup=False, soft_wrap=True)
    return 0


_VERBS: dict[str, tuple[Callable[..., int], tuple[str, ...], tuple[str, ...]]] = {
    "list": (_list, ("PATH",), ()),
    "check": (_check, ("PATH",), ()),
    "reshard": (_reshard, ("PATH", "OUT"), ("ranks",)),
    "export": (_export, ("PATH", "out"), ("format", "shard_gb", "prefix", "dtype", "tokenizer", "config", "trust")),
}
