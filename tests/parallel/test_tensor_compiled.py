"""Compiled blocks: the numbers of one device, one graph for all layers, and no gathered input kept between forward and backward.

Nothing is compiled in the parent: every rank is forked before torch's compiler has started. No dispatch mode is active while a block is
traced, for the compiler then skips the block without a word; hence the counted graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.harness import run_ranks, worst
from tests.parallel.tensor_runs import GELU, SWIGLU, Case, batch, build, case, parallelize, train


def _train_and_count(c: Case) -> tuple[dict[str, Tensor], int, dict[str, int]]:
    from torch._dynamo.utils import counters

    numbers = train(c)[0]
    return numbers, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


SEQUENCE = case({**SWIGLU, "num_layers": 3}, sequence_parallel=True, compile=True)
CASES = {
    "tp2+sp, full": (2, replace(SEQUENCE, recompute="full")),
    "tp2, dropout": (2, case({**GELU, "dropout": 0.1}, compile=True)),
    "dp2 x tp2+sp": (4, replace(SEQUENCE, data=2)),
    "dp2 x tp2+sp, full": (4, case(GELU, sequence_parallel=True, compile=True, data=2, recompute="full")),
}


@pytest.mark.parametrize("name", [name if "dp2" not in name else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_compiled_blocks_equal_one_device(name: str) -> None:
    world, c = CASES[name]
    wanted = train(replace(c, compile=False))[0]
    for numbers, graphs, breaks in run_ranks(_train_and_count, world, c, timeout=250):
        assert worst(wanted, numbers)[0] < 1e-10
        assert graphs == 1  # the layers share it
        assert not breaks


def _saved_sizes(c: Case) -> tuple[list[int], int, int]:
    """Elements of each distinct tensor the blocks' autograd graph holds, after one forward; graphs; elements of a gathered input."""
    from torch._dynamo.utils import counters

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = build(c)
    parallelize(model, c, mesh)
    hidden: list[Tensor] = []
    model.norm.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    ids, _ = batch(0)
    model(ids)
    parameters = {(p.to_local() if isinstance(p, DTensor) else p).untyped_storage()._cdata for p in model.parameters()}
    found: dict[int, int] = {}
    seen: set[Any] = set()
    todo = [hidden[0].grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        for tensor in getattr(node, "saved_tensors", ()):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in parameters:
                found[tensor.untyped_storage()._cdata] = tensor.numel()
    return list(found.values()), counters["stats"]["unique_graphs"], ids.numel() * dict(c.shape).get("hidden_size", 32)


@pytest.mark.slow
def test_compiler_does_not_merge_the_two_gathers() -> None:
    for sizes, graphs, whole in run_ranks(_saved_sizes, 2, SEQUENCE, timeout=200):
        assert graphs == 1
        assert whole // 2 in sizes  # the shards
        assert whole not in sizes
