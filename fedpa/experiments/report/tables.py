"""Comparisons as tables: on a terminal, as `table.csv`, on the page, as Markdown and as LaTeX.

The paper's results (its table 3 and appendix D) can be shown with measured ones. They are shares
here and percent in the paper. No intervals compare them with measured rows, because seeds, software
and partitions differ.
"""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich import box, filesize
from rich.table import Table
from rich.text import Text

from fedpa.errors import find_name, refuse
from fedpa.experiments.report.bootstrap import LEVEL, Interval
from fedpa.experiments.report.comparison import Comparison, Difference, Row
from fedpa.experiments.report.curves import WINDOW, find_split, has_test
from fedpa.experiments.report.looks import COLOURS, assign_looks
from fedpa.experiments.report.runs import Group

_LATEX: dict[str, str | int | None] = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "–": "--",
    "ρ": r"$\rho$",
    "Δ": r"$\Delta$",
}


class Published(NamedTuple):
    method: str
    final: float
    """Final value of the task's metric (mean of the evaluations in the last 100 rounds)."""
    rounds_to: Mapping[float, int | None] = {}


PUBLISHED: Mapping[str, tuple[Published, ...]] = {
    "emnist": (
        Published("AFO", 0.868, {0.84: 546, 0.86: 1291}),  # Reddi et al.
        Published("MIME", 0.849, {0.84: 464, 0.86: None}),  # 1,000 rounds only
        Published("FedAvg[1]", 0.865, {0.84: 451, 0.86: 1360}),
        Published("FedAvg[5]", 0.859, {0.84: 86, 0.86: None}),
        Published("FedPA[5]", 0.873, {0.84: 84, 0.86: 92}),
    ),
    "cifar100": (
        Published("AFO", 0.411, {0.3: 898, 0.4: 1401}),  # Reddi et al.
        Published("MIME", 0.339, {0.3: 680, 0.4: None}),  # 1,000 rounds only
        Published("FedAvg[1]", 0.317, {0.3: 1379, 0.4: None}),
        Published("FedAvg[10]", 0.421, {0.3: 348, 0.4: 896}),
        Published("FedPA[10]", 0.463, {0.3: 348, 0.4: 543}),
    ),
    "stackoverflow-nwp": (
        Published("AFO", 0.234),  # best in round 1049
        Published("FedAvg[1]", 0.228),  # best in round 1074
        Published("FedAvg[5]", 0.230),  # best in round 870
        Published("FedPA[5]", 0.234),  # best in round 805
    ),
    "stackoverflow-lr": (  # recall@5
        Published("AFO", 0.680),
        Published("FedAvg[1]", 0.691),  # precision 0.7458, macro-F1 0.149, micro-F1 0.438
        Published("FedAvg[5]", 0.687),  # precision 0.7865, macro-F1 0.156, micro-F1 0.433
        Published("FedPA[5]", 0.686),  # precision 0.728, macro-F1 0.173, micro-F1 0.440
    ),
}
"""By task; the order is the paper's."""


COLUMNS = (
    "method",
    "seeds",
    "final",
    "difference",
    "test",
    "rounds_to",
    "seconds",
    "bytes_up",
    "bytes_down",
    "rejected",
)
"""Names of columns for `--columns`, in the order of the table."""


class Results(NamedTuple):
    """A table of text cells; a newline in a cell is a line break on a terminal."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The first cell is the method's label, with its round if it is not finished."""
    caption: str
    names: Sequence[str] = ()
    """For each column its name in `COLUMNS`."""
    best: Mapping[int, Sequence[int]] = {}
    """Column → the rows whose mean is the best."""

    def select(self, columns: Sequence[str]) -> "Results":
        """Select columns by their names, in the order of the names; `()` for all."""
        chosen = [k for name in columns for k, own in enumerate(self.names) if own == name]
        if not columns:
            return self
        return Results(
            [self.header[k] for k in chosen],
            [[row[k] for k in chosen] for row in self.rows],
            self.caption,
            [self.names[k] for k in chosen],
            {to: self.best[k] for to, k in enumerate(chosen) if k in self.best},
        )


def parse_columns(text: str | None) -> list[str]:
    """Read names of `COLUMNS` separated by commas; `[]`, which means all, for None."""
    words = [] if text is None else [word.strip() for word in text.split(",") if word.strip()]
    if text is not None and not words:
        raise refuse("columns", text, f"name at least one of {', '.join(COLUMNS)}")
    return list(dict.fromkeys(find_name("columns", word, COLUMNS, "column") for word in words))


