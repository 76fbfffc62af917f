"""Global precision: the other half of eq. 3, its denominator, at the server.

    μ = θ − (Σ q_i Σ_i⁻¹)⁻¹ Σ q_i Σ_i⁻¹ (θ − μ_i)

FedPA's clients estimate the terms of the numerator and leave the denominator to the server's
learning rate. Here, in the first few rounds, when the rounds have doubled, and later every so many
rounds, clients also send a sketch of their precision, the input factor A_i of each layer's Fisher
matrix, from one pass over their examples at θ (`fedpa.precisions.kronecker`); of a layer whose
inputs are the data, which training does not change, only in the first rounds. For each layer, Δ̄ its
averaged delta stacked as [b; W], the server keeps a running average and divides by it:

    A ← β^k A + (1 − β^k) Σ q_i A_i / Σ q_i     A_i = Z_i Z_iᵀ, or exactly X_iᵀX_i/n_i
    Ā = A p/Σ_j A_jj                            j the p inputs, without the bias's 1
    D = ε (Ā + εI)⁻¹ Δ̄                          "ridge", or
    D = (I + κĀ)((1 + ε)κĀ + εI)⁻¹ Δ̄            "saturating"

with k the rounds since the last sketch. Δ_i is what any method's clients send. With the ridge,
directions that inputs don't reach keep gain 1 and steep ones shrink; ε is in units of the inputs'
mean square, 1 in Ā. The saturating filter undoes local training, which goes the share x/(1 + x) of
the way to the client's optimum, x = κλ in a direction of eigenvalue λ: steep directions, where
clients arrive, have gain 1/(1 + ε), flat ones 1/ε. Large layers have a block-diagonal A. What
belongs to no layer that is seen keeps gain 1.

The length of the step, unless the server's rate is to say it, is that of the clients' own:

    D ← ρ √(Σ q_i ‖Δ_i‖² / Σ q_i) D / ‖D‖

and D goes to the server optimizer in Δ̄'s place.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from fedpa.algorithms.client import cosine
from fedpa.algorithms.fedopt import (
    WITH,
    Algorithm,
    Broadcast,
    ClientResult,
    ClientState,
    ClientUpdate,
    Sent,
    State,
)
from fedpa.algorithms.methods import Method, describe
from fedpa.errors import FedpaError, check_integer, check_type, refuse
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.layer_inputs import (
    Layer,
    data_layers,
    layers_of,
    stack_layer,
    unstack_layer,
)
from fedpa.objectives.objective import Objective
from fedpa.precision import accumulation_dtype, narrow, widen
from fedpa.precisions import kronecker
from fedpa.precisions.kronecker import (
    Cholesky,
    Factor,
    Kronecker,
    Rank,
    cut_layer,
    input_factors,
)
from fedpa.server.aggregation import (
    Aggregate,
    Aggregation,
    Result,
    Weight,
    all_finite,
    is_mean,
)
from fedpa.types import Count, Key, Params, Scalar

START = 3
EVERY = 20
DECAY = 0.95
LENGTH = 1.4
BLOCK = 2048
WITH_PRECISION = f"{WITH}precision"
WITH_DEEPER = f"{WITH}precision of deeper layers"
"""Phases in which clients send a sketch are named after those in which they don't."""

Filter = Literal["ridge", "saturating"]
EPSILON: Mapping[Filter, float] = {"ridge": 5.0, "saturating": 0.03}
KAPPA = 0.05


class LayerPrecision(NamedTuple):
    """The server's estimate of a layer's precision."""

    averaged: Kronecker
    """A."""
    factor: Cholesky
    """Of the matrix that Δ̄ is divided by: computed when A changes, kept for the rounds between."""
    steepest: Scalar
    """Ā's largest eigenvalue, about."""


class Gain(NamedTuple):
    """D = a Δ̄ + b (I + cĀ)⁻¹ Δ̄: both filters are of this form."""

    direct: float
    """a."""
    divided: float
    """b."""
    steepness: float
    """c."""


def make_gain(filter: Filter, epsilon: float, kappa: float) -> Gain:
    """The filter's constants.

    (1 + κλ)/((1 + ε)κλ + ε) is (1 + 1/m)/(1 + ε) with m = (1 + ε)κλ + ε.
    """
    if filter == "ridge":
        return Gain(0.0, 1.0, 1 / epsilon)
    return Gain(1 / (1 + epsilon), 1 / (epsilon * (1 + epsilon)), kappa * (1 + epsilon) / epsilon)


