"""The table of methods, as the paper's table 3: printed, and as `table.csv`.

A mean over seeds is of the same rounds of every seed, and a difference between methods of the same
rounds of both: runs that were cut, or ended early, are compared as far as all of them have come.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from fedpa.experiments.report.bootstrap import LEVEL, Interval, interval_of_mean
from fedpa.experiments.report.published import Published
from fedpa.experiments.report.summary import (
    WINDOW,
    Curve,
    at_the_end,
    common_rounds,
    curve,
    finals,
    length,
    rounds_to,
)

Histories = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]
"""method label → one history per seed."""


class Measured(NamedTuple):
    """What the seeds of one method recorded."""

    method: str
    runs: Sequence[Sequence[Mapping[str, Any]]]
    seeds: Sequence[Any]
    """One for each run, in the same order for every method."""
    cohorts: Mapping[str, str] = {}
    """The settings that, beside the seed, decide which clients take part and what is evaluated."""


class Difference(NamedTuple):
    """From the reference, seed by seed: the same cohorts and the same rounds on both sides."""

    mean: float
    interval: Interval | None
    round: int
    """The last round that all runs of both have."""


class Row(NamedTuple):
    method: str
    seeds: int
    round: int
    """The last that all seeds have and, if any is evaluated, evaluated; what follows is up to it,
    but for `test` and `rounds_to`."""
    final: float
    """Mean over seeds."""
    interval: Interval | None
    """Of that mean; None for one seed."""
    difference: Difference | None
    """None for the reference itself, without one, and where there is nothing to pair."""
    unpaired: str | None
    """Why there is nothing to pair."""
    test: float
    """Of each run's last round, on the whole test split; mean over seeds."""
    ends: tuple[int, int]
    """The least and the greatest of those rounds."""
    rounds_to: Mapping[float, Sequence[int | None]]
    """target → one number per seed; None where it was not reached."""
    seconds: float
    """Mean over seeds."""
    bytes_up: float
    bytes_down: float
    """Of all clients, mean over seeds."""


def rows(
    measured: Sequence[Measured],
    metric: str,
    targets: Sequence[float],
    last: int,
    reference: int | None = None,
) -> list[Row]:
    """One row for each method; `reference`: the place of the one others are compared with."""
    curves = [[curve(history, f"eval/{metric}") for history in one.runs] for one in measured]
    found = []
    for place, (one, own) in enumerate(zip(measured, curves, strict=True)):
        values = finals(own, last)
        gap: Difference | str | None = None
        if reference is not None and place != reference:
            gap = _difference(one, measured[reference], own, curves[reference], last)
        lengths = [length(history) for history in one.runs]
        evaluated = common_rounds(own)
        until = int(evaluated[-1]) if len(evaluated) else min(lengths)
        found.append(
            Row(
                one.method,
                len(one.runs),
                until,
                float(np.mean(values)),
                interval_of_mean(values),
                gap if isinstance(gap, Difference) else None,
                gap if isinstance(gap, str) else None,
                float(np.mean([at_the_end(history, f"test/{metric}") for history in one.runs])),
                (min(lengths), max(lengths)),
                {target: [rounds_to(c, target) for c in own] for target in targets},
                *(
                    _total(one, key, until)
                    for key in ("seconds", "comm/bytes_up", "comm/bytes_down")
                ),
            )
        )
    return found


def _total(one: Measured, key: str, until: int) -> float:
    """Of the rounds up to `until`, mean over seeds."""
    totals = [sum(r.get(key) or 0 for r in h if r["round"] <= until) for h in one.runs]
    return float(np.mean(totals))


def _difference(
    one: Measured, other: Measured, own: Sequence[Curve], others: Sequence[Curve], last: int
) -> Difference | str:
    """Or why there is none."""
    names = dict.fromkeys([*one.cohorts, *other.cohorts])
    differ = [name for name in names if one.cohorts.get(name) != other.cohorts.get(name)]
    if differ:
        return f"differs in {', '.join(differ)}"
    if list(one.seeds) != list(other.seeds):
        return "has other seeds"
    common = common_rounds([*own, *others])
    if not len(common):
        return "has no evaluated round in common"
    values = finals([*own, *others], last)
    paired = [a - b for a, b in zip(values[: len(own)], values[len(own) :], strict=True)]
    return Difference(float(np.mean(paired)), interval_of_mean(paired), int(common[-1]))


def standing(row: Row, rounds: int) -> str | None:
    """How far the row's numbers reach, where that is not all of the `rounds`."""
    return f"at round {row.round:,} of {rounds:,}" if row.round < rounds else None


