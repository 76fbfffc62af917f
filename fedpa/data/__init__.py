"""Federated data sets, read by client."""

from fedpa.data.federated import FederatedData, Splits, from_mapping, mapped
from fedpa.data.partition import dirichlet_label_skew

__all__ = ["FederatedData", "Splits", "dirichlet_label_skew", "from_mapping", "mapped"]
