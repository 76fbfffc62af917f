"""What enters each layer, X, seen while a model runs: the input factor XᵀX/n of its Fisher matrix.

A model shows the input of a layer to `layer_input`, which gives it back. Only while `observe` runs
the model is anything noted; otherwise nothing happens, and what is traced is the same program.
`layer_output` does the same for what leaves a layer, of which `output_gradients` needs the loss's
derivative: while it runs, zeros are added there, and the loss is differentiated by them.

A layer's weights (and its bias, as the weight of an input that is always 1) are one matrix [b; W],
a row for each number that enters the layer. Convolutions are such layers whose inputs are patches,
recurrences have two weights, W and U, for x_t and h_{t−1}. A table of which rows are read (the
vectors of words) has one-hots as inputs; of their XᵀX only the diagonal is ever made.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.errors import FedpaError
from fedpa.objectives.client_data import num_rows
from fedpa.precision import widen
from fedpa.types import Examples, Key, Loss, Losses, Model, Params, Scalar

T = TypeVar("T")
Images = Float[Array, "n h w c"]
"""A batch of images."""
Kernel = Float[Array, "k k c d"]
"""A convolution's weights."""
Padding = Literal["VALID", "SAME"]
"""Whether images have a margin of zeros, which keeps their size."""


@jax.tree_util.register_static
class Layer(NamedTuple):
    """Which leaves of θ are the matrix [b; W] of a layer."""

    weights: tuple[int, ...]
    """The numbers of the leaves whose rows make up W."""
    inputs: tuple[int, ...]
    """How many numbers enter each of them."""
    outputs: int
    """r."""
    bias: int | None
    out_first: bool
    """Whether weights are stored as (outputs, inputs)."""
    table: bool
    """Whether rows are read by their numbers: XᵀX is then kept as its diagonal."""

    @property
    def features(self) -> int:
        """The rows of [b; W]: p + 1, or p without a bias."""
        return sum(self.inputs) + (self.bias is not None)


class Rows(NamedTuple):
    """The inputs X that a batch gave a layer."""

    x: Float[Array, "n features"]
    real: Float[Array, " n"]
    """1 for a row that counts, 0 for padding."""


class Squares(NamedTuple):
    """The diagonal of XᵀX."""

    sums: Float[Array, " features"]
    real: Float[Array, " n"]
    """1 for a row of X that counts, 0 for padding."""


class _Tap(NamedTuple):
    """What a model showed: inputs of shape (examples, …, p), or the rows of a table it read."""

    inputs: tuple[Array, ...]
    real: Array | None
    weights: tuple[Any, ...]
    bias: Any
    out_first: bool
    table: bool


_SHOWN: ContextVar[list[_Tap] | None] = ContextVar("fedpa_layer_inputs", default=None)


class _Outputs:
    """What left a model's layers, as it showed them; and what is added there."""

    def __init__(self, zeros: Iterable[Array] | None = None) -> None:
        self.shown: list[tuple[Any, jax.ShapeDtypeStruct]] = []
        """The weight of each, and its shape."""
        self.zeros = None if zeros is None else iter(zeros)

    def meet(self, z: Array, weight: Any) -> Array:
        self.shown.append((weight, jax.ShapeDtypeStruct(z.shape, z.dtype)))
        return z if self.zeros is None else z + next(self.zeros)


_OUTPUTS: ContextVar[_Outputs | None] = ContextVar("fedpa_layer_outputs", default=None)


def observing() -> bool:
    """Whether layers are looked at: what is made for `layer_input` alone can be left out.

    Returns:
        True while a method that needs what enters or leaves layers runs the model.
    Example:
        >>> observing()
        False
    """
    return _SHOWN.get() is not None or _OUTPUTS.get() is not None


