"""The output of a comparison: progress, chosen settings, files."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fedpa.atomic_write import write_atomically
from fedpa.experiments.comparison.comparison import Choice, Planned, Show
from fedpa.experiments.report.comparison import Comparison
from fedpa.experiments.report.figures import draw_curves, render_figure
from fedpa.experiments.report.live import LINES, watch_run
from fedpa.experiments.report.page import make_page
from fedpa.experiments.report.tables import format_csv, format_latex, format_number, make_results
from fedpa.experiments.sweeps.space import format_value
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback

RATE = "_learning_rate"


def show_runs(
    console: Console,
    metric: str | None,
    quiet: bool,
    callbacks: Sequence[Callback] = (),
    lines: int = LINES,
) -> Show:
    """Make the progress display of a run; a tuning run shows only that it starts.

    Args:
        console: Where.
        metric: The metric whose best value is shown; higher is better.
        quiet: Show nothing.
        callbacks: Further callbacks of each run.
        lines: About how many lines a run prints without a terminal.
    """

    @contextlib.contextmanager
    def show(planned: Planned, width: int) -> Iterator[list[Callback]]:
        if planned.is_trial:
            if not quiet:
                console.print(planned.label, soft_wrap=True, markup=False, highlight=False)
            yield list(callbacks)
            return
        with watch_run(
            console,
            f"{planned.label:<{width}}",
            planned.run.rounds,
            metric=metric,
            past=run_directory.past(planned.out, planned.branch),
            quiet=quiet,
            lines=lines,
        ) as progress:
            yield [progress, *callbacks]

    return show


def make_choices_table(chosen: Mapping[str, Choice]) -> Table:
    """Make the table of trials, by entry's label."""
    names = {name for own in chosen.values() for name in own.best.settings}
    what = "rates" if all(name.endswith(RATE) for name in names) else "settings"
    view = Table(
        title=f"{what}, by {next(iter(chosen.values())).metric}",
        title_justify="left",
        caption="* chosen; ! chosen, at an end of the grid",
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    view.add_column("method", no_wrap=True)
    view.add_column("of", no_wrap=True)
    view.add_column(f"{what.removesuffix('s')}: value")
    for label, choice in chosen.items():
        trials, single = choice.trials, len(choice.best.settings) == 1
        ends = (trials[0], trials[-1]) if single else ()
        cells = []
        for trial in trials:
            mark = "" if trial is not choice.best else ("*!" if trial in ends else "*")
            value = "–" if trial.value is None else format_number(trial.value, ".4f")
            point = format_value(*trial.settings.values()) if single else _join(trial.settings)
            cells.append(f"{point}:\u00a0{value}{mark}")
        of = ", ".join(name.removesuffix(RATE) for name in choice.best.settings)
        view.add_row(label, of, "  ".join(cells))
    return view


def _join(settings: Mapping[str, Any]) -> str:
    """Format one setting with its name; of several only the values, in the order of the names."""
    return "(" + ", ".join(map(format_value, settings.values())) + ")"


def write_report(out: Path, comparison: Comparison) -> None:
    """Write `table.csv`, `table.tex`, `curves.png` and `report.html`."""
    with run_directory.writing(out):
        write_atomically(out / run_directory.TABLE, format_csv(comparison).encode())
        write_atomically(out / run_directory.LATEX, format_latex(make_results(comparison)).encode())
        curves = render_figure(draw_curves([comparison]), "png")
        write_atomically(out / run_directory.CURVES, curves)
        write_atomically(out / run_directory.REPORT, make_page([comparison]).encode())
