"""ParallelPlan: the sizes of the axes and how the work is cut, as pure data. ``check`` lists every violated rule at once."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megascale.plan_rules import check_microbatches, check_options, check_values, check_world
from lightning_megascale.support import refusals, schedule_name


@dataclass(frozen=True)
class ParallelPlan:
    """How a run is spread over the ranks. Axes from outermost to innermost: pp, dp_replicate, dp_shard, cp, tp.

    Args:
        data_parallel_size: replicate x shard, or "auto": what the other axes leave of the world.
        data_parallel_replicate_size: copies of the parameters (1: FSDP2, above: HSDP; with shard size 1: plain data parallelism).
        data_parallel_shard_size: ranks that share one copy of the parameters, or "auto".
        tensor_parallel_size: ranks that split each layer's heads and features.
        pipeline_parallel_size: groups of consecutive layers on different ranks.
        context_parallel_size: ranks that hold parts of each row.
        expert_parallel_size: ranks that hold other experts; regroups those of dp_shard x cp x tp.
        sequence_parallel: norms and dropout on a shard of the sequence (Korthikanti et al. 2022, section 4.2).
        pipeline_schedule: torch's name, in any case: "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble".
        pipeline_stages_per_rank: 1, for interleaved schedules 2 or more, for ZBVZeroBubble 2.
        pipeline_split: "auto" cuts by cost; or the names of the blocks with which each pipeline stage but the first begins.
        microbatch_size: rows of one forward and backward; None: the loader's batch, under a pipeline 1.
        activation_checkpointing: None, "selective" (keeps matmul and attention outputs), "full" (keeps a block's input),
            or a set of module classes that are recomputed.
        activation_offload: kept activations go to host memory.
        reshard_after_forward: FSDP2's argument; "auto" frees a block's parameters after its forward, the root's not; under a pipeline it
            keeps all of them until the schedule's end.
        reduce_gradients: over several microbatches, "last" reduces once (unsharded gradients stay in memory), "every" after each
            microbatch (sharded gradients, more communication); a pipeline's schedule reduces at its end or after each microbatch.
        reduce_dtype: dtype in which gradients are summed over ranks under mixed precision; None: that of the parameters.
        cpu_offload: parameters, gradients and optimizer state live in host memory (needs an accelerator).
        compile: False, True, or the arguments of ``torch.compile``; applied to each block.
        context_parallel_method: how attention reaches the keys of other ranks: "ring", "ulysses", "allgather", "ring+ulysses", or
            "auto", by heads and tokens of a rank.
        context_parallel_layout: which tokens a rank holds: "contiguous", "headtail", "packed", or "auto", by documents and padding.
        expert_dispatcher: how tokens reach the experts of other ranks: "alltoall", "two_hop", "two_hop_dedup", a registered name, or
            "auto", by the bytes between nodes.
        expert_payload_dtype: dtype in which hidden states travel to experts and back; None: their own. "bfloat16" halves what float32
            sends and rounds each value to 8 bits.
        attention_backend: kernel of context-parallel attention: "sdpa", "flash2", "flash3", "flash4", "cpu", "math", or "auto".
        loss_weight: how a scalar mean is weighted over microbatches and ranks: "labels", "samples", or "auto".
        label_alignment: where position i's target stands: "aligned" (at i) or at i + 1, and then who shifts: "shift" (the step or the model
            itself) or "huggingface" (the model, which takes ``shift_labels``).
        global_batch_size: rows of one optimizer step over all ranks; accumulation is derived from it.
        allow_batch_change: lets a resume change the global batch.
    """

    data_parallel_size: int | str = "auto"
    data_parallel_replicate_size: int = 1
    data_parallel_shard_size: int | str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_schedule: str = "1F1B"
    pipeline_stages_per_rank: int = 1
    pipeline_split: Any = "auto"
    microbatch_size: int | None = None
    activation_checkpointing: Any = None
    activation_offload: bool = False
    reshard_after_forward: bool | int | str = "auto"
    reduce_gradients: str = "last"
    reduce_dtype: str | None = "float32"
    cpu_offload: bool = False
    compile: Any = False
    context_parallel_method: str = "auto"
    context_parallel_layout: str = "auto"
    expert_dispatcher: str = "auto"
    expert_payload_dtype: str | None = None
    attention_backend: str = "auto"
    loss_weight: str = "auto"
    label_alignment: str | None = None
    loss_parallel: bool = False
    global_batch_size: int | None = None
    allow_batch_change: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ParallelPlan:
        """A plan from keyword values.

        Raises:
            ValueError: for a name that is no field, with the nearest one.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, cutoff=0.3)
                raise ValueError(f"a plan has no field {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return cls(**values)

    def resolve(self, world_size: int) -> ParallelPlan:
        """The same plan with every "auto" size filled in.

        Args:
            world_size: number of ranks.

        Raises:
            ValueError: listing every violated rule, each with the nearest legal values.
        """
        wrong = self.check(world_size)
        if wrong:
            lines = "\n".join(f"  - {message}" for message in wrong)
            raise ValueError(f"this parallel plan cannot run on {world_size} rank{'s'[: world_size != 1]}:\n{lines}")
        return self._filled(world_size)

    def _filled(self, world_size: int) -> ParallelPlan:
        replicate, shard = self.data_parallel_sizes(world_size)
        return dataclasses.replace(
            self, data_parallel_size=replicate * shard, data_parallel_replicate_size=replicate, data_parallel_shard_size=shard
        )

    def check(self, world_size: int) -> list[str]:
        """A message for every violated rule; empty when the plan can run on ``world_size`` ranks. No process group needed."""
        wrong = check_values(self)
        if wrong:
            return wrong
        wrong = check_world(self, world_size)
        return wrong + refusals(self if wrong else self._filled(world_size))

    def check_without_world(self) -> list[str]:
        """The rules that hold for any number of ranks."""
        wrong = check_values(self)
        return wrong or check_options(self) + refusals(self)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same rows: pp x cp x tp."""
        return self.pipeline_parallel_size * self.context_parallel_size * self.tensor_parallel_size

    @property
    def fsdp_size(self) -> int:
        """Size of the ``fsdp`` view, dp_shard x cp. Only after ``resolve``."""
        assert isinstance(self.data_parallel_shard_size, int)
        return self.data_parallel_shard_size * self.context_parallel_size

    def summary(self) -> str:
        """One line: the axes above 1 and the options that are on. Only after ``resolve``."""
        axes = {
            "dp_replicate": self.data_parallel_replicate_size,
            "dp_shard": self.data_parallel_shard_size,
            "tp": self.tensor_parallel_size,
            "pp": self.pipeline_parallel_size,
            "cp": self.context_parallel_size,
            "ep": self.expert_parallel_size,
        }
        parts = [f"{name} {size}" for name, size in axes.items() if size != 1] or ["one rank"]
        if self.pipeline_parallel_size > 1:
            each = f" x {self.pipeline_stages_per_rank} stages" if self.pipeline_stages_per_rank > 1 else ""
            parts.append(f"{schedule_name(self.pipeline_schedule)}{each}")
        parts += ["sequence parallel"] if self.sequence_parallel else []
        if self.activation_checkpointing:
            named = isinstance(self.activation_checkpointing, str)
            parts.append(f"{self.activation_checkpointing if named else 'chosen'} checkpointing")
        parts += ["compiled"] if self.compile else []
        return ", ".join(parts)

    def check_microbatches(self, microbatches: int) -> list[str]:
        """The rules on how many microbatches go through a pipeline in one step."""
        return check_microbatches(self, microbatches)

    def data_parallel_sizes(self, world_size: int) -> tuple[int, int]:
        """(replicate, shard), "auto" filled in; the product may be wrong, which ``check`` reports."""
        left = world_size // self.model_parallel_size
        replicate, shard, total = self.data_parallel_replicate_size, self.data_parallel_shard_size, self.data_parallel_size
        if total != "auto":
            left = int(total)
        if shard == "auto":
            return replicate, max(1, left // replicate)
        if total != "auto" and replicate * int(shard) != total:
            return 0, 0
        return replicate, int(shard)


def batch_arithmetic(plan: ParallelPlan, loader_batch_size: int | None = None) -> tuple[int, int, str]:
    """Microbatch rows, accumulation and the printed line of a resolved plan with a global batch.

    Args:
        plan: a resolved plan with ``global_batch_size``.
        loader_batch_size: rows the loader gives each data-parallel rank; None: the plan's microbatch.

    Returns:
        (rows per forward, batches to accumulate, line such as ``64 = micro 8 x accumulation 4 x dp 2``). Under a pipeline the
        loader's batch holds all microbatches of a step.

    Raises:
        ValueError: when the numbers do not multiply out.
    """
    micro = loader_batch_size or plan.microbatch_size or 1
    data = int(plan.data_parallel_size)
    total = plan.global_batch_size or micro * data
    if total % (micro * data):
        below = total // (micro * data) * micro * data
        near = f"{below} or {below + micro * data}" if below else f"{micro * data}"
        raise ValueError(f"global_batch_size={total} is no multiple of batch {micro} x data-parallel size {data}: nearest {near}")
    parts = total // (micro * data)
    if plan.pipeline_parallel_size > 1:  # all of them go through one call of the schedule
        return micro, 1, f"{total} = micro {micro} x microbatches {parts} x accumulation 1 x dp {data}"
    return micro, parts, f"{total} = micro {micro} x accumulation {parts} x dp {data}"
