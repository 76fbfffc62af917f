"""A method whose burn-in ends at the plateau of FedAvg, instead of after a given round."""

import functools
from collections.abc import Callable
from typing import Any

from fedpa.algorithms.fedopt import Algorithm, Switch
from fedpa.algorithms.methods import Described, Method
from fedpa.algorithms.plateau import Plateau, check_plateau
from fedpa.errors import check_takes, refuse
from fedpa.objectives.objective import Objective

NEVER = 2**31 - 1
"""Rounds of burn-in that no run ends; as a 32-bit integer, it can be compared with in programs."""
AUTO = "auto"
"""In place of a number of burn-in rounds: until the plateau."""


def switch_at_plateau(make: Callable[[int], Method], rule: Plateau = Plateau()) -> Method:
    """Build a method that switches when FedAvg has stopped improving, in place of a fixed round.

    Until the plateau, every round is one of burn-in. If it is reached after round R, the run
    continues as one of `make(R)`, bit for bit, and the next record has `switch/round` = R. A
    resumed run switches after the same round. The records, not the clients, decide: `fedpa.fit` and
    `fedpa.train` can run it, `fedpa.simulate` and Flower can't.

    Args:
        make: Number of burn-in rounds → the method. What its clients and server keep must not
            depend on that number.
        rule: When a plateau is reached; default: `Plateau()`, of the training loss.
    Returns:
        The method, for `fedpa.fit`; in labels and records it is the method that `make` gives.
    Raises:
        FedpaError: `make` is not such a function, or a setting of the rule is out of range.
    Example:
        >>> import fedpa, numpy as np
        >>> clients = {"a": {"x": np.eye(4, 2), "y": np.ones(4)}}
        >>> local = fedpa.LocalTraining(0.1, batch_size=4, epochs=2)
        >>> server = fedpa.Server(fedpa.server.sgd(1.0))
        >>> method = fedpa.switch_at_plateau(
        ...     lambda rounds: fedpa.fedpa(local, server, rho=0.1, burn_in_rounds=rounds),
        ...     fedpa.Plateau(window=5, at_most=20),
        ... )
        >>> result = fedpa.fit(fedpa.objectives.least_squares.loss, np.zeros(2), clients, method,
        ...                    rounds=22, clients_per_round=1, progress=False)
        >>> result.history[20]["phase"], result.history[20]["switch/round"]
        ('sampling', 20)
    """
    check_takes("make", make, "(rounds)")
    check_plateau(rule)
    # Its settings are described as with a switch, since settings may depend on its round, too.
    known = make(1)
    if not callable(known):
        raise refuse("make", known, "must return a method, as fedpa.fedpa(…) gives")

    def build(objective: Objective) -> Algorithm:
        def at(rounds: int) -> Algorithm:
            algorithm = make(rounds)(objective)
            if not isinstance(algorithm, Algorithm):
                raise refuse("make", algorithm, "its method must return an algorithm")
            return algorithm

        return at(NEVER)._replace(switch=Switch(rule, functools.lru_cache(maxsize=4)(at)))

    if not isinstance(known, Described):
        return build
    builder = known.builder

    @functools.wraps(builder)
    def rebuild(**arguments: Any) -> Method:
        """Change arguments of all methods that `make` gives."""
        changed = {k: v for k, v in arguments.items() if v is not described.get(k)}

        def remake(rounds: int) -> Method:
            method = make(rounds)
            assert isinstance(method, Described)
            return builder(**{**method.arguments, **changed})

        return switch_at_plateau(remake, rule)

    described = {**known.arguments, "burn_in_rounds": AUTO, "rule": rule}
    return Described(build, rebuild, described)