def layer_input(
    x: T,
    weight: Array | tuple[Array, ...],
    bias: Array | None = None,
    *,
    real: Array | None = None,
    out_first: bool = False,
) -> T:
    """Show that x enters the layer x·weight + bias, for methods that use XᵀX of a layer's inputs.

    Args:
        x: Shape (examples, …, inputs); for a layer of several weights a tuple of such arrays.
        weight: The parameter itself, a leaf of what the loss is given: (inputs, outputs). A tuple
            of them for several.
        bias: The parameter itself; default: none.
        real: Shape (examples, …), false where x is padding; default: all of it counts.
        out_first: The weight is stored as (outputs, inputs), as equinox and PyTorch do.
    Returns:
        x, as it is.
    Example:
        >>> def loss(params, batch, key):
        ...     x = fedpa.layer_input(batch["x"], params["w"], params["b"])
        ...     return (x @ params["w"] + params["b"] - batch["y"]) ** 2
        >>> loss({"w": jnp.ones(3), "b": 0.5}, {"x": jnp.ones((2, 3)), "y": 3.0}, None)
        Array([0.25, 0.25], dtype=float32)
    """
    shown = _SHOWN.get()
    if shown is not None:
        inputs: Any = x if isinstance(x, tuple) else (x,)
        weights = weight if isinstance(weight, tuple) else (weight,)
        shown.append(_Tap(inputs, real, weights, bias, out_first, table=False))
    return x


def layer_output(z: Array, weight: Array) -> Array:
    """Show that z left the layer of `weight`, for methods that use the loss's derivative there.

    Any summand of the output will do in place of z: the loss has the same derivative by each. Of
    a recurrence z_t = x_t W + h_{t−1} U + b this is x W + b, made for all steps before the loop.

    Args:
        z: Shape (examples, …, outputs), before anything that is not linear. Its rows are those of
            the input that `fedpa.layer_input` or `fedpa.table_input` is shown. With or without the
            bias.
        weight: The parameter itself, as `fedpa.layer_input` is shown it (W of W and U), or
            `fedpa.table_input`.
    Returns:
        z, as it is.
    Example:
        >>> def loss(params, batch, key):
        ...     x = fedpa.layer_input(batch["x"], params)
        ...     return fedpa.layer_output(x @ params, params).sum(1)
        >>> loss(jnp.ones((3, 2)), {"x": jnp.ones((1, 3))}, None)
        Array([6.], dtype=float32)
    """
    outputs = _OUTPUTS.get()
    return z if outputs is None else outputs.meet(z, weight)


def table_input(
    ids: T,
    table: Array,
    bias: Array | None = None,
    *,
    shares: Array | None = None,
    real: Array | None = None,
) -> T:
    """Show which rows of a table are read, for methods that use XᵀX of a layer's inputs.

    Args:
        ids: Shape (examples, …): each reads one row (an embedding).
        table: The parameter itself, a leaf of what the loss is given: (rows, outputs).
        bias: The parameter itself; default: none.
        shares: Of the shape of `ids`: those along the last axis are one bag, whose output is the
            sum of their rows, each multiplied by its share. Default: no bags.
        real: False where there is padding: of the shape of `ids`, or with `shares` of the bags.
            Default: all of it counts.
    Returns:
        The ids, as they are.
    Example:
        >>> params = {"words": jnp.ones((5, 2))}
        >>> ids = fedpa.table_input(jnp.array([[0, 3], [1, 4]]), params["words"])
        >>> fedpa.layer_output(params["words"][ids], params["words"]).shape
        (2, 2, 2)
    """
    shown = _SHOWN.get()
    if shown is not None:
        inputs: Any = (ids,) if shares is None else (ids, shares)
        shown.append(_Tap(inputs, real, (table,), bias, False, table=True))
    return ids


