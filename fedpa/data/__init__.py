"""Federated data sets, read by client. JAX is imported with the first name that is asked for."""

from typing import TYPE_CHECKING

from fedpa.lazy import make_lazy

if TYPE_CHECKING:
    from fedpa.data.federated import FederatedData, Splits, from_mapping, mapped
    from fedpa.data.held_out import held_out
    from fedpa.data.partition import by_column, by_quantity, dirichlet_label_skew, pachinko
    from fedpa.data.pooled import pooled

make_lazy(
    __name__,
    {
        "fedpa.data.federated": ("FederatedData", "Splits", "from_mapping", "mapped"),
        "fedpa.data.held_out": ("held_out",),
        "fedpa.data.partition": ("by_column", "by_quantity", "dirichlet_label_skew", "pachinko"),
        "fedpa.data.pooled": ("pooled",),
    },
)

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