def unpaired(table: Sequence[Row], reference: str) -> list[str]:
    """Why rows have no difference, a sentence for each reason."""
    reasons = dict.fromkeys(row.unpaired for row in table if row.unpaired)
    return [
        f"no difference from {reference}: "
        f"{', '.join(row.method for row in table if row.unpaired == reason)} {reason}"
        for reason in reasons
    ]


def deviation(table: Sequence[Row]) -> str:
    """What stands behind a ±; empty where there is none."""
    counts = {row.seeds for row in table if row.interval is not None}
    if not counts:
        return ""
    wide = " (two seeds make a very wide one: they hardly tell how far seeds are apart)"
    return f" ± half a {LEVEL:.0%} bootstrap interval over seeds" + (wide if 2 in counts else "")


def printed(
    table: Sequence[Row],
    title: str,
    metric: str,
    last: int,
    rounds: int,
    reference: str | None = None,
    published: Sequence[Published] = (),
    preset: str = "paper",
) -> Table:
    """As a terminal shows it, of runs that were to have so many rounds."""
    caption = (
        f"{metric}: mean of the last {last} rounds' evaluations"
        + (deviation(table) or " (one seed: no interval)")
        + "; test: after each run's last round, on all of the test split; rounds to: until the "
        f"{WINDOW}-round average gets there; seconds: compiling included; MB: of all clients"
    )
    if any(standing(row, rounds) for row in table):
        caption += "; at round: the last that all seeds have, up to which numbers are"
    if published:
        caption += "; published: the paper's own, of its preset, not measured here"
        caption += "" if preset == "paper" else f": not comparable with preset {preset}"
    if reference is not None:
        caption = "; ".join([caption, *unpaired(table, reference)])
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
        mark = standing(row, rounds)
        view.add_row(
            row.method if mark is None else f"{row.method}\n({mark})",
            with_half(row.final, ".4f", row.interval, "\n"),
            *([less(row, "\n")] if reference is not None else []),
            on_test(row, "\n"),
            *(reached(numbers) for numbers in row.rounds_to.values()),
            f"{row.seconds:.1f}",
            f"{row.bytes_up / 1e6:.4g}\n{row.bytes_down / 1e6:.4g}",
        )
    for other in published:
        shown = "" if other.final is None else f"{other.final:.3f}"
        targets = [_published(other, target) for target in table[0].rounds_to]
        empty = [""] if reference is not None else []
        name = f"{other.method}\n(published)"
        view.add_row(name, shown, *empty, "", *targets, "", "", style="dim")
    return view


def _published(other: Published, target: float) -> str:
    """Empty for a target of which the paper says nothing; – is one that was never reached."""
    return "" if target not in other.rounds_to else str(other.rounds_to[target] or "–")


def number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"


def with_half(value: float, form: str, interval: Interval | None, apart: str = " ") -> str:
    """0.9412 ± 0.0040."""
    if interval is None or not math.isfinite(interval.half):
        return number(value, form)
    return f"{number(value, form)}{apart}± {interval.half:.4f}"


def less(row: Row, apart: str = " ") -> str:
    """The difference, with the round it is of where that is not the row's; empty for none."""
    gap = row.difference
    if gap is None:
        return "–" if row.unpaired else ""
    text = with_half(gap.mean, "+.4f", gap.interval, apart)
    return text if gap.round == row.round else f"{text}{apart}(at round {gap.round:,})"


def on_test(row: Row, apart: str = " ") -> str:
    """On the test split, with the runs' last rounds where they ended in different ones."""
    text, (first, last) = number(row.test, ".4f"), row.ends
    return text if first == last or text == "–" else f"{text}{apart}(rounds {first:,} to {last:,})"


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
        ["method", "seeds", "round", metric, f"{metric}_low", f"{metric}_high"]
        + ["difference", "difference_low", "difference_high", "difference_round", f"test_{metric}"]
        + [f"rounds_to_{target:g}{end}" for target in targets for end in ("", "_by_seed")]
        + ["seconds", "bytes_up", "bytes_down"]
    )
    for row in table:
        reached = [cell for target in targets for cell in _cells(row.rounds_to[target])]
        gap = row.difference
        writer.writerow(
            [row.method, row.seeds, row.round, f"{row.final:.6f}", *_ends(row.interval)]
            + (
                ["", "", "", ""]
                if gap is None
                else [f"{gap.mean:.6f}", *_ends(gap.interval), gap.round]
            )
            + [f"{row.test:.6f}", *reached, f"{row.seconds:.2f}"]
            + [f"{row.bytes_up:.0f}", f"{row.bytes_down:.0f}"]
        )
    return out.getvalue()


def _ends(interval: Interval | None) -> list[str]:
    return ["", ""] if interval is None else [f"{interval.low:.6f}", f"{interval.high:.6f}"]
