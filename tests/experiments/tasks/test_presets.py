"""The paper's hyperparameters, and what every task promises."""

import dataclasses
import tomllib

import equinox as eqx
import pytest

from fedpa import FedpaError, normal_prior
from fedpa.experiments.config import default_config, read_toml, resolve, write_toml
from fedpa.experiments.evaluation import add_metrics, list_metrics
from fedpa.experiments.methods import METHODS
from fedpa.experiments.run import assemble_run, run
from fedpa.experiments.tasks import TaskOptions, task_named, tasks
from tests.federations import trees_equal
from tests.refusals import refused

# Appendix D: server (optimizer, rate, momentum, τ, β₁, β₂), client (rate, momentum), M, burn-in,
# ρ, batch, examples, clients per round. A dash is a value that does not matter.
PAPER = {
    "emnist": ("sgd", 0.5, 0.9, "-", "-", "-", 0.01, 0.9, 5, 100, 0.1, 20, None, 100),
    "cifar100": ("sgd", 0.5, 0.9, "-", "-", "-", 0.01, 0.9, 10, 400, 0.01, 20, None, 20),
    "stackoverflow-nwp": ("adam", 1.0, 0.0, 1e-3, 0.9, 0.99, 0.1, 0.0, 5, 800, 0.01, 16, 128, 10),
    "stackoverflow-lr": (
        *("adagrad", 5.0, 0.0, 1e-5, "-", "-", 50.0, 0.9, 5, 800, 0.01, 100, 1000, 10),
    ),
}
FIELDS = (
    *("server_optimizer", "server_learning_rate", "server_momentum", "server_tau", "server_b1"),
    *("server_b2", "client_learning_rate", "client_momentum", "epochs", "burn_in_rounds", "rho"),
    "batch_size",
)
FULL_SIZE = {
    "emnist": ("cnn", 1_206_590),
    "cifar100": ("resnet18", 11_227_812),
    "stackoverflow-nwp": ("lstm", 4_050_748),
    "stackoverflow-lr": ("bag-of-words", 5_000_500),
}


@pytest.mark.parametrize("task", PAPER)
def test_the_papers_hyperparameters(task):
    config = resolve(default_config(task, "fedpa", "paper"))
    found = [getattr(config.hyperparameters, name) for name in FIELDS]
    found += [config.task_options.max_examples, config.clients_per_round]
    expected = [f if e == "-" else e for f, e in zip(found, PAPER[task], strict=True)]
    assert found == expected
    assert config.hyperparameters.samples == config.hyperparameters.epochs
    assert config.rounds == 1500
    assert config.task_options.eval_split == "test"
    # All of EMNIST's test split; the first 10,000 of the others'.
    assert config.task_options.eval_examples == (100_000 if task == "emnist" else 10_000)
    assert tasks()[task].presets["paper"].last == 100


@pytest.mark.parametrize("task", FULL_SIZE)
def test_models_are_the_papers(task):
    name, parameters = FULL_SIZE[task]
    assert tasks()[task].models[name] == parameters


@pytest.mark.parametrize("task", tasks())
def test_laptop_is_the_default_and_every_preset_suits_every_method(task, tmp_path):
    assert next(iter(tasks()[task].presets)) == "laptop"
    for preset in tasks()[task].presets:
        for method in METHODS:
            config = resolve(default_config(task, method, preset))
            path = tmp_path / "config.toml"
            path.write_text(write_toml(config))
            assert resolve(read_toml(path)) == config
    assert default_config(task, "fedpa").preset == "laptop"


def test_sampling_is_reached_by_every_preset():
    for name, task in tasks().items():
        for preset in task.presets:
            config = default_config(name, "fedpa", preset)
            assert config.hyperparameters.burn_in_rounds < config.rounds


