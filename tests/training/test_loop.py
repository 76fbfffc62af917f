import warnings
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src import monitoring

import fedpa
from fedpa import FedpaError, LocalTraining, Server, Stop, server
from fedpa.data import from_mapping
from fedpa.errors import NoUsableClientError
from fedpa.objectives import Objective, least_squares
from fedpa.training.loop import client_keys, select_cohort
from tests.federations import least_squares_clients

LOCAL = LocalTraining(optax.sgd(0.05), batch_size=8, epochs=2)
SIDE = Server(server.sgd(0.5))
CLIENTS = least_squares_clients(sizes=(20, 8, 90, 30, 100, 12))
FEDAVG = fedpa.fedavg(LOCAL, SIDE)
# One client at a time, where nothing else is asked for: the other widths that engines prepare for
# would be compiled for nothing.
ENGINE = fedpa.engines.per_client()


def fit(clients=CLIENTS, method=FEDAVG, **options):
    settings = {"rounds": 3, "clients_per_round": 3, "engine": ENGINE, "progress": False} | options
    return fedpa.fit(least_squares.loss, jnp.zeros(3), clients, method, **settings)


def test_cohort_is_a_function_of_seed_and_round():
    ids = [f"c{i}" for i in range(50)]
    assert select_cohort(1, 4, ids, 10) == select_cohort(1, 4, ids, 10)
    assert select_cohort(1, 4, ids, 10) != select_cohort(1, 5, ids, 10)
    assert select_cohort(1, 4, ids, 10) != select_cohort(2, 4, ids, 10)
    for t in range(20):
        assert len(set(select_cohort(0, t, ids, 10))) == 10  # without replacement
    assert select_cohort(0, 0, ids, 99) == ids
    often = np.bincount(
        [int(c[1:]) for t in range(500) for c in select_cohort(0, t, ids, 10)], minlength=50
    )
    assert often.min() > 60  # 100 on average, σ ≈ 9
    assert often.max() < 140


def test_the_cohort_does_not_depend_on_the_method():
    def visited(method):
        seen, algorithm = [], method(Objective(least_squares.loss))
        note = lambda event: seen.append(list(event.cohort))  # noqa: E731
        options = {"rounds": 4, "clients_per_round": 2, "seed": 5, "engine": ENGINE}
        data = from_mapping(CLIENTS)
        fedpa.train(algorithm, jnp.zeros(3), data, callbacks=[note], **options)
        return seen

    assert visited(FEDAVG) == visited(fedpa.fedpa(LOCAL, SIDE, rho=0.1, burn_in_rounds=2))


def test_a_clients_key_depends_on_its_id_not_its_company():
    alone = client_keys(0, 3, ["b"])[0]
    company = client_keys(0, 3, ["a", "b", "c"])
    assert jnp.array_equal(jax.random.key_data(alone), jax.random.key_data(company[1]))
    everyone = np.asarray(
        jnp.stack(
            [
                jax.random.key_data(k)
                for s in (0, 1)
                for t in (0, 1)
                for k in client_keys(s, t, ["a", "b"])
            ]
        )
    )
    assert len({tuple(row) for row in everyone}) == 8


def test_one_client_in_all():
    only = {"a": CLIENTS["client-0000"]}
    assert np.isfinite(fit(only, clients_per_round=1).params).all()


def test_a_cohort_larger_than_the_population_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(clients_per_round=100)
    assert len(caught) == 1
    assert "clients_per_round = 100" in str(caught[0].message)
    per_client = 3 * 4 + 4  # θ in float32 and a number
    assert result.history[0]["comm/bytes_down"] == 6 * per_client
    assert result.history[0]["comm/bytes_up"] == 6 * per_client


def test_a_round_without_any_usable_client_leaves_the_state():
    data = from_mapping(CLIENTS)
    ids = [select_cohort(0, t, data.ids, 1)[0] for t in range(3)]
    assert ids[2] not in ids[:2]

    def examples(name):
        found = data.examples(name)
        return found if name == ids[2] else jax.tree.map(lambda a: np.full_like(a, 1e30), found)

    met = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fedpa.train(
            FEDAVG(Objective(least_squares.loss)),
            jnp.ones(3),
            data._replace(examples=examples),
            rounds=3,
            clients_per_round=1,
            engine=ENGINE,
            callbacks=[lambda event: met.append(event.params)],
        )
    assert any("model left unchanged" in str(w.message) for w in caught)
    assert [record["train/skipped"] for record in result.history] == [1, 1, 0]
    assert result.history[0]["train/rejected"] == 1
    np.testing.assert_array_equal(met[1], jnp.ones(3))
    assert (result.params != 1).all()


