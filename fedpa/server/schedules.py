"""Schedules: what a learning rate is multiplied by, round by round (from 0).

The rate itself belongs to the optimizer; a schedule multiplies it. The same schedules serve
the server (`fedpa.Server(…, schedule=…)`) and the clients (`fedpa.LocalTraining(…, schedule=…)`).
Any function of the round is one, as long as JAX can trace it: optax's own schedules are, too.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from fedpa.errors import ask_if_meant, check_integer, check_positive, refuse
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


def step(round: int, factor: float) -> Schedule:
    """Multiply the learning rate from a round on: 1 before round `round`, `factor` from it on.

    Args:
        round: The round of the step, counted from 0, ≥ 0.
        factor: The factor from then on, > 0.
    Returns:
        The schedule.
    Raises:
        FedpaError: An argument is out of range.
    Example:
        >>> from fedpa.server import schedules
        >>> [float(schedules.step(10, 0.5)(t)) for t in (0, 9, 10, 11)]
        [1.0, 1.0, 0.5, 0.5]
    """
    check_integer("round", round, 0)
    check_positive("factor", factor)
    return lambda t: jnp.where(jnp.asarray(t) >= round, jnp.float32(factor), jnp.float32(1))


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
        text: `constant`, `exponential:DECAY[:EVERY]`, `inverse-time[:SCALE]`,
            `inverse-sqrt[:SCALE]` or `step:ROUND:FACTOR`, each optionally followed by
            `,warmup:ROUNDS`.
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
    head, *warm = text.split(_WARMUP)
    name, *arguments = head.split(":")
    try:
        make, needed, optional = _MAKERS[name]
        if not len(needed) <= len(arguments) <= len(needed + optional) or len(warm) > 1:
            raise ValueError
        readers = (needed + optional)[: len(arguments)]
        numbers = [read(word) for read, word in zip(readers, arguments, strict=True)]
        rounds = [_read_rounds(words, 1) for words in warm]
    except (KeyError, ValueError):
        raise refuse(
            field,
            text,
            "must be constant, exponential:DECAY[:EVERY], inverse-time[:SCALE], "
            "inverse-sqrt[:SCALE] or step:ROUND:FACTOR, optionally followed by ,warmup:ROUNDS"
            f"{ask_if_meant(name, _MAKERS)}",
        ) from None
    schedule = make(*numbers)
    return warmup(rounds[0], schedule) if rounds else schedule


def cut(text: str, rounds: int) -> str:
    """Leave out a step that the first rounds of a schedule do not reach.

    Args:
        text: A schedule that `parse` reads.
        rounds: How many rounds there are, ≥ 1.
    Returns:
        A text with the same factors in rounds 0, …, rounds − 1: the same, or a constant in place of
        the step.
    Example:
        >>> from fedpa.server import schedules
        >>> schedules.cut("step:10:0.5,warmup:3", 10), schedules.cut("step:9:0.5", 10)
        ('constant,warmup:3', 'step:9:0.5')
    """
    head, warm, words = text.partition(_WARMUP)
    name, *arguments = head.split(":")
    return f"constant{warm}{words}" if name == "step" and int(arguments[0]) >= rounds else text


def _read_rate(word: str) -> float:
    number = float(word)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def _read_rounds(word: str, least: int = 0) -> int:
    number = int(word)
    if number < least:
        raise ValueError
    return number


_WARMUP = ",warmup:"
_Read: TypeAlias = Callable[[str], float]
_MAKERS: dict[str, tuple[Callable[..., Schedule], tuple[_Read, ...], tuple[_Read, ...]]] = {
    "constant": (constant, (), ()),
    "exponential": (exponential, (_read_rate,), (_read_rate,)),
    "inverse-time": (inverse_time, (), (_read_rate,)),
    "inverse-sqrt": (inverse_sqrt, (), (_read_rate,)),
    "step": (step, (_read_rounds, _read_rate), ()),
}
"""By name: what makes it, and how the numbers are read that it needs, and that it can have."""


def _float(t: Round) -> jax.Array:
    return jnp.asarray(t, jnp.float32)
