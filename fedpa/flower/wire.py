"""The wire format: what messages between the server and its nodes hold, and how it is read.

A message, either way, has some of these records; the names are Flower's own where it has them.

    arrays   arrays by name (layers/0/weight): θ; back, a sum of clients' results, or a model
    scalars  a tree's single numbers by name: as arrays each would bring 128 bytes of header along
    config   what is asked, or what is said about the answer: texts, ids, flags
    metrics  numbers to be shown

The engine's nodes (`fedpa.flower.client`) answer with the sum over their clients, not yet divided;
the strategy's (`fedpa.numpy_client`) with a model. Nothing is said about the tree itself: both
sides know it. What arrives is checked before any of it is used, and refused as a whole.

Nothing here imports JAX unless a tree is packed or unpacked: a node of the strategy has none.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict

from fedpa.errors import FedpaError

ARRAYS, SCALARS, CONFIG, METRICS = "arrays", "scalars", "config", "metrics"

CODES = {
    1: "an error that Flower does not explain",
    2: "the app on the node raised an error",
    3: "no answer in time",
    5: "the node is gone",
    8: "the node's app ended before it answered",
}
"""Flower's error replies, in words."""


def escape_text(text: object, longest: int = 500) -> str:
    r"""Make one printable line of what another machine sent, to be shown or logged.

    Line breaks, terminal codes and other invisible characters become escapes, as Python writes
    them; what is longer than `longest` characters is cut and ends in "…".

    >>> escape_text("lost\n\x1b[2Jround 9: done", 20)
    'lost\\n\\x1b[2Jround …'
    """
    start = str(text)[: longest + 1]
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in start)
    return line if len(line) <= longest else line[: longest - 1] + "…"


class WireError(FedpaError):
    """A message that is not what it should be; names the array. What it quotes is escaped."""

    def __init__(self, text: str) -> None:
        super().__init__(escape_text(text))


class NodeError(WireError):
    """The node is gone, or reports an error: it is asked what it holds before the next round."""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Make a WireError of whatever goes wrong in reading what another machine sent."""
    try:
        yield
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"the answer makes no sense: {type(error).__name__}: {error}") from None


def describe_error(error: Error) -> str:
    """Put an error reply, Flower's own or a node's, into one line."""
    text = CODES.get(error.code, f"error {error.code}")
    return f"{text}: {escape_text(error.reason)}" if error.reason else text


# Arrays by name, and trees of them.


def pack_arrays(arrays: Mapping[str, Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(a, order="C")) for name, a in arrays.items()})


def read_array(record: Mapping[str, Any], name: str, wanted: Any) -> np.ndarray:
    """The array of that name; refused unless it has the shape and type of `wanted`."""
    if name not in record:
        raise WireError(f"there is no array {name}")
    value = record[name]
    try:
        array = value.numpy() if isinstance(value, Array) else np.asarray(value, wanted.dtype)
    except Exception as error:
        raise WireError(f"{name} can't be read: {error}") from None
    if array.shape != tuple(wanted.shape):
        raise WireError(f"{name} has shape {list(array.shape)}: {list(wanted.shape)} is needed")
    if array.dtype != wanted.dtype:
        raise WireError(f"{name} is of type {array.dtype}: {wanted.dtype} is needed")
    return array


def check_finite(name: str, array: np.ndarray) -> None:
    if np.issubdtype(array.dtype, np.inexact) and not np.isfinite(array).all():
        raise WireError(f"{name} holds a value that is not finite")


def name_leaves(tree: Any) -> dict[str, Any]:
    """The tree's arrays, or shapes, by their names."""
    import jax

    from fedpa.training.named_arrays import path_name

    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def pack(tree: Any) -> dict[str, Any]:
    """A tree as a message's records, by their names in it."""
    leaves = {name: np.asarray(leaf) for name, leaf in name_leaves(tree).items()}
    return {
        ARRAYS: pack_arrays({name: leaf for name, leaf in leaves.items() if leaf.ndim}),
        SCALARS: MetricRecord({n: leaf.item() for n, leaf in leaves.items() if not leaf.ndim}),
    }


