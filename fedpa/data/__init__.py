"""Federated data sets, read by client. JAX is imported with the first name that is asked for."""

from typing import TYPE_CHECKING

from fedpa.lazy import make_lazy

if TYPE_CHECKING:
    from fedpa.data.federated import FederatedData, Splits, from_mapping
    from fedpa.data.partition import by_column, by_quantity, dirichlet_label_skew, pachinko
    from fedpa.data.views import hold_out, map_examples, pool_clients

make_lazy(
    __name__,
    {
        "fedpa.data.federated": ("FederatedData", "Splits", "from_mapping"),
        "fedpa.data.partition": ("by_column", "by_quantity", "dirichlet_label_skew", "pachinko"),
        "fedpa.data.views": ("hold_out", "map_examples", "pool_clients"),
    },
)

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
