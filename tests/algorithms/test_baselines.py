"""The baselines against their published updates, written out in NumPy, and where they end up."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa import LocalTraining, Server, server
from fedpa.algorithms.methods import count_population, set_population
from fedpa.algorithms.mime import client_gradient, moments, momentum
from fedpa.data import from_mapping
from fedpa.experiments.config import default_config, resolve
from fedpa.experiments.hyperparameters import Hyperparameters, resolve_hyperparameters
from fedpa.experiments.methods import METHODS
from fedpa.experiments.models import BagOfWords, bag_of_words
from fedpa.experiments.tasks import tasks
from fedpa.objectives import Objective, client_data, client_loss, least_squares
from fedpa.server.optimizers import decaying, growing
from fedpa.training.loop import train
from tests.compiling import QUICK
from tests.federations import distance, least_squares_clients, trees_equal
from tests.refusals import refused

SIZES = (12, 30, 21)
CLIENTS = least_squares_clients(0, sizes=SIZES, dim=3, heterogeneity=3.0, skew=3.0)
PADDED = [client_data(client, 32) for client in CLIENTS.values()]
OBJECTIVE = Objective(least_squares.loss)
START = np.array([2.0, -1.0, 0.5], np.float32)
RATE, STEPS = 0.05, 4
# Full-batch steps, in which the papers' formulas are arithmetic.
LOCAL = LocalTraining(optax.sgd(RATE), batch_size=32, epochs=STEPS)
# Mini-batches, of which the three clients have 2, 4 and 3 an epoch.
SMALL = LocalTraining(optax.sgd(RATE), batch_size=8, epochs=2)
WHOLE = Server(server.sgd(1.0))
EVERYONE = (0, 1, 2)


def play(method, rounds=3, cohorts=itertools.repeat(EVERYONE), start=START):
    """Rounds of an algorithm as the loop plays them, one compiled program for each of its parts."""
    algorithm = method(OBJECTIVE)
    compiled = lambda f: jax.jit(f, compiler_options=QUICK)  # noqa: E731
    (client,) = map(compiled, algorithm.clients.values())
    step, add = compiled(algorithm.server), compiled(algorithm.aggregation.add)
    inquiry = algorithm.inquiry
    ask = compiled(inquiry.client) if inquiry is not None else None
    state = algorithm.init(jnp.asarray(start))
    kept = [algorithm.client_init(jnp.asarray(start))] * len(PADDED)

    def gathered(update, message, members, t):
        total = None
        for i in members:
            key = jax.random.fold_in(jax.random.key(t), i)
            out = update(message, PADDED[i], kept[i], key)
            total = algorithm.aggregation.init(out.result, out.weight) if total is None else total
            total, accepted = add(total, out.result, out.weight)
            assert accepted
            yield i, out.state
        result.append(algorithm.aggregation.value(total))

    path = []
    for t, members in zip(range(rounds), cohorts, strict=False):
        result = []
        if inquiry is not None:
            list(gathered(ask, inquiry.broadcast(state), members, t))
            state = inquiry.receive(state, result.pop())
        for i, new in list(gathered(client, algorithm.broadcast(state, t), members, t)):
            kept[i] = new
        state, info = step(state, result.pop(), t)
        assert not info.skipped
        path.append(np.asarray(algorithm.parameters(state)))
    return np.array(path), state, info


def gradient(i, theta):
    """∇f_i(θ) of the mean of ½(xᵀθ − y)²."""
    x, y = (np.float64(list(CLIENTS.values())[i][k]) for k in ("x", "y"))
    return x.T @ (x @ theta - y) / len(y)


def weights(weighting="examples"):
    sizes = np.array(SIZES if weighting == "examples" else [1, 1, 1])
    return sizes / sizes.sum()


def hessian(i):
    x = np.float64(list(CLIENTS.values())[i]["x"])
    return x.T @ x / len(x)


def balance(matrices, w):
    """The x with Σ w_i M_i (x − μ_i) = 0, μ_i the clients' own optima."""
    optima = [np.linalg.solve(hessian(i), -gradient(i, np.zeros(3))) for i in EVERYONE]
    left = sum(q * m for q, m in zip(w, matrices, strict=True))
    return np.linalg.solve(
        left, sum(q * m @ o for q, m, o in zip(w, matrices, optima, strict=True))
    )


