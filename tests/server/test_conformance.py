"""What every aggregation must do. A new one joins by being listed in AGGREGATIONS."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpa.server import parse_aggregation
from fedpa.server.aggregation import merge_pairwise, shape_of_sum


def compile_parts(aggregation):
    """Compiled once for each number of rows: eager loops are compiled at every call."""
    names = ("add", "merge", "value")
    return aggregation._replace(**{name: jax.jit(getattr(aggregation, name)) for name in names})


AGGREGATIONS = {
    name: compile_parts(parse_aggregation(name))
    for name in (
        "weighted-mean",
        "clipped-mean:100",
        "centered-clipping",
        "trimmed-mean:0.4",
        "median",
        "geometric-median",
        "multi-krum:1",
        "bucketing:2:trimmed-mean:0.4",
    )
}


@pytest.fixture(params=AGGREGATIONS, name="aggregation")
def _aggregation(request):
    return AGGREGATIONS[request.param]


def tree(values):
    return {"a": jnp.asarray(values[:2], jnp.float32), "b": jnp.asarray(values[2], jnp.float32)}


def scalar(value):
    return jnp.asarray(value, jnp.float32)


def clients(num, seed=0):
    """(result, weight) of each."""
    rng = np.random.default_rng(seed)
    rows, weights = rng.standard_normal((num, 3)), rng.integers(1, 9, num)
    return [(tree(row), scalar(weight)) for row, weight in zip(rows, weights, strict=True)]


def total_of(aggregation, rows):
    """The sum, and who was accepted."""
    total, flags = aggregation.init(tree(np.zeros(3)), scalar(0)), []
    for result, weight in rows:
        total, accepted = aggregation.add(total, result, weight)
        flags.append(bool(accepted))
    return total, flags


def assert_equal(one, other, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), one, other
    )


def test_value_has_the_results_structure_and_the_sum_of_weights(aggregation):
    rows = clients(6)
    total, flags = total_of(aggregation, rows)
    value = aggregation.value(total)
    assert jax.tree.map(jnp.shape, value.mean) == jax.tree.map(jnp.shape, rows[0][0])
    assert float(value.weight) == sum(float(weight) for _, weight in rows)
    assert all(flags)


@pytest.mark.parametrize("num", [1, 2, 4])
def test_too_few_results_have_weight_zero(aggregation, num):
    """The server then leaves the model unchanged."""
    value = aggregation.value(total_of(aggregation, clients(num))[0])
    assert (float(value.weight) > 0) == (num >= aggregation.least_clients)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(value))


def test_weights_count_as_it_says(aggregation):
    rows = clients(6)
    same = aggregation.value(total_of(aggregation, [(row, scalar(2)) for row, _ in rows])[0]).mean
    own = aggregation.value(total_of(aggregation, rows)[0]).mean
    equal = jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-4), own, same)
    assert all(jax.tree.leaves(equal)) != aggregation.is_weighted


@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_neither_order_nor_partial_sums_make_a_difference(aggregation, num):
    """Engines begin a sum for every client, and merge them in pairs."""
    rows = clients(num, seed=num)
    whole = aggregation.value(total_of(aggregation, rows)[0])
    assert_equal(aggregation.value(total_of(aggregation, rows[::-1])[0]), whole)
    for cut in range(num + 1):
        parts = [total_of(aggregation, rows[:cut])[0], total_of(aggregation, rows[cut:])[0]]
        assert_equal(aggregation.value(aggregation.merge(*parts)), whole)
        assert_equal(aggregation.value(aggregation.merge(*parts[::-1])), whole)
    alone = [total_of(aggregation, [row])[0] for row in rows]
    while len(alone) > 1:
        alone = [aggregation.merge(alone[0], alone[1]), *alone[2:]][::-1]
    assert_equal(aggregation.value(alone[0]), whole)


@pytest.mark.parametrize("num", [5, 6])
def test_clients_that_agree_are_given_back_what_they_sent(aggregation, num):
    result = tree([0.1, -0.2, 0.3])
    rows = [(result, weight) for _, weight in clients(num)]
    assert_equal(aggregation.value(total_of(aggregation, rows)[0]).mean, result)


@pytest.mark.parametrize(
    ("values", "weight"),
    [
        ([np.nan, 0, 0], 1.0),
        ([0, 0, np.inf], 1.0),
        ([1, 1, 1], np.nan),
        ([1, 1, 1], np.inf),
        ([1, 1, 1], -1.0),
    ],
)
def test_what_is_not_finite_is_rejected_and_changes_nothing(aggregation, values, weight):
    rows = clients(6)
    total, flags = total_of(aggregation, [*rows[:2], (tree(values), scalar(weight)), *rows[2:]])
    assert flags == [True, True, False, True, True, True, True]
    assert_equal(aggregation.value(total), aggregation.value(total_of(aggregation, rows)[0]), 0)


def test_weight_zero_changes_nothing(aggregation):
    """Lanes without a client have it."""
    rows = clients(6)
    total, _ = total_of(aggregation, [*rows[:2], (tree([50, -50, 50]), scalar(0)), *rows[2:]])
    assert_equal(aggregation.value(total), aggregation.value(total_of(aggregation, rows)[0]), 0)


def test_no_client_has_weight_zero(aggregation):
    value = aggregation.value(total_of(aggregation, [])[0])
    assert float(value.weight) == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(value))


def test_compiles_and_vectorizes(aggregation):
    """Shapes alone begin a sum; its shapes follow from the number of clients."""
    rows = clients(6)
    like = jax.eval_shape(lambda: rows[0])
    total = aggregation.init(*like)
    lanes = jax.tree.map(lambda *xs: jnp.stack(xs), *rows)

    @jax.jit
    def together(result, weight):
        totals, accepted = jax.vmap(aggregation.add, in_axes=(None, 0, 0))(total, result, weight)
        return merge_pairwise(aggregation, totals), accepted

    merged, accepted = together(*lanes)
    one = jax.eval_shape(aggregation.add, total, *rows[0])[0]
    expected = shape_of_sum(aggregation, one, len(rows))
    assert jax.tree.map(jnp.shape, merged) == jax.tree.map(jnp.shape, expected)
    assert accepted.all()
    expected = aggregation.value(total_of(aggregation, rows)[0])
    assert_equal(jax.jit(aggregation.value)(merged), expected)
