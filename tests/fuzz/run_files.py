"""The files of a run directory, and what reads each of them."""

import contextlib
import functools
import hashlib
import importlib
import json
import shutil
import tempfile
import tomllib
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tomli_w
from safetensors.numpy import load, save

import fedpa
from fedpa import LocalTraining, Server, server
from fedpa.errors import FedpaError
from fedpa.experiments.config import read_toml
from fedpa.experiments.report.comparison import choose_scale
from fedpa.experiments.report.posteriors import read_predictions
from fedpa.experiments.report.runs import find_runs, group_runs, list_differences
from fedpa.objectives import least_squares
from fedpa.posterior.density import Normal
from fedpa.precisions import LowRank
from fedpa.privacy.ledger import Ledger
from fedpa.training import run_directory
from fedpa.training.checkpoint import read_checkpoint
from fedpa.training.history import is_number
from fedpa.training.loading import read_initial
from fedpa.training.loggers import open_logger
from fedpa.training.named_arrays import fill_model, update_digest
from fedpa.training.problem import prepare
from tests.federations import least_squares_clients, trees_equal
from tests.fuzz.bounded import Surface
from tests.fuzz.mutations import (
    DEEP,
    change_bytes,
    change_json,
    change_line,
    change_safetensors,
    change_value,
    change_zip,
)

CLIENTS = least_squares_clients(sizes=(20, 8))
METHOD = fedpa.fedavg(LocalTraining(optax.sgd(0.05), batch_size=8), Server(server.adam(0.1)))
MODEL = jnp.zeros(3)
ROUNDS = 3


RELEASES = "".join(f'{{"round": {t}}}\n' for t in (1, 2, 2, 3))
SITES = {"run": "5eed", "clients": {"a": 20, "b": 8}}
PREDICTIONS = {"rows": [{"name": "mean", "trials": 1, "values": {"nll": 0.5, "ece": 0.1}}]}
EXTRA = {
    "clients.json": json.dumps(SITES),
    "loggers.json": json.dumps({"tensorboard": {"start": 1.5}, "wandb": {"id": "abc"}}),
    "posterior.json": json.dumps(PREDICTIONS),
    "privacy.jsonl": RELEASES,
    "settings.toml": 'task = "digits"\nrounds = 3\n[hyperparameters]\nrho = 0.1\n',
}
"""Files of runs of other kinds."""


@functools.cache
def make_run():
    """The directory of a run, made once for all surfaces."""
    out = Path(tempfile.mkdtemp(prefix="fedpa-fuzz-")) / "run"
    settings = {"rounds": ROUNDS, "clients_per_round": 2, "progress": False}
    settings |= {"evaluate": lambda params: {"sum": float(params.sum())}}
    settings |= {"recording": fedpa.RecordingOptions(best="eval/sum", checkpoint_every=1)}
    fedpa.fit(least_squares.loss, MODEL, CLIENTS, METHOD, out=out, **settings)
    if "clients.json" in READERS:
        importlib.import_module("fedpa.flower.server")  # which warns: warnings are errors later
    for name, content in EXTRA.items():
        (out / name).write_text(content)
    fedpa.export(out, out / "model.safetensors")
    density = Normal(jnp.arange(3.0), LowRank(jnp.full(3, 2.0), jnp.eye(3)[:, :1]))
    fedpa.posterior.save_posterior(fedpa.Posterior(density, MODEL), out / "posterior.safetensors")
    return out


@functools.cache
def read_right(name):
    """What the file of the run has, unless it was mutated."""
    return READERS[name](make_run() / name)


@functools.cache
def make_state():
    """The state that a checkpoint fills."""
    objective = fedpa.Objective(least_squares.loss)
    algorithm, theta, *_ = prepare(objective, MODEL, fedpa.data.from_mapping(CLIENTS), METHOD, 3)
    return algorithm.init(theta)


# Readers: file → what it has.


def read_report(path):
    groups = group_runs(find_runs([path.parent]))
    return choose_scale(groups), list_differences(groups)


def read_settings(path):
    """All that reads a run's settings: loading, resuming and reports."""
    recorded = run_directory.read_run(path.parent)
    recorded.is_finished(recorded.settings.get("rounds", 1))
    read_report(path)
    return fedpa.load(path.parent, params=MODEL).params


def read_records(path):
    read_report(path)
    run = fedpa.load(path.parent, params=MODEL)
    str(run)
    for number, record in enumerate(run.metrics, start=1):
        assert record["round"] == number
        assert all(is_number(v) for k, v in record.items() if k.startswith(("train/", "eval/")))
        json.dumps(record).encode()
        str(record["phase"]).encode()


def read_result(path):
    recorded = run_directory.read_run(path.parent)
    recorded.is_finished(ROUNDS)
    read_report(path)
    try:
        fedpa.load(path.parent, "best", params=MODEL)
    except FedpaError as error:
        if "no checkpoint" not in str(error):
            raise


def read_state(path):
    stored = read_checkpoint(path.parents[2], int(path.parent.name))
    rest = stored._replace(arrays={}, history=list(stored.history))
    return dict(stored.arrays), np.frombuffer(repr(rest).encode(), np.uint8)


