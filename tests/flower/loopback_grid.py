"""A grid whose nodes are in this process: messages are functions called, nothing is started."""

import itertools
import logging

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


class LoopbackGrid(Grid):
    """Nodes by number. `faults`: node → what becomes of its answers to `train`, if not themselves:
    a function of the answer, or an error's code, or None for silence.
    """

    def __init__(self, app, run_config, node_configs):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.run_config = app, dict(run_config)
        self.contexts = {}
        for number, config in enumerate(node_configs):
            self.join(101 + number, config)
        self.faults, self.replies, self.sent = {}, {}, []
        self.numbers = itertools.count(1)

    def join(self, node, config):
        self.contexts[node] = Context(1, node, config, RecordDict(), self.run_config)

    def leave(self, node):
        del self.contexts[node]

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        names = []
        for message in messages:
            name = f"m{next(self.numbers)}"
            message.metadata.__dict__["_message_id"] = name
            node = message.metadata.dst_node_id
            self.sent.append(message)
            reply = self.app(message, self.contexts[node])
            if message.metadata.message_type == "train" and node in self.faults:
                fault = self.faults[node]
                if fault is None:
                    reply = None
                elif isinstance(fault, int):
                    reply = Message(Error(fault, "made up"), reply_to=message)
                else:
                    fault(reply.content)
            if reply is not None:
                self.replies[name] = reply
            names.append(name)
        return names

    def pull_messages(self, message_ids):
        return [self.replies.pop(name) for name in message_ids if name in self.replies]

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Message(
            content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl
        )

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))

    def set_run(self, run):
        self._run = run

    @property
    def run(self):
        return self._run


def capture(function):
    """What a function gives, and what it logs by Flower's logger."""
    lines = []

    class Kept(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler = Kept()
    logging.getLogger("flwr").addHandler(handler)
    try:
        return function(), "\n".join(lines)
    finally:
        logging.getLogger("flwr").removeHandler(handler)
