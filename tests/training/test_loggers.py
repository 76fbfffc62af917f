"""Loggers: what lies on disk after runs that are resumed, killed, interrupted or out of luck."""

import ast
import contextlib
import json
import math
import os
import re
import shutil
import struct
import sys
import time
import types
import warnings
from collections import Counter
from pathlib import Path

import pytest

from fedpa import FedpaError
from fedpa.training import loggers
from fedpa.training.loggers import (
    LIBRARIES,
    MEMORY,
    check_loggers,
    forgive,
    import_library,
    open_logger,
    recall,
    remember,
    scalars,
)
from fedpa.training.provenance import flatten

CONFIG = {
    "task": "digits",
    "preset": None,
    "rounds": 3,
    "task_options": {"data_dir": "/data/a|b", "clients": None},
    "hyperparameters": {"rho": 0.1, "long": "x" * 7000},
}
FINAL = {"round": 3, "test/accuracy": 0.75}


def record(number):
    return {
        "round": number,
        "phase": "sampling",
        "seconds": 0.5 * number,
        "train/loss": math.nan if number == 2 else 1.0 / number,
        "train/delta_norm": math.inf,
        "train/rejected": 1,
        "train/rejected_clients": ["a", "b"],
        "eval/recall@5": 0.25,
    }


RECORDS = [record(number) for number in (1, 2, 3)]
NAMES = {"seconds", "train/loss", "train/rejected", "eval/recall@5"}


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """This machine only, and nothing in the user's directories."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))


@pytest.fixture
def out(tmp_path):
    path = tmp_path / "a run"
    path.mkdir()
    return path


@contextlib.contextmanager
def one_warning(match):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    (warning,) = caught
    assert re.search(match, str(warning.message))


# What is on disk: [(metric, round, value), …] and the configuration's settings as texts.


def tensorboard_files(out):
    return sorted((out / "tensorboard").iterdir())


def events(out):
    from tensorboardX.proto.event_pb2 import Event

    (path,) = tensorboard_files(out)
    return [Event.FromString(message) for message in messages(path.read_bytes())]


def messages(data):
    """The messages of a TFRecord file; checksums must be right and nothing left over."""
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        message, rest = data[12 : 12 + length], data[12 + length :]
        assert data[8:12] == masked_checksum(data[:8])
        assert rest[:4] == masked_checksum(message)
        found.append(message)
        data = rest[4:]
    return found


def masked_checksum(data):
    """CRC-32C bit by bit, masked as TFRecord has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def read_tensorboard(out):
    first, text, *rounds = events(out)
    assert first.file_version == "brain.Event:2"
    (value,) = text.summary.value
    assert value.metadata.plugin_data.plugin_name == "text"
    rows = value.tensor.string_val[0].decode().splitlines()[2:]
    settings = dict(row.strip("| ").split(" | ") for row in rows)
    numbers = [(v.tag, e.step, v.simple_value) for e in rounds for v in e.summary.value]
    return numbers, {name: text.replace("&#124;", "|") for name, text in settings.items()}


def wandb_files(out):
    """The records of each of its offline files; `finish` does not wait until they are written."""
    give_up = time.monotonic() + 20
    while True:
        with contextlib.suppress(AssertionError, IndexError):  # cut, or empty
            files = [wandb_file(path) for path in sorted(out.glob("wandb/offline-run-*/*.wandb"))]
            if all(file[-1].WhichOneof("record_type") == "exit" for file in files):
                return files
        assert time.monotonic() < give_up
        time.sleep(0.05)


def wandb_file(path):
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store, found = DataStore(), []
    try:
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            found.append(Record.FromString(data))
    finally:
        store.close()
    return found


