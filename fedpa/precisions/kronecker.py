"""Kronecker precisions of one factor, Λ = A ⊗ I, and of two, Λ = A ⊗ G.

A layer's parameters are a matrix v = [b; W] of p rows and r columns. With one factor, one p×p
matrix A for all r outputs, Λv is A v; with two, Λv is A v G. A and G are kept as their diagonal
blocks, all of one size: one block is A as a whole, blocks of 1 are its diagonal. Rows of zeros fill
up the last block.

Two factors are K-FAC (Martens, Grosse: Optimizing neural networks with Kronecker-factored
approximate curvature, ICML 2015; convolutions: Grosse, Martens, ICML 2016). Each of a layer's n
rows has an input a and a gradient g of the loss by the output. Their Fisher matrix is

    Σ aaᵀ ⊗ ggᵀ  ≈  n (Σ aaᵀ/n) ⊗ (Σ ggᵀ/n)

With one factor, a client's share is the factor A_i = XᵀX/n of its layers' Fisher matrices, exactly
or as a sketch:

    Z_i = XᵀΩ/√(n s),   Ω ∈ {±1}^{n×s} random,   E[Z_i Z_iᵀ] = XᵀX/n

X has a row for each example (each place of a convolution or a sentence) and a column for each row
of [b; W]; with s = r outputs, Z has the shape of [b; W]. A_i's diagonal blocks themselves, their
upper triangles, are sent where they are no more numbers than Z. They need no randomness and add up.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpa.lapack import cholesky, eigh, solve_lower, solve_upper
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.layer_inputs import Layer, Rows, Squares, layers_of, observe
from fedpa.objectives.minibatches import Minibatch, sum_batches
from fedpa.objectives.objective import Objective
from fedpa.precision import widen
from fedpa.precisions.precision import Precision
from fedpa.types import Count, Key, Params, Scalar

Blocks = Float[Array, "blocks size size"]
Values = Float[Array, "blocks size"]
"""Of each block, as many as it has rows."""
Matrix = Float[Array, "features outputs"]
Tiles = Float[Array, "across down height width"]
"""A matrix cut at both factors' blocks: (blocks of columns, blocks of rows, rows, columns)."""
Rank = int | Literal["exact"] | None
POWER_STEPS = 10
"""Of the estimate of the largest eigenvalue."""


