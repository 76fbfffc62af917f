"""Runs that differ only in what happens from the switch on share the rounds before it."""

import contextlib
import dataclasses
import functools
import shutil

import equinox as eqx
import numpy as np
import pytest

from fedpa.experiments.comparison import tasks
from fedpa.experiments.comparison.comparison import Plan, carry_out, run_in_turn
from fedpa.experiments.config import default_config, resolve
from fedpa.experiments.hyperparameters import replace_fields
from fedpa.experiments.run import check_run, resume, run
from fedpa.experiments.tasks.task import task_named
from fedpa.training.named_arrays import name_arrays
from fedpa.training.run_directory import is_run, read_metrics, read_summary
from tests.experiments.cli.test_run_commands import said
from tests.federations import trees_equal
from tests.refusals import refused

ROUNDS, SWITCH = 7, 5
PROBLEM = task_named("digits").load(default_config("digits", "fedpa").task_options)


def configure(method, **settings):
    """A run whose training loss is level from the first round on: its client rate is high."""
    given = {"rounds": ROUNDS, "epochs": 2, "client_learning_rate": 1.0, "clients_per_round": 5}
    given |= {"eval_every": 4, "test_at_end": False, "burn_in_rounds": SWITCH}
    return replace_fields(default_config("digits", method), **(given | settings))


AUTO = {"burn_in_rounds": "auto", "plateau_window": 2}
CONFIGS = {
    "given": {
        "fedavg": configure("fedavg"),
        "fedavg-lower": configure("fedavg", at_switch_rate=0.1),
        "fedavg-step": configure("fedavg", server_schedule=f"step:{SWITCH + 1}:0.1"),
        "fedpa": configure("fedpa"),
        "fedpa-lower": configure("fedpa", at_switch_rate=0.1),
        "mean-step": configure("mean-scaled", client_schedule=f"step:{SWITCH}:0.5"),
    },
    "auto": {
        "fedavg": configure("fedavg", **AUTO),
        "fedavg-lower": configure("fedavg", at_switch_rate=0.1, **AUTO),
        "fedpa-lower": configure("fedpa", at_switch_rate=0.1, **AUTO),
        "mean-scaled": configure("mean-scaled", **AUTO),
    },
}


def compare(configs, out, callbacks=()):
    """Carry out what is missing; return how many runs that is."""
    entries = [
        tasks.make_entry(config, name, PROBLEM)._replace(name=name)
        for name, config in configs.items()
    ]
    began = []

    def show(planned, width):
        began.append(planned.out)
        return contextlib.nullcontext(callbacks)

    plan = Plan(out, entries, range(1), None, "a test")
    carry_out(plan, lambda stage: run_in_turn(stage, show))
    return len(began)


def numbers(history):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


def read_end(out):
    """What a run comes to: its records and its parameters."""
    return numbers(read_metrics(out)), dict(np.load(out / "params.npz"))


def assert_same_end(one, other):
    assert one[0] == other[0]
    assert trees_equal(one[1], other[1])


@pytest.fixture(scope="module", name="compared")
def _compared(tmp_path_factory):
    """The directory of a comparison."""

    @functools.cache
    def compared(kind):
        out = tmp_path_factory.mktemp(kind)
        assert compare(CONFIGS[kind], out) == 1 + len(CONFIGS[kind])
        return out

    return compared


every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind != "auto")) for kind in CONFIGS]
)


@every_kind
def test_one_run_computes_the_rounds_that_all_share(compared, kind):
    out = compared(kind)
    (shared,) = (out / "burn-in").iterdir()
    assert read_summary(shared)["round"] == SWITCH
    took = [record["seconds"] for record in read_metrics(shared)]
    for name in CONFIGS[kind]:  # of the rounds themselves, wherever they are told
        history = read_metrics(out / f"{name}-0")
        assert [record["seconds"] for record in history[:SWITCH]] == took
        assert len(history) == ROUNDS
        told = [record["round"] for record in history if "switch/round" in record]
        assert told == ([SWITCH + 1] if kind == "auto" and name != "fedavg" else [])


@every_kind
def test_they_are_the_runs_that_share_nothing(compared, kind):
    """Bit for bit; and each is another from the switch on."""
    ends = []
    for name, config in CONFIGS[kind].items():
        alone = run(resolve(config), None, problem=PROBLEM)
        theta = name_arrays(eqx.filter(alone.params, eqx.is_inexact_array))
        found = read_end(compared(kind) / f"{name}-0")
        assert_same_end(found, (numbers(alone.history), dict(theta)))
        ends.append(sum(float(np.abs(array).sum()) for array in found[1].values()))
    assert len(set(ends)) == len(ends)


@pytest.mark.parametrize("kind", [pytest.param("given", marks=pytest.mark.long), "auto"])
def test_a_cut_comparison_is_continued(compared, kind, tmp_path):
    configs = CONFIGS[kind]

    def interrupt(event):
        if event.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(configs, tmp_path, [interrupt])
    assert compare(configs, tmp_path) == 1 + len(configs)
    shutil.rmtree(tmp_path / "fedavg-lower-0")
    assert compare(configs, tmp_path) == 1
    assert compare(configs, tmp_path) == 0
    for name in configs:
        assert_same_end(read_end(tmp_path / f"{name}-0"), read_end(compared(kind) / f"{name}-0"))


