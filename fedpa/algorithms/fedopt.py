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
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from fedpa.algorithms.plateau import Plateau
from fedpa.errors import check_integer, check_type, refuse
from fedpa.objectives.client_data import ClientData
from fedpa.privacy.noise import draw_normals
from fedpa.privacy.release import Release
from fedpa.server import update as server_update
from fedpa.server.aggregation import (
    Aggregate,
    Aggregation,
    Result,
    Weight,
    add_all,
    all_finite,
    check_cohort,
)
from fedpa.server.schedules import Round as RoundNumber
from fedpa.server.schedules import Schedule, constant
from fedpa.server.update import Server, ServerInfo, ServerState, check_server
from fedpa.types import Key, Keys, Params, Scalar

State: TypeAlias = PyTree
Message: TypeAlias = PyTree
ClientState: TypeAlias = PyTree
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
    shared: PyTree = ()
    """See `Shared`."""


class Sent(NamedTuple):
    """What a client sends where that is more than Δ."""

    delta: Params
    more: PyTree


class Shared(NamedTuple):
    """State that a server keeps and sends besides θ: SCAFFOLD's c, MIME's statistics.

    Clients' results are then `Sent`.
    """

    init: Callable[[Params], PyTree]
    """θ → before the first round."""
    update: Callable[[ServerState, Aggregate], PyTree]
    """(the server's state before the round, what clients sent) → after it. As it was where that is
    not finite, or θ stays as it was."""


class ClientResult(NamedTuple):
    """The return value of a client update: result, weight, state and diagnostics.

    Args:
        result: What is sent to the server and averaged there.
        weight: q_i, or a tree prefix of the result: each subtree is averaged by its own weight.
        state: What the client keeps for the next round it takes part in.
        info: A NamedTuple of scalars for people to see; averaged over clients as `train/<name>`.
    Example:
        >>> import fedpa, jax.numpy as jnp
        >>> def client(message, data, state, key):  # one that sends nothing
        ...     delta = jnp.zeros_like(message.theta)
        ...     return fedpa.algorithms.ClientResult(delta, jnp.ones(()), state, ())
    """

    result: Result
    weight: Weight
    state: ClientState
    info: PyTree


ClientUpdate = Callable[[Message, ClientData, ClientState, Key], ClientResult]


class Inquiry(NamedTuple):
    """What a round's clients are asked before they begin: a round trip of its own."""

    broadcast: Callable[[State], Message]
    """A part of the message that follows, which is not sent again."""
    client: ClientUpdate
    """It keeps no state: what it returns as one is not looked at."""
    receive: Callable[[State, Aggregate], State]
    """(server state, what the clients answered, aggregated) → server state."""


class Switch(NamedTuple):
    """When an algorithm becomes another one, by what its records say.

    Args:
        rule: The plateau at which it does.
        at: Rounds done → the algorithm from there on. Its server and clients keep the same.
    Example:
        >>> import fedpa
        >>> local = fedpa.LocalTraining(0.1, batch_size=10, epochs=2)
        >>> server = fedpa.Server(fedpa.server.sgd(1.0))
        >>> method = fedpa.switch_at_plateau(
        ...     lambda rounds: fedpa.fedpa(local, server, rho=0.1, burn_in_rounds=rounds)
        ... )
        >>> algorithm = method(fedpa.Objective(fedpa.objectives.least_squares.loss))
        >>> algorithm.phase(7), algorithm.switch.at(7).phase(7)
        ('burn-in', 'sampling')
    """

    rule: Plateau
    at: "Callable[[int], Algorithm]"


class Reading(NamedTuple):
    """How a person reads an algorithm's infos, where a mean over clients does not say it.

    Args:
        reduce: A client info's name → how its records summarize a round's clients (default: the
            mean).
        reasons: A client info's name → why a client was rejected, if that info is not 0; "skipped"
            → why the server skipped a round.
    Example:
        >>> Reading(reduce={"rhat": "max"}, reasons={"indefinite": "its precision is not definite"})
        Reading(reduce={'rhat': 'max'}, reasons={'indefinite': 'its precision is not definite'})
    """

    reduce: Mapping[str, Literal["max", "min", "sum"]] = MappingProxyType({})
    reasons: Mapping[str, str] = MappingProxyType({})


