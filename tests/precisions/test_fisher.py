"""A client's Fisher matrix in every structure, against JᵀHJ formed whole by NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedpa
from fedpa.objectives import ClientData, Likelihood, client_data
from fedpa.precision import ravel
from fedpa.precisions import dense_fisher, diagonal_fisher, kronecker_fisher, low_rank_fisher
from tests.compiling import QUICK
from tests.refusals import refused

N, P, H, K = 5, 3, 2, 3
CLOSE = {"rtol": 1e-3, "atol": 1e-3}
LINKS = pytest.mark.parametrize(
    "link",
    ["softmax", *(pytest.param(link, marks=pytest.mark.long) for link in ("sigmoid", "normal"))],
)
seeds = st.integers(0, 2**32 - 1)


def outputs(theta, batch):
    """A perceptron that shows its layers; `c` is a parameter outside of them."""
    x = fedpa.layer_input(batch["x"], theta["w1"], theta["b1"])
    z = fedpa.layer_output(x @ theta["w1"] + theta["b1"][None], theta["w1"])
    h = fedpa.layer_input(jnp.tanh(z), theta["w2"])
    return theta["c"] * fedpa.layer_output(h @ theta["w2"], theta["w2"])


def likelihood(link):
    return Likelihood(outputs, link, noise=0.5)


def draw(link, seed, n=N):
    """θ and examples."""
    rng = np.random.default_rng(seed)
    shapes = {"w1": (P, H), "b1": (H,), "w2": (H, K), "c": ()}
    theta = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
    y = rng.integers(0, K, n).astype(np.int32)
    labels = y if link == "softmax" else np.eye(K, dtype=np.float32)[y]
    return theta, {"x": rng.normal(size=(n, P)).astype(np.float32), "y": labels}


@functools.cache
def jacobian_and_hessian(link):
    one = likelihood(link)

    def compute(theta, example):
        vector, restore = ravel(theta)
        f = one.outputs(theta, example)[0]
        hessian = jax.hessian(lambda f: one.nll(f[None], example)[0])(f)
        return jax.jacrev(lambda v: one.outputs(restore(v), example)[0])(vector), hessian

    return jax.jit(compute, compiler_options=QUICK)


def whole(link, theta, examples):
    """Σ JᵀHJ, with H the Hessian of −log p by f, by automatic differentiation."""
    total = 0.0
    for j in range(len(examples["x"])):
        one = jax.tree.map(lambda a, j=j: jnp.asarray(a[j : j + 1]), examples)
        jacobian, hessian = map(np.asarray, jacobian_and_hessian(link)(theta, one))
        total += jacobian.T @ hessian @ jacobian
    return total


D = P * H + H + H * K + 1
STRUCTURES = {
    "dense": dense_fisher(batch_size=2),
    "diagonal": diagonal_fisher("all", batch_size=2),
    "low-rank": low_rank_fisher(D, "all", batch_size=2),
    "kronecker": kronecker_fisher("all", batch_size=2),
}


@functools.cache
def program(structure, link):
    """What a client sends, and the precision as a dense matrix over θ ravelled; compiled once."""
    fisher = STRUCTURES[structure]

    def compute(theta, data):
        sent = fisher.of_client(likelihood(link), theta, data, jax.random.key(0))
        precision = fisher.precision(sent, theta)
        _, restore = ravel(theta)
        if fisher.is_vector:
            return sent, jax.vmap(precision.times)(jnp.eye(D))
        return sent, jax.vmap(lambda v: ravel(precision.times(restore(v)))[0])(jnp.eye(D))

    return jax.jit(compute, compiler_options=QUICK)


def compute(structure, link, theta, examples):
    padded = {k: np.concatenate([a, a])[:N] for k, a in examples.items()}  # one shape for all
    n = jnp.asarray(len(examples["x"]), jnp.int32)
    data = ClientData(jax.tree.map(jnp.asarray, padded), n)
    return jax.tree.map(np.asarray, program(structure, link)(theta, data))


@LINKS
@given(seed=seeds)
def test_the_dense_matrix(link, seed):
    one = draw(link, seed)
    np.testing.assert_allclose(compute("dense", link, *one)[1], whole(link, *one), **CLOSE)


@LINKS
@given(seed=seeds)
def test_the_diagonal_with_all_labels(link, seed):
    one = draw(link, seed)
    found = compute("diagonal", link, *one)[1]
    np.testing.assert_allclose(found, np.diag(np.diag(whole(link, *one))), **CLOSE)


@LINKS
def test_low_rank_of_full_rank_is_all_of_it(link):
    one = draw(link, 3)
    found, wanted = compute("low-rank", link, *one)[1], whole(link, *one)
    np.testing.assert_allclose(found, wanted, rtol=5e-3, atol=5e-3)


@LINKS
@given(seed=seeds)
def test_kronecker_blocks_of_a_single_example_are_exact(link, seed):
    """E[aaᵀ] ⊗ E[ggᵀ] is E[aaᵀ ⊗ ggᵀ] where there is one row."""
    theta, example = draw(link, seed, n=1)
    found, wanted = compute("kronecker", link, theta, example)[1], whole(link, theta, example)
    for part in [("b1", "w1"), ("w2",), ("c",)]:
        mask = {k: np.full(np.shape(x), k in part) for k, x in theta.items()}
        chosen = np.concatenate([mask[k].ravel() for k in sorted(mask)])
        block = np.ix_(chosen, chosen)
        np.testing.assert_allclose(found[block], wanted[block], **CLOSE)
        assert not found[np.ix_(chosen, ~chosen)].any()


@pytest.mark.parametrize(
    "fisher", [diagonal_fisher, pytest.param(kronecker_fisher, marks=pytest.mark.long)]
)
def test_sampled_labels_have_the_moments_of_all(fisher):
    """The mean over 400 draws, within five standard errors of each number."""
    theta, examples = draw("softmax", 0)
    data = client_data(examples)
    keys = jax.random.split(jax.random.key(0), 400)
    draws = jax.vmap(fisher("sampled").of_client, (None, None, None, 0))
    one = likelihood("softmax")
    sent = jax.jit(lambda keys: draws(one, theta, data, keys))(keys)
    structure = "kronecker" if fisher is kronecker_fisher else "diagonal"
    wanted = compute(structure, "softmax", theta, examples)[0]
    if fisher is kronecker_fisher:  # of the gradients' factor; the inputs' has no randomness
        sent, wanted = ([f.outputs for f in one.factors] for one in (sent, wanted))
    for many, one in zip(jax.tree.leaves(sent), jax.tree.leaves(wanted), strict=True):
        error = np.std(many, axis=0) / np.sqrt(len(keys))
        assert (np.abs(np.mean(many, axis=0) - one) <= 5 * error + 1e-5).all()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_clients_add_up_to_the_pooled_examples(structure):
    theta, examples = draw("softmax", 1)
    parts = [jax.tree.map(lambda a, s=s: a[s], examples) for s in (slice(0, 2), slice(2, N))]
    one, other = (compute(structure, "softmax", theta, part)[0] for part in parts)
    pooled = compute(structure, "softmax", theta, examples)[0]
    added = jax.tree.leaves(jax.tree.map(np.add, one, other))
    for found, wanted in zip(added, jax.tree.leaves(pooled), strict=True):
        np.testing.assert_allclose(found, wanted, **CLOSE)


def test_too_many_parameters_of_a_dense_matrix_are_refused():
    line = Likelihood(lambda w, batch: batch["x"] @ w, "normal")
    data = client_data({"x": np.ones((1, 8193), np.float32), "y": np.ones(1, np.float32)})
    with refused("structure = 'last-layer'", "8,193"):
        dense_fisher().of_client(line, jnp.zeros(8193), data, jax.random.key(0))
    with refused("labels = 'some'"):
        kronecker_fisher("some")
    with refused("rank = 0"):
        low_rank_fisher(0)
