"""Validation clients, where a data set has none: some of the training clients, held out."""

import numpy as np

from fedpa.data.federated import FederatedData

HELD_OUT_SEED = 0
"""The same clients for every run's seed: what is chosen is chosen on the same examples."""


def held_out(data: FederatedData, share: float) -> tuple[FederatedData, FederatedData | None]:
    """(the others, a random share of the clients, at least one); None if the share is 0."""
    if not share or len(data.ids) == 1:
        return data, None
    size = min(max(round(share * len(data.ids)), 1), len(data.ids) - 1)
    rng = np.random.default_rng(HELD_OUT_SEED)
    chosen = set(rng.choice(len(data.ids), size, replace=False).tolist())
    others = [name for place, name in enumerate(data.ids) if place not in chosen]
    these = [name for place, name in enumerate(data.ids) if place in chosen]
    # Packed rows serve both: clients are found in them by name.
    return data._replace(ids=others), data._replace(ids=these)