class Algorithm(NamedTuple):
    """A federated algorithm as functions: the steps of Algorithm 1.

    It chooses the pytrees of message, result and client state.

    Args:
        init: θ → server state.
        phase: round → the name of the phase it belongs to.
        broadcast: What clients are sent.
        clients: The client update of each phase: one program each.
        client_init: θ → the state of a client that takes part for the first time; () if it keeps
            none.
        aggregation: How results become one.
        server: ServerUpdate. Its info is `ServerInfo`, or a NamedTuple of that and more scalars for
            people to see, as `train/<name>`.
        parameters: server state → the θ to evaluate and to return.
        inquiry: What clients are asked before they begin, if anything: MIME's gradients (default:
            None).
        reading: How its infos are read (default: as means over clients).
        is_state_required: Whether a client that has lost its state can't take part: the server's
            state includes what every client keeps, as q = p₀ Π t_i includes sites, and a new state
            would count it twice (default: False).
        switch: When it becomes another algorithm, if it does (default: None).
        release: How the sum is made private before the server sees it, if it is (default: None).
        repair: (the mean with noise, the noise's standard deviation on what is sent besides Δ) →
            one that the server can use: positive semidefinite where it must be (default: the mean).
    Example:
        >>> import fedpa
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> local = fedpa.LocalTraining(0.1, batch_size=10)
        >>> algorithm = fedpa.fedavg(local, fedpa.Server(fedpa.server.sgd(1.0)))(objective)
        >>> isinstance(algorithm, fedpa.Algorithm)
        True
    """

    init: Callable[[Params], State]
    phase: Callable[[int], str]
    broadcast: Callable[[State, RoundNumber], Message]
    clients: Mapping[str, ClientUpdate]
    client_init: Callable[[Params], ClientState]
    aggregation: Aggregation
    server: Callable[[State, Aggregate, RoundNumber], tuple[State, PyTree]]
    parameters: Callable[[State], Params]
    inquiry: Inquiry | None = None
    reading: Reading = Reading()
    is_state_required: bool = False
    switch: Switch | None = None
    release: Release | None = None
    repair: Callable[[Result, Scalar], Result] = lambda mean, sd: mean


class Cohort(NamedTuple):
    """The clients of one round, stacked: what `fed_round` is given.

    Args:
        data: Examples with a first axis over clients; n of each, or one n for all.
        keys: One for each.
        states: What each has kept, stacked; () if the algorithm's clients keep nothing (default:
            ()).
    Example:
        >>> import fedpa, jax, jax.numpy as jnp
        >>> data = fedpa.objectives.ClientData({"x": jnp.ones((3, 4, 2))}, jnp.asarray(4))
        >>> cohort = fedpa.algorithms.Cohort(data, jax.random.split(jax.random.key(0), 3))
    """

    data: ClientData
    keys: Keys
    states: ClientState = ()


class Round(NamedTuple):
    """The result of a round, besides the server's state."""

    states: ClientState
    """What each client keeps, stacked: as it was where its result was rejected or the server
    skipped the round."""
    accepted: Bool[Array, " m"]
    """Whether a client's result entered the aggregate."""
    client_info: Any
    """Each client's, stacked."""
    server_info: Any


def fed_round(
    algorithm: Algorithm,
    state: State,
    cohort: Cohort,
    t: RoundNumber,
    phase: str | None = None,
    key: Key | None = None,
) -> tuple[State, Round]:
    """Run one round of Algorithm 1, a pure function of server state and cohort: jit, scan, vmap it.

    Args:
        algorithm: What `fedpa.fedavg(local, server)(objective)` gives.
        state: The server's, from `algorithm.init(theta)`.
        cohort: The round's clients.
        t: The round, from 0; a traced number needs its `phase` where there are several.
        phase: `algorithm.phase(t)` by default.
        key: Of the noise that makes the round private, another one in every round; needed by
            `fedpa.private` alone, whose sum is divided by the cohort's number of clients.
    Returns:
        The server's next state, and what the round leaves.
    Example:
        >>> import fedpa, jax, jax.numpy as jnp
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> method = fedpa.fedavg(fedpa.LocalTraining(0.1, 4), fedpa.Server(fedpa.server.sgd(1.0)))
        >>> x = jnp.ones((3, 4, 2))  # three clients, four examples each
        >>> data = fedpa.objectives.ClientData({"x": x, "y": jnp.ones((3, 4))}, jnp.asarray(4))
        >>> cohort = fedpa.algorithms.Cohort(data, jax.random.split(jax.random.key(0), 3))
        >>> algorithm = method(objective)
        >>> state, _ = fedpa.fed_round(algorithm, algorithm.init(jnp.zeros(2)), cohort, t=0)
        >>> [round(float(x), 2) for x in algorithm.parameters(state)]
        [0.1, 0.1]
    """
    check_type("algorithm", algorithm, Algorithm, "fedpa.fedavg(local, server)(objective)")
    if algorithm.release is not None and key is None:
        raise refuse("key", None, "must be given: the noise of a private round is drawn from it")
    check_cohort(algorithm.aggregation, "clients of the cohort", len(cohort.keys))
    if algorithm.inquiry is not None:
        asked, message = algorithm.inquiry.client, algorithm.inquiry.broadcast(state)
        aggregate, _, _ = _run_clients(algorithm, asked, message, cohort)
        state = algorithm.inquiry.receive(state, aggregate)
    if phase is None:
        phase, *others = algorithm.clients
        if others and isinstance(t, jax.core.Tracer):
            names = ", ".join(algorithm.clients)
            raise refuse("phase", None, f"must be given where t is traced: one of {names}")
        if others:
            phase = algorithm.phase(int(t))
    client = algorithm.clients[phase]
    message = algorithm.broadcast(state, t)
    aggregate, out, accepted = _run_clients(algorithm, client, message, cohort)
    if algorithm.release is not None and key is not None:
        normals = draw_normals(key, aggregate.mean)
        aggregate = algorithm.release.noise(state, aggregate, normals, len(cohort.keys))
    state, info = algorithm.server(state, aggregate, t)
    states = _choose(accepted & ~info.skipped, out.state, cohort.states)
    return state, Round(states, accepted, out.info, info)


