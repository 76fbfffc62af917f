"""SCAFFOLD (Karimireddy et al. 2020, option II), written as a test of the algorithm interface.

It needs a message of two parts, client states, results averaged by weights of their own, and a
server step that knows how many took part: all of it without a special case in engine or loop.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpa.algorithms.algorithm import Algorithm, ClientResult
from fedpa.objectives.objective import client_loss
from fedpa.server.aggregation import all_finite, weighted_mean
from fedpa.server.update import ServerInfo


class State(NamedTuple):
    theta: Any
    control: Any


class Info(NamedTuple):
    loss: Any


def scaffold(*, steps, client_rate, server_rate, population):
    def build(objective):
        def client(message, data, control_i, key):
            def step(_, y):
                gradient = jax.grad(client_loss, argnums=1)(objective, y, data, key)
                return y - client_rate * (gradient - control_i + message.control)

            takes_part = (data.n > 0).astype(jnp.float32)
            y = jax.lax.fori_loop(0, steps, step, message.theta)
            new = control_i - message.control + (message.theta - y) / (steps * client_rate)
            result = {
                "delta": takes_part * (message.theta - y),
                "control": takes_part * (new - control_i),
            }
            info = Info(client_loss(objective, message.theta, data, key))
            kept = jnp.where(takes_part > 0, new, control_i)
            return ClientResult(result, takes_part, kept, info)

        def server(state, aggregate, t):
            share = aggregate.weight / population
            new = State(
                state.theta - server_rate * aggregate.mean["delta"],
                state.control + share * aggregate.mean["control"],
            )
            ok = all_finite(new)
            kept = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, state)
            return kept, ServerInfo(~ok)

        return Algorithm(
            init=lambda theta: State(theta, jnp.zeros_like(theta)),
            phase=lambda t: "training",
            broadcast=lambda state, t: state,
            clients={"training": client},
            client_init=jnp.zeros_like,
            aggregation=weighted_mean(),
            server=server,
            parameters=lambda state: state.theta,
        )

    return build
