"""MLflow: the server of `MLFLOW_TRACKING_URI`, or else files in `mlflow/`.

The files are of MLflow's file store. MLflow no longer develops that and wants it to be opted for,
but the alternative without a server is a database, for which `mlflow-skinny` lacks the libraries.
`MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri RUN/mlflow` shows them.
"""

import contextlib
import importlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpa.training.loggers.logger import (
    Logger,
    Write,
    flatten,
    forgive,
    import_library,
    recall,
    remember,
    select_new,
)

NAME, DIRECTORY = "mlflow", "mlflow"
LONGEST, MOST_PARAMS, MOST_METRICS = 6000, 100, 1000
"""What MLflow takes of a parameter's value, and of parameters and metrics at once."""


def _check() -> None:
    import_library("mlflow", "fedpa[mlflow]")


@contextlib.contextmanager
def _opened(
    out: Path, config: Mapping[str, Any], past: Sequence[Mapping[str, Any]]
) -> Iterator[Write]:
    """An MLflow run, the same one whenever the run is resumed; metrics by step, the round.

    A request that fails is tried again for as long as `MLFLOW_HTTP_REQUEST_MAX_RETRIES` says, by
    default four minutes: enough for a server to come back. Only while opening, when a person may be
    waiting and the address may be wrong, is it tried less often.
    """
    mlflow = import_library("mlflow", "fedpa[mlflow]")
    with _unless_set(MLFLOW_HTTP_REQUEST_MAX_RETRIES="2"):
        client = _client(mlflow, out)
        identity = _known_run(mlflow, client, out) or _new_run(client, out)
        client.update_run(identity, "RUNNING")
        _log_params(mlflow, client, identity, config)
        told = _told(client, identity)
    reached = True

    def write(*records: Mapping[str, Any]) -> None:
        nonlocal reached
        metrics, now = [], int(time.time() * 1000)
        for record in records:
            values = select_new({_name(name): value for name, value in record.items()}, told)
            told.update(dict.fromkeys(values, record["round"]))
            for name, value in values.items():
                metrics.append(mlflow.entities.Metric(name, value, now, record["round"]))
        try:
            for start in range(0, len(metrics), MOST_METRICS):
                client.log_batch(identity, metrics=metrics[start : start + MOST_METRICS])
        except Exception:
            reached = False
            raise

    status = "FAILED"
    try:
        write(*past)
        yield write
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        if reached:  # who was given up is not waited for once more
            client.set_terminated(identity, status)


def _client(mlflow: Any, out: Path) -> Any:
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return mlflow.MlflowClient(tracking_uri=uri)
    directory = (out / DIRECTORY).absolute()
    with _unless_set(MLFLOW_ALLOW_FILE_STORE="true"):
        # A client takes a store that this process had before, whose directory may be gone since:
        # making one makes the directory.
        importlib.import_module("mlflow.store.tracking.file_store").FileStore(str(directory))
        return mlflow.MlflowClient(tracking_uri=directory.as_uri())


def _known_run(mlflow: Any, client: Any, out: Path) -> str | None:
    """The run of before, if the store has it: it may be another store now, or cleaned since."""
    identity = recall(out, NAME).get("id")
    if identity is None:
        return None
    try:
        active = client.get_run(identity).info.lifecycle_stage == "active"
    except mlflow.exceptions.MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return identity if active else None


def _new_run(client: Any, out: Path) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedpa"
    found = client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else client.create_experiment(name)
    identity = client.create_run(experiment, run_name=out.absolute().name).info.run_id
    remember(out, NAME, {"id": identity})
    return identity


def _told(client: Any, run: str) -> dict[str, int]:
    """The last round of each metric that the store has."""
    return {
        name: max(metric.step for metric in client.get_metric_history(run, name))
        for name in client.get_run(run).data.metrics
    }


def _log_params(mlflow: Any, client: Any, run: str, config: Mapping[str, Any]) -> None:
    """Those that MLflow does not have yet. It never changes one: the first values stay."""
    known = client.get_run(run).data.params
    params = [
        mlflow.entities.Param(_name(name), str(value)[:LONGEST])
        for name, value in flatten(config).items()
        if _name(name) not in known
    ]
    for start in range(0, len(params), MOST_PARAMS):
        client.log_batch(run, params=params[start : start + MOST_PARAMS])


def _name(name: str) -> str:
    """MLflow takes only some characters: recall@5 is recall_5 there."""
    return re.sub(r"[^\w./ -]", "_", name)


@contextlib.contextmanager
def _unless_set(**variables: str) -> Iterator[None]:
    """MLflow's settings for the time of a few calls, where the user has none of their own."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


LOGGER = Logger(
    "MLflow (fedpa[mlflow]): the server of MLFLOW_TRACKING_URI, or files in the run's directory",
    _check,
    forgive(NAME, _opened),
)
