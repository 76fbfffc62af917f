"""The ClientApp: what a SuperNode runs. It is asked two things.

- `query`: which clients it holds, and whether its model is the server's. It tells their ids, their
  numbers of examples and the shapes of an example's arrays, and no example.
- `train`: a round of some of its clients. It sends the sum of their results.

Something that goes wrong is told in the answer, in one line, and in the node's log.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from logging import ERROR
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.supercore import log

import fedpa
from fedpa.errors import BadValueError, FedpaError
from fedpa.flower import states
from fedpa.flower.examples_kind import as_text
from fedpa.flower.node import Node, answer, example_shapes, message_shapes
from fedpa.flower.records import ABOUT, INFOS, about, packed, shapes, unpacked
from fedpa.flower.settings import Holding, check_state_dir, held, node_settings

Load = Callable[[Mapping[str, Any], Holding, float], Node]
"""(the run's settings, what the node holds, Σ q_i over all nodes' clients) → what it runs, with all
clients of its data. Called for every message: a process that lives for several rounds should give
the same `Node` back, whose engine keeps what it has compiled."""


def client_app(load: Load, mods: Sequence[Mod] = ()) -> ClientApp:
    """An app that runs a node's clients.

    Args:
        load: The run's settings → what the node runs, from `make_node(problem, method, …)`.
        mods: Flower's: functions around every message.
    """
    app = ClientApp(mods=list(mods))
    app.query()(_telling_of_errors(functools.partial(_who, load)))
    app.train()(_telling_of_errors(functools.partial(_round, load)))
    return app


def _who(load: Load, content: RecordDict, context: Context) -> RecordDict:
    """Which clients are here?"""
    asked = about(content)
    if asked.get("version") != fedpa.__version__:
        raise FedpaError(
            f"fedpa is {asked.get('version')!s} on the server and {fedpa.__version__} on the node: "
            "versions must be the same"
        )
    check_state_dir(node_settings(context.node_config))
    mine = _node(load, context, 1.0)
    phase = next(iter(mine.algorithm.clients))
    _compare(json.loads(str(asked["shapes"])), shapes(message_shapes(*mine[1:3], phase)))
    ids = list(mine.clients.ids)
    return RecordDict(
        {
            ABOUT: ConfigRecord(
                {
                    "name": _name(node_settings(context.node_config), context),
                    "clients": ids,
                    "examples": [mine.clients.num_examples(name) for name in ids],
                    "kind": as_text(example_shapes(mine.clients)),
                }
            )
        }
    )


def _compare(theirs: dict[str, str], ours: dict[str, str]) -> None:
    """Refuse a model that is not the server's."""
    for name in [*theirs, *ours]:
        if theirs.get(name) != ours.get(name):
            raise FedpaError(
                f"{name} is {theirs.get(name, 'not there')} on the server and "
                f"{ours.get(name, 'not there')} on the node: task, data and version of fedpa must "
                "be the same on both"
            )


def _round(load: Load, content: RecordDict, context: Context) -> RecordDict:
    """A round of some of the clients."""
    asked = about(content)
    phase, t = str(asked["phase"]), int(asked["round"])  # type: ignore[arg-type]
    ids = [str(name) for name in asked["clients"]]  # type: ignore[union-attr]
    mine = _node(load, context, float(asked["population"]))  # type: ignore[arg-type]
    message = unpacked(message_shapes(*mine[1:3], phase), content)
    template = mine.algorithm.client_init(mine.theta)
    since: Any = asked.get("states")
    store: states.Store | None = None
    kept, lost = dict[str, Any](), list[str]()
    if since is not None:
        store, floor = _store(context, asked, t)
        kept, lost = states.taken(store, template, ids, since, floor)
    words: Any = asked["keys"]
    result = answer(mine, phase, ids, words, message, kept)
    told: dict[str, Any] = {
        "clients": ids,
        "accepted": [bool(ok) for ok in result.accepted],
        "examples": [int(n) for n in result.examples],
    }
    if result.failures:
        told["failures"] = json.dumps(dict(result.failures))
    if store is not None:
        accepted = [name for name, ok in zip(ids, result.accepted, strict=True) if ok]
        states.put(store, {name: result.states[name] for name in accepted}, t + 1)
    if lost:  # Flower can't weigh a list of nothing
        told["lost"] = lost
    infos: dict[str, Any] = {
        name: [float(v) for v in np.asarray(values)] for name, values in result.infos.items()
    }
    return RecordDict(
        {**packed(result.aggregate), ABOUT: ConfigRecord(told), INFOS: MetricRecord(infos)}
    )


def _store(context: Context, asked: ConfigRecord, t: int) -> tuple[states.Store, int]:
    """Where clients' states are, and from which round on they may be asked for again."""
    directory = node_settings(context.node_config).state_dir
    if not directory:  # a run that is gone on with would find nothing here: no round is gone back
        return states.in_context(context.state), t
    run = str(asked["run"])
    if not run.isalnum():  # it becomes a directory's name
        raise FedpaError(f"run = {run!r}: must be letters and digits")
    return states.in_directory(Path(directory) / run), int(asked["floor"])  # type: ignore[arg-type]


def _node(load: Load, context: Context, population: float) -> Node:
    holding = node_settings(context.node_config)
    whole = load(context.run_config, holding, population)
    return whole._replace(clients=held(holding, whole.clients))


def _name(holding: Holding, context: Context) -> str:
    if holding.name:
        return holding.name
    if holding.partition_id is not None:
        return f"node {holding.partition_id}"
    return f"node {context.node_id}"


def _telling_of_errors(
    function: Callable[[RecordDict, Context], RecordDict],
) -> Callable[[Message, Context], Message]:
    def reply(message: Message, context: Context) -> Message:
        try:
            content = function(message.content, context)
        except Exception as error:
            # What we refuse names settings and clients; other errors may quote data, and stay.
            known = isinstance(error, FedpaError) and not isinstance(error, BadValueError)
            text = str(error) if known else f"{type(error).__name__}; the node's log has more"
            log(ERROR, "fedpa: %s", error, exc_info=not known)
            try:
                name = _name(node_settings(context.node_config), context)
            except FedpaError:
                name = str(context.node_config.get("name") or f"node {context.node_id}")
            content = RecordDict({ABOUT: ConfigRecord({"error": text[:1000], "name": name})})
        return Message(content, reply_to=message)

    return reply
