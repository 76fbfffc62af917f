"""When FedAvg has stopped improving, and that the switch is the one of a given round."""

import functools
import itertools
import json
import math
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import fedpa
from fedpa import LocalTraining, Plateau, Server, server
from fedpa.engines.engine import OfAlgorithm
from fedpa.objectives import least_squares
from fedpa.server import schedules
from fedpa.training import RecordingOptions
from fedpa.training.callbacks import Event, stop_at_plateau
from fedpa.training.estimate import estimate
from fedpa.training.fit import label_method
from fedpa.training.problem import prepare
from fedpa.training.run import connect_engine
from tests.federations import least_squares_clients, trees_equal
from tests.refusals import refused

SEEDS = range(200)


def find_round(rule, values):
    """The round after which the rule says that the plateau is reached, as in a run that is cut."""
    callback = stop_at_plateau(rule)
    memory = callback.init
    for t, value in enumerate(values, start=1):
        record = {"round": t} if value is None else {rule.metric: float(value)}
        memory, stop = callback.update(memory, Event(t, len(values), None, None, record))
        memory = json.loads(json.dumps(memory))
        assert (stop is not None) == (memory["round"] is not None)
        if stop is not None:
            return memory["round"]
    return None


def falling_until(flat, seed, rounds=300, noise=0.1):
    """A loss that falls exponentially until a round, from 4 to 1, with the noise of cohorts."""
    t = np.arange(rounds)
    trend = 1 + 3 * np.where(t < flat, np.exp(-4 * t / flat) - np.exp(-4), 0)
    return trend + noise * np.random.default_rng(seed).normal(size=rounds)


@pytest.mark.parametrize("flat", [40, 60])
def test_the_plateau_is_found_soon_after_it_begins_and_never_before(flat):
    """Of 200 seeds 97 % within five windows, half within three, all within eight."""
    found = [find_round(Plateau(window=10), falling_until(flat, seed)) for seed in SEEDS]
    assert flat < min(found)
    assert max(found) <= flat + 80
    assert np.quantile(found, 0.97) <= flat + 50
    assert np.median(found) <= flat + 30


def test_a_fall_by_three_standard_errors_a_window_is_no_plateau():
    """In 200 rounds of none of 200 seeds; a level loss is one in all of them."""
    window = 10
    error = math.sqrt(2 / window)
    t = np.arange(200)
    for seed in SEEDS:
        noise = np.random.default_rng(seed).normal(size=200)
        falling = 100 - 3 * error * t / window + noise
        assert find_round(Plateau(window=window, tolerance=0.0), falling) is None
        assert find_round(Plateau(window=window), 100 + noise) <= 100


def test_without_noise_the_tolerance_decides():
    t = np.arange(200.0)
    falling = 2.0 ** (-t / 20) + 1
    found = find_round(Plateau(window=10), falling)
    before, after = falling[found - 30 : found - 20].mean(), falling[found - 20 : found - 10].mean()
    assert (before - after) / before == pytest.approx(1e-3, rel=0.5)
    assert find_round(Plateau(window=10, tolerance=0.0), falling) is None
    assert find_round(Plateau(window=10), np.ones(200)) == 29  # 3w − 1


@pytest.mark.parametrize(
    ("rule", "values", "found"),
    [
        (Plateau(window=2), [1.0] * 9, 5),
        (Plateau(window=2, at_least=7), [1.0] * 9, 7),
        (Plateau(window=2, at_most=3), [1.0] * 9, 3),
        (Plateau(window=2, at_most=7), [9.0, 8, 7, 6, 5, 4, 3, 2, 1], 7),
        (Plateau(window=2), [9.0, 8, 7, 6, 5, 4, 3, 2, 1], None),
        (Plateau(window=2), [1.0, 2, 3, 4, 5, 6, 7, 8, 9], 5),
        (Plateau("eval/accuracy", window=2), [1.0, 2, 3, 4, 5, 6, 7, 8, 9], None),
        (Plateau(window=2), [1.0, math.nan, 1, 1, math.inf, 1, 1, 1, 1], 7),
        (Plateau("eval/mse", window=2), [None, 1.0] * 8, 10),
    ],
)
def test_what_counts(rule, values, found):
    """Values that are not finite and rounds that were not evaluated don't count."""
    assert find_round(rule, values) == found


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"window": 1}, "window = 1"),
        ({"errors": -1.0}, "errors = -1.0"),
        ({"tolerance": math.nan}, "tolerance = nan"),
        ({"at_least": -1}, "at_least = -1"),
        ({"at_most": 0}, "at_most = 0"),
        ({"at_least": 5, "at_most": 4}, "at_most = 4"),
        ({"metric": 3}, "metric = 3"),
    ],
)
def test_bad_rules_are_refused(settings, field):
    with refused(field):
        fedpa.switch_at_plateau(make_fedpa, Plateau(**settings))


# Runs that switch

