import jax.numpy as jnp
import numpy as np
import pytest

from fedpa import FedpaError, Server, server
from fedpa.server import averaging, schedules, update
from tests.federations import trees_equal
from tests.refusals import refused

THETA = {"w": jnp.array([1.0, 2.0])}
ONE = jnp.asarray(1.0)


@pytest.mark.parametrize("optimizer", [server.sgd(1.0, 0.9), server.adam(1.0), server.adagrad(1.0)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_aggregate_leaves_everything_as_it_was(optimizer, bad):
    side = Server(optimizer, averaging=averaging.polyak())
    state, _ = update.update(side, update.init(side, THETA), {"w": jnp.array([0.5, 0.5])}, ONE)
    after, info = update.update(side, state, {"w": jnp.array([bad, 0.0])}, ONE)
    assert bool(info.skipped)
    assert trees_equal(after, state)


def test_no_client_no_step():
    """With momentum, a zero mean of no client would still move θ."""
    side = Server(server.sgd(1.0, 0.9))
    state, _ = update.update(side, update.init(side, THETA), {"w": jnp.array([0.5, 0.5])}, ONE)
    after, info = update.update(side, state, {"w": jnp.zeros(2)}, jnp.asarray(0.0))
    assert bool(info.skipped)
    assert trees_equal(after, state)


def test_a_step_that_overflows_is_not_taken():
    side = Server(server.sgd(1e30))
    state = update.init(side, THETA)
    after, info = update.update(side, state, {"w": jnp.array([1e30, 0.0])}, ONE)
    assert bool(info.skipped)
    assert trees_equal(after, state)


def test_a_finite_delta_that_would_poison_the_optimizer_is_not_taken():
    """Its square overflows: with v = ∞ the coordinate would never move again."""
    side = Server(server.adam(0.1))
    state = update.init(side, THETA)
    after, info = update.update(side, state, {"w": jnp.array([1e20, 1.0])}, ONE)
    assert bool(info.skipped)
    assert trees_equal(after, state)


def test_rate_multiplies_the_step():
    side = Server(server.sgd(0.5))
    state, info = update.update(side, update.init(side, THETA), {"w": jnp.ones(2)}, ONE, 3.0)
    np.testing.assert_allclose(state.theta["w"], [-0.5, 0.5])
    assert not bool(info.skipped)


def test_averaging():
    thetas = [jnp.asarray(x) for x in (1.0, 2.0, 6.0)]

    def averaged(kind):
        state = kind.init(jnp.asarray(0.0))
        for theta in thetas:
            state = kind.update(state, theta)
        return float(kind.value(state))

    assert averaged(averaging.none()) == 6.0
    assert averaged(averaging.polyak()) == pytest.approx(3.0)
    assert averaged(averaging.polyak(1)) == pytest.approx(4.0)
    assert averaged(averaging.polyak(9)) == 6.0
    assert averaged(averaging.exponential(0.5)) == pytest.approx(0.5 * 1.5 + 3.0)


def test_averages_are_what_is_evaluated_not_what_is_sent():
    side = Server(server.sgd(1.0), averaging=averaging.polyak())
    state = update.init(side, {"w": jnp.array([0.0])})
    for _ in range(2):
        state, _ = update.update(side, state, {"w": jnp.array([1.0])}, ONE)
    np.testing.assert_allclose(state.theta["w"], [-2.0])
    np.testing.assert_allclose(update.parameters(side, state)["w"], [-1.5])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("constant", [1, 1, 1]),
        ("exponential:0.5", [1, 0.5, 0.25]),
        ("exponential:0.25:2", [1, 0.5, 0.25]),
        ("inverse-time", [1, 1 / 2, 1 / 3]),
        ("inverse-time:2", [1, 2 / 3, 1 / 2]),
        ("inverse-sqrt", [1, 1 / np.sqrt(2), 1 / np.sqrt(3)]),
        ("constant,warmup:2", [1 / 2, 1, 1]),
        ("step:0:0.5", [0.5, 0.5, 0.5]),
        ("step:2:0.5", [1, 1, 0.5]),
        ("step:1:3,warmup:2", [1 / 2, 3, 3]),
    ],
)
def test_schedules(text, expected):
    schedule = schedules.parse(text)
    np.testing.assert_allclose([schedule(jnp.asarray(t)) for t in range(3)], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "linear",
        "exponential",
        "exponential:-1",
        "exponential:x",
        "constant:1",
        "constant,warmup",
        "constant,warmup:0",
        "constant,cosine:3",
        "step",
        "step:3",
        "step:3:0",
        "step:3:inf",
        "step:-1:0.1",
        "step:1.5:0.1",
        "step:3:0.1:1",
        "",
    ],
)
def test_bad_schedules_are_refused(text):
    with refused("client_schedule ="):
        schedules.parse(text, "client_schedule")


def test_a_step_takes_a_round_and_a_factor():
    with refused("round = -1"):
        schedules.step(-1, 0.1)
    with refused("factor = 0.0"):
        schedules.step(3, 0.0)


@pytest.mark.parametrize("text", ["constant", "step:4:0.1", "step:4:0.1,warmup:2", "exponential:1"])
@pytest.mark.parametrize("rounds", [4, 5])
def test_a_cut_schedule_is_the_same_in_its_rounds(text, rounds):
    whole, short = schedules.parse(text), schedules.parse(schedules.cut(text, rounds))
    assert [float(whole(t)) for t in range(rounds)] == [float(short(t)) for t in range(rounds)]
    assert ("step" in schedules.cut(text, rounds)) == ("step" in text and rounds == 5)


@pytest.mark.parametrize("text", ["polyakk", "polyak:-1", "exponential:1", "exponential", "none:3"])
def test_bad_averaging_is_refused(text):
    with refused("iterate_averaging ="):
        averaging.parse(text)


def test_swag_keeps_mean_variance_and_the_latest_deviations():
    """Of the third and every second later iterate, against NumPy."""
    kind = averaging.swag(start=2, rank=2, every=2)
    thetas = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    state = kind.init(jnp.zeros(3))
    for count, theta in enumerate(thetas, start=1):
        state = kind.update(state, jnp.asarray(theta))
        taken = thetas[2:count:2]
        wanted = theta if count <= 2 else taken.mean(axis=0)
        np.testing.assert_allclose(kind.value(state), wanted, rtol=1e-5, atol=1e-6)
    assert int(state.members) == len(taken) == 3
    np.testing.assert_allclose(state.spread, 3 * taken.var(axis=0), rtol=1e-4)
    means = [taken[: k + 1].mean(axis=0) for k in range(3)]
    latest = [taken[2] - means[2], taken[1] - means[1]]  # the third replaced the first
    np.testing.assert_allclose(state.deviations, latest, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "sd"), [(jnp.float32, 1e-4), (jnp.bfloat16, 0.02)])
def test_swag_measures_small_spreads(dtype, sd):
    """Of iterates around 1, against their variance in float64, whatever their dtype."""
    rng = np.random.default_rng(1)
    thetas = jnp.asarray(1 + sd * rng.normal(size=(50, 4)), dtype)
    kind = averaging.swag()
    state = kind.init(thetas[0])
    for theta in thetas:
        state = kind.update(state, theta)
    exact = np.asarray(thetas, np.float64)
    np.testing.assert_allclose(state.spread / 50, exact.var(axis=0), rtol=1e-2)
    assert kind.value(state).dtype == dtype


@pytest.mark.parametrize("text", ["swag:-1", "swag:2:1", "swag:a", "swag:1:2:3"])
def test_bad_swag_is_refused(text):
    with pytest.raises(FedpaError):
        averaging.parse(text)
