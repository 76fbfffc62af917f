"""The benchmarks' data sets by name: their content, their download, and how they are opened.

Searching for them does not import JAX; opening them does.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import fedpa
from fedpa import places
from fedpa.data import archives
from fedpa.data.cache import fill_directory, progress, stamp
from fedpa.errors import DataError, FedpaError, check_integer, refuse, suggest
from fedpa.experiments.download import check_url

if TYPE_CHECKING:
    import fedpa.data.readers
    from fedpa.data import FederatedData, Splits

BASE = "https://storage.googleapis.com/tff-datasets-public/"
CIFAR = "cifar-100-binary"
WORDS, TAGS = "stackoverflow.word_count", "stackoverflow.tag_count"
PARTITION = "1"
"""Version of the partition of CIFAR-100; another version partitions it again."""


SHA256 = {
    "fed_emnist": "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
    "fed_emnist_digitsonly": "55333deb8546765427c385710ca5e7301e16f4ed8b60c1dc5ae224b42bd5b14b",
    "fed_cifar100": "e8575e22c038ecef1ce6c7d492d7abee7da13b1e1ba9b70a7fc18531ba7590de",
    "stackoverflow": "99eca2f8b8327a09e5fc123979df2d237acbc5e52322f6d86bf523ee47b961a2",
    WORDS: "1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
    TAGS: "6fe281cec490d9384a290d560072438e7e2b377bbb823876ce7bd6f82696772d",
}
"""Checksums of the archives at BASE, by name without `.tar.bz2`."""


class Archive(NamedTuple):
    name: str
    checksum: str
    url: str | None = None
    """Its URL if it is not at BASE."""


class Feature(NamedTuple):
    """Shape of one example."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """`object` for text."""
    bounds: tuple[float, float] | None = None
    """Smallest and largest valid value."""


class Figures(NamedTuple):
    """A split in the paper's table 2."""

    clients: int
    mean: float
    """Examples per client."""
    std: float


class DataSet(NamedTuple):
    summary: str
    archives: tuple[Archive, ...]
    files: Mapping[str, str]
    """split → file, in TFF's HDF5 where there are clients."""
    features: Mapping[str, Feature]
    classes: int | None
    """Number of labels; None for text, whose words and tags are in separate files."""
    paper: Mapping[str, Figures] = {}
    sqlite: tuple[str, Mapping[str, str]] | None = None
    """TFF's newer copy: its file, split → the split's name there."""
    leaf: tuple[str, ...] = ()
    """Directories of LEAF's JSON that also contain this data set."""
    clients: bool = True
    """Whether it has clients."""


_LABEL = Feature((), np.dtype("int64"))
_TEXT = Feature((), np.dtype(object))
_EMNIST = {
    "pixels": Feature((28, 28), np.dtype("float32"), (0.0, 1.0)),
    "label": Feature((), np.dtype("int32")),
}
_CIFAR = {
    "image": Feature((32, 32, 3), np.dtype("uint8"), (0.0, 255.0)),
    "label": _LABEL,
    "coarse_label": _LABEL,
}
_POSTS = dict.fromkeys(("tokens", "title", "tags", "creation_date", "type"), _TEXT)


def _files(name: str, *splits: str) -> dict[str, str]:
    return {split: f"{name}_{split}.h5" for split in splits}


def _archives(*names: str) -> tuple[Archive, ...]:
    return tuple(Archive(f"{name}.tar.bz2", f"sha256:{SHA256[name]}") for name in names)


