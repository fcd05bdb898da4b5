"""Where numbers part first: the outputs of all modules in the first step, on one device and on the ranks, in forward order.

Only whole tensors are compared: rows are joined over microbatches and data-parallel ranks, a part of the sequence over the tensor-parallel
axis; where the shape still is another one (a part of the heads or features) the module is left out. When all outputs agree, the difference
arises on the way back, and the modules with a wrong gradient are looked at from the last one on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_megascale.verification.compare import Figures, Reference, largest, worst
from lightning_megascale.verification.one_device import train_alone
from lightning_megascale.verification.subject import Subject
from lightning_megascale.verification.training import Plan, Setting, train_on_rank


@dataclass
class Outputs:
    """Floating tensors that modules gave in a step.

    Args:
        calls: (module name, its output's tensors), in the order in which the calls ended.
        place: this rank's (pipeline, data-parallel, tensor-parallel) rank.
    """

    calls: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    place: tuple[int, int, int] = (0, 0, 0)

    def by_name(self) -> dict[str, list[list[Tensor]]]:
        found: dict[str, list[list[Tensor]]] = {}
        for name, leaves in self.calls:
            found.setdefault(name, []).append(leaves)
        return found


class _Watch(pl.Callback):
    """Notes the outputs of all modules below the LightningModule in the forwards that training makes."""

    def __init__(self) -> None:
        self.outputs = Outputs()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        views = getattr(trainer.strategy, "_views", None)
        if views is not None:
            ranks = [0 if mesh is None else mesh.get_local_rank() for mesh in (views.pipeline, views.batch, views.tensor)]
            self.outputs.place = (ranks[0], ranks[1], ranks[2])
        for name, child in module.named_modules():
            if name:
                child.register_forward_hook(lambda _, args, output, name=name: self._note(name, output))

    def _note(self, name: str, output: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1  # recomputed activations
        if torch.is_grad_enabled() and not in_backward:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            local = [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in leaves]
            self.outputs.calls.append((name, [leaf.detach().clone() for leaf in local]))


def outputs_alone(subject: Subject, setting: Setting) -> Outputs:
    """The first step's outputs on one device. In a process of its own."""
    watch = _Watch()
    train_alone(subject, setting, run=2, watch=watch)
    return watch.outputs


def outputs_on_rank(subject: Subject, setting: Setting, plan: Plan) -> Outputs:
    """The first step's outputs on one rank; uncompiled, for compiled modules are not looked into."""
    watch = _Watch()
    train_on_rank(subject, setting, plan, [watch], compile=False)
    return watch.outputs


# ---- forward -------------------------------------------------------------------------------------------------------------------------


def first_other_output(alone: Outputs, ranks: Sequence[Outputs], tolerance: float) -> tuple[str, float] | None:
    """The first module, in the order in which calls end on one device, whose output differs; and by how much of its size."""
    wanted = alone.by_name()
    counted: dict[str, int] = {}
    grids: dict[str, list[list[Sequence[Any]]] | None] = {}
    for name, leaves in alone.calls:
        call = counted[name] = counted.get(name, -1) + 1
        if name not in grids:
            grids[name] = _grid(name, len(wanted[name]), ranks)
        grid = grids[name]
        for index, leaf in enumerate(leaves if grid is not None else ()):
            assert grid is not None
            off = _difference(leaf, [[[part[call] for part in one] for one in row] for row in grid], index)
            if off is not None and not off <= tolerance:
                return name, off
    return None


def _grid(name: str, calls: int, ranks: Sequence[Outputs]) -> list[list[Sequence[Any]]] | None:
    """For each tensor-parallel and each data-parallel rank the microbatches, each with ``calls`` calls; None when they do not match."""
    holders = [rank for rank in ranks if any(name == called for called, _ in rank.calls)]
    if not holders:
        return None
    stage = min(rank.place[0] for rank in holders)  # what several stages share is called on each
    holders = [rank for rank in holders if rank.place[0] == stage]
    rows: list[list[Sequence[Any]]] = []
    for tensor_rank in sorted({rank.place[2] for rank in holders}):
        same = sorted((rank for rank in holders if rank.place[2] == tensor_rank), key=lambda rank: rank.place[1])
        found = [rank.by_name()[name] for rank in same]
        if any(len(one) % calls or len(one) != len(found[0]) for one in found):
            return None
        rows.append([[one[begin : begin + calls] for begin in range(0, len(one), calls)] for one in found])
    return rows


def _difference(wanted: Tensor, grid: Sequence[Sequence[Sequence[list[Tensor]]]], index: int) -> float | None:
    """The largest difference over tensor-parallel ranks, relative to the largest element; None when no whole tensor can be made."""
    size = wanted.abs().max().item() if wanted.numel() else 0.0
    if wanted.ndim == 0 or not size < float("inf"):
        return None
    parts = [[leaves[index] for one in row for leaves in one if index < len(leaves)] for row in grid]
    if not all(parts) or any(part.ndim == 0 for row in parts for part in row):
        return None
    if all(part.shape == wanted.shape for row in parts for part in row) and len(parts[0]) > 1:
        candidates = [part for row in parts for part in row]  # the same for all rows, such as tables of angles
    else:
        try:
            candidates = [torch.cat(row) for row in parts]
        except RuntimeError:
            return None
        if candidates[0].ndim >= 3 and candidates[0].shape != wanted.shape:
            candidates = [torch.cat(candidates, 1)]  # parts of the sequence
    if any(candidate.shape != wanted.shape for candidate in candidates):
        return None
    return max(largest(wanted, candidate) for candidate in candidates) / (size or 1.0)


# ---- what is said --------------------------------------------------------------------------------------------------------------------


def explain(figures: Figures, reference: Reference, plan: Plan, alone: Outputs | None, ranks: Sequence[Outputs]) -> tuple[str, str]:
    """(the first module whose numbers differ and what differs, what that usually means).

    Args:
        figures: of the combination.
        reference: one device.
        plan: of the ranks.
        alone, ranks: outputs of the first step; None and nothing when they could not be had.
    """
    if figures.missing:
        return figures.missing[0], "a parameter that no rank trains: it stands outside of the modules that the layout names"
    wrong = figures.wrong_at_first
    first_loss = figures.losses[0]
    if not wrong and first_loss.is_equal:
        return _later(figures)
    found = None if alone is None else first_other_output(alone, ranks, reference.tolerance)
    if found is not None:
        first = alone is not None and alone.calls[0][0] == found[0]
        before = " (it is the first that is called: what it is given may be off already)" if first else ""
        return f"{found[0]}: its output in the first forward is off by {found[1]:.1e} of its size{before}", _hint_forward(plan)
    compared = "" if alone is None else "; every output of a module that could be compared is equal"
    if not first_loss.is_equal and len(wrong) in (0, len(figures.first_gradients)):
        return f"training_step: the first loss is off by {first_loss.off:.1e}{compared}", _HINTS["loss"]
    order = {} if alone is None else {name: place for place, (name, _) in enumerate(alone.calls)}
    owner = max((_owner(name, order) for name in wrong), key=lambda name: order.get(name, -1))
    named = max((name for name in wrong if _owner(name, order) == owner), key=lambda name: figures.first_gradients[name].off)
    off = figures.first_gradients[named].off
    count = f" (wrong: {_starred(wrong)}; the other {len(figures.first_gradients) - len(wrong)} are equal)"
    if len(wrong) == len(figures.first_gradients):
        count = " (and so is every other one)"
    text = f"{owner}: the gradient of {named} is off by {off:.1e} of the gradient norm in the first backward{count}{compared}"
    return text, _hint_backward(plan, wrong, figures, reference)


def _later(figures: Figures) -> tuple[str, str]:
    """What differs when loss and gradients of the first step are equal."""
    for step, (loss, norm, gradients) in enumerate(zip(figures.losses, figures.norms, figures.gradients)):
        gradient = worst(gradients.values())
        if not loss.is_equal or not gradient.is_equal:
            what = f"the loss of step {step + 1}" if not loss.is_equal else f"the gradient of {gradient.name} in step {step + 1}"
            where = f"the optimizer, or what the module does from step {step + 1} on"
            return f"{where}: step {step} is equal up to the norm of its gradients, and {what} is off", _HINTS["optimizer"]
        if not norm.is_equal:
            return f"clipping: the norm of step {step + 1} is off by {norm.off:.1e}, and its gradients are equal", _HINTS["norm"]
    return f"the optimizer: all losses and gradients are equal, and {figures.parameters.name} is off after the last step", _HINTS[
        "optimizer"
    ]


def _owner(parameter: str, order: Mapping[str, int]) -> str:
    """The innermost module around a parameter that was called by itself."""
    name = parameter.rpartition(".")[0]
    while name and order and name not in order:
        name = name.rpartition(".")[0]
    return name or parameter.rpartition(".")[0] or parameter


def _starred(names: Sequence[str]) -> str:
    patterns = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    return ", ".join(patterns[:6]) + (f" and {len(patterns) - 6} more" if len(patterns) > 6 else "")


_HINTS = {
    "loss": (
        "the loss is no mean over the rows (or the valid labels) of a batch, so shares of it do not add up: return "
        "{'loss_sum': ..., 'num_tokens': ...}, or say plan.loss_weight or plan.label_alignment"
    ),
    "norm": "gradients are changed between the backward and clipping by something that sees one rank's part (on_before_optimizer_step)",
    "optimizer": (
        "the optimizer looks at whole tensors or at several together (a norm for each layer), or the step changes a buffer or weight that "
        "each rank changes otherwise"
    ),
    "rows": (
        "it works on several rows together (a mean, a norm or statistics over the batch, in-batch negatives), of which a rank or a "
        "microbatch has some, or keeps state from step to step"
    ),
    "tensor": (
        "it works on a part of the heads or features as if it were all (a norm, softmax, mean or reshape over them), or a linear has the "
        "wrong role in the layout: colwise and rowwise alternate, one rowwise after the colwise ones"
    ),
    "sequence": "under sequence parallelism it sees a part of the positions (a shift, mean, cumsum or convolution over the sequence)",
    "pipeline": "something changes the hidden state between the layers of the layout (a factor, a skip)",
    "replicated": (
        "a parameter that is whole on every rank and works on a part of the heads or features: its gradient is a part of a sum. List its "
        "module in layout.replicated"
    ),
    "norms": "under sequence parallelism its gradient is a part of a sum over positions: list its module in layout.norms",
}


def _hint_forward(plan: Plan) -> str:
    fields = plan.axes.plan
    keys = ["rows"] if plan.axes.shares > 1 or plan.accumulate > 1 or plan.axes.is_pipeline else []
    keys += ["pipeline"] if plan.axes.is_pipeline else []
    keys += ["tensor"] if fields["tensor_parallel_size"] > 1 else []
    keys += ["sequence"] if fields["sequence_parallel"] else []
    return "; or ".join(_HINTS[key] for key in keys)


def _hint_backward(plan: Plan, wrong: Sequence[str], figures: Figures, reference: Reference) -> str:
    if plan.axes.plan["tensor_parallel_size"] > 1 and len(wrong) < len(figures.first_gradients):
        vectors = all(reference.exact.parameters[reference.exact.aliases.get(name, name)].ndim == 1 for name in wrong)
        if vectors:
            return _HINTS["replicated"] + ("; or " + _HINTS["norms"] if plan.axes.plan["sequence_parallel"] else "")
        return f"{_HINTS['tensor']}; or {_HINTS['replicated']}"
    return _HINTS["loss"] if plan.axes.shares > 1 or plan.axes.is_pipeline or plan.accumulate > 1 else _HINTS["tensor"]
