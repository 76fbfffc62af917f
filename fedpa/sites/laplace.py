"""The site at the mode of cavity · exp ℓ_i: Laplace's approximation of the tilted density."""

import jax
import jax.numpy as jnp

from fedpa.precisions.gaussian import Gaussian, Structure, Vector
from fedpa.sites.site import FindSite, Local, SiteInfo, linearize, no_chains
from fedpa.types import Key, Scalar

STEPS = 50
"""Newton steps at most."""
HALVINGS = 10
CLOSE = 1e-3
"""The search ends with a step of at most this many standard deviations."""


def laplace(structure: Structure = "dense") -> FindSite:
    """Build Laplace's site: −∇²ℓ_i at the mode of cavity · exp ℓ_i.

    Args:
        structure: Of Λ_i: "dense" or "diagonal".
    Returns:
        (client's likelihood, cavity, guess, key) → (site, info).
    Example:
        >>> find = fedpa.sites.laplace()
    """

    def find(
        local: Local, cavity: Gaussian, guess: Gaussian, key: Key
    ) -> tuple[Gaussian, SiteInfo]:
        mode = find_mode(local, cavity, guess.mean, structure)
        return linearize(local, mode, structure), no_chains()

    return find


def find_mode(local: Local, cavity: Gaussian, start: Vector, structure: Structure) -> Vector:
    """The mode of cavity · exp ℓ_i by Newton steps; of their halvings the best is taken.

    A start that is not finite is replaced by 0.
    """

    def density(v: Vector) -> Scalar:
        return local.log_likelihood(v) + cavity.log_density(v)

    def step(carry: tuple[Vector, Scalar, jax.Array]) -> tuple[Vector, Scalar, jax.Array]:
        v, _, count = carry
        target = linearize(local, v, structure).times(cavity)
        move = target.mean - v
        lengths = 0.5 ** jnp.arange(HALVINGS, dtype=v.dtype)
        reached = jax.vmap(lambda length: density(v + length * move))(lengths)
        gains = jnp.where(jnp.isfinite(reached), reached - density(v), -jnp.inf)
        best = jnp.argmax(gains)
        improved = gains[best] > 0
        moved = jnp.where(improved, lengths[best] * move, 0)
        far = jnp.max(jnp.abs(moved) / target.sd)
        return v + moved, jnp.where(improved, far, 0).astype(v.dtype), count + 1

    def is_moving(carry: tuple[Vector, Scalar, jax.Array]) -> jax.Array:
        return (carry[1] > CLOSE) & (carry[2] < STEPS)

    start = jnp.where(jnp.all(jnp.isfinite(start)), start, 0)
    mode, *_ = jax.lax.while_loop(
        is_moving, step, (start, jnp.asarray(jnp.inf, start.dtype), jnp.zeros((), jnp.int32))
    )
    return mode
