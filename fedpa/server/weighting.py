"""Client weights q_i: the examples of one epoch (not times the epochs), or one each."""

from collections.abc import Iterable
from typing import Literal

import jax.numpy as jnp

from fedpa.errors import refuse
from fedpa.types import Count, Scalar

Weighting = Literal["examples", "uniform"]


def client_weight(weighting: str, n: Count) -> Scalar:
    """q_i = n_i or 1; 0 for an empty client either way."""
    if weighting == "examples":
        return n.astype(jnp.float32)
    return (n > 0).astype(jnp.float32)


def total_weight(weighting: str, sizes: Iterable[int]) -> float:
    """Σ q_i over clients of these sizes."""
    return float(sum(n if weighting == "examples" else n > 0 for n in sizes))


def check_weighting(weighting: str) -> None:
    if weighting not in ("examples", "uniform"):
        raise refuse("weighting", weighting, "must be 'examples' or 'uniform'")
