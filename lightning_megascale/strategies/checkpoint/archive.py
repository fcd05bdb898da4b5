"""Reading: our folders, plain ``.ckpt`` files and ModelParallelStrategy folders behind one ``Archive``. Ranks only in ``fetch``."""

from __future__ import annotations

import gc
import io
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from lightning_megascale.strategies.checkpoint.files import (
    DCP_METADATA,
    META,
    is_file_checkpoint,
    is_folder_checkpoint,
    load_pickled,
    locate,
)
from lightning_megascale.strategies.checkpoint.optimizer import NOT_AN_OPTION, SavedOptimizer
from lightning_megascale.strategies.checkpoint.state import canonical

OPTIMIZER_KEY = re.compile(r"optimizer\.(\d+)\.state\.(.+)\.([^.]+)$")


class MemoryMappedReader(StorageReader):
    """Hands tensors of a memory-mapped file to DCP, so that each rank touches only the pages of its own shards."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def read_metadata(self) -> Metadata:
        return Metadata({key: _whole(tensor) for key, tensor in self.tensors.items()}, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            source = self.tensors[item.storage_index.fqn]
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                source = source.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class _FolderReader(FileSystemReader):
    """DCP's reader with the metadata that is already in memory: on thousands of ranks it is not read twice."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _whole(tensor: Tensor) -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * tensor.ndim), sizes=tensor.size())
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), [chunk])


@dataclass
class Archive:
    """An opened checkpoint of any kind.

    Args:
        path: where it is.
        kind: "megascale", "ModelParallelStrategy" (folder) or "file".
        metadata: Lightning's dict without model and optimizer state.
        reader: makes DCP's reader.
        model: canonical name -> key of the reader, in saved order.
        sizes: key of the reader -> shape and dtype.
        optimizers: in saved order; empty for weights only.
        tied: groups of names that were one tensor.
        objects: canonical name -> module state that is no tensor.
        loaders: data-parallel rank -> file of its loader states.
        dcp: DCP's metadata, for folders.
    """

    path: Path
    kind: str
    metadata: dict[str, Any]
    reader: Callable[[], StorageReader]
    model: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    optimizers: list[SavedOptimizer] = field(default_factory=list)
    tied: list[list[str]] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    loaders: dict[int, Path] = field(default_factory=dict)
    dcp: Metadata | None = None

    def read(self, key: str) -> Tensor:
        """One whole tensor on the host, without a process group. Nothing stays behind, though ``torch.load`` leaves what it opened and
        made in a reference cycle."""
        if self.dcp is None:
            reader = self.reader()
            assert isinstance(reader, MemoryMappedReader)
            return reader.tensors[key].clone()
        size, dtype = self.sizes[key]
        tensor = torch.empty(size, dtype=dtype)
        stored = self.dcp.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        for chunk in stored.chunks:
            target = tensor
            for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes)):
                target = target.narrow(dim, start, length)
            with io.BytesIO(_read_place(self.path, self.dcp, MetadataIndex(key, chunk.offsets))) as buffer:
                piece = torch.load(buffer, map_location="cpu", weights_only=True)
            target.copy_(piece)
            del piece
            gc.collect(1)  # young objects only: cheap
        return tensor