CLIENTS = least_squares_clients(sizes=(20, 8, 30, 12))
LOCAL = LocalTraining(0.05, batch_size=8, epochs=2)
SIDE = Server(server.adam(0.1), averaging=server.averaging.polyak())
OBJECTIVE = fedpa.Objective(least_squares.loss)
ENGINE = fedpa.engines.local()
ROUNDS, RULE = 9, Plateau("eval/mse", window=2)
LEVELS = [4.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
"""With a window of 2 values: level from round 6 on, a plateau after round 7."""
SWITCH = 7


def make_fedpa(rounds):
    return fedpa.fedpa(LOCAL, SIDE, rho=0.1, burn_in_rounds=rounds)


def make_mean_scaled(rounds):
    return fedpa.mean_control(LOCAL, SIDE, rho=0.1, burn_in_rounds=rounds)


def make_scaffold(rounds):
    """A method that knows all clients and keeps states, whose rate falls at the switch."""
    falling = SIDE._replace(schedule=schedules.step(rounds, 0.1))
    return fedpa.scaffold(LOCAL, falling)


MAKERS = {"fedpa": make_fedpa, "mean-scaled": make_mean_scaled, "scaffold": make_scaffold}


@functools.cache
def build(name, rounds):
    """One algorithm for all tests: what one compiles serves the next."""
    method = MAKERS[name](rounds)
    return fedpa.algorithms.methods.set_population(method, 70.0)(OBJECTIVE)


def switching(name, rule=RULE):
    return fedpa.switch_at_plateau(lambda rounds: lambda _: build(name, rounds), rule)


def evaluate_round(done):
    """An evaluation that is level from a known round on; `done`: rounds before."""
    given = itertools.count(done)
    return lambda params: {"mse": LEVELS[next(given)]}


def fit(method, out=None, done=0, rounds=ROUNDS, callbacks=(), **options):
    return fedpa.fit(
        least_squares.loss,
        jnp.zeros(3),
        CLIENTS,
        method,
        rounds=rounds,
        clients_per_round=2,
        evaluate=evaluate_round(done),
        engine=ENGINE,
        out=out,
        progress=False,
        recording=RecordingOptions(checkpoint_every=1),
        callbacks=callbacks,
        **options,
    )


def numbers(history):
    told = ("seconds", "switch/round")
    return [{name: record[name] for name in record if name not in told} for record in history]


@pytest.fixture(scope="module", name="runs")
def _runs(tmp_path_factory):
    """A run of each method that switches, and what a kill in each round would have left."""
    root = tmp_path_factory.mktemp("switching")

    @functools.cache
    def run(name):
        def copy(event):
            shutil.copytree(root / name / "whole", root / name / f"in-round-{event.round}")

        return root / name, fit(switching(name), root / name / "whole", callbacks=[copy])

    return run


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != "fedpa")) for n in MAKERS]
)
def test_a_run_that_switches_is_the_run_with_that_number_of_burn_in_rounds(runs, name):
    found = runs(name)[1]
    fixed = fit(lambda _: build(name, SWITCH))
    assert numbers(found.history) == numbers(fixed.history)
    assert trees_equal(found.params, fixed.params)
    assert trees_equal(found.state, fixed.state)
    switches = {r["round"]: r["switch/round"] for r in found.history if "switch/round" in r}
    assert switches == {SWITCH + 1: SWITCH}
    later = fit(lambda _: build(name, SWITCH + 1))
    assert not trees_equal(found.params, later.params)


@pytest.mark.parametrize("killed", range(1, ROUNDS + 1))
@pytest.mark.parametrize("name", ["fedpa", pytest.param("mean-scaled", marks=pytest.mark.long)])
def test_a_run_killed_in_any_round_switches_in_the_same(runs, tmp_path, name, killed):
    root, whole = runs(name)
    out = shutil.copytree(root / f"in-round-{killed}", tmp_path / "run")
    again = fit(switching(name), out, done=killed - 1)
    assert [{**r, "seconds": 0} for r in again.history] == [
        {**r, "seconds": 0} for r in whole.history
    ]
    assert trees_equal(again.params, whole.params)
    assert trees_equal(again.state, whole.state)


def test_an_extended_run_is_the_longer_one(runs, tmp_path):
    """Also where its last round was the one after which it switches."""
    whole = runs("fedpa")[1]
    for rounds in (SWITCH, SWITCH + 1):
        out = tmp_path / f"{rounds}"
        fit(switching("fedpa"), out, rounds=rounds)
        again = fit(switching("fedpa"), out, done=rounds - 1)
        assert trees_equal(again.state, whole.state)
        assert numbers(again.history) == numbers(whole.history)


def test_a_run_without_a_plateau_says_so():
    rule = RULE._replace(window=4)
    with pytest.warns(UserWarning, match=r"no plateau of eval/mse in 9 rounds"):
        found = fit(switching("fedpa", rule))
    assert {record["phase"] for record in found.history} == {"burn-in"}


