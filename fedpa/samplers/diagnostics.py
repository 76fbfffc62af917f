"""How good posterior draws are: do chains mix, and Kish's effective sample size of appendix B.

R̂ (rank-normalized, split) and the autocorrelation effective sample size are blackjax's. Both are
invariant to shift and scale, so draws are standardized in float64 first: in float32, draws that
spread little around a large mean would lose their digits before blackjax could look at them.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from numpy.typing import ArrayLike

from fedpa.errors import FedpaError, refuse
from fedpa.precision import accumulation_dtype
from fedpa.samplers.sampler import Info, import_blackjax
from fedpa.types import Params, Scalar

LEAST_CHAINS = 2
"""One chain alone would say that it agrees with itself."""
LEAST_DRAWS = 4
"""R̂ splits every chain into halves and needs a variance of each."""
MOST_RHAT = 1.01
"""R̂ above which chains are not taken to agree (Vehtari et al. 2021)."""
LEAST_ESS = 100
"""Independent draws, of all chains together, below which a mean is off by a tenth of an sd and an
sd by 7 %: too rough to be reported."""
BLOCK = 2**17
"""Draws looked at together: what bounds the memory, whatever the number of parameters."""


class Diagnostics(NamedTuple):
    """How good the draws of several chains are, for every parameter.

    Args:
        rhat: Rank-normalized split R̂ of every parameter, a tree like θ: 1 where chains agree,
            infinite where they don't move. NaN where all draws are equal, or one is not finite.
        ess: Effective sample size by autocorrelation of every parameter, of all chains together:
            about chains · num for independent draws. NaN like R̂; 0 for chains that are constant
            but differ.
        acceptance: Mean acceptance probability; None for samplers that accept always.
        divergences: Divergent transitions; None for samplers that don't know any.
    Example:
        >>> fedpa.samplers.Diagnostics(np.ones(2), np.full(2, 40.0), None, None).rhat
        array([1., 1.])
    """

    rhat: PyTree[np.ndarray]
    ess: PyTree[np.ndarray]
    acceptance: float | None
    divergences: int | None


class Worst(NamedTuple):
    """The worst of `Diagnostics` over all parameters."""

    rhat: float | Scalar
    """The largest R̂."""
    ess: float | Scalar
    """The smallest effective sample size."""


def judge(
    rhat: float, ess: float, divergences: int | None = None, *, most_rhat: float = MOST_RHAT
) -> list[str]:
    """Say why draws can't be trusted: the rule that `diagnose` warns by.

    They can't if R̂ > 1.01 (the chains disagree), if they are worth fewer than 100 independent
    draws, or if a transition diverged (a part of the posterior was not visited).

    Args:
        rhat: The largest R̂ over the parameters; NaN counts as too large.
        ess: The smallest effective sample size, of all chains together; NaN counts as too small.
        divergences: Divergent transitions; None if the sampler knows none.
        most_rhat: The largest R̂ of chains that agree, > 1. Of a few hundred independent draws per
            chain it is above 1.01 by chance alone.
    Returns:
        One sentence per reason, with its number; empty if there is none.
    Example:
        >>> judge(1.002, 900.0, 0)
        []
        >>> judge(1.3, 900.0, 0)
        ['R̂ = 1.300 is above 1.01: the chains do not agree. Lengthen the burn-in or draw more.']
    """
    reasons = []
    if not rhat <= most_rhat:
        reasons.append(
            f"R̂ = {rhat:.3f} is above {most_rhat}: the chains do not agree. Lengthen the burn-in "
            "or draw more."
        )
    if not ess >= LEAST_ESS:
        reasons.append(
            f"ESS = {ess:.0f} is below {LEAST_ESS}: the draws are worth too few independent ones. "
            "Draw more, or adapt the mass."
        )
    if divergences:
        reasons.append(
            f"divergences = {divergences}: trajectories left the posterior. Raise "
            "target_acceptance or lower the step size."
        )
    return reasons


def measure_mixing(draws: Float[Array, "chains num d"]) -> Worst:
    """Compute the worst R̂ and effective sample size inside compiled functions.

    The numbers of `worst(diagnose(…))`, up to rounding, as arrays: works under `jax.jit` and
    `jax.vmap` (over clients), and compiles in one to two seconds.

    Args:
        draws: At least 2 chains of at least 4 draws of d parameters as one vector.
    Returns:
        The largest R̂ and the smallest effective sample size over the d parameters; NaN where all
        draws of a parameter are equal or one is not finite.
    Example:
        >>> draws = jax.random.normal(jax.random.key(0), (4, 250, 3))
        >>> bool(jax.jit(measure_mixing)(draws).rhat < 1.05)
        True
    """
    chains, num, _ = draws.shape
    if chains < LEAST_CHAINS or num < LEAST_DRAWS:
        raise refuse(
            "draws",
            draws.shape,
            f"must have at least {LEAST_CHAINS} chains of at least {LEAST_DRAWS} draws",
        )
    wide = draws.astype(accumulation_dtype(draws.dtype))
    known = jnp.isfinite(wide).all((0, 1)) & (wide != wide[:1, :1]).any((0, 1))
    stuck = (wide == wide[:, :1]).all((0, 1)) & known
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        # As in `_in_blocks`: the first draw is subtracted first, to keep the digits of small
        # deviations from a large mean.
        moved = jnp.where(known, wide - wide[:1, :1], 0)
        moved = moved / jnp.where(known, jnp.abs(moved).max((0, 1)), 1)
        moved = moved - moved.mean((0, 1))
        module = import_blackjax("diagnostics")
        rhats = module.rhat(moved).reshape(known.shape)  # blackjax squeezes d = 1
        sizes = module.effective_sample_size(moved).reshape(known.shape)
        rhats = jnp.where(known, jnp.where(stuck, jnp.inf, rhats), jnp.nan)
        return Worst(jnp.max(rhats), jnp.min(jnp.where(known, sizes, jnp.nan)))


def diagnose(samples: Params, infos: Info) -> Diagnostics:
    """Diagnose chains: R̂ and autocorrelation effective sample size of every parameter.

    Warns, in one line, if the draws can't be trusted by the rule of `judge`.

    Args:
        samples: From `draw_chains`: a pytree of arrays with axes (chains, num, …), at least 2
            chains of at least 4 draws.
        infos: From `draw_chains`, with `loss` of shape (chains, num).
    Returns:
        The diagnostics, with acceptance and divergences where the sampler knows them.
    Raises:
        FedpaError: There are too few chains or draws, or shapes don't fit.
    Example:
        >>> sampler = fedpa.samplers.exact(fedpa.objectives.least_squares.posterior)
        >>> data, starts = {"x": np.eye(4, 2), "y": np.ones(4)}, jnp.zeros((4, 2))
        >>> chains = fedpa.samplers.draw_chains(sampler, starts, data, jax.random.key(0), 999)
        >>> bool((diagnose(*chains).rhat < 1.01).all())
        True
    """
    chains, num = _chains_and_draws(jax.tree.leaves(samples))
    if chains < LEAST_CHAINS:
        raise refuse("chains", chains, f"R̂ compares chains: give at least {LEAST_CHAINS}")
    shape = np.shape(infos.loss)
    if shape != (chains, num):
        # One chain's samples have their own first axes; its infos do not lie.
        raise FedpaError(
            f"infos.loss has shape {shape}: must be (chains, num) = {(chains, num)}, as of "
            "draw_chains (draw returns a single chain)"
        )
    if num < LEAST_DRAWS:
        raise refuse("num", num, f"R̂ needs at least {LEAST_DRAWS} draws of each chain")

    def of_each(statistic: Callable[[Any], np.ndarray]) -> Any:
        return jax.tree.map(
            lambda x: statistic(x.reshape(chains, num, -1)).reshape(x.shape[2:]), samples
        )

    found = Diagnostics(
        rhat=of_each(rhat),
        ess=of_each(autocorrelation_ess),
        acceptance=(
            float(np.mean(np.asarray(infos.acceptance, np.float64)))
            if "acceptance" in infos._fields
            else None
        ),
        divergences=int(np.sum(infos.divergent)) if "divergent" in infos._fields else None,
    )
    lowest = worst(found)
    reasons = judge(float(lowest.rhat), float(lowest.ess), found.divergences)
    if reasons:
        warnings.warn("draws can't be trusted: " + " ".join(reasons), stacklevel=2)
    return found


def worst(diagnostics: Diagnostics) -> Worst:
    """Reduce diagnostics to the largest R̂ and the smallest effective sample size.

    Args:
        diagnostics: From `diagnose`.
    Returns:
        Both, over all parameters; NaN if it is NaN for one of them.
    Example:
        >>> worst(Diagnostics(np.array([1.0, 1.3]), np.array([90.0, 12.0]), None, None))
        Worst(rhat=1.3, ess=12.0)
    """
    return Worst(
        rhat=float(np.max([np.max(x) for x in jax.tree.leaves(diagnostics.rhat)])),
        ess=float(np.min([np.min(x) for x in jax.tree.leaves(diagnostics.ess)])),
    )


def rhat(draws: Any) -> np.ndarray:
    """R̂ of each of d columns: (chains, num, d) → (d,)."""
    draws = np.asarray(draws)
    # Chains that reject every proposal: infinite, where blackjax's has 0/0 if there are just two.
    stuck = (draws == draws[:, :1]).all(axis=(0, 1)) & np.isfinite(draws).all(axis=(0, 1))
    differ = (draws != draws[:1, :1]).any(axis=(0, 1))
    return np.where(stuck & differ, np.inf, _in_blocks("rhat", draws))


def autocorrelation_ess(draws: Any) -> np.ndarray:
    """Effective sample size of each of d columns, of all chains: (chains, num, d) → (d,)."""
    return _in_blocks("effective_sample_size", draws)


def bulk_ess(draws: Any) -> np.ndarray:
    """The same of ranks and of chains split into halves: (chains, num, d) → (d,).

    Unlike the plain one it is not taken in by a transient: a first draw that is far off would make
    all the others look alike, and independent.
    """
    return _in_blocks("ess_bulk", draws)


def kish_ess(log_weights: ArrayLike) -> Float[np.ndarray, "..."]:
    """Compute Kish's effective sample size (Σ w)² / Σ w² (appendix B).

    The weights are w_j ∝ p(θ_j) = exp(−n f(θ_j)): proportional to the posterior, not to the loss
    (the text's "or equivalently to the loss" is a slip).

    It is no measure of mixing. Draws of a d-dimensional Gaussian with s times the posterior's
    covariance give ESS/ℓ → ((1 + 2s) / (1 + s)²)^{d/2}, which is (3/4)^{d/2} for exact draws (0.75
    at d = 2, 0.24 at d = 10) and 1, the best there is, for s = 0: for copies of one point.

    Args:
        log_weights: log w_j along the last axis, up to a constant.
    Returns:
        One number for each of the other axes' entries; NaN where a log-weight is not finite (the
        chain diverged).
    Example:
        >>> kish_ess(np.log([0.25, 0.25, 0.5])).round(3)
        np.float64(2.667)
    """
    logs = np.asarray(log_weights, np.float64)
    if logs.ndim == 0 or logs.shape[-1] == 0:
        raise refuse("log_weights", logs.shape, "the last axis must hold at least one weight")
    finite = np.all(np.isfinite(logs), axis=-1, keepdims=True)
    logs = np.where(finite, logs, 0)
    weights = np.exp(logs - logs.max(axis=-1, keepdims=True))
    ess = weights.sum(axis=-1) ** 2 / (weights**2).sum(axis=-1)
    return np.where(np.squeeze(finite, -1), ess, np.nan)


@functools.partial(jax.jit, static_argnums=0)
def _compute(statistic: str, block: jax.Array) -> jax.Array:
    compute: Callable[[jax.Array], jax.Array] = getattr(import_blackjax("diagnostics"), statistic)
    return compute(block)


def _in_blocks(statistic: str, draws: Any) -> np.ndarray:
    """One of blackjax's statistics of each column, by blocks of one shape: it compiles once."""
    draws = np.asarray(draws)
    chains, num, columns = draws.shape
    width = max(1, BLOCK // (chains * num))
    found = np.empty(columns)
    for first in range(0, columns, width):
        part = np.asarray(draws[:, :, first : first + width], np.float64)
        known = np.isfinite(part).all(axis=(0, 1)) & (part != part[:1, :1]).any(axis=(0, 1))
        part = np.where(known, part, 0)
        # Standardized by range: squares of large numbers would overflow.
        part = part - part.mean(axis=(0, 1))
        part = part / np.where(known, np.abs(part).max(axis=(0, 1)), 1)
        block = np.zeros((chains, num, width), np.float32)
        block[:, :, : part.shape[2]] = part
        # blackjax relies on promotion that our tests forbid.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            values = np.asarray(_compute(statistic, block)).reshape(
                width
            )  # blackjax squeezes a width of 1
        found[first : first + width] = np.where(known, values[: part.shape[2]], np.nan)
    return found


def _chains_and_draws(leaves: list[Any]) -> tuple[int, int]:
    shapes = [np.shape(leaf) for leaf in leaves]
    if len({shape[:2] for shape in shapes}) != 1 or len(shapes[0]) < 2:
        raise FedpaError(
            f"samples has arrays of shapes {shapes}: all must begin with axes (chains, num)"
        )
    return int(shapes[0][0]), int(shapes[0][1])
