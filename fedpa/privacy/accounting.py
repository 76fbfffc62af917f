"""Accounting: which (ε, δ) the rounds of a run give, computed by dp-accounting.

A round releases the sum of its clients' clipped results, each of norm ≤ C, with Gaussian noise of
standard deviation zC (`fedpa.private`). What one client can change depends on how cohorts are
drawn:

    poisson    each client by itself with probability q = m/N; neighbours are with and without one
               client: the sum moves by C. T rounds are T Gaussian mechanisms of z, each on a
               Poisson sample of q.
    fixed      m clients without replacement; in neighbours one client is another: the sum moves
               by 2C. T Gaussian mechanisms of z/2, without amplification by sampling.
    cyclic     clients take turns in a fixed order: one client is in at most ⌈T/⌊N/m⌋⌉ rounds.
               As many Gaussian mechanisms of z/2. Nothing has to be sampled.

"pld" composes privacy loss distributions, which are discretized pessimistically (Koskela et al.
2020; Doroshenko et al. 2022); mechanisms without sampling have the exact ε of a Gaussian (Balle,
Wang 2018). "rdp" composes Rényi divergences (Mironov 2017): faster, and a larger ε.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from fedpa.errors import FedpaError, check_integer, check_positive, refuse

Sampling = Literal["poisson", "fixed", "cyclic"]
"""How the cohort of a round is drawn."""
Accountant = Literal["pld", "rdp"]
"""How rounds are composed."""
INTERVAL = 1e-4
"""Of the grid of privacy losses."""
COARSE = 0.3
"""Noise multiplier of sampled rounds below which a grid would be too large: RDP takes its place."""
PRECISION = 1e-3
"""Relative, of the ε of the noise multiplier that `find_noise_multiplier` gives."""


class Mechanism(NamedTuple):
    """What of a run decides its ε, besides the number of rounds.

    Args:
        noise_multiplier: z > 0, the noise's standard deviation on the sum in units of C.
        clients: N, how many clients there are.
        cohort: m, how many take part in a round; on average, with Poisson sampling.
        sampling: "poisson", "fixed" or "cyclic" (default: "poisson").
        accountant: "pld" or "rdp" (default: "pld").
    Example:
        >>> mechanism = fedpa.privacy.Mechanism(1.0, clients=10_000, cohort=100)
        >>> round(fedpa.privacy.compute_epsilon(mechanism, rounds=1000, delta=1e-5), 2)
        1.83
    """

    noise_multiplier: float
    clients: int
    cohort: int
    sampling: Sampling = "poisson"
    accountant: Accountant = "pld"


def check_installed() -> None:
    """Refuse to go on without dp-accounting."""
    if find_spec("dp_accounting") is None:
        raise FedpaError("dp-accounting is not installed: pip install 'fedpa[privacy]' installs it")


def check_choice(field: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise refuse(field, value, f"must be one of {', '.join(get_args(choices))}")


def check_mechanism(mechanism: Mechanism) -> None:
    """Refuse values out of range."""
    check_positive("noise_multiplier", mechanism.noise_multiplier)
    check_integer("clients", mechanism.clients, 1)
    check_integer("cohort", mechanism.cohort, 1)
    check_choice("sampling", mechanism.sampling, Sampling)
    check_choice("accountant", mechanism.accountant, Accountant)


def check_delta(delta: object) -> None:
    """Refuse a δ that is not in (0, 1)."""
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta < 1:
        raise refuse("delta", delta, "must be a number in (0, 1), well below 1/clients")


def check_delta_of(delta: float, clients: int, remedy: str) -> None:
    """Refuse a δ with which publishing one client's data at random would be private.

    remedy: what accepts it nevertheless.
    """
    if delta * clients >= 1:
        raise refuse(
            "delta",
            delta,
            f"must be below 1/clients = {1 / clients:.3g}: else the data of one of {clients:,} "
            f"clients could be published and still be private; {remedy} accepts it",
        )


def compute_epsilon(mechanism: Mechanism, rounds: int, delta: float) -> float:
    """Compute the ε of (ε, δ)-differential privacy, at the level of clients, after some rounds.

    Args:
        mechanism: Noise, sampling and accountant.
        rounds: T ≥ 0, how many rounds were released. A repeated round is one more.
        delta: δ in (0, 1).
    Returns:
        ε; 0 before the first round.
    Raises:
        FedpaError: A value is out of range, or dp-accounting is not installed.
    Example:
        >>> fixed = fedpa.privacy.Mechanism(8.0, clients=1000, cohort=50, sampling="fixed")
        >>> round(fedpa.privacy.compute_epsilon(fixed, rounds=10, delta=1e-5), 2)
        3.34
    """
    check_mechanism(mechanism)
    check_integer("rounds", rounds, 0)
    check_delta(delta)
    check_installed()
    return _epsilon(mechanism, int(rounds), float(delta)) if rounds else 0.0


@functools.lru_cache(maxsize=4096)
def _epsilon(mechanism: Mechanism, rounds: int, delta: float) -> float:
    import dp_accounting

    z, clients, cohort, sampling, accountant = mechanism
    rate = min(cohort / clients, 1.0)
    if sampling == "poisson" and rate < 1:
        if accountant == "pld" and z >= COARSE:
            composed = _losses(z, rate).self_compose(rounds)
            return float(composed.get_epsilon_for_delta(delta))
        return _renyi_epsilon(z, rate, rounds, delta)
    # What one client's change moves, in units of C.
    sensitivity = 1 if sampling == "poisson" else 2
    times = count_participations(mechanism, rounds)
    if accountant == "rdp":
        return _renyi_epsilon(z / sensitivity, 1.0, times, delta)
    return float(dp_accounting.get_epsilon_gaussian(z / sensitivity / math.sqrt(times), delta))


def count_participations(mechanism: Mechanism, rounds: int) -> int:
    """In how many of these rounds one client may take part."""
    if mechanism.sampling != "cyclic":
        return rounds
    return -(-rounds // find_separation(mechanism.clients, mechanism.cohort))


def find_separation(clients: int, cohort: int) -> int:
    """⌊N/m⌋: where clients take turns, the rounds from one of a client's to its next, at least."""
    return max(clients // cohort, 1)


@functools.lru_cache(maxsize=64)
def _losses(z: float, rate: float) -> Any:
    """The privacy loss distribution of one round."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        z, value_discretization_interval=INTERVAL, sampling_prob=rate
    )


@functools.lru_cache(maxsize=64)
def _divergences(z: float, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """The orders and Rényi divergences of one round."""
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant()
    noise = dp_accounting.GaussianDpEvent(z)
    with _without_warnings():
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, noise) if rate < 1 else noise)
    return np.asarray(accountant.orders), np.asarray(accountant.rdp)


def _renyi_epsilon(z: float, rate: float, rounds: int, delta: float) -> float:
    from dp_accounting.rdp import rdp_privacy_accountant

    orders, divergences = _divergences(z, rate)
    with _without_warnings():
        epsilon, _ = rdp_privacy_accountant.compute_epsilon(orders, rounds * divergences, delta)
    return float(epsilon)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Orders whose series does not converge are left out, and dp-accounting logs each of them."""
    logger = logging.getLogger("absl")

    def is_other(record: logging.LogRecord) -> bool:
        return "failed to converge" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def find_noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    rounds: int,
    clients: int,
    cohort: int,
    sampling: Sampling = "poisson",
    accountant: Accountant = "pld",
) -> float:
    """Find a noise multiplier z with which rounds are (ε, δ)-differentially private, barely.

    Args:
        epsilon: ε > 0.
        delta: δ in (0, 1).
        rounds: T ≥ 1.
        clients: N, how many clients there are.
        cohort: m, how many take part in a round.
        sampling: "poisson", "fixed" or "cyclic"; default: "poisson".
        accountant: "pld" or "rdp"; default: "pld".
    Returns:
        z, whose ε is at most a thousandth below the one that is asked for.
    Raises:
        FedpaError: A value is out of range, or dp-accounting is not installed.
    Example:
        >>> z = fedpa.privacy.find_noise_multiplier(
        ...     3.0, 1e-5, rounds=100, clients=10_000, cohort=100
        ... )
        >>> round(z, 2)
        0.65
    """
    check_positive("epsilon", epsilon)
    check_integer("rounds", rounds, 1)

    def spent(z: float) -> float:
        return compute_epsilon(Mechanism(z, clients, cohort, sampling, accountant), rounds, delta)

    def excess(z: float) -> float:
        """> 0 where too much is spent; nearly linear in log z."""
        return math.log(max(spent(z), SMALLEST) / epsilon)

    start, step = 1.0, 2.0
    if accountant == "pld" and sampling == "poisson":  # RDP's is a little larger, found at once
        start, step = _start_from_rdp(epsilon, delta, rounds, clients, cohort), 1.2
    low = high = start
    at_low = at_high = excess(start)
    while at_high > 0:
        low, at_low, high = high, at_high, step * high
        if high > LARGEST:
            raise refuse("epsilon", epsilon, f"needs a noise multiplier above {LARGEST:g}")
        at_high = excess(high)
    while at_low <= 0:
        high, at_high, low = low, at_low, low / step
        if low < 1 / LARGEST:
            raise refuse("epsilon", epsilon, f"is that of a noise below {1 / LARGEST:g}")
        at_low = excess(low)
    # The Illinois method: false positions, the end that stays counted for half.
    side = 0
    while at_high < -PRECISION and high > (1 + PRECISION**2) * low:
        share = min(max(at_low / (at_low - at_high), 0.01), 0.99)
        middle = low * (high / low) ** share
        at_middle = excess(middle)
        if at_middle > 0:
            low, at_low = middle, at_middle
            at_high = at_high / 2 if side > 0 and at_high / 2 < -PRECISION else at_high
            side = 1
        else:
            high, at_high = middle, at_middle
            at_low, side = (at_low / 2 if side < 0 else at_low), -1
    return high


