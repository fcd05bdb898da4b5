"""Ranks on one machine, those of ``megascale verify``, and two helpers to compare what they return."""

from __future__ import annotations

import torch

from lightning_megascale.verification.ranks import RankFailure, run_alone, run_ranks

__all__ = ["RankFailure", "full", "run_alone", "run_ranks", "worst"]

torch.set_num_threads(1)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, whatever its sharding."""
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest absolute difference over two dicts of tensors, and the name where it is."""
    if a.keys() != b.keys():
        raise AssertionError(f"different names: {sorted(a.keys() ^ b.keys())}")
    differences = {name: (a[name].double() - b[name].double()).abs().max().item() for name in a}
    name = max(differences, key=lambda key: differences[key] if differences[key] == differences[key] else float("inf"))
    return differences[name], name
