"""SGHMC, stochastic gradient Hamiltonian Monte Carlo (Chen et al. 2014, eq. 15), on blackjax.

    θ ← θ + v
    v ← (1 − α) v − η ∇̂f_i(θ) + √(2αηT/n_i) ξ,   ξ ~ N(0, I)

SGD with momentum 1 − α at rate η, and noise that makes its stationary law that of the posterior at
temperature T as η → 0; α = 1 is SGLD. The velocity starts at its own stationary law and is carried
on from batch to batch and sample to sample.

blackjax's integrator makes the step (with its step size √η, momentum v/√η and friction α/√η). Its
`sghmc` kernel is not used: it draws the momentum with the key it then splits for the steps' noise,
and keeps to one mini-batch for a whole trajectory.

At η > 0 a small friction amplifies the gradients' noise: where f_i has curvature λ and that noise
variance c, θ's variance is (2T/n + ηc/α)(2 − α)/(λ(4 − 2α − ηλ)).
"""

import jax
import jax.numpy as jnp

from fedpa.errors import refuse
from fedpa.objectives.minibatches import Order
from fedpa.objectives.objective import Objective
from fedpa.precision import narrow, widen
from fedpa.samplers.iasg import Gradient, Step, minibatch_chain
from fedpa.samplers.sampler import (
    Epochs,
    Rate,
    Sampler,
    Temperature,
    Window,
    check_rate,
    check_temperature,
    descent,
    import_blackjax,
    in_dtype_of,
    relative_temperature,
)
from fedpa.types import Count, Key, Params, Scalar

FRICTION = 0.5
"""With less, a chain in FedPA travels far from θ₀, 1/α times as far as one of SGD."""


def sghmc(
    objective: Objective,
    learning_rate: Rate,
    *,
    batch_size: int,
    window: Window = Epochs(),
    order: Order = "shuffle",
    temperature: Temperature = 1.0,
    friction: float = FRICTION,
) -> Sampler:
    """Build stochastic gradient HMC: θ ← θ + v, v ← (1 − α) v − η ∇̂f_i(θ) + √(2αηT/n_i) ξ.

    Args:
        objective: The client's loss.
        learning_rate: η > 0, of a step on the mean loss: the scale of local SGD's with momentum
            1 − α.
        batch_size: Examples per step, at least 1.
        window: How many steps apart the samples are, and the burn-in before the first; default: one
            epoch.
        order: Reshuffled epochs ("shuffle", the default) or independent draws ("replacement").
        temperature: T > 0, or "n" for n_i; default: 1, the Bayesian posterior.
        friction: α ∈ (0, 1]; default: 0.5.
    Returns:
        The sampler; its info has the mean loss and the number of steps.
    Example:
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> sghmc(objective, 0.1, batch_size=20, temperature="n", friction=0.2).temperature
        'n'
    """
    check_rate(learning_rate)
    warmth = check_temperature(temperature)
    if not 0 < friction <= 1:
        raise refuse("friction", friction, "must be above 0 and at most 1 (1 − momentum)")

    def start(theta0: Params, n: Count, key: Key) -> Params:
        wide = widen(theta0)
        deviation = jnp.sqrt(in_dtype_of(wide, relative_temperature(warmth, n)))
        return jax.tree.map(
            lambda p: deviation * p, import_blackjax("util").generate_gaussian_noise(key, wide)
        )

    def step(
        theta: Params, momentum: Params, gradient_at: Gradient, n: Count, key: Key
    ) -> tuple[Params, Params, Scalar]:
        wide = widen(theta)
        step_size = jnp.sqrt(in_dtype_of(wide, learning_rate))
        ahead = jax.tree.map(lambda x, p: x + step_size * p, wide, momentum)
        # The gradient where θ goes, as in the paper's algorithm: stable for ηλ < 4 − 2α, where the
        # gradient at the old θ would need ηλ < α.
        loss, gradient = gradient_at(narrow(ahead, theta))
        relative = in_dtype_of(wide, relative_temperature(warmth, n))
        integrate = import_blackjax("sgmcmc.diffusions").sghmc(alpha=friction / step_size)
        moved, momentum = integrate(key, wide, momentum, descent(gradient), step_size, relative)
        return narrow(moved, theta), momentum, loss

    objective = objective._replace(reduction="mean")
    return minibatch_chain(
        objective, Step(start, step), batch_size, window, order, temperature=warmth
    )
