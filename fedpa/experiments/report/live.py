"""Progress of runs and of work on files: live on a terminal, plain lines elsewhere.

A `RunView` receives every round; the display is a function of the rounds so far. The live view ends
as one line, so that several runs look like a table.
"""

import contextlib
import dataclasses
import datetime
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import filesize
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedpa.algorithms.fedopt import stage
from fedpa.data.cache import Tell, show_progress
from fedpa.metrics.streaming import PERCENTILES
from fedpa.training.callbacks import Callback, Event

LINES = 10
"""About how many plain lines are printed without a terminal."""
RECENT = 20
"""Rounds from which the time left is estimated: more than between two evaluations."""
LONGEST_BAR, SHORTEST_BAR = 30, 6
LAST_BAR = 12
"""Length of a finished run's bar, which leaves room for its numbers."""
GAP = "  "
IN_BYTES = ("downloading", "unpacking")
"""First words of work that is measured in bytes; all other work is counted."""
DISTRIBUTION = tuple(f"_p{p}" for p in PERCENTILES)
"""Ends of metrics that are not shown: the distribution over clients is in the files."""


@contextlib.contextmanager
def watch_run(
    console: Console,
    label: str,
    rounds: int,
    *,
    metric: str | None = None,
    past: Sequence[Mapping[str, Any]] = (),
    quiet: bool = False,
    lines: int = LINES,
) -> Iterator[Callback]:
    """Make a callback that shows the progress of a run of `rounds` rounds.

    Args:
        console: Where to show it; times are from its monotonic clock.
        label: The run's name.
        rounds: Its number of rounds.
        metric: The metric whose best value is shown; higher is better.
        past: The records of earlier rounds, if the run is resumed.
        quiet: Show nothing.
        lines: About how many lines are printed without a terminal.
    """
    if quiet:
        yield lambda event: None
        return
    now = console.get_time()
    view = RunView(console, label, rounds, metric, len(past), now, now)
    for record in past:
        view.take(record["round"], record)
    # A dumb terminal can't redraw a line, so lines are printed.
    is_live = console.is_terminal and console.is_interactive
    with _show_live(view) if is_live else _print_lines(view, lines) as callback:
        yield callback


