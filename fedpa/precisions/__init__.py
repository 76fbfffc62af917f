"""Gaussian precisions, Σ⁻¹ of eq. 3, one file per structure.

A structure is a NamedTuple of arrays with the methods of `Precision`.
"""

from fedpa.precisions.dense import Dense
from fedpa.precisions.diagonal import Diagonal
from fedpa.precisions.kronecker import Cholesky, Kronecker, KroneckerPair
from fedpa.precisions.layered import Layered, layer_precision
from fedpa.precisions.low_rank import LowRank, draw_directions, from_products
from fedpa.precisions.precision import Precision
from fedpa.precisions.scalar import Scalar

__all__ = [
    "Cholesky",
    "Dense",
    "Diagonal",
    "Kronecker",
    "KroneckerPair",
    "Layered",
    "LowRank",
    "Precision",
    "Scalar",
    "draw_directions",
    "from_products",
    "layer_precision",
]