def test_a_metric_that_no_record_has_is_refused():
    for metric in ("train/los", "eval/accuracy"):
        with refused(metric):
            fit(switching("fedpa", Plateau(metric)), rounds=1)


def test_it_is_described_as_the_method_that_switches():
    method = fedpa.switch_at_plateau(make_fedpa, Plateau(window=5))
    assert label_method(method) == label_method(make_fedpa(1))
    settings = method.settings()
    assert (settings["burn_in_rounds"], settings["window"], settings["rho"]) == ("auto", 5, 0.1)
    cost = estimate(
        OBJECTIVE, jnp.zeros(3), CLIENTS, method, clients_per_round=2, rounds=ROUNDS
    ).phases
    assert {name: phase.rounds for name, phase in cost.items()} == {"burn-in": 9, "sampling": 0}
    assert cost["sampling"].local_steps == cost["burn-in"].local_steps > 0


def test_another_rule_or_another_step_is_another_run(tmp_path):
    def at(factor, **rule):
        def make(rounds):
            side = SIDE._replace(schedule=schedules.step(rounds, factor))
            return fedpa.fedavg(LOCAL, side)

        return fedpa.switch_at_plateau(make, Plateau(**rule))

    def run(method):
        return fit(method, tmp_path / "run", rounds=1)

    with pytest.warns(UserWarning, match="no plateau"):
        run(at(0.1))
    with refused("can't be resumed"):
        run(at(0.1, window=5))
    with refused("can't be resumed"):
        run(at(0.2))


def test_a_method_that_knows_all_clients_knows_them_after_the_switch():
    data = fedpa.data.from_mapping(CLIENTS)
    method = fedpa.switch_at_plateau(make_scaffold)
    algorithm = prepare(OBJECTIVE, jnp.zeros(3), data, method, 2).algorithm
    for own in (algorithm, algorithm.switch.at(3)):
        assert own.init(jnp.zeros(3)) is not None


def test_what_can_not_switch_is_refused():
    method = fedpa.switch_at_plateau(make_fedpa)
    with refused("burn_in_rounds = 'auto'"):
        fedpa.simulate(
            least_squares.loss,
            jnp.zeros(3),
            CLIENTS,
            method,
            rounds=2,
            clients_per_round=2,
            seeds=1,
        )
    data = fedpa.data.from_mapping(CLIENTS)
    prepared = prepare(OBJECTIVE, jnp.zeros(3), data, method, 2)
    elsewhere = OfAlgorithm(lambda algorithm, theta: (algorithm, ENGINE))
    with refused("burn_in_rounds = 'auto'"):
        connect_engine(elsewhere, prepared)
    with refused("numerator ="):
        fedpa.global_precision(method)(OBJECTIVE)
    for make in (3, lambda: None, lambda rounds: None):
        with refused("make ="):
            fedpa.switch_at_plateau(make)
    with refused("make ="):
        fit(fedpa.switch_at_plateau(lambda rounds: lambda objective: None))


def test_the_right_moment_of_a_federation_whose_loss_is_known():
    """Gradient descent on 1 + p² halves p in every round: the loss is 1 + 16 · 4^{−t}."""
    local, side = LocalTraining(0.25, 4), Server(server.sgd(1.0))
    method = fedpa.switch_at_plateau(
        lambda rounds: fedpa.mean_control(local, side, burn_in_rounds=rounds), Plateau(window=3)
    )
    result = fedpa.fit(
        lambda p, z, key: 1 + (p - z) ** 2,
        jnp.asarray(4.0),
        {"a": np.zeros(4)},
        method,
        rounds=20,
        clients_per_round=1,
        progress=False,
    )
    losses = [record["train/loss"] for record in result.history]
    np.testing.assert_allclose(losses[:6], 1 + 16 * 0.25 ** np.arange(6), rtol=1e-5)
    # Means of three fall by less than 0.1 %, or than their noise, in three rounds in a row.
    known, level = 1 + 16 * 0.25 ** np.arange(40), []
    for t in range(6, 40):
        before, after = known[t - 6 : t - 3].mean(), known[t - 3 : t].mean()
        noise = np.sqrt((np.diff(known[t - 6 : t]) ** 2).sum() / 10 * 2 / 3)
        level += [t] if before - after <= max(noise, 1e-3 * before) else []
    first = next(t for t in level if {t + 1, t + 2} <= set(level))
    assert [r["switch/round"] for r in result.history if "switch/round" in r] == [first + 2]


def test_a_metric_that_nothing_evaluates_is_refused_before_any_work():
    with refused("metric = 'valid/loss'", "evaluate"):
        fedpa.fit(
            least_squares.loss,
            jnp.zeros(3),
            CLIENTS,
            switching("fedpa", Plateau("valid/loss")),
            rounds=9,
            clients_per_round=2,
            progress=False,
        )
