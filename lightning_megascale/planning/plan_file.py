"""A plan as a YAML file: what ``megascale plan out=`` writes and ``megascale train plan_file=`` reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lightning_megascale.plan import ParallelPlan


def write_plan(plan: ParallelPlan, path: str | Path, comments: tuple[str, ...] = ()) -> None:
    """Writes the fields that differ from their defaults, below the comments.

    Args:
        plan: without module classes, which no file can hold.
        path: is replaced.
        comments: lines.
    """
    import yaml

    defaults = {field.name: field.default for field in dataclasses.fields(plan)}
    values = {name: value for name, value in dataclasses.asdict(plan).items() if value != defaults[name]}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    head = "".join(f"# {line}\n" for line in comments)
    Path(path).write_text(head + yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def read_plan(path: str | Path) -> ParallelPlan:
    """The plan that a file holds.

    Raises:
        ValueError: there is no such file, it is no YAML, or holds what is no field.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"plan_file={path}: {error.strerror}; give a file that megascale plan out=FILE wrote") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"plan_file={path}: is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"plan_file={path}: must hold fields of a plan, such as tensor_parallel_size: 8")
    try:
        plan = ParallelPlan.from_dict(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"plan_file={path}: {error}") from None
    wrong = plan.check_without_world()
    if wrong:
        raise ValueError(f"plan_file={path}:\n" + "\n".join(f"  - {line}" for line in wrong))
    return plan
