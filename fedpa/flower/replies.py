"""What a node sent for a round, checked before any of it is used.

A sum that is not finite, of other arrays or shapes, or of another weight than its clients', is
refused as a whole and named: nothing of it reaches the model.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import RecordDict

from fedpa.flower.records import INFOS, WireError, about, escape_text, unpacked
from fedpa.server.aggregation import total_weight
from fedpa.training.named_arrays import path_name


class Unable(WireError):
    """The node is gone, or says that it can't: it is asked who it is before the next round."""


class Reply(NamedTuple):
    total: Any
    """The sum over the node's clients."""
    accepted: Mapping[str, bool]
    infos: Mapping[str, Sequence[float]]
    """By name, in the order of the clients that were asked for."""
    failures: Mapping[str, str]
    """What went wrong with single clients."""
    lost: Sequence[str]
    """Clients whose state of an earlier round was not there any more."""


def checked(
    content: RecordDict,
    template: Any,
    weight_of: Callable[[Any], Any],
    sizes: Mapping[str, int],
    weighting: str,
    names: Collection[str],
) -> Reply:
    """The reply of the clients in `sizes`, which have so many examples. Raises WireError.

    weight_of: a sum's Σ q_i, with q_i by `weighting`. names: of the numbers told of each client.
    """
    said = about(content)
    if "error" in said:
        raise Unable(str(said["error"]))
    ids = list(sizes)
    if list(said.get("clients", ())) != ids:  # type: ignore[arg-type]
        raise WireError("clients: the answer is not of the clients that were asked for")
    accepted = _flags("accepted", said.get("accepted"), len(ids))
    for name, n in zip(ids, _listed("examples", said.get("examples"), len(ids)), strict=True):
        # A client that could not be read reports none.
        if n != sizes[name] and (n != 0 or accepted[ids.index(name)]):
            raise WireError(f"examples = {n!r} of client {name!r}: it has {sizes[name]}")
    total = unpacked(template, content)
    for path, leaf in jax.tree_util.tree_leaves_with_path(total):
        if np.issubdtype(leaf.dtype, np.inexact) and not np.isfinite(leaf).all():
            raise WireError(f"{path_name(path)} holds a value that is not finite")
    counted = [sizes[name] for name, ok in zip(ids, accepted, strict=True) if ok]
    _check_weight(weight_of(total), total_weight(weighting, counted), len(counted))
    infos = {
        name: _listed(name, values, len(ids)) for name, values in content.get(INFOS, {}).items()
    }
    for name in infos.keys() - set(names):
        raise WireError(f"{name} is not among the numbers that are told of clients")
    failures = _texts(said.get("failures", "{}"))
    told: Any = said.get("lost", ())
    lost = [name for name in ids if name in told]
    return Reply(total, dict(zip(ids, accepted, strict=True)), infos, failures, lost)


def _check_weight(weight: Any, expected: float, clients: int) -> None:
    """Refuse a Σ q_i that is not that of the clients it is of, those accepted.

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


def _listed(name: str, values: Any, length: int) -> list[Any]:
    if not isinstance(values, list) or len(values) != length:
        raise WireError(f"{name} must have one value for each of the {length} clients")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WireError(f"{name} = {value!r}: must be a number")
    return values


def _flags(name: str, values: Any, length: int) -> list[bool]:
    if not isinstance(values, list) or len(values) != length or not _all_bool(values):
        raise WireError(f"{name} must say yes or no of each of the {length} clients")
    return values


def _all_bool(values: Sequence[Any]) -> bool:
    return all(isinstance(value, bool) for value in values)


def _texts(text: Any) -> dict[str, str]:
    try:
        found = json.loads(text)
        return {str(name): escape_text(reason) for name, reason in found.items()}
    except (ValueError, TypeError, AttributeError):
        raise WireError("failures must be a JSON object of texts") from None
