import dataclasses
import json
import math
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import fedpa
from fedpa import FedpaError
from fedpa.experiments import config as configuration
from fedpa.experiments.config import as_table, default_config, read_toml, resolve, write_toml
from fedpa.experiments.estimate import estimate_run
from fedpa.experiments.run import run
from fedpa.metrics.streaming import make_evaluator
from fedpa.training import history, run_directory
from tests.federations import trees_equal

SMALL = dataclasses.replace(default_config("digits", "fedpa"), rounds=3, clients_per_round=2)
SMALL = dataclasses.replace(
    SMALL,
    hyperparameters=dataclasses.replace(SMALL.hyperparameters, epochs=2, burn_in_rounds=2),
)
KEYS = {
    "round",
    "phase",
    "seconds",
    "eval/loss",
    "eval/accuracy",
    "train/loss",
    "train/delta_norm",
    "train/correction_norm",
    "train/correction_cosine",
    "train/rho",
    "train/ess",
    "train/rejected",
    "train/empty",
    "train/skipped",
    "train/outliers",
    "comm/bytes_up",
    "comm/bytes_down",
}


@pytest.fixture(scope="module", name="finished")
def _finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "one"
    return out, run(SMALL, out)


def test_a_run_directory_holds_config_metrics_and_parameters(finished):
    out, fit = finished
    files = [".lock", "checkpoints", "config.toml", "loggers.json", "metrics.jsonl", "params.npz"]
    assert sorted(p.name for p in out.iterdir()) == [*files, "summary.json", "tensorboard"]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["round"] for r in records] == [1, 2, 3]
    assert [r["phase"] for r in records] == ["burn-in", "burn-in", "sampling"]
    last = {"test/loss", "test/accuracy"}  # the whole test split, once, at the end
    for record in records:
        assert set(record) == KEYS | (last if record["round"] == 3 else set())
    assert records[2]["test/accuracy"] == records[2]["eval/accuracy"]
    assert records[0]["train/rho"] == 0.0
    assert records[2]["train/rho"] == pytest.approx(1.0)
    assert records[0]["train/ess"] == 0.0
    assert 1 <= records[2]["train/ess"] <= 2
    assert records[0]["train/correction_cosine"] == pytest.approx(1.0)
    assert records[2]["train/correction_norm"] > 0
    assert records == fit.history


def test_load_gives_it_back(finished):
    out, fit = finished
    loaded = fedpa.load(out)
    assert trees_equal(
        [leaf for layer in loaded.params.layers for leaf in (layer.weight, layer.bias)],
        [leaf for layer in fit.params.layers for leaf in (layer.weight, layer.bias)],
    )
    assert loaded.config == resolve(SMALL)
    assert loaded.metrics == fit.history
    problem = fedpa.experiments.tasks.task_named("digits").load(loaded.config.task_options)
    found = make_evaluator(problem.metric, problem.test, 360)(loaded.params)
    assert found.values["accuracy"] == fit.history[-1]["eval/accuracy"]


def test_config_comes_back_from_its_file(finished):
    out, _ = finished
    config = resolve(read_toml(out / "config.toml"))
    assert config == resolve(SMALL)
    text = (out / "config.toml").read_text()
    assert text.startswith(write_toml(config) + "\n[environment]\n")


def test_a_resolved_number_of_samples_does_not_hold_against_other_epochs(finished):
    """The file says samples = 2 because it says epochs = 2; six epochs on top give six."""
    config = read_toml(finished[0] / "config.toml")
    h = dataclasses.replace(config.hyperparameters, epochs=6)
    assert resolve(dataclasses.replace(config, hyperparameters=h)).hyperparameters.samples == 6


def test_a_directory_with_a_run_is_refused_unless_overwritten(finished, tmp_path):
    out, _ = finished
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(FedpaError, match="already contains a run"):
        run(SMALL, out)
    assert (out / "metrics.jsonl").read_bytes() == before
    sampling = dataclasses.replace(SMALL.hyperparameters, burn_in_rounds=0)
    shorter = dataclasses.replace(SMALL, rounds=1, hyperparameters=sampling)
    again = tmp_path / "again"
    run(shorter, again)
    run(dataclasses.replace(shorter, seed=1), again, overwrite=True)
    assert fedpa.load(again).config.seed == 1
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FedpaError, match="is a file"):
            run(SMALL, out)


def test_resume_of_a_command_s_run_takes_nothing_of_one_s_own(finished, capsys):
    out, fit = finished
    with pytest.raises(FedpaError, match=r"leave out loss, evaluate"):
        fedpa.resume(out, lambda p, b, k: b, evaluate=lambda p: {})
    again = fedpa.resume(out)
    assert again.history == fit.history
    assert (again.label, again.out) == (fit.label, fit.out) == ("FedPA[2]", out)
    (line,) = capsys.readouterr().err.splitlines()  # no rounds are left to be shown
    assert repr(str(out)) in line


def begun(out):
    out.mkdir(parents=True)
    run_directory.write_config(out, as_table(resolve(SMALL)), {})
    (out / "checkpoints" / "3").mkdir(parents=True)


