"""What a step leaves on the LightningModule (lists it appends to, counters, buffers): captured steps leave nothing, the last stage's goes
to every rank."""

from __future__ import annotations

import pickle
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_megascale.strategies import pipeline_guards as guards

_PLAIN = (bool, int, float, str, type(None))


class ModuleState:
    """The public attributes of a module that are lists, dicts, numbers, texts or tensors, and its buffers outside the pipelined model.

    Args:
        module: the LightningModule.
        model: its pipelined child, whose buffers belong to their stages.
    """

    def __init__(self, module: pl.LightningModule, model: nn.Module) -> None:
        self._module = module
        inside = {id(buffer) for buffer in model.buffers()}
        self._buffers = {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in inside}

    def snapshot(self) -> dict[str, Any]:
        """Values before a step: lists and dicts by their entries, a tensor by a copy."""
        found: dict[str, Any] = {}
        for name, value in vars(self._module).items():
            if name.startswith("_") or name in ("training", "log"):
                continue
            if isinstance(value, list):
                found[name] = ("list", value, list(value))
            elif isinstance(value, dict):
                found[name] = ("dict", value, dict(value))
            elif isinstance(value, _PLAIN):
                found[name] = ("plain", value, None)
            elif isinstance(value, Tensor):
                found[name] = ("tensor", value, value.detach().clone())
        for name, buffer in self._buffers.items():
            found[f"buffer {name}"] = ("buffer", buffer, buffer.detach().clone())
        return found

    def restore(self, before: dict[str, Any]) -> None:
        """Undoes what a captured step did."""
        for name in [name for name in vars(self._module) if self._is_ours(name) and name not in before]:
            del self._module.__dict__[name]
        for name, (kind, value, kept) in before.items():
            if kind == "list":
                value[:] = kept
            elif kind == "dict":
                value.clear()
                value.update(kept)
            elif kind in ("tensor", "buffer"):
                with torch.no_grad():
                    value.copy_(kept)
            if kind != "buffer":
                self._module.__dict__[name] = value

    def _is_ours(self, name: str) -> bool:
        value = vars(self._module)[name]
        return not name.startswith("_") and name not in ("training", "log") and isinstance(value, (list, dict, Tensor, *_PLAIN))

    def changes(self, before: dict[str, Any]) -> dict[str, Any]:
        """What the last stage's step left, by name: the items a list grew by, whole values of all else."""
        found: dict[str, Any] = {}
        for name in [name for name in vars(self._module) if self._is_ours(name)]:
            value = vars(self._module)[name]
            kind, old, kept = before.get(name, ("new", None, None))
            if kind == "list" and value is old and len(value) >= len(kept) and all(a is b for a, b in zip(value, kept)):
                if len(value) > len(kept):
                    found[name] = ("grown", value[len(kept) :])
            elif kind == "dict" and value is old:
                if value.keys() != kept.keys() or any(value[key] is not kept[key] for key in value):
                    found[name] = ("set", value)
            elif kind == "plain":
                if value is not old and value != old:
                    found[name] = ("set", value)
            elif kind == "tensor" and isinstance(value, Tensor) and value.shape == kept.shape:
                if not torch.equal(value, kept):
                    found[name] = ("set", value)
            else:
                found[name] = ("set", value)
        for name, buffer in self._buffers.items():
            if not torch.equal(buffer, before[f"buffer {name}"][2]):
                found[f"buffer {name}"] = ("buffer", buffer)
        return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), found)

    def share(self, changed: dict[str, Any] | None, has_changes: bool, group: dist.ProcessGroup, owner: int, device: torch.device) -> None:
        """Gives the last stage's changes to all ranks.

        Args:
            changed: on the owner what ``changes`` found.
            has_changes: equal on all ranks: whether there is anything to send.
            group, owner, device: the pipeline axis, the last stage's place in it, and where tensors go.
        """
        if not has_changes:
            return
        sent: list[Any] = [None]
        is_owner = dist.get_rank(group) == owner
        if is_owner:
            try:
                sent = [pickle.dumps(changed)]
            except Exception as error:  # noqa: BLE001 - told to all ranks, which would wait for ever
                sent = [guards.STATE.format(names=", ".join(changed or ()), error=f"{type(error).__name__}: {error}")]
        dist.broadcast_object_list(sent, group_src=owner, group=group, device=device)
        if isinstance(sent[0], str):
            raise ValueError(sent[0])
        if is_owner:
            return
        for name, (kind, value) in pickle.loads(sent[0]).items():
            value = tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
            if kind == "buffer":
                with torch.no_grad():
                    self._buffers[name.removeprefix("buffer ")].copy_(value)
            elif kind == "grown" and isinstance(vars(self._module).get(name), list):
                vars(self._module)[name].extend(value)
            else:
                self._module.__dict__[name] = value
