"""`fedpa data`: find, download, describe and partition the benchmarks' data sets."""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import filesize
from rich.console import Console
from rich.table import Table

from fedpa import places
from fedpa.data.readers.cifar import read_cifar100
from fedpa.errors import FedpaError, find_name
from fedpa.experiments.catalogue import (
    CIFAR,
    DATA_SETS,
    Sizes,
    count_labels,
    count_sizes,
    find_cifar,
    find_counts,
    find_dataset,
    get_dataset,
    get_url,
    open_dataset,
)
from fedpa.experiments.cli.arguments import format_path, parse_words, remove_if_empty, say
from fedpa.experiments.download import download
from fedpa.experiments.report.live import show_file_progress

NAMES = {"positional": "NAME", "help": f"One or more of {', '.join(DATA_SETS)}."}


@dataclasses.dataclass(frozen=True)
class ListCommand:
    """List the benchmarks' data sets, and where each was found."""

    data_dir: Path | None = None
    """Look only in this directory (default: $FEDPA_DATA, then ~/.local/share/fedpa)."""
    json: bool = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True)
class GetCommand:
    """Download data sets. Interrupted downloads are resumed, complete files kept.

    example:
      fedpa data get fed_emnist --data-dir data
    """

    names: tuple[str, ...] = dataclasses.field(metadata=NAMES)
    data_dir: Path | None = None
    """Directory to write to (default: ~/.local/share/fedpa)."""
    mirror: str | None = None
    """Base URL of a copy of the archives (default: $FEDPA_DATA_URL, else the original site)."""


@dataclasses.dataclass(frozen=True)
class InfoCommand:
    """Describe data sets: clients and examples, with the numbers of the paper's table 2."""

    names: tuple[str, ...] = dataclasses.field(metadata=NAMES)
    data_dir: Path | None = None
    """Look only in this directory (default: $FEDPA_DATA, then ~/.local/share/fedpa)."""
    json: bool = False
    """Print JSON."""


def list_data_sets(argv: Sequence[str], console: Console) -> None:
    command = parse_words(ListCommand, argv, "fedpa data list")
    found = {name: find_dataset(name, command.data_dir) for name in DATA_SETS}
    if command.json:
        listed = [
            {"name": name, "summary": DATA_SETS[name].summary, "found": str(path) if path else None}
            for name, path in found.items()
        ]
        _print_json(listed)
        return
    view = Table(title="data sets", title_justify="left")
    for title in ("name", "what", "where, or – how to get it"):
        view.add_column(title, overflow="fold")
    for name, path in found.items():
        where = f"– fedpa data get {name}" if path is None else format_path(path)
        view.add_row(name, DATA_SETS[name].summary, where)
    console.print(view)


def get(argv: Sequence[str], console: Console) -> None:
    command = parse_words(GetCommand, argv, "fedpa data get")
    directory = command.data_dir or places.user_data()
    # Check every name and address before the first download.
    wanted = [
        (archive, get_url(archive, command.mirror))
        for name in _find_names(command.names)
        for archive in get_dataset(name).archives
    ]
    try:
        with remove_if_empty(directory), show_file_progress(Console(stderr=True)):
            for archive, url in wanted:
                path = directory / archive.name
                there = os.path.exists(path)  # False without permission: reported below
                download(url, path, archive.checksum)
                done = "exists" if there else filesize.decimal(path.stat().st_size)
                say(console, f"{format_path(path)}: {done}, checksum verified")
    except KeyboardInterrupt:
        if any((directory / f"{archive.name}.part").exists() for archive, _ in wanted):
            print("the part received is kept: the same command resumes", file=sys.stderr)
        raise


def info(argv: Sequence[str], console: Console) -> None:
    command = parse_words(InfoCommand, argv, "fedpa data info")
    names = _find_names(command.names)
    with show_file_progress(Console(stderr=True)):
        facts = [_describe(name, command.data_dir) for name in names]
    if command.json:
        _print_json(facts if len(facts) > 1 else facts[0])
        return
    for fact in facts:
        console.print(splits_table(fact))
        for note in fact["notes"]:
            say(console, note)


