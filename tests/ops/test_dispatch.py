"""Dispatchers against every expert computed on one device: results and all gradients, for any choice of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megascale.ops.dispatch import (
    ExpertRanks,
    Tokens,
    bytes_across,
    choose_dispatcher,
    dispatchers,
    find_dispatcher,
    register_dispatcher,
)
from lightning_megascale.ops.tensor_parallel import tensor_axis
from tests.harness import run_ranks

T, D, E, K = 6, 4, 8, 3
CHOICES = ("random", "one expert", "none", "some none", "unequal", "own rank")


def choose(kind: str, rank: int, world: int) -> Tensor:
    """(tokens, K) experts of a rank; ranks hold unlike numbers of tokens."""
    generator = torch.Generator().manual_seed(rank)
    count = {"unequal": 3 * rank, "none": T}.get(kind, T + rank)
    chosen = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(count)]) if count else torch.zeros(0, K).long()
    if kind == "one expert":
        chosen = torch.full((count, K), E)
        chosen[:, 1] = 5
    elif kind == "none":
        chosen = torch.full((count, K), E)
    elif kind == "some none":
        chosen[torch.rand(chosen.shape, generator=generator) < 0.4] = E
    elif kind == "own rank":
        chosen = chosen % (E // world) + rank * (E // world)
        chosen[:, 1:] = E
    return chosen


def inputs(kind: str, rank: int, world: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chosen = choose(kind, rank, world)
    generator = torch.Generator().manual_seed(100 + rank)
    hidden, weights = (torch.randn(len(chosen), size, generator=generator, dtype=torch.float64) for size in (D, K))
    weights[chosen == E] = 0
    return hidden, chosen, weights, torch.randn(len(chosen), D, generator=generator, dtype=torch.float64)


MATRICES = torch.randn(E, D, D, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def apply(matrices: Tensor, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """(R, D) rows through tanh(x M) of their experts; index len(matrices) is none."""
    out = rows.new_zeros(rows.shape) + matrices.sum() * 0
    for slot in range(experts.shape[1]):
        real = experts[:, slot] < len(matrices)
        made = torch.tanh(torch.einsum("td,tdo->to", rows[real], matrices[experts[real, slot]])) * weights[real, slot, None]
        out = out.index_put((real.nonzero()[:, 0],), made, accumulate=True)
    return out


def layout_of(nodes: list[int]) -> ExpertRanks:
    """The groups of this rank; every rank makes all of them."""
    me, world = dist.get_rank(), dist.get_world_size()
    groups = [[rank for rank in range(world) if nodes[rank] == node] for node in range(max(nodes) + 1)]
    inside = across = None
    for members in groups:
        group = dist.new_group(members)
        inside = tensor_axis(group) if me in members else inside
    for place in range(len(groups[0])):
        peers = [members[place] for members in groups]
        group = dist.new_group(peers)
        across = tensor_axis(group) if me in peers else across
    return ExpertRanks(E, tensor_axis(dist.group.WORLD), tuple(nodes), inside, across)


def dispatch_all(nodes: list[int], names: list[str]) -> dict[Any, Any]:
    ranks, me, world = layout_of(nodes), dist.get_rank(), dist.get_world_size()
    found = {}
    for name in names:
        for kind in CHOICES:
            hidden, chosen, weights, gradient = inputs(kind, me, world)
            own = MATRICES[me * ranks.each : (me + 1) * ranks.each].clone().requires_grad_()
            hidden.requires_grad_(), weights.requires_grad_()
            seen: list[int] = []

            def experts(rows: Tensor, ids: Tensor, of: Tensor, own: Tensor = own, seen: list[int] = seen) -> Tensor:
                seen.append(len(rows))
                return apply(own, rows, ids, of)

            tokens = Tokens(hidden, chosen, weights)
            out, extra = find_dispatcher(name)(tokens, ranks, experts, lambda: "meanwhile")
            out.backward(gradient)
            assert extra == "meanwhile"
            found[name, kind] = out.detach(), hidden.grad, weights.grad, own.grad, seen
    return found


def expected(kind: str, world: int) -> list[tuple[Tensor, ...]]:
    """Of each rank, from all tokens together on one device."""
    matrices = MATRICES.clone().requires_grad_()
    made = []
    for rank in range(world):
        hidden, chosen, weights, gradient = inputs(kind, rank, world)
        hidden.requires_grad_(), weights.requires_grad_()
        out = apply(matrices, hidden, chosen, weights)
        out.backward(gradient)
        made.append((out.detach(), hidden.grad, weights.grad))
    each = E // world
    return [(*values, matrices.grad[rank * each : (rank + 1) * each]) for rank, values in enumerate(made)]


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ([0, 0], ["alltoall"]),
        ([0, 0, 1, 1], ["alltoall", "two_hop", "two_hop_dedup"]),
        ([0, 1, 0, 1], ["two_hop", "two_hop_dedup"]),  # ranks of a node need not be neighbours
        ([0, 1, 2, 3], ["two_hop", "two_hop_dedup"]),
        ([0, 0, 0, 0], ["two_hop", "two_hop_dedup"]),
    ],
    ids=str,
)
def test_results_and_gradients_are_those_of_one_device(nodes: list[int], names: list[str]) -> None:
    results = run_ranks(dispatch_all, len(nodes), nodes, names)
    for (name, kind), _ in results[0].items():
        for rank, (result, reference) in enumerate(zip(results, expected(kind, len(nodes)))):
            for what, mine, theirs in zip(("out", "hidden", "weights", "experts"), result[name, kind], reference):
                theirs = torch.zeros_like(mine) if theirs is None else theirs
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12, msg=lambda m: f"{name}, {kind}, rank {rank}, {what}: {m}")  # noqa: B023
            needed = sum(int(((c := choose(kind, source, len(nodes))) // (E // len(nodes)) == rank).sum()) for source in range(len(nodes)))
            assert result[name, kind][4] == [needed], "only rows that an expert of this rank was chosen for are computed, in one call"
            del c


def test_bytes_across_nodes() -> None:
    """Top-8 over 8 nodes sends 7.0 copies straight and about 4.6 once a node."""
    assert bytes_across(8, 8, 256, once_a_node=False) == 7.0
    assert bytes_across(8, 8, 256, once_a_node=True) == pytest.approx(4.6, abs=0.05)
    assert bytes_across(2, 2, 16, once_a_node=True) == pytest.approx(1 - (8 * 7) / (16 * 15))
    assert bytes_across(16, 2, 16, once_a_node=True) == 1.0


def test_auto_takes_what_costs_less() -> None:
    """As measured by tests/benchmarks/moe_links.py: bytes decide at top-8, the number of messages where top-2 hardly saves bytes."""
    from lightning_megascale.ops.tensor_parallel import TensorAxis

    def ranks(nodes: tuple[int, ...] | None, inside: int) -> ExpertRanks:
        count = 4 if nodes is None else len(nodes)
        return ExpertRanks(16, TensorAxis("", count, 0), nodes, TensorAxis("", inside, 0), TensorAxis("", count // inside, 0))

    assert choose_dispatcher(8, ranks((0, 0, 1, 1), 2)) == "two_hop_dedup"
    assert choose_dispatcher(2, ranks((0, 0, 1, 1), 2)) == "alltoall"
    assert choose_dispatcher(2, ranks((0, 0, 1, 1, 2, 2, 3, 3), 2)) == "two_hop_dedup"
    assert choose_dispatcher(2, ranks((0, 0, 0, 0, 1, 1, 1, 1), 4)) == "two_hop_dedup"
    assert choose_dispatcher(8, ranks((0, 0, 0, 0), 4)) == "alltoall"
    assert choose_dispatcher(8, ranks((0, 1, 2, 3), 1)) == "alltoall", "with one rank a node there is nobody to hand copies to"
    assert choose_dispatcher(8, ranks(None, 2)) == "alltoall"


def test_own_dispatchers_have_names_of_their_own() -> None:
    def mine(*_: Any) -> Any:
        return None

    register_dispatcher("kernel", mine)
    assert find_dispatcher("kernel") is mine and "kernel" in dispatchers()
    with pytest.raises(ValueError, match="expert_dispatcher='two_hop' is taken"):
        register_dispatcher("two_hop", mine)
    with pytest.raises(ValueError, match="'auto' is taken"):
        register_dispatcher("auto", mine)
