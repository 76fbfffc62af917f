"""Samplers with a temperature: limits that tie them to each other, adaptation, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpa import FedpaError, Objective
from fedpa.objectives import client_data, client_loss
from fedpa.samplers import Epochs, Steps, draw, hmc, iasg, nuts, sghmc, sgld
from tests.compiling import QUICK
from tests.federations import trees_equal
from tests.samplers.covariances import langevin_covariance, underdamped_covariance
from tests.samplers.gaussian import HESSIAN, check_gaussian, target

TARGET = target(capacity=64)
A = jnp.asarray(HESSIAN, jnp.float32)
START = jnp.array([4.0, 4.0])


def samples(sampler, num=5, start=START, key=0):
    run = jax.jit(lambda k: draw(sampler, start, TARGET.data, k, num), compiler_options=QUICK)
    return run(jax.random.key(key))


def test_cold_langevin_is_local_sgd():
    """T → 0 leaves local SGD, on the very mini-batches that IASG visits."""
    window = Steps(7, burn_in=3)
    cold = sgld(TARGET.objective, 0.1, batch_size=10, window=window, temperature=1e-12)
    plain = iasg(TARGET.objective, optax.sgd(0.1), batch_size=10, window=window, average=False)
    np.testing.assert_allclose(samples(cold)[0], samples(plain)[0], rtol=1e-4)


def test_cold_underdamped_is_sgd_with_momentum():
    window = Steps(7, burn_in=3)
    cold = sghmc(
        TARGET.objective, 0.05, batch_size=10, window=window, temperature=1e-14, friction=0.2
    )
    heavy_ball = iasg(
        TARGET.objective,
        optax.sgd(0.05, momentum=0.8),
        batch_size=10,
        window=Steps(7, burn_in=2),  # SGHMC moves first and looks then: it is one step behind
        average=False,
    )
    np.testing.assert_allclose(samples(cold)[0], samples(heavy_ball)[0], rtol=1e-4)


def test_full_friction_has_langevins_covariance():
    """α = 1 forgets the velocity: SGHMC's stationary law is SGLD's."""
    laws = [
        underdamped_covariance(A, A / 10, 0.1, 0.5, friction=1.0),
        langevin_covariance(A, A / 10, 0.1, 0.5),
    ]
    np.testing.assert_allclose(*laws, rtol=1e-6)


def test_laws_tend_to_the_posterior_as_the_rate_falls():
    for law in (langevin_covariance, underdamped_covariance):
        np.testing.assert_allclose(law(A, A, 1e-5, 0.7), 0.7 * np.linalg.inv(HESSIAN), rtol=1e-3)


def short_hmc(*args, **options):
    """In two dimensions long trajectories come back: acceptance would not fall with the step."""
    return hmc(*args, integration_steps=1, **options)


@pytest.mark.parametrize(
    ("build", "aim"),
    [(short_hmc, 0.7), pytest.param(nuts, 0.8, marks=pytest.mark.long)],
    ids=["hmc", "nuts"],
)
def test_the_burn_in_adapts_the_step_size(build, aim):
    """From a rate that accepts nearly everything; the draws stay the posterior's."""
    sampler = build(
        TARGET.objective, 0.003, window=Epochs(300), temperature=1.0, target_acceptance=aim
    )
    infos = check_gaussian(
        sampler,
        TARGET.data,
        TARGET.posterior.mean,
        np.linalg.inv(HESSIAN) / 40,
        num=60_000,
        start=START,
    )
    kept = build(TARGET.objective, 0.003, window=Epochs(), temperature=1.0)
    _, unadapted = samples(kept, 500)
    assert float(jnp.mean(unadapted.acceptance)) > 0.97
    assert abs(float(jnp.mean(infos.acceptance)) - aim) < 0.1
    assert int(jnp.sum(infos.divergent)) == 0


def test_a_rate_far_too_large_diverges_and_says_so():
    _, infos = samples(
        hmc(TARGET.objective, 1e6, window=Epochs(), temperature="n", integration_steps=10), 10
    )
    assert float(jnp.max(infos.acceptance)) == 0.0
    assert int(jnp.sum(infos.divergent)) == 10


def test_a_random_loss_is_one_function_for_a_chain():
    """Else HMC's energy would not be conserved and acceptance would be noise."""

    def loss(theta, batch, key):
        return TARGET.objective.loss(theta, batch, key) + 100 * jax.random.normal(key, ())

    _, infos = samples(hmc(Objective(loss), 0.01, temperature="n", integration_steps=10), 50)
    assert float(jnp.min(infos.acceptance)) > 0.9