def make_results(comparison: Comparison) -> Results:
    """Make a row per method: means over seeds."""
    scale, reference, most = comparison.scale, comparison.reference, comparison.rounds
    tested = has_test(comparison.groups, scale.metric)
    titles = [
        ("method", "method"),
        ("seeds", "seeds"),
        ("final", f"final\n{scale.metric}"),
        *([("difference", f"Δ vs\n{_break_label(reference)}")] if reference is not None else []),
        *([("test", f"test\n{scale.metric}")] if tested else []),
        *(("rounds_to", f"rounds\nto {target:g}") for target in scale.targets),
        ("seconds", "seconds"),
        ("bytes_up", "bytes\nup"),
        ("bytes_down", "bytes\ndown"),
        ("rejected", "rejected"),
    ]
    names, header = zip(*titles, strict=True)
    rows = []
    for row, group in zip(comparison.rows, comparison.groups, strict=True):
        unfinished = sum(not run.is_finished for run in group.runs)
        marks = [f"at round {row.round:,}\nof {most:,}"] if row.round < most else []
        marks += [f"{unfinished} unfinished"] if unfinished else []
        mark = ",\n".join(marks)
        rows.append(
            [
                _break_label(row.method) + (f"\n({mark})" if mark else ""),
                str(row.seeds),
                _format_interval(row.final, ".4f", row.interval),
                *([format_difference(row)] if reference is not None else []),
                *([format_test(row)] if tested else []),
                *(_format_reached(numbers) for numbers in row.rounds_to.values()),
                format_number(row.seconds, ".1f"),
                filesize.decimal(round(row.bytes_up)),
                filesize.decimal(round(row.bytes_down)),
                str(count_rejected(group)),
            ]
        )
    best = _find_best(comparison, names)
    caption = (
        _explain(comparison)
        + "; rejected: clients whose update was not finite, over all rounds and seeds"
    )
    caption += "; bold: the best mean of a column." if best else "."
    return Results(header, rows, caption, names, best)


def count_rejected(group: Group) -> int:
    """Count the clients whose results were rejected, over all rounds and seeds."""
    counts = [record.get("train/rejected", 0) for own in group.histories for record in own]
    return int(np.nansum(counts))


def _find_best(comparison: Comparison, names: Sequence[str]) -> dict[int, list[int]]:
    """Find the rows with the best mean, as rounded in the cells, in each column that has one."""
    if len(comparison.rows) < 2:
        return {}
    sign = -1 if comparison.scale.lower else 1
    values = {
        "final": [sign * round(row.final, 4) for row in comparison.rows],
        "test": [sign * round(row.test, 4) for row in comparison.rows],
    }
    targets = iter(comparison.scale.targets)
    best = {}
    for k, name in enumerate(names):
        own = list(values.get(name, []))
        if name == "rounds_to":
            # A mean over some seeds is not compared with one over all seeds.
            target = next(targets)
            for row in comparison.rows:
                reached = [t for t in row.rounds_to[target] if t is not None]
                is_whole = len(reached) == len(row.rounds_to[target])
                own.append(-round(float(np.mean(reached))) if is_whole else math.nan)
        top = max((value for value in own if math.isfinite(value)), default=None)
        if top is not None:
            best[k] = [place for place, value in enumerate(own) if value == top]
    return best


def _break_label(label: str) -> str:
    """Break FedPA[5] (rho=0.1) in two lines."""
    return label.replace(" (", "\n(")


