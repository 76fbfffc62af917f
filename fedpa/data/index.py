"""Who is in a file and with how many examples: found once, then kept in the cache."""

import contextlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedpa import places
from fedpa.data.kept import settle, stamp, whole
from fedpa.errors import DataError

VERSION = "2"
"""Of the kept form: another one makes indices anew."""


class Index(NamedTuple):
    ids: list[str]
    """Sorted."""
    counts: np.ndarray
    """int64, the examples of each."""
    aligned: Mapping[str, np.ndarray] = {}
    """What else the reader wants to know of each: first axis as `ids`."""
    notes: Mapping[str, np.ndarray] = {}
    """What it wants to know of the whole."""


def indexed(path: Path, part: str, build: Callable[[], Index]) -> Index:
    """The index of a file or directory, from the cache if it has not changed since.

    part: what the index is of, for example the split, if the file holds several.
    build: finds it, in any order. A client that is there twice is refused.
    """
    target = places.cache() / "indices" / f"{stamp(path, f'{part}|{VERSION}')}.npz"
    kept = _kept(target)
    if kept is not None:
        return kept
    index = _sorted(path, build())
    with contextlib.suppress(OSError):  # not to be able to keep it costs time, nothing else
        _keep(target, index)
    return index


def _sorted(path: Path, index: Index) -> Index:
    order = sorted(range(len(index.ids)), key=index.ids.__getitem__)
    ids = [index.ids[i] for i in order]
    refuse_twice(path, ids)
    rows = np.array(order, np.int64)
    moved = {name: array[rows] for name, array in index.aligned.items()}
    return Index(ids, np.asarray(index.counts, np.int64)[rows], moved, index.notes)


def refuse_twice(path: Path, ids: Sequence[str]) -> None:
    """Sorted ids, each once."""
    for one, other in itertools.pairwise(ids):
        if one == other:
            raise DataError(f"{path}: client {one!r} is there twice")


def _keep(target: Path, index: Index) -> None:
    arrays = {"ids": np.frombuffer(json.dumps(index.ids).encode(), np.uint8)}
    arrays |= {"counts": index.counts}
    arrays |= {f"aligned.{name}": array for name, array in index.aligned.items()}
    arrays |= {f"notes.{name}": array for name, array in index.notes.items()}
    with whole(target) as beside:
        made = beside / "index.npz"
        np.savez(made, allow_pickle=False, **arrays)
        settle(made, target)


def _kept(target: Path) -> Index | None:
    """None if there is none, or one that is damaged."""
    try:
        with target.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            ids = json.loads(arrays["ids"].tobytes())
            found = {name: arrays[name] for name in arrays.files if "." in name}
            index = Index(
                ids,
                arrays["counts"],
                _below("aligned.", found),
                _below("notes.", found),
            )
    except Exception:  # of a file that is damaged, NumPy and zipfile raise every kind
        return None
    sizes = {len(array) for array in (index.counts, *index.aligned.values())}
    return index if sizes == {len(index.ids)} else None


def _below(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
