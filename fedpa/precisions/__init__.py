"""Gaussian precisions, Σ⁻¹ of eq. 3, one file per structure.

A structure is a NamedTuple of arrays with the functions `add`, `scale`, `times`, `solve`, `sample`,
`logdet` and `num_numbers`.
"""

from fedpa.precisions import kronecker

__all__ = ["kronecker"]
