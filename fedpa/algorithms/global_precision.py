"""Global precision: the other half of eq. 3, its denominator, at the server.

    μ = θ − (Σ q_i Σ_i⁻¹)⁻¹ Σ q_i Σ_i⁻¹ (θ − μ_i)

FedPA's clients estimate the terms of the numerator and leave the denominator to the server's
learning rate. Here every k-th round clients also send a sketch of their precision, the input
factor A_i of each layer's Fisher matrix, from one pass over their examples at θ
(`fedpa.precisions.kronecker`). For each layer, Δ̄ its averaged delta stacked as [b; W], the
server keeps a running average and divides by it:

    A ← βA + (1 − β) Σ q_i A_i / Σ q_i          A_i = Z_i Z_iᵀ, or exactly X_iᵀX_i/n_i
    Ā = A (p + 1)/tr A
    D = ε (Ā + εI)⁻¹ Δ̄

and D goes to the server optimizer in Δ̄'s place. Δ_i is what any method's clients send. Directions
that inputs don't reach keep gain 1, steep ones shrink; ε is in units of Ā's mean eigenvalue, 1.
Large layers have a block-diagonal A. What belongs to no layer that is seen keeps gain 1.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
from fedpa.objectives.layer_inputs import Layer, layers_of, stack_layer, unstack_layer
from fedpa.objectives.objective import Objective
from fedpa.precision import accumulation_dtype, narrow
from fedpa.precisions import kronecker
from fedpa.precisions.kronecker import (
    Cholesky,
    Factor,
    Kronecker,
    Rank,
    cut_layer,
    input_factors,
)
from fedpa.server.aggregation import Aggregate, Aggregation, Result, Weight, all_finite
from fedpa.types import Key, Params, Scalar

EVERY = 5
EPSILON = 5.0
BLOCK = 2048
MEMORY = 0.95
"""β of a round: what is remembered for k rounds is multiplied by β^k."""
WITH_PRECISION = f"{WITH}precision"
"""Phases in which clients send a sketch are named after those in which they don't."""


class LayerPrecision(NamedTuple):
    """The server's estimate of a layer's precision."""

    averaged: Kronecker
    """A."""
    factor: Cholesky
    """Of Ā/ε + I: computed when A changes and kept for the rounds between."""
    steepest: Scalar
    """Ā's largest eigenvalue, about; the mean is 1."""


class PrecisionState(NamedTuple):
    numerator: State
    """The server's state as the numerator's method has it."""
    precision: tuple[LayerPrecision, ...]


class PrecisionInfo(NamedTuple):
    skipped: Bool[Array, ""]
    """See `ServerInfo`."""
    precision_ratio: Scalar
    """‖D‖/‖Δ̄‖: how much the steep directions took of the step."""
    precision_cosine: Scalar
    """Cosine of the angle between D and Δ̄."""
    precision_steepest: Scalar
    """The largest eigenvalue of any layer's Ā, whose mean is 1."""


@describe
def global_precision(
    numerator: Method,
    *,
    every: int = EVERY,
    epsilon: float = EPSILON,
    decay: float | None = None,
    block: int = BLOCK,
    rank: Rank = None,
    batch_size: int = 32,
) -> Method:
    """Build global precision: what `numerator` averages, times ε(Ā + εI)⁻¹ (eq. 3's denominator).

    Args:
        numerator: The method whose averaged delta is preconditioned, say FedAvg.
        every: k; clients send sketches in rounds 0, k, 2k, …
        epsilon: ε > 0. Directions of Ā far below it keep gain 1; large, it does nothing.
        decay: β, by which A is multiplied when sketches come; default: 0.95^k.
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
        >>> averaging = fedpa.fedavg(local, fedpa.Server(fedpa.server.sgd(3.0)))
        >>> method = fedpa.global_precision(averaging, epsilon=5.0)
    """
    check_integer("batch_size", batch_size, 1)
    check_settings(every, epsilon, decay, block, rank)
    beta = MEMORY**every if decay is None else decay

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

        def factors(message: Broadcast, data: ClientData, key: Key) -> tuple[Factor, ...]:
            return input_factors(
                objective,
                message.theta,
                data,
                jax.random.fold_in(key, _SKETCH),
                batch_size=batch_size,
                rank=rank,
                largest=block,
            )

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
            return PrecisionState(state, init_precision(layers(state), theta, block))

        def server(
            state: PrecisionState, aggregate: Aggregate, t: Any
        ) -> tuple[PrecisionState, PrecisionInfo]:
            seen, precision = layers(state.numerator), state.precision
            mean, fresh = aggregate.mean
            _check_delta(mean, theta_of(state.numerator))
            if fresh:
                precision = update_precision(
                    precision, seen, fresh, aggregate.weight, decay=beta, epsilon=epsilon
                )
            step = precondition(precision, seen, mean)
            after, info = inner.server(state.numerator, Aggregate(step, aggregate.weight), t)
            norm, plain = optax.tree.norm(step), optax.tree.norm(mean)
            return PrecisionState(after, precision), PrecisionInfo(
                info.skipped,
                jnp.where(plain > 0, norm / jnp.where(plain > 0, plain, 1), 1),
                cosine(step, mean),
                jnp.max(jnp.stack([layer.steepest for layer in precision])),
            )

        clients = {
            name: _send_with(client, lambda *_: ()) for name, client in inner.clients.items()
        }
        for name, client in inner.clients.items():
            clients[name + WITH_PRECISION] = _send_with(client, factors)
        return Algorithm(
            init=init,
            phase=lambda t: inner.phase(t) + ("" if t % every else WITH_PRECISION),
            broadcast=lambda state, t: inner.broadcast(state.numerator, t),
            clients=clients,
            client_init=inner.client_init,
            aggregation=unpack_factors(inner.aggregation, block),
            server=server,
            parameters=lambda state: inner.parameters(state.numerator),
        )

    return build