@pytest.mark.long
def test_pytrees_and_narrow_dtypes():
    def loss(theta, batch, key):
        joined = jnp.concatenate([theta["a"], theta["b"].astype(jnp.float32)])
        return TARGET.objective.loss(joined, batch, key)

    start = {"a": jnp.array([4.0]), "b": jnp.array([4.0], jnp.bfloat16)}
    for sampler in [
        sgld(Objective(loss), 0.1, batch_size=10, temperature="n"),
        sghmc(Objective(loss), 0.1, batch_size=10, temperature="n"),
    ]:
        drawn, _ = samples(sampler, 3, start)
        assert (drawn["a"].dtype, drawn["b"].dtype) == (jnp.float32, jnp.bfloat16)
        assert drawn["b"].shape == (3, 1)
    whole = lambda t, b, k: TARGET.objective.loss(jnp.concatenate([t["a"], t["b"]]), b, k)  # noqa: E731
    start = {"a": jnp.array([4.0]), "b": jnp.array([4.0])}
    for sampler in [
        hmc(Objective(whole), 0.1, temperature="n"),
        nuts(Objective(whole), 0.1, temperature="n"),
    ]:
        drawn, _ = samples(sampler, 3, start)
        assert drawn["b"].shape == (3, 1)


def test_the_sum_of_a_batch_is_taken_as_its_mean():
    """`reduction="sum"` scales local SGD's gradient; a posterior is what it is."""
    summed = Objective(TARGET.objective.loss, reduction="sum")
    for build in (sgld, sghmc):
        drawn = [
            samples(build(f, 0.05, batch_size=10, temperature=1.0))[0]
            for f in (TARGET.objective, summed)
        ]
        assert trees_equal(*drawn)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda f: sgld(f, 0.0, batch_size=10, temperature="n"),
            "learning_rate = 0.0: must be a finite number > 0",
        ),
        (
            lambda f: sgld(f, 0.1, batch_size=0, temperature="n"),
            "batch_size = 0: must be a whole number, at least",
        ),
        (lambda f: sgld(f, 0.1, batch_size=9, temperature=-1.0), "temperature = -1.0: must be"),
        (
            lambda f: sghmc(f, 0.1, batch_size=10, friction=0.0, temperature="n"),
            "friction = 0.0: must be above 0",
        ),
        (
            lambda f: sghmc(f, 0.1, batch_size=10, friction=1.5, temperature="n"),
            "friction = 1.5: must be above 0",
        ),
        (
            lambda f: hmc(f, 0.1, integration_steps=0, temperature="n"),
            "integration_steps = 0: must be a whole",
        ),
        (
            lambda f: hmc(f, 0.1, target_acceptance=0.7, temperature="n"),
            "target_acceptance = 0.7: needs a burn-in",
        ),
        (
            lambda f: hmc(f, 0.1, window=Epochs(3), target_acceptance=0.7, temperature="n"),
            "target_acceptance = 0.7: needs a burn-in of at least 20 transitions",
        ),
        (
            lambda f: nuts(f, 0.1, max_doublings=0, temperature="n"),
            "max_doublings = 0: must be a whole number",
        ),
        (
            lambda f: nuts(f, 0.1, window=Epochs(50), target_acceptance=1.5, temperature="n"),
            "target_acceptance = 1.5: must be between 0 and 1",
        ),
        (
            lambda f: nuts(f, 0.1, window=Steps(0), temperature="n"),
            "steps_per_sample = 0: must be a whole number",
        ),
        (lambda f: nuts(f, 0.1, temperature=None), "temperature = None: must be a finite number"),
        (lambda f: hmc(f, 0.1, temperature="N"), "temperature = 'N': must be a finite number > 0"),
    ],
)
def test_refusals(build, message):
    with pytest.raises(FedpaError) as error:
        build(TARGET.objective)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("float16", "float16")])
@pytest.mark.parametrize("build", [hmc, nuts], ids=["hmc", "nuts"])
def test_hamiltonian_chains_are_wide_whatever_the_parameters(build, dtypes):
    def loss(theta, batch, key):
        joined = jnp.concatenate([theta["a"].astype(jnp.float32), theta["b"].astype(jnp.float32)])
        return TARGET.objective.loss(joined, batch, key)

    start = {name: jnp.array([4.0], dtype) for name, dtype in zip("ab", dtypes, strict=True)}
    drawn, infos = samples(build(Objective(loss), 0.1, temperature="n"), 20, start)
    assert [str(drawn[name].dtype) for name in "ab"] == list(dtypes)
    assert float(jnp.mean(infos.acceptance)) > 0.5


def test_the_mean_loss_of_many_half_precision_examples_is_finite():
    """A float16 sum ends at 65,504; sums are wide."""
    many = client_data({"z": np.zeros(50_000, np.float16)})
    two = Objective(lambda theta, batch, key: theta * jnp.ones_like(batch["z"]))
    value = client_loss(two, jnp.asarray(2.0, jnp.float16), many, jax.random.key(0))
    assert float(value) == pytest.approx(2.0, rel=1e-3)
