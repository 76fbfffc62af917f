"""The prior p(θ) of the global posterior p(θ | D) ∝ p(θ) Π_i exp ℓ_i(θ): counted once (eq. 1–3).

ℓ_i is client i's log-likelihood, a sum over its n_i examples. Of n examples of all clients together
each has the share −log p(θ)/n in the mean loss, so client i's local posterior holds the share
p(θ)^{n_i/n}, and the product of all local posteriors holds p(θ), however examples are split.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fedpa.errors import FedpaError, refuse
from fedpa.objectives.client_data import is_real
from fedpa.precision import accumulation_dtype
from fedpa.types import Params, Scalar

Vector = Float[Array, " d"]
"""Numbers of all parameters in one vector."""


@runtime_checkable
class Prior(Protocol):
    """A prior p(θ) over parameters, for `fedpa.Objective(loss, prior=…)`.

    Args:
        theta: θ.
    Example:
        >>> class Laplace:
        ...     def log_density(self, theta):
        ...         return -jnp.sum(jnp.abs(theta))
        >>> isinstance(Laplace(), Prior)
        True
    """

    def log_density(self, theta: Any) -> Any:
        """log p(θ), up to a constant: one number."""
        ...


class NormalPrior(NamedTuple):
    """The prior N(m₀, Λ₀⁻¹) with a diagonal Λ₀, from `fedpa.normal_prior`.

    log p(θ) = −½ Σ_j Λ₀_jj (θ_j − m₀_j)², up to a constant.

    Args:
        mean: m₀: a number, or a pytree like θ of numbers or arrays that broadcast to its arrays.
        precision: The diagonal of Λ₀, ≥ 0, in the same form; 0 where the prior is flat.
    Example:
        >>> prior = NormalPrior(mean=0.0, precision={"w": 4.0, "b": 0.0})
        >>> prior.log_density({"w": jnp.ones(2), "b": jnp.ones(())}).item(), prior.is_proper
        (-4.0, False)
    """

    mean: PyTree
    precision: PyTree

    @property
    def is_proper(self) -> bool:
        """Whether every precision is > 0: p(θ) is a density then."""
        return all(bool(np.all(np.asarray(leaf) > 0)) for leaf in jax.tree.leaves(self.precision))

    def log_density(self, theta: Params) -> Scalar:
        """log p(θ), up to a constant, in the accumulation dtype of θ."""
        dtype = _common_dtype(theta)
        total = jnp.zeros((), dtype)
        for leaf, mean, precision in self._leaves(theta, dtype):
            total = total - 0.5 * jnp.sum(precision * (leaf.astype(dtype) - mean) ** 2)
        return total

    def natural(self, theta: Params) -> tuple[Vector, Vector]:
        """Λ₀m₀ and the diagonal of Λ₀, in the order and of the length of θ ravelled.

        Of θ only structure, shapes and dtypes matter.
        """
        leaves = list(self._leaves(theta, _common_dtype(theta)))
        pulls = jnp.concatenate([(precision * mean).ravel() for _, mean, precision in leaves])
        return pulls, jnp.concatenate([precision.ravel() for *_, precision in leaves])

    def check(self, theta: Params) -> None:
        """Refuse a prior that does not fit θ: other structure or shapes, or numbers out of range.

        Precisions must be finite and ≥ 0, means finite, as θ's accumulation dtype has them.
        """
        dtype = _common_dtype(theta)
        for name, tree, least in (("mean", self.mean, -np.inf), ("precision", self.precision, 0.0)):
            field = f"prior.{name}"
            for path, _, value in _match(field, tree, theta):
                with np.errstate(over="ignore"):
                    kept = np.asarray(value).astype(dtype)
                _check_range(field + path, np.asarray(value), least, kept)

    def restrict(self, params: Any, is_trained: Callable[[Any], bool]) -> "NormalPrior":
        """The prior of the leaves that are trained, if it was given for all leaves of params."""

        def trained(tree: Any) -> Any:
            structures: list[Any] = [jax.tree.structure(one) for one in (tree, params)]
            if structures[0] != structures[1]:
                return tree  # a number for all of them, or of trained leaves alone
            return jax.tree.map(
                lambda leaf, value: value if is_trained(leaf) else None, params, tree
            )

        return NormalPrior(trained(self.mean), trained(self.precision))

    def _leaves(self, theta: Params, dtype: Any) -> Iterator[tuple[Array, Array, Array]]:
        """Each array of θ, with means and precisions of its shape."""
        means = _match("prior.mean", self.mean, theta)
        precisions = _match("prior.precision", self.precision, theta)
        for (_, leaf, mean), (*_, precision) in zip(means, precisions, strict=True):
            shape = jnp.shape(leaf)
            yield (
                leaf,
                jnp.broadcast_to(jnp.asarray(mean, dtype), shape),
                jnp.broadcast_to(jnp.asarray(precision, dtype), shape),
            )


def normal_prior(mean: PyTree = 0.0, *, sd: PyTree = None, precision: PyTree = None) -> NormalPrior:
    """Make the prior θ_j ~ N(m₀_j, sd_j²), independently for all parameters.

    log p(θ) = −½ Σ_j (θ_j − m₀_j)²/sd_j², up to a constant. It is part of the global posterior and
    counted once, however many clients and examples there are; a regularizer counts n times.

    Args:
        mean: m₀: a number; or a pytree like the parameters, of numbers or of arrays that broadcast
            to them. Default: 0.
        sd: Standard deviations > 0, in the same form.
        precision: 1/sd² ≥ 0 in their place; 0 is flat.
    Returns:
        The prior, for `fedpa.fit(…, prior=…)` and `fedpa.Objective(loss, prior=…)`.
    Raises:
        FedpaError: Not exactly one of `sd` and `precision` is given, or a number is out of range.
    Example:
        >>> prior = fedpa.normal_prior(sd={"w": 2.0, "b": 10.0})
        >>> theta = {"w": jnp.ones(3), "b": jnp.zeros(())}
        >>> prior.log_density(theta).item(), [round(x, 2) for x in prior.natural(theta)[1].tolist()]
        (-0.375, [0.01, 0.25, 0.25, 0.25])
    """
    if sd is None and precision is None:
        raise refuse("sd", sd, "give sd or precision: fedpa.normal_prior(sd=2.0)")
    if sd is not None and precision is not None:
        raise refuse("precision", precision, "is 1/sd², and sd is given, too: give one of them")
    for path, value in _list_leaves(mean):
        if not path or _is_number(value):  # a model may have other leaves
            _check_range("mean" + path, _as_number("mean" + path, value), -np.inf)
    if sd is None:
        for path, value in _list_leaves(precision):
            _check_range("precision" + path, _as_number("precision" + path, value), 0.0)
        return NormalPrior(mean, precision)
    for path, value in _list_leaves(sd):
        number = _as_number("sd" + path, value)
        with np.errstate(divide="ignore", over="ignore"):
            inverse = 1 / number**2
        # Positive, and with a precision that is a positive number, too.
        bad = ~((number > 0) & np.isfinite(inverse) & (inverse > 0))
        _check("sd" + path, number, bad, "must be a finite number > 0")
    return NormalPrior(mean, jax.tree.map(_invert_square, sd))


def _invert_square(sd: Any) -> Any:
    """1/sd²: a number of a number, an array of an array."""
    return 1 / (np.asarray(sd, np.float64) ** 2 if np.ndim(sd) else float(sd) ** 2)


def _common_dtype(theta: Params) -> Any:
    dtypes = [accumulation_dtype(leaf.dtype) for leaf in jax.tree.leaves(theta)]
    return functools.reduce(np.promote_types, dtypes)


def _match(field: str, tree: Any, theta: Params) -> Iterator[tuple[str, Any, Any]]:
    """The path of each array of θ, the array, and what `tree` has for it.

    Raises:
        FedpaError: The tree has another structure, or something that does not broadcast.
    """
    leaves = _list_leaves(theta)
    structure = jax.tree.structure(theta)
    if _is_number(tree) and np.ndim(tree) == 0:
        yield from (("", leaf, tree) for _, leaf in leaves)
        return
    found: Any = jax.tree.structure(tree)
    if found != structure:
        raise FedpaError(
            f"{field} has leaves {_name_leaves(tree)}: must be a number, or have the structure of "
            f"params, {_name_leaves(theta)}"
        )
    for (path, leaf), value in zip(leaves, jax.tree.leaves(tree), strict=True):
        if not _is_number(value):
            raise refuse(field + path, value, "must be a number or an array of numbers")
        shape, wanted = np.shape(value), np.shape(leaf)
        aligned = zip(shape[::-1], wanted[::-1], strict=False)
        if len(shape) > len(wanted) or any(a not in (1, b) for a, b in aligned):
            raise FedpaError(f"{field}{path} has shape {shape}: must broadcast to params' {wanted}")
        yield path, leaf, value


def _list_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Each leaf with its path, as messages have it."""
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _name_leaves(tree: Any) -> str:
    names = [path or "one array" for path, _ in _list_leaves(tree)]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _is_number(value: Any) -> bool:
    """Whether it is a real number or an array of them."""
    if isinstance(value, bool) or not isinstance(
        value, int | float | np.generic | np.ndarray | Array
    ):
        return False
    return isinstance(value, int | float) or (is_real(value.dtype) and value.dtype != np.bool_)


def _as_number(field: str, value: Any) -> np.ndarray:
    if not _is_number(value):
        raise refuse(field, value, "must be a number or an array of numbers")
    return np.asarray(value, np.float64)


def _check_range(
    field: str, values: np.ndarray, least: float, kept: np.ndarray | None = None
) -> None:
    """Refuse numbers that are not finite, also as they are kept, or below `least`."""
    of_type = "" if kept is None else f" in {kept.dtype}"
    kept = values if kept is None else kept
    bound = "" if least == -np.inf else f" ≥ {least:g}"
    bad = ~(np.isfinite(kept) & (kept >= least))
    _check(field, values, bad, f"must be a finite number{bound}{of_type}")


def _check(field: str, values: np.ndarray, bad: np.ndarray, expected: str) -> None:
    """Refuse the first of the values that is bad."""
    if bad.any():
        place = np.unravel_index(np.argmax(bad), bad.shape)
        index = "".join(f"[{i}]" for i in place)
        raise refuse(field + index, float(values[place]), expected)
