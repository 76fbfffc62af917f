"""A task of one's own is named by its module, wherever a task is named."""

import json
import sys

import numpy as np
import pytest

import fedpa
from fedpa.errors import FedpaError
from fedpa.experiments.cli.main import main
from fedpa.experiments.tasks import task_named
from fedpa.training.run_directory import fresh_directory

CODE = """
import numpy as np, jax.numpy as jnp
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.data.federated import from_mapping
from fedpa.metrics.classification import classifier
from fedpa.experiments.tasks import Preset, Problem, own_task
import jax, optax


def logits(model, x):
    return x @ model["w"]


def loss(model, batch, key):
    return optax.softmax_cross_entropy_with_integer_labels(logits(model, batch["x"]), batch["y"])


def load(options):
    x = np.random.default_rng(0).normal(size=(4, 10, 3)).astype(np.float32)
    data = {f"c{k}": {"x": x[k], "y": x[k].argmax(-1).astype(np.int32)} for k in range(4)}
    clients = from_mapping(data)
    return Problem(clients, lambda key: {"w": jnp.zeros((3, 3))}, loss, classifier(logits), clients)


settings = Hyperparameters(epochs=2, batch_size=5, client_learning_rate=0.1)
TASK = own_task(load, Preset(rounds=2, clients_per_round=2, hyperparameters=settings))
OTHER, NOT_ONE = TASK, 3
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory, which no script has put on the path, has a package of that name."""
    name = f"package_{tmp_path.name}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "clinics.py").write_text(CODE)
    (tmp_path / name / "broken.py").write_text("import not_installed_anywhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    return name


def test_every_command_takes_it_by_its_module(place, tmp_path, capsys):
    start = ["run", f"{place}.clinics", "--method", "fedavg", "--quiet"]
    main([*start, "--out", "whole"])
    main([*start, "--out", "cut", "--rounds", "1"])
    main(["resume", "cut", "--rounds", "2", "--quiet"])
    main(["run", "--config", "whole/config.toml", "--out", "again", "--quiet"])
    runs = [fedpa.load(name) for name in ("whole", "cut", "again")]
    assert {run.config.task for run in runs} == {f"{place}.clinics"}
    for run in runs:
        np.testing.assert_array_equal(run.params["w"], runs[0].params["w"])
    assert np.any(runs[0].params["w"])
    capsys.readouterr()
    main(["eval", "cut", "--json"])
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["examples"] == 40
    assert evaluated["accuracy"] == runs[0].metrics[-1]["eval/accuracy"]
    main(["report", "whole", "--no-figures"])
    assert (tmp_path / "report.html").is_file()
    assert task_named(f"{place}.clinics:OTHER") is task_named(f"{place}.clinics")
    assert ":" not in fresh_directory(f"{place}.clinics:OTHER").name


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("{}.nothing", "No module named"),
        ("{}.broken", "not_installed_anywhere"),
        ("{}.clinics:NOT_ONE", "must be a task"),
        ("{}.clinics:MISSING", "must be a task"),
        ("{}..clinics", "package.module"),
        (":TASK", "package.module"),
        (".clinics", "package.module"),
        ("{}", "package.module"),
    ],
)
def test_what_is_no_task_is_refused(place, task, said):
    name = task.format(place)
    with pytest.raises(FedpaError) as error:
        task_named(name)
    assert str(error.value).startswith(f"task = {name!r}: ")
    assert said in str(error.value)