def test_runs_and_comparisons_do_not_mix(tmp_path):
    """Either is refused where the other lies; clearing removes ours and nothing else."""
    comparison = tmp_path / "comparison"
    begun(comparison / "fedavg-0")
    (comparison / "fedavg-0" / "notes.txt").write_text("mine")
    (comparison / "table.csv").write_text("old")
    with pytest.raises(FedpaError, match=r"comparison': "):
        run_directory.check_free(comparison, overwrite=False)
    begun(comparison / "fedpa-0")
    run_directory.clear(comparison)
    left = sorted(str(p.relative_to(comparison)) for p in comparison.rglob("*"))
    assert left == ["fedavg-0", "fedavg-0/notes.txt"]


def test_loading_what_is_no_run_is_refused(finished, tmp_path):
    out, _ = finished
    with pytest.raises(FedpaError, match=r"config\.toml is missing"):
        fedpa.load(tmp_path)
    for name in ("config.toml", "metrics.jsonl", "summary.json"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    np.savez(tmp_path / "params.npz", other=np.zeros(3))
    with pytest.raises(FedpaError, match=r"it has other; "):
        fedpa.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("metrics.jsonl", "line 2 "),
        ("config.toml", "TOML"),
    ],
)
def test_a_cut_file_is_named(finished, tmp_path, name, words):
    out, _ = finished
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    whole = (out / name).read_bytes()
    keep = {"metrics.jsonl": whole.index(b"\n") + 50, "config.toml": whole.index(b'"') + 3}
    (tmp_path / name).write_bytes(whole[: keep.get(name, len(whole) // 2)])
    with pytest.raises(FedpaError, match=words) as caught:
        fedpa.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_cut_parameters_are_taken_from_the_last_checkpoint(finished, tmp_path):
    out, fit = finished
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    whole = (out / "params.npz").read_bytes()
    (tmp_path / "params.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match=r"params\.npz is truncated.*; the last checkpoint"):
        loaded = fedpa.load(tmp_path)
    assert trees_equal(loaded.params.layers[0].weight, fit.params.layers[0].weight)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds = 5\nroundz = 3", "unknown field roundz: did you mean rounds?"),
        ("zebra = 3", "unknown field zebra"),
        ("[hyperparameters]\nrhoo = 0.1", "unknown field rhoo: did you mean rho?"),
        ('rounds = "many"', "rounds = 'many': must be a whole number"),
        ("rounds = 2.5", "rounds = 2.5: must be a whole number"),
        ("rounds = true", "rounds = True: must be a whole number"),
        ("[hyperparameters]\nrho = '1'", "rho = '1': must be a number"),
        ("[hyperparameters]\nshrinkage = 'lw'", "shrinkage = 'lw': must be one of 'fixed', 'oas'"),
        (
            "[hyperparameters]\nsample_scale = 'x'",
            "must be one of 'auto', 'none', 'sqrt-n' or a number",
        ),
        ("hyperparameters = 3", "must be a table"),
        ("task = 'nope'", "unknown task; choose from cifar100, digits"),
        ("task = 7", "must be of type str"),
        ("method = 'sgd'", "unknown method; choose from"),
        ("rounds =", "is not valid TOML"),
    ],
)
def test_bad_config_files_are_refused(tmp_path, text, words):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(FedpaError) as caught:
        read_toml(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_file_may_leave_fields_out(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("rounds = 7\n[hyperparameters]\nrho = 1\nsample_scale = 3")
    config = read_toml(path)
    assert config.rounds == 7
    assert config.hyperparameters.rho == 1.0
    assert config.hyperparameters.sample_scale == 3.0
    assert config.hyperparameters.epochs == default_config("digits", "fedpa").hyperparameters.epochs
    with pytest.raises(FedpaError, match="can't be read"):
        read_toml(tmp_path / "missing.toml")


def test_metrics_are_valid_json_even_without_a_number(tmp_path):
    always = {"phase": "burn-in", "seconds": 1.0, "train/rejected": 0}
    always |= {"comm/bytes_up": 0, "comm/bytes_down": 0}
    record = history.plain({"round": np.int64(1), "eval/loss": np.float32("nan"), **always})
    run_directory.write_metrics(tmp_path, fedpa.training.History([record]))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["eval/loss"] is None
    assert math.isnan(run_directory.read_metrics(tmp_path)[0]["eval/loss"])


def test_fresh_directories_do_not_collide(tmp_path):
    names = {run_directory.fresh_directory("digits-fedpa", tmp_path) for _ in range(3)}
    assert len(names) == 3
    assert all(path.is_dir() for path in names)


@pytest.mark.long
def test_the_estimate_is_measured():
    cost, seconds = estimate_run(resolve(SMALL))
    assert cost.clients == 100
    assert cost.parameters == 64 * 32 + 32 + 32 * 10 + 10
    assert {name: phase.rounds for name, phase in cost.phases.items()} == {
        "burn-in": 2,
        "sampling": 1,
    }
    assert set(seconds) == set(cost.phases)
    assert all(value > 0 for value in seconds.values())
    memory = {name: phase.client_memory for name, phase in cost.phases.items()}
    assert memory["sampling"] > memory["burn-in"] > 4 * cost.parameters


def test_typed_values():
    assert configuration.convert_value(float, 3, "x") == 3.0
    with pytest.raises(FedpaError, match="x = 1000"):
        configuration.convert_value(float, 10**400, "x")
    assert jnp.asarray(configuration.convert_value(float | None, 2.5, "x")) == 2.5
