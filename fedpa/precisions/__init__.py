"""Gaussian precisions, Σ⁻¹ of eq. 3, one file per structure.

A structure is a NamedTuple of arrays with the methods of `Precision`.
"""

from fedpa.precisions.dense import Dense
from fedpa.precisions.diagonal import Diagonal
from fedpa.precisions.fisher import (
    Fisher,
    dense_fisher,
    diagonal_fisher,
    kronecker_fisher,
    low_rank_fisher,
)
from fedpa.precisions.kronecker import Cholesky, Eigenbasis, Kronecker, KroneckerPair
from fedpa.precisions.layered import Layered, layer_precision
from fedpa.precisions.low_rank import LowRank, draw_directions, from_products
from fedpa.precisions.precision import Precision
from fedpa.precisions.scalar import Scalar

__all__ = [
    "Cholesky",
    "Dense",
    "Diagonal",
    "Eigenbasis",
    "Fisher",
    "Kronecker",
    "KroneckerPair",
    "Layered",
    "LowRank",
    "Precision",
    "Scalar",
    "dense_fisher",
    "diagonal_fisher",
    "draw_directions",
    "from_products",
    "kronecker_fisher",
    "layer_precision",
    "low_rank_fisher",
]
