import contextlib
import io
import itertools
import math
import re
import sys
import warnings

import pytest
from rich.console import Console
from rich.live import Live

from fedpa.experiments.cli.main import _one_line
from fedpa.experiments.report import live
from fedpa.experiments.report.live import join_fitting, watch_run
from fedpa.training.callbacks import Event

NAMES = [f"f{n:04}_{n % 50:02}" for n in range(1000)]


class Terminal:
    """A terminal of our own: what a person would see, and a clock that we turn."""

    def __init__(self, width, monkeypatch):
        self.now = 1000.0
        self.width = width
        self.file = io.StringIO()
        self.console = Console(
            file=self.file,
            width=width,
            height=24,
            force_terminal=True,
            force_interactive=True,
            color_system=None,
            get_time=lambda: self.now,
        )
        terminal = self

        class Held(Live):
            """Drawn when the test looks, rather than four times a second."""

            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs, auto_refresh=False)
                terminal.live = self

        monkeypatch.setattr(live, "Live", Held)

    def look(self):
        self.live.refresh()
        return self.seen()

    def seen(self):
        """The lines on the screen."""
        rows, at, column = [""], 0, 0
        codes = r"\x1b\[\??\d*[A-Za-z]|\r|\n|[^\x1b\r\n]+"
        for piece in re.findall(codes, self.file.getvalue()):
            if piece == "\n":
                at, column = at + 1, 0
                rows += [""] * (at == len(rows))
            elif piece == "\r":
                column = 0
            elif piece == "\x1b[2K":
                rows[at] = ""
            elif piece == "\x1b[1A":
                at -= 1
            elif not piece.startswith("\x1b"):
                rows[at] = rows[at][:column].ljust(column) + piece
                column += len(piece)
                assert column <= self.width, f"{rows[at]!r} would wrap"
        return [row.rstrip() for row in rows if row.strip()]

    @property
    def cursor(self):
        text = self.file.getvalue()
        return text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")


@pytest.fixture(params=[80, 120])
def terminal(request, monkeypatch):
    return Terminal(request.param, monkeypatch)


@pytest.fixture
def narrow(monkeypatch):
    return Terminal(80, monkeypatch)


def record(t, accuracy=None, *, phase="burn-in", rejected=()):
    found = {"round": t, "phase": phase, "seconds": 7.0, "train/rejected": len(rejected)}
    if rejected:
        found["train/rejected_clients"] = list(rejected)
    if accuracy is not None:
        found |= {"eval/loss": 0.5, "eval/accuracy": accuracy, "eval/accuracy_p10": 0.01}
    return found


def event(t, rounds, accuracy=None, *, cohort=(), **kwargs):
    return Event(t, rounds, None, None, record(t, accuracy, **kwargs), cohort)


def test_the_view_has_what_matters(terminal):
    with watch_run(terminal.console, "FedPA[5]", 30, metric="accuracy") as callback:
        callback(event(1, 30, 0.25, cohort=NAMES[:3]))
        callback(event(2, 30, 0.75, cohort=NAMES[:3]))
        callback(event(3, 30, 0.5, phase="sampling", cohort=NAMES[:1000]))
        callback(event(4, 30, phase="sampling", cohort=NAMES[:1000]))
        heading, metrics, best, clients = terminal.look()
    assert re.match(r"FedPA\[5\]  [━╸ ]{20,}  round  4/30  sampling  0:00:00", heading)
    assert metrics == "  metrics   accuracy 0.5000  loss 0.5000"
    assert best == "  best      accuracy 0.7500 in round 2"
    assert clients.startswith("  clients   1,000: f0000_00, f0001_01, f0002_02, ")
    assert re.search(r"f\d{4}_\d\d, …$", clients)  # names are whole
    assert len(clients) > terminal.width - 15


def test_without_a_metric_there_is_no_best(narrow):
    with watch_run(narrow.console, "FedPA", 3) as callback:
        callback(event(1, 3, 0.5))
        assert narrow.look()[1:] == ["  metrics   loss 0.5000  accuracy 0.5000"]
    assert "best" not in narrow.seen()[0]


