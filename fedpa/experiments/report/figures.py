"""How our figures look: a palette and line styles told apart without colour, files that repeat."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette and a line style each: told apart without colour, too.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLES: list[Any] = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1))]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]


def line_of(index: int) -> tuple[str, Any]:
    """(colour, style) of the method at this place; where colours begin anew, styles are others."""
    style = STYLES[(index + index // len(COLOURS)) % len(STYLES)]
    return COLOURS[index % len(COLOURS)], style


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that lays itself out."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, labels with their units, and no frame above and to the right."""
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(which="both", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def legend_height(labels: Sequence[str]) -> float:
    """Inches that `legend_below` needs."""
    return 0.2 * math.ceil(len(labels) / _columns(labels))


def legend_below(figure: Figure, handles: Mapping[str, Artist]) -> None:
    """A legend outside: curves fill a panel from corner to corner."""
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=_columns(list(handles)),
        frameon=False,
        fontsize=8,
    )


def _columns(labels: Sequence[str]) -> int:
    """As many as the longest label leaves room for: about a hundred characters to a figure."""
    longest = max(len(label) for label in labels)
    return min(max(95 // (longest + 9), 1), 3)


def rendered(figure: Figure, kind: Literal["png", "pdf"]) -> bytes:
    """The figure as a file's bytes, the same for the same figure: no date, no version."""
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Producer": None}}
    buffer = io.BytesIO()
    with rc_context({"pdf.fonttype": 42}):  # text stays text
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata[kind])
    return buffer.getvalue()
