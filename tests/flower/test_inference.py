"""Posteriors over nodes: q on the server is p₀ Π t_i of the sites that nodes hold."""

import functools
import shutil
import types
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

import jax
import jax.numpy as jnp
from flwr.app import Array, Context, RecordDict

import fedpa
from fedpa.algorithms import ep, laplace, product, pvi, sep
from fedpa.data.federated import from_mapping
from fedpa.errors import NoUsableClientError, TooFewClientsError
from fedpa.experiments.methods import METHODS
from fedpa.flower import client_app, make_node, make_run, server
from fedpa.flower.node import StateStore
from fedpa.flower.roster import read_connection
from fedpa.posterior import from_fit
from fedpa.precisions.dense import Dense
from fedpa.precisions.gaussian import Gaussian
from fedpa.training.checkpoint import checkpoint_path
from fedpa.training.problem import Problem
from tests.flower import deployment
from tests.flower.loopback_grid import LoopbackGrid, capture
from tests.refusals import refused

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text("utf-8")
SOURCE = (
    PAGE.split("```python\n# my_app/hospitals.py", 1)[1]
    .split("```")[0]
    .replace(".ep()", '.ep(inner="laplace")')
    .replace("clients_per_round=5", "clients_per_round=3")
)
"""The deployment page's app, with a client's inference that takes no samples."""
APP = types.ModuleType("hospitals")
exec(SOURCE, vars(APP))
FEW = {"min-nodes": 2, "start-timeout": 60.0, "round-timeout": 0.3, "poll": 0.01}
NODES = [{"clients": "a,c"}, {"clients": "b"}]
HOLDERS = {"a": 101, "b": 102, "c": 101}
WAYS = {
    "ep": ep(inner="laplace", newton_rounds=1),
    "pvi": pvi(newton_rounds=1),
    "sep": sep(inner="laplace", newton_rounds=1),
    "laplace": laplace(),
    "product": product(inner="laplace"),
}


def logistic(seed, n):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2)).astype(np.float32)
    y = rng.random(n) < 1 / (1 + np.exp(-x @ [1.0, -0.5] - 0.3 * seed))
    return {"x": x, "y": y.astype(np.float32)}


CLIENTS = from_mapping({name: logistic(k, 8 + 9 * k) for k, name in enumerate("abc")})
PRIOR = fedpa.normal_prior(sd=2.0)
PARAMS = APP.init(None)
METRIC = fedpa.metrics.Metric(APP.measure, lambda sums: {"loss": sums["loss"]})
PROBLEM = Problem(CLIENTS, APP.init, APP.loss, METRIC, CLIENTS, prior=PRIOR)


@functools.cache
def node_of(way):
    """Of all nodes in this process: they share what is compiled."""
    return make_node(PROBLEM, WAYS[way])


def grid_of(way, nodes=NODES):
    return LoopbackGrid(client_app(lambda settings, holding: node_of(way)), {}, nodes)


def serve(grid, out, way="ep", rounds=4, **options):
    run = make_run(
        PROBLEM,
        WAYS[way],
        rounds=rounds,
        clients_per_round=3,
        eval_every=9,
        recording=fedpa.RecordingOptions(checkpoint_every=1),
        **options,
    )
    return server.serve(grid, read_connection({**FEW, "out": str(out)}), run)


def assert_close(a, b, tolerance=2e-4):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def fit_alone(way, rounds):
    """The same by the local engine."""
    return fedpa.fit(
        fedpa.Objective(APP.loss, prior=PRIOR),
        PARAMS,
        CLIENTS,
        WAYS[way],
        rounds=rounds,
        clients_per_round=3,
        engine=fedpa.engines.per_client(),
        progress=False,
    )


@pytest.mark.long  # EP's, by the page's app, is in a shorter test
@pytest.mark.parametrize("way", WAYS)
def test_a_posterior_over_nodes_is_the_local_engine_s(tmp_path, way):
    rounds = 1 if way == "product" else 4
    fit = serve(grid_of(way), tmp_path / "run", way, rounds)
    alone = fit_alone(way, rounds)
    assert_close(fit.state, alone.state)
    names = [name for name in alone.history[-1] if name.startswith("train/")]
    assert "train/mean_change" in names
    for here, there in zip(fit.history, alone.history, strict=True):
        assert [here[name] for name in names] == pytest.approx(
            [there[name] for name in names], rel=1e-2, abs=1e-3, nan_ok=True
        )
    here, there = fedpa.posterior.from_run(tmp_path / "run", PARAMS), from_fit(fit, PARAMS)
    assert_close(here.density, from_fit(alone, PARAMS).density)
    assert_close(here.density, there.density, 0)
    assert len(here.history) == rounds
    with pytest.raises(fedpa.FedpaError, match="has no sites"):  # they are on the nodes
        there.leave_out("a")


