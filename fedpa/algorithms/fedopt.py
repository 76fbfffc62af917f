"""Algorithm 1, generalized federated optimization.

    for t = 0, 1, …:
        broadcast θ to the cohort S_t
        each client:  Δ_i ← ClientUpdate(θ)                    (`fedpa.algorithms.client`)
        aggregate:    Δ ← Σ q_i Δ_i / Σ q_i
        server:       θ ← ServerOpt(θ, Δ)

An `Algorithm` is these steps as functions; `fed_round` is the loop's body, `fedopt` the assembly
that FedAvg, FedPA and the controls share. Message, result and client state are pytrees of the
algorithm's own choosing: an engine moves, weighs and averages them without knowing which algorithm
it runs.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fedpa.errors import check_integer
from fedpa.objectives.client_data import ClientData
from fedpa.server import update as server_update
from fedpa.server.aggregation import (
    Aggregate,
    Aggregation,
    Result,
    Weight,
    all_finite,
    weighted_mean,
)
from fedpa.server.schedules import constant
from fedpa.server.update import Server, ServerInfo, ServerState, check_server
from fedpa.types import Key, Keys, Params, Scalar

State = Any
Message = Any
ClientState = Any
BURN_IN = "burn-in"
SAMPLING = "sampling"
TRAINING = "training"
WITH = " with "
"""Between a phase's name and what some of its rounds have besides."""


def stage(phase: str) -> str:
    """A phase whatever single rounds have besides: burn-in, of `burn-in with precision`."""
    return phase.split(WITH)[0]


class Broadcast(NamedTuple):
    """What clients are sent by `fedopt`."""

    theta: Params
    rate: Scalar
    """Multiplies the client's learning rate this round."""
    shared: Any = ()
    """See `Shared`."""


class Sent(NamedTuple):
    """What a client sends where that is more than Δ."""

    delta: Params
    more: Any


class Shared(NamedTuple):
    """What a server keeps beside θ and sends to clients with it: SCAFFOLD's c, MIME's statistics.

    Clients' results are then `Sent`.
    """

    init: Callable[[Params], Any]
    """θ → before the first round."""
    update: Callable[[ServerState, Aggregate], Any]
    """(the server's state before the round, what clients sent) → after it. As it was where that is
    not finite, or θ stays as it was."""


class ClientResult(NamedTuple):
    result: Result
    """What is sent to the server and averaged there."""
    weight: Weight
    """q_i, or a tree prefix of the result: each subtree is averaged by its own weight."""
    state: ClientState
    """What the client keeps for the next round it takes part in."""
    info: Any
    """A NamedTuple of scalars for people to see; averaged over clients as `train/<name>`."""


ClientUpdate = Callable[[Message, ClientData, ClientState, Key], ClientResult]


class Inquiry(NamedTuple):
    """What a round's clients are asked before they begin: a round trip of its own."""

    broadcast: Callable[[State], Message]
    """A part of the message that follows, which is not sent again."""
    client: ClientUpdate
    """It keeps no state: what it returns as one is not looked at."""
    receive: Callable[[State, Aggregate], State]
    """(server state, what the clients answered, aggregated) → server state."""


class Algorithm(NamedTuple):
    init: Callable[[Params], State]
    """θ → server state."""
    phase: Callable[[int], str]
    """round → the name of the phase it belongs to."""
    broadcast: Callable[[State, Any], Message]
    """What clients are sent."""
    clients: Mapping[str, ClientUpdate]
    """The client update of each phase: one program each."""
    client_init: Callable[[Params], ClientState]
    """θ → the state of a client that takes part for the first time; () if it keeps none."""
    aggregation: Aggregation
    """How results become one."""
    server: Callable[[State, Aggregate, Any], tuple[State, Any]]
    """ServerUpdate. Its info is `ServerInfo`, or a NamedTuple of that and more scalars for people
    to see, as `train/<name>`."""
    parameters: Callable[[State], Params]
    """server state → the θ to evaluate and to return."""
    inquiry: Inquiry | None = None


class Cohort(NamedTuple):
    """The clients of one round, stacked: what `fed_round` is given."""

    data: ClientData
    """Examples with a first axis over clients; n of each, or one n for all."""
    keys: Keys
    """One for each."""
    states: Any = ()
    """What each has kept, stacked; () if the algorithm's clients keep nothing."""


class Round(NamedTuple):
    """What a round leaves beside the server's state."""

    states: ClientState
    """What each client keeps, stacked: as it was where its result was rejected or the server
    skipped the round."""
    accepted: Bool[Array, " m"]
    """Whether a client's result entered the aggregate."""
    client_info: Any
    """Each client's, stacked."""
    server_info: Any


