import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedpa.server import weighted_mean
from fedpa.server.aggregation import client_weight
from tests.strategies import SIXTEENTHS, arrays, powers_of_two

MEAN = weighted_mean()
ADD, VALUE = jax.jit(MEAN.add), jax.jit(MEAN.value)


def tree(values):
    return {"a": jnp.asarray(values[:2], jnp.float32), "b": jnp.asarray(values[2], jnp.float32)}


def aggregate(results, weights):
    total = MEAN.init(results[0], weights[0])
    flags = []
    for result, weight in zip(results, weights, strict=True):
        total, ok = ADD(total, result, weight)
        flags.append(bool(ok))
    return VALUE(total), flags, total


def scalar(value):
    return jnp.asarray(value, jnp.float32)


WEIGHTS = st.builds(lambda size, number: size * abs(number), powers_of_two(-30, 20), SIXTEENTHS)
"""Counts, and shares of a large federation. Far smaller ones, whose product with a delta float32
does not hold (below 1.2e-38), are none of a client's."""


@given(rows=st.lists(st.tuples(arrays(3), WEIGHTS), min_size=1, max_size=6))
def test_is_the_weighted_mean(rows):
    """Σ q_i Δ_i / Σ q_i, not 1/|S| Σ q_i Δ_i; 0 where no weight is positive.

    To one rounding for each product, sum and quotient.
    """
    value, flags, _ = aggregate([tree(v) for v, _ in rows], [scalar(w) for _, w in rows])
    values, weights = np.array([v for v, _ in rows]), np.array([w for _, w in rows])
    total = weights.sum()
    expected = weights @ values / total if total > 0 else np.zeros(3)
    rounding = 2 * (len(rows) + 1) * np.finfo(np.float32).eps
    atol = rounding * np.abs(values).max()
    np.testing.assert_allclose(value.mean["a"], expected[:2], rtol=0, atol=atol)
    np.testing.assert_allclose(value.mean["b"], expected[2], rtol=0, atol=atol)
    np.testing.assert_allclose(value.weight, total, rtol=rounding)
    assert all(flags)


def test_each_subtree_may_have_its_own_weight():
    results = [
        {"delta": tree([1, 1, 1]), "control": scalar(1)},
        {"delta": tree([4, 4, 4]), "control": scalar(3)},
    ]
    weights = [
        {"delta": scalar(10), "control": scalar(1)},
        {"delta": scalar(20), "control": scalar(1)},
    ]
    value, _, _ = aggregate(results, weights)
    np.testing.assert_allclose(value.mean["delta"]["b"], 3.0)
    np.testing.assert_allclose(value.mean["control"], 2.0)
    assert float(value.weight["delta"]) == 30.0


def test_sums_are_kept_in_float32():
    """In float16 the weights of two large clients overflow; in bfloat16 a count stops at 256."""
    half = jnp.ones(2, jnp.float16)
    value, _, _ = aggregate([half] * 2, [scalar(40_000)] * 2)
    np.testing.assert_allclose(value.mean, 1.0)
    value, _, _ = aggregate([jnp.ones(2, jnp.bfloat16)] * 400, [scalar(1)] * 400)
    np.testing.assert_allclose(value.mean, 1.0)


def test_memory_is_that_of_one_result():
    _, _, total = aggregate([tree([1, 2, 3])] * 50, [scalar(1)] * 50)
    assert sum(leaf.size for leaf in jax.tree.leaves(total)) == 4


def test_weights():
    n = jnp.asarray(7, jnp.int32)
    assert float(client_weight("examples", n)) == 7.0
    assert float(client_weight("uniform", n)) == 1.0
    for kind in ("examples", "uniform"):
        assert float(client_weight(kind, jnp.asarray(0, jnp.int32))) == 0.0
