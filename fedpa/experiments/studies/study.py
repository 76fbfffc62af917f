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

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from fedpa.errors import FedpaError, explain
from fedpa.experiments.report.bootstrap import band_of_mean
from fedpa.experiments.report.looks import MARKERS, Look, style_line
from fedpa.lazy import find_components
from fedpa.server import optimizers
from fedpa.server.update import Server
from fedpa.types import Params

Row = dict[str, Any]
Knob = Literal["seeds", "repeats"]
STAMP = ("seed", "size", "versions")
"""The columns that say what made a row."""
DIGITS = 5
"""Significant digits of a measured value in the CSV."""


class Settings(NamedTuple):
    quick: bool
    """A smaller version that shows the same directions, in about a minute; `switch` takes five."""
    seed: int
    repeats: int
    """How many seeds or repeats, as the study's knob says; 0: as many as each problem has."""
    tell: Callable[[float, str], None]
    """(fraction done, what is being done): progress for a person to watch."""
    problems: Sequence[str] = ()
    """The problems to measure, of a study that has some; (): all."""
    kept: Sequence[Row] = ()
    """What an earlier call has measured, of a study that continues."""
    runs: Path = Path()
    """Where a study that continues records its runs."""
    keep: Callable[[list[Row]], None] = lambda rows: None
    """Writes all rows so far, of a study that continues."""


class Study(NamedTuple):
    summary: str
    columns: tuple[str, ...]
    """What identifies a value; `quantity` and `value` follow."""
    knob: Knob
    repeats: tuple[int, int]
    """How many of them at full size, and in quick mode; 0: each problem has its own number."""
    measure: Callable[[Settings], list[Row]]
    draw: Callable[[Sequence[Row]], Figure]
    findings: Callable[[Sequence[Row]], list[Table | str]]
    """What is printed at the end."""
    extras: Callable[[Sequence[Row]], dict[str, bytes]] = lambda rows: {}
    """Further files, by name."""
    problems: tuple[str, ...] = ()
    """Names of the real problems of a study that takes hours: it records runs, continues, and is
    not one of `all`."""


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
    text = io.StringIO()
    names = [*study.columns, "quantity", "value", *stamp]
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        shortened = {
            name: f"{value:.{DIGITS}g}" if isinstance(value, float) else value
            for name, value in row.items()
        }
        writer.writerow(stamp | shortened)  # a row that was kept has its own stamp
    return text.getvalue()


def read_csv(path: Path) -> list[Row]:
    """The rows of a study's CSV: numbers as numbers, what is empty left out."""
    try:
        return parse_csv(path.read_text())
    except OSError as error:
        raise FedpaError(f"{str(path)!r} can't be read: {explain(error)}") from None
    except (KeyError, TypeError, ValueError, csv.Error):
        raise FedpaError(f"{str(path)!r} is no CSV of a study") from None


def parse_csv(content: str) -> list[Row]:
    """The rows of a study's CSV, from its text."""
    records = csv.DictReader(io.StringIO(content))
    rows = [{name: _parse(text) for name, text in record.items() if text} for record in records]
    return [row | {"value": float(row["value"])} for row in rows]


def _parse(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# --- the vocabulary of drawing and reporting ---


def where(rows: Sequence[Row], **columns: Any) -> list[Row]:
    """The rows that have all these values; None stands for a column left empty."""
    return [row for row in rows if all(row.get(k) == v for k, v in columns.items())]


def distinct(rows: Sequence[Row], column: str) -> list[Any]:
    """The values of a column, in order of appearance."""
    return list(dict.fromkeys(row[column] for row in rows if column in row))


def split(rows: Sequence[Row], *columns: str) -> dict[Any, list[Row]]:
    """The rows by their values of one column, or by the tuple of several; others left out."""
    parts: dict[Any, list[Row]] = {}
    for row in rows:
        if all(column in row for column in columns):
            values = tuple(row[column] for column in columns)
            parts.setdefault(values if len(columns) > 1 else values[0], []).append(row)
    return parts


def values_of(rows: Sequence[Row], by: str | None = None, **columns: Any) -> np.ndarray:
    """The values of the rows that have all these columns, in the order of column `by` if given."""
    chosen = where(rows, **columns)
    ordered = chosen if by is None else sorted(chosen, key=lambda row: row[by])
    return np.array([row["value"] for row in ordered], float)


def mean_of(rows: Sequence[Row], **columns: Any) -> float:
    """The mean of the values of the rows that have all these columns."""
    return float(np.mean(values_of(rows, **columns)))


def draw_line(
    axes: Axes, x: Any, middle: Any, band: Any, look: Look, label: str = "", **style: Any
) -> None:
    """Draw a line in this look, unless `style` differs, and its band (low, high)."""
    spacing = 1 / 7
    # Of lines that lie on one another the markers are side by side.
    markers = {"markersize": 4.5, "markevery": (look.marker * spacing / len(MARKERS), spacing)}
    shown = style_line(look) | {"linewidth": 1.5} | markers | style
    axes.plot(x, middle, label=label or None, **shown)
    axes.fill_between(x, *band, color=shown["color"], alpha=0.2, linewidth=0)


def draw_means(
    axes: Axes, rows: Sequence[Row], x: str, look: Look, label: str, **style: Any
) -> None:
    """Draw the mean of the rows at each value of column `x`, with its 95 % band."""
    at = {value: values_of(own) for value, own in sorted(split(rows, x).items())}
    bands = np.array([band_of_mean(values) for values in at.values()]).reshape(-1, 2)
    middle = [values.mean() for values in at.values()]
    draw_line(axes, list(at), middle, bands.T, look, label, **style)


def make_table(
    title: str,
    columns: Sequence[str],
    lines: Iterable[Sequence[str]],
    left: Sequence[str] = (),
    caption: str | None = None,
) -> Table:
    """A table for `findings`: numbers at the right, the columns `left` at the left.

    An empty line ends a section.
    """
    view = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in columns:
        at_left = name in left
        view.add_column(name, justify="left" if at_left else "right", no_wrap=not at_left)
    for line in lines:
        if line:
            view.add_row(*line)
        else:
            view.add_section()
    return view


def simulate_rates(
    simulate_one: Callable[..., Any],
    runs: Sequence[tuple[Params, int]],
    rates: Sequence[float],
    *shared: Any,
) -> Any:
    """Simulate every run at every rate of a plain SGD server, all as one program.

    Args:
        simulate_one: (server, θ₀, key, *shared) → what is kept of a run.
        runs: Each run's θ₀ and seed.
        rates: Server learning rates.
        shared: What is the same for all and too large for a constant of the program.
    Returns:
        What `simulate_one` gives, in float64, with axes (runs, rates, …).
    """

    def one(theta: Params, seed: jax.Array, rate: jax.Array, shared: Any) -> Any:
        server = Server(optimizers.sgd(1.0), schedule=lambda t: rate)
        return simulate_one(server, theta, jax.random.key(seed), *shared)

    thetas, seeds, tried = zip(*((*run, rate) for run in runs for rate in rates), strict=True)
    values = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None)))(
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *thetas),
        jnp.asarray(seeds, jnp.uint32),
        jnp.asarray(tried, jnp.float32),
        shared,
    )
    shape = (len(runs), len(rates))
    return jax.tree.map(
        lambda array: np.asarray(array, np.float64).reshape(*shape, *array.shape[1:]), values
    )
