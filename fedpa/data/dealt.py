"""A central data set after it was dealt: who has which rows, written in TFF's layout."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedpa.data.progress import progress
from fedpa.data.readers.hdf5 import write_hdf5


class Dealt(NamedTuple):
    """A split and who has which of its rows."""

    arrays: Mapping[str, np.ndarray]
    rows: Sequence[np.ndarray]
    names: Sequence[str]
    """Of the clients."""


def numbered(num_clients: int) -> list[str]:
    """Names that sort as numbers do: 000, 001, …"""
    width = len(str(num_clients - 1))
    return [f"{number:0{width}d}" for number in range(num_clients)]


def write_clients(path: Path, dealt: Dealt) -> None:
    """Each client's rows of the arrays, in TFF's layout."""
    with progress(f"writing {path.name}") as tell:

        def clients() -> Iterator[tuple[str, dict[str, np.ndarray]]]:
            for done, (name, own) in enumerate(zip(dealt.names, dealt.rows, strict=True), start=1):
                yield name, {feature: array[own] for feature, array in dealt.arrays.items()}
                tell(done, len(dealt.names))

        write_hdf5(path, clients())
