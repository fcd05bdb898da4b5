"""The files of a checkpoint on the disk: names, what is complete, replacing one by another. No ranks.

Our folder is a torch.distributed.checkpoint (DCP) folder with more kinds of files::

    .metadata, __{rank}_{n}.distcp   DCP: model tensors under canonical names, optimizer.{i}.state.{name}.{key}
    meta.pt                          Lightning's checkpoint dict without tensors of the model and the optimizers
    part_{k}.pt                      optimizer groups, tied names, other module state: one per kind of rank (several under pipelines)
    loader_{k}.pt                    loader states of data-parallel rank k, when loaders are stateful
    huggingface/{module}/            config.json and generation_config.json of a model that has a Hugging Face config
    tokenizer/                       the tokenizer of module or datamodule, when there is one
    megascale.json                   the commit record, written last: step, sizes of all files
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_megascale import commit_record

FORMAT = 1
META, MANIFEST, DCP_METADATA = "meta.pt", commit_record.NAME, commit_record.LAYOUT
_LEFTOVER = re.compile(r"\.(tmp|old)-[0-9a-f]{8}$")


def local_path(path: str | os.PathLike) -> Path:
    """The path, when it is one of a file system.

    Raises:
        ValueError: for an address such as ``s3://...``.
    """
    if "://" in str(path):
        raise ValueError(f"checkpoint path {str(path)!r}: only paths of a (shared) file system work; mount it, or copy the folder first")
    return Path(path)


def locate(path: str | os.PathLike) -> Path:
    """The path, or where an interrupted replacement left the complete old checkpoint.

    Raises:
        ValueError: when there is nothing.
    """
    path = local_path(path)
    if path.exists():
        return path
    stranded = [c for c in leftovers(path) if is_checkpoint(c) and (".old-" in c.name or (c / MANIFEST).is_file())]
    if stranded:
        return max(stranded, key=lambda child: child.stat().st_mtime)
    near = [child.name for child in path.parent.iterdir() if is_checkpoint(child)] if path.parent.is_dir() else []
    raise ValueError(f"there is no checkpoint {path}" + (f"; in that folder are: {', '.join(sorted(near)[:10])}" if near else ""))


def leftovers(path: Path) -> list[Path]:
    """Folders that unfinished saves to ``path`` left beside it."""
    if not path.parent.is_dir():
        return []
    return [c for c in path.parent.iterdir() if c.name.startswith(path.name + ".") and _LEFTOVER.fullmatch(c.name[len(path.name) :])]


def is_leftover(path: Path) -> bool:
    return bool(_LEFTOVER.search(path.name))


def is_folder_checkpoint(path: Path) -> bool:
    return path.is_dir() and (path / DCP_METADATA).is_file() and (path / META).is_file()


def is_file_checkpoint(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def is_checkpoint(path: str | os.PathLike) -> bool:
    """True for a folder or file that ``load`` can read; not whether all of it is readable (``check``)."""
    path = local_path(path)
    return is_folder_checkpoint(path) or is_file_checkpoint(path)


def load_pickled(file: Path | io.BytesIO, name: Any, weights_only: bool | None, mmap: bool | None = None) -> Any:
    """``torch.load`` on the host, with its refusal of pickled classes explained.

    Raises:
        ValueError: for a damaged file; naming the class that torch's default refuses, and the two ways out.
    """
    try:
        if not zipfile.is_zipfile(file):
            raise _damaged(name, "it is no torch file")
        if isinstance(file, io.BytesIO):
            file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except (RuntimeError, EOFError) as error:
        raise _damaged(name, (str(error).splitlines() or ["it ends too early"])[0]) from error
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)|`?([\w.]+)`? was not an allowed global", str(error))
        if not found:
            raise _damaged(name, "its pickle cannot be read") from error
        what = next(filter(None, found.groups()))
        raise ValueError(
            f"{name} holds an object of {what}, which torch does not unpickle by default because unpickling can run code. "
            "If you trust the file: weights_only=False (Trainer.fit(..., weights_only=False)), "
            f"or torch.serialization.add_safe_globals([{what.split('.')[-1]}])"
        ) from error


def _damaged(name: Any, cause: str) -> ValueError:
    return ValueError(f"{name} is unreadable ({cause}): the file is damaged, take an older checkpoint")


@contextmanager
def operating_system_errors() -> Iterator[None]:
    """Shows the full disk behind ``torch.save``'s "unexpected pos 704 vs 598"."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def write_pickled(content: Any, path: Path) -> None:
    """``torch.save`` that is on the disk when it returns."""
    with open(path, "wb") as file:
        with operating_system_errors():
            torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def write_manifest(folder: Path, record: dict[str, Any]) -> None:
    """The commit record: what the folder holds, and the size in bytes of every file."""
    files = {child.relative_to(folder).as_posix(): child.stat().st_size for child in sorted(folder.rglob("*")) if child.is_file()}
    with open(folder / MANIFEST, "w") as file:
        json.dump({"format": FORMAT, **record, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The commit record, or None when there is none (another program's checkpoint)."""
    return commit_record.read(folder)


def check_sizes(path: Path) -> None:
    """Compares the files of a checkpoint folder with its commit record.

    Raises:
        ValueError: for the files that are missing or cut, with the next older checkpoint beside it that is whole.
    """
    problems = commit_record.wrong_sizes(path) if is_folder_checkpoint(path) else []  # a torn one is told apart elsewhere
    if not problems:
        return
    own = commit_record.age(commit_record.read(path) or {})
    beside = commit_record.complete(path.resolve().parent)
    older = [other for step, other in beside if step < own[0] and not commit_record.wrong_sizes(other)]
    remedy = f"the next older whole checkpoint is {path.parent / older[-1].name}" if older else "no older whole checkpoint is beside it"
    raise ValueError(f"checkpoint {path} is damaged: {'; '.join(problems[:5])}; {remedy}")


def commit(temporary: Path, folder: Path) -> None:
    """Puts a complete folder under its final name; what was there is removed only afterwards."""
    if not os.path.lexists(folder):
        os.rename(temporary, folder)
    elif _exchange(temporary, folder):
        remove(temporary)
    else:  # a file system without exchange: a crash between the two leaves the old one under a name that ``locate`` finds
        old = folder.with_name(folder.name + ".old-" + temporary.name.rpartition("-")[2])
        os.rename(folder, old)
        os.rename(temporary, folder)
        remove(old)
    sync_folder(folder.parent)
    for stale in leftovers(folder):
        remove(stale)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step (Linux renameat2 with RENAME_EXCHANGE); False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, exchange = -100, 2
    return rename is not None and rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0


def remove(path: str | os.PathLike) -> None:
    """Removes a folder, a file or a link (not what it points to); fine when there is nothing."""
    path = local_path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def walk(folder: Path, depth: int = 3) -> Iterator[Path]:
    """Checkpoints and leftovers below a folder, not looking into them."""
    for child in sorted(folder.iterdir()):
        if is_leftover(child) or is_folder_checkpoint(child) or (child.suffix == ".ckpt" and is_file_checkpoint(child)):
            yield child
        elif child.is_dir() and not child.is_symlink() and depth:
            yield from walk(child, depth - 1)