class PrecisionState(NamedTuple):
    numerator: State
    """The server's state as the numerator's method has it."""
    precision: tuple[LayerPrecision, ...]
    sketched: Count
    """The last round in which clients sent sketches."""


class PrecisionInfo(NamedTuple):
    skipped: Bool[Array, ""]
    """See `ServerInfo`."""
    precision_ratio: Scalar
    """‖D‖/‖Δ̄‖ as D goes to the optimizer."""
    precision_cosine: Scalar
    """Cosine of the angle between D and Δ̄."""
    precision_steepest: Scalar
    """The largest eigenvalue of any layer's Ā."""


@describe
def global_precision(
    numerator: Method,
    *,
    start: int = START,
    every: int = EVERY,
    filter: Filter = "ridge",
    epsilon: float | None = None,
    kappa: float | None = None,
    length: float | None = LENGTH,
    decay: float = DECAY,
    block: int = BLOCK,
    rank: Rank = None,
    batch_size: int = 32,
) -> Method:
    """Build global precision: what `numerator` averages, divided by the precision (eq. 3).

    Args:
        numerator: The method whose averaged delta is divided, say FedAvg.
        start: Clients send sketches of all layers in rounds 0, …, start − 1; default 3.
        every: k, default 20. After the start, of layers whose inputs are not the data themselves,
            they send sketches in rounds 2^j < k and in rounds k, 2k, …
        filter: "ridge" or "saturating", which gains directions have; see the file's head.
        epsilon: ε > 0. Of the ridge, default 5: directions of Ā far below it keep gain 1. Of the
            saturating filter, default 0.03: 1/ε is the gain of flat directions.
        kappa: κ > 0 of the saturating filter, by default 0.05: how far local training goes in a
            direction of Ā's eigenvalue 1.
        length: ρ > 0, the length of D relative to the clients' own Δ_i, for a server of rate 1;
            None: D as the filter gives it, and the server's rate decides.
        decay: β in [0, 1), by which A is multiplied for every round between sketches.
        block: A of a layer with more inputs is block-diagonal, in blocks of at most this size; 1 is
            the diagonal.
        rank: s, the columns of a sketch, at most a layer's outputs, the default; "exact" sends the
            full matrix A_i, whatever its size.
        batch_size: Examples that a client looks at at a time; changes no expected value.
    Returns:
        The method, for `fedpa.fit`.
    Example:
        >>> import fedpa
        >>> local = fedpa.LocalTraining(0.1, batch_size=10, epochs=5)
        >>> averaging = fedpa.fedavg(local, fedpa.Server(fedpa.server.sgd(1.0)))
        >>> method = fedpa.global_precision(averaging)
    """
    check_integer("batch_size", batch_size, 1)
    check_settings(start, every, filter, epsilon, kappa, length, decay, block, rank)
    gain = make_gain(filter, epsilon or EPSILON[filter], kappa or KAPPA)

    def build(objective: Objective) -> Algorithm:
        inner = numerator(objective) if callable(numerator) else None
        if not isinstance(inner, Algorithm):
            raise refuse("numerator", numerator, "must be a method, as fedpa.fedavg(…) gives")
        if inner.inquiry is not None:
            raise refuse(
                "numerator",
                numerator,
                "makes an inquiry before a round, which is not supported here",
            )

        if inner.switch is not None:
            raise refuse(
                "numerator",
                numerator,
                "switches at a plateau: put switch_at_plateau around global_precision instead",
            )

        if not is_mean(inner.aggregation):
            raise refuse(
                "aggregation",
                inner.aggregation,
                "must be fedpa.server.weighted_mean() here: only a mean of clients' precisions is "
                "one",
            )

        def all_factors(message: Broadcast, data: ClientData, key: Key) -> tuple[Factor, ...]:
            return input_factors(
                objective,
                message.theta,
                data,
                jax.random.fold_in(key, _SKETCH),
                batch_size=batch_size,
                rank=rank,
                largest=block,
            )

        def deeper_factors(message: Broadcast, data: ClientData, key: Key) -> tuple[Any, ...]:
            of_data = data_layers(objective.loss, message.theta, data.examples)
            factors = all_factors(message, data, key)
            return tuple(() if known else one for known, one in zip(of_data, factors, strict=True))

        def theta_of(state: State) -> Params:
            message = inner.broadcast(state, 0)
            check_type("numerator's message", message, Broadcast, "that of fedpa.fedavg(…)")
            if jax.tree.leaves(message.shared):
                raise refuse(
                    "numerator", numerator, "keeps more state than θ, which is not supported here"
                )
            return message.theta

        def layers(state: State) -> tuple[Layer, ...]:
            if objective.like is None:
                raise FedpaError(
                    "global_precision must know what examples look like to find the model's "
                    "layers: fedpa.Objective(loss, like=examples); fedpa.fit does it by itself"
                )
            return layers_of(objective.loss, theta_of(state), objective.like)

        def init(theta: Params) -> PrecisionState:
            state = inner.init(theta)
            precision = init_precision(layers(state), theta, block)
            return PrecisionState(state, precision, jnp.zeros((), jnp.int32))

        def phase(t: int) -> str:
            if t < start:
                return inner.phase(t) + WITH_PRECISION
            doubled = t < every and t.bit_count() == 1
            return inner.phase(t) + (WITH_DEEPER if doubled or t % every == 0 else "")

        def server(
            state: PrecisionState, aggregate: Aggregate, t: Any
        ) -> tuple[PrecisionState, PrecisionInfo]:
            seen, precision = layers(state.numerator), state.precision
            mean, (fresh, square) = aggregate.mean
            _check_delta(mean, theta_of(state.numerator))
            if fresh:
                passed = jnp.maximum(t - state.sketched, 1).astype(jnp.float32)
                precision = update_precision(
                    precision, seen, fresh, aggregate.weight, decay=decay**passed, gain=gain
                )
            step = precondition(precision, seen, mean, gain)
            if length is not None:
                norm = optax.tree.norm(step)
                # With noise the mean of squares may be negative.
                scale = length * jnp.sqrt(jnp.maximum(square, 0)) / jnp.where(norm > 0, norm, 1)
                step = jax.tree.map(lambda d: (scale * d).astype(d.dtype), step)
            after, info = inner.server(state.numerator, Aggregate(step, aggregate.weight), t)
            norm, plain = optax.tree.norm(step), optax.tree.norm(mean)
            sketched = jnp.asarray(t, jnp.int32) if fresh else state.sketched
            return PrecisionState(after, precision, sketched), PrecisionInfo(
                info.skipped,
                jnp.where(plain > 0, norm / jnp.where(plain > 0, plain, 1), 1),
                cosine(step, mean),
                jnp.max(jnp.stack([layer.steepest for layer in precision])),
            )

        clients = {}
        for name, client in inner.clients.items():
            sends_square = length is not None
            clients[name] = _send_with(client, lambda *_: (), sends_square)
            clients[name + WITH_PRECISION] = _send_with(client, all_factors, sends_square)
            clients[name + WITH_DEEPER] = _send_with(client, deeper_factors, sends_square)
        return Algorithm(
            init=init,
            phase=phase,
            broadcast=lambda state, t: inner.broadcast(state.numerator, t),
            clients=clients,
            client_init=inner.client_init,
            aggregation=unpack_factors(inner.aggregation, block),
            server=server,
            parameters=lambda state: inner.parameters(state.numerator),
            repair=repair_factors,
        )

    return build


