"""A study: what is measured, how it is drawn, what is said of it. One file per study.

Measuring gives rows, tidy: one per measured value, with named columns. Drawing and reporting see
the rows alone, as they are read back from the CSV, so that the file is enough to redraw the figure.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from fedpa.errors import FedpaError, explain
from fedpa.experiments.report.bootstrap import band_of_mean
from fedpa.experiments.report.figures import COLOURS, STYLES
from fedpa.lazy import find_components

Row = dict[str, Any]
Knob = Literal["seeds", "repeats"]
STAMP = ("seed", "size", "versions")
"""The columns that say what made a row."""
DIGITS = 5
"""Significant digits of a measured value in the CSV."""


class Settings(NamedTuple):
    quick: bool
    """A smaller version that shows the same directions, in at most about a minute."""
    seed: int
    repeats: int
    """How many seeds or repeats, as the study's knob says."""
    tell: Callable[[float, str], None]
    """(fraction done, what is being done): progress for a person to watch."""


class Study(NamedTuple):
    summary: str
    columns: tuple[str, ...]
    """What identifies a value; `quantity` and `value` follow."""
    knob: Knob
    repeats: tuple[int, int]
    """How many of them at full size, and in quick mode."""
    measure: Callable[[Settings], list[Row]]
    draw: Callable[[Sequence[Row]], Figure]
    findings: Callable[[Sequence[Row]], list[Table | str]]
    """What is printed at the end."""
    extras: Callable[[Sequence[Row]], dict[str, bytes]] = lambda rows: {}
    """Further files, by name."""


def studies() -> dict[str, Study]:
    """All studies: every file of this package that defines `STUDY`, by its name with dashes."""
    return find_components("fedpa.experiments.studies", "STUDY")


def size(quick: bool) -> str:
    return "quick" if quick else "full"


def make_rows(about: Row, values: Mapping[str, Any]) -> list[Row]:
    """A row for each quantity, with the columns of `about`."""
    return [about | {"quantity": name, "value": float(value)} for name, value in values.items()]


def as_csv(study: Study, rows: Iterable[Row], seed: int, quick: bool) -> str:
    """The rows as CSV; what made them is part of every row."""
    made_by = f"fedpa {version('fedpa')} jax {version('jax')}"
    stamp = dict(zip(STAMP, (seed, size(quick), made_by), strict=True))
    names = [*study.columns, "quantity", "value", *stamp]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        unknown = set(row) - set(names)
        if unknown:
            raise FedpaError(f"row has columns {sorted(unknown)}: the study names {names}")
        writer.writerow({k: _written(v) for k, v in row.items()} | stamp)
    return text.getvalue()


def _written(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return f"{float(value):.{DIGITS}g}"
    return value


def read_csv(path: Path) -> list[Row]:
    """The rows of a study's CSV: numbers as numbers, what is empty left out."""
    try:
        return parse_csv(path.read_text())
    except OSError as error:
        raise FedpaError(f"{str(path)!r} can't be read: {explain(error)}") from None
    except (KeyError, ValueError, csv.Error):
        raise FedpaError(f"{str(path)!r} is no CSV of a study") from None


def parse_csv(content: str) -> list[Row]:
    return [_row(record) for record in csv.DictReader(io.StringIO(content))]


def _row(record: dict[str, str]) -> Row:
    row = {name: _read(text) for name, text in record.items() if text}
    return row | {"value": float(row["value"])}


def _read(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def where(rows: Sequence[Row], **values: Any) -> list[Row]:
    """The rows that have all these values; None stands for a column left empty."""
    return [row for row in rows if all(row.get(k) == v for k, v in values.items())]


def distinct(rows: Sequence[Row], column: str) -> list[Any]:
    """The values of a column, in order of appearance."""
    return list(dict.fromkeys(row[column] for row in rows if column in row))


def values_of(rows: Sequence[Row], by: str | None = None, **columns: Any) -> np.ndarray:
    """The values of the rows that have all these columns, in the order of column `by` if given."""
    found = where(rows, **columns)
    ordered = found if by is None else sorted(found, key=lambda row: row[by])
    return np.array([row["value"] for row in ordered], float)


def draw_band(
    axes: Axes, x: Any, middle: Any, band: Sequence[Any], alpha: float = 0.2, **line: Any
) -> None:
    """A line, and its band (low, high) in the line's colour."""
    axes.plot(x, middle, **line)
    axes.fill_between(x, *band, color=line["color"], alpha=alpha, linewidth=0)


def draw_runs(axes: Axes, rows: Sequence[Row], index: int, label: str) -> None:
    """The mean over runs by round, with its 95 % band; the line is that of place `index`."""
    values = np.array([values_of(rows, "round", run=run) for run in distinct(rows, "run")])
    line = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index], "linewidth": 1.5}
    rounds = sorted(distinct(rows, "round"))
    draw_band(axes, rounds, values.mean(0), band_of_mean(values), label=label, **line)


def new_table(title: str, columns: Sequence[str], left: str = "", caption: str = "") -> Table:
    """A table for `findings`: numbers at the right, the column `left` at the left."""
    view = Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")
    for name in columns:
        view.add_column(name, justify="left" if name == left else "right", no_wrap=True)
    return view
