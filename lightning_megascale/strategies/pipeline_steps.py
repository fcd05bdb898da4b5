"""A LightningModule's step through a pipeline: its model call is captured for each microbatch and replayed by the stages' schedule.

``training_step`` runs up to ``self.model(...)`` on every rank, which gives the call to replay; on the last stage's rank it runs again with
the model's output in place of the call, which gives the loss. Both runs draw the same random numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_megascale.mesh import MeshViews
from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, set_microbatch_weight
from lightning_megascale.parallel.context import Context
from lightning_megascale.parallel.context_call import prepare_call
from lightning_megascale.parallel.layouts import is_published
from lightning_megascale.parallel.loss_scale import Weights, documents_of, real_tokens, rows_of, tokens_of, weigh, weighted
from lightning_megascale.parallel.microbatches import first_rows, split_rows
from lightning_megascale.parallel.mixin import become
from lightning_megascale.parallel.pipeline import Call, Pipeline
from lightning_megascale.parallel.pipeline_boundaries import infer_boundaries
from lightning_megascale.parallel.pipeline_functions import uses_parameters
from lightning_megascale.parallel.pipeline_schedule import CallStage, build_schedule, reshard_stages, run_schedule
from lightning_megascale.parallel.published_calls import check_call
from lightning_megascale.parallel.rng import kept_generators, seed_stage, seed_step
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.strategies import pipeline_guards as guards
from lightning_megascale.strategies.pipeline_logs import LogRecorder, MetricStates, NoLog, Results
from lightning_megascale.strategies.pipeline_proof import LossProof, is_opaque
from lightning_megascale.strategies.pipeline_state import ModuleState
from lightning_megascale.strategies.steps import read_output, share_tokens
from lightning_megascale.support import ZERO_BUBBLE_SCHEDULES, schedule_name

_KEPT_SCHEDULES = 4  # shapes of a batch that are remembered: each holds its receive buffers


class _Captured(BaseException):
    """Carries a model call out of a step. No Exception: the step's own ``except`` must not swallow it."""

    def __init__(self, call: Call) -> None:
        super().__init__("model call")
        self.call = call


@dataclass
class _Switch:
    """What a call of the pipelined model does: None refuses it, "capture" records it, "answer" hands out the pipeline's output."""

    mode: str | None = None
    answer: Any = None
    answered: int = 0


