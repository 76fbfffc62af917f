"""Messages out and answers in, with a bound on the wait.

(Flower's own `send_and_receive` looks for answers every three seconds.)
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fedpa.flower.records import escape_text

CODES = {
    1: "an error that Flower does not explain",
    2: "the app on the node raised an error",
    3: "no answer in time",
    5: "the node is gone",
    8: "the node's app ended before it answered",
}
"""Of Flower's error replies, in words."""


LOOK = 1.0
"""Seconds between looks for what else goes on, while answers are waited for."""


class Answer(NamedTuple):
    content: RecordDict | None
    failure: str
    """Why there is no content; empty if there is."""


def push(
    grid: Grid, contents: Mapping[int, RecordDict], kind: str, group: str, ttl: float
) -> dict[str, int]:
    """Send each node its message; message id → node."""
    messages = [
        Message(content, dst_node_id=node, message_type=kind, group_id=group, ttl=ttl)
        for node, content in contents.items()
    ]
    ids = grid.push_messages(messages)
    return {name: node for name, node in zip(ids, contents, strict=True) if name}


def pull(grid: Grid, waiting: Mapping[str, int]) -> dict[int, Answer]:
    """The answers that are there, by node.

    Flower's own errors don't say whose they are; what they reply to does.
    """
    found = {}
    for message in grid.pull_messages(list(waiting)) if waiting else ():
        node = waiting.get(message.metadata.reply_to_message_id)
        if node is not None:
            found[node] = _read(message)
    return found


def _read(message: Message) -> Answer:
    if message.has_error():
        return Answer(None, describe_error(message.error))
    return Answer(message.content, "")


def describe_error(error: Error) -> str:
    """Put an error reply, Flower's own or a node's, into one line."""
    text = CODES.get(error.code, f"error {error.code}")
    return f"{text}: {escape_text(error.reason)}" if error.reason else text


def exchanged(
    grid: Grid,
    contents: Mapping[int, RecordDict],
    kind: str,
    group: str,
    timeout: float,
    poll: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[int, Answer]:
    """All nodes' answers; of those that have not answered in `timeout` seconds, that."""
    waiting = push(grid, contents, kind, group, timeout)
    began = looked = time.monotonic()
    unsent = set(contents) - set(waiting.values())
    answers = {node: Answer(None, "the message could not be sent") for node in unsent}
    while waiting:
        answers |= pull(grid, waiting)
        waiting = {name: node for name, node in waiting.items() if node not in answers}
        now = time.monotonic()
        if waiting and now >= looked + LOOK:
            meanwhile()
            looked = now
        if waiting and now > began + timeout:
            break
        if waiting:
            time.sleep(poll)
    late = Answer(None, f"no answer in {timeout:g} s")
    return answers | dict.fromkeys(waiting.values(), late)
