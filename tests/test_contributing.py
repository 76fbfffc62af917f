"""What is worked through in CONTRIBUTING.md passes what it says it passes."""

import inspect
import json
import random
import re
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa.errors import DataError
from fedpa.experiments.cli.main import main
from fedpa.experiments.tasks import task_named
from tests.algorithms import test_conformance as algorithms
from tests.deltas import test_conformance as deltas
from tests.experiments.tasks import test_presets as presets
from tests.federations import least_squares_clients
from tests.fuzz.bounded import Surface, read_mutated
from tests.fuzz.data_files import damage, use
from tests.samplers import test_conformance as samplers
from tests.samplers.gaussian import HESSIAN
from tests.server import test_conformance as aggregations

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
BLOCKS = dict(
    re.findall(r"^## Adding an? (\w+)\n(?:(?!^## ).)*?```python\n(.*?)```", TEXT, re.M | re.S)
)


def run(block):
    """The names that a section's code defines."""
    names = {"__name__": "contributed"}
    exec(compile(BLOCKS[block], f"CONTRIBUTING.md, {block}", "exec"), names)
    return names


def check_all(suite, **given):
    """Run all tests of a suite that need no more than this, for every parameter they have."""
    tests = [
        test
        for name, test in vars(suite).items()
        if name.startswith("test_") and not name.endswith("other_seeds")
    ]
    done = 0
    for test in tests:
        marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
        assert len(marks) <= 1
        names, rows = marks[0].args if marks else ((), [()])
        names = [names] if isinstance(names, str) else names
        if {*inspect.signature(test).parameters} == {*names, *given}:
            for row in rows:
                test(**given, **dict(zip(names, row if len(names) != 1 else [row], strict=True)))
                done += 1
    return done


CLIENTS = least_squares_clients(sizes=(10, 12))


def fit(method):
    """θ after two rounds of least squares, from 0."""
    return fedpa.fit(
        fedpa.objectives.least_squares.loss,
        jnp.zeros(3),
        CLIENTS,
        method,
        rounds=2,
        clients_per_round=2,
        progress=False,
    ).params


LOCAL = fedpa.LocalTraining(optax.sgd(0.1), batch_size=4, epochs=5)
SERVER = fedpa.Server(fedpa.server.sgd(0.1))


def test_every_section_has_its_code():
    assert [*BLOCKS] == ["sampler", "delta", "aggregation", "method", "reader", "task"]


def test_the_sampler_passes_the_conformance_suite():
    sampler = run("sampler")["metropolis"](samplers.TARGET.objective, step_size=1.0, steps=5)
    entry = (sampler, np.linalg.inv(HESSIAN), 20_000)
    count = sum(check_all(samplers, **{name: entry}) for name in ("law", "entry", "steady"))
    assert count >= 7


def test_the_sampler_runs_in_fedpa():
    metropolis = run("sampler")["metropolis"]
    method = fedpa.fedpa(
        LOCAL,
        SERVER,
        rho=0.1,
        sampler=lambda objective, rate: metropolis(objective, step_size=0.1, steps=5),
    )
    model = eqx.nn.MLP(3, "scalar", 2, depth=1, key=jax.random.key(0))
    result = fedpa.fit(
        lambda m, batch, key: (jax.vmap(m)(batch["x"]) - batch["y"]) ** 2,
        model,
        CLIENTS,
        method,
        rounds=2,
        clients_per_round=2,
        progress=False,
    )
    assert not np.array_equal(result.params.layers[0].weight, model.layers[0].weight)


def test_the_delta_passes_the_conformance_suite(monkeypatch):
    delta = run("delta")["diagonal"](0.3)
    compiled = jax.jit(delta.update), jax.jit(delta.value)
    monkeypatch.setitem(deltas.COMPILED, delta, compiled)
    assert check_all(deltas, delta=delta) >= 4


def test_the_delta_is_what_it_says():
    """(θ₀ − x̄)_j / (w + (1 − w) s_j²), w = 1/(1 + (ℓ−1)ρ); and it runs in FedPA."""
    diagonal, rng = run("delta")["diagonal"], np.random.default_rng(0)
    theta0, samples = rng.standard_normal(4), rng.standard_normal((5, 4))
    delta = diagonal(0.3)
    state = delta.init(jnp.asarray(theta0, jnp.float32), jnp.asarray(9, jnp.int32))
    for sample in jnp.asarray(samples, jnp.float32):
        state = delta.update(state, sample, sample)
    w = 1 / (1 + 4 * 0.3)
    expected = (theta0 - samples.mean(0)) / (w + (1 - w) * samples.var(0, ddof=1))
    np.testing.assert_allclose(delta.value(state)[0], expected, rtol=1e-5)
    assert np.all(fit(fedpa.fedpa(LOCAL, SERVER, delta=diagonal(0.3))) != 0)


def test_the_aggregation_passes_the_conformance_suite():
    assert check_all(aggregations, aggregation=run("aggregation")["drop_extremes"]()) >= 12


