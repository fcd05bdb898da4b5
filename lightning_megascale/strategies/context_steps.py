"""Context parallelism between Lightning and a step: batches are cut, and the first one proves that model and loss may be cut like that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_megascale.callbacks.context_sharding import RingContextSharding
from lightning_megascale.mesh import MeshViews
from lightning_megascale.parallel.context import Context
from lightning_megascale.parallel.context_batch import SequenceCut, names_of
from lightning_megascale.parallel.context_probe import Probe, probe_layout
from lightning_megascale.parallel.loss_scale import IGNORE_INDEX
from lightning_megascale.parallel.microbatches import map_batch
from lightning_megascale.parallel.rng import kept_generators
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.strategies.guards import check_same_batch
from lightning_megascale.strategies.pipeline_logs import LogRecorder, MetricStates
from lightning_megascale.strategies.pipeline_state import ModuleState
from lightning_megascale.strategies.pipeline_steps import PipelineSteps
from lightning_megascale.strategies.steps import read_output

log = logging.getLogger(__name__)

Step = Callable[..., Any]


class ContextSteps:
    """Cuts the batches of one run and proves its first.

    Args:
        plan, views, device: of the run.
        context: what the model's attention reads.
        module, model: the LightningModule and its parallelized child.
        callback: cuts and restores.
        agree: (numbers) -> the largest over all ranks of each.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        views: MeshViews,
        device: torch.device,
        context: Context,
        module: pl.LightningModule,
        model: nn.Module,
        callback: RingContextSharding,
        agree: Callable[[Sequence[float]], list[float]],
    ) -> None:
        assert views.context is not None
        self.context, self.batch_tokens, self.batch_length = context, 0, 0
        self._plan, self._views, self._device, self._agree = plan, views, device, agree
        self._module, self._model, self._callback = module, model, callback
        self._group = views.context.get_group()
        self._compared: set[str] = set()
        self._first: Any = None
        self._proved: set[str] = set()
        self._multiple = plan.tensor_parallel_size if plan.sequence_parallel else 1

    def shard(self, batch: Any, loop: str) -> Any:
        """This rank's part of a whole batch that lies on its device.

        Args:
            batch: from the loader, through the module's hooks.
            loop: "train", "predict", ...
        """
        if loop not in self._compared:
            self._compared.add(loop)
            check_same_batch(batch, self._group, self._device)
        if self._first is None and not {"layout", "loss"} <= self._proved:
            self._first = batch
        cut = SequenceCut(
            self._views.sizes["cp"],
            self._views.context_rank,
            self._plan.context_parallel_layout,
            self._plan.label_alignment,
            self._multiple,
            training=loop != "predict",
        )
        batch, shard = self._callback.shard(batch, cut)
        shard = shard.to(self._device)
        self.batch_length = shard.length
        self.batch_tokens = (
            shard.rows * shard.length
            if not shard.has_documents
            else sum(run.length for row in shard.tables for runs in row for run in runs)
        )
        self.context.begin(shard)
        return batch

    def restore(self, result: Any) -> Any:
        """A prediction of the whole rows."""
        assert self.context.whole is not None
        return self._callback.restore(result, self.context.whole, self._group)

    # ---- proof -------------------------------------------------------------------------------------------------------------------

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
        if wanted <= self._proved or whole is None:
            return
        with self._aside(), torch.no_grad():
            if "layout" not in self._proved:
                self._raise_all(self._try_layout(whole, pipeline))
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
        modes = [(m, m.training) for m in module.modules()]
        module.eval()
        metrics.is_muted = True
        try:
            with kept_generators(self._device), LogRecorder(module):
                yield
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
        tokens = -(-8 // self._multiple) * self._multiple

        def call(ids: Tensor, probe: Probe) -> Tensor | None:
            self.context.probe = probe
            if pipeline is None:
                return _first_tensor(self._model(ids), tokens)
            return pipeline.evaluate(
                "probe", lambda part, *_: _first_tensor(self._model(part["input_ids"]), tokens), {"input_ids": ids}, ()
            )

        if pipeline is not None:  # learns what crosses its boundaries, by forwards that must not be taken for the probe's
            nothing = torch.zeros(1, tokens, dtype=torch.int64, device=self._device)
            call(nothing, Probe(nothing, nothing))
        self.context.reached.clear()
        wrong, missing = probe_layout(call, largest, tokens, self._device), self.context.missing
        if missing and not wrong:
            wrong.append(
                f"{', '.join(missing[:4])}: what attends there does not come through F.scaled_dot_product_attention, so it would see this "
                "rank's tokens only: call it in the forward of the module"
            )
        return wrong

    def _try_loss(self, whole: Any, step: Step, rest: tuple[Any, ...], pipeline: PipelineSteps | None) -> list[str]:
        names = names_of(whole)
        if names.labels is None:
            return [NO_LABELS]
        short = _Short(whole, 8)
        aligned = self._plan.label_alignment == "aligned"
        last = short.tokens - (1 if aligned else 2)

        def loss(target: int, label: int, changed: slice | None) -> float:
            batch, shard = SequenceCut(1, 0, "contiguous", self._plan.label_alignment, self._multiple)(
                short.with_target(target + (not aligned), label, changed)
            )
            self.context.probe = Probe(shard.document_ids, shard.position_ids)
            output = step(batch, *rest) if pipeline is None else pipeline.evaluate("training_step", step, batch, rest)
            found = read_output(output)[1]
            return float("nan") if found is None else float(found)

        first = [loss(0, 0, None), loss(0, 1, None), loss(0, 0, slice(1, None))]
        end = [loss(last, 0, None), loss(last, 1, None), loss(last, 0, slice(last, last + 1))]
        causal = self.context.probe is None or not self.context.probe.bidirectional
        values = torch.tensor([*first, *end])
        blind = first[0] == first[1] and end[0] == end[1] and bool((values > 0).all())
        if blind and bool(values.isfinite().all()):
            log.info("the loss is the same for all labels (a head that starts at zero?), so only label_alignment says where targets stand")
            return []
        right = values.isfinite().all() and first[0] != first[1] and end[0] != end[1] and end[0] != end[2]
        if right and (not causal or abs(first[0] - first[2]) <= 1e-3 * abs(first[0])):
            return []
        return [LOSS[self._plan.label_alignment or ""].format(step="training_step")]

    def _raise_all(self, wrong: list[str]) -> None:
        if not self._agree([float(bool(wrong))])[0]:
            return
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, wrong)
        words = next(words for words in everyone if words)
        raise ValueError(
            f"context_parallel_size={self._plan.context_parallel_size} is refused for {type(self._model).__name__}: {words[0]}"
        )

    # ---- the first real step -------------------------------------------------------------------------------------------------------

    @contextmanager
    def watched(self, batch: Any) -> Iterator[None]:
        """Around the first training step: the targets that reach torch's cross-entropy must be those of this rank's tokens, at the borders
        of its runs too."""
        if "seams" in self._proved or self._plan.compile or self._plan.pipeline_parallel_size > 1:
            yield
            return
        self._proved.add("seams")
        with SeamWatch() as watch:
            yield
        names = names_of(batch)
        expected = names.given.get("shift_labels", names.labels)
        seen = watch.targets()
        if seen is None:
            log.info("the loss is none of torch's cross-entropies: what it scores was tried on a few tokens, and is not watched")
        wrong = seen is not None and not torch.equal(seen, _counted(expected).to(seen))
        self._raise_all([LOSS[self._plan.label_alignment or ""].format(step="training_step")] if wrong else [])


