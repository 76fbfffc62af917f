"""Dealing a central data set to clients."""

import numpy as np

from fedpa.errors import refuse


def dirichlet_label_skew(
    labels: np.ndarray, num_clients: int, concentration: float, seed: int
) -> list[np.ndarray]:
    """Deal examples to clients whose label proportions are Dirichlet(concentration) draws.

    Clients are equally large (to one example) and every example is dealt exactly once: clients
    take turns drawing a label from their own proportions, among the labels that are left.
    """
    if not 1 <= num_clients <= len(labels):
        raise refuse("num_clients", num_clients, f"must be between 1 and {len(labels)} (examples)")
    if not 0 < concentration < float("inf"):
        raise refuse("concentration", concentration, "must be a finite number > 0")
    rng = np.random.default_rng(seed)
    classes = np.unique(labels)
    left = [list(rng.permutation(np.flatnonzero(labels == label))) for label in classes]
    proportions = rng.dirichlet(np.full(len(classes), concentration), size=num_clients)
    dealt: list[list[int]] = [[] for _ in range(num_clients)]
    for turn in range(len(labels)):
        client = turn % num_clients
        weights = proportions[client] * np.array([len(rows) > 0 for rows in left])
        if weights.sum() == 0:  # all that this client wants is gone: take what there is most of
            weights = np.array([float(len(rows)) for rows in left])
        label = rng.choice(len(classes), p=weights / weights.sum())
        dealt[client].append(left[label].pop())
    return [np.array(rows, np.int64) for rows in dealt]
