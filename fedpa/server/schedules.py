"""Schedules: what a learning rate is multiplied by, round by round (from 0).

The rate itself belongs to the optimizer; a schedule multiplies it. The same schedules serve
the server (`fedpa.Server(…, schedule=…)`) and the clients (`fedpa.LocalTraining(…, schedule=…)`).
Any function of the round is one, as long as JAX can trace it: optax's own schedules are, too.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from fedpa.errors import ask_if_meant, refuse
from fedpa.types import Count

Round: TypeAlias = int | Count | jax.Array
"""t, from 0; inside compiled code a traced number."""
Schedule: TypeAlias = Callable[[Round], float | jax.Array]
"""Round t → the factor that multiplies the learning rate in it."""


def constant(factor: float = 1.0) -> Schedule:
    """Multiply the learning rate by the same factor in every round.

    Args:
        factor: The factor; default: 1.
    Returns:
        The schedule.
    Example:
        >>> from fedpa.server import schedules
        >>> float(schedules.constant(0.5)(7))
        0.5
    """
    return lambda t: jnp.full((), factor, jnp.float32)


def exponential(decay: float, every: float = 1.0) -> Schedule:
    """Decay exponentially: decayᵗᐟᵉᵛᵉʳʸ in round t.

    Args:
        decay: The factor of `every` rounds, > 0.
        every: Rounds in which the rate is multiplied by `decay` once.
    Returns:
        The schedule.
    Example:
        >>> from fedpa.server import schedules
        >>> float(schedules.exponential(0.5, every=10)(20))
        0.25
    """
    return lambda t: decay ** (_float(t) / every)


def inverse_time(scale: float = 1.0) -> Schedule:
    """Decay as 1/(1 + t/scale) in round t.

    Args:
        scale: Rounds after which the rate has halved.
    Returns:
        The schedule.
    Example:
        >>> from fedpa.server import schedules
        >>> float(schedules.inverse_time(10)(10))
        0.5
    """
    return lambda t: 1 / (1 + _float(t) / scale)


def inverse_sqrt(scale: float = 1.0) -> Schedule:
    """Decay as 1/√(1 + t/scale) in round t.

    Args:
        scale: A third of the rounds after which the rate has halved.
    Returns:
        The schedule.
    Example:
        >>> from fedpa.server import schedules
        >>> float(schedules.inverse_sqrt(10)(30))
        0.5
    """
    return lambda t: 1 / jnp.sqrt(1 + _float(t) / scale)


def warmup(rounds: int, then: Schedule = constant()) -> Schedule:
    """Rise linearly over the first rounds: then(t) · min(1, (t + 1)/rounds).

    Args:
        rounds: How many rounds the rise takes.
        then: The schedule it multiplies; default: constant.
    Returns:
        The schedule.
    Example:
        >>> from fedpa.server import schedules
        >>> [float(schedules.warmup(4)(t)) for t in (0, 3, 9)]
        [0.25, 1.0, 1.0]
    """
    return lambda t: then(t) * jnp.minimum(1.0, (_float(t) + 1) / rounds)


def parse(text: str, field: str = "schedule") -> Schedule:
    """Read a schedule as a configuration has it.

    Args:
        text: `constant`, `exponential:DECAY[:EVERY]`, `inverse-time[:SCALE]` or
            `inverse-sqrt[:SCALE]`, each optionally followed by `,warmup:ROUNDS`.
        field: The setting's name, for the error message.
    Returns:
        The schedule.
    Raises:
        FedpaError: The text is none of these.
    Example:
        >>> from fedpa.server import schedules
        >>> float(schedules.parse("exponential:0.5,warmup:2")(2))
        0.25
    """
    head, *warm = text.split(",warmup:")
    name, *arguments = head.split(":")
    try:
        numbers = [float(argument) for argument in arguments]
        make, fewest, most = _MAKERS[name]
        rounds = [int(words) for words in warm]
        if not fewest <= len(numbers) <= most or len(rounds) > 1:
            raise ValueError
        if not all(0 < x < float("inf") for x in (*numbers, *rounds)):
            raise ValueError
    except (KeyError, ValueError):
        raise refuse(
            field,
            text,
            "must be constant, exponential:DECAY[:EVERY], inverse-time[:SCALE] or "
            f"inverse-sqrt[:SCALE], optionally followed by ,warmup:ROUNDS"
            f"{ask_if_meant(name, _MAKERS)}",
        ) from None
    schedule = make(*numbers)
    return warmup(rounds[0], schedule) if rounds else schedule


_MAKERS: dict[str, tuple[Callable[..., Schedule], int, int]] = {
    "constant": (constant, 0, 0),
    "exponential": (exponential, 1, 2),
    "inverse-time": (inverse_time, 0, 1),
    "inverse-sqrt": (inverse_sqrt, 0, 1),
}
"""By name: what makes it, and how few and how many numbers it takes."""


def _float(t: Round) -> jax.Array:
    return jnp.asarray(t, jnp.float32)
