"""Reads damaged files: `python -m tests.data.damaged DIRECTORY FIRST CASES LAYOUT…`.

Prints a JSON line for each case that is neither read nor refused in one line that names the file. A
case that hangs or crashes ends the process, after its name was printed.
"""

import contextlib
import json
import os
import random
import resource
import signal
import sqlite3
import sys
import warnings
from pathlib import Path

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
from fedpa.errors import FedpaError
from tests.data import tiny

SECONDS, MEMORY = 20, 2**31
TABLES = ("parquet", "feather")
"""Of which fewer are read: each is read in another process first."""
VALUES = (0, 1, 255, 1000, 2**20, 2**30, 2**31 - 1, 2**40, 2**62, -1, -8)


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


LAYOUTS = {
    "hdf5": ("damaged.h5", lambda p: write_hdf5(p, [(c, tiny.posts(6)) for c in "abc"]), open_hdf5),
    "chunked": ("damaged.h5", chunked, open_hdf5),
    "npz": ("damaged.npz", lambda p: np.savez(p, **arrays()), lambda p: open_npz(p.parent)),
    "compressed": ("damaged.npz", lambda p: np.savez_compressed(p, **arrays()), read_central),
    "sqlite": (
        "damaged.sqlite",
        lambda p: tiny.sqlite(p, ["train"], tiny.posts),
        lambda p: open_sqlite(p, "train"),
    ),
    "indexed": ("damaged.sqlite", indexed, lambda p: open_sqlite(p, "train")),
    "leaf": ("damaged.json", leaf, open_leaf),
    "csv": ("damaged.csv", table, lambda p: open_table(p, "user")),
    "parquet": ("damaged.parquet", table, lambda p: open_table(p, "user")),
    "feather": ("damaged.feather", table, lambda p: open_table(p, "user")),
    "archive": ("damaged.tar.gz", packed, lambda p: find(["set.h5"], "damaged", p.parent)),
    "tar": ("damaged.tar.xz", packed, lambda p: find(["set.h5"], "damaged", p.parent)),
    "cifar": ("damaged.bin", cifar, lambda p: read_cifar100(p, p)),
}


def damage(content, draw):
    """Bytes changed, cut, zeroed, copied, put between, or made numbers that are much."""
    data = bytearray(content)
    how = draw.choice(["byte", "bit", "cut", "zero", "copy", "between", "number", "number"])
    if how == "cut":
        return bytes(data[: draw.randrange(len(data))])
    for _ in range(draw.choice([1, 1, 2, 8])):
        at, size = draw.randrange(len(data)), draw.choice([1, 4, 8, 64, 512])
        if how == "byte":
            data[at] = draw.randrange(256)
        elif how == "bit":
            data[at] ^= 1 << draw.randrange(8)
        elif how == "zero":
            data[at : at + size] = bytes(len(data[at : at + size]))
        elif how == "copy":
            begin = draw.randrange(len(data))
            data[at : at + size] = data[begin : begin + size]
        elif how == "between":
            data[at:at] = bytes([draw.randrange(256)])
        else:
            number = draw.choice(VALUES) % 2**64
            data[at - at % 4 : at - at % 4 + 8] = number.to_bytes(8, "little")
    return bytes(data)


def read_damaged(path, read):
    """What is wrong with the outcome, if anything is."""
    try:
        found = read(path)
        if hasattr(found, "ids"):
            read_all(found)
    except FedpaError as error:
        known = str(error).isprintable() and path.stem in str(error)
        return None if known else f"says {error}"
    except BaseException as error:
        return repr(error)
    return None


def main(directory, first, cases, *layouts):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    warnings.simplefilter("error")
    for layout in layouts:
        home = Path(directory) / layout
        home.mkdir(parents=True)
        os.environ["XDG_CACHE_HOME"] = str(home / "cache")
        name, make, read = LAYOUTS[layout]
        path = home / name
        make(path)
        content = path.read_bytes()
        assert read_damaged(path, read) is None
        number = int(cases) // 8 if layout in TABLES else int(cases)
        for case in range(int(first), int(first) + number):
            print(layout, case, flush=True)
            path.write_bytes(damage(content, random.Random(f"{layout} {case}")))
            signal.alarm(SECONDS)
            wrong = read_damaged(path, read)
            signal.alarm(0)
            if wrong:
                print(json.dumps([layout, case, wrong]), flush=True)
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
