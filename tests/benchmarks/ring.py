"""Attention over 4 ranks: processor time, wall clock and peak bytes of our methods, their peers, and a quarter of full attention.

Run: ``python -m tests.benchmarks.ring [sequences=4096,16384] [rounds=9] [ranks=4] [only=ring,share]``, and
``python -m tests.benchmarks.ring packings [1000]`` for the work that the layout "packed" gives the ranks. 8 heads of 64, causal, forward
and backward, float32, one thread a rank.

All contenders take turns inside one run on the same ranks, in another order each round; figures are medians over rounds, ratios medians of
the ratios inside a round with their 95% bootstrap interval. Processor time is a rank's (all of its threads), the mean over ranks: it leaves
out waiting, and what other programs do to the clock. "share" is what no method can beat: each of the ranks computes, at the same time,
full attention for its part of the heads, without any exchange. Peak bytes are the storages that operators have made and that are still
alive, beyond queries, keys, values and the gradient that comes in, on the rank with most; what operators need inside is not counted.

The peers run on the same CPU operator: torch's private ring (keys by all-to-all or by all-gather), and ring-flash-attn where it is
installed (its zigzag ring; the module for transformers, which it cannot import from present ones, is left out). "a2a + SDPA" is Ulysses in
the fewest lines. The last column is the largest error of the output and the gradients against full attention in float64, at 512 tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_megascale.ops.attention import KERNELS, BlockOptions
from lightning_megascale.ops.context_attention import exchanged_attention, gathered_attention, ring_attention
from lightning_megascale.ops.context_blocks import Pattern
from lightning_megascale.ops.sequence_layout import assign, imbalance, positions_of, ring_step_ratio, runs_of
from tests.benchmarks.activation_bytes import LiveBytes
from tests.benchmarks.overhead import interval
from tests.harness import run_ranks

HEADS, HEAD = 8, 64
SCALE = HEAD**-0.5
OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
OPERATOR_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""This rank's queries, keys and values, (1, N, L, H), to its output."""


# ---- ours -----------------------------------------------------------------------------------------------------------------------------


def ours(function: Callable[..., Tensor], length: int) -> Attention:
    size = dist.get_world_size()
    tables = [runs_of(np.zeros(len(own), int), own) for own in assign(np.zeros(length, int), size, "headtail")]
    pattern = Pattern((tables,))
    return lambda q, k, v: function(q, k, v, pattern, KERNELS["cpu"], dist.group.WORLD)


# ---- peers ----------------------------------------------------------------------------------------------------------------------------


def torch_ring(rotate: str) -> Attention:
    """Torch's ring template. (Private to torch.)"""
    from torch.distributed.tensor.experimental._context_parallel import _attention as template

    method = template._RotateMethod.ALL_TO_ALL if rotate == "a2a" else template._RotateMethod.ALL_GATHER

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            template._cp_options.rotate_method = method
            group = dist.group.WORLD
            out, lse = template._templated_ring_attention(group, 2, OPERATOR, q, k, v, is_causal=True, dropout_p=0.0, scale=SCALE)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            template._cp_options.rotate_method = method
            tensors = dict(zip(("query", "key", "value", "out", "logsumexp"), ctx.saved_tensors))
            return template._templated_ring_attention_backward(
                dist.group.WORLD, 2, OPERATOR_BACKWARD, grad, "grad_out", **tensors, is_causal=True, dropout_p=0.0, scale=SCALE
            )[:3]

    return Ring.apply


def zigzag() -> Attention | None:
    """The zigzag ring of ring-flash-attn on the CPU operator; None where it is not installed."""
    if importlib.util.find_spec("ring_flash_attn") is None:
        return None
    interface = ModuleType("flash_attn.flash_attn_interface")
    varlen = {f"_flash_attn_varlen_{way}": None for way in ("forward", "backward")}
    vars(interface).update(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward, **varlen)
    adapters = ModuleType("ring_flash_attn.adapters")
    vars(adapters).update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    sys.modules.update({"flash_attn": ModuleType("flash_attn"), interface.__name__: interface, adapters.__name__: adapters})
    ring = importlib.import_module("ring_flash_attn").zigzag_ring_flash_attn_func
    return lambda q, k, v: ring(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, group=dist.group.WORLD).transpose(1, 2)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:
    out, lse = OPERATOR(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse, None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: None,
    deterministic: bool,
    rng_state: None = None,
) -> None:
    laid_out = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    for given, grad in zip((dq, dk, dv), OPERATOR_BACKWARD(*laid_out, softmax_lse, 0.0, causal, scale=softmax_scale)):
        given.copy_(grad.transpose(1, 2))


