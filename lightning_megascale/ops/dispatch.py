"""Tokens to the experts of other ranks and their results back: straight, or over a rank of the other node, once for all experts there.

A dispatcher is a function ``(Tokens, ExpertRanks, experts, meanwhile) -> (results (T, D), what meanwhile returned)``; ``experts`` computes
rows of this rank's experts. Each exchanges the counts once, waits for them once, and sends only rows that an expert was chosen for.

Shapes: T tokens of this rank, K experts a token, E experts, W ranks that share them (E/W each), N nodes, n ranks of a node, R rows.
Source: Lepikhin et al. 2020, "GShard", section 3 (all-to-all); Rajbhandari et al. 2022, "DeepSpeed-MoE", section 5 (hierarchical);
DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.2 (a token crosses to a node once and is copied there).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megascale.ops.all_to_all import Hop, exchange, finish_exchange, start_exchange, sum_rows_back
from lightning_megascale.ops.tensor_parallel import TensorAxis, finish_gather, start_gather

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows (R, D), local expert of each (R, 1), weights (R, 1)) -> weighted results (R, D)."""


class Tokens(NamedTuple):
    """What a router decided. ``indices`` (T, K) integer, ``num_experts`` where no expert is meant; ``weights`` (T, K)."""

    hidden: Tensor
    indices: Tensor
    weights: Tensor


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that share the experts, and which of them share a node.

    Args:
        num_experts: E.
        axis: all W ranks; the experts of rank r are those from r * E/W on.
        nodes: node of each of the W ranks, counted from 0; None where it is not known. Every node has n of them.
        inside: the n ranks of this rank's node, in order.
        across: the rank of each node, by node, that has this rank's place in its node.
        payload: dtype in which hidden states travel; None: their own.
    """

    num_experts: int
    axis: TensorAxis
    nodes: tuple[int, ...] | None = None
    inside: TensorAxis | None = None
    across: TensorAxis | None = None
    payload: torch.dtype | None = None

    @property
    def each(self) -> int:
        """Experts of a rank."""
        return self.num_experts // self.axis.size

    @property
    def num_nodes(self) -> int:
        return 1 if self.nodes is None else max(self.nodes) + 1

    def members(self, node: int) -> list[int]:
        """The ranks of a node, in order."""
        assert self.nodes is not None
        return [rank for rank, other in enumerate(self.nodes) if other == node]


Meanwhile = Callable[[], Any] | None
Dispatcher = Callable[[Tokens, ExpertRanks, Experts, Meanwhile], tuple[Tensor, Any]]

_DISPATCHERS: dict[str, Dispatcher] = {}

# ---- choice ------------------------------------------------------------------------------------------------------------------------------


def register_dispatcher(name: str, dispatcher: Dispatcher) -> None:
    """Makes ``expert_dispatcher=name`` mean a function of one's own (a kernel library's, for example).

    Raises:
        ValueError: for a name that is taken, or "auto".
    """
    if name == "auto" or _DISPATCHERS.get(name, dispatcher) is not dispatcher:
        raise ValueError(f"expert_dispatcher={name!r} is taken; dispatchers are {', '.join(dispatchers())}: choose another name")
    _DISPATCHERS[name] = dispatcher


def dispatchers() -> tuple[str, ...]:
    """Names of the dispatchers there are."""
    return ("auto", *_DISPATCHERS)


def find_dispatcher(name: str) -> Dispatcher:
    """The dispatcher of a name."""
    return _DISPATCHERS[name]


def bytes_across(top_k: int, num_nodes: int, num_experts: int, *, once_a_node: bool) -> float:
    """How many times the bytes of a rank's tokens cross between nodes, one way, with experts chosen evenly.

    Args:
        top_k, num_nodes, num_experts: K, N, E.
        once_a_node: a token crosses to a node once, however many of its experts are there.

    Source: a node other than the token's own holds none of its K experts with chance C(E - E/N, K) / C(E, K).
    """
    if not once_a_node:
        return top_k * (1 - 1 / num_nodes)
    none, away = 1.0, num_experts - num_experts // num_nodes
    for taken in range(top_k):
        none *= max(away - taken, 0) / (num_experts - taken)
    return (num_nodes - 1) * (1 - none)


MESSAGE, SECOND_HOP = 0.2, 0.5
"""What a message between nodes and the hop inside of a node cost, in units of a rank's own tokens crossing once. Fitted to
tests/benchmarks/moe_links.py at 2 and 4 nodes x 2 ranks, top-2 and top-8; they are relative, because ranks may hold different numbers of
tokens and have to choose alike."""


def cost_across(top_k: int, ranks: ExpertRanks, *, once_a_node: bool) -> float:
    """Time of a layer's way between nodes in the units of ``MESSAGE``: bytes, messages (W - n straight, N - 1 once a node) and the hop."""
    assert ranks.inside is not None
    sent = bytes_across(top_k, ranks.num_nodes, ranks.num_experts, once_a_node=once_a_node)
    if once_a_node:
        return sent + MESSAGE * (ranks.num_nodes - 1) + SECOND_HOP
    return sent + MESSAGE * (ranks.axis.size - ranks.inside.size)


