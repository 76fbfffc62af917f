"""The posterior against NUTS on the pooled data: what a federation costs, where data may be pooled.

NUTS draws from p(θ | D) ∝ p(θ) Π_i exp ℓ_i(θ) itself, not from a Gaussian. Chains start at draws of
the posterior that is compared, whose covariance is their inverse mass matrix; a wrong one makes
them slow, and R̂, effective sample size and divergences tell.
"""

import math
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpa.algorithms.sites import as_gaussian
from fedpa.data.federated import Clients, as_federation, check_when_read
from fedpa.data.views import pool_clients
from fedpa.errors import FedpaError, check_integer, check_type
from fedpa.objectives.client_data import ClientData, client_data
from fedpa.objectives.prior import NormalPrior
from fedpa.posterior.density import Density, Normal
from fedpa.posterior.infer import LogLikelihood, as_objective, check_per_example
from fedpa.posterior.posterior import LINES, Posterior, name_parameters
from fedpa.precisions.dense import Dense
from fedpa.precisions.gaussian import Gaussian
from fedpa.samplers.diagnostics import autocorrelation_ess, judge, rhat
from fedpa.samplers.nuts import nuts
from fedpa.samplers.sampler import Epochs, draw_chains
from fedpa.sites.site import localize
from fedpa.training.problem import bind

CHAINS = 4
DRAWS = 2000
BURN_IN = 500
ACCEPTANCE = 0.9
STEP = 0.7
"""ε at the start, in units of the mass matrix."""


class ParameterComparison(NamedTuple):
    """One parameter's posterior against pooled NUTS.

    Args:
        name: Its place in the model: w[0].
        mean: The posterior's.
        sd: The posterior's.
        pooled_mean: Of NUTS's draws.
        pooled_sd: Of NUTS's draws.
    Example:
        >>> ParameterComparison("w[0]", 1.1, 0.2, 1.0, 0.25).difference.__round__(2)
        0.4
    """

    name: str
    mean: float
    sd: float
    pooled_mean: float
    pooled_sd: float

    @property
    def difference(self) -> float:
        """How far the mean is from the pooled mean, in pooled standard deviations."""
        return (self.mean - self.pooled_mean) / self.pooled_sd

    @property
    def sd_ratio(self) -> float:
        """sd / pooled sd."""
        return self.sd / self.pooled_sd


class PooledComparison(NamedTuple):
    """A posterior against NUTS on the pooled data, from `fedpa.compare_with_pooled`.

    Printed, it is a table, with a sentence that says how far they agree.

    Args:
        rows: One for each parameter, in the order of the parameters ravelled.
        rhat: The largest R̂ of NUTS's chains.
        ess: Their smallest effective sample size.
        divergences: Transitions of NUTS that diverged.
    Example:
        >>> row = ParameterComparison("w", 1.1, 0.24, 1.0, 0.25)
        >>> comparison = PooledComparison((row,), rhat=1.0, ess=10000.0, divergences=0)
        >>> round(comparison.mean_error, 3), round(comparison.sd_error, 3)
        (0.4, 0.04)
    """

    rows: tuple[ParameterComparison, ...]
    rhat: float
    ess: float
    divergences: int

    @property
    def mean_error(self) -> float:
        """The largest difference of means, in pooled standard deviations."""
        return max(abs(row.difference) for row in self.rows)

    @property
    def sd_error(self) -> float:
        """The largest difference of a standard deviation, as a share of the pooled one."""
        return max(abs(row.sd_ratio - 1) for row in self.rows)

    def __repr__(self) -> str:
        """A line for each parameter, of at most `LINES`, and what they say together."""
        shown = self.rows[:LINES]
        width = max(9, *(len(row.name) for row in shown))
        lines = [
            f"{'parameter':<{width}}  {'mean':>10} {'sd':>9}  {'pooled':>10} {'sd':>9}  "
            f"{'difference':>10} {'sd ratio':>8}"
        ]
        lines += [
            f"{row.name:<{width}}  {row.mean:>10.4g} {row.sd:>9.3g}  {row.pooled_mean:>10.4g} "
            f"{row.pooled_sd:>9.3g}  {row.difference:>+7.2f} sd {row.sd_ratio:>8.3f}"
            for row in shown
        ]
        if len(self.rows) > LINES:
            lines.append(f"… {len(self.rows) - LINES:,} more")
        # Of independent draws: a mean is off by 1/√ESS sd, an sd by the share 1/√(2 ESS).
        error = 1 / math.sqrt(self.ess) if self.ess > 0 else math.inf
        sentence = (
            f"Means agree within {self.mean_error:.2f} sd, sds within {100 * self.sd_error:.0f} %; "
            f"NUTS itself is off by about {error:.2f} sd and {100 * error / math.sqrt(2):.0f} % "
            f"(R̂ {self.rhat:.3f}, ESS {self.ess:,.0f})."
        )
        reasons = judge(self.rhat, self.ess, self.divergences)
        return "\n".join([*lines, sentence, *(f"NUTS can't be trusted: {r}" for r in reasons)])


