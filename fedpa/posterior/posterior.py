"""What comes out: a Gaussian posterior over a model's parameters."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedpa.algorithms.sites import LARGEST_DENSE
from fedpa.errors import FedpaError, check_integer, refuse
from fedpa.precision import narrow, widen
from fedpa.precisions.diagonal import Diagonal
from fedpa.precisions.gaussian import Gaussian
from fedpa.training.history import History
from fedpa.training.problem import split_params
from fedpa.types import Key, Model


class Posterior(NamedTuple):
    """A Gaussian posterior N(μ, Λ⁻¹) over a model's parameters, as `fedpa.infer` returns it.

    Printed, it is a table of means and standard deviations.

    Args:
        gaussian: η and Λ over the parameters ravelled in tree order.
        model: The model as it was given: structure, dtypes, and leaves that are no parameters.
        sites: Client id → the Gaussian that stands for its likelihood, where clients keep it.
        history: One record per round.
        converged: Whether the rounds ended by the convergence rule; a single round has none.
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

    def leave_out(self, client: str) -> "Posterior":
        """The posterior without one client: q / t_i, from its site.

        Raises:
            FedpaError: There is no such client, or clients keep no sites in this method.
        """
        if not self.sites:
            raise FedpaError(
                "this posterior has no sites: infer with method 'ep' or 'pvi' on a local engine "
                "keeps each client's"
            )
        if client not in self.sites:
            raise refuse("client", client, f"must be one of {', '.join(list(self.sites)[:10])}")
        others = {name: site for name, site in self.sites.items() if name != client}
        return self._replace(gaussian=self.gaussian.divide(self.sites[client]), sites=others)

    def restore(self, vectors: jax.Array) -> Model:
        """Vectors of all parameters, (d,) or (s, d), in the model's structure and dtypes."""
        theta, assemble = split_params(self.model)
        _, unravel = ravel_pytree(widen(theta))
        if vectors.ndim == 1:
            return assemble(narrow(unravel(vectors), theta))
        return assemble(jax.vmap(lambda v: narrow(unravel(v), theta))(vectors))

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
        rounds = f"{len(self.history)} rounds" if self.history else "no rounds"
        state = "" if self.converged else ", not converged"
        title = f"Posterior of {len(names):,} parameters, mean ± sd ({rounds}{state})"
        return "\n".join([title, *shown])


LINES = 20


def name_parameters(model: Model) -> list[str]:
    """A name for each entry of the parameters ravelled: w[0], w[1], b."""
    theta, _ = split_params(model)
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(theta):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "θ"
        shape = np.shape(leaf)
        places = np.ndindex(*shape) if math.prod(shape) < MOST_NAMES else [()] * math.prod(shape)
        names += [name + (f"[{','.join(map(str, place))}]" if place else "") for place in places]
    return names


MOST_NAMES = 100_000