def fed_round(
    algorithm: Algorithm, state: State, cohort: Cohort, t: Any, phase: str | None = None
) -> tuple[State, Round]:
    """One round of Algorithm 1, a pure function of server state and cohort: jit, scan or vmap it.

    Args:
        algorithm: What `fedpa.fedavg(local, server)(objective)` gives.
        state: The server's, from `algorithm.init(theta)`.
        cohort: The round's clients.
        t: The round, from 0; a traced number needs its `phase`.
        phase: `algorithm.phase(t)` by default.
    Returns:
        The server's next state, and what the round leaves.
    Example:
        >>> import fedpa, optax
        >>> method = fedpa.fedavg(fedpa.LocalTraining(0.1, 4), fedpa.Server(optax.sgd(1.0)))
        >>> algorithm = method(fedpa.Objective(lambda theta, batch, key: (theta - batch) ** 2))
        >>> data = ClientData(jnp.arange(8.0).reshape(2, 4), jnp.asarray(4))  # two clients
        >>> cohort = Cohort(data, jax.random.split(jax.random.key(0), 2))
        >>> def step(state, t):
        ...     return fed_round(algorithm, state, cohort, t, algorithm.phase(0))
        >>> end, left = jax.lax.scan(step, algorithm.init(jnp.zeros(())), jnp.arange(50))
        >>> round(float(algorithm.parameters(end)), 3)
        3.5
    """
    if algorithm.inquiry is not None:
        asked, message = algorithm.inquiry.client, algorithm.inquiry.broadcast(state)
        aggregate, _, _ = _run_clients(algorithm, asked, message, cohort)
        state = algorithm.inquiry.receive(state, aggregate)
    client = algorithm.clients[algorithm.phase(t) if phase is None else phase]
    message = algorithm.broadcast(state, t)
    aggregate, out, accepted = _run_clients(algorithm, client, message, cohort)
    state, info = algorithm.server(state, aggregate, t)
    states = _choose(accepted & ~info.skipped, out.state, cohort.states)
    return state, Round(states, accepted, out.info, info)


def _run_clients(
    algorithm: Algorithm, client: ClientUpdate, message: Message, cohort: Cohort
) -> tuple[Aggregate, ClientResult, Bool[Array, " m"]]:
    """All clients side by side, their results summed in the order of the cohort."""
    sizes = ClientData(0, 0 if jnp.ndim(cohort.data.n) else None)  # type: ignore[arg-type]
    out = jax.vmap(client, in_axes=(None, sizes, 0, 0))(
        message, cohort.data, cohort.states, cohort.keys
    )
    is_empty = jnp.broadcast_to(cohort.data.n == 0, cohort.keys.shape)
    # Whatever the update makes of no examples, it counts nothing.
    weight = _choose(is_empty, jax.tree.map(jnp.zeros_like, out.weight), out.weight)
    sent = (out.result, weight)
    one = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), sent)
    total, accepted = jax.lax.scan(
        lambda total, one: algorithm.aggregation.add(total, *one),
        algorithm.aggregation.init(*one),
        sent,
    )
    return algorithm.aggregation.value(total), out, accepted


def _choose(which: Bool[Array, " m"], one: Any, other: Any) -> Any:
    """`one` or `other`, client by client."""
    return jax.vmap(lambda w, a, b: jax.tree.map(lambda x, y: jnp.where(w, x, y), a, b))(
        which, one, other
    )


def fedopt(
    server: Server,
    clients: Mapping[str, ClientUpdate],
    phase: Callable[[int], str],
    client_rate: Callable[[Any], Any] = constant(1.0),
    server_rate: Callable[[Any], Any] = constant(1.0),
    shared: Shared | None = None,
) -> Algorithm:
    """Algorithm 1 around the given client updates; the rates multiply learning rates by round."""
    check_server(server)

    def init(theta: Params) -> ServerState:
        state = server_update.init(server, theta)
        return state if shared is None else state._replace(shared=shared.init(theta))

    def broadcast(state: ServerState, t: Any) -> Broadcast:
        return Broadcast(state.theta, jnp.asarray(client_rate(t), jnp.float32), state.shared)

    def step(state: ServerState, aggregate: Aggregate, t: Any) -> tuple[ServerState, ServerInfo]:
        delta = aggregate.mean if shared is None else aggregate.mean.delta
        rate = server_rate(t) * server.schedule(t)
        new, info = server_update.update(server, state, delta, aggregate.weight, rate)
        if shared is None:
            return new, info
        fresh = shared.update(state, aggregate)
        ok = ~info.skipped & all_finite(fresh)
        kept = jax.tree.map(lambda fresh, old: jnp.where(ok, fresh, old), fresh, state.shared)
        return new._replace(shared=kept), info

    return Algorithm(
        init=init,
        phase=phase,
        broadcast=broadcast,
        clients=clients,
        client_init=lambda theta: (),
        aggregation=weighted_mean(),
        server=step,
        parameters=lambda state: server_update.parameters(server, state),
    )


def phase_after(burn_in_rounds: int) -> Callable[[int], str]:
    """round → phase: sampling from round `burn_in_rounds` on."""
    check_integer("burn_in_rounds", burn_in_rounds, 0)
    return lambda t: SAMPLING if t >= burn_in_rounds else BURN_IN