def test_rejected_clients_are_stated_if_there_were_any(terminal):
    with watch_run(terminal.console, "FedPA", 9, metric="accuracy") as callback:
        callback(event(1, 9, 0.5))
        assert "rejected" not in "".join(terminal.look())
        callback(event(2, 9, rejected=["ann", "bob"]))
        assert terminal.look()[-1] == "  rejected  2 in this round, 2 in all; latest: ann, bob"
        callback(event(3, 9, rejected=["carl"]))
        callback(event(4, 9))
        assert terminal.look()[-1] == "  rejected  0 in this round, 3 in all; latest: carl"
    assert "best 0.5000 at 1  rejected 3" in terminal.seen()[0]


def test_a_resumed_run_goes_on_from_what_is_past(terminal):
    past = [
        record(1, 0.9, rejected=["ann"]),
        record(2, math.nan),
        record(3, None),
    ]
    with watch_run(terminal.console, "FedPA", 6, metric="accuracy", past=past) as callback:
        heading, *details = terminal.look()
        assert "round 3/6" in heading
        assert "compiling" in heading
        bar = heading[len("FedPA  ") : heading.index("  round")]
        assert bar.count("━") == len(bar) // 2
        assert details == [
            "  metrics   accuracy nan  loss 0.5000",
            "  best      accuracy 0.9000 in round 1",
            "  rejected  0 in this round, 1 in all; latest: ann",
        ]
        callback(event(4, 6, 0.3, rejected=["bob"]))
        heading, *details = terminal.look()
        assert "round 4/6" in heading
        assert "left" not in heading  # how long the past took says nothing of this machine
        assert details[1:] == [
            "  best      accuracy 0.9000 in round 1",
            "  rejected  1 in this round, 2 in all; latest: bob",
        ]


def test_time_left_is_of_the_rounds_after_compiling(terminal):
    with watch_run(terminal.console, "FedPA", 10) as callback:

        def round_of(seconds, t, **kwargs):
            terminal.now += seconds
            callback(event(t, 10, **kwargs))
            return terminal.look()[0]

        terminal.now += 60
        assert terminal.look()[0].endswith("round  0/10            0:01:00  compiling")
        assert round_of(40, 1).endswith("burn-in   0:01:40")
        assert round_of(3, 2).endswith("burn-in   0:01:43  0:00:24 left")
        terminal.now += 2
        assert terminal.look()[0].endswith("0:01:45  0:00:22 left")
        terminal.now += 100  # longer than expected: the other seven still take 3 s each
        assert terminal.look()[0].endswith("0:03:25  0:00:21 left")
        assert round_of(30, 3, phase="sampling").endswith("sampling  0:03:55")
        assert round_of(5, 4, phase="sampling").endswith("sampling  0:04:00  0:00:30 left")
        assert round_of(5, 10, phase="sampling").endswith("finishing")


def test_the_pace_is_that_of_recent_rounds(narrow):
    rounds = 100 + live.RECENT + 10
    with watch_run(narrow.console, "FedPA", rounds) as callback:
        for t in range(1, rounds + 1):
            narrow.now += 1 if t <= 100 else 60
            callback(event(t, rounds))
            if t == 100:
                assert narrow.look()[0].endswith(f"0:00:{live.RECENT + 10} left")
            if t == 100 + live.RECENT:
                assert narrow.look()[0].endswith("0:10:00 left")
        assert "left" not in narrow.look()[0]


def test_it_ends_as_one_line_and_runs_in_a_row_are_a_table(terminal):
    for label, best in [("FedAvg[1] ", 3), ("FedPA[100]", 12)]:
        with watch_run(terminal.console, label, 12, metric="accuracy") as callback:
            for t in range(1, 13):
                terminal.now += 5
                callback(event(t, 12, 0.9 if t == best else 0.3, cohort=NAMES[:9]))
                terminal.look()
    first, second = terminal.seen()
    assert re.match(r"FedAvg\[1\]   ━+  12/12  0:01:00  accuracy 0.3000  best 0.9000 at 3", first)
    assert re.match(r"FedPA\[100\]  ━+  12/12  0:01:00  accuracy 0.9000  best 0.9000 at 12", second)
    assert first.index("best") == second.index("best")
    assert ("loss" in first) == (terminal.width == 120)
    assert first.find("loss") == second.find("loss")
    assert terminal.cursor


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_leaves_the_terminal_as_it_was(terminal, error):
    def fails():
        with watch_run(terminal.console, "FedPA", 12, metric="accuracy") as callback:
            callback(event(7, 12, 0.5, cohort=NAMES))
            terminal.look()
            assert not terminal.cursor
            raise error

    before = sys.stdout, sys.stderr
    with pytest.raises(error):
        fails()
    assert len(terminal.seen()) == 1
    assert re.match(r"FedPA  [━╸ ]{6,}   7/12  0:00:00  accuracy 0.5000", terminal.seen()[0])
    assert terminal.cursor
    assert (sys.stdout, sys.stderr) == before


