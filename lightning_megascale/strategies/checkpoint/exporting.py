"""A checkpoint as one file, sharded safetensors or a consolidated folder: streamed, one tensor in memory at a time, one process."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import warnings
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
from lightning_megascale.strategies.checkpoint.exporting_safetensors import write_safetensors
from lightning_megascale.strategies.checkpoint.huggingface import MODELS, TOKENIZER

FORMATS = ("ckpt", "safetensors")
# What load_from_checkpoint reads beside the weights, for the module and for a datamodule.
_KEPT = ("epoch", "global_step", "pytorch-lightning_version", "hyper_parameters", "hparams_name", "hparams_type")


def export(
    path: str | os.PathLike,
    out: str | os.PathLike | None = None,
    format: str = "ckpt",
    *,
    shard_bytes: int = 5 * 10**9,
    prefix: str | None = None,
    weights_only: bool | None = None,
    dtype: torch.dtype | str | None = None,
    tokenizer: str | os.PathLike | None = None,
    config: str | os.PathLike | None = None,
) -> list[Path]:
    """Writes the weights of a checkpoint for other programs. No process group; host memory stays near the largest tensor.

    A run whose model is of transformers becomes a folder that ``from_pretrained`` reads: Hugging Face's names and layouts (an expert by
    itself), tied weights once, ``config.json``, ``generation_config.json``, and the tokenizer that module or datamodule had.

    Args:
        path: anything ``load`` reads.
        out: the file ("ckpt") or the folder ("safetensors"); must not exist. Default: beside ``path``, or beside the folder
            ``checkpoints`` that it is in, which is for what a run can resume from.
        format: "ckpt": one file for ``LightningModule.load_from_checkpoint`` (weights, hyper-parameters, version). "safetensors": Hugging
            Face's layout, ``model-00001-of-0000N.safetensors`` and ``model.safetensors.index.json``.
        shard_bytes: most bytes of tensors in one safetensors file, unless one tensor is larger.
        prefix: safetensors only: what to strip from the names, such as "model."; None: that of the Hugging Face model, else the first part
            that all names share; "": nothing, and names stay as they are.
        weights_only: as in ``torch.load``, for the hyper-parameters.
        dtype: safetensors only: of the floating-point tensors written, such as ``torch.bfloat16`` or "bfloat16"; None: as they are.
        tokenizer: safetensors only: a folder whose tokenizer files are copied, in place of those kept in the checkpoint.
        config: safetensors only: a folder with the ``config.json`` of the model, for a checkpoint that has kept none.

    Returns:
        The files written.

    Raises:
        ValueError: no checkpoint, unknown format, ``out`` exists or cannot be written, a dtype that safetensors does not have.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: formats are {', '.join(FORMATS)}")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}: must be at least 1")
    given = [name for name, value in (("dtype", dtype), ("tokenizer", tokenizer), ("config", config)) if value is not None]
    if given and format != "safetensors":
        raise ValueError(f"{', '.join(given)}: only format=safetensors takes it; a ckpt keeps the weights as they are")
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
            names = write_safetensors(archive, temporary, shard_bytes, prefix, _floating(dtype), tokenizer, config)
        os.rename(temporary, target)
    finally:
        files.remove(temporary)
    return [target / name if name else target for name in names]


def _floating(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype={dtype}: must be a floating-point dtype, such as bfloat16, float16 or float32")
    return found


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
        for folder in (archive.path / MODELS, archive.path / TOKENIZER):
            if folder.is_dir():
                shutil.copytree(folder, temporary / folder.name)
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
