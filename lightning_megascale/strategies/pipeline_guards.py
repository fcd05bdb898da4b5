"""Refusals of a pipelined step: what cannot go through a pipeline is named, on all ranks, before anybody waits."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_megascale.plan import ParallelPlan

log = logging.getLogger(__name__)

OUTSIDE = (
    "{model} is cut into pipeline stages and was called outside of a training, validation, test or predict step: no rank holds it whole. "
    "Use a checkpoint and pipeline_parallel_size=1 for generation and other direct calls"
)
SECOND_CALL = (
    "the step calls {model} a second time: a pipeline runs one call of the model for each microbatch. Concatenate the inputs into one "
    "call, or use pipeline_parallel_size=1"
)
NO_CALL = (
    "{step} never called {model}, the pipelined module: with pipeline_parallel_size above 1 it is called exactly once, as self.model(...) "
    "(name it with MegascaleStrategy(module=...))"
)
FAILED_ELSEWHERE = (
    "the step failed on another rank before it called the model: {text}. Up to that call every rank runs the step with the whole "
    "batch, and parts of the model that lie on another rank cannot be called apart"
)
PARAMETERS = (
    "the step uses the model's parameters outside of its forward (a penalty or a norm over self.parameters(), a tied weight in the loss): "
    "the rank that computes the loss holds those of its pipeline stage only, so the number would be wrong. Use the optimizer's "
    "weight_decay, put the term into the model's layers with add_auxiliary_loss, read strategy.grad_norm, or use pipeline_parallel_size=1"
)
STATE = (
    "the step changes {names} of the module on the last pipeline stage, and they cannot be sent to the other ranks ({error}): return what "
    "is needed from the step, or log it"
)
NOT_A_MEAN = (
    "training_step's loss cannot be cut into microbatches: two of them give {apart:.9g} apart and {together:.9g} together. It looks at the "
    "whole batch (in-batch negatives, a statistic over rows), is a sum, or is a mean over something that the batch's labels or rows do not "
    "count. Return {{'loss_sum': ..., 'num_tokens': ...}} with what it divides by, choose loss_weight or label_alignment, or use "
    "pipeline_parallel_size=1"
)
LOGGED_INSIDE = (
    "self.log({name!r}) was called inside of the model's forward, which runs on one pipeline stage only: log in training_step, or in "
    "on_train_batch_end"
)
SCALED = (
    "a hook scaled the gradients of pipeline stages by different factors: torch.nn.utils.clip_grad_norm_ in a hook sees the norm of this "
    "rank's stage only. Use Trainer(gradient_clip_val=...), or self.clip_gradients(...) in configure_gradient_clipping"
)
UNEQUAL_CALLS = (
    "the microbatches of one batch reach the model with different shapes ({first} and {other}): a pipeline's buffers have one shape for a "
    "whole batch. Pad the batch in the collate function, not in the step"
)
NO_LOSS = (
    "training_step returned no loss that depends on the model's output: with pipeline_parallel_size above 1 it must return a loss tensor, "
    "a mapping with 'loss', or {'loss_sum', 'num_tokens'}; a step cannot be skipped by returning None"
)
NO_WEIGHT = (
    "training_step returns a scalar mean, and its batch tells neither labels nor rows, so its weight against the other microbatches is "
    "unknown: put a tensor with a row dimension in the batch, or return {'loss_sum': ..., 'num_tokens': ...}"
)
AUXILIARY_WEIGHT = (
    "a layer of this pipeline stage adds an auxiliary loss, and training_step's num_tokens is not what the batch's labels count, so its "
    "weight was not known where the layer runs: return the number of labels that are not -100, or declare label_alignment or loss_weight"
)
AUXILIARY_TOKENS = (
    "a layer of a pipeline stage adds a mean over {seen} tokens of a microbatch to the loss, and the batch tells {told}, by its input_ids, "
    "inputs_embeds or labels (B, L): its weight against other ranks must be known before it runs. Give the batch input_ids of the "
    "length that layers see, or use pipeline_parallel_size=1"
)
WEIGHT_FUNCTION = (
    "autograd function {names} takes a weight together with its input, so pipeline_schedule={schedule!r}, which runs the backward of "
    "inputs and of weights apart, runs its whole backward twice: use 'Interleaved1F1B', or a model without it"
)
LIST_METRICS = (
    "{names}: a metric that keeps a list of all values is filled on the last pipeline stage only, and would be sent whole after each step: "
    "use one with fixed states (a binned AUROC, a mean), or pipeline_parallel_size=1"
)


def raise_all(wrong: Sequence[str]) -> None:
    if wrong:
        raise ValueError("\n".join(wrong))


def refuse_ragged(rows: int, size: int, anybody_ragged: bool, most: int, least: int, accumulate: int, plan: ParallelPlan) -> None:
    """All ranks must run the same microbatches."""
    if most != least:
        raise ValueError(
            f"data-parallel ranks have batches of {least} to {most} rows in one step (here {rows}), so their pipelines would run different "
            "numbers of microbatches: set drop_last=True on the DataLoader, or make the dataset a multiple of the batch"
        )
    if anybody_ragged:
        raise ValueError(
            f"a batch of {rows} rows cannot be cut into microbatches of microbatch_size={size}: the loader's batch_size must be a multiple "
            "of it, with drop_last=True"
        )
    total = rows * int(plan.data_parallel_size) * accumulate
    if plan.global_batch_size is not None and plan.global_batch_size != total:
        raise ValueError(
            f"global_batch_size={plan.global_batch_size}, and the loader's {rows} rows x data-parallel size {plan.data_parallel_size} x "
            f"accumulate_grad_batches={accumulate} = {total}: under a pipeline the loader's batch holds all microbatches of a schedule"
        )


def check_module(module: pl.LightningModule, target: nn.Module) -> list[str]:
    """A message for everything of a LightningModule that a pipeline cannot run."""
    name = type(module).__name__
    wrong = []
    if not module.automatic_optimization:
        wrong.append(
            "manual optimization: the pipeline's schedule runs forward and backward of all microbatches itself, so a step cannot call "
            "manual_backward; use automatic optimization or pipeline_parallel_size=1"
        )
    if target is module:
        children = ", ".join(child for child, _ in module.named_children())
        message = (
            f"the model must be one child of {name}, called once in each step as self.model(...), and its layers lie in several children "
            f"({children}) or in {name} itself: put them into one nn.Module, or name the one with MegascaleStrategy(module=...)"
        )
        return [*wrong, message]
    if not any(child is target for child in module.children()):
        path = next(key for key, child in module.named_modules() if child is target)
        wrong.append(
            f"module={path!r}: the pipelined module must be a child of {name} itself, for a module around it would run on every stage: "
            "make it an attribute of the LightningModule"
        )
    inside = {id(parameter) for parameter in target.parameters()}
    outside = [key for key, parameter in module.named_parameters() if parameter.requires_grad and id(parameter) not in inside]
    if outside:
        wrong.append(
            f"{', '.join(outside[:6])}{' and more' if len(outside) > 6 else ''}: trainable, and outside of the pipelined module, so only "
            "the last pipeline stage would train them: move them into it, or freeze them"
        )
    return wrong


def check_tied_options(module: nn.Module, optimizers: Sequence[Any], tied: Sequence[Sequence[str]], axis: DeviceMesh | None) -> None:
    """Copies of one parameter must take the same steps. Collective over the pipeline axis; raises on all its ranks.

    Args:
        module: the LightningModule.
        optimizers: at most one.
        tied: groups of names that are one parameter.
        axis: the pipeline axis.
    """
    if not tied or not optimizers or axis is None:
        return
    names: dict[int, list[str]] = {}  # a parameter may have several on one stage
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    copies = {name for group in tied for name in group}
    mine = {
        name: str({key: value for key, value in group.items() if key not in ("params", "param_names", "names")})
        for group in optimizers[0].param_groups
        for parameter in group["params"]
        for name in names.get(id(parameter), [])
        if name in copies
    }
    everyone: list[Any] = [None] * axis.size()
    dist.all_gather_object(everyone, mine, group=axis.get_group())
    options = {name: option for found in everyone for name, option in found.items()}
    for group in tied:
        if len({options.get(name) for name in group}) > 1:
            raise ValueError(
                f"{' and '.join(group)} are one parameter on two pipeline stages, and configure_optimizers puts them into groups with "
                "different options, so they would drift apart: give both the same group"
            )


class GradientScaling:
    """Sees when a hook scales a rank's gradients as a whole: by the norm of its pipeline stage, which is not the norm of the model.

    Args:
        axis: the pipeline axis.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        self._axis = axis
        self._before: list[tuple[Any, torch.Tensor]] = []

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """The final gradients, before anybody's hook."""
        held = [parameter for parameter in parameters if parameter.grad is not None]
        self._before = list(zip(held, self._norms(held)))

    def check(self) -> None:
        """After all hooks and clipping. Collective over the pipeline axis; raises on all its ranks."""
        held = [parameter for parameter, _ in self._before if parameter.grad is not None]
        pairs = [(before, after) for (_, before), after in zip(self._before, self._norms(held)) if float(before) > 0]
        ratios = torch.stack([after / before for before, after in pairs]).double() if pairs else torch.ones(1, dtype=torch.float64)
        is_uniform = float(ratios.max() - ratios.min()) <= 1e-5 * float(ratios.max())
        mine = torch.tensor([float(ratios.mean()), float(is_uniform)], dtype=torch.float64, device=ratios.device)
        everyone = [torch.empty_like(mine) for _ in range(self._axis.size())]
        dist.all_gather(everyone, mine, group=self._axis.get_group())
        factors = [float(factor) for factor, uniform in everyone if uniform]
        self._before = []
        if factors and max(factors) - min(factors) > 1e-4 * max(factors):
            raise ValueError(SCALED)

    @staticmethod
    def _norms(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
        return list(torch._foreach_norm(local)) if local else []


def check_optimizers(optimizers: Sequence[Any]) -> None:
    if len(optimizers) > 1:
        raise ValueError(
            f"configure_optimizers returned {len(optimizers)} optimizers: a pipelined step runs its backward before an optimizer is "
            "chosen. Use one optimizer with parameter groups, or pipeline_parallel_size=1"
        )
