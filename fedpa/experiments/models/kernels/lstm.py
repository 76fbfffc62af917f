"""The LSTM recurrence, with products over single time steps only where the recurrence needs them.

    z_t = x_t W + h_{t−1} U + b            i, f, o = σ(z_i), σ(z_f), σ(z_o);   g = tanh(z_g)
    c_t = f c_{t−1} + i g                  h_t = o tanh(c_t)                   h_0 = c_0 = 0

The input's share x W + b is one product over all steps. Differentiating the scan as it stands would
add up the gradients of W, U and b step by step, a pass over all weights each; here the backward
scan yields ∂z_t alone, and with all of them ∂U = Σ_t h_{t−1}ᵀ ∂z_t is one product (∂W, ∂b and ∂x,
too). Reverse mode only: forward mode (and with it `jax.hessian`) is not defined.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Sequence = Float[Array, "t b h"]


class Gates(NamedTuple):
    """i, f, g and o, the activations that one step, or all steps, made."""

    input: Float[Array, "*t b h"]
    forget: Float[Array, "*t b h"]
    cell: Float[Array, "*t b h"]
    output: Float[Array, "*t b h"]


class Residuals(NamedTuple):
    x: Float[Array, "t b i"]
    input_weight: Float[Array, "i g"]
    recurrent_weight: Float[Array, "h g"]
    h: Sequence
    c: Sequence
    gates: Gates


@jax.custom_vjp
def lstm(
    x: Float[Array, "t b i"],
    input_weight: Float[Array, "i g"],
    recurrent_weight: Float[Array, "h g"],
    bias: Float[Array, " g"],
) -> Sequence:
    """h_1 … h_T, time first. The weights' columns are the four gates' in turn: i, f, g, o."""
    return _forward(x, input_weight, recurrent_weight, bias)[0]


def _forward(
    x: Float[Array, "t b i"],
    input_weight: Float[Array, "i g"],
    recurrent_weight: Float[Array, "h g"],
    bias: Float[Array, " g"],
) -> tuple[Sequence, Residuals]:
    def step(
        carry: tuple[Array, Array], z: Array
    ) -> tuple[tuple[Array, Array], tuple[Array, Array, Gates]]:
        h, c = carry
        i, f, g, o = jnp.split(z + h @ recurrent_weight, 4, axis=-1)
        gates = Gates(jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o))
        c = gates.forget * c + gates.input * gates.cell
        h = gates.output * jnp.tanh(c)
        return (h, c), (h, c, gates)

    start = jnp.zeros((x.shape[1], recurrent_weight.shape[0]), x.dtype)
    _, (h, c, gates) = jax.lax.scan(step, (start, start), x @ input_weight + bias[None, None])
    return h, Residuals(x, input_weight, recurrent_weight, h, c, gates)


def _backward(saved: Residuals, dh: Sequence) -> tuple[Array, Array, Array, Array]:
    def step(carry: tuple[Array, Array], now: tuple) -> tuple[tuple[Array, Array], Array]:
        dh_next, dc = carry
        dh, c, c_before, (i, f, g, o) = now
        dh = dh + dh_next
        tanh_c = jnp.tanh(c)
        dc = dc + dh * o * (1 - tanh_c**2)
        di, df = dc * g * i * (1 - i), dc * c_before * f * (1 - f)
        dg, do = dc * i * (1 - g**2), dh * tanh_c * o * (1 - o)
        dz = jnp.concatenate([di, df, dg, do], axis=-1)
        return (_times_transposed(dz, saved.recurrent_weight), dc * f), dz

    inputs = (dh, saved.c, before(saved.c), saved.gates)
    start = jnp.zeros_like(dh[0])
    _, dz = jax.lax.scan(step, (start, start), inputs, reverse=True)
    over_all_steps = lambda a: jnp.einsum("tbi,tbg->ig", a, dz)  # noqa: E731
    return (
        jnp.einsum("tbg,ig->tbi", dz, saved.input_weight),
        over_all_steps(saved.x),
        over_all_steps(before(saved.h)),
        jnp.sum(dz, axis=(0, 1)),
    )


lstm.defvjp(_forward, _backward)


def before(a: Sequence) -> Sequence:
    """a_{t−1} in place of a_t; 0 at the first step."""
    return jnp.concatenate([jnp.zeros_like(a[:1]), a[:-1]])


def _times_transposed(dz: Float[Array, "b g"], weight: Float[Array, "h g"]) -> Float[Array, "b h"]:
    """dz Uᵀ, as (U dzᵀ)ᵀ.

    Left alone, XLA folds the transpositions into the product and reads U across its rows, half as
    fast again on CPUs. The barriers make it transpose the two small matrices instead.
    """
    barrier = jax.lax.optimization_barrier
    return barrier(weight @ barrier(dz.T)).T