def convolution_input(
    x: Images,
    kernel: Kernel,
    bias: Float[Array, " d"] | None = None,
    stride: int = 1,
    padding: Padding = "VALID",
) -> Images:
    """Show that x enters a convolution: `fedpa.layer_input` whose inputs are k×k patches.

    Args:
        x: Images, shape (n, height, width, channels).
        kernel: The parameter itself, shape (k, k, channels, outputs).
        bias: The parameter itself; default: none.
        stride: Pixels between patches; default: 1.
        padding: "VALID" (the default) or "SAME".
    Returns:
        x, as it is.
    Example:
        >>> kernel = jnp.ones((3, 3, 1, 4))
        >>> fedpa.convolution_input(jnp.ones((2, 8, 8, 1)), kernel, padding="SAME").shape
        (2, 8, 8, 1)
    """
    if observing():
        whole = pad_images(x, kernel.shape[0], stride, padding, 0.0)
        layer_input(image_patches(whole, kernel.shape[0], stride), kernel, bias)
    return x


def image_patches(x: Images, k: int, stride: int) -> Float[Array, "n h2 w2 p"]:
    """Every k×k patch as one vector, `stride` pixels apart."""
    return jnp.concatenate(shift_images(x, k, stride), axis=-1)


def shift_images(x: Images, k: int, stride: int) -> list[Array]:
    """The k² shifted images whose pixels are the entries of a patch, row by row."""
    height, width = x.shape[1] - k + 1, x.shape[2] - k + 1
    return [
        x[:, a : a + height : stride, b : b + width : stride] for a in range(k) for b in range(k)
    ]


def pad_images(
    x: Images, k: int, stride: int, padding: Padding, value: float
) -> Float[Array, "n h2 w2 c"]:
    """The image with `value` around it where padding is "SAME".

    As many as leave one output for every `stride` pixels, an odd one at the lower right (Keras's
    and XLA's rule).
    """
    sides = jax.lax.padtype_to_pads(x.shape[1:3], (k, k), (stride, stride), padding)
    if not any(before or after for before, after in sides):
        return x
    widths = [(0, 0, 0), *((before, after, 0) for before, after in sides), (0, 0, 0)]
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), widths)


def over_examples(function: Callable[..., T]) -> Callable[..., T]:
    """Vectorize a function of one example, as `jax.vmap` does, in which layers may be shown.

    Args:
        function: Of one example's arrays; may call `fedpa.layer_input`.
    Returns:
        The function of arrays with the examples on axis 0.
    Example:
        >>> fedpa.over_examples(lambda x: x.sum())(jnp.ones((3, 2)))
        Array([2., 2., 2.], dtype=float32)
    """

    def call(*arguments: Any) -> T:
        shown, outputs = _SHOWN.get(), _OUTPUTS.get()
        if outputs is not None:
            return _add_over_examples(outputs, function, arguments)
        if shown is None:
            return jax.vmap(function)(*arguments)
        own: list[_Tap] = []

        def alone(*example: Any) -> tuple[T, Any]:
            own[:], value = _watch(function, *example)
            return value, [(tap.inputs, tap.real) for tap in own]

        value, arrays = jax.vmap(alone)(*arguments)
        shown += [
            tap._replace(inputs=inputs, real=real)
            for tap, (inputs, real) in zip(own, arrays, strict=True)
        ]
        return value

    return call


def _add_over_examples(
    outputs: _Outputs, function: Callable[..., T], arguments: tuple[Any, ...]
) -> T:
    """`jax.vmap(function)`, what leaves the layers of one example having an axis of examples."""
    counted = _Outputs()
    batch = num_rows(arguments)
    jax.eval_shape(jax.vmap(lambda *one: _with_outputs(counted, function, *one)), *arguments)
    whole = [
        (weight, jax.ShapeDtypeStruct((batch, *z.shape), z.dtype)) for weight, z in counted.shown
    ]
    outputs.shown += whole
    zeros = None if outputs.zeros is None else [next(outputs.zeros) for _ in whole]

    def alone(zeros: list[Array] | None, *one: Any) -> T:
        return _with_outputs(_Outputs(zeros), function, *one)

    return jax.vmap(alone)(zeros, *arguments)


def _with_outputs(outputs: _Outputs, function: Callable[..., T], *arguments: Any) -> T:
    token = _OUTPUTS.set(outputs)
    try:
        return function(*arguments)
    finally:
        _OUTPUTS.reset(token)