def compare_with_pooled(
    posterior: Posterior,
    log_likelihood: LogLikelihood,
    clients: Clients,
    *,
    prior: NormalPrior | None = None,
    seed: int = 0,
    chains: int = CHAINS,
    draws: int = DRAWS,
    burn_in: int = BURN_IN,
) -> PooledComparison:
    """Compare a posterior with NUTS on the pooled data, where data may be pooled.

    Warns if NUTS's chains can't be trusted by the rule of `fedpa.samplers.judge`.

    Args:
        posterior: From `fedpa.infer`.
        log_likelihood: As it was given to `fedpa.infer`.
        clients: The same; all are read into memory.
        prior: The same; default: flat.
        seed: Of the chains.
        chains: At least 2; default: 4.
        draws: Of each chain, at least 4; default: 2,000.
        burn_in: Transitions before the first draw, at least 20, in which the step size is adapted;
            default: 500.
    Returns:
        A row for each parameter, and how well the chains mixed.
    Raises:
        FedpaError: Arguments don't fit together, or there are more than 2,000 parameters in a dense
            posterior.
    Example:
        >>> rng = np.random.default_rng(0)
        >>> clients = {name: rng.normal(3.0, 1.0, 20) for name in ("a", "b")}
        >>> def log_likelihood(mu, y):
        ...     return -0.5 * (y - mu) ** 2
        >>> posterior = fedpa.infer(log_likelihood, np.zeros(()), clients, method="laplace",
        ...                         progress=False)
        >>> found = fedpa.compare_with_pooled(posterior, log_likelihood, clients, burn_in=100,
        ...                                   draws=500)
        >>> found.mean_error < 0.1
        True
    """
    check_type("posterior", posterior, Posterior, "fedpa.infer(log_likelihood, params, clients)")
    if prior is not None:
        check_type("prior", prior, NormalPrior, "fedpa.normal_prior(sd=2.0)")
    if not bool(posterior.density.is_proper):
        raise FedpaError("this posterior's precision is not positive definite: it is no density")
    check_integer("seed", seed, 0)
    check_integer("chains", chains, 2)
    check_integer("draws", draws, 4)
    check_integer("burn_in", burn_in, 20)
    data = check_when_read(as_federation(clients))
    check_per_example("log_likelihood", log_likelihood, posterior.model, data)
    (pool,) = (pools := pool_clients(data, len(data.ids), seed=0)).ids
    pooled = client_data(pools.examples(pool))

    objective, theta, _ = bind(as_objective(log_likelihood, prior), posterior.model)
    own_prior: Any = objective.prior
    if own_prior is not None:
        own_prior.check(theta)
    key, start_key, loss_key = jax.random.split(jax.random.key(seed), 3)
    q = posterior.density

    # All numbers are arguments: of one likelihood and shapes, one program serves every comparison.
    @jax.jit
    def run(mass: jax.Array, prior: Gaussian, starts: jax.Array, data: ClientData) -> Any:
        sampler = nuts(
            localize(objective, theta, data, loss_key).with_prior(prior),
            mass=mass,
            step_size=STEP,
            window=Epochs(burn_in),
            target_acceptance=ACCEPTANCE,
        )
        return draw_chains(sampler, starts, data, key, draws)

    points, infos = run(
        posterior.covariance() if _is_dense(q) else q.sd**2,
        as_gaussian(own_prior, theta, "diagonal"),
        q.sample(start_key, chains),
        pooled,
    )
    values = np.asarray(points, np.float64)
    worst = float(np.max(rhat(values))), float(np.min(autocorrelation_ess(values)))
    divergences = int(np.sum(infos.divergent))
    for sentence in judge(*worst, divergences):
        warnings.warn(f"NUTS on the pooled data: {sentence}", stacklevel=2)
    columns = (q.mean, q.sd, values.mean(axis=(0, 1)), values.std(axis=(0, 1), ddof=1))
    numbers = np.stack([np.asarray(column, np.float64) for column in columns], axis=1)
    names = name_parameters(posterior.model)
    rows = [
        ParameterComparison(name, *row) for name, row in zip(names, numbers.tolist(), strict=True)
    ]
    return PooledComparison(tuple(rows), *worst, divergences)


def _is_dense(density: Density) -> bool:
    return isinstance(density, Gaussian | Normal) and isinstance(density.precision, Dense)
