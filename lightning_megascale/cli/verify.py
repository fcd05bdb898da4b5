"""``megascale verify target=module:build axes=[tp2,fsdp2xtp2]``: a user's own model under each plan against one device, as a table."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lightning_megascale.cli.errors import USER_ERROR_EXIT_CODE, UserError, nearest, wants_traceback
from lightning_megascale.plan import ParallelPlan

if TYPE_CHECKING:
    from lightning_megascale.verification import Report
    from lightning_megascale.verification.proof import Proof

USAGE = """megascale verify target=MODULE:FUNCTION axes=[AXES,...] [key=value ...]

  Trains your model for a few steps on one device and, for each combination of axes, on CPU processes
  through the strategy, and compares losses, every gradient, the norm before clipping and the parameters.
  The function takes no arguments and returns a small LightningModule with its train_dataloader, or
  (LightningModule, batches), or (nn.Module, batches) for a model whose output has a loss.

  target=MODULE:FUNCTION    such as my_model:build; the current folder is importable
  axes=[tp2,fsdp2xtp2,pp2]  dp, fsdp, tp, pp with their sizes, joined by x; hsdp2x2; tp2+sp; pp2:interleaved1f1b
  layout=auto               MODULE:NAME of a ModelLayout or dict, or {blocks: 'h.*', ...}
  steps=3                   optimizer steps
  accumulate=1              microbatches of each rank for a step
  microbatch_size=1         rows of a pipeline's microbatch
  dtype=float64             or float32
  tolerance=1e-10           of gradients relative to the norm of all (float32: 1e-5)
  seed=0                    of the first values
  timeout=300               seconds for each combination
  module=auto               the child of the LightningModule that is parallelized
  plan.KEY=VALUE            any further field of the plan, such as plan.activation_checkpointing=full

  Exit code: 0 all equal, 1 numbers differ or ranks failed, 2 something was refused or asked for wrongly."""

_KEYS = ("target", "axes", "layout", "steps", "accumulate", "microbatch_size", "dtype", "tolerance", "seed", "timeout", "module")
_DTYPES = ("float64", "float32")


def main(arguments: list[str] | None = None) -> int:
    """Proves all combinations, prints them, and returns the exit code.

    Args:
        arguments: what follows ``megascale verify``; None: this process's command line, which then also ends with the code.
    """
    code = _run(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and code:
        raise SystemExit(code)
    return code


def _run(arguments: list[str]) -> int:
    console = Console(highlight=False)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        console.print(USAGE, markup=False, soft_wrap=True)
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the proof runs on the CPU, in forked processes, which cannot share a CUDA context
    try:
        values = parse(arguments)
        build = locate("target", target := values.pop("target"))
        if not callable(build):
            raise UserError(f"target={target}: is a {type(build).__name__} and cannot be called: name a function that builds the model")
        if isinstance(values.get("layout"), str) and values["layout"] != "auto":
            values["layout"] = locate("layout", values["layout"])
        return prove(console, build, values)
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        if wants_traceback():
            raise
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"megascale: {without_machinery(str(error))}", markup=False)
        return USER_ERROR_EXIT_CODE


# ---- arguments -----------------------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of ``Proof`` by name, and ``target``.

    Raises:
        UserError: for a key that does not exist, a value that cannot be read, and a missing target or axes.
    """
    given: dict[str, Any] = {}
    fields = {f"plan.{field.name}": field.name for field in dataclasses.fields(ParallelPlan)}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise UserError(f"arguments are key=value; {argument!r} has no '='")
        if key not in _KEYS and key not in fields:
            near = nearest(key, [*_KEYS, *fields]) or (f"; did you mean 'plan.{key}'?" if f"plan.{key}" in fields else "")
            raise UserError(f"verify has no key {key!r}{near} Keys: {', '.join(_KEYS)}, plan.*")
        name = fields.get(key, key)
        if name in given:
            raise UserError(f"verify: {key} is given twice")
        given[name] = text if key in ("target", "axes", "module") else _value(key, text)
    for key, example in (("target", "target=my_model:build"), ("axes", "axes=[tp2,fsdp2xtp2,pp2]")):
        if not given.get(key):
            raise UserError(f"verify needs {example}: megascale verify target=my_model:build axes=[tp2,fsdp2xtp2,pp2]")
    given["axes"] = [part.strip() for part in given["axes"].strip("[] ").split(",") if part.strip()]
    return given


def _value(key: str, text: str) -> Any:
    """A value as YAML reads it, and numbers such as 1e-10, which YAML takes for words."""
    import yaml

    if key == "dtype":
        if text not in _DTYPES:
            raise UserError(f"dtype={text}: must be {' or '.join(_DTYPES)}{nearest(text, _DTYPES)}")
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{key}={text}: cannot be read: {str(error).splitlines()[0]}") from None
    if key in ("tolerance", "timeout", "steps", "accumulate", "microbatch_size", "seed"):
        return _number(key, text, value)
    return value


def _number(key: str, text: str, value: Any) -> Any:
    if value is None and key in ("tolerance", "microbatch_size"):
        return None
    try:
        return float(text) if key in ("tolerance", "timeout") else int(text)
    except ValueError:
        kind = "a number" if key in ("tolerance", "timeout") else "a whole number"
        raise UserError(f"{key}={text}: must be {kind}") from None


