"""A real SuperLink with three SuperNodes on loopback."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from fedpa.experiments.flower import run_settings
from fedpa.experiments.run import run
from tests.flower.deployment import APP, Deployment, until

SETTINGS = {
    "rounds": 3,
    "clients-per-round": 6,
    "burn-in-rounds": 1,
    "epochs": 2,
    "seed": 3,
    "min-nodes": 3,
}


def submitted(there, out, **changes):
    return there.run(**{**SETTINGS, "out": str(out), **changes})


def records(out):
    path = Path(out) / "metrics.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.endswith("}")]


def assert_as_locally(tmp_path, out, **changes):
    """The parameters of the local engine, with the same seed and cohorts, to 1e-5."""
    config = run_settings({"task": "digits", "method": "fedpa", **SETTINGS, **changes})
    run(config, tmp_path / "alone")
    with np.load(Path(out) / "params.npz") as here, np.load(tmp_path / "alone/params.npz") as there:
        assert set(here) == set(there)
        for name in here:
            np.testing.assert_allclose(here[name], there[name], atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize(("rounds", "nodes"), [(2, 2), (3, 3)])
def test_rounds_across_the_switch_are_those_of_the_local_engine(tmp_path, rounds, nodes):
    """Every message starts a process: two nodes and two rounds are the fewest that show it."""
    out = tmp_path / "run"
    with Deployment(tmp_path, nodes) as there:
        submitted(there, out, rounds=rounds, **{"min-nodes": nodes})
        until(lambda: (out / "summary.json").is_file(), "the run")
    phases = [record["phase"] for record in records(out)]
    assert phases == ["burn-in", *["sampling"] * (rounds - 1)]
    assert_as_locally(tmp_path, out, rounds=rounds)
    assert all(record["train/rejected"] == 0 for record in records(out))
    assert all(record["comm/bytes_up"] < 3 * 1.1 * 4 * 2_410 for record in records(out))


@pytest.mark.long
def test_a_node_killed_in_mid_round_does_not_stop_the_run_and_comes_back(tmp_path):
    out = tmp_path / "run"
    with Deployment(tmp_path) as there:
        number = submitted(there, out, rounds=9, **{"round-timeout": 25.0, "clients-per-round": 30})
        until(lambda: len(records(out)) >= 1, "the first round")
        seen = there.log("node1").count("Receiving: train message")
        until(lambda: there.log("node1").count("Receiving: train message") > seen, "a message")
        there.end("node1", signal.SIGKILL)
        done = len(records(out))
        until(lambda: len(records(out)) > done, "the round without it")
        failed = records(out)[done]
        assert failed["train/rejected"] > 0
        there.join(1, 3)
        until(lambda: (out / "summary.json").is_file(), "the run", 400)
        log = there.run_log(number)
    found = records(out)
    assert len(found) == 9
    held = {f"client-{k:03d}" for k in range(1, 100, 3)}
    assert set(failed["train/rejected_clients"]) <= held
    assert found[-1]["train/rejected"] == 0, [record["train/rejected"] for record in found]
    assert "node 1" in log


@pytest.mark.long
def test_a_server_app_that_was_killed_goes_on_from_its_checkpoint(tmp_path):
    out = tmp_path / "run"
    with Deployment(tmp_path) as there:
        submitted(there, out, rounds=4)
        until(lambda: (out / "checkpoints" / "2").is_dir(), "the second checkpoint")
        pid = server_app_of(there.started["superlink"].pid)
        os.kill(pid, signal.SIGKILL)
        until(lambda: is_over(pid), "its end")
        done = len(records(out))
        assert not (out / "summary.json").is_file()
        submitted(there, out, rounds=4)
        until(lambda: (out / "summary.json").is_file(), "the run", 300)
    assert 2 <= done <= 4
    assert len(records(out)) == 4
    assert_as_locally(tmp_path, out, rounds=4)


def is_over(pid):
    """Gone, or waiting for its parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def server_app_of(link):
    """The process that runs the ServerApp, among those that the SuperLink started."""

    def descendants(pid):
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == pid:
                child = int(path.parent.name)
                yield child
                yield from descendants(child)

    for pid in descendants(link):
        words = Path(f"/proc/{pid}/cmdline").read_text("utf-8", errors="replace")
        if "flwr-serverapp" in words:
            return pid
    raise AssertionError("no ServerApp is running")


MISCHIEF = """
import numpy as np
from flwr.app import Array

from fedpa.experiments.flower import client_app


def mischief(message, context, call_next):
    reply = call_next(message, context)
    if context.node_config["partition-id"] == 1 and message.metadata.message_type == "train":
        arrays, said = reply.content["arrays"], reply.content["config"]
        name, t = next(iter(arrays)), message.content["config"]["round"]
        value = arrays[name].numpy().copy()
        if t == 0:
            arrays[name] = Array(value[:-1].copy())
        elif t == 1:
            value.flat[0] = np.nan
            arrays[name] = Array(value)
        else:
            said["examples"] = [-n for n in said["examples"]]
    return reply


app = client_app(mods=[mischief])
"""


