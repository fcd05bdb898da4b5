"""Context parallelism between Lightning and a step: batches are cut, and the first one proves that model and loss may be cut like that."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_megascale.callbacks.context_sharding import RingContextSharding
from lightning_megascale.mesh import MeshViews
from lightning_megascale.parallel.context import Context
from lightning_megascale.parallel.context_batch import SequenceCut
from lightning_megascale.parallel.context_call import prepare_call
from lightning_megascale.parallel.context_names import names_of
from lightning_megascale.parallel.context_probe import Probe, probe_layout
from lightning_megascale.parallel.context_shard import SequenceShard
from lightning_megascale.parallel.loss_scale import IGNORE_INDEX, rows_of, weigh
from lightning_megascale.parallel.microbatches import map_batch
from lightning_megascale.parallel.rng import derive_seed, kept_generators
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.strategies.guards import check_same_batch
from lightning_megascale.strategies.pipeline_logs import Entry, LogRecorder, MetricStates
from lightning_megascale.strategies.pipeline_state import ModuleState
from lightning_megascale.strategies.pipeline_steps import PipelineSteps
from lightning_megascale.strategies.steps import read_output

log = logging.getLogger(__name__)

Step = Callable[..., Any]
_enabled = True  # for tests of what a first batch does not prove
_LOGGED = 63  # values of a step that one message holds


def open_context(strategy: Any, trainer: pl.Trainer, module: pl.LightningModule, model: nn.Module, context: Context) -> ContextSteps:
    """Makes batches be cut along their sequence, and calls of the model be given the positions of what is left.

    Args:
        strategy: a ``MegascaleStrategy`` whose model is parallelized.
        trainer: gets the callback that cuts, if it has none.
        module, model: the LightningModule and its parallelized child.
        context: what the model's attention reads.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callback = next((callback for callback in callbacks if isinstance(callback, RingContextSharding)), None)
    if callback is None:
        callback = RingContextSharding()
        callbacks.append(callback)
        rank_zero_info("RingContextSharding was added: batches are cut along their sequence")
    if strategy.plan.pipeline_parallel_size == 1 and "_megascale_positions" not in model.__dict__:  # a pipeline captures its calls
        model.__dict__["_megascale_positions"] = model.register_forward_pre_hook(
            lambda called, args, kwargs: prepare_call(called, context, args, kwargs), with_kwargs=True, prepend=True
        )
    return ContextSteps(
        strategy.plan, strategy.mesh_views, strategy.root_device, context, module, model, callback, strategy._largest_over_ranks
    )


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
        self._shard: SequenceShard | None = None
        self._proved: set[str] = set()
        self._modes: list[tuple[nn.Module, bool]] = []
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
        if not {"layout", "loss"} <= self._proved:
            self._first = batch  # the one that comes next: validation's first batch may have other keys than training's
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
        self._shard = shard
        self.context.begin(shard)
        return batch

    def restore(self, result: Any) -> Any:
        """A prediction of the whole rows."""
        assert self._shard is not None
        return self._callback.restore(result, self._shard, self._group)

    @contextmanager
    def shared_logs(self, batch: Any) -> Iterator[None]:
        """Around a step: what it logs as a mean becomes the mean over the whole rows, as one device logs it, also where a part of a row
        counts nothing. One message; ranks that log other things keep their own values."""
        with LogRecorder(self._module) as logs:
            yield
        shared = [entry for entry in logs.entries if isinstance(entry.value, Tensor) and _is_mean(entry)][:_LOGGED]
        counted = weigh(batch, "auto", self._plan.label_alignment, self._device)
        count = torch.ones((), dtype=torch.float64, device=self._device) if counted is None else counted.used.double()
        rows = rows_of(batch)
        table = torch.zeros(_LOGGED + 1, 2, dtype=torch.float64, device=self._device)
        table[0, 0] = float(derive_seed(*(entry.name for entry in shared)) % 2**52)
        for place, entry in enumerate(shared, 1):
            size = entry.options.get("batch_size")  # rows, as Lightning means it, weigh no part of a row
            table[place, 0] = count if size is None or size == rows else size
            table[place, 1] = entry.value.to(self._device, torch.float64)
        tables = [torch.empty_like(table) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(tables, table, group=self._group)
        every = torch.stack(tables)  # (W, entries, 2)
        alike = (every[:, 0, 0] == table[0, 0]).all()
        counts, values = every[:, 1:, 0], every[:, 1:, 1]
        total = counts.sum(0)
        mean = torch.where(counts > 0, counts * values, 0.0).sum(0) / total
        mean = torch.where((values == values[0]).all(0) | (total == 0), table[1:, 1], mean)
        for place, entry in enumerate(shared):
            entry.value = torch.where(alike, mean[place].to(entry.value.device, entry.value.dtype), entry.value)
        for entry in logs.entries:
            entry.log(self._module)

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
        if names.labels is None:
            return [NO_LABELS]
        aligned, multiple = self._plan.label_alignment == "aligned", self._multiple
        if names.tokens.shape[1] < 4:
            return [f"rows of {names.tokens.shape[1]} tokens are too short to try where the step scores its targets: give at least 4"]
        trial = _Trial(whole, -(-8 // multiple) * multiple, 1 if pipeline is not None else 2, aligned)

        def loss(targets: Sequence[_Target], changed: slice | None = None, order: str = "cut") -> tuple[float, float]:
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

        wrong = _judge(loss, trial, lambda: self.context.probe is not None and self.context.probe.bidirectional)
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
        wrong = seen is not None and not torch.equal(seen, _counted(expected).to(seen))
        self._raise_all([LOSS[self._plan.label_alignment or ""]] if wrong else [])


class SeamWatch(TorchFunctionMode):
    """Collects the targets of torch's cross-entropies."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Tensor] = []
        self.outside = False

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self.outside = True  # ours never gets here
        if function in (F.cross_entropy, F.nll_loss):
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            if isinstance(target, Tensor) and not target.is_floating_point():
                self._seen.append(target.detach())
        return function(*args, **kwargs)

    def targets(self) -> Tensor | None:
        """Those that count, in order; None when there were none at all."""
        return torch.cat([_counted(target) for target in self._seen]) if self._seen else None


def _is_mean(entry: Entry) -> bool:
    reduce = entry.options.get("reduce_fx", "mean")
    return getattr(reduce, "__name__", reduce) == "mean" and entry.value.is_floating_point()


def _counted(labels: Tensor) -> Tensor:
    labels = labels.flatten()
    return labels[labels != IGNORE_INDEX]


_Target = tuple[int, int, int]  # row, token whose logits are scored, label


class _Trial:
    """The first tokens of the first rows of a batch, with few targets.

    Args:
        whole: a batch.
        tokens, rows: at most so many.
        aligned: a target stands at its token, else one later.
    """

    def __init__(self, whole: Any, tokens: int, rows: int, aligned: bool) -> None:
        names = names_of(whole)
        self._of, self._length = names.tokens.shape[:2]
        self.rows, self.tokens = min(rows, self._of), min(tokens, self._length)
        self.last = self.tokens - (1 if aligned else 2)
        self._later = 0 if aligned else 1
        self._ids_at, self._labels_at, self._whole = names.tokens_at, names.labels_at, whole
        self.rounding = 1e-4
        """Relative difference of losses that counts as none."""

    def batch(self, targets: Sequence[_Target], changed: slice | None) -> Any:
        """Labels ignored but those of ``targets``; the tokens of ``changed`` are others."""

        def cut(name: str, leaf: Any) -> Any:
            if isinstance(leaf, (list, tuple)):
                return leaf[: self.rows] if len(leaf) == self._of else leaf
            if leaf.ndim == 2 and tuple(leaf.shape) == (1, self._length) and name.endswith(("['position_ids']", ".position_ids")):
                return leaf[:, : self.tokens].expand(self.rows, -1)
            if leaf.ndim == 0 or leaf.shape[0] != self._of:
                return leaf
            is_of_tokens = leaf.ndim > 1 and leaf.shape[1] == self._length
            part = leaf[: self.rows, : self.tokens] if is_of_tokens else leaf[: self.rows]
            key = name.replace("['", ".").removesuffix("']").rpartition(".")[2]
            if name == self._labels_at:
                part = torch.full_like(part, IGNORE_INDEX)
                for row, place, label in targets:
                    part[row, place + self._later] = label
            elif name == self._ids_at and changed is not None:
                part = part.clone()
                part[:, changed] = part[:, changed] + 1 if leaf.is_floating_point() else torch.where(part[:, changed] == 0, 1, 0)
            elif key == "document_ids":
                part = torch.zeros_like(part)
            elif key == "attention_mask" or (is_of_tokens and ("mask" in key or "weight" in key)):
                part = torch.ones_like(part)
            elif key == "position_ids" and leaf.shape[0] == self._of:
                part = torch.arange(self.tokens, device=part.device, dtype=part.dtype).expand(self.rows, -1)
            return part

        return map_batch(self._whole, cut)


def _judge(loss: Callable[..., tuple[float, float]], trial: _Trial, looks_ahead: Callable[[], bool]) -> str | None:
    """What is wrong with a loss: "place" (it does not come from the target's token), "sum" (it is no sum over targets), "whole" (it is
    another one when the tokens lie otherwise, or than one device computes), "blind" (it is the same for all labels, so nothing can be
    said), or None.

    Args:
        loss: (targets, changed tokens) -> (sum, count).
        trial: makes the batches.
        looks_ahead: whether attention sees later tokens, asked after a run.
    """
    last = trial.last
    single = [loss([(0, 0, 0)]), loss([(0, last, 1)]), *([loss([(1, 0, 0)])] if trial.rows > 1 else [])]
    other = [loss([(0, 0, 1)]), loss([(0, last, 0)])]
    later, own = loss([(0, 0, 0)], slice(1, None)), loss([(0, last, 1)], slice(last, last + 1))
    together = loss([(0, 0, 0), (0, last, 1), *([(1, 0, 0)] if trial.rows > 1 else [])])

    def close(a: float, b: float) -> bool:
        return abs(a - b) <= trial.rounding * max(abs(a), abs(b))

    values = torch.tensor([value for value, _ in (*single, *other, later, own, together)])
    if not bool(values.isfinite().all()) or not bool((values != 0).all()):
        return "place"
    if single[0] == other[0] and single[1] == other[1]:
        return "blind"
    if single[0] == other[0] or single[1] == other[1] or single[1] == own:
        return "place"
    if not looks_ahead() and not close(single[0][0], later[0]):
        return "place"
    sums, counts = sum(value for value, _ in single), sum(count for _, count in single)
    if not close(together[0], sums) or not close(together[1], counts):
        return "sum"
    first = 0 if trial.last == trial.tokens - 1 else -1  # -1: the label that no logits are scored against
    every = [(row, place, place % 2) for row in range(trial.rows) for place in range(first, trial.last + 1)]
    whole, shuffled = loss(every, None, "whole"), loss(every, None, "shuffled")
    return None if close(whole[0], shuffled[0]) and close(whole[1], shuffled[1]) else "whole"


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


NO_LABELS = (
    "the batch has no 'labels' (B, L), so what the step scores at the borders of this rank's tokens is unknown: put labels into the batch, "
    "made from the whole row"
)
NOT_ADDITIVE = (
    "a few targets were put into a short batch, and training_step's loss of all of them was not the mean of their single losses: a loss "
    "for each row, a preference or contrastive loss, a mean over something else than valid labels, weights by class. Under context "
    "parallelism each rank scores a part of each row: return {'loss_sum': ..., 'num_tokens': ...} whose two numbers are sums over tokens"
)
OTHERWISE = (
    "training_step's loss of a short batch changed when its tokens were laid in another order, with their positions and targets, as "
    "context parallelism lays them: something in the step depends on where a token stands (weights by place, the last token), counts "
    "labels that nothing is scored against, or calls another model whose attention is not reached (a teacher). Compute it from what "
    "belongs to a token, and return {'loss_sum': ..., 'num_tokens': ...} for other means"
)
OUTSIDE = (
    "training_step calls F.scaled_dot_product_attention outside of the parallelized module (another model, a teacher, a probe on hidden "
    "states), where it would see this rank's tokens only: make it part of that module, in a module named by layout.attention"
)
_HOW = (
    "a target was put at a single token of a few, and training_step's loss did not come from the logits of that token alone. Under context "
    "parallelism each rank sees part of a row, so who shifts labels has to be right, other tokens must not count (a penalty over all of "
    "them), and labels are changed in on_after_batch_transfer, not in the step: "
)
LOSS = {
    "aligned": _HOW + "label_alignment='aligned' says that the step scores the logits at i against labels[:, i]. If it (or the model's own "
    "loss) shifts them, say label_alignment='shift', or 'huggingface' for a transformers model that takes shift_labels",
    "shift": _HOW + "label_alignment='shift' says that the step scores the logits at i against labels[:, i + 1], as "
    "cross_entropy(logits[:, :-1], labels[:, 1:]) does. If labels are aligned already say 'aligned'",
    "huggingface": _HOW + "label_alignment='huggingface' says that the model's loss takes shift_labels, which the batch holds: call "
    "self.model(**batch), or pass shift_labels=batch['shift_labels']. For a class that ignores it, and shifts labels itself, say 'shift'",
}