def read_wandb(out):
    """The last of the files has it all, and the same id as all others."""
    files = wandb_files(out)
    runs = [r.run for file in files for r in file if r.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {recall(out, "wandb")["id"]}
    assert {(run.project, run.display_name) for run in runs} == {("fedpa", "a run")}
    settings = {item.key: json.loads(item.value_json) for item in runs[-1].config.update}
    numbers = []
    for item in (r.history for r in files[-1] if r.WhichOneof("record_type") == "history"):
        row = {cell.key or cell.nested_key[0]: json.loads(cell.value_json) for cell in item.item}
        step = row.pop("round")
        numbers += [(name, step, float(v)) for name, v in row.items() if not name.startswith("_")]
    return numbers, {name: str(value) for name, value in flatten(settings).items()}


def mlflow_client(out):
    import mlflow

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        return mlflow.MlflowClient(tracking_uri=(out / "mlflow").as_uri())


def mlflow_run(out):
    client = mlflow_client(out)
    experiment = client.get_experiment_by_name("fedpa").experiment_id
    (run,) = client.search_runs([experiment])
    return run


def read_mlflow(out):
    client, run = mlflow_client(out), mlflow_run(out)
    assert run.info.run_id == recall(out, "mlflow")["id"]
    numbers = [
        (name.replace("recall_5", "recall@5"), metric.step, metric.value)
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    ]
    return numbers, run.data.params


READ = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}
NOT_ALL_AT_ONCE = [pytest.param("wandb", marks=pytest.mark.long), "tensorboard", "mlflow"]
"""W&B starts a server of its own, which takes long."""


def test_all_loggers_are_found():
    assert set(LIBRARIES) == set(READ)


@pytest.mark.parametrize("name", NOT_ALL_AT_ONCE)
def test_a_library_that_is_there_is_found(name):
    check_loggers([name])


@pytest.mark.parametrize("name", NOT_ALL_AT_ONCE)
def test_a_killed_and_resumed_run_has_each_round_once(name, out):
    with open_logger(name, out, CONFIG, []) as write:
        write(RECORDS[0])
        write(RECORDS[1])
    # Killed before round 2 was saved: it is done again.
    with open_logger(name, out, CONFIG | {"rounds": 4}, RECORDS[:1]) as write:
        write(RECORDS[1])
        write(RECORDS[2])
        write(FINAL)
    # Resumed with nothing left to do.
    with open_logger(name, out, CONFIG, RECORDS) as write:
        write(FINAL)

    numbers, settings = READ[name](out)
    places = Counter((metric, step) for metric, step, _ in numbers)
    expected = {(metric, step) for metric in NAMES for step in (1, 2, 3)}
    assert places == Counter(expected | {("test/accuracy", 3)})
    values = {(metric, step): value for metric, step, value in numbers}
    assert math.isnan(values["train/loss", 2])
    assert values["train/loss", 3] == pytest.approx(1 / 3)
    assert values["test/accuracy", 3] == 0.75
    assert settings["task"] == "digits"
    assert settings["task_options.data_dir"] == "/data/a|b"
    assert settings["hyperparameters.rho"] == "0.1"
    assert settings["hyperparameters.long"].startswith("x" * 6000)
    assert "task_options.clients" not in settings


@pytest.mark.parametrize("name", NOT_ALL_AT_ONCE)
def test_one_that_is_added_later_gets_the_past(name, out):
    with open_logger(name, out, CONFIG, RECORDS[:2]) as write:
        write(RECORDS[2])
    numbers, _ = READ[name](out)
    assert {(metric, step) for metric, step, _ in numbers} == {
        (metric, step) for metric in NAMES for step in (1, 2, 3)
    }


@pytest.mark.parametrize("name", NOT_ALL_AT_ONCE)
def test_a_directory_that_cannot_be_used_is_refused(name, tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(FedpaError, match=f"logger '{name}' can't be opened: .+"),
        open_logger(name, tmp_path / "file", CONFIG, []),
    ):
        pass


def test_only_numbers_are_drawn():
    assert scalars({"round": 1, "a": math.inf, "b": "text", "c": [1.0], "d": None, "e": 2}) == {
        "e": 2.0
    }
    assert math.isnan(scalars({"f": math.nan})["f"])


# TensorBoard


def test_times_follow_the_rounds_not_the_clock(out, monkeypatch):
    clock = iter([5000.0, 4999.0, 10.0, 20.0, 30.0])
    monkeypatch.setattr(loggers, "time", types.SimpleNamespace(time=lambda: next(clock)))
    with open_logger("tensorboard", out, CONFIG, []) as write:
        write(RECORDS[0])
    (before,) = tensorboard_files(out)
    with open_logger("tensorboard", out, CONFIG, RECORDS[:1]) as write:
        write(RECORDS[1])
        write({"round": 3, "seconds": math.nan})
        write({"round": 3, "test/accuracy": 0.75})
    assert not before.exists()
    assert [event.wall_time for event in events(out)] == [
        5000.0,
        5000.0,
        5000.5,
        5001.5,
        5001.5,
        5001.5,
    ]