def test_the_aggregation_is_what_it_says_and_outlasts_an_outlier():
    aggregation, rng = run("aggregation")["drop_extremes"](), np.random.default_rng(0)
    rows, weights = rng.standard_normal((6, 3)), rng.integers(1, 9, 6)
    rows[2] = 1e12, -1e12, 1e12
    pairs = [
        (aggregations.tree(row), aggregations.scalar(q))
        for row, q in zip(rows, weights, strict=True)
    ]
    mean = aggregation.value(aggregations.total_of(aggregation, pairs)[0]).mean
    for column, found in enumerate([*mean["a"], mean["b"]]):
        kept = np.argsort(rows[:, column])[1:-1]
        expected = np.average(rows[kept, column], weights=weights[kept])
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.all(fit(fedpa.fedavg(LOCAL, SERVER._replace(aggregation=aggregation))) != 0)


def test_the_method_passes_the_conformance_suite():
    method = run("method")["alternating"](algorithms.LOCAL, algorithms.SERVER, rho=0.1)
    assert check_all(algorithms, algorithm=method(algorithms.OBJECTIVE)) >= 5


def test_the_method_alternates():
    """Its first round is FedAvg's, and its second FedPA's from there."""
    alternating = run("method")["alternating"](LOCAL, SERVER, rho=0.1)
    assert (alternating.name, alternating.settings()["rho"]) == ("alternating", 0.1)
    expected = fit(fedpa.fedpa(LOCAL, SERVER, rho=0.1, burn_in_rounds=1))
    np.testing.assert_allclose(fit(alternating), expected, rtol=1e-5)


@pytest.fixture(name="jsonl")
def _jsonl(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "clients").mkdir()
    return tmp_path / "clients"


def write_jsonl(path):
    rng = np.random.default_rng(0)
    rows = [{"x": rng.standard_normal(3).tolist(), "y": i} for i in range(6)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_the_reader_reads_what_was_written(jsonl):
    open_jsonl = run("reader")["open_jsonl"]
    write_jsonl(jsonl / "a.jsonl")
    (jsonl / "empty.jsonl").write_text("")
    for _ in range(2):  # and from the index in the cache
        data = open_jsonl(jsonl, {"label": "y"})
        assert (list(data.ids), data.num_examples("a")) == (["a", "empty"], 6)
        np.testing.assert_array_equal(data.examples("a")["label"], np.arange(6))
    assert open_jsonl(jsonl).examples("empty")["x"].shape == (0, 3)
    assert open_jsonl(jsonl).examples("a")["x"].dtype == np.float32
    with pytest.raises(DataError, match="'z'"):
        open_jsonl(jsonl, ["z"]).examples("a")
    (jsonl / "b.jsonl").write_text('{"x": [1, 2, 3]}\n')
    with pytest.raises(DataError, match=r"client 'b'.*'y'"):
        open_jsonl(jsonl)


def test_the_reader_reads_or_refuses_damaged_files(jsonl):
    open_jsonl, path = run("reader")["open_jsonl"], jsonl / "damaged.jsonl"
    write_jsonl(path)
    content, read = path.read_bytes(), use(lambda path: open_jsonl(path.parent))
    surface = Surface(path.name, write_jsonl, read, damage, named="damaged")
    for case in range(200):
        damage(path, content, random.Random(case))
        _, wrong = read_mutated(surface, path)
        assert wrong is None, (case, wrong)


@pytest.fixture(name="clinics")
def _clinics(tmp_path, monkeypatch):
    """The task's module, outside of fedpa, and data for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = tmp_path / f"package_{tmp_path.name}"
    package.mkdir()
    (package / "clinics.py").write_text(BLOCKS["task"])
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    for name in range(10):
        x = rng.standard_normal((20, 8)).astype(np.float32)
        y = x[:, :3].argmax(1).astype(np.int32)
        np.savez(tmp_path / "data" / f"{name}.npz", x=x, y=y, note=np.array(["x"] * 20))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    return f"{package.name}.clinics"


def test_the_task_is_run_by_the_command(clinics):
    options = ["--rounds", "3", "--data-dir", "data", "--out", "run", "--quiet"]
    main(["run", clinics, "--method", "fedavg", *options])
    assert fedpa.load("run").metrics[-1]["eval/accuracy"] > 0.5
    with pytest.raises(fedpa.FedpaError, match="data_dir = None"):
        task_named(clinics).load(task_named(clinics).presets["laptop"].options)


def test_the_task_keeps_what_every_task_promises(clinics, tmp_path, monkeypatch):
    monkeypatch.setattr(presets, "tasks", lambda: {clinics: task_named(clinics)})
    presets.test_laptop_is_the_default_and_every_preset_suits_every_method(clinics, tmp_path)
    presets.test_sampling_is_reached_by_every_preset()
    problem = task_named(clinics).load(presets.TaskOptions(data_dir="data"))
    sizes = [len(data.ids) for data in (problem.clients, problem.validation, problem.test)]
    assert sizes == [7, 1, 2]
    assert sum(leaf.size for leaf in jax.tree.leaves(problem.init(None))) == 27
