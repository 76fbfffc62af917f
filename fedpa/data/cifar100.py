"""CIFAR-100 dealt by Pachinko, as Reddi et al. did it: 500 clients to train, 100 to test."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedpa.data.dealt import Dealt, numbered, write_clients
from fedpa.data.partition import pachinko
from fedpa.data.readers.cifar import read_cifar100

CLIENTS = {"train": 500, "test": 100}
EACH = 100
ALPHA, BETA = 0.1, 10.0


def stream(seed: int, split: str) -> int:
    """Each split has randomness of its own."""
    number = list(CLIENTS).index(split)
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def deal_pachinko(split: str, arrays: Mapping[str, np.ndarray], seed: int) -> Dealt:
    """The images of a split."""
    coarse, fine = arrays["coarse_label"], arrays["label"]
    rows = pachinko(coarse, fine, CLIENTS[split], EACH, ALPHA, BETA, stream(seed, split))
    return Dealt(arrays, rows, numbered(len(rows)))


def write_pachinko(train: Path, test: Path, out: Path, seed: int) -> None:
    """Deal both files and write `fed_cifar100_{train,test}.h5` into the directory `out`."""
    for split, arrays in zip(CLIENTS, read_cifar100(train, test), strict=True):
        write_clients(out / f"fed_cifar100_{split}.h5", deal_pachinko(split, arrays, seed))