DATA_SETS: Mapping[str, DataSet] = {
    "fed_emnist": DataSet(
        "characters by writer",
        _archives("fed_emnist"),
        _files("fed_emnist", "train", "test"),
        _EMNIST,
        62,
        {"train": Figures(3400, 198.0, 77.0), "test": Figures(3400, 23.0, 9.0)},
        ("emnist_all.sqlite", {"train": "all_train", "test": "all_test"}),
        ("femnist", "leaf", "femnist/data"),
    ),
    "fed_emnist_digitsonly": DataSet(
        "digits by writer",
        _archives("fed_emnist_digitsonly"),
        _files("fed_emnist_digitsonly", "train", "test"),
        _EMNIST,
        10,
        sqlite=("emnist_all.sqlite", {"train": "digits_only_train", "test": "digits_only_test"}),
    ),
    "fed_cifar100": DataSet(
        "CIFAR-100 by Pachinko",
        _archives("fed_cifar100"),
        _files("fed_cifar100", "train", "test"),
        _CIFAR,
        100,
        {"train": Figures(500, 100.0, 0.0), "test": Figures(100, 100.0, 0.0)},
        ("cifar100.sqlite", {"train": "train", "test": "test"}),
    ),
    CIFAR: DataSet(
        "CIFAR-100, no clients",
        (
            Archive(
                f"{CIFAR}.tar.gz",
                "md5:03b5dce01913d631647c71ecec9e9cb8",
                f"https://www.cs.toronto.edu/~kriz/{CIFAR}.tar.gz",
            ),
        ),
        {"train": "train.bin", "test": "test.bin"},
        _CIFAR,
        100,
        clients=False,
    ),
    "stackoverflow": DataSet(
        "sentences by user",
        _archives("stackoverflow", WORDS, TAGS),
        _files("stackoverflow", "train", "held_out", "test"),
        _POSTS | {"score": Feature((), np.dtype("int64"))},
        None,
        {"train": Figures(342_477, 397.0, 1279.0), "test": Figures(204_088, 81.0, 301.0)},
        ("stackoverflow.sqlite", {"train": "train", "held_out": "held_out", "test": "test"}),
    ),
}


def get_dataset(name: str) -> DataSet:
    if name not in DATA_SETS:
        raise refuse("data set", name, f"unknown; {suggest(name, DATA_SETS)}")
    return DATA_SETS[name]


def get_url(archive: Archive, mirror: str | None = None) -> str:
    """Return its URL: at the mirror, at FEDPA_DATA_URL, or at the original site."""
    base = mirror or os.environ.get("FEDPA_DATA_URL")
    if base is None or base == "":
        return archive.url or BASE + archive.name
    check_url("mirror" if mirror else "FEDPA_DATA_URL", base)
    return f"{base.rstrip('/')}/{archive.name}"


def _find_layout(
    name: str, directory: Path, look_only: bool = False
) -> tuple[str, dict[str, Path]] | None:
    """Find the first layout in a directory ("own", "sqlite", "leaf") and the path of each split."""
    dataset = get_dataset(name)
    paths = archives.find(list(dataset.files.values()), name, directory, look_only)
    if paths is not None:
        return "own", {split: paths[file] for split, file in dataset.files.items()}
    if dataset.sqlite is not None:
        file, _ = dataset.sqlite
        paths = archives.find([file], file, directory, look_only)
        if paths is not None:
            return "sqlite", dict.fromkeys(dataset.files, paths[file])
    for folder in (directory / each for each in dataset.leaf):
        if all(any((folder / split).glob("*.json")) for split in dataset.files):
            return "leaf", dict.fromkeys(dataset.files, folder)
    return None


@archives.refuse_unreadable()
def _search(
    name: str, data_dir: str | Path | None, look_only: bool = False
) -> tuple[str, dict[str, Path]] | None:
    """Find the first layout in one of the directories."""
    directories = [path for path in archives.list_places(data_dir) if path.is_dir()]
    layouts = (_find_layout(name, directory, look_only) for directory in directories)
    return next(filter(None, layouts), None)


