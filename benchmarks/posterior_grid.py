"""The ways of `fedpa.infer` on Bayesian logistic regression, against pooled NUTS: one table.

    python -m benchmarks.posterior_grid docs/posterior.csv

Cells that the table has are kept: an interrupted grid continues, and a new one needs a new file.

5 and 20 clients of 20 to 200 examples, d = 5 and 20 parameters, prior N(0, 2²), and three splits:
`balanced`, by chance; `label`, sorted by label, so that most clients have one label; `separable`,
sorted by the true linear predictor. The truth is NUTS on the pooled data, and for PVI also the
pooled variational Gaussian.
"""

import argparse
import csv
import itertools
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np

import fedpa

PRIOR_SD = 2.0
WAYS = ("laplace", "product", "sep", "pvi", "ep")
SPLITS = ("balanced", "label", "separable")
CHAINS, DRAWS, BURN_IN = 4, 4000, 200
LARGEST_ERROR = 0.02
"""Of the truth's own means, in standard deviations."""


class Cell(NamedTuple):
    """A federation of the grid."""

    clients: int
    d: int
    split: str


class Moments(NamedTuple):
    mean: np.ndarray
    sd: np.ndarray


class Row(NamedTuple):
    """One line of the table."""

    clients: int
    d: int
    split: str
    way: str
    mean_error: float
    """The largest error of a mean, in standard deviations of pooled NUTS."""
    sd_error: float
    """The largest relative error of a standard deviation."""
    variational_sd_error: float
    """The same against the pooled variational Gaussian."""
    rounds: int
    converged: bool


GRID = [Cell(*place) for place in itertools.product((5, 20), (5, 20), SPLITS)]