def test_what_failed_before_the_first_round_leaves_nothing(terminal):
    def fails():
        with watch_run(terminal.console, "FedPA", 12):
            assert len(terminal.look()) == 1
            raise ValueError

    with pytest.raises(ValueError):
        fails()
    assert terminal.seen() == []


def test_there_is_room_for_what_the_terminal_writes_on_ctrl_c(terminal):
    """Without it ^C is on a line of its own, and the view's first line stays there for ever."""
    with watch_run(terminal.console, "F" * 100, 12, metric="accuracy") as callback:
        assert max(map(len, terminal.look())) <= terminal.width - 2
        callback(event(7, 12, 0.5, cohort=NAMES, rejected=NAMES))
        assert max(map(len, terminal.look())) <= terminal.width - 2


class Tty(io.StringIO):
    def isatty(self):
        return True


def test_warnings_appear_above_the_view(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Tty())
    with warnings.catch_warnings(), watch_run(terminal.console, "FedPA", 4) as callback:
        warnings.simplefilter("always")
        warnings.showwarning = _one_line
        callback(event(1, 4, 0.5))
        terminal.look()
        warnings.warn("client [ann] failed", stacklevel=1)
        warning, heading, metrics = terminal.look()
    assert warning == "warning: client [ann] failed"
    assert heading.startswith("FedPA")
    assert metrics.startswith("  metrics")
    assert [text.split()[0] for text in terminal.seen()] == ["warning:", "FedPA"]


