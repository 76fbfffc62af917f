"""Conjugate federations: linear regression with known noise, whose posterior is a formula."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedpa
from fedpa.algorithms import Cohort
from fedpa.objectives import ClientData, Objective

NOISE = 0.7
D = 3
PRIOR_MEAN, PRIOR_PRECISION = np.array([0.5, -1.0, 0.0]), np.array([0.5, 2.0, 0.1])
PRIOR = fedpa.normal_prior(mean=PRIOR_MEAN, precision=PRIOR_PRECISION)


def log_likelihood(theta, batch):
    return -0.5 * ((batch["y"] - batch["x"] @ theta) / NOISE) ** 2


def loss(theta, batch, key):
    return -log_likelihood(theta, batch)


class Exact(NamedTuple):
    mean: np.ndarray
    covariance: np.ndarray

    @property
    def sd(self):
        return np.sqrt(np.diag(self.covariance))


def make_examples(seed=0, n=40, orthogonal=False):
    """Rows of x and y; `orthogonal`: each row has one feature, so that precisions are diagonal."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, D))
    if orthogonal:
        x *= np.eye(D)[rng.integers(D, size=n)]
    y = x @ np.array([1.0, -0.5, 2.0]) + NOISE * rng.normal(size=n)
    return x, y


def exact(x, y, *, flat=False):
    """The textbook posterior of all examples; `flat`: without the prior."""
    precision, eta = x.T @ x / NOISE**2, x.T @ y / NOISE**2
    if not flat:
        precision, eta = precision + np.diag(PRIOR_PRECISION), eta + PRIOR_PRECISION * PRIOR_MEAN
    covariance = np.linalg.inv(precision)
    return Exact(covariance @ eta, covariance)


def split(x, y, sizes):
    """Client id → the next so many examples."""
    rows = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    return {f"client-{i}": {"x": x[r], "y": y[r]} for i, r in enumerate(rows)}


def stack(clients, capacity, dtype):
    """Clients side by side, filled up to `capacity` examples each."""

    def fill(name, shape):
        filled = np.zeros((len(clients), capacity, *shape), dtype)
        for row, client in zip(filled, clients.values(), strict=True):
            row[: len(client[name])] = client[name]
        return jnp.asarray(filled)

    n = jnp.asarray([len(client["y"]) for client in clients.values()], jnp.int32)
    return ClientData({"x": fill("x", (D,)), "y": fill("y", ())}, n)


def make_rounds(method, *, num_examples, rounds=1, prior=PRIOR, dtype=np.float64):
    """A compiled (clients' data, key) → (server state, what clients keep) of the first rounds."""
    algorithm = method(Objective(loss, prior=prior, num_examples=num_examples))

    def run(data, key):
        theta = jnp.full(D, 3.0, dtype)
        state = algorithm.init(theta)
        kept = algorithm.client_init(theta)
        kept = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(data.n)), kept)
        for t in range(rounds):
            keys = jax.random.split(jax.random.fold_in(key, t), len(data.n))
            state, left = fedpa.fed_round(algorithm, state, Cohort(data, keys, kept), t)
            kept = left.states
        return state, kept

    return jax.jit(run)


def assert_close(gaussian, truth, tolerance):
    """Means in standard deviations and standard deviations relative, within the tolerance."""
    mean, sd = np.asarray(gaussian.mean), np.asarray(gaussian.sd)
    np.testing.assert_allclose((mean - truth.mean) / truth.sd, 0, atol=tolerance)
    np.testing.assert_allclose(sd / truth.sd, 1, atol=tolerance)
