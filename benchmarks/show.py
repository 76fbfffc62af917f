"""The results as tables and as one chart."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import NullFormatter
from rich.table import Table

from benchmarks.compare import Row, quartiles, ratios, share_of_peak, significant
from benchmarks.systems import OURS
from benchmarks.works import WORKS, Work
from fedpa.experiments.report.figures import new_figure, render_figure, tidy
from fedpa.experiments.report.looks import COLOURS, MARKERS

ORDER = [OURS, "fedjax", "pfl", "flower", "torch", "torch (sparse)", "torch (dense)"]


def make_table(work: Work, rows: Sequence[Row], peak: float) -> Table:
    """One work: who took how long, and whether it was the same work."""
    title = (
        f"{work.name}: {work.clients:,} × {work.examples} examples, batch {work.batch_size}, "
        f"{work.steps:,} steps a round"
    )
    view = _make_empty_table(
        title, "seconds: median (quartiles); peer / ours: median (smallest–largest)"
    )
    for column in ("system", "ms a round", "peer / ours", f"{work.scored}/s", "loss", "checked"):
        view.add_column(column, justify="left" if column in ("system", "checked") else "right")
    if work.model == "cnn":
        view.add_column("of peak", justify="right")
    view.add_column("versions")
    for row in rows:
        view.add_row(*_cells(work, row, peak))
    return view


def _cells(work: Work, row: Row, peak: float) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in row.versions.items())
    speed = share = time = "–"
    if row.seconds is not None:
        time = row.seconds.text(1e3)
        done = work.steps if work.scored == "steps" else work.clients
        speed = significant(done / row.seconds.median)
        share = f"{100 * share_of_peak(work, row.seconds.median, peak):.0f} %"
    return [
        row.system,
        time,
        "" if row.system == OURS else row.ratio.text() if row.ratio else "–",
        speed,
        "–" if row.loss is None else f"{row.loss:.4f}",
        row.status,
        *([share] if work.model == "cnn" else []),
        versions,
    ]


def methods_table(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> Table:
    view = _make_empty_table(
        "FedPA's round against FedAvg's, equal local steps",
        "5 epochs: 5 samples; median (quartiles); ratio: median (smallest–largest)",
    )
    for column in ("work", "FedAvg, ms", "FedPA, ms", "FedPA / FedAvg"):
        view.add_column(column, justify="left" if column == "work" else "right")
    for name, runs in found.items():
        ratio = ratios(runs["fedpa"], runs["fedavg"])
        times = [_time(runs[method]) for method in ("fedavg", "fedpa")]
        view.add_row(name, *times, ratio.text() if ratio else "–")
    return view


def scaling_table(rows: Mapping[str, Sequence[Row]]) -> Table:
    """Milliseconds per client as the number of clients grows."""
    view = _make_empty_table("ours, by the number of clients (logistic regression)", "")
    for column in ("clients", "ms a round", "µs a client"):
        view.add_column(column, justify="right")
    for name, found in rows.items():
        seconds = next((row.seconds for row in found if row.system == OURS), None)
        if WORKS[name].model == "logistic" and seconds is not None:
            clients = WORKS[name].clients
            view.add_row(f"{clients:,}", seconds.text(1e3), seconds.text(1e6 / clients))
    return view


def first_table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    view = _make_empty_table(
        "ours, first round of a fresh process, s", "process: imports, two rounds, evaluation"
    )
    view.add_column("work")
    for column in ("empty cache", "filled cache"):
        view.add_column(f"{column}: round", justify="right")
        view.add_column("process", justify="right")
    for name, runs in found.items():
        cells = []
        for run in runs.values():
            if "failed" in run:
                cells += [run["failed"], "–"]
            else:
                cells += [significant(run["warmup"][0]), significant(run["wall"])]
        view.add_row(name, *cells)
    return view


def deltas_table(found: Mapping[str, Any]) -> Table:
    view = _make_empty_table(
        "posterior delta, float32", "error: ‖Δ̂ − reference‖ / ‖reference‖, reference in float64"
    )
    for column in ("d", "ℓ", "recurrence, ms", "error", "posterior_delta, ms", "error", "ratio"):
        view.add_column(column, justify="right")
    for row in found.get("rows", []):
        compiled, host = row["recurrence"], row["host"]
        view.add_row(
            f"{row['d']:,}",
            str(row["samples"]),
            significant(1e3 * compiled["seconds"]),
            f"{compiled['error']:.1e}",
            significant(1e3 * host["seconds"]),
            f"{host['error']:.1e}",
            significant(compiled["seconds"] / host["seconds"]),
        )
    return view


def machine_lines(machine: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, "
        f"Python {machine['python']}",
        f"float32 matrix products (numpy {machine['numpy']}): {machine['peak'] / 1e9:.0f} GFLOP/s",
    ]
    if machine["others"] > 0.1:
        lines.append(
            f"warning: other processes took {100 * machine['others']:.0f} % of the cores during "
            "this run. Libraries that wait for their threads by spinning (PyTorch's) suffer most: "
            "these ratios do not hold on a machine that is idle otherwise"
        )
    return lines


def chart(rows: Mapping[str, Sequence[Row]], path: Path) -> None:
    """A panel per work: points of milliseconds a round, on a scale of factors."""
    shown = {name: [r for r in found if r.seconds] for name, found in rows.items()}
    shown = {name: found for name, found in shown.items() if found}
    columns = min(4, max(1, len(shown)))
    lines = max(1, -(-len(shown) // columns))
    figure = new_figure(3.4 * columns, 2.1 * lines)
    for place, (name, found) in enumerate(shown.items(), start=1):
        axes = figure.add_subplot(lines, columns, place)
        _points(axes, found)
        tidy(axes, name, "ms a round (log scale)", "")
        axes.tick_params(axis="y", length=0)
    path.write_bytes(render_figure(figure, "png"))


def _points(axes: Any, found: Sequence[Row]) -> None:
    for place, row in enumerate(reversed(found)):
        assert row.seconds is not None
        valid = row.status == "ok"
        middle = 1e3 * row.seconds.median
        colour = COLOURS[0] if row.system == OURS else "0.4"
        ends = [[middle - 1e3 * row.seconds.low], [1e3 * row.seconds.high - middle]]
        axes.errorbar(
            middle,
            place,
            xerr=ends,
            color=colour,
            marker=MARKERS[ORDER.index(row.system) % len(MARKERS)],
            markerfacecolor=colour if valid else "white",
            markersize=6,
            linewidth=1.0,
            capsize=2,
        )
        text = significant(middle)
        if row.ratio is not None:
            text += f" ({significant(row.ratio.median)}×)"
        if not valid:
            text += " invalid" if row.status.startswith("invalid") else " unchecked"
        axes.annotate(text, (1e3 * row.seconds.high, place), (8, 0),
                      textcoords="offset points", va="center_baseline", fontsize=7)  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    low = min(1e3 * row.seconds.low for row in found if row.seconds)
    high = max(1e3 * row.seconds.high for row in found if row.seconds)
    axes.set_xlim(low / 3, high * (high / low) ** 0.5 * 6)  # room for the numbers
    axes.set_yticks(range(len(found)), [row.system for row in reversed(found)])
    axes.set_ylim(-0.6, len(found) - 0.4)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _time(runs: Sequence[Mapping[str, Any]]) -> str:
    seconds = [s for run in runs if "failed" not in run for s in run["seconds"]]
    return quartiles(seconds).text(1e3) if seconds else runs[0]["failed"]


def _make_empty_table(title: str, caption: str) -> Table:
    return Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")
