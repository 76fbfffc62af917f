"""Clipping: what one client can contribute to a round's sum is bounded.

A client's whole result r_i, Δ_i and all that is sent with it, is one vector. Its share of the sum
is u_i c_i r_i with

    c_i = min(1, C/‖r_i‖),   ‖r‖² = ‖Δ‖² + s²‖rest‖²,   0 ≤ u_i ≤ 1

so its norm is at most C: adding or removing a client moves the sum by at most C, and replacing one
by at most 2C. u_i is 1, or min(n_i, n_max)/n_max. s, a constant, brings what is sent besides Δ to
Δ's scale.

Adaptive clipping (Andrew, Thakkar, McMahan, Ramaswamy: Differentially private learning with
adaptive clipping, NeurIPS 2021) lets C follow a quantile γ of the norms. Clients also send
b_i = 1 where ‖r_i‖ ≤ C, else 0, and the server, for m clients a round,

    b̃ = ½ + (Σ (b_i − ½) + N(0, σ_b²))/m
    C ← C exp(−η (b̃ − γ))

b_i − ½ moves the sum by ½, so this is a Gaussian mechanism of multiplier 2σ_b. For both together
to be one of z, the noise on the results has z_Δ = (z⁻² − (2σ_b)⁻²)^{−1/2}.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from fedpa.errors import check_positive, refuse
from fedpa.precision import widen
from fedpa.types import Count, Scalar

ROUNDING = 1e-6
"""Relative: a rounded norm may be too small by that, and the sum must move by no more than C."""


class AdaptiveClip(NamedTuple):
    """A clipping norm that follows a quantile of the clients' norms (Andrew et al. 2021).

    Args:
        start: C of the first round, > 0.
        quantile: γ in (0, 1), the share of clients whose results are not clipped (default: 0.5).
        rate: η > 0, by how much C follows in a round (default: 0.2).
        count_noise: σ_b > z/2, the noise on the number of clients that are not clipped (default:
            a twentieth of the round's clients, at least z).
    Example:
        >>> import fedpa
        >>> averaging = fedpa.fedavg(fedpa.LocalTraining(0.1, 10), fedpa.Server(optax.sgd(1.0)))
        >>> method = fedpa.private(averaging, clip=fedpa.privacy.AdaptiveClip(0.1),
        ...                        noise_multiplier=1.0, delta=1e-5)
    """

    start: float
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None


def check_clip(clip: Any, noise_multiplier: float) -> None:
    """Refuse a clipping norm, or settings of an adaptive one, out of range."""
    if not isinstance(clip, AdaptiveClip):
        check_positive("clip", clip)
        return
    check_positive("clip", clip.start)
    check_positive("clip_rate", clip.rate)
    if isinstance(clip.quantile, bool) or not 0 < clip.quantile < 1:
        raise refuse("clip_quantile", clip.quantile, "must be in (0, 1)")
    if clip.count_noise is not None:
        check_positive("count_noise", clip.count_noise)
        if 2 * clip.count_noise <= noise_multiplier:
            raise refuse(
                "count_noise",
                clip.count_noise,
                f"must be above half of noise_multiplier = {noise_multiplier:g}",
            )


def find_count_noise(clip: AdaptiveClip, noise_multiplier: float, cohort: float) -> float:
    """σ_b: as given, else m/20, and at least z."""
    if clip.count_noise is not None:
        return clip.count_noise
    return max(cohort / 20, noise_multiplier)


def split_noise(noise_multiplier: float, count_noise: float) -> float:
    """Compute z_Δ = (z⁻² − (2σ_b)⁻²)^{−1/2}: the results' part of a noise multiplier z.

    Args:
        noise_multiplier: z, of results and counts together.
        count_noise: σ_b > z/2, the noise on the count.
    Returns:
        z_Δ > z.
    Example:
        >>> round(split_noise(1.0, 1.0), 4)
        1.1547
    """
    return 1 / math.sqrt(noise_multiplier**-2 - (2 * count_noise) ** -2)


def adapt(clip: Scalar, share: Scalar, settings: AdaptiveClip) -> Scalar:
    """C exp(−η (b̃ − γ)); C where b̃ is not finite."""
    new = clip * jnp.exp(-settings.rate * (share - settings.quantile))
    return jnp.where(jnp.isfinite(new) & (new > 0), new, clip).astype(clip.dtype)


def joint_norm(tree: PyTree) -> Scalar:
    """‖r‖ of all arrays together, summed in at least float32, and rounded to float32."""
    norm: Scalar = optax.tree.norm(widen(tree)).astype(jnp.float32)
    return norm


def clip_factor(norm: Scalar, clip: Scalar) -> Scalar:
    """Compute c = min(1, C/‖r‖), a little below where rounding could make ‖c r‖ exceed C.

    Args:
        norm: ‖r‖ ≥ 0.
        clip: C > 0.
    Returns:
        c in [0, 1].
    Example:
        >>> [round(float(clip_factor(jnp.asarray(x), jnp.asarray(2.0))), 3) for x in (1.0, 4.0)]
        [1.0, 0.5]
    """
    return clip / jnp.maximum(clip, norm * (1 + ROUNDING))


def bound_weight(n: Count, cap: float | None) -> Scalar:
    """u_i: 1, or min(n_i, n_max)/n_max; 0 of an empty client."""
    if cap is None:
        return (n > 0).astype(jnp.float32)
    return jnp.minimum(n.astype(jnp.float32), cap) / cap


def scale_rest(tree: PyTree, factor: float) -> PyTree:
    """Multiply every array by a constant."""
    return tree if factor == 1 else jax.tree.map(lambda x: factor * x, tree)
