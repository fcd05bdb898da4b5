"""``megascale plan profile``: measures products, memory and collectives of this machine, and writes them as constants of a stack.

Run alone it measures one device, and a collective between this machine's devices (two processes on a CPU). ``megascale plan ...
profile=FILE`` takes the constants in the place of the assumed or fitted ones.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_megascale.cli.arguments import check_output, parse
from lightning_megascale.cli.errors import UserError
from lightning_megascale.planning.kernels import HALF_LENGTH
from lightning_megascale.planning.stack import Stack
from lightning_megascale.topology.gpus import GPUS, Gpu, gpu_sheet

CONSTANTS = ("matmul_efficiency", "attention_efficiency", "memory_efficiency", "kernel_seconds", "nvlink_efficiency")


def profile(arguments: list[str]) -> int:
    """The verb: measures, prints and writes.

    Raises:
        UserError: for a GPU of which there is no data sheet.
    """
    import yaml

    values = parse("plan", "profile", arguments, (), ("out", "gpu"))
    out = values.get("out", "profile.yaml")
    check_output("out", out)
    sheet = _sheet(values.get("gpu"))
    constants = measure(sheet)
    source = f"measured on {sheet.name} by megascale plan profile"
    Path(out).write_text(yaml.safe_dump({"gpu": sheet.name, **constants, "source": source}, sort_keys=False), encoding="utf-8")
    for name, value in constants.items():
        unit = "s a kernel" if name == "kernel_seconds" else "of the data sheet"
        print(f"{name:<22}{value:<10.3g}{unit}")
    print(f"wrote {out}: megascale plan ... profile={out} takes it")
    return 0


def with_profile(stack: Stack, path: str, gpu: str) -> Stack:
    """A stack with the constants of a file.

    Raises:
        UserError: there is no such file, it is of another GPU, or holds other keys or no numbers.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"profile={path}: cannot be read: {error}; write it with megascale plan profile out=FILE") from error
    if not isinstance(values, Mapping) or values.get("gpu") != gpu:
        found = values.get("gpu") if isinstance(values, Mapping) else None
        raise UserError(f"profile={path}: was measured on gpu={found}, and the cluster has {gpu}; measure on one of its nodes")
    constants = {name: value for name, value in values.items() if name not in ("gpu", "source")}
    wrong = [f"{name}={value!r}" for name, value in constants.items() if name not in CONSTANTS or not _is_rate(value)]
    if wrong:
        raise UserError(f"profile={path}: {', '.join(wrong)}: must be a number above 0, of {', '.join(CONSTANTS)}")
    return dataclasses.replace(stack, **constants, source=str(values.get("source", path)))


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _sheet(asked: str | None) -> Gpu:
    import torch

    if asked is not None:
        return gpu_sheet(asked)
    if not torch.cuda.is_available():
        return gpu_sheet("cpu")
    words = torch.cuda.get_device_name(0).lower().replace("-", " ").split()
    found = [name for name in GPUS if name.partition("_")[0] in words]
    if not found:
        raise UserError(f"{torch.cuda.get_device_name(0)} has no data sheet here: name the nearest with gpu=NAME, of {', '.join(GPUS)}")
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return gpu_sheet(min(found, key=lambda name: abs(GPUS[name].memory_gib - memory)))


def measure(sheet: Gpu) -> dict[str, float]:
    """The constants of this machine's device, as shares of a data sheet's rates.

    Args:
        sheet: of the device; products run in bfloat16 where there is CUDA and in float32 otherwise.
    """
    import torch

    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    peak = sheet.peak_flops_per_s("bfloat16" if cuda else "float32")
    size = 8192 if cuda else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    long = torch.empty(2**28 if cuda else 2**24, device=device, dtype=dtype)
    tiny = torch.zeros(1, device=device)
    length, heads = (8192, 16) if cuda else (512, 4)
    q, k, v = (torch.randn(1, heads, length, 128, device=device, dtype=dtype) for _ in range(3))
    products = 2 * size**3 / _seconds(lambda: a @ b)
    core = torch.nn.functional.scaled_dot_product_attention
    attention = 2 * length**2 * heads * 128 / _seconds(lambda: core(q, k, v, is_causal=True))  # half of 4LLNH
    attention *= 1 + HALF_LENGTH / length  # the constant is of rows without end
    copied = 2 * long.numel() * long.element_size() / _seconds(lambda: long.mul_(1.0))
    found = {
        "matmul_efficiency": products / peak,
        "attention_efficiency": attention / peak,
        "memory_efficiency": copied / (sheet.memory_tb_per_s * 1e12),
        "kernel_seconds": _seconds(lambda: [tiny.add_(1.0) for _ in range(100)]) / 100,
    }
    linked = _reduced_bytes_per_s()
    return found if linked is None else found | {"nvlink_efficiency": linked / (sheet.scale_up_gb_per_s * 1e9)}


def _seconds(work: Callable[[], Any], rounds: int = 7) -> float:
    """The median of some rounds, after two that warm up."""
    import torch

    def once() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    return statistics.median([once() for _ in range(rounds + 2)][2:])


def _reduced_bytes_per_s() -> float | None:
    """What each rank of this machine sends a second in an all-reduce of 64 MB, 2 (g - 1) / g of it; None with one GPU."""
    import torch
    from torch import multiprocessing

    ranks = max(2, torch.cuda.device_count())
    if 0 < torch.cuda.device_count() < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_reduce, args=(ranks, folder), nprocs=ranks)
        return float((Path(folder) / "rate").read_text())


def _reduce(rank: int, ranks: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=ranks)
    buffer = torch.ones(2**24, device="cuda" if cuda else "cpu")
    seconds = _seconds(lambda: dist.all_reduce(buffer))
    if rank == 0:
        sent = 2 * (ranks - 1) / ranks * buffer.numel() * buffer.element_size()
        (Path(folder) / "rate").write_text(str(sent / seconds))
    dist.destroy_process_group()
