"""Comparisons as tables: on a terminal, as `table.csv`, on the page, as Markdown and as LaTeX.

The paper's own results (its table 3 and appendix D) may stand beside measured ones. They are shares
here, percent there, and never compared with measured rows by intervals: seeds, software and
partitions differ.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from fedpa.experiments.report.bootstrap import LEVEL, Interval
from fedpa.experiments.report.comparison import Comparison, Row
from fedpa.experiments.report.found_runs import Group
from fedpa.experiments.report.summary import WINDOW, format_bytes, split_shown

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "–": "--",
    "ρ": r"$\rho$",
}


class Published(NamedTuple):
    method: str
    final: float | None
    """Of the task's metric at the end (mean of the last 100 rounds' evaluations)."""
    rounds_to: Mapping[float, int | None] = {}
    note: str = ""


def _rows(
    targets: tuple[float, ...], *rows: tuple[str, float | None, tuple[int | None, ...], str]
) -> tuple[Published, ...]:
    return tuple(
        Published(method, final, dict(zip(targets, reached, strict=True)) if reached else {}, note)
        for method, final, reached, note in rows
    )


_SHORTER = "1,000 rounds only"

PUBLISHED: Mapping[str, tuple[Published, ...]] = {
    "emnist": _rows(
        (0.84, 0.86),
        ("AFO", 0.868, (546, 1291), "Reddi et al."),
        ("MIME", 0.849, (464, None), _SHORTER),
        ("FedAvg[1]", 0.865, (451, 1360), ""),
        ("FedAvg[5]", 0.859, (86, None), ""),
        ("FedPA[5]", 0.873, (84, 92), ""),
    ),
    "cifar100": _rows(
        (0.3, 0.4),
        ("AFO", 0.411, (898, 1401), "Reddi et al."),
        ("MIME", 0.339, (680, None), _SHORTER),
        ("FedAvg[1]", 0.317, (1379, None), ""),
        ("FedAvg[10]", 0.421, (348, 896), ""),
        ("FedPA[10]", 0.463, (348, 543), ""),
    ),
    "stackoverflow-nwp": _rows(
        (),
        ("AFO", 0.234, (), "best in round 1049"),
        ("FedAvg[1]", 0.228, (), "best in round 1074"),
        ("FedAvg[5]", 0.230, (), "best in round 870"),
        ("FedPA[5]", 0.234, (), "best in round 805"),
    ),
    "stackoverflow-lr": _rows(
        (),
        ("AFO", 0.680, (), "recall@5"),
        ("FedAvg[1]", 0.691, (), "recall@5; precision 0.7458, macro-F1 0.149, micro-F1 0.438"),
        ("FedAvg[5]", 0.687, (), "recall@5; precision 0.7865, macro-F1 0.156, micro-F1 0.433"),
        ("FedPA[5]", 0.686, (), "recall@5; precision 0.728, macro-F1 0.173, micro-F1 0.440"),
    ),
}
"""By task; the order is the paper's."""


