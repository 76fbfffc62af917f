"""Simulation-based calibration (Talts et al. 2018) on logistic regression: ranks of θ, one table.

    python -m benchmarks.posterior_ranks docs/posterior_ranks.csv

θ comes from the prior and data from the model: θ's rank among draws of its posterior is uniform if
the posterior is right. Three clients of twelve examples: few, so that Gaussians have it hard.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import chi2

import fedpa
from fedpa.algorithms import Cohort, Method
from fedpa.objectives import ClientData, Objective

CLIENTS, EXAMPLES = 3, 12
DIM, PRIOR_SD = 2, 1.5
REPLICATIONS, DRAWS, BINS = 400, 99, 10
NEWTON_ROUNDS, SITE_ROUNDS = 8, 8


def loss(theta: Any, batch: Any, key: Any) -> Any:
    """−log p(y | x, θ) of each example."""
    z = batch["x"] @ theta
    return jnp.logaddexp(0.0, z) - batch["y"] * z


def methods() -> dict[str, Method]:
    """The ways that are compared."""
    find = fedpa.sites.sampled("hmc", chains=2, draws=200, burn_in=50)
    return {
        "ep": fedpa.algorithms.ep(inner=find, newton_rounds=NEWTON_ROUNDS),
        "laplace": fedpa.algorithms.laplace(),
    }


def rank_truth(method: Method) -> np.ndarray:
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
    algorithm = method(Objective(loss, prior=prior, num_examples=CLIENTS * EXAMPLES))

    def start(_: Any) -> Any:
        zeros = jnp.zeros(DIM)
        kept = algorithm.client_init(zeros)
        return algorithm.init(zeros), jax.tree.map(lambda leaf: jnp.stack([leaf] * CLIENTS), kept)

    def play(phase: str) -> Any:
        def one(carry: Any, data: ClientData, key: jax.Array, t: jax.Array) -> Any:
            cohort = Cohort(data, jax.random.split(key, CLIENTS), carry[1])
            state, left = fedpa.fed_round(algorithm, carry[0], cohort, t, phase)
            return state, left.states

        return jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None)))

    carry = jax.vmap(start)(jnp.arange(REPLICATIONS))
    plays = {phase: play(phase) for phase in algorithm.clients}
    for t in range(NEWTON_ROUNDS + SITE_ROUNDS):
        keys = jax.random.split(jax.random.key(t), REPLICATIONS)
        carry = plays[algorithm.phase(t)](carry, data, keys, jnp.asarray(t))
    noise = jax.random.normal(jax.random.key(99), (REPLICATIONS, DRAWS, DIM))
    draws = jax.vmap(lambda q, z: q.draw(z))(carry[0].q, noise)
    return np.sum(np.asarray(draws) < theta[:, None], axis=1)


def count_ranks(ranks: np.ndarray) -> np.ndarray:
    """How many ranks are in each of ten equal bins, of each parameter: (d, bins)."""
    return np.stack(
        [np.bincount(column * BINS // (DRAWS + 1), minlength=BINS) for column in ranks.T]
    )


def p_values(counts: np.ndarray) -> np.ndarray:
    """The p-value of χ² of equal counts, of each parameter."""
    expected = REPLICATIONS / BINS
    squares = np.sum((counts - expected) ** 2 / expected, axis=1)
    return np.asarray(chi2.sf(squares, BINS - 1))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table: a line for each way and parameter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the table, e.g. docs/posterior_ranks.csv")
    out = parser.parse_args(arguments).out
    with out.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        bins = [f"bin_{i}" for i in range(BINS)]
        table.writerow(["way", "parameter", "p_value", *bins])
        for way, method in methods().items():
            counts = count_ranks(rank_truth(method))
            for place, (p_value, row) in enumerate(zip(p_values(counts), counts, strict=True)):
                table.writerow([way, place, f"{p_value:.4f}", *row])


if __name__ == "__main__":
    main()
