"""`fedpa.compare`: methods compared on a model of one's own, by the core that the command uses."""

import csv
import math
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa.data import from_mapping
from fedpa.data.views import hold_out
from fedpa.experiments.comparison.own_run import is_same
from fedpa.training.run_directory import is_run, read_metrics
from tests.federations import trees_equal

RNG = np.random.default_rng(0)
CLIENTS = {}
for i in range(8):
    x = RNG.normal(size=(12, 3)).astype(np.float32)
    y = (x[:, 0] + 0.5 * x[:, 1 + i % 2] > 0).astype(np.int32)
    CLIENTS[f"client-{i}"] = {"x": x, "y": y}
START = np.zeros(3, np.float32)
LOCAL = fedpa.LocalTraining(0.1, batch_size=6, epochs=2)
SHARE = 0.25


def loss(w, batch, key):
    score = batch["x"] @ w
    return jnp.logaddexp(jnp.zeros_like(score), score) - batch["y"].astype(score.dtype) * score


def accuracy(w, batch):
    return (batch["x"] @ w > 0) == (batch["y"] > 0)


def at(rate):
    return fedpa.Server(fedpa.server.sgd(rate))


def make_fedavg(server_learning_rate):
    return fedpa.fedavg(LOCAL, at(server_learning_rate))


def make_fedpa(server_learning_rate):
    return fedpa.fedpa(LOCAL, at(server_learning_rate), rho=0.1, burn_in_rounds=2)


METHODS = {"FedAvg": make_fedavg, "FedPA, ρ = 0.1": make_fedpa}
RATES = {"server_learning_rate": [0.3, 1.0, 3.0]}
FIXED = {"FedAvg": make_fedavg(1.0), "FedPA": make_fedpa(1.0)}
"""Without anything to choose."""


def compare(**options):
    given = {
        "rounds": 4,
        "seeds": 2,
        "tune": RATES,
        "metrics": {"accuracy": accuracy},
        "by": "loss",
    }
    return brief(METHODS, **(given | options))


