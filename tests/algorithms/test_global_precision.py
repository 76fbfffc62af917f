"""Global precision: what it solves that first-order methods don't, what is sent, what is kept."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa import LocalTraining, Server, server
from fedpa.data import from_mapping
from fedpa.engines.engine import num_bytes
from fedpa.experiments.comparison.tasks import find_burn_in_end
from fedpa.experiments.config import default_config, resolve
from fedpa.experiments.hyperparameters import Hyperparameters, resolve_hyperparameters
from fedpa.experiments.methods import METHODS, label_method
from fedpa.experiments.models import bag_of_words, cnn, lstm, resnet
from fedpa.objectives import Objective, client_data, layer_input
from tests.algorithms.ill_conditioned import Problem, adam_server, full_batches, plain_server
from tests.federations import trees_equal
from tests.refusals import refused

LOCAL = LocalTraining(optax.sgd(0.05), batch_size=8, epochs=2)
SIDE = Server(server.sgd(0.5, 0.9))
RNG = np.random.default_rng(0)
CLIENTS = {
    f"client-{i}": {
        "x": RNG.standard_normal((12, 6)).astype(np.float32),
        "y": RNG.integers(0, 3, 12).astype(np.int32),
    }
    for i in range(3)
}
THETA = {"w": jnp.zeros((6, 3)), "b": jnp.zeros(3), "scale": jnp.ones(())}


def loss(theta, batch, key):
    x = layer_input(batch["x"], theta["w"], theta["b"])
    z = theta["scale"] * (x @ theta["w"] + theta["b"][None])
    return optax.softmax_cross_entropy_with_integer_labels(z, batch["y"])


# Clients of one size, one at a time: few programs.
ENGINE = fedpa.engines.per_client()


def fit(method, rounds=4, **options):
    settings = {"rounds": rounds, "clients_per_round": 3, "engine": ENGINE} | options
    return fedpa.fit(loss, THETA, CLIENTS, method, **settings)


def test_it_solves_what_first_order_methods_do_not():
    """The rates are the best of the grids of the longer test."""
    problem = Problem()
    assert problem.condition > 1e4
    step = 1 / problem.steepest_client

    def end(method, client_rate, server_rate):
        return problem.best(method, [client_rate], [server_rate])[0]

    precise = end(
        lambda c, s: fedpa.global_precision(
            fedpa.fedavg(full_batches(c), plain_server(s, 0.5)),
            start=1_000,
            epsilon=1e-3,
            length=None,
            batch_size=100,
        ),
        step,
        5e3,
    )
    assert precise < 1e-6
    momentum = lambda c, s: fedpa.fedavg(full_batches(c), plain_server(s, 0.9))  # noqa: E731
    assert end(momentum, step, 9.6) > 1e-2


@pytest.mark.long
def test_no_rate_of_the_others_gets_there():
    """Grids of rates for each; a diagonal precision is none of the inputs' rotated axes."""
    problem = Problem()
    step, longest = 1 / problem.steepest_client, problem.steepest_client / problem.steepest
    rates, few = np.geomspace(0.5, 10, 10), np.array([0.3, 1, 1.5]) * step
    steep = np.linspace(0.5, 4, 29) * longest
    nesterov = lambda s, beta: Server(  # noqa: E731
        optax.chain(optax.trace(beta, nesterov=True), optax.scale(-1.0)), schedule=s
    )
    others = {
        "fedavg-1": (lambda c, s: fedpa.fedavg(full_batches(c), plain_server(s)), [step], steep),
        "adam-1": (
            lambda c, s: fedpa.fedavg(full_batches(c), adam_server(s, 0.1)),
            [step],
            np.geomspace(0.01, 100, 60),
        ),
        "adam-100": (
            lambda c, s: fedpa.fedavg(full_batches(c, 100), adam_server(s, 0.1)),
            [step],
            np.geomspace(0.01, 100, 40),
        ),
        "mean": (
            lambda c, s: fedpa.mean_control(full_batches(c, 100), plain_server(s, 0.8)),
            few,
            rates,
        ),
        "fedpa": (
            lambda c, s: fedpa.fedpa(full_batches(c, 20), plain_server(s, 0.8), rho=0.1),
            few,
            np.geomspace(0.01, 10, 16),
        ),
        "diagonal": (
            lambda c, s: fedpa.global_precision(
                fedpa.fedavg(full_batches(c), plain_server(s, 0.5)),
                start=1_000,
                epsilon=1e-3,
                length=None,
                block=1,
                batch_size=100,
            ),
            [step],
            np.geomspace(50, 40_000, 35),
        ),
    }
    for beta in (0.5, 0.8, 0.9, 0.95, 0.98):
        others[f"momentum {beta}"] = (
            lambda c, s, beta=beta: fedpa.fedavg(full_batches(c), plain_server(s, beta)),
            [step],
            steep,
        )
        others[f"nesterov {beta}"] = (
            lambda c, s, beta=beta: fedpa.fedavg(full_batches(c), nesterov(s, beta)),
            [step],
            steep / 2,
        )
        others[f"fedavg-100 {beta}"] = (
            lambda c, s, beta=beta: fedpa.fedavg(full_batches(c, 100), plain_server(s, beta)),
            few,
            rates,
        )
    ends = {name: problem.best(*entry)[0] for name, entry in others.items()}
    assert min(ends.values()) > 1e-3, ends
    for rank, momentum in ((None, 0.5), ("exact", 0.0)):
        precise = lambda c, s: fedpa.global_precision(  # noqa: E731
            fedpa.fedavg(full_batches(c), plain_server(s, momentum)),
            start=1_000,
            epsilon=1e-3,
            length=None,
            rank=rank,
            batch_size=100,
        )
        assert problem.best(precise, [step], np.geomspace(500, 40_000, 25))[0] < 1e-6