def locate(key: str, target: str) -> Any:
    """What ``module:name`` names; the current folder is importable.

    Raises:
        UserError: when it cannot be found, or its file fails when it is imported.
    """
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        hint = f"; did you mean {module.rpartition('.')[0]}:{module.rpartition('.')[2]}?" if "." in module else ""
        raise UserError(f"{key}={target}: must be MODULE:NAME, such as my_model:build{hint}")
    if module.endswith(".py") or "/" in module:
        raise UserError(f"{key}={target}: name the module, not the file: {module.removesuffix('.py').strip('./').replace('/', '.')}:{name}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    from lightning_megascale.verification.subject import described

    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            files = sorted(file.removesuffix(".py") for file in os.listdir() if file.endswith(".py"))
            raise UserError(f"{key}={target}: there is no module {error.name!r} in {os.getcwd()}{nearest(error.name, files)}") from None
        raise UserError(f"{key}={target}: {module} cannot be imported: {described(error)}") from error
    except Exception as error:
        raise UserError(f"{key}={target}: {module} cannot be imported: {described(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"{key}={target}: {module} has no {part!r}{nearest(part, vars(found) if hasattr(found, '__dict__') else ())}")
        found = getattr(found, part)
    return found


# ---- the proof and its table ---------------------------------------------------------------------------------------------------------


def prove(console: Console, build: Callable[[], Any], values: dict[str, Any]) -> int:
    """Runs all combinations and prints what came out. Returns the exit code."""
    import torch

    from lightning_megascale.verification.proof import Proof

    torch.set_num_threads(1)  # as the ranks: what this process does with more threads could hang them
    values["dtype"] = getattr(torch, values.get("dtype", "float64"))
    axes = values.pop("axes")
    with _doing(console, "one device"):
        proof = Proof(build, axes, **values)
    console.print(header(proof), markup=False, soft_wrap=True)
    reports = []
    for combination in proof.axes:
        with _doing(console, f"{combination.name} on {combination.ranks} ranks"):
            reports.append(proof.check(combination))
    console.print(table(reports, console.width))
    for report in reports:
        if not report.ok:
            console.print(details(report), markup=False, soft_wrap=True)
    if any("layout" in (report.refused or "") for report in reports):
        console.print("\n(here the layout is layout=MODULE:NAME, and other arguments of the strategy are plan.KEY=VALUE)", soft_wrap=True)
    console.print(summary(reports, proof), markup=False, soft_wrap=True)
    return exit_code(reports)


def exit_code(reports: Iterable[Report]) -> int:
    """0 when all are equal, 1 when numbers differ or ranks failed, else 2: what was refused is not proven either."""
    verdicts = {report.verdict for report in reports}
    return 1 if verdicts & {"DIFFERENT", "FAILED"} else 2 if "refused" in verdicts else 0


@contextmanager
def _doing(console: Console, text: str) -> Iterator[None]:
    """Says on a terminal what is going on, and wipes it off. Without rich's thread: a fork would copy the locks it holds."""
    if not console.is_terminal:
        yield
        return
    console.file.write(f"{text} ...")
    console.file.flush()
    try:
        yield
    finally:
        console.file.write("\r\x1b[2K")
        console.file.flush()


def header(proof: Proof) -> str:
    """What is trained, and what was changed for it."""
    subject = proof.subject
    kind = str(subject.dtype).removeprefix("torch.")
    lines = [
        f"{subject.kind}, {subject.parameters:,} parameters, {subject.steps} steps of {subject.rows} rows in {kind}, against one device"
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in proof.notes)])


def table(reports: Sequence[Report], width: int) -> Table:
    """A row for each combination: the worst figures and the verdict.

    Args:
        reports: of the combinations.
        width: of the terminal; names that do not fit lose their beginning.
    """
    room = max(12, width - max(len(report.axes) for report in reports) - 54)
    found = Table(box=None, pad_edge=False, header_style="bold")
    for title, options in (
        ("axes", {"overflow": "fold"}),
        ("loss", {"justify": "right"}),
        ("gradient", {"justify": "right"}),
        ("worst in", {"overflow": "fold"}),
        ("norm", {"justify": "right"}),
        ("parameters", {"justify": "right"}),
        ("verdict", {}),
    ):
        found.add_column(title, **options)  # type: ignore[arg-type]
    for report in reports:
        style = {"equal": "green", "refused": "yellow"}.get(report.verdict, "bold red")
        gradient, where = (None, "") if report.gradient is None else report.gradient
        where = where if len(where) <= room else "…" + where[1 - room :]
        parameters = None if report.parameters is None else report.parameters[0]
        figures = [_figure(report.loss), _figure(gradient), where, _figure(report.norm), _figure(parameters)]
        found.add_row(report.axes, *figures, f"[{style}]{report.verdict}[/]")
    return found


def _figure(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def details(report: Report) -> str:
    """Why a combination is not proven."""
    if report.refused:
        return f"\n{report.axes} is refused: {report.refused}"
    if report.error:
        return f"\n{report.axes} failed: {report.error.strip() if wants_traceback() else without_machinery(report.error.strip())}"
    lines = [f"\n{report.axes} differs, first in {report.first_divergence}"]
    return "\n".join([*lines, f"  usually: {report.hint}"] if report.hint else lines)


def without_machinery(text: str) -> str:
    """A traceback without the frames of installed packages and of this one, except the last."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if re.match(r'  File ".*", line \d+', line)]
    dropped: set[int] = set()
    for start, end in zip(starts, starts[1:]):
        if re.search(r"/(site-packages|lightning_megascale|dist-packages)/", lines[start]):
            dropped |= set(range(start, end))
    return "\n".join(line for number, line in enumerate(lines) if number not in dropped)


def summary(reports: Sequence[Report], proof: Proof) -> str:
    """The last line."""
    equal = sum(report.ok for report in reports)
    every = "the combination gives" if len(reports) == 1 else f"all {equal} combinations give"
    if equal < len(reports):
        every = f"{equal} of {len(reports)} combinations {'gives' if equal == 1 else 'give'}"
    return f"\n{every} the numbers of one device (tolerance {proof.tolerance:.0e})"
