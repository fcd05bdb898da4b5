"""Expert parallelism: ranks of dp_shard x cp x tp hold other experts, and tokens travel to them. Experts are never cut inside.

A module in the role ``experts`` keeps its class and its code: called as (hidden (T, D), indices (T, K), weights (T, K)), it sends each row
to the rank of its expert, where the module's own forward runs with E/ep experts and one expert a row. Gradients are sums over tokens, so
an expert's gradient holds the tokens of all ranks of its axis already, and FSDP2 sums it over ``expert_shard``: no factor of ep anywhere.
Shapes: T tokens of a rank, D model, E experts, K experts a token.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_megascale.layout import ModelLayout
from lightning_megascale.mesh import ExpertViews, MeshViews
from lightning_megascale.ops.dispatch import ExpertRanks, Tokens, choose_dispatcher, find_dispatcher
from lightning_megascale.ops.experts import check_choice
from lightning_megascale.ops.tensor_parallel import TensorAxis, finish_gather, start_gather, tensor_axis
from lightning_megascale.parallel.mixin import become
from lightning_megascale.parallel.tensor_experts import own_experts
from lightning_megascale.parallel.tensor_roles import Roles
from lightning_megascale.plan import ParallelPlan


@dataclass(frozen=True)
class SharedState:
    """What a module of shared experts knows.

    Args:
        ranks: who holds which experts.
        dispatcher: name of the dispatcher, or "auto".
        copies: the ranks that all have the same tokens (tensor parallelism without sequence parallelism) and route a part of them each;
            None where each has its own.
    """

    ranks: ExpertRanks
    dispatcher: str
    copies: TensorAxis | None


class SharedExperts:
    """Experts of which this rank has E/ep. Called with its own tokens; see the module's docstring."""

    ep: SharedState

    @torch.compiler.disable  # rows in numbers that no compiler knows
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: SharedState = self.ep
        meanwhile: Callable[[], Any] | None = kwargs.pop("meanwhile", None)
        own_forward = super().forward  # type: ignore[misc]
        bound = inspect.signature(own_forward).bind(*args, **kwargs)
        hidden, indices, weights = list(bound.arguments.values())[:3]
        check_choice(hidden, indices, weights, state.ranks.num_experts, type(self).__name__)
        tokens, count = Tokens(hidden, indices, weights), len(hidden)
        if state.copies is not None:
            tokens = _own_part(tokens, state.copies, state.ranks.num_experts)

        def compute(rows: Tensor, ids: Tensor, of: Tensor) -> Tensor:
            with own_experts(self, state.ranks.each) as parameters:
                if len(rows):
                    return own_forward(rows, ids, of.to(weights.dtype))
                results = rows * of.to(rows.dtype)
                for parameter in parameters:  # in the graph also where no token came: every rank has every gradient
                    results = results + parameter.flatten()[:0].sum().to(results.dtype)
            return results

        name = choose_dispatcher(indices.shape[1], state.ranks) if state.dispatcher == "auto" else state.dispatcher
        results, extra = _checked(name, find_dispatcher(name)(tokens, state.ranks, compute, meanwhile), tokens.hidden)
        if state.copies is not None:
            results = _AllParts.apply(results, state.copies)
            results = results if len(results) == count else results[:count].clone()  # FSDP2 takes no views
        return results if meanwhile is None else (results, extra)


def _checked(name: str, made: Any, hidden: Tensor) -> tuple[Tensor, Any]:
    """What a dispatcher made, which may be somebody's own."""
    results = made[0] if isinstance(made, tuple) and len(made) == 2 else made
    if results is made or not isinstance(results, Tensor) or results.shape != hidden.shape or results.dtype != hidden.dtype:
        found = f"{tuple(results.shape)} {results.dtype}" if isinstance(results, Tensor) else type(results).__name__
        raise ValueError(
            f"expert_dispatcher={name!r} returned {found}: it must return a pair of the results, {tuple(hidden.shape)} {hidden.dtype} in "
            "the order of the tokens, and what meanwhile() returned (None without it)"
        )
    return results, made[1]


# ---- one of several equal copies of the tokens -------------------------------------------------------------------------------------------


