"""Every precision of the package does what its dense matrix does, through `fedpa.Precision`.

A new structure joins by a row in `STRUCTURES`; one without fails.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpa
from fedpa import precisions
from fedpa.precisions import kronecker

FEATURES, OUTPUTS = 7, 3


class Structure(NamedTuple):
    one: fedpa.Precision
    other: fedpa.Precision
    dense: Callable
    """precision → its matrix over parameters ravelled row by row."""
    num_numbers: int


def in_kronecker_blocks(largest: int) -> Structure:
    """A of blocks; where they don't come out even, the last is filled up."""
    cut = kronecker.cut(FEATURES, largest)
    rng = np.random.default_rng(largest)

    def make() -> kronecker.Kronecker:
        x = rng.standard_normal((cut.blocks, cut.size, 2 * cut.size))
        blocks = (x @ x.swapaxes(1, 2) / cut.size).reshape(*cut, cut.size)
        real = np.arange(cut.blocks * cut.size).reshape(cut) < FEATURES
        blocks = np.where(real[:, :, None] & real[:, None, :], blocks, 0)
        return kronecker.Kronecker(jnp.asarray(blocks, jnp.float32)).add_identity()

    def dense(precision: kronecker.Kronecker) -> np.ndarray:
        whole = np.zeros((cut.blocks * cut.size,) * 2)
        for place, block in enumerate(np.asarray(precision.blocks, np.float64)):
            rows = slice(place * cut.size, (place + 1) * cut.size)
            whole[rows, rows] = block
        return np.kron(whole[:FEATURES, :FEATURES], np.eye(OUTPUTS))

    numbers = cut.blocks * cut.size * (cut.size + 1) // 2
    return Structure(make(), make(), dense, numbers)


STRUCTURES = {
    "kronecker": in_kronecker_blocks(FEATURES),
    "kronecker in blocks": in_kronecker_blocks(4),
    "kronecker's diagonal": in_kronecker_blocks(1),
}
V = jnp.asarray(np.random.default_rng(1).standard_normal((FEATURES, OUTPUTS)), jnp.float32)


@pytest.fixture(name="structure", params=STRUCTURES)
def _structure(request):
    return STRUCTURES[request.param]


def close(found, wanted):
    np.testing.assert_allclose(np.ravel(found), np.ravel(wanted), rtol=2e-5, atol=2e-5)


def test_every_structure_of_the_package_is_here():
    modules = [
        importlib.import_module(f"{precisions.__name__}.{info.name}")
        for info in pkgutil.iter_modules(precisions.__path__)
    ]
    classes = {c for module in modules for c in vars(module).values() if isinstance(c, type)}
    # The names of the interface, not `isinstance`, which would not see what a structure lacks.
    found = {c for c in classes - {fedpa.Precision} if {"add", "scale", "times"} & set(dir(c))}
    assert found == {type(structure.one) for structure in STRUCTURES.values()}


def test_it_is_a_pytree_with_the_interface(structure):
    assert isinstance(structure.one, fedpa.Precision)
    leaves, tree = jax.tree.flatten(structure.one)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert type(jax.tree.unflatten(tree, leaves)) is type(structure.one)


def test_add_and_scale(structure):
    one, other, dense, _ = structure
    close(dense(one.add(other)), dense(one) + dense(other))
    close(dense(one.scale(2.5)), 2.5 * dense(one))
    # What aggregation does with it: a weighted sum of its arrays.
    summed = jax.tree.map(lambda a, b: 2 * a + 3 * b, one, other)
    close(dense(summed), dense(one.scale(2.0).add(other.scale(3.0))))


def test_times_and_solve(structure):
    one, _, dense, _ = structure
    matrix, v = dense(one), np.asarray(V, np.float64).ravel()
    close(jax.jit(lambda one, v: one.times(v))(one, V), matrix @ v)
    close(jax.jit(lambda one, v: one.solve(v))(one, V), np.linalg.solve(matrix, v))


def test_logdet_and_num_numbers(structure):
    one, _, dense, numbers = structure
    close(jax.jit(lambda one: one.logdet(V))(one), np.linalg.slogdet(dense(one))[1])
    assert one.num_numbers == numbers


def test_samples_have_the_inverse_as_covariance(structure):
    """Each entry within five of its standard errors."""
    one, _, dense, _ = structure
    draw = jax.jit(jax.vmap(lambda key: one.sample(V, key)))
    draws = np.asarray(draw(jax.random.split(jax.random.key(0), 20_000)), np.float64)
    flat = draws.reshape(len(draws), -1)
    covariance = np.linalg.inv(dense(one))
    variances = np.diag(covariance)
    error = np.sqrt((covariance**2 + np.outer(variances, variances)) / len(flat))
    np.testing.assert_array_less(np.abs(flat.T @ flat / len(flat) - covariance), 5 * error)
    assert np.abs(flat.mean(axis=0) / np.sqrt(variances / len(flat))).max() < 5


def test_what_was_factorized_is_solved_with_alike():
    one = STRUCTURES["kronecker in blocks"].one
    factor = one.factorize()
    np.testing.assert_array_equal(factor.solve(V), one.solve(V))
    np.testing.assert_array_equal(factor.logdet(V), one.logdet(V))