@dataclasses.dataclass
class RunView:
    """The state of the progress display, and how it is drawn."""

    console: Console
    label: str
    rounds: int
    metric: str | None
    resumed_at: int
    started: float
    since: float
    """Start time of the current round."""
    round: int = 0
    phase: str = ""
    latest: dict[str, float] = dataclasses.field(default_factory=dict)
    """The last evaluation, which stays visible until the next."""
    best: tuple[float, int] | None = None
    """The highest value of the metric, and its round."""
    cohort: Sequence[str] = ()
    rejected: int = 0
    rejected_in_all: int = 0
    rejected_names: Sequence[str] = ()
    """Names from the latest round that rejected clients."""
    timed_phase: str | None = None
    seconds: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds of recent rounds of that phase."""
    is_over: bool = False

    def take(self, t: int, record: Mapping[str, Any]) -> None:
        """Add a round's record."""
        self.round, self.phase = t, record["phase"]
        for key, value in record.items():
            if key.startswith("eval/") and not key.endswith(DISTRIBUTION):
                self.latest[key.removeprefix("eval/")] = float(value)
        value = record.get(f"eval/{self.metric}", math.nan)
        if value > (-math.inf if self.best is None else self.best[0]):
            self.best = value, t
        self.rejected = record.get("train/rejected", 0)
        self.rejected_in_all += self.rejected
        self.rejected_names = record.get("train/rejected_clients") or self.rejected_names

    def update(self, event: Event) -> None:
        """Count a round and its time.

        Rounds of burn-in and of sampling take different times. The first of each is not used,
        since it includes compilation.
        """
        self.take(event.round, event.record)
        self.cohort = event.cohort
        now, phase = self.console.get_time(), stage(self.phase)
        if phase == self.timed_phase:
            self.seconds.append(now - self.since)
        else:
            self.seconds.clear()
        self.since, self.timed_phase = now, phase

    def _format_left(self, now: float) -> str:
        """Estimate the time of the remaining rounds and the current one; empty if unknown."""
        rounds = self.rounds - self.round
        if not self.seconds or rounds < 1:
            return ""
        each = sum(self.seconds) / len(self.seconds)
        # A round that takes longer than expected does not shorten later ones.
        left = max(each - (now - self.since), 0.0) + (rounds - 1) * each
        return f"{_format_seconds(left)} left"

    def _list_metrics(self) -> list[str]:
        # Metrics without room are left out at the end, so the main metric comes first.
        names = sorted(self.latest, key=lambda name: name != self.metric)
        return [f"{name} {_format_value(self.latest[name])}" for name in names]

    def format_line(self) -> str:
        """Format the progress as a log line."""
        parts = [self.label, f"round {self.round}/{self.rounds}", self.phase, *self._list_metrics()]
        if self.best is not None:
            parts.append(f"best {_format_value(self.best[0])} (round {self.best[1]})")
        if self.rejected_in_all:
            parts.append(f"rejected {self.rejected} ({self.rejected_in_all} in all)")
        left = self._format_left(self.since)
        return GAP.join([*parts, left] if left else parts)

    def draw(self) -> RenderableType:
        """Draw the progress: a few lines, without wrapping."""
        if self.is_over:
            return self._draw_end()
        now = self.console.get_time()
        expected = self._format_left(now)
        if self.round >= self.rounds:
            expected = "finishing"  # the whole test split may take a while
        elif self.round == self.resumed_at:
            expected = "compiling"
        # Fixed widths, so that the bar keeps its length.
        words = [
            Text(f"round {self.round:>{len(str(self.rounds))}}/{self.rounds}"),
            Text(f"{self.phase:<8}", "cyan"),
            Text(_format_seconds(now - self.started)),
            Text(f"{expected:<12}"),
        ]
        # The terminal writes ^C after the view; without room for it, the view would lose a line.
        width = max(self.console.width - len("^C"), 1)
        lines = [self._draw_bar(words, width, LONGEST_BAR)]
        room = width - len(GAP + "rejected" + GAP)

        def add(name: str, text: str, style: str = "") -> None:
            named = (f"{GAP}{name:<8}{GAP}", "dim")
            lines.append(Text.assemble(named, (text, style), no_wrap=True, overflow="ellipsis"))

        if self.latest:
            add("metrics", join_fitting(self._list_metrics(), room, GAP))
        if self.best is not None:
            value = f"{self.metric} {_format_value(self.best[0])} in round {self.best[1]}"
            add("best", value, "green")
        if self.cohort:
            number = f"{len(self.cohort):,}: "
            add("clients", number + join_fitting(self.cohort, room - len(number), ", "))
        if self.rejected_in_all:
            text = f"{self.rejected:,} in this round, {self.rejected_in_all:,} in all"
            if self.rejected_names:
                text += "; latest: "
                text += join_fitting(self.rejected_names, room - len(text), ", ")
            add("rejected", text, "yellow")
        return Constrain(Group(*lines), width)

    def _draw_end(self) -> RenderableType:
        """Draw the final line; nothing if the run never started: then only the error is shown."""
        if not self.round:
            return Group()
        digits = len(str(self.rounds))
        elapsed = _format_seconds(self.console.get_time() - self.started)
        words = [Text(f"{self.round:>{digits}}/{self.rounds}"), Text(elapsed)]
        numbers = self._list_metrics()
        if self.rejected_in_all:
            numbers.insert(1, f"rejected {self.rejected_in_all:,}")
        if self.best is not None:  # next to its metric, the first
            best, t = self.best
            numbers.insert(1, f"best {_format_value(best)} at {t:<{digits}}")
        room = self.console.width - self._measure(words) - SHORTEST_BAR - 2 * len(GAP)
        words.append(Text(join_fitting(numbers, room, GAP, more=None)))
        return self._draw_bar(words, self.console.width, LAST_BAR)

    def _draw_bar(self, words: Sequence[Text], width: int, longest: int) -> RenderableType:
        """Draw label, bar and text: with little room a shorter bar, then no bar, then less text."""
        fit = [word for n, word in enumerate(words, 1) if self._measure(words[:n]) <= width]
        length = min(width - self._measure(fit) - len(GAP), longest)
        cells: list[RenderableType] = [Text(self.label, "bold"), *fit]
        if length >= SHORTEST_BAR:
            cells.insert(1, ProgressBar(self.rounds, self.round, width=length))
        table = Table.grid(padding=(0, len(GAP), 0, 0))
        for _ in cells:
            table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_row(*cells)
        return table

    def _measure(self, words: Sequence[Text]) -> int:
        """Measure the width of all but the bar."""
        return cell_len(self.label) + sum(len(GAP) + word.cell_len for word in words)


