"""What clients keep between rounds (SCAFFOLD's c_i) stays in the node's context.

A state is kept under the round it is of. The server says which it wants a client to go on from: one
that a round left, which was then not counted, is not it, and the one before is there still.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import RecordDict

from fedpa.engines.flower.records import ARRAYS, SCALARS, packed, unpacked

NEW = 0
"""The round of a client that has taken part in none."""


def taken(
    context: RecordDict, template: Any, ids: Sequence[str], since: Sequence[int]
) -> tuple[dict[str, Any], list[str]]:
    """The clients' states of the rounds asked for; and the clients whose state is not here."""
    found, lost = {}, []
    for name, t in zip(ids, since, strict=True):
        for key in list(context):
            whose, of, _ = key.rsplit("\n", 2)
            if whose == name and int(of) != t:
                del context[key]
        if t == NEW:
            continue
        arrays = context.get(_key(name, t, ARRAYS))
        if arrays is None:
            lost.append(name)
        else:
            content = {ARRAYS: arrays, SCALARS: context[_key(name, t, SCALARS)]}
            found[name] = unpacked(template, content)
    return found, lost


def put(context: RecordDict, states: Mapping[str, Any], t: int) -> None:
    """Keep the states that round t (from 1) left."""
    for name, state in states.items():
        for kind, record in packed(state).items():
            context[_key(name, t, kind)] = record


def _key(name: str, t: int, kind: str) -> str:
    return f"{name}\n{t}\n{kind}"
