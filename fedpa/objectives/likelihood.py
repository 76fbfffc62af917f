"""The likelihood p(y | f(θ, x)): what a model's outputs f say about labels y.

    softmax:  p(y = c | f) = exp f_c / Σ_k exp f_k        one of k classes
    sigmoid:  p(y_m = 1 | f) = 1 / (1 + exp(−f_m))        any number of tags
    normal:   p(y | f) = N(y; f, σ²)                      a regression

A loss says how well one label fits. What needs all labels' probabilities takes a likelihood:
predictions with a posterior, calibration, and the Fisher matrix of the outputs

    H = E_{y ~ p(y | f)}[∇log p ∇log pᵀ] = −∂² log p(y | f)/∂f²

which for these three does not depend on y: softmax diag(p) − ppᵀ, sigmoid diag(p(1 − p)), normal
I/σ². With it, JᵀHJ is the Fisher matrix of θ (and the Gauss–Newton matrix), J = ∂f/∂θ.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedpa.errors import FedpaError, check_positive, refuse
from fedpa.precision import widen
from fedpa.types import Examples, Key, Losses, Model

Link = Literal["softmax", "sigmoid", "normal"]
Outputs = Float[Array, "..."]
"""f of a batch: (b, k) or (b,), or with a label at each of t places (b, t, k)."""


class Likelihood(NamedTuple):
    """How a model's outputs become probabilities of labels.

    Args:
        outputs: `outputs(params, batch)`: f. Of k classes (b, k), or (b, t, k) with a label at
            each of t places; of m tags (b, m); of a regression (b,) or (b, m).
        link: "softmax" (the default), "sigmoid" or "normal".
        field: Name of the labels in a batch; default: "y". Of classes their numbers from 0, shape
            (b,) or (b, t); of tags 0 or 1, of a regression numbers, of the shape of f.
        ignored: A class number that does not count (padding); default: all count.
        noise: σ > 0 of the normal link; default: 1.
    Example:
        >>> likelihood = Likelihood(lambda params, batch: batch["x"] @ params)
        >>> batch = {"x": jnp.eye(2), "y": jnp.array([0, 1])}
        >>> f = likelihood.outputs(jnp.zeros((2, 2)), batch)
        >>> likelihood.mean(f).tolist(), likelihood.nll(f, batch).round(3).tolist()
        ([[0.5, 0.5], [0.5, 0.5]], [0.6930000185966492, 0.6930000185966492])
    """

    outputs: Callable[[Model, Examples], Array]
    link: Link = "softmax"
    field: str = "y"
    ignored: int | None = None
    noise: float = 1.0

    def loss(self, params: Model, batch: Examples, key: Key | None = None) -> Losses:
        """−log p(y | f(θ, x)) of each example: a loss for `fedpa.fit`."""
        return self.nll(self.outputs(params, batch), batch)

    def mean(self, f: Outputs) -> Outputs:
        """E[y | f], of the shape of f: probabilities of classes or tags; f of a regression."""
        wide: Array = widen(f)
        if self.link == "normal":
            return wide
        return jax.nn.softmax(wide) if self.link == "softmax" else jax.nn.sigmoid(wide)

    def labels(self, batch: Examples) -> Array:
        """The batch's labels.

        Raises:
            FedpaError: The batch has no such field.
        """
        if not isinstance(batch, dict) or self.field not in batch:
            known = ", ".join(batch) if isinstance(batch, dict) else type(batch).__name__
            raise FedpaError(f"field = {self.field!r}: examples have no such labels, but {known}")
        labels: Array = batch[self.field]
        return labels

    def check(self) -> None:
        """Refuse a link, a noise or an ignored class that there is not."""
        if self.link not in get_args(Link):
            raise refuse("link", self.link, f"must be one of {', '.join(get_args(Link))}")
        if self.link == "normal":
            check_positive("noise", self.noise)
        if self.ignored is not None and self.link != "softmax":
            raise refuse("ignored", self.ignored, "is a class of the softmax link: leave it out")

    def check_labels(self, f: Outputs, y: Array) -> None:
        """Refuse labels that don't belong to the outputs: another shape would be broadcast.

        Raises:
            FedpaError: Their shape or type does not fit.
        """
        wanted = f.shape[:-1] if self.link == "softmax" else f.shape
        if y.shape != wanted:
            raise FedpaError(
                f"field = {self.field!r}: labels have shape {y.shape}, and outputs of shape "
                f"{f.shape} need {wanted} with the {self.link} link"
            )
        if self.link == "softmax" and not jnp.issubdtype(y.dtype, jnp.integer):
            raise FedpaError(
                f"field = {self.field!r}: labels are {y.dtype}: classes are numbered by integers"
            )

    def is_counted(self, batch: Examples) -> Bool[Array, "..."]:
        """Which labels count, of the labels' shape."""
        y = self.labels(batch)
        return jnp.ones(y.shape, bool) if self.ignored is None else y != self.ignored

    def nll(self, f: Outputs, batch: Examples) -> Losses:
        """−log p(y | f) of each example: the sum over its labels that count."""
        f, y = widen(f), self.labels(batch)
        self.check_labels(f, y)
        if self.link == "softmax":
            chosen = jnp.take_along_axis(f, y[..., None], axis=-1)[..., 0]
            each = jax.nn.logsumexp(f, axis=-1) - chosen
        elif self.link == "sigmoid":
            each = jax.nn.softplus(f) - f * y.astype(f.dtype)
        else:
            constant = 0.5 * np.log(2 * np.pi * self.noise**2)
            each = 0.5 * ((y.astype(f.dtype) - f) / self.noise) ** 2 + constant.astype(f.dtype)
        counted = jnp.where(self.is_counted(batch), each, 0)
        return jnp.sum(counted.reshape(len(counted), -1), axis=1)

    def curvature(self, f: Outputs, u: Outputs, batch: Examples) -> Outputs:
        """Hu, of the labels that count.

        Example:
            >>> likelihood = Likelihood(lambda params, batch: params, link="sigmoid")
            >>> f = jnp.zeros((1, 2))
            >>> likelihood.curvature(f, jnp.ones((1, 2)), {"y": f}).tolist()
            [[0.25, 0.25]]
        """
        p, u = self.mean(f), widen(u)
        if self.link == "softmax":
            product = p * (u - jnp.sum(p * u, axis=-1, keepdims=True))
        else:
            product = u * (p * (1 - p) if self.link == "sigmoid" else self.noise**-2)
        return self._mask(product, batch)

    def curvature_root(self, f: Outputs, v: Outputs, batch: Examples) -> Outputs:
        """Sv with SSᵀ = H: the random signs v give vectors whose second moments are H.

        S is diag(√p) − p√pᵀ for the softmax, and √H where H is diagonal.
        """
        p, v = self.mean(f), widen(v)
        if self.link == "softmax":
            root = jnp.sqrt(p) * v
            product = root - p * jnp.sum(root, axis=-1, keepdims=True)
        else:
            product = v * (jnp.sqrt(p * (1 - p)) if self.link == "sigmoid" else 1 / self.noise)
        return self._mask(product, batch)

    def _mask(self, values: Outputs, batch: Examples) -> Outputs:
        counted = self.is_counted(batch)
        return jnp.where(
            counted.reshape(*counted.shape, *[1] * (values.ndim - counted.ndim)), values, 0
        )
