"""Every structure of a precision does what its dense matrix does. A new one joins by a row here."""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpa.precisions import kronecker

FEATURES, OUTPUTS = 7, 3


class Structure(NamedTuple):
    module: ModuleType
    one: Any
    other: Any
    dense: Any
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
        return kronecker.add_identity(kronecker.Kronecker(jnp.asarray(blocks, jnp.float32)))

    def dense(precision: kronecker.Kronecker) -> np.ndarray:
        whole = np.zeros((cut.blocks * cut.size,) * 2)
        for place, block in enumerate(np.asarray(precision.blocks, np.float64)):
            rows = slice(place * cut.size, (place + 1) * cut.size)
            whole[rows, rows] = block
        return np.kron(whole[:FEATURES, :FEATURES], np.eye(OUTPUTS))

    numbers = cut.blocks * cut.size * (cut.size + 1) // 2
    return Structure(kronecker, make(), make(), dense, numbers)


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


def test_add_and_scale(structure):
    module, one, other, dense, _ = structure
    close(dense(module.add(one, other)), dense(one) + dense(other))
    close(dense(module.scale(one, 2.5)), 2.5 * dense(one))


def test_times_and_solve(structure):
    module, one, _, dense, _ = structure
    matrix, v = dense(one), np.asarray(V, np.float64).ravel()
    close(jax.jit(module.times)(one, V), matrix @ v)
    close(jax.jit(module.solve)(one, V), np.linalg.solve(matrix, v))


def test_logdet_and_num_numbers(structure):
    module, one, _, dense, numbers = structure
    close(jax.jit(module.logdet)(one, V), np.linalg.slogdet(dense(one))[1])
    assert module.num_numbers(one) == numbers


def test_samples_have_the_inverse_as_covariance(structure):
    """Each entry within five of its standard errors."""
    module, one, _, dense, _ = structure
    draw = jax.jit(jax.vmap(lambda key: module.sample(one, V, key)))
    draws = np.asarray(draw(jax.random.split(jax.random.key(0), 20_000)), np.float64)
    flat = draws.reshape(len(draws), -1)
    covariance = np.linalg.inv(dense(one))
    variances = np.diag(covariance)
    error = np.sqrt((covariance**2 + np.outer(variances, variances)) / len(flat))
    np.testing.assert_array_less(np.abs(flat.T @ flat / len(flat) - covariance), 5 * error)
    assert np.abs(flat.mean(axis=0) / np.sqrt(variances / len(flat))).max() < 5


def test_what_was_factorized_is_solved_with_alike():
    one = STRUCTURES["kronecker in blocks"].one
    factor = kronecker.factorize(one)
    np.testing.assert_array_equal(kronecker.solve(factor, V), kronecker.solve(one, V))
    np.testing.assert_array_equal(kronecker.logdet(factor, V), kronecker.logdet(one, V))
