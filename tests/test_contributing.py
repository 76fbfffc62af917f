"""The sampler worked through in CONTRIBUTING.md passes what it says it passes."""

import re
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import fedpa
from tests.federations import least_squares_clients
from tests.samplers import test_conformance as conformance
from tests.samplers.gaussian import HESSIAN

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


@pytest.fixture(name="metropolis", scope="module")
def _metropolis():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {"__name__": "contributed"}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    return names["metropolis"]


def test_the_worked_sampler_passes_the_conformance_suite(metropolis):
    sampler = metropolis(conformance.TARGET.objective, step_size=1.0, steps=5)
    entry = (sampler, np.linalg.inv(HESSIAN), 20_000)
    tests = [
        test
        for name, test in vars(conformance).items()
        if name.startswith("test_") and not name.endswith("other_seeds")
    ]
    assert len(tests) >= 7
    for test in tests:
        test(entry)


def test_the_worked_sampler_runs_in_fedpa(metropolis):
    """With a model that has leaves of other kinds, through `fit`."""
    clients = least_squares_clients(sizes=(10, 12))
    model = eqx.nn.MLP(3, "scalar", 2, depth=1, key=jax.random.key(0))
    method = fedpa.fedpa(
        fedpa.LocalTraining(optax.sgd(0.1), batch_size=4, epochs=5),
        fedpa.Server(fedpa.server.sgd(0.1)),
        rho=0.1,
        sampler=lambda objective, rate: metropolis(objective, step_size=0.1, steps=5),
    )
    fit = fedpa.fit(
        lambda m, batch, key: (jax.vmap(m)(batch["x"]) - batch["y"]) ** 2,
        model,
        clients,
        method,
        rounds=2,
        clients_per_round=2,
    )
    assert not np.array_equal(fit.params.layers[0].weight, model.layers[0].weight)
