"""What a client sends, from its posterior samples: one file each (Theorem 3, appendix C)."""

from fedpa.deltas.delta import Delta, DeltaInfo
from fedpa.deltas.last_iterate import last_iterate
from fedpa.deltas.mean import mean
from fedpa.deltas.posterior import posterior
from fedpa.deltas.posterior_delta import posterior_delta
from fedpa.deltas.shrinkage import Shrinkage, fixed, oas, rblw

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