def make_table(
    comparison: Comparison, published: Sequence[Published] = (), preset: str = "paper"
) -> Table:
    """Make the results table for a terminal, in 80 columns if possible."""
    results = make_results(comparison)
    caption = _explain(comparison)
    if published:
        caption += "; published: the paper's results with its settings, not measured here"
        caption += "" if preset == "paper" else f": not comparable with preset {preset}"
    table = Table(
        title=comparison.title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    method, _, *numbers, up, down, _ = range(len(results.header))  # no seeds, no rejected
    table.add_column("method")
    for k in numbers:
        name = results.header[k]  # next to "final accuracy", "test accuracy" may be shortened
        name = "test" if name.startswith("test\n") else name
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bytes\nup and\ndown", justify="right", no_wrap=True)
    looks = assign_looks(comparison.groups).values()
    for row, look in zip(results.rows, looks, strict=True):
        colour = COLOURS[look.colour]
        # Black means the terminal's text colour, which may be white.
        label = Text(row[method], "" if colour == "#000000" else colour)
        table.add_row(label, *(row[k] for k in numbers), f"{row[up]}\n{row[down]}")
    for other in published:
        # Empty for a target that is not in the paper; – for one that was never reached.
        cells = {f"rounds\nto {t:g}": str(reached or "–") for t, reached in other.rounds_to.items()}
        cells[results.header[2]] = f"{other.final:.3f}"
        shown = [cells.get(results.header[k], "") for k in numbers]
        table.add_row(f"{other.method}\n(published)", *shown, "", style="dim")
    return table


def make_records(comparison: Comparison) -> list[dict[str, Any]]:
    """Make a record per method, as in `table.csv`; None for missing numbers."""
    metric, records = comparison.scale.metric, []
    for row, group in zip(comparison.rows, comparison.groups, strict=True):
        gap = row.difference if isinstance(row.difference, Difference) else None
        record: dict[str, Any] = {"method": row.method, "seeds": row.seeds, "round": row.round}
        record |= {metric: row.final, **_list_ends(metric, row.interval)}
        record |= {"difference": gap.mean if gap else None}
        record |= _list_ends("difference", gap.interval if gap else None)
        record |= {"difference_round": gap.round if gap else None}
        if has_test(comparison.groups, metric):
            record |= {f"test_{metric}": row.test}
        for target, numbers in row.rounds_to.items():
            # The mean, only if every seed reached the target, and the numbers of all seeds.
            reached = [n for n in numbers if n is not None]
            mean = float(np.mean(reached)) if len(reached) == len(numbers) else None
            record |= {f"rounds_to_{target:g}": mean, f"rounds_to_{target:g}_by_seed": numbers}
        record |= {"seconds": row.seconds, "bytes_up": row.bytes_up, "bytes_down": row.bytes_down}
        record |= {"rejected": count_rejected(group)}
        records.append(record)
    return records


def _list_ends(name: str, interval: Interval | None) -> dict[str, float | None]:
    low, high = (None, None) if interval is None else interval
    return {f"{name}_low": low, f"{name}_high": high}


def format_csv(*comparisons: Comparison, columns: Sequence[str] = ()) -> str:
    """Format comparisons as `table.csv`; with several tasks the first column is the task.

    columns: names of `COLUMNS`; default: all.
    """
    records = []
    for part in comparisons:
        task = {"task": part.task} if len(comparisons) > 1 else {}
        for record in make_records(part):
            chosen = [k for name in columns for k in record if name_column(k, part) == name]
            records.append(task | {k: record[k] for k in (chosen if columns else record)})
    out = io.StringIO()
    fields = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(out, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _format_cell(k, v) for k, v in record.items()} for record in records)
    return out.getvalue()


def name_column(field: str, comparison: Comparison) -> str:
    """Name the column of the table that a field of `table.csv` belongs to."""
    if field.removesuffix("_low").removesuffix("_high") == comparison.scale.metric:
        return "final"
    return next(
        (name for name in ("difference", "test", "rounds_to") if field.startswith(f"{name}_")),
        field,
    )


def _format_cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ";".join("–" if n is None else str(n) for n in value)
    if not isinstance(value, float):
        return str(value)
    forms = {"seconds": ".2f", "bytes_up": ".0f", "bytes_down": ".0f"}
    return format(value, "g" if name.startswith("rounds_to_") else forms.get(name, ".6f"))


def _explain(comparison: Comparison) -> str:
    """Explain what the columns are."""
    rows, scale, rounds = comparison.rows, comparison.scale, comparison.rounds
    split, last = find_split(comparison.groups, scale.metric), min(scale.last, rounds)
    final = f"final: mean of the {split} evaluations in the last {last} rounds".replace("  ", " ")
    seeds = {row.seeds for row in rows if row.interval is not None}
    if not seeds:
        final += " (one seed: no interval)"
    else:
        final += f" ± half a {LEVEL:.0%} bootstrap interval over seeds"
        if 2 in seeds:
            final += " (very wide for two seeds)"
    parts = [final]
    if any(isinstance(row.difference, Difference) for row in rows):
        parts.append(f"Δ vs {comparison.reference}: paired by seed, at the same rounds")
    if has_test(comparison.groups, scale.metric):
        parts.append("test: after each run's last round, on all of the test split")
    if scale.targets:
        parts.append(
            f"rounds to: until the average of the last {WINDOW} rounds (at first, of all so far) "
            "reaches the target, – if it does not"
        )
    parts.append("seconds (with compilation) and bytes (of all clients): per run, mean over seeds")
    if any(row.round < rounds for row in rows):
        parts.append("at round: the last that all seeds have; final, seconds and bytes refer to it")
    if comparison.unequal_burn_in is not None:
        parts.append(comparison.unequal_burn_in)
    unpaired: dict[str, list[str]] = {}
    for row in rows:
        if isinstance(row.difference, str):
            unpaired.setdefault(row.difference, []).append(row.method)
    parts += [
        f"no difference from {comparison.reference}: {', '.join(methods)} {reason}"
        for reason, methods in unpaired.items()
    ]
    return "; ".join(parts)


