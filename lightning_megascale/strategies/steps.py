"""A training step's numbers: what its loss counts, and what stands between the last backward and every reader of gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_megascale.mesh import MeshViews
from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, set_microbatch_weight
from lightning_megascale.parallel.data import Remaining, reduce_remaining, remaining
from lightning_megascale.parallel.loss_scale import Agreement, LossScale, Weights, weigh, weighted
from lightning_megascale.parallel.rng import derive_seed
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.strategies import guards

_ONE = Weights(torch.ones((), dtype=torch.float64))  # a single rank and microbatch: nothing to weigh against


class StepNumbers:
    """Bookkeeping of one fit, from a step's forward to its finished gradients. Automatic optimization sums and scales once per
    optimizer step; manual optimization makes each backward its share of the global mean.

    Args:
        plan, views, device: of the run.
    """

    def __init__(self, plan: ParallelPlan, views: MeshViews, device: torch.device) -> None:
        self.scale = LossScale()
        self._plan, self._views, self._device = plan, views, device
        self._weights: Weights | None = None
        self._batch: Any = None
        self._loss: torch.Tensor | None = None
        self._checked = self._batch_checked = False
        self._steps = 0
        self._backwards = 0
        self._auxiliary = MicrobatchWeight()
        self._remaining: dict[int, tuple[int, Remaining, list[torch.nn.Parameter]]] = {}

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._views.loss.get_group() if self._views.loss.size() > 1 else None

    def before_forward(self, batch: Any, tokens: torch.Tensor | None = None, documents: torch.Tensor | None = None) -> None:
        """Notes the batch: manual optimization runs its backwards inside the step.

        Args:
            batch: this rank's.
            tokens: bool (B, L), which of its tokens are no padding; None: all.
            documents: integer (B, L), of packed rows; None: whole rows, or attention knows.
        """
        self._batch, self._weights, self._loss, self._backwards = batch, None, None, 0
        self._auxiliary = MicrobatchWeight(tokens=tokens, documents=documents)
        set_microbatch_weight(self._auxiliary)

    def after_forward(self, module: pl.LightningModule, output: Any) -> Any:
        """Notes what the step's loss counts; returns what Lightning gets to see."""
        output, loss, weights = read_output(output)
        if loss is not None and loss.requires_grad:
            self._loss = loss.detach()
            self._weights = (weights or self._weigh(module, self._batch) or _ONE).rounded_to(loss)
        return output

    def begin_window(self, module: pl.LightningModule) -> None:
        """At the first microbatch of an optimizer step, after the gradients were zeroed."""
        guards.check_zeroed(module)
        self.scale.restart()  # also of the microbatches of a window that was never stepped

    def before_backward(self, module: pl.LightningModule, loss: torch.Tensor) -> torch.Tensor:
        """The loss as a sum over what it counts, or, where it is a whole step, as its share of the global mean."""
        self._backwards += 1
        if not module.automatic_optimization:
            weights = self._weigh(module, self._batch)
            if weights is None or self._group is None:
                self._auxiliary.value = 1.0
                return loss
            return self._multiplied(loss, weights.used, self.scale.share(loss.detach(), weights, self._group))
        assert self._weights is not None and self._loss is not None
        accumulate = module.trainer.accumulate_grad_batches
        if module.trainer.fit_loop.epoch_loop.batch_idx % accumulate == 0:
            self.begin_window(module)
        if accumulate == 1 and loss.dtype.itemsize >= 4:  # a half-precision loss could not carry n / N backward exactly
            return self._multiplied(loss, self._weights.used, self.scale.share(self._loss, self._weights, self._group))
        self.scale.add(self._loss, self._weights)
        return self._multiplied(loss * accumulate, self._weights.used, self._weights.used, 1.0)  # Lightning divided by it

    def _multiplied(
        self, loss: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, unit: torch.Tensor | float | None = None
    ) -> torch.Tensor:
        """The loss times ``weight``.

        Args:
            loss: a mean.
            labels: what it counts on this rank, 0-dim.
            weight: its factor.
            unit: what one label weighs; None: 1 / N of the step whose share was just taken.
        """
        if unit is None:
            assert self.scale.step_labels is not None
            unit = 1.0 / torch.where(self.scale.step_labels > 0, self.scale.step_labels, 1.0)
        self._auxiliary.value, self._auxiliary.unit = weight, unit
        if self._auxiliary.is_used:
            slices = int(self._plan.tensor_parallel_size) if self._plan.sequence_parallel else 1
            share_tokens([self._auxiliary], [self._auxiliary.held(slices)], labels, self._group)
        return weighted(loss, weight)

    def finish(self, module: pl.LightningModule, optimizer: Optimizer, partial: set[int]) -> None:
        """After a step's last backward: no parameter forgotten, the sums that are still open, the one scale.

        Args:
            module, optimizer: whose gradients are finished.
            partial: ids of parameters whose gradients are parts of a sum over the tensor-parallel axis.
        """
        over, parameters = self._remaining_of(optimizer, [p for group in optimizer.param_groups for p in group["params"]], partial)
        self._steps += 1
        if self._steps <= 2:  # what hooks after the first step changed is seen in the second
            guards.check_buffers(module, self._group, self._device)
        if not module.automatic_optimization:
            guards.check_manual_backward(self._backwards)
            return
        if not self._checked:
            guards.check_gradients(module, parameters)
            self._checked = True
        reduce_remaining(over, parameters, self._views)
        used = "".join("01"[parameter.grad is not None] for parameter in parameters)
        rates = sum(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
        self.scale.note(Agreement(derive_seed(used) % 2**20, rates))
        self.scale.finish([parameter.grad for parameter in parameters if parameter.grad is not None], self._group)

    def set_aside(self, module: pl.LightningModule, partial: set[int]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Before a manual backward: gradients that earlier ones have completed, of parameters whose sums no unit's reduction covers.

        Args:
            module, partial: as in ``finish``.
        """
        over, _ = self._remaining_of(module, list(module.parameters()), partial)
        kept = [(p, p.grad) for p in {*over.tensor, *over.loss, *over.replicate} if p.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        return kept

    def complete(self, module: pl.LightningModule, partial: set[int], kept: list[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """After a manual backward: its open sums are carried out and added to what was set aside, so that clipping sees the gradients of
        one device."""
        over, parameters = self._remaining_of(module, list(module.parameters()), partial)
        reduce_remaining(over, parameters, self._views)
        with torch.no_grad():
            for parameter, gradient in kept:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def settle(self) -> None:
        """At the end of a fit: the checks that run one step behind."""
        self.scale.settle(self._group, self._device)

    def _remaining_of(
        self, owner: object, parameters: list[torch.nn.Parameter], partial: set[int]
    ) -> tuple[Remaining, list[torch.nn.Parameter]]:
        """The parameters of an optimizer or a module, and the sums they still need; looked up again when parameters were added."""
        known = self._remaining.get(id(owner))
        if known is None or known[0] != len(parameters):
            known = (len(parameters), remaining(parameters, partial, self._views), parameters)
            self._remaining[id(owner)] = known
        return known[1], known[2]

    def _weigh(self, module: pl.LightningModule, batch: Any) -> Weights | None:
        if not self._batch_checked and self._plan.loss_weight == "auto":
            guards.check_hidden_labels(batch, self._group, self._device)
        self._batch_checked = True
        weights = weigh(batch, self._plan.loss_weight, self._plan.label_alignment, self._device)
        if weights is None and (self._group is not None or module.trainer.accumulate_grad_batches > 1):
            raise ValueError(
                "training_step returns a scalar mean, and this batch tells neither labels nor rows, so its weight against other "
                "ranks and microbatches is unknown: put a tensor with a row dimension in the batch, or return "
                "{'loss_sum': ..., 'num_tokens': ...}"
            )
        return weights


def share_tokens(
    weights: Sequence[MicrobatchWeight],
    tokens: Sequence[torch.Tensor | None],
    labels: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> None:
    """Tells layers how many labels a token stands for, of the microbatches that run together, over all ranks: one message.

    Args:
        weights: of these microbatches.
        tokens: what each holds on this rank, 0-dim; where one is not known, nothing is told.
        labels: what they count on this rank, 0-dim.
        group: the loss view; None for a single rank.
    """
    known = [count for count in tokens if count is not None]
    if len(known) < len(tokens):
        return
    sums = torch.stack([labels.double(), torch.stack([count.double().to(labels.device) for count in known]).sum()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    for weight in weights:
        weight.labels_per_token = sums[0] / sums[1].clamp(min=1)


def read_output(output: Any) -> tuple[Any, torch.Tensor | None, Weights | None]:
    """Reads a step's output.

    Args:
        output: a 0-dim loss, a mapping with ``loss``, or a mapping with ``loss_sum`` and ``num_tokens``.

    Returns:
        (what Lightning gets to see, its loss or None, the weights if the step gave them). ``loss_sum`` becomes a mean under
        ``loss``; the scale undoes that division exactly where it multiplies by ``num_tokens``.

    Raises:
        ValueError: for ``loss_sum`` without ``num_tokens`` or the other way round, or a loss that is no scalar.
    """
    if isinstance(output, torch.Tensor):
        return output, _scalar(output, "loss"), None
    if not isinstance(output, Mapping):
        return output, None, None
    if ("loss_sum" in output) != ("num_tokens" in output):
        raise ValueError("training_step returned one of 'loss_sum' and 'num_tokens': return both, or a scalar mean as 'loss'")
    if "loss_sum" not in output:
        loss = output.get("loss")
        return output, _scalar(loss, "loss") if isinstance(loss, torch.Tensor) else None, None
    loss_sum = _scalar(output["loss_sum"], "loss_sum")
    tokens = torch.as_tensor(output["num_tokens"], device=loss_sum.device).detach().double()
    if tokens.numel() != 1:
        raise ValueError(f"training_step's num_tokens has shape {tuple(tokens.shape)}: it must be a single number")
    tokens = tokens.reshape(())
    loss = loss_sum / torch.where(tokens > 0, tokens, 1.0).to(loss_sum.dtype)
    return {**output, "loss": loss}, loss, Weights(tokens)


def _scalar(loss: Any, name: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise ValueError(f"training_step's {name} is a {type(loss).__name__}: it must be a tensor, or nothing could be learnt from it")
    if loss.numel() != 1:
        raise ValueError(f"training_step's {name} has shape {tuple(loss.shape)}: it must be a single number (a mean, or a sum of tokens)")
    return loss.reshape(())


def drop_parameters(optimizers: Iterable[Optimizer], absent: Collection[int]) -> None:
    """Takes parameters out of optimizers, and leaves their groups.

    Args:
        optimizers: new ones, which have no state yet.
        absent: ids of the parameters.
    """
    for group in (group for optimizer in optimizers for group in optimizer.param_groups if absent):
        stays = [id(parameter) not in absent for parameter in group["params"]]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [entry for entry, keep in zip(group[key], stays) if keep]
