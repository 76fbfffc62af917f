"""Every precision of the package does what its dense matrix does, through `fedpa.Precision`.

A new structure joins by a row in `STRUCTURES`; one without fails.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

import fedpa
from fedpa import precisions
from fedpa.objectives.layer_inputs import Layer
from fedpa.precisions import (
    Dense,
    Diagonal,
    Eigenbasis,
    Kronecker,
    KroneckerPair,
    Layered,
    LowRank,
    Scalar,
    kronecker,
)
from tests.compiling import QUICK, run_in_two_threads

FEATURES, OUTPUTS = 7, 3
WIDTH = 5
"""Outputs of pairs."""
seeds = st.integers(0, 2**32 - 1)


class Structure(NamedTuple):
    make: Callable[[np.random.Generator], fedpa.Precision]
    """Positive definite, with float64 NumPy arrays."""
    dense: Callable[[Any], np.ndarray]
    """precision → its matrix over parameters ravelled row by row."""
    like: Any
    """Parameters: an array or a pytree of arrays, in NumPy."""
    num_numbers: int
    add: Callable[[Any, Any], np.ndarray] | None = None
    """The matrix of a sum; default: the sum of the matrices."""
    has_add: bool = True
    """Whether it is a whole `fedpa.Precision`, or one without `add`."""
    sums_arrays: bool = True
    """Whether `add` and `scale` are those of the arrays, as an aggregation adds."""


def gram(rng: np.random.Generator, size: int) -> np.ndarray:
    """A random symmetric matrix, positive definite."""
    x = rng.standard_normal((size, 2 * size))
    return x @ x.T / size + np.eye(size)


def scalar() -> Structure:
    like = np.zeros((2, 3))
    return Structure(
        make=lambda rng: Scalar(np.asarray(rng.uniform(0.5, 4))),
        dense=lambda precision: precision.value * np.eye(like.size),
        like=like,
        num_numbers=1,
    )


def diagonal() -> Structure:
    like = np.zeros((2, 1, 3))
    return Structure(
        make=lambda rng: Diagonal(rng.uniform(0.5, 4, like.shape)),
        dense=lambda precision: np.diag(precision.values.ravel()),
        like=like,
        num_numbers=6,
    )


def dense(size: int = 5) -> Structure:
    return Structure(
        make=lambda rng: Dense(gram(rng, size)),
        dense=lambda precision: precision.matrix,
        like=np.zeros(size),
        num_numbers=size * (size + 1) // 2,
    )


def low_rank(size: int, rank: int) -> Structure:
    return Structure(
        make=lambda rng: LowRank(rng.uniform(0.5, 4, size), rng.standard_normal((size, rank))),
        dense=lambda one: np.diag(one.diagonal) + one.columns @ one.columns.T,
        like=np.zeros(size),
        num_numbers=size + rank * size,
        sums_arrays=False,
    )


def block_diagonal(blocks: np.ndarray, features: int) -> np.ndarray:
    count, size, _ = blocks.shape
    whole = np.zeros((count * size,) * 2)
    for place, block in enumerate(blocks):
        rows = slice(place * size, (place + 1) * size)
        whole[rows, rows] = block
    return whole[:features, :features]


def random_blocks(rng: np.random.Generator, cut: kronecker.Cut, features: int) -> np.ndarray:
    """Of a positive definite matrix; where they don't come out even, the last is filled up."""
    blocks = np.stack([gram(rng, cut.size) for _ in range(cut.blocks)])
    real = np.arange(cut.blocks * cut.size).reshape(cut) < features
    return np.where(real[:, :, None] & real[:, None, :], blocks, 0)


def in_kronecker_blocks(largest: int) -> Structure:
    cut = kronecker.cut(FEATURES, largest)

    def make(rng: np.random.Generator) -> Kronecker:
        filled = random_blocks(rng, cut, FEATURES)
        return Kronecker(filled + np.eye(cut.size)[None])  # also where it is filled up

    return Structure(
        make=make,
        dense=lambda one: np.kron(block_diagonal(one.blocks, FEATURES), np.eye(OUTPUTS)),
        like=np.zeros((FEATURES, OUTPUTS)),
        num_numbers=cut.blocks * cut.size * (cut.size + 1) // 2,
    )


