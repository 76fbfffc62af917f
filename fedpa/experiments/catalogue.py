"""The benchmarks' data sets by name: what they hold, where they are got, how they are opened.

Looking for them imports no JAX; opening them does.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import fedpa
from fedpa import places
from fedpa.data import archives
from fedpa.data.cache import fill_directory, stamp
from fedpa.errors import DataError, FedpaError, check_integer, refuse, suggest
from fedpa.experiments.download import check_url

if TYPE_CHECKING:
    import fedpa.data.readers
    from fedpa.data import FederatedData, Splits

BASE = "https://storage.googleapis.com/tff-datasets-public/"
CIFAR = "cifar-100-binary"
WORDS, TAGS = "stackoverflow.word_count", "stackoverflow.tag_count"
PARTITION = "1"
"""Of the way CIFAR-100 is dealt: another one deals it again."""


class Archive(NamedTuple):
    name: str
    checksum: str
    url: str | None = None
    """Where it is if not at BASE."""


class Feature(NamedTuple):
    """One example's."""

    shape: tuple[int, ...]
    dtype: str
    """NumPy's name, or "str"."""
    bounds: tuple[float, float] | None = None
    """Least and largest value there may be."""


class Figures(NamedTuple):
    """What the paper's table 2 says of a split."""

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
    """How many labels; None of text, whose words and tags are in files of their own."""
    paper: Mapping[str, Figures] = {}
    sqlite: tuple[str, Mapping[str, str]] | None = None
    """TFF's newer copy: its file, split → the split's name there."""
    leaf: tuple[str, ...] = ()
    """Folders of LEAF's JSON that hold this data set, too."""
    clients: bool = True
    """Whether it is dealt to clients."""


_EMNIST = {"pixels": Feature((28, 28), "float32", (0.0, 1.0)), "label": Feature((), "int32")}
_CIFAR = {
    "image": Feature((32, 32, 3), "uint8", (0.0, 255.0)),
    "label": Feature((), "int64"),
    "coarse_label": Feature((), "int64"),
}
_TEXT = {name: Feature((), "str") for name in ("tokens", "title", "tags", "creation_date", "type")}


def _files(name: str, *splits: str) -> dict[str, str]:
    return {split: f"{name}_{split}.h5" for split in splits}


def _archive(name: str, sha256: str) -> Archive:
    return Archive(f"{name}.tar.bz2", f"sha256:{sha256}")


DATA_SETS: Mapping[str, DataSet] = {
    "fed_emnist": DataSet(
        "characters by writer",
        (
            _archive(
                "fed_emnist", "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0"
            ),
        ),
        _files("fed_emnist", "train", "test"),
        _EMNIST,
        62,
        {"train": Figures(3400, 198.0, 77.0), "test": Figures(3400, 23.0, 9.0)},
        ("emnist_all.sqlite", {"train": "all_train", "test": "all_test"}),
        ("femnist", "leaf", "femnist/data"),
    ),
    "fed_emnist_digitsonly": DataSet(
        "digits by writer",
        (
            _archive(
                "fed_emnist_digitsonly",
                "55333deb8546765427c385710ca5e7301e16f4ed8b60c1dc5ae224b42bd5b14b",
            ),
        ),
        _files("fed_emnist_digitsonly", "train", "test"),
        _EMNIST,
        10,
        sqlite=("emnist_all.sqlite", {"train": "digits_only_train", "test": "digits_only_test"}),
    ),
    "fed_cifar100": DataSet(
        "CIFAR-100 by Pachinko",
        (
            _archive(
                "fed_cifar100", "e8575e22c038ecef1ce6c7d492d7abee7da13b1e1ba9b70a7fc18531ba7590de"
            ),
        ),
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
        (
            _archive(
                "stackoverflow", "99eca2f8b8327a09e5fc123979df2d237acbc5e52322f6d86bf523ee47b961a2"
            ),
            _archive(WORDS, "1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c"),
            _archive(TAGS, "6fe281cec490d9384a290d560072438e7e2b377bbb823876ce7bd6f82696772d"),
        ),
        _files("stackoverflow", "train", "held_out", "test"),
        _TEXT | {"score": Feature((), "int64")},
        None,
        {"train": Figures(342_477, 397.0, 1279.0), "test": Figures(204_088, 81.0, 301.0)},
        (
            "stackoverflow.sqlite",
            {"train": "train", "held_out": "held_out", "test": "test"},
        ),
    ),
}


