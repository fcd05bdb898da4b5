"""The strategy's arguments as tools see them: ``help()``, editors and LightningCLI read a plan's fields from the signature."""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ParamSpec

from lightning_megascale.plan import ParallelPlan

P = ParamSpec("P")


def shows_fields_of_a_plan(init: Callable[P, None]) -> Callable[P, None]:
    """Puts the fields of ``ParallelPlan``, with types and defaults, in place of ``**sizes`` in a signature. What is called stays."""
    own = inspect.signature(init)
    types = {**typing.get_type_hints(ParallelPlan), **typing.get_type_hints(init)}
    plan = [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default) for f in fields(ParallelPlan)]
    shown = [*(p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD), *plan]
    shown = [parameter.replace(annotation=types.get(parameter.name, inspect.Parameter.empty)) for parameter in shown]

    @functools.wraps(init)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        init(*args, **kwargs)

    typing.cast(Any, wrapper).__signature__ = own.replace(parameters=shown)
    wrapper.__annotations__ = {name: kind for name, kind in types.items() if name in {p.name for p in shown} | {"return"}}
    return wrapper


def plan_from(given: ParallelPlan | Mapping[str, Any] | None, sizes: Mapping[str, Any], strategy: type) -> ParallelPlan:
    """The plan of a strategy's keyword arguments.

    Args:
        given: ``plan=...``.
        sizes: the fields given by name; a configuration file may give all of them, so a default counts as not given.
        strategy: whose arguments a wrong name may have meant.

    Raises:
        ValueError: for a name that is no argument, with the nearest; for a plan and fields.
    """
    defaults = {field.name: field.default for field in fields(ParallelPlan)}
    for name in sizes if given is None or isinstance(given, ParallelPlan) else given:
        if name not in defaults:
            names = [known for known in inspect.signature(strategy).parameters if known not in ("self", "sizes")]
            near = difflib.get_close_matches(name, names, 1, cutoff=0.3)
            raise ValueError(f"MegascaleStrategy has no argument {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if given is None:
        return ParallelPlan(**sizes)
    twice = [name for name, value in sizes.items() if value != defaults.get(name, inspect.Parameter.empty)]
    if twice:
        raise ValueError(f"give the plan or its fields, not both: plan=... and {', '.join(twice)}")
    return given if isinstance(given, ParallelPlan) else ParallelPlan(**given)
