"""Learning rates by round, for the server and for the clients: round (from 0) → rate.

A schedule is an ordinary optax schedule, so optax's own fit wherever these do.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from fedpa.errors import refuse

Schedule = Callable[[Any], Any]


def constant(rate: float) -> Schedule:
    return lambda t: jnp.full((), rate, jnp.float32)


def exponential(rate: float, decay: float, every: float = 1.0) -> Schedule:
    """η_t = η · decayᵗᐟᵉᵛᵉʳʸ."""
    return lambda t: rate * decay ** (_float(t) / every)


def inverse_time(rate: float, scale: float = 1.0) -> Schedule:
    """η_t = η / (1 + t/scale)."""
    return lambda t: rate / (1 + _float(t) / scale)


def inverse_sqrt(rate: float, scale: float = 1.0) -> Schedule:
    """η_t = η / √(1 + t/scale)."""
    return lambda t: rate / jnp.sqrt(1 + _float(t) / scale)


def warmup(schedule: Schedule, rounds: int) -> Schedule:
    """Rise linearly over the first `rounds` rounds: η_t · min(1, (t + 1)/rounds)."""
    return lambda t: schedule(t) * jnp.minimum(1.0, (_float(t) + 1) / rounds)


def parse(text: str, rate: float, field: str = "schedule") -> Schedule:
    """A schedule as written in a configuration.

    `constant`, `exponential:DECAY[:EVERY]`, `inverse-time[:SCALE]`, `inverse-sqrt[:SCALE]`, each
    optionally with `,warmup:ROUNDS` behind it.
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
            "inverse-sqrt[:SCALE], optionally followed by ,warmup:ROUNDS",
        ) from None
    schedule = make(rate, *numbers)
    return warmup(schedule, *rounds) if rounds else schedule


_MAKERS: dict[str, tuple[Callable[..., Schedule], int, int]] = {
    "constant": (constant, 0, 0),
    "exponential": (exponential, 1, 2),
    "inverse-time": (inverse_time, 0, 1),
    "inverse-sqrt": (inverse_sqrt, 0, 1),
}
"""By name: what makes it, and how few and how many numbers it takes beside the rate."""


def _float(t: Any) -> Any:
    return jnp.asarray(t, jnp.float32)
