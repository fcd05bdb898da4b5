"""Where pretrained weights lie: a path that every rank sees, or a repository of the Hugging Face hub, fetched once for each node."""

from __future__ import annotations

import difflib
import os
import re
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lightning_megascale.strategies.checkpoint.state import some
from lightning_megascale.strategies.checkpoint.together import broadcast, distributed, gather, rank_of, together

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"]


def find_weights(
    path: str | os.PathLike,
    *,
    first_of_node: bool,
    node: int,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta = timedelta(minutes=30),
) -> Path:
    """The place of pretrained weights on this rank. Collective.

    Args:
        path: a file or folder, or ``organization/name`` or ``organization/name@revision`` of the hub when there is no such folder. Rank 0's
            value counts.
        first_of_node: True on one rank of each node, which downloads for all of them.
        node: the number of this rank's node.
        group: one whose waits need no GPU (gloo).
        timeout: how long to wait for the downloads.

    Raises:
        ValueError: on all ranks, when there is nothing, or not on every rank.
        RuntimeError: on all ranks, for a download that failed, or ranks that did not come back from theirs.
    """
    text = os.path.expanduser(str(broadcast(str(path), group)))
    there = gather(os.path.exists(text), group)
    if all(there):
        return Path(text)
    if any(there):
        absent = [rank for rank, found in enumerate(there) if not found]
        raise ValueError(
            f"init_from={text}: {sum(there)} of {len(there)} ranks see it, and rank {some(absent)} not: every node needs it at this path, "
            "on a file system that all share or as a copy of its own"
        )
    if not _REPOSITORY.fullmatch(text):
        raise ValueError(
            f"init_from={text}: there is no such file or folder{_near(Path(text))}; nor is that a name of the hub, such as org/name"
        )
    return _downloaded(text, first_of_node, node, group, timeout)


def _downloaded(text: str, first_of_node: bool, node: int, group: dist.ProcessGroup | None, timeout: timedelta) -> Path:
    """The first rank of each node downloads, the others wait for all of them, and learn the place from their own."""
    repository, _, revision = text.partition("@")
    place: str | None = None
    failed: Exception | None = None
    if first_of_node:
        try:
            place = str(_download(repository, revision or None))
        except Exception as error:  # noqa: BLE001 raised below, on all ranks together
            failed = error
    _wait_for_all(text, group, timeout)

    def report() -> None:
        if failed is not None:
            cause = (str(failed).splitlines() or [type(failed).__name__])[0]
            raise RuntimeError(
                f"there is no folder {text} here, and the hub's repository {repository} could not be downloaded ({cause}). Without a "
                "network, give the path of a folder (or fill the hub's cache and set HF_HUB_OFFLINE=1)"
            ) from failed

    together(f"init_from={text}", report, group)
    places = dict(found for found in gather((node, place), group) if found[1] is not None)
    if node not in places:
        raise ValueError(f"init_from={text}: no rank of node {node} has LOCAL_RANK 0, so nobody downloaded for it; set LOCAL_RANK per node")
    return Path(places[node])


def _wait_for_all(text: str, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Waits until every rank has come, and says which have not."""
    if not distributed() or dist.get_world_size(group) == 1:
        return
    try:
        dist.monitored_barrier(group, timeout=timeout, wait_all_ranks=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"init_from={text}: rank {rank_of(group)} waited {timeout} for the ranks that download for their nodes, and some did not come "
            f"back: {error}"
        ) from error


def _download(repository: str, revision: str | None) -> str:
    """Weights and config of a repository, through the hub's cache (HF_HOME)."""
    from huggingface_hub import snapshot_download

    return snapshot_download(repository, revision=revision, allow_patterns=_FILES)


def _near(path: Path) -> str:
    """What is there instead."""
    if not path.parent.is_dir():
        return f", nor its folder {path.parent}"
    near = difflib.get_close_matches(path.name, [child.name for child in path.parent.iterdir()], 1, cutoff=0.5)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