@pytest.mark.long
def test_replies_that_make_no_sense_are_rejected_and_named(tmp_path):
    app = tmp_path / "app"
    shutil.copytree(APP, app)
    (app / "fedpa_app" / "client.py").write_text(MISCHIEF)
    out = tmp_path / "run"
    with Deployment(tmp_path, app=app) as there:
        number = submitted(there, out, **{"clients-per-round": 12})
        until(lambda: (out / "summary.json").is_file(), "the run")
        log = there.run_log(number)
    for said in ("has shape", "not finite", "examples = -"):
        assert said in log, log
    assert all(record["train/rejected"] > 0 for record in records(out))
    for record in records(out):
        assert np.isfinite(record["train/loss"])


@pytest.mark.long
def test_too_few_nodes_and_bad_data_are_refused_in_time(tmp_path):
    with Deployment(tmp_path, nodes=2) as there:
        started = time.monotonic()
        number = submitted(there, tmp_path / "run", **{"start-timeout": 20.0})
        status = there.ended(number)
        assert "failed" in status
        assert "min-nodes = 3, but 2 of 2 connected nodes can take part" in there.run_log(number)
        assert time.monotonic() - started < 90
        assert not (tmp_path / "run").exists()
        there.join(2, 3, 'clients="nobody"')
        number = submitted(there, tmp_path / "run", **{"start-timeout": 60.0})
        there.ended(number)
        assert "no client 'nobody'" in there.run_log(number)
        assert "no client 'nobody'" in there.log("node2")


@pytest.mark.long
def test_the_page_s_commands_for_the_simulation_run(tmp_path):
    pytest.importorskip("ray", reason="Flower's simulation needs Ray")
    from tests.flower.deployment import simulated

    said = simulated(tmp_path)
    assert "round 3/3" in said, said
    same = {"rounds": 3, "clients-per-round": 9, "seed": 0}
    assert_as_locally(tmp_path, tmp_path / "simulated", **same)


def with_openssl(*words, cwd):
    subprocess.run(["openssl", *words], cwd=cwd, check=True, capture_output=True, timeout=60)


def certified(root, name="ca"):
    """An authority, and a certificate of the server that it signed."""
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-384", "-nodes")
    authority = ("-keyout", f"{name}.key", "-out", f"{name}.crt")
    with_openssl("req", "-x509", *new, "-subj", f"/CN={name}", *authority, cwd=root)
    mine = ("-keyout", f"{name}-server.key", "-out", f"{name}-server.csr")
    with_openssl("req", *new, "-subj", "/CN=superlink", *mine, cwd=root)
    (root / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
    signed = ("-CA", f"{name}.crt", "-CAkey", f"{name}.key", "-CAcreateserial", "-extfile", "ext")
    files = ("-in", f"{name}-server.csr", "-out", f"{name}-server.crt")
    with_openssl("x509", "-req", *signed, *files, cwd=root)
    return root / f"{name}.crt"


@pytest.mark.long
@pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")),
    reason="needs openssl and ssh-keygen",
)
def test_with_tls_only_nodes_with_registered_keys_take_part(tmp_path):
    ca, other = certified(tmp_path), certified(tmp_path, "other")
    for name in ("node0", "node1", "node2", "stranger"):
        words = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", name]
        subprocess.run(words, cwd=tmp_path, check=True, timeout=60)

    def keys(number):
        name = f"node{number}" if number < 3 else "stranger"
        return ("--auth-supernode-private-key", str(tmp_path / name))

    secured = (
        *("--ssl-ca-certfile", str(ca), "--ssl-certfile", str(tmp_path / "ca-server.crt")),
        *("--ssl-keyfile", str(tmp_path / "ca-server.key"), "--enable-supernode-auth"),
    )
    out = tmp_path / "run"
    with Deployment(tmp_path, nodes=0, link=secured, node=keys, tls=ca) as there:
        for number in range(3):
            there.flwr("supernode", "register", str(tmp_path / f"node{number}.pub"), "here")
            there.join(number, 3)
        stranger = there.join(3, 4, name="stranger")
        there.tls = other
        wrong = there.join(0, 4, name="wrong")
        there.tls = ca
        submitted(there, out)
        until(lambda: (out / "summary.json").is_file(), "the run", 300)
        for name, process in (("stranger", stranger), ("wrong", wrong)):
            said = there.log(name)
            assert process.poll() is not None or "rror" in said, (name, said)
            assert "Receiving" not in said
    assert len(json.loads((out / "clients.json").read_text())["clients"]) == 100
    assert_as_locally(tmp_path, out)
