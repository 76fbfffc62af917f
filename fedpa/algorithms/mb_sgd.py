"""Mini-batch SGD: as many gradients as local training would take, all at θ, averaged.

Δ_i = (1/K) Σ_k ∇̂f_i(θ): unbiased, so it has no fixed-point bias, but K gradients make one step. The
client's learning rate is not used: Δ is a gradient, and the server's rate has another scale.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedpa.algorithms.client import Broadcast, client_info, run_locally
from fedpa.algorithms.fedopt import BURN_IN, Algorithm, ClientResult, fedopt
from fedpa.algorithms.local_training import LocalTraining, local_sampler, local_work
from fedpa.algorithms.methods import Method, describe
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective
from fedpa.server.aggregation import client_weight
from fedpa.server.update import Server, check_server
from fedpa.types import Count, Key, Params


@describe
def mb_sgd(local: LocalTraining, server: Server) -> Method:
    """Visit the mini-batches `local` describes, without moving, and send the mean gradient."""
    check_server(server)
    samples = local_work(local).samples
    at_rest = local._replace(optimizer=_gradient_mean())

    def build(objective: Objective) -> Algorithm:
        sampler = local_sampler(objective, at_rest, jnp.ones(()), average=False)

        def client(message: Broadcast, data: ClientData, state: Any, key: Key) -> ClientResult:
            chain, loss = run_locally(sampler, samples, message.theta, data, key)
            gradient = chain.memory[0].mean
            info = client_info(gradient, gradient, loss)
            return ClientResult(gradient, client_weight(server.weighting, data.n), state, info)

        return fedopt(server, {BURN_IN: client}, lambda _: BURN_IN)

    return build


class _GradientMean(NamedTuple):
    mean: Params
    steps: Count


def _gradient_mean() -> optax.GradientTransformation:
    """An optimizer that stays where it is and remembers the mean of the gradients it has seen."""

    def init(theta: Params) -> _GradientMean:
        return _GradientMean(jax.tree.map(jnp.zeros_like, theta), jnp.zeros((), jnp.int32))

    def update(
        gradient: Params, state: _GradientMean, params: Params | None = None
    ) -> tuple[Params, _GradientMean]:
        steps = state.steps + 1
        mean = jax.tree.map(lambda m, g: m + (g - m) / steps.astype(g.dtype), state.mean, gradient)
        return jax.tree.map(jnp.zeros_like, gradient), _GradientMean(mean, steps)

    return optax.GradientTransformation(init, update)
