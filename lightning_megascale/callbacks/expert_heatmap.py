"""A picture of how evenly tokens are dealt to experts: layers x experts, around the even share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROWS_WITH_TEXT = 64  # more layers leave no room for a line of text each
_COLUMNS_WITH_CROSSES = 128  # crosses of more experts would touch


def draw_loads(loads: Sequence[Sequence[float]], labels: Sequence[str], title: str) -> Any:
    """A matplotlib figure.

    Colours go from blue (0) over white (1.0, the even share) to red (2 and more), which colour-blind readers tell apart; the range is the
    same in every picture, so pictures of one run can be compared. A cross marks an expert without any token; grey: nothing was counted, or
    there is no such expert. The right margin holds the largest share of each layer. Crosses and margin are left out where there is no room.

    Args:
        loads: of each layer, of each expert: assignments over the mean of the layer.
        labels: of the layers.
        title: of the picture.
    """
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows, columns = len(loads), max(map(len, loads))
    table = np.full((rows, columns), np.nan)
    for row, load in zip(table, loads):
        row[: len(load)] = load
    width, height = min(max(4.5 + 0.09 * columns, 6.5), 16), min(max(1.9 + 0.24 * rows, 3.0), 18)
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_facecolor("#b8b8b8")
    image = axes.imshow(table, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    dead = np.argwhere(table == 0)
    has_crosses = columns <= _COLUMNS_WITH_CROSSES
    if len(dead) and has_crosses:
        axes.scatter(dead[:, 1], dead[:, 0], marker="x", s=min(30.0, 2500 / columns), color="white", linewidths=0.9)
    axes.xaxis.set_major_locator(MaxNLocator(min(columns, 16), integer=True, min_n_ticks=1))
    axes.set(xlabel="expert", ylabel="layer", title=title, xlim=(-0.5, columns - 0.5))
    axes.set_yticks(range(0, rows, math.ceil(rows / _ROWS_WITH_TEXT)))
    axes.set_yticklabels([labels[row].removeprefix("layer_") for row in range(0, rows, math.ceil(rows / _ROWS_WITH_TEXT))])
    if rows <= _ROWS_WITH_TEXT:
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(rows), [f"{max(load):.1f}" if not math.isnan(load[0]) else "–" for load in loads])
        right.tick_params(length=0, labelsize=8, colors="#555555")
        right.spines[:].set_visible(False)
        right.set_ylabel("largest share", fontsize=8, color="#555555")
    if columns <= 64 and rows <= _ROWS_WITH_TEXT:  # thin lines between cells
        axes.set_xticks([column - 0.5 for column in range(1, columns)], minor=True)
        axes.set_yticks([row - 0.5 for row in range(1, rows)], minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    length = min(height - 0.9, 4.0)  # inches
    shape: dict[str, Any] = {"shrink": length / (height - 0.9), "aspect": length / 0.16, "extendfrac": 0.06, "anchor": (0.0, 1.0)}
    bar = figure.colorbar(image, extend="max", ticks=[0, 0.5, 1, 1.5, 2], **shape)
    bar.set_label(f"share of tokens (1: even{', ×: none' if has_crosses else ''})")
    bar.outline.set_visible(False)  # type: ignore[operator]
    return figure


def as_picture(figure: Any) -> Any:
    """(height, width, 3) uint8."""
    import numpy as np

    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def publish(figure: Any, loggers: Sequence[Any], step: int, folder: Path) -> Path | None:
    """Gives the picture to every W&B and TensorBoard logger, and writes ``moe_load_step{n}.png`` where there is none.

    Args:
        figure: of ``draw_loads``.
        loggers: the trainer's.
        step: of the optimizer.
        folder: of the file.

    Returns:
        the file, where one was written.
    """
    from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

    is_shown = False
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image("moe/load", [as_picture(figure)], step=step)
            is_shown = True
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure("moe/load", figure, global_step=step, close=False)
            is_shown = True
    if is_shown:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"moe_load_step{step}.png"
    figure.savefig(path)
    return path
