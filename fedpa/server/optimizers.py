"""Server optimizers (Algorithm 1, line 9; Reddi et al. 2021, Algorithm 2): Δ taken as a gradient.

Each is an optax transformation, and any optax transformation can replace it. They differ from
optax's versions in the place of the adaptivity τ and in bias correction: at τ = 1e-3 the difference
is large.

    m ← β₁m + (1 − β₁)Δ
    v ← v + Δ²                               (Adagrad)
    v ← v − (1 − β₂)Δ² sign(v − Δ²)          (Yogi)
    v ← β₂v + (1 − β₂)Δ²                     (Adam)
    θ ← θ − η · m/(√v + τ)

Adam and Yogi by default correct the bias, as the code of Reddi et al.'s experiments does (Keras's
Adam, its own Yogi): the step is multiplied by √(1−β₂ᵗ)/(1−β₁ᵗ). Adam starts v at 0 and Yogi at τ²,
as there. Their paper prints both without correction and with v starting at τ²:
`bias_correction=False`, for Adam with `initial=tau**2`. At β₁ = 0.9 and β₂ = 0.99 the factor is 1
in the first round, 0.54 in the fifth, least (0.47) in the 13th, 0.98 in the 300th.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedpa.errors import refuse
from fedpa.precision import accumulation_dtype
from fedpa.types import Count, Params

SecondMoment = Callable[[jax.Array, jax.Array], jax.Array]
"""(v, Δ²) → v."""


def sgd(learning_rate: float, momentum: float = 0.0) -> optax.GradientTransformation:
    """Take gradient steps, with momentum if asked for: m ← βm + Δ, θ ← θ − ηm.

    FedAvg for η = 1, β = 0; FedAvgM with momentum.

    Args:
        learning_rate: η > 0. How it changes by round is `fedpa.Server(…, schedule=…)`.
        momentum: β in [0, 1).
    Returns:
        An optax transformation.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.sgd(1.0, momentum=0.9))
    """
    _check(learning_rate, momentum=momentum)
    return optax.chain(
        optax.trace(decay=momentum) if momentum else optax.identity(),
        optax.scale_by_learning_rate(learning_rate),
    )


def adagrad(
    learning_rate: float, tau: float = 1e-5, b1: float = 0.0, initial: float = 0.0
) -> optax.GradientTransformation:
    """Divide by the root of all squares so far, FedAdagrad: v ← v + Δ², θ ← θ − η m/(√v + τ).

    Args:
        learning_rate: η > 0.
        tau: τ ≥ 0, the adaptivity: what is added to √v.
        b1: β₁ in [0, 1), of the momentum m.
        initial: Where v starts: 0 as in Reddi et al.'s runs (Keras's default is 0.1).
    Returns:
        An optax transformation.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.adagrad(0.1))
    """
    return _adaptive(learning_rate, growing, tau, b1, initial)


def yogi(
    learning_rate: float,
    tau: float = 1e-3,
    b1: float = 0.9,
    b2: float = 0.99,
    initial: float | None = None,
    bias_correction: bool = True,
) -> optax.GradientTransformation:
    """Step as Yogi does, FedYogi: v ← v − (1 − β₂)Δ² sign(v − Δ²), θ ← θ − η m/(√v + τ).

    Args:
        learning_rate: η > 0.
        tau: τ ≥ 0, the adaptivity: what is added to √v.
        b1: β₁ in [0, 1), of the momentum m.
        b2: β₂ in [0, 1), of v.
        initial: Where v starts; default: τ².
        bias_correction: Whether the step is multiplied by √(1−β₂ᵗ)/(1−β₁ᵗ).
    Returns:
        An optax transformation.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.yogi(0.01))
    """
    start = tau**2 if initial is None else initial
    decays = (b1, b2) if bias_correction else None
    return _adaptive(learning_rate, yogis(b2), tau, b1, start, corrected=decays)


def adam(
    learning_rate: float,
    tau: float = 1e-3,
    b1: float = 0.9,
    b2: float = 0.99,
    initial: float = 0.0,
    bias_correction: bool = True,
) -> optax.GradientTransformation:
    """Step as Adam does, FedAdam: v ← β₂v + (1 − β₂)Δ², θ ← θ − η m/(√v + τ).

    Args:
        learning_rate: η > 0.
        tau: τ ≥ 0, the adaptivity: what is added to √v.
        b1: β₁ in [0, 1), of the momentum m.
        b2: β₂ in [0, 1), of v.
        initial: Where v starts.
        bias_correction: Whether the step is multiplied by √(1−β₂ᵗ)/(1−β₁ᵗ).
    Returns:
        An optax transformation.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.adam(0.01, tau=1e-3))
    """
    decays = (b1, b2) if bias_correction else None
    return _adaptive(learning_rate, decaying(b2), tau, b1, initial, corrected=decays)


def growing(v: jax.Array, square: jax.Array) -> jax.Array:
    """Adagrad's v."""
    return v + square


