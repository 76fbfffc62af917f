"""ClientMCMC: one interface for every way to sample a client's posterior.

A sampler streams: each call of `sample` returns the next approximate posterior sample, and its
state does not grow with the steps it has made. All randomness comes from the key given to `init`,
so a chain is a function of (θ₀, data, key).

The posterior at temperature T is p_i(θ) ∝ exp(−(n_i/T) f_i(θ)): f_i at relative temperature T/n_i.
T = 1 is the Bayesian posterior, T = n_i ("n") has the covariance A_i⁻¹ at which Σ̂⁻¹(θ − μ̂) is the
gradient. FedPA multiplies deviations by √(n_i/T) and so gets that covariance at every T; what T
decides is the noise of μ̂, √(T tr A_i⁻¹/(n_i ℓ)). With few samples of many parameters it drowns the
delta unless T is small: on the digits (ℓ = 5, d = 2,410) at T = 1 as well as at T = n_i.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedpa.errors import FedpaError, check_integer, check_type, refuse
from fedpa.objectives.checks import check_like
from fedpa.objectives.client_data import ClientData, client_data, num_rows
from fedpa.precision import widen
from fedpa.types import ClientArrays, Count, Key, Params, Scalar

Temperature = float | Literal["n"]
"""T, or "n" for n_i."""
COLD = 0.01
"""T of the command's samplers in FedPA, if not given; that of the functions is 1."""
Rate = float | jax.Array
"""A learning rate; an array (traced, too) where it follows a schedule."""

State: TypeAlias = PyTree
"""Whatever the sampler needs to make its next step."""

Info: TypeAlias = PyTree
"""A NamedTuple of scalars a person wants to see; `loss` is always one of them."""


class Sampler(NamedTuple):
    """A way to sample a client's posterior p_i(θ) ∝ exp(−(n_i/T) f_i(θ)) (ClientMCMC, Algorithm 3).

    Three pure functions: a chain is a function of (θ₀, data, key). An empty client's samples are
    θ₀.

    Args:
        init: (θ₀, data, key) → state, the sampler's own burn-in done.
        sample: (state, data) → (state, θ_s, info): the next posterior sample.
        position: state → the chain's current iterate θ_k, which FedAvg would send.
        temperature: T of the posterior it samples; None, the default, if its spread follows from
            something else (IASG).
    Example:
        >>> loss = fedpa.objectives.least_squares.loss
        >>> sampler = fedpa.samplers.iasg(fedpa.Objective(loss), 0.1, batch_size=2)
        >>> data = fedpa.objectives.client_data({"x": np.eye(4, 2), "y": np.ones(4)})
        >>> state = sampler.init(jnp.zeros(2), data, jax.random.key(0))
        >>> state, theta_s, info = sampler.sample(state, data)
    """

    init: Callable[[Params, ClientData, Key], State]
    sample: Callable[[State, ClientData], tuple[State, Params, Info]]
    position: Callable[[State], Params]
    temperature: Temperature | None = None


class Epochs(NamedTuple):
    """One sample per epoch, as in the paper's experiments.

    Args:
        burn_in: In-round burn-in: epochs before the first sample, ≥ 0; default: 0.
    Example:
        >>> fedpa.samplers.Epochs(burn_in=2)
        Epochs(burn_in=2)
    """

    burn_in: int = 0


class Steps(NamedTuple):
    """One sample per K steps (Algorithm 4); the order of examples continues across samples.

    Args:
        per_sample: K ≥ 1: iterates that make one sample.
        burn_in: B ≥ 0: steps before the first sample; default: 0.
        discard: Steps ≥ 0 dropped before each sample's K, to make samples less correlated; default:
            0.
    Example:
        >>> fedpa.samplers.Steps(100, burn_in=50)
        Steps(per_sample=100, burn_in=50, discard=0)
    """

    per_sample: int
    burn_in: int = 0
    discard: int = 0


Window = Epochs | Steps
"""What makes a sample."""


def check_window(window: Window) -> None:
    if not isinstance(window, Epochs | Steps):
        raise refuse("window", window, "must be Epochs(…) or Steps(…)")
    check_integer("burn_in", window.burn_in, 0)
    if isinstance(window, Steps):
        check_integer("steps_per_sample", window.per_sample, 1)
        check_integer("discard_steps", window.discard, 0)