def test_errors_that_go_to_a_file_still_do(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with watch_run(terminal.console, "FedPA", 4):
        print("warning: something", file=sys.stderr)
        assert "warning" not in "".join(terminal.look())
    assert sys.stderr.getvalue() == "warning: something\n"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_nothing_wraps_whatever_the_width(width, monkeypatch):
    terminal = Terminal(width, monkeypatch)  # which fails if it does
    names = ["a client with a name that is longer than most terminals are wide " * 3] * 3
    with watch_run(
        terminal.console, "FedPA-SGLD[3×10 steps], seed 3", 1500, metric="f1"
    ) as callback:
        values = {f"eval/metric_{n}": 10.0**n for n in range(-9, 9)} | {"eval/f1": math.nan}
        told = record(1499, 0.5, rejected=names) | values
        callback(Event(1499, 1500, None, None, told, names))
        told = record(1500, 0.5, rejected=names) | values | {"eval/f1": 0.25}
        callback(Event(1500, 1500, None, None, told, names))
        assert len(terminal.look()) == 5
    assert len(terminal.seen()) == 1


def test_with_little_room_words_go_before_they_are_cut(monkeypatch):
    terminal = Terminal(44, monkeypatch)
    with watch_run(terminal.console, "FedPA[5]", 60) as callback:
        callback(event(1, 60))
        callback(event(2, 60))
        assert terminal.look() == ["FedPA[5]  round  2/60  burn-in   0:00:00"]


def test_the_best_is_the_highest_number(narrow):
    with watch_run(narrow.console, "FedPA", 6, metric="accuracy") as callback:
        for t, value in enumerate([math.nan, 0.25, None, 0.75, 0.75, math.nan], start=1):
            callback(event(t, 6, value))
        assert narrow.look()[1:] == [
            "  metrics   accuracy nan  loss 0.5000",
            "  best      accuracy 0.7500 in round 4",
        ]


def test_pieces_are_whole():
    assert join_fitting(["one", "two", "three"], 15, ", ") == "one, two, three"
    assert join_fitting(["one", "two", "three"], 14, ", ") == "one, two, …"
    assert join_fitting(["one", "two", "three"], 10, ", ") == "one, …"
    assert join_fitting(["one", "two", "three"], 14, ", ", more=None) == "one, two"
    assert join_fitting(["longer than that"], 5, ", ") == "longer than that"
    assert join_fitting([], 5, ", ") == ""


def plain():
    """No terminal; whenever it is looked at, the clock has gone on by ten seconds."""
    clock = itertools.count(0.0, 10.0)
    return Console(
        force_terminal=False,
        width=20,
        record=True,
        file=io.StringIO(),
        get_time=lambda: next(clock),
    )


def test_lines_keep_the_latest_metrics_in_sight():
    console = plain()
    with watch_run(console, "FedPA[b]", 4, metric="loss") as callback:
        for t in range(1, 5):
            told = {"phase": "burn-in", "train/rejected": int(t == 3)}
            if t % 2 == 0:
                told |= {"eval/loss": 0.5 * t, "eval/loss_p10": 0.1}
            callback(Event(t, 4, None, None, told))
    assert console.export_text().splitlines() == [
        "FedPA[b]  round 1/4  burn-in",
        "FedPA[b]  round 2/4  burn-in  loss 1.0000  best 1.0000 (round 2)  0:00:20 left",
        "FedPA[b]  round 3/4  burn-in  loss 1.0000  best 1.0000 (round 2)  "
        "rejected 1 (1 in all)  0:00:10 left",
        "FedPA[b]  round 4/4  burn-in  loss 2.0000  best 2.0000 (round 4)  rejected 0 (1 in all)",
    ]


@pytest.mark.parametrize(
    ("rounds", "done"), [(3, 0), (10, 0), (11, 0), (19, 0), (1500, 0), (1500, 1441)]
)
def test_about_ten_lines_and_the_last_round(rounds, done):
    console = plain()
    past = [record(t, 0.5) for t in range(1, done + 1)]
    with watch_run(console, "FedPA", rounds, metric="accuracy", past=past) as callback:
        for t in range(done + 1, rounds + 1):
            callback(event(t, rounds, 0.1))
        assert f"round {rounds}/{rounds}" in console.file.getvalue()  # not only when it is over
    lines = console.export_text().splitlines()
    assert min(rounds, 6) <= len(lines) <= live.LINES + 1
    assert len(set(lines)) == len(lines)
    assert f"round {rounds}/{rounds}" in lines[-1]
    assert ("best 0.5000 (round 1)" in lines[0]) == (done > 0)


@pytest.mark.parametrize(("lines", "expected"), [(1, ["20/20"]), (2, ["15/20", "20/20"])])
def test_fewer_lines_can_be_asked_for(lines, expected):
    """Of a run that starts from another's end: its last round is told again, and not shown."""
    console = plain()
    past = [record(t, 0.5) for t in range(1, 11)]
    with watch_run(console, "FedPA", 20, past=past, lines=lines) as callback:
        for t in range(10, 21):
            callback(event(t, 20))
    assert [line.split()[2] for line in console.export_text().splitlines()] == expected


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_run_that_ends_early_says_where(error):
    console = plain()

    def ends():
        with watch_run(console, "FedPA", 1000) as callback:
            for t in range(1, 151):
                callback(event(t, 1000))
            if error:
                raise error

    with pytest.raises(error) if error else contextlib.nullcontext():
        ends()
    lines = console.export_text().splitlines()
    assert [text.split()[2] for text in lines] == ["100/1000", "150/1000"]


def test_a_dumb_terminal_gets_lines():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, _environ={"TERM": "dumb"}, width=80)
    with watch_run(console, "FedPA", 1) as callback:
        callback(event(1, 1))
    assert file.getvalue() == "FedPA  round 1/1  burn-in\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_quiet_shows_nothing(is_terminal):
    file = io.StringIO()
    with watch_run(
        Console(file=file, force_terminal=is_terminal), "FedPA", 2, quiet=True
    ) as callback:
        assert callback(event(1, 2, 0.5, rejected=["ann"])) is None
        assert callback(event(2, 2, 0.5)) is None
    assert file.getvalue() == ""