def _run_clients(
    algorithm: Algorithm, client: ClientUpdate, message: Message, cohort: Cohort
) -> tuple[Aggregate, ClientResult, Bool[Array, " m"]]:
    """All clients side by side, their results merged pairwise."""
    sizes = ClientData(0, 0 if jnp.ndim(cohort.data.n) else None)  # type: ignore[arg-type]
    out = jax.vmap(client, in_axes=(None, sizes, 0, 0))(
        message, cohort.data, cohort.states, cohort.keys
    )
    is_empty = jnp.broadcast_to(cohort.data.n == 0, cohort.keys.shape)
    # Whatever the update makes of no examples, it counts nothing.
    weight = _choose(is_empty, jax.tree.map(jnp.zeros_like, out.weight), out.weight)
    total, accepted = add_all(algorithm.aggregation, out.result, weight)
    return algorithm.aggregation.value(total), out, accepted


def _choose(which: Bool[Array, " m"], one: Any, other: Any) -> Any:
    """`one` or `other`, client by client."""
    return jax.vmap(lambda w, a, b: jax.tree.map(lambda x, y: jnp.where(w, x, y), a, b))(
        which, one, other
    )


def fedopt(
    server: Server,
    clients: ClientUpdate | Mapping[str, ClientUpdate],
    phase: Callable[[int], str] | None = None,
    client_rate: Schedule = constant(),
    shared: Shared | None = None,
) -> Algorithm:
    """Put Algorithm 1 around client updates: θ ← ServerOpt(θ, Σ q_i Δ_i / Σ q_i).

    Args:
        server: Aggregation, optimizer and averaging.
        clients: The client update, as `client_update` gives it; or one for each phase, by name.
        phase: Round, from 0 → the name of its phase; needed where there are several.
        client_rate: Multiplies the clients' learning rate, by round.
        shared: State that the server keeps and sends besides θ; clients' results are then `Sent`.
    Returns:
        The algorithm, as engines and `fed_round` run it.
    Raises:
        FedpaError: The server is none, or there are several phases and no `phase`.
    Example:
        >>> import fedpa, jax.numpy as jnp
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> sampler = fedpa.samplers.iasg(objective, 0.1, batch_size=10)
        >>> client = fedpa.client_update(sampler, fedpa.deltas.last_iterate())
        >>> algorithm = fedpa.fedopt(fedpa.Server(fedpa.server.sgd(1.0)), client)
        >>> algorithm.parameters(algorithm.init(jnp.zeros(2))).shape
        (2,)
    """
    check_server(server)
    clients = clients if isinstance(clients, Mapping) else {TRAINING: clients}
    if phase is None:
        if len(clients) != 1:
            raise refuse("phase", None, f"must say which of {', '.join(clients)} a round is of")
        (only,) = clients
        phase = lambda t: only  # noqa: E731

    def init(theta: Params) -> ServerState:
        state = server_update.init(server, theta)
        return state if shared is None else state._replace(shared=shared.init(theta))

    def broadcast(state: ServerState, t: RoundNumber) -> Broadcast:
        return Broadcast(state.theta, jnp.asarray(client_rate(t), jnp.float32), state.shared)

    def step(
        state: ServerState, aggregate: Aggregate, t: RoundNumber
    ) -> tuple[ServerState, ServerInfo]:
        delta = aggregate.mean if shared is None else aggregate.mean.delta
        new, info = server_update.update(server, state, delta, aggregate.weight, server.schedule(t))
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
        aggregation=server.aggregation,
        server=step,
        parameters=lambda state: server_update.parameters(server, state),
    )


def phase_after(burn_in_rounds: int) -> Callable[[int], str]:
    """round → phase: sampling from round `burn_in_rounds` on."""
    check_integer("burn_in_rounds", burn_in_rounds, 0)
    return lambda t: SAMPLING if t >= burn_in_rounds else BURN_IN