_SKETCH = 1001
"""The stream of a client's randomness that sketches are drawn from; chains use others."""


def _send_with(client: ClientUpdate, factors: Any, sends_square: bool) -> ClientUpdate:
    """The client's result, its sketch of the precision, and ‖Δ‖² if the step's length needs it."""

    def whole(message: Any, data: ClientData, state: ClientState, key: Key) -> ClientResult:
        out = client(message, data, state, key)
        square = optax.tree.norm(widen(out.result), squared=True) if sends_square else ()
        return out._replace(result=Sent(out.result, (factors(message, data, key), square)))

    return whole


def init_precision(
    layers: Sequence[Layer], theta: Params, largest: int
) -> tuple[LayerPrecision, ...]:
    """A = 0: every direction has gain 1."""
    dtype = accumulation_dtype(jnp.result_type(*jax.tree.leaves(theta)))
    zeros = [kronecker.zeros(cut_layer(layer, largest), dtype) for layer in layers]
    return tuple(
        LayerPrecision(zero, Cholesky(zero.add_identity().blocks), jnp.zeros((), dtype))
        for zero in zeros
    )


def update_precision(
    precision: tuple[LayerPrecision, ...],
    layers: Sequence[Layer],
    fresh: Sequence[Kronecker | tuple[()]],
    weight: Scalar,
    *,
    decay: float | Scalar,
    gain: Gain,
) -> tuple[LayerPrecision, ...]:
    """A and its factors after a round whose clients sent what they see; unchanged if none did."""

    def update(old: LayerPrecision, new: Kronecker | tuple[()], layer: Layer) -> LayerPrecision:
        if not isinstance(new, Kronecker):
            return old
        kept = old.averaged.scale(decay)
        averaged = kept.add(narrow(new, kept).scale(1 - decay))
        bar = averaged.normalize(layer)
        factor = bar.scale(gain.steepness).add_identity().factorize()
        return LayerPrecision(averaged, factor, bar.largest_eigenvalue())

    new = tuple(map(update, precision, fresh, layers))
    ok = all_finite(new) & (weight > 0)
    kept: tuple[LayerPrecision, ...]
    kept = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, precision)
    return kept


