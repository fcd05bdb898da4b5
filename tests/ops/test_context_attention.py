"""Attention over ranks against full attention on one: every method, layout, packing, window and grouping of heads, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_megascale.ops.attention import KERNELS
from lightning_megascale.ops.context_attention import exchanged_attention, gathered_attention, ring_attention
from lightning_megascale.ops.context_blocks import Pattern, in_order
from lightning_megascale.ops.sequence_layout import PADDING, assign, positions_of, runs_of
from tests.harness import run_ranks

LENGTH, HEAD = 24, 8
PACKINGS = {  # documents of a row of 24 tokens
    "one document": [0] * 24,
    "padded": [0] * 19 + [PADDING] * 5,
    "packed": [0] * 3 + [1] * 11 + [2] * 1 + [3] * 9,
    "packed, padded": [0] * 7 + [1] * 9 + [PADDING] * 8,
}
HEADS = {"as many": (4, 4), "grouped": (4, 2), "one group": (4, 1)}
WINDOWS: dict[str, tuple[bool, int | None]] = {"causal": (True, None), "window 5": (True, 5), "full": (False, None)}
LAYOUTS = ("contiguous", "headtail", "packed")


def tensors(heads: tuple[int, int], rows: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, n, LENGTH, HEAD) for n in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def reference(documents: list[list[int]], heads: tuple[int, int], is_causal: bool, window: int | None, dtype: torch.dtype) -> list[Tensor]:
    """(out, dq, dk, dv) of full attention with a mask; rows that see nothing give 0."""
    q, k, v, grad = tensors(heads, len(documents), dtype)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    masks = []
    for row in documents:
        place, ids = torch.arange(LENGTH), torch.tensor(row)
        seen = (ids[:, None] == ids) & (ids != PADDING)[:, None]
        if is_causal:
            seen &= place[:, None] >= place
        if window is not None:
            seen &= place[:, None] - place < window
        masks.append(seen)
    mask = torch.stack(masks)[:, None]
    scores = (q @ k.repeat_interleave(heads[0] // heads[1], 1).mT) * HEAD**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)
    out = weights @ v.repeat_interleave(heads[0] // heads[1], 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def local(cases: list[tuple], method: str, dtype: torch.dtype, kernel: str) -> list[list[Tensor]]:
    """This rank's (out, dq, dk, dv) of every case."""
    rank, size = dist.get_rank(), dist.get_world_size()
    attention = METHODS[method](size)
    found = []
    for packing, layout, heads, (is_causal, window) in cases:
        rows = [np.array(PACKINGS[name]) for name in packing]
        places = [assign(row, size, layout) for row in rows]
        tables = [[runs_of(row[own], positions_of(row)[own]) for own in place] for row, place in zip(rows, places)]
        own = torch.tensor(np.stack([place[rank] for place in places]))[:, None, :, None]
        q, k, v, grad = (x.take_along_dim(own, 2) for x in tensors(HEADS[heads], len(rows), dtype))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        same = len(set(packing)) == 1
        pattern = Pattern(tuple(tables[:1] if same else tables), is_causal, window)
        out = attention(q, k, v, pattern, KERNELS[kernel])
        found.append([out.detach(), *torch.autograd.grad(out, (q, k, v), grad)])
    return found


def _ulysses_ring(size: int) -> Callable[..., Tensor]:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("ring", "ulysses"))
    return lambda *args: exchanged_attention(*args, mesh["ulysses"].get_group(), mesh["ring"].get_group())


METHODS: dict[str, Callable[[int], Callable[..., Tensor]]] = {
    "ring": lambda size: lambda *args: ring_attention(*args, dist.group.WORLD),
    "allgather": lambda size: lambda *args: gathered_attention(*args, dist.group.WORLD),
    "ulysses": lambda size: lambda *args: exchanged_attention(*args, dist.group.WORLD),
    "ring+ulysses": _ulysses_ring,
}


def check(method: str, ranks: int, cases: list[tuple], dtype: torch.dtype, kernel: str, tolerance: float) -> None:
    results = run_ranks(local, ranks, cases, method, dtype, kernel)
    for number, (packing, layout, heads, (is_causal, window)) in enumerate(cases):
        documents = [PACKINGS[name] for name in packing]
        wanted = reference(documents, HEADS[heads], is_causal, window, dtype)
        places = [assign(np.array(row), ranks, layout) for row in documents]
        for kind, (name, whole) in enumerate(zip(("out", "dq", "dk", "dv"), wanted)):
            for rank in range(ranks):
                own = torch.tensor(np.stack([place[rank] for place in places]))[:, None, :, None]
                off = (results[rank][number][kind] - whole.take_along_dim(own, 2)).abs().max().item()
                assert off < tolerance, f"{method}, {ranks} ranks, {cases[number]}, rank {rank}: {name} off by {off:.1e}"


def all_cases(method: str, ranks: int, every: int = 1) -> list[tuple]:
    packings = [(name, name) for name in PACKINGS] + [("packed", "padded")]
    chosen = list(product(packings, LAYOUTS, HEADS, WINDOWS.values()))
    shared = 2 if method == "ring+ulysses" else ranks if method == "ulysses" else 1
    return [case for case in chosen if not any(n % shared for n in HEADS[case[2]])][::every]


