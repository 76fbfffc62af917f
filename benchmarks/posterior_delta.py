"""The forms of the posterior delta against each other, in one run: medians and ratios.

Each form is given ℓ samples of d float32 parameters. "read each" reads Δ̂ after every sample. With
`--json`, the forms at a million parameters and their errors, as one line for `benchmarks/run.py`.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import fedpa
from fedpa.deltas import fixed, posterior

REPEATS = 7
RHO = 0.1
CASES = [
    (1_000, 5),
    (1_000, 20),
    (100_000, 5),
    (100_000, 20),
    (100_000, 100),
    (1_000_000, 5),
    (1_000_000, 20),
]
MILLION = [(1_000_000, 20), (1_000_000, 100)]


def median_seconds(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    jax.block_until_ready(work())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def online(form: str, ell: int, read_each: bool) -> Callable[..., Any]:
    """The delta as a client's compiled program runs it: sample by sample."""
    delta = posterior(ell, fixed(RHO), form=form)

    @jax.jit
    def run(theta0: jax.Array, samples: jax.Array) -> Any:
        def step(state: Any, sample: jax.Array) -> tuple[Any, Any]:
            state = delta.update(state, sample, sample)
            return state, jnp.sum(delta.value(state)[0]) if read_each else None

        state, sums = jax.lax.scan(step, delta.init(theta0, jnp.asarray(100)), samples)
        return delta.value(state)[0], sums

    return run


def problem(rng: np.random.Generator, d: int, ell: int) -> tuple[jax.Array, jax.Array]:
    """θ₀ and samples, spread as local SGD spreads them: λ_max(Σ̃) of about 2.

    (Far wider samples cost a decomposition.)
    """
    theta0 = jnp.asarray(rng.standard_normal(d, dtype=np.float32))
    spread = np.float32(1 / np.sqrt(RHO * d))
    return theta0, jnp.asarray(spread * rng.standard_normal((ell, d), dtype=np.float32))


def reference(theta0: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Δ̂ in float64 by Woodbury's identity, written down without any code of ours."""
    x = np.asarray(samples, np.float64)
    ell = len(x)
    a = 1 / (1 + (ell - 1) * RHO)  # Σ̂ = a·I + (1 − a)·Ŝ
    b = (1 - a) / (ell - 1)
    mean = x.mean(0)
    v = np.asarray(theta0, np.float64) - mean
    x -= mean
    inner = np.linalg.solve(a / b * np.eye(ell) + x @ x.T, x @ v)
    return (v - x.T @ inner) / a


def million(repeats: int, cases: list[tuple[int, int]] = MILLION) -> list[dict[str, Any]]:
    """The compiled recurrence and `fedpa.posterior_delta` on the host: seconds and errors."""
    rng = np.random.default_rng(0)
    rows = []
    for d, ell in cases:
        theta0, samples = problem(rng, d, ell)
        exact = reference(np.asarray(theta0), np.asarray(samples))
        row: dict[str, Any] = {"d": d, "samples": ell}
        compiled = online("recurrence", ell, False)
        for name, work in {
            "recurrence": lambda f=compiled: f(theta0, samples)[0],
            "host": lambda: fedpa.posterior_delta(theta0, samples, RHO),
        }.items():
            error = np.linalg.norm(np.asarray(work(), np.float64) - exact) / np.linalg.norm(exact)
            row[name] = {"seconds": median_seconds(work, repeats), "error": float(error)}
        rows.append(row)
    return rows


def main() -> None:
    rng = np.random.default_rng(0)
    table = Table(title=f"posterior delta, float32, ms (median of {REPEATS})")
    for column in ("d", "ℓ", "recurrence", "gram", "gram on host", "recurrence, read each",
                   "gram, read each", "gram / recurrence"):  # fmt: skip
        table.add_column(column, justify="right")
    for d, ell in CASES:
        theta0, samples = problem(rng, d, ell)
        seconds = {
            (form, each): median_seconds(lambda f=online(form, ell, each): f(theta0, samples))
            for form in ("recurrence", "gram")
            for each in (False, True)
        }
        host = median_seconds(lambda: fedpa.posterior_delta(theta0, samples, RHO))
        values = [
            seconds["recurrence", False],
            seconds["gram", False],
            host,
            seconds["recurrence", True],
            seconds["gram", True],
        ]
        ratio = seconds["gram", False] / seconds["recurrence", False]
        table.add_row(f"{d:,}", str(ell), *[f"{1e3 * v:.2f}" for v in values], f"{ratio:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    if "--json" in sys.argv[1:]:
        print(
            json.dumps(
                {
                    "rows": million(3 if "--quick" in sys.argv else REPEATS),
                    "versions": {"jax": jax.__version__},
                }
            )
        )
    else:
        main()