def fetch(targets: dict[str, Tensor], reader: StorageReader, process_group: Any = None) -> None:
    """Fills tensors (plain ones, DTensors of any sharding) from a checkpoint. Collective."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(targets), storage_reader=reader, planner=planner, process_group=process_group)


def open_archive(path: str | os.PathLike, weights_only: bool | None = None, *, metadata: bool = True) -> Archive:
    """Opens a checkpoint: reads what describes it, no tensors.

    Args:
        weights_only: as in ``torch.load``; None is torch's default, which refuses pickled classes.
        metadata: False leaves ``meta.pt`` of a folder alone (it alone can hold foreign classes).

    Raises:
        ValueError: when there is no checkpoint, it is torn, or it holds classes that ``weights_only`` refuses.
    """
    path = locate(path)
    if is_file_checkpoint(path):
        return _open_file(path, weights_only)
    if not is_folder_checkpoint(path):
        lacking = [name for name in (DCP_METADATA, META) if not (path / name).is_file()] if path.is_dir() else []
        raise ValueError(f"{path} is no checkpoint" + (f": {' and '.join(lacking)} missing, the save was not finished" if lacking else ""))
    try:
        layout = FileSystemReader(path).read_metadata()
    except Exception as error:
        raise ValueError(
            f"checkpoint {path}: {DCP_METADATA} is unreadable ({error}); the file is torn, take an older checkpoint"
        ) from error
    meta = load_pickled(path / META, path / META, weights_only) if metadata else {}
    parts = sorted(path.glob("part_*.pt"))
    archive = Archive(path, "megascale" if parts else "ModelParallelStrategy", meta, lambda: _FolderReader(path, layout), dcp=layout)
    for key, stored in layout.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            archive.sizes[key] = stored.size, stored.properties.dtype
    if parts:
        _read_parts(archive, [load_pickled(part, part, weights_only) for part in parts])
        archive.loaders = {int(file.stem.split("_")[1]): file for file in sorted(path.glob("loader_*.pt"))}
    else:
        _read_lightning_folder(archive, layout)
    return archive


def _read_parts(archive: Archive, parts: list[dict[str, Any]]) -> None:
    for key in archive.sizes:
        if not OPTIMIZER_KEY.match(key):
            archive.model[key] = key
    for part in parts:
        archive.tied += [group for group in part["tied"] if group not in archive.tied]
        archive.objects = {**part["objects"], **archive.objects}
        for index, record in enumerate(part["optimizers"]):
            if index == len(archive.optimizers):
                archive.optimizers.append(SavedOptimizer(record["class"], []))
            merged = archive.optimizers[index]
            _merge_groups(archive, merged, record["groups"])
            merged.values = {**record["values"], **merged.values}
    for key in archive.sizes:
        if match := OPTIMIZER_KEY.match(key):
            archive.optimizers[int(match[1])].tensors.setdefault(match[2], {})[match[3]] = key


def _merge_groups(archive: Archive, merged: SavedOptimizer, groups: list[dict[str, Any]]) -> None:
    """Adds one kind of rank's groups. Pipeline stages number theirs apart, so equal options mean the same group, not equal numbers.

    A group that only a later stage has is appended, and the schedulers' lists, which are those of the first stage, grow with it.
    """
    used: set[int] = set()
    before = len(merged.groups)
    for number, group in enumerate(groups):
        fitting = [place for place in range(before) if place not in used and _same_options(merged.groups[place], group)]
        place = number if number in fitting else fitting[0] if fitting else len(merged.groups)
        if place == len(merged.groups):
            merged.groups.append({"names": [], "options": group["options"]})
            if before:
                _extend_schedulers(archive.metadata.get("lr_schedulers") or [], place, group["options"])
        used.add(place)
        known = set(merged.groups[place]["names"])
        merged.groups[place]["names"] += [name for name in group["names"] if name not in known]


def _same_options(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return sorted(map(str, one["options"].items())) == sorted(map(str, other["options"].items()))


def _extend_schedulers(states: list[dict[str, Any]], groups: int, options: dict[str, Any]) -> None:
    own = {"base_lrs": options.get("initial_lr", options.get("lr")), "_last_lr": options.get("lr")}
    for state in states:
        for key, value in state.items():
            if isinstance(value, list) and len(value) == groups and value:
                value.append(own.get(key, value[0]))


def _read_lightning_folder(archive: Archive, metadata: Metadata) -> None:
    """ModelParallelStrategy's keys: a path of dict keys each, ("state_dict", name), ("optimizer_0", "state", name, key), ..."""
    groups: dict[int, dict[int, dict[str, Any]]] = {}
    states: dict[int, dict[str, dict[str, str]]] = {}
    for key, stored in metadata.state_dict_metadata.items():
        route = (metadata.planner_data or {}).get(key, ())
        in_bytes = isinstance(stored, BytesStorageMetadata)
        if len(route) == 2 and route[0] in ("state_dict", "model"):
            if in_bytes:
                archive.objects[canonical(route[1])] = _read_bytes(archive.path, metadata, key)
            else:
                archive.model[canonical(route[1])] = key
        elif len(route) == 4 and (match := re.fullmatch(r"optimizer_(\d+)", str(route[0]))):
            if route[1] == "param_groups":
                value = _read_bytes(archive.path, metadata, key) if in_bytes else archive.read(key)
                groups.setdefault(int(match[1]), {}).setdefault(route[2], {})[route[3]] = value
            elif not in_bytes:
                states.setdefault(int(match[1]), {}).setdefault(canonical(route[2]), {})[route[3]] = key
    for index in sorted(groups):
        rows = [_group(row) for _, row in sorted(groups[index].items())]
        archive.optimizers.append(SavedOptimizer(None, rows, states.get(index, {})))


def _read_place(path: Path, metadata: Metadata, index: MetadataIndex) -> bytes:
    place = metadata.storage_data[index]
    with open(path / place.relative_path, "rb") as file:
        file.seek(place.offset)
        return file.read(place.length)


def _read_bytes(path: Path, metadata: Metadata, key: str) -> Any:
    return load_pickled(io.BytesIO(_read_place(path, metadata, MetadataIndex(key))), f"{path}: {key}", True)


def _clean(name: Any) -> Any:
    return canonical(name) if isinstance(name, str) else name


def _group(row: dict[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in row.items() if key not in NOT_AN_OPTION or key == "param_names"}
    return {"names": [_clean(name) for name in row["params"]], "options": options}


def _open_file(path: Path, weights_only: bool | None) -> Archive:
    content = load_pickled(path, path, weights_only, mmap=True)
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(f"{path} is no Lightning checkpoint: it has no 'state_dict'")
    tensors: dict[str, Tensor] = {}
    archive = Archive(path, "file", content, lambda: MemoryMappedReader(tensors))
    by_storage: dict[tuple, list[str]] = {}
    for raw, value in content.pop("state_dict").items():
        name = canonical(raw)
        if not isinstance(value, Tensor):
            archive.objects[name] = value
            continue
        tensors[name], archive.model[name] = value, name
        if value.numel():
            by_storage.setdefault((value.untyped_storage().data_ptr(), value.storage_offset(), value.shape), []).append(name)
    archive.tied = [names for names in by_storage.values() if len(names) > 1]
    for index, state in enumerate(content.pop("optimizer_states", [])):
        saved = SavedOptimizer(None, [_group(row) for row in state["param_groups"]])
        for i, entries in state["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    storage_key = f"optimizer.{index}.state.{i}.{key}"
                    tensors[storage_key] = value
                    saved.tensors.setdefault(_clean(i), {})[key] = storage_key
                else:
                    saved.values.setdefault(_clean(i), {})[key] = value
        archive.optimizers.append(saved)
    archive.sizes = {key: (tensor.size(), tensor.dtype) for key, tensor in tensors.items()}
    return archive
