"""Multi-Krum (Blanchard et al. 2017)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.errors import check_integer
from fedpa.server.aggregation import Aggregation, Result
from fedpa.server.keep_results import Present, Rows, distances, keep_results, mix_rows


def multi_krum(malicious: int) -> Aggregation:
    """Average the n − f results that are closest to their neighbors.

    A result's score is the sum of its squared distances to its n − f − 2 nearest others; the n − f
    results of the lowest scores are averaged with equal weights (Blanchard, El Mhamdi, Guerraoui,
    Stainer: Machine learning with adversaries, NeurIPS 2017, section 4: m = n − f).

    Withstands f malicious clients of n ≥ 2f + 3. Honest clients that differ much from the others
    are left out, too. Distances are those of all arrays that a client sends, as one vector. It
    ignores weights, keeps all results of a round (`keep_results`), and takes O(n²d) time.

    Args:
        malicious: f ≥ 0.
    Returns:
        The aggregation. A run with cohorts of fewer than 2f + 3 clients is refused, and a round
        with fewer usable results leaves the model unchanged.
    Raises:
        FedpaError: f is out of range.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.sgd(1.0), aggregation=multi_krum(2))
        >>> side.aggregation.least_clients
        7
    """
    check_integer("malicious", malicious, 0)

    def combine(rows: Rows, present: Present) -> Result:
        number, place = jnp.sum(present), jnp.arange(len(present))

        def score(at: Any) -> Float[Array, ""]:
            away = distances(rows, jax.tree.map(lambda x: x[at], rows))
            nearest = jnp.sort(jnp.where(present & (place != at), away**2, jnp.inf))
            counted = jnp.where(place < number - malicious - 2, nearest, 0)
            return jnp.where(present[at], jnp.sum(counted), jnp.inf)

        # Absent rows come last, also behind scores that overflow.
        order = jnp.lexsort((jax.lax.map(score, place), ~present))
        is_chosen = jnp.zeros_like(present).at[order].set(place < number - malicious)
        shares = is_chosen.astype(jnp.float32) / (number - malicious).astype(jnp.float32)
        return mix_rows(shares, rows)

    return keep_results(combine, least_clients=2 * malicious + 3)