def restore(path):
    out, t = path.parents[2], int(path.parent.name)
    checkpoint = fedpa.load_checkpoint(out, t, like=make_state())
    assert checkpoint.round == t
    run_directory.write_metrics(out, checkpoint.history)
    stored = read_checkpoint(out, t)
    assert stored.stopped is None or isinstance(stored.stopped, str)
    assert isinstance(stored.memory, dict)


def read_model(path):
    return fill_model(MODEL, read_initial(str(path)), str(path))


def read_sites(path):
    from fedpa.flower.server import read_start  # Flower may not be installed

    start = read_start(path.parent)
    assert start.clients
    assert all(0 <= n < 2**53 for n in start.clients.values())
    assert all(name.isprintable() for name in [start.run, *start.clients])


def read_releases(path):
    return Ledger(path).count()


def read_loggers(path):
    with open_logger("tensorboard", path.parent, {"a": 1}, []) as write:
        write({"round": 1, "train/loss": 0.5})


def read_table(path):
    read_predictions(path.parent)


def read_posterior(path):
    posterior = fedpa.load_posterior(path, MODEL)
    return posterior.mean, posterior.sd, posterior.sample(jax.random.key(0), 2)


def read_command(path):
    read_toml(path)


READERS = {
    "config.toml": read_settings,
    "settings.toml": read_command,
    "metrics.jsonl": read_records,
    "summary.json": read_result,
    "params.npz": read_model,
    "model.safetensors": read_model,
    f"checkpoints/{ROUNDS}/state.safetensors": read_state,
    f"checkpoints/{ROUNDS}/state.json": read_state,
    "clients.json": read_sites,
    "loggers.json": read_loggers,
    "privacy.jsonl": read_releases,
    "posterior.json": read_table,
    "posterior.safetensors": read_posterior,
}
if find_spec("flwr") is None:
    del READERS["clients.json"]
DIGEST = {
    "params.npz",
    f"checkpoints/{ROUNDS}/state.safetensors",
    f"checkpoints/{ROUNDS}/state.json",
    "posterior.safetensors",
}
"""Files that have a digest of their content: what is read is what was written."""


def make_at(name):
    """Write a copy of the run, of which `name` is at the path."""

    def make(path):
        home = path.parents[len(Path(name).parts) - 1]
        shutil.copytree(make_run(), home, dirs_exist_ok=True)

    return make


def read_as_written(name):
    """Read the file; where it has a digest, it has to be what was written."""

    def read(path):
        found = READERS[name](path)
        assert name not in DIGEST or trees_equal(found, read_right(name))

    return read


def damage(path, content, draw):
    path.write_bytes(change_bytes(content, draw))


def lie(change):
    """A mutation that keeps the format and changes what it says."""
    return lambda path, content, draw: path.write_bytes(change(content, draw))


def change_toml(content, draw):
    """Settings with a changed value, or nested too deeply."""
    if draw.randrange(50) == 0:
        return b"a = " + b"[" * DEEP
    for _ in range(100):
        with contextlib.suppress(TypeError, AttributeError, UnicodeEncodeError):
            changed = change_value(tomllib.loads(content.decode()), draw)
            return tomli_w.dumps(changed).encode()  # not every value can be written
    raise AssertionError("no value could be changed")


def change_state(content, draw):
    """The text of a checkpoint with a changed value, and the digest of that."""
    about = json.loads(content)
    del about["digest"]
    changed = change_value(about, draw)
    if isinstance(changed, dict):
        text = json.dumps(changed, sort_keys=True)
        changed["digest"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return json.dumps(changed).encode()


def change_posterior(content, draw):
    """A posterior with a changed structure, and the digest of that."""
    arrays = load(content)
    size = int.from_bytes(content[:8], "little")
    about = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["fedpa"])
    del about["digest"]
    changed = change_value(about, draw)
    if isinstance(changed, dict):
        digest = hashlib.blake2b(json.dumps(changed, sort_keys=True).encode(), digest_size=16)
        update_digest(digest, arrays)
        changed["digest"] = digest.hexdigest()
    return save(arrays, {"fedpa": json.dumps(changed)})


STATE = f"checkpoints/{ROUNDS}/state.json"
LIES = {
    "config.toml": change_toml,
    "settings.toml": change_toml,
    "metrics.jsonl": change_line,
    "summary.json": change_json,
    "params.npz": change_zip,
    "model.safetensors": change_safetensors,
    f"checkpoints/{ROUNDS}/state.safetensors": change_safetensors,
    STATE: change_state,
    "clients.json": change_json,
    "loggers.json": change_json,
    "privacy.jsonl": change_line,
    "posterior.json": change_json,
    "posterior.safetensors": change_posterior,
}
NAMED = {name: f"checkpoints/{ROUNDS}" for name in READERS if name.startswith("checkpoints")}
SURFACES = {
    name: Surface(name, make_at(name), read_as_written(name), damage, named=NAMED.get(name, ""))
    for name in READERS
} | {
    f"{name}-lies": Surface(
        name,
        make_at(name),
        restore if name == STATE else READERS[name],
        lie(change),
        named=NAMED.get(name, ""),
    )
    for name, change in LIES.items()
    if name in READERS
}
