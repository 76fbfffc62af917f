"""What `fedpa posterior` wrote into a run's directory, as a table and a reliability diagram.

This module does not import JAX, so that reports start fast.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TABLE = "posterior.json"
FIGURE = "posterior.png"
METRICS = ("nll", "brier", "ece", "accuracy", "ood_entropy", "ood_mutual")
"""The columns of classes and tags; a regression has its own."""
MEANINGS = {
    "point": "the model as it was trained",
    "temperature": "its outputs divided by a number",
    "isotropic": "a posterior of one standard deviation, with the same total variance as laplace",
    "isotropic-tuned": "the same, its standard deviation chosen",
    "laplace": "the posterior",
    "swag": "SWAG over the server's iterates, its scale chosen",
    "ensemble": "several runs, equally weighted",
}


class Predictions(NamedTuple):
    """A posterior's table, its controls among the rows."""

    about: Mapping[str, Any]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    figure: bytes | None
    """The reliability diagram, a PNG."""


def tabulate(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of rows with `name`, `trials` and `values`."""
    known = list(rows[0]["values"])
    names = [name for name in METRICS if name in known] or known
    header = ["prediction", "trials", *(name.replace("_", " ") for name in names)]
    return header, [
        [row["name"], str(row["trials"]), *(_format(row["values"].get(name)) for name in names)]
        for row in rows
    ]


def _format(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4f}"


def read_predictions(directory: Path) -> Predictions | None:
    """Read a run's posterior, if it has one; a damaged file is left out, with a warning."""
    try:
        about = json.loads((directory / TABLE).read_bytes())
        header, rows = tabulate(about["rows"])
    except FileNotFoundError:
        return None
    except Exception as error:  # of values of other types, any of its lines may fail
        reason = " ".join(str(error).split())
        warnings.warn(
            f"{directory / TABLE} is left out, it is damaged: {type(error).__name__} {reason}",
            stacklevel=2,
        )
        return None
    figure = directory / FIGURE
    return Predictions(about, header, rows, figure.read_bytes() if figure.is_file() else None)