def in_kronecker_pairs(largest: int, largest_output: int = WIDTH) -> Structure:
    cuts = kronecker.cut(FEATURES, largest), kronecker.cut(WIDTH, largest_output)

    def make(rng: np.random.Generator) -> KroneckerPair:
        number, prior = rng.uniform(1, 9, 2)
        inputs, outputs = map(random_blocks, [rng] * 2, cuts, (FEATURES, WIDTH))
        return KroneckerPair(inputs, outputs, np.asarray(number), np.asarray(prior - 1))

    def dense(one: KroneckerPair) -> np.ndarray:
        factors = map(block_diagonal, (one.inputs, one.outputs), (FEATURES, WIDTH))
        return np.kron(*factors) / one.n + one.prior * np.eye(FEATURES * WIDTH)

    return Structure(
        make=make,
        dense=dense,
        like=np.zeros((FEATURES, WIDTH)),
        num_numbers=sum(cut.blocks * cut.size * (cut.size + 1) // 2 for cut in cuts) + 2,
        add=lambda one, other: dense(KroneckerPair(*map(np.add, one, other))),
    )


def in_eigenbases(largest: int, largest_output: int = WIDTH) -> Structure:
    pairs = in_kronecker_pairs(largest, largest_output)

    def make(rng: np.random.Generator) -> Eigenbasis:
        inputs, outputs, n, prior = pairs.make(rng)
        spectra = (*np.linalg.eigh(inputs), *np.linalg.eigh(outputs))
        return Eigenbasis(*spectra, 1 / n, prior)

    def dense(one: Eigenbasis) -> np.ndarray:
        factors = [
            (vectors * values[:, None, :]) @ vectors.swapaxes(1, 2)
            for values, vectors in (one[:2], one[2:4])
        ]
        return pairs.dense(KroneckerPair(*factors, 1 / one.share, one.prior))

    return pairs._replace(make=make, dense=dense, add=None, has_add=False, sums_arrays=False)


PARAMETERS = {
    "bias": (2,),
    "kernel": (1, 2, 1, 2),
    "norm": (3,),
    "scale": (2, 1),
    "table": (3, 2),
    "u": (2, 2),
    "w": (2, 3),
    "x": (3, 2),
}


def layered() -> Structure:
    """A dense layer stored as (outputs, inputs), a convolution, a table, a recurrence, and more."""
    layers = (
        Layer((6,), (3,), outputs=2, bias=0, out_first=True, table=False),
        Layer((1,), (2,), outputs=2, bias=None, out_first=False, table=False),
        Layer((4,), (3,), outputs=2, bias=None, out_first=False, table=True),
        Layer((7, 5), (3, 2), outputs=2, bias=None, out_first=False, table=False),
    )
    cuts = [kronecker.Cut(1, 4), kronecker.Cut(1, 2), kronecker.Cut(3, 1), kronecker.Cut(2, 3)]
    sizes = [4, 2, 3, 5]
    ends = np.cumsum([np.prod(shape) for shape in PARAMETERS.values()])
    numbers = {
        name: np.arange(end - np.prod(shape), end).reshape(shape)
        for (name, shape), end in zip(PARAMETERS.items(), ends, strict=True)
    }
    places = [  # of each part's entries in the ravelled parameters
        np.concatenate([numbers["bias"][None], numbers["w"].T]),
        numbers["kernel"],
        numbers["table"],
        np.concatenate([numbers["x"], numbers["u"]]),
        numbers["norm"],
        numbers["scale"],
    ]

    def make(rng: np.random.Generator) -> Layered:
        blocks = [random_blocks(rng, *both) for both in zip(cuts, sizes, strict=True)]
        counts = rng.uniform(1, 9, (3, 2))
        pairs = [
            KroneckerPair(inputs, gram(rng, 2)[None], np.asarray(n), np.asarray(prior))
            for inputs, (n, prior) in zip(blocks[:3], counts, strict=True)
        ]
        one = Kronecker(blocks[3] + np.eye(3)[None])
        diagonal, scalar = rng.uniform(0.5, 4, 3), np.asarray(rng.uniform(0.5, 4))
        return Layered(layers, (*pairs, one), (Diagonal(diagonal), Scalar(scalar)))

    def dense(one: Layered) -> np.ndarray:
        whole = np.zeros((ends[-1],) * 2)
        parts = [
            np.kron(block_diagonal(pair.inputs, size), pair.outputs[0]) / pair.n
            + pair.prior * np.eye(2 * size)
            for pair, size in zip(one.factors[:3], sizes, strict=False)
        ]
        parts.append(np.kron(block_diagonal(one.factors[3].blocks, 5), np.eye(2)))
        parts += [np.diag(one.rest[0].values), one.rest[1].value * np.eye(2)]
        for where, part in zip(places, parts, strict=True):
            whole[np.ix_(where.ravel(), where.ravel())] = part
        return whole

    return Structure(
        make=make,
        dense=dense,
        like={name: np.zeros(shape) for name, shape in PARAMETERS.items()},
        num_numbers=(10 + 3 + 2) + (3 + 3 + 2) + (3 + 3 + 2) + 12 + 3 + 1,
        add=lambda one, other: dense(jax.tree.map(np.add, one, other)),
    )


STRUCTURES = {
    "scalar": scalar(),
    "diagonal": diagonal(),
    "dense": dense(),
    "low rank": low_rank(6, 2),
    "low rank of more columns than rows": low_rank(3, 5),
    "kronecker": in_kronecker_blocks(FEATURES),
    "kronecker in blocks": in_kronecker_blocks(4),
    "kronecker's diagonal": in_kronecker_blocks(1),
    "kronecker pair": in_kronecker_pairs(FEATURES),
    "kronecker pair in blocks": in_kronecker_pairs(4),
    "kronecker pair with a diagonal": in_kronecker_pairs(1),
    "kronecker pair in blocks of both": in_kronecker_pairs(4, 3),
    "kronecker pair of diagonals": in_kronecker_pairs(1, 1),
    "eigenbasis": in_eigenbases(FEATURES),
    "eigenbasis in blocks of both": in_eigenbases(4, 3),
    "eigenbasis of diagonals": in_eigenbases(1, 1),
    "layered": layered(),
}
TOLERANCE = {"float32": 2e-4, "float64": 1e-11}
LONGER = {
    "kronecker pair in blocks",
    "kronecker pair with a diagonal",
    "kronecker pair of diagonals",
    "eigenbasis",
    "eigenbasis of diagonals",
}
"""Those of the longer suite: `in blocks of both` is the general case."""


def parametrize(structures: dict[str, Structure]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "structure",
        [
            pytest.param(one, id=name, marks=[pytest.mark.long] * (name in LONGER))
            for name, one in structures.items()
        ],
    )


every_structure = parametrize(STRUCTURES)
every_added = parametrize({name: one for name, one in STRUCTURES.items() if one.has_add})
both_dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


def cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def matrix(structure: Structure, precision: Any) -> np.ndarray:
    return np.asarray(structure.dense(jax.tree.map(lambda x: np.asarray(x, np.float64), precision)))


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])


