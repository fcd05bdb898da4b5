"""What is to be run dry, and how small models stand for a large one: the same stages with one or two layers of each kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_megascale.models.config import DecoderConfig
from lightning_megascale.models.decoder import Decoder
from lightning_megascale.parallel.layouts import stages_of
from lightning_megascale.plan import ParallelPlan

Counts = tuple[tuple[int, int], ...]
"""(dense layers, layers with experts) of each pipeline stage; one stage without a pipeline."""


@dataclass(frozen=True)
class Subject:
    """A run.

    Args:
        config: of the decoder.
        plan: resolved, with its batch.
        sequence_length: tokens of a row.
        precision: Lightning's name.
        optimizer: arguments of ``build_optimizer``.
        clip: norm at which gradients are clipped; None: they are not.
        ranks_per_node: neighbouring ranks that share a node, which dispatchers of experts ask for.
    """

    config: DecoderConfig
    plan: ParallelPlan
    sequence_length: int
    precision: str = "32-true"
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-4})
    clip: float | None = 1.0
    ranks_per_node: int = 8

    @property
    def world_size(self) -> int:
        return self.plan.model_parallel_size * int(self.plan.data_parallel_size)

    @property
    def rows(self) -> int:
        """Of one microbatch."""
        return self.plan.microbatch_size or 1

    @property
    def microbatches(self) -> int:
        """Of one optimizer step on one rank."""
        total = self.plan.global_batch_size or self.rows * int(self.plan.data_parallel_size)
        return total // (self.rows * int(self.plan.data_parallel_size))


def counts_of(config: DecoderConfig, plan: ParallelPlan) -> Counts:
    """Layers of each kind on each pipeline stage, cut as the strategy cuts the model."""
    dense = config.num_dense_layers if config.num_experts else config.num_layers
    if plan.pipeline_parallel_size == 1:
        return ((dense, config.num_layers - dense),)
    with torch.device("meta"):
        model = Decoder(config)
    found = []
    for units in stages_of(model, plan, model.megascale_layout).units:
        numbers = [int(unit.rpartition(".")[2]) for unit in units if unit.startswith("layers.")]
        found.append((sum(number < dense for number in numbers), sum(number >= dense for number in numbers)))
    return tuple(found)


def owned(counts: Counts, stages: Sequence[int]) -> dict[str, int]:
    """Layers of each kind on some stages."""
    kinds = {"dense": sum(counts[stage][0] for stage in stages), "moe": sum(counts[stage][1] for stage in stages)}
    return {kind: count for kind, count in kinds.items() if count}


def shrunk(counts: Counts, dense: int, moe: int) -> Counts:
    """At most so many layers of each kind on each stage."""
    return tuple((min(a, dense), min(b, moe)) for a, b in counts)


def resized(subject: Subject, counts: Counts) -> Subject:
    """The same run of a model with other numbers of layers.

    Args:
        counts: of each stage; dense layers come first in the whole model, as in ``subject``'s.
    """
    dense, layers = sum(a for a, _ in counts), sum(a + b for a, b in counts)
    plan, config = subject.plan, subject.config
    if plan.pipeline_parallel_size > 1:
        starts = [sum(a + b for a, b in counts[: stage + 1]) for stage in range(len(counts) - 1)]
        plan = dataclasses.replace(plan, pipeline_split=[f"layers.{start}" if start < layers else "last" for start in starts])
    changes: dict[str, Any] = {"num_dense_layers": dense} if config.num_experts else {}
    return dataclasses.replace(subject, config=dataclasses.replace(config, num_layers=layers, **changes), plan=plan)
