from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.objectives import Quadratic, client_data
from fedpa.samplers import draw, draw_chains, exact
from fedpa.samplers.diagnostics import (
    Diagnostics,
    autocorrelation_ess,
    bulk_ess,
    diagnose,
    judge,
    kish_ess,
    measure_mixing,
    worst,
)
from tests.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:draws can't be trusted")

CHAINS, NUM = 4, 500
POSTERIOR = Quadratic(jnp.arange(12.0), jnp.diag(jnp.linspace(0.5, 3.0, 12)), jnp.asarray(50.0))
EXAMPLES = {"z": np.zeros((50, 1), np.float32)}


class Info(NamedTuple):
    loss: np.ndarray


class HamiltonianLike(NamedTuple):
    loss: np.ndarray
    acceptance: np.ndarray
    divergent: np.ndarray


def no_infos(draws):
    return Info(np.zeros(np.shape(draws)[:2]))


def autoregressive(correlation, shape, seed=0):
    """Chains whose effective sample size is (1 − φ)/(1 + φ) of their length."""
    rng = np.random.default_rng(seed)
    chains, num, columns = shape
    draws = np.empty(shape)
    draws[:, 0] = rng.standard_normal((chains, columns))
    for t in range(1, num):
        noise = rng.standard_normal((chains, columns))
        draws[:, t] = correlation * draws[:, t - 1] + np.sqrt(1 - correlation**2) * noise
    return draws


log_weights = st.lists(st.floats(-500, 500), min_size=1, max_size=50).map(np.array)


@given(log_weights)
def test_kish_is_between_one_and_the_number_of_samples(logs):
    assert 1 - 1e-9 <= kish_ess(logs) <= len(logs) + 1e-9


@given(log_weights, st.floats(-1e4, 1e4))
def test_kish_knows_weights_up_to_a_factor(logs, constant):
    # Adding a constant rounds the logs themselves.
    np.testing.assert_allclose(kish_ess(logs + constant), kish_ess(logs), rtol=1e-8)


@given(st.floats(-1e5, 1e5), st.integers(1, 200))
def test_kish_of_equal_weights_is_their_number(value, number):
    assert kish_ess(np.full(number, value)) == pytest.approx(number)


@given(log_weights)
def test_kish_of_one_dominating_weight_is_one(logs):
    assert kish_ess(np.append(logs, 2_000.0)) == pytest.approx(1.0)


def test_kish_works_along_the_last_axis_and_a_divergence_has_none():
    logs = np.zeros((2, 3, 5))
    logs[0, 1, 2], logs[1, 0, 0] = -np.inf, np.nan
    found = kish_ess(logs)
    assert found.shape == (2, 3)
    assert np.isnan(found[[0, 1], [1, 0]]).all()
    assert np.sum(found == 5) == 4


@pytest.mark.parametrize(("dim", "share"), [(2, 0.75), (10, 0.2373)])
@pytest.mark.parametrize("spread", [1.0, 0.2])
def test_kish_of_gaussian_draws_falls_with_the_dimension_however_exact_they_are(dim, share, spread):
    rng = np.random.default_rng(0)
    z = np.sqrt(spread) * rng.standard_normal((50, 10_000, dim))
    ratios = kish_ess(-0.5 * np.sum(z**2, axis=-1)) / z.shape[1]
    law = ((1 + 2 * spread) / (1 + spread) ** 2) ** (dim / 2)
    if spread == 1:
        assert law == pytest.approx(share, abs=1e-4)
    error = ratios.std(ddof=1) / np.sqrt(len(ratios))
    assert error < 0.01 * law, "too few draws to tell"
    assert abs(ratios.mean() - law) < 4 * error


