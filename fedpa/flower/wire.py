"""The wire format: the content of messages between the server and its nodes, and how it is read.

A message, either way, has up to three records, with Flower's names:

    arrays   a tree's arrays by name (layers/0/weight): θ; in replies, a sum of clients' results
    config   the fields of one of the types below
    metrics  numbers about each client

Messages do not describe the tree itself, which both sides know. A message is checked before any of
it is used, and refused as a whole.
"""

import contextlib
import difflib
import io
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict

from fedpa.errors import FedpaError, convert_value, escape_unprintable
from fedpa.training.named_arrays import path_name

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
OWN = "app."
"""Prefix of settings that belong to the app, not to fedpa."""

LONGEST_NAME = 200
"""Characters of a node's name, and of a client's id."""

CODES = {
    1: "an error that Flower does not explain",
    2: "the app on the node raised an error",
    3: "no answer in time",
    5: "the node is gone",
    8: "the node's app ended before it answered",
}
"""Flower's error replies, in words."""


class Query(NamedTuple):
    """A query to a new node: which clients does it have?"""

    version: str
    """Version of fedpa on the server."""
    arrays: str
    """JSON: type and shape of each array that clients are sent, and of an example's."""


class Introduction(NamedTuple):
    """The answer of a node that has the same version and arrays."""

    name: str
    clients: list[str]
    examples: list[int]


class Assignment(NamedTuple):
    """A round of some of a node's clients."""

    phase: str
    round: int
    clients: list[str]
    keys: list[int]
    """The words of the clients' keys, one client's after the other's. The server has made them for
    its cohort; to make them again would take a tenth of a second of every message."""
    population: float
    """Σ q_i of all nodes' clients, for methods that need it."""
    num_examples: int
    """Of all nodes' clients together, for priors and methods that have to know."""
    run: str = ""
    """The run's name, where clients keep states."""
    floor: int = 0
    """The round that the server may return to."""
    states: list[int] = []
    """The rounds of the clients' states."""
    largest: int = 0
    """Examples above which a client weighs as if it had so many; 0: none."""


class Report(NamedTuple):
    """A node's reply to a round, in the order of the requested clients."""

    clients: list[str]
    accepted: list[bool]
    examples: list[int]
    failed: list[str] = []
    reasons: list[str] = []
    """Error messages of the clients that failed."""
    lost: list[str] = []
    """Clients whose state of an earlier round is missing."""


def escape_text(text: object, longest: int = 500) -> str:
    r"""Make one printable line of what another machine sent, to be shown or logged.

    Line breaks, terminal codes and other invisible characters become escapes, as Python writes
    them; what is longer than `longest` characters is cut and ends in "…".

    >>> escape_text("lost\n\x1b[2Jround 9: done", 20)
    'lost\\n\\x1b[2Jround …'
    """
    start = str(text)[: longest + 1]
    line = escape_unprintable(start)
    return line if len(line) <= longest else line[: longest - 1] + "…"


class WireError(FedpaError):
    """An invalid message; names the array. Quoted text is escaped."""

    def __init__(self, text: str) -> None:
        super().__init__(escape_text(text))


class NodeError(WireError):
    """The node is lost or reports an error: it is queried again before the next round."""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Convert every error in reading a message into a WireError."""
    try:
        yield
    except WireError:
        raise
    except FedpaError as error:
        raise WireError(str(error)) from None
    except Exception as error:
        raise WireError(f"the answer makes no sense: {type(error).__name__}: {error}") from None


def describe_error(error: Error) -> str:
    """Put an error reply, Flower's own or a node's, into one line."""
    text = CODES.get(error.code, f"error {error.code}")
    return f"{text}: {escape_text(error.reason)}" if error.reason else text


# Flat tables: settings, and the fields of a message.

Fields = TypeVar("Fields")


def write_fields(fields: Any) -> ConfigRecord:
    """The fields as a record. Empty ones are left out: Flower can't measure them."""
    said = {name: value for name, value in fields._asdict().items() if value not in ([], "")}
    return ConfigRecord(said)


def read_fields(kind: Callable[..., Fields], content: RecordDict) -> Fields:
    """The fields of a message, each of the type that it should have.

    Raises NodeError if there is an error in their place.
    """
    record = content.get(CONFIG)
    if not isinstance(record, ConfigRecord):
        raise WireError(f"there is no record {CONFIG}")
    if "error" in record:
        raise NodeError(str(record["error"]))
    values: dict[str, Any] = {}
    defaults: Any = kind._field_defaults  # type: ignore[attr-defined]
    for name, hint in typing.get_type_hints(kind).items():
        value = record.get(name, defaults.get(name))
        if typing.get_origin(hint) is not list:
            values[name] = convert_value(hint, value, name)
        elif isinstance(value, list):
            (item,) = typing.get_args(hint)
            values[name] = [convert_value(item, each, name) for each in value]
        else:
            raise WireError(f"{name} = {value!r}: must be a list")
    return kind(**values)


def read_settings(
    kind: Callable[..., Fields], table: Mapping[str, Any], where: str, others: bool = False
) -> Fields:
    """A dataclass of settings from a flat table, whose names may have dashes.

    Args:
        kind: The dataclass.
        table: Its values by name; names that begin with `app.` are left alone.
        where: What messages call the table.
        others: Whether the table may contain other settings.
    """
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in hints:
            values[name] = convert_value(hints[name], value, f"{where}: {key}")
        elif not others and not key.startswith(OWN):
            raise unknown_setting(where, key, hints)
    return kind(**values)


