"""Flower apps by name: tasks and methods of the laboratory, chosen by the run's settings.

    from fedpa.experiments.flower import client_app, server_app

The run's settings, `[tool.flwr.app.config]` and `flwr run -c`, are those of `fedpa run` by the same
names (`clients-per-round`), and those of the connection.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpa import flower
from fedpa.algorithms.switch import AUTO
from fedpa.engines import ENGINES, configure, per_client
from fedpa.engines.engine import OfAlgorithm
from fedpa.errors import refuse
from fedpa.experiments.config import RunConfig, build_run_method, from_table, resolve
from fedpa.experiments.methods import METHODS
from fedpa.experiments.run import run, set_prior
from fedpa.experiments.tasks.task import task_named
from fedpa.training.callbacks import Callback
from fedpa.training.loop import Fit
from fedpa.training.problem import Problem

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.clientapp.typing import Mod
    from flwr.serverapp import ServerApp

    from fedpa.flower.client import Node
    from fedpa.flower.node import Holding
    from fedpa.flower.server import Served


def server_app() -> "ServerApp":
    """An app for the laboratory's tasks and methods."""
    return flower.server_app(load_served)


def client_app(mods: "Sequence[Mod]" = ()) -> "ClientApp":
    """An app for the laboratory's tasks and methods; `mods` are Flower's, around every message."""
    return flower.client_app(load_node, mods)


def load_served(table: Mapping[str, Any]) -> "Served":
    """The run that the settings describe."""
    config = run_settings(table)

    def train(
        problem: Problem, engine: OfAlgorithm, out: Path, callbacks: Sequence[Callback]
    ) -> Fit:
        return run(
            config, out, resuming=True, callbacks=callbacks, problem=problem, elsewhere=engine
        )

    problem = task_named(config.task).load(config.task_options)
    method = build_run_method(config)
    return flower.Served(problem, method, train, config.hyperparameters.weighting, config.task)


def load_node(table: Mapping[str, Any], holding: "Holding") -> "Node":
    """What the settings and the node's data make of it."""
    config = run_settings(table)
    options = dataclasses.replace(config.task_options, data_dir=holding.data_dir)
    # What makes a difference to what a client does, and nothing else: see `_make_node`.
    matters = RunConfig(
        config.task,
        config.method,
        engine=config.engine,
        task_options=options,
        engine_options=config.engine_options,
        hyperparameters=config.hyperparameters,
        privacy=config.privacy,
    )
    return _make_node(matters)


@functools.lru_cache(maxsize=4)
def _make_node(config: RunConfig) -> "Node":
    """Cache nodes, so that a process compiles once for several rounds or nodes."""
    # A process may live for one message: it should compile nothing that another has compiled.
    configure(worth_keeping=0.0)
    problem = set_prior(task_named(config.task).load(config.task_options), config.task_options)
    method = build_run_method(config)
    make = per_client if config.engine == "local" else ENGINES[config.engine]
    return flower.make_node(problem, method, make(config.engine_options))


def run_settings(table: Mapping[str, Any]) -> RunConfig:
    """The run's settings, all of them checked."""
    from fedpa.flower.roster import Connection  # which needs Flower
    from fedpa.flower.wire import OWN, unknown_setting

    homes, connection = _homes(), typing.get_type_hints(Connection)
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if key.startswith(OWN) or name in connection:
            continue
        if name not in homes:
            raise unknown_setting("run config", key, [*homes, *connection])
        home = homes[name]
        (values if home is None else values.setdefault(home, {}))[name] = value
    given = from_table(values, "run config", of_run=False)
    if given.hyperparameters.burn_in_rounds == AUTO:
        raise refuse("burn_in_rounds", AUTO, "is not supported with Flower: give a number")
    config = resolve(given)
    if METHODS[config.method].pooled:
        raise refuse(
            "method", config.method, "pools clients' examples, which must stay on their nodes"
        )
    return config


def _homes() -> dict[str, str | None]:
    """Each setting's table in `RunConfig`; None if it is not in one."""
    homes: dict[str, str | None] = {}
    for name, hint in typing.get_type_hints(RunConfig).items():
        if dataclasses.is_dataclass(hint):
            homes |= {field.name: name for field in dataclasses.fields(hint)}
        else:
            homes[name] = None
    return homes
