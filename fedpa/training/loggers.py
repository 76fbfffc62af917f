"""Loggers take a copy of a run's records elsewhere: TensorBoard, Weights & Biases, MLflow.

`metrics.jsonl` stays the truth. What follows from that holds for all of them (`forgive`): one that
can't be opened is refused before training, one that fails later costs a warning and its copy, never
the run.
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
"""By what loggers find their run again when it is resumed."""
TENSORBOARD, WANDB, MLFLOW = "tensorboard", "wandb", "mlflow"
"""Names of the loggers, and of the directories of their files in that of the run."""
LIBRARIES = {
    MLFLOW: ("mlflow", "fedpa[mlflow]"),
    TENSORBOARD: ("tensorboardX", "fedpa[experiments]"),
    WANDB: ("wandb", "fedpa[wandb]"),
}
"""What each logger imports, and what installs that."""

Write = Callable[[Mapping[str, Any]], None]
"""Takes one round's record: once per round, and once more at the end with {"round": the last one,
"test/…": …}."""


def check_loggers(names: Sequence[str]) -> None:
    """Refuse what is no logger, what is named twice, and what lacks its library."""
    for name in names:
        find_name("log", name, LIBRARIES, "logger")
    if len(set(names)) < len(names):
        raise refuse("log", list(names), "must name each logger once")
    for name in names:
        import_library(*LIBRARIES[name])


def open_logger(
    name: str, out: Path, config: Mapping[str, Any], past: Sequence[Mapping[str, Any]]
) -> AbstractContextManager[Write]:
    """Open a logger: gives the function that takes each round's record.

    Args:
        name: One of `LIBRARIES`.
        out: The run's directory.
        config: Its resolved configuration.
        past: The records of rounds done before a resume.
    """
    opened = {TENSORBOARD: _open_tensorboard, WANDB: _open_wandb, MLFLOW: _open_mlflow}[name]
    return forgive(name, opened(out, config, past))


@contextlib.contextmanager
def forgive(name: str, manager: AbstractContextManager[Write]) -> Iterator[Write]:
    """Let a logger never end a run that has begun: after an error it is left alone."""
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
                f"logger {name!r} failed and is left alone from here on; metrics.jsonl has every "
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
        passing = sys.exc_info()  # decides how the logger says that the run ended
        raise
    finally:
        try:
            manager.__exit__(*passing)
        except Exception as error:
            give_up(error)


def _reason(error: Exception) -> str:
    """One line, whatever the library makes of it."""
    return " ".join(str(error).split()) or type(error).__name__


def recall(out: Path, name: str) -> dict[str, Any]:
    """What this logger remembered, or nothing."""
    return _read(out).get(name, {})


def remember(out: Path, name: str, facts: Mapping[str, Any]) -> None:
    """Keep these facts, in the place of earlier ones of this logger."""
    text = json.dumps({**_read(out), name: dict(facts)}, indent=2)
    write_atomically(out / MEMORY, (text + "\n").encode())


def _read(out: Path) -> dict[str, dict[str, Any]]:
    try:
        memory: dict[str, dict[str, Any]] = json.loads((out / MEMORY).read_text())
        return memory
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise FedpaError(
            f"{out / MEMORY} is cut or no JSON ({error}): remove it to start new logs"
        ) from None


def import_library(name: str, install: str) -> Any:
    """The library of this name; refused with what to install if it is not there."""
    missing = FedpaError(f"{name} is not installed: pip install {install!r} brings it")
    try:
        found = importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise missing from None
        raise FedpaError(f"{name} can't be imported: {error}") from error
    # W&B and MLflow write to directories of their own names. Where they are not installed, such a
    # directory beside the script is what an import finds: a package without a file.
    if getattr(found, "__file__", None) is None:
        raise missing
    return found


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """What can be drawn over rounds. NaN can: a gap says that there was no number."""
    return {
        name: float(value)
        for name, value in record.items()
        if name != "round" and isinstance(value, int | float) and not math.isinf(value)
    }


def take_new(record: Mapping[str, Any], told: dict[str, int]) -> dict[str, float]:
    """Take the record's scalars that a logger does not have, by the last round it has of each.

    A run that was killed does its last rounds again, to the same numbers. Services can't take back
    what they were told, so they are not told again. By name, since the record that comes after the
    last round bears its number, too.
    """
    t = record["round"]
    values = {name: value for name, value in scalars(record).items() if t > told.get(name, 0)}
    told.update(dict.fromkeys(values, t))
    return values


PREFIX, SUFFIX = "events.out.tfevents.", ".fedpa"
"""TensorBoard looks for the first, the second tells which files are ours."""


@contextlib.contextmanager
def _open_tensorboard(
    out: Path, config: Mapping[str, Any], past: Sequence[Mapping[str, Any]]
) -> Iterator[Write]:
    """Write one event file with each round once: a run may be resumed at an earlier round.

    Written here and now rather than by `tensorboardX.SummaryWriter`: that has a thread which dies
    when the disk is full, and a queue in front of it which then fills up and stops training.

    Time is the start of the run and the seconds of its rounds since, whatever the clock says: the
    same file comes out of a run whether it was resumed or not.
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
    told: dict[str, int] = {}  # the last record of the past may know what comes after it

    with (directory / f"{PREFIX}{time.time():010.0f}{SUFFIX}").open("wb") as file:

        def event(**content: Any) -> None:
            file.write(_framed(Event(wall_time=now, **content).SerializeToString()))

        def write(record: Mapping[str, Any], flush: bool = True) -> None:
            nonlocal now
            seconds = record.get("seconds", 0.0)
            now += seconds if math.isfinite(seconds) else 0.0
            values = take_new(record, told).items()
            summary = [Summary.Value(tag=name, simple_value=value) for name, value in values]
            event(step=record["round"], summary=Summary(value=summary))
            if flush:
                file.flush()  # to the system, not to the disk: that would be a wait per round

        event(file_version="brain.Event:2")
        event(summary=text("configuration", _table(config)))
        for record in past:
            write(record, flush=False)
        file.flush()
        yield write


