"""End to end: where the algorithms go on heterogeneous least squares, and how they switch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa import LocalTraining, Server, server
from fedpa.data import from_mapping
from fedpa.objectives import Objective, client_data, global_posterior, least_squares
from fedpa.samplers import exact
from tests.federations import distance, least_squares_federation, trees_equal

SIZES = (60, 30, 15, 45)
# Few clients with designs far from alike and optima far apart: where averaging is biased.
CLIENTS, QUADRATICS, GLOBAL = least_squares_federation(
    0, sizes=SIZES, dim=4, heterogeneity=3.0, skew=3.0
)
START = jnp.full(4, 5.0)
OBJECTIVE = Objective(least_squares.loss)


# One client at a time: the other widths that engines prepare for would be compiled for nothing.
ENGINE = fedpa.engines.per_client()


def run(method, rounds, **options):
    return fedpa.train(
        method(OBJECTIVE),
        START,
        from_mapping(CLIENTS),
        rounds=rounds,
        clients_per_round=4,
        engine=ENGINE,
        **options,
    )


def final_distance(distances):
    """Mean over the last 20 rounds."""
    return float(np.mean(distances[-20:]))


def distances(method, rounds):
    seen = []
    run(method, rounds, callbacks=[lambda e: seen.append(distance(e.params, GLOBAL.mean))])
    return seen


def steps(rate, per_sample, samples, burn_in=0, batch=10):
    return LocalTraining(
        optax.sgd(rate),
        batch_size=batch,
        samples=samples,
        steps_per_sample=per_sample,
        burn_in_steps=burn_in,
    )


def test_exact_deltas_reach_the_global_mode(x64):
    double = {k: jax.tree.map(lambda a: a.astype(np.float64), c) for k, c in CLIENTS.items()}
    pooled = {key: np.concatenate([c[key] for c in double.values()]) for key in ("x", "y")}
    optimum = np.linalg.lstsq(pooled["x"], pooled["y"])[0]
    method = fedpa.exact_posterior(least_squares.posterior, Server(server.sgd(0.1)))
    fit = fedpa.train(
        method(OBJECTIVE),
        jnp.full(4, 5.0, jnp.float64),
        from_mapping(double),
        rounds=250,
        clients_per_round=4,
        engine=ENGINE,
    )
    assert distance(fit.params, optimum) < 1e-6


@pytest.mark.long
def test_fedpa_with_exact_samples_ends_far_closer_than_fedavg():
    """A fifth of FedAvg's distance with unequal n_i: each n_i counts once, as a weight."""
    fedavg = fedpa.fedavg(steps(0.05, 1, 100), Server(server.sgd(1.0)))
    sampler = lambda objective, rate: exact(least_squares.posterior)  # noqa: E731
    posterior = fedpa.fedpa(steps(0.05, 1, 100), Server(server.sgd(0.05)), rho=1.0, sampler=sampler)
    biased = final_distance(distances(fedavg, 60))
    ours = final_distance(distances(posterior, 150))
    assert biased > 0.5
    assert ours < biased / 5


def figure_1():
    """The paper's figure 1: two clients, two dimensions, designs stretched in other directions."""
    rng = np.random.default_rng(0)
    clients = {}
    for name, eigenvalues, angle, optimum in [
        ("one", (10, 0.5), np.pi / 6, (-3, 2)),
        ("two", (8, 0.5), -np.pi / 4, (4, 3)),
    ]:
        c, s = np.cos(angle), np.sin(angle)
        x = rng.standard_normal((100, 2)) * np.sqrt(eigenvalues) @ np.array([[c, s], [-s, c]])
        y = x @ np.array(optimum) + rng.standard_normal(100)
        clients[name] = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    return clients