def test_files_of_others_and_cut_files_of_ours(out):
    directory = out / "tensorboard"
    directory.mkdir()
    other = directory / "events.out.tfevents.1700000000.host"
    other.write_bytes(b"of another program")
    (directory / "events.out.tfevents.1700000000.fedpa").write_bytes(b"\x10\0\0\0\0\0\0\0cut")
    with open_logger("tensorboard", out, CONFIG, RECORDS):
        pass
    assert other.read_bytes() == b"of another program"
    other.unlink()
    assert len(events(out)) == 5


def test_a_record_is_in_the_file_once_it_is_written(out):
    with open_logger("tensorboard", out, CONFIG, []) as write:
        write(RECORDS[0])
        assert events(out)[-1].step == 1  # as after a SIGKILL


def test_what_the_past_knows_of_the_end_is_there_once(out):
    past = [*RECORDS[:2], RECORDS[2] | FINAL]
    with open_logger("tensorboard", out, CONFIG, past) as write:
        write(FINAL)
    numbers, _ = read_tensorboard(out)
    assert [step for name, step, _ in numbers if name == "test/accuracy"] == [3]


def test_a_full_disk_costs_one_warning(out):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_logger("tensorboard", out, CONFIG, RECORDS[:1]) as write:
        (path,) = tensorboard_files(out)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        try:
            with one_warning("'tensorboard' failed.*File too large"):
                write(RECORDS[1])
                write(RECORDS[2])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # Resumed with room again, all is there.
    with open_logger("tensorboard", out, CONFIG, RECORDS):
        pass
    assert [event.step for event in events(out)[2:]] == [1, 2, 3]


# W&B


@pytest.mark.long
def test_wandb_says_how_a_run_ended_and_leaves_runs_of_others_alone(out):
    import wandb

    theirs = wandb.init(project="theirs", dir=str(out.parent))
    with contextlib.suppress(RuntimeError), open_logger("wandb", out, CONFIG, []):
        raise RuntimeError
    with contextlib.suppress(KeyboardInterrupt), open_logger("wandb", out, CONFIG, []):
        raise KeyboardInterrupt
    with open_logger("wandb", out, CONFIG, []) as write:
        write(RECORDS[0])
    assert wandb.run is theirs
    theirs.log({"still": "open"})
    theirs.finish()
    assert [file[-1].exit.exit_code for file in wandb_files(out)] == [1, 255, 0]


class Online:
    """As much of wandb as a server that has rounds up to 2 of the run makes a difference to."""

    __file__ = "online.py"

    def __init__(self):
        self.asked, self.rows = [], []

    class Settings:
        pass

    def init(self, **asked):
        self.asked.append(asked)
        self.summary = {"round": 2, "train/loss": 1.0, "test/accuracy": 0.5, "_step": 7}
        return self

    def define_metric(self, *args, **kwargs):
        pass

    def log(self, row):
        self.rows.append(row)

    def finish(self, exit_code):
        pass


def test_wandb_is_not_told_again_what_its_server_has(out, monkeypatch):
    online = Online()
    monkeypatch.setitem(sys.modules, "wandb", online)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    short = [{"round": r["round"], "train/loss": r["round"]} for r in RECORDS]
    for _ in range(2):
        with open_logger("wandb", out, CONFIG, short[:1]) as write:
            write(short[1])
            write(short[2])
            write(FINAL)
    assert online.rows == [short[2], FINAL] * 2
    first, second = online.asked
    assert (first["name"], second["name"]) == ("a run", None)  # it may have got another since
    for asked in online.asked:
        assert asked["id"] == recall(out, "wandb")["id"]
        assert asked["resume"] == "allow"
        assert asked["project"] == "mine"
        assert asked["config"] == CONFIG


# MLflow


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_mlflow_says_how_a_run_ended(out, error, status):
    with contextlib.suppress(ValueError, KeyboardInterrupt), open_logger("mlflow", out, {}, []):
        assert mlflow_run(out).info.status == "RUNNING"
        if error:
            raise error
    assert mlflow_run(out).info.status == status
    with open_logger("mlflow", out, {}, []):
        assert mlflow_run(out).info.status == "RUNNING"


