"""ParallelPlan: the sizes of the axes and how the work is cut, as pure data. ``check`` lists every violated rule at once."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megascale.support import LOOPED_SCHEDULES, SCHEDULES, V_SCHEDULES, refusals, schedule_name

_SIZES = (
    "data_parallel_replicate_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "activation_checkpointing": (None, "selective", "full"),
    "reduce_dtype": ("float32", "bfloat16", None),
    "reduce_gradients": ("last", "every"),
    "loss_weight": ("auto", "labels", "samples"),
    "label_alignment": (None, "aligned", "shift", "huggingface"),
    "context_parallel_method": ("auto", "ring", "ulysses", "allgather", "ring+ulysses"),
    "context_parallel_layout": ("auto", "contiguous", "headtail", "packed"),
    "attention_backend": ("auto", "sdpa", "flash2", "flash3", "flash4", "cpu", "math"),
}


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
        expert_parallel_size: see ``support``; 1 switches the axis off.
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
        replicate, shard = self._data_parallel(world_size)
        return dataclasses.replace(
            self, data_parallel_size=replicate * shard, data_parallel_replicate_size=replicate, data_parallel_shard_size=shard
        )

    def check(self, world_size: int) -> list[str]:
        """A message for every violated rule; empty when the plan can run on ``world_size`` ranks. No process group needed."""
        wrong = self._check_values()
        if not wrong:
            wrong = self._check_world(world_size)
        return wrong + refusals(self if wrong else self._filled(world_size))

    def check_without_world(self) -> list[str]:
        """The rules that hold for any number of ranks."""
        wrong = self._check_values()
        return (wrong or self._check_options()) + refusals(self)

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

    def _check_values(self) -> list[str]:
        wrong = []
        for name in (*_SIZES, "pipeline_stages_per_rank"):
            value = getattr(self, name)
            if not _is_size(value):
                wrong.append(f"{name}={value!r}: must be a whole number of at least 1")
        for name in ("data_parallel_size", "data_parallel_shard_size"):
            value = getattr(self, name)
            if value != "auto" and not _is_size(value):
                wrong.append(f"{name}={value!r}: must be 'auto' or a whole number of at least 1")
        for name in ("microbatch_size", "global_batch_size"):
            value = getattr(self, name)
            if value is not None and not _is_size(value):
                wrong.append(f"{name}={value!r}: must be None or a whole number of at least 1")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if isinstance(value, (set, frozenset, list, tuple)) and name == "activation_checkpointing":
                if not value or not all(isinstance(kind, type) for kind in value):
                    wrong.append(f"{name}={value!r}: a set must hold module classes, such as {{MyBlock}}")
            elif value not in choices:
                near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                wrong.append(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}{hint}")
        if not isinstance(self.compile, (bool, Mapping)):
            wrong.append(f"compile={self.compile!r}: must be False, True or a dict of torch.compile's arguments")
        reshard = self.reshard_after_forward
        if not (reshard == "auto" or isinstance(reshard, bool) or _is_size(reshard)):
            wrong.append(f"reshard_after_forward={reshard!r}: must be 'auto', True, False or a group size")
        if schedule_name(self.pipeline_schedule) not in SCHEDULES:
            near = difflib.get_close_matches(str(self.pipeline_schedule), SCHEDULES, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            wrong.append(f"pipeline_schedule={self.pipeline_schedule!r}: must be one of {', '.join(SCHEDULES)}{hint}")
        split = self.pipeline_split
        if split != "auto" and not (isinstance(split, (list, tuple)) and split and all(isinstance(name, str) for name in split)):
            wrong.append(f"pipeline_split={split!r}: must be 'auto' or a list of block names such as ['layers.4']")
        for name in ("sequence_parallel", "activation_offload", "cpu_offload", "allow_batch_change", "loss_parallel"):
            if not isinstance(getattr(self, name), bool):
                wrong.append(f"{name}={getattr(self, name)!r}: must be True or False")
        return wrong

    def _check_world(self, world_size: int) -> list[str]:
        wrong = []
        others = self.model_parallel_size
        if world_size % others:
            used = " x ".join(
                f"{name}={getattr(self, name)}"
                for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
                if getattr(self, name) > 1
            )
            tensor = f"; nearest tensor_parallel_size: {_near_divisors(world_size, self.tensor_parallel_size)}"
            product = f" = {others}" if " x " in used else ""
            wrong.append(f"{used}{product} does not divide the {world_size} ranks: use a multiple of {others} ranks{tensor}")
        else:
            replicate, shard = self._data_parallel(world_size)
            if replicate * shard * others != world_size:
                left = world_size // others
                wrong.append(
                    f"data_parallel_replicate_size={self.data_parallel_replicate_size} x "
                    f"data_parallel_shard_size={self.data_parallel_shard_size} with data_parallel_size={self.data_parallel_size}: "
                    f"the other axes leave {left} rank{'s'[: left != 1]} for data parallelism; nearest "
                    f"data_parallel_replicate_size: {_near_divisors(left, self.data_parallel_replicate_size)}, "
                    "and leave data_parallel_size and data_parallel_shard_size at 'auto'"
                )
            elif self.expert_parallel_size > 1 and (world_size // self.pipeline_parallel_size // replicate) % self.expert_parallel_size:
                size = world_size // self.pipeline_parallel_size // replicate
                wrong.append(
                    f"expert_parallel_size={self.expert_parallel_size} must divide dp_shard x cp x tp = {size}: "
                    f"nearest {_near_divisors(size, self.expert_parallel_size)}"
                )
            elif _is_size(self.reshard_after_forward) and self.reshard_after_forward is not True:
                size = shard * self.context_parallel_size
                if size % int(self.reshard_after_forward) or self.reshard_after_forward in (1, size):
                    wrong.append(
                        f"reshard_after_forward={self.reshard_after_forward}: a group size must divide dp_shard x cp = {size} "
                        "and differ from 1 and from it; True and False are the two ends"
                    )
        wrong += self._check_options()
        if self.global_batch_size is not None and not wrong:
            wrong += self._check_batch(world_size)
        return wrong

    def _check_options(self) -> list[str]:
        wrong = []
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            wrong.append(
                "sequence_parallel=True needs tensor_parallel_size above 1 (it shards norms over the tensor-parallel axis); "
                "for long sequences see context_parallel_size"
            )
        if self.loss_parallel and self.tensor_parallel_size == 1:
            wrong.append("loss_parallel=True needs tensor_parallel_size above 1: nothing shards the vocabulary otherwise")
        wrong += self._check_pipeline() + self._check_context()
        if (self.global_batch_size is None) != (self.microbatch_size is None) and self.pipeline_parallel_size == 1:
            wrong.append(
                f"global_batch_size={self.global_batch_size} and microbatch_size={self.microbatch_size}: give both (the accumulation is "
                "derived from them) or neither (the loader's batch and accumulate_grad_batches hold)"
            )
        return wrong

    def _check_pipeline(self) -> list[str]:
        wrong = []
        schedule, stages = schedule_name(self.pipeline_schedule), self.pipeline_stages_per_rank
        if self.pipeline_parallel_size == 1:
            given = {"pipeline_schedule": "1F1B", "pipeline_stages_per_rank": 1, "pipeline_split": "auto"}
            for name, default in given.items():
                value = schedule if name == "pipeline_schedule" else getattr(self, name)
                if value != default:
                    wrong.append(f"{name}={value!r} needs pipeline_parallel_size above 1: there is no pipeline otherwise")
            return wrong
        if schedule in LOOPED_SCHEDULES and stages == 1:
            wrong.append(f"pipeline_schedule={schedule!r} alternates between stages of a rank: set pipeline_stages_per_rank=2 or more")
        elif schedule in V_SCHEDULES and stages != 2:
            wrong.append(f"pipeline_schedule={schedule!r} goes down and up again: set pipeline_stages_per_rank=2 (it is {stages})")
        elif schedule not in LOOPED_SCHEDULES + V_SCHEDULES and stages != 1:
            names = ", ".join(LOOPED_SCHEDULES + V_SCHEDULES)
            wrong.append(
                f"pipeline_stages_per_rank={stages}: pipeline_schedule={schedule!r} has one stage on each rank; use 1, or one of {names}"
            )
        if self.global_batch_size is not None and not wrong:
            micro = self.microbatch_size or 1
            if self.global_batch_size % micro:
                wrong.append(f"global_batch_size={self.global_batch_size} is no multiple of microbatch_size={micro}")
        return wrong

    def _check_context(self) -> list[str]:
        if self.context_parallel_size == 1:
            return [
                f"{name}={getattr(self, name)!r} needs context_parallel_size above 1: rows lie whole on a rank otherwise"
                for name in ("context_parallel_method", "context_parallel_layout", "attention_backend")
                if getattr(self, name) != "auto"
            ]
        wrong = []
        if self.label_alignment is None:
            wrong.append(
                f"context_parallel_size={self.context_parallel_size} needs label_alignment, for each rank sees part of a row: "
                "'aligned' (the target of position i stands at i), 'shift' (at i + 1, and the step or model shifts), or 'huggingface' "
                "(at i + 1, and the model takes shift_labels)"
            )
        if self.context_parallel_method == "ring+ulysses" and ulysses_size(self.context_parallel_size) == 1:
            wrong.append(
                f"context_parallel_method='ring+ulysses' splits context_parallel_size={self.context_parallel_size} into two factors, and "
                "it has none: use a size such as 4, 6 or 8, or 'ring'"
            )
        return wrong

    def check_microbatches(self, microbatches: int) -> list[str]:
        """The rules on how many microbatches go through a pipeline in one step."""
        schedule, ranks = schedule_name(self.pipeline_schedule), self.pipeline_parallel_size
        count = f"{microbatches} microbatch{'es'[: 2 * (microbatches != 1)]}"
        rows = f"the loader's batch makes {count} of microbatch_size={self.microbatch_size or 1}"
        if schedule == "1F1B" and microbatches < ranks:
            return [f"{rows}, and pipeline_schedule='1F1B' needs at least pipeline_parallel_size={ranks}: give more rows, or use 'GPipe'"]
        rounds = max(1, microbatches // ranks)
        if schedule in LOOPED_SCHEDULES and (microbatches < ranks or microbatches % rounds):
            near = f"{rounds * ranks} or {(rounds + 1) * ranks}"
            rule = f"pipeline_schedule={schedule!r} works in rounds of pipeline_parallel_size={ranks} microbatches"
            return [f"{rows}, and {rule}: use {near} microbatches"]
        return []

    def _check_batch(self, world_size: int) -> list[str]:
        replicate, shard = self._data_parallel(world_size)
        assert self.global_batch_size is not None
        micro = self.microbatch_size or 1
        unit = micro * replicate * shard
        if self.global_batch_size % unit == 0:
            return []
        below = self.global_batch_size // unit * unit
        near = f"{below} or {below + unit}" if below else f"{unit}"
        product = f"microbatch_size {micro} x data-parallel size {replicate * shard} = {unit}"
        return [f"global_batch_size={self.global_batch_size} is no multiple of {product}: nearest {near}"]

    def _data_parallel(self, world_size: int) -> tuple[int, int]:
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


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _near_divisors(number: int, wanted: int) -> str:
    """The divisors of ``number`` on both sides of ``wanted``."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    below = [size for size in divisors if size <= wanted][-1:]
    above = [size for size in divisors if size > wanted][:1]
    return " or ".join(map(str, below + above))


def ulysses_size(context_parallel_size: int) -> int:
    """How many neighbouring ranks exchange heads for tokens under "ring+ulysses": the largest divisor of the axis up to its square root,
    so that both message sizes shrink."""
    return max(
        size for size in range(1, context_parallel_size + 1) if context_parallel_size % size == 0 and size**2 <= context_parallel_size
    )