def dataset_named(name: str) -> DataSet:
    if name not in DATA_SETS:
        raise refuse("data set", name, f"unknown; {suggest(name, DATA_SETS)}")
    return DATA_SETS[name]


def url_of(archive: Archive, mirror: str | None = None) -> str:
    """Where to get it: from the mirror, the environment's FEDPA_DATA_URL or its home."""
    base = mirror or os.environ.get("FEDPA_DATA_URL")
    if base is None or base == "":
        return archive.url or BASE + archive.name
    check_url("mirror" if mirror else "FEDPA_DATA_URL", base)
    return f"{base.rstrip('/')}/{archive.name}"


def open_dataset(
    name: str,
    data_dir: str | Path | None = None,
    seed: int = 0,
    features: Sequence[str] | None = None,
) -> "Splits":
    """The federations of a data set, of raw features, each client read when it is asked for.

    data_dir: the only place to look; else FEDPA_DATA and the user's own. seed: of the dealing,
    where there are no clients (fed_cifar100 out of cifar-100-binary). features: the ones to read,
    all unless told. `held_out` is the split to choose by (validation).
    """
    dataset = dataset_named(name)
    check_integer("seed", seed, 0)
    if not dataset.clients:
        raise FedpaError(
            f"{name} has no clients: open fed_cifar100, or make some with fedpa data partition"
        )
    for feature in features or ():
        if feature not in dataset.features:
            raise refuse("features", feature, f"{name} has {', '.join(dataset.features)}")
    for directory in _directories(data_dir):
        for opener in (_hdf5, _sqlite, _leaf):
            splits = opener(name, dataset, directory, features)
            if splits is not None:
                return splits
    if name == "fed_cifar100":
        for directory in _directories(data_dir):
            dealt = _dealt(directory, seed)
            if dealt is not None:
                return _of_files(name, dataset, dealt, features)
    raise missing(name, data_dir)