def test_chains_are_draws_with_keys_of_their_own():
    sampler = exact(lambda data: POSTERIOR)
    starts = jnp.stack([jnp.zeros(12), jnp.ones(12)])
    samples, infos = draw_chains(sampler, starts, EXAMPLES, jax.random.key(3), 5)
    assert samples.shape == (2, 5, 12)
    assert infos.loss.shape == (2, 5)
    assert not np.allclose(samples[0], samples[1])
    keys = jax.random.split(jax.random.key(3), 2)
    for chain in range(2):
        alone, _ = draw(sampler, starts[chain], EXAMPLES, keys[chain], 5)
        np.testing.assert_allclose(samples[chain], alone, rtol=1e-5)


def test_chains_can_be_compiled():
    """With examples among the arguments, too."""
    sampler = exact(lambda data: POSTERIOR)
    run = jax.jit(lambda s, data: draw_chains(sampler, s, data, jax.random.key(3), 5)[0])
    for data in (EXAMPLES, client_data(EXAMPLES)):
        assert run(jnp.zeros((3, 12)), data).shape == (3, 5, 12)
    alone = jax.jit(lambda data: draw(sampler, jnp.zeros(12), data, jax.random.key(3), 5)[0])
    assert alone(EXAMPLES).shape == (5, 12)


@pytest.mark.parametrize(
    ("function", "start"), [(draw, jnp.zeros(12)), (draw_chains, jnp.zeros((2, 12)))]
)
def test_a_sampler_is_compiled_once(function, start):
    traced = []
    sampler = exact(lambda data: traced.append(1) or POSTERIOR)
    first, _ = function(sampler, start, EXAMPLES, jax.random.key(0), 3)
    assert traced
    traced.clear()
    again, _ = function(sampler, start + 1, EXAMPLES, jax.random.key(0), 3)
    assert not traced
    np.testing.assert_allclose(again, first, rtol=1e-5)


def test_exact_draws_are_as_many_as_they_are():
    sampler = exact(lambda data: POSTERIOR)
    starts = jnp.zeros((CHAINS, 12))
    found = diagnose(*draw_chains(sampler, starts, EXAMPLES, jax.random.key(0), NUM))
    assert found.rhat.shape == found.ess.shape == (12,)
    assert (np.abs(found.rhat - 1) < 0.01).all()
    # The estimate of one coordinate scatters by about 10 % at this length.
    assert (np.abs(found.ess / (CHAINS * NUM) - 1) < 0.35).all()
    assert abs(found.ess.mean() / (CHAINS * NUM) - 1) < 0.1
    assert found.acceptance is None
    assert found.divergences is None


@pytest.mark.parametrize("estimate", [autocorrelation_ess, bulk_ess])
def test_correlated_draws_are_fewer(estimate):
    found = estimate(autoregressive(0.6, (CHAINS, 2_000, 20))) / (CHAINS * 2_000)
    assert found.mean() == pytest.approx(0.25, rel=0.1)


def test_a_transient_takes_in_the_plain_estimate_but_not_that_of_ranks():
    draws = autoregressive(0.6, (CHAINS, NUM, 20))
    draws[:, 0] += 1e3
    assert autocorrelation_ess(draws).mean() > 0.9 * CHAINS * NUM
    assert bulk_ess(draws).mean() == pytest.approx(0.25 * CHAINS * NUM, rel=0.2)


def test_chains_stuck_at_different_places_are_told_apart():
    draws = np.random.default_rng(0).standard_normal((CHAINS, NUM, 2))
    draws[:, :, 1] = 0.1 * draws[:, :, 1] + np.arange(CHAINS)[:, None]
    found = diagnose(draws, no_infos(draws))
    assert found.rhat[0] < 1.01
    assert found.rhat[1] > 2
    assert found.ess[1] < 3 * CHAINS
    assert worst(found) == (found.rhat[1], found.ess[1])
    constant = np.broadcast_to(np.arange(2.0)[:, None, None], (2, 10, 1))
    found = diagnose(constant, no_infos(constant))
    assert found.rhat[0] == np.inf
    assert found.ess[0] == 0


