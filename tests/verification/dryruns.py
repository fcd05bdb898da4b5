"""Runs of the tests of the dry run: small decoders under plans of up to 16 ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_megascale.models.config import DecoderConfig
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.verification.dryrun.result import DryRun
from lightning_megascale.verification.dryrun.run import dry_run
from lightning_megascale.verification.dryrun.subject import Subject


def subject_of(config: DecoderConfig | str = "tiny", *, length: int = 64, precision: str = "bf16-mixed", **plan: Any) -> Subject:
    """A run; the plan's sizes say how many ranks."""
    config = PRESETS[config] if isinstance(config, str) else config
    made = ParallelPlan(**{"data_parallel_shard_size": 2, "microbatch_size": 1, "global_batch_size": 16, **plan})
    world = made.model_parallel_size * made.data_parallel_replicate_size * int(made.data_parallel_shard_size)
    return Subject(config, made.resolve(world), length, precision)


def changed(preset: str, **values: Any) -> DecoderConfig:
    """A preset with other numbers."""
    return dataclasses.replace(PRESETS[preset], **values)


def figures(run: DryRun) -> list[dict[str, Any]]:
    """Everything about each stage that a figure can be extended to."""
    return [
        {**{key: value for key, value in vars(trace).items() if key not in ("schedule", "traffic")},
         **{(row.axis, row.operation, row.dtype): (row.calls, row.bytes_) for row in trace.traffic}}
        for trace in run.stages
    ]  # fmt: skip


__all__ = ["changed", "dry_run", "figures", "subject_of"]
