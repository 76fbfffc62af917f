"""One colour, dash and marker per method, in every figure, page and table.

Okabe and Ito's palette, whose colours differ for the colour-blind, too. Where colours repeat,
dashes and markers differ: no two of 49 look alike.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedpa.experiments.methods import METHODS
from fedpa.experiments.report.runs import Group

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
DARK = ["#4C9BE8", "#F07F3C", "#2FBF92", "#E39CC3", "#F2B632", "#8AD0F7", "#F2F2F2"]
"""The same hues on a dark page."""
STYLES: list[Any] = ["-", "--", "-.", ":", (0, (8, 2)), (0, (8, 2, 2, 2)), (0, (3, 1, 1, 1))]
"""matplotlib's."""
DASHES = ["solid", "dash", "dashdot", "dot", "longdash", "longdashdot", "5px 2px 1px 2px"]
"""plotly's."""
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
"""matplotlib's."""
SYMBOLS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x"]
"""plotly's."""
GLYPHS = "●■▲◆▼✚✖"
"""The same as text."""
FIRST = ("fedavg", "fedpa", "mean-scaled", "fedavg-1", "scaffold", "mean", "centralized")
"""The most frequent methods: each has its own colour."""
PLACES = {
    name: k for k, name in enumerate([*FIRST, *(name for name in METHODS if name not in FIRST)])
}
"""Method → the place of its look."""


class Look(NamedTuple):
    """How one method looks."""

    colour: int
    """Index in `COLOURS` and `DARK`."""
    dash: int
    """Index in `STYLES` and `DASHES`."""
    marker: int
    """Index in `MARKERS`, `SYMBOLS` and `GLYPHS`."""


def choose_look(place: int) -> Look:
    """Choose the look of a place: no two of the first 49 are alike."""
    n = len(COLOURS)
    turn = place // n
    return Look(place % n, (place + turn) % n, (place + 2 * turn) % n)


def choose_looks(methods: Mapping[str, str | None]) -> dict[str, Look]:
    """Choose each label's look by its method, the same in every figure.

    A method with other settings has its colour, in another dash; methods that are not fedpa's have
    the looks that are left.

    Args:
        methods: Label → its method by name; None for one that is not fedpa's.
    """
    taken: dict[str, int] = {}

    def take(label: str, place: int, step: int) -> None:
        while place in taken.values():
            place += step
        taken[label] = place

    first = {method: label for label, method in reversed(list(methods.items()))}
    for label, method in sorted(methods.items(), key=lambda item: first[item[1]] != item[0]):
        if method is not None:
            take(label, PLACES[method], len(COLOURS))
    for label in methods:
        if label not in taken:
            take(label, 0, 1)
    return {label: choose_look(taken[label]) for label in methods}


def assign_looks(groups: Sequence[Group]) -> dict[str, Look]:
    """Assign each group's label its look."""
    return choose_looks({group.label: group.runs[0].method for group in groups})


def style_line(look: Look) -> dict[str, Any]:
    """Give a line's look as matplotlib's arguments."""
    return {
        "color": COLOURS[look.colour],
        "linestyle": STYLES[look.dash],
        "marker": MARKERS[look.marker],
    }
