"""Files in the layouts of others, one file each, read client by client."""

from fedpa.data.readers.cifar import read_cifar100
from fedpa.data.readers.hdf5 import open_hdf5, write_hdf5
from fedpa.data.readers.leaf import open_leaf
from fedpa.data.readers.npz import open_npz
from fedpa.data.readers.sqlite import open_sqlite, sqlite_splits
from fedpa.data.readers.table import open_huggingface, open_table

__all__ = [
    "open_hdf5",
    "open_huggingface",
    "open_leaf",
    "open_npz",
    "open_sqlite",
    "open_table",
    "read_cifar100",
    "sqlite_splits",
    "write_hdf5",
]
