"""A report as one self-contained page, with styles, script, plotly and numbers.

Content of files (labels, settings, names of directories) is text, never markup: it is escaped
everywhere, also in the JSON that the script reads. This module writes the numbers of the charts;
the script (`page.js`) draws them.
"""

import base64
import html
import importlib.resources
import json
import math
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import filesize

from fedpa.errors import FedpaError
from fedpa.experiments.report.comparison import Comparison
from fedpa.experiments.report.conclusions import conclude, explain_controls, interpret_diagnostics
from fedpa.experiments.report.curves import (
    EPSILON,
    Curve,
    Panel,
    find_private,
    find_spread_metrics,
    read_last,
)
from fedpa.experiments.report.looks import (
    COLOURS,
    DARK,
    DASHES,
    GLYPHS,
    SYMBOLS,
    assign_looks,
)
from fedpa.experiments.report.posteriors import MEANINGS, read_predictions
from fedpa.experiments.report.runs import UNUSED, Group, Run, list_differences
from fedpa.experiments.report.tables import (
    format_latex,
    format_markdown,
    format_number,
    make_results,
    mark_best,
)
from fedpa.metrics.streaming import PERCENTILES

MOST_BYTES = 6_000_000
"""Largest size of a page, which mail and repositories accept; plotly takes 4.8 million."""
MOST_MARKS = 4000
"""Most lines in one chart: more are slow, and can't be distinguished."""
MOST_POINTS = 50_000
"""Most points of all lines of a page."""
LEAST_POINTS = (50, 20, 10)
"""Most points of a line: the first number with which the page is small enough."""


def make_page(comparisons: Sequence[Comparison], columns: Sequence[str] = ()) -> str:
    """Make the whole page, as HTML.

    If it is too large, it has fewer points, then no diagnostics; if it is still too large, it is
    refused.

    columns: those of the results, of `tables.COLUMNS`; all by default.
    """
    bare = [part._replace(diagnostics=()) for part in comparisons]
    left_out = "Too many methods: posterior diagnostics are left out to keep the page small"
    left_out += ". A report of fewer runs has them."
    for shown, notices in ((comparisons, []), (bare, [left_out])):
        for least in LEAST_POINTS:
            text = _fill_page(shown, columns, least, notices)
            if len(text.encode()) <= MOST_BYTES:
                return text
    runs = sum(len(group.runs) for part in comparisons for group in part.groups)
    raise FedpaError(
        f"the page of these {runs:,} runs would have {filesize.decimal(len(text.encode()))}, more "
        f"than {filesize.decimal(MOST_BYTES)}: name fewer runs, for example the best of a sweep"
    )