def _framed(message: bytes) -> bytes:
    """A record of a TFRecord file: length, its checksum, the message, its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(message))
    sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, message)]
    return length + sums[0] + message + sums[1]


def _table(config: Mapping[str, Any]) -> str:
    """The configuration in Markdown, which TensorBoard shows."""
    texts = {name: " ".join(str(value).split()) for name, value in flatten(config).items()}
    rows = [f"| {name} | {text.replace('|', '&#124;')} |" for name, text in texts.items()]
    return "\n".join(["| setting | value |", "| --- | --- |", *rows])


PATIENCE = 300.0
"""Seconds to wait for uploads after the run; wandb alone would wait for a lost server for ever."""


@contextlib.contextmanager
def _open_wandb(
    out: Path, config: Mapping[str, Any], past: Sequence[Mapping[str, Any]]
) -> Iterator[Write]:
    """Open a W&B run, the same one whenever the run is resumed. Charts are drawn over "round".

    `WANDB_MODE`, `WANDB_PROJECT` and its other variables say where and how.

    W&B's own steps only ever grow and rows once sent are closed, but what comes after the last
    round bears its number too: so the round is a number of each row, declared to be their axis.

    Offline, every opening makes another directory, all of the same id. Each is told the whole past,
    so that the last one is all there is to sync: that of a killed run lacks what wandb had not
    written yet, which may be everything, and syncing does not join several into one run.
    """
    wandb = import_library(*LIBRARIES[WANDB])
    known = recall(out, WANDB).get("id")
    identity = known or secrets.token_hex(8)
    offline = os.environ.get("WANDB_MODE") == "offline"
    # Where there is a server, the run may have got another name since.
    named = "WANDB_NAME" in os.environ or (known is not None and not offline)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "fedpa",
        dir=str(out),
        id=identity,
        name=None if named else out.absolute().name,
        # Offline there is no server to ask for the run, which wandb would warn of.
        resume=None if offline else "allow",
        config=dict(config),
        reinit="create_new",  # a run that the caller may have open is theirs
        settings=_wandb_settings(wandb),
    )
    code = 1
    try:
        remember(out, WANDB, {"id": identity})
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        # The server, if it has the run, has all metrics up to its last row; but what is measured
        # after the last round may be of an earlier end, before the run was prolonged.
        summary = dict(run.summary)
        names = [name for name in summary if not name.startswith("test/")]
        told = {name: int(summary.get("round", 0)) for name in names}

        def write(record: Mapping[str, Any]) -> None:
            if values := take_new(record, told):
                run.log({"round": record["round"], **values})

        for record in past:
            write(record)
        yield write
        code = 0
    except KeyboardInterrupt:
        code = 255  # as wandb has it
        raise
    finally:
        run.finish(exit_code=code)


def _wandb_settings(wandb: Any) -> Any:
    """Bound the patience, where this version of wandb can have it and no other was chosen."""
    able = "finish_timeout" in getattr(wandb.Settings, "model_fields", {})
    chosen = "WANDB_FINISH_TIMEOUT" in os.environ
    return wandb.Settings(finish_timeout=PATIENCE) if able and not chosen else None


LONGEST, MOST_PARAMS, MOST_METRICS = 6000, 100, 1000
"""What MLflow takes of a parameter's value, and of parameters and metrics at once."""