def unpack(template: Any, content: Mapping[str, Any]) -> Any:
    """The tree that a message holds. `template`: the arrays it must have, or their shapes."""
    import jax

    wanted = name_leaves(template)
    arrays, scalars = content.get(ARRAYS, {}), content.get(SCALARS, {})
    for name in [*arrays, *scalars]:
        if name not in wanted:
            raise WireError(f"{name} is not among the arrays that are needed")
    leaves = [
        read_array(arrays if leaf.ndim else scalars, name, leaf) for name, leaf in wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def describe_arrays(tree: Any) -> dict[str, str]:
    """Each array's type and shape, as a text, by its name."""
    return {name: _describe(leaf) for name, leaf in name_leaves(tree).items()}


def describe_example(shapes: Any) -> str:
    """The shapes of an example's arrays in their tree, to be compared."""
    import jax

    return repr(jax.tree.map(_describe, shapes))


def _describe(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def count_bytes(content: RecordDict) -> int:
    """How large a message's records are; one that Flower can't measure counts nothing."""
    total = 0
    for record in content.values():
        with contextlib.suppress(IndexError, ValueError):  # an empty list or text
            total += record.count_bytes()
    return total


# What is said beside the arrays.


def read_config(content: RecordDict) -> ConfigRecord:
    """What a message says beside its arrays."""
    record = content.get(CONFIG)
    if not isinstance(record, ConfigRecord):
        raise WireError(f"there is no record {CONFIG}")
    return record


def check_count(what: str, n: Any, largest: int) -> None:
    """Refuse a number of examples that can't be one: it is a weight."""
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= largest:
        raise WireError(f"{what} = {n!r}: must be a whole number from 0 to {largest:,}")


class Expected(NamedTuple):
    """What nodes' replies in a phase must hold."""

    total: Any
    """The shapes of the sum over a node's clients."""
    infos: Collection[str]
    """The names of the numbers about each client."""
    weight_of: Callable[[Any], Any]
    """sum → its Σ q_i."""
    weight: Callable[[Sequence[int]], float]
    """Σ q_i of clients by their numbers of examples."""


class Reply(NamedTuple):
    """What a node sent for a round, in the order of the clients that were asked for."""

    total: Any
    accepted: Sequence[bool]
    infos: Mapping[str, Sequence[float]]
    failures: Mapping[str, str]
    """What went wrong with single clients."""
    lost: Sequence[str]
    """Clients whose state of an earlier round is gone."""


def read_reply(content: RecordDict, expected: Expected, sizes: Mapping[str, int]) -> Reply:
    """The reply of a node for its clients in `sizes`, with their numbers of examples.

    A sum that is not finite, of other arrays or shapes, or of another weight than its clients', is
    refused as a whole and named: nothing of it reaches the model. Raises WireError.
    """
    said, ids = read_config(content), list(sizes)
    if "error" in said:
        raise NodeError(str(said["error"]))
    if list(said.get("clients", ())) != ids:  # type: ignore[arg-type]
        raise WireError("clients: the answer is not of the clients that were asked for")
    accepted = _read_list("accepted", said.get("accepted"), bool, len(ids))
    examples = _read_list("examples", said.get("examples"), int | float, len(ids))
    for name, n, ok in zip(ids, examples, accepted, strict=True):
        if n != sizes[name] and (n != 0 or ok):  # a client that could not be read reports none
            raise WireError(f"examples = {n!r} of client {name!r}: it has {sizes[name]}")
    total = unpack(expected.total, content)
    for name, array in name_leaves(total).items():
        check_finite(name, array)
    counted = [sizes[name] for name, ok in zip(ids, accepted, strict=True) if ok]
    _check_weight(expected.weight_of(total), expected.weight(counted), len(counted))
    infos = {}
    for name, values in content.get(METRICS, {}).items():
        if name not in expected.infos:
            raise WireError(f"{name} is not among the numbers that nodes report")
        infos[name] = _read_list(name, values, int | float, len(ids))
    lost: Any = said.get("lost", ())
    missing = set(lost)
    failures = _read_texts("failures", said.get("failures", "{}"))
    return Reply(total, accepted, infos, failures, [name for name in ids if name in missing])


def _check_weight(weight: Any, expected: float, clients: int) -> None:
    """Refuse a Σ q_i that is not that of the clients it is of, those accepted.

    Weights are whole numbers: their sum in float32 is exact up to 2²⁴, and above it rounds with
    every client.
    """
    import jax

    rounding = 0.0 if expected <= 2**24 else clients * 2.0**-24 * expected
    for leaf in jax.tree.leaves(weight):
        values = np.asarray(leaf, np.float64).reshape(-1)
        wrong = values[~(np.abs(values - expected) <= rounding)]
        if wrong.size:
            raise WireError(
                f"weight = {wrong[0]:.9g}: that of its accepted clients is {expected:.9g}"
            )


def _read_list(name: str, values: Any, kind: Any, length: int) -> list[Any]:
    if not isinstance(values, list) or len(values) != length:
        raise WireError(f"{name} must have one value for each of the {length} clients")
    for value in values:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            expected = "true or false" if kind is bool else "a number"
            raise WireError(f"{name} = {value!r}: must be {expected}")
    return values


def _read_texts(name: str, text: Any) -> dict[str, str]:
    try:
        return {str(key): escape_text(value) for key, value in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        raise WireError(f"{name} must be a JSON object of texts") from None