@contextlib.contextmanager
def _print_lines(view: RunView, lines: int) -> Iterator[Callback]:
    every = max(math.ceil((view.rounds - view.round) / lines), 1)
    begun = printed = view.round

    def print_line() -> None:
        nonlocal printed
        printed = view.round
        view.console.print(view.format_line(), soft_wrap=True, markup=False, highlight=False)

    def callback(event: Event) -> None:
        view.update(event)
        is_due = event.round > begun and event.round % every == 0
        if is_due or event.round == view.rounds:
            print_line()

    try:
        yield callback
    finally:
        if printed != view.round:  # it ended early: the last line shows the progress
            print_line()


@contextlib.contextmanager
def _show_live(view: RunView) -> Iterator[Callback]:
    live = Live(
        get_renderable=view.draw,
        console=view.console,
        # Warnings go above the view; `2> file` still receives them.
        redirect_stderr=sys.stderr.isatty(),
        vertical_overflow="crop",
    )
    with live:
        try:
            yield view.update
        finally:
            view.is_over = True


def join_fitting(pieces: Sequence[str], room: int, between: str, more: str | None = "…") -> str:
    """Join as many whole pieces as fit, at least one; `more` replaces the rest."""
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


def _format_value(value: float) -> str:
    """Format a metric, with the same width in all rounds if possible."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 100 else f"{value:.4g}"


def _format_seconds(seconds: float) -> str:
    """Format 1:02:03."""
    return str(datetime.timedelta(seconds=round(seconds)))


@contextlib.contextmanager
def show_file_progress(console: Console) -> Iterator[None]:
    """Show the progress of work on files inside the block."""
    if not console.is_terminal:
        with show_progress(lambda what: _print_progress(console, what)):
            yield
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
    )
    # Removed at the end: the command prints the result.
    bars = Progress(*columns, console=console, transient=True)
    with bars, show_progress(lambda what: _show_bar(bars, what)):
        yield


@contextlib.contextmanager
def _show_bar(bars: Progress, what: str) -> Iterator[Tell]:
    task = bars.add_task(what, total=None, amount="")

    def tell(done: int, total: int | None) -> None:
        amount = _format_amount(what, done)
        amount += "" if total is None else f" of {_format_amount(what, total)}"
        bars.update(task, completed=done, total=total, amount=amount)

    try:
        yield tell
    finally:
        bars.remove_task(task)


@contextlib.contextmanager
def _print_progress(console: Console, what: str) -> Iterator[Tell]:
    last = 0
    started = time.perf_counter()

    def tell(done: int, total: int | None) -> None:
        nonlocal last
        last = done

    console.print(what, highlight=False, markup=False, soft_wrap=True)
    yield tell
    amount = f"{_format_amount(what, last)}, " if last else ""
    text = f"{what}: done ({amount}{time.perf_counter() - started:.0f} s)"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _format_amount(what: str, number: int) -> str:
    """Format bytes with a unit, or a number with thousands separators."""
    return filesize.decimal(number) if what.split(" ")[0] in IN_BYTES else f"{number:,}"