def test_an_mlflow_store_that_vanishes_costs_one_warning_and_is_made_anew(out):
    with one_warning("'mlflow' failed"), open_logger("mlflow", out, CONFIG, []) as write:
        write(RECORDS[0])
        shutil.rmtree(out / "mlflow")
        write(RECORDS[1])
        write(RECORDS[2])
    with open_logger("mlflow", out, CONFIG, RECORDS) as write:
        write(FINAL)
    numbers, _ = read_mlflow(out)
    assert {step for _, step, _ in numbers} == {1, 2, 3}


def test_an_mlflow_server_that_is_away_is_refused(out, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with (
        pytest.raises(FedpaError, match=r"'mlflow' can't be opened: .*127\.0\.0\.1"),
        open_logger("mlflow", out, CONFIG, []),
    ):
        pass


def test_the_environment_is_as_it_was(out, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    before = dict(os.environ)
    with open_logger("mlflow", out, CONFIG, []):
        assert dict(os.environ) == before
    assert mlflow_client(out).get_experiment_by_name("mine")


# What all of them share


def failing(at):
    """A logger that fails at these of its steps, and what it was asked for."""
    asked = []

    def step(name):
        asked.append(name)
        if name in at:
            raise OSError(f"no\n{name}")

    @contextlib.contextmanager
    def logger():
        step("open")
        try:
            yield lambda record: step("write")
            asked.append("ended well")
        finally:
            step("close")

    return forgive("some", logger()), asked


def test_a_failing_logger_is_left_alone():
    opened, asked = failing({"write", "close"})
    with one_warning("'some' failed .*: no write"), opened as write:
        for item in RECORDS:
            write(item)
    assert asked == ["open", "write", "ended well", "close"]


def test_failing_to_close_is_a_warning_and_hides_no_error():
    opened, asked = failing({"close"})
    with (
        one_warning("no close"),
        pytest.raises(RuntimeError, match="mine"),
        opened,
    ):
        raise RuntimeError("mine")
    assert asked == ["open", "close"]


def test_an_error_that_the_caller_is_handling_is_not_the_runs():
    opened, asked = failing(())
    try:
        raise RuntimeError
    except RuntimeError:
        with opened:
            pass
    assert asked == ["open", "ended well", "close"]


def test_failing_to_open_is_refused():
    opened, _ = failing({"open"})
    with (
        pytest.raises(FedpaError, match="'some' can't be opened: no open"),
        opened,
    ):
        pass


def test_unknown_and_doubled_names_are_refused():
    with pytest.raises(FedpaError, match="'visdom': unknown logger; choose from mlflow, tensor"):
        check_loggers(["tensorboard", "visdom"])
    with pytest.raises(FedpaError, match="must name each logger once"):
        check_loggers(["tensorboard", "tensorboard"])


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_library_that_is_missing_is_refused(name, monkeypatch, out):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))  # a directory of that name
    with pytest.raises(FedpaError, match=rf"{name} is not installed: .*fedpa\[{name}\]"):
        check_loggers([name])
    with pytest.raises(FedpaError, match="not installed"), open_logger(name, out, CONFIG, []):
        pass


def test_libraries_that_are_absent_or_broken(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_library.py").write_text("import absent_part\n")
    with pytest.raises(FedpaError, match="absent_library is not installed"):
        import_library("absent_library", "fedpa[absent]")
    with pytest.raises(FedpaError, match=r"broken_library can't be imported.*absent_part"):
        import_library("broken_library", "fedpa[broken]")


def test_memory_is_each_loggers_own(tmp_path):
    remember(tmp_path, "a", {"id": "one"})
    remember(tmp_path, "b", {"id": "two"})
    remember(tmp_path, "a", {"id": "three"})
    assert recall(tmp_path, "a") == {"id": "three"}
    assert recall(tmp_path, "b") == {"id": "two"}
    assert recall(tmp_path, "c") == {}
    assert [path.name for path in tmp_path.iterdir()] == [MEMORY]
    (tmp_path / MEMORY).write_text("{")
    with pytest.raises(FedpaError, match=r"loggers\.json"):
        recall(tmp_path, "a")


def test_slow_libraries_are_imported_only_where_they_are_used():
    for node in ast.parse(Path(loggers.__file__).read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None), *(alias.name for alias in node.names)]
            assert not {"wandb", "mlflow", "tensorboardX"} & {str(m).split(".")[0] for m in modules}
