"""Mixture of experts: one process, against the experts of transformers (its loop, and its grouped products).

Run: ``python -m tests.benchmarks.moe [shapes=2048x256x512x16x2,2048x256x512x64x8] [rounds=9] [threads=1] [dtype=float32]``; a shape is
tokens x width x feed-forward x experts x experts of a token.

All contenders hold the same weights and take turns inside one run, in another order each round: forward and backward, with gradients
of hidden states, weights of the choice and parameters, for tokens that choose at random. Figures are medians over rounds, ratios medians
of the ratios inside a round with their 95% bootstrap interval (above 1: ours is faster). Processor time leaves out waiting, and what
other programs do to the clock. "kept" is what autograd holds between forward and backward beyond inputs and parameters.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_megascale.models.moe import GroupedExperts
from tests.benchmarks.overhead import interval

OURS = "ours"


def contenders(width: int, inner: int, experts: int, top_k: int, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Modules with the same weights, called alike."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.manual_seed(0)
    made: dict[str, nn.Module] = {OURS: GroupedExperts(experts, width, inner).to(dtype)}
    for implementation in ("eager", "grouped_mm"):
        config = MixtralConfig(hidden_size=width, intermediate_size=inner, num_local_experts=experts, num_experts_per_tok=top_k)
        config._experts_implementation = implementation
        peer = MixtralExperts(config).to(dtype)
        peer.load_state_dict(made[OURS].state_dict())
        made[f"transformers {implementation}"] = peer
    return made


def turn(run: Callable[[], Tensor], gradient: Tensor) -> tuple[float, float]:
    """(seconds, processor seconds) of a forward and a backward."""
    begin = time.perf_counter(), time.process_time()
    run().backward(gradient)
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def kept_bytes(run: Callable[[], Tensor], given: list[Tensor]) -> int:
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = run()
    del out
    return sum(size for place, size in storages.items() if place not in {tensor.untyped_storage().data_ptr() for tensor in given})


def one_process(shape: tuple[int, ...], rounds: int, dtype: torch.dtype) -> list[tuple[str, ...]]:
    """Rows of the table for one shape."""
    tokens, width, inner, experts, top_k = shape
    modules = contenders(width, inner, experts, top_k, dtype)
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    indices = torch.rand(tokens, experts).topk(top_k).indices
    weights = torch.rand(tokens, top_k).requires_grad_()
    gradient = torch.randn(tokens, width).to(dtype)
    runs = {name: (lambda module=module: module(hidden, indices, weights)) for name, module in modules.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    order = list(runs)
    for number in range(rounds + 1):
        random.Random(number).shuffle(order)
        for name in order:
            for tensor in (hidden, weights, *modules[name].parameters()):
                tensor.grad = None
            measured = turn(runs[name], gradient)
            if number:  # the first round warms up
                times[name].append(measured)
    rows = []
    for name, run in runs.items():
        kept = kept_bytes(run, [hidden, weights, indices, *modules[name].parameters()])
        cells = [f"{statistics.median(t[kind] for t in times[name]) * 1000:.0f}" for kind in (0, 1)]
        for kind in (0, 1):
            ratios = [theirs[kind] / ours[kind] for theirs, ours in zip(times[name], times[OURS])]
            cells.append("" if name == OURS else "{:.2f} [{:.2f}, {:.2f}]".format(*interval(ratios)))
        rows.append(("x".join(map(str, shape)), name, *cells, f"{kept / 2**20:.1f}"))
    return rows


def main(arguments: list[str]) -> None:
    given = dict(argument.split("=", 1) for argument in arguments)
    torch.set_num_threads(int(given.get("threads", 1)))
    dtype: Any = getattr(torch, given.get("dtype", "float32"))
    table = Table("shape", "experts", "ms", "processor ms", "time / ours", "processor time / ours", "kept MiB", title="one process")
    for text in given.get("shapes", "2048x256x512x16x2,2048x256x512x64x8").split(","):
        for row in one_process(tuple(map(int, text.split("x"))), int(given.get("rounds", 9)), dtype):
            table.add_row(*row)
    Console(width=140).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
