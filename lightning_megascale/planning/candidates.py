"""Plans as columns: many at once, one number for each in every column, so that a whole search is a few array operations.

P is the number of plans. Axes are named as the mesh names them. A column of a choice holds an index into the tuple of its names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_megascale.plan import ParallelPlan
from lightning_megascale.support import SCHEDULES, schedule_name

CHECKPOINTING = (None, "selective", "full")
# What data-parallel ranks share out: nothing; the optimizer's state (ZeRO-1); and reduced gradients, with parameters that are gathered
# once and kept until the step's end (ZeRO-2, reshard_after_forward=False); or everything, parameters freed after each use (ZeRO-3).
SHARDING = ("none", "optimizer", "gradients", "parameters")
METHODS = ("ring", "ulysses", "allgather")


@dataclass(frozen=True)
class Candidates:
    """P plans. Every column is an array (P,), of int64 unless said otherwise.

    Args:
        pp, dp_replicate, dp_shard, cp, tp: sizes of the axes, outermost to innermost.
        ep: ranks that hold other experts; regroups dp_shard x cp x tp.
        microbatch_size: rows of one forward and backward.
        stages_per_rank: pipeline stages on each rank, v.
        schedule: index into ``SCHEDULES``; of no meaning where pp is 1.
        checkpointing: index into ``CHECKPOINTING``.
        sharding: index into ``SHARDING``.
        sequence_parallel: bool.
        method: how attention reaches the keys of other cp ranks, index into ``METHODS``.
        reduce_every: bool; gradients are reduced after each microbatch, else once.

    Raises:
        ValueError: columns of unlike lengths.
    """

    pp: np.ndarray
    dp_replicate: np.ndarray
    dp_shard: np.ndarray
    cp: np.ndarray
    tp: np.ndarray
    ep: np.ndarray
    microbatch_size: np.ndarray
    stages_per_rank: np.ndarray
    schedule: np.ndarray
    checkpointing: np.ndarray
    sharding: np.ndarray
    sequence_parallel: np.ndarray
    method: np.ndarray
    reduce_every: np.ndarray

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns().items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"candidates: columns have lengths {lengths}; give one number of each for every plan")

    def __len__(self) -> int:
        return len(self.pp)

    def columns(self) -> dict[str, np.ndarray]:
        """Name -> column, in the order of the class."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def take(self, chosen: np.ndarray) -> Candidates:
        """The plans at these places: int (N,) or bool (P,)."""
        return Candidates(**{name: column[chosen] for name, column in self.columns().items()})

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Candidates:
        """From a mapping for each plan; what it leaves out is 1 for sizes, and False or the first choice otherwise."""
        rows = list(rows)
        one = {"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "microbatch_size", "stages_per_rank"}
        names = [field.name for field in dataclasses.fields(cls)]
        for row in rows:
            if unknown := set(row) - set(names):
                raise ValueError(f"candidates: no column is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        return cls(**{name: np.array([row.get(name, int(name in one)) for row in rows], dtype=_dtype(name)) for name in names})

    @classmethod
    def from_plan(cls, plan: ParallelPlan, auto_method: str = "ring") -> Candidates:
        """One candidate: a resolved plan.

        Args:
            plan: with no size left "auto".
            auto_method: what ``context_parallel_method="auto"`` becomes; ``plan_effects.auto_method`` knows it.

        Raises:
            ValueError: a size is "auto".
        """
        sizes = (plan.data_parallel_size, plan.data_parallel_replicate_size, plan.data_parallel_shard_size)
        if "auto" in sizes:
            raise ValueError(f"data_parallel sizes {sizes}: must be numbers; call plan.resolve(world_size) first")
        piped = plan.pipeline_parallel_size > 1
        keeps = plan.reshard_after_forward is False or (plan.reshard_after_forward == "auto" and piped)
        shared = int(plan.data_parallel_shard_size) * plan.context_parallel_size > 1
        named = plan.activation_checkpointing
        asked = plan.context_parallel_method
        method = auto_method if asked == "auto" else "ring"
        return cls.of([{
            "pp": plan.pipeline_parallel_size,
            "dp_replicate": plan.data_parallel_replicate_size,
            "dp_shard": int(plan.data_parallel_shard_size),
            "cp": plan.context_parallel_size,
            "tp": plan.tensor_parallel_size,
            "ep": plan.expert_parallel_size,
            "microbatch_size": plan.microbatch_size or 1,
            "stages_per_rank": plan.pipeline_stages_per_rank,
            "schedule": SCHEDULES.index(schedule_name(plan.pipeline_schedule)),
            "checkpointing": CHECKPOINTING.index(named if named is None or isinstance(named, str) else "full"),
            "sharding": SHARDING.index("none" if not shared else "gradients" if keeps else "parameters"),
            "sequence_parallel": plan.sequence_parallel,
            "method": METHODS.index(asked if asked in METHODS else method),
            "reduce_every": plan.reduce_gradients == "every",
        }])  # fmt: skip

    def plan(self, index: int, global_batch_size: int) -> ParallelPlan:
        """The plan at a place, of ranks of this package: sharded optimizer states alone (ZeRO-1) are none of its choices."""
        row = {name: column[index].item() for name, column in self.columns().items()}
        assert SHARDING[row["sharding"]] != "optimizer"
        auto = "gradients" if row["pp"] > 1 else "parameters"
        shared = row["dp_shard"] * row["cp"] > 1
        return ParallelPlan(
            data_parallel_size=row["dp_replicate"] * row["dp_shard"],
            data_parallel_replicate_size=row["dp_replicate"],
            data_parallel_shard_size=row["dp_shard"],
            tensor_parallel_size=row["tp"],
            pipeline_parallel_size=row["pp"],
            context_parallel_size=row["cp"],
            expert_parallel_size=row["ep"],
            sequence_parallel=row["sequence_parallel"],
            pipeline_schedule=SCHEDULES[row["schedule"]],
            pipeline_stages_per_rank=row["stages_per_rank"],
            microbatch_size=row["microbatch_size"],
            activation_checkpointing=CHECKPOINTING[row["checkpointing"]],
            reshard_after_forward="auto" if not shared or SHARDING[row["sharding"]] == auto else row["pp"] > 1,
            reduce_gradients="every" if row["reduce_every"] else "last",
            context_parallel_method=METHODS[row["method"]] if row["cp"] > 1 else "auto",
            label_alignment="aligned" if row["cp"] > 1 else None,
            global_batch_size=global_batch_size,
        )

    @property
    def world_size(self) -> np.ndarray:
        """Ranks of each plan."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> np.ndarray:
        """Ranks that read other rows: replicate x shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> np.ndarray:
        """Ranks that share one copy of the parameters that are no experts: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def expert_owners(self) -> np.ndarray:
        """Ranks that hold other experts."""
        return owners_of_experts(self.ep, self.tp, self.sequence_parallel)

    @property
    def expert_shard(self) -> np.ndarray:
        """Ranks that share one copy of a rank's experts: dp_shard x cp x tp, which no other ones own."""
        return self.dp_shard * self.cp * self.tp // self.expert_owners

    def microbatches(self, global_batch_size: int) -> np.ndarray:
        """Microbatches of a rank in one optimizer step."""
        return global_batch_size // (self.dp * self.microbatch_size)


def owners_of_experts(ep: np.ndarray, tp: np.ndarray, sequence_parallel: np.ndarray) -> np.ndarray:
    """Ranks that hold other experts, int (P,).

    Those of expert parallelism. Without it tensor parallelism deals whole experts out over its ranks, on the tokens that all of them have;
    but under sequence parallelism each rank has tokens of its own and all experts. Source: ``parallel/expert.py``, ``regroups_ranks``.
    """
    return np.where(ep > 1, ep, np.where(sequence_parallel, 1, tp))


def _dtype(name: str) -> type:
    return np.bool_ if name in ("sequence_parallel", "reduce_every") else np.int64
