"""Differential privacy for clients, around any method that averages (McMahan et al. 2018).

    client:  sends c_i u_i r_i,  c_i = min(1, C/‖r_i‖),  u_i = 1 or min(n_i, n_max)/n_max
    server:  r̄ ← (Σ_S c_i u_i r_i + zC ξ)/m,  ξ ~ N(0, I), in place of Σ q_i r_i / Σ q_i
             then what the method's server does with r̄

r_i is all that a method's client sends, as one vector: Δ_i, and a sketch of its precision as the
matrix that is added up. m is the number of clients that a round has, or has on average, never a sum
of what clients report. A rejected client counts as zero, and a round without clients adds noise,
too. `fedpa.privacy` has the pieces: `clipping`, `noise`, `cohorts` and `accounting`, which says
what ε the rounds give.

(McMahan, Ramage, Talwar, Zhang: Learning differentially private recurrent language models, ICLR
2018; Abadi et al.: Deep learning with differential privacy, CCS 2016.)
"""

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from fedpa.algorithms.centralized import centralized
from fedpa.algorithms.fedopt import (
    Algorithm,
    Broadcast,
    ClientResult,
    ClientState,
    ClientUpdate,
    Message,
    Sent,
    State,
)
from fedpa.algorithms.methods import Described, Method, describe
from fedpa.errors import FedpaError, check_integer, check_positive, refuse
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective
from fedpa.privacy.accounting import Accountant, Budget, Sampling, check_budget
from fedpa.privacy.clipping import (
    AdaptiveClip,
    adapt,
    bound_weight,
    check_clip,
    clip_factor,
    find_count_noise,
    joint_norm,
    scale_rest,
    split_noise,
)
from fedpa.privacy.noise import band_norm, correlate, make_bands, no_noises
from fedpa.privacy.release import Release
from fedpa.server.aggregation import Aggregate, Aggregation, Result, Weight, is_mean
from fedpa.server.schedules import Round as RoundNumber
from fedpa.types import Key, Params, Scalar


class PrivateState(NamedTuple):
    """What the server keeps."""

    inner: State
    """The server's state as the method has it."""
    clip: Scalar
    """C."""
    noises: tuple[PyTree, ...] = ()
    """The noises of the last rounds, the latest first, where noise is correlated."""


class PrivateMessage(NamedTuple):
    """What clients are sent."""

    inner: Message
    clip: Scalar


class Clipped(NamedTuple):
    """What a client sends, and its sum. The factor c_i u_i is the client's weight."""

    result: Result
    below: Scalar | tuple[()] = ()
    """½ where ‖r_i‖ ≤ C, else −½; with adaptive clipping alone."""


class Noised(NamedTuple):
    """What the server is given."""

    mean: Result
    below: Scalar | tuple[()]
    """b̃, the noised share of clients that are not clipped."""
    noise: PyTree
    """y_t, where noise is correlated."""
    sd: Scalar
    """The noise's standard deviation on what is sent besides Δ."""


SUMMED = 1e-5
"""Relative: by how much the norm of a sum may exceed the sum of the bounds from rounding."""