RUNS = [("ring", 1), ("ring", 2), ("ring", 3), ("ring", 4), ("allgather", 2), ("allgather", 4)]
RUNS += [("ulysses", 2), ("ulysses", 4), ("ring+ulysses", 2), ("ring+ulysses", 4)]


@pytest.mark.parametrize(("method", "ranks"), RUNS)
def test_equal_to_full_attention(method: str, ranks: int) -> None:
    check(method, ranks, all_cases(method, ranks, every=9), torch.float64, "cpu", 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "ranks"), RUNS)
def test_equal_to_full_attention_in_every_case(method: str, ranks: int) -> None:
    check(method, ranks, all_cases(method, ranks), torch.float64, "cpu", 1e-12)


@pytest.mark.parametrize(
    ("dtype", "kernel", "tolerance"), [(torch.float32, "cpu", 1e-5), (torch.float64, "math", 1e-12), (torch.float32, "math", 1e-5)]
)
def test_other_kernels_and_dtypes(dtype: torch.dtype, kernel: str, tolerance: float) -> None:
    check("ring", 2, all_cases("ring", 2, every=7), dtype, kernel, tolerance)


def _errors() -> list[Tensor]:
    """(out, dq, dk, dv) in bfloat16 on this rank's head-tail share, of a long row."""
    rank, size, length = dist.get_rank(), dist.get_world_size(), 256
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, length, 16, generator=generator).bfloat16() for _ in range(4)]
    place = assign(np.zeros(length, int), size, "headtail")
    tables = [runs_of(np.zeros(len(own), int), own) for own in place]
    q, k, v, grad = (x[:, :, torch.tensor(place[rank])] for x in whole)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = ring_attention(q, k, v, Pattern((tables,)), KERNELS["cpu"], dist.group.WORLD)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def test_bfloat16_rounds_no_more_than_one_device() -> None:
    generator, length = torch.Generator().manual_seed(0), 256
    whole = [torch.randn(1, 2, length, 16, generator=generator).bfloat16() for _ in range(4)]

    def alone(dtype: torch.dtype) -> list[Tensor]:
        q, k, v, grad = (x.to(dtype) for x in whole)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]

    exact, single, place = alone(torch.float64), alone(torch.bfloat16), assign(np.zeros(length, int), 2, "headtail")
    results = run_ranks(_errors, 2)
    for kind, name in enumerate(("out", "dq", "dk", "dv")):
        ring = torch.cat([result[kind] for result in results], 2).double()
        order = torch.tensor(place.flatten())
        error = (ring - exact[kind][:, :, order]).square().mean().sqrt()
        granted = (single[kind].double() - exact[kind]).square().mean().sqrt()
        assert error <= 1.5 * granted, f"{name}: {error / granted:.2f} times the error of one device"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_exchanged_tokens_stand_in_the_order_of_their_documents(packing: str, layout: str) -> None:
    """A run for each document, whatever the layout, and every place of every rank once."""
    row, ranks = np.array(PACKINGS[packing]), 4
    places = assign(row, ranks, layout)
    tables = [runs_of(row[own], positions_of(row)[own]) for own in places]
    runs, order = in_order(tables, LENGTH // ranks)
    gathered = np.concatenate([places[rank][start : start + count] for rank, start, count in order])
    texts = np.flatnonzero(row != PADDING)
    assert np.array_equal(gathered[: len(texts)], texts) and sorted(gathered) == list(range(LENGTH))
    assert runs == runs_of(row[gathered], positions_of(row)[gathered]) and len(runs) == len(set(row[texts]))


# ---- messages and refusals ------------------------------------------------------------------------------------------------------------


def _counted(method: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in ("batch_isend_irecv", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        real = getattr(dist, name)

        def count(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return real(*args, **kwargs)

        setattr(dist, name, count)
    local([(("one document",), "headtail", "as many", (True, None))], method, torch.float64, "cpu")
    return counts


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_ring_sends_nothing_for_nothing(ranks: int) -> None:
    """W - 1 messages of keys forward, W - 1 of keys and W - 1 of gradients backward; alone, none."""
    for counts in run_ranks(_counted, ranks, "ring"):
        assert counts == ({"batch_isend_irecv": 3 * (ranks - 1)} if ranks > 1 else {})


def test_other_methods_send_what_they_must() -> None:
    assert run_ranks(_counted, 2, "allgather")[0] == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 1}
    assert run_ranks(_counted, 2, "ulysses")[0] == {"all_to_all_single": 8}  # q, k, v and out, there and back


def _refused() -> str:
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 1, 6, 8)
    with pytest.raises(ValueError) as caught:
        exchanged_attention(q, k, k, Pattern(([], [])), KERNELS["cpu"], dist.group.WORLD)  # type: ignore[arg-type]
    return str(caught.value)


def test_heads_that_cannot_be_exchanged_are_refused_alike() -> None:
    one, other = run_ranks(_refused, 2)
    assert one == other and "num_kv_heads=1 is not divisible by the 2" in one and "context_parallel_method='ring'" in one
