"""Loggers copy a run's records to TensorBoard, Weights & Biases and MLflow.

`metrics.jsonl` remains the reference. A logger that can't be opened is refused before training; one
that fails later causes a warning and is disabled, but never ends the run (`forgive`).
"""

import contextlib
import importlib
import json
import math
import os
import re
import secrets
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fedpa.atomic_write import write_atomically
from fedpa.errors import FedpaError, find_name, refuse
from fedpa.training.provenance import flatten

MEMORY = "loggers.json"
"""File with the ids by which loggers continue a resumed run."""
TENSORBOARD, WANDB, MLFLOW = "tensorboard", "wandb", "mlflow"
"""Names of the loggers, and of their directories in the run's directory."""
LIBRARIES = {
    MLFLOW: ("mlflow", "fedpa[mlflow]"),
    TENSORBOARD: ("tensorboardX", "fedpa[experiments]"),
    WANDB: ("wandb", "fedpa[wandb]"),
}
"""The library that each logger imports, and what installs it."""

Write = Callable[[Mapping[str, Any]], None]
"""Receives one record per round, and at the end {"round": the last one, "test/…": …}."""


def check_loggers(names: Sequence[str]) -> None:
    """Refuse unknown loggers, repeated names, and loggers whose library is missing."""
    for name in names:
        find_name("log", name, LIBRARIES, "logger")
    if len(set(names)) < len(names):
        raise refuse("log", list(names), "must name each logger once")
    for name in names:
        import_library(*LIBRARIES[name])


def open_logger(
    name: str, out: Path, config: Mapping[str, Any], past: Sequence[Mapping[str, Any]]
) -> AbstractContextManager[Write]:
    """Open a logger: yields the function that receives each round's record.

    Args:
        name: One of `LIBRARIES`.
        out: The run's directory.
        config: Its resolved configuration.
        past: The records of rounds before a resume.
    """
    opened = {TENSORBOARD: _open_tensorboard, WANDB: _open_wandb, MLFLOW: _open_mlflow}[name]
    return forgive(name, opened(out, config, past))


@contextlib.contextmanager
def forgive(name: str, manager: AbstractContextManager[Write]) -> Iterator[Write]:
    """Disable a logger after an error, so that it never ends a run that has started."""
    try:
        write = manager.__enter__()
    except FedpaError:
        raise
    except Exception as error:
        raise FedpaError(f"logger {name!r} can't be opened: {_reason(error)}") from error
    failed = False

    def give_up(error: Exception) -> None:
        nonlocal failed
        if not failed:
            failed = True
            warnings.warn(
                f"logger {name!r} failed and is disabled from here on; metrics.jsonl has every "
                f"round: {_reason(error)}",
                stacklevel=3,
            )

    def attempt(record: Mapping[str, Any]) -> None:
        if not failed:
            try:
                write(record)
            except Exception as error:
                give_up(error)

    passing: Any = (None, None, None)
    try:
        yield attempt
    except BaseException:
        passing = sys.exc_info()  # determines the final status that the logger reports
        raise
    finally:
        try:
            manager.__exit__(*passing)
        except Exception as error:
            give_up(error)


def _reason(error: Exception) -> str:
    """Format an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def recall(out: Path, name: str) -> dict[str, Any]:
    """Read the stored facts of this logger, or nothing."""
    return _read(out).get(name, {})


def remember(out: Path, name: str, facts: Mapping[str, Any]) -> None:
    """Store these facts of this logger; earlier ones are replaced."""
    text = json.dumps({**_read(out), name: dict(facts)}, indent=2)
    write_atomically(out / MEMORY, (text + "\n").encode())


def _read(out: Path) -> dict[str, dict[str, Any]]:
    remedy = "remove the file to start new logs"
    try:
        memory: dict[str, dict[str, Any]] = json.loads((out / MEMORY).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise FedpaError(f"{out / MEMORY} is truncated or not JSON ({error}): {remedy}") from None
    if not isinstance(memory, dict):
        raise refuse(f"{out / MEMORY}: content", memory, f"must be an object; {remedy}")
    for name, facts in memory.items():
        if not isinstance(facts, dict):
            raise refuse(f"{out / MEMORY}: {name}", facts, f"must be an object; {remedy}")
        start, identity = facts.get("start", 0.0), facts.get("id", "none")
        if not (isinstance(start, float) and math.isfinite(start)):
            raise refuse(f"{out / MEMORY}: {name}.start", start, f"must be a number; {remedy}")
        # It becomes part of a directory's name.
        if not isinstance(identity, str) or not re.fullmatch(r"[\w-]+", identity):
            expected = f"must be letters, digits and hyphens; {remedy}"
            raise refuse(f"{out / MEMORY}: {name}.id", identity, expected)
    return memory


def import_library(name: str, install: str) -> Any:
    """Import the library; if it is missing, raise an error that says what to install."""
    missing = FedpaError(f"{name} is not installed: pip install {install!r} installs it")
    try:
        found = importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise missing from None
        raise FedpaError(f"{name} can't be imported: {error}") from error
    # W&B and MLflow write to directories named after them. If they are not installed, an import
    # finds such a directory next to the script: a package without a file.
    if getattr(found, "__file__", None) is None:
        raise missing
    return found


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Select the numbers of a record. NaN is included; it shows as a gap."""
    return {
        name: float(value)
        for name, value in record.items()
        if name != "round" and isinstance(value, int | float) and not math.isinf(value)
    }