@describe
def private(
    method: Method,
    *,
    clip: float | AdaptiveClip,
    noise_multiplier: float,
    delta: float,
    sampling: Sampling = "poisson",
    accountant: Accountant = "pld",
    max_epsilon: float | None = None,
    weight_cap: float | None = None,
    extra_scale: float = 1.0,
    bands: int = 1,
    force: bool = False,
) -> Method:
    """Make a method differentially private at the level of clients.

    Records have `privacy/epsilon`, the ε after each round. A method is refused if it sends
    something before it is clipped (MIME), keeps a state for each client (SCAFFOLD, EP, PVI), or
    does not average clients' results.

    Args:
        method: The method, `fedpa.fedavg(…)`. Its clients' weights are replaced by u_i.
        clip: C > 0, the largest norm of a client's result; or `fedpa.privacy.AdaptiveClip`.
        noise_multiplier: z > 0: the noise on the sum has standard deviation zC.
        delta: δ in (0, 1), below 1/clients.
        sampling: How the clients of a round are drawn. "poisson": each by itself,
            `clients_per_round` on average; "fixed": that many, without amplification by sampling;
            "cyclic": in turns. Default: "poisson".
        accountant: How rounds are composed: "pld" (default) or "rdp", faster and less tight.
        max_epsilon: ε > 0; the run ends before the round that would exceed it. Default: none.
        weight_cap: n_max > 0: clients weigh min(n_i, n_max)/n_max. Default: all weigh the same.
        extra_scale: s > 0, by which all that is sent besides Δ is multiplied where ‖r_i‖ is
            computed. Default: 1.
        bands: b ≥ 1 of DP-FTRL's correlated noise; "cyclic" alone. Default: 1, fresh noise.
        force: Accept a δ of 1/clients or more. Default: False.
    Returns:
        The method, for `fedpa.fit`.
    Raises:
        FedpaError: A setting is out of range, or the method can't be made private.
    Example:
        >>> import fedpa, numpy as np
        >>> clients = {str(k): {"x": np.eye(4, 2), "y": np.ones(4)} for k in range(100)}
        >>> averaging = fedpa.fedavg(fedpa.LocalTraining(0.1, 4), fedpa.Server(optax.sgd(1.0)))
        >>> method = fedpa.private(averaging, clip=0.1, noise_multiplier=1.0, delta=1e-3)
        >>> result = fedpa.fit(fedpa.objectives.least_squares.loss, np.zeros(2), clients, method,
        ...                    rounds=3, clients_per_round=10, progress=False)
        >>> [round(record["privacy/epsilon"], 2) for record in result.history]
        [0.65, 0.84, 0.98]
    """
    budget = Budget(noise_multiplier, delta, sampling, accountant, max_epsilon, force)
    check_budget(budget)
    check_clip(clip, noise_multiplier)
    check_positive("extra_scale", extra_scale)
    if weight_cap is not None:
        check_positive("weight_cap", weight_cap)
    check_integer("bands", bands, 1)
    if bands > 1 and sampling != "cyclic":
        raise refuse("bands", bands, "needs sampling cyclic: clients must take turns")
    if bands > 1 and isinstance(clip, AdaptiveClip):
        raise refuse("bands", bands, "needs a fixed clip: counts have no correlated noise")
    _check_described(method)
    coefficients = make_bands(bands)

    def build(objective: Objective) -> Algorithm:
        inner = method(objective) if callable(method) else None
        _check_algorithm(inner, method)
        assert inner is not None

        def init(theta: Params) -> PrivateState:
            state = inner.init(theta)
            _check_state(inner, method, state, theta)
            start = clip.start if isinstance(clip, AdaptiveClip) else clip
            like = _shape_of_sum(inner, objective, state, theta, bands) if bands > 1 else ()
            noises = no_noises(like, coefficients)
            return PrivateState(state, jnp.asarray(start, jnp.float32), noises)

        def broadcast(state: PrivateState, t: RoundNumber) -> PrivateMessage:
            return PrivateMessage(inner.broadcast(state.inner, t), state.clip)

        def make_noise(
            state: PrivateState, aggregate: Aggregate, normals: Clipped, cohort: float
        ) -> Aggregate:
            """(Σ_S c_i u_i r_i + zC ‖c‖ y_t)/m."""
            z, total = noise_multiplier, aggregate.mean
            below: Any = ()
            if isinstance(clip, AdaptiveClip):
                count_noise = find_count_noise(clip, z, cohort)
                noised: Any = jax.tree.map(
                    lambda s, y: s + count_noise * y, total.below, normals.below
                )
                below = noised / cohort + 0.5
                z = split_noise(z, count_noise)
            noise = correlate(normals.result, state.noises, coefficients)
            sd = z * band_norm(coefficients) * state.clip
            shared = _scale(noise, 1 / extra_scale)
            mean = jax.tree.map(
                lambda s, y: ((s + sd.astype(s.dtype) * y) / cohort).astype(s.dtype),
                total.result,
                shared,
            )
            kept = noise if bands > 1 else ()
            rest = sd / (cohort * extra_scale)
            return Aggregate(Noised(mean, below, kept, rest), jnp.asarray(cohort, jnp.float32))

        def is_possible(message: PrivateMessage, total: Aggregate, number: int) -> Bool[Array, ""]:
            norm = joint_norm(_scale(total.mean.result, extra_scale))
            counts = [jnp.abs(x) <= 0.5 * number for x in jax.tree.leaves(total.mean.below)]
            bound = number * (1 + SUMMED) * message.clip
            return functools.reduce(jnp.logical_and, counts, norm <= bound)

        def server(
            state: PrivateState, aggregate: Aggregate, t: RoundNumber
        ) -> tuple[PrivateState, Any]:
            noised: Noised = aggregate.mean
            mean = inner.repair(noised.mean, noised.sd)
            new, info = inner.server(state.inner, Aggregate(mean, aggregate.weight), t)
            after = state.clip
            if isinstance(clip, AdaptiveClip):
                after = adapt(after, noised.below, clip)  # type: ignore[arg-type]
            noises = (noised.noise, *state.noises)[: bands - 1]
            return PrivateState(new, after, noises), info

        clients = {
            name: _clip_client(
                client, inner.aggregation, isinstance(clip, AdaptiveClip), weight_cap, extra_scale
            )
            for name, client in inner.clients.items()
        }
        return Algorithm(
            init=init,
            phase=inner.phase,
            broadcast=broadcast,
            clients=clients,
            client_init=inner.client_init,
            aggregation=_sum_clipped(inner.aggregation),
            server=server,
            parameters=lambda state: inner.parameters(state.inner),
            reading=inner.reading,
            release=Release(budget, make_noise, is_possible),
        )

    return build


