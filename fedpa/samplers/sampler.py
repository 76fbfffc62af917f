"""ClientMCMC: one interface for every way to sample a client's posterior.

A sampler streams: each call of `sample` returns the next approximate posterior sample, and its
state does not grow with the steps it has made. All randomness comes from the key given to `init`,
so a chain is a function of (θ₀, data, key).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.errors import FedpaError, check_integer, refuse
from fedpa.objectives.client_data import ClientData, client_data
from fedpa.types import Key, Params

State = Any
"""Whatever the sampler needs to make its next step."""

Info = Any
"""A NamedTuple of scalars a person wants to see; `loss` is always one of them."""


class Sampler(NamedTuple):
    init: Callable[[Params, ClientData, Key], State]
    """(θ₀, data, key) → state, the sampler's own burn-in done."""
    sample: Callable[[State, ClientData], tuple[State, Params, Info]]
    """(state, data) → (state, θ_s, info): the next posterior sample."""
    position: Callable[[State], Params]
    """state → the chain's current iterate θ_k, which FedAvg would send."""


class Epochs(NamedTuple):
    """One sample per epoch, as in the paper's experiments."""

    burn_in: int = 0
    """In-round burn-in: epochs before the first sample."""


class Steps(NamedTuple):
    """Algorithm 4 by steps; the order of examples runs on across samples."""

    per_sample: int
    """K: iterates that make one sample."""
    burn_in: int = 0
    """B: steps before the first sample."""
    discard: int = 0
    """Steps dropped before each sample's K, to make samples less correlated."""


Window = Epochs | Steps
"""What makes a sample."""


def check_window(window: Window) -> None:
    if not isinstance(window, Epochs | Steps):
        raise refuse("window", window, "must be Epochs(…) or Steps(…)")
    check_integer("burn_in", window.burn_in, 0)
    if isinstance(window, Steps):
        check_integer("steps_per_sample", window.per_sample, 1)
        check_integer("discard_steps", window.discard, 0)


def draw(sampler: Sampler, theta0: Params, data: Any, key: Key, num: int) -> tuple[Any, Any]:
    """`num` samples of a client's posterior, stacked on axis 0, and their stacked infos.

    `data` is a client's examples: a pytree of arrays, or `ClientData`. θ₀ is a pytree of arrays (of
    a model with other leaves, `equinox.partition(model, equinox.is_inexact_array)[0]`).
    """
    check_integer("num", num, 1)
    for leaf in jax.tree.leaves(theta0):
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        if not isinstance(leaf, jax.Array | np.ndarray) or not jnp.issubdtype(kind, jnp.floating):
            raise FedpaError(
                f"theta0 has a leaf of type {kind}: all must be floating-point arrays (of a model, "
                "equinox.partition(model, equinox.is_inexact_array)[0])"
            )
    if not isinstance(key, jax.Array):
        raise refuse("key", key, "must be a key, for example jax.random.key(0)")
    if not isinstance(data, ClientData):
        data = client_data(data)

    def step(state: State, _: None) -> tuple[State, tuple[Params, Info]]:
        state, theta_s, info = sampler.sample(state, data)
        return state, (theta_s, info)

    _, (samples, infos) = jax.lax.scan(step, sampler.init(theta0, data, key), None, length=num)
    return samples, infos
