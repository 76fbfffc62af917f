"""SCAFFOLD (Karimireddy et al. 2020, option II): control variates that the clients keep.

    client:  y ← ClientOpt(y, ∇̂f_i(y) − c_i + c),  K_i times from y = x
             c_i⁺ ← 1/K_i Σ_k ∇̂f_i(y_k);  sends x − y and c_i⁺ − c_i, keeps c_i⁺
    server:  x ← ServerOpt(x, Σ_S q_i (x − y_i) / Σ_S q_i)
             c ← c + Σ_S q_i (c_i⁺ − c_i) / Σ q_i,  the last sum over all clients, S or not

For plain SGD the mean of the gradients met is option II as printed, c_i − c + (x − y)/(K_i η), but
for rounding; of momentum and Adam it still is a gradient. Equal weights give the paper's 1/N.
c_i and c begin at 0, and a first round is FedAvg's. A client that never returns has used no c_i.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedpa.algorithms.client import client_info, run_locally
from fedpa.algorithms.fedopt import TRAINING, Algorithm, ClientResult
from fedpa.algorithms.local_training import LocalTraining, as_optimizer, local_sampler, local_work
from fedpa.algorithms.methods import Method, OfPopulation, describe
from fedpa.errors import check_number, refuse
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective
from fedpa.precision import narrowed
from fedpa.server import update as server_update
from fedpa.server.aggregation import Aggregate, all_finite, client_weight, weighted_mean
from fedpa.server.update import Server, ServerInfo, ServerState, check_server
from fedpa.types import Count, Key, Params, Scalar


class ScaffoldState(NamedTuple):
    server: ServerState
    control: Params
    """c."""


class ScaffoldBroadcast(NamedTuple):
    theta: Params
    control: Params
    rate: Scalar
    """Multiplies the client's learning rate this round."""


class ScaffoldResult(NamedTuple):
    delta: Params
    control: Params
    """c_i⁺ − c_i."""


@describe
def scaffold(local: LocalTraining, server: Server, *, population: Any = None) -> Method:
    """Build SCAFFOLD.

    population: Σ q_i over all clients: how many there are (weighting uniform), or how many examples
        they have. `fedpa.fit` and the commands count for themselves.
    """
    samples = local_work(local).samples
    check_server(server)
    if population is None:
        return OfPopulation(
            server.weighting, lambda counted: scaffold(local, server, population=counted)
        )
    check_number("population", population)
    if not population:
        raise refuse("population", population, "must be the sum of all clients' weights, > 0")

    def build(objective: Objective) -> Algorithm:
        def client(
            message: ScaffoldBroadcast, data: ClientData, control: Params, key: Key
        ) -> ClientResult:
            shift = optax.tree.sub(message.control, control)
            corrected = optax.chain(_shifted(shift), as_optimizer(local.optimizer))
            sampler = local_sampler(
                objective, local._replace(optimizer=corrected), message.rate, average=False
            )
            chain, loss = run_locally(sampler, samples, message.theta, data, key)
            met = chain.memory[0][0].mean
            new = jax.tree.map(lambda g, c: jnp.where(data.n > 0, g, c), met, control)
            delta = optax.tree.sub(message.theta, chain.theta)
            return ClientResult(
                ScaffoldResult(delta, optax.tree.sub(new, control)),
                client_weight(server.weighting, data.n),
                new,
                client_info(delta, delta, loss),
            )

        return _algorithm(server, local, client, float(population))

    return build


def _algorithm(server: Server, local: LocalTraining, client: Any, population: float) -> Algorithm:
    def broadcast(state: ScaffoldState, t: Any) -> ScaffoldBroadcast:
        rate = jnp.asarray(local.schedule(t), jnp.float32)
        return ScaffoldBroadcast(state.server.theta, state.control, rate)

    def step(
        state: ScaffoldState, aggregate: Aggregate, t: Any
    ) -> tuple[ScaffoldState, ServerInfo]:
        inner, info = server_update.update(
            server, state.server, aggregate.mean.delta, aggregate.weight, server.schedule(t)
        )
        share = aggregate.weight / population
        change = jax.tree.map(lambda d: share.astype(d.dtype) * d, aggregate.mean.control)
        control = optax.tree.add(state.control, narrowed(change, state.control))
        ok = ~info.skipped & all_finite(control)
        kept = jax.tree.map(lambda new, old: jnp.where(ok, new, old), control, state.control)
        return ScaffoldState(inner, kept), info

    return Algorithm(
        init=lambda theta: ScaffoldState(
            server_update.init(server, theta), optax.tree.zeros_like(theta)
        ),
        phase=lambda _: TRAINING,
        broadcast=broadcast,
        clients={TRAINING: client},
        client_init=optax.tree.zeros_like,
        aggregation=weighted_mean(),
        server=step,
        parameters=lambda state: server_update.parameters(server, state.server),
    )


class _Met(NamedTuple):
    mean: Params
    """Of the gradients met so far."""
    steps: Count


def _shifted(shift: Params) -> optax.GradientTransformation:
    """g ← g + shift, dense whatever g is; remembers the mean of the g."""

    def init(theta: Params) -> _Met:
        return _Met(optax.tree.zeros_like(theta), jnp.zeros((), jnp.int32))

    def update(gradient: Params, met: _Met, params: Params | None = None) -> tuple[Params, _Met]:
        steps = met.steps + 1
        mean = jax.tree.map(lambda m, g: m + (g - m) / steps.astype(g.dtype), met.mean, gradient)
        return optax.tree.add(gradient, shift), _Met(mean, steps)

    return optax.GradientTransformation(init, update)
