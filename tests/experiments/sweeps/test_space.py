"""Search spaces: what they hold, what a file may say, what is refused."""

import tomllib

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from fedpa import FedpaError
from fedpa.experiments.config import default_config
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.experiments.sweeps.search import choose_search
from fedpa.experiments.sweeps.space import (
    Interval,
    check_space,
    configure,
    parse_space,
    point,
    read_space,
    size,
    trim_space,
)
from fedpa.experiments.sweeps.space import as_table as space_table
from fedpa.experiments.sweeps.sweep import (
    Sweep,
    as_table,
    check_sweep,
    read_settings,
    write_settings,
)
from fedpa.experiments.tasks import tasks

RATES = st.floats(1e-4, 1e2, allow_subnormal=False)
CHOICES = {
    "server_learning_rate": st.lists(RATES, min_size=1, max_size=4, unique=True),
    "client_learning_rate": st.lists(RATES, min_size=1, max_size=4, unique=True),
    "epochs": st.lists(st.integers(1, 20), min_size=1, max_size=3, unique=True),
    "server_optimizer": st.lists(
        st.sampled_from(["sgd", "adam", "yogi"]), min_size=1, max_size=3, unique=True
    ),
}
INTERVALS = {
    "rho": st.tuples(st.floats(0.001, 1.0), st.floats(1.5, 10.0), st.booleans()),
    "burn_in_rounds": st.tuples(st.integers(1, 5), st.integers(6, 50), st.booleans()),
}


def lists():
    return st.fixed_dictionaries({}, optional=CHOICES).filter(bool)


def tables():
    intervals = {
        name: strategy.map(lambda ends: dict(zip(("low", "high", "log"), ends, strict=True)))
        for name, strategy in INTERVALS.items()
    }
    return st.fixed_dictionaries({}, optional=CHOICES | intervals).filter(bool)


@given(lists())
def test_a_grid_has_every_combination_once(table):
    space = parse_space(table, "here")
    product = 1
    for values in table.values():
        product *= len(values)
    points = [tuple(point(space, n).items()) for n in range(size(space))]
    assert size(space) == product == len(set(points))
    for found in points:
        assert all(value in table[name] for name, value in found)


@given(tables())
def test_a_space_goes_through_toml(table):
    space = parse_space(table, "here")
    again = parse_space(tomllib.loads(tomli_w.dumps(space_table(space))), "there")
    assert again == space
    assert list(again) == list(space)


@given(tables(), st.permutations(list(CHOICES | INTERVALS)))
def test_the_order_of_lines_does_not_matter(table, names):
    shuffled = {name: table[name] for name in names if name in table}
    assert list(parse_space(shuffled, "here").items()) == list(parse_space(table, "here").items())


def test_a_sweep_is_read_back(tmp_path):
    base = default_config("digits", "fedpa")
    space = parse_space({"rho": {"low": 0.01, "high": 1.0, "log": True}, "epochs": [2, 5]}, "here")
    settings = check_sweep(Sweep(base, space, choose_search("tpe", space, 7, 3, True)))
    write_settings(tmp_path, settings)
    again = check_sweep(read_settings(tmp_path))
    assert as_table(again) == as_table(settings)
    # The samples follow from each trial's own epochs.
    for epochs in (2, 5):
        config = configure(again.base, {"rho": 0.1, "epochs": epochs})
        assert config.hyperparameters.samples == epochs


REFUSED = {
    "epoch = [2]": "epoch can't be swept: did you mean epochs?",
    "rounds = [2]": "rounds can't be swept: it is the same for all trials",
    "epochs = []": "epochs = []: is empty",
    "epochs = 3": "must be a list of values",
    "epochs = [2.5]": "epochs = 2.5: must be a whole number",
    'rho = ["a"]': "rho = 'a': must be a number",
    "epochs = [2, 2]": "has 2 twice",
    "rho = {low = 1.0}": "lacks high",
    "rho = {low = 1.0, high = 0.5}": "low must be below high",
    "rho = {low = 0.0, high = 0.5, log = true}": "low must be above 0",
    "rho = {low = 0.1, high = 0.5, step = 1}": "unknown step",
    "rho = {low = 0.1, high = inf}": "both finite",
    'server_optimizer = {low = "a", high = "b"}': "is no number",
    "sample_scale = {low = 'none', high = 2.0}": "both finite",
    "": "is empty",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused_by_its_form(text, tmp_path):
    path = tmp_path / "space.toml"
    path.write_text(f"[space]\n{text}\n")
    with pytest.raises(FedpaError) as refusal:
        read_space(path)
    assert REFUSED[text] in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["[spaces]\nrho = [1.0]", "rho = [1.0]", "rho = [", ""])
def test_a_file_holds_one_table(text, tmp_path):
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(FedpaError, match=r"one table, \[space\]|valid TOML"):
        read_space(path)
    with pytest.raises(FedpaError, match="can't be read"):
        read_space(tmp_path / "missing.toml")


BY_METHOD = {
    ("fedpa", "rho", (-1.0,)): "rho = -1.0: must be",
    ("fedpa", "client_learning_rate", Interval(0.0, 1.0)): "client_learning_rate = 0.0",
    ("fedpa", "burn_in_rounds", (10, 350)): "none of the 350 rounds of fedpa would sample",
    ("fedavg-1", "epochs", (1, 5)): "method fedavg-1 takes 1 always",
    ("fedpa", "sampler", ("iasg", "nope")): "nope",
}


@pytest.mark.parametrize(("method", "name", "values"), BY_METHOD)
def test_refused_by_the_method(method, name, values):
    with pytest.raises(FedpaError) as refusal:
        check_space({name: values}, default_config("digits", method))
    assert BY_METHOD[method, name, values] in str(refusal.value)


def test_combinations_are_refused_too():
    space = parse_space(
        {"client_optimizer": ["sgd", "adam"], "client_momentum": [0.0, 0.9]}, "here"
    )
    with pytest.raises(FedpaError, match=r"client_optimizer adam.* can't be run"):
        check_space(space, default_config("digits", "fedavg"))


def test_every_preset_has_a_grid_that_can_be_run():
    for task, known in tasks().items():
        for preset in known.presets:
            grid = known.presets[preset].grid
            for method, choices in [("fedavg", grid.training), ("fedpa", grid.sampling)]:
                base = default_config(task, method, preset)
                assert parse_space(choices, "grid")
                assert trim_space(choices, base) == choices
                settings = base.hyperparameters
                if preset == "paper":  # what the paper chose is in the grid it chose from
                    assert all(getattr(settings, name) in choices[name] for name in choices)


def test_the_papers_grids():
    """Appendix D."""
    for task, server, client in [
        ("emnist", 6, 5),
        ("cifar100", 6, 5),
        ("stackoverflow-nwp", 5, 3),
        ("stackoverflow-lr", 5, 5),
    ]:
        training, sampling = tasks()[task].presets["paper"].grid
        assert size(training) == server * client * 4
        assert training["epochs"] == (2, 5, 10, 20)
        assert sampling["burn_in_rounds"] == (100, 200, 400, 600, 800)
        assert sampling["rho"] == (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def test_a_tasks_grid_is_trimmed():
    base = default_config("digits", "fedavg-1")
    assert set(trim_space(tasks()["digits"].presets["laptop"].grid.training, base)) == {
        "server_learning_rate",
        "client_learning_rate",
    }
    assert isinstance(base.hyperparameters, Hyperparameters)