def test_fedpa_crosses_the_switch_and_beats_fedavg_with_the_same_local_steps():
    """With IASG, ρ = 1, 1,100 local steps: FedAvg ends 3.7 from the global optimum, FedPA 0.4."""
    clients = figure_1()
    local = steps(0.01, 10, 100, burn_in=100)
    side = Server(server.sgd(0.03))
    mode = global_posterior(
        [least_squares.posterior(client_data(c)) for c in clients.values()]
    ).mean

    def path(method):
        seen = []
        fit = fedpa.train(
            method(OBJECTIVE),
            jnp.array([-10.0, -10.0]),
            from_mapping(clients),
            rounds=160,
            clients_per_round=2,
            seed=3,
            engine=ENGINE,
            callbacks=[lambda e: seen.append((e.state, distance(e.params, mode)))],
        )
        return fit.history, seen

    _, fedavg = path(fedpa.fedavg(local, side))
    history, ours = path(fedpa.fedpa(local, side, rho=1.0, burn_in_rounds=40))
    assert [record["phase"] for record in history] == ["burn-in"] * 40 + ["sampling"] * 120
    assert history[39]["train/correction_norm"] == 0.0
    assert history[40]["train/correction_norm"] > 0.0
    # Bit for bit the same before the switch, different right after it.
    assert all(trees_equal(a[0], b[0]) for a, b in zip(fedavg[:40], ours[:40], strict=True))
    assert not trees_equal(fedavg[40][0], ours[40][0])
    biased, corrected = (final_distance([d for _, d in seen]) for seen in (fedavg, ours))
    assert biased == pytest.approx(3.7, rel=0.1)
    assert corrected == pytest.approx(0.39, rel=0.15)


@pytest.mark.long
def test_minibatch_sgd_has_no_bias_and_local_sgd_has():
    mb_sgd = distances(fedpa.mb_sgd(steps(0.05, 10, 1), Server(server.sgd(0.1))), 300)
    fedavg = distances(fedpa.fedavg(steps(0.05, 1, 100), Server(server.sgd(1.0))), 60)
    assert final_distance(mb_sgd) < 0.3 * final_distance(fedavg)


@pytest.mark.long
def test_scaffold_reaches_the_optimum_with_two_clients_of_four_a_round():
    """Partial participation, so that client states matter from round to round."""
    local = LocalTraining(optax.sgd(0.05), batch_size=100, samples=20, steps_per_sample=1)
    side = Server(server.sgd(1.0), weighting="uniform")  # as in the paper
    fit = fedpa.train(
        fedpa.scaffold(local, side, population=4)(OBJECTIVE),
        START,
        from_mapping(CLIENTS),
        rounds=300,
        clients_per_round=2,
    )
    hessian = sum(q.hessian for q in QUADRATICS)
    optimum = jnp.linalg.solve(hessian, sum(q.hessian @ q.mean for q in QUADRATICS))
    assert distance(fit.params, optimum) < 1e-3
    assert distance(run(fedpa.fedavg(local, side), 100).params, optimum) > 0.1


def test_mean_scaled_is_mean_with_a_longer_step():
    """One round from the same θ: the step is 1 + (ℓ−1)ρ times as long."""
    local, side = LocalTraining(optax.sgd(0.01), batch_size=10, epochs=5), Server(server.sgd(0.1))
    plain = run(fedpa.mean_control(local, side), 1).params - START
    scaled = run(fedpa.mean_control(local, side, rho=0.25), 1).params - START
    np.testing.assert_allclose(scaled, 2.0 * plain, rtol=1e-4)


@pytest.mark.long
def test_mean_is_fedpa_at_rho_zero():
    local, side = LocalTraining(optax.sgd(0.01), batch_size=10, epochs=5), Server(server.sgd(0.1))
    mean, zero = (
        run(m, 3).params
        for m in (fedpa.mean_control(local, side), fedpa.fedpa(local, side, rho=0.0))
    )
    np.testing.assert_allclose(mean, zero, rtol=1e-5)


def test_one_step_per_sample_and_one_sample_is_fedavg():
    """Only then is a single sample the last iterate."""
    side = Server(server.sgd(0.5))
    one = steps(0.05, 1, 1)
    with pytest.warns(UserWarning, match="samples = 1"):
        single = fedpa.fedpa(one, side, rho=0.5)
    pairs = [run(method, 3).params for method in (fedpa.fedavg(one, side), single)]
    np.testing.assert_allclose(*pairs, rtol=1e-6)


def test_client_learning_rate_schedule_reaches_the_clients():
    side = Server(server.sgd(1.0))
    local = LocalTraining(optax.sgd(0.01), batch_size=100, epochs=1)
    halved = local._replace(schedule=server.schedules.constant(0.5))
    full, half = (run(fedpa.fedavg(x, side), 1).params - START for x in (local, halved))
    np.testing.assert_allclose(half, 0.5 * full, rtol=1e-4)


