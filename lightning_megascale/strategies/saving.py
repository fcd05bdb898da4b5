"""Checkpoints of a run: what Lightning hands over goes to the checkpoint package, sharded and by name."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_megascale.parallel.layouts import target_of
from lightning_megascale.parallel.parallelize import Parallelized
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.strategies import checkpoint as checkpoints
from lightning_megascale.strategies import guards
from lightning_megascale.strategies.checkpoint.huggingface import tokenizers_of
from lightning_megascale.strategies.checkpoint.pretrained import InitFrom, Pretrained, open_pretrained
from lightning_megascale.strategies.ranks import Ranks


class Saving(Ranks):
    """The checkpoints of ``MegascaleStrategy``."""

    plan: ParallelPlan
    _done: Parallelized | None = None
    _module_name: str
    init_from: InitFrom | None = None

    def open_pretrained(self) -> Pretrained | None:
        """The weights of ``init_from``, matched with the module while it is whole; None without, and on a resume, which brings its own."""
        assert self.lightning_module is not None
        if self.init_from is None or _resumes():
            return None
        name, _ = target_of(self.lightning_module, self._module_name)
        return open_pretrained(
            self.init_from,
            self.lightning_module,
            name,
            strict=self.lightning_module.strict_loading,
            first_of_node=self.local_rank == 0,
            node=self.node_rank,
            group=self._control_group(),
            timeout=self._timeout,
        )

    def fill_from(self, pretrained: Pretrained) -> None:
        """Reads this rank's part of each tensor into the parallelized module."""
        assert self.lightning_module is not None
        shapes = None if self._done is None or self._done.pipeline is None else self._done.shapes
        size = pretrained.fill(self.lightning_module, shapes)
        rank_zero_info(f"init_from: weights of {self.init_from}" + (f", {size / 2**20:,.0f} MiB of them on rank 0" if size else ""))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}  # save_checkpoint takes it from the optimizer itself, sharded and by name

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise ValueError("storage_options is not used: a checkpoint is a folder written by torch.distributed.checkpoint")
        assert self.lightning_module is not None
        checkpoint["megascale"] = {"plan": dataclasses.asdict(self.plan) | {"activation_checkpointing": None, "compile": False}}
        path = self.broadcast(str(filepath))
        arguments = (checkpoint, self.lightning_module, self._raw_optimizers() if "optimizer_states" in checkpoint else [])
        if not self._save_distributed_checkpoint:
            checkpoints.save_single_file(path, *arguments)
            return
        peers = self.plan.model_parallel_size
        first = peers == 1 or self._is_first_of_data_rank()
        self._drop_whole_copies()
        checkpoints.save(
            path,
            *arguments,
            data_parallel_rank=self.data_parallel_rank,
            is_first_of_data_rank=first,
            tied=self._tied_names(),
            tokenizers=tokenizers_of(self.lightning_module, getattr(self.lightning_module.trainer, "datamodule", None)),
        )

    def _tied_names(self) -> list[list[str]]:
        """Groups of names below the LightningModule that are one parameter, of which pipeline stages hold copies."""
        if self._done is None or self._done.pipeline is None or self.lightning_module is None:
            return []
        prefix, _ = target_of(self.lightning_module, self._module_name)
        return [[f"{prefix}.{name}" for name in group] for group in self._done.pipeline.tied]

    def _is_first_of_data_rank(self) -> bool:
        """True on one of the ranks that share this rank's rows."""
        views = self.mesh_views
        return all(axis is None or axis.get_local_rank() == 0 for axis in (views.tensor, views.pipeline))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        path = self.broadcast(str(checkpoint_path))
        self._drop_whole_copies()
        found = checkpoints.read_metadata(path, weights_only) if os.path.isdir(path) else {}
        guards.refuse_batch_change(found.get("megascale", {}).get("plan", {}), self.plan)
        return checkpoints.load(
            path,
            self.lightning_module,
            self._raw_optimizers(),
            data_parallel_rank=self.data_parallel_rank,
            strict=self.lightning_module.strict_loading,
            weights_only=weights_only,
            shapes=None if self._done is None or self._done.pipeline is None else self._done.shapes,
        )

    def _raw_optimizers(self) -> list[Optimizer]:
        return [getattr(optimizer, "_optimizer", optimizer) for optimizer in self.optimizers]

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            checkpoints.remove(str(filepath))

    def _drop_whole_copies(self) -> None:
        """A forward without backward leaves FSDP2's gathered parameters behind; after a change of the shards they would be stale."""
        assert self._done is not None
        for unit in self._done.units:
            unit.reshard()


def _resumes() -> bool:
    """Whether the Trainer is going to load a checkpoint. It has the path in hand while it calls ``setup``, and says so only afterwards."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not Trainer._run.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and bool(frame.f_locals.get("ckpt_path"))
