"""What comes out: a posterior over a model's parameters."""

import importlib
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedpa.algorithms.sites import LARGEST_DENSE
from fedpa.errors import FedpaError, check_integer, refuse
from fedpa.posterior.density import Density
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
from fedpa.precisions.gaussian import Gaussian
from fedpa.training.history import History
from fedpa.training.problem import split_params
from fedpa.types import ClientArrays, Key, Model, Params


class Posterior(NamedTuple):
    """A posterior over a model's parameters: of `fedpa.infer` or `fedpa.laplace_posterior`.

    Printed, it is a table of means and standard deviations.

    Args:
        density: Over the parameters ravelled in tree order: a Gaussian, or another of
            `fedpa.posterior.Density`.
        model: The model: structure, dtypes, leaves that are no parameters, and parameters that
            `over` does not name.
        sites: Client id → the Gaussian that stands for its likelihood, where clients keep it.
        history: One record per round.
        converged: Whether the rounds ended by the convergence rule; the product has none.
        over: Names of the parameters that it is over, as `name_leaf` has them; the others are known
            exactly. Default: all.
    Example:
        >>> from fedpa.precisions import Diagonal
        >>> gaussian = Gaussian(jnp.array([2.0, 0.0]), Diagonal(jnp.array([4.0, 1.0])))
        >>> posterior = Posterior(gaussian, {"w": np.zeros(2, np.float32)})
        >>> posterior.mean["w"].tolist(), posterior.sd["w"].tolist()
        ([0.5, 0.0], [0.5, 1.0])
        >>> posterior.sample(jax.random.key(0), 10)["w"].shape
        (10, 2)
    """

    density: Density
    model: Model
    sites: Mapping[str, Gaussian] = MappingProxyType({})
    history: History = History()
    converged: bool = True
    over: tuple[str, ...] | None = None

    @property
    def mean(self) -> Model:
        """μ, as a model."""
        return self.restore(self.density.mean)

    @property
    def sd(self) -> Model:
        """Each parameter's standard deviation, in the model's structure; 0 if not in `over`."""
        theta, rest = split_model(self.model, self.over)
        known = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_inexact_array(x) else x, rest)
        return eqx.combine(ravel(theta)[1](self.density.sd), known)

    def covariance(self) -> jax.Array:
        """Λ⁻¹, d×d, in the order of the parameters ravelled.

        Raises:
            FedpaError: There are more than 2,000 parameters.
        """
        d = len(self.density.mean)
        if d > LARGEST_DENSE:
            raise FedpaError(
                f"covariance() of {d:,} parameters would be a matrix of {d:,} × {d:,}, and the "
                f"most is {LARGEST_DENSE:,}: use sd, or sample(key, num)"
            )
        return self.density.covariances(jnp.eye(d, dtype=self.density.mean.dtype)[None])[0]

    def sample(self, key: Key, num: int) -> Model:
        """Draw models: the structure of the model, a first axis over draws at each parameter.

        Args:
            key: The draws' randomness.
            num: How many, ≥ 1.
        """
        check_integer("num", num, 1)
        return self.restore(self.density.sample(key, num))

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
            >>> from fedpa.precisions import Diagonal
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
        return predict(self.density, split_model(self.model, self.over), f, x, key, settings)

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
        q = self.check_sites()
        if client not in self.sites:
            raise refuse("client", client, f"must be one of {', '.join(list(self.sites)[:10])}")
        others = {name: site for name, site in self.sites.items() if name != client}
        return self._replace(density=q.divide(self.sites[client]), sites=others)

    def check_sites(self) -> Gaussian:
        """q, the product of the prior and the sites; a posterior without sites is refused."""
        if not self.sites or not isinstance(self.density, Gaussian):
            raise FedpaError(
                "this posterior has no sites: infer with method 'ep' or 'pvi' on a local engine "
                "keeps each client's"
            )
        return self.density

    def restore(self, vectors: jax.Array) -> Model:
        """Vectors of the parameters, (d,) or (s, d), in the model's structure and dtypes."""
        theta, rest = split_model(self.model, self.over)
        _, restore = ravel(theta)
        return eqx.combine(
            restore(vectors) if vectors.ndim == 1 else jax.vmap(restore)(vectors), rest
        )

    def __repr__(self) -> str:
        """A line for each parameter, of at most `LINES`."""
        means, sds = np.asarray(self.density.mean), np.asarray(self.density.sd)
        names = name_parameters(split_model(self.model, self.over)[0])
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


def split_model(model: Model, over: Collection[str] | None = None) -> tuple[Params, Any]:
    """The parameters that a posterior is over, and the rest; `eqx.combine` puts them together."""
    theta, assemble = split_params(model)
    return choose_parameters(assemble(theta), over)


def choose_parameters(model: Model, over: Collection[str] | None) -> tuple[Params, Any]:
    """Partition a model, or its θ, into the arrays of these names (None: all) and the rest."""

    def is_chosen(path: Any, leaf: Any) -> bool:
        return eqx.is_inexact_array(leaf) and (over is None or name_leaf(path) in over)

    chosen, rest = eqx.partition(model, jax.tree_util.tree_map_with_path(is_chosen, model))
    return chosen, rest


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