def _fill_page(
    comparisons: Sequence[Comparison], columns: Sequence[str], least: int, notices: Sequence[str]
) -> str:
    groups = [group for part in comparisons for group in part.groups]
    assigned = assign_looks(groups)
    methods = list(assigned)
    looks = [
        {
            "light": COLOURS[look.colour],
            "dark": DARK[look.colour],
            "dash": DASHES[look.dash],
            "symbol": SYMBOLS[look.marker],
            "glyph": GLYPHS[look.marker],
        }
        for look in assigned.values()
    ]
    panels = [panel for part in comparisons for panel in _list_panels(part)]
    lines = [s.line for p in panels for s in p.series]
    drawn = len(lines) + sum(2 * bool(s.band) + len(s.rest) for p in panels for s in p.series)
    most = max(MOST_POINTS // max(drawn, 1), least)
    charts = [
        make_chart(panel, methods, most) | {"id": _name_chart(panel, number)}
        for number, part in enumerate(comparisons)
        for panel in _list_panels(part)
    ]
    sections = {}
    for name, (title, show) in _SECTIONS.items():
        content = ""
        for number, part in enumerate(comparisons):
            heading = f"<h3>{_escape(part.task)}</h3>" if len(comparisons) > 1 else ""
            own = show(part, number, columns)
            content += heading + own if own else ""
        if content:
            sections[name] = title, content
    listed = "".join(f"<li>{_escape(x)}</li>" for x in [*_list_notices(comparisons), *notices])
    lengths = [len(run.history) for group in groups for run in group.runs]
    is_thinned = max((len(line.rounds) for line in lines), default=0) > most
    return string.Template(_read_file("page.html")).substitute(
        title=_escape(
            f"{', '.join(part.task for part in comparisons)}: {_count(len(methods), 'method')}"
        ),
        style=_read_file("page.css"),
        summary=f"{_count(len(lengths), 'run')}, up to {_count(max(lengths), 'round')}.",
        notices=f'<ul class="notice">{listed}</ul>' if listed else "",
        links="".join(f'<li><a href="#{n}">{title}</a></li>' for n, (title, _) in sections.items()),
        sections="".join(
            f'<section id="{name}" aria-labelledby="{name}-title">'
            f'<h2 id="{name}-title">{title}</h2>{content}</section>\n'
            for name, (title, content) in sections.items()
        ),
        thinned=f" Lines of more than {most:,} rounds skip some of them." if is_thinned else "",
        data=dump_json({"charts": charts, "methods": methods, "looks": looks}),
        plotly=_read_file("package_data/plotly.min.js", "plotly"),
        script=_read_file("page.js"),
    )


def _list_panels(part: Comparison) -> list[Panel]:
    return [part.curves, *part.diagnostics, *part.clients, *part.privacy]


def _name_chart(panel: Panel, number: int) -> str:
    """Name a chart's element: panels of two tasks may share a name."""
    return f"chart-{number}-{panel.name}"


def dump_json(data: Any) -> str:
    """Dump JSON that can't end its HTML element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read_file(name: str, package: str = "fedpa.experiments.report") -> str:
    return (importlib.resources.files(package) / name).read_text("utf-8")


def _escape(value: object) -> str:
    return html.escape(str(value))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def make_chart(panel: Panel, methods: Sequence[str], most: int) -> dict[str, Any]:
    """Make a panel's numbers for the script, with lines of at most about `most` points.

    Every trace has its method and kind in `meta`, since plotly reads names as HTML.
    """
    every = _thin_marks(panel)
    traces = []
    for series in panel.series:
        parts: list[tuple[str, str | None, Curve]] = []
        if series.band is not None:  # first, so that it is in the background
            low, high = (_thin(end, most) for end in series.band)
            # Along the top and back along the bottom: one trace, which is shown or hidden.
            rounds = np.concatenate([high.rounds, low.rounds[::-1]])
            values = np.concatenate([high.values, low.values[::-1]])
            if np.all(np.isfinite(values)):
                parts.append(("band", None, Curve(rounds, values)))
        parts += [("marks", seed, c.select(slice(None, None, every))) for seed, c in series.marks]
        parts += [("rest", seed, _thin(c, most)) for seed, c in series.rest]
        parts.append(("line", None, _thin(series.line, most)))
        for role, seed, curve in parts:
            name = series.method if seed is None else f"{series.method}, seed {seed}"
            traces.append(
                {
                    "name": _escape(name),
                    "x": curve.rounds.tolist(),
                    # As many digits as are visible; JSON has no NaN.
                    "y": [float(f"{y:.5g}") if math.isfinite(y) else None for y in curve.values],
                    "meta": {"method": methods.index(series.method), "role": role},
                }
            )
    return {
        "name": panel.name,
        "y": _escape(panel.y),
        "targets": panel.targets,
        "switches": panel.switches,
        "data": traces,
    }


def _thin(curve: Curve, most: int) -> Curve:
    """Keep at most about `most` points, including the last."""
    every = max(math.ceil(len(curve.rounds) / most), 1)
    return curve.select(np.arange(len(curve.rounds))[::-1][::every][::-1])


def _thin_marks(panel: Panel) -> int:
    """Choose the step between evaluations with a mark."""
    number = sum(len(curve.rounds) for series in panel.series for _, curve in series.marks)
    return max(math.ceil(number / MOST_MARKS), 1)


def _list_notices(comparisons: Sequence[Comparison]) -> list[str]:
    """List warnings about the means: unfinished runs, single seeds, unequal lengths."""
    groups = [group for part in comparisons for group in part.groups]
    notices = []
    unfinished = [
        f"{run.directory.name} ({_format_progress(run)})"
        for group in groups
        for run in group.runs
        if not run.is_finished
    ]
    if unfinished:
        notices.append(
            f"Unfinished: {', '.join(unfinished)}. Numbers are from the last complete round."
        )
    single = [group.label for group in groups if len(group.runs) == 1]
    if len(single) == len(groups):
        notices.append("One seed per method: there are no bands, and differences may be chance.")
    elif single:
        notices.append(f"One seed, so no band: {', '.join(dict.fromkeys(single))}.")
    unequal = [group.label for group in groups if len(set(map(len, group.histories))) > 1]
    if unequal:
        notices.append(
            "Seeds of unequal length: means and results use the rounds that all of them have; "
            f"thin lines show the rest: {', '.join(dict.fromkeys(unequal))}."
        )
    for part in comparisons:
        by_length: dict[int, list[str]] = {}
        for group in part.groups:
            by_length.setdefault(min(map(len, group.histories)), []).append(group.label)
        if len(by_length) > 1:
            lengths = "; ".join(
                f"{_count(n, 'round')}: "
                + (", ".join(own) if len(own) < 10 else _count(len(own), "method"))
                for n, own in sorted(by_length.items())
            )
            notices.append(
                f"Methods of unequal length ({part.task}): final values are from different rounds, "
                f"differences from the last round that both have. {lengths}."
            )
    return notices


def _format_progress(run: Run) -> str:
    return f"{len(run.history):,} of {_count(run.rounds, 'round')}"


def _show_curves(part: Comparison, number: int, columns: Sequence[str]) -> str:
    every, panel = _thin_marks(part.curves), part.curves
    if every > 1:
        panel = panel._replace(note=f"{panel.note} One in {every} evaluations has a ×.")
    return _show_chart(panel, number, "chart tall")


def _show_results(part: Comparison, number: int, columns: Sequence[str]) -> str:
    results, said = (
        make_results(part).select(columns),
        [*conclude(part), *explain_controls(part.groups)],
    )
    table = _show_table(results.header, results.rows, results.caption, best=results.best)
    return "".join(f"<p>{_escape(text)}</p>" for text in said) + table


def _show_diagnostics(part: Comparison, number: int, columns: Sequence[str]) -> str:
    if not part.diagnostics:
        return ""
    several = any(len(group.runs) > 1 for group in part.groups)
    shaded = " Shaded: from the lowest to the highest seed." if several else ""
    charts = "".join(_show_chart(panel, number, "chart") for panel in part.diagnostics)
    rejected = any(panel.name == "train-rejected" for panel in part.diagnostics)
    meanings = "".join(f"<li>{_escape(text)}</li>" for text in interpret_diagnostics(part.groups))
    return (
        (f"<ul>{meanings}</ul>" if meanings else "")
        + f'<p class="quiet">Means over the clients of a round, and over seeds.{shaded}</p>'
        f'<div class="grid">{charts}</div>' + ("" if rejected else "<p>No client was rejected.</p>")
    )


def _show_privacy(part: Comparison, number: int, columns: Sequence[str]) -> str:
    private = find_private(part.groups)
    if not private:
        return ""
    charts = "".join(_show_chart(panel, number, "chart") for panel in part.privacy)
    header = ["method", "ε at the end", *(title for title, _ in PRIVACY)]
    rows = []
    for group in private:
        spent = [read_last(history, EPSILON) for history in group.histories if history]
        settings = group.runs[0].settings
        found = [
            settings.get(f"privacy.{name}", settings.get(f"hyperparameters.{name}", "–"))
            for _, name in PRIVACY
        ]
        rows.append([group.label, f"{max(spent):.4g}", *map(str, found)])
    caption = (
        "At the level of clients. Evaluation on held-out clients and the test split is taken to be "
        "public. Of several seeds, the largest ε; each seed alone."
    )
    warning = (
        "Training diagnostics (train/…) and traffic (comm/…) are not noised, so they are not "
        "private: do not publish them."
    )
    return (
        f'<div class="grid">{charts}</div>{_show_table(header, rows, caption)}'
        f"<p><strong>{warning}</strong></p>"
    )


PRIVACY = (
    ("δ", "delta"),
    ("noise multiplier", "noise_multiplier"),
    ("clipping norm", "clip"),
    ("sampling", "sampling"),
    ("accountant", "accountant"),
)
"""Columns of the table of privacy, and the settings that they show."""


def _show_clients(part: Comparison, number: int, columns: Sequence[str]) -> str:
    content = "".join(_show_chart(panel, number, "chart tall") for panel in part.clients)
    for metric in find_spread_metrics(part.groups, "test"):
        header = ["method", *(f"{p}th percentile" for p in PERCENTILES)]
        rows = [[_label_with_ends(group)] for group in part.groups]
        for row, group in zip(rows, part.groups, strict=True):
            for p in PERCENTILES:
                ends = [read_last(history, f"test/{metric}_p{p}") for history in group.histories]
                row.append(format_number(float(np.mean(ends)), ".4f"))
        caption = f"test {metric} after each run's last round: percentiles over clients."
        content += _show_table(header, rows, caption)
    return content


def _show_predictions(part: Comparison, number: int, columns: Sequence[str]) -> str:
    """The posteriors that `fedpa posterior` made of the runs."""
    content = ""
    for run in (run for group in part.groups for run in group.runs):
        found = read_predictions(run.directory)
        if found is None:
            continue
        named = [f"{row[0]}: {MEANINGS[row[0]]}" for row in found.rows if row[0] in MEANINGS]
        caption = (
            f"Test split, parameters of round {found.about.get('round')}, structure "
            f"{found.about.get('structure')}. Trials: measurements on validation clients with "
            f"which the row's settings were chosen. {'; '.join(named)}."
        )
        content += f"<h3>{_escape(run.directory.name)}</h3>"
        content += _show_table(found.header, found.rows, caption)
        if found.figure is not None:
            image = base64.b64encode(found.figure).decode()
            content += (
                '<figure><img alt="Reliability diagram: share of predictions that come true, by '
                f'predicted probability" src="data:image/png;base64,{image}"></figure>'
            )
    return content


def _label_with_ends(group: Group) -> str:
    """Label a group, with the runs' last rounds if they differ."""
    ends = [len(history) for history in group.histories]
    if min(ends) == max(ends):
        return group.label
    return f"{group.label} (rounds {min(ends):,} to {max(ends):,})"


def _show_settings(part: Comparison, number: int, columns: Sequence[str]) -> str:
    rows = [[name, *values] for name, values in list_differences(part.groups).items()]
    caption = (
        f"Fields of config.toml in which the runs differ, with every seed. {UNUSED}: the method "
        "does not use the setting."
    )
    header = ["field", *(group.label for group in part.groups)]
    return (
        _show_table(header, rows, caption, "left")
        if rows
        else "<p>The runs have the same settings.</p>"
    )


def _show_texts(part: Comparison, number: int, columns: Sequence[str]) -> str:
    content = ""
    for kind, write in (("LaTeX", format_latex), ("Markdown", format_markdown)):
        place = f"{kind.lower()}-{number}"
        content += (
            f'<div class="copy"><h3 id="{place}-title">{kind}</h3>'
            f'<button type="button" data-copy="{place}" '
            f'aria-label="Copy the results as {kind}">Copy</button></div>'
            f'<pre id="{place}" tabindex="0" role="region" aria-labelledby="{place}-title">'
            f"{_escape(write(make_results(part).select(columns)))}</pre>"
        )
    return content


def _show_runs(part: Comparison, number: int, columns: Sequence[str]) -> str:
    rows = []
    for group in part.groups:
        for run in group.runs:
            state = "finished" if run.is_finished else "unfinished"
            state += f" early: {run.stopped}" if run.is_finished and run.stopped else ""
            progress = _format_progress(run)
            rows.append([run.directory.name, group.label, str(run.seed), progress, state])
    header = ["directory", "method", "seed", "rounds", "state"]
    return _show_table(header, rows, "All runs on this page.", "left")


_SECTIONS = {
    "curves": ("Learning curves", _show_curves),
    "results": ("Results", _show_results),
    "diagnostics": ("Posterior diagnostics", _show_diagnostics),
    "clients": ("Over clients", _show_clients),
    "posteriors": ("Posteriors", _show_predictions),
    "privacy": ("Privacy", _show_privacy),
    "settings": ("Settings that differ", _show_settings),
    "texts": ("For papers", _show_texts),
    "runs": ("Runs", _show_runs),
}


def _show_chart(panel: Panel, number: int, kind: str) -> str:
    heading = "" if panel.name == "curves" else f"<h3>{_escape(panel.title)}</h3>"
    methods = ", ".join(series.method for series in panel.series)
    spoken = f"{panel.title}: {panel.y} by round, of {methods}"
    return (
        f'<figure>{heading}<div id="{_escape(_name_chart(panel, number))}" class="{kind}" '
        f'role="group" aria-label="{_escape(spoken)}"></div>'
        f"<figcaption>{_escape(panel.note)}</figcaption></figure>"
    )


def _show_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str,
    kind: str = "",
    best: Mapping[int, Sequence[int]] = {},
) -> str:
    """Show a table in a box that scrolls, also by keyboard, with its caption below."""
    head = "".join(f'<th scope="col">{_escape(cell)}</th>' for cell in header)
    body = ""
    for place, row in enumerate(rows):
        first, *others = mark_best(row, place, best, _escape, "<strong>{}</strong>")
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        body += f'<tr><th scope="row">{first}</th>{cells}</tr>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_escape(caption)}">'
        f'<table class="{kind}"><thead><tr>{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><p class="quiet">{_escape(caption)}</p>'
    )
