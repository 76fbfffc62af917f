"""A federation dealt anew: the same examples and as many clients, with skewed labels.

What belongs together by nature (a writer's digits) is torn apart; what is left of the difference
between clients is which labels they have.
"""

import jax
import numpy as np

from fedpa.data.dealt import numbered
from fedpa.data.federated import FederatedData, from_mapping
from fedpa.data.partition import dirichlet_label_skew


def dealt_by_label(
    data: FederatedData, label: str, concentration: float, seed: int
) -> FederatedData:
    """Clients of equal sizes whose proportions of `label` are Dirichlet(concentration) draws.

    All examples are read, and stay in memory.
    """
    everything = [data.examples(name) for name in data.ids]
    arrays = jax.tree.map(lambda *parts: np.concatenate(parts), *everything)
    dealt = dirichlet_label_skew(arrays[label], len(data.ids), concentration, seed)
    names = numbered(len(dealt))
    return from_mapping(
        {
            name: jax.tree.map(lambda array, rows=rows: array[rows], arrays)
            for name, rows in zip(names, dealt, strict=True)
        }
    )
