"""Runs and long work on files as a person watches them: live on a terminal, plain lines elsewhere.

What the rounds have shown (`Seen`) and how fast they go (`Pace`) are values, replaced after every
round; what is on display is a function of them. The live view ends as one line, so that several
runs in a row read as a table.
"""

import contextlib
import functools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich import filesize
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedpa.algorithms.fedopt import stage
from fedpa.data.cache import Tell, show_progress
from fedpa.metrics.streaming import PERCENTILES
from fedpa.training.callbacks import Callback, Event

LINES = 10
"""About how many plain lines are printed where there is no terminal."""
RECENT = 20
"""Time left is estimated from this many rounds: more than lie between two evaluations."""
LONGEST_BAR, SHORTEST_BAR = 30, 6
LAST_BAR = 12
"""A bar that no longer moves leaves the line to its numbers."""
GAP = "  "
IN_BYTES = ("downloading", "unpacking")
"""First words of what is done that tell bytes; all else tells how many."""


class Seen(NamedTuple):
    """What the rounds so far have shown."""

    round: int = 0
    phase: str = ""
    latest: Mapping[str, float | str] = {}
    """Not every round is evaluated: what the last evaluation gave stays in sight."""
    best: tuple[float, int] | None = None
    """The highest value of the metric that matters, and its round."""
    cohort: Sequence[str] = ()
    rejected: int = 0
    """In this round."""
    rejected_in_all: int = 0
    rejected_names: Sequence[str] = ()
    """Of the latest round that rejected any."""


class Pace(NamedTuple):
    """How long rounds of the present phase take."""

    since: float
    """When the present round began, in seconds of a monotonic clock."""
    phase: str | None = None
    seconds: tuple[float, ...] = ()


@contextlib.contextmanager
def watch_run(
    console: Console,
    label: str,
    rounds: int,
    *,
    metric: str | None = None,
    past: Sequence[Mapping[str, Any]] = (),
    quiet: bool = False,
) -> Iterator[Callback]:
    """A callback that shows where a run of `rounds` rounds stands.

    metric: the name of the metric, higher being better, whose best value is shown.
    past: the records of the rounds that were done before, if the run is resumed.
    quiet: show nothing.

    Times are of this process, by the console's clock, which is monotonic.
    """
    if quiet:
        yield lambda event: None
        return
    seen = functools.reduce(lambda s, r: after(s, r["round"], r, metric), past, Seen())
    seen = seen._replace(round=len(past))
    # A dumb terminal can't redraw a line: there, too, lines are printed.
    view = _live if console.is_terminal and console.is_interactive else _lines
    with view(console, label, rounds, metric, seen) as callback:
        yield callback


@contextlib.contextmanager
def _lines(
    console: Console, label: str, rounds: int, metric: str | None, seen: Seen
) -> Iterator[Callback]:
    every = max(math.ceil((rounds - seen.round) / LINES), 1)
    told = seen.round
    pace = Pace(console.get_time())

    def tell() -> None:
        nonlocal told
        told = seen.round
        left = seconds_left(pace, rounds - seen.round, pace.since)
        text = line(label, rounds, seen, left)
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    def callback(event: Event) -> None:
        nonlocal seen, pace
        seen = after(seen, event.round, event.record, metric, event.cohort)
        pace = paced(pace, seen.phase, console.get_time())
        if event.round % every == 0 or event.round == rounds:
            tell()

    try:
        yield callback
    finally:
        if told != seen.round:  # it ended early: how far it came is the last line
            tell()


@contextlib.contextmanager
def _live(
    console: Console, label: str, rounds: int, metric: str | None, seen: Seen
) -> Iterator[Callback]:
    started, resumed_at = console.get_time(), seen.round
    pace = Pace(started)
    over = False

    def callback(event: Event) -> None:
        nonlocal seen, pace
        seen = after(seen, event.round, event.record, metric, event.cohort)
        pace = paced(pace, seen.phase, console.get_time())

    def present() -> RenderableType:
        now = console.get_time()
        if over:
            return last_line(label, rounds, seen, now - started, console.width)
        left = seconds_left(pace, rounds - seen.round, now)
        if seen.round >= rounds:
            expected = "finishing"  # the whole test split may take a while
        elif seen.round == resumed_at:
            expected = "compiling"
        else:
            expected = "" if left is None else f"{_clock(left)} left"
        # The terminal writes ^C behind the view: with no room for it there, it would go on to a
        # line that the view doesn't know of.
        width = max(console.width - len("^C"), 1)
        view = screen(label, rounds, seen, metric, now - started, expected, width)
        return Constrain(view, width)

    live = Live(
        get_renderable=present,
        console=console,
        # Warnings go above the view; `2> file` still gets what it asks for.
        redirect_stderr=sys.stderr.isatty(),
        vertical_overflow="crop",
    )
    with live:
        try:
            yield callback
        finally:
            over = True