# What goes wrong between a node's site and the server's q.


def spoil(content):
    content["arrays"] = type(content["arrays"])(
        {
            name: Array(np.full_like(array.numpy(), np.nan))
            for name, array in content["arrays"].items()
        }
    )


def make_improper(content):
    """A sum after which q would be no density: the server skips the round."""
    (name,) = (name for name in content["arrays"] if name.endswith("precision/matrix"))
    content["arrays"][name] = Array(np.float32(-1e6) * np.eye(3, dtype=np.float32))


def empty_site():
    return Gaussian(jnp.zeros(3), Dense(jnp.zeros((3, 3))))


def watch(grid, faults):
    """Before each round, its faults; and what the server sends, beside what nodes hold."""
    original, rounds, tokens = grid.push_messages, [], {}
    eta, diagonal = PRIOR.natural(PARAMS)

    def push(messages):
        messages = list(messages)
        if messages[0].metadata.message_type == "train":
            for message in messages:
                config, arrays = message.content["config"], message.content["arrays"]
                tokens.update(zip(config["clients"], config["states"], strict=True))
            q = Gaussian(arrays["q/eta"].numpy(), Dense(arrays["q/precision/matrix"].numpy()))
            held, lost = Gaussian(eta, Dense(jnp.diag(diagonal))), []
            for name, node in HOLDERS.items():
                store = StateStore(grid.contexts[node].state)
                sites, gone = store.take(empty_site(), [name], [tokens[name]], config["floor"])
                lost += gone
                for site in sites.values():
                    held = held.times(site)
            rounds.append((dict(tokens), lost, q, held))
            grid.faults = faults(len(rounds))
        return original(messages)

    grid.push_messages = push
    return rounds


@pytest.mark.filterwarnings("ignore:round")
def test_the_server_s_q_is_of_the_sites_that_nodes_hold(tmp_path):
    """Answers that are refused, that don't come, and a round that the server skips."""
    grid = grid_of("ep")
    faults = {2: {102: spoil}, 3: {101: None}, 5: {101: make_improper}}
    rounds = watch(grid, lambda number: faults.get(number, {}))
    fit = serve(grid, tmp_path / "run", rounds=7)
    held = [tuple(tokens[name] for name in "abc") for tokens, *_ in rounds]
    # After round 3 node 101 is first asked whether it is there again.
    assert held == [(0, 0, 0), (1, 1, 1), (2, 1, 2), (2, 3, 2), (2, 4, 2), (2, 4, 2), (6, 6, 6)]
    assert [record["train/rejected"] for record in fit.history] == [0, 1, 2, 2, 0, 0, 0]
    assert [record["train/skipped"] for record in fit.history] == [0, 0, 0, 0, 1, 0, 0]
    for _, lost, q, sites in rounds:
        assert not lost
        assert_close(q, sites)
    assert_close(rounds[4][2], rounds[5][2], 0)  # of the round that was skipped nothing is left


@pytest.mark.filterwarnings("ignore:round")
def test_a_client_that_has_lost_its_site_is_left_out_and_q_keeps_it(tmp_path):
    grid, states = grid_of("ep"), RecordDict()

    def forget(number):
        if number == 3:  # node 102 is started again, and has no state-dir
            states.update(grid.contexts[102].state)
            grid.contexts[102].state.clear()
        return {}

    rounds = watch(grid, forget)
    fit, text = capture(lambda: serve(grid, tmp_path / "run", rounds=5))
    assert (
        "round 3: node 102 has lost the states of 1 of its clients ('b', …): they are left" in text
    )
    gone = [record.get("train/rejected_clients", []) for record in fit.history]
    assert gone == [[], [], ["b"], ["b"], ["b"]]
    assert [lost for _, lost, *_ in rounds] == [[], [], [], ["b"], ["b"]]
    assert [tokens["a"] for tokens, *_ in rounds] == [0, 1, 2, 3, 4]  # the others continue
    last = StateStore(states).take(empty_site(), ["b"], [2], 2)[0]["b"]
    for _, _, q, sites in rounds[3:]:
        assert_close(q.divide(sites), last)
    strict = grid_of("ep")
    watch(strict, lambda number: strict.contexts[102].state.clear() or {})
    with pytest.raises(TooFewClientsError, match=r"client 'b': its state is lost"):
        serve(strict, tmp_path / "strict", min_success=1.0)


