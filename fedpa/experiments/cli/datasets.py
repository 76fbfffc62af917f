"""`fedpa data list`, `get`, `info`: the benchmarks' data sets, where they are, what they hold."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from fedpa import places
from fedpa.data.readers.cifar import read_cifar100
from fedpa.data.statistics import Sizes, num_labels, sizes
from fedpa.discovery import find_name
from fedpa.errors import FedpaError
from fedpa.experiments.catalogue import (
    CIFAR,
    DATA_SETS,
    cifar_files,
    counts_files,
    dataset_named,
    found,
    open_dataset,
    url_of,
)
from fedpa.experiments.cli.arguments import parse_words, shown
from fedpa.experiments.cli.directories import left_as_found
from fedpa.experiments.download import download
from fedpa.experiments.report.data_tables import data_sets_table, splits_table
from fedpa.experiments.report.file_progress import in_bytes, shown_on

Names = Annotated[
    tuple[str, ...],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="NAME", help=f"{', '.join(DATA_SETS)}."),
]


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

    names: Names = ()
    data_dir: Path | None = None
    """Where to put them; your own data directory if not given."""
    mirror: str | None = None
    """Base URL of a copy of the archives; FEDPA_DATA_URL, or their home, if not given."""


@dataclasses.dataclass(frozen=True)
class InfoCommand:
    """What a data set holds, beside the paper's table 2."""

    names: Names = ()
    data_dir: Path | None = None
    """The only directory to look in; else FEDPA_DATA and your own."""
    json: bool = False
    """Print JSON."""


def list_data_sets(argv: Sequence[str], console: Console) -> None:
    command = parse_words(ListCommand, argv, "fedpa data list", ListCommand())
    rows = [
        (name, dataset.summary, found(name, command.data_dir))
        for name, dataset in DATA_SETS.items()
    ]
    if command.json:
        listed = [
            {"name": name, "summary": summary, "found": str(path) if path else None}
            for name, summary, path in rows
        ]
        _print_json(listed)
        return
    console.print(data_sets_table([(n, s, shown(p) if p else None) for n, s, p in rows]))


def get(argv: Sequence[str], console: Console) -> None:
    command = parse_words(GetCommand, argv, "fedpa data get", GetCommand())
    if not command.names:
        raise FedpaError(f"get needs a name: choose from {', '.join(DATA_SETS)}")
    directory = command.data_dir or places.user_data()
    # Every name and address is right before the first byte is fetched.
    wanted = [
        (archive, url_of(archive, command.mirror))
        for name in _names(command.names)
        for archive in dataset_named(name).archives
    ]
    try:
        with left_as_found(directory), shown_on(Console(stderr=True)):
            for archive, url in wanted:
                path = directory / archive.name
                there = os.path.exists(path)  # False where nobody may look: told below
                download(url, path, archive.checksum)
                done = "there already" if there else in_bytes(path.stat().st_size)
                _say(console, f"{shown(path)}: {done}, its checksum is right")
    except KeyboardInterrupt:
        if any((directory / f"{archive.name}.part").exists() for archive, _ in wanted):
            print("what came is kept: the same command resumes", file=sys.stderr)
        raise


def info(argv: Sequence[str], console: Console) -> None:
    command = parse_words(InfoCommand, argv, "fedpa data info", InfoCommand())
    if not command.names:
        raise FedpaError(f"info needs a name: choose from {', '.join(DATA_SETS)}")
    names = _names(command.names)
    with shown_on(Console(stderr=True)):
        facts = [_facts(name, command.data_dir) for name in names]
    if command.json:
        _print_json(facts if len(facts) > 1 else facts[0])
        return
    for fact in facts:
        console.print(splits_table(fact))
        for note in fact["notes"]:
            _say(console, note)


def _names(words: Sequence[str]) -> list[str]:
    """The data sets that are meant, each once."""
    return list(dict.fromkeys(find_name("data set", word, DATA_SETS) for word in words))


def _facts(name: str, data_dir: Path | None) -> dict[str, Any]:
    """All that `info` says, as JSON would have it."""
    dataset, path = dataset_named(name), found(name, data_dir)
    notes = []
    if name == CIFAR:
        splits = _central(data_dir)
        notes.append("no clients: fedpa data partition makes some, fed_cifar100 is made of it")
    else:
        text = "label" not in dataset.features
        opened = open_dataset(name, data_dir, features=None if text else ["label"])
        splits = {
            split: {
                **sizes(data)._asdict(),
                "classes": None if text else num_labels(data, "label"),
            }
            for split, data in zip(("train", "held_out", "test"), opened, strict=True)
            if data is not None
        }
        if path == found(CIFAR, data_dir):
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
    files = cifar_files(data_dir)
    arrays = dict(zip(files, read_cifar100(files["train"], files["test"]), strict=True))
    return {
        split: dict.fromkeys(Sizes._fields)
        | {"examples": len(own["label"]), "classes": len(set(own["label"].tolist()))}
        for split, own in arrays.items()
    }


def _vocabulary(data_dir: Path | None, notes: list[str]) -> dict[str, int | None]:
    """How many words and tags the counts files list."""
    try:
        words, tags = counts_files(data_dir)
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


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
