"""D, from Δ̄ and A, by both filters; A's blocks, its memory, and the sums it is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.algorithms.fedopt import Sent
from fedpa.algorithms.global_precision import (
    init_precision,
    make_gain,
    precondition,
    unpack_factors,
    update_precision,
)
from fedpa.objectives.layer_inputs import Layer
from fedpa.precisions.kronecker import Gram, Kronecker, Sketch, cut, split_rows
from fedpa.server import weighted_mean
from tests.federations import trees_equal

RNG = np.random.default_rng(0)
FEATURES, OUTPUTS, EPSILON, DECAY = 7, 3, 0.5, 0.8
RIDGE = make_gain("ridge", EPSILON, 1.0)
LAYER = Layer((2,), (6,), OUTPUTS, 0, out_first=False, table=False)
DELTA = {
    name: jnp.asarray(RNG.standard_normal(shape), jnp.float32)
    for name, shape in [("bias", 3), ("norm", 4), ("weight", (6, 3))]
}
STACKED = np.concatenate([np.asarray(DELTA["bias"])[None], np.asarray(DELTA["weight"])])


def spd(seed=0):
    x = np.random.default_rng(seed).standard_normal((20, FEATURES)).astype(np.float32)
    return x.T @ x / 20


def in_parts(matrix, largest):
    """The diagonal blocks, stacked."""
    blocks, size = cut(FEATURES, largest)
    whole = np.zeros((blocks * size,) * 2, np.float32)
    whole[:FEATURES, :FEATURES] = matrix
    parts = [whole[i : i + size, i : i + size] for i in range(0, len(whole), size)]
    return Kronecker(jnp.asarray(parts))


def after(largest, *matrices, weight=1.0):
    state = jax.jit(lambda: init_precision([LAYER], DELTA, largest))()
    for matrix in matrices:
        state = updated(state, in_parts(matrix, largest), jnp.asarray(weight))
    return state


@jax.jit
def updated(state, blocks, weight):
    return update_precision(state, [LAYER], [blocks], weight, decay=DECAY, gain=RIDGE)


def stepped(state, gain=RIDGE):
    return jax.jit(lambda delta: precondition(state, [LAYER], delta, gain))(DELTA)


def normalized(averaged):
    """In units of the inputs' mean square: the first row and column are the bias's."""
    return averaged * (FEATURES - 1) / np.trace(averaged[1:, 1:])


def expected(averaged):
    bar = normalized(averaged)
    return EPSILON * np.linalg.solve(bar + EPSILON * np.eye(FEATURES), STACKED)


def check(step, wanted):
    np.testing.assert_allclose(step["bias"], wanted[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(step["weight"], wanted[1:], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(step["norm"], DELTA["norm"])


def test_the_formula_in_numpy():
    """Two rounds of A ← βA + (1 − β)A_t; a block that holds all is the dense formula."""
    one, two = spd(1), spd(2)
    averaged = DECAY * (1 - DECAY) * one + (1 - DECAY) * two
    state = after(FEATURES, one, two)
    np.testing.assert_allclose(state[0].averaged.blocks[0], averaged, rtol=1e-5)
    check(stepped(state), expected(averaged))
    bar = normalized(averaged)
    largest = np.linalg.eigvalsh(bar)[-1]
    assert 0.9 * largest < float(state[0].steepest) < 1.001 * largest


@pytest.mark.parametrize("largest", [1, 2, 3])
def test_blocks_leave_out_what_is_between_them(largest):
    """One feature a block is the diagonal."""
    matrix = spd()
    place = np.arange(FEATURES) // cut(FEATURES, largest).size
    blocked = np.where(place[:, None] == place[None], matrix, 0)
    check(stepped(after(largest, matrix)), expected(blocked))
    if largest == 1:
        bar = np.diagonal(normalized(matrix))
        check(stepped(after(1, matrix)), (EPSILON / (bar + EPSILON))[:, None] * STACKED)


@given(epsilon=st.floats(0.01, 10), kappa=st.floats(0.001, 10), seed=st.integers(0, 2**31))
def test_the_saturating_filter_in_numpy(epsilon, kappa, seed):
    """(I + κĀ)((1 + ε)κĀ + εI)⁻¹: 1/ε in flat directions, 1/(1 + ε) in steep ones."""
    gain = make_gain("saturating", epsilon, kappa)
    matrix = spd(seed)
    bar = normalized(matrix)
    state = init_precision([LAYER], DELTA, FEATURES)
    state = update_precision(
        state, [LAYER], [in_parts(matrix, FEATURES)], jnp.ones(()), decay=DECAY, gain=gain
    )
    one = np.eye(FEATURES)
    wanted = np.linalg.solve((1 + epsilon) * kappa * bar + epsilon * one, STACKED)
    wanted = wanted + kappa * bar @ wanted
    step = precondition(state, [LAYER], DELTA, gain)
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(step["bias"], wanted[0], atol=1e-3 * largest)
    np.testing.assert_allclose(step["weight"], wanted[1:], atol=1e-3 * largest)
    limits = [gain.direct + gain.divided / (1 + gain.steepness * x) for x in (0, 1e12)]
    np.testing.assert_allclose(limits, [1 / epsilon, 1 / (1 + epsilon)], rtol=1e-6)


@pytest.mark.parametrize("filter", ["ridge", "saturating"])
def test_before_the_first_sketch_the_gain_is_one(filter):
    check(stepped(after(FEATURES), make_gain(filter, 0.03, 0.05)), STACKED)


def test_a_layer_that_sent_nothing_keeps_its_average():
    state = after(FEATURES, spd())
    same = update_precision(state, [LAYER], [()], jnp.ones(()), decay=DECAY, gain=RIDGE)
    assert trees_equal(state, same)


def test_before_the_first_sketch_and_in_directions_without_inputs_the_gain_is_one():
    check(stepped(after(FEATURES)), STACKED)
    flat = np.diag([0, 0, 1, 1, 1, 1, 1.0])
    step = stepped(after(FEATURES, flat))
    np.testing.assert_allclose(step["bias"], DELTA["bias"], rtol=1e-5)
    np.testing.assert_allclose(step["weight"][0], DELTA["weight"][0], rtol=1e-5)
    shrunk = EPSILON / ((FEATURES - 1) / 5 + EPSILON)
    np.testing.assert_allclose(step["weight"][1:], shrunk * DELTA["weight"][1:], rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_scale_of_inputs_does_not_matter(scale):
    check(stepped(after(FEATURES, scale * spd())), expected(spd()))


def test_a_round_of_nobody_or_of_no_numbers_leaves_the_average():
    state = after(FEATURES, spd())
    for matrix, weight in [(spd(3), 0.0), (np.full((7, 7), np.nan), 1.0)]:
        same = updated(state, in_parts(matrix, FEATURES), jnp.asarray(weight))
        assert trees_equal(state, same)


def client(seed, **changes):
    z = np.random.default_rng(seed).standard_normal((FEATURES, 2)).astype(np.float32)
    fields = {"delta": {"w": jnp.full(2, float(seed))}, "factors": (Sketch(jnp.asarray(z)),)}
    fields |= changes
    return Sent(fields["delta"], (fields["factors"], jnp.asarray(2.0 * seed))), z


def test_sums_are_of_products_and_a_client_that_is_not_finite_is_left_out_whole():
    aggregation = unpack_factors(weighted_mean(), 4)
    sent = [client(seed)[0] for seed in range(3)]
    broken = Sketch(sent[1].more[0][0].z.at[0, 0].set(jnp.inf))
    sent[1] = sent[1]._replace(more=((broken,), sent[1].more[1]))
    weights = [jnp.asarray(q) for q in (1.0, 5.0, 3.0)]

    @jax.jit
    def added(results):
        totals = [
            aggregation.add(aggregation.init(result, q), result, q)
            for result, q in zip(results, weights, strict=True)
        ]
        merged = aggregation.merge(aggregation.merge(totals[0][0], totals[1][0]), totals[2][0])
        return aggregation.value(merged), [accepted for _, accepted in totals]

    (mean, weight), accepted = added(sent)
    assert [bool(a) for a in accepted] == [True, False, True]
    assert float(weight) == 4
    np.testing.assert_allclose(mean.delta["w"], [1.5, 1.5])
    z = [split_rows(jnp.asarray(client(seed)[1]), cut(FEATURES, 4)) for seed in (0, 2)]
    wanted = (z[0] @ z[0].swapaxes(1, 2) + 3 * z[1] @ z[1].swapaxes(1, 2)) / 4
    factors, square = mean.more
    np.testing.assert_allclose(factors[0].blocks, wanted, rtol=1e-5, atol=1e-6)
    assert float(square) == 3  # (1·0 + 3·4)/4


def test_exact_factors_add_up_and_rounds_without_have_none():
    aggregation = unpack_factors(weighted_mean(), 4)

    @jax.jit
    def twice(result):
        q = jnp.asarray(2.0)
        total, accepted = aggregation.add(aggregation.init(result, q), result, q)
        return aggregation.value(aggregation.merge(total, total)).mean, accepted

    triangle = Gram(jnp.arange(6.0)[None])  # of one block of 3
    mean, accepted = twice(client(1, factors=(triangle, ()))[0])
    assert bool(accepted)
    (blocks, nothing), square = mean.more
    np.testing.assert_array_equal(blocks.blocks[0], [[0, 1, 2], [1, 3, 4], [2, 4, 5]])
    assert (nothing, float(square)) == ((), 2)
    assert twice(client(1, factors=())[0])[0].more[0] == ()


def test_the_bias_does_not_set_the_unit():
    """A bag of words' entries are hundredths: beside its 1 they would all be flat."""
    matrix = spd()
    matrix[0] = matrix[:, 0] = 0
    steps = []
    for bias in (1.0, 1e4):
        matrix[0, 0] = bias
        steps.append(stepped(after(1, matrix)))
    np.testing.assert_allclose(steps[0]["weight"], steps[1]["weight"], rtol=1e-5)
    assert np.abs(steps[1]["bias"] / steps[0]["bias"]).max() < 0.01
