"""θ from the prior, data from the model: what a posterior says of θ is as often true as it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

import fedpa
from fedpa.algorithms import Cohort, ep, laplace
from fedpa.objectives import ClientData, Objective
from fedpa.sites import sampled
from tests.posterior import conjugate

CLIENTS, EXAMPLES = 3, 12
COUNT = CLIENTS * EXAMPLES


def test_coverage_of_intervals():
    """3,000 intervals of 95 % in a correctly specified regression: within four binomial sds."""
    replications = 1000
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(replications, 3)) / np.sqrt(conjugate.PRIOR_PRECISION)
    theta = conjugate.PRIOR_MEAN + noise
    x = rng.normal(size=(replications, CLIENTS, EXAMPLES, 3))
    y = np.einsum("rced,rd->rce", x, theta) + conjugate.NOISE * rng.normal(size=x.shape[:3])
    rounds = conjugate.make_rounds(laplace(), num_examples=COUNT, dtype=np.float32)
    data = ClientData(
        {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)},
        jnp.full((replications, CLIENTS), EXAMPLES, jnp.int32),
    )
    keys = jax.random.split(jax.random.key(0), replications)
    state, _ = jax.jit(jax.vmap(rounds))(data, keys)
    mean, sd = jax.vmap(lambda q: (q.mean, q.sd))(state.q)
    inside = np.abs(np.asarray(mean) - theta) < 1.959964 * np.asarray(sd)
    assert abs(inside.mean() - 0.95) < 4 * np.sqrt(0.95 * 0.05 / inside.size)


DIM, PRIOR_SD = 2, 1.5
REPLICATIONS, DRAWS, BINS = 400, 99, 10


def logistic_loss(theta, batch, key):
    z = batch["x"] @ theta
    return jnp.logaddexp(0.0, z) - batch["y"] * z


def rank_logistic(method, newton_rounds, site_rounds):
    """Ranks of θ among 99 draws of its posterior, (replications, d): 0 … 99."""
    rng = np.random.default_rng(1)
    theta = PRIOR_SD * rng.normal(size=(REPLICATIONS, DIM))
    x = rng.normal(size=(REPLICATIONS, CLIENTS, EXAMPLES, DIM))
    x[..., 0] = 1
    z = np.einsum("rced,rd->rce", x, theta)
    y = rng.random(z.shape) < 1 / (1 + np.exp(-z))
    data = ClientData(
        {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)},
        jnp.full((REPLICATIONS, CLIENTS), EXAMPLES, jnp.int32),
    )
    prior = fedpa.normal_prior(sd=PRIOR_SD)
    algorithm = method(Objective(logistic_loss, prior=prior, num_examples=COUNT))

    def start(_):
        zeros = jnp.zeros(DIM)
        kept = algorithm.client_init(zeros)
        return algorithm.init(zeros), jax.tree.map(lambda leaf: jnp.stack([leaf] * CLIENTS), kept)

    def play(phase):
        def one(carry, data, key, t):
            cohort = Cohort(data, jax.random.split(key, CLIENTS), carry[1])
            state, left = fedpa.fed_round(algorithm, carry[0], cohort, t, phase)
            return state, left.states

        return jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None)))

    carry = jax.vmap(start)(jnp.arange(REPLICATIONS))
    plays = {phase: play(phase) for phase in algorithm.clients}
    for t in range(newton_rounds + site_rounds):
        keys = jax.random.split(jax.random.key(t), REPLICATIONS)
        carry = plays[algorithm.phase(t)](carry, data, keys, jnp.asarray(t))
    noise = jax.random.normal(jax.random.key(99), (REPLICATIONS, DRAWS, DIM))
    draws = jax.vmap(lambda q, z: q.draw(z))(carry[0].q, noise)
    return np.sum(np.asarray(draws) < theta[:, None], axis=1)


def uniformity(ranks):
    """The p-value of the χ² of ten equal bins, of each parameter."""
    counts = [np.bincount(column * BINS // (DRAWS + 1), minlength=BINS) for column in ranks.T]
    expected = REPLICATIONS / BINS
    return [chi2.sf(np.sum((count - expected) ** 2 / expected), BINS - 1) for count in counts]


@pytest.mark.long
def test_ranks_in_the_posterior_of_ep_are_uniform():
    """Simulation-based calibration (Talts et al. 2018), at a level of 0.001 for each parameter."""
    find = sampled("hmc", chains=2, draws=200, burn_in=50)
    ranks = rank_logistic(ep(inner=find, newton_rounds=8), newton_rounds=8, site_rounds=8)
    assert min(uniformity(ranks)) > 0.001
