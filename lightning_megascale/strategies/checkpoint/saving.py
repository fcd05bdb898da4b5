"""Saving: tensors as torch.distributed.checkpoint shards, the rest beside them, written aside and renamed when complete."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils import _pytree as pytree

from lightning_megascale.strategies.checkpoint import files
from lightning_megascale.strategies.checkpoint.archive import OPTIMIZER_KEY
from lightning_megascale.strategies.checkpoint.huggingface import write_descriptions
from lightning_megascale.strategies.checkpoint.optimizer import optimizer_record, unwrap
from lightning_megascale.strategies.checkpoint.state import model_state, parameter_names, reshard
from lightning_megascale.strategies.checkpoint.together import broadcast, dcp_together, distributed, gather, rank_of, together


def save(
    folder: str | os.PathLike,
    checkpoint: dict[str, Any],
    module: nn.Module,
    optimizers: Sequence[Any] = (),
    *,
    data_parallel_rank: int = 0,
    is_first_of_data_rank: bool = True,
    tied: Sequence[Sequence[str]] = (),
    tokenizers: Sequence[Any] = (),
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a checkpoint folder. Collective.

    The folder is written as ``{folder}.tmp-{id}`` and renamed when every rank is done, so that a crash leaves no half checkpoint under the
    final name, and replacing an existing one never loses it. Tensors come from ``module`` and ``optimizers``, not from ``checkpoint``.

    Args:
        folder: the final name on a file system that all ranks share; rank 0's value counts.
        checkpoint: Lightning's dict; ``state_dict`` and ``optimizer_states`` in it are ignored, the rest is rank 0's, but for the loader
            states, which are kept per data-parallel rank. Without ``optimizer_states`` beside a ``state_dict`` no optimizer is saved.
        optimizers: torch's or Lightning's, in the order of ``configure_optimizers``.
        is_first_of_data_rank: True on the one rank that writes the loader states of its ``data_parallel_rank``.
        tied: groups of names that are one parameter, of which pipeline stages hold equal copies; saved as without a pipeline.
        tokenizers: kept beside the weights, for an export; rank 0's, with its models' Hugging Face configs.

    Raises:
        ValueError: for what cannot be saved, naming it.
        RuntimeError: when a rank could not write, with its cause; the temporary folder is removed.
    """
    group = process_group
    rank = rank_of(group)
    target, token = broadcast((str(folder), secrets.token_hex(4)), group)
    what = f"checkpoint {target} was not written"

    def collect() -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
        path = files.local_path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        weights_only = "state_dict" in checkpoint and "optimizer_states" not in checkpoint
        return path, *_collect(module, () if weights_only else optimizers, tied)

    path, tensors, part = together(what, collect, group)
    temporary = path.with_name(f"{path.name}.tmp-{token}")
    try:
        number = _kind_of_rank(part, group)
        written = _write_tensors(what, tensors, temporary, group)

        def write_rest() -> None:
            meta, loaders = _split_loaders(checkpoint)
            if number is not None:
                files.write_pickled(part, temporary / f"part_{number:05d}.pt")
            if loaders and is_first_of_data_rank:
                files.write_pickled(loaders, temporary / f"loader_{data_parallel_rank:05d}.pt")
            if rank == 0:
                _check_portable(meta)
                files.write_pickled(meta, temporary / files.META)
                write_descriptions(module, temporary, tokenizers)

        together(what, write_rest, group)
        together(what, lambda: _finish(temporary, path, checkpoint, written, group) if rank == 0 else None, group)
    except BaseException:
        if rank == 0 and temporary.exists():
            files.remove(temporary)
        raise


