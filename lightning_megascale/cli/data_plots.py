"""The pictures of ``megascale data stats``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_megascale.cli.data_stats import edges_of

if TYPE_CHECKING:
    from lightning_megascale.cli.data_mix import MixStats

COLORS = ("#4477aa", "#ee8866", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#bbbbbb")  # Tol's bright set


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")


def _save(figure: Any, out: str) -> str:
    from matplotlib import pyplot

    path = Path(out).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return f"picture: {path}"


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _short(name: str, most: int = 48) -> str:
    return name if len(name) <= most else f"…{name[-most:]}"


def save_shards(sets: Sequence[tuple[str, str, np.ndarray, np.ndarray]], out: str) -> str:
    """One line of panels for each set: lengths of its samples, sizes of its pictures.

    Args:
        sets: name, what lengths count, lengths (n,), heights and widths of pictures (m, 2).
        out: file.
    """
    figure, axes = _figure(len(sets), 2, 11, 3.4 * len(sets))
    for (name, what, lengths, pictures), (left, right) in zip(sets, axes):
        if len(lengths):
            edges = edges_of(lengths, 40)
            left.hist(lengths, edges, color=COLORS[0], edgecolor="white", linewidth=0.5)
            if len(edges) > 2 and edges[2] - edges[1] != edges[1] - edges[0]:
                left.set_xscale("log", base=2)
                left.set_xticks(edges, [f"{edge:,}" for edge in edges], rotation=45 if len(edges) > 8 else 0)
                left.minorticks_off()
            left.axvline(float(lengths.mean()), color=COLORS[1], label=f"mean {lengths.mean():,.0f}")
            left.legend(frameon=False)
        else:
            _nothing(left, "no lengths")
        left.set(title=_short(name), xlabel=what, ylabel="samples")
        if len(pictures):
            places, counts = np.unique(pictures, axis=0, return_counts=True)
            area = np.clip(12 + 120 * counts / counts.max(), 12, None)
            right.scatter(places[:, 1], places[:, 0], s=area, color=COLORS[2], alpha=0.45, linewidth=0)
            most = 1.08 * float(pictures.max())
            right.plot([0, most], [0, most], color="#cccccc", linewidth=0.8, zorder=0)
            right.set(xlim=(0, most), ylim=(0, most), aspect="equal", xlabel="width, pixels", ylabel="height, pixels")
        else:
            _nothing(right, "no pictures")
        right.set(title=f"{len(pictures):,} pictures")
    return _save(figure, out)


def _nothing(axis: Any, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", color="#888888", transform=axis.transAxes)
    axis.set(xticks=[], yticks=[])


def save_mix(found: MixStats, out: str) -> str:
    """Shares along the run, amounts by stage, epochs by source, and lengths of samples where they were counted."""
    figure, ((shares, amounts), (epochs, lengths)) = _figure(2, 2, 13, 8.5)
    _shares(shares, found)
    _amounts(amounts, found)
    _epochs(epochs, found)
    _lengths(lengths, found)
    figure.legend(*amounts.get_legend_handles_labels(), loc="outside lower center", ncols=min(len(found.sources), 6), frameon=False)
    return _save(figure, out)


def _shares(axis: Any, found: MixStats) -> None:
    edges, drawn, wanted = found.curve
    for number in range(len(found.sources)):
        axis.stairs(drawn[:, : number + 1].sum(1), edges, baseline=drawn[:, :number].sum(1), fill=True, color=_color(number), alpha=0.8)
        axis.stairs(wanted[:, : number + 1].sum(1), edges, baseline=None, color="black", linewidth=0.9, linestyle=(0, (4, 3)))
    for stage in found.stages:
        axis.axvline(stage.start, color="white", linewidth=2)
        axis.text((stage.start + stage.end) / 2, 1.015, _short(stage.name, 16), ha="center", fontsize=9)
    axis.set(xlim=(0, edges[-1]), ylim=(0, 1), xlabel="position of the run", ylabel=f"share of {found.unit}")
    axis.set_title("drawn (colours) and wanted (dashes)", pad=20)
    _round_numbers(axis)


def _round_numbers(axis: Any) -> None:
    """Few labels, such as 250k: whole numbers of many digits run into each other."""
    from matplotlib.ticker import EngFormatter

    axis.locator_params(axis="x", nbins=7)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def _amounts(axis: Any, found: MixStats) -> None:
    """Tokens by stage and source where counted, else samples."""
    left = np.zeros(len(found.stages))
    names = [_short(stage.name, 20) for stage in found.stages]
    for number, source in enumerate(found.sources):
        values = np.array([(stage.tokens or stage.samples)[number] for stage in found.stages], float)
        axis.barh(names, values, left=left, color=_color(number), label=_short(source, 30))
        left += values
    for place, stage in enumerate(found.stages):
        text = f" {stage.padding:.1%} padding" if stage.padding is not None else f" {stage.end - stage.start:,}"
        axis.text(left[place], place, text, va="center", fontsize=9)
    what = "tokens" if found.lengths is not None else "samples"
    axis.set(title=f"{what} of each stage", xlabel=what, xlim=(0, 1.25 * left.max()))
    _round_numbers(axis)
    axis.invert_yaxis()


def _epochs(axis: Any, found: MixStats) -> None:
    names = [_short(source, 30) for source in found.sources]
    axis.barh(names, found.epochs, color=[_color(number) for number in range(len(names))])
    for place, value in enumerate(found.epochs):
        axis.text(value, place, f" {value:,.2f}", va="center", fontsize=9)
    axis.axvline(1, color="#888888", linewidth=0.8, linestyle=":")
    axis.set(title="epochs of each source over the run", xlabel="epochs", xlim=(0, 1.15 * max(*found.epochs, 1)))
    axis.invert_yaxis()


def _lengths(axis: Any, found: MixStats) -> None:
    if found.lengths is None:
        _nothing(axis, "with tokenizer=FOLDER: lengths of samples in tokens")
        return
    together = np.concatenate(list(found.lengths.values()))
    edges = edges_of(np.maximum(together, 1), 40)
    for number, source in enumerate(found.sources):
        values = np.maximum(found.lengths[source], 1)
        axis.hist(values, edges, weights=np.full(len(values), 1 / len(values)), histtype="step", linewidth=1.8, color=_color(number))
    if len(edges) > 2 and edges[2] - edges[1] != edges[1] - edges[0]:
        axis.set_xscale("log", base=2)
        axis.set_xticks(edges, [f"{edge:,}" for edge in edges], rotation=45 if len(edges) > 8 else 0)
        axis.minorticks_off()
    axis.set(title="lengths of samples", xlabel="tokens", ylabel="share of the source's samples")
