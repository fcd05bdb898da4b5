"""Training a small decoder on one device and on tensor-parallel ranks, step by step alike: shared by the tests of tensor and recompute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.parallel.recompute import apply_recompute
from lightning_megascale.parallel.tensor import apply_tensor_parallel
from tests.harness import full

BATCH, LENGTH, STEPS = 4, 16, 3
SWIGLU = dict(norm="rms", positions="rope", mlp="swiglu", qk_norm=True, num_kv_heads=4)
GELU = dict(norm="layer", positions="learned", mlp="gelu", bias=True, tie_embeddings=True)


@dataclass(frozen=True)
class Case:
    """One way to train: the shape of the model, the loss, and the plan."""

    shape: tuple[tuple[str, Any], ...]
    sequence_parallel: bool = False
    recompute: Any = None
    loss: str = "logits"  # "logits", "labels" (the head makes the loss), "shards" (loss_parallel)
    data: int = 1
    compile: bool = False
    dtype: torch.dtype = torch.float64
    optimizer: str = "adamw"
    spoil: Callable[[nn.Module], None] | None = None  # a mutation, applied to the parallel model
    forget: str = ""  # partial gradients of parameters with this in their name are not summed


def case(shape: dict[str, Any], **plan: Any) -> Case:
    return Case(tuple(shape.items()), **plan)


def build(case: Case) -> Decoder:
    """The same values on every rank; spread wide enough that an error anywhere shows."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=48, hidden_size=32, num_layers=2, num_heads=8, intermediate_size=48, max_position_embeddings=32)
    model = Decoder(DecoderConfig(**{**sizes, **dict(case.shape)}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=1.0 if parameter.ndim == 1 else 0.0, std=0.2)
    return model.to(case.dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """(B, L) tokens and aligned labels; some labels are not counted."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(48, (BATCH, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, :5] = -100
    return ids[:, :-1], labels


def loss_sum(model: nn.Module, case: Case, ids: Tensor, labels: Tensor) -> Tensor:
    if case.loss == "labels":
        return model(ids, labels=labels)[0]
    logits = model(ids)
    if case.loss == "shards" and dist.is_initialized():
        from lightning_megascale.ops.cross_entropy import cross_entropy_from_shards

        return cross_entropy_from_shards(logits, labels, group=model.head.tp.mesh.get_group())[0]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


class Collectives(TorchDispatchMode):
    """Counts collectives on local tensors, backward threads included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.split("::")
        if name[0] == "_c10d_functional" and name[1] != "wait_tensor":
            self.counts[name[1]] = self.counts.get(name[1], 0) + 1
        return func(*args, **(kwargs or {}))


def train(case: Case) -> tuple[dict[str, Tensor], dict[str, dict[str, int]], dict[str, Any]]:
    """Losses, gradients and parameters of STEPS steps; collectives of the last one; facts about the model.

    Without a process group this is one device, whose numbers every plan must give.
    """
    model, partial, rows, mesh, facts = build(case), [], slice(None), None, {}
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (case.data, dist.get_world_size() // case.data), mesh_dim_names=("dp", "tp"))
        partial = parallelize(model, case, mesh)
        share = BATCH // case.data
        rows = slice(mesh["dp"].get_local_rank() * share, (mesh["dp"].get_local_rank() + 1) * share)
        facts = {"partial": partial, "tied": model.head.weight is model.embed_tokens.weight, "state": list(model.state_dict())}
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    options = {"momentum": 0.9} if case.optimizer == "sgd" else {"eps": 1e-6}  # 1e-8 turns the rounding of a zero gradient into steps
    optimizer = kinds[case.optimizer](model.parameters(), lr=1e-2, **options)
    numbers: dict[str, Tensor] = {}
    counts: dict[str, dict[str, int]] = {}
    for step in range(STEPS):
        torch.manual_seed(step)  # dropout
        ids, labels = batch(step)
        tokens = (labels != -100).sum()
        if case.compile:
            loss = loss_sum(model, case, ids[rows], labels[rows])
            (loss / tokens).backward()
        else:
            with Collectives() as forward:
                loss = loss_sum(model, case, ids[rows], labels[rows])
            with Collectives() as backward:
                (loss / tokens).backward()
            counts = {"forward": forward.counts, "backward": backward.counts}
        total = loss.detach().clone()
        if mesh is not None:
            dist.all_reduce(total, group=mesh["dp"].get_group())
        numbers[f"loss{step}"] = total / tokens
        sum_partial(model, [name for name in partial if not case.forget or case.forget not in name], mesh)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            numbers[f"gradient{step}.{name}"] = full(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        numbers[f"parameter.{name}"] = full(parameter)
    return numbers, counts, facts


def parallelize(model: Decoder, case: Case, mesh: Any) -> list[str]:
    """TP -> recompute (around a compiled block) -> FSDP2, as the package does it."""
    partial = apply_tensor_parallel(
        model,
        mesh["tp"],
        model.megascale_layout,
        sequence_parallel=case.sequence_parallel,
        recompute=case.recompute,
        loss_parallel=case.loss == "shards",
        compiled=case.compile,
    )
    if case.spoil:
        case.spoil(model)
    if case.compile:
        for block in model.layers:
            block.compile(backend="aot_eager", fullgraph=case.data == 1)
    apply_recompute(list(model.layers), case.recompute)
    if case.data > 1:
        for block in model.layers:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    return partial


def sum_partial(model: nn.Module, names: list[str], mesh: Any) -> None:
    """What the strategy does once per step."""
    parameters = dict(model.named_parameters())
    for name in names:
        grad = parameters[name].grad
        dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=mesh["tp"].get_group())
