"""Small federations the tests share."""

import jax
import jax.numpy as jnp

from fedpa.objectives import client_data, global_posterior, least_squares, make_regression

# Eagerly each of its operations would be a program of its own.
posterior = jax.jit(least_squares.posterior)


def least_squares_clients(seed=0, sizes=(20, 40, 60, 30), dim=3, **options):
    return make_regression(seed, sizes=sizes, dim=dim, **options).clients


def least_squares_federation(seed=0, sizes=(20, 40, 60, 30), **options):
    """(clients, their quadratics, the exact global posterior)."""
    clients = least_squares_clients(seed, sizes, **options)
    capacity = max(sizes)
    quadratics = [posterior(client_data(c, capacity)) for c in clients.values()]
    return clients, quadratics, global_posterior(quadratics)


def distance(theta, mode):
    return float(jnp.linalg.norm(theta - mode))


def trees_equal(one, other):
    """Bit for bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        bool(jnp.array_equal(a, b)) for a, b in pairs
    )