def after(
    seen: Seen,
    round: int,
    record: Mapping[str, Any],
    metric: str | None,
    cohort: Sequence[str] = (),
) -> Seen:
    """What is known after one more round."""
    evaluated = _evaluated(record)
    latest = {**seen.latest, **evaluated}
    rejected = record.get("train/rejected", 0)
    return Seen(
        round=round,
        phase=record["phase"],
        # What has no room is left out at the end, so the metric that matters is the first.
        latest={name: latest[name] for name in sorted(latest, key=lambda name: name != metric)},
        best=_better(seen.best, evaluated.get(metric or ""), round),
        cohort=cohort,
        rejected=rejected,
        rejected_in_all=seen.rejected_in_all + rejected,
        rejected_names=record.get("train/rejected_clients") or seen.rejected_names,
    )


def _evaluated(record: Mapping[str, Any]) -> dict[str, float | str]:
    """The metrics of the curves; the distribution over clients is in the files."""
    distribution = tuple(f"_p{p}" for p in PERCENTILES)
    return {
        key.removeprefix("eval/"): _value(record[key])
        for key in record
        if key.startswith("eval/") and not key.endswith(distribution)
    }


def _value(value: Any) -> float | str:
    if isinstance(value, str):
        return value
    return math.nan if value is None else float(value)


def _better(
    best: tuple[float, int] | None, value: float | str | None, round: int
) -> tuple[float, int] | None:
    if not isinstance(value, float) or math.isnan(value):
        return best
    return (value, round) if best is None or value > best[0] else best


def paced(pace: Pace, phase: str, now: float) -> Pace:
    """The pace after a round that ended now.

    Rounds of burn-in and of sampling cost differently, and the first of each compiles: it tells
    nothing about the others.
    """
    phase = stage(phase)
    if phase != pace.phase:
        return Pace(now, phase)
    return Pace(now, phase, (*pace.seconds, now - pace.since)[-RECENT:])


def seconds_left(pace: Pace, rounds: int, now: float) -> float | None:
    """Until `rounds` more rounds are done, the present one among them; None if it can't be told."""
    if not pace.seconds or rounds < 1:
        return None
    each = sum(pace.seconds) / len(pace.seconds)
    # A round that takes longer than expected makes those after it no shorter.
    return max(each - (now - pace.since), 0.0) + (rounds - 1) * each


def line(label: str, rounds: int, seen: Seen, left: float | None) -> str:
    """Where the run stands, as a log has it."""
    parts = [label, f"round {seen.round}/{rounds}", seen.phase, *_metrics(seen)]
    if seen.best is not None:
        parts.append(f"best {_shown(seen.best[0])} (round {seen.best[1]})")
    if seen.rejected_in_all:
        parts.append(f"rejected {seen.rejected} ({seen.rejected_in_all} in all)")
    if left is not None:
        parts.append(f"{_clock(left)} left")
    return GAP.join(parts)


def screen(
    label: str,
    rounds: int,
    seen: Seen,
    metric: str | None,
    elapsed: float,
    expected: str,
    width: int,
) -> RenderableType:
    """Where the run stands, as a terminal shows it: a few lines, none of which wraps."""
    # Each as wide as it will ever be, so that the bar keeps its length.
    words = [
        Text(f"round {seen.round:>{len(str(rounds))}}/{rounds}"),
        Text(f"{seen.phase:<8}", "cyan"),
        Text(_clock(elapsed)),
        Text(f"{expected:<12}"),
    ]
    shown = [_with_bar(label, rounds, seen.round, words, width, LONGEST_BAR)]
    room = width - cell_len(_name(""))
    if seen.latest:
        shown.append(_detail("metrics", fitting(_metrics(seen), room, GAP)))
    if seen.best is not None:
        best = f"{metric} {_shown(seen.best[0])} in round {seen.best[1]}"
        shown.append(_detail("best", best, "green"))
    if seen.cohort:
        number = f"{len(seen.cohort):,}: "
        names = fitting(seen.cohort, room - len(number), ", ")
        shown.append(_detail("clients", number + names))
    if seen.rejected_in_all:
        text = f"{seen.rejected:,} in this round, {seen.rejected_in_all:,} in all"
        if seen.rejected_names:
            text += "; latest: "
            text += fitting(seen.rejected_names, room - len(text), ", ")
        shown.append(_detail("rejected", text, "yellow"))
    return Group(*shown)


def _detail(name: str, text: str, style: str = "") -> Text:
    return Text.assemble((_name(name), "dim"), (text, style), no_wrap=True, overflow="ellipsis")