def make_clients(cell: Cell, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Make the clients of a cell: x with an intercept, labels of a logistic model."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(20, 201, cell.clients)
    x = rng.normal(size=(sizes.sum(), cell.d)).astype(np.float32)
    x[:, 0] = 1
    theta = rng.normal(size=cell.d)
    y = (rng.random(len(x)) < 1 / (1 + np.exp(-x @ theta))).astype(np.float32)
    if cell.split != "balanced":
        order = np.argsort(y if cell.split == "label" else x @ theta, kind="stable")
        x, y = x[order], y[order]
    places = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    return {f"client-{i:02d}": {"x": x[rows], "y": y[rows]} for i, rows in enumerate(places)}


def log_likelihood(theta: Any, batch: Any) -> Any:
    """log p(y | x, θ) of each example."""
    z = batch["x"] @ theta
    return batch["y"] * z - jnp.logaddexp(0.0, z)


def pool(clients: dict[str, Any]) -> dict[str, np.ndarray]:
    """All examples together."""
    return {
        name: np.concatenate([client[name] for client in clients.values()]) for name in ("x", "y")
    }


def sample_pooled(data: dict[str, np.ndarray], seed: int = 1) -> Moments:
    """The truth: NUTS on the pooled data, its mass that of the variational Gaussian."""
    guess = fit_variational(data)
    d = len(guess.mean)

    def log_density(theta: Any) -> Any:
        return jnp.sum(log_likelihood(theta, data)) - 0.5 * jnp.sum(theta**2) / PRIOR_SD**2

    kernel = blackjax.nuts(log_density, 0.6, guess_covariance(data, guess).astype(np.float32))

    def run(key: jax.Array, start: jax.Array) -> jax.Array:
        def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            state, _ = kernel.step(key, state)
            return state, state.position

        keys = jax.random.split(key, BURN_IN + DRAWS)
        return jax.lax.scan(step, kernel.init(start), keys)[1][BURN_IN:]

    start_key, key = jax.random.split(jax.random.key(seed))
    noise = np.asarray(jax.random.normal(start_key, (CHAINS, d)))
    starts = (guess.mean + guess.sd * noise).astype(np.float32)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        draws = jax.jit(jax.vmap(run))(jax.random.split(key, CHAINS), starts)
        ess = np.asarray(blackjax.diagnostics.effective_sample_size(draws))
    assert np.max(1 / np.sqrt(ess)) < LARGEST_ERROR, ess
    flat = np.asarray(draws, np.float64).reshape(-1, d)
    return Moments(flat.mean(axis=0), flat.std(axis=0))


NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(40)


def _expect(data: dict[str, np.ndarray], mean: np.ndarray, covariance: np.ndarray) -> Any:
    """E[σ(z)] and E[σ′(z)] of every example for z = xᵀθ, θ ~ N(mean, covariance)."""
    x = data["x"].astype(np.float64)
    sd = np.sqrt(np.einsum("ni,ij,nj->n", x, covariance, x))
    z = (x @ mean)[:, None] + sd[:, None] * NODES
    p = 1 / (1 + np.exp(-z))
    weights = WEIGHTS / WEIGHTS.sum()
    return x, p @ weights, (p * (1 - p)) @ weights


def guess_covariance(data: dict[str, np.ndarray], moments: Moments) -> np.ndarray:
    """The Laplace covariance at the means."""
    d = len(moments.mean)
    x, _, slopes = _expect(data, moments.mean, np.zeros((d, d)))
    return np.linalg.inv(np.eye(d) / PRIOR_SD**2 + (x * slopes[:, None]).T @ x)


def fit_variational(data: dict[str, np.ndarray]) -> Moments:
    """The pooled variational Gaussian, by its fixed point in float64 and quadrature: no draws."""
    d = data["x"].shape[1]
    mean, covariance = np.zeros(d), np.eye(d)
    for _ in range(500):
        x, p, slopes = _expect(data, mean, covariance)
        gradient = x.T @ (data["y"] - p) - mean / PRIOR_SD**2
        new = np.linalg.inv(np.eye(d) / PRIOR_SD**2 + (x * slopes[:, None]).T @ x)
        step = 0.5 * new @ gradient
        done = max(np.abs(step).max(), np.abs(new - covariance).max()) < 1e-10
        mean, covariance = mean + step, new
        if done:
            return Moments(mean, np.sqrt(np.diag(covariance)))
    raise RuntimeError("the variational Gaussian was not found")


def measure(cell: Cell, ways: Sequence[str] = WAYS, **options: Any) -> Iterator[Row]:
    """One row for each way; `options` are those of `fedpa.infer`."""
    clients = make_clients(cell)
    data = pool(clients)
    truth, variational = sample_pooled(data), fit_variational(data)
    for way in ways:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "not converged")  # it is in the table
            warnings.filterwarnings("ignore", "clients disagree")  # sorted by label, they do
            posterior = fedpa.infer(
                log_likelihood,
                np.zeros(cell.d, np.float32),
                clients,
                prior=fedpa.normal_prior(sd=PRIOR_SD),
                method=way,  # type: ignore[arg-type]
                progress=False,
                **options,
            )
        yield Row(
            *cell,
            way,
            float(np.max(np.abs(posterior.mean - truth.mean) / truth.sd)),
            float(np.max(np.abs(posterior.sd / truth.sd - 1))),
            float(np.max(np.abs(posterior.sd / variational.sd - 1))),
            len(posterior.history),
            posterior.converged,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table of the whole grid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the table, e.g. docs/posterior.csv")
    out = parser.parse_args(arguments).out
    done = read_rows(out)
    for cell in GRID:
        if {way for *found, way in done if tuple(found) == tuple(map(str, cell))} >= set(WAYS):
            continue
        rows = list(measure(cell))
        with out.open("a", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            if not file.tell():
                table.writerow(Row._fields)
            for row in rows:
                table.writerow([round(x, 4) if isinstance(x, float) else x for x in row])
                print(*row, file=sys.stderr, flush=True)


def read_rows(path: Path) -> set[tuple[str, ...]]:
    """Clients, d, split and way of each row of the table."""
    if not path.exists():
        return set()
    with path.open(newline="", encoding="utf-8") as file:
        return {(r["clients"], r["d"], r["split"], r["way"]) for r in csv.DictReader(file)}


if __name__ == "__main__":
    main()
