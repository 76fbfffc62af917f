"""Federated data sets, read by client."""

from fedpa.data.federated import FederatedData, Splits, from_mapping
from fedpa.data.partition import by_column, by_quantity, dirichlet_label_skew, pachinko
from fedpa.data.views import hold_out, map_examples, pool_clients

__all__ = [
    "FederatedData",
    "Splits",
    "by_column",
    "by_quantity",
    "dirichlet_label_skew",
    "from_mapping",
    "hold_out",
    "map_examples",
    "pachinko",
    "pool_clients",
]
