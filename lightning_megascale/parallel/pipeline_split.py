"""Which modules make up which pipeline stage, and which rank owns it: pure functions over names, shapes and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import inf

from lightning_megascale.layout import ModuleInfo
from lightning_megascale.support import V_SCHEDULES

_LOOKUPS = ("Embedding", "EmbeddingBag")


@dataclass(frozen=True)
class Stages:
    """A cut of a model.

    Args:
        units: for each pipeline stage the names of its modules, in the order in which the model calls them.
        owners: for each pipeline stage the pipeline-parallel rank that runs it.
        costs: for each pipeline stage the share of a token's matrix work, summing to 1.
    """

    units: tuple[tuple[str, ...], ...]
    owners: tuple[int, ...]
    costs: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.units)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs, first stage first."""
        return tuple(stage for stage, owner in enumerate(self.owners) if owner == rank)

    def stage_of(self, name: str) -> int | None:
        """The stage of a module or parameter, or None for one that no stage holds."""
        for stage, units in enumerate(self.units):
            if any(name == unit or name.startswith(unit + ".") for unit in units):
                return stage
        return None

    @property
    def order(self) -> tuple[str, ...]:
        """All units, in the order in which the model calls them."""
        return tuple(unit for units in self.units for unit in units)


def owners_of(stages: int, ranks: int, schedule: str) -> tuple[int, ...]:
    """The rank of each stage: round robin, or down and up again for V-shaped schedules.

    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", section 2.2 (round
        robin); Qi et al. 2023, "Zero bubble pipeline parallelism", section 6 (V).
    """
    if schedule in V_SCHEDULES:
        return tuple(min(stage, 2 * ranks - 1 - stage) for stage in range(stages))
    return tuple(stage % ranks for stage in range(stages))


def module_cost(name: str, modules: Sequence[ModuleInfo]) -> float:
    """Multiply-adds of a token's forward in the matrices at or below a module; a lookup costs next to nothing, a vector its length.

    What grows with the sequence (the attention core) is equal in all blocks and left out.
    """
    total = 0.0
    for module in modules:
        if module.name == name or module.name.startswith(name + "."):
            for _, shape in module.shapes:
                size = 1.0
                for length in shape:
                    size *= length
                total += shape[-1] if module.kind in _LOOKUPS and shape else size
    return total


def cut_by_cost(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Where each stage but the first begins, so that the dearest stage is as cheap as it can be; among those cuts the most even one.

    Args:
        costs: of the units, in order.
        stages: how many contiguous, non-empty parts.

    Returns:
        ``stages - 1`` indices into ``costs``.

    Raises:
        ValueError: for fewer units than stages.
    """
    units = len(costs)
    if units < stages:
        raise ValueError(f"{units} units cannot make {stages} pipeline stages")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    @cache
    def dearest(end: int, parts: int) -> float:
        """The smallest possible dearest part of the first ``end`` units."""
        if parts == 1:
            return before[end]
        return min(max(dearest(start, parts - 1), before[end] - before[start]) for start in range(parts - 1, end))

    limit = dearest(units, stages)

    @cache
    def evenest(end: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """(sum of squares, starts) of the first ``end`` units, no part above the limit."""
        if parts == 1:
            return (before[end] ** 2 if before[end] <= limit else inf), ()
        options = []
        for start in range(parts - 1, end):
            last = before[end] - before[start]
            if last <= limit:
                squares, starts = evenest(start, parts - 1)
                options.append((squares + last**2, (*starts, start)))
        return min(options, default=(inf, ()), key=lambda option: option[0])

    return evenest(units, stages)[1]


def check_split(split: str | Sequence[str], blocks: Sequence[str], stages: int) -> list[str]:
    """A message for every rule that a split by hand violates.

    Args:
        split: "auto", or the blocks with which each stage but the first begins; ``"last"`` stands for the modules after the blocks.
        blocks: all block names, in order.
        stages: pipeline_parallel_size x pipeline_stages_per_rank.
    """
    if isinstance(split, str):
        return []
    names = [*blocks, "last"]
    wrong = []
    if len(split) != stages - 1:
        wrong.append(
            f"pipeline_split={list(split)}: {len(split)} names make {len(split) + 1} pipeline stages, and pipeline_parallel_size x "
            f"pipeline_stages_per_rank = {stages} are needed: give {stages - 1}, the block with which each stage but the first begins"
        )
    unknown = [name for name in split if name not in names]
    if unknown:
        wrong.append(f"pipeline_split: {', '.join(map(repr, unknown))} is no block; blocks are {blocks[0]} ... {blocks[-1]}, then 'last'")
    elif any(names.index(one) >= names.index(other) for one, other in pairwise(split)):
        wrong.append(f"pipeline_split={list(split)}: the names must stand in the order of the model, each once")
    return wrong


def check_places(names: Sequence[str]) -> list[str]:
    """A message for every module that the roles first, blocks and last name twice, or that lies inside of another one.

    Args:
        names: of the three roles together.
    """
    twice = [f"{name!r}" for name in dict.fromkeys(names) if list(names).count(name) > 1]
    twice += [f"{outer!r} and {inner!r}" for outer in dict.fromkeys(names) for inner in names if inner.startswith(outer + ".")]
    if not twice:
        return []
    message = (
        f"the layout's first, blocks and last name {', '.join(twice[:4])}: a module has one place in a pipeline, and what lies inside of "
        "it goes with it. A module that is called at both ends cannot be split"
    )
    return [message]


def cut_stages(
    first: Sequence[str],
    blocks: Sequence[str],
    last: Sequence[str],
    modules: Sequence[ModuleInfo],
    *,
    ranks: int,
    stages_per_rank: int,
    schedule: str,
    split: str | Sequence[str] = "auto",
) -> Stages:
    """Cuts a model into stages; the modules before the blocks, each block, and the modules after them stay together.

    Args:
        first, blocks, last: module names, in order.
        modules: the model as data.
        ranks, stages_per_rank, schedule, split: of the plan; already checked.

    Raises:
        ValueError: for fewer parts than stages.
    """
    parts = [tuple(first), *((block,) for block in blocks), tuple(last)]
    total = ranks * stages_per_rank
    costs = [sum(module_cost(name, modules) for name in part) for part in parts]
    if isinstance(split, str):
        if len(parts) < total:
            raise ValueError(
                f"pipeline_parallel_size={ranks} x pipeline_stages_per_rank={stages_per_rank} = {total} pipeline stages, and the model has "
                f"{len(parts)} parts (embedding, {len(blocks)} blocks, head): use fewer stages or a deeper model"
            )
        starts = cut_by_cost(costs, total)
    else:
        places = {**{block: 1 + index for index, block in enumerate(blocks)}, "last": 1 + len(blocks)}
        starts = tuple(places[name] for name in split)
    edges = (0, *starts, len(parts))
    units = tuple(tuple(name for part in parts[a:b] for name in part) for a, b in pairwise(edges))
    whole = sum(costs) or 1.0
    shares = tuple(sum(costs[a:b]) / whole for a, b in pairwise(edges))
    return Stages(units, owners_of(total, ranks, schedule), shares)