def _name(name: str) -> str:
    return f"{GAP}{name:<{len('rejected')}}{GAP}"


def last_line(label: str, rounds: int, seen: Seen, elapsed: float, width: int) -> RenderableType:
    """Where the run ended; nothing if it never began, so that an error stands alone."""
    if not seen.round:
        return Group()
    digits = len(str(rounds))
    words = [Text(f"{seen.round:>{digits}}/{rounds}"), Text(_clock(elapsed))]
    numbers = _metrics(seen)
    if seen.rejected_in_all:
        numbers.insert(1, f"rejected {seen.rejected_in_all:,}")
    if seen.best is not None:  # next to the metric that it is of, the first
        numbers.insert(1, f"best {_shown(seen.best[0])} at {seen.best[1]:<{digits}}")
    room = width - _taken(label, words) - SHORTEST_BAR - 2 * len(GAP)
    words.append(Text(fitting(numbers, room, GAP, more=None)))
    return _with_bar(label, rounds, seen.round, words, width, LAST_BAR)


def fitting(pieces: Sequence[str], room: int, between: str, more: str | None = "…") -> str:
    """As many whole pieces as there is room for, at least one; `more` stands for the others."""
    kept: list[str] = []
    for piece in pieces:
        if kept and cell_len(between.join([*kept, piece])) > room:
            break
        kept.append(piece)
    if len(kept) == len(pieces) or more is None:
        return between.join(kept)
    while len(kept) > 1 and cell_len(between.join([*kept, more])) > room:
        kept.pop()
    return between.join([*kept, more])


def _with_bar(
    label: str, rounds: int, done: int, words: Sequence[Text], width: int, longest: int
) -> RenderableType:
    """label, bar, words. With little room the bar is shorter, then gone, then the last words."""
    fit = [word for n, word in enumerate(words, 1) if _taken(label, words[:n]) <= width]
    length = min(width - _taken(label, fit) - len(GAP), longest)
    bar = [ProgressBar(rounds, done, width=length)] if length >= SHORTEST_BAR else []
    cells: list[RenderableType] = [Text(label, "bold"), *bar, *fit]
    table = Table.grid(padding=(0, len(GAP), 0, 0))
    for _ in cells:
        table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row(*cells)
    return table


def _taken(label: str, words: Sequence[Text]) -> int:
    """The width of all but the bar."""
    return cell_len(label) + sum(len(GAP) + word.cell_len for word in words)


def _metrics(seen: Seen) -> list[str]:
    return [f"{name} {_shown(value)}" for name, value in seen.latest.items()]


def _shown(value: float | str) -> str:
    """Of the same width from round to round where that can be."""
    if isinstance(value, str):
        return value
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 100 else f"{value:.4g}"


def _clock(seconds: float) -> str:
    """1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@contextlib.contextmanager
def show_file_progress(console: Console) -> Iterator[None]:
    """Show the progress of what is done inside."""
    if not console.is_terminal:
        with show_progress(lambda what: _print_file_lines(console, what)):
            yield
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        _Amount(),
        TimeRemainingColumn(),
    )
    # Gone when it is done: what came of it is for the command to say.
    bars = Progress(*columns, console=console, transient=True)
    with bars, show_progress(lambda what: _show_bar(bars, what)):
        yield


@contextlib.contextmanager
def _show_bar(bars: Progress, what: str) -> Iterator[Tell]:
    task = bars.add_task(what, total=None)
    try:
        yield lambda done, total: bars.update(task, completed=done, total=total)
    finally:
        bars.remove_task(task)


@contextlib.contextmanager
def _print_file_lines(console: Console, what: str) -> Iterator[Tell]:
    last = 0
    started = time.perf_counter()

    def tell(done: int, total: int | None) -> None:
        nonlocal last
        last = done

    console.print(what, highlight=False, markup=False, soft_wrap=True)
    yield tell
    amount = f"{amount_of(what, last)}, " if last else ""
    seconds = time.perf_counter() - started
    console.print(
        f"{what}: done ({amount}{seconds:.0f} s)", highlight=False, markup=False, soft_wrap=True
    )


class _Amount(ProgressColumn):
    """How much is done of how much."""

    def render(self, task: Task) -> Text:
        done = amount_of(task.description, int(task.completed))
        total = "" if task.total is None else f" of {amount_of(task.description, int(task.total))}"
        return Text(done + total)


def amount_of(what: str, number: int) -> str:
    """Bytes in the unit a person would use, or a number with thousands apart."""
    if what.split(" ")[0] not in IN_BYTES:
        return f"{number:,}"
    return filesize.decimal(number)
