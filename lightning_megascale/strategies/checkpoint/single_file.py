"""One plain ``.ckpt`` file from sharded ranks: everything gathered to rank 0, in the layout of the plain Trainer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megascale.strategies.checkpoint import files
from lightning_megascale.strategies.checkpoint.optimizer import NOT_AN_OPTION, unwrap
from lightning_megascale.strategies.checkpoint.state import model_state, parameter_names, reshard
from lightning_megascale.strategies.checkpoint.together import broadcast, rank_of, together


def save_single_file(
    path: str | os.PathLike,
    checkpoint: dict[str, Any],
    module: nn.Module,
    optimizers: Sequence[Any] = (),
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Writes one file that a plain Trainer, ``load_from_checkpoint`` and ``load`` read. Collective; rank 0's host holds the whole state.

    Tensors are gathered one at a time. Optimizer state is numbered as torch numbers it, with the names beside (``param_names``).

    Args:
        path: the file; replaced in one step when the new one is complete. Rank 0's value counts.
        checkpoint: Lightning's dict; ``state_dict`` and ``optimizer_states`` in it are replaced.

    Raises:
        RuntimeError: on every rank, when rank 0 could not write.
    """
    group = process_group
    target, token = broadcast((str(path), secrets.token_hex(4)), group)
    what = f"checkpoint {target} was not written"
    file = together(what, lambda: files.local_path(target), group)
    keep = rank_of(group) == 0
    reshard(module)
    state = model_state(module)
    gathered: dict[int, Tensor | None] = {}  # tied parameters stay one tensor
    weights: dict[str, Any] = dict(state.objects)
    for name, tensor in state.all_tensors().items():
        if id(tensor) not in gathered:
            gathered[id(tensor)] = _gathered(tensor, keep)
        weights[name] = gathered[id(tensor)]
    names = parameter_names(module)
    states = [_numbered(unwrap(optimizer), names, keep) for optimizer in optimizers]

    def write() -> None:
        if not keep:
            return
        content = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        content["state_dict"] = weights
        if optimizers:
            content["optimizer_states"] = states
        temporary = file.with_name(f"{file.name}.tmp-{token}")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            files.write_pickled(content, temporary)
            files.commit(temporary, file)
        finally:
            files.remove(temporary)

    together(what, write, group)


def _gathered(tensor: Tensor, keep: bool) -> Tensor | None:
    """The whole tensor on rank 0's host; None elsewhere (all ranks of its mesh take part)."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu().clone() if keep else None


def _numbered(optimizer: Optimizer, names: dict[int, list[str]], keep: bool) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in optimizer.param_groups:
        numbers = []
        for parameter in group["params"]:
            entries = optimizer.state.get(parameter, {})
            if entries:
                state[number] = {k: _gathered(v, keep) if isinstance(v, torch.Tensor) else v for k, v in entries.items()}
            numbers.append(number)
            number += 1
        options = {key: value for key, value in group.items() if key not in NOT_AN_OPTION}
        groups.append({**options, "params": numbers, "param_names": [names[id(p)][0] for p in group["params"]]})
    return {"state": state, "param_groups": groups}
