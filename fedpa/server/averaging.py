"""Averaging of server iterates: what is evaluated and returned may be a mean of θ over rounds.

The server's own θ, which clients are sent, is not touched.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpa.errors import refuse
from fedpa.types import Count, Params


class Averaging(NamedTuple):
    init: Callable[[Params], Any]
    update: Callable[[Any, Params], Any]
    value: Callable[[Any], Params]


class AverageState(NamedTuple):
    average: Params
    rounds: Count


def none() -> Averaging:
    """The last iterate."""
    return Averaging(lambda theta: theta, lambda _, theta: theta, lambda theta: theta)


def polyak(start: int = 0) -> Averaging:
    """The mean of all θ since round `start` (from 0); before it, the last iterate."""
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
    """An exponential moving average: a ← decay·a + (1 − decay)·θ, started at the first θ."""
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
    last: Params
    before: Params


def last_two() -> Averaging:
    """The mean of the last iterate and the one before it."""

    def value(state: LastTwo) -> Params:
        return jax.tree.map(lambda x, y: x + (y - x) / 2, state.last, state.before)

    return Averaging(
        lambda theta: LastTwo(theta, theta), lambda state, theta: LastTwo(theta, state.last), value
    )


def parse(text: str, field: str = "iterate_averaging") -> Averaging:
    """As a configuration has it: `none`, `polyak[:START]`, `exponential:DECAY` or `last-two`."""
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
    except ValueError:
        pass
    raise refuse(field, text, "must be none, polyak[:START], exponential:DECAY or last-two")
