"""One statistical test for every sampler: does it draw from the Gaussian it should?

The target is a location model whose posterior is known and whose gradient noise is additive, so
that IASG's theory is exact on it: f(θ; z) = ½ (θ − z)ᵀA(θ − z), hence p(θ) = N(z̄, (T/n) A⁻¹).

Moments are compared in units of their own standard errors, which come from means over long blocks
of the chain and so know of its autocorrelation. The chain must be long enough for these errors to
be small, or the test would pass for lack of power: that is asserted, too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.objectives import ClientData, Objective, Quadratic, client_data
from fedpa.samplers import Sampler, draw

HESSIAN = np.array([[2.0, 0.6], [0.6, 1.0]])
SIZE = 40
BLOCKS = 40
LIMIT = 4.5
"""Standard errors: beyond 4.5 for one of five moments happens once in 30,000 by chance."""


class Target(NamedTuple):
    data: ClientData
    objective: Objective
    posterior: Quadratic
    noise: np.ndarray
    """Covariance of one example's gradient; it commutes with the Hessian."""


def loss(theta, batch, key):
    del key
    difference = theta[None, :] - batch["z"]
    return 0.5 * jnp.sum((difference @ jnp.asarray(HESSIAN, theta.dtype)) * difference, axis=1)


def target(capacity: int | None = None) -> Target:
    """Examples whose covariance is A⁻¹ exactly: the well-specified case, where C = A."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((SIZE, 2))
    z = (z - z.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(z.T, bias=True))).T
    z = z @ np.linalg.cholesky(np.linalg.inv(HESSIAN)).T + np.array([1.5, -0.5])
    data = client_data({"z": z.astype(np.float32)}, capacity)
    posterior = Quadratic(
        jnp.asarray(z.mean(0), jnp.float32), jnp.asarray(HESSIAN, jnp.float32), jnp.asarray(40.0)
    )
    return Target(data, Objective(loss), posterior, HESSIAN)


def check_gaussian(
    sampler: Sampler, data: ClientData, mean, covariance, *, num: int, seed: int = 0, start=None
):
    """Assert that `num` draws have the given mean and covariance; returns what is told of them."""
    start = jnp.asarray(mean if start is None else start, jnp.float32)
    run = jax.jit(lambda key: draw(sampler, start, data, key, num))
    samples, infos = run(jax.random.key(seed))
    samples = np.asarray(samples, np.float64)
    deviations = samples - np.asarray(mean, np.float64)
    i, j = np.triu_indices(samples.shape[1])
    moments = np.concatenate([deviations, deviations[:, i] * deviations[:, j]], axis=1)
    covariance = np.asarray(covariance, np.float64)
    expected = np.concatenate([np.zeros(samples.shape[1]), covariance[i, j]])
    blocks = moments[: num - num % BLOCKS].reshape(BLOCKS, -1, moments.shape[1]).mean(1)
    errors = blocks.std(0, ddof=1) / np.sqrt(BLOCKS)
    scale = np.diag(covariance).max()
    assert (errors[: samples.shape[1]] < 0.1 * np.sqrt(scale)).all(), "too few draws to tell"
    assert (errors[samples.shape[1] :] < 0.06 * scale).all(), "too few draws to tell"
    off = np.abs(moments.mean(0) - expected) / errors
    assert (off < LIMIT).all(), f"moments are off by {off} standard errors"
    return infos