class Piped:
    """The user's model while its stages lie on several ranks; its class is put before the model's own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        switch: _Switch = self.__dict__["_pipeline_switch"]
        if switch.mode == "capture":
            raise _Captured((args, kwargs))
        if switch.mode is None:
            raise ValueError(guards.OUTSIDE.format(model=type(self).__name__))
        switch.answered += 1
        if switch.answered > 1:
            raise ValueError(guards.SECOND_CALL.format(model=type(self).__name__))
        answer, switch.answer = switch.answer, None
        return answer

    forward = __call__


@dataclass
class _Work:
    """One call of a step: its microbatches and what the last stage makes of them."""

    step: Callable[..., Any]
    parts: list[Any]
    rest: tuple[Any, ...]
    number: int
    train: bool
    results: list[Any] = field(default_factory=list)
    weights: list[float | Tensor] = field(default_factory=list)
    sums: Tensor | None = None
    logs: list[LogRecorder] = field(default_factory=list)
    error: Exception | None = None
    auxiliary: list[MicrobatchWeight] = field(default_factory=list)
    tokens: list[Tensor | None] = field(default_factory=list)
    counts_otherwise: bool = False
    rows: int = 0
    before: dict[str, Any] = field(default_factory=dict)
    batch: Any = None


class PipelineSteps:
    """Runs training, validation, test and prediction steps of a module whose model is cut into stages.

    Args:
        module: the LightningModule.
        model: its pipelined child.
        pipeline: this rank's stages.
        plan, views, device, seed: of the run.
        output_dtype: floating outputs of the model are cast to it (mixed precision); None leaves them.
        agree: (numbers) -> the largest over all ranks of each; host data, never waits for a device.
        context: what attention reads, under context parallelism.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        model: nn.Module,
        pipeline: Pipeline,
        plan: ParallelPlan,
        views: MeshViews,
        device: torch.device,
        seed: int,
        output_dtype: torch.dtype | None,
        agree: Callable[[Sequence[float]], list[float]],
        context: Context | None = None,
    ) -> None:
        assert views.pipeline is not None
        self.pipeline, self.num_microbatches = pipeline, 0
        self._module, self._plan, self._views, self._device, self._seed = module, plan, views, device, seed
        self._group = views.pipeline.get_group()
        self._output_dtype, self._agree, self._context = output_dtype, agree, context
        self._switch = _Switch()
        if not isinstance(model, Piped):  # it is one from an earlier Trainer's run
            become(model, Piped)
        model.__dict__["_pipeline_switch"] = self._switch
        self._model = model
        self._built: OrderedDict[Any, tuple[Any, list[CallStage]]] = OrderedDict()
        self._work: _Work | None = None
        self._metrics = MetricStates(module)
        self._state = ModuleState(module, model)
        self._proof = LossProof()
        self._results = Results(self._group, pipeline.last_owner, device)
        self._told: set[str] = set()
        self._looked = self._loss_checked = self._tokens_checked = False
        self._evaluated = 0  # batches so far, which their random numbers follow

    # ---- steps ---------------------------------------------------------------------------------------------------------

    def train(self, step: Callable[..., Any], batch: Any, rest: tuple[Any, ...], number: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of a batch.

        Args:
            step: the module's ``training_step``.
            batch, rest: its arguments.
            number: of training batches before this one, which its random numbers follow.

        Returns:
            the mean loss over the batch's rows, and the row of sums that ``LossScale`` counts; on every rank of the pipeline.
        """
        rows = self._rows(batch, "training_step")
        size = self._plan.microbatch_size or 1
        whole, most, least = self._agree([float(rows % size != 0), rows, -rows])
        guards.refuse_ragged(rows, size, bool(whole), int(most), int(-least), self._module.trainer.accumulate_grad_batches, self._plan)
        count = rows // size
        guards.raise_all(self._plan.check_microbatches(count))
        self.num_microbatches = count
        work = _Work(step, [], rest, number, train=True)
        calls = self._try_capture(work, batch, rows, count)
        if isinstance(calls, _NotCalled):
            calls = ValueError(guards.NO_CALL.format(step="training_step", model=type(self._model).__name__))
        self._run(work, calls)
        sums = self._share(work)
        assert sums is not None
        seed_step(self._seed, "after", number, self._views.data_parallel_rank)  # peers draw alike again, for the loader say
        return sums[4] / sums[0].clamp(min=1e-300), sums

    def evaluate(self, name: str, step: Callable[..., Any], batch: Any, rest: tuple[Any, ...]) -> Any:
        """Forward of a batch; returns what the step gave for the whole of it, on every rank of the pipeline."""
        rows = self._rows(batch, name)
        size = self._plan.microbatch_size or 1
        ragged, most, least = self._agree([float(rows % size != 0), rows, -rows])
        count = 1 if ragged or most != -least else rows // size
        work = _Work(step, [], rest, self._evaluated, train=False)
        self._evaluated += 1
        with kept_generators(self._device):
            calls = self._try_capture(work, batch, rows, count)
            if isinstance(calls, _NotCalled):
                return step(batch, *rest)  # no model call, nothing to pipeline
            self._run(work, calls)
        reshard_stages(self.pipeline)
        self._share(work)
        return self._results.share_output(work.results, work.weights, work.rows)

    # ---- capture -------------------------------------------------------------------------------------------------------

    def _rows(self, batch: Any, step: str) -> int:
        rows = rows_of(batch)
        if not rows:
            raise ValueError(f"the batch of {step} holds no tensor with rows, so it cannot be cut into microbatches")
        return rows

    def _try_capture(self, work: _Work, batch: Any, rows: int, count: int) -> list[Call] | _NotCalled | Exception:
        """Cuts the batch and captures its calls. An error may be this rank's alone, so it is not raised before all ranks know."""
        try:
            work.parts, work.batch, work.rows = split_rows(batch, rows, count), batch, rows // count
            work.before = self._state.snapshot()
            calls = self._capture(work)
            work.auxiliary = [self._microbatch(work, number, part) for number, part in enumerate(work.parts)]
            return calls
        except Exception as error:  # noqa: BLE001 - raised on all ranks together
            return error

    def _microbatch(self, work: _Work, number: int, part: Any) -> MicrobatchWeight:
        """What layers read of a microbatch: the weight of its loss, and which of its tokens are no padding."""
        if self._context is not None and self._context.whole is not None and self._context.probe is None:
            tokens: Tensor | None = self._context.whole.part(number * work.rows, work.rows).document_ids >= 0
        else:
            tokens = real_tokens(part)
        documents = documents_of(part) if self._context is None else None
        if not work.train:
            return MicrobatchWeight(1.0, tokens=tokens, documents=documents)
        weights = self._weigh(part)
        weight = MicrobatchWeight(None if weights is None else weights.used, 1.0, tokens, documents)
        work.tokens.append(tokens.sum() if tokens is not None else tokens_of(part))
        return weight

    def _capture(self, work: _Work) -> list[Call] | _NotCalled:
        """The model's arguments for each microbatch."""
        calls: list[Call] = []
        self._switch.mode = "capture"
        try:
            with LogRecorder(self._module), self._parameters_apart():
                for number, part in enumerate(work.parts):
                    self._seed_part(work, number)
                    try:
                        work.step(part, *work.rest)
                        return _NotCalled()
                    except _Captured as captured:
                        call = captured.call
                        if is_published(self._model):
                            check_call(self._model, self._plan, call[1])
                        calls.append(call if self._context is None else self._prepared(call))
        finally:
            self._switch.mode = None
            self._state.restore(work.before)
        shapes = [_shapes(call) for call in calls]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(guards.UNEQUAL_CALLS.format(first=shapes[0], other=next(s for s in shapes if s != shapes[0])))
        return calls

    @contextmanager
    def _parameters_apart(self) -> Iterator[None]:
        """A step that goes over all parameters (a penalty, a norm to log) would see this rank's only; the first tells device and dtype."""
        owners = (self._module, self._model)
        for owner in owners:
            owner.__dict__["named_parameters"] = partial(_first_parameter, type(owner).named_parameters, owner)
        try:
            yield
        finally:
            for owner in owners:
                owner.__dict__.pop("named_parameters", None)

    def _seed_part(self, work: _Work, number: int) -> None:
        """Both runs of a microbatch's step draw the same, on all ranks of the pipeline."""
        self._select(work, number)
        seed_step(self._seed, "microbatch", work.number * len(work.parts) + number, self._views.token_rank)

    def _prepared(self, call: Call) -> Call:
        assert self._context is not None
        forward = super(Piped, self._model).forward  # type: ignore[misc]  # of the user's class
        return prepare_call(self._model, self._context, *call, forward=forward)

    def _select(self, work: _Work, number: int) -> None:
        """Which rows attention works on."""
        if self._context is not None and self._context.probe is None:
            self._context.select(number * work.rows, work.rows)

    # ---- the schedule --------------------------------------------------------------------------------------------------

    def _run(self, work: _Work, calls: list[Call] | Exception) -> None:
        failed = isinstance(calls, Exception)
        key = None if isinstance(calls, Exception) else (work.train, len(calls), _shapes(calls[0]))
        is_new, any_failed = self._agree([float(not failed and key not in self._built), float(failed)])
        if isinstance(calls, Exception) or any_failed:
            raise self._error_of_all(calls)
        if is_new:
            self._select(work, 0)
            self._build(key, calls[0])
        self._built.move_to_end(key)
        schedule, stages = self._built[key]
        self._work = work
        if work.train:
            self._share_tokens(work)
        try:
            with self._metrics.over_batch(), NoLog(self._module):
                run_schedule(schedule, stages, calls, self.pipeline.has_last)
        finally:
            self._work = None
            set_microbatch_weight(MicrobatchWeight(1.0))
        if work.train and not self._tokens_checked:
            self._check_tokens(work)
        if work.train and not self._looked and schedule_name(self._plan.pipeline_schedule) in ZERO_BUBBLE_SCHEDULES:
            self._looked = True
            self._refuse_weight_functions(stages)

    def _share_tokens(self, work: _Work) -> None:
        """Backwards begin before the last forwards, so what a token weighs comes from the batch."""
        labels = [weight.value for weight in work.auxiliary if isinstance(weight.value, Tensor)]
        if len(labels) == len(work.auxiliary):
            loss = self._views.loss
            share_tokens(work.auxiliary, work.tokens, torch.stack(labels).sum(), loss.get_group() if loss.size() > 1 else None)

    def _check_tokens(self, work: _Work) -> None:
        """After the first step: layers with a loss of their own must have seen the tokens that the batch told of."""
        self._tokens_checked = True
        slices = int(self._plan.tensor_parallel_size) if self._plan.sequence_parallel else 1
        wrong = ""
        for weight, told in zip(work.auxiliary, work.tokens):
            if weight.seen is None or weight.tokens is not None:
                continue
            seen = int(weight.seen) * slices
            if told is None or int(told) != seen:
                wrong = guards.AUXILIARY_TOKENS.format(seen=seen, told="nothing" if told is None else int(told))
        if self._agree([float(bool(wrong))])[0]:
            raise ValueError(wrong or guards.FAILED_ELSEWHERE.format(text=guards.AUXILIARY_TOKENS.format(seen="others", told="others")))

    def _error_of_all(self, calls: list[Call] | Exception) -> Exception:
        """This rank's own error, or one with the words of the rank that has one."""
        own = calls if isinstance(calls, Exception) else None
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, None if own is None else f"{type(own).__name__}: {own}", group=self._group)
        text = next((text for text in everyone if text is not None), "see the log of the other data-parallel ranks")
        return own or ValueError(guards.FAILED_ELSEWHERE.format(text=text))

    def _refuse_weight_functions(self, stages: list[CallStage]) -> None:
        """After the first zero-bubble schedule: its numbers are right, and part of its backward ran twice."""
        found = sorted({name for stage in stages for name in stage.weight_functions or ()})
        if self._agree([float(bool(found))])[0]:
            everyone: list[Any] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(everyone, found, group=self._group)
            names = ", ".join(dict.fromkeys(name for names in everyone for name in names))
            raise ValueError(guards.WEIGHT_FUNCTION.format(names=names, schedule=schedule_name(self._plan.pipeline_schedule)))

    def _build(self, key: Any, call: Call) -> None:
        """A schedule for one shape of microbatch; on all ranks together."""
        train, count, _ = key
        boundaries = infer_boundaries(self.pipeline, call, self._device, self._group)
        self._built[key] = build_schedule(
            self.pipeline,
            self._plan.pipeline_schedule,
            count,
            boundaries,
            device=self._device,
            group=self._group,
            loss_fn=self._loss,
            before_forward=self._before_forward,
            before_backward=self._before_backward,
            train=train,
            reduce_every=self._plan.reduce_gradients == "every",
            reshard=self._plan.reshard_after_forward is True,
        )
        while len(self._built) > _KEPT_SCHEDULES:
            self._built.popitem(last=False)

    def _before_forward(self, stage: int, number: int) -> None:
        assert self._work is not None
        set_microbatch_weight(self._work.auxiliary[number])
        self._select(self._work, number)
        seed_stage(self._seed, self._work.number * len(self._work.parts) + number, self._views.token_rank, stage)

    def _before_backward(self, number: int) -> None:
        assert self._work is not None
        set_microbatch_weight(self._work.auxiliary[number])  # recomputation reads it again
        self._select(self._work, number)

    # ---- the loss, on the last stage -----------------------------------------------------------------------------------

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        """The rest of the step for one microbatch. An error waits until the schedule has ended, or the other ranks would wait for ever."""
        work = self._work
        assert work is not None
        index = int(number)
        nothing = sum((leaf.double().sum() * 0 for leaf in output if leaf.requires_grad), torch.zeros((), dtype=torch.float64))
        if work.error is not None:
            return nothing
        try:
            return self._replay(work, index, self.pipeline.chunks[-1].rebuild(output))
        except Exception as error:  # noqa: BLE001 - raised on all ranks once the schedule has ended
            work.error = error
            return nothing

    def _replay(self, work: _Work, index: int, output: Any) -> Tensor:
        part = work.parts[index]
        if self._output_dtype is not None:
            output = tree_map_only(Tensor, lambda t: t.to(self._output_dtype) if t.is_floating_point() else t, output)
        self._seed_part(work, index)
        self._switch.mode, self._switch.answer, self._switch.answered = "answer", output, 0
        try:
            with LogRecorder(self._module) as logs, self._parameters_apart():
                result = work.step(part, *work.rest)
        finally:
            self._switch.mode, self._switch.answer = None, None
        work.logs.append(logs)
        if not work.train:
            work.results.append(tree_map_only(Tensor, Tensor.detach, result))
            weights = self._weigh(part)
            work.weights.append(1.0 if weights is None else weights.used)
            return torch.zeros(())
        result, loss, given = read_output(result)
        if loss is None or not loss.requires_grad:
            raise ValueError(guards.NO_LOSS)
        if not self._loss_checked:
            self._loss_checked = True
            leaves = tree_leaves(output)
            if not is_opaque(leaves) and uses_parameters(loss, leaves):
                raise ValueError(guards.PARAMETERS)
        weights = given or self._weigh(part)
        if weights is None:
            raise ValueError(guards.NO_WEIGHT)
        weights = weights.rounded_to(loss)
        expected = work.auxiliary[index].value
        work.counts_otherwise |= given is not None and (expected is None or float(expected) != float(weights.used))
        self._tell_extras(result)
        self._proof.note(index, work.rows, output, loss.detach(), weights.used, partial(self._loss_of_two, work))
        row = weights.products(loss.detach())
        work.sums = row if work.sums is None else work.sums + row
        work.weights.append(weights.used)
        return weighted(loss, weights.used)

    def _loss_of_two(self, work: _Work, output: Any) -> Tensor | None:
        """The step's mean loss on microbatches 0 and 1 together; None when it draws random numbers, which would be others."""
        part = first_rows(work.batch, work.rows * len(work.parts), 2 * work.rows)
        kept, metrics = self._state.snapshot(), self._metrics.snapshot()
        drawn = torch.get_rng_state()
        self._metrics.is_muted = True
        self._switch.mode, self._switch.answer, self._switch.answered = "answer", output, 0
        try:
            with LogRecorder(self._module), self._parameters_apart():
                _, loss, _ = read_output(work.step(part, *work.rest))
            draws = not torch.equal(drawn, torch.get_rng_state())
        finally:
            self._switch.mode, self._switch.answer = None, None
            self._state.restore(kept)
            self._metrics.restore(metrics)
            self._metrics.is_muted = False
            torch.set_rng_state(drawn)
        return None if draws else loss

    def _weigh(self, part: Any) -> Weights | None:
        return weigh(part, self._plan.loss_weight, self._plan.label_alignment, self._device)

    def _tell_extras(self, result: Any) -> None:
        extra = sorted(set(result) - {"loss", "loss_sum", "num_tokens"}) if isinstance(result, dict) else []
        if extra and "extras" not in self._told:
            self._told.add("extras")
            guards.log.warning(
                "training_step also returned %s: under a pipeline only the loss reaches on_train_batch_end", ", ".join(extra)
            )

    # ---- results on every rank -----------------------------------------------------------------------------------------

    def _share(self, work: _Work) -> Tensor | None:
        """Gives every rank of the pipeline the sums, the logged values and the metrics of the last stage; raises its error on all."""
        changed = self._state.changes(work.before) if self.pipeline.has_last else {}
        trainer = self._module.trainer
        marks = (work.counts_otherwise, bool(changed), bool(trainer.should_stop))
        sums, logs, (counts_otherwise, has_changes, should_stop) = self._results.share(
            work.sums, work.logs, work.weights, work.error, marks
        )
        trainer.should_stop = trainer.should_stop or should_stop  # a step may have asked for it
        self._state.share(changed, has_changes, self._group, self.pipeline.last_owner, self._device)
        if counts_otherwise and any(weight.is_used for weight in work.auxiliary):
            raise ValueError(guards.AUXILIARY_WEIGHT)
        self._metrics.share(self._group, self.pipeline.last_owner)
        for entry in logs:
            entry.log(self._module)
        return sums


def _first_parameter(
    named_parameters: Callable[..., Any], owner: nn.Module, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, nn.Parameter]]:
    for place, entry in enumerate(named_parameters(owner, *args, **kwargs)):
        if place:
            raise ValueError(guards.PARAMETERS)
        yield entry


class _NotCalled:
    """The step never called the model."""


def _shapes(call: Call) -> tuple[Any, ...]:
    """What a schedule depends on: shapes and dtypes of the tensors in a call."""
    return tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in tree_leaves(call))
