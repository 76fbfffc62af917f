"""`fedpa privacy`: the noise that an ε needs, or the ε that a noise gives."""

import dataclasses
import math
from collections.abc import Sequence

from rich.console import Console

from fedpa.errors import check_integer, refuse
from fedpa.experiments.cli.arguments import parse_words, say
from fedpa.privacy.accounting import (
    Accountant,
    Mechanism,
    Sampling,
    check_delta,
    check_delta_of,
    compute_epsilon,
    find_noise_multiplier,
)


@dataclasses.dataclass(frozen=True)
class PrivacyCommand:
    """Compute the noise multiplier that an ε needs, or the ε that a noise multiplier gives.

    examples:
      fedpa privacy --clients 1000000 --cohort 1000 --rounds 500 --epsilon 2 --delta 1e-7
      fedpa privacy --clients 800 --cohort 40 --rounds 100 --noise-multiplier 1.2 --delta 1e-4
    """

    clients: int
    """Number of clients, at least 1."""
    cohort: int
    """Clients that take part in a round, at least 1; on average, if each is sampled by itself."""
    rounds: int
    """Rounds, at least 1."""
    delta: float
    """δ of (ε, δ), in (0, 1): below 1/clients."""
    epsilon: float | None = None
    """ε > 0 that the rounds may spend; give it or --noise-multiplier."""
    noise_multiplier: float | None = None
    """Noise on the sum in units of the clipping norm, > 0."""
    sampling: Sampling = "poisson"
    """How a round's clients are drawn: poisson, each by itself; fixed, always as many, without
    amplification by sampling; cyclic, in turns."""
    accountant: Accountant = "pld"
    """How rounds are composed: pld is tight, rdp fast."""
    simulated_cohort: int | None = None
    """Also print the noise multiplier that has the same noise on the mean in a simulation with
    this many clients a round, at least 1."""
    force: bool = False
    """Accept a --delta of 1/clients or more."""


def main(argv: Sequence[str], console: Console) -> None:
    """`fedpa privacy`."""
    command = parse_words(PrivacyCommand, argv, "fedpa privacy")
    given = (command.epsilon, command.noise_multiplier)
    if (given[0] is None) == (given[1] is None):
        raise refuse("epsilon", given[0], "give either epsilon or noise_multiplier")
    check_integer("clients", command.clients, 1)
    check_integer("cohort", command.cohort, 1)
    check_integer("rounds", command.rounds, 1)
    if command.cohort > command.clients:
        expected = f"must be at most clients = {command.clients}"
        raise refuse("cohort", command.cohort, expected)
    check_delta(command.delta)
    if not command.force:
        check_delta_of(command.delta, command.clients, "--force")
    z = command.noise_multiplier
    if command.epsilon is not None:
        found = find_noise_multiplier(
            command.epsilon,
            command.delta,
            rounds=command.rounds,
            clients=command.clients,
            cohort=command.cohort,
            sampling=command.sampling,
            accountant=command.accountant,
        )
        z = math.ceil(found * 10_000) / 10_000
    assert z is not None
    mechanism = Mechanism(z, command.clients, command.cohort, command.sampling, command.accountant)
    spent = compute_epsilon(mechanism, command.rounds, command.delta)
    say(console, f"noise multiplier  {z:g}")
    say(console, f"epsilon           {spent:.4g} at delta = {command.delta:g}")
    say(console, f"rounds            {command.rounds:,} of {command.cohort:,} clients each")
    say(console, f"clients           {command.clients:,} ({command.sampling} sampling)")
    say(console, f"noise on the mean {z / command.cohort:.3g} × the clipping norm")
    if command.simulated_cohort is not None:
        check_integer("simulated_cohort", command.simulated_cohort, 1)
        scaled = z * command.simulated_cohort / command.cohort
        say(
            console,
            f"a simulation with {command.simulated_cohort:,} clients a round has the same noise on "
            f"the mean with noise multiplier {scaled:.4g}; its own epsilon is another",
        )
