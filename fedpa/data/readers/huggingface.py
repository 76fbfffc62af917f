"""A data set of Hugging Face's `datasets`, by a column that says whose row it is."""

from typing import Any

import numpy as np

from fedpa.data.federated import FederatedData
from fedpa.data.readers.clients import Arrays, Features, federation, wanted
from fedpa.data.readers.grouped import check_column, column
from fedpa.data.readers.table import arrow_clients
from fedpa.errors import DataError, FedpaError, refuse


def open_huggingface(dataset: Any, client_column: str, features: Features = None) -> FederatedData:
    """Rows by client, in the order in which they stand; the other columns are the features.

    dataset: a `datasets.Dataset`, which lies in files and is read row by row. Only the clients'
    names are read at once.
    features: which columns: names, or {the name it shall have: the column}; all others unless told.
    Columns are taken as `with_format("numpy")` gives them, images decoded, text as `str`.
    """
    try:
        import datasets
    except ImportError:
        raise FedpaError(
            "Hugging Face data sets need datasets: install it with pip install 'fedpa[huggingface]'"
        ) from None
    if isinstance(dataset, datasets.DatasetDict):
        raise refuse("dataset", list(dataset), "must be one of these splits, dataset[split]")
    if not isinstance(dataset, datasets.Dataset):
        raise refuse("dataset", type(dataset).__name__, "must be a datasets.Dataset")
    check_column("dataset", client_column, dataset.column_names)
    if not len(dataset):
        raise DataError("dataset has no rows")
    ids = dataset.select_columns([client_column]).with_format("arrow")[:]
    by_client = arrow_clients("dataset", ids, client_column)
    columns = [name for name in dataset.column_names if name != client_column]
    names = wanted(features, columns, "dataset")
    rows = dataset.select_columns(list(dict.fromkeys(names.values()))).with_format("numpy")

    def read(client: str) -> Arrays:
        own = by_client.rows(client)
        taken = rows[own.tolist()]
        where = f"dataset: client {client!r}, column"
        return {
            new: column(f"{where} {old!r}", np.asarray(taken[old]), own)
            for new, old in names.items()
        }

    return federation("dataset", by_client.who, read, by_client.rows)