def brief(methods=FIXED, **options):
    given = {"params": START, "rounds": 3, "clients_per_round": 3, "validation": SHARE}
    return fedpa.compare(methods, loss, clients=CLIENTS, **(given | options))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A comparison as a user makes it, with all there is."""
    out = tmp_path_factory.mktemp("made") / "a-comparison"
    return compare(out=out)


def test_the_table_curves_page_and_runs_are_written(made):
    names = {f"{stem}-{seed}" for stem in ("FedAvg", "FedPA-ρ-=-0.1") for seed in (0, 1)}
    files = {
        "table.csv",
        "table.tex",
        "curves.png",
        "report.html",
        "comparison.toml",
        "burn-in",
        "tuning",
    }
    assert {path.name for path in made.out.iterdir()} == names | files
    assert all(is_run(made.out / name) for name in names)
    assert (made.out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "FedPA, ρ = 0.1" in (made.out / "report.html").read_text("utf-8")
    rows = list(csv.DictReader((made.out / "table.csv").read_text("utf-8").splitlines()))
    assert [row["method"] for row in rows] == list(METHODS)
    assert float(rows[1]["difference"]) == pytest.approx(made.table[1]["difference"], abs=1e-6)
    assert made.table[1]["loss_low"] < made.table[1]["loss"] < made.table[1]["loss_high"]
    assert made.table[0]["difference"] is None  # FedAvg is the reference
    shown = repr(made)
    assert "Δ vs" in shown
    assert "mean of the validation evaluations" in shown
    assert "rates, by valid/loss" in shown


def test_the_numbers_are_those_of_the_runs(made):
    for label, fits in made.fits.items():
        finals = [np.mean([r["eval/loss"] for r in fit.history]) for fit in fits.values()]
        (row,) = [row for row in made.table if row["method"] == label]
        assert row["loss"] == pytest.approx(np.mean(finals))
        assert list(fits) == [0, 1]
        assert [r["eval/loss"] for r in fits[0].history] == [
            r["valid/loss"] for r in fits[0].history
        ]


def test_the_rate_is_the_best_on_validation_and_the_runs_have_it(made):
    for label, choice in made.chosen.items():
        values = {t.settings["server_learning_rate"]: t.value for t in choice.trials}
        assert set(values) >= {0.3, 1, 3}
        best = choice.best.settings["server_learning_rate"]
        assert values[best] == min(values.values())
        stem = "FedAvg" if label == "FedAvg" else "FedPA-ρ-=-0.1"
        config = tomllib.loads((made.out / f"{stem}-1" / "config.toml").read_text("utf-8"))
        assert config["tuned"] == {"server_learning_rate": best}
        trial = made.out / "tuning" / f"{stem}-{choice.best.number}"
        assert np.mean([r["valid/loss"] for r in read_metrics(trial)]) == pytest.approx(
            values[best]
        )
        seed = tomllib.loads((trial / "config.toml").read_text("utf-8"))["seed"]
        assert seed not in made.fits[label]


def test_the_first_rounds_are_made_once_and_are_the_same_bits(tmp_path):
    together = brief(seeds=2, out=tmp_path)
    shared = sorted((tmp_path / "burn-in").iterdir())
    assert len(shared) == 2  # by seed
    train, _ = hold_out(from_mapping(CLIENTS), SHARE)
    for label, method in FIXED.items():
        alone = fedpa.fit(loss, START, train, method, rounds=3, clients_per_round=3, seed=1)
        fit = together.fits[label][1]
        assert trees_equal(alone.params, fit.params)
        assert [r["train/loss"] for r in alone.history] == [r["train/loss"] for r in fit.history]
        took = [record["seconds"] for record in read_metrics(shared[1])]
        assert took == [record["seconds"] for record in fit.history[:2]]


def test_methods_meet_the_same_clients(tmp_path):
    """Their first rounds are of the same cohort from the same start, though nothing is shared."""
    methods = {"slow": make_fedavg(0.1), "fast": make_fedavg(2.0)}
    found = brief(methods, seeds=2, out=tmp_path / "a", reference="fast", targets=[0.69, 0.0])
    assert not (tmp_path / "a" / "burn-in").exists()
    slow, fast = (
        [fit.history[0]["train/loss"] for fit in own.values()] for own in found.fits.values()
    )
    assert slow == fast
    assert slow[0] != slow[1]
    assert found.table[1]["difference"] is None
    assert found.table[0]["difference"] > 0  # of a loss
    assert found.table[1]["rounds_to_0_by_seed"] == [None, None]


def test_a_grid_that_ends_too_early_is_extended(tmp_path):
    found = brief(
        {"FedAvg": make_fedavg}, rounds=2, tune={"server_learning_rate": [0.01, 0.02]}, out=tmp_path
    )
    tried = [t.settings["server_learning_rate"] for t in found.chosen["FedAvg"].trials]
    assert tried == [0.01, 0.02, 0.04, 0.08, 0.16]
    assert "0.16" in repr(found)
    assert "*!" in repr(found)


def test_of_several_settings_the_grid_is_tried_and_one_that_fails_is_no_choice():
    def make(rate, kind):
        momentum = 0.9 if kind == "heavy" else 0.0
        return fedpa.fedavg(LOCAL, fedpa.Server(fedpa.server.sgd(rate, momentum)))

    grid = {"rate": [1.0, 1e30], "kind": ["plain", "heavy"]}
    found = brief({"as it is": FIXED["FedAvg"], "tuned": make}, rounds=1, tune=grid)
    assert list(found.chosen) == ["tuned"]
    trials = found.chosen["tuned"].trials
    wanted = [(1.0, "plain"), (1.0, "heavy"), (1e30, "plain"), (1e30, "heavy")]
    assert [tuple(trial.settings.values()) for trial in trials] == wanted
    assert found.chosen["tuned"].best.settings == {"rate": 1.0, "kind": "plain"}  # alike: the first
    assert "settings, by valid/loss" in repr(found)


def test_an_interrupted_comparison_is_continued(made, tmp_path):
    calls = 0

    def interrupt(w):
        nonlocal calls
        calls += 1
        if calls == stop:
            raise KeyboardInterrupt
        return {}

    out = tmp_path / "cut"
    for point in (3, 12):  # in a trial, and in a run
        stop, calls = point, 0
        with pytest.raises(KeyboardInterrupt, match="continues it"):
            compare(out=out, evaluate=interrupt)
    assert not (out / "table.csv").exists()
    stop = 0
    whole = compare(out=out, evaluate=interrupt)
    for mine, other in zip(whole.table, made.table, strict=True):
        assert {**mine, "seconds": 0} == {**other, "seconds": 0}
    for label, fits in whole.fits.items():
        assert all(trees_equal(fits[k].params, made.fits[label][k].params) for k in fits)
    kept = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    again = compare(out=out, evaluate=interrupt)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")} == kept
    assert trees_equal(again.fits["FedAvg"][0].params, whole.fits["FedAvg"][0].params)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"clients_per_round": 2}, "clients_per_round was 3 and is 2"),
        ({"tune": {"server_learning_rate": [0.3, 1.0]}}, "tuning.FedAvg.server_learning_rate was"),
        ({"by": "accuracy"}, "by was 'valid/loss' and is 'valid/accuracy'"),
        ({}, "tune was given and is not"),
        ({"rounds": 3}, "rounds = 3"),
        ({"validation": 0.5}, "data"),
        ({"metrics": {}}, "metrics was"),
        ({"params": START + 1}, "the initial parameters"),
    ],
)
def test_other_settings_are_refused_before_anything_is_written(made, changed, field):
    there = {path: path.stat().st_mtime_ns for path in made.out.rglob("*")}
    with pytest.raises(fedpa.FedpaError) as refused:
        compare(out=made.out, **changed) if changed else brief(out=made.out)
    assert field in str(refused.value)
    assert str(refused.value).startswith(("out = ", "rounds = "))
    assert "overwrite" not in str(refused.value)  # there is no such argument
    assert {path: path.stat().st_mtime_ns for path in made.out.rglob("*")} == there


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rounds": 0}, "rounds = 0"),
        ({"seeds": 0}, "seeds = 0"),
        ({"seeds": []}, "seeds = []"),
        ({"seeds": [1, 1]}, "seeds = [1, 1]"),
        ({"seeds": [0, -1]}, "seeds = -1"),
        ({"seeds": "01"}, "seeds = '0'"),
        ({"seeds": 1.5}, "seeds = 1.5"),
        ({"seeds": [0, 2**32]}, "seed = 4294967296"),
        ({"seeds": [1, 2], "seed": 1}, "seed = 1"),
        ({"seeds": [0, 1_000_000], "tune": RATES}, "seeds = 1000000"),
        ({"validation": 1.5}, "validation = 1.5"),
        ({"validation": None}, "validation = None"),
        ({"validation": None, "evaluate": lambda w: {}, "metrics": {"a": accuracy}}, "metrics = "),
        ({"tune": {"server_learning_rate": [1, 1]}}, "tune['server_learning_rate'] = [1, 1]"),
        ({"tune": {"server_learning_rate": [1, None]}}, "tune['server_learning_rate'] = None"),
        ({"tune": {"server_learning_rate": "13"}}, "tune['server_learning_rate'] = '13'"),
        ({"tune": {"rho": [0, 1]}}, "tune = 'rho'"),
        ({"tune": RATES, "validation": None, "test": CLIENTS}, "validation = None"),
        ({"by": "f1"}, "by = 'f1'"),
        ({"by": 3, "evaluate": lambda w: {}}, "by = 3"),
        ({"metrics": accuracy}, "metrics = <function accuracy"),
        ({"metrics": {"a": loss}}, "metrics['a'] = <function loss"),
        ({"metrics": {"a": lambda w, batch: batch["label"]}}, "metrics['a'] = 'label'"),
        ({"targets": 0.7}, "targets = 0.7"),
        ({"evaluate": {"norm": 1.0}}, "evaluate = {'norm': 1.0}"),
        ({"out": 3}, "out = 3"),
        ({"reference": "SCAFFOLD"}, "reference = 'SCAFFOLD'"),
        ({"metrics": {"loss": accuracy}}, "metrics = 'loss'"),
        ({"metrics": {"mean": lambda w, batch: jnp.mean(batch["x"])}}, "metrics = 'mean'"),
        ({"targets": [math.nan]}, "targets = nan"),
        ({"evaluate": lambda w: {"loss": 1.0}}, "evaluate's answer = 'eval/loss'"),
    ],
)
def test_what_can_not_be_done_is_refused_with_field_and_value(changed, says):
    with pytest.raises(fedpa.FedpaError) as refused:
        brief(**changed)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ({}, "methods = {}"),
        ({"": FIXED["FedAvg"]}, "methods = ''"),
        ({"FedAvg": fedpa.fedavg}, "methods['FedAvg']'s parameter = 'local'"),
        ({"FedAvg": make_fedavg}, "methods['FedAvg']'s parameter = 'server_learning_rate'"),
        ({"FedAvg": lambda rate=1.0: rate}, "methods['FedAvg'] = 1.0"),
        ({"FedAvg": 3}, "methods['FedAvg'] = 3"),
        ({"mine": lambda objective: None}, "methods['mine']: "),
        ({"FedPA": lambda: fedpa.fedpa(LOCAL, at(1.0), rho=-1)}, "methods['FedPA']: rho = -1"),
    ],
)
def test_what_is_no_method_is_refused_by_its_label(methods, says):
    with pytest.raises(fedpa.FedpaError) as refused:
        brief(methods)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (lambda lr: make_fedavg(lr), "lr"),
        (lambda rate, rho: None, "rho"),
        (lambda rate, objective: None, "objective"),
        (lambda other, **settings: None, "other"),
    ],
)
def test_a_parameter_that_is_not_tuned_is_refused_by_its_name(function, missing):
    with pytest.raises(fedpa.FedpaError) as refused:
        brief({"FedPA": function}, tune={"rate": [1, 2], "momentum": [0.0, 0.9]})
    assert f"methods['FedPA']'s parameter = {missing!r}" in str(refused.value)
    assert "tune (rate, momentum)" in str(refused.value)


def test_a_method_of_ones_own_is_told_by_its_argument():
    """From functions of settings, of which a default need not be in tune."""

    def mine(objective, rate=1.0):
        return make_fedavg(rate)(objective)

    found = brief(
        {
            "named": mine,
            "by position": lambda x, /: mine(x),
            "settings": lambda rate=1.0: make_fedavg(rate),
            "none": lambda: make_fedavg(1.0),
        },
        rounds=1,
    )
    losses = [row["loss"] for row in found.table]
    assert losses == pytest.approx([losses[0]] * 4)


def test_seeds_can_be_named_and_runs_have_about_ten_lines(capsys):
    found = brief(seeds=[5, np.int64(2)])
    assert [list(fits) for fits in found.fits.values()] == [[5, 2]] * 2
    assert all(type(seed) is int for fits in found.fits.values() for seed in fits)
    written = capsys.readouterr().err.splitlines()
    for start in ("FedAvg, seed 5", "FedPA, seed 2"):  # they begin with round 3
        assert sum(line.startswith(start) for line in written) == 1
    assert len(written) <= 2 * 2 + 2 * 2  # the first two rounds of both seeds
    again = brief({"FedAvg": FIXED["FedAvg"]}, seed=2, progress=False)
    assert capsys.readouterr().err == ""
    assert list(again.fits["FedAvg"]) == [2]
    assert trees_equal(again.fits["FedAvg"][2].params, found.fits["FedAvg"][2].params)


@pytest.mark.long
def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    """As it stands, but for its length."""
    page = Path(__file__).parents[2] / "docs" / "how_to" / "report.md"
    section = page.read_text("utf-8").split("## A model of your own")[1]
    code = section.split("```python\n")[1].split("```")[0]
    shorter = {
        "rounds=20": "rounds=3",
        "burn_in_rounds=10": "burn_in_rounds=1",
        "seeds=3": "seeds=1",
    }
    for written, short in shorter.items():
        assert written in code
        code = code.replace(written, short)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    assert set(names["comparison"].chosen) == {"FedAvg", "FedPA"}
    assert "rounds_to_0.82" in names["comparison"].table[0]
    assert Path("a-comparison", "report.html").exists()


def test_test_clients_are_what_the_table_shows():
    others = {"a": CLIENTS["client-0"], "b": CLIENTS["client-1"]}
    found = brief({"FedAvg": FIXED["FedAvg"]}, test=others, validation=None, rounds=2)
    last = found.fits["FedAvg"][0].history[-1]
    both = {k: np.concatenate([client[k] for client in others.values()]) for k in ("x", "y")}
    final = found.fits["FedAvg"][0].params
    assert last["test/loss"] == pytest.approx(float(jnp.mean(loss(final, both, None))))
    assert found.table[0]["test_loss"] == last["test/loss"] == last["eval/loss"]
    assert "valid/loss" not in last
    assert "mean of the test evaluations" in repr(found)


def test_a_function_of_the_parameters_alone_can_be_what_is_compared():
    found = brief(
        {"FedAvg": FIXED["FedAvg"]},
        validation=None,
        evaluate=lambda w: {"norm": float(jnp.linalg.norm(w))},
        rounds=2,
    )
    norms = [record["eval/norm"] for record in found.fits["FedAvg"][0].history]
    assert found.table[0]["norm"] == pytest.approx(np.mean(norms))
    assert "mean of the evaluations in" in repr(found)


def test_what_is_better_can_be_said():
    found = brief(
        {"FedAvg": FIXED["FedAvg"]},
        evaluate=lambda w: {"norm": float(jnp.linalg.norm(w))},
        by=fedpa.Best("norm", lower=True),
        targets=[100.0],
        rounds=2,
    )
    assert found.table[0]["rounds_to_100"] == 1  # from above
    assert found.fits["FedAvg"][0].best["metric"] == "eval/norm"
    assert found.fits["FedAvg"][0].best["round"] == 1


def test_an_objective_weighs_what_is_measured():
    def count(batch):
        return 1 + batch["y"].astype(jnp.float32)

    weighed = fedpa.Objective(loss, weight=count)
    found = fedpa.compare(
        {"FedAvg": FIXED["FedAvg"]},
        weighed,
        START,
        CLIENTS,
        rounds=1,
        clients_per_round=3,
        test=CLIENTS,
    )
    every = {k: np.concatenate([client[k] for client in CLIENTS.values()]) for k in ("x", "y")}
    losses, weights = loss(found.fits["FedAvg"][0].params, every, None), count(every)
    wanted = float(jnp.sum(losses * weights) / jnp.sum(weights))
    assert found.table[0]["loss"] == pytest.approx(wanted, rel=1e-5)


def test_the_command_says_who_made_a_directory(made, capsys):
    from fedpa.experiments.cli.main import main

    with pytest.raises(SystemExit):
        main(["compare", "--out", str(made.out)])
    assert "was made by fedpa.compare" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", "digits", "--methods", "fedavg", "--out", str(made.out)])
    assert "made_by was 'fedpa.compare'" in capsys.readouterr().err


def clipped(most):
    return optax.chain(optax.clip(most), optax.sgd(0.1))


def test_functions_are_the_same_by_what_they_close_over():
    assert is_same(at(1.0), at(1.0))
    assert not is_same(at(1.0), at(2.0))
    assert is_same(clipped(5.0), clipped(5.0))
    assert not is_same(clipped(5.0), clipped(10.0))  # their first steps are the same
    table = np.arange(3.0)
    assert is_same({"a": (table, "x", None)}, {"a": (table.copy(), "x", None)})
    assert not is_same({"a": table}, {"a": table + 1})
    assert not is_same(object(), object())

    def make_recursive():
        def recursive(n):
            return recursive(n - 1) if n else 0

        return recursive

    assert is_same(make_recursive(), make_recursive())


def test_what_begins_in_another_way_is_not_shared(tmp_path):
    """Clipping that a few sample steps do not show: alike by settings, and not the same."""
    five, seven = (LOCAL._replace(optimizer=clipped(most)) for most in (5.0, 7.0))
    methods = {
        "FedAvg": fedpa.fedavg(five, at(1.0)),
        "FedPA": fedpa.fedpa(five, at(1.0), rho=0.1, burn_in_rounds=1),
        "other": fedpa.fedavg(seven, at(1.0)),
    }
    brief(methods, rounds=2, out=tmp_path)
    (shared,) = (tmp_path / "burn-in").iterdir()
    took = read_metrics(shared)[0]["seconds"]  # of the round itself, wherever it is told
    own = {name: read_metrics(tmp_path / f"{name}-0")[0]["seconds"] for name in methods}
    assert own["FedAvg"] == own["FedPA"] == took != own["other"]


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "table.csv").write_text("mine")
    with pytest.raises(fedpa.FedpaError, match=r"out = .*table\.csv"):
        brief(out=tmp_path)
    assert [path.name for path in Path(tmp_path).iterdir()] == ["table.csv"]
