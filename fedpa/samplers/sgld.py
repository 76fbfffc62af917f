"""SGLD, stochastic gradient Langevin dynamics (Welling and Teh 2011), on blackjax.

    θ ← θ − η ∇̂f_i(θ) + √(2ηT/n_i) ξ,   ξ ~ N(0, I)

Local SGD at rate η with noise that makes its stationary law p_i(θ) ∝ exp(−(n_i/T) f_i(θ)) as
η → 0. At η > 0 it is too wide: where f_i has curvature λ and the gradients' noise variance c, its
variance is (2T/n + ηc)/(λ(2 − ηλ)).
"""

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


def sgld(
    objective: Objective,
    learning_rate: Rate,
    *,
    batch_size: int,
    window: Window = Epochs(),
    order: Order = "shuffle",
    temperature: Temperature = 1.0,
) -> Sampler:
    """Build stochastic gradient Langevin dynamics: θ ← θ − η ∇̂f_i(θ) + √(2ηT/n_i) ξ.

    Args:
        objective: The client's loss.
        learning_rate: η > 0, of a step on the mean loss: the scale of local SGD's.
        batch_size: Examples per step, at least 1.
        window: How many steps apart the samples are, and the burn-in before the first; default: one
            epoch.
        order: Reshuffled epochs ("shuffle", the default) or independent draws ("replacement").
        temperature: T > 0, or "n" for n_i; default: 1, the Bayesian posterior.
    Returns:
        The sampler; its info has the mean loss and the number of steps.
    Example:
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> sgld(objective, 0.1, batch_size=20, temperature=1.0).temperature
        1.0
    """
    check_rate(learning_rate)
    warmth = check_temperature(temperature)
    integrate = import_blackjax("sgmcmc.diffusions").overdamped_langevin()

    def step(
        theta: Params, memory: tuple[()], gradient_at: Gradient, n: Count, key: Key
    ) -> tuple[Params, tuple[()], Scalar]:
        loss, gradient = gradient_at(theta)
        wide = widen(theta)
        relative = in_dtype_of(wide, relative_temperature(warmth, n))
        rate = in_dtype_of(wide, learning_rate)
        moved = integrate(key, wide, descent(gradient), rate, relative)
        return narrow(moved, theta), (), loss

    objective = objective._replace(reduction="mean")
    walk = Step(lambda theta0, n, key: (), step)
    return minibatch_chain(objective, walk, batch_size, window, order, temperature=warmth)