class Kronecker(NamedTuple):
    """A Gaussian precision Λ = A ⊗ I over p×r matrices: one p×p matrix A for all columns.

    A `fedpa.Precision`: Λv is A v, and log det Λ is r log det A.

    Args:
        blocks: The diagonal blocks of A, all of one size; A is 0 elsewhere. One block is A as a
            whole, blocks of 1 are its diagonal.
    Example:
        >>> precision = Kronecker(jnp.array([[[2.0, 1.0], [1.0, 2.0]]]))
        >>> v = jnp.ones((2, 3))
        >>> bool(jnp.allclose(precision.solve(precision.times(v)), v))
        True
    """

    blocks: Blocks

    def add(self, other: "Kronecker") -> "Kronecker":
        """Λ + Λ′, of blocks of the same sizes."""
        return Kronecker(jnp.add(self.blocks, other.blocks))

    def scale(self, factor: float | Scalar) -> "Kronecker":
        """cΛ."""
        return Kronecker(factor * self.blocks)

    def times(self, v: Matrix) -> Matrix:
        """Λv."""
        return _by_blocks(lambda rows: self.blocks @ rows, self.blocks, v)

    def solve(self, v: Matrix) -> Matrix:
        """Λ⁻¹v, for A positive definite."""
        return self.factorize().solve(v)

    def sample(self, like: Matrix, key: Key) -> Matrix:
        """One draw of N(0, Λ⁻¹), of the shape and dtype of `like`."""
        return self.factorize().sample(like, key)

    def logdet(self, like: Matrix) -> Scalar:
        """log det Λ over matrices of the shape of `like`."""
        return self.factorize().logdet(like)

    def variances(self, like: Matrix) -> Matrix:
        """The diagonal of Λ⁻¹, of the shape and dtype of `like`: the same for all columns."""
        return self.factorize().variances(like)

    @property
    def num_numbers(self) -> int:
        """How many numbers describe Λ: the upper triangles of its blocks."""
        return Cut(*self.blocks.shape[:2]).num_numbers

    def denoise(self, sd: float | Scalar) -> "Kronecker":
        """A without noise of standard deviation sd on its entries: symmetric, semidefinite.

        The nearest such matrix, its eigenvalues less the edge sd √(2p) of the spectrum that the
        noise of a p×p block has once it is symmetric (Wigner's semicircle).
        """
        blocks = 0.5 * (self.blocks + self.blocks.mT)
        size = blocks.shape[-1]
        if size == 1:
            return Kronecker(jnp.maximum(blocks, 0))
        values, vectors = jax.vmap(eigh)(blocks)
        left = jnp.maximum(values - (2 * size) ** 0.5 * sd, 0)
        return Kronecker((vectors * left[:, None, :]) @ vectors.mT)

    def factorize(self) -> "Cholesky":
        """L of LLᵀ = A, for A positive definite: computed once for many solves."""
        blocks = self.blocks
        return Cholesky(jnp.sqrt(blocks) if blocks.shape[-1] == 1 else jax.vmap(cholesky)(blocks))

    def add_identity(self, factor: float | Scalar = 1.0) -> "Kronecker":
        """Λ + cI, which also makes the rows that fill up the last block harmless to `solve`."""
        return Kronecker(
            self.blocks + factor * jnp.eye(self.blocks.shape[-1], dtype=self.blocks.dtype)[None]
        )

    def normalize(self, layer: Layer) -> "Kronecker":
        """Ā: A in units of the mean square of what enters the layer; 0 if nothing does.

        The bias's own 1 does not count: a bag of words has entries of a hundredth, and the 1 would
        be nearly all of the trace.
        """
        squares = jnp.diagonal(self.blocks, axis1=1, axis2=2).reshape(-1)
        total = jnp.sum(squares[0 if layer.bias is None else 1 :])
        return self.scale(
            jnp.where(total > 0, sum(layer.inputs) / jnp.where(total > 0, total, 1), 0)
        )

    def largest_eigenvalue(self) -> Scalar:
        """Λ's largest eigenvalue by a few steps of the power method: from below."""
        blocks = self.blocks
        vector = jnp.ones((blocks.shape[0], blocks.shape[1], 1), blocks.dtype)
        length = jnp.ones((blocks.shape[0], 1, 1), blocks.dtype)
        for _ in range(POWER_STEPS if blocks.shape[-1] > 1 else 1):
            vector = blocks @ (vector / jnp.where(length > 0, length, 1))
            length = jnp.linalg.norm(vector, axis=1, keepdims=True)
        return jnp.max(length)