def _start_from_rdp(epsilon: float, delta: float, rounds: int, clients: int, cohort: int) -> float:
    return find_noise_multiplier(
        epsilon, delta, rounds=rounds, clients=clients, cohort=cohort, accountant="rdp"
    )


SMALLEST = 1e-12
"""ε that counts as none."""
LARGEST = 1e6
"""Largest noise multiplier that is tried."""


class Budget(NamedTuple):
    """The settings of a run's privacy, besides what its clients do.

    Args:
        noise_multiplier: z > 0.
        delta: δ in (0, 1), below 1/clients.
        sampling: How cohorts are drawn (default: "poisson").
        accountant: How rounds are composed (default: "pld").
        max_epsilon: The run ends before the round that would exceed it (default: None).
        force: Accept a δ of 1/clients or more (default: False).
    Example:
        >>> fedpa.privacy.Budget(1.0, 1e-5).sampling
        'poisson'
    """

    noise_multiplier: float
    delta: float
    sampling: Sampling = "poisson"
    accountant: Accountant = "pld"
    max_epsilon: float | None = None
    force: bool = False

    def mechanism(self, clients: int, cohort: int) -> Mechanism:
        """The mechanism of a run with these clients, `cohort` of them in a round."""
        number = min(clients, cohort)
        return Mechanism(self.noise_multiplier, clients, number, self.sampling, self.accountant)