def test_what_can_not_be_known_is_nan_and_the_rest_unharmed():
    draws = np.random.default_rng(0).standard_normal((CHAINS, NUM, 4))
    alone = diagnose(draws[:, :, 3], no_infos(draws))
    draws[:, :, 0] = 7.0
    draws[1, 2, 1], draws[1, 2, 2] = np.nan, np.inf
    found = diagnose(draws, no_infos(draws))
    for values, expected in ((found.rhat, alone.rhat), (found.ess, alone.ess)):
        assert np.isnan(values[:3]).all()
        assert values[3] == pytest.approx(float(expected), rel=1e-5)
    assert np.isnan(worst(found)).all()


def test_shift_and_scale_change_nothing():
    draws = autoregressive(0.5, (2, 100, 3))
    moved = {"w": 1e4 + 1e-3 * draws[:, :, :2], "b": 1e30 * draws[:, :, 2]}
    plain, found = (diagnose(x, no_infos(draws)) for x in (draws, moved))
    assert jax.tree.structure(found.rhat) == jax.tree.structure(moved)
    assert found.ess["b"].shape == ()
    for of_plain, of_moved in ((plain.rhat, found.rhat), (plain.ess, found.ess)):
        joined = np.append(of_moved["w"], of_moved["b"])
        np.testing.assert_allclose(joined, of_plain, rtol=1e-3)


@pytest.mark.long
def test_more_parameters_than_fit_at_once(monkeypatch):
    draws = np.random.default_rng(0).standard_normal((2, 50, 7))
    together = autocorrelation_ess(draws)
    monkeypatch.setattr("fedpa.samplers.diagnostics.BLOCK", 2 * 50 * 3)
    np.testing.assert_allclose(autocorrelation_ess(draws), together, rtol=1e-5)
    monkeypatch.setattr("fedpa.samplers.diagnostics.BLOCK", 1)
    np.testing.assert_allclose(autocorrelation_ess(draws), together, rtol=1e-5)


def test_bfloat16_draws_are_diagnosed():
    draws = np.random.default_rng(0).standard_normal((2, 100, 2)).astype(jnp.bfloat16)
    assert np.isfinite(diagnose(draws, no_infos(draws)).ess).all()


def test_acceptance_and_divergences_are_reported_where_known():
    draws = np.random.default_rng(0).standard_normal((2, 100, 1))
    acceptance = np.array([[0.5, 1.0] * 50] * 2, np.float32)
    divergent = np.zeros((2, 100), int)
    divergent[0, 1], divergent[1, 0] = 2, 1
    found = diagnose(draws, HamiltonianLike(acceptance, acceptance, divergent))
    assert isinstance(found, Diagnostics)
    assert found.acceptance == 0.75
    assert found.divergences == 3


@pytest.mark.parametrize(
    ("rhat", "ess", "divergences", "named"),
    [
        (1.01, 100.0, 0, []),
        (1.0, 5_000.0, None, []),
        (1.011, 100.0, 0, ["R̂ = 1.011"]),
        (np.nan, 100.0, 0, ["R̂ = nan"]),
        (1.0, 99.0, None, ["ESS = 99"]),
        (1.0, np.nan, None, ["ESS = nan"]),
        (1.0, 100.0, 1, ["divergences = 1"]),
        (np.inf, 0.0, 7, ["R̂ = inf", "ESS = 0", "divergences = 7"]),
    ],
)
def test_every_reason_not_to_trust_draws_is_named(rhat, ess, divergences, named):
    reasons = judge(rhat, ess, divergences)
    assert len(reasons) == len(named)
    for reason, name in zip(reasons, named, strict=True):
        assert reason.startswith(name)


