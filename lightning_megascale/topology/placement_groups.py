"""The mesh as numbers of ranks: groups of every axis under an order of axes, and which orders the strategy's mesh takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
KINDS = ("ring", "alltoall", "chain")
# Several axes in one group, as lightning_megascale/mesh.py makes them. ep and expert_shard regroup dp_shard x cp x tp.
JOINED = {"batch": ("dp_replicate", "dp_shard"), "loss": ("dp_replicate", "dp_shard", "cp"), "fsdp": ("dp_shard", "cp")}
EXPERT = ("ep", "expert_shard")
GROUPS = AXES + tuple(JOINED) + EXPERT


@dataclass(frozen=True)
class Traffic:
    """What one step sends in the groups of one kind.

    Args:
        groups: an axis ("pp", "dp_replicate", "dp_shard", "cp", "tp"); "batch" (dp_replicate x dp_shard), "loss" (that x cp), "fsdp"
            (dp_shard x cp); "ep", or "expert_shard", the rest of dp_shard x cp x tp.
        kind: "ring" (all-gather, reduce-scatter, all-reduce, ring attention), "alltoall" (each pair alike) or "chain" (pipeline
            neighbours). Stages that wrap around (interleaved) are a ring.
        bytes_: that one rank sends in a step; in a chain to the next stage, and as many return from it.

    Raises:
        ValueError: there are no such groups, no such kind, or the bytes are no number of at least 0.
    """

    groups: str
    kind: str
    bytes_: float

    def __post_init__(self) -> None:
        for name, value, allowed in (("groups", self.groups, GROUPS), ("kind", self.kind, KINDS)):
            if value not in allowed:
                raise ValueError(f"traffic.{name}={value!r}: must be one of {', '.join(allowed)}; choose one of these")
        if isinstance(self.bytes_, bool) or not isinstance(self.bytes_, (int, float)) or not 0 <= self.bytes_ < math.inf:
            raise ValueError(f"traffic.bytes_={self.bytes_!r}: must be a number of at least 0; give what a rank sends in a step")


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes.

    Args:
        sizes: by axis; missing ones are 1.
        ep: ranks that hold different experts, of neighbours in dp_shard x cp x tp; None: no experts.

    Raises:
        ValueError: an unknown axis, a size that is no whole number above 0, or an ep that does not divide.
    """

    sizes: Mapping[str, int]
    ep: int | None = None

    def __post_init__(self) -> None:
        for axis in self.sizes:
            if axis not in AXES:
                raise ValueError(f"sizes[{axis!r}]: no such axis; the mesh has {', '.join(AXES)}, and ep is an argument of its own")
        object.__setattr__(self, "sizes", {axis: self.sizes.get(axis, 1) for axis in AXES})
        for name, value in [*self.sizes.items(), ("ep", 1 if self.ep is None else self.ep)]:
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name}={value!r}: the size of an axis must be a whole number of at least 1; give 1 to leave it out")
        if self.ep is not None and self.inner % self.ep:
            raise ValueError(f"ep={self.ep}: must divide dp_shard x cp x tp = {self.inner}; take {math.gcd(self.ep, self.inner)}")

    @property
    def inner(self) -> int:
        """Ranks of dp_shard x cp x tp."""
        return math.prod(self.sizes[axis] for axis in ("dp_shard", "cp", "tp"))

    @property
    def world(self) -> int:
        return math.prod(self.sizes.values())

    def size(self, name: str) -> int:
        """Ranks of a group called ``name``."""
        if name in EXPERT:
            ep = self.ep or 1
            return ep if name == "ep" else self.inner // ep
        return math.prod(self.sizes[axis] for axis in JOINED.get(name, (name,)))

    def grid(self, axis_order: tuple[str, ...]) -> np.ndarray:
        """The rank at each place of the mesh, axes as in AXES, when ranks count ``axis_order`` with the last fastest; int."""
        ranks = np.arange(self.world).reshape([self.sizes[axis] for axis in axis_order])
        return ranks.transpose([axis_order.index(axis) for axis in AXES])

    def groups(self, axis_order: tuple[str, ...], name: str) -> np.ndarray:
        """Ranks of each group called ``name``, in mesh order: int (M, n)."""
        grid = self.grid(axis_order)
        if name in EXPERT:
            split = grid.reshape(-1, self.size("expert_shard"), self.size("ep"))
            return (split if name == "ep" else split.swapaxes(1, 2)).reshape(-1, self.size(name))
        wanted = [AXES.index(axis) for axis in JOINED.get(name, (name,))]
        kept = [axis for axis in range(len(AXES)) if axis not in wanted]
        return grid.transpose(kept + wanted).reshape(-1, self.size(name))

    def descending(self, axis_order: tuple[str, ...]) -> str | None:
        """The first groups whose ranks do not ascend, which the strategy's mesh refuses since torch's groups count ranks so."""
        names = GROUPS if self.ep is not None else AXES + tuple(JOINED)
        return next((name for name in names if (np.diff(self.groups(axis_order, name)) < 0).any()), None)

    @cached_property
    def axis_orders(self) -> list[tuple[str, ...]]:
        """Every order of the axes above size 1, outermost first, under which all groups ascend; the mesh's own first."""
        narrow = tuple(axis for axis in AXES if self.sizes[axis] == 1)
        wide = tuple(axis for axis in AXES if self.sizes[axis] > 1)
        orders = [AXES] + [narrow + some for some in itertools.permutations(wide) if some != wide]
        # Sizes of at most 3 tell an order that ascends from one that does not; experts need the true ones.
        small = self if self.ep is not None else Mesh({axis: min(size, 3) for axis, size in self.sizes.items()})
        return [order for order in orders if small.descending(order) is None]
