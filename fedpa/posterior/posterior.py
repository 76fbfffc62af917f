"""What comes out: a Gaussian posterior over a model's parameters."""

import importlib
import math
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.algorithms.sites import LARGEST_DENSE
from fedpa.errors import FedpaError, check_integer, refuse
from fedpa.posterior.prediction import (
    BATCH,
    DRAWS,
    LEVELS,
    Kind,
    Noise,
    Prediction,
    Predictor,
    Settings,
    predict,
)
from fedpa.precision import ravel
from fedpa.precisions.diagonal import Diagonal
from fedpa.precisions.gaussian import Gaussian
from fedpa.training.history import History
from fedpa.training.problem import split_params
from fedpa.types import ClientArrays, Key, Model


class Posterior(NamedTuple):
    """A Gaussian posterior N(μ, Λ⁻¹) over a model's parameters, as `fedpa.infer` returns it.

    Printed, it is a table of means and standard deviations.

    Args:
        gaussian: η and Λ over the parameters ravelled in tree order.
        model: The model as it was given: structure, dtypes, and leaves that are no parameters.
        sites: Client id → the Gaussian that stands for its likelihood, where clients keep it.
        history: One record per round.
        converged: Whether the rounds ended by the convergence rule; the product has none.
    Example:
        >>> gaussian = Gaussian(jnp.array([2.0, 0.0]), Diagonal(jnp.array([4.0, 1.0])))
        >>> posterior = Posterior(gaussian, {"w": np.zeros(2, np.float32)})
        >>> posterior.mean["w"].tolist(), posterior.sd["w"].tolist()
        ([0.5, 0.0], [0.5, 1.0])
        >>> posterior.sample(jax.random.key(0), 10)["w"].shape
        (10, 2)
    """

    gaussian: Gaussian
    model: Model
    sites: Mapping[str, Gaussian] = MappingProxyType({})
    history: History = History()
    converged: bool = True

    @property
    def mean(self) -> Model:
        """μ, as a model."""
        return self.restore(self.gaussian.mean)

    @property
    def sd(self) -> Model:
        """Each parameter's standard deviation, in the model's structure."""
        return self.restore(self.gaussian.sd)

    def covariance(self) -> jax.Array:
        """Λ⁻¹, d×d, in the order of the parameters ravelled.

        Raises:
            FedpaError: There are more than 2,000 parameters.
        """
        d = len(self.gaussian.eta)
        if d > LARGEST_DENSE:
            raise FedpaError(
                f"covariance() of {d:,} parameters would be a matrix of {d:,} × {d:,}, and the "
                f"most is {LARGEST_DENSE:,}: use sd, or sample(key, num)"
            )
        if isinstance(self.gaussian.precision, Diagonal):
            return jnp.diag(self.gaussian.sd**2)
        return self.gaussian.root @ self.gaussian.root.T

    def sample(self, key: Key, num: int) -> Model:
        """Draw models: the structure of the model, a first axis over draws at each parameter.

        Args:
            key: The draws' randomness.
            num: How many, ≥ 1.
        """
        check_integer("num", num, 1)
        noise = jax.random.normal(key, (num, len(self.gaussian.eta)), self.gaussian.eta.dtype)
        return self.restore(self.gaussian.draw(noise))

    def predict(
        self,
        f: Predictor,
        x: ClientArrays,
        key: Key | None = None,
        *,
        kind: Kind = "mean",
        draws: int = DRAWS,
        linearized: bool = False,
        noise: Noise | None = None,
        levels: Sequence[float] = LEVELS,
        batch_size: int = BATCH,
    ) -> Prediction:
        """Predict with all that the posterior holds possible, not with its mean alone.

        By Monte Carlo: means, standard deviations and quantiles over f(θ_s, x) of the draws
        θ_1 … θ_S = `sample(key, draws)`. Linearized: f is replaced by its tangent at the mean,
        which needs no draws; exact where f is linear in the parameters. Examples are streamed:
        memory is that of the draws, of one batch and of the answer.

        Args:
            f: `f(params, x)`: for each example of x, on its own, a number, shape (b,), or k of
                them, (b, k).
            x: A pytree of arrays whose first axis counts examples.
            key: The draws' randomness; linearized, none is needed.
            kind: What f returns: the "mean" of a regression; "logits" or "probabilities" of k
                classes, or of the label 1 of two, shape (b,).
            draws: S ≥ 2; default: 1,000.
            linearized: Whether f is linearized at the mean. Probabilities of classes are then by
                the probit approximation, σ(m / √(1 + π/8 · variance)) of their log-odds.
            noise: Of a new observation of a regression: its standard deviation σ ≥ 0, or a
                function params → σ if the model has it; `fedpa.posterior.estimate_noise` estimates
                it.
            levels: Which intervals are kept, each between 0 and 1.
            batch_size: Examples at a time, ≥ 1; fewer if their Jacobians would be too large.
        Returns:
            The prediction: `mean`, `sd`, `interval(level)`, and with noise `observation_sd` and
            `observation_interval(level)`.
        Raises:
            FedpaError: An argument is out of range, or f returns another shape.
        Example:
            >>> gaussian = Gaussian(jnp.array([2.0, 0.0]), Diagonal(jnp.array([4.0, 1.0])))
            >>> posterior = Posterior(gaussian, np.zeros(2, np.float32))
            >>> x = np.array([[2.0, 0.0], [0.0, 3.0]], np.float32)
            >>> def f(w, x):
            ...     return x @ w
            >>> posterior.predict(f, x, linearized=True, noise=4.0)
            Prediction of 2 examples: value of f, mean ± sd, 95 % interval (of a new observation)
               0           1 ± 1   -0.96 … 2.96   (-7.081 … 9.081)
               1           0 ± 3   -5.88 … 5.88   (-9.8 … 9.8)
            >>> posterior.predict(f, x, jax.random.key(0), kind="logits").interval(0.9).lower.shape
            (2,)
        """
        settings = Settings(kind, draws, linearized, noise, levels, batch_size)
        return predict(self.gaussian, self.model, f, x, key, settings)

    def to_arviz(self, key: Key, draws: int = DRAWS, chains: int = 4) -> Any:
        """Draw models as ArviZ's InferenceData, for its tables and figures.

        The draws are independent: chains are there because ArviZ expects them, and say nothing
        about convergence. `history` has R̂ of the clients' chains.

        Args:
            key: The draws' randomness.
            draws: Of each chain, ≥ 1; default: 1,000.
            chains: ≥ 1; default: 4.
        Returns:
            InferenceData with the group `posterior`: a variable for each array of parameters, with
            dimensions chain, draw and its own.
        Raises:
            FedpaError: ArviZ is not installed.
        """
        check_integer("draws", draws, 1)
        check_integer("chains", chains, 1)
        arviz = _import_arviz()
        theta, _ = split_params(self.sample(key, chains * draws))
        variables = {
            name_leaf(path): np.asarray(leaf).reshape(chains, draws, *leaf.shape[1:])
            for path, leaf in jax.tree_util.tree_leaves_with_path(theta)
        }
        attributes = {"inference_library": "fedpa", "inference_library_version": version("fedpa")}
        return arviz.from_dict(posterior=variables, posterior_attrs=attributes)

    def leave_out(self, client: str) -> "Posterior":
        """The posterior without one client: q / t_i, from its site.

        Raises:
            FedpaError: There is no such client, or clients keep no sites in this method.
        """
        self.check_sites()
        if client not in self.sites:
            raise refuse("client", client, f"must be one of {', '.join(list(self.sites)[:10])}")
        others = {name: site for name, site in self.sites.items() if name != client}
        return self._replace(gaussian=self.gaussian.divide(self.sites[client]), sites=others)

    def check_sites(self) -> None:
        """Refuse a posterior without sites."""
        if not self.sites:
            raise FedpaError(
                "this posterior has no sites: infer with method 'ep' or 'pvi' on a local engine "
                "keeps each client's"
            )

    def restore(self, vectors: jax.Array) -> Model:
        """Vectors of all parameters, (d,) or (s, d), in the model's structure and dtypes."""
        theta, assemble = split_params(self.model)
        _, restore = ravel(theta)
        return assemble(restore(vectors) if vectors.ndim == 1 else jax.vmap(restore)(vectors))

    def __repr__(self) -> str:
        """A line for each parameter, of at most `LINES`."""
        means, sds = np.asarray(self.gaussian.mean), np.asarray(self.gaussian.sd)
        names = name_parameters(self.model)
        width = max(map(len, names[:LINES]), default=0)
        shown = [
            f"  {name:<{width}}  {mean:10.4g} ± {sd:.3g}"
            for name, mean, sd in zip(names[:LINES], means, sds, strict=False)
        ]
        if len(names) > LINES:
            shown.append(f"  … {len(names) - LINES:,} more")
        count = len(self.history)
        rounds = f"{count or 'no'} round{'' if count == 1 else 's'}"
        state = "" if self.converged else ", not converged"
        title = f"Posterior of {len(names):,} parameters, mean ± sd ({rounds}{state})"
        return "\n".join([title, *shown])


LINES = 20


def name_parameters(model: Model) -> list[str]:
    """A name for each entry of the parameters ravelled: w[0], w[1], b."""
    theta, _ = split_params(model)
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(theta):
        name = name_leaf(path)
        shape = np.shape(leaf)
        places = np.ndindex(*shape) if math.prod(shape) < MOST_NAMES else [()] * math.prod(shape)
        names += [name + (f"[{','.join(map(str, place))}]" if place else "") for place in places]
    return names


MOST_NAMES = 100_000


def name_leaf(path: Any) -> str:
    """An array's name by its path in the model: layers.0.weight; θ, if it is all there is."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "θ"


def _import_arviz() -> Any:
    try:
        with warnings.catch_warnings():
            # It announces its next major version, once a day.
            warnings.simplefilter("ignore", FutureWarning)
            return importlib.import_module("arviz")
    except ImportError as error:
        raise FedpaError("arviz is not installed: pip install 'fedpa[arviz]' brings it") from error
