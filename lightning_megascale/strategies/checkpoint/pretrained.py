"""Weights from elsewhere into a module of any plan: matched with the whole module first, then each rank reads its own part of each tensor.

No collective carries weights, and no rank holds more than its part and one small buffer. A module on the meta device gets its storage here,
and only what the weights lack is drawn.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_megascale.parallel.init import local_bounds, reserve
from lightning_megascale.strategies.checkpoint.archive import open_archive
from lightning_megascale.strategies.checkpoint.files import is_checkpoint
from lightning_megascale.strategies.checkpoint.hub import find_weights
from lightning_megascale.strategies.checkpoint.loading import load
from lightning_megascale.strategies.checkpoint.safetensors_folder import SafetensorsFolder
from lightning_megascale.strategies.checkpoint.state import ModelState, describe_mismatch, model_state, reshard
from lightning_megascale.strategies.checkpoint.together import gather, rank_of, together
from lightning_megascale.strategies.checkpoint.views import Stored, View
from lightning_megascale.strategies.checkpoint.weight_names import ignored, names_for_loading, transformers_models

HALF_AN_HOUR = timedelta(minutes=30)  # torch's own time-out
InitFrom = str | os.PathLike | Mapping[str, str | os.PathLike]


@dataclass
class Pretrained:
    """Weights that fit a module: made by ``open_pretrained`` before the module is parallelized, ``fill`` comes afterwards.

    Args:
        strict: what the module's ``strict_loading`` says.
        group: all ranks, waiting on no GPU.
        views: canonical name in the LightningModule -> what it is made of, and the folder that holds it.
        tied: groups of names that are one tensor in the whole module.
        checkpoints: checkpoint folders or files, to be loaded by name.
        inside: names that the checkpoints hold.
    """

    strict: bool
    group: dist.ProcessGroup | None = None
    views: dict[str, tuple[View, SafetensorsFolder]] = field(default_factory=dict)
    tied: list[list[str]] = field(default_factory=list)
    checkpoints: list[Path] = field(default_factory=list)
    inside: set[str] = field(default_factory=set)

    def source_of(self, name: str) -> tuple[View, SafetensorsFolder] | None:
        """What fills a tensor: what has its name, else what has another name of the same tensor."""
        if name in self.views:
            return self.views[name]
        partners = next((group for group in self.tied if name in group), [])
        return next((self.views[partner] for partner in partners if partner in self.views), None)

    def filled(self, module: nn.Module) -> list[Tensor]:
        """The tensors of the LightningModule that ``fill`` gives their values."""
        known = {name for group in self.tied if self.inside.intersection(group) for name in group} | self.inside
        tensors = model_state(module).tensors.items()
        return [tensor for name, tensor in tensors if name in known or self.source_of(name) is not None]

    def reserve(self, module: nn.Module, device: torch.device) -> None:
        """Gives what will be filled its storage, without a value; what is left on the meta device has to be drawn.

        Args:
            module: the parallelized LightningModule.
        """
        reserve(module, self.filled(module), device)

    def fill(self, module: nn.Module, shapes: Mapping[str, torch.Size] | None = None) -> int:
        """Reads this rank's part of every tensor. Collective: what fails on one rank is raised on all.

        Args:
            module: the parallelized LightningModule, whose tensors have storage.
            shapes: of the whole module's parameters, under a pipeline.

        Returns:
            Bytes of the tensors that this rank filled from safetensors.
        """
        with torch.no_grad():
            reshard(module)
            filled = together("init_from was not loaded", lambda: self._fill(module), self.group)
        for path in self.checkpoints:
            load(path, module, strict=self.strict, process_group=self.group, shapes=shapes, metadata=False)
        return filled

    def _fill(self, module: nn.Module) -> int:
        filled: dict[int, str] = {}
        size = 0
        try:
            for name, tensor in model_state(module).tensors.items():
                source = self.source_of(name)
                if source is None:
                    continue
                local = _local(tensor)
                if id(tensor) not in filled:
                    filled[id(tensor)] = name
                    _read(source, tensor, local)
                    size += local.nbytes
                elif name in self.views:  # the second name of a tied tensor, which the folder holds too
                    again = torch.empty_like(local)
                    _read(source, tensor, again)
                    if not torch.equal(again, local):
                        raise ValueError(
                            f"{filled[id(tensor)]} and {name} are one tensor in the module, but differ in {source[1].path}: build a model "
                            "that does not tie them (tie_word_embeddings=False)"
                        )
        finally:
            for _, folder in self.views.values():
                folder.close()
        return size


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _read(source: tuple[View, SafetensorsFolder], tensor: Tensor, out: Tensor) -> None:
    view, folder = source
    view.read(local_bounds(tensor), out, folder.read)


def open_pretrained(
    init_from: InitFrom,
    module: nn.Module,
    target: str,
    *,
    strict: bool = True,
    first_of_node: bool = True,
    node: int = 0,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> Pretrained:
    """Finds weights and matches them with a module that is still whole. Collective.

    Args:
        init_from: a Hugging Face folder or hub name, an export, a ``.safetensors`` file, a checkpoint; or a dict of them, by the names of
            the modules below the LightningModule that they belong to.
        module: the LightningModule, on any device, not yet cut into pipeline stages.
        target: name of the child that is parallelized.
        strict: False takes the names that both have, with a warning. Shapes must agree either way.
        first_of_node, node, group, timeout: see ``find_weights``.

    Raises:
        ValueError: on all ranks: nothing there, not on all ranks, other files on other ranks, damaged or unreadable files, and one list of
            the names, shapes and dtypes that do not fit.
    """
    named = dict(init_from) if isinstance(init_from, Mapping) else {None: init_from}
    found = Pretrained(strict, group)
    state = model_state(module)
    found.tied = state.tied
    for child, given in named.items():
        place = find_weights(given, first_of_node=first_of_node, node=node, group=group, timeout=timeout or HALF_AN_HOUR)
        _open(found, place, module, state, target, child)
    return found


def _open(found: Pretrained, place: Path, module: nn.Module, state: ModelState, target: str, child: str | None) -> None:
    """Adds a folder or file to ``found``."""
    what = f"init_from={place}"
    if is_checkpoint(place):
        if child is not None:
            raise ValueError(f"init_from[{child!r}]={place} is a checkpoint, whose names are those of the whole module: give it by itself")
        archive = together(what, lambda: open_archive(place, metadata=False), found.group)
        found.checkpoints.append(place)
        found.inside |= archive.model.keys()
        return
    folder = together(what, lambda: SafetensorsFolder(place), found.group)
    _same_everywhere(folder, found.group)
    together(what, lambda: _match(found, folder, module, state, target, child), found.group)


def _same_everywhere(folder: SafetensorsFolder, group: dist.ProcessGroup | None) -> None:
    digests = gather(folder.digest, group)
    other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise ValueError(
            f"init_from={folder.path}: rank {other[0]} sees other weights there than rank 0 (other names, shapes or files): copies on the "
            "nodes' own disks have to be the same"
        )


def _match(found: Pretrained, folder: SafetensorsFolder, module: nn.Module, state: ModelState, target: str, child: str | None) -> None:
    """Adds a folder's tensors to ``found``, or raises one ValueError for everything that does not fit."""
    stored = {name: Stored(name, tensor.shape) for name, tensor in folder.tensors.items()}
    options = []
    for prefix, model in _bases(module, target, child):
        begin = f"{prefix}." if prefix else ""
        wanted = {name.removeprefix(begin): tensor for name, tensor in state.tensors.items() if name.startswith(begin)}
        views, unexpected = names_for_loading(model, stored, wanted)
        options.append((len(views), begin, model, wanted, views, unexpected))
    _, begin, model, wanted, views, unexpected = max(options, key=lambda option: option[0])  # the first of equal ones
    full = {begin + name for name in views}
    tied = {name for group in state.tied if full.intersection(group) for name in group}
    missing = [name for name in wanted if name not in views and begin + name not in tied]
    optional = ignored(model, missing, "missing")
    missing = [name for name in missing if name not in optional]
    of_no_matter = ignored(model, unexpected.values(), "unexpected") | {name.removeprefix(begin) for name in state.copies}
    surplus = [name for name, renamed in unexpected.items() if renamed not in of_no_matter and name not in of_no_matter]
    shapes = {name: (view.shape, tuple(wanted[name].shape)) for name, view in views.items() if view.shape != tuple(wanted[name].shape)}
    _check(found, folder, missing, surplus, shapes)
    _check_dtypes(folder, views, wanted)
    found.views.update({begin + name: (view, folder) for name, view in views.items()})