def parameters(structure: Structure, rng: np.random.Generator, dtype: str) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), dtype), structure.like)


@functools.cache
def compiled(name: str, vectorized: bool = False) -> Callable[..., Any]:
    """A method as a compiled function of the precision and its arguments."""

    def call(precision: Any, *arguments: Any) -> Any:
        return getattr(precision, name)(*arguments)

    return jax.jit(jax.vmap(call) if vectorized else call, compiler_options=QUICK)


def close(found: Any, wanted: Any, dtype: str) -> None:
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(
        np.ravel(found), np.ravel(wanted), rtol=0, atol=TOLERANCE[dtype] * scale
    )


def test_every_structure_of_the_package_is_here():
    modules = [
        importlib.import_module(f"{precisions.__name__}.{info.name}")
        for info in pkgutil.iter_modules(precisions.__path__)
    ]
    classes = {c for module in modules for c in vars(module).values() if isinstance(c, type)}
    # The names of the interface, not `isinstance`, which would not see what a structure lacks.
    found = {c for c in classes - {fedpa.Precision} if {"add", "scale"} & set(dir(c))}
    rng = np.random.default_rng(0)
    assert found == {type(structure.make(rng)) for structure in STRUCTURES.values()}


@every_structure
def test_it_is_a_pytree_with_the_interface(structure):
    one = cast(structure.make(np.random.default_rng(0)), "float32")
    assert isinstance(one, fedpa.Precision) == structure.has_add
    interface = {name for name in vars(fedpa.Precision) if not name.startswith("_")}
    assert interface - set(dir(one)) == (set() if structure.has_add else {"add"})
    leaves, tree = jax.tree.flatten(one)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert type(jax.tree.unflatten(tree, leaves)) is type(one)
    assert one.num_numbers == structure.num_numbers