def per_example(batch_loss: Callable[[Model, Examples, Key], Scalar]) -> Loss:
    """Turn a loss that returns one number for a whole batch into one number per example.

    `batch_loss` is called on batches of a single example, vectorized over the batch. Its value
    must therefore be that of the examples alone: no regularizer (pass it separately) and no
    statistics over the batch.

    Args:
        batch_loss: `batch_loss(params, batch, key)` → one number.
    Returns:
        The loss that `fedpa.fit` takes.
    Example:
        >>> def mean_square(params, batch, key):
        ...     return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)
        >>> batch = {"x": jnp.eye(2), "y": jnp.array([1.0, 3.0])}
        >>> print(fedpa.per_example(mean_square)(jnp.zeros(2), batch, jax.random.key(0)))
        [1. 9.]
    """

    def loss(params: Any, batch: Examples, key: Key) -> Losses:
        keys = jax.random.split(key, num_rows(batch))
        alone = jax.tree.map(lambda array: array[:, None], batch)
        return over_examples(lambda example, k: batch_loss(params, example, k))(alone, keys)

    return loss


def observe(
    loss: Loss, theta: Params, examples: Examples, weights: Float[Array, " b"], key: Key
) -> dict[Layer, Rows | Squares]:
    """Run the model on a batch; what entered each of its layers. Weight 0 marks padded examples."""
    theta = jax.tree.map(jnp.array, theta)  # parameters are compared by identity: no two the same
    shown, _ = _watch(loss, theta, examples, key)
    leaves = jax.tree.leaves(theta)
    found: dict[Layer, Rows | Squares] = {}
    for tap in shown:
        layer = _layer(tap, leaves, num_rows(examples))
        seen = _squares(layer, tap, weights) if layer.table else _rows(layer, tap, weights)
        found[layer] = _together(found[layer], seen) if layer in found else seen
    used = [w for layer in found for w in (*layer.weights, layer.bias) if w is not None]
    if len(set(used)) < len(used):
        raise FedpaError(
            "a parameter is shown as part of two different layers: show only one of its uses"
        )
    return found


def output_gradients(
    loss: Loss, theta: Params, examples: Examples, weights: Float[Array, " b"], key: Key
) -> dict[int, Float[Array, "_ _"]]:
    """∂ℓ_j/∂z of every row that left a layer, by the number of the layer's weight among θ's leaves.

    Examples with weight 0 have rows of zeros. Layers whose output is not shown are not there.
    """
    theta = jax.tree.map(jnp.array, theta)  # parameters are compared by identity: no two the same
    shapes = _Outputs()
    jax.eval_shape(lambda: _with_outputs(shapes, loss, theta, examples, key))

    def total(zeros: list[Array]) -> Scalar:
        losses = _with_outputs(_Outputs(zeros), loss, theta, examples, key)
        return jnp.sum(jnp.where(weights > 0, losses, 0))

    found: dict[int, Array] = {}
    gradients = jax.grad(total)([jnp.zeros(z.shape, z.dtype) for _, z in shapes.shown])
    leaves = jax.tree.leaves(theta)
    for (weight, z), gradient in zip(shapes.shown, gradients, strict=True):
        place = _number(weight, leaves)
        if not z.shape or z.shape[0] != num_rows(examples):
            raise FedpaError(
                f"layer_output is shown an output of shape {z.shape} by a batch of "
                f"{num_rows(examples)} examples: its first axis must be the examples"
            )
        rows = widen(gradient).reshape(-1, z.shape[-1] if len(z.shape) > 1 else 1)
        found[place] = jnp.concatenate([found[place], rows]) if place in found else rows
    return found


def layers_of(loss: Loss, theta: Any, examples: Any) -> tuple[Layer, ...]:
    """The layers that the model shows, in the order in which it shows them. Nothing is computed.

    θ and examples may be arrays or their shapes. A model that shows none is refused.
    """
    found = find_layers(loss, theta, examples)
    if not found:
        raise FedpaError(
            "the model shows no layer: call fedpa.layer_input(x, weight, bias) on what enters each "
            "of its layers, as docs/global_precision.md says"
        )
    return found


