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
from fedpa.errors import FedpaError, find_name, match_name, suggest
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
from fedpa.experiments.cli.commands import COMMANDS
from fedpa.experiments.download import download
from fedpa.experiments.report.live import show_file_progress

NAMES = {"positional": "NAME", "help": f"{', '.join(DATA_SETS)}."}


@dataclasses.dataclass(frozen=True)
class ListCommand:
    """The benchmarks' data sets, and where each was found."""

    data_dir: Path | None = None
    """The only directory to look in; else FEDPA_DATA and your own."""
    json: bool = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True)
class GetCommand:
    """Download data sets. What broke off is resumed; what is there is kept."""

    names: tuple[str, ...] = dataclasses.field(default=(), metadata=NAMES)
    data_dir: Path | None = None
    """Where to put them; your own data directory if not given."""
    mirror: str | None = None
    """Base URL of a copy of the archives; FEDPA_DATA_URL, or their home, if not given."""


@dataclasses.dataclass(frozen=True)
class InfoCommand:
    """What a data set holds, beside the paper's table 2."""

    names: tuple[str, ...] = dataclasses.field(default=(), metadata=NAMES)
    data_dir: Path | None = None
    """The only directory to look in; else FEDPA_DATA and your own."""
    json: bool = False
    """Print JSON."""


def list_data_sets(argv: Sequence[str], console: Console) -> None:
    command = parse_words(ListCommand, argv, "fedpa data list")
    rows = [
        (name, dataset.summary, find_dataset(name, command.data_dir))
        for name, dataset in DATA_SETS.items()
    ]
    if command.json:
        listed = [
            {"name": name, "summary": summary, "found": str(path) if path else None}
            for name, summary, path in rows
        ]
        _print_json(listed)
        return
    console.print(data_sets_table([(n, s, format_path(p) if p else None) for n, s, p in rows]))


def get(argv: Sequence[str], console: Console) -> None:
    command = parse_words(GetCommand, argv, "fedpa data get")
    if not command.names:
        raise FedpaError(f"get needs a name: choose from {', '.join(DATA_SETS)}")
    directory = command.data_dir or places.user_data()
    # Every name and address is right before the first byte is fetched.
    wanted = [
        (archive, get_url(archive, command.mirror))
        for name in _names(command.names)
        for archive in get_dataset(name).archives
    ]
    try:
        with remove_if_empty(directory), show_file_progress(Console(stderr=True)):
            for archive, url in wanted:
                path = directory / archive.name
                there = os.path.exists(path)  # False where nobody may look: told below
                download(url, path, archive.checksum)
                done = "there already" if there else filesize.decimal(path.stat().st_size)
                say(console, f"{format_path(path)}: {done}, its checksum is right")
    except KeyboardInterrupt:
        if any((directory / f"{archive.name}.part").exists() for archive, _ in wanted):
            print("what came is kept: the same command resumes", file=sys.stderr)
        raise


def info(argv: Sequence[str], console: Console) -> None:
    command = parse_words(InfoCommand, argv, "fedpa data info")
    if not command.names:
        raise FedpaError(f"info needs a name: choose from {', '.join(DATA_SETS)}")
    names = _names(command.names)
    with show_file_progress(Console(stderr=True)):
        facts = [_facts(name, command.data_dir) for name in names]
    if command.json:
        _print_json(facts if len(facts) > 1 else facts[0])
        return
    for fact in facts:
        console.print(splits_table(fact))
        for note in fact["notes"]:
            say(console, note)


def _names(words: Sequence[str]) -> list[str]:
    """The data sets that are meant, each once."""
    return list(dict.fromkeys(find_name("data set", word, DATA_SETS) for word in words))


def _facts(name: str, data_dir: Path | None) -> dict[str, Any]:
    """All that `info` says, as JSON would have it."""
    dataset, path = get_dataset(name), find_dataset(name, data_dir)
    notes = []
    if name == CIFAR:
        splits = _central(data_dir)
        notes.append("no clients: fedpa data partition makes some, fed_cifar100 is made of it")
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
            notes.append(f"dealt from {CIFAR} by Pachinko, seed 0")
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
    """How many words and tags the counts files list."""
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
        raise FedpaError(f"{tags} is cut or no JSON: get it again") from None
    notes.append(
        f"{num_words:,} words in {words.name}, {num_tags:,} tags in {tags.name} (the paper takes "
        "the first 10,000 and 500)"
    )
    return {"words": num_words, "tags": num_tags}


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


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


def partition(argv: Sequence[str], console: Console) -> None:
    """Imported when it is asked for: it draws."""
    from fedpa.experiments.cli.partition import main

    main(argv, console)


SUBCOMMANDS = {
    "list": (list_data_sets, "the benchmarks' data sets, and where each was found"),
    "get": (get, "download data sets; what broke off is resumed"),
    "info": (info, "what a data set holds, beside the paper's table 2"),
    "partition": (partition, "deal a data set without clients to clients"),
}


def main(argv: Sequence[str], console: Console) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        _help(console)
        return
    word = match_name(argv[0], SUBCOMMANDS)
    if word is None:
        raise FedpaError(f"unknown command {'data ' + argv[0]!r}: {suggest(argv[0], SUBCOMMANDS)}")
    SUBCOMMANDS[word][0](argv[1:], console)


def _help(console: Console) -> None:
    summary = COMMANDS["data"].summary.capitalize()
    console.print(f"usage: fedpa data COMMAND [OPTIONS]\n\n{summary}.\n\ncommands:")
    for name, (_, does) in SUBCOMMANDS.items():
        console.print(f"  {name:<10} {does}", highlight=False, markup=False)
    console.print(
        "\nData sets are looked for in --data-dir if it is given, else in the directory that\n"
        "FEDPA_DATA (of the environment) names and in your own data directory.\n\n"
        "fedpa data COMMAND --help lists a command's options.",
        highlight=False,
        markup=False,
    )