def _collect(module: nn.Module, optimizers: Sequence[Any], tied: Sequence[Sequence[str]] = ()) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors by key, and the record of what is no tensor."""
    copies = {name for group in tied for name in group[1:]}
    reshard(module)
    state = model_state(module)
    tensors = {name: tensor.detach() for name, tensor in state.all_tensors().items()}
    clash = next((name for name in tensors if OPTIMIZER_KEY.match(name)), None)
    if clash:
        raise ValueError(
            f"module state {clash!r} has a name of the form optimizer.N.state.*, which is kept for optimizers; rename the module"
        )
    names = parameter_names(module)
    records = []
    for index, optimizer in enumerate(optimizers):
        flat, record = optimizer_record(index, unwrap(optimizer), names, copies)
        tensors.update(flat)
        records.append(record)
    return tensors, {"tied": state.tied + [list(group) for group in tied], "objects": state.objects, "optimizers": records}


def _kind_of_rank(part: dict[str, Any], group: dist.ProcessGroup | None) -> int | None:
    """The number of the part file this rank writes, or None: the first rank of every kind writes (kinds differ under pipelines only)."""
    groups = [[(group["names"], sorted(map(str, group["options"].items()))) for group in record["groups"]] for record in part["optimizers"]]
    text = repr((part["tied"], sorted(part["objects"]), groups, [sorted(record["values"]) for record in part["optimizers"]]))
    kinds = gather(hashlib.sha256(text.encode()).hexdigest(), group)
    rank = rank_of(group)
    first = sorted({kind: kinds.index(kind) for kind in kinds}.values())
    return first.index(rank) if rank in first else None


class _Writer(FileSystemWriter):
    """DCP's writer, with the operating system's error instead of the zip writer's."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with files.operating_system_errors():
            return super().write_data(plan, planner)


class _Planner(DefaultSavePlanner):
    """Takes each plain tensor from the first rank that has it; DCP alone would spread them over the ranks, and mix the buffers of several
    (running mean of one, running variance of another). Replicas of DTensors are equal by contract and are spread."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], dcp.Metadata]:
        seen: set[str] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.type != WriteItemType.TENSOR or item.index.fqn not in seen]
            seen.update(item.index.fqn for item in items if item.type == WriteItemType.TENSOR)
            plans.append(dataclasses.replace(plan, items=items))
        return super().create_global_plan(plans)


def _write_tensors(what: str, tensors: dict[str, Tensor], temporary: Path, group: dist.ProcessGroup | None) -> dcp.Metadata:
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return dcp_together(what, lambda: dcp.save(tensors, storage_writer=_Writer(temporary), planner=planner, process_group=group))


def _split_loaders(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The metadata to save, and this data-parallel rank's loader states, which Lightning keeps inside the fit loop's."""
    meta = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    inside = meta.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    loaders = inside.get("combined_loader") or []
    if loaders:
        inside = {key: value for key, value in inside.items() if key != "combined_loader"}
        meta["loops"] = {**meta["loops"], "fit_loop": {**meta["loops"]["fit_loop"], "state_dict": inside}}
    return meta, loaders


def _check_portable(meta: dict[str, Any]) -> None:
    for key, value in meta.items():
        if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value)):
            raise ValueError(
                f"checkpoint[{key!r}] holds a DTensor: only rank 0's shard of it would be saved. "
                "Keep it as a buffer of the LightningModule, or gather it with full_tensor() in the hook that puts it there"
            )


def _finish(temporary: Path, path: Path, checkpoint: dict[str, Any], written: dcp.Metadata, group: dist.ProcessGroup | None) -> None:
    """Rank 0: all files of all ranks are there, the commit record, the final name."""
    expected = {place.relative_path for place in written.storage_data.values()}
    absent = sorted(name for name in expected if not (temporary / name).is_file())
    if absent:
        raise RuntimeError(f"rank 0 does not see {', '.join(absent[:5])}: {path.parent} must be a folder that all nodes share")
    record = {
        "step": checkpoint.get("global_step"),
        "epoch": checkpoint.get("epoch"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "world_size": dist.get_world_size(group) if distributed() else 1,
        "torch": torch.__version__,
        "lightning": checkpoint.get("pytorch-lightning_version"),
        "tensors": len(written.state_dict_metadata),
    }
    files.write_manifest(temporary, record)
    files.commit(temporary, path)