class KroneckerPair(NamedTuple):
    """A Gaussian precision Λ = (Σaaᵀ) ⊗ (Σggᵀ)/n + λI over p×r matrices: K-FAC, and a prior.

    A `fedpa.Precision`: Λv is (Σaaᵀ) v (Σggᵀ)/n + λv. `solve`, `sample`, `logdet` and `variances`
    are exact, in the factors' eigenbases, where λI is diagonal, too; O(p³ + r³ + pr(p + r)), or
    less with blocks. `factorize` computes the eigenbases once for many of these calls.
    `add` adds the sums of both factors, n and λ, which gives the factors of the pooled rows; it is
    not the sum of the matrices Λ.

    Args:
        inputs: Σaaᵀ, the p×p sum over rows of what entered the layer, as diagonal blocks.
        outputs: Σggᵀ, the r×r sum over rows of the gradients by what left it, as diagonal blocks.
        n: How many rows the sums have: examples, or examples times places.
        prior: λ ≥ 0; 0 for what clients send.
    Example:
        >>> inputs, outputs = 8 * jnp.eye(2)[None], 2 * jnp.eye(3)[None]
        >>> data = KroneckerPair(inputs, outputs, jnp.float32(4), jnp.float32(0))
        >>> data.add_identity(1.0).times(jnp.ones((2, 3)))[0].tolist()  # 8·2/4 + 1
        [5.0, 5.0, 5.0]
    """

    inputs: Blocks
    outputs: Blocks
    n: Scalar
    prior: Scalar

    def add(self, other: "KroneckerPair") -> "KroneckerPair":
        """Λ of the rows of both, with both priors."""
        return KroneckerPair(*map(jnp.add, self, other))

    def add_identity(self, factor: float | Scalar = 1.0) -> "KroneckerPair":
        """Λ + cI."""
        return self._replace(prior=self.prior + factor)

    def scale(self, factor: float | Scalar) -> "KroneckerPair":
        """cΛ: of c times as many rows."""
        return KroneckerPair(*(factor * part for part in self))

    def times(self, v: Matrix) -> Matrix:
        """Λv."""
        share, inputs, outputs = self._share(), self.inputs[None], self.outputs[:, None]

        def multiply(tiles: Tiles) -> Tiles:
            return share * (inputs @ tiles @ outputs) + self.prior * tiles

        return _by_tiles(multiply, self.inputs, self.outputs, v)

    def solve(self, v: Matrix) -> Matrix:
        """Λ⁻¹v, for Λ positive definite."""
        return self.factorize().solve(v)

    def sample(self, like: Matrix, key: Key) -> Matrix:
        """One draw of N(0, Λ⁻¹), of the shape and dtype of `like`."""
        return self.factorize().sample(like, key)

    def logdet(self, like: Matrix) -> Scalar:
        """log det Λ over matrices of the shape of `like`."""
        return self.factorize().logdet(like)

    def variances(self, like: Matrix) -> Matrix:
        """The diagonal of Λ⁻¹, of the shape and dtype of `like`."""
        return self.factorize().variances(like)

    def factorize(self) -> "Eigenbasis":
        """The eigenvalues and eigenvectors of both factors: computed once for many solves."""
        spectra = (*_spectra(self.inputs), *_spectra(self.outputs))
        return Eigenbasis(*spectra, self._share(), self.prior)

    @property
    def num_numbers(self) -> int:
        """The upper triangles of both factors' blocks, n and λ."""
        return sum(Cut(*part.shape[:2]).num_numbers for part in self[:2]) + 2

    def _share(self) -> Scalar:
        """1/n; without any rows, 0."""
        return jnp.where(self.n > 0, 1 / jnp.where(self.n > 0, self.n, 1), 0)


if TYPE_CHECKING:
    _: tuple[type[Precision], ...] = (Kronecker, KroneckerPair)


class Cholesky(NamedTuple):
    """What of a `Kronecker` is computed once for many solves: A = LLᵀ.

    Args:
        lower: L, in the blocks of A.
    Example:
        >>> factor = Kronecker(4 * jnp.ones((2, 1, 1))).factorize()
        >>> factor.solve(jnp.ones((2, 1))).tolist()
        [[0.25], [0.25]]
    """

    lower: Blocks

    def solve(self, v: Matrix) -> Matrix:
        """Λ⁻¹v."""
        lower = self.lower

        def divide(rows: Array) -> Array:
            if lower.shape[-1] == 1:
                return rows / lower**2
            return jax.vmap(solve_upper)(lower, jax.vmap(solve_lower)(lower, rows))

        return _by_blocks(divide, lower, v)

    def sample(self, like: Matrix, key: Key) -> Matrix:
        """One draw of N(0, Λ⁻¹), of the shape and dtype of `like`."""
        lower = self.lower
        noise = jax.random.normal(key, like.shape, lower.dtype)

        def divide(rows: Array) -> Array:
            return rows / lower if lower.shape[-1] == 1 else jax.vmap(solve_upper)(lower, rows)

        return _by_blocks(divide, lower, noise).astype(like.dtype)

    def logdet(self, like: Matrix) -> Scalar:
        """log det Λ over matrices of the shape of `like`."""
        features, outputs = like.shape
        diagonal = jnp.diagonal(self.lower, axis1=1, axis2=2).reshape(-1)
        return 2 * outputs * jnp.sum(jnp.log(diagonal[:features]))

    def variances(self, like: Matrix) -> Matrix:
        """The diagonal of Λ⁻¹, of the shape and dtype of `like`: the same for all columns."""
        lower = self.lower
        if lower.shape[-1] == 1:
            squares = 1 / lower**2
        else:
            identity = jnp.eye(lower.shape[-1], dtype=lower.dtype)
            squares = jax.vmap(solve_lower, (0, None))(lower, identity) ** 2
        column = jnp.sum(squares, axis=1).reshape(-1, 1)[: like.shape[0]]
        return jnp.broadcast_to(column, like.shape).astype(like.dtype)


