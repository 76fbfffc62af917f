"""What every algorithm must do. A new algorithm joins by being listed in METHODS."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa import LocalTraining, Server, server
from fedpa.algorithms.fedopt import Algorithm
from fedpa.algorithms.mime import moments, momentum
from fedpa.data import FederatedData, from_mapping
from fedpa.objectives import ClientData, Objective, least_squares
from fedpa.server.optimizers import decaying
from tests.compiling import QUICK
from tests.federations import least_squares_clients, trees_equal

LOCAL = LocalTraining(optax.sgd(0.05), batch_size=8, epochs=3)
SERVER = Server(server.sgd(0.5))
CLIENTS = least_squares_clients(sizes=(20, 8, 13, 30))
METHODS = {
    "centralized": fedpa.centralized(LOCAL),
    "fedavg": fedpa.fedavg(LOCAL, SERVER),
    "fedprox": fedpa.fedprox(LOCAL, SERVER, proximal=0.5),
    "fedexp": fedpa.fedexp(LOCAL, SERVER._replace(averaging=server.averaging.last_two())),
    "mime": fedpa.mime(LOCAL, SERVER, base=momentum(0.5)),
    "mime-lite": fedpa.mime_lite(LOCAL, SERVER, base=moments(decaying(0.9), 0.5, 0.5)),
    "fedpa": fedpa.fedpa(LOCAL, SERVER, rho=0.1, burn_in_rounds=2),
    "fedpa-oas": fedpa.fedpa(LOCAL, SERVER, rho="oas"),
    "mean": fedpa.mean_control(LOCAL, SERVER, burn_in_rounds=2),
    "mean-scaled": fedpa.mean_control(LOCAL, SERVER, burn_in_rounds=2, rho=0.1),
    "global-precision": fedpa.global_precision(
        fedpa.fedpa(LOCAL, SERVER, rho=0.1, form="gram"), every=2
    ),
    "local-precision": fedpa.local_precision(LOCAL, SERVER),
    "mb-sgd": fedpa.mb_sgd(LOCAL, SERVER),
    "exact-posterior": fedpa.exact_posterior(least_squares.posterior, SERVER),
    "scaffold": fedpa.scaffold(LOCAL, SERVER, population=71),
}


# Built once, and one engine for all: what is compiled for one test serves the next. One client at
# a time, which clients of such sizes are anyway: other widths would be compiled for nothing.
OBJECTIVE = Objective(least_squares.loss, like=CLIENTS["client-0000"])
ALGORITHMS = {name: method(OBJECTIVE) for name, method in METHODS.items()}
ENGINE = fedpa.engines.per_client()


# What is different about these is in others' programs, too, or in `test_baselines.py`.
LONG = {"fedprox", "local-precision", "mime-lite", "global-precision"}


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in ALGORITHMS],
    name="algorithm",
    scope="module",
)
def _algorithm(request) -> Algorithm:
    return ALGORITHMS[request.param]


def train(algorithm, clients=CLIENTS, **options):
    settings = {"rounds": 4, "clients_per_round": 3, "seed": 0, "engine": ENGINE} | options
    data = clients if isinstance(clients, FederatedData) else from_mapping(clients)
    return fedpa.train(algorithm, jnp.zeros(3), data, **settings)


def updates(algorithm, state):
    """(phase, client update, message): all that clients may be asked for."""
    message = algorithm.broadcast(state, jnp.asarray(0))
    found = [(phase, client, message) for phase, client in algorithm.clients.items()]
    if algorithm.inquiry is not None:
        found.append(("inquiry", algorithm.inquiry.client, algorithm.inquiry.broadcast(state)))
    return found


def test_runs_and_is_reproducible(algorithm):
    one, same = train(algorithm), train(algorithm)
    assert np.isfinite(one.params).all()
    assert float(jnp.linalg.norm(one.params)) > 0
    assert trees_equal(one.state, same.state)
    assert not trees_equal(one.state, train(algorithm, seed=1).state)


def test_an_empty_client_has_weight_zero_and_moves_nothing(algorithm):
    empty = ClientData({"x": jnp.zeros((64, 3)), "y": jnp.zeros(64)}, jnp.asarray(0, jnp.int32))
    theta = jnp.full(3, 7.0)
    state = algorithm.init(theta)
    for phase, client, message in updates(algorithm, state):
        run = jax.jit(client, compiler_options=QUICK)
        out = run(message, empty, algorithm.client_init(theta), jax.random.key(0))
        assert not any(np.asarray(w).any() for w in jax.tree.leaves(out.weight)), phase
        assert not any(np.asarray(r).any() for r in jax.tree.leaves(out.result)), phase


def test_clients_run_side_by_side(algorithm):
    """Traced in lanes, as the vectorized engine runs them."""
    lanes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), tree)  # noqa: E731
    data = ClientData({"x": jnp.zeros((64, 3)), "y": jnp.zeros(64)}, jnp.asarray(9, jnp.int32))
    theta = jnp.zeros(3)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    for _, client, message in updates(algorithm, algorithm.init(theta)):
        together = jax.vmap(client, in_axes=(None, 0, 0, 0))
        alone = jax.eval_shape(
            client, message, data, algorithm.client_init(theta), jax.random.key(0)
        )
        out = jax.eval_shape(
            together, message, lanes(data), lanes(algorithm.client_init(theta)), keys
        )
        assert jax.tree.map(jnp.shape, out) == jax.tree.map(jnp.shape, lanes(alone))


def test_an_empty_client_in_the_federation_changes_nothing(algorithm):
    empty = {"x": np.zeros((0, 3), np.float32), "y": np.zeros(0, np.float32)}
    everyone = train(algorithm, clients_per_round=4).params
    # `zzzz` sorts last, so that the others are visited in the same order.
    with_empty = train(algorithm, CLIENTS | {"zzzz": empty}, clients_per_round=5).params
    np.testing.assert_allclose(everyone, with_empty, rtol=1e-5, atol=1e-6)


def test_results_that_are_not_finite_are_rejected_and_the_rest_counts(algorithm):
    """Numbers so large that their squares overflow."""
    data = from_mapping(CLIENTS)
    far = {key: np.full_like(array, 1e30) for key, array in data.examples("client-0001").items()}
    lazy = data._replace(
        examples=lambda name: far if name == "client-0001" else data.examples(name)
    )
    with pytest.warns(UserWarning, match="client-0001") as caught:
        fit = train(algorithm, lazy, rounds=3, clients_per_round=4)
    assert len(caught) == 1  # once, not every round
    assert np.isfinite(fit.params).all()
    assert float(jnp.linalg.norm(fit.params)) > 0
    assert [record["train/rejected"] for record in fit.history] == [1, 1, 1]
    assert fit.history[0]["train/rejected_clients"] == ["client-0001"]


def test_it_learns(algorithm):
    """Twenty rounds bring the loss over all data down by half at least."""
    pooled = {key: jnp.concatenate([c[key] for c in CLIENTS.values()]) for key in ("x", "y")}
    loss = lambda theta: float(jnp.mean(least_squares.loss(theta, pooled, jax.random.key(0))))  # noqa: E731
    fit = train(algorithm, rounds=20, clients_per_round=4)
    minimum = loss(jnp.asarray(np.linalg.lstsq(pooled["x"], pooled["y"])[0]))
    assert loss(fit.params) - minimum < 0.5 * (loss(jnp.zeros(3)) - minimum)


def test_records_have_the_documented_keys(algorithm):
    record = train(algorithm, rounds=3).history[0]
    assert {
        "round",
        "phase",
        "seconds",
        "train/loss",
        "train/rejected",
        "train/skipped",
        "comm/bytes_up",
        "comm/bytes_down",
    } <= set(record)
    assert record["round"] == 1
    assert record["phase"] in algorithm.clients


@pytest.mark.parametrize("name", [name for name in METHODS if "server" in METHODS[name].arguments])
def test_results_are_averaged_as_the_server_says(name):
    arguments = METHODS[name].arguments
    own = server.weighted_mean()
    side = arguments["server"]._replace(aggregation=own)
    method = METHODS[name].builder(**{**arguments, "server": side})
    assert method(OBJECTIVE).aggregation is own


def test_a_delta_of_ones_own_is_sent():
    still = fedpa.deltas.last_iterate()._replace(
        value=lambda state: (jnp.zeros(3), fedpa.deltas.DeltaInfo(jnp.zeros(()), jnp.zeros(())))
    )
    algorithm = fedpa.fedpa(LOCAL, SERVER, delta=still)(OBJECTIVE)
    np.testing.assert_array_equal(train(algorithm, rounds=1).params, np.zeros(3))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "rho = None"),
        ({"delta": fedpa.deltas.mean(), "rho": 0.1}, "delta = "),
        ({"delta": fedpa.deltas.mean(), "form": "gram"}, "delta = "),
        ({"delta": fedpa.deltas.mean}, "delta = "),
    ],
)
def test_fedpa_takes_rho_or_a_delta(settings, field):
    with pytest.raises(fedpa.FedpaError, match=field):
        fedpa.fedpa(LOCAL, SERVER, **settings)


def test_phases_must_be_told_apart():
    clients = ALGORITHMS["fedpa"].clients
    with pytest.raises(fedpa.FedpaError, match="phase = None"):
        fedpa.fedopt(SERVER, clients)
    assert fedpa.fedopt(SERVER, clients["sampling"]).phase(7) == "training"


SAMPLER = fedpa.samplers.iasg(OBJECTIVE, 0.1, batch_size=8)
DELTA = fedpa.deltas.mean()
MEAN = server.weighted_mean()


@pytest.mark.parametrize(
    ("pieces", "field"),
    [
        ({"sampler": lambda rate: None}, "sampler = None"),
        ({"sample": lambda s, d: SAMPLER.sample(s, d)[:2]}, "sampler.sample's answer"),
        ({"sample": lambda s, d: (*SAMPLER.sample(s, d)[:2], {})}, "sampler.sample's info"),
        ({"sample": lambda s, d: (s, jnp.zeros(2), SAMPLER.sample(s, d)[2])}, "sample's θ_s"),
        ({"delta": lambda state: jnp.zeros(3)}, "delta.value's answer"),
        ({"delta": lambda state: (jnp.zeros(4), DELTA.value(state)[1])}, "delta.value's Δ"),
        ({"aggregation": MEAN._replace(value=tuple)}, "aggregation.value's answer"),
        (
            {"aggregation": MEAN._replace(add=lambda *x: MEAN.add(*x)[0])},
            "aggregation.add's answer",
        ),
        ({"aggregation": server.weighted_mean}, "aggregation = "),
    ],
)
def test_pieces_of_another_form_are_refused_by_name(pieces, field):
    """Before anything runs: a piece is looked at when it is given, or when its client is traced."""
    chosen = pieces.get("sampler") or SAMPLER._replace(sample=pieces.get("sample", SAMPLER.sample))
    delta = DELTA._replace(value=pieces.get("delta", DELTA.value))

    def trace():
        side = SERVER._replace(aggregation=pieces.get("aggregation", MEAN))
        algorithm = fedpa.fedopt(side, fedpa.client_update(chosen, delta))
        _, client, message = updates(algorithm, algorithm.init(jnp.zeros(3)))[0]
        data = ClientData({"x": jnp.zeros((8, 3)), "y": jnp.zeros(8)}, jnp.asarray(8, jnp.int32))
        jax.eval_shape(client, message, data, (), jax.random.key(0))

    with pytest.raises(fedpa.FedpaError, match=field):
        trace()
