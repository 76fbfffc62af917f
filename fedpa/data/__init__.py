"""Federated data sets, read by client."""

from fedpa.data.federated import FederatedData, from_mapping
from fedpa.data.partition import dirichlet_label_skew

__all__ = ["FederatedData", "dirichlet_label_skew", "from_mapping"]