def find_layers(loss: Loss, theta: Any, examples: Any) -> tuple[Layer, ...]:
    """The same; () where the model shows none."""
    batch, key = _few_examples(examples)
    found: list[Layer] = []

    def look(theta: Params, batch: Examples, key: Key) -> None:
        found.extend(observe(loss, theta, batch, jnp.ones(_BATCH), key))

    jax.eval_shape(look, theta, batch, key)
    return tuple(found)


_BATCH = 3


def _few_examples(examples: Any) -> tuple[Any, Any]:
    """The shapes of a batch and of a key, to trace a loss with."""
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((_BATCH, *x.shape[1:]), x.dtype), examples)
    return batch, jax.eval_shape(lambda: jax.random.key(0))


def data_layers(loss: Loss, theta: Any, examples: Any) -> tuple[bool, ...]:
    """For each of `layers_of`: whether its inputs are the data, whatever θ is."""
    batch, key = _few_examples(examples)

    def inputs(theta: Params, batch: Examples, key: Key) -> list[Array]:
        found = observe(loss, theta, batch, jnp.ones(_BATCH), key)
        return [seen.sums if isinstance(seen, Squares) else seen.x for seen in found.values()]

    program = jax.make_jaxpr(inputs)(theta, batch, key).jaxpr
    # Whatever is computed from something that depends on θ is taken to depend on it.
    depends = set(program.invars[: len(jax.tree.leaves(theta))])
    for step in program.eqns:
        if any(value in depends for value in step.invars if not hasattr(value, "val")):
            depends.update(step.outvars)
    return tuple(hasattr(out, "val") or out not in depends for out in program.outvars)


def stack_layer(layer: Layer, theta: Params) -> Float[Array, "features outputs"]:
    """[b; W] of a layer."""
    leaves = jax.tree.leaves(theta)
    parts = [
        leaves[w].reshape(-1, p).T if layer.out_first else leaves[w].reshape(p, -1)
        for w, p in zip(layer.weights, layer.inputs, strict=True)
    ]
    if layer.bias is not None:
        parts = [leaves[layer.bias].reshape(1, -1), *parts]
    return jnp.concatenate(parts)


def unstack_layer(layer: Layer, matrix: Float[Array, "features outputs"], theta: Params) -> Params:
    """θ with `matrix` as [b; W] of a layer."""
    leaves, structure = jax.tree.flatten(theta)
    begin = 0
    if layer.bias is not None:
        leaves[layer.bias] = matrix[0].reshape(leaves[layer.bias].shape)
        begin = 1
    for w, p in zip(layer.weights, layer.inputs, strict=True):
        part = matrix[begin : begin + p]
        leaves[w] = (part.T if layer.out_first else part).reshape(leaves[w].shape)
        begin += p
    return jax.tree.unflatten(structure, leaves)


def _watch(function: Callable[..., T], *arguments: Any) -> tuple[list[_Tap], T]:
    shown: list[_Tap] = []
    token = _SHOWN.set(shown)
    try:
        return shown, function(*arguments)
    finally:
        _SHOWN.reset(token)


def _layer(tap: _Tap, leaves: Sequence[Any], batch: int) -> Layer:
    weights = tuple(_number(weight, leaves) for weight in tap.weights)
    bias = None if tap.bias is None else _number(tap.bias, leaves)
    for x in tap.inputs:
        if jnp.ndim(x) < (1 if tap.table else 2) or x.shape[0] != batch:
            raise FedpaError(
                f"layer_input is shown an input of shape {x.shape} by a batch of {batch} examples: "
                "its first axis must be the examples, its last what enters the layer (in a "
                "function of one example, fedpa.over_examples in place of jax.vmap)"
            )
    if tap.table:
        inputs: tuple[int, ...] = (tap.weights[0].shape[0],)
    else:
        inputs = tuple(x.shape[-1] for x in tap.inputs)
    sizes = {
        _outputs(weight.shape, p, tap.out_first)
        for weight, p in zip(tap.weights, inputs, strict=True)
    } | (set() if tap.bias is None else {tap.bias.size})
    if len(sizes) > 1:
        raise FedpaError(
            f"layer_input is shown weights and a bias of {sorted(sizes)} outputs as one layer"
        )
    return Layer(weights, inputs, sizes.pop(), bias, tap.out_first, tap.table)


