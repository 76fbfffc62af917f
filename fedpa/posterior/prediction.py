"""Prediction with a posterior: the mean over draws, or the model linearized at the mean.

    Monte Carlo:  p(y | x, D) ≈ 1/S Σ_s p(y | x, θ_s),  θ_s ~ N(μ, Σ)
    linearized:   f(θ, x) ≈ f(μ, x) + J(x)(θ − μ), so that f ~ N(f(μ, x), J Σ Jᵀ)

Linearized, regression is exact Gaussian algebra. In classification, what is linearized is each
class's log-odds, z_c − log Σ_{k≠c} exp z_k of the logits z, with mean m_c and variance v_c. Its
probability is MacKay's (1992) probit approximation σ(m_c / √(1 + π/8 · v_c)), divided by the sum
over classes: off by at most 0.02 for a single logit. (Scaling each logit by its own variance, and
then the softmax, is not invariant to a number added to all logits; against the integral over
Gaussian logits its error was 1.3 to 20 times as large, for 2 to 10 classes.) Log-odds of three or
more classes are curved: where logits have standard deviations near 1, those of the probabilities
are off by up to 40 %, their means by 0.03; draws are not.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import NormalDist
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from fedpa.errors import (
    FedpaError,
    check_integer,
    check_number,
    check_takes,
    refuse,
    refuse_type,
)
from fedpa.objectives.client_data import check_examples, num_rows
from fedpa.posterior.density import Density
from fedpa.precision import ravel, widen
from fedpa.types import ClientArrays, Examples, Model, Params, Scalar

Kind = Literal["mean", "logits", "probabilities"]
"""What f returns."""
Predictor = Callable[[Model, Examples], Any]
"""`f(params, x)`: a number, or a number per class, for each example of x, on its own."""
Noise = float | Callable[[Model], Scalar]
"""A standard deviation, or the model's."""

DRAWS = 1000
BATCH = 128
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
TOGETHER = 100
"""Draws that are computed together."""
BUDGET = 2**24
"""Numbers of Jacobians that are held at a time."""
NODES = 32
"""Of the quadrature for the standard deviation of a probability."""
CLOSE = 1e-3
"""By how much probabilities may miss 1."""
LINES = 10


class Interval(NamedTuple):
    """A central interval for each example: as much probability lies below as above it.

    Args:
        lower: Of the shape of the prediction's mean.
        upper: The same.
    Example:
        >>> Interval(np.array([0.1]), np.array([0.4])).upper.tolist()
        [0.4]
    """

    lower: np.ndarray
    upper: np.ndarray


class Prediction(NamedTuple):
    """What a posterior predicts for each of n examples, from `Posterior.predict`.

    Printed, it is a table. Arrays have shape (n,), or (n, k) for k classes or outputs.

    Args:
        kind: What f returned: "mean", "logits" or "probabilities".
        mean: The predicted mean; of a classifier the probability of each class, or of the label 1.
        sd: How uncertain that is, since θ is: the standard deviation of f, or of the probabilities.
        observation_sd: The standard deviation of a new observation, √(sd² + noise²); None without
            noise.
        intervals: Level → the interval of f, or of the probabilities.
        observation_intervals: Level → the interval of a new observation; empty without noise.
    Example:
        >>> half = {0.95: Interval(np.array([0.3]), np.array([0.7]))}
        >>> prediction = Prediction("logits", np.array([0.5]), np.array([0.1]), intervals=half)
        >>> prediction.interval(0.95).lower.tolist()
        [0.3]
    """

    kind: Kind
    mean: np.ndarray
    sd: np.ndarray
    observation_sd: np.ndarray | None = None
    intervals: Mapping[float, Interval] = MappingProxyType({})
    observation_intervals: Mapping[float, Interval] = MappingProxyType({})

    def interval(self, level: float = 0.95) -> Interval:
        """The interval in which f, or the probability, lies with this probability.

        Raises:
            FedpaError: The level is not one of `predict(…, levels=…)`.
        """
        return _look_up(self.intervals, level)

    def observation_interval(self, level: float = 0.95) -> Interval:
        """The interval in which a new observation lies with this probability.

        Raises:
            FedpaError: The level is not one of `predict(…, levels=…)`, or there is no noise.
        """
        if not self.observation_intervals:
            raise FedpaError(
                "this prediction has no noise, so that a new observation's spread is not known: "
                "give predict(…, noise=…) with kind='mean'"
            )
        return _look_up(self.observation_intervals, level)

    def __repr__(self) -> str:
        """A line for each example, of at most `LINES`."""
        level = min(self.intervals, key=lambda level: abs(level - 0.95), default=None)
        what = "value of f" if self.kind == "mean" else "probability"
        count = f"{len(self.mean):,} example{'' if len(self.mean) == 1 else 's'}"
        title = f"Prediction of {count}: {what}, mean ± sd"
        if level is not None:
            title += f", {100 * level:g} % interval"
            title += " (of a new observation)" if self.observation_intervals else ""
        places = [self._show(row) for row in range(min(LINES, len(self.mean)))]
        lines = [line for row in places for line in self._describe(row, level)]
        more = len(self.mean) - LINES
        return "\n".join([title, *lines, *([f"  … {more:,} more"] if more > 0 else [])])

    def _show(self, row: int) -> list[tuple[int, ...]]:
        """Which numbers of an example are shown: all outputs, or the most probable class."""
        if self.mean.ndim == 1:
            return [(row,)]
        if self.kind == "mean":
            return [(row, column) for column in range(self.mean.shape[1])]
        return [(row, int(np.argmax(self.mean[row])))]

    def _describe(self, places: list[tuple[int, ...]], level: float | None) -> Iterator[str]:
        for place in places:
            named = f"{place[0]:4}"
            if len(place) == 2:
                named += f" {'output' if self.kind == 'mean' else 'class'} {place[1]}"
            line = f"{named}  {self.mean[place]:10.4g} ± {self.sd[place]:.3g}"
            if level is not None:
                interval = self.intervals[level]
                line += f"   {interval.lower[place]:.4g} … {interval.upper[place]:.4g}"
            if level is not None and self.observation_intervals:
                interval = self.observation_intervals[level]
                line += f"   ({interval.lower[place]:.4g} … {interval.upper[place]:.4g})"
            yield line


