"""Torch's pipeline schedules driven by recorded calls: a stage replays what the step called the model with, one call per microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _add_send_recv,
    _add_unshard_reshard,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from lightning_megascale.parallel.data import units_of
from lightning_megascale.parallel.pipeline import Call, Chunk, Pipeline
from lightning_megascale.parallel.pipeline_functions import weight_functions


@dataclass(frozen=True)
class Boundary:
    """What leaves a stage for one microbatch.

    Args:
        shape, dtype: of the tensor as it lies on this rank (a shard of the sequence under sequence parallelism).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, requires_grad: bool) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=requires_grad)


class CallStage(PipelineStage):
    """A stage whose forward replays recorded calls; the schedule carries nothing but hidden states.

    Args:
        chunk: the stage's forward.
        index, stages: of the pipeline stage, and how many there are.
        received, sent: what crosses its two boundaries; None at the ends.
        device, group: of the pipeline axis.
        before_forward: called with (stage, microbatch) before each forward.
        before_backward: called with (microbatch) before each backward, which may compute a part of the forward again.
        reduce_every: gradients are summed over the data-parallel ranks after each microbatch, and kept sharded.
        reshard: parameters are freed after each backward too, and gathered again for the next.
    """

    def __init__(
        self,
        chunk: Chunk,
        index: int,
        stages: int,
        received: Tensor | None,
        sent: Tensor | None,
        device: torch.device,
        group: dist.ProcessGroup,
        before_forward: Callable[[int, int], None],
        before_backward: Callable[[int], None],
        reduce_every: bool,
        reshard: bool,
    ) -> None:
        nothing = torch.empty(1, device="meta")
        super().__init__(
            chunk,
            index,
            stages,
            device,
            input_args=nothing if received is None else received,
            output_args=nothing if sent is None else sent,
            group=group,
        )
        self._runtime_validate = False  # the ends carry no tensor, so there is nothing to compare there
        self.calls: Sequence[Call] = ()
        self.microbatch = 0
        self.weight_functions: list[str] | None = None
        self._before_forward, self._before_backward, self._reduce_every, self._reshard = (
            before_forward,
            before_backward,
            reduce_every,
            reshard,
        )
        self._units = units_of(chunk)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._before_backward(bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *received: Any, **_: Any) -> Any:
        self._before_forward(self.stage_index, self.microbatch)
        output = self.submod(*received, call=self.calls[self.microbatch])
        if self.weight_functions is None:
            outputs = output if isinstance(output, tuple) else (output,)
            self.weight_functions = weight_functions(outputs, self.submod.parameters())
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self.is_last else super().get_fwd_send_ops(fwd_chunk_id)  # any number of tensors leave the last stage

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        gradients = self.bwd_cache.get(bwd_chunk_id, ())
        self.bwd_cache[bwd_chunk_id] = tuple(None if gradient is None else gradient.contiguous() for gradient in gradients)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        """As torch's, which never frees parameters before the schedule ends nor reduces gradients earlier, unless it is asked to."""
        if backward_type != "full" or not (self._reduce_every or self._reshard):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        for unit in self._units:
            unit.set_requires_gradient_sync(self._reduce_every, recurse=False)
            unit.set_requires_all_reduce(self._reduce_every and last_backward, recurse=False)
            unit.set_is_last_backward(self._reduce_every and last_backward)
            unit.set_reshard_after_backward(self._reshard or (self._reduce_every and last_backward), recurse=False)
        return stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward and not self._reduce_every:
            super().perform_reduce_grad(grad_scale_factor)

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was run to learn the shapes, and gradients of earlier schedule calls must stay."""


class ForwardOnly(_PipelineScheduleRuntime):
    """All microbatches through all stages without a backward, for any placement of stages."""

    def __init__(self, stages: list[CallStage], microbatches: int, owners: Sequence[int], loss_fn: Callable[..., Tensor]) -> None:
        super().__init__(stages, microbatches, loss_fn=loss_fn, scale_grads=False)
        self._has_backward = False
        order: dict[int, list[_Action | None]] = {}
        for rank in range(stages[0].group_size):
            mine = [stage for stage, owner in enumerate(owners) if owner == rank]
            order[rank] = [_Action(stage, _ComputationType.FORWARD, number) for stage in mine for number in range(microbatches)]
        self.pipeline_order = order
        self.stage_index_to_group_rank = dict(enumerate(owners))  # torch's own preparation wants a backward for each forward
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        lowered = {rank: _add_unshard_reshard(actions) for rank, actions in order.items()}
        self.pipeline_order_with_comms = _add_send_recv(lowered, lambda stage: owners[stage], len(owners))


def build_schedule(
    pipeline: Pipeline,
    schedule: str,
    microbatches: int,
    boundaries: Sequence[Boundary],
    *,
    device: torch.device,
    group: dist.ProcessGroup,
    loss_fn: Callable[[Any, Tensor], Tensor],
    before_forward: Callable[[int, int], None],
    before_backward: Callable[[int], None],
    train: bool,
    reduce_every: bool = False,
    reshard: bool = False,
) -> tuple[_PipelineSchedule, list[CallStage]]:
    """A schedule over this rank's stages, for one shape of microbatch.

    Args:
        pipeline: this rank's stages.
        schedule: torch's name, case-insensitive.
        microbatches: how many go through in one call.
        boundaries: what leaves each stage but the last.
        device, group: of the pipeline axis.
        loss_fn: (the model's output, microbatch number as a 0-dim tensor) -> loss; called on the last stage only.
        before_forward, before_backward: see ``CallStage``.
        train: False: forward only.
        reduce_every, reshard: see ``CallStage``.
    """
    total = len(pipeline.stages)
    stages = []
    for index, chunk in zip(pipeline.own_stages, pipeline.chunks):
        received = None if index == 0 else boundaries[index - 1].empty(train and pipeline.trains[index - 1])
        sent = None if index == total - 1 else boundaries[index].empty(train and pipeline.trains[index])
        stages.append(CallStage(chunk, index, total, received, sent, device, group, before_forward, before_backward, reduce_every, reshard))
    if not train:
        return ForwardOnly(stages, microbatches, pipeline.stages.owners, loss_fn), stages
    kind = get_schedule_class(schedule)
    single = issubclass(kind, PipelineScheduleSingle)
    return kind(stages[0] if single else stages, microbatches, loss_fn=loss_fn, scale_grads=False), stages


def run_schedule(schedule: _PipelineSchedule, stages: Sequence[CallStage], calls: Sequence[Call], has_last: bool) -> None:
    """One pass of all microbatches.

    Args:
        schedule, stages: of ``build_schedule``.
        calls: what the step called the model with, one for each microbatch.
        has_last: this rank runs the last stage, so it computes losses.
    """
    for stage in stages:
        stage.calls = calls
    try:
        schedule.step(return_outputs=False, target=torch.arange(len(calls)) if has_last else None)
    finally:
        for stage in stages:
            stage.calls = ()
            stage.clear_runtime_states()


def reshard_stages(pipeline: Pipeline) -> None:
    """Frees the gathered parameters that a forward without backward left."""
    for chunk in pipeline.chunks:
        for unit in chunk.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
