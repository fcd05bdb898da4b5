"""One rank's model, taken through the functions that the strategy calls, and one optimizer step of it. Under fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megascale.mesh import MeshViews
from lightning_megascale.module import MegascaleModule
from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, set_microbatch_weight
from lightning_megascale.optim import build_optimizer
from lightning_megascale.parallel.clip import clip_grad_norm_
from lightning_megascale.parallel.context import Context
from lightning_megascale.parallel.context_batch import SequenceCut
from lightning_megascale.parallel.context_call import prepare_call
from lightning_megascale.parallel.data import postponed_reduction, reduce_remaining, remaining
from lightning_megascale.parallel.layouts import find_layout, target_of
from lightning_megascale.parallel.loss_scale import Agreement, LossScale, Weights, weighted
from lightning_megascale.parallel.model_check import check_model
from lightning_megascale.parallel.parallelize import Parallelized, parallelize
from lightning_megascale.parallel.pipeline import standing_in
from lightning_megascale.parallel.pipeline_schedule import Boundary, CallStage, build_schedule, run_schedule
from lightning_megascale.parallel.tied import sum_tied_gradients
from lightning_megascale.strategies.precision import reduction_dtype
from lightning_megascale.strategies.steps import drop_parameters
from lightning_megascale.verification.dryrun.subject import Subject

_PRECISIONS = {
    "32-true": (torch.float32, None),
    "bf16-true": (torch.bfloat16, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "64-true": (torch.float64, None),
}
"""Lightning's name -> (dtype of parameters, FSDP2's ``param_dtype``), as ``strategies.precision`` has it."""


def check_precision(precision: str) -> None:
    """Raises ValueError for a precision that no plan runs in."""
    if precision not in _PRECISIONS:
        raise ValueError(f"trainer.precision={precision}: must be one of {', '.join(_PRECISIONS)}")


def meta_module(subject: Subject) -> MegascaleModule:
    """The LightningModule around the decoder, on the meta device."""
    module = MegascaleModule(model=asdict(subject.config), optimizer=subject.optimizer)
    with torch.device("meta"):
        module.configure_model()
    return module.to(_PRECISIONS[subject.precision][0])


def problems(subject: Subject) -> list[str]:
    """Every rule that the model violates under its plan."""
    module = meta_module(subject)
    _, target = target_of(module, "auto")
    return check_model(module, target, subject.plan, find_layout(target, "auto", tensor_parallel=True, expert_parallel=True))


@dataclass
class RankModel:
    """What a rank holds.

    Args:
        subject: the run.
        views: its mesh.
        module, target, done: the LightningModule, its decoder, and what was done to it.
        optimizer: over this rank's parameters.
        device: of all tensors.
        context: what attention reads, under context parallelism.
        length: tokens of a row that this rank holds, before tensor parallelism splits them.
    """

    subject: Subject
    views: MeshViews
    module: MegascaleModule
    target: nn.Module
    done: Parallelized
    optimizer: Optimizer
    device: torch.device
    context: Context | None
    length: int

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    @property
    def compute_dtype(self) -> torch.dtype:
        own, mixed = _PRECISIONS[self.subject.precision]
        return mixed or own


def build(subject: Subject, views: MeshViews, fake: Any) -> RankModel:
    """Builds and parallelizes as ``MegascaleStrategy`` does; values are never drawn.

    Args:
        subject, views: of the run.
        fake: the FakeTensorMode in which tensors get their storages.
    """
    module = meta_module(subject)
    _, target = target_of(module, "auto")
    plan = subject.plan
    layout = find_layout(target, "auto", tensor_parallel=plan.tensor_parallel_size > 1, expert_parallel=plan.expert_parallel_size > 1)
    param_dtype = _PRECISIONS[subject.precision][1]
    dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduction_dtype(module, param_dtype, plan.reduce_dtype)}
    device = torch.device(views.root.device_type)
    context, length = _context(subject, views, device)
    done = parallelize(module, target, plan, views, layout, context=context, **dtypes)
    with fake:
        module.to_empty(device=device)
        with standing_in(module) as absent:
            optimizer = build_optimizer(module.named_parameters(), all_names=done.trainable, **subject.optimizer)
        drop_parameters([optimizer], absent)
    return RankModel(subject, views, module, target, done, optimizer, device, context, length)


def _context(subject: Subject, views: MeshViews, device: torch.device) -> tuple[Context | None, int]:
    """What attention reads, with rows of one document each laid out, and the tokens that this rank holds of a row."""
    if views.context is None:
        return None, subject.sequence_length
    plan = subject.plan
    cut = SequenceCut(
        views.sizes["cp"],
        views.context_rank,
        plan.context_parallel_layout,
        plan.label_alignment,
        plan.tensor_parallel_size if plan.sequence_parallel else 1,
    )
    rows = torch.zeros(subject.rows, subject.sequence_length, dtype=torch.int64)  # real ones: index maths reads them
    batch, shard = cut({"input_ids": rows, "labels": rows.clone()})
    context = Context(views, plan.context_parallel_method, plan.attention_backend, device)
    context.begin(shard)
    return context, batch["input_ids"].shape[1]


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Watch:
    """What a schedule does, in order, and how many forwards are kept at a time."""

    def __init__(self) -> None:
        self.trace: list[str] = []
        self.kept = self.most = 0

    def attach(self, stage: CallStage, boundary: Boundary | None) -> None:
        """Wraps the three halves of a stage's work; what leaves its forward must be what its receiver waits for."""

        def around(name: str, letter: Callable[[dict[str, Any]], str]) -> None:
            inner = getattr(stage, name)

            def call(number: int, *args: Any, **kwargs: Any) -> Any:
                result = inner(number, *args, **kwargs)
                what = letter(kwargs)
                self.trace.append(f"{what}{stage.stage_index}.{number}")
                self.kept += {"F": 1, "B": -1, "W": -1}.get(what, 0)
                self.most = max(self.most, self.kept)
                if what == "F" and boundary is not None:
                    assert tuple(result.shape) == boundary.shape and result.dtype == boundary.dtype, (result.shape, boundary)
                return result

            setattr(stage, name, call)

        around("forward_one_chunk", lambda kwargs: "F")
        around("backward_one_chunk", lambda kwargs: "B" if kwargs.get("full_backward", True) else "I")
        around("backward_weight_one_chunk", lambda kwargs: "W")


