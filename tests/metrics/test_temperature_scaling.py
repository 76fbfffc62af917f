"""A temperature is the best of its grid, and finds the one by which outputs are too certain."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, softmax
from sklearn.metrics import log_loss

from fedpa.data import from_mapping
from fedpa.errors import FedpaError
from fedpa.metrics import fit_temperature, scale_outputs
from fedpa.objectives import Likelihood
from tests.refusals import refused

N, K = 2_000, 3
LIKELIHOODS = {
    "softmax": Likelihood(lambda scale, batch: scale * batch["f"]),
    "sigmoid": Likelihood(lambda scale, batch: scale * batch["f"], link="sigmoid"),
}


def draw(link, truth):
    """Outputs that are `truth` times too large, and labels of their probabilities."""
    rng = np.random.default_rng(0)
    f = rng.normal(size=(N, K))
    if link == "softmax":
        y = (rng.random((N, 1)) > softmax(f, axis=1).cumsum(axis=1)).sum(axis=1).astype(np.int32)
    else:
        y = (rng.random((N, K)) < expit(f)).astype(np.uint8)
    f = (truth * f).astype(np.float32)
    cuts = [0, 3, 1_000, N]
    return {
        str(k): {"f": f[slice(*cuts[k : k + 2])], "y": y[slice(*cuts[k : k + 2])]} for k in range(3)
    }


@pytest.mark.parametrize("link", LIKELIHOODS)
@pytest.mark.parametrize("truth", [0.5, 2.5])
def test_the_best_of_the_grid(link, truth):
    clients = draw(link, truth)
    found = fit_temperature(LIKELIHOODS[link], jnp.float32(1), from_mapping(clients))
    f, y = (np.concatenate([client[name] for client in clients.values()]) for name in "fy")

    def nll(temperature):
        if link == "softmax":
            return log_loss(y, softmax(f.astype(float) / temperature, axis=1))
        return log_loss(y.ravel(), expit(f.astype(float) / temperature).ravel())

    grid = np.geomspace(0.25, 4, 21)
    assert found == pytest.approx(min(grid, key=nll))
    assert abs(np.log(found / truth)) < 1.5 * np.log(grid[1] / grid[0])


def test_a_grid_of_ones_own():
    data = from_mapping(draw("softmax", 1.0))
    given = {"trials": 3, "lowest": 0.1, "highest": 10.0, "batch_size": 7_000}
    assert fit_temperature(LIKELIHOODS["softmax"], jnp.float32(1), data, **given) == pytest.approx(
        1.0
    )


def test_outputs_are_divided():
    batch = {"f": jnp.array([[2.0, 0.0]]), "y": jnp.array([0])}
    scaled = scale_outputs(LIKELIHOODS["softmax"], np.float64(2.0))
    assert scaled.outputs(jnp.float32(1), batch).tolist() == [[1.0, 0.0]]
    assert scaled.link == "softmax"


def test_what_is_no_temperature_is_refused():
    data, one = from_mapping(draw("softmax", 1.0)), jnp.float32(1)
    likelihood = LIKELIHOODS["softmax"]
    for temperature in (0, -1.0, float("nan"), float("inf"), "2"):
        with refused(f"temperature = {temperature!r}"):
            scale_outputs(likelihood, temperature)
    with refused("trials = 1"):
        fit_temperature(likelihood, one, data, trials=1)
    with refused("lowest = 4.0"):
        fit_temperature(likelihood, one, data, lowest=4.0)
    with refused("highest = nan"):
        fit_temperature(likelihood, one, data, highest=float("nan"))
    with refused("link = 'normal'"):
        fit_temperature(likelihood._replace(link="normal"), one, data)
    with pytest.raises(FedpaError, match=r"\Aparams"):
        fit_temperature(likelihood, jnp.float32(np.nan), data)