class SeamWatch(TorchFunctionMode):
    """Collects the targets of torch's cross-entropies."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Tensor] = []

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in (F.cross_entropy, F.nll_loss):
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            if isinstance(target, Tensor) and not target.is_floating_point():
                self._seen.append(target.detach())
        return function(*args, **kwargs)

    def targets(self) -> Tensor | None:
        """Those that count, in order; None when there were none at all."""
        return torch.cat([_counted(target) for target in self._seen]) if self._seen else None


def _counted(labels: Tensor) -> Tensor:
    labels = labels.flatten()
    return labels[labels != IGNORE_INDEX]


class _Short:
    """The first tokens of the first row of a batch, with a single target.

    Args:
        whole: a batch.
        tokens: at most so many.
    """

    def __init__(self, whole: Any, tokens: int) -> None:
        names = names_of(whole)
        rows, length = names.tokens.shape[:2]
        self.tokens = min(tokens, length)
        self._ids_at, self._labels_at = names.tokens_at, names.labels_at
        self._whole, self._rows, self._length = whole, rows, length

    def with_target(self, place: int, label: int, changed: slice | None) -> Any:
        """Labels ignored but at ``place``; the tokens of ``changed`` are others."""

        def cut(name: str, leaf: Any) -> Any:
            if isinstance(leaf, (list, tuple)):
                return leaf[:1] if len(leaf) == self._rows else leaf
            if leaf.ndim == 0 or leaf.shape[0] != self._rows:
                return leaf
            part = leaf[:1, : self.tokens] if leaf.ndim > 1 and leaf.shape[1] == self._length else leaf[:1]
            if name == self._labels_at:
                part = torch.full_like(part, IGNORE_INDEX)
                part[0, place] = label
            elif name == self._ids_at and changed is not None:
                part = part.clone()
                part[:, changed] = torch.where(part[:, changed] == 0, 1, 0) if not leaf.is_floating_point() else part[:, changed] + 1
            elif name.endswith(("['document_ids']", ".document_ids")):
                part = torch.zeros_like(part)
            elif name.endswith(("['attention_mask']", ".attention_mask")):
                part = torch.ones_like(part)
            elif name.endswith(("['position_ids']", ".position_ids")):
                part = torch.arange(self.tokens, device=part.device, dtype=part.dtype)[None]
            return part

        return map_batch(self._whole, cut)


def _first_tensor(output: Any, tokens: int) -> Tensor | None:
    """The logits of an output: by name, else its first floating tensor with a row for each token."""
    named = getattr(output, "logits", None)
    floating = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    fitting = [leaf for leaf in floating if leaf.ndim > 1 and leaf.shape[1] == tokens]
    return named if isinstance(named, Tensor) else next(iter(fitting or floating), None)


NO_LABELS = (
    "the batch has no 'labels' (B, L), so what the step scores at the borders of this rank's tokens is unknown: put labels into the batch, "
    "made from the whole row"
)
_HOW = (
    "One target was put at a single token of a few, and {step}'s loss did not come from the logits of that token. Under context "
    "parallelism each rank sees part of a row, so who shifts labels has to be right: "
)
LOSS = {
    "aligned": _HOW
    + "label_alignment='aligned' says that {step} scores the logits at i against labels[:, i]. If it (or the model's own loss) "
    "shifts them, say label_alignment='shift', or 'huggingface' for a transformers model that takes shift_labels",
    "shift": _HOW + "label_alignment='shift' says that {step} scores the logits at i against labels[:, i + 1], as "
    "cross_entropy(logits[:, :-1], labels[:, 1:]) does. If labels are aligned already say 'aligned'",
    "huggingface": _HOW + "label_alignment='huggingface' says that the model's loss takes shift_labels, which the batch holds: call "
    "self.model(**batch), or pass shift_labels=batch['shift_labels']. For a class that ignores it, and shifts labels itself, say 'shift'",
}
