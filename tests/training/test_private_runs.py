"""Private runs: noise, ε in records, budgets, resumed bits, and deployments that count twice."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedpa
from fedpa import LocalTraining, Server, server
from fedpa.algorithms.methods import Described
from fedpa.data import from_mapping
from fedpa.engines import EngineOptions
from fedpa.objectives import ClientData, Objective, least_squares
from fedpa.privacy import AdaptiveClip, Ledger, Mechanism, compute_epsilon
from fedpa.training import RecordingOptions
from tests.federations import least_squares_clients, trees_equal
from tests.refusals import refused

CLIENTS = least_squares_clients(sizes=(20, 8, 13, 30, 9, 16, 11, 25, 10, 14, 19, 12))
DATA = from_mapping(CLIENTS)
LOSS = least_squares.loss
LOCAL, SERVER = LocalTraining(0.05, batch_size=8), Server(server.sgd(1.0))
BUDGET = {"clip": 0.5, "noise_multiplier": 1.0, "delta": 0.01, "accountant": "rdp"}
ROUNDS, COHORT = 6, 3
ENGINE = fedpa.engines.per_client()
OBJECTIVE = Objective(LOSS, like=CLIENTS["client-0000"])
AVERAGING = fedpa.fedavg(LOCAL, SERVER)
KINDS = {
    "poisson": {},
    "fixed": {"sampling": "fixed"},
    "adaptive": {"clip": AdaptiveClip(0.5)},
    "bands": {"sampling": "cyclic", "bands": 3},
}


def make_private(method=AVERAGING, **settings):
    return fedpa.private(method, **{**BUDGET, **settings})


# Built once: what one test compiles serves the next.
ALGORITHMS = {name: make_private(**settings)(OBJECTIVE) for name, settings in KINDS.items()}


def fit(out=None, kind="poisson", **options):
    method = options.pop("method", None) or Described(
        lambda objective: ALGORITHMS[kind], fedpa.private, make_private(**KINDS[kind]).arguments
    )
    settings = {"rounds": ROUNDS, "clients_per_round": COHORT, "engine": ENGINE, "out": out}
    settings |= {"recording": RecordingOptions(checkpoint_every=1), "progress": False} | options
    return fedpa.fit(LOSS, np.zeros(3, np.float32), CLIENTS, method, **settings)


def train(algorithm, **options):
    settings = {"rounds": ROUNDS, "clients_per_round": COHORT, "engine": ENGINE} | options
    return fedpa.train(algorithm, jnp.zeros(3), DATA, **settings)


def test_records_have_epsilon_and_say_what_is_not_private():
    history = fit().history
    mechanism = Mechanism(1.0, len(CLIENTS), COHORT, accountant="rdp")
    spent = [compute_epsilon(mechanism, t, 0.01) for t in range(1, ROUNDS + 1)]
    assert [record["privacy/epsilon"] for record in history] == spent
    assert [record["privacy/releases"] for record in history] == list(range(1, ROUNDS + 1))
    assert {record["privacy/clip"] for record in history} == {0.5}
    assert {record["privacy/not_noised"] for record in history} == {"train/*, comm/*"}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.long] * (kind in ("fixed", "adaptive")))
        for kind in KINDS
    ],
)
def test_a_resumed_run_has_the_same_bits_and_the_same_epsilon(kind, tmp_path):
    whole = fit(kind=kind)
    fit(tmp_path, kind, rounds=3)
    resumed = fit(tmp_path, kind)
    assert trees_equal(whole.state, resumed.state)
    for name in ("privacy/epsilon", "privacy/releases", "privacy/clip", "train/loss"):
        one, other = ([record[name] for record in run.history] for run in (whole, resumed))
        np.testing.assert_array_equal(one, other)
    assert not trees_equal(whole.state, fit(kind=kind, seed=1).state)


def test_poisson_cohorts_vary_and_an_empty_one_is_a_round():
    sizes = []

    def count(event):
        sizes.append(len(event.cohort))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fit(rounds=30, clients_per_round=1, callbacks=[count])
    assert len(set(sizes)) > 2
    assert 0 in sizes
    empty = [r for r, size in zip(result.history, sizes, strict=True) if not size]
    assert all(record["train/skipped"] == 0 for record in empty)
    assert all(record["comm/bytes_up"] == 0 for record in empty)
    assert all(np.isnan(record["train/loss"]) for record in empty)


def test_programs_are_not_compiled_for_every_size_of_a_cohort(monkeypatch):
    """The width of a block follows from the mean size."""
    from fedpa.engines import program

    widths = set()
    run_lanes = program.run_lanes

    def watch(client, aggregation):
        run = run_lanes(client, aggregation)

        def traced(shared, lanes):
            widths.add(lanes.keys.shape[0])
            return run(shared, lanes)

        return traced

    monkeypatch.setattr(program, "run_lanes", watch)
    engine = fedpa.engines.vectorized(EngineOptions(workers=1))
    train(ALGORITHMS["poisson"], rounds=5, clients_per_round=6, engine=engine)
    assert 1 <= len(widths) <= 3


def test_the_noise_of_a_round_is_zc_over_m_whatever_the_cohort():
    """Also of a round without clients: the mean is never divided by a sum of weights."""
    algorithm = ALGORITHMS["poisson"]
    state = algorithm.init(jnp.zeros(3))

    def add(state):
        data = ClientData(jax.tree.map(jnp.asarray, OBJECTIVE.like), jnp.asarray(3, jnp.int32))
        message = algorithm.broadcast(state, jnp.asarray(0))
        sent = algorithm.clients["training"](message, data, (), jax.random.key(0))
        return algorithm.aggregation.value(algorithm.aggregation.init(sent.result, sent.weight))

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(add, state))

    def theta(key):
        normals = fedpa.privacy.draw_normals(key, nothing.mean)
        noised = algorithm.release.noise(state, nothing, normals, COHORT)
        return algorithm.parameters(algorithm.server(state, noised, jnp.asarray(0))[0])

    draws = jax.vmap(theta)(jax.random.split(jax.random.key(0), 3000))
    sd = 1.0 * 0.5 / COHORT
    assert stats.kstest(np.ravel(draws) / sd, "norm").pvalue > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["fedavg", "fedpa", "fedprox", "fedexp", "mime-lite", "mb-sgd", "mean"]
)
def test_with_hardly_any_noise_and_clipping_it_is_the_method_itself(name):
    """Fixed cohorts and uniform weights: the constant is their number."""
    from tests.algorithms.test_conformance import METHODS

    side = METHODS[name].arguments["server"]._replace(weighting="uniform")
    plain = METHODS[name].builder(**{**METHODS[name].arguments, "server": side})
    method = fedpa.private(
        plain, clip=1e3, noise_multiplier=1e-9, delta=0.01, sampling="fixed", accountant="rdp"
    )
    one, other = fit(method=method), fit(method=plain)
    np.testing.assert_allclose(one.params, other.params, rtol=1e-4, atol=1e-5)


def test_a_run_ends_before_the_round_that_would_exceed_the_budget(tmp_path):
    mechanism = Mechanism(1.0, len(CLIENTS), COHORT, accountant="rdp")
    spent = [compute_epsilon(mechanism, t, 0.01) for t in (3, 4)]
    most = sum(spent) / 2
    ended = fit(tmp_path, method=make_private(max_epsilon=most))
    assert len(ended.history) == 3
    assert ended.stopped.startswith("privacy budget")
    assert ended.history[-1]["privacy/epsilon"] == spent[0] <= most
    again = fit(tmp_path, method=make_private(max_epsilon=most))
    assert len(again.history) == 3


def test_what_a_budget_does_not_allow_is_refused_before_anything_is_written(tmp_path):
    for settings, anchor in [
        ({"delta": 0.1}, "delta = 0.1"),
        ({"max_epsilon": 0.01}, "max_epsilon = 0.01"),
    ]:
        with refused(anchor):
            fit(tmp_path / "run", method=make_private(**settings))
    with refused("min_success = 0.5"):
        fit(tmp_path / "run", min_success=0.5)
    with refused("method = 'scaffold'"):
        fit(tmp_path / "run", method=make_private(method=fedpa.scaffold(LOCAL, SERVER)))
    with refused("method = ", "can't be made private"):
        keeping = AVERAGING(OBJECTIVE)._replace(client_init=lambda theta: theta)
        fit(tmp_path / "run", method=make_private(method=lambda objective: keeping))
    assert not (tmp_path / "run").exists()
    assert fit(method=make_private(delta=0.1, force=True), rounds=1).history


def test_a_budget_spent_on_resuming_is_refused(tmp_path):
    fit(tmp_path, rounds=3)
    with refused("max_epsilon = 1.5"):
        fit(tmp_path, method=make_private(max_epsilon=1.5), rounds=5)
    more = fit(tmp_path, method=make_private(max_epsilon=100.0), rounds=5)
    assert len(more.history) == 5


# Deployments.


def deploy(path):
    """The algorithm as on other machines: randomness from the operating system, and a ledger."""
    algorithm = ALGORITHMS["poisson"]
    return algorithm._replace(release=algorithm.release._replace(ledger=Ledger(path)))


def test_a_deployments_noise_and_cohorts_do_not_follow_from_its_seed(tmp_path):
    one, other = (train(deploy(tmp_path / name)) for name in ("a", "b"))
    assert not np.equal(one.params, other.params).any()


def test_no_record_of_a_deployment_names_a_client_or_has_a_number_without_noise(tmp_path):
    cohorts = []

    def remember(event):
        cohorts.append(event.cohort)

    history = train(deploy(tmp_path / "privacy.jsonl"), callbacks=[remember]).history
    assert {key for record in history for key in record} == {
        *("round", "phase", "seconds", "train/skipped"),
        *("privacy/epsilon", "privacy/releases", "privacy/clip", "privacy/deployed"),
    }
    assert "client" not in json.dumps(history)
    assert set(cohorts) == {()}


def test_repeated_rounds_of_a_deployment_count_twice(tmp_path):
    """A crash after a release: the round is drawn again, and both are counted."""
    ledger, snapshots = Ledger(tmp_path / "privacy.jsonl"), []
    train(deploy(ledger.path), rounds=3, keep=snapshots.append)
    after_two = snapshots[1]  # the last checkpoint before the crash
    resumed = train(deploy(ledger.path), start=after_two)
    assert ledger.count() == ROUNDS + 1
    mechanism = Mechanism(1.0, len(CLIENTS), COHORT, accountant="rdp")
    spent = [record["privacy/epsilon"] for record in resumed.history]
    expected = [compute_epsilon(mechanism, count, 0.01) for count in (1, 2, 4, 5, 6, 7)]
    assert spent == expected
    assert [record["privacy/releases"] for record in resumed.history] == [1, 2, 4, 5, 6, 7]


def test_a_round_is_counted_before_its_model_exists(tmp_path):
    ledger = Ledger(tmp_path / "privacy.jsonl")
    algorithm = deploy(ledger.path)
    seen = []
    release = algorithm.release

    def noise(state, aggregate, normals, cohort):
        jax.debug.callback(lambda: seen.append(ledger.count()))
        return release.noise(state, aggregate, normals, cohort)

    train(algorithm._replace(release=release._replace(noise=noise)), rounds=2)
    jax.effects_barrier()
    assert seen == [1, 2]


def test_a_deployment_whose_ledger_has_spent_the_budget_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "privacy.jsonl")
    for t in range(40):
        ledger.record(t)
    algorithm = make_private(max_epsilon=3.0)(OBJECTIVE)
    deployed = algorithm._replace(release=algorithm.release._replace(ledger=ledger))
    with refused("max_epsilon = 3.0"):
        train(deployed)


@pytest.mark.parametrize(
    "content", ['{"round": 1}\n{"round": 3}\n', "[]\n", '{"round": 1} {"round": 2}\n', "\n", "x\n"]
)
def test_a_lost_or_changed_release_is_refused(tmp_path, content):
    """Otherwise ε would be smaller than what was spent."""
    path = tmp_path / "privacy.jsonl"
    path.write_text(content)
    with refused(f"{path}: line"):
        Ledger(path).count()


def test_fewer_releases_than_rounds_are_refused(tmp_path):
    ledger = Ledger(tmp_path / "privacy.jsonl")
    ledger.record(1)
    assert ledger.count(done=1) == 1
    with refused(str(ledger.path), "round 2"):
        ledger.count(done=2)


def test_a_release_that_a_crash_cut_short_is_not_counted_and_spoils_no_other(tmp_path):
    ledger = Ledger(tmp_path / "privacy.jsonl")
    ledger.record(1)
    with ledger.path.open("a") as file:
        file.write('{"rou')
    assert ledger.count() == 1
    ledger.record(2)
    assert ledger.path.read_text() == '{"round": 1}\n{"round": 2}\n'


def test_a_deployment_is_not_resumed_as_a_simulation(tmp_path):
    """Its noise would follow from the seed, and its rounds would not be counted."""
    fit(tmp_path, rounds=1)
    Ledger(tmp_path / "privacy.jsonl").record(1)
    with refused(str(tmp_path), "flwr run"):
        fit(tmp_path, rounds=2)


# Pure functions.


def simulate(method):
    settings = {"rounds": 3, "clients_per_round": COHORT, "seeds": [0]}
    return fedpa.simulate(LOSS, np.zeros(3, np.float32), CLIENTS, method, **settings)


@pytest.mark.long
def test_a_simulation_has_the_numbers_of_fit():
    runs = simulate(make_private(sampling="fixed"))
    np.testing.assert_allclose(runs.params[0], fit(kind="fixed", rounds=3).params, atol=1e-5)


def test_a_simulation_has_cohorts_of_one_size():
    with refused("sampling = 'poisson'"):
        simulate(make_private())


def test_a_round_needs_a_key_for_its_noise():
    algorithm = ALGORITHMS["fixed"]
    data = ClientData(jax.tree.map(lambda x: jnp.asarray(x)[None], OBJECTIVE.like), jnp.asarray(20))
    cohort = fedpa.algorithms.Cohort(data, jax.random.split(jax.random.key(0), 1))
    with refused("key = None"):
        fedpa.fed_round(algorithm, algorithm.init(jnp.zeros(3)), cohort, 0)


@pytest.mark.long
def test_estimates_are_of_the_method_inside():
    kinds = (make_private(), AVERAGING)
    costs = [
        fedpa.estimate(LOSS, np.zeros(3, np.float32), CLIENTS, method, clients_per_round=COHORT)
        for method in kinds
    ]
    private, plain = (cost.phases["training"] for cost in costs)
    assert private.local_steps == plain.local_steps
    assert private.bytes_up == plain.bytes_up
    assert private.bytes_down == plain.bytes_down + 4  # the clipping norm


def test_a_private_run_is_labelled():
    assert fit(rounds=1).label.startswith("private FedAvg, clip = 0.5")


@pytest.mark.long
@pytest.mark.parametrize("noise", [0.8, 2.0])
def test_membership_inference_does_no_better_than_epsilon_allows(noise):
    """The likeliest attack on whether one client took part, over thousands of runs.

    For every threshold: true positives ≤ e^ε false positives + δ, but for sampling error. The
    client always sends C in one direction, the others nothing, so that nothing hides it.
    """
    runs, rounds, clients, cohort, delta = 20_000, 4, 10, 3, 0.01
    settings = BUDGET | {"clip": 1.0, "noise_multiplier": noise, "accountant": "pld"}

    def client(message, data, state, key):
        result = jnp.where(data.examples["x"][0, 0] > 0, 5.0, 0.0) * jnp.ones(1)
        return fedpa.algorithms.ClientResult(result, jnp.ones(()), state, ())

    plain = fedpa.fedopt(SERVER, client)
    algorithm = fedpa.private(lambda objective: plain, **settings)(OBJECTIVE)
    rate = cohort / clients

    def run(key, is_member):
        """Poisson cohorts in lanes of a fixed number; who is not drawn has no examples."""
        state = algorithm.init(jnp.zeros(1))
        x = jnp.zeros((clients, 1, 1)).at[0].set(1.0)
        for t in range(rounds):
            draw, noise_key = jax.random.split(jax.random.fold_in(key, t))
            taken = jax.random.uniform(draw, (clients,)) < rate
            taken = taken.at[0].set(taken[0] & is_member)
            data = ClientData({"x": x}, taken.astype(jnp.int32))
            lanes = fedpa.algorithms.Cohort(data, jax.random.split(key, clients))
            state, _ = fedpa.fed_round(algorithm, state, lanes, t, key=noise_key)
        return algorithm.parameters(state)[0]

    keys = jax.random.split(jax.random.key(0), 2 * runs).reshape(2, runs)
    both = jax.jit(jax.vmap(run, in_axes=(0, None)))
    members, others = (-np.asarray(both(k, m)) for k, m in zip(keys, (True, False), strict=True))
    epsilon = compute_epsilon(Mechanism(noise, clients, cohort), rounds, delta)
    thresholds = np.quantile(np.concatenate([members, others]), np.linspace(0.001, 0.999, 200))
    true, false = ((x[:, None] > thresholds).mean(axis=0) for x in (members, others))
    error = 4 * np.sqrt((true * (1 - true) + np.exp(2 * epsilon) * false * (1 - false)) / runs)
    assert (true <= np.exp(epsilon) * false + delta + error + 1e-3).all()
    assert (true - false).max() > 0.05  # the attack does find something
