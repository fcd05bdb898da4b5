"""Names on disk and names in memory: where each tensor of a Hugging Face model comes from and goes to, as views that read lazily.

transformers' own conversion data (``transformers.conversion_mapping``) says how names and layouts differ: one tensor for each expert on
disk, one for all of them in memory. Here its operations become views over stored tensors, so that a piece of a fused tensor reads only the
experts it needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from lightning_megascale.strategies.checkpoint.views import Joined, Part, Stacked, Swapped, View


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, without importing it."""
    return any(base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.") for base in type(module).__mro__)


def transformers_models(module: nn.Module) -> dict[str, nn.Module]:
    """The outermost transformers models below a module (or the module itself, as ""), by name."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        if is_transformers_model(child) and not any(outer == "" or name.startswith(outer + ".") for outer in found):
            found[name] = child
    return found


def names_for_loading(model: nn.Module, stored: Mapping[str, View], wanted: Iterable[str]) -> tuple[dict[str, View], dict[str, str]]:
    """What in memory comes from what on disk, as ``from_pretrained`` has it.

    Args:
        model: whose names are wanted; conversions apply when it is a transformers model.
        stored: name on disk -> tensor.
        wanted: names in memory.

    Returns:
        Name in memory -> tensor; and the names on disk that nothing wants -> what they would be called in memory.

    Raises:
        ValueError: for a conversion that cannot be read by pieces.
    """
    names = dict.fromkeys(wanted, True)
    if not is_transformers_model(model):
        return {name: view for name, view in stored.items() if name in names}, {name: name for name in stored if name not in names}
    return _convert_names(model, stored, names)


def _convert_names(model: Any, stored: Mapping[str, View], names: dict[str, bool]) -> tuple[dict[str, View], dict[str, str]]:
    """Source: ``convert_and_load_state_dict_in_model`` of ``transformers.core_model_loading``, whose order of steps this keeps."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    collected: dict[str, tuple[Any, dict[str, list[View]]]] = {}
    unexpected: dict[str, str] = {}
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, names)
        if renamed not in names and name in names:  # in memory it is called as on disk already
            renamed, pattern = rename_source_key(name, [], [], prefix, names)
        if renamed not in names:
            unexpected[name] = renamed
            continue
        converter = None if pattern is None else by_pattern[pattern]
        collected.setdefault(renamed, (converter, {}))[1].setdefault(pattern or name, []).append(stored[name])
    found: dict[str, View] = {}
    for target, (converter, parts) in collected.items():
        if converter is None:
            views = [view for group in parts.values() for view in group]
            if len(views) > 1:
                raise ValueError(f"{' and '.join(view.names()[0] for view in views)} are both {target} in memory: which one is meant?")
            found[target] = views[0]
        else:
            found.update(_convert(model, converter, target, parts))
    return found, unexpected


def names_for_saving(model: nn.Module, held: Mapping[str, View]) -> dict[str, View]:
    """What on disk comes from what in memory, as ``save_pretrained`` writes it.

    Args:
        model: a transformers model; it may be on the meta device.
        held: name in memory -> tensor, tied ones once.

    Raises:
        ValueError: for a conversion that cannot be written by pieces.
    """
    # Source: revert_weight_conversion of transformers.core_model_loading, for a model that was not made by from_pretrained.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )

    transforms = [one for one in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(one, PrefixChange)]  # type: ignore[arg-type]
    transforms = [transform.reverse_transform() for transform in reversed(transforms)]
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    written: dict[str, View] = {}
    collected: dict[str, tuple[Any, dict[str, list[View]]]] = {}
    for name in sorted(held, key=dot_natural_key):
        renamed, pattern = apply_converters(name, converters)
        if pattern is None:
            written[apply_renamings(name, renamings)] = held[name]
        else:
            collected.setdefault(renamed, (by_pattern[pattern], {}))[1].setdefault(pattern, []).append(held[name])
    for target, (converter, parts) in collected.items():
        views = _convert(model, converter, target, parts)
        written.update({apply_renamings(name, renamings): view for name, view in views.items()})
    return dict(sorted(written.items(), key=lambda item: dot_natural_key(item[0])))


