"""`fedpa data partition`: partition a data set, write TFF's layout and draw it."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fedpa.data.partition import (
    Partition,
    by_column,
    by_quantity,
    dirichlet_label_skew,
    first_missing,
    number_clients,
    pachinko,
    tabulate_labels,
)
from fedpa.data.readers.cifar import ALPHA, BETA, CLIENTS, EACH, read_cifar100, seed_split
from fedpa.data.readers.hdf5 import write_partition
from fedpa.data.readers.table import read_central
from fedpa.errors import FedpaError, check_integer, find_name, match_name, refuse
from fedpa.experiments.catalogue import CIFAR, count_sizes, find_cifar
from fedpa.experiments.cli.arguments import format_path, parse_words, remove_if_empty, say
from fedpa.experiments.cli.commands.data import splits_table
from fedpa.experiments.report.figures import draw_partition, render_figure
from fedpa.experiments.report.live import show_file_progress
from fedpa.experiments.staged_files import publish, remove_leftovers, stage_files
from fedpa.training.run_directory import check_free, writing

APPLY = {
    "column": {"column"},
    "dirichlet": {"clients", "test_clients", "concentration"},
    "quantity": {"clients", "test_clients", "concentration", "sigma"},
    "pachinko": {
        "clients",
        "test_clients",
        "examples_per_client",
        "concentration",
        "fine_concentration",
        "coarse",
    },
}
"""scheme → the options that apply to it."""
PICTURE = "clients-by-labels"
STAGED = "partition"
"""Name of the directory in which the files are staged."""


@dataclasses.dataclass(frozen=True)
class PartitionCommand:
    """Partition a data set into clients; write TFF's HDF5 layout and a figure.

    schemes:
      column     one client per value of a column
      dirichlet  clients of equal size, label proportions from a Dirichlet distribution
      quantity   clients of unequal sizes, examples drawn at random
      pachinko   coarse, then fine labels are drawn, as for the paper's CIFAR-100

    example:
      fedpa data partition mine.csv --scheme dirichlet --clients 50 --out mine
    """

    source: str = dataclasses.field(
        metadata={
            "positional": "SOURCE",
            "help": f"{CIFAR}, or a file with arrays or columns of one length (.npz, .csv, "
            ".parquet, .feather).",
        },
    )
    scheme: str
    """How examples are assigned: column, dirichlet, quantity or pachinko."""
    out: Path
    """Directory to write to, new or empty."""
    clients: int | None = None
    """Number of clients, at least 1 (default: 500 for CIFAR-100 by pachinko)."""
    test_clients: int | None = None
    """cifar-100-binary: clients of the test split, at least 1 (default: a fifth of --clients)."""
    test_share: float | None = None
    """Files: share of each client's examples for its test split, in [0, 1) (default: 0.2)."""
    seed: int = 0
    """Random seed, at least 0. The same seed gives the same partition."""
    column: str | None = None
    """column: name of the column whose values are the clients."""
    label: str | None = None
    """Name of the label's array or column (default: label or y, if there is one)."""
    coarse: str | None = None
    """pachinko: name of the coarse label (default: coarse_label)."""
    concentration: float | None = None
    """Concentration > 0 of the Dirichlet distribution: of labels (dirichlet), of coarse labels
    (pachinko) or of sizes (quantity); lower is more unequal (default: 0.1, quantity: see
    --sigma)."""
    fine_concentration: float | None = None
    """pachinko: concentration > 0 of the fine labels in a coarse one (default: 10)."""
    sigma: float | None = None
    """quantity: σ ≥ 0 of the sizes' log-normal distribution (default: 1)."""
    examples_per_client: int | None = None
    """pachinko: examples per client, at least 1 (default: 100)."""
    data_dir: Path | None = None
    """Look for cifar-100-binary only in this directory (default: $FEDPA_DATA, then
    ~/.local/share/fedpa)."""


def main(argv: Sequence[str], console: Console) -> None:
    command = parse_words(PartitionCommand, argv, "fedpa data partition")
    command = dataclasses.replace(
        command,
        source=match_name(command.source, [CIFAR]) or command.source,
        scheme=find_name("scheme", command.scheme, APPLY),
    )
    _check(command)
    out = command.out
    started = time.perf_counter()
    with show_file_progress(Console(stderr=True)):
        dealt = _deal_splits(command)
        label = _label(command, dealt["train"].arrays)
        files = _write(command, dealt, label)
    console.print(splits_table(_describe(command, dealt, label)))
    if label is not None:
        _, table = tabulate_labels(dealt["train"].arrays[label], dealt["train"].rows)
        kinds = (table > 0).sum(axis=1)
        console.print(
            f"a client has {kinds.mean():.1f} of {table.shape[1]} labels on average "
            f"({kinds.min()} to {kinds.max()})",
            highlight=False,
        )
    seconds = time.perf_counter() - started
    say(console, f"written to {format_path(out)}: {', '.join(files)} ({seconds:.0f} s)")