class Eigenbasis(NamedTuple):
    """What of a `KroneckerPair` is computed once for many solves and draws: its eigenbasis.

    With the eigenvalues α, β and the eigenvectors P, Q of Σaaᵀ and Σggᵀ,

        Λ = s (P ⊗ Q) diag(α ⊗ β) (P ⊗ Q)ᵀ + λI,   s = 1/n

    `scale` and `add_identity` change s and λ only: c₁F + c₂I is solved, drawn from and has its
    log-determinant for many c₁ and c₂ at one factorization. It has the methods of a
    `fedpa.Precision` but `add`: two of them have no eigenbasis in common.

    Args:
        input_values: α ≥ 0, for each block of Σaaᵀ.
        input_vectors: P, the eigenvectors as the columns of each block.
        output_values: β ≥ 0, for each block of Σggᵀ.
        output_vectors: Q, the same.
        share: s ≥ 0: 1/n times what Λ was scaled by.
        prior: λ ≥ 0.
    Example:
        >>> inputs, outputs = 8 * jnp.eye(2)[None], 2 * jnp.eye(3)[None]
        >>> pair = KroneckerPair(inputs, outputs, jnp.float32(4), jnp.float32(0))
        >>> basis, like = pair.factorize(), jnp.ones((2, 3))
        >>> [basis.scale(c).add_identity(1.0).variances(like)[0, 0].item() for c in (0.25, 0.75)]
        [0.5, 0.25]
        >>> keys = jax.random.split(jax.random.key(0), 100)
        >>> jax.vmap(basis.sample, (None, 0))(like, keys).shape
        (100, 2, 3)
    """

    input_values: Values
    input_vectors: Blocks
    output_values: Values
    output_vectors: Blocks
    share: Scalar
    prior: Scalar

    def add_identity(self, factor: float | Scalar = 1.0) -> "Eigenbasis":
        """Λ + cI."""
        return self._replace(prior=self.prior + factor)

    def scale(self, factor: float | Scalar) -> "Eigenbasis":
        """cΛ."""
        return self._replace(share=factor * self.share, prior=factor * self.prior)

    def times(self, v: Matrix) -> Matrix:
        """Λv."""
        return self._in_eigenbasis(lambda tiles, values: tiles * values, v)

    def solve(self, v: Matrix) -> Matrix:
        """Λ⁻¹v, for Λ positive definite."""
        return self._in_eigenbasis(lambda tiles, values: tiles / values, v)

    def sample(self, like: Matrix, key: Key) -> Matrix:
        """One draw of N(0, Λ⁻¹), of the shape and dtype of `like`."""
        noise = jax.random.normal(key, like.shape, self.input_vectors.dtype)
        draw = self._in_eigenbasis(lambda tiles, values: tiles / jnp.sqrt(values), noise)
        return draw.astype(like.dtype)

    def logdet(self, like: Matrix) -> Scalar:
        """log det Λ over matrices of the shape of `like`."""
        values, real = self._eigenvalues(like)
        return jnp.sum(real * jnp.log(values))

    def variances(self, like: Matrix) -> Matrix:
        """The diagonal of Λ⁻¹, (P∘P) diag(1/(sαβ + λ)) (Q∘Q)ᵀ, of the shape and dtype of `like`."""
        values, _ = self._eigenvalues(like)
        left, right = self.input_vectors[None] ** 2, self.output_vectors[:, None] ** 2

        def square(tiles: Tiles) -> Tiles:
            return left @ (1 / values) @ right.mT

        return _by_tiles(square, self.input_vectors, self.output_vectors, like)

    @property
    def num_numbers(self) -> int:
        """As many as of the `KroneckerPair`: the factors' upper triangles, n and λ."""
        parts = (self.input_vectors, self.output_vectors)
        return sum(Cut(*part.shape[:2]).num_numbers for part in parts) + 2

    def _eigenvalues(self, like: Matrix) -> tuple[Tiles, Tiles]:
        """Λ's eigenvalues, and how much of each eigenvector is in rows and columns of `like`.

        The rest is in rows and columns that fill up the last blocks. There v is 0, and is divided
        by 1 where λ = 0 leaves nothing else.
        """
        alpha, beta = self.input_values[None, :, :, None], self.output_values[:, None, None]
        values = self.share * alpha * beta + self.prior
        rows = _real_parts(self.input_vectors, like.shape[0])[None, :, :, None]
        columns = _real_parts(self.output_vectors, like.shape[1])[:, None, None]
        real = rows * columns
        return jnp.where((values == 0) & (real < 0.5), 1, values), real

    def _in_eigenbasis(self, function: Callable[[Tiles, Tiles], Tiles], v: Matrix) -> Matrix:
        values, _ = self._eigenvalues(v)
        left, right = self.input_vectors[None], self.output_vectors[:, None]

        def between(tiles: Tiles) -> Tiles:
            return left @ function(left.mT @ tiles @ right, values) @ right.mT

        return _by_tiles(between, self.input_vectors, self.output_vectors, v)