def _look_up(intervals: Mapping[float, Interval], level: float) -> Interval:
    for kept, interval in intervals.items():
        if isinstance(level, int | float) and math.isclose(kept, level):
            return interval
    kept_levels = ", ".join(f"{kept:g}" for kept in intervals) or "none"
    raise refuse(
        "level", level, f"this prediction has {kept_levels}: predict(…, levels=({level},)) keeps it"
    )


class Settings(NamedTuple):
    """How to predict; `Posterior.predict` says what each of them is."""

    kind: Any
    draws: Any
    linearized: bool
    noise: Any
    levels: Any
    batch_size: Any


class _Part(NamedTuple):
    """What is predicted for a batch; the axis over examples is the first."""

    mean: Any
    sd: Any
    bounds: Any
    """A last axis: the lower ends of all levels, then the upper ones."""
    observation_sd: Any = None
    observation_bounds: Any = None


def predict(
    density: Density,
    model: tuple[Params, Any],
    f: Any,
    x: ClientArrays,
    key: Any,
    settings: Settings,
) -> Prediction:
    """`Posterior.predict` for this density over the first part of a model, its θ."""
    levels = _check_settings(settings, key)
    check_takes("f", f, "(params, x)")
    if not bool(density.is_proper):
        raise FedpaError(
            "this posterior's precision is not positive definite: it is no density, and predicts "
            "nothing"
        )
    arrays, found = check_examples(x, lambda row: "x")
    if not len(arrays[0]):
        raise FedpaError("x has no examples: at least one is needed")
    examples = jax.tree.unflatten(found.structure, arrays)
    # What is no parameter may be anything, also a function; filter_jit keeps it as it is.
    theta, rest = model
    outputs = _check_outputs(f, theta, rest, examples, settings)
    size = min(settings.batch_size, len(arrays[0]))
    _, restore = ravel(theta)
    if settings.linearized:
        size = min(size, max(1, BUDGET // (math.prod(outputs) * len(density.mean))))
        thetas = jax.vmap(restore)(density.mean[None])
    else:
        thetas = jax.vmap(restore)(density.sample(key, settings.draws))
    noises = _noise_of_models(settings.noise, thetas, rest)

    def summarize(batch: Any) -> _Part:
        if not settings.linearized:
            return _simulate(f, thetas, rest, batch, noises, settings.kind, levels)
        value, covariance = (
            np.asarray(a, np.float64) for a in _linearize(f, density, theta, rest, batch)
        )
        if settings.kind == "mean":
            return _describe_means(value, covariance, noises, levels)
        return _describe_classes(value, covariance, levels)

    parts = [jax.device_get(summarize(batch)) for batch in _batches(examples, size)]

    def join(*pieces: np.ndarray) -> np.ndarray:
        return np.concatenate(pieces)[: len(arrays[0])]

    whole: _Part = jax.tree.map(join, *parts)
    return Prediction(
        settings.kind,
        whole.mean,
        whole.sd,
        whole.observation_sd,
        _intervals(whole.bounds, levels),
        _intervals(whole.observation_bounds, levels),
    )


def _check_settings(settings: Settings, key: Any) -> tuple[float, ...]:
    """The levels, if all is as it must be."""
    kind, noise = settings.kind, settings.noise
    if kind not in get_args(Kind):
        raise refuse_type("kind", kind, Kind)
    if settings.linearized and kind == "probabilities":
        raise refuse("kind", kind, "linearized, logits are needed: let f return them")
    check_integer("draws", settings.draws, 2)
    check_integer("batch_size", settings.batch_size, 1)
    if not settings.linearized and not isinstance(key, jax.Array):
        raise refuse("key", key, "must be a key, for example jax.random.key(0)")
    if noise is not None and kind != "mean":
        raise refuse("noise", noise, f"is of a regression, kind='mean', and kind is {kind!r}")
    if callable(noise):
        check_takes("noise", noise, "(params)")
    elif noise is not None:
        check_number("noise", noise)
    levels = settings.levels
    if not isinstance(levels, tuple | list):
        raise refuse("levels", levels, "must be a tuple of numbers, for example (0.9, 0.95)")
    for place, level in enumerate(levels):
        if not isinstance(level, int | float) or not 0 < level < 1:
            raise refuse(f"levels[{place}]", level, "must be a number between 0 and 1")
    return tuple(map(float, levels))


def _check_outputs(
    f: Any, theta: Params, rest: Any, examples: Any, settings: Settings
) -> tuple[int, ...]:
    """What f returns for one example, () or (k,), if it is of the kind."""
    b = min(settings.batch_size, num_rows(examples))
    batch = jax.tree.map(lambda a: jnp.asarray(a[:b]), examples)
    found = jax.eval_shape(lambda theta, x: f(eqx.combine(theta, rest), x), theta, batch)
    shape = getattr(found, "shape", None)
    is_float = shape is not None and jnp.issubdtype(found.dtype, jnp.floating)
    if shape is None or not is_float or len(shape) not in (1, 2) or shape[0] != b:
        got = f"shape {shape}" if shape is None or is_float else f"type {found.dtype}"
        raise FedpaError(
            f"f returns {got} for {b} examples: it must return floating-point numbers of shape "
            f"({b},), or ({b}, k) for k classes or outputs"
        )
    if settings.kind != "mean" and shape[1:] == (1,):
        raise FedpaError(
            f"f returns shape {shape}, one class: for two classes return the logit or probability "
            f"of the label 1 alone, shape ({b},)"
        )
    if settings.kind == "probabilities":
        values = np.asarray(f(eqx.combine(theta, rest), batch), np.float64)
        classes = values if values.ndim == 2 else np.stack([1 - values, values], axis=1)
        good = (classes >= -CLOSE).all(axis=1) & np.isclose(classes.sum(axis=1), 1, atol=CLOSE)
        if not good.all():
            row = int(np.argmin(good))
            raise FedpaError(
                f"f returns {np.array2string(values[row], precision=3)} for x[{row}]: these are no "
                "probabilities. Give kind='logits', or let f return a softmax"
            )
    return tuple(shape[1:])


def _noise_of_models(noise: Any, thetas: Params, rest: Any) -> Any:
    """The noise's standard deviation of each model, (s,); None where there is none."""
    if noise is None:
        return None
    count = len(jax.tree.leaves(thetas)[0])
    if not callable(noise):
        return jnp.full(count, noise, jnp.float32)
    sds = jax.lax.map(lambda theta: jnp.asarray(noise(eqx.combine(theta, rest))), thetas)
    if sds.shape != (count,):
        raise FedpaError(f"noise returns shape {sds.shape[1:]} for a model: must be one number")
    values = np.asarray(sds, np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        worst = float(values[np.argmin(np.where(np.isfinite(values), values, -np.inf))])
        raise refuse(
            "noise", worst, "the model's must be a finite number ≥ 0 (its logarithm, exp?)"
        )
    return sds.astype(jnp.float32)


def _batches(examples: Any, size: int) -> Iterator[Any]:
    """Batches of one size; the last is padded by repeating the last example."""
    n = num_rows(examples)
    for start in range(0, n, size):
        rows = np.minimum(np.arange(start, start + size), n - 1)
        yield jax.tree.map(lambda a: jnp.asarray(a[rows]), examples)


def _intervals(bounds: np.ndarray | None, levels: tuple[float, ...]) -> dict[float, Interval]:
    if bounds is None:
        return {}
    num = len(levels)
    return {
        level: Interval(bounds[..., place], bounds[..., num + place])
        for place, level in enumerate(levels)
    }


@eqx.filter_jit
def _simulate(
    f: Any, thetas: Params, rest: Any, x: Any, noises: Any, kind: str, levels: tuple[float, ...]
) -> _Part:
    """Mean, sd and quantiles over draws."""

    def respond(theta: Params) -> jax.Array:
        value: jax.Array = widen(f(eqx.combine(theta, rest), x))
        if kind != "logits":
            return value
        return jax.nn.softmax(value) if value.ndim == 2 else jax.nn.sigmoid(value)

    values = jax.lax.map(respond, thetas, batch_size=TOGETHER)
    ends = [(1 - level) / 2 for level in levels] + [(1 + level) / 2 for level in levels]

    def quantiles(values: jax.Array) -> jax.Array:
        found = jnp.quantile(values, jnp.asarray(ends, values.dtype), axis=0)
        return jnp.moveaxis(found, 0, -1)

    mean, sd = jnp.mean(values, axis=0), jnp.std(values, axis=0, ddof=1)
    if noises is None:
        return _Part(mean, sd, quantiles(values))
    # Draws are independent of their order, so that the noise may come as quantiles, in order.
    order = (jnp.arange(len(values), dtype=jnp.float32) + 0.5) / len(values)
    added = (noises * ndtri(order)).astype(values.dtype)
    observed = values + added.reshape(-1, *[1] * (values.ndim - 1))
    observation_sd = jnp.sqrt(sd**2 + jnp.mean(noises**2).astype(sd.dtype))
    return _Part(mean, sd, quantiles(values), observation_sd, quantiles(observed))


@eqx.filter_jit
def _linearize(
    f: Any, density: Density, theta: Params, rest: Any, x: Any
) -> tuple[jax.Array, jax.Array]:
    """f at the mean, (b,) or (b, k), and JΣJᵀ of each example, (b, k, k)."""
    _, restore = ravel(theta)

    def respond(v: jax.Array, example: Any) -> jax.Array:
        one = jax.tree.map(lambda a: a[None], example)
        value: jax.Array = widen(f(eqx.combine(restore(v), rest), one))[0]
        return value

    mean = density.mean
    values = jax.vmap(respond, (None, 0))(mean, x)
    jacobians = jax.vmap(jax.jacrev(respond), (None, 0))(mean, x).astype(mean.dtype)
    return values, density.covariances(jacobians.reshape(len(values), -1, len(mean)))


def _describe_means(
    mean: np.ndarray, covariance: np.ndarray, noises: Any, levels: tuple[float, ...]
) -> _Part:
    sd = np.sqrt(np.diagonal(covariance, axis1=1, axis2=2)).reshape(mean.shape)
    steps = _steps(levels)
    bounds = mean[..., None] + sd[..., None] * steps
    if noises is None:
        return _Part(mean, sd, bounds)
    observation_sd = np.sqrt(sd**2 + float(noises[0]) ** 2)
    observed = mean[..., None] + observation_sd[..., None] * steps
    return _Part(mean, sd, bounds, observation_sd, observed)


def _describe_classes(
    logits: np.ndarray, covariance: np.ndarray, levels: tuple[float, ...]
) -> _Part:
    if logits.ndim == 1:
        odds, spread = logits, np.sqrt(covariance[:, 0, 0])
    else:
        odds, gradient = _log_odds(logits)
        spread = np.sqrt(np.einsum("bck,bkl,bcl->bc", gradient, covariance, gradient))
    mean = _sigmoid(odds / np.sqrt(1 + math.pi / 8 * spread**2))
    if logits.ndim == 2:
        mean = mean / mean.sum(axis=1, keepdims=True)
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    weights = weights / weights.sum()
    at_nodes = _sigmoid(odds[..., None] + spread[..., None] * nodes)
    sd = np.sqrt((at_nodes - (at_nodes @ weights)[..., None]) ** 2 @ weights)
    return _Part(mean, sd, _sigmoid(odds[..., None] + spread[..., None] * _steps(levels)))


def _log_odds(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each class's z_c − log Σ_{k≠c} exp z_k, (b, c), and its derivatives by z, (b, c, k)."""
    classes = logits.shape[1]
    itself = np.eye(classes, dtype=bool)
    others = np.where(itself, -np.inf, logits[:, None, :])
    highest = others.max(axis=2)
    total = highest + np.log(np.exp(others - highest[..., None]).sum(axis=2))
    return logits - total, itself - _softmax(others)


def _softmax(z: np.ndarray) -> np.ndarray:
    powers = np.exp(z - z.max(axis=-1, keepdims=True))
    shares: np.ndarray = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def _sigmoid(z: np.ndarray) -> np.ndarray:
    share: np.ndarray = 0.5 * (1 + np.tanh(0.5 * z))
    return share


def _steps(levels: tuple[float, ...]) -> np.ndarray:
    """The ends of the levels' central intervals, in standard deviations."""
    upper = np.array([NormalDist().inv_cdf((1 + level) / 2) for level in levels])
    return np.concatenate([-upper, upper])