def yogis(b2: float) -> SecondMoment:
    """Yogi's v."""
    check_decays(b2=b2)
    return lambda v, square: v - (1 - b2) * square * jnp.sign(v - square)


def decaying(b2: float) -> SecondMoment:
    """Adam's v."""
    check_decays(b2=b2)
    return lambda v, square: b2 * v + (1 - b2) * square


def over_root(m: jax.Array, v: jax.Array, tau: float) -> jax.Array:
    """m/(√v + τ); where nothing has moved yet and τ = 0: 0 rather than 0/0."""
    root = jnp.sqrt(v) + tau
    return jnp.where(root > 0, m / jnp.where(root > 0, root, 1), 0).astype(m.dtype)


def bias_correction(t: jax.Array, b1: float, b2: float) -> jax.Array:
    """√(1 − β₂ᵗ)/(1 − β₁ᵗ), in t's precision."""

    def one_minus_power(b: float) -> jax.Array:
        # Not 1 − bᵗ: of 1 − 0.9999 rounding would leave float32 three digits.
        return -jnp.expm1(t * math.log(b)) if b else jnp.ones_like(t)

    return jnp.sqrt(one_minus_power(b2)) / one_minus_power(b1)


class AdaptiveState(NamedTuple):
    t: Count
    m: Params
    v: Params


def _adaptive(
    learning_rate: Any,
    second_moment: SecondMoment,
    tau: float,
    b1: float,
    initial: float,
    corrected: tuple[float, float] | None = None,
) -> optax.GradientTransformation:
    _check(learning_rate, b1=b1)
    for name, value in [("tau", tau), ("initial", initial)]:
        if not 0 <= value < float("inf"):
            raise refuse(name, value, "must be a finite number ≥ 0")

    def init(theta: Params) -> AdaptiveState:
        return AdaptiveState(
            jnp.zeros((), jnp.int32),
            jax.tree.map(jnp.zeros_like, theta),
            jax.tree.map(lambda x: jnp.full_like(x, initial), theta),
        )

    def update(
        delta: Params, state: AdaptiveState, params: Params | None = None
    ) -> tuple[Params, AdaptiveState]:
        t = state.t + 1
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.m, delta)
        v = jax.tree.map(lambda v, g: second_moment(v, g**2), state.v, delta)

        def step(m: jax.Array, v: jax.Array) -> jax.Array:
            if corrected is not None:
                dtype = accumulation_dtype(m.dtype)
                m = (bias_correction(t.astype(dtype), *corrected) * m.astype(dtype)).astype(m.dtype)
            return over_root(m, v, tau)

        return jax.tree.map(step, m, v), AdaptiveState(t, m, v)

    return optax.chain(
        optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate)
    )


def _check(learning_rate: float, **decays: float) -> None:
    if callable(learning_rate):
        by_round = "must be a number; how it changes by round is fedpa.Server(…, schedule=…)"
        raise refuse("learning_rate", learning_rate, by_round)
    if not 0 < learning_rate < float("inf"):
        raise refuse("learning_rate", learning_rate, "must be a finite number > 0")
    check_decays(**decays)


def check_decays(**decays: float) -> None:
    for name, value in decays.items():
        if not 0 <= value < 1:
            raise refuse(name, value, "must be in [0, 1)")
