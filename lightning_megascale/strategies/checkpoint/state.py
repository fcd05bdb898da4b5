"""What of a module goes into a checkpoint, under canonical names, and what keeps a module and a checkpoint apart. No files, no ranks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical(name: str) -> str:
    """The name of a parameter without the parts that compile, recompute and FSDP1 wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@dataclass
class ModelState:
    """A module's ``state_dict()``, sorted by how each entry comes back.

    Args:
        tensors: canonical name -> the module's own parameter or persistent buffer, which a load fills in place.
        copies: canonical name -> a tensor that ``state_dict()`` made (torchmetrics, own overrides): loaded through ``load_state_dict``.
        objects: canonical name -> whatever else (``get_extra_state``).
        raw: canonical name -> the name in ``state_dict()``.
        tied: groups of names that are one tensor.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    copies: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, str] = field(default_factory=dict)
    tied: list[list[str]] = field(default_factory=list)

    def all_tensors(self) -> dict[str, Tensor]:
        return {**self.tensors, **self.copies}


def reshard(module: nn.Module) -> None:
    """Registers the sharded parameters again. After a forward without backward (validation) FSDP2 leaves the root's whole ones in place,
    which the optimizer does not know."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def model_state(module: nn.Module) -> ModelState:
    """Parameters and persistent buffers as the module itself declares them, DTensors as they are. Call ``reshard`` first."""
    resident = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}
    state = ModelState()
    by_id: dict[int, list[str]] = {}
    for raw, value in module.state_dict(keep_vars=True).items():
        name = canonical(raw)
        state.raw[name] = raw
        if not isinstance(value, Tensor):
            state.objects[name] = value
        elif id(value) in resident:
            state.tensors[name] = value
            by_id.setdefault(id(value), []).append(name)
        else:
            state.copies[name] = value
    state.tied = [names for names in by_id.values() if len(names) > 1]
    return state


def parameter_names(module: nn.Module) -> dict[int, list[str]]:
    """``id(parameter)`` -> its canonical names, the first being the one its optimizer state is kept under."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical(name))
    return names


def describe_mismatch(
    path: Any, missing: Sequence[str], unexpected: Sequence[str], shapes: Mapping[str, tuple[Sequence[int], Sequence[int]]]
) -> str | None:
    """One message for everything that keeps a module and a checkpoint apart; None when nothing does."""
    rows = []
    for name in missing[:20]:
        near = difflib.get_close_matches(name, unexpected, 1, cutoff=0.5)
        rows.append(f"  missing in the checkpoint: {name}" + (f" (nearest unused name there: {near[0]})" if near else ""))
    for name in unexpected[:20]:
        near = difflib.get_close_matches(name, missing, 1, cutoff=0.5)
        rows.append(f"  unexpected in the checkpoint: {name}" + (f" (nearest name without a value: {near[0]})" if near else ""))
    for name, (saved, current) in list(shapes.items())[:20]:
        rows.append(f"  other shape: {name} is {tuple(current)}, the checkpoint has {tuple(saved)}")
    if not rows:
        return None
    total = len(missing) + len(unexpected) + len(shapes)
    more = f"\n  and {total - len(rows)} more" if total > len(rows) else ""
    remedy = "build the saved model" + ("" if shapes else ", or set strict_loading=False on the LightningModule to load what fits")
    return f"checkpoint {path} does not fit the module:\n" + "\n".join(rows) + f"{more}\n{remedy}"


def some(names: Sequence[Any], most: int = 3) -> str:
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