class Step:
    """Optimizer steps of one rank with so many microbatches.

    Args:
        rank: its model.
        microbatches: of a step.
    """

    def __init__(self, rank: RankModel, microbatches: int) -> None:
        self.rank, self.microbatches, self.watch = rank, microbatches, Watch()
        self.batches = [self._batch() for _ in range(microbatches)]
        self._schedule: tuple[Any, list[CallStage]] | None = None
        if rank.done.pipeline is not None:
            self._schedule = self._build_schedule()

    def _batch(self) -> dict[str, Tensor]:
        shape = (self.rank.subject.rows, self.rank.length)
        return {key: torch.zeros(shape, dtype=torch.int64, device=self.rank.device) for key in ("input_ids", "labels")}

    def _build_schedule(self) -> tuple[Any, list[CallStage]]:
        rank, plan, pipeline = self.rank, self.rank.subject.plan, self.rank.done.pipeline
        assert pipeline is not None and rank.views.pipeline is not None
        length = rank.length // (plan.tensor_parallel_size if plan.sequence_parallel else 1)
        boundary = Boundary((rank.subject.rows, length, rank.subject.config.hidden_size), rank.compute_dtype)
        schedule, stages = build_schedule(
            pipeline,
            plan.pipeline_schedule,
            self.microbatches,
            [boundary] * (len(pipeline.stages) - 1),
            device=rank.device,
            group=rank.views.pipeline.get_group(),
            loss_fn=self._loss,
            before_forward=lambda stage, number: set_microbatch_weight(self._weight(number)),
            before_backward=lambda number: set_microbatch_weight(self._weight(number)),
            train=True,
            reduce_every=plan.reduce_gradients == "every",
            reshard=plan.reshard_after_forward is True,
        )
        for stage in stages:
            self.watch.attach(stage, None if stage.is_last else boundary)
        return schedule, stages

    def _weight(self, number: int) -> MicrobatchWeight:
        return MicrobatchWeight(1.0)

    def _call(self, batch: dict[str, Tensor]) -> tuple[tuple, dict[str, Any]]:
        """What the step calls the model with."""
        module, context = self.rank.module, self.rank.context
        call = (), {**module._inputs(batch), "labels": module._aligned_labels(batch)}
        return call if context is None else prepare_call(self.rank.target, context, *call)

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        """On the last stage: the weighted loss of one microbatch."""
        assert self.rank.done.pipeline is not None
        loss_sum, tokens = self.rank.done.pipeline.chunks[-1].rebuild(output)
        return self._weighted(loss_sum, tokens)

    def _weighted(self, loss_sum: Tensor, tokens: Tensor) -> Tensor:
        tokens = tokens.double()
        loss = loss_sum / tokens.to(loss_sum.dtype)
        self._scale.add(loss.detach(), Weights(tokens))
        return weighted(loss, tokens)

    def run(self) -> None:
        """Forward and backward of all microbatches, the open sums, the scale, clipping and the optimizer."""
        rank, self._scale = self.rank, LossScale()
        if self._schedule is not None:
            assert rank.done.pipeline is not None
            run_schedule(*self._schedule, [self._call(batch) for batch in self.batches], rank.done.pipeline.has_last)
        else:
            self._accumulate()
        set_microbatch_weight(MicrobatchWeight(1.0))
        self._finish()
        rank.optimizer.step()
        if rank.done.routers is not None:
            rank.done.routers.settle()

    def _accumulate(self) -> None:
        rank = self.rank
        last_only = rank.subject.plan.reduce_gradients == "last"
        for number, batch in enumerate(self.batches):
            is_last = number == self.microbatches - 1
            with nullcontext() if is_last else postponed_reduction(rank.done.units, last_only=last_only):
                set_microbatch_weight(self._weight(number))
                args, kwargs = self._call(batch)
                loss = self._weighted(*rank.target(*args, **kwargs))
                self.watch.trace.append(f"F0.{number}")
                loss.backward()
                self.watch.trace.append(f"B0.{number}")
        self.watch.most = 1

    def _finish(self) -> None:
        rank, done, views = self.rank, self.rank.done, self.rank.views
        if done.pipeline is not None and views.pipeline is not None:
            sum_tied_gradients(rank.target, done.pipeline, views.pipeline.get_group())
            if not done.pipeline.has_last:  # the strategy gives all ranks of the pipeline the sums of the last
                self._scale.add_row(torch.ones(5, dtype=torch.float64, device=rank.device))
        parameters = [parameter for group in rank.optimizer.param_groups for parameter in group["params"]]
        reduce_remaining(remaining(parameters, done.partial, views), parameters, views)
        self._scale.note(Agreement(0, 0.0))
        group = views.loss.get_group() if views.loss.size() > 1 else None
        self._scale.finish([parameter.grad for parameter in parameters if parameter.grad is not None], group)
        if rank.subject.clip is not None:
            pipeline = None if views.pipeline is None else views.pipeline.get_group()
            clip_grad_norm_(parameters, rank.subject.clip, pipeline=pipeline, copies=done.copies)