@pytest.mark.filterwarnings("ignore:round")
@pytest.mark.long
def test_a_run_is_resumed_exactly_where_nodes_have_kept_their_sites(tmp_path):
    """Nodes are ahead of the server, as a kill leaves them. Without their files it is refused."""
    nodes = [node | {"state-dir": str(tmp_path / node["clients"])} for node in NODES]
    whole = serve(grid_of("ep", nodes), tmp_path / "whole", rounds=5)
    serve(grid_of("ep", nodes), tmp_path / "run", rounds=4)
    shutil.rmtree(checkpoint_path(tmp_path / "run", 4))
    (tmp_path / "run" / "summary.json").unlink()
    shutil.copytree(tmp_path / "run", tmp_path / "lost")
    fit = serve(grid_of("ep", nodes), tmp_path / "run", rounds=5)
    assert [record["train/rejected"] for record in fit.history] == [0] * 5
    assert_close(fit.state, whole.state, 0)
    with pytest.raises(NoUsableClientError, match=r"round 4: all 3 clients have lost their states"):
        serve(grid_of("ep"), tmp_path / "lost", rounds=5)


def write_examples(root):
    """Client b's in one directory, the others' in two."""
    for name in CLIENTS.ids:
        place = root / ("one" if name == "b" else "two")
        place.mkdir(exist_ok=True)
        np.savez(place / f"{name}.npz", **CLIENTS.examples(name))


def write_app(root):
    """The page's app as Flower runs it: EP of four rounds, which no convergence rule ends."""
    changes = {
        "(inner=": "(newton_rounds=1, inner=",
        "rounds=60": "rounds=4",
        "stop_when_converged()": "stop_when_converged(in_a_row=9)",
    }
    source = SOURCE
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (root / "my_app").mkdir(parents=True)
    (root / "my_app" / "__init__.py").touch()
    (root / "my_app" / "hospitals.py").write_text(source)
    project = (deployment.APP / "pyproject.toml").read_text().split("task =")[0]
    for name in ("server", "client"):
        project = project.replace(f"fedpa_app.{name}:app", f"my_app.hospitals:{name}")
    settings = 'out = ""\nmin-nodes = 2\nstart-timeout = 120.0\nround-timeout = 120.0\n'
    (root / "pyproject.toml").write_text(f'{project}{settings}app.data = ""\n')
    return root


@pytest.mark.long
def test_the_page_s_app_gives_the_local_posterior_over_processes(tmp_path):
    """Every message starts a process: one node's sites are in Flower's state, one's in files."""
    write_examples(tmp_path)
    nodes = [f'data-dir="{tmp_path}/one"', f'data-dir="{tmp_path}/two" state-dir="{tmp_path}/kept"']
    out, app = tmp_path / "run", write_app(tmp_path / "app")
    there = deployment.Deployment(
        tmp_path, nodes=2, app=app, node_config=lambda number, of: nodes[number]
    )
    with there:
        number = there.run(**{"out": str(out), "app.data": str(tmp_path / "one")})
        assert there.ended(number) == "finished:completed", there.run_log(number)
    found, alone = fedpa.posterior.from_run(out, PARAMS), from_fit(fit_alone("ep", 4), PARAMS)
    assert [record["phase"] for record in found.history] == ["newton", *["sites"] * 3]
    assert [record["train/rejected"] for record in found.history] == [0] * 4
    assert_close(found.density, alone.density)
    assert_close((found.mean, found.sd), (alone.mean, alone.sd))


def test_the_page_s_app_gives_the_posterior_of_infer(tmp_path):
    write_examples(tmp_path)
    settings = {**FEW, "out": str(tmp_path / "run"), "app.data": str(tmp_path / "one")}
    nodes = [{"data-dir": str(tmp_path / place)} for place in ("one", "two")]
    APP.server(LoopbackGrid(APP.client, settings, nodes), Context(1, 1, {}, RecordDict(), settings))
    names = {"fedpa": fedpa, "init": APP.init, "out": tmp_path / "run"}
    exec(PAGE.split("directory has the posterior:\n\n```python\n")[1].split("```")[0], names)
    alone = fedpa.infer(
        lambda params, batch: -APP.loss(params, batch, None),
        PARAMS,
        CLIENTS,
        prior=PRIOR,
        inner="laplace",
        engine=fedpa.engines.per_client(),
        progress=False,
    )
    found = names["posterior"]
    assert found.converged
    assert len(found.history) == len(alone.history)
    assert_close(found.density, alone.density)
    assert_close((found.mean, found.sd), (alone.mean, alone.sd))
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('method = "ep"', 'method = "fedavg"'))
    with refused(f"directory = {str(tmp_path / 'run')!r}"):  # only inference has a posterior
        fedpa.posterior.from_run(tmp_path / "run", PARAMS)


def test_methods_of_inference_are_none_of_the_command_s():
    assert not set(WAYS) & set(METHODS)
