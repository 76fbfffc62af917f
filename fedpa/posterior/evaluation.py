"""A posterior's predictions over a federation: streamed, in the metrics of `fedpa.metrics`.

    sampled      p(y | x) = 1/S Σ_s p(y | f(θ_s, x))
    linearized   f replaced by its tangent at θ*, f(θ*, x) ± J(x)(θ_s − θ*)

Far from θ* a network is not its quadratic approximation, of which the posterior is made; its
tangent is. Draws of a posterior that is not narrow therefore predict better linearized. A draw's
mirror image at θ* is as likely as the draw; its tangent is the same, so that two draws cost one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from fedpa.data.federated import FederatedData
from fedpa.errors import check_integer
from fedpa.metrics.streaming import Evaluation, make_evaluator
from fedpa.metrics.uncertainty import uncertainty
from fedpa.objectives.likelihood import Likelihood
from fedpa.objectives.tangent import linearize
from fedpa.posterior.posterior import Posterior, split_model
from fedpa.precision import narrow, ravel, widen
from fedpa.types import Examples, Key, Model

BATCH = 128


class PredictionSettings(NamedTuple):
    """How a posterior's predictions are measured.

    Args:
        draws: S ≥ 1; linearized they come in pairs, and S is rounded up.
        linearized: Whether f is replaced by its tangent at the mean.
        batch_size: Examples at a time.
        most: Largest number of examples, of the first clients in a shuffled order; None: all.
    Example:
        >>> PredictionSettings(draws=30, linearized=False)
        PredictionSettings(draws=30, linearized=False, batch_size=128, most=None)
    """

    draws: int = 30
    linearized: bool = True
    batch_size: int = BATCH
    most: int | None = None


class Drawn(NamedTuple):
    """A model, and how draws of some of its parameters differ from it, stacked.

    Differences are in at least float32: in a parameter's own dtype small ones would be rounded off.
    """

    model: Model
    deviations: Model
    """None for the parameters that are not drawn."""


def draw_models(posterior: Posterior, key: Key, num: int) -> Drawn:
    """The model at the posterior's mean, and draws of the parameters that the posterior is over.

    Args:
        posterior: The posterior.
        key: The draws' randomness.
        num: How many.
    Returns:
        What `draw_outputs` predicts with.
    Example:
        >>> from fedpa.posterior.density import Normal
        >>> from fedpa.precisions import Scalar
        >>> posterior = fedpa.Posterior(Normal(jnp.zeros(2), Scalar(jnp.float32(4))), np.zeros(2))
        >>> draw_models(posterior, jax.random.key(0), 30).deviations.shape
        (30, 2)
    """
    theta, rest = split_model(posterior.model, posterior.over)
    _, restore = ravel(widen(theta))
    mean = posterior.density.mean
    draws = posterior.density.sample(key, num)
    deviations = jax.vmap(restore)(draws - mean[None])
    return Drawn(eqx.combine(narrow(restore(mean), theta), rest), deviations)


def draw_outputs(likelihood: Likelihood, linearized: bool) -> Callable[[Drawn, Examples], Any]:
    """Build the function (drawn models, batch) → f of each draw, stacked.

    Args:
        likelihood: Of the model: its outputs f.
        linearized: Whether f is replaced by its tangent at the mean. Then a mirror image follows
            each draw: 2S outputs.
    Returns:
        The function, also for `fedpa.metrics.uncertainty(likelihood, outputs)`.
    Example:
        >>> from fedpa.posterior.density import Normal
        >>> from fedpa.precisions import Scalar
        >>> likelihood = fedpa.objectives.Likelihood(lambda w, batch: batch["x"] @ w, "normal")
        >>> posterior = fedpa.Posterior(Normal(jnp.zeros(2), Scalar(jnp.float32(4))), np.zeros(2))
        >>> outputs = draw_outputs(likelihood, linearized=True)
        >>> outputs(draw_models(posterior, jax.random.key(0), 30), {"x": jnp.eye(2)}).shape
        (60, 2)
    """

    def outputs(drawn: Drawn, batch: Examples) -> Any:
        def of(some: Model) -> Any:
            return widen(likelihood.outputs(eqx.combine(some, drawn.model), batch))

        is_drawn = jax.tree.map(
            lambda x: x is not None, drawn.deviations, is_leaf=lambda x: x is None
        )
        mean, _ = eqx.partition(drawn.model, is_drawn)
        if not linearized:

            def at(deviation: Model) -> Any:
                return of(narrow(jax.tree.map(jnp.add, widen(mean), deviation), mean))

            return jax.lax.map(at, drawn.deviations)
        f, push, _ = linearize(of, mean)

        along = jax.lax.map(lambda deviation: push(narrow(deviation, mean)), drawn.deviations)
        return jnp.concatenate([f[None] + along, f[None] - along])

    return outputs


def evaluate_posterior(
    likelihood: Likelihood, data: FederatedData, settings: PredictionSettings = PredictionSettings()
) -> Callable[[Posterior, Key], Evaluation]:
    """Build the function (posterior, key) → its predictions' metrics over a federation.

    Args:
        likelihood: How the model's outputs become probabilities.
        data: The federation.
        settings: How it is measured.
    Returns:
        The function; its `Evaluation` has `nll`, `brier`, `ece`, …, see
        `fedpa.metrics.uncertainty`.
    Example:
        >>> from fedpa.posterior.density import Normal
        >>> from fedpa.precisions import Scalar
        >>> likelihood = fedpa.objectives.Likelihood(lambda w, batch: batch["x"] @ w, "sigmoid")
        >>> data = fedpa.data.from_mapping({"a": {"x": np.eye(2, dtype=np.float32),
        ...                                       "y": np.array([0.0, 1.0], np.float32)}})
        >>> wide = Normal(jnp.zeros(2), Scalar(jnp.float32(1e-4)))
        >>> posterior = fedpa.Posterior(wide, np.zeros(2, np.float32))
        >>> evaluate_posterior(likelihood, data)(posterior, jax.random.key(0)).values["nll"] > 0.5
        True
    """
    check_integer("draws", settings.draws, 1)
    metric = uncertainty(likelihood, draw_outputs(likelihood, settings.linearized))
    evaluate = make_evaluator(metric, data, settings.batch_size, settings.most)

    def measure(posterior: Posterior, key: Key) -> Evaluation:
        drawn = -(-settings.draws // 2) if settings.linearized else settings.draws
        return evaluate(draw_models(posterior, key, drawn))

    return measure
