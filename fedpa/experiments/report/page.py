"""A report as one page that needs nothing else: styles, script, plotly and numbers are in it.

Whatever comes from files (labels, settings, names of directories) is text, never markup: it is
escaped wherever it is put, also in the JSON that the script reads.
"""

import html
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedpa.errors import FedpaError
from fedpa.experiments.report.comparison import Comparison
from fedpa.experiments.report.figures import COLOURS
from fedpa.experiments.report.found_runs import UNUSED, FoundRun, Group, list_differences
from fedpa.experiments.report.page_charts import (
    DARK,
    LEAST_POINTS,
    charts,
    dash,
    marks_shown,
    points_shown,
)
from fedpa.experiments.report.panels import Panel, at_the_end_over_clients, spread_metrics
from fedpa.experiments.report.summary import format_bytes
from fedpa.experiments.report.tables import (
    format_latex,
    format_markdown,
    format_number,
    make_results,
)
from fedpa.metrics.streaming import PERCENTILES

# The page may run what is in it and load nothing, whatever a library would like to.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; form-action 'none'; base-uri 'none'"
)


Ids = Mapping[tuple[str, str], str]
"""Task and panel's name → the chart's place."""
MOST_BYTES = 6_000_000
"""Of a page, of which plotly is 4.8 million: what mail and repositories take."""


def page(found: Sequence[Comparison]) -> str:
    """The whole page, as HTML; with fewer points, then without diagnostics, if it gets too large.

    What is too large even so is refused.
    """
    bare = [part._replace(diagnostics=()) for part in found]
    left_out = any(part.diagnostics for part in found)
    for own, least in [(own, least) for own in (found, bare) for least in (LEAST_POINTS, 20, 10)]:
        text = _page(own, least, left_out=left_out and own is bare)
        size = len(text.encode())
        if size <= MOST_BYTES:
            return text
    runs = sum(len(group.runs) for part in found for group in part.groups)
    raise FedpaError(
        f"the page of these {runs:,} runs would have {format_bytes(size)}, more than "
        f"{format_bytes(MOST_BYTES)}: name fewer runs, for example the best of a sweep"
    )


def _page(found: Sequence[Comparison], least: int, left_out: bool) -> str:
    methods = list(dict.fromkeys(group.label for part in found for group in part.groups))
    panels = [panel for part in found for panel in _panels(part)]
    figures = charts(panels, methods, least)
    # Panels of two tasks share a name: a chart's place is its number.
    keys = [(part.task, panel.name) for part in found for panel in _panels(part)]
    ids = {key: f"chart-{number}" for number, key in enumerate(keys)}
    for figure, key in zip(figures, keys, strict=True):
        figure["id"] = ids[key]
    data = {
        "charts": figures,
        "methods": [{"label": m, "dash": dash(k)} for k, m in enumerate(methods)],
        "palettes": {"light": COLOURS, "dark": DARK},
    }
    sections = {
        "curves": ("Learning curves", _curves(found, ids)),
        "results": ("Results", _results(found)),
        "diagnostics": ("Posterior diagnostics", _diagnostics(found, ids)),
        "clients": ("Over clients", _clients(found, ids)),
        "settings": ("Settings that differ", _settings(found)),
        "texts": ("For papers", _texts(found)),
        "runs": ("Runs", _runs(found)),
    }
    there = {name: section for name, section in sections.items() if section[1]}
    return _PAGE.format(
        title=_text(_title(found)),
        policy=POLICY,
        style=_file("page.css"),
        summary=_text(_summary(found)),
        notices=_notices(found, left_out),
        links="".join(f'<li><a href="#{n}">{title}</a></li>' for n, (title, _) in there.items()),
        toggles="".join(_toggle(number, method) for number, method in enumerate(methods)),
        sections="".join(
            f'<section id="{name}" aria-labelledby="{name}-title">'
            f'<h2 id="{name}-title">{title}</h2>{content}</section>\n'
            for name, (title, content) in there.items()
        ),
        thinned=_thinned(panels, least),
        data=json_in_page(data),
        plotly=_plotly(),
        script=_file("page.js"),
    )


_PAGE = """<!doctype html>
<html lang="en" data-theme="light">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#main">To the content</a>
<header>
<div class="head"><div><h1>{title}</h1><p class="quiet">{summary}</p></div>
<button id="theme" type="button" aria-label="Use dark colours">Dark</button></div>
{notices}
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<div class="methods"><fieldset><legend>Methods shown in all charts</legend>{toggles}
</fieldset></div>
<main id="main">
{sections}</main>
<footer class="quiet">Charts: hover for numbers, drag to zoom, double-click to go
back.{thinned}</footer>
<div id="said" class="unseen" role="status" aria-live="polite"></div>
<script type="application/json" id="report-data">{data}</script>
<script>{plotly}</script>
<script>
{script}</script>
</body>
</html>
"""


