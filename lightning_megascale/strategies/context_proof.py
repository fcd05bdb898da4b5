"""The first batch of a context-parallel run proves that model and loss may be cut along the sequence."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, set_microbatch_weight
from lightning_megascale.parallel.context import Context
from lightning_megascale.parallel.context_batch import SequenceCut
from lightning_megascale.parallel.context_names import names_of
from lightning_megascale.parallel.context_probe import Probe, probe_layout
from lightning_megascale.parallel.rng import kept_generators
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.strategies.context_trial import LOSS, NO_LABELS, NOT_ADDITIVE, OTHERWISE, Target, Trial, judge
from lightning_megascale.strategies.context_watch import OUTSIDE, SeamWatch, counted_labels
from lightning_megascale.strategies.pipeline_logs import LogRecorder, MetricStates
from lightning_megascale.strategies.pipeline_state import ModuleState
from lightning_megascale.strategies.pipeline_steps import PipelineSteps
from lightning_megascale.strategies.steps import read_output

log = logging.getLogger(__name__)

Step = Callable[..., Any]
_enabled = True  # for tests of what a first batch does not prove


class ContextProof:
    """Tries the first batch of one run and watches its first training step.

    Args:
        plan, device: of the run.
        context: what the model's attention reads.
        module, model: the LightningModule and its parallelized child.
        agree: (numbers) -> the largest over all ranks of each.
        multiple: as ``SequenceCut`` has it.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        device: torch.device,
        context: Context,
        module: pl.LightningModule,
        model: nn.Module,
        agree: Callable[[Sequence[float]], list[float]],
        multiple: int,
    ) -> None:
        self.context = context
        self._plan, self._device, self._agree, self._multiple = plan, device, agree, multiple
        self._module, self._model = module, model
        self._first: Any = None
        self._proved: set[str] = set()
        self._modes: list[tuple[nn.Module, bool]] = []

    def keep(self, batch: Any) -> None:
        """A whole batch, to be tried next: validation's first batch may have other keys than training's."""
        if not {"layout", "loss"} <= self._proved:
            self._first = batch

    def prove(self, step: Step | None, rest: tuple[Any, ...], pipeline: PipelineSteps | None) -> None:
        """At the first batch: the model follows the positions it is given, and the step scores the targets it is given.

        Args:
            step: the module's ``training_step``; None in other loops, whose losses train nothing.
            rest: its arguments after the batch.
            pipeline: runs steps through stages, where there are any.

        Raises:
            ValueError: on all ranks, in the words of the first that found something.
        """
        whole, wanted = self._first, {"layout"} | ({"loss"} if step is not None else set())
        if wanted <= self._proved or whole is None or not _enabled:
            return
        with self._aside(), torch.no_grad():
            if "layout" not in self._proved:
                with _stirred(self._module):
                    wrong = self._try_layout(whole, pipeline)
                self._raise_all(wrong)
            if "loss" in wanted:
                self._raise_all(self._try_loss(whole, step, rest, pipeline))  # type: ignore[arg-type]
        self._proved |= wanted
        if "loss" in self._proved:
            self._first = None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What runs inside leaves nothing: no logs, no metrics, no random numbers, no attributes."""
        module, state, metrics = self._module, ModuleState(self._module, self._model), MetricStates(self._module)
        before, kept = state.snapshot(), metrics.snapshot()
        modes = self._modes = [(m, m.training) for m in module.modules()]
        module.eval()
        metrics.is_muted = True
        set_microbatch_weight(MicrobatchWeight(1.0))
        try:
            with kept_generators(self._device), LogRecorder(module), torch.compiler.set_stance("force_eager"):
                yield  # compiled, every length of a trial would be compiled anew
        finally:
            self.context.probe = None
            state.restore(before)
            metrics.restore(kept)
            for child, training in modes:
                child.training = training

    def _try_layout(self, whole: Any, pipeline: PipelineSteps | None) -> list[str]:
        names = names_of(whole)
        if names.tokens.is_floating_point():
            return [
                "the batch holds inputs_embeds and no input_ids, so whether the model follows its position_ids cannot be tried on tokens"
            ]
        largest = int(self._agree([float(names.tokens.max())])[0])
        assert self.context.whole is not None
        unit = self._multiple
        tokens = max(8 * unit, min(256, self.context.whole.length) // unit * unit)  # as long as a row: lengths may be looked at

        needed: dict[str, Any] = {}
        for name in [] if pipeline is not None else _required(self._model):
            if name not in ("attention_mask", "position_ids"):
                return [
                    f"its forward needs {name} besides tokens, so whether it may be cut cannot be tried on tokens: give {name} a default"
                ]
            needed[name] = None  # filled in, or read from the batch

        def call(ids: Tensor, probe: Probe) -> Tensor | None:
            self.context.probe = probe
            if pipeline is None:
                return _first_tensor(self._model(ids, **needed), tokens)
            return pipeline.evaluate(
                "probe", lambda part, *_: _first_tensor(self._model(part["input_ids"]), tokens), {"input_ids": ids}, ()
            )

        if pipeline is not None:  # learns what crosses its boundaries, by forwards that must not be taken for the probe's
            nothing = torch.zeros(1, tokens, dtype=torch.int64, device=self._device)
            call(nothing, Probe(nothing, nothing))
        self._train_where_nothing_is_drawn(lambda: call(torch.zeros(1, tokens, dtype=torch.int64, device=self._device), _single(tokens)))
        self.context.reached.clear()
        counts = names.given.get("position_ids") is None
        wrong, missing = probe_layout(call, largest, tokens, self._device, counts, unit), self.context.missing
        if missing and not wrong:
            wrong.append(
                f"{', '.join(missing[:4])}: what attends there does not come through F.scaled_dot_product_attention, so it would see this "
                "rank's tokens only: call it in the forward of the module"
            )
        return wrong

    def _train_where_nothing_is_drawn(self, call: Callable[[], Any]) -> None:
        """What trains is tried, unless it draws random numbers, which would be others for each order of tokens."""
        before = torch.get_rng_state()
        for child, training in self._modes:
            child.training = training and not isinstance(child, nn.modules.dropout._DropoutNd)
        call()
        if self._agree([float(not torch.equal(before, torch.get_rng_state()))])[0]:
            self._module.eval()

    def _try_loss(self, whole: Any, step: Step, rest: tuple[Any, ...], pipeline: PipelineSteps | None) -> list[str]:
        names = names_of(whole)
        rows, length = names.tokens.shape[:2]
        # batches may differ by rank, and ranks meet in every step: what one of them cannot try, none tries
        unlabelled, short, single = self._agree([float(names.labels is None), float(length < 4), float(rows == 1)])
        if unlabelled:
            return [NO_LABELS]
        if short:
            return [f"rows of {length} tokens, and on a rank of fewer than 4, are too short to try where the step scores its targets"]
        aligned, multiple = self._plan.label_alignment == "aligned", self._multiple
        trial = Trial(whole, -(-8 // multiple) * multiple, 1 if pipeline is not None or single else 2, aligned)

        def loss(targets: Sequence[Target], changed: slice | None = None, order: str = "cut") -> tuple[float, float]:
            """(sum of what is counted, how much that is). "whole": the batch as one device gets it; "shuffled": cut, in another order."""
            batch = trial.batch(targets, changed)
            if order == "whole":
                zeros = torch.zeros(trial.rows, trial.tokens, dtype=torch.int64, device=self._device)
                counted_from_0 = torch.arange(trial.tokens, device=self._device).expand_as(zeros)
                self.context.probe = Probe(zeros, counted_from_0, int(not aligned), gives_positions=False)
            else:
                places = tuple(_shuffled(trial.tokens) if order == "shuffled" else range(trial.tokens))
                batch, shard = SequenceCut(1, 0, "contiguous", self._plan.label_alignment, multiple, order=places)(batch)
                self.context.probe = Probe(shard.document_ids, shard.position_ids, shard.spare)
            output = step(batch, *rest) if pipeline is None else pipeline.evaluate("training_step", step, batch, rest)
            _, found, weights = read_output(output)
            counted = float(len(targets)) if weights is None else float(weights.used)
            if found is not None:
                trial.rounding = {2: 2e-2, 4: 1e-5}.get(found.dtype.itemsize, 1e-9)
            return (float("nan") if found is None else float(found) * counted), counted

        wrong = judge(loss, trial, lambda: self.context.probe is not None and self.context.probe.bidirectional)
        if wrong == "blind":
            log.info("the loss is the same for all labels (a head that starts at zero?), so only label_alignment says where targets stand")
            return []
        said = {None: [], "place": [LOSS[self._plan.label_alignment or ""]], "sum": [NOT_ADDITIVE], "whole": [OTHERWISE]}
        return said[wrong]

    def _raise_all(self, wrong: list[str]) -> None:
        if not self._agree([float(bool(wrong))])[0]:
            return
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, wrong)
        words = next(words for words in everyone if words)
        model = type(self._model).__name__.removeprefix("FSDP")  # as FSDP2 renames it
        raise ValueError(f"context_parallel_size={self._plan.context_parallel_size} is refused for {model}: {words[0]}")

    # ---- the first real step -------------------------------------------------------------------------------------------------------

    @contextmanager
    def watched(self, batch: Any) -> Iterator[None]:
        """Around the first training step: the targets that reach torch's cross-entropy must be those of this rank's tokens, at the borders
        of its runs too, and so must the positions that the model is given, where some ranks alone see that they are not."""
        if "seams" in self._proved or self._plan.compile or self._plan.pipeline_parallel_size > 1:
            yield
            return
        self._proved.add("seams")
        self.context.doubts = []
        try:
            with SeamWatch() as watch:
                yield
        finally:
            doubts, self.context.doubts = self.context.doubts, None
        self._raise_all([*doubts, *([OUTSIDE] if watch.outside else [])])
        names = names_of(batch)
        expected = names.given.get("shift_labels", names.labels)
        seen = watch.targets()
        if seen is None:
            log.info("the loss is none of torch's cross-entropies: what it scores was tried on a few tokens, and is not watched")
        wrong = seen is not None and not torch.equal(seen, counted_labels(expected).to(seen))
        self._raise_all([LOSS[self._plan.label_alignment or ""]] if wrong else [])


def _single(tokens: int) -> Probe:
    """A row of one document."""
    return Probe(torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens)[None])


def _shuffled(tokens: int) -> list[int]:
    return torch.randperm(tokens, generator=torch.Generator().manual_seed(5)).tolist()


@contextmanager
def _stirred(module: nn.Module) -> Iterator[None]:
    """Parameters that are all 0 (tables, gates and projections that start so, and hide what they lead to) hold other numbers inside."""
    still = []
    for parameter in module.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.numel() and local.is_floating_point() and not bool(local.count_nonzero()):
            still.append(local.detach())
    try:
        for local in still:
            places = torch.arange(local.numel(), device=local.device, dtype=torch.float32)
            local.copy_((0.1 * (places * 0.7 + 1).sin()).reshape(local.shape))
        yield
    finally:
        for local in still:
            local.zero_()
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # no gathered copy of those numbers stays


def _required(model: nn.Module) -> list[str]:
    """Arguments of a forward that have to be given, after the first."""
    takes = inspect.signature(model.forward).parameters.values()
    return [p.name for p in takes if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][1:]


def _first_tensor(output: Any, tokens: int) -> Tensor | None:
    """The logits of an output: by name, else its first floating tensor with a row for each token."""
    named = getattr(output, "logits", None)
    floating = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    fitting = [leaf for leaf in floating if leaf.ndim > 1 and leaf.shape[1] == tokens]
    return named if isinstance(named, Tensor) else next(iter(fitting or floating), None)
