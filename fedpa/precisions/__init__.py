"""Gaussian precisions, Σ⁻¹ of eq. 3, one file per structure.

A structure is a NamedTuple of arrays with the methods of `Precision`.
"""

from fedpa.precisions.kronecker import Cholesky, Kronecker
from fedpa.precisions.precision import Precision

__all__ = ["Cholesky", "Kronecker", "Precision"]
