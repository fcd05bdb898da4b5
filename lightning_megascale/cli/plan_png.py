"""The picture of a plan: the pipeline's timeline, the memory of each pipeline rank, and which GPU holds which coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_megascale.planning.memory import memory_by_rank
from lightning_megascale.planning.timeline import timeline
from lightning_megascale.support import SCHEDULES

if TYPE_CHECKING:
    from lightning_megascale.planning.estimates import Estimate
    from lightning_megascale.topology.placement import Placement

_KINDS = {"forward": "#4c78a8", "backward": "#f58518", "inputs": "#f58518", "weights": "#eeca3b"}
_PARTS = {"parameters": "#4c78a8", "gradients": "#72b7b2", "optimizer": "#54a24b", "unsharded": "#b279a2", "activations": "#f58518",
          "working": "#ff9da6", "logits": "#eeca3b", "buffers": "#9d755d", "reserve": "#bab0ac"}  # fmt: skip
_MOST_RANKS, _MOST_MICROBATCHES, _MOST_NODES = 16, 32, 16


def draw(plan: Estimate, path: str, placed: Placement | None = None) -> None:
    """Writes the picture.

    Args:
        plan: one estimate.
        placed: where its ranks stand; None: in the order of the cluster's nodes, pp outermost.
        path: of a PNG (or what else matplotlib writes by its suffix).

    Raises:
        ValueError: for a suffix that matplotlib does not write.
    """
    from matplotlib.figure import Figure

    from lightning_megascale.cli.plan_table import axes

    figure = Figure(figsize=(15, 12), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, gridspec_kw={"height_ratios": [1.0, 0.8, 1.2]})
    work, good = plan.setting.workload, plan.goodput
    figure.suptitle(
        f"{work.model.name} on {plan.gpus:,} GPUs of {plan.setting.cluster.name}: {axes(plan)}\n"
        f"{plan.step_seconds:.3g} s a step, goodput {good.share:.1%}, {good.seconds_per_useful_step:.3g} s a useful step (estimates)"
    )
    _timeline(top, plan)
    _memory(middle, plan)
    _placement(bottom, plan, placed)
    figure.savefig(path, dpi=110)


def _timeline(axis: Any, plan: Estimate) -> None:
    """Forwards and backwards of the pipeline ranks; every stage is drawn as long as the longest."""
    columns = {name: int(column[0]) for name, column in plan.candidates.columns().items()}
    ranks, each, schedule = columns["pp"], columns["stages_per_rank"], SCHEDULES[columns["schedule"]]
    total = int(plan.candidates.microbatches(plan.setting.workload.global_batch_size)[0])
    shown = min(total, max(_MOST_MICROBATCHES, 2 * ranks))
    shown -= shown % ranks if shown > ranks else 0
    busy = (plan.step_seconds - float(plan.time.bubble[0] + plan.time.optimizer[0] + plan.time.data[0])) / total / each
    share = 1 / 3  # a backward is twice a forward, but for what it runs again
    again = float(plan.time.recompute[0]) / total / each
    forward = (busy - again) * share
    stages = ranks * each
    pieces = timeline(
        schedule, ranks=ranks, stages_per_rank=each, microbatches=shown, forward=[forward] * stages,
        backward_inputs=[forward + again] * stages, backward_weights=[forward] * stages,
    )  # fmt: skip
    for rank in range(min(ranks, _MOST_RANKS)):
        for kind, color in _KINDS.items():
            own = [(piece.start, piece.end - piece.start) for piece in pieces if piece.rank == rank and piece.kind == kind]
            axis.broken_barh(own, (rank - 0.42, 0.84), facecolors=color, edgecolor="white", linewidth=0.4)
        if len(pieces) <= 1500:
            for piece in pieces:
                if piece.rank == rank and piece.kind != "weights":
                    axis.text((piece.start + piece.end) / 2, rank, piece.microbatch, ha="center", va="center", fontsize=6, color="white")
    axis.set_ylim(min(ranks, _MOST_RANKS) - 0.4, -0.6)
    axis.set_yticks(range(min(ranks, _MOST_RANKS)))
    axis.set_xlabel("seconds")
    axis.set_ylabel("pipeline rank")
    more = f", the first {shown} of {total} microbatches" if shown < total else f", {total} microbatch{'es'[: 2 * (total > 1)]}"
    fewer = f", {_MOST_RANKS} of {ranks} ranks" if ranks > _MOST_RANKS else ""
    name = f"{schedule}" if ranks > 1 else "no pipeline"
    axis.set_title(f"timeline: {name}{more}{fewer}; {plan.bubble_share:.1%} of the step is bubble", loc="left", fontsize=10)
    axis.legend(handles=_patches(_used_kinds(pieces)), loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


def _used_kinds(pieces: Any) -> Mapping[str, str]:
    names = {"inputs": "gradients of inputs", "weights": "gradients of weights"}
    return {names.get(kind, kind): color for kind, color in _KINDS.items() if any(piece.kind == kind for piece in pieces)}


def _memory(axis: Any, plan: Estimate) -> None:
    """Bytes of each pipeline rank by kind, below what a GPU has."""
    setting = plan.setting
    by_rank = memory_by_rank(setting.workload, setting.cluster, setting.stack, plan.candidates)
    number = len(by_rank)
    below = np.zeros(number)
    for name, color in _PARTS.items():
        values = np.array([float(getattr(memory, name)[0]) for memory in by_rank]) / 1e9
        axis.bar(range(number), values, bottom=below, color=color, label=name, width=0.8)
        below += values
    axis.axhline(setting.memory_bytes / 1e9, color="black", linestyle="--", linewidth=1)
    axis.text(number - 0.5, setting.memory_bytes / 1e9, " what a GPU has", va="bottom", ha="right", fontsize=8)
    axis.set_xticks(range(number) if number <= 32 else range(0, number, 8))
    axis.set_xlim(-0.6, number - 0.4)
    axis.set_ylim(0, 1.15 * max(setting.memory_bytes / 1e9, float(below.max())))
    axis.set_xlabel("pipeline rank")
    axis.set_ylabel("GB")
    axis.set_title(f"memory: {plan.memory_bytes / 1e9:.1f} GB where it is most", loc="left", fontsize=10)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


def _placement(axis: Any, plan: Estimate, placed: Placement | None) -> None:
    """GPUs of the first nodes, coloured by pipeline rank, with the coordinates of the rank that each holds."""
    from matplotlib import colormaps

    columns = {name: int(column[0]) for name, column in plan.candidates.columns().items()}
    names = [name for name in _AXES if columns[name] > 1]
    per_node = min(plan.setting.cluster.gpus_per_node, plan.gpus)
    nodes = min(-(-plan.gpus // per_node), _MOST_NODES)
    grid = np.arange(plan.gpus) if placed is None else np.array(placed.strategy_placement)
    places = np.unravel_index(np.argsort(grid), [columns[name] for name in _AXES])  # of each rank
    hosts = [node.name for node in plan.setting.cluster.nodes[:nodes]] if placed is None else list(placed.hosts[:nodes])
    colors = colormaps["tab20"]
    for gpu in range(nodes * per_node):
        node, slot = divmod(gpu, per_node)
        place = {name: int(places[number][gpu]) for number, name in enumerate(_AXES) if name in names}
        hue = place.get("dp_shard", place.get("dp_replicate", 0)) if columns["pp"] == 1 else place.get("pp", 0)
        axis.add_patch(_square(slot, node, colors(int(hue) % 20)))
        words = " ".join(f"{_SHORT[name]}{int(value)}" for name, value in place.items())
        axis.text(slot + 0.5, node + 0.5, words, ha="center", va="center", fontsize=7)
    axis.set_xlim(0, per_node)
    axis.set_ylim(nodes, 0)
    axis.set_xticks(np.arange(per_node) + 0.5, [f"GPU {slot}" for slot in range(per_node)], fontsize=8)
    axis.set_yticks(np.arange(nodes) + 0.5, hosts, fontsize=7)
    fewer = f": the first {nodes} of {-(-plan.gpus // per_node):,} nodes" if plan.gpus > nodes * per_node else ""
    shown = ", ".join(f"{_SHORT[name]} {name}" for name in names) or "one rank"
    order = "in the order of the nodes" if placed is None else f"{placed.seconds:.3g} s of the slowest link"
    axis.set_title(f"placement, {order}{fewer} ({shown})", loc="left", fontsize=10)


_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_SHORT = {"pp": "p", "dp_replicate": "r", "dp_shard": "s", "cp": "c", "tp": "t"}


def _square(left: float, top: float, color: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left + 0.03, top + 0.06), 0.94, 0.88, facecolor=color, alpha=0.55, edgecolor="white")


def _patches(colors: Mapping[str, str]) -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=color, label=name) for name, color in colors.items()]