def _spectra(blocks: Blocks) -> tuple[Values, Blocks]:
    """Eigenvalues and eigenvectors of each block; rounding does not make eigenvalues negative.

    Rows of zeros are taken far below zero before, which is cut off after: so their eigenvectors,
    those of the rows that fill up the last block among them, have no part in other rows.
    """
    if blocks.shape[-1] == 1:
        return jnp.maximum(blocks[:, :, 0], 0), jnp.ones_like(blocks)
    diagonal = jnp.diagonal(blocks, axis1=1, axis2=2)
    largest = jnp.max(diagonal, axis=1, keepdims=True)
    shift = jnp.where(diagonal == 0, jnp.where(largest > 0, largest, 1), 0)
    identity = jnp.eye(blocks.shape[-1], dtype=blocks.dtype)
    values, vectors = jax.vmap(eigh)(blocks - shift[:, :, None] * identity[None])
    return jnp.maximum(values, 0), vectors


def _real_parts(vectors: Blocks, size: int) -> Values:
    """The squared length of each eigenvector in the first `size` rows; others fill up the last."""
    count = vectors.shape[0] * vectors.shape[1]
    if count == size:
        return jnp.ones(vectors.shape[:2], vectors.dtype)
    real = jnp.arange(count).reshape(*vectors.shape[:2], 1) < size
    return jnp.sum(jnp.where(real, vectors**2, 0), axis=1)