def find_dataset(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Find the data set, if it is available, without unpacking anything."""
    there = _search(name, data_dir, look_only=True)
    if there is not None:
        return there[1]["train"]
    # Data that must be partitioned first comes last, in all directories.
    return find_dataset(CIFAR, data_dir) if name == "fed_cifar100" else None


def find_first(names: Sequence[str], data_dir: str | Path | None = None) -> str:
    """Find the first of several data sets that is available."""
    here = next((name for name in names if find_dataset(name, data_dir) is not None), None)
    if here is None:
        for name in names:  # reports incomplete data sets
            archives.find(list(get_dataset(name).files.values()), name, data_dir)
        raise _make_missing_error(names[0], names[0], data_dir)
    return here


def find_counts(data_dir: str | Path | None = None) -> tuple[Path, Path]:
    """Find StackOverflow's counts of words and of tags."""
    paths: dict[str, Path] = {}
    for name in (WORDS, TAGS):
        where = archives.find([name], name, data_dir)
        if where is None:
            raise _make_missing_error(name, "stackoverflow", data_dir)
        paths |= where
    return paths[WORDS], paths[TAGS]


def find_cifar(data_dir: str | Path | None = None) -> dict[str, Path]:
    """Find CIFAR-100's records by split."""
    there = _search(CIFAR, data_dir)
    if there is None:
        raise _make_missing_error(CIFAR, CIFAR, data_dir)
    return there[1]


def _make_missing_error(what: str, name: str, data_dir: str | Path | None) -> FedpaError:
    """Make the error for a missing data set: where it was searched for, and how to get it."""
    searched = ", ".join(str(path) for path in archives.list_places(data_dir))
    elsewhere = "" if data_dir is None else f" --data-dir {data_dir}"
    return FedpaError(
        f"{what} is not in {searched}: get it with fedpa data get {name}{elsewhere}, or "
        "name the directory that has it (--data-dir, FEDPA_DATA)"
    )


def open_dataset(
    name: str,
    data_dir: str | Path | None = None,
    seed: int = 0,
    features: Sequence[str] | None = None,
) -> "Splits":
    """Open the federations of a data set, with raw features; clients are read on demand.

    Args:
        data_dir: The only directory to search; default: FEDPA_DATA, then the user's data directory.
        seed: Seed of the partition, for fed_cifar100 made from cifar-100-binary.
        features: The features to read; default: all.
    Returns:
        The splits. `held_out` is the validation split.
    """
    dataset = get_dataset(name)
    check_integer("seed", seed, 0)
    if not dataset.clients:
        raise FedpaError(
            f"{name} has no clients: open fed_cifar100, or make clients with fedpa data partition"
        )
    for feature in features or ():
        if feature not in dataset.features:
            raise refuse("features", feature, f"{name} has {', '.join(dataset.features)}")
    there = _search(name, data_dir)
    if there is None and name == "fed_cifar100":
        records = _search(CIFAR, data_dir)
        there = None if records is None else ("own", _deal_cifar(records[1], seed))
    if there is None:
        raise _make_missing_error(name, name, data_dir)
    layout, paths = there
    splits = {
        split: _conform(name, _open_split(dataset, layout, split, path, features), path, features)
        for split, path in paths.items()
    }
    return fedpa.data.Splits(splits["train"], splits.get("held_out"), splits["test"])


def _open_split(
    dataset: DataSet, layout: str, split: str, path: Path, features: Sequence[str] | None
) -> "FederatedData":
    if layout == "own":
        return fedpa.data.readers.open_hdf5(path, features)
    if layout == "sqlite" and dataset.sqlite is not None:
        data = fedpa.data.readers.open_sqlite(path, dataset.sqlite[1][split])
    else:
        data = fedpa.data.readers.open_leaf(path / split)

    def reshape(_: str, examples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Rename LEAF's features as in the HDF5 files: x are flattened pixels, y labels."""
        names = {{"x": "pixels", "y": "label"}.get(key, key): key for key in examples}
        return {
            new: _reshape(examples[old], dataset.features.get(new)) for new, old in names.items()
        }

    return fedpa.data.map_examples(data, reshape)


def _deal_cifar(records: Mapping[str, Path], seed: int) -> dict[str, Path]:
    """Partition CIFAR-100 by Pachinko allocation, once for each seed, and cache it."""
    from fedpa.data.readers.cifar import write_pachinko

    files = DATA_SETS["fed_cifar100"].files
    train, test = records["train"], records["test"]
    key = stamp(train, f"{stamp(test)}|{seed}|{PARTITION}")
    target = fill_directory(
        places.cache() / "partitions" / key,
        lambda made: write_pachinko(train, test, made, seed),
    )
    return {split: target / file for split, file in files.items()}


def _conform(
    name: str, data: "FederatedData", where: Path, features: Sequence[str] | None
) -> "FederatedData":
    """Select features, and check shapes, types and values of every client.

    A client without examples has empty ones. Files of another data set are refused: the first
    client must have the features.
    """
    dataset = get_dataset(name)
    expected = {key: dataset.features[key] for key in features or dataset.features}
    bounds = {key: own.bounds for key, own in expected.items() if own.bounds is not None}
    if "label" in expected and dataset.classes is not None:
        bounds["label"] = (0.0, dataset.classes - 1.0)

    def conform(client: str, examples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        misfit = _find_misfit(client, examples, expected)
        if misfit and not data.num_examples(client):
            return {key: np.zeros((0, *own.shape), own.dtype) for key, own in expected.items()}
        if misfit:
            raise DataError(f"{where}: {misfit}")
        for key, (least, most) in bounds.items():
            values = examples[key]
            for value in (values.min(), values.max()) if values.size else ():  # NaN if any is
                if not least <= value <= most:
                    raise DataError(
                        f"{where}: client {client!r} has {key} {value}: must be {least:g} to "
                        f"{most:g}"
                    )
        return {key: examples[key] for key in expected}

    first = next((client for client in data.ids if data.num_examples(client)), None)
    if first is None:
        raise DataError(f"{where} has no examples")
    if misfit := _find_misfit(first, data.examples(first), expected):
        raise DataError(f"{where} is not {name}: {misfit}")
    return fedpa.data.map_examples(data, conform)


def _find_misfit(
    client: str, there: Mapping[str, np.ndarray], expected: Mapping[str, Feature]
) -> str | None:
    """Describe what the client has and must have, if shape or type differ."""
    fits = all(
        feature in there
        and there[feature].shape[1:] == wanted.shape
        and _kind(there[feature].dtype) == _kind(wanted.dtype)
        for feature, wanted in expected.items()
    )
    if fits:
        return None
    has = ", ".join(f"{k} {_show(Feature(a.shape[1:], a.dtype))}" for k, a in there.items())
    should = ", ".join(f"{k} {_show(feature)}" for k, feature in expected.items())
    return f"client {client!r} has {has}; must have {should}"


def _show(feature: Feature) -> str:
    dtype = "text" if feature.dtype == object else feature.dtype.name
    return dtype + (str(list(feature.shape)) if feature.shape else "")


def _kind(dtype: np.dtype[Any]) -> str:
    """Classify a dtype: integers of any width are one kind, and so is text."""
    return {"u": "i", "S": "O", "U": "O"}.get(dtype.kind, dtype.kind)


def _reshape(array: np.ndarray, feature: Feature | None) -> np.ndarray:
    """Convert an array to the feature's type if possible; otherwise the check refuses it."""
    if feature is None or _kind(array.dtype) != _kind(feature.dtype):
        return array
    if array[:1].size == np.prod(feature.shape, dtype=int) * len(array[:1]):
        array = array.reshape(len(array), *feature.shape)
    own = feature.dtype
    if own.kind in "iu" and array.size and array.dtype != own:
        limits = np.iinfo(own)
        if array.min() < limits.min or array.max() > limits.max:  # would become another number
            return array
    return array.astype(own, copy=False)


class Sizes(NamedTuple):
    """The numbers of the paper's table 2 for a split, counted."""

    clients: int
    examples: int
    mean: float
    """Examples per client, and so on down."""
    std: float
    """Over these clients: divided by their number."""
    least: int
    median: float
    most: int


def count_sizes(numbers: Sequence[int]) -> Sizes:
    """Summarize the clients' numbers of examples."""
    sizes = np.asarray(numbers, np.int64)
    return Sizes(
        len(sizes),
        int(sizes.sum()),
        float(sizes.mean()),
        float(sizes.std()),
        int(sizes.min()),
        float(np.median(sizes)),
        int(sizes.max()),
    )


def count_labels(data: "FederatedData", feature: str) -> int:
    """Count the labels of all clients, which reads all of them."""
    labels: set[int] = set()
    with progress(f"reading every {feature}") as tell:
        for done, name in enumerate(data.ids, start=1):
            labels.update(np.unique(data.examples(name)[feature]).tolist())
            tell(done, len(data.ids))
    return len(labels)
