"""The table of methods: printed, and as `table.csv`."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from fedpa.report.summary import WINDOW, at_the_end, curve, final, rounds_to

Histories = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]
"""method label → one history per seed."""


class Row(NamedTuple):
    method: str
    seeds: int
    final: float
    """Mean over seeds."""
    spread: float | None
    """Standard deviation over seeds; None for one seed."""
    test: float
    """Of the last round, on the whole test split; mean over seeds."""
    rounds_to: Mapping[float, Sequence[int | None]]
    """target → one number per seed; None where it was not reached."""
    seconds: float
    """Of all rounds, mean over seeds."""


def rows(histories: Histories, metric: str, targets: Sequence[float], last: int) -> list[Row]:
    result = []
    for method, runs in histories.items():
        curves = [curve(history, f"eval/{metric}") for history in runs]
        finals = [final(c, last) for c in curves]
        result.append(
            Row(
                method,
                len(runs),
                float(np.mean(finals)),
                float(np.std(finals, ddof=1)) if len(runs) > 1 else None,
                float(np.mean([at_the_end(history, f"test/{metric}") for history in runs])),
                {target: [rounds_to(c, target) for c in curves] for target in targets},
                float(np.mean([sum(r["seconds"] for r in history) for history in runs])),
            )
        )
    return result


def printed(table: Sequence[Row], title: str, metric: str, last: int) -> Table:
    spread = " ± standard deviation over seeds" if table[0].spread is not None else ""
    caption = (
        f"{metric}: mean of the last {last} rounds' evaluations{spread}; test: after the last "
        f"round, on all of the test split; rounds to: until the {WINDOW}-round average gets there; "
        "seconds: compiling included"
    )
    view = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    view.add_column("method", no_wrap=True)
    view.add_column(metric, justify="right", no_wrap=True)
    view.add_column("test", justify="right", no_wrap=True)
    for target in table[0].rounds_to:
        view.add_column(f"rounds to {target:g}", justify="right")
    view.add_column("seconds", justify="right")
    for row in table:
        value = f"{row.final:.4f}" + (f" ± {row.spread:.4f}" if row.spread is not None else "")
        cells = [reached(numbers) for numbers in row.rounds_to.values()]
        view.add_row(row.method, value, f"{row.test:.4f}", *cells, f"{row.seconds:.1f}")
    return view


def reached(numbers: Sequence[int | None]) -> str:
    """The mean over seeds where all reached the target; which did where some."""
    got = [n for n in numbers if n is not None]
    if not got:
        return "–"
    if len(got) < len(numbers):
        return f"{np.mean(got):.0f} ({len(got)} of {len(numbers)} seeds)"
    return f"{np.mean(got):.0f}"


def _cells(numbers: Sequence[int | None]) -> tuple[str, str]:
    """The mean, empty unless every seed got there, and all of them."""
    mean = "" if None in numbers else f"{np.mean([n for n in numbers if n is not None]):g}"
    return mean, ";".join("–" if n is None else str(n) for n in numbers)


def as_csv(table: Sequence[Row], metric: str) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    targets = list(table[0].rounds_to)
    writer.writerow(
        ["method", "seeds", metric, f"{metric}_std", f"test_{metric}"]
        + [f"rounds_to_{target:g}{end}" for target in targets for end in ("", "_by_seed")]
        + ["seconds"]
    )
    for row in table:
        reached = [cell for target in targets for cell in _cells(row.rounds_to[target])]
        spread = "" if row.spread is None else f"{row.spread:.6f}"
        numbers = [f"{row.final:.6f}", spread, f"{row.test:.6f}", *reached, f"{row.seconds:.2f}"]
        writer.writerow([row.method, row.seeds, *numbers])
    return out.getvalue()
