"""Cohorts: which clients take part in a round, so that the accounting holds."""

from collections.abc import Sequence

import numpy as np

from fedpa.privacy.accounting import Sampling


def draw_cohort(
    sampling: Sampling, ids: Sequence[str], size: int, uniforms: np.ndarray
) -> list[str]:
    """Draw the clients of a round.

    Args:
        sampling: "poisson" takes each client by itself with probability m/N, so sizes vary and a
            round may have no client; "fixed" takes exactly m.
        ids: All N clients.
        size: m; all clients take part if there are fewer.
        uniforms: A number in [0, 1) for each client, independent.
    Returns:
        The cohort, in the order of `ids`.
    Example:
        >>> draw_cohort("poisson", ["a", "b", "c"], 1, np.array([0.5, 0.1, 0.2]))
        ['b', 'c']
    """
    if sampling == "poisson":
        chosen = uniforms < size / len(ids)
    else:
        chosen = np.zeros(len(ids), bool)
        chosen[np.argsort(uniforms)[:size]] = True
    return [name for name, taken in zip(ids, chosen, strict=True) if taken]


def take_turns(ids: Sequence[str], size: int, t: int, order: np.ndarray) -> list[str]:
    """Take the next m clients of a fixed order in round t, from 0; after the last comes the first.

    Args:
        ids: All N clients.
        size: m; all clients take part if there are fewer.
        t: The round, from 0.
        order: A permutation of 0 … N − 1.
    Returns:
        The cohort. A client's rounds are at least ⌊N/m⌋ apart.
    Example:
        >>> [take_turns(["a", "b", "c"], 2, t, np.array([2, 0, 1])) for t in range(3)]
        [['c', 'a'], ['b', 'c'], ['a', 'b']]
    """
    size = min(size, len(ids))
    return [ids[order[place % len(ids)]] for place in range(t * size, (t + 1) * size)]
