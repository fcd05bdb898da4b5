"""How the blocks of plans lie on ranks, what they are computed from, and the seconds of a part of a model as columns.

U is the number of different ways to cut a block that the plans of a search have between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_megascale.planning.candidates import Candidates, owners_of_experts
from lightning_megascale.planning.collectives import Links
from lightning_megascale.planning.kernels import Rates
from lightning_megascale.planning.stack import Stack
from lightning_megascale.planning.workload import Workload


@dataclass(frozen=True)
class Cut:
    """How a block lies on ranks, and of what a microbatch consists there. Columns (U,) as in ``Candidates``."""

    tp: np.ndarray
    cp: np.ndarray
    ep: np.ndarray
    microbatch_size: np.ndarray
    checkpointing: np.ndarray
    sequence_parallel: np.ndarray
    method: np.ndarray
    tp_stride: np.ndarray
    cp_stride: np.ndarray

    @classmethod
    def of(cls, plans: Candidates, strides: Mapping[str, np.ndarray]) -> tuple[Cut, np.ndarray]:
        """The different cuts, and which of them each plan has, int (P,).

        Args:
            plans: all of them.
            strides: axis -> ranks from one coordinate to the next, int (P,).
        """
        columns = {field.name: getattr(plans, field.name, None) for field in dataclasses.fields(cls)}
        columns |= {"tp_stride": strides["tp"], "cp_stride": strides["cp"]}
        rows, places = distinct(*columns.values())  # type: ignore[arg-type]
        return cls(**dict(zip(columns, rows, strict=True))), places

    @property
    def expert_owners(self) -> np.ndarray:
        """Ranks that hold other experts."""
        return owners_of_experts(self.ep, self.tp, self.sequence_parallel)


@dataclass(frozen=True)
class Cost:
    """Seconds of a part of a model, forward and backward of one microbatch. All (U,).

    Args:
        forward: computing.
        backward_inputs: computing, up to what the stage before needs.
        backward_weights: computing, which a zero-bubble schedule may put off.
        recompute: of the forward again in the backward.
        tensor_forward, tensor_backward: exposed communication of tensor parallelism, a repeated forward's in the backward.
        context_forward, context_backward: of context parallelism.
        expert_forward, expert_backward: of expert parallelism.
    """

    forward: np.ndarray
    backward_inputs: np.ndarray
    backward_weights: np.ndarray
    recompute: np.ndarray
    tensor_forward: np.ndarray
    tensor_backward: np.ndarray
    context_forward: np.ndarray
    context_backward: np.ndarray
    expert_forward: np.ndarray
    expert_backward: np.ndarray

    def table(self) -> np.ndarray:
        """The fields in order, (fields, U)."""
        return np.array([getattr(self, field.name) for field in dataclasses.fields(self)])

    @classmethod
    def nothing(cls, count: int) -> Cost:
        """Zeros (U,)."""
        return cls(*[np.zeros(count)] * len(dataclasses.fields(cls)))


@dataclass(frozen=True)
class Machine:
    """What costs are computed from: a workload, the rates of a GPU, links and the software's facts."""

    workload: Workload
    rates: Rates
    links: Links
    stack: Stack

    def tokens(self, cut: Cut, stream: str = "tokens") -> np.ndarray:
        """Of a microbatch on a context-parallel rank, (U,)."""
        length = self.workload.sequence_length if stream == "tokens" else self.workload.source_length or 0
        return cut.microbatch_size * length / cut.cp


def distinct(*columns: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """The different rows of these columns of non-negative integers, as columns, and which of them each row is."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, places = np.unique(key, return_index=True, return_inverse=True)
    return [column[first] for column in columns], places
