"""What every delta must do. A new delta joins by being listed in DELTAS."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpa.deltas import fixed, last_iterate, mean, oas, posterior, rblw

N = jnp.asarray(25, jnp.int32)
DELTAS = {
    "last-iterate": last_iterate(),
    "mean": mean(),
    "auto": posterior(8, fixed(0.3)),
    "gram": posterior(8, fixed(0.3), form="gram"),
    "recurrence": posterior(8, fixed(0.3), form="recurrence"),
    "gram-scaled-samples": posterior(8, fixed(0.3), sample_scale="sqrt-n"),
    "oas": posterior(8, oas()),
    "rblw-scaled": posterior(8, rblw(target="scaled")),
}


def chain(num=8, seed=0):
    """(θ₀, samples, iterates) as pytrees of two arrays."""
    rng = np.random.default_rng(seed)
    tree = lambda *lead: {  # noqa: E731
        "b": jnp.asarray(rng.standard_normal((*lead, 2)).astype(np.float32)),
        "w": jnp.asarray(rng.standard_normal((*lead, 3, 2)).astype(np.float32)),
    }
    return tree(), tree(num), tree(num)


COMPILED = {delta: (jax.jit(delta.update), jax.jit(delta.value)) for delta in DELTAS.values()}


def run(delta, theta0, samples, iterates):
    """The value after every sample."""
    state, values = delta.init(theta0, N), []
    update, value = COMPILED[delta]
    for index in range(len(samples["b"])):
        at = lambda tree, index=index: jax.tree.map(lambda x: x[index], tree)  # noqa: E731
        state = update(state, at(samples), at(iterates))
        values.append(value(state))
    return values


@pytest.fixture(params=DELTAS, name="delta")
def _delta(request):
    return DELTAS[request.param]


def test_value_has_thetas_structure_a_rho_and_an_ess(delta):
    theta0, samples, iterates = chain()
    flat = np.concatenate([np.asarray(x).reshape(8, -1) for x in jax.tree.leaves(samples)], axis=1)
    for t, (value, info) in enumerate(run(delta, theta0, samples, iterates), start=1):
        assert jax.tree.map(jnp.shape, value) == jax.tree.map(jnp.shape, theta0)
        assert float(info.rho) >= 0
        uses_samples = delta is not DELTAS["last-iterate"]
        expected = effective_sample_size(flat[:t].astype(float)) if uses_samples else 0
        assert float(info.ess) == pytest.approx(expected, rel=1e-4)


def effective_sample_size(samples):
    """ℓ (1 − r₁)/(1 + r₁) as it is defined, between 1 and ℓ."""
    ell, deviations = len(samples), samples - samples.mean(0)
    if ell == 1:
        return 1
    r = 1 - np.sum(np.diff(samples, axis=0) ** 2) / np.sum(deviations**2) / 2
    return np.clip(ell * (1 - r) / (1 + r), 1, ell)


def test_every_prefix_equals_the_batch(delta):
    """Online and any-time: reading early, or from a larger buffer, changes nothing."""
    theta0, samples, iterates = chain()
    online = run(delta, theta0, samples, iterates)
    for t in (1, 2, 5):
        prefix = jax.tree.map(lambda x, t=t: x[:t], (samples, iterates))
        fresh = run(delta, theta0, *prefix)[-1]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            online[t - 1],
            fresh,
        )


def test_sample_at_theta0_gives_zero(delta):
    """An empty client's samples are θ₀: its delta is 0, never −θ₀."""
    theta0, _, _ = chain()
    still = jax.tree.map(lambda x: jnp.stack([x] * 3), theta0)
    for value, _ in run(delta, theta0, still, still):
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(value))


def test_compiles_and_vectorizes(delta):
    theta0, samples, iterates = chain()

    def whole(theta0, samples, iterates):
        def step(state, pair):
            return delta.update(state, *pair), None

        state, _ = jax.lax.scan(step, delta.init(theta0, N), (samples, iterates))
        return delta.value(state)[0]

    expected = run(delta, theta0, samples, iterates)[-1][0]
    two = jax.tree.map(lambda x: jnp.stack([x, x]), (theta0, samples, iterates))
    together = jax.jit(jax.vmap(whole))(*two)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[1], b, rtol=1e-4, atol=1e-5), together, expected
    )
