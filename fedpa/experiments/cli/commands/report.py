"""`fedpa report`: one self-contained page of runs and comparisons, with figures."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedpa.errors import refuse
from fedpa.experiments.cli.arguments import format_path, parse_words, say
from fedpa.experiments.report.comparison import Comparison, compare_groups
from fedpa.experiments.report.figures import FIGURES, draw_figures
from fedpa.experiments.report.page import make_page
from fedpa.experiments.report.runs import check_tasks, find_runs, group_runs
from fedpa.experiments.report.tables import (
    COLUMNS,
    format_csv,
    format_latex,
    make_results,
    parse_columns,
)
from fedpa.experiments.staged_files import remove_leftovers, write_together
from fedpa.training.run_directory import check_writable, writing

TABLES = ("table.csv", "table.tex")


@dataclasses.dataclass(frozen=True)
class ReportCommand:
    """Write one HTML page that summarizes runs and comparisons, and its figures.

    examples:
      fedpa report runs/c                       report.html of a comparison
      fedpa report runs/a runs/b --out ab.html  a page of two runs
      fedpa report runs/c --columns method,final,difference
                                                choose the table columns
    """

    directories: tuple[Path, ...] = dataclasses.field(
        default=(), metadata={"positional": "DIR [DIR …]"}
    )
    """Runs, finished or not, or directories that contain runs, as fedpa compare writes them."""
    out: Path = Path("report.html")
    """Page to write; report-table.csv, report-table.tex, report-curves.png, … go next to it."""
    figures: bool = True
    """Write the figures as PNG and PDF; --no-figures writes the page alone."""
    columns: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": f"Columns of the tables, in this order: {', '.join(COLUMNS)}. rejected counts "
            "the clients whose update was not finite, over all rounds and seeds (default: all)."
        },
    )
    mixed: bool = False
    """Allow runs of different tasks; each task has its own curves and table."""
    reference: str | None = None
    """Method that the others are compared with, by name or label (default: fedavg if it takes
    part, else the first)."""
    overwrite: bool = False
    """Replace existing files."""


def main(argv: Sequence[str], console: Console) -> None:
    command = parse_words(ReportCommand, argv, "fedpa report")
    columns = parse_columns(command.columns)
    _check_out(command)
    runs = find_runs(command.directories)
    if not command.mixed:
        check_tasks(runs)
    comparisons = compare_groups(group_runs(runs), command.reference)
    for part in comparisons:
        there = make_results(part).names
        if columns and not set(columns) & set(there):
            reason = f"the runs have {', '.join(dict.fromkeys(there))}"
            raise refuse("columns", command.columns, reason)
    page = make_page(comparisons, columns)
    files = dict(zip(TABLES, _format_tables(comparisons, columns), strict=True))
    files |= draw_figures(comparisons) if command.figures else {}
    beside = {_beside(command.out, name).name: content for name, content in files.items()}
    with writing(command.out):
        # The page comes last: where it is, its tables and figures are.
        write_together(command.out, {**beside, command.out.name: page.encode()})
    said = f"written {format_path(command.out)} ({len(runs)} {'run' if len(runs) == 1 else 'runs'})"
    say(console, f"{said}, and {', '.join(beside)}" if beside else said)


def _format_tables(
    comparisons: Sequence[Comparison], columns: Sequence[str]
) -> tuple[bytes, bytes]:
    """Format the tables as CSV and as LaTeX."""
    latex = "\n".join(format_latex(make_results(part).select(columns)) for part in comparisons)
    return format_csv(*comparisons, columns=columns).encode(), latex.encode()


def _check_out(command: ReportCommand) -> None:
    out = command.out
    if out.suffix != ".html":
        raise refuse("out", str(out), "must end in .html")
    if out.is_dir():
        raise refuse("out", str(out), "is a directory: give a file that ends in .html")
    check_writable(out.parent)
    remove_leftovers(out)
    if command.overwrite:
        return
    names = (*TABLES, *(FIGURES if command.figures else ()))
    for path in [out, *(_beside(out, name) for name in names)]:
        if path.exists():
            raise refuse("out", str(out), f"{path.name} exists: choose another or give --overwrite")


def _beside(out: Path, name: str) -> Path:
    return out.with_name(f"{out.stem}-{name}")
