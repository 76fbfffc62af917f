"""Mini-batch SGD: as many gradients as local training would take, all at θ, averaged.

Δ_i = (1/K) Σ_k ∇̂f_i(θ): unbiased, so it has no fixed-point bias, but K gradients make one step. The
client's learning rate is not used: Δ is a gradient, and the server's rate has another scale.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedpa.algorithms.client import client_info, run_client
from fedpa.algorithms.fedopt import Algorithm, Broadcast, ClientResult, fedopt
from fedpa.algorithms.local_training import LocalTraining, local_sampler, local_work
from fedpa.algorithms.methods import Method, describe
from fedpa.deltas.last_iterate import last_iterate
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective
from fedpa.server.aggregation import client_weight
from fedpa.server.update import Server, check_server
from fedpa.types import Count, Key, Params


@describe
def mb_sgd(local: LocalTraining, server: Server) -> Method:
    """Build mini-batch SGD: clients send the mean gradient at θ over the batches of `local`.

    Args:
        local: The batches that are visited; its learning rate is not used.
        server: The server's side; Δ is a gradient, so its rate has another scale than FedAvg's.
    Returns:
        The method, for `fedpa.fit`.
    Example:
        >>> import fedpa
        >>> local = fedpa.LocalTraining(0.1, batch_size=10, epochs=5)
        >>> method = fedpa.mb_sgd(local, fedpa.Server(fedpa.server.sgd(0.1)))
    """
    check_server(server)
    samples = local_work(local).samples
    at_rest = local._replace(optimizer=remember_mean(optax.tree.zeros_like))

    def build(objective: Objective) -> Algorithm:
        sampler = local_sampler(objective, at_rest, jnp.ones(()), average=False)

        def client(message: Broadcast, data: ClientData, state: Any, key: Key) -> ClientResult:
            chain, _, info = run_client(sampler, last_iterate(), samples, message.theta, data, key)
            gradient = chain.memory[0].mean
            info = client_info(gradient, gradient, info.loss)
            return ClientResult(gradient, client_weight(server.weighting, data.n), state, info)

        return fedopt(server, client)

    return build


class GradientMean(NamedTuple):
    mean: Params
    """Of the gradients seen so far."""
    steps: Count


def remember_mean(change: Callable[[Params], Params]) -> optax.GradientTransformation:
    """g ← change(g), dense whatever g is; remembers the mean of the g."""

    def init(theta: Params) -> GradientMean:
        return GradientMean(optax.tree.zeros_like(theta), jnp.zeros((), jnp.int32))

    def update(
        gradient: Params, seen: GradientMean, params: Params | None = None
    ) -> tuple[Params, GradientMean]:
        steps = seen.steps + 1
        mean = jax.tree.map(lambda m, g: m + (g - m) / steps.astype(g.dtype), seen.mean, gradient)
        return change(gradient), GradientMean(mean, steps)

    return optax.GradientTransformation(init, update)