def found(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Where the data set lies, if it does: looks only, unpacks nothing."""
    dataset = dataset_named(name)
    for directory in _directories(data_dir):
        path = _lies(directory, list(dataset.files.values()), name)
        if path is None and dataset.sqlite is not None:
            path = _lies(directory, [dataset.sqlite[0]], dataset.sqlite[0])
        path = path or _leaf_folder(dataset, directory)
        if path is not None:
            return path
    # What has to be dealt first comes last, wherever it lies.
    return found(CIFAR, data_dir) if name == "fed_cifar100" else None


def first_found(names: Sequence[str], data_dir: str | Path | None = None) -> str:
    """The first of several data sets that is there."""
    here = next((name for name in names if found(name, data_dir) is not None), None)
    if here is None:
        for name in names:  # says what is there only in part
            archives.find(list(dataset_named(name).files.values()), [name], data_dir)
        raise missing(names[0], data_dir)
    return here


def counts_files(data_dir: str | Path | None = None) -> tuple[Path, Path]:
    """StackOverflow's counts of words and of tags."""
    paths = []
    for name in (WORDS, TAGS):
        where = archives.find([name], [name], data_dir)
        if where is None:
            raise _nowhere(name, "stackoverflow", data_dir)
        paths.append(where[name])
    words, tags = paths
    return words, tags


def cifar_files(data_dir: str | Path | None = None) -> dict[str, Path]:
    """CIFAR-100's records by split."""
    for directory in _directories(data_dir):
        where = _central(directory)
        if where is not None:
            return where
    raise missing(CIFAR, data_dir)


def missing(name: str, data_dir: str | Path | None) -> FedpaError:
    """The error for a data set that is nowhere: where it was looked for, what gets it."""
    return _nowhere(name, name, data_dir)


def _nowhere(what: str, name: str, data_dir: str | Path | None) -> FedpaError:
    places_searched = ", ".join(str(path) for path in archives.searched(data_dir))
    elsewhere = "" if data_dir is None else f" --data-dir {data_dir}"
    return FedpaError(
        f"{what} is not in {places_searched}: get it with fedpa data get {name}{elsewhere}, or "
        "name the directory that has it (--data-dir, FEDPA_DATA)"
    )


def check_features(
    name: str, data: "FederatedData", where: object, features: Sequence[str] | None = None
) -> None:
    """Refuse files of another data set: the first client must have the features asked for."""
    client = next((each for each in data.ids if data.num_examples(each)), None)
    if client is None:
        raise DataError(f"{where} has no examples")
    known = dataset_named(name).features
    expected = {key: known[key] for key in (known if features is None else features)}
    if misfit := _misfit(client, data.examples(client), expected):
        raise DataError(f"{where} is not {name}: {misfit}")


def _misfit(
    client: str, there: Mapping[str, np.ndarray], expected: Mapping[str, Feature]
) -> str | None:
    """What the client has and must have, if that is not the same in shape and kind."""
    fits = all(
        feature in there
        and there[feature].shape[1:] == wanted.shape
        and _kind(there[feature].dtype) == _kind(_dtype(wanted))
        for feature, wanted in expected.items()
    )
    if fits:
        return None
    has = ", ".join(f"{k} {_shown(Feature(a.shape[1:], a.dtype.name))}" for k, a in there.items())
    should = ", ".join(f"{k} {_shown(feature)}" for k, feature in expected.items())
    return f"client {client!r} has {has}; must have {should}"


def _shown(feature: Feature) -> str:
    dtype = "text" if feature.dtype in ("str", "object") else feature.dtype
    return dtype + (str(list(feature.shape)) if feature.shape else "")


def _dtype(feature: Feature) -> np.dtype[Any]:
    return np.dtype(object if feature.dtype == "str" else feature.dtype)


def _kind(dtype: np.dtype[Any]) -> str:
    """Whole numbers of any width are one kind, and so is text however it is kept."""
    return {"u": "i", "S": "O", "U": "O"}.get(dtype.kind, dtype.kind)


@archives.readable()
def _directories(data_dir: str | Path | None) -> list[Path]:
    return [path for path in archives.searched(data_dir) if path.is_dir()]


def _lies(directory: Path, files: Sequence[str], stem: str) -> Path | None:
    """The first of the files, or what it is packed in."""
    where = archives.find(files, [stem], directory, look_only=True)
    return None if where is None else where[files[0]]


def _hdf5(
    name: str, dataset: DataSet, directory: Path, features: Sequence[str] | None
) -> "Splits | None":
    """TFF's HDF5 files, or the archive of them."""
    where = archives.find(list(dataset.files.values()), [name], directory)
    if where is None:
        return None
    paths = {split: where[file] for split, file in dataset.files.items()}
    return _of_files(name, dataset, paths, features)


def _of_files(
    name: str, dataset: DataSet, paths: Mapping[str, Path], features: Sequence[str] | None
) -> "Splits":
    for path in paths.values():
        check_features(name, fedpa.data.readers.open_hdf5(path), path, features)
    return _splits(
        {
            split: _sound(dataset, fedpa.data.readers.open_hdf5(path, features), path, features)
            for split, path in paths.items()
        }
    )


def _sqlite(
    name: str, dataset: DataSet, directory: Path, features: Sequence[str] | None
) -> "Splits | None":
    """TFF's newer copies: everything in one file, images flattened."""
    if dataset.sqlite is None:
        return None
    file, names = dataset.sqlite
    where = archives.find([file], [file], directory)
    if where is None:
        return None
    opened = {
        split: fedpa.data.readers.open_sqlite(where[file], there) for split, there in names.items()
    }
    return _splits(_shaped(name, opened, where[file], features))


def _leaf(
    name: str, dataset: DataSet, directory: Path, features: Sequence[str] | None
) -> "Splits | None":
    """LEAF's JSON, whose x are our pixels, flattened, and y our labels."""
    folder = _leaf_folder(dataset, directory)
    if folder is None:
        return None
    names = {"x": "pixels", "y": "label"}
    opened = {
        split: fedpa.data.map_examples(
            fedpa.data.readers.open_leaf(folder / split),
            lambda _, examples: {names.get(key, key): array for key, array in examples.items()},
        )
        for split in dataset.files
    }
    return _splits(_shaped(name, opened, folder, features))


@archives.readable()
def _leaf_folder(dataset: DataSet, directory: Path) -> Path | None:
    folders = (directory / folder for folder in dataset.leaf)
    whole_ones = (
        folder
        for folder in folders
        if all(any((folder / split).glob("*.json")) for split in dataset.files)
    )
    return next(whole_ones, None)


def _shaped(
    name: str, opened: Mapping[str, "FederatedData"], where: Path, features: Sequence[str] | None
) -> dict[str, "FederatedData"]:
    """Features as they are in the HDF5 files: their shapes and widths, only those asked for."""
    expected = dataset_named(name).features

    def shaped(_: str, examples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {key: _like(array, expected.get(key)) for key, array in examples.items()}

    result = {split: fedpa.data.map_examples(data, shaped) for split, data in opened.items()}
    for data in result.values():
        check_features(name, data, where, features)
    dataset = dataset_named(name)
    return {split: _sound(dataset, data, where, features) for split, data in result.items()}


def _sound(
    dataset: DataSet, data: "FederatedData", where: Path, features: Sequence[str] | None
) -> "FederatedData":
    """The features asked for, of every client as they must be: shapes, kinds, values.

    A client without examples has empty ones.
    """
    names = list(dataset.features) if features is None else list(features)
    expected = {name: dataset.features[name] for name in names}
    bounds = {name: own.bounds for name, own in expected.items() if own.bounds is not None}
    if "label" in expected and dataset.classes is not None:
        bounds["label"] = (0.0, dataset.classes - 1.0)

    def sound(client: str, examples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        misfit = _misfit(client, examples, expected)
        if misfit and not data.num_examples(client):
            return {name: np.zeros((0, *own.shape), _dtype(own)) for name, own in expected.items()}
        if misfit:
            raise DataError(f"{where}: {misfit}")
        for name, (least, most) in bounds.items():
            _check_bounds(f"{where}: client {client!r}", name, examples[name], least, most)
        return {name: examples[name] for name in names}

    return fedpa.data.map_examples(data, sound)


def _check_bounds(whose: str, name: str, values: np.ndarray, least: float, most: float) -> None:
    """Refuse values beyond them, and NaN."""
    if not values.size:
        return
    for value in (values.min(), values.max()):  # either is NaN if any is
        if not least <= value <= most:
            raise DataError(f"{whose} has {name} {value}: must be {least:g} to {most:g}")


def _like(array: np.ndarray, feature: Feature | None) -> np.ndarray:
    """What can't be brought to the feature's form stays as it is: the check names it."""
    if feature is None or _kind(array.dtype) != _kind(_dtype(feature)):
        return array
    if array[:1].size == np.prod(feature.shape, dtype=int) * len(array[:1]):
        array = array.reshape(len(array), *feature.shape)
    own = _dtype(feature)
    if own.kind in "iu" and array.size and array.dtype != own:
        held = np.iinfo(own)
        if array.min() < held.min or array.max() > held.max:  # would become another number
            return array
    return array.astype(own, copy=False)


def _splits(by_name: Mapping[str, "FederatedData"]) -> "Splits":
    return fedpa.data.Splits(by_name["train"], by_name.get("held_out"), by_name["test"])


def _central(directory: Path) -> dict[str, Path] | None:
    files = DATA_SETS[CIFAR].files
    where = archives.find(list(files.values()), [CIFAR], directory)
    return None if where is None else {split: where[file] for split, file in files.items()}


def _dealt(directory: Path, seed: int) -> dict[str, Path] | None:
    """CIFAR-100 dealt by Pachinko: once for each seed, then kept in the cache."""
    where = _central(directory)
    if where is None:
        return None
    key = stamp(where["train"], f"{stamp(where['test'])}|{seed}|{PARTITION}")
    from fedpa.data.readers.cifar import write_pachinko

    files = DATA_SETS["fed_cifar100"].files
    target = fill_directory(
        places.cache() / "partitions" / key,
        lambda made: write_pachinko(where["train"], where["test"], made, seed),
        lambda made: all((made / file).is_file() for file in files.values()),
    )
    return {split: target / file for split, file in files.items()}
