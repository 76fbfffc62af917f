"""Least squares that first-order methods can't solve in sixty rounds: condition 10⁴, d = 50.

Twenty clients, all of them in every round, with spectra, axes and optima of their own. Every
direction has its share of the loss at the start. Runs are simulated, so that a whole grid of rates
is one program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedpa import LocalTraining, Server, server
from fedpa.data import from_mapping
from fedpa.objectives import Objective, least_squares
from fedpa.training.simulate import run_rounds, stack_federation

DIM, CLIENTS, EXAMPLES, ROUNDS, CONDITION = 50, 20, 100, 60, 1e4


def federation(seed=0, rotated=True):
    """client id → {"x", "y"}; without rotation the inputs' axes are nearly the coordinates'."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    axes = np.linalg.qr(normal((DIM, DIM)))[0] if rotated else np.eye(DIM)
    spectrum = np.logspace(0, -np.log10(CONDITION), DIM)
    common = normal(DIM) / np.sqrt(spectrum)
    clients = {}
    for index in range(CLIENTS):
        own = spectrum * np.exp(0.7 * normal(DIM))
        turned = np.linalg.qr(np.eye(DIM) + 0.002 * normal((DIM, DIM)))[0]
        optimum = common + 0.3 * normal(DIM) / np.sqrt(spectrum)
        x = normal((EXAMPLES, DIM)) * np.sqrt(own) @ turned.T
        y = x @ optimum + 0.1 * normal(EXAMPLES)
        arrays = {"x": (x @ axes.T).astype(np.float32), "y": y.astype(np.float32)}
        clients[f"client-{index:02d}"] = arrays
    return clients


class Problem:
    def __init__(self, seed=0, rotated=True):
        clients = federation(seed, rotated)
        self.clients = stack_federation(from_mapping(clients))
        self.objective = Objective(least_squares.loss, like=clients["client-00"])
        pairs = [(c["x"].astype(np.float64), c["y"].astype(np.float64)) for c in clients.values()]
        hessians = [x.T @ x / EXAMPLES for x, _ in pairs]
        self.hessian = np.mean(hessians, axis=0)
        slope = np.mean([x.T @ y / EXAMPLES for x, y in pairs], axis=0)
        self.optimum = np.linalg.solve(self.hessian, slope)
        eigenvalues = np.linalg.eigvalsh(self.hessian)
        self.condition = eigenvalues[-1] / eigenvalues[0]
        self.steepest = eigenvalues[-1]
        """L, the largest curvature of the mean loss."""
        self.steepest_client = max(np.linalg.eigvalsh(a)[-1] for a in hessians)

    def suboptimality(self, theta):
        """(f(θ) − f*)/(f(0) − f*), in double precision."""
        away = np.asarray(theta, np.float64) - self.optimum
        value = np.einsum("...i,ij,...j->...", away, self.hessian, away)
        return value / (self.optimum @ self.hessian @ self.optimum)

    def reached(self, method, client_rates, server_rates, seed=0, rounds=ROUNDS):
        """After 60 rounds with each pair of rates: method(local schedule, server schedule) → it."""

        def final(client_rate, server_rate):
            algorithm = method(lambda t: client_rate, lambda t: server_rate)(self.objective)
            start, root = jnp.zeros(DIM), jax.random.key(seed)
            return run_rounds(algorithm, start, self.clients, root, rounds).params

        pairs = np.array([(c, s) for c in client_rates for s in server_rates], np.float32)
        ends = self.suboptimality(jax.jit(jax.vmap(final))(pairs[:, 0], pairs[:, 1]))
        ends = np.where(np.isfinite(ends), ends, np.inf)
        return ends, pairs

    def best(self, *arguments, **options):
        ends, pairs = self.reached(*arguments, **options)
        return float(ends.min()), tuple(map(float, pairs[ends.argmin()]))


def full_batches(schedule, steps=1):
    """So many local steps, each on all of a client's examples; a sample after each."""
    return LocalTraining(
        optax.sgd(1.0), EXAMPLES, samples=steps, steps_per_sample=1, schedule=schedule
    )


def plain_server(schedule, momentum=0.0):
    return Server(server.sgd(1.0, momentum), schedule=schedule)


def adam_server(schedule, tau):
    return Server(server.adam(1.0, tau), schedule=schedule)