@every_added
@both_dtypes
@given(seed=seeds, factor=st.floats(0.01, 100))
def test_add(structure, dtype, seed, factor):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(dtype == "float64"):
        one, other = (cast(structure.make(rng), dtype) for _ in range(2))
        left, right = matrix(structure, one), matrix(structure, other)
        if structure.add is None:
            total = left + right
        else:
            total = structure.add(
                *(jax.tree.map(lambda x: np.asarray(x, np.float64), p) for p in (one, other))
            )
        close(matrix(structure, compiled("add")(one, other)), total, dtype)
        if structure.sums_arrays:  # what an aggregation does: a weighted sum of the arrays
            summed = jax.tree.map(lambda a, b: 2 * a + factor * b, one, other)
            wanted = compiled("add")(one.scale(2.0), other.scale(factor))
            close(matrix(structure, summed), matrix(structure, wanted), dtype)


@every_structure
@both_dtypes
@given(seed=seeds, factor=st.floats(0.01, 100))
def test_scale_and_add_identity(structure, dtype, seed, factor):
    with jax.enable_x64(dtype == "float64"):
        one = cast(structure.make(np.random.default_rng(seed)), dtype)
        whole = matrix(structure, one)
        more = whole + factor * np.eye(len(whole))
        for c in (jnp.asarray(factor, dtype), factor):
            close(matrix(structure, compiled("scale")(one, c)), factor * whole, dtype)
            close(matrix(structure, compiled("add_identity")(one, c)), more, dtype)


@every_structure
@both_dtypes
@given(seed=seeds)
def test_times_solve_variances_and_logdet(structure, dtype, seed):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(dtype == "float64"):
        one, v = cast(structure.make(rng), dtype), parameters(structure, rng, dtype)
        whole, vector = matrix(structure, one), flat(v)
        times, solve, logdet = (compiled(name) for name in ("times", "solve", "logdet"))
        close(flat(times(one, v)), whole @ vector, dtype)
        close(flat(solve(one, v)), np.linalg.solve(whole, vector), dtype)
        close(flat(solve(one, times(one, v))), vector, dtype)
        variances = compiled("variances")(one, v)
        close(flat(variances), np.diag(np.linalg.inv(whole)), dtype)
        sign, size = np.linalg.slogdet(whole)
        assert sign == 1
        # log(1 + ε) is ε for each of the eigenvalues
        np.testing.assert_allclose(logdet(one, v), size, rtol=0, atol=TOLERANCE[dtype] * len(whole))
        drawn = compiled("sample")(one, v, jax.random.key(0))
        for out in (times(one, v), solve(one, v), variances, drawn):
            assert jax.tree.map(jnp.shape, out) == jax.tree.map(jnp.shape, v)
            assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(out))
        assert logdet(one, v).dtype == dtype


