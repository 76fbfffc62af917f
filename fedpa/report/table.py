"""The table of methods, as the paper's table 3: printed, and as `table.csv`."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from fedpa.report.bootstrap import LEVEL, Interval, interval_of_mean
from fedpa.report.published import Published
from fedpa.report.summary import WINDOW, at_the_end, curve, final, rounds_to

Histories = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]
"""method label → one history per seed, the same seeds in the same order for every method."""


class Difference(NamedTuple):
    """From the reference, seed by seed: the same cohorts on both sides."""

    mean: float
    interval: Interval | None


class Row(NamedTuple):
    method: str
    seeds: int
    final: float
    """Mean over seeds."""
    interval: Interval | None
    """Of that mean; None for one seed."""
    difference: Difference | None
    """None for the reference itself, and without one."""
    test: float
    """Of the last round, on the whole test split; mean over seeds."""
    rounds_to: Mapping[float, Sequence[int | None]]
    """target → one number per seed; None where it was not reached."""
    seconds: float
    """Of all rounds, mean over seeds."""
    bytes_up: float
    bytes_down: float
    """Of all rounds and clients, mean over seeds."""


def rows(
    histories: Histories,
    metric: str,
    targets: Sequence[float],
    last: int,
    reference: str | None = None,
) -> list[Row]:
    """One row for each method; `reference` is the one that the others are compared with."""
    curves = {
        method: [curve(history, f"eval/{metric}") for history in runs]
        for method, runs in histories.items()
    }
    finals = {method: [final(c, last) for c in own] for method, own in curves.items()}
    return [
        Row(
            method,
            len(runs),
            float(np.mean(finals[method])),
            interval_of_mean(finals[method]),
            _difference(finals, method, reference),
            _mean(at_the_end(history, f"test/{metric}") for history in runs),
            {target: [rounds_to(c, target) for c in curves[method]] for target in targets},
            _mean(sum(r["seconds"] for r in history) for history in runs),
            _mean(sum(r.get("comm/bytes_up", 0) for r in history) for history in runs),
            _mean(sum(r.get("comm/bytes_down", 0) for r in history) for history in runs),
        )
        for method, runs in histories.items()
    ]


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def _difference(
    finals: Mapping[str, Sequence[float]], method: str, reference: str | None
) -> Difference | None:
    if reference is None or method == reference:
        return None
    paired = [a - b for a, b in zip(finals[method], finals[reference], strict=True)]
    return Difference(float(np.mean(paired)), interval_of_mean(paired))


def printed(
    table: Sequence[Row],
    title: str,
    metric: str,
    last: int,
    reference: str | None = None,
    published: Sequence[Published] = (),
) -> Table:
    several = table[0].seeds > 1
    caption = (
        f"{metric}: mean of the last {last} rounds' evaluations"
        + (f" ± half a {LEVEL:.0%} bootstrap interval over seeds" if several else "")
        + ("" if several else " (one seed: no interval)")
        + "; test: after the last round, on all of the test split; rounds to: until the "
        f"{WINDOW}-round average gets there; seconds: compiling included; MB: of all clients"
    )
    if published:
        caption += "; published: the paper's own, not measured here"
    view = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    view.add_column("method", no_wrap=True)
    view.add_column(metric, justify="right", no_wrap=True)
    if reference is not None:
        view.add_column(f"less\n{reference}", justify="right", no_wrap=True)
    view.add_column("test", justify="right", no_wrap=True)
    for target in table[0].rounds_to:
        view.add_column(f"rounds\nto {target:g}", justify="right")
    view.add_column("seconds", justify="right", no_wrap=True)
    view.add_column("MB up,\ndown", justify="right", no_wrap=True)
    for row in table:
        value = _with_half(f"{row.final:.4f}", row.interval)
        rounds = [reached(numbers) for numbers in row.rounds_to.values()]
        view.add_row(
            row.method,
            value,
            *([_told(row.difference)] if reference is not None else []),
            f"{row.test:.4f}",
            *rounds,
            f"{row.seconds:.1f}",
            f"{row.bytes_up / 1e6:.4g}\n{row.bytes_down / 1e6:.4g}",
        )
    for other in published:
        shown = "–" if other.final is None else f"{other.final:.3f}"
        targets = [str(other.rounds_to.get(t) or "–") for t in table[0].rounds_to]
        empty = [""] if reference is not None else []
        name = f"{other.method}\n(published)"
        view.add_row(name, shown, *empty, "", *targets, "", "", style="dim")
    return view


def _with_half(text: str, interval: Interval | None) -> str:
    return text if interval is None else f"{text}\n± {interval.half:.4f}"


def _told(difference: Difference | None) -> str:
    if difference is None:
        return ""
    return _with_half(f"{difference.mean:+.4f}", difference.interval)


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
        ["method", "seeds", metric, f"{metric}_low", f"{metric}_high"]
        + ["difference", "difference_low", "difference_high", f"test_{metric}"]
        + [f"rounds_to_{target:g}{end}" for target in targets for end in ("", "_by_seed")]
        + ["seconds", "bytes_up", "bytes_down"]
    )
    for row in table:
        reached = [cell for target in targets for cell in _cells(row.rounds_to[target])]
        gap = row.difference
        writer.writerow(
            [row.method, row.seeds, f"{row.final:.6f}", *_ends(row.interval)]
            + (["", "", ""] if gap is None else [f"{gap.mean:.6f}", *_ends(gap.interval)])
            + [f"{row.test:.6f}", *reached, f"{row.seconds:.2f}"]
            + [f"{row.bytes_up:.0f}", f"{row.bytes_down:.0f}"]
        )
    return out.getvalue()


def _ends(interval: Interval | None) -> list[str]:
    return ["", ""] if interval is None else [f"{interval.low:.6f}", f"{interval.high:.6f}"]
