"""Release: what is between a round's sum and the server, where the sum is private."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Array, Bool, PyTree

from fedpa.privacy.accounting import Budget
from fedpa.server.aggregation import Aggregate

if TYPE_CHECKING:
    from fedpa.privacy.ledger import Ledger

Noise = Callable[[PyTree, Aggregate, PyTree, float], Aggregate]
"""(server state, sum, independent N(0, 1) like the sum, m) → what the server is given."""


Bound = Callable[[PyTree, Aggregate, int], Bool[Array, ""]]
"""(message, sum, number of clients) → whether that many clients can have that sum."""


class Release(NamedTuple):
    """How an algorithm's sum is made private before the server sees it (`fedpa.private`).

    Args:
        budget: z, δ, sampling and accountant.
        noise: Adds the noise to the sum and divides by m.
        is_possible: Whether a sum can be that of n clipped results: its norm is at most their
            number times C. A deployment's server asks it of every node's sum.
        ledger: In a deployment: where its randomness comes from, and how its rounds are counted;
            None in simulations, whose noise and cohorts come from the run's keys (default: None).
    Example:
        >>> averaging = fedpa.fedavg(fedpa.LocalTraining(0.1, 10), fedpa.Server(optax.sgd(1.0)))
        >>> method = fedpa.private(averaging, clip=0.5, noise_multiplier=1.0, delta=1e-5)
        >>> algorithm = method(fedpa.Objective(fedpa.objectives.least_squares.loss))
        >>> algorithm.release.budget.noise_multiplier
        1.0
    """

    budget: Budget
    noise: Noise
    is_possible: Bound
    ledger: "Ledger | None" = None
