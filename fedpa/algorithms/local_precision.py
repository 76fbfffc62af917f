"""Local precision: FedAvg whose clients divide their gradients by their own precision.

    θ ← ClientOpt(θ, (I + Ā_i/ε)⁻¹ ∇̂f_i(θ))     Ā_i = A_i p/Σ_j A_i,jj,  A_i = X_iᵀX_i/n_i

for each layer, X_i its inputs at θ₀ with a column of ones, the gradient stacked as [b; W]. A_i is
the input factor of the layer's Fisher matrix, as in `global_precision`, which divides the averaged
deltas instead. This is the local half of FedPM (Ishii et al., AAAI 2026), with the preconditioner
of FOOF (Benzing, ICML 2022); `global_precision(local_precision(…))` has both halves. In eq. 3 it
changes neither client's nor server's precision: it is another way to the client's optimum μ_i.
"""

import jax
import jax.numpy as jnp
import optax

from fedpa.algorithms.fedavg import fedavg_client
from fedpa.algorithms.fedopt import Algorithm, Broadcast, ClientResult, ClientState, fedopt
from fedpa.algorithms.local_training import LocalTraining, as_optimizer, local_work
from fedpa.algorithms.methods import Method, describe
from fedpa.errors import check_integer, check_number, refuse
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.layer_inputs import Layer, layers_of, stack_layer, unstack_layer
from fedpa.objectives.objective import Objective
from fedpa.precisions import kronecker
from fedpa.precisions.kronecker import Factor, Kronecker, input_factors
from fedpa.server.update import Server, check_server
from fedpa.types import Key, Params

EPSILON = 5.0
BLOCK = 2048


@describe
def local_precision(
    local: LocalTraining,
    server: Server,
    *,
    local_epsilon: float = EPSILON,
    local_block: int = BLOCK,
) -> Method:
    """Build local precision: FedAvg with local gradients g ← (I + Ā_i/ε)⁻¹ g.

    The model must declare its layers, `fedpa.layer_input`. Nothing more than Δ is sent. A client
    makes one more pass over its examples, inverts Ā_i and, in every step, multiplies the gradient
    of a layer of p inputs by a p×p matrix. A regularizer's gradient is divided, too. A table has a
    diagonal factor, and all of its rows are visited in every step.

    Args:
        local: The clients' work.
        server: The server's side.
        local_epsilon: ε > 0 in units of the inputs' mean square, default 5: far flatter directions
            keep gain 1; a very large ε is FedAvg.
        local_block: A_i of a layer with more inputs is block-diagonal, in blocks of at most this
            size, default 2048.
    Returns:
        The method, for `fedpa.fit`, or as the numerator of `fedpa.global_precision`.
    Example:
        >>> import fedpa
        >>> local = fedpa.LocalTraining(0.1, batch_size=10, epochs=5)
        >>> method = fedpa.local_precision(local, fedpa.Server(fedpa.server.sgd(1.0)))
        >>> both = fedpa.global_precision(method)
    """
    local_work(local)
    check_server(server)
    check_integer("local_block", local_block, 1)
    check_number("local_epsilon", local_epsilon)
    if not local_epsilon:
        raise refuse("local_epsilon", local_epsilon, "must be > 0")

    def build(objective: Objective) -> Algorithm:
        def client(
            message: Broadcast, data: ClientData, state: ClientState, key: Key
        ) -> ClientResult:
            layers = layers_of(objective.loss, message.theta, data.examples)
            factors = input_factors(
                objective,
                message.theta,
                data,
                jax.random.fold_in(key, _FACTOR),
                batch_size=local.batch_size,
                rank="exact",
                largest=local_block,
            )
            inverses = [
                invert(factor, layer, local_epsilon, local_block)
                for factor, layer in zip(factors, layers, strict=True)
            ]

            def divide(gradient: Params, _: Params | None) -> Params:
                for layer, inverse in zip(layers, inverses, strict=True):
                    step = inverse.times(stack_layer(layer, gradient))
                    gradient = unstack_layer(layer, step, gradient)
                return gradient

            steps = optax.chain(optax.stateless(divide), as_optimizer(local.optimizer))
            plain = fedavg_client(objective, local._replace(optimizer=steps), server)
            return plain(message, data, state, key)

        return fedopt(server, client, client_rate=local.schedule)

    return build


_FACTOR = 1002
"""The stream of a client's randomness for a loss that is random; chains use others."""


def invert(factor: Factor, layer: Layer, epsilon: float, block: int) -> Kronecker:
    """(I + Ā/ε)⁻¹, in blocks: once for all steps, in which a product is faster than a solve."""
    divisor = kronecker.unpack(factor, block).normalize(layer).scale(1 / epsilon).add_identity()
    blocks, size, _ = divisor.blocks.shape
    identity = jnp.tile(jnp.eye(size, dtype=divisor.blocks.dtype), (blocks, 1))
    return Kronecker(divisor.solve(identity).reshape(blocks, size, size))