def _number(parameter: Any, leaves: Sequence[Any]) -> int:
    """The parameter's place among the leaves of θ."""
    for place, leaf in enumerate(leaves):
        if leaf is parameter:
            return place
    raise FedpaError(
        f"layer_input or layer_output is shown a weight or bias of shape {jnp.shape(parameter)} "
        "that is no parameter: pass the parameter itself, not a cast, slice or transpose of it, "
        "and outside of jax.jit and jax.lax.scan"
    )


def _outputs(shape: tuple[int, ...], inputs: int, out_first: bool) -> int:
    """r of a weight that takes `features` inputs, in its first axes (or, `out_first`, its last)."""
    axes = shape[::-1] if out_first else shape
    for length in range(1, len(axes) + 1):
        if math.prod(axes[:length]) == inputs:
            return math.prod(axes[length:])
    raise FedpaError(
        f"layer_input is shown {inputs} inputs of a weight of shape {shape}, stored as "
        f"{'(outputs, inputs)' if out_first else '(inputs, outputs)'}: they don't fit "
        f"(out_first={not out_first} says the other)"
    )


def _rows(layer: Layer, tap: _Tap, weights: Float[Array, " b"]) -> Rows:
    counts = _count_rows(tap.real, weights, tap.inputs[0].shape[:-1])
    parts = [widen(x).reshape(-1, x.shape[-1]) for x in tap.inputs]
    if layer.bias is not None:
        parts = [jnp.ones((parts[0].shape[0], 1), parts[0].dtype), *parts]
    x = jnp.concatenate(parts, axis=1)
    # Not x·0: zero times a padded row's infinity is not zero.
    return Rows(jnp.where(counts[:, None] > 0, x, 0).astype(x.dtype), counts.astype(x.dtype))


def _squares(layer: Layer, tap: _Tap, weights: Float[Array, " b"]) -> Squares:
    ids, *bags = tap.inputs
    if bags:
        shares = widen(bags[0])
        counts = _count_rows(tap.real, weights, ids.shape[:-1]).astype(shares.dtype)
        flat, shares = ids.reshape(-1, ids.shape[-1]), shares.reshape(-1, ids.shape[-1])
        same = (flat[:, :, None] == flat[:, None, :]).astype(shares.dtype)
        # A word that is there twice: Σ_w share_w (Σ_w' share_w'), over its places, is its square.
        squares = shares * jnp.einsum("bwv,bv->bw", same, shares) * counts[:, None]
    else:
        counts = _count_rows(tap.real, weights, ids.shape)
        flat, squares = ids.reshape(-1), counts
    sums = jnp.zeros(layer.inputs[0], squares.dtype).at[flat].add(squares)
    return Squares(sums if layer.bias is None else jnp.append(jnp.sum(counts), sums), counts)


def _count_rows(
    real: Any, weights: Float[Array, " b"], shape: tuple[int, ...]
) -> Float[Array, " n"]:
    """1 for each row of a real example that counts, flat."""
    counts = jnp.broadcast_to(weights.reshape(-1, *[1] * (len(shape) - 1)), shape)
    if real is not None:
        counts = jnp.where(jnp.broadcast_to(real, shape), counts, 0)
    return counts.reshape(-1)


def _together(one: Any, other: Any) -> Rows | Squares:
    """A layer that is run twice has the inputs of both."""
    real = jnp.concatenate([one.real, other.real])
    if isinstance(one, Squares):
        return Squares(one.sums + other.sums, real)
    return Rows(jnp.concatenate([one.x, other.x]), real)
