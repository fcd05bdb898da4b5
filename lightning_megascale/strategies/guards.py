"""Refusals: each says the name, the value, the rule and the remedy, on all ranks alike, before anything can hang."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_megascale.data.sharing import Withheld
from lightning_megascale.ops.attention import check_backend
from lightning_megascale.ops.dispatch import dispatchers
from lightning_megascale.parallel.loss_scale import IGNORE_INDEX, rows_of
from lightning_megascale.parallel.rng import derive_seed
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.strategies.habits import refused_habits


def raise_all(wrong: list[str], what: str) -> None:
    """One ValueError for all messages."""
    if wrong:
        raise ValueError(f"{what} cannot be parallelized as asked:\n" + "\n".join(f"  - {message}" for message in wrong))


def check_values(plan: ParallelPlan) -> None:
    """What can be told without knowing the number of ranks is told at once."""
    wrong = plan.check_without_world() + _dispatcher(plan)
    if wrong:
        raise ValueError("this parallel plan cannot run:\n" + "\n".join(f"  - {message}" for message in wrong))


def _dispatcher(plan: ParallelPlan) -> list[str]:
    """Dispatchers can be registered by users, so their names are known here only."""
    name = plan.expert_dispatcher
    if name not in dispatchers():
        near = difflib.get_close_matches(str(name), dispatchers(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return [f"expert_dispatcher={name!r}: must be one of {', '.join(map(repr, dispatchers()))}, or registered before{hint}"]
    if name != "auto" and plan.expert_parallel_size == 1:
        return [f"expert_dispatcher={name!r} needs expert_parallel_size above 1: all experts are on every rank otherwise"]
    if plan.expert_payload_dtype is not None and plan.expert_parallel_size == 1:
        return [f"expert_payload_dtype={plan.expert_payload_dtype!r} needs expert_parallel_size above 1: nothing travels otherwise"]
    return []


def refuse_notebook(cluster_environment: Any) -> None:
    """Lightning would re-run a script that a notebook does not have."""
    if _IS_INTERACTIVE and not getattr(cluster_environment, "creates_processes_externally", True):
        raise ValueError(
            "MegascaleStrategy starts its ranks from a script, and this is a notebook or an interactive shell: put the code in a file and "
            "run `python train.py` or `torchrun --nproc-per-node=N train.py`, or use `megascale train`"
        )


def check_trainer(module: pl.LightningModule, plan: ParallelPlan) -> None:
    """Trainer options that contradict the plan."""
    strategy = module.trainer.strategy
    wrong = refused_habits(module.trainer, plan)
    if getattr(strategy, "_layer_sync", None) is not None:
        wrong.append("sync_batchnorm=True: batch norm over sharded ranks is proven by no test; use group, layer or RMS norm")
    if strategy.root_device.type not in ("cpu", "cuda"):
        wrong.append(f"accelerator on {strategy.root_device.type!r}: gloo on CPUs and NCCL on CUDA GPUs are known; use accelerator='cpu'")
    if plan.pipeline_parallel_size > 1 and not getattr(strategy, "_save_distributed_checkpoint", True):
        wrong.append(
            "save_distributed_checkpoint=False: rank 0 would write its own pipeline stages only; leave it True, and make one file with "
            "`megascale checkpoint export`"
        )
    if plan.context_parallel_size > 1 and not module.automatic_optimization:
        wrong.append(
            f"context_parallel_size={plan.context_parallel_size} and manual optimization: the first batch proves where the step scores its "
            "targets by trying it, which a step that runs backward itself does not allow: use automatic optimization"
        )
    if plan.context_parallel_size > 1:
        wrong += check_backend(plan.attention_backend, strategy.root_device.type)
    if plan.global_batch_size is not None and not module.automatic_optimization:
        wrong.append(
            "global_batch_size is given and the module uses manual optimization, whose steps it takes itself: leave it None, or use "
            "automatic optimization"
        )
    raise_all(wrong, type(module).__name__)


_ABOUT_SHARDS = ("mixed torch.Tensor and DTensor", "must have the same mesh", "different meshes", "cross-mesh", "cross mesh")


@contextmanager
def explained(remedy: str) -> Iterator[None]:
    """Says what torch's complaints about DTensors mean to somebody who knows of none.

    Args:
        remedy: what to do about it in this place.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(part in str(error) for part in _ABOUT_SHARDS):
            raise
        raise RuntimeError(remedy) from error


