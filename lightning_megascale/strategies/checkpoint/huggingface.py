"""What makes a folder one that ``from_pretrained`` reads: config and tokenizer kept when saving, names and files when exporting."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_megascale.strategies.checkpoint.archive import Archive
from lightning_megascale.strategies.checkpoint.state import some
from lightning_megascale.strategies.checkpoint.views import Stored, View
from lightning_megascale.strategies.checkpoint.weight_names import ignored, names_for_saving, transformers_models

MODELS, TOKENIZER = "huggingface", "tokenizer"  # folders in a checkpoint: huggingface/{module name}/config.json, tokenizer/...
CONFIG, GENERATION = "config.json", "generation_config.json"
_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "*processor_config.json",
)


# ---- saving ----------------------------------------------------------------------------------------------------------------


def write_descriptions(module: nn.Module, folder: Path, tokenizers: Iterable[Any] = ()) -> None:
    """Puts the config of every outermost model that has a Hugging Face one into a checkpoint folder, and tokenizers beside. One rank.

    Args:
        module: the LightningModule.
        tokenizers: objects with ``save_pretrained``; one that cannot be saved is warned of, and the checkpoint goes on.
    """
    for name, model in _described(module).items():
        values = json.loads(model.config.to_json_string())
        values["architectures"] = [next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule)).__name__]
        place = folder / MODELS / name
        place.mkdir(parents=True)
        _write_json(place / CONFIG, values)
        generation = getattr(model, "generation_config", None)
        if generation is not None and callable(getattr(generation, "to_json_string", None)):
            (place / GENERATION).write_text(generation.to_json_string())
    for tokenizer in tokenizers:
        try:
            tokenizer.save_pretrained(str(folder / TOKENIZER))
        except Exception as error:  # noqa: BLE001 weights without a tokenizer are better than none
            warnings.warn(f"the checkpoint has no tokenizer: {type(tokenizer).__name__}.save_pretrained failed: {error}", stacklevel=2)


def _described(module: nn.Module) -> dict[str, Any]:
    """The outermost transformers models by name; without one, what else has a Hugging Face config, but for the LightningModule itself."""
    found: dict[str, Any] = dict(transformers_models(module))
    if found:
        return found
    for name, child in module.named_modules():
        config = getattr(child, "config", None)
        if name and callable(getattr(config, "to_json_string", None)) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = child
    return found


def tokenizers_of(*owners: Any) -> list[Any]:
    """What a LightningModule or datamodule has as ``tokenizer`` or ``processor`` and can be saved."""
    found = [getattr(owner, name, None) for owner in owners for name in ("tokenizer", "processor")]
    return list({id(one): one for one in found if callable(getattr(one, "save_pretrained", None))}.values())


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


# ---- exporting -------------------------------------------------------------------------------------------------------------


def described_models(path: Path) -> dict[str, Path]:
    """Module name -> folder of its config, of a checkpoint; in it a module of the name "" lies by itself."""
    root = path / MODELS
    return {str(file.parent.relative_to(root)).lstrip("."): file.parent for file in sorted(root.rglob(CONFIG))} if root.is_dir() else {}


def choose_model(archive: Archive, prefix: str | None, config: str | os.PathLike | None) -> tuple[str, Path] | None:
    """Which model an export is of: its prefix ("model.") and the folder of its config; None for one that is not Hugging Face's.

    Args:
        prefix: as ``export`` has it.
        config: a folder with a ``config.json``, in place of what the checkpoint kept.

    Raises:
        ValueError: for a folder without a config, and for several models of which none was chosen.
    """
    if config is not None:
        folder = Path(config)
        if not (folder / CONFIG).is_file():
            raise ValueError(f"config={folder}: there is no {CONFIG} in it; give the folder that the model came from")
        return _shared_prefix(list(archive.model)) if prefix is None else prefix, folder
    models = (
        {f"{name}." if name else "": folder for name, folder in described_models(archive.path).items()} if archive.path.is_dir() else {}
    )
    if prefix is not None:
        return (prefix, models[prefix]) if prefix in models else None
    if len(models) > 1:
        raise ValueError(f"{archive.path} holds {len(models)} Hugging Face models: choose one with prefix={' or prefix='.join(models)}")
    return next(iter(models.items()), None)


def _shared_prefix(names: list[str]) -> str:
    first = {name.split(".")[0] for name in names}
    return f"{first.pop()}." if len(first) == 1 and all("." in name for name in names) else ""


def skeleton(folder: Path) -> nn.Module | None:
    """The model that a config describes, without weights (meta device); None for a class that transformers does not have."""
    import transformers

    values = json.loads((folder / CONFIG).read_text())
    kind: Any = getattr(transformers, (values.get("architectures") or [""])[0], None)
    if not hasattr(kind, "config_class"):
        return None
    with torch.device("meta"):
        return kind(kind.config_class.from_pretrained(str(folder)))


def views_to_write(archive: Archive, prefix: str, model: nn.Module | None) -> dict[str, View]:
    """Name on disk -> what it is made of in the checkpoint, in the order of writing; tied tensors once.

    Args:
        archive: the checkpoint.
        prefix: of the model's names in it.
        model: its skeleton, or None for one whose class is unknown: names stay as they are.

    Raises:
        ValueError: for a checkpoint that holds another model than its config says, or that has untied what the config ties.
    """
    held: dict[str, View] = {
        name.removeprefix(prefix): Stored(name, tuple(archive.sizes[key][0]))
        for name, key in archive.model.items()
        if name.startswith(prefix)
    }
    left_out = [name for name in archive.model if not name.startswith(prefix)]
    if left_out:
        warnings.warn(f"left out, since they are no part of {prefix}*: {some(left_out)}; prefix='' exports all names", stacklevel=3)
    tied = [[name.removeprefix(prefix) for name in group] for group in archive.tied]
    if model is None:
        for name in [name for group in tied for name in group[1:] if group[0] in held]:
            held.pop(name, None)
        return held
    _check_names(archive, model, held)
    for name in _duplicates(archive, model, held, tied) | ignored(model, held, "save"):
        del held[name]
    return names_for_saving(model, held)


def _check_names(archive: Archive, model: nn.Module, held: Mapping[str, View]) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing, surplus = [name for name in wanted if name not in held], [name for name in held if name not in wanted]
    other = [name for name, view in held.items() if name in wanted and wanted[name] != view.shape]
    if missing or surplus or other:
        rows = [
            f"  {what}: {some(names)}"
            for what, names in (("not in it", missing), ("unknown to it", surplus), ("other shape", other))
            if names
        ]
        raise ValueError(
            f"{archive.path} is no plain {type(model).__name__} any more (adapters, a changed head, another config?):\n"
            + "\n".join(rows)
            + "\nMerge adapters before saving, or give prefix='' to export all names as they are"
        )


def _duplicates(archive: Archive, model: Any, held: Mapping[str, View], tied: list[list[str]]) -> set[str]:
    """The names of tied tensors that ``save_pretrained`` leaves out, and ``from_pretrained`` ties again.

    Source: transformers' ``remove_tied_weights_from_state_dict``: names declared as tied go first, one stays.
    """
    patterns = [
        f"{name}.{key}".lstrip(".") for name, part in model.named_modules() for key in (getattr(part, "_tied_weights_keys", None) or {})
    ]
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    out: set[str] = set()
    for names in by_tensor.values():
        if len(names) == 1:
            continue
        _check_tied(archive, names, held, tied)
        declared = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in patterns)]
        kept = next((name for name in names if name not in declared), declared[-1] if declared else names[0])
        out.update(name for name in names if name != kept)
    return out


def _check_tied(archive: Archive, names: list[str], held: Mapping[str, View], tied: list[list[str]]) -> None:
    """What the config ties is equal in the checkpoint."""
    if any(set(names) <= set(group) for group in tied):
        return
    first, *others = (held[name].names()[0] for name in names)
    whole = archive.read(archive.model[first])
    for other in others:
        if not torch.equal(whole, archive.read(archive.model[other])):
            raise ValueError(
                f"{first} and {other} differ in {archive.path}, and the config ties them (tie_word_embeddings), so from_pretrained would "
                "load one for both: set tie_word_embeddings=False in the model's config"
            )


def write_beside(out: Path, config: Path | None, dtype: torch.dtype | None, tokenizer: Path | None, chosen: bool) -> list[str]:
    """Copies config and tokenizer into an exported folder.

    Args:
        config: the folder of the model's config.
        dtype: of the weights; goes into the config.
        tokenizer: folder to take tokenizer files from; may not exist unless ``chosen``.

    Returns:
        The names of the files.

    Raises:
        ValueError: when there is no tokenizer in the folder that was ``chosen``.
    """
    before = set(out.iterdir())
    if config is not None:
        values = json.loads((config / CONFIG).read_text())
        if dtype is not None:
            values.pop("torch_dtype", None)
            values["dtype"] = str(dtype).removeprefix("torch.")
        _write_json(out / CONFIG, values)
        if (config / GENERATION).is_file():
            shutil.copyfile(config / GENERATION, out / GENERATION)
    if tokenizer is not None:
        if chosen and not tokenizer.is_dir():
            raise ValueError(f"tokenizer={tokenizer}: there is no such folder")
        names = [file.name for file in sorted(tokenizer.iterdir())] if tokenizer.is_dir() else []
        wanted = [name for name in names if not chosen or any(fnmatch(name, pattern) for pattern in _TOKENIZER_FILES)]
        if chosen and not wanted:
            raise ValueError(f"tokenizer={tokenizer}: there are no tokenizer files in it (such as tokenizer.json or tokenizer_config.json)")
        for name in wanted:
            shutil.copyfile(tokenizer / name, out / name)
    return sorted(file.name for file in set(out.iterdir()) - before)


def main_dtype(views: Mapping[str, View], archive: Archive) -> torch.dtype | None:
    """The floating dtype of most of the elements."""
    count: Counter[torch.dtype] = Counter()
    for view in views.values():
        dtype = archive.sizes[archive.model[view.names()[0]]][1]
        if dtype.is_floating_point:
            count[dtype] += prod(view.shape)
    return count.most_common(1)[0][0] if count else None
