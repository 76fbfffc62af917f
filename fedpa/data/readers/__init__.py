"""Files in the layouts of others, one file each, read client by client.

A reader is imported when it is asked for: some need packages of their own (h5py, pyarrow).
"""

from typing import TYPE_CHECKING

from fedpa.lazy import make_lazy

if TYPE_CHECKING:
    from fedpa.data.readers.cifar import read_cifar100
    from fedpa.data.readers.hdf5 import open_hdf5, write_hdf5
    from fedpa.data.readers.leaf import open_leaf
    from fedpa.data.readers.npz import open_npz
    from fedpa.data.readers.sqlite import open_sqlite, sqlite_splits
    from fedpa.data.readers.table import open_huggingface, open_table

make_lazy(
    __name__,
    {
        "fedpa.data.readers.cifar": ("read_cifar100",),
        "fedpa.data.readers.hdf5": ("open_hdf5", "write_hdf5"),
        "fedpa.data.readers.leaf": ("open_leaf",),
        "fedpa.data.readers.npz": ("open_npz",),
        "fedpa.data.readers.sqlite": ("open_sqlite", "sqlite_splits"),
        "fedpa.data.readers.table": ("open_huggingface", "open_table"),
    },
)

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