class _Swap(torch.autograd.Function):
    """Splits one dim over the ranks and joins another: an all-to-all and the two copies around it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int) -> Tensor:
        ctx.dims = join, split
        parts = torch.stack(x.chunk(dist.get_world_size(), split))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Swap.apply(grad, *ctx.dims), None, None


def bare(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (_Swap.apply(x, 1, 2) for x in (q, k, v))
    return _Swap.apply(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)


# ---- one rank -------------------------------------------------------------------------------------------------------------------------


def contenders(length: int) -> dict[str, Attention]:
    found: dict[str, Attention | None] = {
        "ring": ours(ring_attention, length),
        "ulysses": ours(exchanged_attention, length),
        "allgather": ours(gathered_attention, length),
        "torch ring (a2a)": torch_ring("a2a"),
        "torch ring (all-gather)": torch_ring("allgather"),
        "ring-flash-attn": zigzag(),
        "a2a + SDPA": bare,
    }
    return {name: attention for name, attention in found.items() if attention is not None}


def inputs(length: int) -> list[Tensor]:
    """q, k, v and the gradient of the output on this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(1, HEADS, length // dist.get_world_size(), HEAD, generator=generator) for _ in range(4)]


def share(length: int) -> Callable[[], None]:
    """Full attention for this rank's part of the heads: the kernel's work and nothing else."""
    heads = HEADS // dist.get_world_size()
    q, k, v, grad = (torch.randn(1, heads, length, HEAD) for _ in range(4))
    kernel, options = KERNELS["cpu"], BlockOptions(SCALE, is_causal=True)

    def compute() -> None:
        out, lse = kernel.forward(q, k, v, options)
        kernel.backward(grad, q, k, v, out, lse, options)

    return compute


def turn(attention: Attention, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    *qkv, grad = (x.detach() for x in tensors)
    qkv = [x.requires_grad_() for x in qkv]
    out = attention(*qkv)
    return out.detach(), *torch.autograd.grad(out, qkv, grad)


class Peak(LiveBytes):
    """The most bytes that were alive at once."""

    peak = 0

    def adopt(self, tensor: Tensor) -> None:
        super().adopt(tensor)
        self.peak = max(self.peak, self.live)


def peak_bytes(attention: Attention, tensors: list[Tensor]) -> int:
    with Peak() as counter:
        turn(attention, tensors)
    return counter.peak


def contest(length: int, rounds: int, only: list[str]) -> tuple[dict[str, list[tuple[float, float]]], dict[str, int]]:
    """(seconds and processor seconds of every round, peak bytes) of every contender on this rank."""
    tensors, methods = inputs(length), contenders(length)
    turns: dict[str, Callable[[], Any]] = {name: lambda a=attention: turn(a, tensors) for name, attention in methods.items()}  # type: ignore[misc]
    turns["share"] = share(length)
    names = [name for name in turns if name in only or not only]
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(names, len(names)):
            dist.barrier()
            start, start_processor = time.perf_counter(), time.process_time()
            turns[name]()
            processor = time.process_time() - start_processor
            dist.barrier()
            if number:  # the first round warms up
                took[name].append((time.perf_counter() - start, processor))
    return took, {name: peak_bytes(methods[name], tensors) for name in names if name in methods}


def errors(length: int = 512) -> dict[str, float]:
    """Largest error of every contender on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, found = inputs(length), {}
    for layout in ("headtail", "contiguous"):
        place = torch.from_numpy(assign(np.zeros(length, int), size, layout))
        whole = []
        for tensor in mine:
            parts = [torch.empty_like(tensor) for _ in range(size)]
            dist.all_gather(parts, tensor)
            row = torch.empty(1, HEADS, length, HEAD, dtype=torch.float64)
            row[:, :, place.flatten()] = torch.cat(parts, 2).double()
            whole.append(row)
        wanted = turn(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), whole)
        for name, attention in contenders(length).items():
            if (name == "a2a + SDPA") == (layout == "contiguous"):
                got = turn(attention, mine)
                found[name] = max((a.double() - b[:, :, place[rank]]).abs().max().item() for a, b in zip(got, wanted))
    return found


# ---- tables ---------------------------------------------------------------------------------------------------------------------------


def ratio(mine: list[float], other: list[float]) -> str:
    middle, low, high = interval([a / b for a, b in zip(mine, other)])
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def show(length: int, ranks: int, rounds: int, only: list[str]) -> None:
    results = run_ranks(contest, ranks, length, rounds, only, timeout=3000)
    wrong = run_ranks(errors, ranks)
    table = Table("", "CPU s a rank", "wall s", "CPU vs share", "CPU vs a2a + SDPA", "peak MiB", "error")
    table.title = f"{ranks} ranks, {length:,} tokens, {HEADS} heads of {HEAD}, causal, float32; median [95% interval]"
    processor = {name: [statistics.mean(took[name][i][1] for took, _ in results) for i in range(rounds)] for name in results[0][0]}
    for name in processor:
        wall = [max(took[name][i][0] for took, _ in results) for i in range(rounds)]
        row = [f"{statistics.median(processor[name]):.3f}", f"{statistics.median(wall):.3f}"]
        row += [ratio(processor[name], processor[other]) if other in processor else "" for other in ("share", "a2a + SDPA")]
        if name != "share":
            row += [f"{max(peaks[name] for _, peaks in results) / 2**20:.1f}", f"{max(w[name] for w in wrong):.0e}"]
        table.add_row(name, *row)
    console = Console(width=150)
    console.print(table)
    peers = [name for name in processor if name.startswith(("torch ring", "ring-flash-attn"))]
    if not peers or "ring" not in processor:
        return
    best = min(peers, key=lambda name: statistics.median(processor[name]))
    console.print(f"ring vs {best}, the best of {', '.join(peers)}: {ratio(processor['ring'], processor[best])}")


def packings(number: int = 1000) -> None:
    """Balance of the layout "packed" over random log-normal packings: total work, and a ring's steps."""
    generator = np.random.default_rng(0)
    table = Table("context ranks", "tokens", "total max/mean: largest", "ring steps: median", "p90", "largest")
    table.title = f"layout 'packed', {number:,} packings: document lengths log-normal, median 200 to 8,000, sigma 0.5 to 2"
    drawn = [(np.exp(generator.uniform(np.log(200), np.log(8000))), generator.uniform(0.5, 2)) for _ in range(number)]
    worst, steps = [], []
    for ranks in (2, 4, 8, 16):
        for length in (8192, 32768, 131072):
            totals, ratios = [], []
            for median, sigma in drawn:
                sizes: list[int] = []
                while sum(sizes) < length:
                    sizes += np.maximum(1, generator.lognormal(np.log(median), sigma, 64)).astype(int).tolist()
                documents = np.repeat(np.arange(len(sizes)), sizes)[:length]
                positions = positions_of(documents)
                tables = [runs_of(documents[own], positions[own]) for own in assign(documents, ranks, "packed")]
                totals.append(imbalance(tables))
                ratios.append(ring_step_ratio(tables))
            table.add_row(
                str(ranks),
                f"{length:,}",
                f"{max(totals):.4f}",
                *(f"{x:.3f}" for x in (np.median(ratios), np.quantile(ratios, 0.9), max(ratios))),
            )
            worst.append(max(totals))
            steps += ratios
    Console(width=150).print(table)
    Console(width=150).print(f"all: total at most {max(worst):.4f}, ring steps median {np.median(steps):.3f}")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["packings"]:
        packings(*map(int, arguments[1:]))
        return
    options = dict(argument.split("=") for argument in arguments)
    only = options["only"].split(",") if "only" in options else []
    for length in map(int, options.get("sequences", "4096,16384").split(",")):
        show(length, int(options.get("ranks", 4)), int(options.get("rounds", 9 if length <= 4096 else 5)), only)


if __name__ == "__main__":
    main(sys.argv[1:])
