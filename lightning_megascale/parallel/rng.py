"""Where random numbers come from: parameters from (seed, name), a microbatch from (seed, batch, data-parallel rank)."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any parts, equal on every machine and in every process."""
    digest = hashlib.blake2b("\x00".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def seed_torch(number: int) -> None:
    """``torch.manual_seed``; without an accelerator it would note a stack trace for each kind of one, which takes milliseconds."""
    if _has_accelerator():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def seed_microbatch(seed: int, batch: int, data_parallel_rank: int) -> None:
    """Seeds torch's generators for one forward and backward.

    Ranks that work on the same rows draw the same numbers, so that replicated tensors stay equal under dropout; other rows
    draw others; and a run that resumes at a batch draws what the uninterrupted run drew there.

    Args:
        seed: the run's seed.
        batch: number of training batches before this one.
        data_parallel_rank: which share of the rows this rank works on.
    """
    seed_torch(derive_seed(seed, "microbatch", batch, data_parallel_rank))


def seed_stage(seed: int, microbatch: int, data_parallel_rank: int, stage: int) -> None:
    """Seeds torch's generators for one pipeline stage's forward of one microbatch: what the stages before drew is not known there.

    Args:
        seed, data_parallel_rank: as for ``seed_microbatch``.
        microbatch: number of microbatches of this rank before this one.
        stage: of the pipeline.
    """
    seed_torch(derive_seed(seed, "stage", microbatch, data_parallel_rank, stage))


def seed_step(*parts: int | str) -> None:
    """Seeds the generators of torch, Python and numpy: for what runs twice, or on several ranks, and must draw alike.

    Args:
        *parts: what the numbers follow.
    """
    number = derive_seed(*parts)
    seed_torch(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)


@contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Puts the generators of torch, Python and numpy back afterwards."""
    host, numpy = random.getstate(), sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(host)
        if numpy is not None:
            numpy.random.set_state(arrays)


@contextmanager
def fork_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators inside the block and puts their state back afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        seed_torch(seed)
        yield
