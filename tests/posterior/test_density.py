"""Every density: its draws have its mean and covariance, and as a file it is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpa
from fedpa.objectives.layer_inputs import Layer
from fedpa.posterior import Density, Ensemble, Normal, Posterior, Swag, load_posterior
from fedpa.posterior.files import save_posterior
from fedpa.precisions import (
    Dense,
    Diagonal,
    KroneckerPair,
    Layered,
    LowRank,
    Scalar,
)
from fedpa.precisions.gaussian import Gaussian
from tests.refusals import refused

RNG = np.random.default_rng(0)
ROOT = RNG.normal(size=(5, 10))
MATRIX = jnp.asarray(ROOT @ ROOT.T / 10 + np.eye(5), jnp.float32)
MEAN = jnp.asarray(RNG.normal(size=5), jnp.float32)
THETA = {"b": MEAN[:1], "w": MEAN[1:].reshape(2, 2)}
LAYERS = (Layer((1,), (2,), 2, None, False, False),)


def layered():
    pair = KroneckerPair(
        MATRIX[None, :2, :2], MATRIX[None, 2:4, 2:4], jnp.float32(2), jnp.zeros(())
    )
    whole = Layered(LAYERS, (pair,), (Diagonal(jnp.ones(1)),))
    return whole.add_identity(jnp.float32(0.5))


DENSITIES = {
    "gaussian": Gaussian(MATRIX @ MEAN, Dense(MATRIX)),
    "gaussian-diagonal": Gaussian(MEAN, Diagonal(jnp.diagonal(MATRIX))),
    "normal-dense": Normal(MEAN, Dense(MATRIX)),
    "normal-scalar": Normal(MEAN, Scalar(jnp.float32(2.0))),
    "normal-low-rank": Normal(MEAN, LowRank(jnp.ones(5), MATRIX[:, :2])),
    "normal-layered": Normal(THETA, layered()),
    "normal-factorized": Normal(THETA, layered().factorize()),
    "swag": Swag(MEAN, jnp.diagonal(MATRIX), MATRIX[:3] - MATRIX[:3].mean(axis=0)[None], 0.5),
    "ensemble": Ensemble(jnp.asarray(RNG.normal(size=(7, 5)), jnp.float32)),
}
MODEL = {"b": np.zeros(1, np.float32), "w": np.zeros((2, 2), np.float32)}


@pytest.fixture(params=DENSITIES, name="density")
def _density(request):
    return DENSITIES[request.param]


def test_it_is_a_density(density):
    assert isinstance(density, Density)
    assert bool(density.is_proper)


def test_draws_have_its_moments(density):
    """Means and covariances of 20,020 draws, within five standard errors."""
    draws = np.asarray(density.sample(jax.random.key(0), 20_020), np.float64)
    covariance = np.asarray(density.covariances(jnp.eye(5)[None])[0])
    sd = np.asarray(density.sd)
    np.testing.assert_allclose(np.diag(covariance), sd**2, rtol=1e-4)
    error = 5 / np.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - density.mean) <= error * sd).all()
    assert (np.abs(np.cov(draws.T) - covariance) <= 2 * error * sd[:, None] * sd[None]).all()


def test_covariances_are_those_of_a_linear_function(density):
    rows = jnp.asarray(RNG.normal(size=(2, 3, 5)), jnp.float32)
    whole = density.covariances(jnp.eye(5)[None])[0]
    wanted = np.einsum("bkd,de,ble->bkl", rows, whole, rows)
    np.testing.assert_allclose(density.covariances(rows), wanted, rtol=1e-3, atol=1e-4)


def test_a_file_has_all_of_it(density, tmp_path):
    one = Posterior(density, MODEL)
    save_posterior(one, tmp_path / "p.safetensors")
    other = load_posterior(tmp_path / "p.safetensors", MODEL)
    key = jax.random.key(1)
    for a, b in zip(
        jax.tree.leaves(one.sample(key, 4)), jax.tree.leaves(other.sample(key, 4)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_parameters_that_it_is_not_over_are_known():
    posterior = Posterior(Normal(jnp.zeros(1), Scalar(jnp.float32(4.0))), MODEL, over=("b",))
    assert jax.tree.map(np.shape, posterior.sample(jax.random.key(0), 3)) == {
        "b": (3, 1),
        "w": (2, 2),
    }
    assert posterior.sd["b"].tolist() == [0.5]
    assert not posterior.sd["w"].any()


def test_a_file_of_another_model_is_refused(tmp_path):
    path = tmp_path / "p.safetensors"
    save_posterior(Posterior(DENSITIES["normal-dense"], MODEL), path)
    with refused(f"path = '{path}'", "w"):
        load_posterior(path, {"b": np.zeros(1), "w": np.zeros((4, 1))})
    with refused("path", ".safetensors"):
        save_posterior(Posterior(DENSITIES["normal-dense"], MODEL), tmp_path / "p.npz")


def test_a_file_over_some_parameters_needs_the_others_as_they_were(tmp_path):
    path = tmp_path / "p.safetensors"
    density = Normal(jnp.zeros(1), Scalar(jnp.float32(4.0)))
    save_posterior(Posterior(density, MODEL, over=("b",)), path)
    other_b = MODEL | {"b": np.ones(1, np.float32)}
    assert load_posterior(path, other_b).sd["b"].tolist() == [0.5]
    with refused(f"path = '{path}'"):
        load_posterior(path, MODEL | {"w": np.ones((2, 2), np.float32)})


def test_a_file_of_which_any_byte_was_changed_is_refused(tmp_path):
    path = tmp_path / "p.safetensors"
    save_posterior(Posterior(DENSITIES["normal-factorized"], MODEL), path)
    whole = path.read_bytes()
    for at in range(8, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with refused(str(path)):
            load_posterior(path, MODEL)


def test_a_damaged_file_is_refused(tmp_path):
    """Cut anywhere, or with other text: an error that names the file, never another posterior."""
    path = tmp_path / "p.safetensors"
    save_posterior(Posterior(DENSITIES["normal-factorized"], MODEL), path)
    whole = path.read_bytes()
    for end in [0, 4, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:end])
        with refused(str(path)):
            load_posterior(path, MODEL)
    for old, new in [
        (b"fedpa posterior", b"fedpa pastorior"),
        (b"Eigenbasis", b"Eigenpasis"),
        (b"input_values", b"inputs_value"),
    ]:
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        with refused(str(path)):
            load_posterior(path, MODEL)
    with refused(str(tmp_path / "none.safetensors")):
        load_posterior(tmp_path / "none.safetensors", MODEL)


def test_predictions_of_an_improper_posterior_are_refused():
    flat = Posterior(Normal(jnp.zeros(2), Diagonal(jnp.zeros(2))), np.zeros(2, np.float32))
    with pytest.raises(fedpa.FedpaError):
        flat.predict(lambda w, x: x @ w, np.ones((1, 2), np.float32), jax.random.key(0))