@every_structure
@given(seed=seeds)
def test_a_batch_of_precisions_is_vectorized(structure, seed):
    rng, dtype = np.random.default_rng(seed), "float64"
    with jax.enable_x64(True):
        both = [cast(structure.make(rng), dtype) for _ in range(2)]
        vectors = [parameters(structure, rng, dtype) for _ in range(2)]
        keys = jax.random.split(jax.random.key(seed % 2**31), 2)

        def stack(trees: Any) -> Any:
            return jax.tree.map(lambda *x: jnp.stack(x), *trees)

        batch, v = stack(both), stack(vectors)
        calls = {
            **({"add": (batch,)} if structure.has_add else {}),
            "add_identity": (jnp.asarray([0.5, 2.0], dtype),),
            "scale": (jnp.asarray([0.5, 2.0], dtype),),
            "times": (v,),
            "solve": (v,),
            "sample": (v, keys),
            "logdet": (v,),
            "variances": (v,),
        }
        for name, arguments in calls.items():
            found = compiled(name, vectorized=True)(batch, *arguments)
            for place, one in enumerate(both):
                own = jax.tree.map(lambda x, place=place: x[place], arguments)
                at = jax.tree.map(lambda x, place=place: x[place], found)
                close(flat(at), flat(compiled(name)(one, *own)), dtype)


@every_structure
@both_dtypes
def test_samples_have_the_inverse_as_covariance(structure, dtype):
    """Each entry within five of its standard errors."""
    rng = np.random.default_rng(3)
    with jax.enable_x64(dtype == "float64"):
        one, like = cast(structure.make(rng), dtype), cast(structure.like, dtype)
        draw = jax.jit(
            jax.vmap(lambda key: ravel_pytree(one.sample(like, key))[0]), compiler_options=QUICK
        )
        draws = np.asarray(draw(jax.random.split(jax.random.key(0), 20_000)), np.float64)
    covariance = np.linalg.inv(matrix(structure, one))
    variances = np.diag(covariance)
    error = np.sqrt((covariance**2 + np.outer(variances, variances)) / len(draws))
    np.testing.assert_array_less(np.abs(draws.T @ draws / len(draws) - covariance), 5 * error)
    assert np.abs(draws.mean(axis=0) / np.sqrt(variances / len(draws))).max() < 5


@every_structure
def test_half_precision_parameters_keep_their_dtype(structure):
    """Λ stays in float32: what is computed is not rounded on the way."""
    rng = np.random.default_rng(0)
    one, v = cast(structure.make(rng), "float32"), parameters(structure, rng, "float32")
    half = cast(v, "bfloat16")
    same = cast(half, "float32")
    for name in ("times", "solve", "variances"):
        found, wanted = compiled(name)(one, half), compiled(name)(one, same)
        assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(found))
        np.testing.assert_allclose(flat(found), flat(wanted), rtol=2**-7)
    drawn = [compiled("sample")(one, like, jax.random.key(0)) for like in (half, same)]
    np.testing.assert_allclose(*map(flat, drawn), rtol=2**-7)


def test_what_is_not_positive_definite_has_no_solution():
    indefinite = Dense(jnp.array([[1.0, 2.0], [2.0, 1.0]]))
    assert np.isnan(indefinite.solve(jnp.ones(2))).all()
    assert np.isnan(indefinite.logdet(jnp.ones(2)))


@pytest.mark.parametrize(
    "name",
    [
        "kronecker in blocks",
        "kronecker pair in blocks of both",
        pytest.param("layered", marks=pytest.mark.long),
    ],
)
def test_what_was_factorized_is_solved_with_alike(name):
    rng = np.random.default_rng(0)
    structure = STRUCTURES[name]
    one, v = cast(structure.make(rng), "float32"), parameters(structure, rng, "float32")
    factor, key = one.factorize(), jax.random.key(0)
    for call in ("solve", "logdet", "variances"):
        np.testing.assert_array_equal(*(flat(getattr(p, call)(v)) for p in (factor, one)))
    np.testing.assert_array_equal(flat(factor.sample(v, key)), flat(one.sample(v, key)))