def test_auto_is_the_run_of_the_round_it_finds(compared, tmp_path):
    """Also extended: what it remembers is in the checkpoint from which it began."""
    out = shutil.copytree(compared("auto") / "mean-scaled-0", tmp_path / "run")
    again = resume(out, rounds=ROUNDS + 1, problem=PROBLEM)
    fixed = configure("mean-scaled", rounds=ROUNDS + 1)
    told = numbers(again.history)
    assert told[SWITCH].pop("switch/round") == SWITCH
    assert told == numbers(run(resolve(fixed), None, problem=PROBLEM).history)


def test_a_step_before_the_switch_is_not_shared():
    planned = [
        tasks.TaskRun(resolve(configure("fedpa", server_schedule=text)), PROBLEM)
        for text in ("constant", f"step:{SWITCH - 1}:0.1", f"step:{SWITCH}:0.1,warmup:2")
    ]
    assert len({own.find_burn_in().key for own in planned}) == 3


def test_what_happens_after_the_last_round_is_refused():
    for method in ("fedavg", "fedpa", "global-precision"):
        for field in ("server_schedule", "client_schedule"):
            with refused(f"{field} = 'step:{ROUNDS}:0.1,warmup:3'"):
                resolve(configure(method, **{field: f"step:{ROUNDS}:0.1,warmup:3"}))
            resolve(configure(method, **{field: f"step:{ROUNDS - 1}:0.1"}))
        for rounds in (0, ROUNDS):
            with refused("at_switch_rate = 0.1", f"burn_in_rounds = {rounds}"):
                resolve(configure(method, at_switch_rate=0.1, burn_in_rounds=rounds))
        for rate in (0.0, -1.0, float("nan")):
            with refused("at_switch_rate ="):
                resolve(configure(method, at_switch_rate=rate))


def test_methods_that_do_not_sample_keep_the_round_of_the_switch_only_if_there_is_one():
    for method in ("fedavg", "scaffold", "global-precision"):
        for given in ({}, AUTO):
            plain = resolve(configure(method, **given)).hyperparameters
            assert (plain.burn_in_rounds, plain.plateau_window, plain.rho) == (0, None, 0.1)
            h = resolve(configure(method, at_switch_rate=0.1, rho=0.7, **given)).hyperparameters
            expected = configure(method, **given).hyperparameters.burn_in_rounds
            assert (h.burn_in_rounds, h.at_switch_rate, h.rho) == (expected, 0.1, 0.1)


def test_settings_of_the_plateau():
    with refused("plateau_window = 1"):
        resolve(configure("fedpa", burn_in_rounds="auto", plateau_window=1))
    for name, value in {"plateau_window": 5, "plateau_metric": "train/loss"}.items():
        with refused(f"{name} = {value!r}"):
            resolve(configure("fedpa", **{name: value}))
    for name in ("valid/loss", "train/los"):  # there are no validation clients
        config = resolve(configure("fedpa", **AUTO | {"plateau_metric": name}, eval_every=1))
        with refused(f"plateau_metric = {name!r}"):
            check_run(config, PROBLEM)
    config = configure("fedpa", **AUTO, plateau_metric="eval/loss", eval_every=1)
    check_run(resolve(config), PROBLEM)


def test_the_command_trains_until_the_plateau(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--rounds", "7", "--epochs", "2", "--client-learning-rate", "1", "--eval-every", "7"]
    words += ["--clients-per-round", "5", "--plateau-window", "2", "--burn-in-rounds", "auto"]
    out = said(capsys, "run", "digits", *words, "--dry-run")
    assert 'burn_in_rounds = "auto"' in out
    assert "sampling" in out
    out = said(capsys, "run", "digits", *words, "--out", "a")
    assert f"switched after round {SWITCH}" in out
    assert is_run(tmp_path / "a")
    err = said(capsys, "run", "digits", "--method", "fedavg", *words, code=2)
    assert "--burn-in-rounds" in err
    words = ["--rounds", "7", "--burn-in-rounds", "3", "--at-switch-rate", "0.1", "--dry-run"]
    out = said(capsys, "run", "digits", "--method", "fedavg", *words)
    assert "burn_in_rounds = 3\nat_switch_rate = 0.1" in out
    err = said(capsys, "run", "digits", "--method", "centralized", *words, code=2)
    assert "--burn-in-rounds" in err


def test_a_plateau_that_no_round_can_reach_is_refused():
    late = configure("fedpa", **AUTO, rounds=3 * AUTO["plateau_window"] - 1)
    with refused(f"plateau_window = {AUTO['plateau_window']}"):
        resolve(late)
    rare = configure("fedpa", **AUTO | {"plateau_metric": "eval/loss"}, rounds=100)
    with refused(f"plateau_window = {AUTO['plateau_window']}"):
        resolve(dataclasses.replace(rare, eval_every=50))


def test_a_run_on_other_data_shares_nothing(compared, tmp_path):
    (shared,) = (compared("auto") / "burn-in").iterdir()
    config = configure("fedpa", **AUTO)
    other = dataclasses.replace(
        config, task_options=dataclasses.replace(config.task_options, validation_share=0.5)
    )
    with refused("branch ="):
        run(resolve(other), tmp_path / "run", branch=shared)