def _by_tiles(
    function: Callable[[Tiles], Tiles], inputs: Array, outputs: Array, v: Matrix
) -> Matrix:
    """`function` of v cut at the blocks of two factors, put together again."""
    p, r = v.shape
    (down, height), (across, width) = inputs.shape[:2], outputs.shape[:2]
    missing = ((0, down * height - p), (0, across * width - r))
    tiles = jnp.pad(v.astype(inputs.dtype), missing).reshape(down, height, across, width)
    whole = function(tiles.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
    return whole.reshape(down * height, across * width)[:p, :r].astype(v.dtype)


class Cut(NamedTuple):
    """How many diagonal blocks there are of A, and how large they are."""

    blocks: int
    size: int

    @property
    def num_numbers(self) -> int:
        """How many numbers the blocks' upper triangles have."""
        return self.blocks * self.size * (self.size + 1) // 2


def cut(features: int, largest: int) -> Cut:
    """As few blocks as hold all features, of one size."""
    blocks = -(-features // largest)
    return Cut(blocks, -(-features // blocks))


def zeros(cut: Cut, dtype: Any) -> Kronecker:
    """Λ = 0."""
    return Kronecker(jnp.zeros((*cut, cut.size), dtype))


class Sketch(NamedTuple):
    """Z, of which Z Zᵀ estimates A."""

    z: Float[Array, "features s"]
    """In bfloat16: rounding it changes Z Zᵀ far less than its random signs do."""


class Gram(NamedTuple):
    """A itself."""

    triangles: Float[Array, "blocks t"]
    """The upper triangle of each block, row by row."""


Factor = Sketch | Gram
"""What is sent of a precision."""


def pack(precision: Kronecker) -> Gram:
    row, column = np.triu_indices(precision.blocks.shape[-1])
    return Gram(precision.blocks[:, row, column])


def unpack(factor: Factor, largest: int) -> Kronecker:
    """A, or Z Zᵀ, in diagonal blocks of at most `largest` rows."""
    if isinstance(factor, Sketch):
        z = split_rows(widen(factor.z), cut(factor.z.shape[0], largest))
        return Kronecker(z @ z.swapaxes(1, 2))
    blocks, numbers = factor.triangles.shape
    size = (math.isqrt(8 * numbers + 1) - 1) // 2
    row, column = np.triu_indices(size)
    upper = jnp.zeros((blocks, size, size), factor.triangles.dtype)
    upper = upper.at[:, row, column].set(factor.triangles)
    return Kronecker(upper + jnp.triu(upper, 1).swapaxes(1, 2))


def split_rows(rows: Float[Array, "features c"], cut: Cut) -> Float[Array, "blocks size c"]:
    """The rows of each block; zeros behind the last."""
    missing = cut.blocks * cut.size - rows.shape[0]
    return jnp.pad(rows, ((0, missing), (0, 0))).reshape(*cut, -1)


def _by_blocks(function: Callable[[Array], Array], blocks: Blocks, v: Matrix) -> Matrix:
    """`function` of the rows of v that belong to each block, put together again."""
    rows = split_rows(v.astype(blocks.dtype), Cut(*blocks.shape[:2]))
    return function(rows).reshape(-1, v.shape[1])[: v.shape[0]].astype(v.dtype)


def cut_layer(layer: Layer, largest: int) -> Cut:
    return cut(layer.features, 1 if layer.table else largest)


def columns(layer: Layer, rank: Rank, largest: int) -> int | None:
    """s of a layer's sketch; None where the blocks themselves are sent, of no more bytes."""
    if rank == "exact":
        return None
    s = layer.outputs if rank is None else min(rank, layer.outputs)
    blocks = cut_layer(layer, largest)
    return None if blocks.size == 1 or 2 * blocks.num_numbers <= layer.features * s else s


def input_factors(
    objective: Objective,
    theta: Params,
    data: ClientData,
    key: Key,
    *,
    batch_size: int,
    rank: Rank,
    largest: int,
) -> tuple[Factor, ...]:
    """What a client sends of each layer at θ, from one pass over its examples in their order."""
    layers = layers_of(objective.loss, theta, data.examples)
    sketched = [columns(layer, rank, largest) for layer in layers]

    def of_batch(index: Count, batch: Minibatch) -> list[_Sums]:
        loss_key, *keys = jax.random.split(jax.random.fold_in(key, index), 1 + len(layers))
        seen = observe(objective.loss, theta, batch.examples, batch.weights, loss_key)
        return [
            _sums(seen[layer], s, cut_layer(layer, largest), k)
            for layer, s, k in zip(layers, sketched, keys, strict=True)
        ]

    totals = sum_batches(of_batch, data, batch_size)
    return tuple(_factor(total, s) for total, s in zip(totals, sketched, strict=True))


class _Sums(NamedTuple):
    value: Array
    """XᵀΩ, or the blocks of XᵀX."""
    n: Scalar


def _sums(seen: Rows | Squares, s: int | None, cut: Cut, key: Key) -> _Sums:
    n = jnp.sum(seen.real)
    if isinstance(seen, Squares):
        return _Sums(seen.sums[:, None, None], n)
    if s is not None:  # rows that don't count are 0 in X
        return _Sums(seen.x.T @ signs(key, seen.x.shape[0], s, seen.x.dtype), n)
    x = split_rows(seen.x.T, cut)
    if cut.size == 1:
        return _Sums(jnp.sum(x**2, axis=2, keepdims=True), n)
    return _Sums(x @ x.swapaxes(1, 2), n)


def _factor(total: _Sums, s: int | None) -> Factor:
    n = jnp.maximum(total.n, 1)
    if s is not None:
        return Sketch((total.value / jnp.sqrt(n * s)).astype(jnp.bfloat16))
    return pack(Kronecker(total.value / n))


def signs(key: Key, n: int, s: int, dtype: Any) -> Float[Array, "n s"]:
    """Ω: independent ±1, from one random bit each."""
    words = jax.random.bits(key, (n, -(-s // 32)), jnp.uint32)
    bits: Array = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & jnp.uint32(
        1
    )
    return 1 - 2 * bits.reshape(n, -1)[:, :s].astype(dtype)