def check_budget(budget: Budget) -> None:
    """Refuse values out of range."""
    check_mechanism(budget.mechanism(1, 1))
    check_delta(budget.delta)
    if budget.max_epsilon is not None:
        check_positive("max_epsilon", budget.max_epsilon)


def check_run(budget: Budget, clients: int, cohort: int, done: int = 0, more: bool = True) -> None:
    """Refuse a run that its budget does not allow.

    Args:
        budget: Its settings.
        clients: How many clients there are.
        cohort: How many take part in a round.
        done: Rounds released so far.
        more: Whether there are more rounds to run.
    """
    check_installed()
    if not budget.force:
        check_delta_of(budget.delta, clients, "force=True (--force)")
    if budget.max_epsilon is None or not more:
        return
    mechanism = budget.mechanism(clients, cohort)
    spent = compute_epsilon(mechanism, done, budget.delta)
    if spent > budget.max_epsilon:
        raise refuse(
            "max_epsilon",
            budget.max_epsilon,
            f"is exceeded already: {done} rounds have spent ε = {spent:.4g}. The run ends here, or "
            "allow more",
        )
    if not done and compute_epsilon(mechanism, 1, budget.delta) > budget.max_epsilon:
        first = compute_epsilon(mechanism, 1, budget.delta)
        raise refuse(
            "max_epsilon",
            budget.max_epsilon,
            f"the first round alone would spend ε = {first:.4g}: raise noise_multiplier",
        )


def is_exhausted(budget: Budget, mechanism: Mechanism, done: int) -> bool:
    """Whether one more round would exceed the largest ε."""
    if budget.max_epsilon is None:
        return False
    return compute_epsilon(mechanism, done + 1, budget.delta) > budget.max_epsilon