def test_a_run_that_no_client_ever_changed_fails_and_says_why(tmp_path):
    """After five such rounds; a shorter one after its last. Run again, it fails again."""
    rounds = []

    def run(**options):
        note = lambda event: rounds.append(event.round)  # noqa: E731
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fit(method=wild, callbacks=[note], out=tmp_path / "run", **options)

    wild = fedpa.fedavg(LOCAL._replace(optimizer=optax.sgd(1e30)), SIDE)
    with pytest.raises(
        NoUsableClientError, match=r"rounds 1 to 3 .*client 'client-000.*not finite"
    ):
        run()
    with pytest.raises(NoUsableClientError, match="rounds 1 to 3 "):
        run()
    with pytest.raises(NoUsableClientError, match=r"rounds 1 to 5 .*Lower the learning rate"):
        run(rounds=9)
    assert rounds == [1, 2, 3, 4]
    assert not (tmp_path / "run" / "summary.json").exists()
    assert fedpa.load(tmp_path / "run").round == 4


def test_a_run_whose_clients_have_no_examples_fails():
    empty = {name: jax.tree.map(lambda a: a[:0], client) for name, client in CLIENTS.items()}
    with (
        pytest.warns(UserWarning, match="round 1"),
        pytest.raises(NoUsableClientError, match=r"'client-000[345]' .*no examples"),
    ):
        fit(empty | {"client-0000": CLIENTS["client-0000"]}, rounds=1)  # not of the cohort


def compilations(work):
    """How many programs XLA compiles while `work` runs."""
    count = 0

    def listener(event, duration, **_):
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    monitoring.register_event_duration_secs_listener(listener)
    try:
        work()
    finally:
        monitoring.unregister_event_duration_listener(listener)
    return count


def test_few_programs_per_phase_and_none_later():
    """Sizes 8 to 100: one or three lanes, two phases; other cohorts are served by the same
    programs.
    """
    traced = Counter()

    def counting(phase, client):
        def counted(message, data, state, key):
            traced[phase, data.examples["x"].shape[0]] += 1
            return client(message, data, state, key)

        return counted

    method = fedpa.fedpa(LOCAL, SIDE, rho=0.1, burn_in_rounds=6)
    algorithm = method(Objective(least_squares.loss))
    algorithm = algorithm._replace(
        clients={phase: counting(phase, c) for phase, c in algorithm.clients.items()}
    )
    engine = fedpa.engines.local()

    def train(seed):
        fedpa.train(
            algorithm,
            jnp.zeros(3),
            from_mapping(CLIENTS),
            rounds=20,
            clients_per_round=3,
            engine=engine,
            seed=seed,
        )

    assert compilations(lambda: train(0)) >= 4  # the counter counts
    first = sum(traced.values())
    # Once for each program, and once more per phase to learn the shape of a result.
    assert first <= 2 * (2 + 1)
    for seed in range(1, 6):  # other cohorts, in other orders: nothing is traced or compiled
        assert compilations(lambda seed=seed: train(seed)) == 0
    assert sum(traced.values()) == first


def test_a_rejected_client_keeps_its_old_state():
    """One bad round does not spoil a stateful client for good."""
    data, name = from_mapping(CLIENTS), next(iter(CLIENTS))
    clients = {name: jax.tree.map(np.array, data.examples(name)) for name in data.ids}
    clients[name]["x"] *= 1e30  # its loss is not finite

    def mend(event):
        clients[name]["x"][:] = CLIENTS[name]["x"]

    algorithm = fedpa.scaffold(LOCAL, SIDE, population=260)(Objective(least_squares.loss))
    with pytest.warns(UserWarning, match="rejected"):
        result = fedpa.train(
            algorithm,
            jnp.zeros(3),
            data._replace(examples=clients.__getitem__),
            rounds=4,
            clients_per_round=6,
            engine=ENGINE,
            callbacks=[mend],
        )
    assert [record["train/rejected"] for record in result.history] == [1, 0, 0, 0]


def test_a_run_that_never_samples_says_so():
    with pytest.warns(UserWarning, match="all 3 rounds are burn-in"):
        fit(method=fedpa.fedpa(LOCAL, SIDE, rho=0.1, burn_in_rounds=3))


def test_server_schedule_goes_by_round():
    side = SIDE._replace(schedule=server.schedules.exponential(0.5))
    one = {"a": {"x": np.ones((1, 1), np.float32), "y": np.ones(1, np.float32)}}
    local = LocalTraining(optax.sgd(1.0), batch_size=1)
    seen = []
    fedpa.fit(
        lambda theta, batch, key: -theta[0] * batch["y"],  # Δ = −1 whatever θ
        jnp.zeros(1),
        one,
        fedpa.fedavg(local, side),
        rounds=3,
        clients_per_round=1,
        callbacks=[lambda e: seen.append(float(e.params[0]))],
    )
    np.testing.assert_allclose(seen, [0.5, 0.75, 0.875], rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "method"),
    [
        (jnp.bfloat16, fedpa.fedpa(LOCAL, SIDE, rho=0.1, form="gram")),
        (jnp.float16, fedpa.mean_control(LOCAL, SIDE)),
    ],
    ids=["bfloat16", "float16"],
)
def test_low_precision_parameters_train(dtype, method):
    result = fedpa.fit(
        lambda theta, batch, key: least_squares.loss(theta.astype(jnp.float32), batch, key),
        jnp.zeros(3, dtype),
        CLIENTS,
        method,
        rounds=2,
        clients_per_round=2,
        engine=ENGINE,
    )
    assert result.params.dtype == dtype
    assert result.history[0]["comm/bytes_up"] == 2 * (3 * 2 + 4)  # two clients: θ and a weight
    assert float(jnp.sum(jnp.abs(result.params.astype(jnp.float32)))) > 0


