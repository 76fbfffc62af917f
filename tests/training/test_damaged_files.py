"""A file that was damaged or edited by hand costs one line that names it, never a traceback."""

import contextlib
import copy
import hashlib
import io
import json
import random
import tomllib
import tracemalloc
import warnings
import zipfile

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tomli_w

import fedpa
from fedpa import FedpaError, LocalTraining, Server, server
from fedpa.errors import explain
from fedpa.experiments.report.comparison import choose_scale
from fedpa.experiments.report.runs import find_runs, group_runs, list_differences
from fedpa.objectives import least_squares
from fedpa.training import run_directory
from fedpa.training.checkpoint import read_last_checkpoint
from fedpa.training.loading import read_initial
from fedpa.training.loggers import recall
from fedpa.training.named_arrays import fill_model, write_npz
from tests.federations import least_squares_clients

CLIENTS = least_squares_clients(sizes=(20, 8))
METHOD = fedpa.fedavg(LocalTraining(optax.sgd(0.05), batch_size=8), Server(server.sgd(1.0)))
MODEL = jnp.zeros(3)


def fit(out, **options):
    settings = {"rounds": 2, "clients_per_round": 2, "engine": fedpa.engines.per_client()}
    settings |= {"evaluate": lambda params: {"sum": float(params.sum())}, "progress": False}
    settings |= {"recording": fedpa.RecordingOptions(best="eval/sum")}
    return fedpa.fit(least_squares.loss, MODEL, CLIENTS, METHOD, out=out, **settings | options)


@pytest.fixture(scope="module", name="run")
def _run(tmp_path_factory):
    out = tmp_path_factory.mktemp("damaged") / "run"
    fit(out)
    return out


def report(out):
    groups = group_runs(find_runs([out]))
    return choose_scale(groups), list_differences(groups)


def resumed(out):
    """What resuming reads."""
    recorded = run_directory.read_run(out)
    rounds = recorded.settings.get("rounds", 1)
    return recorded.is_finished(rounds), run_directory.past(out)


READERS = {
    "load": lambda out: fedpa.load(out, params=MODEL),
    "best": lambda out: fedpa.load(out, "best"),
    "report": report,
    "resume": resumed,
}


@contextlib.contextmanager
def replaced(path, content):
    kept = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(kept)


def read_all(out):
    """The errors of all readers: none, or lines of our own."""
    said = []
    for read in READERS.values():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # parameters are taken from the last checkpoint
                read(out)
        except FedpaError as error:
            said.append(str(error))
    assert not any("\n" in line for line in said)
    return said


VALUES = (None, True, -1, 10**400, 2.5, "text", [], ["a"], {}, {"a": 1})


def places(value, place=()):
    yield place
    parts = value.items() if isinstance(value, dict) else []
    for name, part in [*parts, *(enumerate(value) if isinstance(value, list) else [])]:
        yield from places(part, (*place, name))


def changed(value, place, new):
    if not place:
        return new
    value = copy.deepcopy(value)
    inner = value
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = new
    return value


def as_text(name, content):
    """How the file holds it; None if it can't."""
    try:
        if name == "config.toml":
            return tomli_w.dumps(content).encode()
        return json.dumps(content).encode() + b"\n"
    except (TypeError, AttributeError):
        return None


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "config.toml"])
def test_any_value_in_any_place_is_read_or_refused_in_one_line(run, name):
    whole = (run / name).read_bytes()
    first, rest = whole, b""
    if name == "metrics.jsonl":
        first, rest = whole.split(b"\n", 1)
    parsed = tomllib.loads(first.decode()) if name == "config.toml" else json.loads(first)
    rng, refused = random.Random(0), 0
    mutants = [(place, value) for place in places(parsed) for value in VALUES]
    for place, value in rng.sample(mutants, min(len(mutants), 40)):
        text = as_text(name, changed(parsed, place, value))
        if text is not None:
            with replaced(run / name, text + rest):
                refused += any(name in line for line in read_all(run))
    assert refused > 3


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "config.toml", "params.npz"])
def test_any_bytes_are_read_or_refused_in_one_line(run, name):
    whole, rng = (run / name).read_bytes(), random.Random(1)
    for _ in range(25):
        content = bytearray(whole)
        for _ in range(rng.choice([1, 2, 5])):
            place = rng.randrange(len(content))
            content[place : place + rng.randrange(2)] = rng.randbytes(rng.randrange(1, 3))
        with replaced(run / name, bytes(content)):
            read_all(run)
            if name == "params.npz":
                with contextlib.suppress(FedpaError):
                    read_initial(str(run / name))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.jsonl", b'{"round": 1, "phase": "\xff"}\n', "metrics.jsonl: line 1 "),
        ("metrics.jsonl", b"[1]\n", r"metrics.jsonl: line 1: the record = \[1\]"),
        ("summary.json", b"[]", r"summary.json: content = \[\]"),
        ("summary.json", b"{}", "summary.json: round = None"),
        ("summary.json", b'{"round": 2, "stopped": 3}', "summary.json: stopped = 3"),
        ("config.toml", b"environment = 3", "config.toml: environment = 3"),
        ("config.toml", b"a = " + b"[" * 100_000, "config.toml is not valid TOML"),
        ("config.toml", b'[environment]\nmade_by = "os"', "config.toml: made_by = 'os'"),
        ("config.toml", b'[environment]\nmade_by = ".x"', "config.toml: made_by = '.x'"),
        ("summary.json", b'{"round": 2, "stopped": "\\ud800"}', "summary.json: content = "),
        ("metrics.jsonl", b'{"round": 1, "phase": "\\ud800"}\n', "metrics.jsonl: line 1: "),
        ("config.toml", b'rounds = "x"\n[environment]', "config.toml: rounds = 'x'"),
    ],
)
def test_what_is_wrong_is_named(run, name, content, words):
    with replaced(run / name, content):
        said = read_all(run)
    assert said
    with pytest.raises(FedpaError, match=words):
        raise FedpaError(said[0])