def _bases(module: nn.Module, target: str, child: str | None) -> Iterator[tuple[str, nn.Module]]:
    """What the names in a folder may be relative to, likeliest first: the transformers model, the parallelized child, the whole module."""
    if child is not None:
        try:
            yield child, module.get_submodule(child)
        except AttributeError:
            raise ValueError(
                f"init_from[{child!r}]: {type(module).__name__} has no such module; it has {', '.join(dict(module.named_children()))}"
            ) from None
        return
    models = transformers_models(module)
    if len(models) > 1 and not target:
        raise ValueError(
            f"init_from: {type(module).__name__} has {len(models)} transformers models, {', '.join(models)}: say which gets which weights, "
            f"such as init_from={{{next(iter(models))!r}: 'DIR'}}"
        )
    if len(models) == 1:
        yield next(iter(models.items()))
    if target not in models:
        yield target, module.get_submodule(target)
    if target:
        yield "", module


def _check(found: Pretrained, folder: SafetensorsFolder, missing: list[str], surplus: list[str], shapes: dict[str, Any]) -> None:
    message = describe_mismatch(folder.path, missing, surplus, shapes)
    if message and (found.strict or shapes):
        raise ValueError(f"init_from: {message}")
    if message and rank_of(found.group) == 0:
        warnings.warn(f"init_from: {message}", stacklevel=2)


def _check_dtypes(folder: SafetensorsFolder, views: Mapping[str, View], wanted: Mapping[str, Tensor]) -> None:
    """Numbers may change their precision, not their kind."""
    wrong = []
    for name, view in views.items():
        dtypes = {folder.tensors[part].dtype for part in view.names()}
        if any(dtype.is_floating_point != wanted[name].dtype.is_floating_point for dtype in dtypes):
            wrong.append(f"{name} is {wanted[name].dtype} here and {', '.join(map(str, dtypes))} there")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"init_from={folder.path}: {'; '.join(wrong[:3])}{more}: quantized or packed weights are no start for training")