def _panels(part: Comparison) -> list[Panel]:
    return [part.curves, *part.diagnostics, *part.over_clients]


def _thinned(panels: Sequence[Panel], least: int) -> str:
    most = points_shown(panels, least)
    longest = max((len(s.line.rounds) for p in panels for s in p.series), default=0)
    return f" Lines of more than {most:,} rounds skip some between." if longest > most else ""


def json_in_page(data: Any) -> str:
    """JSON that can't end the element it is in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return (importlib.resources.files("fedpa.experiments.report") / name).read_text("utf-8")


def _plotly() -> str:
    return (importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_text(
        "utf-8"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _title(found: Sequence[Comparison]) -> str:
    return ", ".join(part.task for part in found) + ": " + _several(_methods(found), "method")


def _summary(found: Sequence[Comparison]) -> str:
    runs = [run for part in found for group in part.groups for run in group.runs]
    longest = max((len(run.history) for run in runs), default=0)
    return f"{_several(len(runs), 'run')}, up to {_several(longest, 'round')}."


def _methods(found: Sequence[Comparison]) -> int:
    return len({group.label for part in found for group in part.groups})


def _several(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _notices(found: Sequence[Comparison], left_out: bool) -> str:
    """What a reader must know before trusting a mean."""
    groups = [group for part in found for group in part.groups]
    texts = []
    unfinished = [run for group in groups for run in group.runs if not run.finished]
    if unfinished:
        listed = ", ".join(f"{run.directory.name} ({_progress(run)})" for run in unfinished)
        texts.append(f"Unfinished: {listed}. Their numbers are as of the last whole round.")
    single = [group.label for group in groups if len(group.runs) == 1]
    if len(single) == len(groups):
        texts.append("One seed of each method: no bands, and differences may be chance.")
    elif single:
        texts.append(f"One seed, so no band: {', '.join(dict.fromkeys(single))}.")
    unequal = [g.label for g in groups if len({len(r.history) for r in g.runs}) > 1]
    if unequal:
        texts.append(
            "Seeds of unequal length: means and results are of the rounds that all of them have, "
            f"thin lines show the rest: {', '.join(dict.fromkeys(unequal))}."
        )
    texts += [text for part in found if (text := _unequal_methods(part))]
    if left_out:
        texts.append(
            "So many methods that the posterior diagnostics are left out, to keep the page small: "
            "a report of fewer runs has them."
        )
    listed = "".join(f"<li>{_text(text)}</li>" for text in texts)
    return f'<ul class="notice">{listed}</ul>' if texts else ""


def _unequal_methods(part: Comparison) -> str:
    lengths = [min(len(history) for history in group.histories) for group in part.groups]
    if len(set(lengths)) == 1:
        return ""
    by_length = {
        n: [g.label for g, own in zip(part.groups, lengths, strict=True) if own == n]
        for n in sorted(set(lengths))
    }
    told = "; ".join(
        f"{_several(n, 'round')}: {', '.join(own) if len(own) < 10 else f'{len(own)} methods'}"
        for n, own in by_length.items()
    )
    return (
        f"Methods of unequal length ({part.task}): final values are not of the same round, "
        f"differences are, the last that both have. {told}."
    )


def _progress(run: FoundRun) -> str:
    return f"{len(run.history):,} of {_several(run.rounds, 'round')}"


def _toggle(number: int, method: str) -> str:
    lengths = {"solid": "none", "dash": "7 4", "dashdot": "7 3 2 3", "dot": "2 3"}
    lengths |= {"longdash": "11 4", "longdashdot": "11 3 2 3"}
    pattern = lengths.get(dash(number), "5 2 1 2")
    return (
        f'<label><input type="checkbox" checked data-method="{number}">'
        '<svg width="34" height="10" aria-hidden="true"><line x1="0" y1="5" x2="34" y2="5" '
        f'stroke-width="3" stroke-dasharray="{pattern}" data-swatch="{number}" '
        f'stroke="{COLOURS[number % len(COLOURS)]}"/></svg><span>{_text(method)}</span></label>'
    )


def _chart(panel: Panel, place: str, title: str | None, tall: bool = False) -> str:
    heading = "" if title is None else f"<h3>{_text(title)}</h3>"
    spoken = f"{title or panel.title}: {panel.y} by round, of {', '.join(_drawn(panel))}"
    return (
        f'<figure>{heading}<div id="{place}" class="chart{" tall" if tall else ""}" role="group" '
        f'aria-label="{_text(spoken)}"></div><figcaption>{_text(panel.note)}</figcaption></figure>'
    )


def _drawn(panel: Panel) -> list[str]:
    return [series.method for series in panel.series]


def _of_task(part: Comparison, found: Sequence[Comparison]) -> str | None:
    """A heading where there are several tasks."""
    return part.task if len(found) > 1 else None


def _headed(part: Comparison, found: Sequence[Comparison], content: str) -> str:
    title = _of_task(part, found)
    return content if title is None or not content else f"<h3>{_text(title)}</h3>{content}"


def _curves(found: Sequence[Comparison], ids: Ids) -> str:
    return "".join(
        _chart(
            _with_thinning(part.curves), ids[part.task, "curves"], _of_task(part, found), tall=True
        )
        for part in found
    )


def _with_thinning(panel: Panel) -> Panel:
    every = marks_shown(panel)
    if every == 1:
        return panel
    return panel._replace(note=f"{panel.note} Of the evaluations, one in {every} has its ×.")


def _diagnostics(found: Sequence[Comparison], ids: Ids) -> str:
    several = any(len(group.runs) > 1 for part in found for group in part.groups)
    shaded = " Shaded: from the lowest seed to the highest." if several else ""
    content = ""
    for part in found:
        shown = "".join(_chart(p, ids[part.task, p.name], p.title) for p in part.diagnostics)
        rejected = not any(p.name == "train-rejected" for p in part.diagnostics)
        none = "<p>No client was rejected.</p>" if rejected and _rounds(part) else ""
        content += _headed(part, found, f'<div class="grid">{shown}</div>{none}' if shown else "")
    about = f'<p class="quiet">Means over the clients of a round, and over seeds.{shaded}</p>'
    return about + content if content else ""


def _rounds(part: Comparison) -> bool:
    return any(history for group in part.groups for history in group.histories)


def _clients(found: Sequence[Comparison], ids: Ids) -> str:
    content = ""
    for part in found:
        shown = "".join(
            _chart(p, ids[part.task, p.name], p.title, tall=True) for p in part.over_clients
        )
        tables = ""
        for metric in spread_metrics(part.groups, "test"):
            header = ["method", *(f"{p}th percentile" for p in PERCENTILES)]
            rows = [
                [
                    _with_ends(group),
                    *(format_number(v, ".4f") for v in at_the_end_over_clients(group, metric)),
                ]
                for group in part.groups
            ]
            caption = f"test {metric} after each run's last round: percentiles over clients."
            tables += _table(header, rows, caption)
        content += _headed(part, found, shown + tables)
    return content


def _with_ends(group: Group) -> str:
    """The label, with the runs' last rounds where they ended in different ones."""
    ends = [len(history) for history in group.histories]
    if min(ends) == max(ends):
        return group.label
    return f"{group.label} (rounds {min(ends):,} to {max(ends):,})"