def _check(command: PartitionCommand) -> None:
    """Check the options before anything is read."""
    for option in sorted(set().union(*APPLY.values())):
        value = getattr(command, option)
        if value is not None and option not in APPLY[command.scheme]:
            others = ", ".join(scheme for scheme, options in APPLY.items() if option in options)
            raise refuse(option, value, f"does not apply to {command.scheme}, only to {others}")
    central = command.source == CIFAR
    if central and command.test_share is not None:
        raise refuse("test_share", command.test_share, f"{CIFAR} has its own test split")
    for option in () if central else ("test_clients", "data_dir"):
        value = getattr(command, option)
        if value is not None:
            shown = str(value) if isinstance(value, Path) else value
            raise refuse(option, shown, f"applies to {CIFAR} only")
    if command.scheme == "column" and command.column is None:
        raise FedpaError("column needs --column NAME, the column whose values name the clients")
    default = command.scheme == "pachinko" and central
    if command.clients is None and "clients" in APPLY[command.scheme] and not default:
        raise FedpaError(f"{command.scheme} needs --clients N")
    for option in ("clients", "test_clients", "examples_per_client"):
        if getattr(command, option) is not None:
            check_integer(option, getattr(command, option), 1)
    for option in ("concentration", "fine_concentration"):
        value = getattr(command, option)
        if value is not None and not 0 < value < float("inf"):
            raise refuse(option, value, "must be a finite number > 0")
    if command.sigma is not None and command.concentration is not None:
        raise refuse("sigma", command.sigma, "give either --sigma or --concentration")
    if command.test_share is not None and not 0 <= command.test_share < 1:
        raise refuse("test_share", command.test_share, "must be from 0 to below 1")
    check_integer("seed", command.seed, 0)
    check_free(command.out, overwrite=True)
    remove_leftovers(command.out / STAGED)
    if command.out.is_dir() and any(command.out.iterdir()):
        raise refuse("out", str(command.out), "is not empty: choose another directory")


def _deal_splits(command: PartitionCommand) -> dict[str, Partition]:
    """Partition each split of the source."""
    if command.source == CIFAR:
        files = find_cifar(command.data_dir)
        splits = zip(CLIENTS, read_cifar100(files["train"], files["test"]), strict=True)
        return {split: _deal(command, split, arrays) for split, arrays in splits}
    arrays = read_central(Path(command.source), command.column or "")
    share = 0.2 if command.test_share is None else command.test_share
    return _put_aside(_deal(command, "train", arrays), share, command.seed)


def _deal(command: PartitionCommand, split: str, arrays: Mapping[str, np.ndarray]) -> Partition:
    if command.scheme == "column":
        values = _array(arrays, "column", command.column)
        rest = {name: array for name, array in arrays.items() if name != command.column}
        names = [str(value) for value in np.unique(values)]
        for name in names:
            if not name or name == "." or "/" in name or "\0" in name:
                raise refuse("column", name, "must have names without '/', not '.' or empty")
        return Partition(rest, by_column(values), names)
    num_clients, seed = _num_clients(command, split), seed_split(command.seed, split)
    num_examples = len(next(iter(arrays.values())))
    if command.scheme == "quantity":
        sigma = command.sigma
        rows = by_quantity(num_examples, num_clients, command.concentration, sigma, seed)
        return Partition(arrays, rows, number_clients(len(rows)))
    labels = _labels(arrays, "label", _label(command, arrays))
    alpha = ALPHA if command.concentration is None else command.concentration
    if command.scheme == "dirichlet":
        rows = dirichlet_label_skew(labels, num_clients, alpha, seed)
    else:
        each = EACH if command.examples_per_client is None else command.examples_per_client
        beta = BETA if command.fine_concentration is None else command.fine_concentration
        coarse = _labels(arrays, "coarse", command.coarse or "coarse_label")
        rows = pachinko(coarse, labels, num_clients, each, alpha, beta, seed)
    return Partition(arrays, rows, number_clients(len(rows)))


