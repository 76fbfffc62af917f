"""Theorem 3: every identity of the posterior delta, against the dense float64 solve."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fedpa
from fedpa.deltas import fixed, gram, mean, posterior
from fedpa.deltas.recurrence import RecurrenceState, recurrence
from fedpa.deltas.shrinkage import shrinkage
from tests.compiling import run_in_two_threads
from tests.deltas.dense import dense_delta
from tests.refusals import refused
from tests.strategies import SIXTEENTHS, arrays, powers_of_two, starts_and_samples

FLOOR = {np.dtype(np.float32): 1e-4, np.dtype(np.float64): 1e-10}


DTYPES = st.sampled_from([np.float32, np.float64])
MANY = settings(max_examples=max(150, settings().max_examples))


@st.composite
def small_problems(draw):
    theta0, samples = draw(starts_and_samples())
    rho, dtype = draw(st.just(0.0) | powers_of_two(-20, 10)), draw(DTYPES)
    return theta0.astype(dtype), samples.astype(dtype), rho


@st.composite
def large_problems(draw):
    """Also badly scaled, d < ℓ, and θ₀ along the samples' widest direction."""
    d, ell = draw(st.integers(1, 200)), draw(st.integers(1, 50))
    dtype = draw(DTYPES)
    rho = draw(st.one_of(st.just(0.0), st.floats(-6, 3).map(lambda e: 10.0**e)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.floats(-3, 3))
    scales = 10.0 ** (rng.uniform(-3, 3, d) if draw(st.booleans()) else np.full(d, spread))
    offset = 10.0 ** draw(st.floats(-2, 3)) * rng.standard_normal(d)
    samples = offset + scales * rng.standard_normal((ell, d))
    if draw(st.booleans()) and ell > 1:
        _, _, directions = np.linalg.svd(samples - samples.mean(0), full_matrices=False)
        theta0 = samples.mean(0) + 10.0 ** draw(st.floats(-2, 2)) * directions[0]
    else:
        theta0 = 10.0 ** draw(st.floats(-2, 3)) * rng.standard_normal(d)
    return theta0.astype(dtype), samples.astype(dtype), rho


def problems():
    """(θ₀, samples, ρ); a failure is shrunk to a small one where small ones fail, too."""
    return small_problems() | large_problems()


def largest_eigenvalue(samples, rho):
    x = samples.astype(np.float64)
    return 1 + rho * np.linalg.norm(x - x.mean(0), 2) ** 2


def allowed(theta0, samples, rho):
    """‖Δ̂‖·max(50·ε·λ_max(Σ̃)·max(1, max‖x_j‖/‖θ₀ − x̄‖), the dtype's floor).

    Where θ₀ = x̄, Δ̂ is rounding alone, at most 1/a = 1 + (ℓ−1)ρ times that of the samples.
    """
    x = samples.astype(np.float64)
    gap = np.linalg.norm(theta0.astype(np.float64) - x.mean(0))
    size = np.linalg.norm(dense_delta(theta0, samples, fixed(rho)))
    stretch = size / gap if gap > 0 else 1 + (len(x) - 1) * rho
    steep = 50 * np.finfo(theta0.dtype).eps * largest_eigenvalue(samples, rho)
    bound = steep * max(gap, np.linalg.norm(x, axis=1).max()) * stretch
    return max(bound, FLOOR[theta0.dtype] * size)


def absolute_error(value, expected):
    return np.linalg.norm(np.asarray(value, np.float64) - expected)


def relative_error(value, expected):
    return absolute_error(value, expected) / np.linalg.norm(expected)


@jax.jit
def _gram(theta0, samples, count, rho):
    traced = fixed(1.0)._replace(rho=rho)
    return gram.solve(theta0, samples, traced, jnp.ones_like(count), count).delta


@jax.jit
def _recurrence(theta0, samples, count, rho):
    delta = recurrence(samples.shape[0], 1.0, lambda n, dtype: jnp.ones((), dtype))
    state = delta.init(theta0, jnp.asarray(1, jnp.int32))._replace(rho=rho)

    def step(state, x):
        new = delta.update(state, x, x)
        return jax.tree.map(lambda a, b: jnp.where(state.t < count, a, b), new, state), None

    return delta.value(jax.lax.scan(step, state, samples)[0])[0]


def compiled(form, theta0, samples, rho):
    """Padded to one shape, so that one program serves every example: zeros change nothing."""
    ell, d = samples.shape
    with jax.enable_x64(theta0.dtype == np.float64):
        scalars = [jnp.asarray(value, theta0.dtype) for value in (ell, rho)]
        padded = np.pad(samples, [(0, 50 - ell), (0, 200 - d)])
        return np.asarray(form(np.pad(theta0, (0, 200 - d)), padded, *scalars))[:d]


@MANY
@given(problems())
def test_equals_the_dense_solve(problem):
    theta0, samples, rho = problem
    value = fedpa.posterior_delta(theta0, samples, rho)
    assert isinstance(value, np.ndarray)
    assert value.dtype == theta0.dtype
    expected = dense_delta(theta0, samples, fixed(rho))
    assert absolute_error(value, expected) <= allowed(theta0, samples, rho)


@MANY
@given(problems())
def test_compiled_gram_equals_the_dense_solve(problem):
    theta0, samples, rho = problem
    expected = dense_delta(theta0, samples, fixed(rho))
    assert absolute_error(compiled(_gram, *problem), expected) <= allowed(*problem)


@pytest.mark.parametrize("scale", [1e2, 1e3, 1e5, 1e7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_bound_holds_however_steep(scale, dtype):
    """d < ℓ, ρ = 1000, λ_max(Σ̃) up to 10¹⁸: far beyond what the precision resolves."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        theta0 = (scale * rng.standard_normal(5)).astype(dtype)
        samples = (scale * rng.standard_normal((20, 5))).astype(dtype)
        expected = dense_delta(theta0, samples, fixed(1e3))
        bound = allowed(theta0, samples, 1e3)
        assert absolute_error(fedpa.posterior_delta(theta0, samples, 1e3), expected) <= bound
        assert absolute_error(compiled(_gram, theta0, samples, 1e3), expected) <= bound


def rational_delta(theta0, samples, rho):
    """Theorem 3 in rational numbers, rounded once."""
    x = [[Fraction(float(value)) for value in row] for row in samples]
    ell, d, rho = len(x), len(theta0), Fraction(rho)
    mean = [sum(column) / ell for column in zip(*x, strict=True)]
    x = [[value - m for value, m in zip(row, mean, strict=True)] for row in x]
    system = [
        [(i == j) + rho * sum(row[i] * row[j] for row in x) for j in range(d)]
        + [Fraction(float(theta0[i])) - mean[i]]
        for i in range(d)
    ]
    for k in range(d):
        for i in set(range(d)) - {k}:
            factor = system[i][k] / system[k][k]
            system[i] = [a - factor * b for a, b in zip(system[i], system[k], strict=True)]
    return np.array(
        [float(row[d] / row[i] * (1 + (ell - 1) * rho)) for i, row in enumerate(system)]
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ell", [8, 100])
def test_many_samples_of_few_parameters_lose_no_digits_to_a_large_rho(dtype, ell):
    """d < ℓ: θ₀ − x̄ lies in the samples' span, whose part of Δ̂ a Gram matrix would lose."""
    rng = np.random.default_rng(0)
    theta0, samples = rng.normal(3, 1, 3).astype(dtype), rng.normal(0, 1, (ell, 3)).astype(dtype)
    bound = 100 * np.finfo(dtype).eps
    for rho in (1e9, 1e12):
        expected = rational_delta(theta0, samples, rho)
        assert relative_error(fedpa.posterior_delta(theta0, samples, rho), expected) <= bound
        with jax.enable_x64(dtype == np.float64):
            scalars = [jnp.asarray(value, dtype) for value in (ell, rho)]
            assert relative_error(_gram(theta0, samples, *scalars), expected) <= bound


@MANY
@given(problems())
def test_recurrence_equals_gram(problem):
    """Up to λ_max(Σ̃) = 10⁶; beyond, the recurrence as printed loses more digits than the bound."""
    _, samples, rho = problem
    assume(largest_eigenvalue(samples, rho) <= 1e6)
    value = fedpa.posterior_delta(*problem).astype(np.float64)
    assert absolute_error(compiled(_recurrence, *problem), value) <= allowed(*problem)


@given(problems())
def test_rho_zero_and_one_sample_are_exact(problem):
    """Σ̂ = I: Δ̂ = θ₀ − x̄, to the rounding of a sum of ℓ + 1 numbers."""
    theta0, samples, rho = problem
    for x, r in [(samples, 0.0), (samples[:1], rho)]:
        exact = x.astype(np.longdouble)
        plain = theta0 - exact.mean(0)
        size = np.abs(theta0 - exact[-1]).max() + np.abs(exact - exact[-1]).max()
        atol = float((len(x) + 1) * np.finfo(theta0.dtype).eps * size)
        np.testing.assert_allclose(fedpa.posterior_delta(theta0, x, r), plain, rtol=0, atol=atol)


ONLINE = {
    form: (delta, jax.jit(delta.update), jax.jit(delta.value))
    for form in ("gram", "recurrence")
    for delta in [posterior(6, fixed(0.7), form=form)]
}


@given(
    theta0=arrays(5, dtype=np.float32),
    samples=arrays(6, 5, dtype=np.float32),
    form=st.sampled_from(["gram", "recurrence"]),
)
def test_every_prefix_equals_the_batch(theta0, samples, form):
    delta, update, read = ONLINE[form]
    state = delta.init(jnp.asarray(theta0), jnp.asarray(10, jnp.int32))
    for t, sample in enumerate(samples, start=1):
        state = update(state, sample, sample)
        value, _ = read(state)
        problem = theta0, samples[:t], 0.7
        batch = fedpa.posterior_delta(*problem)
        assert absolute_error(value, batch) <= allowed(*problem)


@given(flat=arrays(10), rows=arrays(4, 10), rho=SIXTEENTHS.map(abs))
def test_flat_equals_pytree(flat, rows, rho):
    """Inner products run over all parameters jointly, not leaf by leaf."""
    tree = {"a": flat[:4].reshape(2, 2), "b": (flat[4:], None)}
    stacked = {"a": rows[:, :4].reshape(4, 2, 2), "b": (rows[:, 4:], None)}
    value = fedpa.posterior_delta(tree, stacked, rho)
    joined = np.concatenate([value["a"].ravel(), value["b"][0]])
    np.testing.assert_array_equal(joined, fedpa.posterior_delta(flat, rows, rho))
    assert value["b"][1] is None


@given(problem=starts_and_samples(), scale=powers_of_two(-3, 4))
def test_sample_scale_multiplies_deviations_only(problem, scale):
    theta0, samples = problem
    mean = samples.mean(0)
    stretched = mean + scale * (samples - mean)
    value = fedpa.posterior_delta(theta0, samples, 0.5, sample_scale=scale)
    expected = fedpa.posterior_delta(theta0, stretched, 0.5)
    assert absolute_error(value, expected) <= allowed(theta0, stretched, 0.5)


@pytest.mark.parametrize("form", ["gram", "recurrence"])
def test_sqrt_n_scale_uses_the_clients_n(form):
    rng = np.random.default_rng(0)
    theta0, samples = rng.standard_normal(6), rng.standard_normal((5, 6))
    arrays = jnp.asarray(theta0, jnp.float32), jnp.asarray(samples, jnp.float32)
    delta = posterior(5, fixed(0.5), sample_scale="sqrt-n", form=form)
    state, update = delta.init(arrays[0], jnp.asarray(16, jnp.int32)), jax.jit(delta.update)
    for sample in arrays[1]:
        state = update(state, sample, sample)
    expected = fedpa.posterior_delta(theta0, samples, 0.5, sample_scale=4.0)
    np.testing.assert_allclose(jax.jit(delta.value)(state)[0], expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("temperature", "scale"), [(1.0, 4.0), (0.25, 8.0), ("n", 1.0), (None, 1.0)]
)
def test_auto_scale_brings_every_temperature_to_that_of_n(temperature, scale):
    """√(n/T), n = 16; samples without a temperature stay as they are."""
    rng = np.random.default_rng(1)
    theta0, samples = rng.standard_normal(7), rng.standard_normal((5, 7))
    delta = posterior(5, fixed(0.5), sample_scale="auto", temperature=temperature)
    state = delta.init(jnp.asarray(theta0, jnp.float32), jnp.asarray(16, jnp.int32))
    for sample in samples.astype(np.float32):
        state = delta.update(state, jnp.asarray(sample), jnp.asarray(sample))
    expected = fedpa.posterior_delta(theta0, samples, 0.5, sample_scale=scale)
    np.testing.assert_allclose(delta.value(state)[0], expected, rtol=1e-4, atol=1e-5)


def test_small_spread_is_mostly_a_longer_step():
    """The control's reason: Δ̂ → (1 + (ℓ−1)ρ)(θ₀ − x̄) as S → 0."""
    rng = np.random.default_rng(0)
    theta0, samples = rng.standard_normal(50), 1e-5 * rng.standard_normal((5, 50))
    longer = (1 + 4 * 0.1) * (theta0 - samples.mean(0))
    np.testing.assert_allclose(fedpa.posterior_delta(theta0, samples, 0.1), longer, rtol=1e-6)


def test_of_equal_samples_it_is_the_scaled_mean():
    """The control `mean-scaled` sends just that."""
    theta0, x = jnp.arange(3.0), jnp.array([1.0, -2.0, 0.5])
    found = []
    for delta in (posterior(4, fixed(0.25)), mean(1 + 3 * 0.25)):
        state = delta.init(theta0, jnp.asarray(10))
        for _ in range(4):
            state = delta.update(state, x, x)
        found.append(delta.value(state)[0])
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_the_misprinted_recurrence_would_be_noticed():
    """With Ŝ_{t−1} in place of Ŝ_t (as printed) the delta is off by O(1)."""
    rng = np.random.default_rng(0)
    theta0, x = rng.standard_normal(4), rng.standard_normal((3, 4))
    printed = np.eye(4) + 2 * 1.0 * np.cov(x[:2].T)
    wrong = (1 + 2 * 1.0) * np.linalg.solve(printed, theta0 - x.mean(0))
    right = fedpa.posterior_delta(theta0, x, 1.0)
    assert relative_error(wrong, right) > 0.1


def test_kind_and_dtype_are_kept():
    theta0, samples = np.ones(3, np.float32), np.zeros((2, 3), np.float32)
    assert isinstance(fedpa.posterior_delta(theta0, samples, 0.1), np.ndarray)
    value = fedpa.posterior_delta(jnp.asarray(theta0), jnp.asarray(samples), 0.1)
    assert isinstance(value, jax.Array)
    assert value.dtype == jnp.float32
    with jax.enable_x64(True):
        double = jnp.ones(3, jnp.float64), jnp.zeros((2, 3), jnp.float64)
    assert fedpa.posterior_delta(*double, 0.1).dtype == jnp.float64
    compiled = jax.jit(lambda a, b: fedpa.posterior_delta(a, b, 0.1))
    np.testing.assert_allclose(compiled(theta0, samples), value, rtol=1e-6)


@pytest.mark.parametrize(
    ("theta0", "samples", "rho", "anchors"),
    [
        (np.ones(2), np.ones((3, 2)), -0.1, ["rho = -0.1"]),
        (np.ones(2), np.ones((3, 2)), float("nan"), ["rho = nan"]),
        (np.ones(2), np.ones((3, 2)), float("inf"), ["rho = inf"]),
        (np.ones(2), np.ones((3, 2)), "oass", ["rho = 'oass'"]),
        (np.ones(2), np.ones((3, 2)), None, ["rho = None"]),
        (np.ones(2), np.ones((0, 2)), 0.1, ["samples", "(0, 2)", "theta0", "(2,)"]),
        (np.ones(2), np.ones(2), 0.1, ["samples", "(2,)", "theta0", "(2,)"]),
        (np.ones(2), np.ones((3, 4)), 0.1, ["samples", "(3, 4)", "theta0", "(2,)"]),
        ({"a": np.ones(2)}, {"b": np.ones((3, 2))}, 0.1, ["samples", "{'b': *}", "{'a': *}"]),
        ({"a": np.ones(2)}, np.ones((3, 2)), 0.1, ["samples", "PyTreeDef(*)", "{'a': *}"]),
        (
            {"a": np.ones(2), "b": np.ones(1)},
            {"a": np.ones((3, 2)), "b": np.ones((2, 1))},
            0.1,
            ["samples", "(3, 2)", "(2, 1)", "theta0"],
        ),
        (np.ones(2), np.array([[1.0, np.nan]]), 0.1, ["samples"]),
        (np.array([1.0, np.inf]), np.ones((3, 2)), 0.1, ["theta0"]),
        (np.ones(2, int), np.ones((3, 2)), 0.1, ["theta0", "int64"]),
        ({}, {}, 0.1, ["theta0"]),
        (np.zeros(0), np.zeros((2, 0)), 0.1, ["theta0"]),
    ],
)
def test_bad_input_is_refused(theta0, samples, rho, anchors):
    with refused(*anchors):
        fedpa.posterior_delta(theta0, samples, rho)


@pytest.mark.parametrize(
    ("theta_dtype", "sample_dtype"),
    [(jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)],
)
def test_low_precision_is_computed_in_float32(theta_dtype, sample_dtype):
    """Differences of what is given, not of what is left of it in θ₀'s precision."""
    rng = np.random.default_rng(0)
    theta0 = jnp.ones(4, theta_dtype)
    samples = jnp.asarray(1 + 0.003 * rng.standard_normal((5, 4)), sample_dtype)
    exact = [np.asarray(a, np.float64) for a in (theta0, samples)]
    expected = dense_delta(*exact, fixed(0.5))
    for value in (
        fedpa.posterior_delta(theta0, samples, 0.5),
        jax.jit(lambda a, b: fedpa.posterior_delta(a, b, 0.5))(theta0, samples),
    ):
        assert value.dtype == theta_dtype
        np.testing.assert_allclose(np.asarray(value, float), expected, rtol=0.01, atol=1e-5)


def test_more_samples_than_room_give_no_number():
    for form in ("gram", "recurrence"):
        delta = posterior(2, fixed(0.5), form=form)
        state, update = delta.init(jnp.ones(3), jnp.asarray(1, jnp.int32)), jax.jit(delta.update)
        for sample in jnp.zeros((3, 3)):
            state = update(state, sample, sample)
        assert np.isnan(jax.jit(delta.value)(state)[0]).all()


def test_auto_takes_the_faster_form():
    few, many = posterior(3, fixed(0.1)), posterior(4, fixed(0.1))
    n, theta0 = jnp.asarray(1, jnp.int32), jnp.ones(3)
    assert isinstance(few.init(theta0, n), RecurrenceState)
    assert many.init(theta0, n).rows.shape == (4, 3)
    assert posterior(3, shrinkage("oas")).init(theta0, n).rows.shape == (3, 3)


def test_bad_settings_are_refused():
    with refused("sample_scale = 'sqrt-n'"):
        fedpa.posterior_delta(np.ones(2), np.ones((3, 2)), 0.1, sample_scale="sqrt-n")
    with refused("form = 'dense'"):
        posterior(2, fixed(0.1), form="dense")
    with refused("num_samples = 0"):
        posterior(0, fixed(0.1))
    with refused("sample_scale = 'sqrt'"):
        posterior(2, fixed(0.1), sample_scale="sqrt")
    with refused("form = 'recurrence'"):
        posterior(2, shrinkage("oas"), form="recurrence")
    with refused("target = 'mean'"):
        fixed(0.1, target="mean")


def test_many_parameters_in_float32():
    """Large problems stay in float32: error at most 5e-6."""
    rng = np.random.default_rng(0)
    ell, d = 20, 60_001
    theta0 = rng.standard_normal(d, dtype=np.float32)
    samples = rng.standard_normal((ell, d), dtype=np.float32) / np.float32(np.sqrt(0.1 * d))
    value = gram.solve(theta0, samples, fixed(0.1))
    assert value.delta.dtype == np.float32
    exact = gram.solve(theta0.astype(float), samples.astype(float), fixed(0.1))
    assert relative_error(value.delta, exact.delta) <= 5e-6
    assert value.ess == pytest.approx(exact.ess, rel=1e-4)


@pytest.mark.parametrize("rho", [1e6, 1e9, 1e12])
def test_few_parameters_are_exact_however_large_rho(rho):
    """ℓ = 500 samples of d = 3 parameters: Σ̃ is as well conditioned as Ŝ."""
    rng = np.random.default_rng(0)
    theta0, samples = rng.standard_normal(3), rng.standard_normal((500, 3))
    value = fedpa.posterior_delta(theta0, samples, rho)
    assert relative_error(value, dense_delta(theta0, samples, fixed(rho))) <= 1e-12


def test_numbers_that_are_none_give_none():
    samples = np.full((2, 3), np.nan, np.float32)
    assert np.isnan(gram.solve(np.zeros(3, np.float32), samples, fixed(0.1)).delta).all()


def test_programs_in_two_threads_do_not_wait_for_each_other():
    """Batched LAPACK calls did, for ever."""
    run_in_two_threads(
        """
from fedpa.deltas import fixed, gram

program = jax.jit(jax.vmap(lambda theta0, samples: gram.solve(theta0, samples, fixed(0.3)).delta))
theta0 = jnp.asarray(rng.standard_normal((16, 600)), jnp.float32)
samples = rng.standard_normal((16, 5, 600))
calls = [  # the Gram form, and the steep one
    functools.partial(program, theta0, jnp.asarray(spread * samples, jnp.float32))
    for spread in (0.01, 10.0)
]
"""
    )