def _clip_client(
    client: ClientUpdate,
    aggregation: Aggregation,
    counts: bool,
    weight_cap: float | None,
    extra_scale: float,
) -> ClientUpdate:
    """The client whose weight is c_i u_i."""

    def clipped(
        message: PrivateMessage, data: ClientData, state: ClientState, key: Key
    ) -> ClientResult:
        out = client(message.inner, data, state, key)
        norm = joint_norm(_scale(sum_of_one(aggregation, out.result), extra_scale))
        weight = clip_factor(norm, message.clip) * bound_weight(data.n, weight_cap)
        is_below = norm <= message.clip
        below = jnp.where(is_below, 0.5, -0.5) if counts else ()
        info = _extend_info(out.info, ~is_below)
        return ClientResult(Clipped(out.result, below), weight, out.state, info)

    return clipped


def sum_of_one(aggregation: Aggregation, result: Result) -> Result:
    """r_i, as it is added up: what the sum is of this client alone, with weight 1."""
    one = jnp.ones(())
    total, _ = aggregation.add(aggregation.init(result, one), result, one)
    mean: Result = total.mean
    return mean


def _sum_clipped(inner: Aggregation) -> Aggregation:
    """Σ c_i u_i r_i, which nothing is divided by, and Σ (b_i − ½)."""

    def init(result: Clipped, weight: Weight) -> Aggregate:
        total = inner.init(result.result, weight)
        below = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result.below)
        return Aggregate(Clipped(total.mean, below), total.weight)

    def add(total: Aggregate, result: Clipped, weight: Weight) -> tuple[Aggregate, Bool[Array, ""]]:
        before = Aggregate(total.mean.result, total.weight)
        sums, accepted = inner.add(before, result.result, weight)
        counted = accepted & (weight > 0)
        below = jax.tree.map(
            lambda s, b: s + jnp.where(counted, b, 0).astype(s.dtype),
            total.mean.below,
            result.below,
        )
        return Aggregate(Clipped(sums.mean, below), sums.weight), accepted

    return Aggregation(init, add, inner.merge, lambda total: total)


