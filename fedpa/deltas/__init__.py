"""Deltas: what a client sends, computed from its posterior samples (Theorem 3, appendix C)."""

from typing import TYPE_CHECKING

from fedpa.lazy import make_lazy

if TYPE_CHECKING:
    from fedpa.deltas.delta import Delta, DeltaInfo
    from fedpa.deltas.last_iterate import last_iterate
    from fedpa.deltas.mean import mean
    from fedpa.deltas.posterior import posterior
    from fedpa.deltas.posterior_delta import posterior_delta
    from fedpa.deltas.shrinkage import Shrinkage, fixed, oas, rblw

make_lazy(
    __name__,
    {
        "fedpa.deltas.delta": ("Delta", "DeltaInfo"),
        "fedpa.deltas.last_iterate": ("last_iterate",),
        "fedpa.deltas.mean": ("mean",),
        "fedpa.deltas.posterior": ("posterior",),
        "fedpa.deltas.posterior_delta": ("posterior_delta",),
        "fedpa.deltas.shrinkage": ("Shrinkage", "fixed", "oas", "rblw"),
    },
)

__all__ = [
    "Delta",
    "DeltaInfo",
    "Shrinkage",
    "fixed",
    "last_iterate",
    "mean",
    "oas",
    "posterior",
    "posterior_delta",
    "rblw",
]