def _num_clients(command: PartitionCommand, split: str) -> int:
    if split == "test" and command.test_clients is not None:
        return command.test_clients
    if command.clients is None:
        return CLIENTS[split]
    return command.clients if split == "train" else max(1, command.clients // 5)


def _label(command: PartitionCommand, arrays: Mapping[str, np.ndarray]) -> str | None:
    """Choose the label's array; None if it is not given and no array has the usual name."""
    if command.label is not None:
        _array(arrays, "label", command.label)
        return command.label
    return next(
        (name for name in ("label", "y") if name in arrays and arrays[name].ndim == 1), None
    )


def _array(arrays: Mapping[str, np.ndarray], option: str, name: str | None) -> np.ndarray:
    if name is None or name not in arrays:
        expected = f"the source has {', '.join(arrays)}: give --{option} NAME"
        raise refuse(option, name or "", expected)
    if arrays[name].ndim != 1:
        raise refuse(
            option, name, f"has shape {list(arrays[name].shape)}: must be one value per example"
        )
    return arrays[name]


def _labels(arrays: Mapping[str, np.ndarray], option: str, name: str | None) -> np.ndarray:
    """Check that every example has a value."""
    values = _array(arrays, option, name)
    row = first_missing(values)
    if row is not None:
        raise refuse(option, name, f"row {row} has no value: every example needs a label")
    return values


def _put_aside(dealt: Partition, share: float, seed: int) -> dict[str, Partition]:
    """Draw a share of each client's examples at random as its test split."""
    if share == 0:
        return {"train": dealt}
    rng = np.random.default_rng(seed_split(seed, "test"))
    train, test = [], []
    for rows in dealt.rows:
        mixed = rng.permutation(len(rows))
        aside = int(share * len(rows))
        test.append(rows[np.sort(mixed[:aside])])
        train.append(rows[np.sort(mixed[aside:])])
    if not any(map(len, test)):
        raise refuse("test_share", share, "no client has enough examples for a test split")
    some = [i for i, rows in enumerate(test) if len(rows)]
    return {
        "train": dealt._replace(rows=train),
        "test": Partition(dealt.arrays, [test[i] for i in some], [dealt.names[i] for i in some]),
    }


def _name(command: PartitionCommand) -> str:
    if command.source == CIFAR:
        return "fed_cifar100" if command.scheme == "pachinko" else CIFAR
    return Path(command.source).stem


def _write(
    command: PartitionCommand, dealt: Mapping[str, Partition], label: str | None
) -> list[str]:
    """Write all files, or none."""
    out, figure = command.out, _figure(command, dealt["train"], label)
    files = {f"{_name(command)}_{split}.h5": one for split, one in dealt.items()}
    pictures = {f"{PICTURE}.{kind}": render_figure(figure, kind) for kind in ("png", "pdf")}
    with writing(out), remove_if_empty(out), stage_files(out / STAGED) as staged:
        for file, one in files.items():
            write_partition(staged / file, one)
        for file, content in pictures.items():
            (staged / file).write_bytes(content)
        publish(staged, [*pictures, *reversed(files)])  # no train file without its test file
    return [*files, *pictures]


def _figure(command: PartitionCommand, dealt: Partition, label: str | None) -> Any:
    title = f"{_name(command)} (train) by {command.scheme}, seed {command.seed}"
    if label is None:
        counts = np.array([[len(rows)] for rows in dealt.rows])
        return draw_partition(counts, dealt.names, None, title)
    values = dealt.arrays[label]
    kinds, counts = tabulate_labels(values, dealt.rows)
    coarse = dealt.arrays.get(command.coarse or "coarse_label")
    if coarse is None or not (command.scheme == "pachinko" or command.source == CIFAR):
        return draw_partition(counts, dealt.names, [str(kind) for kind in kinds], title)
    # Labels of one coarse label next to each other, which shows the skew.
    first = {kind: row for row, kind in reversed(list(enumerate(values.tolist())))}
    parents = np.array([coarse[first[kind]] for kind in kinds.tolist()])
    order = np.argsort(parents, kind="stable")
    names = _coarse_names(command)
    groups = [names.get(str(parents[i]), str(parents[i])) for i in order]
    labels = [str(kinds[i]) for i in order]
    return draw_partition(counts[:, order], dealt.names, labels, title, groups)


def _coarse_names(command: PartitionCommand) -> dict[str, str]:
    """Read CIFAR-100's label names, if they are next to its records."""
    if command.source != CIFAR:
        return {}
    path = find_cifar(command.data_dir)["train"].with_name("coarse_label_names.txt")
    lines = path.read_text().split() if path.is_file() else []
    return {str(number): line.replace("_", " ") for number, line in enumerate(lines)}


def _describe(
    command: PartitionCommand, dealt: Mapping[str, Partition], label: str | None
) -> dict[str, Any]:
    """What `splits_table` shows."""
    splits = {}
    for split, one in dealt.items():
        own = None if label is None else one.arrays[label][np.concatenate(one.rows)]
        splits[split] = {
            **count_sizes([len(rows) for rows in one.rows])._asdict(),
            "classes": None if own is None else len(np.unique(own)),
        }
    summary = f"by {command.scheme}, seed {command.seed}"
    found = format_path(command.out)
    return {"name": _name(command), "summary": summary, "found": found, "splits": splits}
