"""θ from the prior, data from the model: what a posterior says of θ is as often true as it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.posterior_ranks import (
    DIM,
    REPLICATIONS,
    count_ranks,
    methods,
    p_values,
    rank_truth,
)
from fedpa.algorithms import laplace
from fedpa.objectives import ClientData
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


@pytest.mark.long
def test_ranks_in_the_posterior_of_ep_are_uniform():
    """At a level of 0.001 for each parameter."""
    counts = count_ranks(rank_truth(methods()["ep"]))
    assert counts.sum(axis=1).tolist() == [REPLICATIONS] * DIM
    assert p_values(counts).min() > 0.001
