"""Shrinkage estimators of the covariance, Σ̂ = a (I + r Ŝ), known by two numbers.

Ŝ is the sample covariance with divisor ℓ − 1, as in the paper. Everything an estimator needs of it
are tr Ŝ and tr Ŝ², which the posterior delta reads off its ℓ×ℓ Gram matrix: no d×d matrix is ever
formed, and ρ can be chosen after the samples at no further O(d) cost.

- `fixed` (Theorem 3): mixing weight w = ρ_ℓ = 1/(1 + (ℓ−1)ρ).
- `oas`, `rblw` (Chen et al. 2010, eq. 23 and 17): w from the samples, mapped back to
  ρ = (1/w − 1)/(ℓ − 1). Their equations are written for n draws of known mean; we put n = ℓ. The
  weight does not depend on Ŝ's divisor.

Target `identity` (the paper's): Σ̂ = w I + (1 − w) Ŝ. Target `scaled` (Chen et al.'s):
Σ̂ = w (tr Ŝ/d) I + (1 − w) Ŝ. With one sample Σ̂ = I. If all samples are equal, Ŝ = 0:
`oas` and `rblw` take w = 1, and the scaled target, which would be 0, becomes I.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from fedpa.errors import refuse

Target = Literal["identity", "scaled"]
"""Towards what Ŝ is shrunk: I (the paper), or (tr Ŝ/d) I (Chen et al.)."""
Rule = Literal["fixed", "oas", "rblw"]
"""How the mixing weight is chosen."""
Rho: TypeAlias = float | Literal["oas", "rblw"]
"""ρ ≥ 0, or the rule that chooses it from the samples."""


class Moments(NamedTuple):
    """The statistics of the samples that shrinkage needs; NumPy or JAX scalars."""

    trace: Any
    """tr Ŝ."""
    trace_of_square: Any
    """tr Ŝ²."""
    num_samples: Any
    """ℓ, as a floating-point number."""
    dim: int
    """d."""


class Coefficients(NamedTuple):
    """Σ̂ = a (I + r Ŝ)."""

    a: Any
    r: Any
    rho: Any
    """The ρ in use: r = (ℓ−1)ρ for the identity target."""


class Shrinkage(NamedTuple):
    """How Σ̂ = w·target + (1 − w)·Ŝ is shrunk; made by `fixed`, `oas` or `rblw`.

    Args:
        rule: How the mixing weight w is chosen.
        rho: For the rule "fixed"; unused otherwise.
        target: "identity" (I) or "scaled" ((tr Ŝ/d) I).
    Example:
        >>> fedpa.deltas.fixed(0.1)
        Shrinkage(rule='fixed', rho=0.1, target='identity')
    """

    rule: Rule
    rho: float
    target: Target


def fixed(rho: float, target: Target = "identity") -> Shrinkage:
    """Shrink by a fixed ρ: Σ̂ = w I + (1 − w) Ŝ with w = 1/(1 + (ℓ−1)ρ) (Theorem 3).

    Args:
        rho: ρ ≥ 0; at 0, Σ̂ = I.
        target: "identity" (the paper's, the default) or "scaled".
    Returns:
        The shrinkage.
    Example:
        >>> theta0, samples = np.ones(2), np.array([[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
        >>> posterior = fedpa.deltas.posterior(3, fixed(0.1))  # as fedpa.posterior_delta, rho=0.1
        >>> fedpa.posterior_delta(theta0, samples, rho=0.1).round(3)
        array([1. , 1.2])
    """
    try:
        value = float("nan") if isinstance(rho, str | bool) else float(rho)
    except (TypeError, ValueError):
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise refuse("rho", rho, "must be a finite number ≥ 0")
    return _check_target(Shrinkage("fixed", value, target))


def oas(target: Target = "identity") -> Shrinkage:
    """Choose ρ from the samples: oracle approximating shrinkage (Chen et al. 2010, eq. 23).

    w = min(1, [(1 − 2/d) tr Ŝ² + tr² Ŝ] / [(ℓ + 1 − 2/d)(tr Ŝ² − tr² Ŝ/d)]), ρ = (1/w − 1)/(ℓ − 1).

    Args:
        target: "identity" (the paper's, the default) or "scaled" (Chen et al.'s).
    Returns:
        The shrinkage.
    Example:
        >>> delta = fedpa.deltas.posterior(5, oas())
        >>> fedpa.posterior_delta(np.ones(2), np.eye(3, 2), rho="oas").round(3)  # the same rule
        array([0.667, 0.667])
    """
    return _check_target(Shrinkage("oas", float("nan"), target))


def rblw(target: Target = "identity") -> Shrinkage:
    """Choose ρ from the samples: Rao–Blackwellized Ledoit–Wolf (Chen et al. 2010, eq. 17).

    w = min(1, [(ℓ − 2)/ℓ · tr Ŝ² + tr² Ŝ] / [(ℓ + 2)(tr Ŝ² − tr² Ŝ/d)]), ρ = (1/w − 1)/(ℓ − 1).

    Args:
        target: "identity" (the paper's, the default) or "scaled" (Chen et al.'s).
    Returns:
        The shrinkage.
    Example:
        >>> delta = fedpa.deltas.posterior(5, rblw())
        >>> fedpa.posterior_delta(np.ones(2), np.eye(3, 2), rho="rblw").round(3)  # the same rule
        array([0.667, 0.667])
    """
    return _check_target(Shrinkage("rblw", float("nan"), target))


def shrinkage(rule: Any, target: Any = "identity") -> Shrinkage:
    """Read a shrinkage: a name (`oas`, `rblw`), or a number as fixed ρ. Refuses other values."""
    if isinstance(rule, str):
        if rule not in ("oas", "rblw"):
            raise refuse("rho", rule, "must be a number ≥ 0, 'oas' or 'rblw'")
        return oas(target) if rule == "oas" else rblw(target)
    return fixed(rule, target)


def _check_target(shrink: Shrinkage) -> Shrinkage:
    if shrink.target not in ("identity", "scaled"):
        raise refuse("target", shrink.target, "must be 'identity' or 'scaled'")
    return shrink


def mixing_weight(shrink: Shrinkage, moments: Moments) -> Any:
    """w ∈ (0, 1]."""
    trace, trace_of_square, n, p = moments
    if shrink.rule == "fixed":
        return 1 / (1 + (n - 1) * shrink.rho)
    if shrink.rule == "oas":
        above = (1 - 2 / p) * trace_of_square + trace**2
        below = (n + 1 - 2 / p) * (trace_of_square - trace**2 / p)
    else:
        above = (n - 2) / n * trace_of_square + trace**2
        below = (n + 2) * (trace_of_square - trace**2 / p)
    # Where Ŝ is already a multiple of I (or is 0): 1.
    xp = array_namespace(above)
    positive = below > 0
    return xp.minimum(xp.where(positive, above / xp.where(positive, below, 1.0), 1.0), 1.0)


def coefficients(estimator: Shrinkage, moments: Moments) -> Coefficients:
    """(a, r) of Σ̂ = a (I + r Ŝ), and the ρ in use."""
    xp = array_namespace(moments.trace)
    degrees = xp.maximum(moments.num_samples - 1, 1.0)
    degenerate = (moments.num_samples <= 1) | (moments.trace <= 0)
    w = mixing_weight(estimator, moments)
    if estimator.rule == "fixed":
        # Not (1 − w)/w, which a small ρ would lose to cancellation.
        rho = xp.full_like(w, estimator.rho)
    else:
        w = xp.where(degenerate, 1.0, w)
        rho = (1 / w - 1) / degrees
    r = rho * (moments.num_samples - 1)
    if estimator.target == "identity":
        return Coefficients(w, r, rho)
    scale = xp.where(degenerate, 1.0, moments.trace / moments.dim)
    return Coefficients(
        xp.where(degenerate, 1.0, w * scale), xp.where(degenerate, 0.0, r / scale), rho
    )


def array_namespace(array: Any) -> Any:
    """numpy for NumPy's arrays and numbers, jax.numpy for JAX's."""
    if isinstance(array, np.ndarray | np.generic | float | int):
        return np
    return array.__array_namespace__()