def take_new(record: Mapping[str, Any], sent: dict[str, int]) -> dict[str, float]:
    """Select the record's scalars that a logger does not have yet.

    A run that was killed repeats its last rounds, with the same numbers. Services can't delete what
    they received, so it is not sent again. The last round is stored by metric, since the record
    after the last round has its number, too.
    """
    t = record["round"]
    values = {name: value for name, value in scalars(record).items() if t > sent.get(name, 0)}
    sent.update(dict.fromkeys(values, t))
    return values


PREFIX, SUFFIX = "events.out.tfevents.", ".fedpa"
"""TensorBoard looks for the first; the second marks files of fedpa."""


@contextlib.contextmanager
def _open_tensorboard(
    out: Path, config: Mapping[str, Any], past: Sequence[Mapping[str, Any]]
) -> Iterator[Write]:
    """Write one event file with each round once, although a run may resume at an earlier round.

    It does not use `tensorboardX.SummaryWriter`, whose thread dies when the disk is full and whose
    queue then fills up and stops training.

    Times are the start of the run plus the seconds of its rounds, so that the file is the same
    whether the run was resumed or not.
    """
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.summary import text

    now: float = recall(out, TENSORBOARD).get("start", time.time())
    remember(out, TENSORBOARD, {"start": now})
    directory = out / TENSORBOARD
    directory.mkdir(exist_ok=True)
    for path in directory.glob(f"{PREFIX}*{SUFFIX}"):
        path.unlink()
    sent: dict[str, int] = {}  # the last past record may include what comes after it

    with (directory / f"{PREFIX}{time.time():010.0f}{SUFFIX}").open("wb") as file:

        def event(**content: Any) -> None:
            file.write(_frame(Event(wall_time=now, **content).SerializeToString()))

        def write(record: Mapping[str, Any], flush: bool = True) -> None:
            nonlocal now
            seconds = record.get("seconds", 0.0)
            now += seconds if math.isfinite(seconds) else 0.0
            values = take_new(record, sent).items()
            summary = [Summary.Value(tag=name, simple_value=value) for name, value in values]
            event(step=record["round"], summary=Summary(value=summary))
            if flush:
                file.flush()  # to the system, not synced to disk, which would delay each round

        event(file_version="brain.Event:2")
        event(summary=text("configuration", _table(config)))
        for record in past:
            write(record, flush=False)
        file.flush()
        yield write