def _own_part(tokens: Tokens, axis: TensorAxis, nobody: int) -> Tokens:
    """This rank's part of tokens that all ranks of the axis have; as many on each, the last with rows of no expert."""
    missing = -len(tokens.hidden) % axis.size
    pad = torch.nn.functional.pad
    hidden, weights = (_OwnPart.apply(pad(t, (0, 0, 0, missing)), axis) for t in (tokens.hidden, tokens.weights))
    indices = pad(tokens.indices, (0, 0, 0, missing), value=nobody).chunk(axis.size)[axis.rank]
    return Tokens(hidden, indices, weights)


class _OwnPart(torch.autograd.Function):
    """Rows of this rank; backward: the gradient of all rows, on every rank."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return whole.chunk(axis.size)[axis.rank].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return finish_gather(start_gather(gradient, ctx.axis), ctx.axis, 0), None


class _AllParts(torch.autograd.Function):
    """Rows of all ranks; backward: of the gradient, which every rank has whole, this rank's rows."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return finish_gather(start_gather(part, axis), axis, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.axis.size)[ctx.axis.rank].clone(), None


# ---- application -------------------------------------------------------------------------------------------------------------------------


def regroups_ranks(plan: ParallelPlan, layout: ModelLayout | None) -> bool:
    """Whether experts get views of their own: with ep, and under sequence parallelism, where each rank routes its own tokens. (Tensor
    parallelism alone deals whole experts out over tp, on the tokens that all its ranks have.)"""
    has_experts = layout is not None and bool(layout.experts)
    return has_experts and (plan.expert_parallel_size > 1 or (plan.tensor_parallel_size > 1 and plan.sequence_parallel))


def check_experts(model: nn.Module, layout: ModelLayout | None, plan: ParallelPlan) -> list[str]:
    """A message for every rule of expert parallelism that a model violates. No communication."""
    ep = plan.expert_parallel_size
    if layout is None or not layout.experts:
        missing = (
            f"expert_parallel_size={ep}: no experts are known in {type(model).__name__}; name the modules of experts in layout.experts, "
            "called as (hidden (T, D), indices (T, K), weights (T, K)), or use expert_parallel_size=1"
        )
        return [] if ep == 1 else [missing]
    wrong, roles = [], Roles.of(model, layout)
    for name in roles.experts:
        module = model.get_submodule(name)
        count, parameters = getattr(module, "num_experts", None), dict(module.named_parameters())
        if not isinstance(count, int) or not parameters or any("." in key or p.shape[:1] != (count,) for key, p in parameters.items()):
            wrong.append(
                f"{name} is {type(module).__name__}: layout.experts are modules with num_experts whose own parameters have it as dim 0"
            )
        elif count % ep:
            legal = [size for size in range(1, count + 1) if count % size == 0]
            near = sorted(legal, key=lambda size: abs(size - ep))[:2]
            wrong.append(
                f"{name}: num_experts={count} is not divisible by expert_parallel_size={ep}; nearest {' or '.join(map(str, sorted(near)))}"
            )
        elif ep > 1 and (buffers := [key for key, buffer in module.named_buffers() if count in buffer.shape]):
            shape = tuple(module.get_buffer(buffers[0]).shape)
            wrong.append(
                f"{name}.{buffers[0]} is a buffer of shape {shape}, with num_experts={count} as a dim: only parameters are dealt out, so "
                "its entries would be read for other experts. Make it a parameter with requires_grad=False and experts as dim 0, or use "
                "expert_parallel_size=1"
            )
        elif len(inspect.signature(module.forward).parameters) < 3:
            wrong.append(f"{name}: layout.experts are called as (hidden (T, D), indices (T, K), weights (T, K))")
    return wrong + _check_routers(model, roles, plan)


def _check_routers(model: nn.Module, roles: Roles, plan: ParallelPlan) -> list[str]:
    wrong = []
    for name in roles.router:
        capacity = getattr(model.get_submodule(name), "capacity_factor", None)
        cut = "context_parallel_size" if plan.context_parallel_size > 1 else "sequence_parallel" if plan.sequence_parallel else None
        if capacity is not None and cut is not None:
            wrong.append(
                f"{name} has capacity_factor={capacity}: the tokens of a row compete for places, and {cut}={getattr(plan, cut)} deals them "
                "out over ranks. Use capacity_factor=None (no token is dropped), or whole rows on each rank"
            )
    return wrong


