"""SCAFFOLD (Karimireddy et al. 2020, option II): control variates that the clients keep.

    client:  y ← ClientOpt(y, ∇̂f_i(y) − c_i + c),  K_i times from y = x
             c_i⁺ ← 1/K_i Σ_k ∇̂f_i(y_k);  sends x − y and c_i⁺ − c_i, keeps c_i⁺
    server:  x ← ServerOpt(x, Σ_S q_i (x − y_i) / Σ_S q_i)
             c ← c + Σ_S q_i (c_i⁺ − c_i) / Σ q_i,  the last sum over all clients, S or not

For plain SGD the mean of the gradients met is option II as printed, c_i − c + (x − y)/(K_i η), but
for rounding; of momentum and Adam it still is a gradient. Equal weights give the paper's 1/N.
c_i and c begin at 0, and a first round is FedAvg's. A client that never returns has used no c_i.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from fedpa.algorithms.client import client_info, run_client
from fedpa.algorithms.fedopt import (
    Algorithm,
    Broadcast,
    ClientResult,
    Sent,
    Shared,
    fedopt,
)
from fedpa.algorithms.local_training import LocalTraining, as_optimizer, local_sampler, local_work
from fedpa.algorithms.mb_sgd import remember_mean
from fedpa.algorithms.methods import Method, describe
from fedpa.deltas.last_iterate import last_iterate
from fedpa.errors import FedpaError, check_number, refuse
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective
from fedpa.precision import narrow
from fedpa.server.aggregation import Aggregate, client_weight
from fedpa.server.update import Server, ServerState, check_server
from fedpa.types import Key, Params


@describe
def scaffold(local: LocalTraining, server: Server, *, population: float | None = None) -> Method:
    """Build SCAFFOLD: clients keep control variates c_i and correct their steps by c − c_i.

    Args:
        local: The clients' work.
        server: The server's side.
        population: Σ q_i over all clients: how many there are (weighting uniform), or how many
            examples they have. `fedpa.fit` and the commands count for themselves.
    Returns:
        The method, for `fedpa.fit`.
    Example:
        >>> import fedpa
        >>> local = fedpa.LocalTraining(0.1, batch_size=10, epochs=5)
        >>> method = fedpa.scaffold(local, fedpa.Server(fedpa.server.sgd(1.0)))
    """
    samples = local_work(local).samples
    check_server(server)
    if population is not None:
        check_number("population", population)
        if not population:
            raise refuse("population", population, "must be the sum of all clients' weights, > 0")

    def client(
        objective: Objective, message: Broadcast, data: ClientData, control: Params, key: Key
    ) -> ClientResult:
        """`control` is c_i, `message.shared` c."""
        shift = optax.tree.sub(message.shared, control)
        corrected = optax.chain(
            remember_mean(lambda g: optax.tree.add(g, shift)), as_optimizer(local.optimizer)
        )
        sampler = local_sampler(
            objective, local._replace(optimizer=corrected), message.rate, average=False
        )
        chain, delta, info = run_client(sampler, last_iterate(), samples, message.theta, data, key)
        met = chain.memory[0][0].mean
        new = jax.tree.map(lambda g, c: jnp.where(data.n > 0, g, c), met, control)
        return ClientResult(
            Sent(delta, optax.tree.sub(new, control)),
            client_weight(server.weighting, data.n),
            new,
            client_info(delta, delta, info.loss),
        )

    def update(state: ServerState, aggregate: Aggregate) -> Params:
        assert population is not None  # `build` has seen to it
        share = aggregate.weight / float(population)
        change = jax.tree.map(lambda d: share.astype(d.dtype) * d, aggregate.mean.more)
        return optax.tree.add(state.shared, narrow(change, state.shared))

    def build(objective: Objective) -> Algorithm:
        if population is None:
            raise FedpaError(
                "population is not known: give population=…, the sum of the weights of all clients"
            )
        control = Shared(optax.tree.zeros_like, update)
        own = functools.partial(client, objective)
        frame = fedopt(server, own, client_rate=local.schedule, shared=control)
        return frame._replace(client_init=optax.tree.zeros_like)

    return build