IN_STEP = (
    "training_step touched a sharded parameter outside of its module's forward: part of the model was called apart (such as "
    "self.model.head(x) in place of self.model(x)), or a parameter was used as a tensor (such as an L2 term on self.parameters()). "
    "Move that into the forward of the parallelized module, or make the part a child of the LightningModule of its own"
)
IN_HOOK = (
    "a hook between backward and the optimizer's step put parameters or gradients together that are sharded in different ways (such as "
    "torch.nn.utils.clip_grad_norm_ over all parameters, or a sum of their norms). Clip with Trainer(gradient_clip_val=...) or "
    "self.clip_gradients(...), read the norm as strategy.grad_norm or with lightning.pytorch.utilities.grad_norm, and make a tensor whole "
    "with .full_tensor(), on all ranks"
)


def check_rows(batch: Any, plan: ParallelPlan) -> None:
    """With a global batch, a loader's batch has the microbatch's rows; a pipeline cuts it into microbatches itself."""
    if plan.microbatch_size is None or plan.pipeline_parallel_size > 1:
        return
    rows = rows_of(batch)
    if rows is not None and rows != plan.microbatch_size:
        raise ValueError(
            f"the loader gave {rows} rows and microbatch_size={plan.microbatch_size}: the accumulation derived from "
            "global_batch_size holds "
            "for full batches only; set the loader's batch_size to it and drop_last=True"
        )


