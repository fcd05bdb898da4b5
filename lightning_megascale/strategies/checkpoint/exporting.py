"""A checkpoint as one file, sharded safetensors or a consolidated folder: streamed, one tensor in memory at a time, one process."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import struct
import threading
import warnings
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.utils import _pytree as pytree

from lightning_megascale.strategies.checkpoint import files
from lightning_megascale.strategies.checkpoint.archive import Archive, open_archive

FORMATS = ("ckpt", "safetensors")
# What load_from_checkpoint reads beside the weights, for the module and for a datamodule.
_KEPT = ("epoch", "global_step", "pytorch-lightning_version", "hyper_parameters", "hparams_name", "hparams_type")
_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def export(
    path: str | os.PathLike,
    out: str | os.PathLike | None = None,
    format: str = "ckpt",
    *,
    shard_bytes: int = 5 * 10**9,
    prefix: str | None = None,
    weights_only: bool | None = None,
) -> list[Path]:
    """Writes the weights of a checkpoint for other programs. No process group; host memory stays near the largest tensor.

    Args:
        path: anything ``load`` reads.
        out: the file ("ckpt") or the folder ("safetensors"); must not exist. Default: beside ``path``, or beside the folder
            ``checkpoints`` that it is in, which is for what a run can resume from.
        format: "ckpt": one file for ``LightningModule.load_from_checkpoint`` (weights, hyper-parameters, version). "safetensors": Hugging
            Face's layout, ``model-00001-of-0000N.safetensors`` and ``model.safetensors.index.json``.
        shard_bytes: most bytes of tensors in one safetensors file, unless one tensor is larger.
        prefix: safetensors only: what to strip from the names, such as "model."; None: the first part that all names share; "": nothing.
        weights_only: as in ``torch.load``, for the hyper-parameters.

    Returns:
        The files written.

    Raises:
        ValueError: no checkpoint, unknown format, ``out`` exists or cannot be written, a dtype that safetensors does not have.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: formats are {', '.join(FORMATS)}")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}: must be at least 1")
    files.check_sizes(files.locate(path))
    archive = open_archive(path, weights_only, metadata=format == "ckpt")
    if not archive.model:
        raise ValueError(f"checkpoint {archive.path} holds no model tensors")
    target = files.local_path(out) if out is not None else _beside(archive.path, format)
    temporary = _aside(target)
    try:
        if format == "ckpt":
            _write_ckpt(archive, temporary)
            names = [""]
        else:
            names = _write_safetensors(archive, temporary, shard_bytes, prefix)
        os.rename(temporary, target)
    finally:
        files.remove(temporary)
    return [target / name if name else target for name in names]