def draw(
    sampler: Sampler, theta0: Params, data: ClientArrays | ClientData, key: Key, num: int
) -> tuple[Params, Info]:
    """Draw `num` samples of a client's posterior.

    Compiles once per sampler, shapes and `num`; works inside `jax.jit`, too.

    Args:
        sampler: From `fedpa.samplers`, or your own.
        theta0: θ₀, a pytree of arrays (of a model with other leaves,
            `equinox.partition(model, equinox.is_inexact_array)[0]`).
        data: A client's examples: a pytree of arrays, or `ClientData`.
        key: All of the chain's randomness.
        num: ℓ, at least 1.
    Returns:
        The samples and their infos, each stacked on axis 0.
    Raises:
        FedpaError: An argument is of another kind, or the data can't be used.
    Example:
        >>> loss = fedpa.objectives.least_squares.loss
        >>> sampler = fedpa.samplers.iasg(fedpa.Objective(loss), 0.1, batch_size=2)
        >>> data = {"x": np.eye(4, 2), "y": np.ones(4)}
        >>> samples, infos = draw(sampler, jnp.zeros(2), data, jax.random.key(0), 3)
        >>> samples.shape, infos.loss.shape
        ((3, 2), (3,))
    """
    _check(sampler, theta0, key, num)
    samples, infos = _draw(sampler, int(num), theta0, _client_data(data), key)
    return samples, infos


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draw(
    sampler: Sampler, num: int, theta0: Params, data: ClientData, key: Key
) -> tuple[Any, Any]:
    def step(state: State, _: None) -> tuple[State, tuple[Params, Info]]:
        state, theta_s, info = sampler.sample(state, data)
        return state, (theta_s, info)

    _, (samples, infos) = jax.lax.scan(step, sampler.init(theta0, data, key), None, length=num)
    return samples, infos


def draw_chains(
    sampler: Sampler, starts: Params, data: ClientArrays | ClientData, key: Key, num: int
) -> tuple[Params, Info]:
    """Draw `num` samples of each of several chains of one client.

    Compiles once per sampler, shapes and `num`; works inside `jax.jit`, too.

    Args:
        sampler, data, num: As in `draw`.
        starts: The chains' θ₀, stacked on axis 0.
        key: Split into one key per chain.
    Returns:
        The samples and their infos, each with axes (chains, num, …).
    Example:
        >>> loss = fedpa.objectives.least_squares.loss
        >>> sampler = fedpa.samplers.iasg(fedpa.Objective(loss), 0.1, batch_size=2)
        >>> data = {"x": np.eye(4, 2), "y": np.ones(4)}
        >>> samples, _ = draw_chains(sampler, jnp.zeros((5, 2)), data, jax.random.key(0), 3)
        >>> samples.shape
        (5, 3, 2)
    """
    _check(sampler, starts, key, num)
    keys = jax.random.split(key, _num_chains(starts))
    samples, infos = _draw_chains(sampler, int(num), starts, _client_data(data), keys)
    return samples, infos


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draw_chains(
    sampler: Sampler, num: int, starts: Params, data: ClientData, keys: Any
) -> tuple[Any, Any]:
    samples, infos = jax.vmap(lambda theta0, key: _draw(sampler, num, theta0, data, key))(
        starts, keys
    )
    return samples, infos


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


def check_sample(answer: Any, theta0: Params) -> tuple[State, Params, Info]:
    """What `Sampler.sample` gives; refused, while it is traced, if it has another form."""
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise refuse("sampler.sample's answer", answer, "must be (state, θ_s, info)")
    state, theta_s, info = answer
    loss = getattr(info, "loss", None)
    if not isinstance(info, tuple) or not isinstance(loss, jax.Array) or loss.shape != ():
        raise refuse("sampler.sample's info", info, "must be a NamedTuple of scalars with a loss")
    check_like("sampler.sample's θ_s", theta_s, theta0)
    return state, theta_s, info


def relative_temperature(temperature: Temperature, n: Count) -> Scalar:
    """T/n_i. An empty client counts as one example."""
    if temperature == "n":
        return jnp.ones((), jnp.float32)
    return jnp.asarray(temperature, jnp.float32) / jnp.maximum(n, 1).astype(jnp.float32)


def descent(gradient: Params) -> Params:
    """−∇f, wide enough to add up."""
    return jax.tree.map(jnp.negative, widen(gradient))


def in_dtype_of(tree: Params, value: Any) -> jax.Array:
    """A number in the dtype that the tree's arrays have together."""
    return jnp.asarray(value).astype(
        np.result_type(*[leaf.dtype for leaf in jax.tree.leaves(tree)])
    )


def check_rate(learning_rate: Rate) -> None:
    if not isinstance(learning_rate, jax.Array):
        check_positive("learning_rate", learning_rate, "must be a finite number > 0")


def check_temperature(temperature: Temperature) -> Temperature:
    """T, if it is one."""
    if temperature != "n":
        check_positive("temperature", temperature, "must be a finite number > 0, or 'n' for n_i")
    return temperature


def check_positive(field: str, value: Any, expected: str) -> None:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise refuse(field, value, expected)


def import_blackjax(module: str) -> Any:
    """The module of this name below `blackjax`, imported when it is first needed.

    Importing it takes a third of a second and starts JAX's devices, which must not happen before
    several processes have met (`fedpa.engines.distributed`).
    """
    with jax.ensure_compile_time_eval():  # its constants must be numbers, wherever it is imported
        return importlib.import_module(f"blackjax.{module}")
