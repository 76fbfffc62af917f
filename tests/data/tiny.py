"""Small data sets in the layouts that users have: HDF5, SQLite, LEAF's JSON, CIFAR's records."""

import contextlib
import json
import resource
import sqlite3
import tarfile
from pathlib import Path

import numpy as np

from fedpa.data.readers.hdf5 import write_hdf5


def emnist(n=3, seed=0, classes=62):
    rng = np.random.default_rng(seed)
    pixels = rng.random((n, 28, 28), np.float32)
    return {"pixels": pixels, "label": rng.integers(0, classes, n).astype(np.int32)}


def cifar(n=3, seed=0):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 100, n)
    image = rng.integers(0, 256, (n, 32, 32, 3)).astype(np.uint8)
    return {"image": image, "label": label, "coarse_label": label // 5}


def posts(n=3, seed=0):
    text = {
        name: np.array([f"{name} {seed} {i}" for i in range(n)], object)
        for name in ("tokens", "title", "tags", "creation_date", "type")
    }
    return text | {"score": np.arange(n)}


@contextlib.contextmanager
def small_disk(limit=20_000):
    """No file of this process grows beyond so many bytes."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def hdf5(directory, name, make, splits=("train", "test"), sizes=(3, 5)):
    directory.mkdir(parents=True, exist_ok=True)
    for number, split in enumerate(splits):
        clients = [(f"c{i}", make(n, 10 * number + i)) for i, n in enumerate(sizes)]
        write_hdf5(directory / f"{name}_{split}.h5", clients)


def archive(path: Path, *members: Path, folder=""):
    with tarfile.open(path, f"w:{path.suffix[1:]}") as tar:
        for member in members:
            tar.add(member, folder + member.name)


def cifar_records(directory, per_label=(6, 3), seed=0):
    """train.bin and test.bin with so many images of every one of the 100 labels."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for name, n in zip(("train.bin", "test.bin"), per_label, strict=True):
        fine = rng.permutation(np.repeat(np.arange(100, dtype=np.uint8), n))
        pixels = rng.integers(0, 256, (len(fine), 3072)).astype(np.uint8)
        (directory / name).write_bytes(np.column_stack([fine // 5, fine, pixels]).tobytes())
    names = "\n".join(f"group_{k}" for k in range(20))
    (directory / "coarse_label_names.txt").write_text(names + "\n")


def sqlite(path, splits, make, flat=True):
    """splits: names there; two clients each."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
        )
        connection.execute(
            "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)"
        )
        for number, split in enumerate(splits):
            for i, n in enumerate((3, 5)):
                arrays = make(n, 10 * number + i)
                connection.execute(
                    "INSERT INTO client_metadata VALUES (?, ?, ?)", (f"c{i}", split, n)
                )
                for row in range(n):
                    proto = example({name: array[row] for name, array in arrays.items()})
                    connection.execute(
                        "INSERT INTO examples VALUES (?, ?, ?)", (split, f"c{i}", proto)
                    )


def example(features):
    """A serialized tf.train.Example."""
    entries = b""
    for name, value in features.items():
        entries += _field(1, _field(1, name.encode()) + _field(2, _values(value)))
    return _field(1, entries)


def _values(value):
    if isinstance(value, str):
        return _field(1, _field(1, value.encode()))
    array = np.asarray(value)
    if array.dtype.kind == "f":
        return _field(2, _field(1, array.astype("<f4").tobytes()))
    return _field(3, _field(1, b"".join(_varint(int(number)) for number in array.ravel())))


def _field(number, content):
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number):
    number &= 2**64 - 1
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def leaf(directory, sizes=(3, 5)):
    for number, split in enumerate(("train", "test")):
        clients = {f"c{i}": emnist(n, 10 * number + i) for i, n in enumerate(sizes)}
        content = {
            "users": list(clients),
            "num_samples": list(sizes),
            "user_data": {
                name: {"x": own["pixels"].reshape(-1, 784).tolist(), "y": own["label"].tolist()}
                for name, own in clients.items()
            },
        }
        (directory / split).mkdir(parents=True)
        (directory / split / "all_data.json").write_text(json.dumps(content))