def make_table(
    comparison: Comparison,
    title: str,
    published: Sequence[Published] = (),
    preset: str = "paper",
) -> Table:
    """The comparison as a terminal shows it."""
    metric, rounds, reference = comparison.scale.metric, comparison.rounds, comparison.reference
    table, targets = comparison.rows, comparison.scale.targets
    caption = (
        f"{metric}: mean of the last {min(comparison.scale.last, rounds)} rounds' evaluations"
        + (_explain_interval(table) or " (one seed: no interval)")
        + "; test: after each run's last round, on all of the test split; rounds to: until the "
        f"{WINDOW}-round average gets there; seconds: compiling included; MB: of all clients"
    )
    if any(_standing(row, rounds) for row in table):
        caption += "; at round: the last that all seeds have, up to which numbers are"
    if published:
        caption += "; published: the paper's own, of its preset, not measured here"
        caption += "" if preset == "paper" else f": not comparable with preset {preset}"
    view = Table(
        title=title,
        title_justify="left",
        caption="; ".join([caption, *_explain_unpaired(comparison)]),
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    view.add_column("method", no_wrap=True)
    view.add_column(metric, justify="right", no_wrap=True)
    if reference is not None:
        view.add_column(f"less\n{reference}", justify="right", no_wrap=True)
    view.add_column("test", justify="right", no_wrap=True)
    for target in targets:
        view.add_column(f"rounds\nto {target:g}", justify="right")
    view.add_column("seconds", justify="right", no_wrap=True)
    view.add_column("MB up,\ndown", justify="right", no_wrap=True)
    for row in table:
        mark = _standing(row, rounds)
        view.add_row(
            row.method if mark is None else f"{row.method}\n({mark})",
            *_format_numbers(row, reference is not None, "\n"),
            f"{row.seconds:.1f}",
            f"{row.bytes_up / 1e6:.4g}\n{row.bytes_down / 1e6:.4g}",
        )
    for other in published:
        shown = "" if other.final is None else f"{other.final:.3f}"
        empty = [""] if reference is not None else []
        reached = [_format_published(other, target) for target in targets]
        name = f"{other.method}\n(published)"
        view.add_row(name, shown, *empty, "", *reached, "", "", style="dim")
    return view


def _format_published(other: Published, target: float) -> str:
    """Empty for a target of which the paper says nothing; – is one that was never reached."""
    return "" if target not in other.rounds_to else str(other.rounds_to[target] or "–")


def format_csv(comparison: Comparison) -> str:
    """The comparison as `table.csv`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    metric, targets = comparison.scale.metric, comparison.scale.targets
    writer.writerow(
        ["method", "seeds", "round", metric, f"{metric}_low", f"{metric}_high"]
        + ["difference", "difference_low", "difference_high", "difference_round", f"test_{metric}"]
        + [f"rounds_to_{target:g}{end}" for target in targets for end in ("", "_by_seed")]
        + ["seconds", "bytes_up", "bytes_down"]
    )
    for row in comparison.rows:
        gap = row.difference
        writer.writerow(
            [row.method, row.seeds, row.round, f"{row.final:.6f}", *_ends(row.interval)]
            + (
                ["", "", "", ""]
                if gap is None
                else [f"{gap.mean:.6f}", *_ends(gap.interval), gap.round]
            )
            + [f"{row.test:.6f}"]
            + [cell for target in targets for cell in _by_seed(row.rounds_to[target])]
            + [f"{row.seconds:.2f}", f"{row.bytes_up:.0f}", f"{row.bytes_down:.0f}"]
        )
    return out.getvalue()


def _ends(interval: Interval | None) -> list[str]:
    return ["", ""] if interval is None else [f"{interval.low:.6f}", f"{interval.high:.6f}"]


def _by_seed(numbers: Sequence[int | None]) -> tuple[str, str]:
    """The mean, empty unless every seed got there, and all of them."""
    mean = "" if None in numbers else f"{np.mean([n for n in numbers if n is not None]):g}"
    return mean, ";".join("–" if n is None else str(n) for n in numbers)


class Results(NamedTuple):
    """A table as texts in cells, for the page and for papers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The first cell is the method's label, with how far it has come where that is not all."""
    caption: str


def make_results(comparison: Comparison) -> Results:
    """A row per method: means over seeds."""
    scale, reference = comparison.scale, comparison.reference
    header = [
        "method",
        "seeds",
        f"final {scale.metric}",
        *([f"less {reference}"] if reference is not None else []),
        f"test {scale.metric}",
        *(f"rounds to {target:g}" for target in scale.targets),
        "seconds",
        "bytes up",
        "bytes down",
        "rejected",
    ]
    cells = [
        [
            _mark(row, group, comparison.rounds),
            str(row.seeds),
            *_format_numbers(row, reference is not None, " "),
            format_number(row.seconds, ".1f"),
            format_bytes(round(row.bytes_up)),
            format_bytes(round(row.bytes_down)),
            str(sum(_count_rejected(history) for history in group.histories)),
        ]
        for row, group in zip(comparison.rows, comparison.groups, strict=True)
    ]
    return Results(header, cells, _caption(comparison))


def _mark(row: Row, group: Group, rounds: int) -> str:
    unfinished = sum(not run.finished for run in group.runs)
    marks = [_standing(row, rounds), f"{unfinished} unfinished" if unfinished else None]
    told = ", ".join(mark for mark in marks if mark)
    return f"{row.method} ({told})" if told else row.method


def _count_rejected(history: Sequence[dict[str, object]]) -> int:
    return int(np.nansum([r.get("train/rejected", 0) for r in history]))


def _caption(comparison: Comparison) -> str:
    table, scale = comparison.rows, comparison.scale
    evaluated = [h for group in comparison.groups for h in group.histories if h]
    split = split_shown(evaluated[0], scale.metric) if evaluated else "test"
    final = f"final: mean of the {split} evaluations in the last {scale.last} rounds"
    parts = [
        final + _explain_interval(table),
        "test: after each run's last round, on all of the test split",
    ]
    if any(row.difference is not None for row in table):
        parts.insert(1, "less: the difference from the reference, seed by seed, at the same rounds")
    if scale.targets:
        parts.append(
            f"rounds to: until the {WINDOW}-round average gets there, – if it has not so far"
        )
    parts.append("seconds and bytes: of a run, mean over seeds; rejected: clients, all seeds")
    if any(_standing(row, comparison.rounds) for row in table):
        parts.append(
            "at round: the last that all seeds have, up to which final, seconds, bytes are"
        )
    if comparison.unequal_burn_in is not None:
        parts.append(comparison.unequal_burn_in)
    return "; ".join([*parts, *_explain_unpaired(comparison)]) + "."


def _standing(row: Row, rounds: int) -> str | None:
    """How far the row's numbers reach, where that is not all of the `rounds`."""
    return f"at round {row.round:,} of {rounds:,}" if row.round < rounds else None


def _explain_unpaired(comparison: Comparison) -> list[str]:
    """Why rows have no difference, a sentence for each reason."""
    reasons = dict.fromkeys(row.unpaired for row in comparison.rows if row.unpaired)
    return [
        f"no difference from {comparison.reference}: "
        f"{', '.join(row.method for row in comparison.rows if row.unpaired == reason)} {reason}"
        for reason in reasons
    ]


def _explain_interval(table: Sequence[Row]) -> str:
    """What stands behind a ±; empty where there is none."""
    counts = {row.seeds for row in table if row.interval is not None}
    if not counts:
        return ""
    wide = " (two seeds make a very wide one: they hardly tell how far seeds are apart)"
    return f" ± half a {LEVEL:.0%} bootstrap interval over seeds" + (wide if 2 in counts else "")


def _format_numbers(row: Row, paired: bool, apart: str) -> list[str]:
    """What terminal, page and papers show alike: final, difference, test, rounds to each target."""
    return [
        _format_interval(row.final, ".4f", row.interval, apart),
        *([format_difference(row, apart)] if paired else []),
        format_test(row, apart),
        *(_format_reached(numbers) for numbers in row.rounds_to.values()),
    ]


def format_number(value: float, form: str) -> str:
    """– for what is no number."""
    return format(value, form) if math.isfinite(value) else "–"


def _format_interval(value: float, form: str, interval: Interval | None, apart: str) -> str:
    """0.9412 ± 0.0040."""
    if interval is None or not math.isfinite(interval.half):
        return format_number(value, form)
    return f"{format_number(value, form)}{apart}± {interval.half:.4f}"


def format_difference(row: Row, apart: str = " ") -> str:
    """The difference, with the round it is of where that is not the row's; empty for none."""
    gap = row.difference
    if gap is None:
        return "–" if row.unpaired else ""
    text = _format_interval(gap.mean, "+.4f", gap.interval, apart)
    return text if gap.round == row.round else f"{text}{apart}(at round {gap.round:,})"


def format_test(row: Row, apart: str = " ") -> str:
    """On the test split, with the runs' last rounds where they ended in different ones."""
    text, (first, last) = format_number(row.test, ".4f"), row.ends
    return text if first == last or text == "–" else f"{text}{apart}(rounds {first:,} to {last:,})"


def _format_reached(numbers: Sequence[int | None]) -> str:
    """The mean over seeds where all reached the target; which did where some."""
    got = [n for n in numbers if n is not None]
    if not got:
        return "–"
    if len(got) < len(numbers):
        return f"{np.mean(got):.0f} ({len(got)} of {len(numbers)} seeds)"
    return f"{np.mean(got):.0f}"


def format_markdown(results: Results) -> str:
    """A table as GitHub shows it; numbers to the right, what they are below."""
    rules = ["---", *("---:" for _ in results.header[1:])]
    lines = [_line(results.header), _line(rules), *(_line(row) for row in results.rows)]
    return "\n".join([*lines, "", _markdown_text(results.caption)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_markdown_text(cell) for cell in cells) + " |"


def _markdown_text(text: str) -> str:
    """Bars end a cell, lines end a row, and < begins HTML."""
    plain = " ".join(text.split()).replace("\\", "\\\\")
    return plain.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def format_latex(results: Results) -> str:
    """A tabular with booktabs' rules; what the numbers are is a comment, to make a caption of."""
    columns = "l" + "r" * (len(results.header) - 1)
    rows = [_latex_row(row) for row in results.rows]
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            f"% {escape_latex(results.caption)}",
            f"\\begin{{tabular}}{{{columns}}}",
            "\\toprule",
            _latex_row(results.header),
            "\\midrule",
            *rows,
            "\\bottomrule",
            "\\end{tabular}",
            "",
        ]
    )


def _latex_row(cells: Sequence[str]) -> str:
    # A row that begins with [ would be read as an argument of the \\ before it.
    texts = [escape_latex(cell) for cell in cells]
    first = f"{{}}{texts[0]}" if texts[0].startswith("[") else texts[0]
    return " & ".join([first, *texts[1:]]) + r" \\"


def escape_latex(text: str) -> str:
    """Characters that LaTeX would take for commands, as text."""
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
