"""Every candidate plan of a number of GPUs as columns: sizes of all axes, schedules and microbatches; then the ways to save memory.

Not tried: tensor parallelism without sequence parallelism (it keeps more in memory, and saves the gathers that sequence parallelism repeats
in the backward: fix sequence_parallel=False to try it), and GPipe where 1F1B runs (the same bubble, more memory).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from lightning_megascale.planning.candidates import METHODS, SHARDING, Candidates
from lightning_megascale.planning.legal import batch_rules, expert_counts, first_broken, model_rules, schedule_rules
from lightning_megascale.planning.workload import Workload
from lightning_megascale.support import LOOPED_SCHEDULES, SCHEDULES, V_SCHEDULES

SIZES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
OPTIONS = ("microbatch_size", "stages_per_rank", "schedule", "method")
STAGES_PER_RANK = (1, 2, 3, 4, 6, 8)
MOST_TOKENS = 65536  # of a microbatch on one rank: kernels gain nothing beyond
# Ways to save memory, each a column's values from the fastest to the one that needs least.
SAVINGS = {"checkpointing": (0, 1, 2), "sharding": (SHARDING.index("gradients"), SHARDING.index("parameters")), "reduce_every": (0, 1)}


def base_candidates(
    workload: Workload, gpus: int, *, most_tensor: int, fixed: Mapping[str, int] | None = None
) -> tuple[Candidates, Counter[str]]:
    """All plans of so many GPUs that model, batch and schedules allow, with no memory saved; ``variants`` has the ways to save it.

    Tensor parallelism beyond ``most_tensor`` is not tried, since each of its collectives stands in the way of the next product, nor are
    other numbers of stages a rank than ``STAGES_PER_RANK``, nor microbatches of more tokens a rank than ``MOST_TOKENS`` (but one row).

    Args:
        workload: what is trained.
        gpus: ranks.
        most_tensor: the largest tensor-parallel size; that of an NVLink domain.
        fixed: column -> the only value it may have; "dp" for dp_replicate x dp_shard.

    Returns:
        (candidates, rule -> how many combinations it refuses: of sizes for the rules of sizes, of plans for the others).
    """
    fixed = dict(fixed or {})
    refused: Counter[str] = Counter()
    sizes = _sizes(workload, gpus, most_tensor, fixed, refused)
    classes, owner, counts = np.unique(_without_split(sizes), axis=0, return_inverse=True, return_counts=True)
    plans, chosen = _with_options(workload, classes, fixed)
    for rules in (batch_rules, schedule_rules):
        broken, messages = first_broken(rules(workload, plans), len(plans))
        for number, message in enumerate(messages):
            refused[message] += int(counts[chosen[broken == number]].sum())
        plans, chosen = plans.take(broken < 0), chosen[broken < 0]
    if not {"schedule", "stages_per_rank"} & set(fixed):
        first_in_line = (plans.pp > 1) & (plans.microbatches(workload.global_batch_size) >= plans.pp)
        kept = ~(first_in_line & (plans.schedule == SCHEDULES.index("GPipe")))
        plans, chosen = plans.take(kept), chosen[kept]
    return _join(plans, chosen, sizes, owner.reshape(-1), counts), refused


def _join(plans: Candidates, chosen: np.ndarray, sizes: np.ndarray, owner: np.ndarray, counts: np.ndarray) -> Candidates:
    """Plans of a class with each way to split its data-parallel ranks and experts.

    Args:
        plans: (N,) of a class each, whose ranks are all of dp_shard.
        chosen: (N,) the class of each.
        sizes: (M, 6) columns as ``SIZES``.
        owner: (M,) the class of each.
        counts: how many rows of ``sizes`` each class has.
    """
    order, starts = np.argsort(owner, kind="stable"), np.cumsum(counts) - counts
    many = counts[chosen]
    place = np.repeat(np.arange(len(chosen)), many)
    within = np.arange(len(place)) - np.repeat(np.cumsum(many) - many, many)
    rows = sizes[order[starts[chosen][place] + within]]
    columns = {name: column[place] for name, column in plans.columns().items()} | dict(zip(SIZES, rows.T, strict=True))
    shared = columns["dp_shard"] * columns["cp"] > 1
    columns["sharding"] = np.where(shared, SHARDING.index("gradients"), SHARDING.index("none"))
    return Candidates(**columns)


def _without_split(sizes: np.ndarray) -> np.ndarray:
    """(pp, dp, cp, tp) of each row of sizes, which all rules of options depend on."""
    return np.stack([sizes[:, 0], sizes[:, 1] * sizes[:, 2], sizes[:, 3], sizes[:, 4]], 1)


def variants(plans: Candidates, global_batch_size: int, fixed: Mapping[str, int] | None = None) -> tuple[Candidates, np.ndarray]:
    """Each plan with every way to save memory that means something for it.

    Returns:
        (candidates, the place in ``plans`` each comes from, int). Those of one plan are neighbours.
    """
    fixed = dict(fixed or {})
    ways = np.array(list(product(*(_allowed(values, name, fixed) for name, values in SAVINGS.items()))), dtype=np.int64).reshape(-1, 3)
    owner = np.repeat(np.arange(len(plans)), len(ways))
    columns = {name: column[owner] for name, column in plans.columns().items()}
    columns |= dict(zip(SAVINGS, np.tile(ways, (len(plans), 1)).T, strict=True))
    columns["reduce_every"] = columns["reduce_every"].astype(bool)
    shared = columns["dp_shard"] * columns["cp"] > 1
    several = columns["microbatch_size"] * columns["dp_shard"] * columns["dp_replicate"] < global_batch_size
    gathers = columns["sharding"] == SHARDING.index("parameters")
    meant = (shared | ~gathers) & (several | ~columns["reduce_every"])
    columns["sharding"] = np.where(shared, columns["sharding"], SHARDING.index("none"))
    return Candidates(**columns).take(meant), owner[meant]


def _sizes(workload: Workload, gpus: int, most_tensor: int, fixed: Mapping[str, int], refused: Counter[str]) -> np.ndarray:
    """Sizes of the axes that multiply to ``gpus`` and divide model and batch, int64 (N, 6), columns as ``SIZES``."""
    experts = expert_counts(workload.model)
    divisors = _divisors(gpus)
    rows: list[tuple[int, ...]] = []
    for tp, cp in product(_allowed(divisors, "tp", fixed), _allowed(divisors, "cp", fixed)):
        if gpus % (tp * cp) or tp > most_tensor and "tp" not in fixed or workload.sequence_length % cp:
            continue
        for pp in _allowed(_divisors(gpus // tp // cp), "pp", fixed):
            data = gpus // (tp * cp * pp)
            if data != fixed.get("dp", data):
                continue
            if workload.global_batch_size % data:
                refused[f"global_batch_size={workload.global_batch_size} is no multiple of the data-parallel size"] += 1
                continue
            for shard in _allowed(_divisors(data), "dp_shard", fixed):
                if data // shard != fixed.get("dp_replicate", data // shard):
                    continue
                for ep in _allowed(_divisors(shard * cp * tp) if experts else (1,), "ep", fixed):
                    rows.append((pp, data // shard, shard, cp, tp, ep))
    sizes = np.array(rows, dtype=np.int64).reshape(-1, len(SIZES))
    broken, messages = first_broken(model_rules(workload.model, sizes[:, 4], sizes[:, 5]), len(sizes))
    for number, message in enumerate(messages):
        refused[message] += int((broken == number).sum())
    return sizes[broken < 0]


def _with_options(workload: Workload, classes: np.ndarray, fixed: Mapping[str, int]) -> tuple[Candidates, np.ndarray]:
    """Each (pp, dp, cp, tp) with each microbatch, schedule and method that means something for it, and the class of each."""
    batch, length = workload.global_batch_size, workload.sequence_length
    staged = [pair for pair in product(*(_option(name, fixed) for name in ("stages_per_rank", "schedule"))) if _is_choice(*pair)]
    plain = [pair for pair in staged if pair == (1, SCHEDULES.index("1F1B"))]
    micro = np.array(_allowed(_divisors(batch), "microbatch_size", fixed), dtype=np.int64)
    tables = []
    for number, (pp, dp, cp, tp) in enumerate(classes.tolist()):
        most = batch if "microbatch_size" in fixed else max(1, MOST_TOKENS * cp // length)
        sizes = micro[(micro <= most) & (batch // dp % micro == 0)]
        options = product(sizes.tolist(), staged if pp > 1 else plain, _option("method", fixed) if cp > 1 else (0,))
        tables += [(number, pp, dp, cp, tp, m, *pair, method) for m, pair, method in options]
    table = np.array(tables, dtype=np.int64).reshape(-1, 9).T
    named = dict(zip(("pp", "dp_shard", "cp", "tp", *OPTIONS), table[1:], strict=True))
    sequence = (named["tp"] > 1) & (length // named["cp"] % named["tp"] == 0) & bool(fixed.get("sequence_parallel", 1))
    ones, zeros = np.ones(table.shape[1], dtype=np.int64), np.zeros(table.shape[1], dtype=np.int64)
    off = zeros.astype(bool)
    plans = Candidates(
        **named, dp_replicate=ones, ep=ones, checkpointing=zeros, sharding=zeros, sequence_parallel=sequence, reduce_every=off
    )
    kept = sequence == bool(fixed.get("sequence_parallel", 0)) if "sequence_parallel" in fixed else ~off
    return plans.take(kept), table[0][kept]


def _option(name: str, fixed: Mapping[str, int]) -> Sequence[int]:
    values = {"stages_per_rank": STAGES_PER_RANK, "schedule": range(len(SCHEDULES)), "method": range(len(METHODS))}
    return _allowed(values[name], name, fixed)


def _is_choice(stages: int, schedule: int) -> bool:
    """A schedule with stages that it can have."""
    name = SCHEDULES[schedule]
    return stages >= 2 if name in LOOPED_SCHEDULES else stages == (2 if name in V_SCHEDULES else 1)


def _allowed(values: Sequence[int], name: str, fixed: Mapping[str, int]) -> Sequence[int]:
    return [value for value in values if value == fixed.get(name, value)]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0] if number < 1000 else _large_divisors(number)


def _large_divisors(number: int) -> list[int]:
    low = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})