def apply_experts(model: nn.Module, layout: ModelLayout, views: MeshViews, experts: ExpertViews, plan: ParallelPlan) -> list[nn.Module]:
    """Deals the experts of ``model`` out in place; every rank keeps its part of the values it has.

    Args:
        model: on any device, meta included; of a pipeline, this rank's stages.
        layout: names ``experts`` and ``router``.
        views, experts: of the run.
        plan: resolved.

    Returns:
        the modules of experts, which are to be sharded over ``experts.shard``.
    """
    roles = Roles.of(model, layout)
    has_copies = views.tensor is not None and views.tensor.size() > 1 and not plan.sequence_parallel
    copies = tensor_axis(views.tensor.get_group()) if has_copies and views.tensor is not None else None
    payload = None if plan.expert_payload_dtype is None else getattr(torch, plan.expert_payload_dtype)
    nodes = _nodes(experts.expert)
    _check_hops(plan, nodes)
    found = []
    for name in roles.experts:
        module: Any = model.get_submodule(name)
        if not hasattr(module, "num_experts"):
            continue  # stands in for one of another stage
        if experts.expert is not None:
            _deal(module, experts.expert)
        axis = TensorAxis("", 1, 0) if experts.expert is None else tensor_axis(experts.expert.get_group())
        ranks = replace(nodes, num_experts=module.num_experts, axis=axis, payload=payload)
        become(module, SharedExperts).ep = SharedState(ranks, plan.expert_dispatcher, copies)
        found.append(module)
    return found


def _deal(module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        local = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].contiguous().clone()
        part = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        module.register_parameter(key, nn.Parameter(part, parameter.requires_grad))


def _nodes(mesh: DeviceMesh | None) -> ExpertRanks:
    """Who of the axis shares a node, asked of the hosts, and a group for each hop; without them where nodes are unlike."""
    alone = ExpertRanks(0, TensorAxis("", 1, 0))
    if mesh is None or mesh.size() == 1:
        return alone
    group = mesh.get_group()
    hosts: list[Any] = [None] * mesh.size()
    dist.all_gather_object(hosts, host_name(), group=group)
    order = list(dict.fromkeys(hosts))
    nodes = tuple(order.index(host) for host in hosts)
    members = [[rank for rank, node in enumerate(nodes) if node == number] for number in range(len(order))]
    ranks = dist.get_process_group_ranks(group)
    peers = [[part[place] for part in members] for place in range(len(members[0]))] if len({*map(len, members)}) == 1 else []
    if len(order) == 1 or not peers or any(peer != sorted(peer) for peer in peers):
        return replace(alone, nodes=None)
    me = mesh.get_local_rank()
    inside, across = (
        next(_axis_of([ranks[r] for r in part]) for part in parts if me in part) for parts in (members, peers)
    )  # fmt: skip
    return replace(alone, nodes=nodes, inside=inside, across=across)


def _check_hops(plan: ParallelPlan, nodes: ExpertRanks) -> None:
    """Raises on all ranks alike where a dispatcher of two hops has no nodes to hop over."""
    if not plan.expert_dispatcher.startswith("two_hop"):
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, nodes.inside is None)
    if any(everyone):
        raise ValueError(
            f"expert_dispatcher={plan.expert_dispatcher!r} needs the {plan.expert_parallel_size} ranks that share experts on two nodes or "
            "more, as many of them on each, and their hosts say otherwise: use 'alltoall', or 'auto', which chooses by that"
        )


def host_name() -> str:
    """What ranks of one node have in common."""
    return socket.gethostname()


def _axis_of(ranks: list[int]) -> TensorAxis:
    """A group made by its members alone; a single rank needs none."""
    if len(ranks) == 1:
        return TensorAxis("", 1, 0)
    return tensor_axis(dist.new_group(ranks, use_local_synchronization=True))
