"""ClientMCMC: one interface for every way to sample a client's posterior.

A sampler streams: each call of `sample` returns the next approximate posterior sample, and its
state does not grow with the steps it has made. All randomness comes from the key given to `init`,
so a chain is a function of (θ₀, data, key).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.errors import FedpaError, check_integer, check_type, refuse
from fedpa.objectives.client_data import ClientData, client_data, num_rows
from fedpa.samplers.temperature import Temperature
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
    temperature: Temperature | None = None
    """T of the posterior it samples; None if its spread follows from something else (IASG)."""


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
    """Draw `num` samples of a client's posterior.

    Compiles once per sampler, shapes and `num`; works inside `jax.jit`, too.

    Args:
        sampler: As of `fedpa.samplers`.
        theta0: θ₀, a pytree of arrays (of a model with other leaves,
            `equinox.partition(model, equinox.is_inexact_array)[0]`).
        data: A client's examples: a pytree of arrays, or `ClientData`.
        key: All of the chain's randomness.
        num: At least 1.
    Returns:
        The samples and their infos, each stacked on axis 0.
    """
    _check(sampler, theta0, key, num)
    return _draw(sampler, int(num), theta0, _client_data(data), key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draw(
    sampler: Sampler, num: int, theta0: Params, data: ClientData, key: Key
) -> tuple[Any, Any]:
    def step(state: State, _: None) -> tuple[State, tuple[Params, Info]]:
        state, theta_s, info = sampler.sample(state, data)
        return state, (theta_s, info)

    _, (samples, infos) = jax.lax.scan(step, sampler.init(theta0, data, key), None, length=num)
    return samples, infos


def draw_chains(sampler: Sampler, starts: Params, data: Any, key: Key, num: int) -> tuple[Any, Any]:
    """Draw `num` samples of each of several chains of one client.

    Compiles once per sampler, shapes and `num`; works inside `jax.jit`, too.

    Args:
        sampler, data, num: As in `draw`.
        starts: The chains' θ₀, stacked on axis 0.
        key: Split into one key per chain.
    Returns:
        The samples and their infos, each with axes (chains, num, …).
    """
    _check(sampler, starts, key, num)
    keys = jax.random.split(key, _num_chains(starts))
    return _draw_chains(sampler, int(num), starts, _client_data(data), keys)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draw_chains(
    sampler: Sampler, num: int, starts: Params, data: ClientData, keys: Any
) -> tuple[Any, Any]:
    return jax.vmap(lambda theta0, key: _draw(sampler, num, theta0, data, key))(starts, keys)


def _check(sampler: Sampler, theta0: Params, key: Key, num: int) -> None:
    check_type("sampler", sampler, Sampler, "fedpa.samplers.iasg(objective, optax.sgd(0.1))")
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


def _client_data(data: Any) -> ClientData:
    if isinstance(data, ClientData):
        return data
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(data)):
        n = num_rows(data)  # inside a compiled function: there are no values to check
        return ClientData(jax.tree.map(jnp.asarray, data), jnp.asarray(n, jnp.int32))
    return client_data(data)


def _num_chains(starts: Any) -> int:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(starts)]
    if len({shape[:1] for shape in shapes} - {()}) != 1 or () in shapes or shapes[0][0] == 0:
        raise FedpaError(
            f"starts has arrays of shapes {shapes}: all must have one θ₀ per chain on axis 0"
        )
    return int(shapes[0][0])