@pytest.mark.parametrize(
    "name",
    ["kronecker pair in blocks of both", pytest.param("layered", marks=pytest.mark.long)],
)
def test_other_scales_and_priors_need_no_other_eigenvectors(name, monkeypatch):
    rng, structure = np.random.default_rng(0), STRUCTURES[name]
    one, v = cast(structure.make(rng), "float32"), parameters(structure, rng, "float32")
    keys, basis = jax.random.split(jax.random.key(0), 3), one.factorize()
    assert type(basis) is (Layered if name == "layered" else Eigenbasis)
    assert basis.num_numbers == one.num_numbers
    changed = [p.scale(3.0).add_identity(0.5) for p in (one, basis)]
    wanted = [changed[0].solve(v), changed[0].variances(v), changed[0].times(v)]
    draws = jax.tree.map(lambda *x: jnp.stack(x), *(changed[0].sample(v, key) for key in keys))
    size = changed[0].logdet(v)
    monkeypatch.setattr(kronecker, "eigh", None)
    found = [changed[1].solve(v), changed[1].variances(v), changed[1].times(v)]
    for a, b in zip(found, wanted, strict=True):
        close(flat(a), flat(b), "float32")
    close(flat(jax.vmap(changed[1].sample, (None, 0))(v, keys)), flat(draws), "float32")
    np.testing.assert_allclose(changed[1].logdet(v), size, rtol=1e-5)


@both_dtypes
@pytest.mark.parametrize(
    ("rank", "prior"),
    [pytest.param(FEATURES, 0.0, marks=pytest.mark.long), (2, 0.5), (0, 0.5)],
)
def test_rows_that_fill_up_a_block_count_nowhere(dtype, rank, prior):
    """Without a prior; and where real rows, and combinations of them, are zero like the fill."""
    structure, rng = STRUCTURES["kronecker pair in blocks of both"], np.random.default_rng(0)
    inputs, outputs, n, _ = structure.make(rng)
    if rank < FEATURES:
        x = rng.standard_normal((2, 4, rank)) * np.array([[1, 1, 0, 1], [1, 1, 0, 0]])[:, :, None]
        inputs = x @ x.swapaxes(1, 2)
    with jax.enable_x64(dtype == "float64"):
        one = cast(KroneckerPair(inputs, outputs, n, np.asarray(prior)), dtype)
        v, whole = parameters(structure, rng, dtype), matrix(structure, one)
        for precision in (one, one.factorize()):
            close(flat(precision.solve(v)), np.linalg.solve(whole, flat(v)), dtype)
            close(flat(precision.variances(v)), np.diag(np.linalg.inv(whole)), dtype)
            wanted = np.linalg.slogdet(whole)[1]
            np.testing.assert_allclose(precision.logdet(v), wanted, atol=35 * TOLERANCE[dtype])
            noise = jax.random.normal(jax.random.key(0), v.shape, v.dtype)
            values, vectors = np.linalg.eigh(whole)
            drawn = vectors @ (vectors.T @ flat(noise) / np.sqrt(values))
            close(flat(precision.sample(v, jax.random.key(0))), drawn, dtype)


@pytest.mark.long
def test_programs_in_two_threads_do_not_wait_for_each_other():
    """Batched LAPACK calls did, for ever."""
    run_in_two_threads(
        """
from fedpa.precisions import Dense, Kronecker, KroneckerPair, LowRank

x = rng.standard_normal((16, 60, 80))
matrices = jnp.asarray(x @ x.swapaxes(1, 2), jnp.float32)
keys = jax.random.split(jax.random.key(0), 16)

@jax.jit
@jax.vmap
def dense(matrix, key):
    precision = Dense(matrix)
    return precision.solve(precision.sample(matrix[0], key)), precision.logdet(matrix[0])

@jax.jit
def blocks(matrices, key):
    precision, like = Kronecker(matrices), jnp.ones((16 * 60, 40))
    return precision.solve(precision.sample(like, key)), precision.logdet(like)

@jax.jit
@jax.vmap
def pair(matrix, key):
    precision, like = KroneckerPair(matrix[None], matrix[None], matrix[0, 0], matrix[1, 1]), matrix
    return precision.solve(precision.sample(like, key)), precision.logdet(like)

@jax.jit
@jax.vmap
def low_rank(matrix, key):
    precision = LowRank(jnp.diagonal(matrix), matrix[:, :9])
    return precision.solve(precision.sample(matrix[0], key)), precision.logdet(matrix[0])

calls = [
    lambda: dense(matrices, keys),
    lambda: blocks(matrices, keys[0]),
    lambda: pair(matrices[:, :20, :20], keys),
    lambda: low_rank(matrices, keys),
]
"""
    )
