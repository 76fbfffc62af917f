"""Data sets as tables: which there are, and what a federation holds beside the paper's figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def data_sets_table(rows: Sequence[tuple[str, str, str | None]]) -> Table:
    """(name, summary, where it was found) of each."""
    view = Table(title="data sets", title_justify="left")
    view.add_column("name", overflow="fold")
    view.add_column("what", overflow="fold")
    view.add_column("found, or – what gets it", overflow="fold")
    for name, summary, where in rows:
        view.add_row(name, summary, f"– fedpa data get {name}" if where is None else where)
    return view


def splits_table(facts: Mapping[str, Any]) -> Table:
    """A row for each split, and one beneath it with the paper's figures where it has them."""
    view = Table(
        title=f"{facts['name']}: {facts['summary']}",
        title_justify="left",
        caption=facts["found"],
        caption_justify="left",
    )
    view.add_column("split", no_wrap=True)
    for title in ("clients", "examples", "per client", "min / median / max", "classes"):
        view.add_column(title, justify="right", no_wrap=True)
    for name, split in facts["splits"].items():
        view.add_row(
            name,
            _number(split["clients"]),
            _number(split["examples"]),
            spread(split["mean"], split["std"]),
            _range(split),
            _number(split["classes"]),
        )
        if paper := split.get("paper"):
            view.add_row(
                "  paper",
                _number(paper["clients"]),
                "",
                spread(paper["mean"], paper["std"]),
                "",
                _number(facts["classes"]),
                style="dim",
            )
    return view


def spread(mean: float | None, std: float | None) -> str:
    """Mean ± standard deviation."""
    if mean is None or std is None:
        return "–"
    return f"{_plain(mean)} ± {_plain(std)}"


def _plain(value: float) -> str:
    """Whole from 10 on, as the paper has them."""
    return f"{value:,.0f}" if value >= 9.95 or value == round(value) else f"{value:.1f}"


def _range(split: Mapping[str, Any]) -> str:
    if split["median"] is None:
        return "–"
    return f"{split['least']:,} / {split['median']:,.10g} / {split['most']:,}"


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
