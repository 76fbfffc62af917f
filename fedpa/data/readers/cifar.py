"""CIFAR-100's binary records, and their partition by Pachinko (Reddi et al.)."""

from pathlib import Path

import numpy as np

from fedpa.data.partition import Partition, number_clients, pachinko
from fedpa.data.readers.hdf5 import write_partition
from fedpa.data.readers.reader import MAX_BYTES, Arrays, refuse_damaged
from fedpa.errors import DataError

SIDE, CHANNELS = 32, 3
RECORD = 2 + CHANNELS * SIDE * SIDE
FINE, COARSE = 100, 20


def read_cifar100(train: Path, test: Path) -> tuple[Arrays, Arrays]:
    """Read CIFAR-100's binary files, before they are dealt to clients.

    Args:
        train: `train.bin`.
        test: `test.bin`.
    Returns:
        Of each, `image` as uint8[n, 32, 32, 3], `label` and `coarse_label` as int64[n].
    Raises:
        DataError: A file is cut, or has labels that are not CIFAR-100's.
    Example:
        >>> np.zeros(2 * 3074, np.uint8).tofile("train.bin")
        >>> train, _ = read_cifar100(Path("train.bin"), Path("train.bin"))
        >>> train["image"].shape
        (2, 32, 32, 3)
    """
    return _read(train), _read(test)


def _read(path: Path) -> Arrays:
    with refuse_damaged(f"{path} can't be read", OSError):
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DataError(f"{path} has {size} bytes: must have at most {MAX_BYTES}")
        raw = np.fromfile(path, np.uint8)
    if not len(raw) or len(raw) % RECORD:
        raise DataError(f"{path} has {len(raw)} bytes: must be records of {RECORD}, it may be cut")
    records = raw.reshape(-1, RECORD)
    for column, classes, kind in ((0, COARSE, "coarse"), (1, FINE, "fine")):
        bad = np.flatnonzero(records[:, column] >= classes)
        if len(bad):
            raise DataError(
                f"{path}: record {bad[0]} has {kind} label {records[bad[0], column]}: must be "
                f"below {classes}"
            )
    images = records[:, 2:].reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)
    return {
        "image": np.ascontiguousarray(images),
        "label": records[:, 1].astype(np.int64),
        "coarse_label": records[:, 0].astype(np.int64),
    }


CLIENTS = {"train": 500, "test": 100}
EACH = 100
ALPHA, BETA = 0.1, 10.0


def seed_split(seed: int, split: str) -> int:
    """Each split has randomness of its own."""
    number = list(CLIENTS).index(split)
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def write_pachinko(train: Path, test: Path, out: Path, seed: int) -> None:
    """Deal both files and write `fed_cifar100_{train,test}.h5` into the directory `out`."""
    for split, arrays in zip(CLIENTS, read_cifar100(train, test), strict=True):
        coarse, fine = arrays["coarse_label"], arrays["label"]
        rows = pachinko(coarse, fine, CLIENTS[split], EACH, ALPHA, BETA, seed_split(seed, split))
        dealt = Partition(arrays, rows, number_clients(len(rows)))
        write_partition(out / f"fed_cifar100_{split}.h5", dealt)
