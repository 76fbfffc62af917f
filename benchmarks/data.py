"""How long it takes to open and read large federations: `python -m benchmarks.data --dir DIR`.

Files like StackOverflow's are generated into a new directory below DIR and deleted afterwards.
Every measurement is a separate process; files are dropped from the page cache before each, if the
system allows it. Work is processor time: the rest is waiting, for the disk or for
others on the machine.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedpa.data.readers.hdf5 import open_hdf5
from fedpa.data.readers.sqlite import open_sqlite
from fedpa.experiments.cli.arguments import parse_words

FEATURES = ("creation_date", "tags", "title", "tokens", "type")
"""Those of StackOverflow that are text."""
COHORT = 100
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Options:
    dir: Path
    """Where the files are generated; about 10 KB a client are needed."""
    clients: int = 342_477
    """Those of StackOverflow."""
    layouts: str = "hdf5,sqlite,sqlite-unindexed"
    """Which, with commas."""
    measure: str = ""
    """Used by the processes that measure."""


def main(options: Options) -> None:
    if options.measure:
        print(json.dumps(measure(options.measure, options.dir)))
        return
    for layout in options.layouts.split(","):
        directory = Path(tempfile.mkdtemp(prefix="fedpa-data-", dir=options.dir))
        try:
            path = directory / layout
            started = time.perf_counter()
            GENERATE[layout](path, options.clients)
            took, size = time.perf_counter() - started, path.stat().st_size / 2**20
            print(f"{layout}: {options.clients} clients, {size:.0f} MB, generated in {took:.0f} s")
            for occasion in (
                "first open",
                "later open",
                "later open",
                "later open, file in memory",
            ):
                if occasion.endswith("memory"):
                    path.read_bytes()
                else:
                    forget(path)
                shown = ", ".join(f"{name} {value}" for name, value in apart(layout, path).items())
                print(f"  {occasion}: {shown}", flush=True)
        finally:
            shutil.rmtree(directory)


def apart(layout: str, path: Path) -> dict[str, Any]:
    """Measure in a separate process, whose cache is next to the file."""
    environment = os.environ | {"XDG_CACHE_HOME": str(path.parent / "cache")}
    command = [sys.executable, "-m", "benchmarks.data", "--measure", layout, "--dir", str(path)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(layout: str, path: Path) -> dict[str, Any]:
    before, started, worked = resident(), time.perf_counter(), time.process_time()
    data = open_hdf5(path) if layout == "hdf5" else open_sqlite(path, "train")
    opened, memory = time.perf_counter() - started, resident() - before
    opened_work = time.process_time() - worked
    cohort = np.random.default_rng(os.getpid()).choice(len(data.ids), COHORT, replace=False)
    started, worked = time.perf_counter(), time.process_time()
    sentences = sum(len(data.examples(data.ids[i])["tokens"]) for i in cohort)
    read, read_work = time.perf_counter() - started, time.process_time() - worked
    return {
        "open s": round(opened, 2),
        "of it work": round(opened_work, 2),
        "open MB": round(memory),
        f"cohort of {COHORT} s": round(read, 3),
        "of it work ": round(read_work, 3),
        "sentences": sentences,
        "MB in all": round(resident() - before),
    }


def resident() -> float:
    """MB of this process in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


def forget(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sentences(num_clients: int) -> Any:
    """(client, sentences): a few each, more of some."""
    rng = np.random.default_rng(0)
    words = ["the", "compiler", "returns", "segmentation", "fault", "with", "a", "pointer", "to"]
    pool = [" ".join(rng.choice(words, 12)).encode() for _ in range(500)]
    sizes = np.minimum(1 + rng.geometric(0.3, num_clients), 50)
    for i, n in enumerate(sizes.tolist()):
        # Not in order of the clients, as they would be in no file.
        yield f"{(i * 7919 + 104729) % 10_000_019:08d}", [pool[(i + j) % 500] for j in range(n)]


def generate_hdf5(path: Path, num_clients: int) -> None:
    kind = h5py.h5t.py_create(h5py.string_dtype(), logical=True)
    with h5py.File(path, "w") as file:
        root = file.create_group("examples").id
        for name, tokens in sentences(num_clients):
            group = h5py.h5g.create(root, name.encode())
            space = h5py.h5s.create_simple((len(tokens),))
            values = np.array(tokens, object)
            for feature in FEATURES:
                dataset = h5py.h5d.create(group, feature.encode(), kind, space)
                dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values, mtype=kind)


def generate_sqlite(path: Path, num_clients: int, with_index: bool = True) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(
        "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
        "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB);"
        "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER);"
    )
    for name, tokens in sentences(num_clients):
        rows = [("train", name, example(text)) for text in tokens]
        connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        connection.execute(
            "INSERT INTO client_metadata VALUES (?, ?, ?)", (name, "train", len(tokens))
        )
    if with_index:
        connection.execute("CREATE INDEX by_client ON examples (client_id)")
    connection.commit()
    connection.close()


def example(text: bytes) -> bytes:
    """A tf.train.Example with the text as each of the features. All parts are below 16 KB."""
    entries = [
        field(1, field(1, feature.encode()) + field(2, field(1, field(1, text))))
        for feature in FEATURES
    ]
    return field(1, b"".join(entries))


def field(number: int, content: bytes) -> bytes:
    size = len(content)
    length = bytes([size]) if size < 128 else bytes([size & 0x7F | 0x80, size >> 7])
    return bytes([number << 3 | 2]) + length + content


GENERATE: dict[str, Callable[[Path, int], None]] = {
    "hdf5": generate_hdf5,
    "sqlite": generate_sqlite,
    "sqlite-unindexed": lambda path, n: generate_sqlite(path, n, with_index=False),
}

if __name__ == "__main__":
    main(parse_words(Options, sys.argv[1:], "python -m benchmarks.data"))