def _scale(result: Result, factor: float) -> Result:
    """The result, all but Δ of it multiplied by a constant."""
    if not isinstance(result, Sent):
        return result
    return result._replace(more=scale_rest(result.more, factor))


@functools.cache
def _info_type(fields: tuple[str, ...]) -> Any:
    return namedtuple("PrivateInfo", fields)


def _extend_info(info: Any, clipped: Bool[Array, ""]) -> Any:
    """A client's info, and whether it was clipped."""
    known = info._asdict() if hasattr(info, "_asdict") else {}
    return _info_type((*known, "clipped"))(*known.values(), clipped.astype(jnp.float32))


# Refusals.


def _name(method: Any) -> str:
    return method.name if isinstance(method, Described) else getattr(method, "__qualname__", "own")


def _refuse(method: Any, why: str) -> FedpaError:
    return refuse("method", _name(method), f"can't be made private: {why}")


def _check_described(method: Any) -> None:
    """Refuse what a method's settings say, before it is built."""
    if not isinstance(method, Described):
        return
    if method.lacks_population or method.arguments.get("population") is not None:
        raise _refuse(method, KEEPS_STATE)
    if method.builder is centralized:
        raise _refuse(method, "it pools clients' examples, so no result is of one client")


KEEPS_STATE = (
    "it keeps a state for each client, and what the server keeps follows from all of them before "
    "anything is clipped"
)


def _check_algorithm(inner: Any, method: Any) -> None:
    """Refuse an algorithm that sends what is not clipped, or whose server needs more than means."""
    if not isinstance(inner, Algorithm):
        raise refuse("method", method, "must be a method, as fedpa.fedavg(…) gives")
    if inner.release is not None:
        raise refuse("method", _name(method), "is private already")
    if inner.inquiry is not None:
        raise _refuse(
            method,
            "its clients send gradients before the round (an inquiry), which are not clipped",
        )
    if inner.switch is not None:
        raise refuse(
            "burn_in_rounds",
            "auto",
            "the plateau is that of a training metric without noise: give a number of rounds",
        )
    if not is_mean(inner.aggregation):
        raise refuse(
            "aggregation",
            inner.aggregation,
            f"{_name(method)} does not average: only sums of clipped results have a known "
            "sensitivity. Use fedpa.server.weighted_mean()",
        )


def _check_state(inner: Algorithm, method: Any, state: State, theta: Params) -> None:
    """Refuse an algorithm whose clients keep states, or that is not of `fedopt`'s form."""
    if jax.tree.leaves(jax.eval_shape(inner.client_init, theta)):
        raise _refuse(method, KEEPS_STATE)
    message = jax.eval_shape(inner.broadcast, state, jnp.asarray(0))
    if not isinstance(message, Broadcast):
        raise _refuse(
            method, "its server adds up natural parameters over examples, and does not average"
        )


def _shape_of_sum(
    inner: Algorithm, objective: Objective, state: State, theta: Params, bands: int
) -> PyTree:
    """The shapes of what is added up, for noise that is kept from round to round."""
    if objective.like is None:
        raise FedpaError(
            f"bands = {bands}: must know what examples look like: "
            "fedpa.Objective(loss, like=examples); fedpa.fit does it by itself"
        )

    def one(client: ClientUpdate, state: State, examples: Any) -> PyTree:
        data = ClientData(examples, jnp.asarray(1, jnp.int32))
        message = inner.broadcast(state, jnp.asarray(0))
        out = client(message, data, inner.client_init(theta), jax.random.key(0))
        return sum_of_one(inner.aggregation, out.result)

    like = jax.tree.map(lambda x: jnp.asarray(x[:1]), objective.like)
    shapes, *others = [
        jax.eval_shape(functools.partial(one, client), state, like)
        for client in inner.clients.values()
    ]
    if any(other != shapes for other in others):
        raise refuse(
            "bands",
            bands,
            "clients of this method send more in some rounds than in others; one band fits",
        )
    kept: PyTree = shapes
    return kept