def _frame(message: bytes) -> bytes:
    """Format a record of a TFRecord file: length, its checksum, the message, its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(message))
    sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, message)]
    return length + sums[0] + message + sums[1]


def _table(config: Mapping[str, Any]) -> str:
    """Format the configuration as Markdown for TensorBoard."""
    texts = {name: " ".join(str(value).split()) for name, value in flatten(config).items()}
    rows = [f"| {name} | {text.replace('|', '&#124;')} |" for name, text in texts.items()]
    return "\n".join(["| setting | value |", "| --- | --- |", *rows])


PATIENCE = 300.0
"""Seconds to wait for uploads after the run; wandb would wait for a lost server forever."""


@contextlib.contextmanager
def _open_wandb(
    out: Path, config: Mapping[str, Any], past: Sequence[Mapping[str, Any]]
) -> Iterator[Write]:
    """Open a W&B run, the same one whenever the run is resumed. Charts use "round" as axis.

    `WANDB_MODE`, `WANDB_PROJECT` and its other variables apply.

    W&B's own steps must increase and rows can't be changed once sent, but the record after the last
    round has the same round. So the round is a number of each row, declared as axis.

    Offline, every opening creates another directory with the same id. Each receives the whole past,
    so that only the last one must be synced: the directory of a killed run lacks what wandb had not
    written yet, and syncing does not join several into one run.
    """
    wandb = import_library(*LIBRARIES[WANDB])
    known = recall(out, WANDB).get("id")
    identity = known or secrets.token_hex(8)
    offline = os.environ.get("WANDB_MODE") == "offline"
    # With a server, the run may have been renamed.
    named = "WANDB_NAME" in os.environ or (known is not None and not offline)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "fedpa",
        dir=str(out),
        id=identity,
        name=None if named else out.absolute().name,
        # Offline, wandb would warn that it can't ask a server for the run.
        resume=None if offline else "allow",
        config=dict(config),
        reinit="create_new",  # keep a run that the caller has open
        settings=_wandb_settings(wandb),
    )
    code = 1
    try:
        remember(out, WANDB, {"id": identity})
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        # If the server has the run, it has all metrics up to its last row; but the final metrics
        # may be from an earlier end, before the run was extended.
        summary = dict(run.summary)
        names = [name for name in summary if not name.startswith("test/")]
        sent = {name: int(summary.get("round", 0)) for name in names}

        def write(record: Mapping[str, Any]) -> None:
            if values := take_new(record, sent):
                run.log({"round": record["round"], **values})

        for record in past:
            write(record)
        yield write
        code = 0
    except KeyboardInterrupt:
        code = 255  # as wandb names it
        raise
    finally:
        run.finish(exit_code=code)


def _wandb_settings(wandb: Any) -> Any:
    """Limit the wait for uploads, if this version of wandb supports it and none is set."""
    able = "finish_timeout" in getattr(wandb.Settings, "model_fields", {})
    chosen = "WANDB_FINISH_TIMEOUT" in os.environ
    return wandb.Settings(finish_timeout=PATIENCE) if able and not chosen else None


LONGEST, MOST_PARAMS, MOST_METRICS = 6000, 100, 1000
"""MLflow's limits: length of a parameter's value, parameters and metrics per request."""


@contextlib.contextmanager
def _open_mlflow(
    out: Path, config: Mapping[str, Any], past: Sequence[Mapping[str, Any]]
) -> Iterator[Write]:
    """Open an MLflow run, the same one whenever the run is resumed; metrics by step, the round.

    It is at the server of `MLFLOW_TRACKING_URI`, otherwise in MLflow's file store. MLflow no longer
    develops that and requires an opt-in, but the alternative without a server is a database, for
    which `mlflow-skinny` lacks the libraries. `MLFLOW_ALLOW_FILE_STORE=true mlflow ui
    --backend-store-uri RUN/mlflow` shows them.

    A failed request is retried `MLFLOW_HTTP_REQUEST_MAX_RETRIES` times, by default for four
    minutes, so that a server can restart. While opening, when the address may be wrong, there are
    fewer retries.
    """
    mlflow = import_library(*LIBRARIES[MLFLOW])
    with _unless_set(MLFLOW_HTTP_REQUEST_MAX_RETRIES="2"):
        client = _connect(mlflow, out)
        identity = _find_run(mlflow, client, out) or _create_run(client, out)
        client.update_run(identity, "RUNNING")
        _log_params(mlflow, client, identity, config)
        sent = {  # the last round of each metric in the store
            name: max(metric.step for metric in client.get_metric_history(identity, name))
            for name in client.get_run(identity).data.metrics
        }
    reached = True

    def write(*records: Mapping[str, Any]) -> None:
        nonlocal reached
        metrics, now = [], int(time.time() * 1000)
        for record in records:
            named = {_name(name): value for name, value in record.items()}
            for name, value in take_new(named, sent).items():
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
        if reached:  # do not wait again for a logger that failed
            client.set_terminated(identity, status)


def _connect(mlflow: Any, out: Path) -> Any:
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return mlflow.MlflowClient(tracking_uri=uri)
    directory = (out / MLFLOW).absolute()
    with _unless_set(MLFLOW_ALLOW_FILE_STORE="true"):
        # A client reuses a store of this process whose directory may have been removed; creating a
        # store creates the directory.
        importlib.import_module("mlflow.store.tracking.file_store").FileStore(str(directory))
        return mlflow.MlflowClient(tracking_uri=directory.as_uri())


def _find_run(mlflow: Any, client: Any, out: Path) -> str | None:
    """Find the earlier run, if the store still has it."""
    identity = recall(out, MLFLOW).get("id")
    if identity is None:
        return None
    try:
        active = client.get_run(identity).info.lifecycle_stage == "active"
    except mlflow.exceptions.MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return identity if active else None


def _create_run(client: Any, out: Path) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedpa"
    found = client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else client.create_experiment(name)
    identity: str = client.create_run(experiment, run_name=out.absolute().name).info.run_id
    remember(out, MLFLOW, {"id": identity})
    return identity


def _log_params(mlflow: Any, client: Any, run: str, config: Mapping[str, Any]) -> None:
    """Select the parameters that MLflow does not have yet, since it can't change them."""
    known = client.get_run(run).data.params
    params = [
        mlflow.entities.Param(_name(name), str(value)[:LONGEST])
        for name, value in flatten(config).items()
        if _name(name) not in known
    ]
    for start in range(0, len(params), MOST_PARAMS):
        client.log_batch(run, params=params[start : start + MOST_PARAMS])


def _name(name: str) -> str:
    """Replace characters that MLflow does not allow: recall@5 becomes recall_5."""
    return re.sub(r"[^\w./ -]", "_", name)


@contextlib.contextmanager
def _unless_set(**variables: str) -> Iterator[None]:
    """Set MLflow's settings inside the block, unless the user has set them."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
