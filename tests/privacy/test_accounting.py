"""ε is dp-accounting's, for every way to draw cohorts; noise multipliers are its inverse."""

import math
import subprocess
import sys

import dp_accounting
import pytest
from dp_accounting import pld, rdp

from fedpa.privacy import Mechanism, compute_epsilon, find_noise_multiplier
from fedpa.privacy.accounting import Budget, check_run
from tests.refusals import refused

ADD = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dp_accounting.NeighboringRelation.REPLACE_ONE
GRID = [
    (1.0, 1000, 10, 1, 1e-5),
    (0.7, 10_000, 100, 50, 1e-5),
    (2.0, 100, 50, 20, 1e-3),
    (4.0, 836, 40, 300, 1e-4),
]
"""(z, N, m, T, δ)"""


def ask(accountant, event, delta):
    accountant.compose(event)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(("z", "clients", "cohort", "rounds", "delta"), GRID)
def test_poisson_sampling_is_amplified_and_adds_or_removes_one(z, clients, cohort, rounds, delta):
    noise = dp_accounting.GaussianDpEvent(z)
    round_ = dp_accounting.PoissonSampledDpEvent(cohort / clients, noise)
    event = dp_accounting.SelfComposedDpEvent(round_, rounds)
    for name, kind in (("pld", pld.PLDAccountant), ("rdp", rdp.RdpAccountant)):
        mechanism = Mechanism(z, clients, cohort, "poisson", name)
        expected = ask(kind(neighboring_relation=ADD), event, delta)
        assert compute_epsilon(mechanism, rounds, delta) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("z", "clients", "cohort", "rounds", "delta"),
    [(2.0, 1000, 10, 1, 1e-5), (30.0, 836, 40, 300, 1e-4), (10.0, 100, 50, 20, 1e-3)],
)
def test_fixed_cohorts_replace_one_without_amplification(z, clients, cohort, rounds, delta):
    """A sum that moves by 2C: half of z. dp-accounting's PLD doubles the sensitivity by itself."""
    mechanism = Mechanism(z, clients, cohort, "fixed", "rdp")
    half = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(z / 2), rounds)
    expected = ask(rdp.RdpAccountant(neighboring_relation=REPLACE), half, delta)
    assert compute_epsilon(mechanism, rounds, delta) == pytest.approx(expected, rel=1e-6)
    whole = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(z), rounds)
    expected = ask(pld.PLDAccountant(neighboring_relation=REPLACE), whole, delta)
    exact = compute_epsilon(mechanism._replace(accountant="pld"), rounds, delta)
    assert exact == pytest.approx(expected, rel=1e-3)
    assert exact <= expected + 1e-6  # a grid is pessimistic


def test_clients_that_take_turns_are_counted_when_it_is_their_turn():
    turns = Mechanism(3.0, 100, 30, "cyclic")  # at least three rounds apart
    fixed = turns._replace(sampling="fixed")
    for rounds, times in [(1, 1), (3, 1), (4, 2), (9, 3), (10, 4)]:
        assert compute_epsilon(turns, rounds, 1e-3) == compute_epsilon(fixed, times, 1e-3)


def test_all_clients_in_every_round_are_not_sampled():
    alone = compute_epsilon(Mechanism(2.0, 10, 10), 4, 1e-2)
    assert alone == pytest.approx(dp_accounting.get_epsilon_gaussian(1.0, 1e-2))


def test_nothing_is_spent_before_the_first_round():
    assert compute_epsilon(Mechanism(1.0, 100, 10), 0, 1e-3) == 0


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "cyclic"])
@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_the_noise_multiplier_spends_epsilon_and_no_more(sampling, epsilon):
    settings = {"clients": 500, "cohort": 25, "sampling": sampling, "accountant": "rdp"}
    z = find_noise_multiplier(epsilon, 1e-4, rounds=40, **settings)
    spent = compute_epsilon(Mechanism(z, **settings), 40, 1e-4)
    assert 0.995 * epsilon < spent <= epsilon


@pytest.mark.long
def test_the_noise_multiplier_of_loss_distributions():
    z = find_noise_multiplier(2.0, 1e-5, rounds=40, clients=500, cohort=25)
    assert 1.99 < compute_epsilon(Mechanism(z, 500, 25), 40, 1e-5) <= 2.0


def test_little_noise_needs_no_grid():
    assert math.isfinite(compute_epsilon(Mechanism(0.01, 1000, 10), 5, 1e-4))


@pytest.mark.parametrize(
    ("values", "anchor"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0.0"),
        ({"noise_multiplier": math.inf}, "noise_multiplier = inf"),
        ({"cohort": 0}, "cohort = 0"),
        ({"sampling": "shuffled"}, "sampling = 'shuffled'"),
        ({"accountant": "zcdp"}, "accountant = 'zcdp'"),
    ],
)
def test_values_out_of_range_are_refused(values, anchor):
    with refused(anchor):
        compute_epsilon(Mechanism(1.0, 100, 10)._replace(**values), 1, 1e-3)


@pytest.mark.parametrize("delta", [0, 1, -0.1, True, "small"])
def test_delta_is_a_probability(delta):
    with refused(f"delta = {delta!r}"):
        compute_epsilon(Mechanism(1.0, 100, 10), 1, delta)


def test_a_delta_of_one_client_is_refused_unless_it_is_wanted():
    budget = Budget(1.0, 0.01)
    with refused("delta = 0.01", "--force"):
        check_run(budget, 100, 10)
    check_run(budget._replace(force=True), 100, 10)
    check_run(budget, 99, 10)


def test_a_spent_budget_is_refused():
    budget = Budget(1.0, 1e-3, max_epsilon=1.0)
    check_run(budget, 100, 10, done=2)
    with refused("max_epsilon = 1.0"):
        check_run(budget, 100, 10, done=50)
    check_run(budget, 100, 10, done=50, more=False)  # a finished run is read
    with refused("max_epsilon = 0.001"):
        check_run(budget._replace(max_epsilon=0.001), 100, 10)


def test_without_the_extra_a_run_is_refused_and_nothing_else():
    """`import fedpa`, a private method and its pieces need no dp-accounting."""
    program = """
import importlib.util, sys
find = importlib.util.find_spec
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dp_accounting":
            raise ModuleNotFoundError(name)
importlib.util.find_spec = lambda name, *a: None if name == "dp_accounting" else find(name, *a)
sys.meta_path.insert(0, Missing())
import fedpa, fedpa.privacy.accounting as accounting
from fedpa.experiments.privacy import PrivacyOptions
budget = accounting.Budget(1.0, 1e-3)
accounting.check_budget(budget)
try:
    accounting.check_run(budget, 100, 10)
except fedpa.FedpaError as error:
    assert "fedpa[privacy]" in str(error), error
else:
    raise AssertionError
assert "dp_accounting" not in sys.modules
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