def unknown_setting(where: str, key: str, known: Iterable[str]) -> FedpaError:
    """The error for a name that no setting has."""
    close = difflib.get_close_matches(key, [name.replace("_", "-") for name in known], n=1)
    hint = f"did you mean {close[0]}?" if close else f"a setting of the app itself is {OWN}{key}"
    return FedpaError(f"{where}: unknown field {key}: {hint}")


# Trees of arrays.


def name_leaves(tree: Any) -> dict[str, Any]:
    """The tree's arrays, or shapes, by their names."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def describe_arrays(tree: Any) -> dict[str, str]:
    """Each array's type and shape, as a text, by its name."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in name_leaves(tree).items()}


def pack(tree: Any) -> ArrayRecord:
    """A tree's arrays as a record."""
    return ArrayRecord({name: Array(np.asarray(a)) for name, a in name_leaves(tree).items()})


def unpack(template: Any, record: Mapping[str, Any]) -> Any:
    """The tree in a record. `template`: the arrays it must have, or their shapes."""
    wanted = name_leaves(template)
    for name in record:
        if name not in wanted:
            raise WireError(f"{name} is not among the arrays that are needed")
    leaves = [read_array(record, name, leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def read_array(record: Mapping[str, Any], name: str, wanted: Any) -> np.ndarray:
    """The array of that name; refused unless it has the shape and type of `wanted`."""
    if name not in record:
        raise WireError(f"there is no array {name}")
    try:
        # First what it claims to be: NumPy makes room for that, whatever follows.
        shape, dtype = read_array_header(record[name].data)
    except Exception as error:
        raise WireError(f"{name} can't be read: {error}") from None
    if shape != tuple(wanted.shape):
        raise WireError(f"{name} has shape {list(shape)}: {list(wanted.shape)} is needed")
    if dtype != wanted.dtype:
        raise WireError(f"{name} has type {dtype}: {wanted.dtype} is needed")
    try:
        array: np.ndarray = record[name].numpy()
    except Exception as error:
        raise WireError(f"{name} can't be read: {error}") from None
    return array


def read_array_header(data: bytes) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array as `numpy.save` writes it."""
    file = io.BytesIO(data)
    is_first = np.lib.format.read_magic(file) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype


def check_finite(name: str, array: np.ndarray) -> None:
    if np.issubdtype(array.dtype, np.inexact) and not np.isfinite(array).all():
        raise WireError(f"{name} holds a value that is not finite")


def count_bytes(content: RecordDict) -> int:
    """How large a message's records are; one that Flower can't measure counts nothing."""
    total = 0
    for record in content.values():
        with contextlib.suppress(IndexError, ValueError):  # an empty list or text
            total += record.count_bytes()
    return total


# A node's reply to an assignment.


def read_reply(
    content: RecordDict, shapes: Any, names: Collection[str], sizes: Mapping[str, int]
) -> tuple[Any, Report, dict[str, list[float]]]:
    """The sum of a node's clients, its report and the numbers about each of them.

    Args:
        content: The node's reply.
        shapes: Those of the sum's arrays.
        names: Those of the numbers.
        sizes: The clients that were asked for, and their numbers of examples.

    A reply of other arrays or clients, or with values that are not finite, is refused as a whole
    and named: nothing of it reaches the model. Raises WireError.
    """
    report = read_fields(Report, content)
    numbers = content.get(METRICS, MetricRecord())
    if not isinstance(numbers, MetricRecord):
        raise WireError(f"{METRICS} is not a record of numbers")
    infos: Any = dict(numbers)
    if report.clients != list(sizes):
        raise WireError("clients: the answer is not of the clients that were asked for")
    for name in infos:
        if name not in names:
            raise WireError(f"{name} is not among the numbers that nodes report")
    lists = {"accepted": report.accepted, "examples": report.examples, **infos}
    for name, values in lists.items():
        if not isinstance(values, list) or len(values) != len(sizes):
            raise WireError(f"{name} must have one value for each of the {len(sizes)} clients")
    for name, n, ok in zip(sizes, report.examples, report.accepted, strict=True):
        if n != sizes[name] and (n != 0 or ok):  # a client that could not be read reports none
            raise WireError(f"examples = {n!r} of client {name!r}: it has {sizes[name]}")
    total = unpack(shapes, content[ARRAYS])
    for name, array in name_leaves(total).items():
        check_finite(name, array)
    return total, report._replace(reasons=[escape_text(why) for why in report.reasons]), infos


def check_weight(weight: Any, expected: float, clients: int) -> None:
    """Refuse a Σ q_i that is not that of the accepted clients.

    Weights are whole numbers: their sum in float32 is exact up to 2²⁴, and above it rounds with
    every client.
    """
    rounding = 0.0 if expected <= 2**24 else clients * 2.0**-24 * expected
    for leaf in jax.tree.leaves(weight):
        values = np.asarray(leaf, np.float64).reshape(-1)
        wrong = values[~(np.abs(values - expected) <= rounding)]
        if wrong.size:
            raise WireError(
                f"weight = {wrong[0]:.9g}: that of its accepted clients is {expected:.9g}"
            )


def check_client(where: str, client: str) -> None:
    """Refuse an id that is long or can't be printed: it will be in logs and files.

    where: the start of the message.
    """
    if client != escape_text(client, LONGEST_NAME):
        raise WireError(
            f"{where}client {escape_text(client, 100)!r}: an id must be at most {LONGEST_NAME} "
            "printable characters"
        )


def check_count(what: str, n: Any, largest: int) -> None:
    """Refuse a number of examples that can't be one: it is a weight."""
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= largest:
        raise WireError(f"{what} = {n!r}: must be a whole number from 0 to {largest:,}")