def _convert(model: Any, converter: Any, target: str, parts: Mapping[str, list[View]]) -> dict[str, View]:
    """A transformers ``WeightConverter`` on views: the tensors it makes, by full name."""
    converter = deepcopy(converter)
    values: dict[str, Any] = dict(parts)
    for operation in converter.operations:
        step = _OPERATIONS.get(type(operation).__name__)
        if step is None or getattr(operation, "check_dims", False):
            raise ValueError(
                f"{target}: transformers makes it by {type(operation).__name__}, which cannot be done by pieces here; write a folder with "
                "save_pretrained(..., save_original_format=False) once, which keeps the names and layouts of memory"
            )
        values = step(operation, values, converter, model)
    full = target.replace("*.", "0.")
    key = next((key for key in values if key in full), None)
    prefix, _, suffix = full.partition(key) if key is not None else ("", "", "")
    return {f"{prefix}{name}{suffix}": value[0] if isinstance(value, list) else value for name, value in values.items()}


def _only(value: Any) -> View:
    return value[0] if isinstance(value, list) else value


def _merge(operation: Any, values: dict[str, Any], converter: Any, model: Any) -> dict[str, Any]:
    merged = {}
    for pattern, parts in values.items():
        name = operation.get_target_pattern(len(values), pattern, converter.target_patterns)
        merged[name] = Stacked(parts if isinstance(parts, list) else [parts], operation.dim)
    return merged


def _concatenate(operation: Any, values: dict[str, Any], converter: Any, model: Any) -> dict[str, Any]:
    parts: list[View] = []
    for pattern in converter.source_patterns:
        value = values.get(pattern, [])
        parts += value if isinstance(value, list) else [value]
    return {operation.get_target_pattern(converter.target_patterns): Joined(parts, operation.dim)}


def _chunk(operation: Any, values: dict[str, Any], converter: Any, model: Any) -> dict[str, Any]:
    (value,) = values.values()
    whole, targets = _only(value), operation.get_target_patterns(converter.target_patterns, config=model.config)
    length, rest = divmod(whole.shape[operation.dim], len(targets))
    if rest:
        raise ValueError(f"{whole.names()[0]} {tuple(whole.shape)} cannot be cut into {len(targets)} equal parts")
    return {name: Part(whole, operation.dim, index * length, length) for index, name in enumerate(targets)}


def _split_list(operation: Any, values: dict[str, Any], converter: Any, model: Any) -> dict[str, Any]:
    made = {}
    for pattern, value in values.items():
        whole = _only(value)
        count = whole.shape[operation.dim]
        targets = operation.get_target_patterns(values, pattern, converter.target_patterns, count)
        made.update({name: Part(whole, operation.dim, index, 1, squeeze=True) for index, name in enumerate(targets)})
    return made


def _transpose(operation: Any, values: dict[str, Any], converter: Any, model: Any) -> dict[str, Any]:
    (value,) = values.values()
    name = operation.get_target_pattern(values, converter.source_patterns, converter.target_patterns)
    return {name: Swapped(_only(value), operation.dim0, operation.dim1)}


_OPERATIONS: dict[str, Callable[[Any, dict[str, Any], Any, Any], dict[str, Any]]] = {
    "MergeModulelist": _merge,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "SplitModulelist": _split_list,
    "Transpose": _transpose,
}


def ignored(model: nn.Module, names: Iterable[str], which: str) -> set[str]:
    """Those of the names that a transformers model declares to be of no matter.

    Args:
        which: "missing", "unexpected" or "save".
    """
    if not is_transformers_model(model):
        return set()
    patterns = set(getattr(model, "_keys_to_ignore_on_save" if which == "save" else f"_keys_to_ignore_on_load_{which}", None) or ())
    if which == "unexpected":  # buffers that old checkpoints hold; Source: PreTrainedModel._adjust_missing_and_unexpected_keys
        buffers = [name for name, _ in model.named_buffers()]
        patterns |= {r"rotary_emb\.inv_freq"} if any(name.endswith("rotary_emb.inv_freq") for name in buffers) else set()
        patterns |= {r"(^|\.)position_ids$"} if any(name.endswith("position_ids") for name in buffers) else set()
    if which == "save":
        return {name for name in names if name in patterns}
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}
