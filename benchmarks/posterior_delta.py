"""The forms of the posterior delta against each other, in one run: medians and ratios.

Each form is given ℓ samples of d float32 parameters. "read each" reads Δ̂ after every sample.
"""

import statistics
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


def median_seconds(work: Callable[[], Any]) -> float:
    jax.block_until_ready(work())
    times = []
    for _ in range(REPEATS):
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


def main() -> None:
    rng = np.random.default_rng(0)
    table = Table(title=f"posterior delta, float32, ms (median of {REPEATS})")
    for column in ("d", "ℓ", "recurrence", "gram", "gram on host", "recurrence, read each",
                   "gram, read each", "gram / recurrence"):  # fmt: skip
        table.add_column(column, justify="right")
    for d, ell in CASES:
        theta0 = jnp.asarray(rng.standard_normal(d, dtype=np.float32))
        # As local SGD spreads them: λ_max(Σ̃) of about 2. (Far wider samples cost a decomposition.)
        spread = np.float32(1 / np.sqrt(RHO * d))
        samples = jnp.asarray(spread * rng.standard_normal((ell, d), dtype=np.float32))
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
    main()