@contextlib.contextmanager
def _open_mlflow(
    out: Path, config: Mapping[str, Any], past: Sequence[Mapping[str, Any]]
) -> Iterator[Write]:
    """Open an MLflow run, the same one whenever the run is resumed; metrics by step, the round.

    It is at the server of `MLFLOW_TRACKING_URI`, or else in files of MLflow's file store. MLflow no
    longer develops that and wants it to be opted for, but the alternative without a server is a
    database, for which `mlflow-skinny` lacks the libraries. `MLFLOW_ALLOW_FILE_STORE=true mlflow ui
    --backend-store-uri RUN/mlflow` shows them.

    A request that fails is tried again for as long as `MLFLOW_HTTP_REQUEST_MAX_RETRIES` says, by
    default four minutes: enough for a server to come back. Only while opening, when a person may be
    waiting and the address may be wrong, is it tried less often.
    """
    mlflow = import_library(*LIBRARIES[MLFLOW])
    with _unless_set(MLFLOW_HTTP_REQUEST_MAX_RETRIES="2"):
        client = _connect(mlflow, out)
        identity = _find_run(mlflow, client, out) or _create_run(client, out)
        client.update_run(identity, "RUNNING")
        _log_params(mlflow, client, identity, config)
        told = {  # the last round of each metric that the store has
            name: max(metric.step for metric in client.get_metric_history(identity, name))
            for name in client.get_run(identity).data.metrics
        }
    reached = True

    def write(*records: Mapping[str, Any]) -> None:
        nonlocal reached
        metrics, now = [], int(time.time() * 1000)
        for record in records:
            named = {_name(name): value for name, value in record.items()}
            for name, value in take_new(named, told).items():
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


def _connect(mlflow: Any, out: Path) -> Any:
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return mlflow.MlflowClient(tracking_uri=uri)
    directory = (out / MLFLOW).absolute()
    with _unless_set(MLFLOW_ALLOW_FILE_STORE="true"):
        # A client takes a store that this process had before, whose directory may be gone since:
        # making one makes the directory.
        importlib.import_module("mlflow.store.tracking.file_store").FileStore(str(directory))
        return mlflow.MlflowClient(tracking_uri=directory.as_uri())


def _find_run(mlflow: Any, client: Any, out: Path) -> str | None:
    """The run of before, if the store has it: it may be another store now, or cleaned since."""
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
