"""What checkpoints there are, and whether one of them is whole: for people and for the command line. No ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_megascale import commit_record
from lightning_megascale.strategies.checkpoint import files
from lightning_megascale.strategies.checkpoint.archive import Archive, open_archive


@dataclass
class CheckpointReport:
    """One checkpoint, described.

    Args:
        kind: "megascale", "ModelParallelStrategy", "file", or "leftover" of an interrupted save.
        step, epoch: Lightning's ``global_step`` and ``epoch``; None when unknown.
        size: bytes on the disk.
        parameters: number of elements of the model's tensors.
        model_bytes, optimizer_bytes: of the tensors.
        world_size: ranks that wrote it; None when unknown.
        time: when it was written, as text.
        problems: what is wrong; empty for a whole checkpoint (as far as it was looked at).
    """

    path: Path
    kind: str
    step: int | None = None
    epoch: int | None = None
    size: int = 0
    tensors: int = 0
    parameters: int = 0
    model_bytes: int = 0
    optimizer_bytes: int = 0
    world_size: int | None = None
    time: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not self.problems


def read_metadata(path: str | os.PathLike, weights_only: bool | None = None) -> dict[str, Any]:
    """Lightning's checkpoint dict without model and optimizer state: loops, callbacks, hyper-parameters, versions.

    Raises:
        ValueError: no checkpoint, or classes that ``weights_only`` refuses.
    """
    return open_archive(path, weights_only).metadata


def list_checkpoints(folder: str | os.PathLike) -> list[CheckpointReport]:
    """The checkpoints in a folder and up to three folders below it, by step; leftovers of interrupted saves last.

    Looks at descriptions only (``check`` reads the tensors).

    Raises:
        ValueError: when there is no such folder.
    """
    folder = files.local_path(folder)
    if files.is_checkpoint(folder):
        return [_summary(folder)]
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    reports = [_summary(path) for path in files.walk(folder)]
    return sorted(reports, key=lambda report: (report.kind == "leftover", report.step if report.step is not None else -1, str(report.path)))


def check(path: str | os.PathLike, weights_only: bool | None = None) -> CheckpointReport:
    """Reads everything once, a tensor at a time: files of the recorded sizes, every tensor covered, readable and of its recorded shape.

    Torch stores no checksums: a flipped bit inside a tensor is not found, NaN is.

    Raises:
        ValueError: when there is nothing that could be a checkpoint.
    """
    path = files.local_path(path)
    if not path.exists():
        path = files.locate(path)
    report = _summary(path)
    if report.kind == "leftover" or report.problems:
        return report
    if path.is_dir():
        _check_files(path, report)
    try:
        archive = open_archive(path, weights_only)
    except ValueError as error:
        report.problems.append(str(error))
        return report
    if archive.dcp is not None:
        report.problems += _check_coverage(archive.dcp)
    for key in archive.sizes:
        try:
            tensor = archive.read(key)
        except Exception as error:  # noqa: BLE001 whatever makes it unreadable is the finding
            report.problems.append(f"{key} is unreadable: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            continue
        if tensor.is_floating_point() and torch.isnan(tensor).any():
            report.problems.append(f"{key} holds NaN")
    return report


def _summary(path: Path) -> CheckpointReport:
    size = path.stat().st_size if path.is_file() else sum(child.stat().st_size for child in path.rglob("*") if child.is_file())
    if files.is_leftover(path):
        return CheckpointReport(path, "leftover", size=size, problems=["left by an interrupted save; remove it when no save is running"])
    try:
        manifest = files.read_manifest(path) if path.is_dir() else None
        archive = open_archive(path, metadata=manifest is None)
    except ValueError as error:
        kind = "file" if path.is_file() else "megascale" if (path / files.MANIFEST).exists() else "folder"
        return CheckpointReport(path, kind, size=size, problems=[str(error)])
    described = manifest or {"step": archive.metadata.get("global_step"), "epoch": archive.metadata.get("epoch")}
    report = CheckpointReport(path, archive.kind, described.get("step"), described.get("epoch"), size)
    report.world_size, report.time = described.get("world_size"), described.get("time")
    _count(archive, report)
    return report


def _count(archive: Archive, report: CheckpointReport) -> None:
    again = {archive.model[name] for names in archive.tied for name in names[1:] if name in archive.model}  # tied: one tensor
    model = set(archive.model.values())
    report.tensors = len(archive.sizes)
    for key, (shape, dtype) in archive.sizes.items():
        if key in again:
            continue
        if key in model:
            report.parameters += prod(shape)
            report.model_bytes += prod(shape) * dtype.itemsize
        else:
            report.optimizer_bytes += prod(shape) * dtype.itemsize


def _check_files(path: Path, report: CheckpointReport) -> None:
    if files.read_manifest(path) is None:
        if report.kind == "megascale":
            state = "damaged" if (path / files.MANIFEST).exists() else "missing"
            report.problems.append(f"{files.MANIFEST} is {state}")
        return
    report.problems += commit_record.wrong_sizes(path)


def _check_coverage(metadata: Metadata) -> list[str]:
    """Tensors whose saved pieces do not add up to the whole."""
    problems = []
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            covered = sum(prod(chunk.sizes) for chunk in stored.chunks)
            if covered != prod(stored.size):
                problems.append(f"{key}: the saved pieces hold {covered:,} of {prod(stored.size):,} elements")
    return problems