@pytest.mark.filterwarnings("error")
def test_diagnose_warns_of_draws_that_can_not_be_trusted():
    good = np.random.default_rng(0).standard_normal((CHAINS, 2_000, 2))
    diagnose(good, no_infos(good))
    apart = good + np.arange(CHAINS)[:, None, None]
    with pytest.warns(UserWarning, match="R̂ = .*ESS = ") as caught:
        diagnose(apart, no_infos(apart))
    assert "\n" not in str(caught[0].message)
    divergent = np.zeros((CHAINS, 2_000), int)
    divergent[2, 3] = 1
    infos = HamiltonianLike(np.zeros(divergent.shape), np.ones(divergent.shape), divergent)
    with pytest.warns(UserWarning, match="divergences = 1"):
        diagnose(good, infos)


def test_compiled_diagnostics_are_those_of_the_host():
    """Vectorized over clients: mixed, apart, far from zero, stuck, constant, not finite."""
    mixed = autoregressive(0.6, (CHAINS, NUM, 3))
    apart = mixed + 0.5 * np.arange(CHAINS)[:, None, None]
    stuck, constant, broken = mixed.copy(), mixed.copy(), mixed.copy()
    stuck[:, :, 1] = np.arange(CHAINS)[:, None]
    constant[:, :, 1], broken[1, 2, 0] = 3.0, np.nan
    clients = [mixed, apart, 1e3 + mixed, 1e-6 * mixed, stuck, constant, broken]
    clients = np.stack(clients).astype(np.float32)
    found = jax.jit(jax.vmap(measure_mixing))(jnp.asarray(clients))
    hosts = [worst(diagnose(draws, no_infos(draws))) for draws in clients]
    np.testing.assert_allclose(found.rhat, [host.rhat for host in hosts], rtol=1e-3)
    np.testing.assert_allclose(found.ess, [host.ess for host in hosts], rtol=1e-2)
    one = jax.jit(measure_mixing)(jnp.asarray(clients[0, :, :, :1]))
    assert one.rhat.shape == one.ess.shape == ()


def one_chain():
    return draw(exact(lambda data: POSTERIOR), jnp.zeros(12), EXAMPLES, jax.random.key(0), 20)


@pytest.mark.parametrize(
    ("attempt", "anchors"),
    [
        (lambda run: run(num=0), ["num = 0"]),
        (lambda run: run(data={"z": np.array([[np.nan]])}), ["z[0, 0] = nan"]),
        (lambda run: run(starts={"a": jnp.zeros((2, 3)), "b": jnp.zeros(())}), ["starts"]),
        (lambda run: run(starts={"a": jnp.zeros((2, 3)), "b": jnp.zeros(3)}), ["starts"]),
        (lambda run: run(starts=jnp.zeros((0, 3))), ["starts"]),
        (lambda run: diagnose(np.zeros((1, 9, 2)), None), ["chains = 1"]),
        (lambda run: diagnose(*run(num=3)), ["num = 3"]),
        (lambda run: diagnose(*one_chain()), ["infos.loss", "(20,)"]),
        (lambda run: diagnose(np.zeros(3), None), ["samples", "(3,)"]),
        (lambda run: diagnose([np.zeros((2, 9)), np.zeros((2, 8))], None), ["samples"]),
        (lambda run: measure_mixing(jnp.zeros((1, 9, 2))), ["draws = (1, 9, 2)"]),
        (lambda run: measure_mixing(jnp.zeros((2, 3, 2))), ["draws = (2, 3, 2)"]),
        (lambda run: kish_ess([]), ["log_weights = (0,)"]),
        (lambda run: kish_ess(1.0), ["log_weights = ()"]),
    ],
)
def test_refusals(attempt, anchors):
    def run(starts=jnp.zeros((2, 12)), data=EXAMPLES, num=3):
        sampler = exact(lambda data: POSTERIOR)
        return draw_chains(sampler, starts, data, jax.random.key(0), num)

    with refused(*anchors):
        attempt(run)


def test_the_limit_of_rhat_can_be_chosen():
    assert judge(1.03, 900.0)
    assert not judge(1.03, 900.0, most_rhat=1.05)
    assert judge(float("nan"), 900.0, most_rhat=1.05)