def _find_names(words: Sequence[str]) -> list[str]:
    """Match the names of data sets, each once."""
    return list(dict.fromkeys(find_name("data set", word, DATA_SETS) for word in words))


def _describe(name: str, data_dir: Path | None) -> dict[str, Any]:
    """Collect the output of `info` as plain values."""
    dataset, path = get_dataset(name), find_dataset(name, data_dir)
    notes = []
    if name == CIFAR:
        splits = _central(data_dir)
        notes.append("no clients: fedpa data partition makes clients; fed_cifar100 is made from it")
    else:
        text = "label" not in dataset.features
        opened = open_dataset(name, data_dir, features=None if text else ["label"])
        splits = {
            split: {
                **count_sizes([data.num_examples(each) for each in data.ids])._asdict(),
                "classes": None if text else count_labels(data, "label"),
            }
            for split, data in zip(("train", "held_out", "test"), opened, strict=True)
            if data is not None
        }
        if path == find_dataset(CIFAR, data_dir):
            notes.append(f"partitioned from {CIFAR} by Pachinko, seed 0")
    for split, figures in dataset.paper.items():
        splits[split]["paper"] = figures._asdict()
    facts: dict[str, Any] = {
        "name": name,
        "summary": dataset.summary,
        "found": str(path),
        "classes": dataset.classes,
        "splits": splits,
        "notes": notes,
    }
    if name == "stackoverflow":
        facts |= _vocabulary(data_dir, notes)
    return facts


def _central(data_dir: Path | None) -> dict[str, dict[str, Any]]:
    files = find_cifar(data_dir)
    arrays = dict(zip(files, read_cifar100(files["train"], files["test"]), strict=True))
    return {
        split: dict.fromkeys(Sizes._fields)
        | {"examples": len(own["label"]), "classes": len(set(own["label"].tolist()))}
        for split, own in arrays.items()
    }


def _vocabulary(data_dir: Path | None, notes: list[str]) -> dict[str, int | None]:
    """Count the words and tags in the counts files."""
    try:
        words, tags = find_counts(data_dir)
    except FedpaError as error:
        notes.append(str(error))
        return {"words": None, "tags": None}
    with words.open("rb") as lines:
        num_words = sum(1 for line in lines if line.strip())
    try:
        num_tags = len(json.loads(tags.read_bytes()))
    except (ValueError, TypeError):
        raise FedpaError(f"{tags} is truncated or not JSON: download it again") from None
    notes.append(
        f"{num_words:,} words in {words.name}, {num_tags:,} tags in {tags.name} (the paper takes "
        "the first 10,000 and 500)"
    )
    return {"words": num_words, "tags": num_tags}


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def splits_table(facts: Mapping[str, Any]) -> Table:
    """Make a row for each split, followed by the paper's numbers if it has them."""
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
        sizes = "–"
        if split["median"] is not None:
            sizes = f"{split['least']:,} / {split['median']:,.10g} / {split['most']:,}"
        counts = (split["clients"], split["examples"], split["classes"])
        clients, examples, classes = map(_format_count, counts)
        view.add_row(name, clients, examples, _format_spread(split), sizes, classes)
        if paper := split.get("paper"):
            clients, classes = _format_count(paper["clients"]), _format_count(facts["classes"])
            view.add_row("  paper", clients, "", _format_spread(paper), "", classes, style="dim")
    return view


def _format_spread(sizes: Mapping[str, Any]) -> str:
    """Format mean ± standard deviation; without decimals from 10 on, as in the paper."""
    if sizes["mean"] is None or sizes["std"] is None:
        return "–"
    mean, std = (
        f"{value:,.0f}" if value >= 9.95 or value == round(value) else f"{value:.1f}"
        for value in (sizes["mean"], sizes["std"])
    )
    return f"{mean} ± {std}"


def _format_count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