OPTIMUM = balance([hessian(i) for i in EVERYONE], weights())


def sgd(i, x, direction=lambda y, g: g):
    """x − y after STEPS full-batch steps along `direction`."""
    y = x
    for _ in range(STEPS):
        y = y - RATE * direction(y, gradient(i, y))
    return x - y


def by_hand(delta, rounds=3, length=lambda deltas: 1.0):
    """x of every round: clients send delta(i, x); the server steps η_g times their mean."""
    x, path = np.float64(START), []
    for _ in range(rounds):
        deltas = np.array([delta(i, x) for i in EVERYONE])
        x = x - length(deltas) * weights() @ deltas
        path.append(x)
    return np.array(path)


@pytest.fixture(scope="module", name="fedavg")
def _fedavg():
    return {name: play(fedpa.fedavg(local, WHOLE))[0] for name, local in BOTH.items()}


BOTH = {"full": LOCAL, "small": SMALL}


def test_the_reference_is_fedavg(fedavg):
    np.testing.assert_allclose(fedavg["full"], by_hand(sgd), rtol=1e-4)


def test_fedprox_is_its_formula(fedavg):
    mu = 2.0
    found, *_ = play(fedpa.fedprox(LOCAL, WHOLE, proximal=mu))
    expected = by_hand(lambda i, x: sgd(i, x, lambda y, g: g + mu * (y - x)))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert np.abs(found - fedavg["full"]).max() > 0.01


def test_without_the_term_fedprox_is_fedavg(fedavg):
    found, *_ = play(fedpa.fedprox(SMALL, WHOLE, proximal=0.0))
    np.testing.assert_allclose(found, fedavg["small"], rtol=1e-6)


@pytest.mark.long
def test_fedprox_ends_where_proximal_points_balance():
    """Local problems solved to the end: x = Σ w_i argmin_y f_i(y) + μ/2 ‖y − x‖²."""
    mu, local = 3.0, LOCAL._replace(epochs=100)
    end = play(fedpa.fedprox(local, WHOLE, proximal=mu), 60)[0][-1]
    fixed = balance(
        [np.linalg.solve(hessian(i) + mu * np.eye(3), hessian(i)) for i in EVERYONE], weights()
    )
    np.testing.assert_allclose(end, fixed, rtol=1e-3, atol=1e-3)
    assert distance(fixed, OPTIMUM) > 0.05  # less biased than FedAvg, not unbiased


def scaffold_by_hand(cohorts, weighting):
    """The paper's Algorithm 1, option II as printed, with w_i for 1/N."""
    x, c, own, path = np.float64(START), np.zeros(3), np.zeros((3, 3)), []
    w = weights(weighting)
    for members in map(list, cohorts):
        deltas = np.array([sgd(i, x, lambda y, g, i=i: g - own[i] + c) for i in members])
        news = own[members] - c + deltas / (STEPS * RATE)
        x = x - w[members] @ deltas / w[members].sum()
        c = c + w[members] @ (news - own[members])
        own[members] = news
        path.append(x)
    return np.array(path), c