def _results(found: Sequence[Comparison]) -> str:
    content = ""
    for part in found:
        content += _headed(part, found, _table(*make_results(part)))
    return content


def _settings(found: Sequence[Comparison]) -> str:
    """Within a task: two tasks differ in nearly everything."""
    caption = (
        f"Fields of config.toml in which the runs differ; of seeds, every value. {UNUSED}: a "
        "setting that the method does not use."
    )
    content = ""
    for part in found:
        rows = [[name, *values] for name, values in list_differences(part.groups).items()]
        header = ["field", *(group.label for group in part.groups)]
        table = _table(header, rows, caption, left=True)
        content += _headed(part, found, table if rows else "<p>The runs differ in none.</p>")
    return content


def _texts(found: Sequence[Comparison]) -> str:
    content = ""
    for number, part in enumerate(found):
        results = make_results(part)
        texts = {"LaTeX": format_latex(results), "Markdown": format_markdown(results)}
        boxes = "".join(
            f'<div class="copy"><h3 id="{place}-title">{kind}</h3>'
            f'<button type="button" data-copy="{place}" '
            f'aria-label="Copy the results as {kind}">Copy</button></div>'
            f'<pre id="{place}" tabindex="0" role="region" aria-labelledby="{place}-title">'
            f"{_text(text)}</pre>"
            for kind, text in texts.items()
            for place in [f"{kind.lower()}-{number}"]
        )
        content += _headed(part, found, boxes)
    return content


def _runs(found: Sequence[Comparison]) -> str:
    rows = [
        [run.directory.name, part.task, group.label, str(run.seed), _progress(run), _state(run)]
        for part in found
        for group in part.groups
        for run in group.runs
    ]
    header = ["directory", "task", "method", "seed", "rounds", "state"]
    return _table(header, rows, "Every run that this page is made of.", left=True)


def _state(run: FoundRun) -> str:
    if not run.finished:
        return "unfinished"
    return "finished" if not run.stopped else f"finished early: {run.stopped}"


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], caption: str, left: bool = False
) -> str:
    """A table that scrolls in a box of its own, by keyboard, too; what it says stands below it."""
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{_text(row[0])}</th>'
        + "".join(f"<td>{_text(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(caption)}">'
        f"<table{' class=left' if left else ''}><thead><tr>{head}</tr></thead>"
        f'<tbody>{body}</tbody></table></div><p class="quiet">{_text(caption)}</p>'
    )