def test_callbacks_add_metrics_and_stop():
    seen = []

    def stop(event):
        seen.append(event.record["eval/size"])
        return Stop("enough") if event.round == 2 else None

    result = fit(
        rounds=9, evaluate=lambda theta: {"size": float(jnp.sum(theta**2))}, callbacks=[stop]
    )
    assert len(result.history) == len(seen) == 2
    assert result.stopped == "enough"
    assert result.history[1]["eval/size"] == seen[1] > 0


def test_evaluation_every_so_many_rounds_and_after_the_last():
    result = fit(rounds=5, evaluate=lambda theta: {"one": 1.0}, eval_every=2)
    assert [r["round"] for r in result.history if "eval/one" in r] == [2, 4, 5]


def test_equinox_models_keep_their_other_leaves():
    model = eqx.nn.MLP(3, "scalar", 4, depth=1, key=jax.random.key(0))

    def loss(model, batch, key):
        return (jax.vmap(model)(batch["x"]) - batch["y"]) ** 2

    result = fedpa.fit(loss, model, CLIENTS, FEDAVG, rounds=2, clients_per_round=2, engine=ENGINE)
    assert result.params.activation is model.activation
    assert not jnp.array_equal(result.params.layers[0].weight, model.layers[0].weight)


def test_flax_parameters():
    import flax.linen as nn

    module = nn.Dense(1)
    params = module.init(jax.random.key(0), jnp.ones((1, 3)))

    def loss(params, batch, key):
        return (module.apply(params, batch["x"])[:, 0] - batch["y"]) ** 2

    result = fedpa.fit(loss, params, CLIENTS, FEDAVG, rounds=2, clients_per_round=2, engine=ENGINE)
    assert result.params["params"]["kernel"].shape == (3, 1)


def test_plain_pytrees_with_other_leaves():
    params = {"w": np.zeros(3, np.float32), "steps": 7, "name": "linear", "order": np.arange(3)}

    def loss(params, batch, key):
        assert params["name"] == "linear"
        return (batch["x"] @ params["w"] - batch["y"]) ** 2

    method = fedpa.fedpa(LOCAL, SIDE, rho=0.1)
    result = fedpa.fit(loss, params, CLIENTS, method, rounds=2, clients_per_round=2, engine=ENGINE)
    assert result.params["steps"] == 7
    np.testing.assert_array_equal(result.params["order"], np.arange(3))
    assert np.asarray(result.params["w"]).any()


def test_a_regularizer_pulls_and_sum_reduction_lengthens_the_step():
    def moved(clients=CLIENTS, rate=0.001, batch_size=200, **options):
        method = fedpa.fedavg(LocalTraining(optax.sgd(rate), batch_size=batch_size), SIDE)
        objective = fedpa.Objective(least_squares.loss, **options)
        settings = {"rounds": 1, "clients_per_round": len(clients)}
        fit = fedpa.fit(objective, jnp.zeros(3), clients, method, engine=ENGINE, **settings)
        return fit.params

    plain = moved()
    pulled = moved(regularizer=lambda theta: 100.0 * jnp.sum((theta - 1.0) ** 2))
    # One full-batch step: the regularizer adds exactly −η ∂r/∂θ = 0.2 to the local step.
    np.testing.assert_allclose(pulled - plain, 0.5 * 0.2, rtol=1e-4)
    one = {"a": CLIENTS["client-0000"]}
    mean, total = (moved(one, 1e-4, 20, reduction=r) for r in ("mean", "sum"))
    np.testing.assert_allclose(total, 20 * mean, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 0}, "rounds = 0"),
        ({"clients_per_round": 0}, "clients_per_round = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"eval_every": 0, "evaluate": lambda theta: {}}, "eval_every = 0"),
        ({"clients": {"a": {"x": np.full((2, 3), np.nan), "y": np.zeros(2)}}}, "client 'a': x"),
    ],
)
def test_bad_settings_are_refused(options, words):
    with pytest.raises(FedpaError, match=words):
        fit(**options)


def test_bad_models_and_losses_are_refused():
    with pytest.raises(FedpaError, match="params has no floating-point arrays"):
        fedpa.fit(least_squares.loss, {"n": 3}, CLIENTS, FEDAVG, rounds=1, clients_per_round=1)
    with pytest.raises(FedpaError, match=r"params: \['w'\] = nan"):
        fedpa.fit(
            lambda p, b, k: b["y"] * p["w"],
            {"w": jnp.asarray(jnp.nan)},
            CLIENTS,
            FEDAVG,
            rounds=1,
            clients_per_round=1,
        )
    with pytest.raises(FedpaError, match="one number per example"):
        fedpa.fit(
            lambda p, b, k: jnp.mean(b["y"]) * jnp.sum(p),
            jnp.zeros(3),
            CLIENTS,
            FEDAVG,
            rounds=1,
            clients_per_round=1,
        )