def check_same_batch(batch: Any, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Peers on other axes than data compute parts of one forward: on different rows the result would be garbage without an error."""
    if group is None or dist.get_world_size(group) == 1:
        return
    leaves = [leaf for leaf in tree_leaves(_seen_by_all(batch, group)) if isinstance(leaf, torch.Tensor)]
    shapes = derive_seed(*(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in leaves))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    values = [leaf.detach().double().nan_to_num() for leaf in leaves if leaf.numel() and not leaf.is_complex()]
    sums = sum((value.sum() * (place + 1) for place, value in enumerate(values)), zero)
    ends = sum((value.flatten()[0] * (place + 1) for place, value in enumerate(values)), zero)
    mine = torch.stack([torch.tensor(float(shapes % 2**52), dtype=torch.float64, device=device), sums, ends])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    if any(not torch.equal(other, mine) for other in gathered):
        raise ValueError(
            "pipeline-, context- or tensor-parallel peers got different batches, so each would compute its part of another forward. Divide "
            "the data by trainer.strategy.data_parallel_rank and .data_parallel_size (not by RANK and WORLD_SIZE), and let shuffling "
            "depend on nothing else"
        )


def _seen_by_all(batch: Any, group: dist.ProcessGroup) -> Any:
    """A batch without the entries that its reader did not send to some ranks of a group."""
    if not isinstance(batch, Mapping):
        return batch
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, [key for key, value in batch.items() if isinstance(value, Withheld)], group=group)
    withheld = {key for keys in everyone for key in keys}
    return {key: value for key, value in batch.items() if key not in withheld}


def check_loader_lengths(loader: Any, device: torch.device) -> bool:
    """Ranks with different numbers of batches would wait for each other for ever. True when the number is known."""
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        length = -1
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([length], dtype=torch.int64, device=device))
    counts = [int(count) for count in lengths]
    if len(set(counts)) > 1:
        shortest, longest = counts.index(min(counts)), counts.index(max(counts))
        raise ValueError(
            f"ranks have different numbers of batches: rank {shortest} has {min(counts)} and rank {longest} has {max(counts)} (-1: "
            "unknown), so "
            "the longer ones would wait for ever. Use Lightning's distributed sampler, or drop_last=True on equal shares"
        )
    return length >= 0


def refuse_other_plan(done: ParallelPlan, wanted: ParallelPlan) -> None:
    """A module is parallelized once."""
    differing = [field.name for field in fields(ParallelPlan) if getattr(done, field.name) != getattr(wanted, field.name)]
    if differing:
        raise ValueError(
            f"this LightningModule was already parallelized under another plan (differing: {', '.join(differing)}): build a new "
            "module for a "
            "new plan, and load a checkpoint into it"
        )


def refuse_options_of_parallel_module(plan: ParallelPlan) -> None:
    """A ``configure_model`` that shards by itself leaves nothing for these options to act on."""
    given = [name for name in ("activation_checkpointing", "compile", "sequence_parallel", "cpu_offload") if getattr(plan, name)]
    given += ["pipeline_parallel_size"] if plan.pipeline_parallel_size > 1 else []
    if given:
        raise ValueError(
            f"{', '.join(given)}: the module's own configure_model has applied fully_shard or parallelize_module already, so the strategy "
            "cannot add this; apply it there, or leave the parallelization to MegascaleStrategy"
        )


def check_gradients(module: pl.LightningModule, parameters: Iterable[nn.Parameter]) -> None:
    """After the first backward no trainable parameter may be without a gradient, on any rank."""
    stepped = {id(parameter) for parameter in parameters}
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad and id(p) in stepped]
    missing = [name for name, parameter in trainable if parameter.grad is None]
    if module.trainer.strategy.reduce_boolean_decision(bool(missing), all=False):
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "") if missing else "(on another rank)"
        raise ValueError(
            f"after the first backward these trainable parameters have no gradient: {shown}. If the loss never uses them they would never "
            "train, and no error would tell: freeze them with requires_grad_(False). If only this rank's rows did not use them, add their "
            "output times 0 to the loss, so that every rank uses every parameter in every step"
        )
    hooked = [name for name, parameter in trainable if parameter._backward_hooks]
    if hooked:
        raise ValueError(f"{', '.join(hooked[:8])}: {HOOKS}")


def check_buffers(module: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """After a step: a buffer that follows the rows of a rank differs between ranks, and a checkpoint would keep that of one.

    Args:
        module: the LightningModule.
        group: ranks that count other rows; None for one.
        device: where the comparison lies.
    """
    plain = {name: buffer for name, buffer in module.named_buffers() if not isinstance(buffer, DTensor) and not buffer.is_complex()}
    buffers = {name: buffer.detach().double() for name, buffer in plain.items() if buffer.numel()}
    if group is None or not buffers:
        return
    mine = torch.stack([torch.stack([b.nan_to_num().sum(), b.nan_to_num().abs().sum()]).to(device) for b in buffers.values()])
    largest, least = mine.clone(), mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    differs = ((largest - least) > 1e-6 * largest[:, 1:]).any(dim=1).tolist()
    names = [name for name, wrong in zip(buffers, differs) if wrong]
    if names:
        raise ValueError(
            f"{', '.join(names[:8])}: a buffer that training changes, and by each rank's own rows (a running statistic, a codebook), so "
            "ranks compute with different ones: compute it from everybody's rows, self.all_gather(x) or strategy.reduce(x)"
        )


def refuse_unfreezing(module: nn.Module, trainable: Collection[str], copies: Collection[int], on_any_stage: Callable[[bool], bool]) -> None:
    """A pipeline's stages know from its start which of them gradients reach. Collective; raises on all ranks.

    Args:
        module: the LightningModule.
        trainable: names of its trainable parameters when it was cut.
        copies: ids of the second copies of tied parameters, whose names are not among them.
        on_any_stage: whether something is true on any rank.
    """
    own = [(name, parameter) for name, parameter in module.named_parameters() if id(parameter) not in copies]
    unfrozen = [name for name, parameter in own if parameter.requires_grad and name not in trainable]
    if on_any_stage(bool(unfrozen)):
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, unfrozen[:8])
        names = ", ".join(dict.fromkeys(name for some in everyone for name in some))
        raise ValueError(
            f"{names}: unfrozen since the model was cut into pipeline stages, which are built for what trains then: set requires_grad "
            "before trainer.fit, and go on from a checkpoint with a new module, or use pipeline_parallel_size=1"
        )


HOOKS = (
    "a hook registered on a parameter never runs, for sharded parameters get their gradients by a reduction and not by autograd. Change "
    "gradients in on_before_optimizer_step, where they are final"
)


def check_zeroed(module: pl.LightningModule) -> None:
    """At the start of a window no gradient may be left that will be stepped: it was scaled already, and would be scaled again."""
    stepped = {id(p) for optimizer in module.trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
    left = [p for p in module.parameters() if p.grad is not None and id(p) in stepped]
    if not cast(Any, module.trainer.strategy).on_any_stage(bool(left)):
        return
    local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in left if p.grad is not None]
    if module.trainer.strategy.reduce_boolean_decision(any(bool(gradient.count_nonzero()) for gradient in local), all=False):
        raise ValueError(
            "gradients of an earlier step are left at the start of this one (an optimizer_zero_grad that does not zero?): they "
            "were divided "
            "by their own number of tokens already. To accumulate use Trainer(accumulate_grad_batches=...), or manual optimization"
        )


def check_manual_backward(backwards: int) -> None:
    """``loss.backward()`` by hand is neither weighted nor scaled."""
    if backwards == 0:
        raise ValueError(
            "an optimizer steps and self.manual_backward(loss) was not called in this training_step: loss.backward() by hand gives the sum "
            "over ranks instead of the mean. Call self.manual_backward(loss)"
        )


def check_hidden_labels(batch: Any, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Labels that are not called so: with masked entries their number, not the rows, would be the weight."""
    batch = vars(batch) if is_dataclass(batch) else batch
    if group is None or (isinstance(batch, Mapping) and isinstance(batch.get("labels"), torch.Tensor)):
        return
    whole = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.int64, torch.int32)]
    found = torch.tensor(int(any(bool((leaf == IGNORE_INDEX).any()) for leaf in whole)), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    if int(found):
        raise ValueError(
            "the batch holds a whole-number tensor with -100 in it, which masks labels, but not under the key 'labels', so a scalar mean "
            "would be weighted by rows. Call it 'labels' in a dict, return {'loss_sum': ..., 'num_tokens': ...}, or say "
            "loss_weight='samples' "
            "if it is no label"
        )


def check_optimizers(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Optimizers that look at whole parameters compute something else on shards; and an optimizer steps the module's parameters."""
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        inner = getattr(optimizer, "_optimizer", optimizer)
        foreign = sum(id(parameter) not in known for group in inner.param_groups for parameter in group["params"])
        if foreign:
            raise ValueError(
                f"optimizer {type(inner).__name__} holds {foreign} tensors that are no parameters of {type(module).__name__}, so they "
                "would "
                "train nothing: make it in configure_optimizers from self.parameters()"
            )
        if type(inner).__name__ in ("LBFGS", "Adafactor", "SparseAdam", "Muon", "Shampoo", "Rprop"):
            raise ValueError(
                f"optimizer {type(inner).__name__} looks at whole tensors or at all parameters together, which no test proves on shards: "
                "use an element-wise one such as AdamW, Adam, SGD, RMSprop or Adagrad"
            )


def refuse_batch_change(saved: Mapping[str, Any], plan: ParallelPlan) -> None:
    """The global batch belongs to the run, not to the plan."""
    before, now = saved.get("global_batch_size"), plan.global_batch_size
    if before is not None and now is not None and before != now and not plan.allow_batch_change:
        raise ValueError(
            f"global_batch_size={now}, and the checkpoint was trained with {before}: a resume keeps the global batch. Set it to "
            f"{before}, or "
            "allow_batch_change=True if the change is meant"
        )
