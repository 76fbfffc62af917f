import os

import numpy as np
import pytest

from fedpa.data.readers import read_cifar100
from fedpa.errors import DataError
from tests.refusals import refused


def records(n, seed):
    raw = np.random.default_rng(seed).integers(0, 256, (n, 3074)).astype(np.uint8)
    raw[:, 0] %= 20
    raw[:, 1] %= 100
    return raw


@pytest.fixture
def paths(tmp_path):
    for name, n in (("train.bin", 5), ("test.bin", 2)):
        records(n, n).tofile(tmp_path / name)
    return tmp_path / "train.bin", tmp_path / "test.bin"


def test_records_are_images(paths):
    train, test = read_cifar100(*paths)
    raw = records(5, 5)
    assert train["image"].shape == (5, 32, 32, 3)
    assert train["image"].dtype == np.uint8
    assert len(test["image"]) == 2
    assert train["coarse_label"].tolist() == raw[:, 0].tolist()
    assert train["label"].tolist() == raw[:, 1].tolist()
    assert train["label"].dtype == np.int64
    # Row 3, column 7: all of the red plane comes first, then green, then blue.
    assert train["image"][1, 3, 7].tolist() == [raw[1, 2 + c * 1024 + 3 * 32 + 7] for c in range(3)]


@pytest.mark.parametrize("size", [0, 1, 3073, 3 * 3074 - 1])
def test_a_cut_file_is_refused(paths, size):
    paths[1].write_bytes(bytes(size))
    with refused("test.bin", f"{size} bytes", "3074", kind=DataError):
        read_cifar100(*paths)


@pytest.mark.parametrize(("column", "value", "kind"), [(0, 20, "coarse"), (1, 100, "fine")])
def test_labels_out_of_range_are_refused(paths, column, value, kind):
    raw = records(5, 5)
    raw[3, column] = value
    raw.tofile(paths[0])
    with refused("train.bin", "record 3", f"{kind} label {value}", kind=DataError):
        read_cifar100(*paths)


def test_a_file_that_is_not_there(paths):
    paths[0].unlink()
    with refused("train.bin", kind=DataError):
        read_cifar100(*paths)


def test_claims_of_a_sparse_file_take_no_memory(paths):
    os.truncate(paths[0], 3074 * 10**9)
    with refused("train.bin", "3074000000000 bytes", kind=DataError):
        read_cifar100(*paths)