_SKETCH = 1001
"""The stream of a client's randomness that sketches are drawn from; chains use others."""


def _send_with(client: ClientUpdate, factors: Any) -> ClientUpdate:
    """The client's result, and its sketch of the precision."""

    def whole(message: Any, data: ClientData, state: ClientState, key: Key) -> ClientResult:
        out = client(message, data, state, key)
        return out._replace(result=Sent(out.result, factors(message, data, key)))

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
    fresh: Sequence[Kronecker],
    weight: Scalar,
    *,
    decay: float,
    epsilon: float,
) -> tuple[LayerPrecision, ...]:
    """A and its factors after a round whose clients sent what they see; unchanged if none did."""

    def update(old: LayerPrecision, new: Kronecker, layer: Layer) -> LayerPrecision:
        kept = old.averaged.scale(decay)
        averaged = kept.add(narrow(new, kept).scale(1 - decay))
        bar = averaged.normalize(layer.features)
        factor = Kronecker(bar.blocks / epsilon).add_identity().factorize()
        return LayerPrecision(averaged, factor, bar.largest_eigenvalue())

    new = tuple(map(update, precision, fresh, layers))
    ok = all_finite(new) & (weight > 0)
    kept: tuple[LayerPrecision, ...]
    kept = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, precision)
    return kept


def precondition(
    precision: Sequence[LayerPrecision], layers: Sequence[Layer], delta: Params
) -> Params:
    """D, from Δ̄."""
    for layer, known in zip(layers, precision, strict=True):
        divided = known.factor.solve(stack_layer(layer, delta))
        delta = unstack_layer(layer, divided, delta)
    return delta


def unpack_factors(aggregation: Aggregation, largest: int) -> Aggregation:
    """The aggregation of deltas and matrices A_i: sketches become Z_i Z_iᵀ as they are added.

    A client whose sketch is not finite is rejected with its delta.
    """

    def unpack(result: Sent) -> Sent:
        return result._replace(
            more=tuple(kronecker.unpack(factor, largest) for factor in result.more)
        )

    def init(result: Result, weight: Weight) -> Any:
        return aggregation.init(jax.eval_shape(unpack, result), weight)

    def add(total: Any, result: Result, weight: Weight) -> tuple[Any, Bool[Array, ""]]:
        return aggregation.add(total, unpack(result), weight)

    return aggregation._replace(init=init, add=add)


def _check_delta(mean: Any, theta: Params) -> None:
    averaged, wanted = ([jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in (mean, theta))
    if averaged != wanted:
        raise FedpaError(
            "global_precision's numerator averages more than deltas: only what has the shape of "
            "the parameters can be divided by their precision"
        )


def check_settings(
    every: Any = EVERY,
    epsilon: Any = EPSILON,
    decay: Any = None,
    block: Any = BLOCK,
    rank: Rank = None,
    prefix: str = "",
) -> None:
    check_integer(f"{prefix}every", every, 1)
    check_integer(f"{prefix}block", block, 1)
    if rank != "exact" and rank is not None:
        check_integer(f"{prefix}rank", rank, 1)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise refuse(f"{prefix}epsilon", epsilon, "must be a finite number > 0")
    if decay is not None and not 0 <= decay < 1:
        raise refuse(f"{prefix}decay", decay, "must be in [0, 1)")
