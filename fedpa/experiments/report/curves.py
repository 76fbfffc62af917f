"""Learning curves as in the paper: a mark per evaluation, a line for the 10-round average."""

from pathlib import Path

from fedpa.atomic_write import write_atomically
from fedpa.experiments.report.figures import (
    legend_below,
    legend_height,
    line_of,
    new_figure,
    rendered,
)
from fedpa.experiments.report.summary import (
    WINDOW,
    curve,
    mean_over_seeds,
    running_average,
    split_shown,
    switch_round,
)
from fedpa.experiments.report.table import Histories

MOST_INSIDE = 5
"""Methods whose names have room among the curves."""


def draw_curves(
    histories: Histories, metric: str, targets: tuple[float, ...], title: str, path: Path
) -> None:
    """Draw the metric against rounds, one line per method (the mean over seeds), to a PNG."""
    many = len(histories) > MOST_INSIDE
    figure = new_figure(7.0, 4.3 + (legend_height(list(histories)) if many else 0.0))
    axes = figure.subplots()
    for target in targets:
        axes.axhline(target, color="0.85", linewidth=0.8, zorder=0)
    for index, (method, runs) in enumerate(histories.items()):
        colour, style = line_of(index)
        curves = [curve(history, f"eval/{metric}") for history in runs]
        for c in curves:
            axes.plot(c.rounds, c.values, "x", color=colour, markersize=2.5, alpha=0.25)
        smooth = running_average(mean_over_seeds(curves))
        axes.plot(
            smooth.rounds, smooth.values, color=colour, linestyle=style, linewidth=1.8, label=method
        )
    switches = {switch_round(runs[0]) for runs in histories.values()}
    for switch in [t for t in switches if t is not None]:
        axes.axvline(switch, color="0.5", linestyle=(0, (1, 2)), linewidth=1.0)
        axes.annotate(
            "sampling begins",
            (switch, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8,
            color="0.35",
        )
    axes.set_xlabel("round")
    split = split_shown(next(iter(histories.values()))[0], metric)
    axes.set_ylabel(f"{split} {metric} (×), {WINDOW}-round average (line)")
    axes.set_title(title, fontsize=10, loc="left")
    if many:
        lines, labels = axes.get_legend_handles_labels()
        legend_below(figure, dict(zip(labels, lines, strict=True)))
    else:
        axes.legend(loc="lower right", frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    write_atomically(path, rendered(figure, "png"))
