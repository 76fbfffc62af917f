"""What a client makes of its posterior samples: one interface for every delta.

A delta is online and any-time: `value` may be read after every `update` and is the result on the
samples seen so far.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedpa.types import Count, Params, Scalar

State = Any


class DeltaInfo(NamedTuple):
    rho: Scalar
    """The ρ in use; 0 where Σ̂ = I."""
    ess: Scalar
    """How many independent samples the samples are worth; 0 where none are used."""


class Delta(NamedTuple):
    init: Callable[[Params, Count], State]
    """(θ₀, n_i) → state."""
    update: Callable[[State, Params, Params], State]
    """(state, θ_s, θ_k) → state: a new sample, and the chain's iterate when it was drawn."""
    value: Callable[[State], tuple[Params, DeltaInfo]]
    """state → (Δ, info), after at least one update."""