@pytest.mark.long
def test_where_the_axes_are_the_coordinates_the_diagonal_is_enough():
    problem = Problem(rotated=False)
    diagonal = lambda c, s: fedpa.global_precision(  # noqa: E731
        fedpa.fedavg(full_batches(c), plain_server(s)),
        start=1_000,
        epsilon=1e-3,
        length=None,
        block=1,
    )
    rates = np.geomspace(500, 40_000, 25)
    assert problem.best(diagonal, [1 / problem.steepest_client], rates)[0] < 1e-6


def test_a_sketch_is_sent_every_kth_round_and_counted():
    """Δ is 22 numbers and ‖Δ‖²; the sketch of [b; W] is 7×3 of half the size, its diagonal 7."""
    like = CLIENTS["client-0"]
    data = client_data(like)

    def bytes_of(phase, **options):
        method = fedpa.global_precision(fedpa.fedavg(LOCAL, SIDE), every=3, **options)
        algorithm = method(Objective(loss, like=like))
        message = algorithm.broadcast(algorithm.init(THETA), 0)
        out = jax.eval_shape(algorithm.clients[phase], message, data, (), jax.random.key(0))
        return num_bytes(out.result)

    plain = 4 * 23
    assert bytes_of("training") == plain
    for options, more in [
        ({}, 2 * 21),
        ({"rank": 1}, 2 * 7),
        ({"rank": "exact"}, 4 * 28),
        ({"block": 1}, 4 * 7),
    ]:
        assert bytes_of("training with precision", **options) == plain + more
        # The layer's inputs are the data: training does not change them.
        assert bytes_of("training with precision of deeper layers", **options) == plain


KEY = jax.random.key(0)
FULL_SIZE = {
    "cnn": (cnn.loss, lambda: cnn.CNN(62, key=KEY), {"x": (28, 28, 1), "y": ()}),
    "small-resnet": (
        resnet.loss,
        lambda: resnet.small_resnet(key=KEY),
        {"x": (32, 32, 3), "y": ()},
    ),
    "resnet18": (resnet.loss, lambda: resnet.resnet18(key=KEY), {"x": (32, 32, 3), "y": ()}),
    "lstm": (lstm.loss, lambda: lstm.NextWordLSTM(key=KEY), {"x": (20,), "y": (20,)}),
    "bag-of-words": (
        bag_of_words.loss,
        lambda: bag_of_words.BagOfWords(key=KEY),
        {"ids": (64,), "weights": (64,), "y": (500,)},
    ),
}
TYPES = {"x": np.uint8, "ids": np.int32, "weights": np.float32, "y": np.int32}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long) if n == "resnet18" else n for n in FULL_SIZE],
)
def test_sketches_add_at_most_seven_percent_to_a_hundred_rounds(name):
    model_loss, make, columns = FULL_SIZE[name]
    whole = {"cnn": {"x": np.float32}, "lstm": {"x": np.int32}}.get(name, {})
    like = {
        field: jax.ShapeDtypeStruct((4, *shape), whole.get(field, TYPES[field]))
        for field, shape in columns.items()
    }
    theta = jax.eval_shape(make)
    method = fedpa.global_precision(fedpa.fedavg(LOCAL, Server(server.sgd(1.0))))
    algorithm = method(Objective(model_loss, like=like))

    def sent(phase):
        def run(theta, examples, key):
            message = algorithm.broadcast(algorithm.init(theta), 0)
            data = fedpa.objectives.ClientData(examples, jnp.asarray(4))
            return algorithm.clients[phase](message, data, (), key).result

        return num_bytes(jax.eval_shape(run, theta, like, jax.eval_shape(lambda: KEY)))

    phases = collections.Counter(algorithm.phase(t) for t in range(100))
    up = sum(rounds * sent(phase) for phase, rounds in phases.items())
    assert 1 < up / (100 * num_bytes(theta)) < 1.07