def format_number(value: float, form: str) -> str:
    """Format a number; – if it is missing."""
    return format(value, form) if math.isfinite(value) else "–"


def _format_interval(value: float, form: str, interval: Interval | None) -> str:
    """Format 0.9412 ± 0.0040."""
    if interval is None or not math.isfinite(interval.half):
        return format_number(value, form)
    return f"{format_number(value, form)}\n± {interval.half:.4f}"


def format_difference(row: Row) -> str:
    """Format the difference, with its round if that is not the row's."""
    gap = row.difference
    if not isinstance(gap, Difference):
        return "–" if gap else ""
    text = _format_interval(gap.mean, "+.4f", gap.interval)
    return text if gap.round == row.round else f"{text}\n(at round {gap.round:,})"


def format_test(row: Row) -> str:
    """Format the test split's value, with the runs' last rounds if these differ."""
    text, (first, last) = format_number(row.test, ".4f"), row.ends
    return text if first == last or text == "–" else f"{text}\n(rounds {first:,}\nto {last:,})"


def _format_reached(numbers: Sequence[int | None]) -> str:
    """Format the mean over seeds that reached the target, and their number if not all did."""
    got = [n for n in numbers if n is not None]
    if not got:
        return "–"
    some = f"\n({len(got)} of {len(numbers)}\nseeds)" if len(got) < len(numbers) else ""
    return f"{np.mean(got):.0f}{some}"


def mark_best(
    cells: Sequence[str],
    place: int,
    best: Mapping[int, Sequence[int]],
    escape: Callable[[str], str],
    bold: str,
) -> list[str]:
    """Escape a row's cells, the mean of those that are the best of their column in bold.

    Args:
        cells: The row's; a mean ends with its line.
        place: The row's number.
        best: Column → the rows that are its best.
        escape: Escapes a text for the format.
        bold: Template of the format's bold text.
    """
    marked = []
    for k, cell in enumerate(cells):
        mean, *rest = map(escape, cell.split("\n"))
        marked.append(" ".join([bold.format(mean) if place in best.get(k, ()) else mean, *rest]))
    return marked


def format_markdown(results: Results) -> str:
    """Format a table as GitHub shows it; numbers to the right, what they are below.

    The best mean of a column is in bold.
    """
    rules = ["---", *("---:" for _ in results.header[1:])]
    rows = [
        mark_best(row, place, results.best, _escape_markdown, "**{}**")
        for place, row in enumerate(results.rows)
    ]
    lines = [
        f"| {' | '.join(cells)} |"
        for cells in ([*map(_escape_markdown, results.header)], rules, *rows)
    ]
    return "\n".join([*lines, "", _escape_markdown(results.caption)]) + "\n"


def _escape_markdown(text: str) -> str:
    """Escape characters that end a cell or a row, or start HTML."""
    plain = " ".join(text.split()).replace("\\", "\\\\")
    return plain.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def format_latex(results: Results) -> str:
    """Format a tabular with booktabs' rules; the caption's text is a comment.

    The best mean of a column is in bold.
    """
    header, *rows = (
        " & ".join(mark_best(cells, place, results.best, escape_latex, r"\textbf{{{}}}")) + r" \\"
        for place, cells in enumerate((results.header, *results.rows), start=-1)
    )
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            f"% {escape_latex(results.caption)}",
            rf"\begin{{tabular}}{{l{'r' * (len(results.header) - 1)}}}",
            r"\toprule",
            header,
            r"\midrule",
            # LaTeX would read a row that begins with [ as an argument of the \\ before it.
            *(f"{{}}{row}" if row.startswith("[") else row for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def escape_latex(text: str) -> str:
    """Escape characters that are commands in LaTeX."""
    return " ".join(text.split()).translate(str.maketrans(_LATEX))