def test_weighting():
    """Two clients that pull apart: by examples the larger wins, uniformly neither."""
    pull = lambda y, n: {"x": np.ones((n, 1), np.float32), "y": np.full(n, y, np.float32)}  # noqa: E731
    clients = {"large": pull(1.0, 30), "small": pull(-1.0, 10)}
    local = LocalTraining(optax.sgd(0.1), batch_size=50)
    moved = {
        weighting: fedpa.train(
            fedpa.fedavg(local, Server(server.sgd(1.0), weighting))(OBJECTIVE),
            jnp.zeros(1),
            from_mapping(clients),
            rounds=1,
            clients_per_round=2,
            engine=ENGINE,
        ).params
        for weighting in ("examples", "uniform")
    }
    np.testing.assert_allclose(moved["examples"], 0.1 * (30 - 10) / 40, rtol=1e-5)
    np.testing.assert_allclose(moved["uniform"], 0.0, atol=1e-6)


@pytest.mark.parametrize("form", ["recurrence"])  # auto takes the other
def test_both_forms_train_alike(form):
    local, side = LocalTraining(optax.sgd(0.01), batch_size=10, epochs=5), Server(server.sgd(0.1))
    value = run(fedpa.fedpa(local, side, rho=0.3, form=form), 5).params
    auto = run(fedpa.fedpa(local, side, rho=0.3), 5).params
    np.testing.assert_allclose(value, auto, rtol=1e-4)


@pytest.mark.long
def test_figure_1_over_five_seeds():
    """Distances to the global optimum after 1,000 rounds, against an independent prototype's."""
    clients = figure_1()
    mode = global_posterior(
        [least_squares.posterior(client_data(c)) for c in clients.values()]
    ).mean

    def measured(method):
        algorithm, engine, ends = method(OBJECTIVE), fedpa.engines.local(), []
        for seed in range(5):
            seen = []
            fedpa.train(
                algorithm,
                jnp.array([-10.0, -10.0]),
                from_mapping(clients),
                rounds=1000,
                clients_per_round=2,
                seed=seed,
                engine=engine,
                callbacks=[lambda e, seen=seen: seen.append(distance(e.params, mode))],
            )
            ends.append(final_distance(seen))
        return np.mean(ends)

    whole, slow = Server(server.sgd(1.0)), Server(server.sgd(0.01))
    assert measured(fedpa.fedavg(steps(0.01, 10, 1), whole)) == pytest.approx(0.20, rel=0.1)
    assert measured(fedpa.fedavg(steps(0.01, 100, 1), whole)) == pytest.approx(2.05, rel=0.1)
    few, many = steps(0.01, 10, 10, burn_in=100), steps(0.01, 10, 100, burn_in=100)
    assert measured(fedpa.fedpa(few, slow, rho=1.0)) == pytest.approx(1.59, rel=0.1)
    assert measured(fedpa.fedpa(many, slow, rho=1.0)) == pytest.approx(0.39, rel=0.1)
    exactly = fedpa.fedpa(
        many, slow, rho=1.0, sampler=lambda objective, rate: exact(least_squares.posterior)
    )
    assert measured(exactly) < 0.1


def test_centralised_training_is_sgd_on_everything_and_finds_the_global_optimum():
    """What the federated number is read against: no bias, however many local steps there are."""
    local = LocalTraining(optax.sgd(0.02), batch_size=10, epochs=20)
    everyone = fedpa.data.pool_clients(from_mapping(CLIENTS), len(SIZES), seed=0)
    assert list(everyone.ids) == ["pool-0"]

    def trained(method, data):
        return fedpa.train(
            method(OBJECTIVE), START, data, rounds=10, clients_per_round=1, engine=ENGINE
        ).params

    central = trained(fedpa.centralized(local), everyone)
    by_hand = trained(
        fedpa.fedavg(local, Server(server.sgd(1.0))),
        from_mapping({"pool-0": everyone.examples("pool-0")}),
    )
    np.testing.assert_allclose(central, by_hand, rtol=1e-6)
    biased = run(fedpa.fedavg(local, Server(server.sgd(1.0))), 10).params
    assert distance(central, GLOBAL.mean) < 0.2 * distance(biased, GLOBAL.mean)
