"""A site t_i: the Gaussian that stands for a client's likelihood exp ℓ_i(θ).

ℓ_i(θ) = Σ_j log p(z_ij | θ) is a sum over the client's examples. The site
t_i ∝ exp(η_iᵀθ − ½θᵀΛ_iθ) has a linear score η_i − Λ_iθ: the best linear fit of ∇ℓ_i,

    at one point θ:     Λ_i = −∇²ℓ_i(θ),  η_i = ∇ℓ_i(θ) + Λ_iθ                       (Laplace)
    over a density p:   Λ_i = −Cov_p[θ]⁻¹ Cov_p[θ, ∇ℓ_i],  η_i = E_p[∇ℓ_i] + Λ_i E_p[θ]

With p the Gaussian q itself, Λ_i = −E_q[∇²ℓ_i] by Stein's identity: the variational optimum (PVI).
With p ∝ cavity · exp ℓ_i, the tilted density, Stein's identity says that cavity · t_i has the mean
and the covariance of p: the moments that EP matches. From draws θ_1 … θ_ℓ of p both are the least
squares line through (θ_s, ∇ℓ_i(θ_s)): exact from d + 1 draws on where ℓ_i is quadratic, and noisy
only as far as it is not. (The inverse of the draws' covariance, less the cavity's precision, has
the same limit and the noise of all of Λ.)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.lapack import cholesky, solve_lower, solve_upper
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective, client_loss
from fedpa.precision import ravel
from fedpa.precisions.dense import Dense
from fedpa.precisions.diagonal import Diagonal
from fedpa.precisions.gaussian import Gaussian, Structure, Vector
from fedpa.types import Count, Key, Params, Scalar


class Local(NamedTuple):
    """A client's likelihood as a function of one vector, θ ravelled; from `localize`.

    Args:
        objective: Without a prior, a function of the vector.
        data: The client's examples.
        key: Of a random loss: one for the whole inference, so that ℓ_i is a function.
    Example:
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> data = fedpa.objectives.client_data({"x": np.eye(2), "y": np.ones(2)})
        >>> Local(objective, data, jax.random.key(0)).log_likelihood(jnp.zeros(2)).item()
        -1.0
    """

    objective: Objective
    data: ClientData
    key: Key

    def log_likelihood(self, v: Vector) -> Scalar:
        """ℓ_i(θ) = −n_i f_i(θ)."""
        loss = client_loss(self.objective, v, self.data, self.key)
        return -self.data.n.astype(loss.dtype) * loss

    def with_prior(self, prior: Gaussian) -> Objective:
        """The objective whose posterior at temperature 1 is prior · exp ℓ_i."""
        return self.objective._replace(prior=prior, num_examples=jnp.maximum(self.data.n, 1))


def localize(objective: Objective, theta: Params, data: ClientData, key: Key) -> Local:
    """Make a client's likelihood a function of one vector, θ ravelled.

    Args:
        objective: The loss, a negative log-likelihood of each example.
        theta: θ; only its structure, shapes and dtypes matter.
        data: The client's examples.
        key: For a loss that is random.
    Returns:
        The likelihood, without the objective's prior.
    Example:
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> data = fedpa.objectives.client_data({"x": np.eye(2), "y": np.array([1.0, 3.0])})
        >>> local = localize(objective, jnp.zeros(2), data, jax.random.key(0))
        >>> local.log_likelihood(jnp.zeros(2)).item()
        -5.0
    """
    _, restore = ravel(theta)
    loss, regularizer = objective.loss, objective.regularizer
    flat = objective._replace(
        loss=lambda v, batch, key: loss(restore(v), batch, key),
        regularizer=None if regularizer is None else lambda v: regularizer(restore(v)),
        sparse=None,
        prior=None,
    )
    return Local(flat, data, key)


class SiteInfo(NamedTuple):
    """What a person wants to see of a client's inference.

    Args:
        rhat: The largest split R̂ of its chains; 1 where there are none.
        ess: The smallest effective sample size of its chains; infinite where there are none.
        acceptance: Mean acceptance probability; 1 where there are no chains.
        divergent: Transitions that diverged.
    Example:
        >>> SiteInfo(jnp.float32(1.0), jnp.float32(800.0), jnp.float32(0.9), jnp.int32(0))._fields
        ('rhat', 'ess', 'acceptance', 'divergent')
    """

    rhat: Scalar
    ess: Scalar
    acceptance: Scalar
    divergent: Count


def no_chains() -> SiteInfo:
    one = jnp.ones((), jnp.float32)
    return SiteInfo(one, jnp.inf * one, one, jnp.zeros((), jnp.int32))


FindSite = Callable[[Local, Gaussian, Gaussian, Key], tuple[Gaussian, SiteInfo]]
"""(the client's likelihood, cavity, a guess of cavity · exp ℓ_i, key) → its site. The cavity is the
client's prior; the guess says where to start and how far to look."""


def linearize(local: Local, v: Vector, structure: Structure) -> Gaussian:
    """The site at one point: Λ = −∇²ℓ_i(θ), η = ∇ℓ_i(θ) + Λθ.

    Args:
        local: The client's likelihood.
        v: θ ravelled.
        structure: "dense", or "diagonal" for the diagonal of the Hessian alone (by d products with
            it, one after the other).
    Returns:
        The site.
    Example:
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> data = fedpa.objectives.client_data({"x": np.eye(2), "y": np.array([1.0, 3.0])})
        >>> local = localize(objective, jnp.zeros(2), data, jax.random.key(0))
        >>> linearize(local, jnp.zeros(2), "dense").mean.tolist()
        [1.0, 3.0]
    """
    gradient = jax.grad(local.log_likelihood)
    score = gradient(v)
    if structure == "dense":
        hessian = jax.jacfwd(gradient)(v)
        precision: Dense | Diagonal = Dense(-0.5 * (hessian + hessian.T))
    else:

        def entry(j: Count) -> Scalar:
            unit = jnp.zeros_like(v).at[j].set(1)
            return -jnp.vdot(unit, jax.jvp(gradient, (v,), (unit,))[1])

        precision = Diagonal(jax.lax.map(entry, jnp.arange(len(v))))
    return Gaussian(score + precision.times(v), precision)


def fit_score(local: Local, points: Float[Array, "s d"], structure: Structure) -> Gaussian:
    """The site over draws: the least-squares line through (θ_s, ∇ℓ_i(θ_s)).

    Args:
        local: The client's likelihood.
        points: Draws θ_1 … θ_ℓ ravelled, more than d of them for a dense structure.
        structure: "dense", or "diagonal" for a line per coordinate.
    Returns:
        The site.
    Example:
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> data = fedpa.objectives.client_data({"x": np.eye(2), "y": np.array([1.0, 3.0])})
        >>> local = localize(objective, jnp.zeros(2), data, jax.random.key(0))
        >>> points = jax.random.normal(jax.random.key(1), (10, 2))
        >>> [round(x, 3) for x in fit_score(local, points, "dense").mean.tolist()]  # exact
        [1.0, 3.0]
    """
    scores = jax.lax.map(jax.grad(local.log_likelihood), points, batch_size=BATCH)
    centre, level = jnp.mean(points, axis=0), jnp.mean(scores, axis=0)
    apart, steps = points - centre[None], scores - level[None]
    if structure == "dense":
        # Whitened by the draws' own spread: the normal equations in coordinates of one scale.
        lower = cholesky(apart.T @ apart)
        slope = solve_upper(lower, solve_lower(lower, apart.T @ steps))
        precision: Dense | Diagonal = Dense(-0.5 * (slope + slope.T))
    else:
        precision = Diagonal(-jnp.sum(apart * steps, axis=0) / jnp.sum(apart**2, axis=0))
    return Gaussian(level + precision.times(centre), precision)


BATCH = 64
"""Draws whose scores are computed together."""