@pytest.mark.parametrize(
    ("task", "options", "says"),
    [
        ("digits", {"data_dir": "x"}, "data_dir = 'x': task digits has bundled data"),
        ("emnist", {"vocabulary": 5}, "vocabulary = 5: does not apply to task emnist; it takes"),
        ("emnist", {"max_examples": 0}, "max_examples = 0"),
        ("emnist", {"validation_share": 1.0}, "validation_share = 1.0: must be a share"),
        ("emnist", {"eval_examples": 0}, "eval_examples = 0"),
        ("cifar100", {"partition_seed": -1}, "partition_seed = -1"),
        ("digits", {"prior_sd": 0.0}, "prior_sd = 0.0"),
        ("digits", {"prior_sd": -2.0}, "prior_sd = -2.0"),
        ("emnist", {"prior_sd": float("inf")}, "prior_sd = inf"),
    ],
)
def test_options_are_refused(task, options, says):
    config = default_config(task, "fedpa")
    changed = dataclasses.replace(config.task_options, **options)
    with pytest.raises(FedpaError, match=says):
        resolve(dataclasses.replace(config, task_options=changed))


@pytest.mark.parametrize("method", ["fedavg", "centralized"])
def test_a_prior_counts_once_for_all_training_examples(method):
    """1,437 digits, of which a tenth of the clients are held out; also where they are pooled."""
    config = default_config("digits", method)
    options = TaskOptions(prior_sd=2.0, validation_share=0.1)
    config = resolve(dataclasses.replace(config, task_options=options))
    problem = task_named("digits").load(options)
    objective = assemble_run(config, problem).prepared.objective
    sizes = [problem.clients.num_examples(name) for name in problem.clients.ids]
    assert len(sizes) == 90
    assert objective.prior == normal_prior(sd=2.0)
    assert objective.num_examples == sum(sizes) < 1437
    assert tomllib.loads(write_toml(config))["task_options"]["prior_sd"] == 2.0


def test_a_prior_of_the_tasks_own_is_not_replaced():
    problem = task_named("digits").load(TaskOptions())._replace(prior=normal_prior(sd=1.0))
    config = default_config("digits", "fedavg")
    with refused("prior_sd = 2.0"):
        assemble_run(dataclasses.replace(config, task_options=TaskOptions(prior_sd=2.0)), problem)


def test_metrics_are_those_of_the_tasks_likelihood():
    problem = task_named("digits").load(TaskOptions())
    with refused("metrics = 'nll'", "loss, accuracy"):
        add_metrics(problem._replace(likelihood=None), "nll")
    for link, names in [("sigmoid", "nll, brier, ece, entropy"), ("normal", "nll, rmse")]:
        other = problem._replace(likelihood=problem.likelihood._replace(link=link))
        with refused("metrics = 'nll,mutual_information'", "mutual_information", names):
            add_metrics(other, "nll,mutual_information")
    names = list_metrics(problem, "accuracy", TaskOptions(metrics="brier,Entropy,brier"))
    assert names == ["eval/loss", "eval/accuracy", "eval/brier", "eval/entropy"]


def test_runs_that_differ_in_their_seed_share_compiled_programs():
    problem = task_named("digits").load(TaskOptions())
    configs = [
        resolve(dataclasses.replace(default_config("digits", method), seed=seed, rounds=3))
        for method, seed in [("fedavg", 0), ("fedavg", 1), ("fedadam", 1)]
    ]
    first, second, other = (assemble_run(config, problem) for config in configs)
    assert second.engine is first.engine
    assert second.prepared.algorithm is first.prepared.algorithm
    assert not trees_equal(second.prepared.theta, first.prepared.theta)
    assert other.engine is not first.engine
    after_another_seed = run(configs[1], None, problem=problem)
    alone = run(configs[1], None, problem=task_named("digits").load(TaskOptions()))
    assert eqx.tree_equal(after_another_seed.params, alone.params)


@pytest.mark.parametrize("task", ["cifar100", "stackoverflow-nwp"])
def test_unknown_models_are_refused(task):
    with pytest.raises(FedpaError, match=r"model = 'vgg': unknown model .*choose from"):
        task_named(task).load(TaskOptions(model="vgg"))


def test_unknown_presets_are_refused():
    with pytest.raises(FedpaError, match="preset = 'paper': unknown preset"):
        default_config("digits", "fedpa", "paper")
