"""The noise of a regression, from sums of squared residuals over clients."""

import math
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from fedpa.data.federated import Clients, as_federation
from fedpa.errors import FedpaError, check_type
from fedpa.metrics.metric import Counts, Metric
from fedpa.metrics.streaming import make_evaluator
from fedpa.objectives.prior import NormalPrior
from fedpa.posterior.infer import check_per_example
from fedpa.posterior.posterior import Posterior
from fedpa.training.problem import split_params
from fedpa.types import Examples, Losses, Model

BATCH = 256


def estimate_noise(
    posterior: Posterior,
    residuals: Callable[[Model, Examples], Losses],
    clients: Clients,
    *,
    prior: NormalPrior | None = None,
) -> float:
    """Estimate the noise's standard deviation σ of a regression from sums over clients.

    Each client sends Σ_j r_j² at the posterior's mean and n_i:

        σ̂² = Σ r² / (n − d_eff),   d_eff = d − tr(Λ₀Σ)

    d_eff is how many parameters the data determine (MacKay 1992), d with a flat prior: σ̂² is then
    the unbiased estimate of least squares. It does not know of the uncertainty of σ itself.

    Args:
        posterior: From `fedpa.infer`.
        residuals: `residuals(params, batch)`: y − f of each example, shape (b,).
        clients: As `fedpa.infer` takes them.
        prior: As it was given to `fedpa.infer`; default: flat.
    Returns:
        σ̂, for `predict(…, noise=σ̂)`.
    Raises:
        FedpaError: Residuals have another shape, or there are not more examples than parameters.
    Example:
        >>> clients = {"a": {"y": np.array([0.0, 2.0])}, "b": {"y": np.array([4.0])}}
        >>> posterior = fedpa.infer(lambda mu, batch: -0.5 * (batch["y"] - mu) ** 2, np.zeros(()),
        ...                         clients, method="laplace", progress=False)
        >>> round(estimate_noise(posterior, lambda mu, batch: batch["y"] - mu, clients), 4)
        2.0
    """
    check_type("posterior", posterior, Posterior, "fedpa.infer(log_likelihood, params, clients)")
    if prior is not None:
        check_type("prior", prior, NormalPrior, "fedpa.normal_prior(sd=2.0)")
    data = as_federation(clients)
    check_per_example("residuals", residuals, posterior.model, data)

    def measure(params: Model, batch: Examples) -> Counts:
        squares = residuals(params, batch) ** 2
        return Counts({"squares": squares.astype(jnp.float32)})

    metric = Metric(measure, lambda sums: dict(sums))
    found = make_evaluator(metric, data, BATCH)(posterior.mean)
    count = found.examples - _effective_parameters(posterior, prior)
    if count <= 0:
        raise FedpaError(
            f"clients have {found.examples} examples for {len(posterior.density.mean)} parameters: "
            "to estimate the noise there must be more. Give predict(…, noise=…) a known one"
        )
    return math.sqrt(found.values["squares"] / count)


def _effective_parameters(posterior: Posterior, prior: NormalPrior | None) -> float:
    """d − tr(Λ₀Σ)."""
    d = len(posterior.density.mean)
    if prior is None:
        return float(d)
    theta, assemble = split_params(posterior.model)
    prior = prior.restrict(assemble(theta), eqx.is_inexact_array)
    prior.check(theta)
    known = np.asarray(prior.natural(theta)[1], np.float64)
    return d - float(known @ np.asarray(posterior.density.sd, np.float64) ** 2)