def precondition(
    precision: Sequence[LayerPrecision], layers: Sequence[Layer], delta: Params, gain: Gain
) -> Params:
    """D, from Δ̄; the gain is 1 before the first sketch."""
    for layer, known in zip(layers, precision, strict=True):
        plain = stack_layer(layer, delta)
        step = gain.direct * plain + gain.divided * known.factor.solve(plain)
        delta = unstack_layer(layer, jnp.where(known.steepest > 0, step, plain), delta)
    return delta


def unpack_factors(aggregation: Aggregation, largest: int) -> Aggregation:
    """The aggregation of deltas and matrices A_i: sketches become Z_i Z_iᵀ as they are added.

    A client whose sketch is not finite is rejected with its delta.
    """

    def unpack(result: Sent) -> Sent:
        factors, square = result.more
        blocks = tuple(kronecker.unpack(one, largest) if one else () for one in factors)
        return result._replace(more=(blocks, square))

    def init(result: Result, weight: Weight) -> Any:
        return aggregation.init(jax.eval_shape(unpack, result), weight)

    def add(total: Any, result: Result, weight: Weight) -> tuple[Any, Bool[Array, ""]]:
        return aggregation.add(total, unpack(result), weight)

    return aggregation._replace(init=init, add=add)


def repair_factors(mean: Sent, sd: Scalar) -> Sent:
    """Matrices A that are symmetric and positive semidefinite, which noise leaves neither."""
    factors, square = mean.more
    cleaned = tuple(one.denoise(sd) if one else () for one in factors)
    return mean._replace(more=(cleaned, square))


def _check_delta(mean: Any, theta: Params) -> None:
    averaged, wanted = ([jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in (mean, theta))
    if averaged != wanted:
        raise FedpaError(
            "global_precision's numerator averages more than deltas: only what has the shape of "
            "the parameters can be divided by their precision"
        )


def check_settings(
    start: Any = START,
    every: Any = EVERY,
    filter: Any = "ridge",
    epsilon: Any = None,
    kappa: Any = None,
    length: Any = None,
    decay: Any = DECAY,
    block: Any = BLOCK,
    rank: Rank = None,
    prefix: str = "",
) -> None:
    for name, whole in (("start", start), ("every", every), ("block", block)):
        check_integer(f"{prefix}{name}", whole, 1)
    if rank != "exact" and rank is not None:
        check_integer(f"{prefix}rank", rank, 1)
    if filter not in get_args(Filter):
        raise refuse(f"{prefix}filter", filter, f"must be {' or '.join(get_args(Filter))}")
    if kappa is not None and filter != "saturating":
        raise refuse(f"{prefix}kappa", kappa, "belongs to the filter saturating; leave it out")
    for name, number in (("epsilon", epsilon), ("kappa", kappa), ("length", length)):
        if number is not None and not (math.isfinite(number) and number > 0):
            raise refuse(f"{prefix}{name}", number, "must be a finite number > 0")
    if not 0 <= decay < 1:
        raise refuse(f"{prefix}decay", decay, "must be in [0, 1)")
