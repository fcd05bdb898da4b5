"""Save under any plan, resume under any other: one torch.distributed.checkpoint folder per checkpoint, complete or not there.

``save`` and ``load`` are collective over their ``process_group`` (None: all ranks; without torch.distributed: this process alone), and
whatever goes wrong on one rank is raised on all of them. Everything else needs no process group.
"""

from lightning_megascale.strategies.checkpoint.exporting import export, reshard_checkpoint
from lightning_megascale.strategies.checkpoint.files import is_checkpoint, remove
from lightning_megascale.strategies.checkpoint.loading import load
from lightning_megascale.strategies.checkpoint.report import CheckpointReport, check, list_checkpoints, read_metadata
from lightning_megascale.strategies.checkpoint.saving import save
from lightning_megascale.strategies.checkpoint.single_file import save_single_file

__all__ = [
    "CheckpointReport",
    "check",
    "export",
    "is_checkpoint",
    "list_checkpoints",
    "load",
    "read_metadata",
    "remove",
    "reshard_checkpoint",
    "save",
    "save_single_file",
]