def choose_dispatcher(top_k: int, ranks: ExpertRanks) -> str:
    """The dispatcher that "auto" means: "alltoall" or "two_hop_dedup", whichever costs less; the same on every rank."""
    if ranks.num_nodes == 1 or ranks.inside is None or ranks.inside.size == 1:
        return "alltoall"
    straight, once = (cost_across(top_k, ranks, once_a_node=how) for how in (False, True))
    return "two_hop_dedup" if once < straight else "alltoall"


# ---- counts ------------------------------------------------------------------------------------------------------------------------------


class _Assignments(NamedTuple):
    """The (token, expert) pairs of this rank, by expert. ``order`` (T * K,): their places in (T, K); those of no expert come last."""

    order: Tensor
    counts: Tensor


def _by_expert(indices: Tensor, num_experts: int) -> _Assignments:
    flat = indices.reshape(-1)
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(num_experts + 1, dtype=torch.int64).scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
    return _Assignments(order, counts[:num_experts])


def _share_counts(counts: Tensor, axis: TensorAxis) -> list[list[int]]:
    """Everybody's counts on the host: [rank][...]. The one wait for the device."""
    table = finish_gather(start_gather(counts[None], axis), axis, 0) if axis.size > 1 else counts[None]
    if table.device.type == "cpu":
        return table.tolist()
    host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    host.copy_(table, non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    return host.tolist()


def _expert_ids(counts: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """Ids (R,) of rows that lie by source and, of one source, by expert; counts[source][expert]."""
    flat = [count for row in counts for count in row]
    ids = torch.arange(len(counts[0]) if counts else 0).repeat(len(counts))
    return ids.repeat_interleave(torch.tensor(flat, dtype=torch.int64)).to(like.device, non_blocking=True)


# ---- dispatchers -------------------------------------------------------------------------------------------------------------------------


def _cast(rows: Tensor, ranks: ExpertRanks) -> Tensor:
    return rows if ranks.payload is None else rows.to(ranks.payload)


def straight(tokens: Tokens, ranks: ExpertRanks, experts: Experts, meanwhile: Meanwhile) -> tuple[Tensor, Any]:
    """ "alltoall": every row goes straight to the rank of its expert."""
    hidden, top_k = tokens.hidden, tokens.indices.shape[1]
    sorted_, axis, each = _by_expert(tokens.indices, ranks.num_experts), ranks.axis, ranks.each
    table = _share_counts(sorted_.counts, axis)  # [source][expert]
    own = slice(axis.rank * each, (axis.rank + 1) * each)
    sends = [sum(table[axis.rank][rank * each : (rank + 1) * each]) for rank in range(axis.size)]
    hop = Hop.of(axis, sends, [sum(row[own]) for row in table])
    order = sorted_.order[: sum(sends)]
    places = order // top_k
    rows = start_exchange(_cast(hidden.index_select(0, places), ranks), hop)
    weights = start_exchange(tokens.weights.reshape(-1, 1).index_select(0, order), hop)
    extra = meanwhile() if meanwhile is not None else None
    ids = _expert_ids([row[own] for row in table], order)
    results = experts(finish_exchange(rows).to(hidden.dtype), ids[:, None], finish_exchange(weights))
    return sum_rows_back(_cast(results, ranks), places, len(hidden), hop.back()).to(hidden.dtype), extra


def two_hop(tokens: Tokens, ranks: ExpertRanks, experts: Experts, meanwhile: Meanwhile) -> tuple[Tensor, Any]:
    """ "two_hop": a row goes to the rank with this rank's place in the expert's node, and from there to the rank of its expert. As many
    bytes between nodes as straight, in N - 1 messages instead of W - n."""
    hidden, top_k = tokens.hidden, tokens.indices.shape[1]
    sorted_ = _by_expert(tokens.indices, ranks.num_experts)
    route = _Route.of(ranks, _share_counts(sorted_.counts, ranks.axis))
    by_node = _node_order(sorted_.order, tokens.indices, ranks)[: sum(route.across.sends)]
    places = by_node // top_k
    rows = start_exchange(_cast(hidden.index_select(0, places), ranks), route.across)
    weights = start_exchange(tokens.weights.reshape(-1, 1).index_select(0, by_node), route.across)
    extra = meanwhile() if meanwhile is not None else None
    order = _expert_ids(route.arrived, by_node).argsort(stable=True)  # by expert of this node, so by its rank
    relayed = start_exchange(finish_exchange(rows).index_select(0, order), route.inside)
    weight = exchange(finish_exchange(weights).index_select(0, order), route.inside)
    ids = _expert_ids(route.final, by_node)
    results = experts(finish_exchange(relayed).to(hidden.dtype), ids[:, None], weight)
    gathered = sum_rows_back(_cast(results, ranks), order, len(order), route.inside.back())
    return sum_rows_back(gathered, places, len(hidden), route.across.back()).to(hidden.dtype), extra


def two_hop_dedup(tokens: Tokens, ranks: ExpertRanks, experts: Experts, meanwhile: Meanwhile) -> tuple[Tensor, Any]:
    """ "two_hop_dedup": as "two_hop", but a token crosses to a node once, with its experts there and their weights, and what they made of
    it comes back as one sum."""
    hidden, (count, top_k) = tokens.hidden, tokens.indices.shape
    nodes = _nodes_of_experts(ranks, hidden.device)  # (E + 1,), N for no expert
    going = torch.zeros(count, ranks.num_nodes + 1, dtype=torch.bool, device=hidden.device).scatter_(1, nodes[tokens.indices], True)
    going = going[:, :-1].t()  # (N, T)
    vector = torch.cat([_by_expert(tokens.indices, ranks.num_experts).counts, going.sum(1)])
    route = _Route.of(ranks, _share_counts(vector, ranks.axis))
    places = _true_places(going, sum(route.across.sends)) % count  # by node, then by token
    rows = start_exchange(_cast(hidden.index_select(0, places), ranks), route.across)
    exact = torch.promote_types(tokens.weights.dtype, torch.float32)  # for ids below 2^24
    facts = torch.cat([tokens.indices.to(exact), tokens.weights.to(exact)], dim=1)
    told = start_exchange(facts.index_select(0, places), route.across)
    extra = meanwhile() if meanwhile is not None else None
    facts = finish_exchange(told)
    chosen, weights = facts[:, :top_k].detach().long(), facts[:, top_k:].to(tokens.weights.dtype)
    own = _node_position(ranks, hidden.device)[chosen]  # (U, K): position among this node's experts, E for another node's
    order = own.reshape(-1).argsort(stable=True)[: sum(route.inside.sends)]
    relayed = start_exchange(finish_exchange(rows).index_select(0, order // top_k), route.inside)
    weight = exchange(weights.reshape(-1, 1).index_select(0, order), route.inside)
    ids = _expert_ids(route.final, order)
    results = experts(finish_exchange(relayed).to(hidden.dtype), ids[:, None], weight)
    summed = sum_rows_back(_cast(results, ranks), order // top_k, len(chosen), route.inside.back())
    return sum_rows_back(summed, places, count, route.across.back()).to(hidden.dtype), extra


def _need(axis: TensorAxis | None) -> TensorAxis:
    assert axis is not None, "a dispatcher of two hops where nodes are not known"
    return axis


@dataclass(frozen=True)
class _Route:
    """The two hops of this rank, over the nodes and inside of its own, and what arrives: ``arrived`` counts [peer][expert of this node]
    after the first, ``final`` [gateway][own expert] after the second."""

    across: Hop
    inside: Hop
    arrived: list[list[int]]
    final: list[list[int]]

    @classmethod
    def of(cls, ranks: ExpertRanks, table: list[list[int]]) -> _Route:
        """From everybody's counts [rank][experts], or [rank][experts and tokens of each node] where a token crosses once."""
        inside, across, each = _need(ranks.inside), _need(ranks.across), ranks.each
        me, groups = ranks.axis.rank, [ranks.members(node) for node in range(ranks.num_nodes)]
        node = next(number for number, members in enumerate(groups) if me in members)
        once = len(table[0]) > ranks.num_experts

        def rows(source: int, members: Sequence[int]) -> int:
            return sum(sum(table[source][rank * each : (rank + 1) * each]) for rank in members)

        def crossing(source: int, target: int) -> int:
            return table[source][ranks.num_experts + target] if once else rows(source, groups[target])

        place = groups[node].index(me)
        peers = [members[place] for members in groups]  # the ranks with my place, by node
        over = Hop.of(across, [crossing(me, target) for target in range(ranks.num_nodes)], [crossing(peer, node) for peer in peers])
        relays = [[members[spot] for members in groups] for spot in range(inside.size)]  # who sends through the gateway of each place
        sends = [sum(rows(peer, [rank]) for peer in peers) for rank in groups[node]]
        first = me * each
        final = [[sum(table[source][first + e] for source in sources) for e in range(each)] for sources in relays]
        held = [rank * each + e for rank in groups[node] for e in range(each)]
        arrived = [[table[peer][expert] for expert in held] for peer in peers]
        return cls(over, Hop.of(inside, sends, [sum(row) for row in final]), arrived, final)


def _nodes_of_experts(ranks: ExpertRanks, device: torch.device) -> Tensor:
    """(E + 1,): node of each expert, N for no expert."""
    assert ranks.nodes is not None
    nodes = torch.tensor([*ranks.nodes]).repeat_interleave(ranks.each)
    return torch.cat([nodes, torch.tensor([ranks.num_nodes])]).to(device, non_blocking=True)


def _node_position(ranks: ExpertRanks, device: torch.device) -> Tensor:
    """(E + 1,): place of each expert among those of this rank's node, by rank; E for those of other nodes and for no expert."""
    assert ranks.nodes is not None
    found = torch.full((ranks.num_experts + 1,), ranks.num_experts)
    for place, rank in enumerate(ranks.members(ranks.nodes[ranks.axis.rank])):
        found[rank * ranks.each : (rank + 1) * ranks.each] = torch.arange(place * ranks.each, (place + 1) * ranks.each)
    return found.to(device, non_blocking=True)


def _node_order(order: Tensor, indices: Tensor, ranks: ExpertRanks) -> Tensor:
    """Pairs by expert -> by the node of the expert, those of a node still by rank and expert."""
    nodes = _nodes_of_experts(ranks, order.device)[indices.reshape(-1).index_select(0, order)]
    return order.index_select(0, nodes.argsort(stable=True))


def _true_places(mask: Tensor, count: int) -> Tensor:
    """Flat places of the ``count`` true entries, in order, without a wait for the device."""
    return torch.nonzero_static(mask.reshape(-1), size=count).reshape(-1)


_DISPATCHERS |= {"alltoall": straight, "two_hop": two_hop, "two_hop_dedup": two_hop_dedup}