@pytest.mark.parametrize("weighting", ["examples", pytest.param("uniform", marks=pytest.mark.long)])
def test_scaffold_is_option_two(weighting):
    cohorts = [(0, 1), (1, 2), (0, 2), (1,), (0, 1, 2)]
    side = Server(server.sgd(1.0), weighting)
    method = fedpa.scaffold(LOCAL, side)
    counted = set_population(method, count_population(method, SIZES))
    found, state, _ = play(counted, 5, cohorts)
    path, control = scaffold_by_hand(cohorts, weighting)
    np.testing.assert_allclose(found, path, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(state.shared, control, rtol=1e-3, atol=1e-3)


def test_a_first_round_of_scaffold_is_fedavgs(fedavg):
    """The same mini-batches in the same order; clients make different numbers of steps."""
    found, *_ = play(fedpa.scaffold(SMALL, WHOLE, population=sum(SIZES)))
    np.testing.assert_allclose(found[0], fedavg["small"][0], rtol=1e-6)
    assert np.abs(found[1] - fedavg["small"][1]).max() > 1e-3


def test_controls_are_gradients_whatever_the_clients_optimizer_is():
    """(x − y)/(Kη) would be ten times as long with momentum 0.9."""
    local = LOCAL._replace(optimizer=optax.sgd(1e-4, momentum=0.9))
    _, state, _ = play(fedpa.scaffold(local, WHOLE, population=sum(SIZES)), 1)
    full = sum(w * gradient(i, START) for i, w in enumerate(weights()))
    np.testing.assert_allclose(state.shared, full, rtol=0.01)


def mime_by_hand(move, track, s, control_variates, rounds=3):
    """The paper's Algorithm 1 with full batches."""
    x, path = np.float64(START), []
    for _ in range(rounds):
        c = sum(w * gradient(i, x) for i, w in enumerate(weights()))
        deltas = []
        for i in EVERYONE:
            shift = c - gradient(i, x) if control_variates else 0.0
            deltas.append(sgd(i, x, lambda y, g, shift=shift: move(g + shift, s)))
        x, s = x - weights() @ np.array(deltas), track(c, s)
        path.append(x)
    return np.array(path)


BASES = {
    "momentum": (
        momentum(0.8),
        lambda g, m: 0.2 * g + 0.8 * m,
        lambda g, m: 0.2 * g + 0.8 * m,
        np.zeros(3),
    ),
    "adam": (
        moments(decaying(0.9), 0.5, 0.3),
        lambda g, s: (0.5 * g + 0.5 * s[0]) / (np.sqrt(s[1]) + 0.3),
        lambda g, s: (0.5 * g + 0.5 * s[0], 0.1 * g**2 + 0.9 * s[1]),
        (np.zeros(3), np.zeros(3)),
    ),
    "adagrad": (
        moments(growing, 0.0, 0.3),
        lambda g, v: g / (np.sqrt(v) + 0.3),
        lambda g, v: v + g**2,
        np.zeros(3),
    ),
}


@pytest.mark.parametrize(
    ("method", "base"),
    [
        ("mime", "momentum"),
        ("mime_lite", "adam"),
        *(
            pytest.param(*pair, marks=pytest.mark.long)
            for pair in [("mime", "adam"), ("mime", "adagrad"), ("mime_lite", "momentum")]
        ),
    ],
)
def test_mime_is_its_formula(method, base):
    ours, move, track, start = BASES[base]
    found, *_ = play(getattr(fedpa, method)(LOCAL, WHOLE, base=ours))
    expected = mime_by_hand(move, track, start, control_variates=method == "mime")
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_mimelite_of_plain_sgd_is_fedavg(fedavg):
    found, *_ = play(fedpa.mime_lite(SMALL, WHOLE, base=momentum(0.0)))
    np.testing.assert_allclose(found, fedavg["small"], rtol=1e-6)


def test_where_fedavg_stalls_control_variates_do_not():
    """Full participation, many full-batch steps on clients far from alike."""
    local = LOCAL._replace(epochs=15)
    ends = {
        name: distance(play(method, 60)[0][-1], OPTIMUM)
        for name, method in {
            "fedavg": fedpa.fedavg(local, WHOLE),
            "scaffold": fedpa.scaffold(local, WHOLE, population=sum(SIZES)),
            "mime": fedpa.mime(local, WHOLE, base=momentum(0.5)),
        }.items()
    }
    assert ends["fedavg"] > 0.1
    assert ends["scaffold"] < 1e-3
    assert ends["mime"] < 1e-3


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_full_gradient_is_that_of_the_objective(reduction):
    """Batches of 8 of 21 examples, padded to 32; with `sum`, times their mean size."""
    objective = Objective(
        least_squares.loss,
        lambda theta: jnp.sum(theta**2),
        reduction,
        weight=lambda b: 1 + b["y"] ** 2,
    )
    data, theta, key = PADDED[2], jnp.asarray(START), jax.random.key(0)
    loss, found = jax.jit(lambda d: client_gradient(objective, theta, d, key, 8))(data)
    plain = objective._replace(regularizer=None)
    value, full = jax.value_and_grad(client_loss, argnums=1)(plain, theta, data, key)
    y = list(CLIENTS.values())[2]["y"]
    factor = 1 if reduction == "mean" else np.sum(1 + y**2) / 3
    np.testing.assert_allclose(loss, factor * value + np.sum(START**2), rtol=1e-5)
    np.testing.assert_allclose(found, factor * full + 2 * START, rtol=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_full_gradient_has_the_share_of_the_prior(reduction):
    """With `sum`, times the mean size of a batch, as the examples' own gradient."""
    prior = fedpa.normal_prior(1.0, sd=0.1)
    objective = Objective(least_squares.loss, reduction=reduction, prior=prior, num_examples=50)
    data, theta, key = PADDED[2], jnp.asarray(START), jax.random.key(0)
    loss, found = jax.jit(lambda d: client_gradient(objective, theta, d, key, 8))(data)
    value, full = jax.value_and_grad(client_loss, argnums=1)(objective, theta, data, key)
    factor = 1 if reduction == "mean" else 21 / 3
    np.testing.assert_allclose(loss, factor * value, rtol=1e-5)
    np.testing.assert_allclose(found, factor * full, rtol=1e-4)


def test_fedexp_is_its_formula():
    epsilon = 0.01
    lengths = []

    def length(deltas):
        mean = weights() @ deltas
        squares = weights() @ (deltas**2).sum(1)
        lengths.append(max(1.0, squares / (2 * (mean @ mean + epsilon))))
        return lengths[-1]

    found, state, info = play(fedpa.fedexp(LOCAL, WHOLE, epsilon=epsilon), 6)
    expected = by_hand(sgd, 6, length)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(info.step_length, lengths[-1], rtol=1e-3)
    assert max(lengths) > 1.5
    # What is evaluated may be the mean of the last two; clients go on from the last.
    side = WHOLE._replace(averaging=server.averaging.last_two())
    evaluated, state, _ = play(fedpa.fedexp(LOCAL, side, epsilon=epsilon), 6)
    np.testing.assert_allclose(evaluated[1:], (found[1:] + found[:-1]) / 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.theta, found[-1], rtol=1e-6)


def test_a_table_is_not_left_alone_where_every_row_moves():
    """Sparse steps are for plain SGD: pulls and control variates move rows that nobody read."""
    model = BagOfWords(6, 2, key=jax.random.key(1))
    examples = {
        "ids": np.array([[1, 2], [2, 1]], np.int32),
        "weights": np.full((2, 2), 0.5, np.float32),
        "y": np.array([[1, 0], [0, 1]], np.float32),
    }
    data, local = client_data(examples), LocalTraining(0.5, batch_size=1, epochs=2)
    found = {}
    for objective in (
        Objective(bag_of_words.loss),
        Objective(bag_of_words.loss, sparse=bag_of_words.SPARSE),
    ):
        algorithm = fedpa.scaffold(local, WHOLE, population=2)(objective)
        state = algorithm.init(model)
        message = algorithm.broadcast(state, 0)._replace(
            shared=jax.tree.map(jnp.ones_like, state.shared)
        )
        (client,) = algorithm.clients.values()
        out = jax.jit(client, compiler_options=QUICK)(
            message, data, algorithm.client_init(model), jax.random.key(0)
        )
        found[objective.sparse is None] = out.result
    for dense, ours in zip(
        jax.tree.leaves(found[True]), jax.tree.leaves(found[False]), strict=True
    ):
        np.testing.assert_allclose(ours, dense, rtol=1e-5, atol=1e-6)
    table = bag_of_words.SPARSE.table(found[False].delta)
    np.testing.assert_allclose(table[5], 2.0, rtol=1e-6)  # 4 steps of 0.5·c, on a row never read


@pytest.mark.parametrize(
    ("build", "anchor"),
    [
        (lambda: fedpa.fedprox(LOCAL, WHOLE, proximal=-1), "proximal = -1"),
        (lambda: fedpa.fedprox(LOCAL, WHOLE, proximal="1"), "proximal = '1'"),
        (lambda: fedpa.fedexp(LOCAL, WHOLE, epsilon=float("nan")), "epsilon = nan"),
        (lambda: fedpa.scaffold(LOCAL, WHOLE, population=0), "population = 0"),
        (lambda: fedpa.scaffold(LOCAL, WHOLE)(OBJECTIVE), "population"),
        (lambda: fedpa.mime(LOCAL, WHOLE, base=0.9), "base = 0.9"),
        (lambda: momentum(1.0), "momentum = 1.0"),
        (lambda: moments(decaying(2.0), 0.9, 1.0), "b2 = 2.0"),
    ],
)
def test_refusals(build, anchor):
    with refused(anchor):
        build()


def test_scaffold_says_what_becomes_of_it_where_clients_do_not_return():
    clients = {f"c{i}": {"x": np.ones((1, 3)), "y": np.ones(1)} for i in range(50)}
    with pytest.raises(UserWarning) as warned:  # an error here: nothing runs
        fedpa.fit(
            least_squares.loss,
            jnp.zeros(3),
            clients,
            fedpa.scaffold(LOCAL, WHOLE),
            rounds=2,
            clients_per_round=3,
        )
    said = str(warned.value)
    assert "0.12 times on average (3 of 50 in each of 2 rounds)" in said
    assert "6 states, 6.98e-05 MB" in said


@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_the_adaptive_family_on_presets(preset):
    kinds = {"fedadam": "adam", "fedyogi": "yogi", "fedadagrad": "adagrad", "fedavgm": "sgd"}
    for task in (name for name, task in tasks().items() if preset in task.presets):
        own = default_config(task, "fedavg", preset).hyperparameters
        for method, kind in kinds.items():
            h = resolve(default_config(task, method, preset)).hyperparameters
            assert h.server_optimizer == kind
            if own.server_optimizer == kind and (kind != "sgd" or own.server_momentum):
                assert h.server_learning_rate == own.server_learning_rate
            elif kind == "sgd":  # momentum's longer steps are made up for
                plain = own.server_learning_rate if own.server_optimizer == "sgd" else 1.0
                assert h.server_learning_rate == pytest.approx(0.1 * plain)
            assert h.server_momentum == (0.9 if kind == "sgd" else 0.0)
        afo = resolve(default_config(task, "afo", preset)).hyperparameters
        assert (afo.epochs, afo.client_schedule) == (1, "exponential:0.1:500")
        assert afo.server_optimizer != "sgd"


@pytest.mark.long
def test_the_family_is_fedavg_with_that_server():
    h = Hyperparameters(epochs=STEPS, batch_size=32, client_learning_rate=RATE)
    for name, side in {
        "fedavgm": Server(server.sgd(1.0, 0.9)),
        "fedadam": Server(server.adam(1.0)),
    }.items():
        named = METHODS[name]
        found, *_ = play(named.build(resolve_hyperparameters(named.adjust(h))), 2)
        np.testing.assert_array_equal(found, play(fedpa.fedavg(LOCAL, side), 2)[0])


def test_afo_decays_the_clients_rates():
    h = METHODS["afo"].adjust(Hyperparameters())
    message = METHODS["afo"].build(h)(OBJECTIVE)
    rate = message.broadcast(message.init(jnp.zeros(3)), 500).rate
    np.testing.assert_allclose(rate, 0.1, rtol=1e-5)


@pytest.mark.parametrize("preset", ["laptop", "paper"])
def test_mime_moves_as_far_as_fedavg_on_presets(preset):
    """By a constant gradient, in the long run: momenta lengthen FedAvg's steps, and not MIME's."""
    for task in (name for name, task in tasks().items() if preset in task.presets):
        h = resolve(default_config(task, "fedavg", preset)).hyperparameters
        fedavg = h.client_learning_rate / (1 - h.client_momentum)
        if h.server_optimizer == "sgd":
            fedavg *= h.server_learning_rate / (1 - h.server_momentum)
        mime = resolve(default_config(task, "mime", preset)).hyperparameters
        assert (mime.client_momentum, mime.server_learning_rate) == (0.0, 1.0)
        assert mime.client_learning_rate == pytest.approx(fedavg, rel=1e-5)


def test_mimes_two_gradients_are_of_one_mini_batch():
    """A single step of plain SGD is then along c, whatever the batch was."""
    one = LocalTraining(optax.sgd(RATE), batch_size=8, samples=1, steps_per_sample=1)
    cohorts = [(0, 2), (1,), (0, 1)]
    found, *_ = play(fedpa.mime(one, WHOLE, base=momentum(0.0)), 3, cohorts)
    theta = START.astype(float)
    for members, after in zip(cohorts, found, strict=True):
        weights = [SIZES[i] / sum(SIZES[j] for j in members) for i in members]
        theta = theta - RATE * sum(
            w * gradient(i, theta) for w, i in zip(weights, members, strict=True)
        )
        np.testing.assert_allclose(after, theta, rtol=1e-5, atol=1e-6)


def test_controls_stay_together_when_the_server_skips_a_round():
    """c is the mean of all c_i; clients that went on alone would bias it for ever."""
    once = lambda t: jnp.where(jnp.asarray(t) == 1, jnp.inf, 1.0)  # noqa: E731
    method = fedpa.scaffold(SMALL, WHOLE._replace(schedule=once), population=sum(SIZES))
    snapshots = []
    with pytest.warns(UserWarning, match="model left unchanged"):
        train(
            method(OBJECTIVE),
            jnp.asarray(START),
            from_mapping(CLIENTS),
            rounds=3,
            clients_per_round=3,
            engine=fedpa.engines.per_client(),
            keep=snapshots.append,
        )
    assert [record["train/skipped"] for record in snapshots[-1].history] == [0, 1, 0]
    for snapshot in snapshots:
        own = [np.asarray(snapshot.client_states[name]) for name in CLIENTS]
        mean = sum(n * c for n, c in zip(SIZES, own, strict=True)) / sum(SIZES)
        np.testing.assert_allclose(snapshot.state.shared, mean, rtol=1e-4, atol=1e-6)


def test_what_a_method_fixes_is_stated():
    h = dataclasses.replace(Hyperparameters(), client_momentum=0.9, server_learning_rate=0.5)
    for name in ("mime", "mime-lite"):
        fixed = METHODS[name].adjust(h)
        assert (fixed.client_momentum, fixed.server_learning_rate) == (0.0, 1.0)
    assert METHODS["fedexp"].adjust(h).server_learning_rate == 1.0
    assert METHODS["fedexp"].defaults(h).iterate_averaging == "last-two"


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [
        fedpa.fedprox(SMALL, WHOLE, proximal=0.1),
        fedpa.fedexp(SMALL, WHOLE._replace(averaging=server.averaging.last_two())),
        fedpa.mime(SMALL, WHOLE, base=momentum(0.9)),
        fedpa.mime_lite(SMALL, WHOLE, base=moments(decaying(0.9), 0.9, 0.1)),
        fedpa.scaffold(SMALL, WHOLE),
    ],
)
def test_a_run_that_was_cut_is_the_run_that_was_not(method, tmp_path):
    engine = fedpa.engines.per_client()

    def fit(rounds, out):
        return fedpa.fit(
            least_squares.loss,
            jnp.asarray(START),
            CLIENTS,
            method,
            rounds=rounds,
            clients_per_round=2,
            engine=engine,
            out=out,
        )

    fit(3, tmp_path / "run")
    again, whole = fit(5, tmp_path / "run"), fit(5, None)
    assert trees_equal(again.state, whole.state)