def test_the_step_s_length_is_that_of_the_clients():
    """√(Σ q_i ‖Δ_i‖²/Σ q_i) times ρ, in Δ̄'s place; without ρ, what the filter gives."""
    like, data = CLIENTS["client-0"], [client_data(one) for one in CLIENTS.values()]

    @functools.partial(jax.jit, static_argnums=0)
    def moved(length):
        side = Server(server.sgd(1.0))
        method = fedpa.global_precision(fedpa.fedavg(LOCAL, side), length=length)
        algorithm = method(Objective(loss, like=like))
        state = algorithm.init(THETA)
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *data)
        keys = jax.random.split(jax.random.key(0), len(data))
        cohort = fedpa.algorithms.Cohort(stacked, keys)
        after, left = fedpa.fed_round(algorithm, state, cohort, 0, "training with precision")
        step = optax.tree.sub(THETA, algorithm.parameters(after))
        return step, left.client_info.delta_norm, left.server_info.precision_ratio

    (free, norms, ratio), (step, _, _) = moved(None), moved(0.7)
    clients = float(jnp.sqrt(jnp.mean(norms**2)))  # as many examples each
    np.testing.assert_allclose(float(optax.tree.norm(step)), 0.7 * clients, rtol=1e-5)
    assert float(ratio) < 1
    cosine = optax.tree.vdot(free, step) / optax.tree.norm(free) / optax.tree.norm(step)
    np.testing.assert_allclose(float(cosine), 1, rtol=1e-5)


def test_the_numerators_deltas_are_what_they_would_be_alone():
    """The same chains from the same keys, bit for bit, whether a sketch is made or not."""
    objective, data = Objective(loss, like=CLIENTS["client-0"]), client_data(CLIENTS["client-0"])
    plain = fedpa.fedavg(LOCAL, SIDE)(objective)
    ours = fedpa.global_precision(fedpa.fedavg(LOCAL, SIDE))(objective)
    message = plain.broadcast(plain.init(THETA), 0)

    @jax.jit
    def deltas(key):
        alone = plain.clients["training"](message, data, (), key).result
        beside = [client(message, data, (), key).result.delta for client in ours.clients.values()]
        return [alone, *beside]

    alone, *beside = deltas(jax.random.key(3))
    assert len(beside) == 3
    assert all(trees_equal(alone, delta) for delta in beside)


def test_each_phase_has_rounds_with_a_sketch_and_without():
    method = fedpa.global_precision(
        fedpa.fedpa(LOCAL, SIDE, rho=0.3, burn_in_rounds=2, form="gram"), start=1, every=3
    )
    algorithm = method(Objective(loss))
    all_layers, deeper = "with precision", "with precision of deeper layers"
    phases = [f"burn-in {all_layers}", f"burn-in {deeper}", f"sampling {deeper}", "sampling"]
    assert [algorithm.phase(t) for t in (0, 1, 3, 4)] == phases
    assert set(algorithm.clients) == {
        f"{name}{more}"
        for name in ("burn-in", "sampling")
        for more in ("", f" {all_layers}", f" {deeper}")
    }


def test_sketches_come_less_often_the_longer_training_goes():
    """At the start, where layers change fast; when the rounds have doubled; then every k-th."""
    algorithm = fedpa.global_precision(fedpa.fedavg(LOCAL, SIDE))(Objective(loss))
    phases = [algorithm.phase(t) for t in range(100)]
    assert [t for t in range(100) if phases[t].endswith("with precision")] == [0, 1, 2]
    deeper = [t for t in range(100) if phases[t].endswith("deeper layers")]
    assert deeper == [4, 8, 16, 20, 40, 60, 80]


def test_records_say_what_the_precision_did():
    history = fit(
        fedpa.global_precision(
            fedpa.fedavg(LOCAL, SIDE), start=2, every=2, epsilon=1.0, length=None
        ),
        3,
    ).history
    sent = [record["comm/bytes_up"] for record in history]
    assert sent == [3 * (4 * 23 + 2 * 21)] * 2 + [3 * 4 * 23]  # with the weight
    for record in history:
        assert 0 < record["train/precision_ratio"] < 1
        assert 0.5 < record["train/precision_cosine"] < 1
        assert 1 < record["train/precision_steepest"] < 7
        assert record["train/skipped"] == 0
    steepest = [record["train/precision_steepest"] for record in history]
    assert steepest[0] != steepest[1] == steepest[2]  # only sketches change it


