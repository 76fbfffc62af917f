"""The readers of data, and a small file of each layout."""

import contextlib
import json
import sqlite3

import h5py
import numpy as np
import pyarrow as pa
from pyarrow import feather, parquet

from fedpa.data.archives import find
from fedpa.data.readers import (
    open_hdf5,
    open_leaf,
    open_npz,
    open_sqlite,
    open_table,
    read_cifar100,
    write_hdf5,
)
from fedpa.data.readers.table import read_central
from tests.data import tiny
from tests.fuzz.bounded import Surface
from tests.fuzz.mutations import change_bytes, change_hdf5, change_json, change_zip, make_archive


def read_all(data):
    for name in data.ids:
        arrays = data.examples(name)
        assert arrays, name
        assert all(len(array) == data.num_examples(name) for array in arrays.values())


def table(path):
    n = 40
    columns = {"user": [f"u{i % 5}" for i in range(n)], "x": np.linspace(0, 1, n), "n": range(n)}
    columns |= {"text": ["w" * (i % 7) for i in range(n)]}
    if path.suffix != ".csv":
        columns["vector"] = [[float(i), 0.0] for i in range(n)]
    made = pa.table({name: pa.array(values) for name, values in columns.items()})
    if path.suffix == ".csv":
        made.to_pandas().to_csv(path, index=False)
    elif path.suffix == ".parquet":
        parquet.write_table(made, path, row_group_size=30)
    else:
        feather.write_feather(made, str(path), compression="uncompressed")


def chunked(path):
    with h5py.File(path, "w", libver="latest") as file:
        for name in "abc":
            data = np.random.default_rng(0).random((20, 5))
            options = {"chunks": (10, 5), "compression": "gzip", "shuffle": True}
            file.create_dataset(f"examples/{name}/x", data=data, **options)
            file[f"examples/{name}/y"] = np.arange(20)


def indexed(path):
    tiny.sqlite(path, ["train"], tiny.posts)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE INDEX i ON examples (client_id)")


def arrays():
    return {"x": np.ones((10, 3)), "y": np.arange(10), "t": np.array(["é", "ab"] * 5)}


def leaf(path):
    data = {"a": {"x": [[1.5, 2], [3, 4]], "y": [0, 1]}, "b": {"x": [[1, 2.5]] * 3, "y": [1, 2, 3]}}
    path.write_text(json.dumps({"users": ["a", "b"], "num_samples": [2, 3], "user_data": data}))


def packed(path):
    inside = path.parent / "inside" / "set.h5"
    inside.parent.mkdir()
    inside.write_bytes(bytes(range(256)) * 8)
    tiny.archive(path, inside)
    inside.unlink()
    inside.parent.rmdir()


def cifar(path):
    path.write_bytes((bytes([1, 5]) + bytes(3072)) * 3)


def damage(path, content, draw):
    path.write_bytes(change_bytes(content, draw))


def lie(change):
    """A mutation that keeps the format and changes what it says."""
    return lambda path, content, draw: path.write_bytes(change(content, draw))


def link(path, content, draw):
    change_hdf5(path, draw)


def pack_elsewhere(path, content, draw):
    path.write_bytes(make_archive(draw, ("set.h5", b"content")))


def write_arrays(path):
    np.savez(path, **arrays())


def write_posts(path):
    write_hdf5(path, [(c, tiny.posts(6)) for c in "abc"])
    outside = path.parent / "outside.h5"
    with h5py.File(outside, "w") as file:
        file["x"] = file["examples/a/x"] = np.zeros(6, "f4")


def find_set(path):
    return find(["set.h5"], "set", path.parent)


def use(read):
    """Read all clients of a federation, too."""

    def read_and_use(path):
        found = read(path)
        if hasattr(found, "ids"):
            read_all(found)

    return read_and_use


def read_posts(path):
    return open_sqlite(path, "train")


def read_by_user(path):
    return open_table(path, "user")


LAYOUTS = {
    "hdf5": ("clients.h5", write_posts, open_hdf5),
    "chunked": ("clients.h5", chunked, open_hdf5),
    "npz": ("client.npz", write_arrays, lambda p: open_npz(p.parent)),
    "compressed": ("client.npz", lambda p: np.savez_compressed(p, **arrays()), read_central),
    "sqlite": (
        "clients.sqlite",
        lambda p: tiny.sqlite(p, ["train"], tiny.posts),
        read_posts,
    ),
    "indexed": ("clients.sqlite", indexed, read_posts),
    "leaf": ("clients.json", leaf, open_leaf),
    "csv": ("clients.csv", table, read_by_user),
    "parquet": ("clients.parquet", table, read_by_user),
    "feather": ("clients.feather", table, read_by_user),
    "archive": ("set.tar.gz", packed, find_set),
    "tar": ("set.tar.xz", packed, find_set),
    "cifar": ("train.bin", cifar, lambda p: read_cifar100(p, p)),
}
SLOW = {"parquet": 8, "feather": 8}
"""Each is read in another process first."""
LIES = {
    "hdf5": link,
    "npz": lie(change_zip),
    "compressed": lie(change_zip),
    "leaf": lie(change_json),
    "archive": pack_elsewhere,
    "tar": pack_elsewhere,
}
SURFACES = {
    name: Surface(file, make, use(read), damage, SLOW.get(name, 1), named=file.partition(".")[0])
    for name, (file, make, read) in LAYOUTS.items()
} | {
    f"{name}-lies": Surface(file, make, use(read), LIES[name], 4, named=file.partition(".")[0])
    for name, (file, make, read) in LAYOUTS.items()
    if name in LIES
}
