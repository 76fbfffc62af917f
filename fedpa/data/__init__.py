"""Federated data sets, read by client."""

from fedpa.data.federated import FederatedData, Splits, from_mapping, mapped
from fedpa.data.held_out import held_out
from fedpa.data.partition import by_column, by_quantity, dirichlet_label_skew, pachinko
from fedpa.data.pooled import pooled

__all__ = [
    "FederatedData",
    "Splits",
    "by_column",
    "by_quantity",
    "dirichlet_label_skew",
    "from_mapping",
    "held_out",
    "mapped",
    "pachinko",
    "pooled",
]
