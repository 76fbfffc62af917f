"""What the paper's table 2 says of a federation, counted."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedpa.data.cache import progress
from fedpa.data.federated import FederatedData


class Sizes(NamedTuple):
    clients: int
    examples: int
    mean: float
    """Examples per client, and so on down."""
    std: float
    """Over these clients: divided by their number."""
    least: int
    median: float
    most: int


def sizes_of(numbers: Sequence[int] | np.ndarray) -> Sizes:
    """Of the clients' numbers of examples."""
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


def sizes(data: FederatedData) -> Sizes:
    return sizes_of([data.num_examples(name) for name in data.ids])


def num_labels(data: FederatedData, feature: str) -> int:
    """How many labels there are among all clients: reads them all."""
    seen: set[int] = set()
    with progress(f"reading every {feature}") as tell:
        for done, name in enumerate(data.ids, start=1):
            seen.update(np.unique(data.examples(name)[feature]).tolist())
            tell(done, len(data.ids))
    return len(seen)


def table_of(labels: np.ndarray, rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(the labels, sorted; how many examples of each a client has: [clients, labels])."""
    kinds, inverse = np.unique(labels, return_inverse=True)
    return kinds, np.stack([np.bincount(inverse[own], minlength=len(kinds)) for own in rows])