@pytest.mark.parametrize("value", [[0.5], "0.5", {"a": 1}])
@pytest.mark.parametrize("field", ["seconds", "eval/sum", "train/loss"])
def test_a_metric_that_is_no_number_is_named(run, field, value):
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    text = json.dumps(json.loads(lines[1]) | {field: value}).encode()
    with (
        replaced(run / "metrics.jsonl", lines[0] + b"\n" + text + b"\n"),
        pytest.raises(FedpaError, match=rf"metrics.jsonl: line 2: {field} = "),
    ):
        fedpa.load(run)


def test_evaluations_are_numbers():
    with pytest.raises(FedpaError, match="eval/note = 'good': must be a number"):
        fit(None, evaluate=lambda params: {"note": "good"}, recording=fedpa.RecordingOptions())


def test_a_checkpoint_whose_notes_are_damaged_is_passed_over(run):
    notes = run / "checkpoints" / "2" / "state.json"
    for content in (b"{}", b"[]", b'{"format": 1}', b"\xff", notes.read_bytes()[:-9]):
        with (
            replaced(notes, content),
            pytest.warns(UserWarning, match="checkpoint .*2' is damaged"),
        ):
            assert read_last_checkpoint(run).round == 1


@pytest.mark.parametrize("field", ["round", "history", "memory", "stopped", "clients", "settings"])
def test_a_checkpoint_with_a_field_less_and_its_own_digest_is_passed_over(run, field):
    notes = run / "checkpoints" / "2" / "state.json"
    about = json.loads(notes.read_bytes())
    del about["digest"], about[field]
    text = json.dumps(about, sort_keys=True)
    about["digest"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    with (
        replaced(notes, json.dumps(about).encode()),
        pytest.warns(UserWarning, match="checkpoint .*2' is damaged"),
    ):
        assert read_last_checkpoint(run).round == 1


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[]", '{"tensorboard": 1}', '{"w": {"id": "../x"}}']
)
def test_a_damaged_memory_of_loggers_is_named(tmp_path, content):
    (tmp_path / "loggers.json").write_text(content)
    with pytest.raises(FedpaError, match=r"loggers\.json"):
        recall(tmp_path, "tensorboard")


def test_parameters_that_claim_to_be_large_take_no_memory(tmp_path):
    header = io.BytesIO()
    claimed = {"descr": "<f8", "fortran_order": False, "shape": (2**40,)}
    np.lib.format.write_array_header_1_0(header, claimed)
    with zipfile.ZipFile(tmp_path / "init.npz", "w") as file:
        file.writestr("theta.npy", header.getvalue())
    tracemalloc.start()
    with pytest.raises(FedpaError, match=r"init\.npz"):
        read_initial(str(tmp_path / "init.npz"))
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_messages_have_no_terminal_codes_of_names():
    assert str(FedpaError("a\n\x1b[2J\ud800")) == r"a\n\x1b[2J\ud800"


def test_a_file_that_is_no_file_of_parameters_is_named(tmp_path):
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    (tmp_path / "text.safetensors").write_text("text")
    for name in ("array.npz", "text.safetensors"):
        with pytest.raises(FedpaError, match=rf"{name} is "):
            read_initial(str(tmp_path / name))


@pytest.mark.parametrize(
    "array", [np.ones(3, np.complex64), np.array(["a"] * 3), np.zeros(3, "V2")]
)
def test_parameters_of_another_type_are_refused(tmp_path, array):
    write_npz(tmp_path / "params.npz", {"theta": array})
    arrays = read_initial(str(tmp_path / "params.npz"))
    with pytest.raises(FedpaError, match=r"init: theta has type .* float32"):
        fill_model(MODEL, arrays, "init")
    assert fill_model(MODEL, {"theta": np.ones(3, np.int8)}, "init").dtype == MODEL.dtype


def test_callbacks_can_not_take_names_of_ours_or_of_each_other(tmp_path):
    mine = fedpa.Remembering("best", 0, lambda memory, event: (memory, None))
    other = mine._replace(name="other")
    for callbacks in ([mine], [other, other]):
        with pytest.raises(FedpaError, match="callbacks = "):
            fit(tmp_path / "run", callbacks=callbacks, recording=fedpa.RecordingOptions())
    assert not (tmp_path / "run").exists()


def test_an_error_of_the_system_is_explained_even_without_its_text():
    with (
        pytest.raises(FedpaError, match="can't be written: 9 requested and 0 written"),
        run_directory.writing(run_directory.Path("out")),
    ):
        raise OSError("9 requested and 0 written")
    assert explain(OSError()) == "OSError"
    assert explain(OSError(28, "No space left on device")) == "No space left on device"
