"""Averaging of server iterates: what is evaluated and returned may be a mean of θ over rounds.

The server's own θ, which clients are sent, is not touched.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedpa.errors import ask_if_meant, check_integer, refuse
from fedpa.precision import narrow, widen
from fedpa.types import Count, Params


class Averaging(NamedTuple):
    """How server iterates become the θ that is evaluated and returned.

    Args:
        init: θ before the first round → state.
        update: (state, θ after a round) → state.
        value: state → the average.
    Example:
        >>> import fedpa, jax.numpy as jnp
        >>> mean = fedpa.server.averaging.polyak()
        >>> state = mean.init(jnp.asarray(0.0))
        >>> for theta in (1.0, 3.0):
        ...     state = mean.update(state, jnp.asarray(theta))
        >>> float(mean.value(state))
        2.0
    """

    init: Callable[[Params], PyTree]
    update: Callable[[PyTree, Params], PyTree]
    value: Callable[[PyTree], Params]


class AverageState(NamedTuple):
    """What `polyak` and `exponential` keep.

    Args:
        average: The mean of iterates so far.
        rounds: How many rounds there were.
    Example:
        >>> import fedpa, jax.numpy as jnp
        >>> int(fedpa.server.averaging.polyak().init(jnp.zeros(3)).rounds)
        0
    """

    average: Params
    rounds: Count


def none() -> Averaging:
    """Take the last iterate: no averaging.

    Returns:
        The averaging.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.sgd(1.0), averaging=fedpa.server.averaging.none())
    """
    return Averaging(lambda theta: theta, lambda _, theta: theta, lambda theta: theta)


def polyak(start: int = 0) -> Averaging:
    """Take the mean of all iterates since a round; before it, the last iterate.

    Args:
        start: The round, from 0.
    Returns:
        The averaging.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.sgd(1.0), averaging=fedpa.server.averaging.polyak(20))
    """
    if start < 0:
        raise refuse("start", start, "must be a round ≥ 0")

    def update(state: AverageState, theta: Params) -> AverageState:
        rounds = state.rounds + 1
        members = jnp.maximum(rounds - start, 1)
        average = jax.tree.map(
            lambda mean, x: mean + (x - mean) / members.astype(x.dtype), state.average, theta
        )
        return AverageState(average, rounds)

    return Averaging(_start, update, lambda state: state.average)


def exponential(decay: float) -> Averaging:
    """Take an exponential moving average: a ← decay·a + (1 − decay)·θ, started at the first θ.

    Args:
        decay: In [0, 1); 0 is the last iterate.
    Returns:
        The averaging.
    Example:
        >>> import fedpa
        >>> moving = fedpa.server.averaging.exponential(0.9)
        >>> side = fedpa.Server(fedpa.server.sgd(1.0), averaging=moving)
    """
    if not 0 <= decay < 1:
        raise refuse("decay", decay, "must be in [0, 1)")

    def update(state: AverageState, theta: Params) -> AverageState:
        weight = jnp.where(state.rounds == 0, 1.0, 1 - decay)
        average = jax.tree.map(
            lambda mean, x: mean + weight.astype(x.dtype) * (x - mean), state.average, theta
        )
        return AverageState(average, state.rounds + 1)

    return Averaging(_start, update, lambda state: state.average)


def _start(theta: Params) -> AverageState:
    return AverageState(theta, jnp.zeros((), jnp.int32))


class LastTwo(NamedTuple):
    """What `last_two` keeps.

    Args:
        last: The last iterate.
        before: The one before it.
    Example:
        >>> import fedpa, jax.numpy as jnp
        >>> fedpa.server.averaging.last_two().init(jnp.zeros(3)).last.shape
        (3,)
    """

    last: Params
    before: Params


def last_two() -> Averaging:
    """Take the mean of the last iterate and the one before it, as FedExP does.

    Returns:
        The averaging.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.sgd(1.0), averaging=fedpa.server.averaging.last_two())
    """

    def value(state: LastTwo) -> Params:
        return jax.tree.map(lambda x, y: x + (y - x) / 2, state.last, state.before)

    return Averaging(
        lambda theta: LastTwo(theta, theta), lambda state, theta: LastTwo(theta, state.last), value
    )


class SwagState(NamedTuple):
    """What `swag` keeps.

    Args:
        last: The last iterate, in the parameters' dtypes.
        average: θ̄, the mean of iterates so far; before the start the last iterate. In at least
            float32, as all that follows.
        spread: Σ (θ − θ̄)², of which the variance is made.
        deviations: The latest θ − θ̄, each from the mean at its time, on a first axis.
        rounds: How many rounds there were.
        members: How many iterates the mean has.
    Example:
        >>> import fedpa, jax.numpy as jnp
        >>> fedpa.server.averaging.swag(rank=5).init(jnp.zeros(3)).deviations.shape
        (5, 3)
    """

    last: Params
    average: Params
    spread: Params
    deviations: Params
    rounds: Count
    members: Count


def swag(start: int = 0, rank: int = 20, every: int = 1) -> Averaging:
    """Take the mean of iterates since a round, and keep their spread for a posterior (SWAG).

    W. Maddox et al., A simple baseline for Bayesian uncertainty in deep learning, NeurIPS 2019:
    N(θ̄, ½(diag(σ²) + DDᵀ/(K − 1))), σ² the variance of the iterates and D's columns the deviations
    of the latest K. `fedpa.posterior.swag_posterior` makes it of the trained run. What it keeps,
    K + 2 models, is in checkpoints.

    Args:
        start: The round, from 0.
        rank: K ≥ 2.
        every: Rounds between iterates, ≥ 1.
    Returns:
        The averaging.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.sgd(1.0), averaging=fedpa.server.averaging.swag(100))
    """
    for field, value, least in (("start", start, 0), ("rank", rank, 2), ("every", every, 1)):
        check_integer(field, value, least)

    def init(theta: Params) -> SwagState:
        zero, wide = jnp.zeros((), jnp.int32), widen(theta)
        rows = jax.tree.map(lambda x: jnp.zeros((rank, *x.shape), x.dtype), wide)
        return SwagState(theta, wide, jax.tree.map(jnp.zeros_like, wide), rows, zero, zero)

    def update(state: SwagState, theta: Params) -> SwagState:
        rounds, wide = state.rounds + 1, widen(theta)
        is_taken = (rounds > start) & ((rounds - start - 1) % every == 0)
        members = state.members + is_taken.astype(jnp.int32)

        def average(old: Array, x: Array) -> Array:
            moved = old + (x - old) / jnp.maximum(members, 1).astype(x.dtype)
            return jnp.where(rounds <= start, x, jnp.where(is_taken, moved, old))

        means = jax.tree.map(average, state.average, wide)

        def spread(sums: Array, x: Array, old: Array, new: Array) -> Array:
            # Welford's sum: squares less the mean's square would lose most digits.
            return jnp.where(is_taken & (members > 1), sums + (x - old) * (x - new), sums)

        place = (members - 1) % rank

        def put(rows: Array, x: Array, mean: Array) -> Array:
            return jnp.where(is_taken, rows.at[place].set(x - mean), rows)

        return SwagState(
            theta,
            means,
            jax.tree.map(spread, state.spread, wide, state.average, means),
            jax.tree.map(put, state.deviations, wide, means),
            rounds,
            members,
        )

    return Averaging(init, update, lambda state: narrow(state.average, state.last))


def parse(text: str, field: str = "iterate_averaging") -> Averaging:
    """Read an averaging as a configuration has it.

    Args:
        text: `none`, `polyak[:START]`, `exponential:DECAY`, `last-two` or `swag[:START[:RANK]]`.
        field: The setting's name, for the error message.
    Returns:
        The averaging.
    Raises:
        FedpaError: The text is none of these.
    Example:
        >>> import fedpa
        >>> averaging = fedpa.server.averaging.parse("polyak:20")
    """
    try:
        match text.split(":"):
            case ["none"]:
                return none()
            case ["polyak"]:
                return polyak()
            case ["polyak", start]:
                return polyak(int(start))
            case ["exponential", decay]:
                return exponential(float(decay))
            case ["last-two"]:
                return last_two()
            case ["swag", *numbers] if len(numbers) <= 2:
                return swag(*map(int, numbers))
    except ValueError:
        pass
    names = ("none", "polyak", "exponential", "last-two", "swag")
    known = "none, polyak[:START], exponential:DECAY, last-two or swag[:START[:RANK]]"
    raise refuse(field, text, f"must be {known}{ask_if_meant(text.split(':')[0], names)}")
