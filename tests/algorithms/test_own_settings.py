"""Settings that only some methods have: who takes them, and what happens where nobody does."""

import dataclasses

from fedpa.experiments.comparison.tasks import as_burn_in
from fedpa.experiments.config import default_config, resolve
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.experiments.methods import METHODS, check_own, drop_others, list_own_fields
from fedpa.experiments.sweeps.space import check_space
from tests.refusals import refused

MU = Hyperparameters(proximal=0.3)


def test_every_one_is_a_field_that_is_none_unless_given():
    plain = Hyperparameters()
    assert list_own_fields()["proximal"] == ["fedprox"]
    assert all(getattr(plain, field) is None for field in list_own_fields())


def test_a_value_that_the_method_does_not_take_is_refused():
    check_own("fedprox", MU)
    for name in set(METHODS) - {"fedprox"}:
        with refused("proximal = 0.3", name, "fedprox"):
            check_own(name, MU)


def test_a_configuration_says_what_the_method_takes_where_nothing_is_given():
    assert resolve(default_config("digits", "fedprox")).hyperparameters.proximal == 0.01
    given = default_config("digits", "fedprox")
    given = dataclasses.replace(given, hyperparameters=MU)
    assert resolve(given).hyperparameters.proximal == 0.3
    with refused("proximal = 0.3"):
        resolve(dataclasses.replace(given, method="fedpa"))


def test_in_a_comparison_each_method_has_its_own():
    assert drop_others("fedavg", MU, ["fedavg", "fedprox"]).proximal is None
    assert drop_others("fedprox", MU, ["fedavg", "fedprox"]).proximal == 0.3
    assert drop_others("fedavg", MU, ["fedavg", "fedpa"]).proximal == 0.3  # to be refused


def test_a_shared_burn_in_has_none():
    config = default_config("digits", "fedprox")
    config = dataclasses.replace(config, hyperparameters=MU)
    assert as_burn_in(config, 3).hyperparameters.proximal is None


def test_a_space_of_another_method_is_refused():
    check_space({"proximal": (0.1, 1.0)}, default_config("digits", "fedprox"))
    with refused("proximal 0.1", "fedprox"):
        check_space({"proximal": (0.1, 1.0)}, default_config("digits", "fedavg"))