def reshard_checkpoint(path: str | os.PathLike, out: str | os.PathLike, ranks: int = 1) -> Path:
    """Rewrites one of our checkpoints into a consolidated folder: whole tensors, balanced over ``ranks`` files; streamed, no process group.

    Everything else (loops, optimizer groups, loader states) is copied as it is.

    Raises:
        ValueError: not one of our folders, ``out`` exists, ``ranks`` below 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: the number of files must be at least 1")
    files.check_sizes(files.locate(path))
    archive = open_archive(path, metadata=False)
    if archive.kind != "megascale":
        raise ValueError(
            f"{archive.path} is a {archive.kind} checkpoint: only folders of MegascaleStrategy can be resharded; it can be exported"
        )
    target = files.local_path(out)
    temporary = _aside(target)
    try:
        wanted = {key: torch.empty(size, dtype=dtype, device="meta") for key, (size, dtype) in archive.sizes.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            writer = FileSystemWriter(temporary, thread_count=ranks)
            dcp.save(wanted, storage_writer=writer, planner=_StreamingPlanner(archive), no_dist=True)
        for file in [archive.path / files.META, *archive.path.glob("part_*.pt"), *archive.path.glob("loader_*.pt")]:
            shutil.copy2(file, temporary / file.name)
        old = files.read_manifest(archive.path) or {}
        files.write_manifest(temporary, {key: value for key, value in old.items() if key not in ("format", "files")})
        os.rename(temporary, target)
    finally:
        files.remove(temporary)
    return target


class _StreamingPlanner(DefaultSavePlanner):
    """Reads each tensor when the writer asks for it."""

    def __init__(self, archive: Archive) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.archive = archive
        self.thread = threading.local()  # the writer has one per file

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        previous = getattr(self.thread, "tensor", None)
        if previous is not None:  # written by now, but DCP's writer keeps every tensor of a file until the file is closed
            previous.untyped_storage().resize_(0)
        self.thread.tensor = self.archive.read(write_item.index.fqn)
        return self.thread.tensor


def _aside(target: Path) -> Path:
    if os.path.lexists(target):
        raise ValueError(f"{target} exists; choose another name or remove it")
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror}; choose another place") from error
    return temporary


def _beside(path: Path, format: str) -> Path:
    name = f"{path.stem}-export" + (".ckpt" if format == "ckpt" else "")
    folder = path.parent
    if folder.absolute().name == "checkpoints":
        folder = folder.parent if folder.name else folder.absolute().parent
    return folder / name


def _bytes(tensor: Tensor) -> Any:
    """A tensor's memory as something ``write`` takes, without a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _write_ckpt(archive: Archive, path: Path) -> None:
    """One zip file as ``torch.save`` lays it out, with holes that are then filled tensor by tensor.

    Source: torch.serialization notes, "Fast tensor operations with skip_data and FakeTensorMode".
    """
    with FakeTensorMode():
        fakes = {name: torch.empty(size, dtype=dtype) for name, key in archive.model.items() for size, dtype in [archive.sizes[key]]}
    for group in archive.tied:  # one storage, as torch.save does for a tied module
        for name in group[1:]:
            if name in fakes and group[0] in fakes:
                fakes[name] = fakes[group[0]]
    kept = {key: value for key, value in archive.metadata.items() if key in _KEPT or key.startswith("datamodule_h")}
    content: dict[str, Any] = {**kept, "state_dict": {**fakes, **archive.objects}}
    with files.operating_system_errors(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(content, path)
    with FakeTensorMode():
        laid_out = torch.load(path, weights_only=False)  # our own file, just written
    places = {name: laid_out["state_dict"][name].untyped_storage()._checkpoint_offset for name in fakes}
    done: set[int] = set()
    with open(path, "r+b") as file:
        for name, place in places.items():
            if place not in done:
                file.seek(place)
                file.write(_bytes(archive.read(archive.model[name])))
                done.add(place)
        for tensor, fake in zip(pytree.tree_leaves(content), pytree.tree_leaves(laid_out)):
            if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):  # inside hyper-parameters or module objects
                file.seek(fake.untyped_storage()._checkpoint_offset)
                file.write(_bytes(tensor.new_empty(0).set_(tensor.untyped_storage())))
        file.flush()
        os.fsync(file.fileno())


def _write_safetensors(archive: Archive, folder: Path, shard_bytes: int, prefix: str | None) -> list[str]:
    odd = {str(archive.sizes[key][1]) for key in archive.model.values() if archive.sizes[key][1] not in _SAFETENSORS_DTYPES}
    if odd:
        raise ValueError(f"safetensors has no dtype for {', '.join(sorted(odd))}; use format=ckpt")
    names = _strip(list(archive.model), prefix)
    shards = list(_shards(archive, shard_bytes))
    folder.mkdir()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_one(archive, folder / file_name, shard, names)
        weight_map.update({names[name]: file_name for name in shard})
    total = sum(_size(archive, name) for name in archive.model)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return [*sorted(set(weight_map.values())), "model.safetensors.index.json"]


def _size(archive: Archive, name: str) -> int:
    size, dtype = archive.sizes[archive.model[name]]
    return prod(size) * dtype.itemsize


def _shards(archive: Archive, shard_bytes: int) -> Iterator[list[str]]:
    shard: list[str] = []
    filled = 0
    for name in archive.model:
        size = _size(archive, name)
        if shard and filled + size > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def _strip(names: Sequence[str], prefix: str | None) -> dict[str, str]:
    if prefix is None:
        first = {name.split(".")[0] for name in names}
        prefix = f"{first.pop()}." if len(first) == 1 and all("." in name for name in names) else ""
    elif prefix and not any(name.startswith(prefix) for name in names):
        raise ValueError(f"prefix={prefix!r}: no name starts with it; names are {', '.join(names[:3])}, ...")
    return {name: name.removeprefix(prefix) for name in names}


def _write_one(archive: Archive, path: Path, shard: Sequence[str], names: dict[str, str]) -> None:
    """Source: safetensors' format: 8 bytes little-endian length, a JSON header of that length, the tensors without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in shard:
        size, dtype = archive.sizes[archive.model[name]]
        end = offset + _size(archive, name)
        header[names[name]] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in shard:
            file.write(_bytes(archive.read(archive.model[name])))
        file.flush()
        os.fsync(file.fileno())
