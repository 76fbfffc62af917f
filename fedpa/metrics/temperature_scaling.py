"""Temperature scaling (Guo et al., ICML 2017): probabilities of f/T, with T by validation NLL.

One number is fitted: the control of every method that says its probabilities are calibrated.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedpa.data.federated import FederatedData
from fedpa.errors import FedpaError, check_integer, check_number, check_positive, refuse
from fedpa.metrics.metric import Counts, Metric
from fedpa.metrics.streaming import make_evaluator
from fedpa.objectives.likelihood import Likelihood
from fedpa.precision import widen
from fedpa.types import Examples, Model

TRIALS = 21
"""Temperatures that are tried."""
LOWEST, HIGHEST = 0.25, 4.0


def fit_temperature(
    likelihood: Likelihood,
    params: Model,
    data: FederatedData,
    *,
    trials: int = TRIALS,
    lowest: float = LOWEST,
    highest: float = HIGHEST,
    batch_size: int = 100,
    most: int | None = None,
) -> float:
    """Choose T by the NLL of the probabilities of f/T over a validation federation.

    All temperatures are measured in one pass: a client sends one sum per temperature. They are on
    a logarithmic grid from `lowest` to `highest`; with an odd number, from 1/c to c, 1 is in its
    middle. Of equally good ones the lowest is chosen.

    Args:
        likelihood: Of classes or tags.
        params: The model.
        data: Validation clients; not those that trained the model.
        trials: How many temperatures are tried, at least 2; default: 21. As many trials as other
            controls have.
        lowest: The lowest, > 0; default: 0.25.
        highest: The highest, > `lowest`; default: 4.
        batch_size: Examples that are computed at a time.
        most: Largest number of examples, of the first clients in a shuffled order; default: all.
    Returns:
        T, for `scale_outputs`.
    Raises:
        FedpaError: The grid is invalid, the likelihood that of a regression, or the NLL is finite
            at no temperature.
    Example:
        >>> likelihood = fedpa.objectives.Likelihood(lambda params, batch: batch["x"] @ params)
        >>> y = np.array([0, 0, 0, 1])  # right in 3 of 4, where the model says 0.98
        >>> data = fedpa.data.from_mapping({"a": {"x": np.ones((4, 1)), "y": y}})
        >>> round(fit_temperature(likelihood, np.array([[4.0, 0.0]]), data), 2)
        3.48
    """
    _check_link(likelihood)
    check_integer("trials", trials, 2)
    for name, value in (("lowest", lowest), ("highest", highest)):
        check_number(name, value)
    if not 0 < lowest < highest:
        raise refuse("lowest", lowest, f"must be a number > 0 and < highest = {highest:g}")
    temperatures = np.geomspace(lowest, highest, trials)

    def measure(params: Model, batch: Examples) -> Counts:
        f = widen(likelihood.outputs(params, batch))

        def nll(temperature: Array) -> Array:
            return likelihood.nll(f / temperature, batch)

        losses = jax.lax.map(nll, jnp.asarray(temperatures, f.dtype))
        return Counts({}, {"nll": losses.T})

    evaluate = make_evaluator(Metric(measure, lambda sums: {}), data, batch_size, most)
    sums = evaluate(params).vectors["nll"]
    if not np.isfinite(sums).any():
        raise FedpaError(
            "params: the validation clients' NLL is finite at no temperature: has the model "
            "diverged?"
        )
    return float(temperatures[np.argmin(np.where(np.isfinite(sums), sums, np.inf))])


def scale_outputs(likelihood: Likelihood, temperature: float) -> Likelihood:
    """Divide a likelihood's outputs by T: above 1 probabilities are less certain, below 1 more.

    Args:
        likelihood: Of classes or tags.
        temperature: T > 0, as `fit_temperature` chooses it.
    Returns:
        The likelihood of f/T.
    Raises:
        FedpaError: T is no finite number > 0, or the likelihood that of a regression.
    Example:
        >>> likelihood = fedpa.objectives.Likelihood(lambda params, batch: params)
        >>> scale_outputs(likelihood, 2.0).outputs(jnp.array([4.0, 0.0]), {}).tolist()
        [2.0, 0.0]
    """
    _check_link(likelihood)
    check_positive("temperature", temperature)
    divisor, outputs = float(temperature), likelihood.outputs
    return likelihood._replace(outputs=lambda params, batch: outputs(params, batch) / divisor)


def _check_link(likelihood: Likelihood) -> None:
    if likelihood.link == "normal":
        expected = "a regression's outputs are no log-odds: temperatures are for classes and tags"
        raise refuse("link", likelihood.link, expected)