@pytest.mark.long
def test_a_run_that_is_resumed_is_the_uninterrupted_one(tmp_path):
    """Cut between two sketches: the average and its factors come from the checkpoint."""
    method = fedpa.global_precision(fedpa.fedavg(LOCAL, SIDE), every=3)
    whole = fit(method, rounds=3)
    fit(method, rounds=2, out=tmp_path / "run")
    resumed = fit(method, rounds=3, out=tmp_path / "run")
    assert trees_equal(resumed.state, whole.state)
    assert trees_equal(resumed.params, whole.params)


def test_a_model_that_shows_nothing_is_refused_before_any_work():
    untold = lambda theta, batch, key: jnp.sum(batch["x"] @ theta["w"], axis=1)  # noqa: E731
    method = fedpa.global_precision(fedpa.fedavg(LOCAL, SIDE))
    with refused("fedpa.layer_input"):
        fedpa.fit(untold, THETA, CLIENTS, method, rounds=1, clients_per_round=1)
    with refused("fedpa.Objective(loss, like=examples)"):
        fedpa.train(
            method(Objective(loss)), THETA, from_mapping(CLIENTS), rounds=1, clients_per_round=1
        )


@pytest.mark.parametrize(
    ("settings", "anchor"),
    [
        ({"start": 0}, "start = 0"),
        ({"every": 0}, "every = 0"),
        ({"filter": "flat"}, "filter = 'flat'"),
        ({"kappa": 0.1}, "kappa = 0.1"),
        ({"filter": "saturating", "kappa": -1.0}, "kappa = -1.0"),
        ({"length": -1.0}, "length = -1.0"),
        ({"epsilon": 0.0}, "epsilon = 0.0"),
        ({"epsilon": float("nan")}, "epsilon = nan"),
        ({"decay": 1.0}, "decay = 1.0"),
        ({"block": 0}, "block = 0"),
        ({"rank": 0}, "rank = 0"),
        ({"rank": "all"}, "rank = 'all'"),
        ({"batch_size": 0}, "batch_size = 0"),
    ],
)
def test_bad_settings_are_refused(settings, anchor):
    with refused(anchor):
        fedpa.global_precision(fedpa.fedavg(LOCAL, SIDE), **settings)
    fields = {f"precision_{name}": value for name, value in settings.items()}
    if "batch_size" not in settings and settings.get("rank") != "all" and "flat" not in anchor:
        with refused(f"precision_{anchor}"):
            METHODS["global-precision"].build(Hyperparameters(**fields))


def test_a_numerator_that_is_no_method_is_refused():
    with refused("numerator ="):
        fedpa.global_precision(LOCAL)(Objective(loss))


def test_a_numerator_of_more_than_deltas_is_refused():
    with refused("numerator"):
        fit(fedpa.global_precision(fedpa.fedexp(LOCAL, SIDE)), out=None, rounds=1)
    mime = fedpa.mime(LOCAL, SIDE, base=fedpa.algorithms.momentum(0.9))
    with refused("numerator"):
        fit(fedpa.global_precision(mime))
    with refused("numerator"):
        fit(fedpa.global_precision(fedpa.scaffold(LOCAL, SIDE, population=36)))


def test_by_name():
    h = resolve(default_config("digits", "global-precision")).hyperparameters
    assert (h.numerator, h.precision_start, h.precision_every) == ("fedavg", 3, 20)
    assert (h.precision_filter, h.precision_epsilon, h.precision_kappa) == ("ridge", 5.0, None)
    assert (h.precision_length, h.precision_decay, h.precision_block) == (1.4, 0.95, 2048)
    assert (h.server_optimizer, h.server_learning_rate, h.server_momentum) == ("sgd", 1.0, 0.0)
    saturating = METHODS["global-precision"].adjust(Hyperparameters(precision_filter="saturating"))
    assert (saturating.precision_epsilon, saturating.precision_kappa) == (0.03, 0.05)
    diagonal = METHODS["global-precision-diagonal"]
    assert "precision_block" not in diagonal.takes
    for numerator in ("fedavg", "fedpa", "mean", "mb-sgd"):
        for method in (METHODS["global-precision"], diagonal):
            method.build(
                resolve_hyperparameters(method.adjust(Hyperparameters(numerator=numerator)))
            )
    assert label_method("global-precision", Hyperparameters(epochs=5)) == "Precision[5]"
    fedpas = Hyperparameters(epochs=5, numerator="fedpa", sampler="sgld", batch_size=5)
    assert label_method("global-precision", fedpas) == "Precision of fedpa-SGLD[5]"
    unsampled = METHODS["global-precision"].adjust(Hyperparameters(sampler="sgld"))
    assert unsampled.sampler == "iasg"


def test_its_burn_in_is_nobody_elses():
    """The first rounds are preconditioned: FedAvg's checkpoint is not theirs."""
    assert find_burn_in_end(default_config("digits", "fedpa")) is not None
    assert find_burn_in_end(default_config("digits", "global-precision")) is None
